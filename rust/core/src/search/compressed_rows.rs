//! Compressed rows (CSR): the lists of all queries one after the other, as a search by radius returns them.
//!
//! ```text
//! Part of each chunk of queries ──join──────────> starts, rows, values
//! Part, upper triangle only     ──join_triangle─> the same, each pair in the lists of both rows
//! ```

use rayon::prelude::*;

use crate::error::Result;
use crate::matrix::Output;
use crate::runtime::alloc::{try_vec, try_zeroed};
use crate::runtime::{Monitor, POLLED};

/// The purpose of the lists in [`crate::Error::OutOfMemory`].
pub(crate) const FOUND: &str = "the rows within the radius";

/// The rows within a radius of each query, in CSR form.
#[derive(Debug, Clone, PartialEq)]
pub struct Within<T> {
    /// The row pointer: the list of query `i` is `starts[i] .. starts[i + 1]` of `rows` and `values`. Queries + 1 entries.
    pub starts: Vec<i64>,
    /// Reference rows.
    pub rows: Vec<i64>,
    /// Their distances or similarities; empty if not requested.
    pub values: Vec<T>,
}

/// The sorted lists of a chunk of queries.
pub(crate) struct Part<O> {
    pub(crate) counts: Vec<usize>,
    pub(crate) rows: Vec<u32>,
    pub(crate) values: Vec<O>,
}

/// Join the parts of all chunks; each part is freed once it is copied.
pub(crate) fn join<O: Output>(
    parts: Vec<Part<O>>,
    queries: usize,
    with_values: bool,
    threads: usize,
    monitor: &Monitor,
) -> Result<Within<O>> {
    let mut starts = try_vec(queries + 1, FOUND)?;
    let mut total = 0usize;
    starts.push(0);
    for count in parts.iter().flat_map(|part| &part.counts) {
        total += count;
        starts.push(total as i64);
    }
    starts.resize(queries + 1, 0);
    let mut rows = try_zeroed::<i64>(total, FOUND)?;
    let mut values = try_zeroed::<O>(if with_values { total } else { 0 }, FOUND)?;
    let mut copies = try_vec(parts.len(), FOUND)?;
    let (mut rows_left, mut values_left) = (rows.as_mut_slice(), values.as_mut_slice());
    for part in parts {
        let (rows_here, values_here);
        (rows_here, rows_left) = rows_left.split_at_mut(part.rows.len());
        (values_here, values_left) = values_left.split_at_mut(part.values.len());
        copies.push((part, rows_here, values_here));
    }
    let copy = |(part, rows, values): (Part<O>, &mut [i64], &mut [O])| {
        for (rows, from) in rows.chunks_mut(POLLED).zip(part.rows.chunks(POLLED)) {
            monitor.check()?;
            for (to, from) in rows.iter_mut().zip(from) {
                *to = i64::from(*from);
            }
        }
        for (values, from) in values.chunks_mut(POLLED).zip(part.values.chunks(POLLED)) {
            monitor.check()?;
            values.copy_from_slice(from);
        }
        Ok(())
    };
    if threads == 1 || copies.len() < 2 {
        // No rayon call: this may be the caller's thread.
        copies.into_iter().try_for_each(copy)?;
    } else {
        // In parallel: page faults of the new arrays take longer than the copy.
        copies.into_par_iter().with_max_len(1).try_for_each(copy)?;
    }
    Ok(Within { starts, rows, values })
}

/// Join parts that have each pair once, in the list of the lower row.
pub(crate) fn join_triangle<O: Output>(parts: Vec<Part<O>>, with_values: bool, monitor: &Monitor) -> Result<Within<O>> {
    let counts = || parts.iter().flat_map(|part| &part.counts);
    let queries = counts().count();
    // First the number of rows before each query, then the place of the next of them.
    let mut places = try_zeroed::<usize>(queries, FOUND)?;
    each_query(&parts, monitor, |query, rows, _| {
        rows.iter().filter(|&&row| row as usize != query).for_each(|&row| places[row as usize] += 1);
    })?;
    let mut starts = try_vec(queries + 1, FOUND)?;
    let mut total = 0usize;
    starts.push(0);
    for (place, count) in places.iter_mut().zip(counts()) {
        let before = std::mem::replace(place, total);
        total += before + count;
        starts.push(total as i64);
    }
    let mut rows = try_zeroed::<i64>(total, FOUND)?;
    let mut values = try_zeroed::<O>(if with_values { total } else { 0 }, FOUND)?;
    each_query(&parts, monitor, |query, found, measured| {
        // Queries ascend, so all rows before this one have been entered.
        let own = places[query];
        for (i, &row) in found.iter().enumerate() {
            let mut enter = |place: usize, row: usize| {
                rows[place] = row as i64;
                if with_values {
                    values[place] = measured[i];
                }
            };
            enter(own + i, row as usize);
            if row as usize != query {
                enter(places[row as usize], query);
                places[row as usize] += 1;
            }
        }
    })?;
    Ok(Within { starts, rows, values })
}

/// Call `visit` for each query, in ascending order, with its number, its rows and their values, if any.
fn each_query<O>(parts: &[Part<O>], monitor: &Monitor, mut visit: impl FnMut(usize, &[u32], &[O])) -> Result<()> {
    let mut query = 0;
    for part in parts {
        let mut start = 0;
        monitor.check()?;
        for count in &part.counts {
            let places = start..start + count;
            start = places.end;
            visit(query, &part.rows[places.clone()], part.values.get(places).unwrap_or(&[]));
            query += 1;
        }
    }
    Ok(())
}
