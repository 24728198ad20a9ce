//! The k nearest among references that arrive in blocks, since they do not fit in memory or are segments of an index.
//!
//! ```text
//! k places of each query, all empty
//! for each block of references
//!     k-th place ──> initial threshold of the query ──> knn: only rows before it are found
//!     found ──rows offset by the rows of earlier blocks──> merged into the places
//! places ──> values and rows, the same bytes as one search of all blocks
//! ```
//!
//! The order of neighbours is total and its float64 ranks are kept, so the first k of all blocks are among the first k of
//! each. Earlier rows have lower numbers and come first among equal values, so a row of a later block must be strictly
//! nearer.

use super::knn::{self, Neighbours, Options, numbered_from};
use super::nearest::Out;
use super::plan::Problem;
use super::references::Source;
use super::{Context, Execution, check_finite};
use crate::error::{Argument, Error, Result};
use crate::exact::rows::Rows;
use crate::matrix::{Element, MatrixRef, Precision, check_row_count};
use crate::order::{Neighbour, Ranking};
use crate::runtime::alloc::{try_vec, try_zeroed};
use crate::runtime::{Monitor, float_env};

/// The nearest neighbours so far of a set of queries. Each block makes a new `BlockSearch`, so a block is added completely or
/// not at all. The queries themselves are not stored: they are passed with each block.
#[derive(Debug)]
pub struct BlockSearch<'a> {
    options: Options<'a>,
    queries: usize,
    dim: usize,
    /// References so far.
    rows: usize,
    /// `k` places per query, sorted.
    places: Vec<Neighbour>,
}

impl<'o> BlockSearch<'o> {
    /// A search without references.
    ///
    /// # Errors
    /// [`Error::NonFinite`] for a query row, [`Error::OutOfMemory`].
    pub fn new<E: Element>(query: MatrixRef<'_, E>, options: Options<'o>) -> Result<Self> {
        Self::of(&query, options)
    }

    /// [`BlockSearch::new`] for queries of any type.
    pub(crate) fn of(query: &dyn Rows, options: Options<'o>) -> Result<Self> {
        check_finite(query)?;
        let places = knn::places(query.rows(), options.k)?;
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

    fn problem(&self, references: usize, double: bool, packed: bool) -> Problem {
        Problem {
            queries: self.queries,
            references,
            dim: self.dim,
            k: self.options.k,
            threads: self.options.threads.get(),
            double,
            packed,
            metric: self.options.metric,
        }
    }

    /// How a block of `references` rows is searched.
    pub fn execution<E: Element>(&self, references: usize) -> Execution {
        let problem = self.problem(references, E::DOUBLE, false);
        Execution::decide(self.options.simd, self.options.threads, &problem)
    }

    /// Whether the search of a block of `references` rows takes less time than handing it to the pool.
    pub fn is_small<E: Element>(&self, references: usize) -> bool {
        self.execution::<E>(references).is_inline()
    }

    /// This search with one more block, whose row numbers continue those of the earlier blocks.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::BadBuffer`] if the queries have another shape, [`Error::TooManyRows`],
    /// [`Error::NonFinite`] with the row among all references, [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn with<E: Element>(
        &self,
        query: MatrixRef<'_, E>,
        reference: MatrixRef<'_, E>,
        monitor: &Monitor,
    ) -> Result<Self> {
        let mut places = try_vec(self.places.len(), "the neighbours")?;
        places.extend_from_slice(&self.places);
        let mut after = Self { places, ..*self };
        monitor.begin(self.problem(reference.rows(), E::DOUBLE, false).pairs());
        after.add(&query, Source::one_shot(&reference), monitor)?;
        Ok(after)
    }

    /// Search one more source of references; the caller has started the monitor. After an error this search must not be used.
    pub(crate) fn add(&mut self, query: &dyn Rows, source: Source<'_>, monitor: &Monitor) -> Result<()> {
        let reference = source.rows;
        if query.dim() != reference.dim() {
            return Err(Error::DimensionMismatch { query: query.dim(), reference: reference.dim() });
        }
        if (query.rows(), query.dim()) != (self.queries, self.dim) {
            let elements = query.rows() * query.dim();
            return Err(Error::BadBuffer { rows: self.queries, dim: self.dim, elements });
        }
        check_row_count(self.rows.saturating_add(reference.rows()), Argument::Reference)?;
        let double = reference.precision() == Precision::Double;
        let problem = self.problem(reference.rows(), double, source.packed);
        let execution = Execution::decide(self.options.simd, self.options.threads, &problem);
        let problem = Problem { threads: execution.threads(), ..problem };
        execution.run(|| self.add_here(query, source, problem, monitor)).map_err(numbered_from(self.rows))?;
        self.rows += reference.rows();
        Ok(())
    }

    fn add_here(&mut self, query: &dyn Rows, source: Source<'_>, problem: Problem, monitor: &Monitor) -> Result<()> {
        if self.places.is_empty() || source.rows.rows() == 0 {
            // There is nothing to search, but references that are not finite are refused all the same.
            return source.check_finite(problem.threads, monitor);
        }
        let Options { k, metric, exclude, simd, .. } = self.options;
        let mut initial = Vec::new();
        // With fewer than k references so far, no query has k neighbours.
        if self.rows >= k {
            initial = try_vec(self.queries, "the neighbours")?;
            initial.extend(self.places.chunks(k).map(|places| places[k - 1].threshold()));
        }
        let context = Context {
            query,
            source,
            first_reference: self.rows,
            rows: 0..source.rows.rows(),
            metric,
            ranking: Ranking::new(metric, source.rows.precision()),
            exclude,
            upper_triangle: false,
            simd,
            problem,
            monitor,
        };
        knn::search(&context, &initial, Out::SoFar(&mut self.places))
    }

    /// The neighbours among all references so far.
    ///
    /// # Errors
    /// [`Error::ReferenceLacksQueries`], [`Error::KTooLarge`] and [`Error::KTooLargeWithoutSelf`] for too few references.
    pub fn result<E: Element>(&self) -> Result<Neighbours<E::Output>> {
        super::check_rows(self.queries, self.rows, self.options.exclude)?;
        super::check_k(self.options.k, self.rows, self.options.exclude)?;
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

    /// A checkpoint for [`BlockSearch::restore`]: the float64 rank of each place (smaller is nearer) and its row; infinity
    /// and -1 for empty places.
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

    /// Continue from a checkpoint of [`BlockSearch::state`] after `so_far` references.
    ///
    /// # Errors
    /// [`Error::BadArray`] for a state that no search of `so_far` references can have.
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
            let own = self.options.exclude.own_row(query);
            let itself = |place: &Neighbour| own == Some(place.row() as usize);
            let others = so_far - usize::from(own.is_some_and(|own| own < so_far));
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
    use crate::search::SelfRule;

    #[test]
    fn results_do_not_depend_on_the_callers_float_state() {
        let simd = Level::available().into_iter().filter_map(Simd::new).next_back().expect("a level");
        let (k, threads) = (2, NonZero::<usize>::MIN);
        let options = Options { k, metric: Metric::Cityblock, exclude: SelfRule::None, simd, threads };
        let query = MatrixRef::new(&[0.0f32], 1, 1, Argument::Query).expect("a good matrix");
        let numbers = [3, 1, 2].map(f32::from_bits);
        let block = MatrixRef::new(&numbers, 3, 1, Argument::Reference).expect("a good matrix");
        let found = while_flushing(|| {
            let search = BlockSearch::new(query, options)?.with(query, block, &Monitor::new())?;
            search.result::<f32>()
        })
        .expect("a good search");
        // Bits: a comparison of denormals would depend on the caller's environment.
        assert_eq!(found.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(found.rows, [1, 2]);
    }
}
