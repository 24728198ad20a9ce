//! All rows within a radius, as compressed rows.
//!
//! ```text
//! r ──> Edge: the last float64 value inside, so that one comparison decides a pair
//!   ──Bound──> Limits of a query: rows with keys below `reject` are outside, with keys above `accept` inside
//! scan: candidates ──key above `accept`, values not requested──> Found
//!                  └─else: float64 value inside the Edge?─────> Found
//! for each query: join its splits, sort ──> Part of a chunk ──> one array of all chunks
//! ```
//!
//! In a self-search returned by row number, only the upper triangle is scanned: query `i` with the rows from `i`. The pairs
//! of the lower triangle are the same, and [`compressed_rows::join_triangle`] enters each pair in the lists of both rows.
//!
//! The size of the result is unknown in advance: lists grow as they are filled, and a list that cannot grow is an
//! [`Error::OutOfMemory`]. The plan is the one for a single nearest neighbour, whose thresholds settle early, too.

use super::compressed_rows::{self, FOUND, Part, Within};
use super::knn::numbered_from;
use super::plan::{self, Plan, Problem};
use super::references::{References, Source};
use super::scan::{self, Candidates, Collector, Pass, Question};
use super::{Context, Execution, SelfRule, all_queries, check_finite, check_sizes};
use crate::arch::level::Simd;
use crate::error::{Error, Result};
use crate::exact::rows::{Rows, begins_with};
use crate::filter::Filter;
use crate::filter::bound::accept_threshold;
use crate::matrix::{Element, MatrixRef, Output, Precision};
use crate::metric::Metric;
use crate::order::{Neighbour, Ranking};
use crate::runtime::Monitor;
use crate::runtime::alloc::{try_extend, try_map_parallel, try_vec};

/// The order of the rows of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// Nearest first, as in a search for the k nearest: by value, then by row number.
    Value,
    /// By row number.
    Row,
}

/// Options of a search by radius.
#[derive(Debug, Clone, Copy)]
pub struct RadiusOptions<'a> {
    /// The largest distance, or the smallest similarity, of a row inside; values are rounded to the output type first.
    pub radius: f64,
    /// The distance or similarity.
    pub metric: Metric,
    /// Which reference row is the query itself.
    pub exclude: SelfRule<'a>,
    /// Whether distances are returned. If they are not, and rows are ordered by number, rows accepted by their keys need no
    /// float64 value.
    pub values: bool,
    /// The first row that is searched. In a self-search by blocks of queries it skips pairs that earlier blocks have found.
    pub from_row: usize,
    /// The order of the rows of a query.
    pub order: RowOrder,
    /// The SIMD level.
    pub simd: Simd,
    /// Threads that the search may use.
    pub threads: std::num::NonZero<usize>,
}

/// A search by radius whose arguments have been checked.
#[derive(Clone, Copy)]
pub struct RadiusSearch<'a, E> {
    query: MatrixRef<'a, E>,
    reference: References<'a, E>,
    options: RadiusOptions<'a>,
}

impl<'a, E: Element> RadiusSearch<'a, E> {
    /// Check all arguments, but not the elements of the rows.
    ///
    /// # Errors
    /// [`Error::BadRadius`], [`Error::DimensionMismatch`], and if self is excluded [`Error::ReferenceLacksQueries`],
    /// [`Error::QueriesOutsideReference`] and [`Error::BadArray`].
    pub fn new(
        query: MatrixRef<'a, E>,
        reference: impl Into<References<'a, E>>,
        options: RadiusOptions<'a>,
    ) -> Result<Self> {
        let reference = reference.into();
        options.check(&query, reference.rows().dim(), reference.rows().rows())?;
        Ok(Self { query, reference, options })
    }

    fn problem(&self) -> Problem {
        let packed = self.reference.is_packed();
        self.options.problem(&self.query, self.reference.rows().rows(), E::DOUBLE, packed)
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
    pub fn run(&self, monitor: &Monitor) -> Result<Within<E::Output>> {
        let execution = self.execution();
        let problem = Problem { threads: execution.threads(), ..self.problem() };
        execution.run(|| search(&self.query, &[self.reference.source()], self.options, problem, monitor))
    }
}

impl RadiusOptions<'_> {
    /// Check the radius, and the sizes of queries and references.
    ///
    /// # Errors
    /// [`Error::BadRadius`], and as for [`check_sizes`].
    pub(crate) fn check(&self, query: &dyn Rows, dim: usize, references: usize) -> Result<()> {
        if !self.radius.is_finite() {
            return Err(Error::BadRadius { given: self.radius });
        }
        check_sizes(query, dim, references, self.exclude)
    }

    /// The sizes of a search with these options.
    pub(crate) fn problem(&self, query: &dyn Rows, references: usize, double: bool, packed: bool) -> Problem {
        Problem {
            queries: query.rows(),
            references,
            dim: query.dim(),
            k: 1,
            threads: self.threads.get(),
            double,
            packed,
            metric: self.metric,
        }
    }

    /// Whether every row inside needs its value, to return it or to sort by it.
    fn needs_values(&self) -> bool {
        self.values || self.order == RowOrder::Value
    }
}

/// All rows within the radius of each query, among consecutive `sources`. Sizes have been checked.
pub(crate) fn search<O: Output>(
    query: &dyn Rows,
    sources: &[Source<'_>],
    options: RadiusOptions<'_>,
    problem: Problem,
    monitor: &Monitor,
) -> Result<Within<O>> {
    check_finite(query)?;
    let edge = Edge::new(options.metric, O::PRECISION, options.radius);
    let met = problem.references.saturating_sub(options.from_row);
    if edge.excludes_all() || query.rows() == 0 || met == 0 {
        // There is nothing to search, but references that are not finite are refused all the same.
        for source in sources {
            source.check_finite(problem.threads, monitor)?;
        }
        return compressed_rows::join(Vec::new(), query.rows(), options.values, problem.threads, monitor);
    }
    monitor.begin(Problem { references: met, ..problem }.pairs());
    let queries = all_queries(query.rows())?;
    let context = |number: usize, first_reference: usize| -> Context<'_> {
        let source = sources[number];
        let rows = options.from_row.saturating_sub(first_reference).min(source.rows.rows())..source.rows.rows();
        let problem = Problem { references: rows.len(), packed: source.packed, ..problem };
        Context {
            query,
            source,
            first_reference,
            rows,
            metric: options.metric,
            ranking: Ranking::new(options.metric, O::PRECISION),
            exclude: options.exclude,
            upper_triangle: false,
            simd: options.simd,
            problem,
            monitor,
        }
    };
    let finish = |found: Vec<Found>| sorted::<O>(found, &options, monitor);
    if let [source] = sources {
        let upper_triangle = is_triangle(query, source, &options);
        let context = Context { upper_triangle, ..context(0, 0) };
        let radius = Radius { context: &context, options: &options, edge, finish };
        let found = radius.run(&queries)?;
        return if upper_triangle {
            compressed_rows::join_triangle(found, options.values, monitor)
        } else {
            compressed_rows::join(found, query.rows(), options.values, problem.threads, monitor)
        };
    }
    // Rows are sorted once, after the last source.
    let mut all = nothing_found(query.rows())?;
    let mut first_reference = 0;
    for (number, source) in sources.iter().enumerate() {
        let context = context(number, first_reference);
        let radius = Radius { context: &context, options: &options, edge, finish: Ok };
        let found = radius.run(&queries).map_err(numbered_from(first_reference))?;
        for (whole, found) in all.iter_mut().zip(found.into_iter().flatten()) {
            whole.append(found, first_reference)?;
        }
        first_reference += source.rows.rows();
    }
    let count = all.len().div_ceil(plan::RADIUS_CHUNK_ROWS);
    let (mut chunks, mut all) = (try_vec(count, FOUND)?, all.into_iter());
    for _ in 0..count {
        let mut chunk = try_vec(plan::RADIUS_CHUNK_ROWS.min(all.len()), FOUND)?;
        chunk.extend(all.by_ref().take(plan::RADIUS_CHUNK_ROWS));
        chunks.push(chunk);
    }
    let finished: Vec<Part<O>> = if problem.threads == 1 {
        let mut finished = try_vec(count, FOUND)?;
        for chunk in chunks {
            finished.push(finish(chunk)?);
        }
        finished
    } else {
        try_map_parallel(chunks, FOUND, finish)?
    };
    compressed_rows::join(finished, query.rows(), options.values, problem.threads, monitor)
}

/// Whether the upper triangle suffices. Not for an order by value: it may depend on more than the rounded values, which are
/// all that the lists hold.
fn is_triangle(query: &dyn Rows, source: &Source<'_>, options: &RadiusOptions<'_>) -> bool {
    options.order == RowOrder::Row
        && options.metric.is_symmetric()
        && options.from_row == 0
        && query.rows() >= plan::TRIANGLE_ROWS
        && matches!(options.exclude, SelfRule::None | SelfRule::From(0))
        && query.rows() == source.rows.rows()
        && begins_with(source.rows, query)
}

/// The float64 values inside: those up to the last one that rounds to at most the radius (for similarities, to at least it).
#[derive(Debug, Clone, Copy)]
struct Edge {
    largest_first: bool,
    last: f64,
}

impl Edge {
    fn new(metric: Metric, precision: Precision, radius: f64) -> Self {
        let largest_first = metric.largest_first();
        // For a similarity the signs are reversed; rounding is symmetric about zero.
        let last = if largest_first { -precision.largest_within(-radius) } else { precision.largest_within(radius) };
        Self { largest_first, last }
    }

    /// Whether no value is inside: distances are not negative.
    fn excludes_all(self) -> bool {
        !self.largest_first && self.last < 0.0
    }

    #[inline(always)]
    fn contains(self, value: f64) -> bool {
        if self.largest_first { value >= self.last } else { value <= self.last }
    }
}

/// The floor and the ceiling of a query's keys.
struct Limits {
    /// Rows with an exact key below it are outside.
    reject: f32,
    /// Rows with an exact key above it are inside. Infinite if all values are needed anyway.
    accept: f32,
}

/// The rows inside of one query, unordered; see [`sorted`].
#[derive(Default)]
struct Found {
    /// Without values, if none are needed; else empty.
    rows: Vec<u32>,
    /// With values, if they are needed; else empty.
    neighbours: Vec<Neighbour>,
}

impl Found {
    /// Add the rows of another scan, whose first reference is row `first_row`.
    fn append(&mut self, more: Self, first_row: usize) -> Result<()> {
        reserve(&mut self.rows, more.rows.len())?;
        reserve(&mut self.neighbours, more.neighbours.len())?;
        self.rows.extend(more.rows.iter().map(|row| row + first_row as u32));
        self.neighbours.extend(more.neighbours.iter().map(|neighbour| neighbour.offset_by(first_row)));
        Ok(())
    }
}

/// Rows within a radius, as a question. `finish` maps the rows found by a chunk of queries to its answer.
struct Radius<'a, F> {
    context: &'a Context<'a>,
    options: &'a RadiusOptions<'a>,
    edge: Edge,
    finish: F,
}

impl<T: Send, F: Fn(Vec<Found>) -> Result<T> + Sync> Radius<'_, F> {
    fn run(&self, queries: &[u32]) -> Result<Vec<T>> {
        let filter = self.context.problem.filter(self.context.simd.level());
        if self.options.from_row > 0 && !filter.is_packed() {
            // Packing meets all rows, other scans only those that are searched.
            self.context.source.check_finite(self.context.problem.threads, self.context.monitor)?;
        }
        scan::run(self.context, self, queries, (), filter)
    }
}

impl<T: Send, F: Fn(Vec<Found>) -> Result<T> + Sync> Question for Radius<'_, F> {
    type Collector = RadiusCollector;
    type Place = ();
    type Answer = T;

    fn plan(&self, problem: &Problem, _: &[u32], filter: Filter) -> Plan {
        let plan = Plan::new(problem, filter);
        Plan { chunk: plan.chunk.min(plan::RADIUS_CHUNK_ROWS), ..plan }
    }

    fn split(&self, (): (), _: &[u32]) -> ((), ()) {
        ((), ())
    }

    fn collector(&self, pass: &Pass<'_>) -> Result<RadiusCollector> {
        let count = pass.queries().len();
        let mut limits = try_vec(count, FOUND)?;
        limits.extend((0..count).map(|query| {
            // The edge accounts for rounding, so the bound needs no margin for it.
            let bound = pass.key_map(query).map(|keys| keys.bound(0.0));
            let accept = bound.filter(|_| !self.options.needs_values()).map(|bound| bound.accept_above(self.edge.last));
            Limits {
                reject: bound.map_or(f32::NEG_INFINITY, |bound| bound.reject_below(self.edge.last)),
                accept: accept.unwrap_or(f32::INFINITY),
            }
        }));
        Ok(RadiusCollector {
            ranking: self.context.ranking,
            edge: self.edge,
            needs_values: self.options.needs_values(),
            limits,
            found: nothing_found(count)?,
        })
    }

    fn finish(&self, _: &[u32], collector: RadiusCollector, (): ()) -> Result<T> {
        (self.finish)(collector.found)
    }
}

/// The rows within the radius of each query of a chunk.
struct RadiusCollector {
    ranking: Ranking,
    edge: Edge,
    needs_values: bool,
    limits: Vec<Limits>,
    found: Vec<Found>,
}

impl Collector for RadiusCollector {
    fn reject_below(&self, query: usize) -> f32 {
        self.limits[query].reject
    }

    fn triage(&mut self, query: usize, candidates: Candidates<'_>, undecided: &mut Vec<u32>) -> Result<()> {
        let accept = self.limits[query].accept;
        let (Some(errors), true) = (candidates.errors, accept < f32::INFINITY) else {
            return try_extend(undecided, candidates.rows, FOUND);
        };
        let found = &mut self.found[query].rows;
        reserve(found, candidates.rows.len())?;
        reserve(undecided, candidates.rows.len())?;
        // One threshold per panel, as the error bounds are: candidates ascend, so they arrive panel by panel.
        let (mut panel, mut threshold) = (usize::MAX, f32::INFINITY);
        for (&row, &key) in candidates.rows.iter().zip(candidates.keys) {
            if row as usize / errors.panel_rows != panel {
                panel = row as usize / errors.panel_rows;
                threshold = accept_threshold(accept, errors.of_panel(panel));
            }
            // A NaN key accepts nothing.
            if key > threshold { found.push(row) } else { undecided.push(row) }
        }
        Ok(())
    }

    fn take(&mut self, query: usize, rows: &[u32], values: &[f64]) -> Result<u64> {
        let found = &mut self.found[query];
        let before = found.rows.len() + found.neighbours.len();
        let inside = rows.iter().zip(values).filter(|(_, value)| self.edge.contains(**value));
        if self.needs_values {
            reserve(&mut found.neighbours, rows.len())?;
            found.neighbours.extend(inside.map(|(&row, &value)| self.ranking.neighbour(value, row)));
        } else {
            reserve(&mut found.rows, rows.len())?;
            found.rows.extend(inside.map(|(&row, _)| row));
        }
        let taken = found.rows.len() + found.neighbours.len() - before;
        Ok((rows.len() - taken) as u64)
    }

    fn merge(&mut self, other: Self) -> Result<()> {
        self.found.iter_mut().zip(other.found).try_for_each(|(whole, more)| whole.append(more, 0))
    }
}

/// Sort the rows of each query of a chunk.
fn sorted<O: Output>(found: Vec<Found>, options: &RadiusOptions<'_>, monitor: &Monitor) -> Result<Part<O>> {
    let mut counts = try_vec(found.len(), FOUND)?;
    counts.extend(found.iter().map(|found| found.rows.len() + found.neighbours.len()));
    let total = counts.iter().sum();
    let mut rows = try_vec(total, FOUND)?;
    let mut values = try_vec(if options.values { total } else { 0 }, FOUND)?;
    for Found { rows: mut without_values, mut neighbours } in found {
        monitor.check()?;
        match options.order {
            RowOrder::Value => neighbours.sort_unstable(),
            RowOrder::Row => neighbours.sort_unstable_by_key(|neighbour| neighbour.row()),
        }
        // In each run the rows accepted by their keys come before those accepted by their values.
        without_values.sort_unstable();
        rows.append(&mut without_values);
        rows.extend(neighbours.iter().map(|neighbour| neighbour.row()));
        if options.values {
            values.extend(neighbours.iter().map(|neighbour| neighbour.value::<O>(options.metric)));
        }
    }
    Ok(Part { counts, rows, values })
}

/// Reserve room for `more` elements, growing by doubling.
fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve(more)
        .map_err(|_| Error::OutOfMemory { bytes: (list.len() + more).saturating_mul(size_of::<T>()), what: FOUND })
}

fn nothing_found(queries: usize) -> Result<Vec<Found>> {
    let mut found = try_vec(queries, FOUND)?;
    found.extend((0..queries).map(|_| Found::default()));
    Ok(found)
}
