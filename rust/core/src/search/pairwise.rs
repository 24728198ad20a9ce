//! The values of pairs of rows named by position: row `i` of one matrix with row `i` of the other.
//!
//! ```text
//! x[i], y[i] ──rescore──> float64 value ──order──> what a search among these rows returns for the pair
//! ```
//!
//! No filter and no plan: each pair is wanted, so each gets its float64 value.

use std::num::NonZero;

use rayon::prelude::*;

use super::plan::{self, Problem};
use super::{Execution, check_finite};
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::rows::Rows;
use crate::exact::{Prepared, Widened, score};
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_zeroed;

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct PairwiseOptions {
    /// What is measured.
    pub metric: Metric,
    /// The level to run at.
    pub simd: Simd,
    /// Threads to measure with.
    pub threads: NonZero<usize>,
}

/// A measurement of pairs whose arguments were found good.
#[derive(Clone, Copy)]
pub struct Pairwise<'a, E> {
    query: MatrixRef<'a, E>,
    reference: MatrixRef<'a, E>,
    options: PairwiseOptions,
}

impl<'a, E: Element> Pairwise<'a, E> {
    /// Check everything that can be checked without reading the rows.
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
        // As much as one reference row against all the queries.
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

    /// Whether the work is over before a hand-over to other threads would be.
    pub fn is_small(&self) -> bool {
        self.execution().is_inline()
    }

    /// The value of each pair: on this thread alone if there is little to do, else on the pool of this process with as many
    /// threads as the options say (the current one, if the call is made in it).
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

    /// The values of the pairs from `start` on.
    fn fill(&self, start: usize, values: &mut [E::Output], monitor: &Monitor) -> Result<()> {
        monitor.check()?;
        let Self { query, reference, options: PairwiseOptions { metric, simd, .. } } = *self;
        let (mut wide, mut scored) = (Widened::new(), Vec::new());
        for (i, value) in (start..).zip(values.iter_mut()) {
            let prepared = Prepared::new(metric, query.row(i));
            let row = i as u32;
            score(simd, &prepared, reference, &[row], &mut wide, &mut scored);
            // Through the type that ranks, so that zeros have the sign they have in a search.
            *value = Neighbour::new::<E::Output>(metric, scored[0], row).value(metric);
        }
        monitor.advance(values.len() as u64);
        Ok(())
    }
}
