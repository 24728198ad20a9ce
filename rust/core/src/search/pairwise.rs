//! Values of pairs of rows by position: row `i` of one matrix and row `i` of the other.
//!
//! ```text
//! x[i], y[i] ──exact──> float64 value ──order──> the value that a search of these rows returns for the pair
//! ```
//!
//! There is no filter and no plan: every pair gets its float64 value.

use std::num::NonZero;

use rayon::prelude::*;

use super::plan::{self, Problem};
use super::{Execution, check_finite};
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::Widened;
use crate::exact::rows::Rows;
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_zeroed;

/// Options of pairwise values.
#[derive(Debug, Clone, Copy)]
pub struct PairwiseOptions {
    /// The distance or similarity.
    pub metric: Metric,
    /// The SIMD level.
    pub simd: Simd,
    /// Threads that the work may use.
    pub threads: NonZero<usize>,
}

/// Pairwise values whose arguments have been checked.
#[derive(Clone, Copy)]
pub struct Pairwise<'a, E> {
    query: MatrixRef<'a, E>,
    reference: MatrixRef<'a, E>,
    options: PairwiseOptions,
}

impl<'a, E: Element> Pairwise<'a, E> {
    /// Check all arguments, but not the elements of the rows.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`] and [`Error::RowsMismatch`].
    pub fn new(query: MatrixRef<'a, E>, reference: MatrixRef<'a, E>, options: PairwiseOptions) -> Result<Self> {
        if query.dim() != reference.dim() {
            return Err(Error::DimensionMismatch { query: query.dim(), reference: reference.dim() });
        }
        if query.rows() != reference.rows() {
            return Err(Error::RowsMismatch { query: query.rows(), reference: reference.rows() });
        }
        Ok(Self { query, reference, options })
    }

    /// How the work runs.
    pub fn execution(&self) -> Execution {
        // The same number of pairs as one reference row and all queries.
        let problem = Problem {
            queries: self.query.rows(),
            references: 1,
            dim: self.query.dim(),
            k: 1,
            threads: self.options.threads.get(),
            double: E::DOUBLE,
            packed: false,
            metric: self.options.metric,
        };
        Execution::decide(self.options.simd, self.options.threads, &problem)
    }

    /// Whether the work takes less time than handing it to the pool.
    pub fn is_small(&self) -> bool {
        self.execution().is_inline()
    }

    /// The value of each pair: on the calling thread if there are few, else on the pool of this process with the threads of
    /// the options. A call from a worker of the pool stays in it.
    ///
    /// # Errors
    /// [`Error::NonFinite`] for a NaN or an infinity (the query's first, then the reference's), [`Error::OutOfMemory`],
    /// [`Error::Cancelled`].
    pub fn run(&self, monitor: &Monitor) -> Result<Vec<E::Output>> {
        let execution = self.execution();
        execution.run(|| self.run_here(execution, monitor))
    }

    fn run_here(&self, execution: Execution, monitor: &Monitor) -> Result<Vec<E::Output>> {
        check_finite(&self.query)?;
        Rows::first_non_finite(&self.reference, Argument::Reference, 0).map_or(Ok(()), Err)?;
        monitor.begin(self.query.rows() as u64);
        let mut values = try_zeroed::<E::Output>(self.query.rows(), "the values of the pairs")?;
        let tasks = |(task, values): (usize, &mut [E::Output])| self.fill(task * plan::PAIRWISE_TASK, values, monitor);
        if execution.is_inline() {
            values.chunks_mut(plan::PAIRWISE_TASK).enumerate().try_for_each(tasks)?;
        } else {
            values.par_chunks_mut(plan::PAIRWISE_TASK).enumerate().with_max_len(1).try_for_each(tasks)?;
        }
        Ok(values)
    }

    /// Fill `values` with those of the pairs from `start`.
    fn fill(&self, start: usize, values: &mut [E::Output], monitor: &Monitor) -> Result<()> {
        monitor.check()?;
        let Self { query, reference, options: PairwiseOptions { metric, simd, .. } } = *self;
        let (mut wide, mut scored) = (Widened::new(), Vec::new());
        let mut scratch = query.scratch()?;
        for (i, value) in (start..).zip(values.iter_mut()) {
            let prepared = query.prepare(metric, i, &mut scratch)?;
            let row = i as u32;
            Rows::score(&reference, simd, &prepared, &[row], &mut wide, &mut scored)?;
            // By way of `Neighbour`, so that zeros have the same sign as in a search.
            *value = Neighbour::new::<E::Output>(metric, scored[0], row).value(metric);
        }
        monitor.advance(values.len() as u64);
        Ok(())
    }
}
