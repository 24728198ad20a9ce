//! Lists of different lengths, one a query, as compressed rows: what a search by radius returns.
//!
//! ```text
//! Part of each chunk of queries ──join──────────> starts, rows, values
//! Part, each pair once          ──join_triangle─> the same, each pair in the lists of both its rows
//! ```

use rayon::prelude::*;

use crate::error::Result;
use crate::matrix::Output;
use crate::runtime::alloc::{try_vec, try_zeroed};

/// What the lists of a search are called when there is no memory for them.
pub(crate) const FOUND: &str = "the rows within the radius";

/// The rows within a radius of each query, as compressed rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Within<T> {
    /// Query `i` found the places `starts[i] .. starts[i + 1]` of `rows` and `values`; one more than there are queries.
    pub starts: Vec<i64>,
    /// Reference rows.
    pub rows: Vec<i64>,
    /// Their distances or similarities; empty when not wanted.
    pub values: Vec<T>,
}

/// What the queries of a chunk have found, in its final order.
pub(crate) struct Part<O> {
    pub(crate) counts: Vec<usize>,
    pub(crate) rows: Vec<u32>,
    pub(crate) values: Vec<O>,
}

/// One answer from those of the chunks; each is given up once it is copied.
pub(crate) fn join<O: Output>(
    parts: Vec<Part<O>>,
    queries: usize,
    with_values: bool,
    threads: usize,
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
        for (to, from) in rows.iter_mut().zip(&part.rows) {
            *to = i64::from(*from);
        }
        values.copy_from_slice(&part.values);
    };
    if threads == 1 || copies.len() < 2 {
        // Stay on this thread: it may be the caller's.
        copies.into_iter().for_each(copy);
    } else {
        // In parallel: the first touch of new pages takes longer than the copy.
        copies.into_par_iter().with_max_len(1).for_each(copy);
    }
    Ok(Within { starts, rows, values })
}

/// One answer from parts in which each pair stands once, in the row of the lower number.
pub(crate) fn join_triangle<O: Output>(parts: Vec<Part<O>>, with_values: bool) -> Result<Within<O>> {
    let counts = || parts.iter().flat_map(|part| &part.counts);
    let queries = counts().count();
    // First how many rows each query has before itself, then where the next of them goes.
    let mut places = try_zeroed::<usize>(queries, FOUND)?;
    each_query(&parts, |query, rows, _| {
        rows.iter().filter(|&&row| row as usize != query).for_each(|&row| places[row as usize] += 1);
    });
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
    each_query(&parts, |query, found, measured| {
        // In ascending order of the queries: all rows before this one have been entered.
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
    });
    Ok(Within { starts, rows, values })
}

/// Call `visit` with the number of each query, in ascending order, the rows it found and, where wanted, their values.
fn each_query<O>(parts: &[Part<O>], mut visit: impl FnMut(usize, &[u32], &[O])) {
    let mut query = 0;
    for part in parts {
        let mut start = 0;
        for count in &part.counts {
            let places = start..start + count;
            start = places.end;
            visit(query, &part.rows[places.clone()], part.values.get(places).unwrap_or(&[]));
            query += 1;
        }
    }
}
