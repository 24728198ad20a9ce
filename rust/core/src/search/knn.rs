//! The k nearest references of each query.
//!
//! ```text
//! Knn ──KnnCollector of each chunk──> TopK of each query; the floor of its k-th value is reject_below
//!     ──large k──────> a strided sample of the panels first: the last row of a rank in it suggests a floor, which is verified
//!     ──self-search──> symmetric.rs, if symmetric tiles pay
//!     ──finish───────> values and rows, or the nearest so far (incremental.rs)
//! ```

use super::engine::Scanner;
use super::nearest::{KnnCollector, Out};
use super::plan::{self, Problem};
use super::references::References;
use super::scan::{self, Pass, Question};
use super::{Context, Execution, SelfRule, all_queries, check_finite, check_k, check_sizes, symmetric};
use crate::arch::kernel::Visit;
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::rows::Rows;
use crate::matrix::{Element, MatrixRef, Output};
use crate::metric::Metric;
use crate::order::{Neighbour, Ranking};
use crate::runtime::Monitor;
use crate::runtime::alloc::try_zeroed;

/// Options of a search for the k nearest neighbours.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Neighbours of each query.
    pub k: usize,
    /// The distance or similarity.
    pub metric: Metric,
    /// Which reference row is the query itself.
    pub exclude: SelfRule<'a>,
    /// The SIMD level.
    pub simd: Simd,
    /// Threads that the search may use.
    pub threads: std::num::NonZero<usize>,
}

impl Options<'_> {
    /// Check the sizes of queries and references.
    ///
    /// # Errors
    /// As for [`check_sizes`] and [`check_k`].
    pub(crate) fn check(&self, query: &dyn Rows, dim: usize, references: usize) -> Result<()> {
        check_sizes(query, dim, references, self.exclude)?;
        check_k(self.k, references, self.exclude)
    }

    /// The sizes of a search with these options.
    pub(crate) fn problem(&self, query: &dyn Rows, references: usize, double: bool, packed: bool) -> Problem {
        Problem {
            queries: query.rows(),
            references,
            dim: query.dim(),
            k: self.k,
            threads: self.threads.get(),
            double,
            packed,
            metric: self.metric,
        }
    }
}

/// The `k` nearest neighbours of each query, nearest first, as a row-major matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbours<T> {
    /// `queries * k` distances or similarities.
    pub values: Vec<T>,
    /// `queries * k` reference rows.
    pub rows: Vec<i64>,
}

/// A search whose arguments have been checked.
#[derive(Clone, Copy)]
pub struct Search<'a, E> {
    query: MatrixRef<'a, E>,
    reference: References<'a, E>,
    options: Options<'a>,
}

impl<'a, E: Element> Search<'a, E> {
    /// Check all arguments, but not the elements of the rows.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::KTooLarge`], [`Error::KTooLargeWithoutSelf`], and if self is excluded
    /// [`Error::ReferenceLacksQueries`], [`Error::QueriesOutsideReference`] and [`Error::BadArray`].
    pub fn new(query: MatrixRef<'a, E>, reference: impl Into<References<'a, E>>, options: Options<'a>) -> Result<Self> {
        let reference = reference.into();
        options.check(&query, reference.rows().dim(), reference.rows().rows())?;
        Ok(Self { query, reference, options })
    }

    fn problem(&self) -> Problem {
        self.options.problem(&self.query, self.reference.rows().rows(), E::DOUBLE, self.reference.is_packed())
    }

    /// How the search runs.
    pub fn execution(&self) -> Execution {
        Execution::decide(self.options.simd, self.options.threads, &self.problem())
    }

    /// Whether the search takes less time than handing it to the pool.
    pub fn is_small(&self) -> bool {
        self.execution().is_inline()
    }

    /// Search: on the calling thread if the search is small, else on the pool of this process with the threads of the
    /// options. A call from a worker of the pool stays in it.
    ///
    /// # Errors
    /// [`Error::NonFinite`] for a NaN or an infinity (the query's first, then the reference's), [`Error::OutOfMemory`],
    /// [`Error::Cancelled`].
    pub fn run(&self, monitor: &Monitor) -> Result<Neighbours<E::Output>> {
        let execution = self.execution();
        execution.run(|| self.run_here(execution, monitor))
    }

    fn run_here(&self, execution: Execution, monitor: &Monitor) -> Result<Neighbours<E::Output>> {
        let k = self.options.k;
        let len = places(self.query.rows(), k)?;
        check_finite(&self.query)?;
        let source = self.reference.source();
        if len == 0 {
            // There is nothing to search, but references that are not finite are refused all the same.
            source.check_finite(execution.threads(), monitor)?;
            return Ok(Neighbours { values: Vec::new(), rows: Vec::new() });
        }
        let mut values = try_zeroed::<E::Output>(len, "the neighbours")?;
        let mut rows = try_zeroed::<i64>(len, "the neighbours")?;
        let problem = Problem { threads: execution.threads(), ..self.problem() };
        monitor.begin(problem.pairs());
        let context = Context {
            query: &self.query,
            source,
            first_reference: 0,
            rows: 0..self.reference.rows().rows(),
            metric: self.options.metric,
            ranking: Ranking::new(self.options.metric, E::PRECISION),
            exclude: self.options.exclude,
            upper_triangle: false,
            simd: self.options.simd,
            problem,
            monitor,
        };
        search(&context, &[], Out::Answer(E::Output::erase(&mut values), &mut rows))?;
        Ok(Neighbours { values, rows })
    }
}

/// Fill `out`, `k` places per query. `initial` has the initial threshold of each query, or is empty: new neighbours must come
/// before it, since k neighbours from earlier blocks do.
pub(crate) fn search(context: &Context<'_>, initial: &[Option<Neighbour>], out: Out<'_>) -> Result<()> {
    let queries = all_queries(context.problem.queries)?;
    let knn = Knn { context, k: context.problem.k, initial };
    scan::run(context, &knn, &queries, out, context.problem.filter(context.simd.level()))?;
    Ok(())
}

/// The k nearest neighbours, as a question.
struct Knn<'a> {
    context: &'a Context<'a>,
    k: usize,
    /// See [`search`].
    initial: &'a [Option<Neighbour>],
}

impl Knn<'_> {
    /// The initial threshold of a query.
    fn initial(&self, query: u32) -> Option<Neighbour> {
        self.initial.get(query as usize).copied().flatten()
    }

    /// The rank to find in a sample of the references, if sampling pays. It does not if there are initial thresholds, which
    /// are as good.
    fn sample_rank(&self, pass: &Pass<'_>) -> Option<usize> {
        let samples = pass.is_packed() && self.initial.is_empty();
        samples.then(|| plan::sample_rank(self.k, pass.references())).flatten()
    }
}

impl<'a> Question for Knn<'a> {
    type Collector = KnnCollector;
    type Place = Out<'a>;
    type Answer = ();

    fn split(&self, place: Out<'a>, first: &[u32]) -> (Out<'a>, Out<'a>) {
        place.split_at(first.len() * self.k)
    }

    fn collector(&self, pass: &Pass<'_>) -> Result<KnnCollector> {
        let k = self.sample_rank(pass).unwrap_or(self.k);
        KnnCollector::new(pass, self.context.ranking, |query| self.initial(query), k, pass.references())
    }

    /// Scan all references at once, or a sample first: every eighth panel, since references are often sorted by class. The
    /// row of the sampled rank is expected a little behind rank k of all references. Its value gives a floor, which is
    /// verified at the end: a query with fewer than k neighbours before it is searched again without a sample.
    fn scan(&self, pass: &mut Pass<'_>, collector: &mut KnnCollector) -> Result<()> {
        if self.sample_rank(pass).is_none() {
            return pass.visit(Visit::All, collector);
        }
        pass.visit(Visit::Sample, collector)?;
        collector.expect(self.k, pass.references())?;
        pass.visit(Visit::Rest, collector)?;
        let failed = collector.short_of(self.k)?;
        if !failed.is_empty() {
            let mut again = pass.again(&failed)?;
            let mut found = KnnCollector::new(&again, self.context.ranking, |_| None, self.k, again.references())?;
            again.visit(Visit::All, &mut found)?;
            collector.replace(&failed, found);
        }
        Ok(())
    }

    fn scan_symmetric(&self, scanner: &dyn Scanner, queries: &[u32], place: Out<'a>) -> Result<Option<Out<'a>>> {
        let pays = match &place {
            Out::Answer(..) if scanner.is_symmetric() => symmetric::block(self.context, scanner, queries),
            _ => None,
        };
        let Some(block) = pays else { return Ok(Some(place)) };
        symmetric::search(self.context, scanner, queries, block, place)?;
        Ok(None)
    }

    fn finish(&self, _: &[u32], collector: KnnCollector, place: Out<'a>) -> Result<()> {
        collector.write(self.k, self.context.first_reference, place, self.context.monitor)
    }
}

/// `queries * k`, or an error if that overflows.
pub(crate) fn places(queries: usize, k: usize) -> Result<usize> {
    queries.checked_mul(k).ok_or(Error::OutOfMemory { bytes: usize::MAX, what: "the neighbours" })
}

/// Maps an error that names a row of a block to one that names the row among all references.
pub(crate) fn numbered_from(first_reference: usize) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::NonFinite { argument: Argument::Reference, row, column, value } => {
            Error::NonFinite { argument: Argument::Reference, row: first_reference + row, column, value }
        }
        other => other,
    }
}
