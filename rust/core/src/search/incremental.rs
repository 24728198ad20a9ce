//! A search whose references come block by block, for those that do not fit in memory.
//!
//! ```text
//! places of each query: k, taken by nobody yet
//! for each block of references
//!     k-th place ──> bar of the query ──> driver: only rows before the bar survive
//!     found ──numbered on from the rows before──> merged into the places
//! places ──> values and rows, the same bytes as from one search of all blocks together
//! ```
//!
//! The order of neighbours is total and known in float64, so the k first of all blocks are the k first of the k first of
//! each. Among equal values the row that came first stays first, so a row of a later block must be strictly nearer.

use crate::error::{Argument, Error, Result};
use crate::matrix::{Element, MatrixRef, QueryRef, check_row_count};
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;
use crate::runtime::alloc::try_zeroed;
use crate::runtime::{float_env, pool};
use crate::search::Neighbours;
use crate::search::plan::{self, Options, Problem};
use crate::search::references::References;
use crate::search::scan::{Job, Out};

/// The nearest so far of some queries. The queries themselves are handed in again with each block, which makes a new one: so
/// a block is taken in whole or not at all.
#[derive(Debug)]
pub struct BlockSearch {
    options: Options,
    queries: usize,
    dim: usize,
    /// References so far.
    rows: usize,
    /// `k` of each query, in their order.
    places: Vec<Neighbour>,
}

impl BlockSearch {
    /// A search that has seen no references yet.
    ///
    /// # Errors
    /// [`Error::NonFinite`] for a query row, [`Error::OutOfMemory`].
    pub fn new<E: Element>(query: MatrixRef<'_, E>, options: Options) -> Result<Self> {
        Self::of::<E>(query.into(), options)
    }

    /// The same for queries that may be widened already.
    pub(crate) fn of<E: Element>(query: QueryRef<'_, E>, options: Options) -> Result<Self> {
        if let Some(error) = query.first_non_finite(0) {
            return Err(error);
        }
        let places = query.rows().checked_mul(options.k);
        let places = places.ok_or(Error::OutOfMemory { bytes: usize::MAX, what: "the neighbours" })?;
        let mut search = Self {
            options,
            queries: query.rows(),
            dim: query.dim(),
            rows: 0,
            places: try_vec(places, "the neighbours")?,
        };
        search.places.resize(places, Neighbour::EMPTY);
        Ok(search)
    }

    /// References so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn problem<E: Element>(&self, references: usize, packed: bool) -> Problem {
        Problem {
            queries: self.queries,
            references,
            dim: self.dim,
            k: self.options.k,
            threads: self.options.threads.get(),
            double: E::DOUBLE,
            packed,
            metric: self.options.metric,
        }
    }

    /// Whether a block of so many references is searched before a hand-over to other threads would be.
    pub fn is_small<E: Element>(&self, references: usize) -> bool {
        plan::is_small(&self.problem::<E>(references, false), self.options.simd.level())
    }

    /// This search after one more block, whose rows are numbered on from those before.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::BadBuffer`] if these are other queries than before, [`Error::TooManyRows`],
    /// [`Error::NonFinite`] with the row as numbered, [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn with<E: Element>(
        &self,
        query: MatrixRef<'_, E>,
        reference: MatrixRef<'_, E>,
        monitor: &Monitor,
    ) -> Result<Self> {
        let mut places = try_vec(self.places.len(), "the neighbours")?;
        places.extend_from_slice(&self.places);
        let mut after = Self { places, ..*self };
        monitor.begin(self.problem::<E>(reference.rows(), false).pairs());
        after.take_in(query.into(), References::one_shot(reference), monitor)?;
        Ok(after)
    }

    /// Search a part of the references whose panels may be kept; the caller has begun the monitor. After an error this search
    /// is of no use any more.
    pub(crate) fn take_in<E: Element>(
        &mut self,
        query: QueryRef<'_, E>,
        references: References<'_, E>,
        monitor: &Monitor,
    ) -> Result<()> {
        let reference = references.rows;
        if query.dim() != reference.dim() {
            return Err(Error::DimensionMismatch { query: query.dim(), reference: reference.dim() });
        }
        if (query.rows(), query.dim()) != (self.queries, self.dim) {
            let elements = query.rows() * query.dim();
            return Err(Error::BadBuffer { rows: self.queries, dim: self.dim, elements });
        }
        check_row_count(self.rows.saturating_add(reference.rows()), Argument::Reference)?;
        let mut problem = self.problem::<E>(reference.rows(), references.kept.is_some());
        let is_small = plan::is_small(&problem, self.options.simd.level());
        if is_small {
            problem.threads = 1;
        }
        pool::enter(self.options.threads, is_small, || self.take_in_here(query, references, problem, monitor))
    }

    fn take_in_here<E: Element>(
        &mut self,
        query: QueryRef<'_, E>,
        references: References<'_, E>,
        problem: Problem,
        monitor: &Monitor,
    ) -> Result<()> {
        let (first_row, reference) = (self.rows, references.rows);
        let numbered_on = |error| match error {
            Error::NonFinite { argument: Argument::Reference, row, column, value } => {
                Error::NonFinite { argument: Argument::Reference, row: first_row + row, column, value }
            }
            other => other,
        };
        if self.places.is_empty() || reference.rows() == 0 {
            // Nothing to search, but what was passed must still be good.
            references.check_finite(problem.threads, monitor).map_err(numbered_on)?;
        } else {
            let k = self.options.k;
            let mut bars = Vec::new();
            // Before so many rows nobody's places are all taken.
            if first_row >= k {
                bars = try_vec(self.queries, "the neighbours")?;
                bars.extend(self.places.chunks(k).map(|places| places[k - 1].bar()));
            }
            let options = &self.options;
            Job { query, references, options, problem, monitor, first_row, bars: &bars }
                .run(Out::SoFar(&mut self.places))
                .map_err(numbered_on)?;
        }
        self.rows += reference.rows();
        Ok(())
    }

    /// The neighbours among all references so far.
    ///
    /// # Errors
    /// [`Error::ReferenceLacksQueries`], [`Error::KTooLarge`] and [`Error::KTooLargeWithoutSelf`]: there are too few of them.
    pub fn result<E: Element>(&self) -> Result<Neighbours<E::Output>> {
        self.options.check_sizes(self.queries, self.rows)?;
        float_env::with_default(|| self.result_here::<E>())
    }

    fn result_here<E: Element>(&self) -> Result<Neighbours<E::Output>> {
        let mut values = try_zeroed::<E::Output>(self.places.len(), "the neighbours")?;
        let mut rows = try_zeroed::<i64>(self.places.len(), "the neighbours")?;
        for ((place, value), row) in self.places.iter().zip(&mut values).zip(&mut rows) {
            *value = place.value(self.options.metric);
            *row = i64::from(place.row());
        }
        Ok(Neighbours { values, rows })
    }

    /// What [`BlockSearch::restore`] needs to go on from here: the number that orders each place (float64, smaller is nearer)
    /// and its row. Places that nobody has taken: infinity and -1.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn state(&self) -> Result<(Vec<f64>, Vec<i64>)> {
        let mut ranks = try_vec(self.places.len(), "the state")?;
        let mut rows = try_vec(self.places.len(), "the state")?;
        for &place in &self.places {
            let (rank, row) = place.parts();
            ranks.push(rank);
            rows.push(if place == Neighbour::EMPTY { -1 } else { i64::from(row) });
        }
        Ok((ranks, rows))
    }

    /// Go on from what [`BlockSearch::state`] gave after `so_far` references.
    ///
    /// # Errors
    /// [`Error::BadArray`] for what no search of so many references can have found.
    pub fn restore(&mut self, ranks: &[f64], rows: &[i64], so_far: usize) -> Result<()> {
        check_row_count(so_far, Argument::Reference)?;
        let bad = |argument, wanted: String, given: String| Err(Error::BadArray { argument, wanted, given });
        for (argument, len) in [("ranks", ranks.len()), ("indices", rows.len())] {
            if len != self.places.len() {
                let wanted = format!("have {} numbers for each of {} queries", self.options.k, self.queries);
                return bad(argument, wanted, format!("{len} in all"));
            }
        }
        let mut places = try_vec(self.places.len(), "the neighbours")?;
        for (&rank, &row) in ranks.iter().zip(rows) {
            let place = match usize::try_from(row) {
                Ok(row) if row < so_far && !rank.is_nan() => Neighbour::from_parts(rank, row as u32),
                Err(_) if row == -1 && rank == f64::INFINITY => Neighbour::EMPTY,
                _ => {
                    let wanted = format!("be below {so_far}, of a rank that is a number, or -1 with an infinite rank");
                    return bad("indices", wanted, format!("{row} with rank {rank}"));
                }
            };
            places.push(place);
        }
        for (query, places) in places.chunks(self.options.k.max(1)).enumerate() {
            let ordered = places.windows(2).all(|pair| pair[0] < pair[1] || pair[1] == Neighbour::EMPTY);
            let itself = |place: &Neighbour| self.options.exclude_self && place.row() as usize == query;
            let others = so_far - usize::from(self.options.exclude_self && query < so_far);
            let taken = places.iter().filter(|place| **place != Neighbour::EMPTY).count();
            if !ordered || taken != others.min(places.len()) || places.iter().any(itself) {
                let wanted = format!("hold the nearest of {so_far} references, nearest first");
                return bad("indices", wanted, format!("something else for query {query}"));
            }
        }
        (self.places, self.rows) = (places, so_far);
        Ok(())
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::num::NonZero;

    use super::*;
    use crate::arch::level::{Level, Simd};
    use crate::metric::Metric;
    use crate::runtime::float_env::while_flushing;

    #[test]
    fn results_do_not_depend_on_the_callers_float_state() {
        let simd = Level::available().into_iter().filter_map(Simd::new).next_back().expect("a level");
        let (k, threads) = (2, NonZero::<usize>::MIN);
        let options = Options { k, metric: Metric::Cityblock, exclude_self: false, simd, threads };
        let query = MatrixRef::new(&[0.0f32], 1, 1, Argument::Query).expect("a good matrix");
        let numbers = [3, 1, 2].map(f32::from_bits);
        let block = MatrixRef::new(&numbers, 3, 1, Argument::Reference).expect("a good matrix");
        let found = while_flushing(|| {
            let search = BlockSearch::new(query, options)?.with(query, block, &Monitor::new())?;
            search.result::<f32>()
        })
        .expect("a good search");
        // Bits: a comparison of subnormal numbers would itself obey the caller's state.
        assert_eq!(found.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(found.rows, [1, 2]);
    }
}
