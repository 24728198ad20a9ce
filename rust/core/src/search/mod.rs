//! The public search: checks, the plan, and the result.

pub(crate) mod incremental;
pub(crate) mod pairwise;
pub(crate) mod plan;
pub(crate) mod radius;
mod rank_counts;
pub(crate) mod ranks;
pub(crate) mod references;
mod scan;
mod symmetric;

use self::plan::{Options, Problem};
use crate::error::{Argument, Error, Result};
use crate::matrix::{Element, MatrixRef};
use crate::runtime::Monitor;
use crate::runtime::alloc::try_zeroed;
use crate::runtime::pool;
use crate::search::scan::{Job, Out};

/// The `k` nearest of each query, nearest first, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbours<T> {
    /// `queries * k` distances or similarities.
    pub values: Vec<T>,
    /// `queries * k` reference rows.
    pub rows: Vec<i64>,
}

/// A search whose arguments were found good.
#[derive(Clone, Copy)]
pub struct Search<'a, E> {
    query: MatrixRef<'a, E>,
    reference: MatrixRef<'a, E>,
    options: Options,
}

impl<'a, E: Element> Search<'a, E> {
    /// Check everything that can be checked without reading the rows.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::KTooLarge`], [`Error::KTooLargeWithoutSelf`] and
    /// [`Error::ReferenceLacksQueries`].
    pub fn new(query: MatrixRef<'a, E>, reference: MatrixRef<'a, E>, options: Options) -> Result<Self> {
        if query.dim() != reference.dim() {
            return Err(Error::DimensionMismatch { query: query.dim(), reference: reference.dim() });
        }
        options.check_sizes(query.rows(), reference.rows())?;
        Ok(Self { query, reference, options })
    }

    fn problem(&self) -> Problem {
        Problem {
            queries: self.query.rows(),
            references: self.reference.rows(),
            dim: self.query.dim(),
            k: self.options.k,
            threads: self.options.threads.get(),
            double: E::DOUBLE,
            packed: false,
            metric: self.options.metric,
        }
    }

    /// Whether the search is over before a hand-over to other threads would be.
    pub fn is_small(&self) -> bool {
        plan::is_small(&self.problem(), self.options.simd.level())
    }

    /// Search: on this thread alone if the search is small, else on the pool of this process with as many threads as the
    /// options say (the current one, if the call is made in it).
    ///
    /// # Errors
    /// [`Error::NonFinite`] for a NaN or an infinity (the query's first, then the reference's), [`Error::OutOfMemory`],
    /// [`Error::Cancelled`].
    pub fn run(&self, monitor: &Monitor) -> Result<Neighbours<E::Output>> {
        pool::enter(self.options.threads, self.is_small(), || self.run_here(monitor))
    }

    fn run_here(&self, monitor: &Monitor) -> Result<Neighbours<E::Output>> {
        let k = self.options.k;
        let len =
            self.query.rows().checked_mul(k).ok_or(Error::OutOfMemory { bytes: usize::MAX, what: "the neighbours" })?;
        if let Some(error) = self.query.first_non_finite(Argument::Query, 0) {
            return Err(error);
        }
        if len == 0 {
            // Nothing to search, but what was passed must still be good.
            return match self.reference.first_non_finite(Argument::Reference, 0) {
                Some(error) => Err(error),
                None => Ok(Neighbours { values: Vec::new(), rows: Vec::new() }),
            };
        }
        let mut values = try_zeroed::<E::Output>(len, "the neighbours")?;
        let mut rows = try_zeroed::<i64>(len, "the neighbours")?;
        let mut problem = self.problem();
        if self.is_small() {
            problem.threads = 1;
        }
        monitor.begin(problem.pairs());
        let job = Job::whole(self.query, self.reference, &self.options, problem, monitor);
        job.run(Out::Answer(&mut values, &mut rows))?;
        Ok(Neighbours { values, rows })
    }
}
