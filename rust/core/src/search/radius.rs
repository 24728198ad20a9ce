//! All rows within a radius, as compressed rows.
//!
//! ```text
//! r ──> Edge: the last float64 value that counts, so one comparison decides a pair
//!   ──Bound──> Limits of a query: keys below `out` are surely outside, keys above `sure` surely inside
//! for each task = (chunk of queries, split of the references)          in parallel
//!     Kernel::scan ──CandidateLists──┬── above `sure`, no value wanted ──────> Found
//!                          └── else: value in float64, in the Edge? ──> Found       self is skipped here, nowhere else
//! for each query: join its splits, sort ──> Part of a chunk ──> one array of all chunks
//! ```
//!
//! Where rows are searched among themselves and come by row number, a query only looks at the rows from itself on: the
//! pairs with those before it are the same pairs, found from the other side, and [`join_mirrored`] enters them twice.
//!
//! Nothing is known of the size of an answer before it is found: lists grow as they are filled, and a list that cannot
//! grow is [`Error::OutOfMemory`]. The plan is that of a search for one neighbour, whose threshold does not move either
//! once it has settled.

use std::ops::Range;

use rayon::prelude::*;

use crate::arch::WithKernel;
use crate::arch::kernel::{CandidateLists, Kernel, QueryPanel, Thresholds, Visit};
use crate::arch::level::Simd;
use crate::error::{Error, Result};
use crate::exact::{Prepared, Widened, score};
use crate::filter::bound::{Bound, sure_bar};
use crate::filter::frame::Frame;
use crate::filter::panels::{PackedQuery, PackedReference};
use crate::filter::{Filter, with_filter};
use crate::matrix::{Element, MatrixRef, Output, QueryRef};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;
use crate::runtime::alloc::try_zeroed;
use crate::runtime::pool;
use crate::search::plan::{self, Plan, Problem};
use crate::search::references::{Panels, References};

/// Query rows of a task at most, a multiple of the tallest panel: bounds what is found and not yet written out.
const CHUNK_ROWS: usize = 192;

/// Rows of a block of a direct search at least: a query is prepared once for each block.
const DIRECT_BLOCK_ROWS: usize = 16;

/// Rows among themselves from which on half of the products are left out; fewer take no time anyway.
const MIRRORED_ROWS: usize = 1024;

/// How the rows of one query follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// As in a search for the k nearest: by value, among equals by row number.
    Value,
    /// By row number.
    Row,
}

/// What to look for.
#[derive(Debug, Clone, Copy)]
pub struct RadiusOptions {
    /// Rows whose distance, rounded to the output type, is at most this are inside; rows whose similarity is at least this.
    pub radius: f64,
    /// What is measured.
    pub metric: Metric,
    /// Query `i` is reference row `i` and must not return it.
    pub exclude_self: bool,
    /// Whether the distances are wanted. Without them, and by row number, a row that is certainly inside is never measured.
    pub values: bool,
    /// Order of the rows of a query.
    pub order: RowOrder,
    /// The level to run at.
    pub simd: Simd,
    /// Threads to search with.
    pub threads: std::num::NonZero<usize>,
}

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

/// A search by radius whose arguments were found good.
#[derive(Clone)]
pub struct RadiusSearch<'a, E: Element> {
    query: QueryRef<'a, E>,
    /// The references, in parts that follow one another; one, unless they come from an index.
    parts: Vec<References<'a, E>>,
    options: RadiusOptions,
}

impl<'a, E: Element> RadiusSearch<'a, E> {
    /// Check everything that can be checked without reading the rows.
    ///
    /// # Errors
    /// [`Error::BadRadius`], [`Error::DimensionMismatch`] and [`Error::ReferenceLacksQueries`].
    pub fn new(query: MatrixRef<'a, E>, reference: MatrixRef<'a, E>, options: RadiusOptions) -> Result<Self> {
        Self::of_parts(query.into(), vec![References::one_shot(reference)], options)
    }

    /// The same for references in parts.
    pub(crate) fn of_parts(
        query: QueryRef<'a, E>,
        parts: Vec<References<'a, E>>,
        options: RadiusOptions,
    ) -> Result<Self> {
        if !options.radius.is_finite() {
            return Err(Error::BadRadius { given: options.radius });
        }
        for part in &parts {
            if query.dim() != part.rows.dim() {
                return Err(Error::DimensionMismatch { query: query.dim(), reference: part.rows.dim() });
            }
        }
        let search = Self { query, parts, options };
        let (queries, references) = (query.rows(), search.references());
        if options.exclude_self && references < queries {
            return Err(Error::ReferenceLacksQueries { queries, references });
        }
        Ok(search)
    }

    fn references(&self) -> usize {
        self.parts.iter().map(|part| part.rows.rows()).sum()
    }

    fn problem(&self) -> Problem {
        Problem {
            queries: self.query.rows(),
            references: self.references(),
            dim: self.query.dim(),
            k: 1,
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
    pub fn run(&self, monitor: &Monitor) -> Result<Within<E::Output>> {
        pool::enter(self.options.threads, self.is_small(), || self.run_here(monitor))
    }

    fn run_here(&self, monitor: &Monitor) -> Result<Within<E::Output>> {
        if let Some(error) = self.query.first_non_finite(0) {
            return Err(error);
        }
        let edge = Edge::new::<E::Output>(self.options.metric, self.options.radius);
        let nothing = edge.excludes_all() || self.query.rows() == 0 || self.references() == 0;
        let mut problem = self.problem();
        if self.is_small() {
            problem.threads = 1;
        }
        let with_values = self.options.values;
        if nothing {
            // Nothing to search, but what was passed must still be good.
            for part in &self.parts {
                part.check_finite(problem.threads, monitor)?;
            }
            return join(Vec::new(), self.query.rows(), with_values, problem.threads);
        }
        monitor.begin(problem.pairs());
        let (query, options, mirrored) = (self.query, &self.options, self.is_mirrored());
        let job = |references: References<'a, E>, first_row| {
            let problem = Problem { references: references.rows.rows(), packed: references.kept.is_some(), ..problem };
            Job { query, references, options, edge, problem, monitor, mirrored, first_row }
        };
        if let [part] = self.parts[..] {
            let job = job(part, 0);
            let found = job.run(|splits| job.finish(job.gather(splits)?))?;
            return if mirrored {
                join_mirrored(found, with_values)
            } else {
                join(found, query.rows(), with_values, problem.threads)
            };
        }
        // What is found in one part stays unordered until the last has been searched.
        let mut all = nothing_found(query.rows())?;
        let mut first_row = 0;
        for &part in &self.parts {
            let job = job(part, first_row);
            for (whole, found) in all.iter_mut().zip(job.run(|splits| job.gather(splits))?.into_iter().flatten()) {
                whole.append(found, first_row)?;
            }
            first_row += part.rows.rows();
        }
        let job = job(self.parts[0], 0);
        let mut chunks = Vec::new();
        while !all.is_empty() {
            chunks.push(all.split_off(all.len().saturating_sub(CHUNK_ROWS)));
        }
        let finished: Vec<Part<E::Output>> = if problem.threads == 1 {
            chunks.into_iter().rev().map(|chunk| job.finish(chunk)).collect::<Result<_>>()?
        } else {
            chunks.into_par_iter().rev().with_max_len(1).map(|chunk| job.finish(chunk)).collect::<Result<_>>()?
        };
        join(finished, query.rows(), with_values, problem.threads)
    }

    /// Whether every pair can be found from one of its sides. By value the order may need more than the rounded values.
    fn is_mirrored(&self) -> bool {
        self.options.order == RowOrder::Row
            && self.options.metric.is_symmetric()
            && self.query.rows() >= MIRRORED_ROWS
            && matches!(self.parts[..], [part] if self.query.rows() == part.rows.rows()
                && self.query.begins_with(part.rows))
    }
}

/// Which float64 values are inside: those up to the last one whose rounded value still keeps to the radius.
#[derive(Debug, Clone, Copy)]
struct Edge {
    largest_first: bool,
    last: f64,
}

impl Edge {
    fn new<O: Output>(metric: Metric, radius: f64) -> Self {
        let largest_first = metric.largest_first();
        // Rounding is symmetric about zero.
        let last = if largest_first { -O::largest_within(-radius) } else { O::largest_within(radius) };
        Self { largest_first, last }
    }

    /// Whether no value can be inside: no distance is negative.
    fn excludes_all(self) -> bool {
        !self.largest_first && self.last < 0.0
    }

    #[inline(always)]
    fn holds(self, value: f64) -> bool {
        if self.largest_first { value >= self.last } else { value <= self.last }
    }
}

/// What keys of one query prove.
struct Limits {
    /// Keys below it belong to rows outside.
    out: f32,
    /// Keys above it belong to rows inside; infinite where the value is wanted anyway.
    sure: f32,
}

/// What one query has found; [`Job::finish`] brings it into its order.
#[derive(Default)]
struct Found {
    /// Where no value is needed; else empty.
    rows: Vec<u32>,
    /// Where values are needed; else empty.
    neighbours: Vec<Neighbour>,
}

impl Found {
    /// Take in what another search found among references of which `first_row` is the first.
    fn append(&mut self, more: Self, first_row: usize) -> Result<()> {
        reserve(&mut self.rows, more.rows.len())?;
        reserve(&mut self.neighbours, more.neighbours.len())?;
        self.rows.extend(more.rows.iter().map(|row| row + first_row as u32));
        self.neighbours.extend(more.neighbours.iter().map(|neighbour| neighbour.offset_by(first_row)));
        Ok(())
    }
}

/// What the queries of a chunk have found, in its final order.
struct Part<O> {
    counts: Vec<usize>,
    rows: Vec<u32>,
    values: Vec<O>,
}

/// Buffers of a task that are filled again for each query.
struct Scratch<E: Element> {
    /// Rows that are certainly inside.
    sure: Vec<u32>,
    /// Rows to be decided by their value.
    rows: Vec<u32>,
    values: Vec<f64>,
    wide: Widened<E>,
    query: Vec<E::Wide>,
}

impl<E: Element> Scratch<E> {
    fn new() -> Self {
        Self { sure: Vec::new(), rows: Vec::new(), values: Vec::new(), wide: Widened::new(), query: Vec::new() }
    }
}

struct Job<'a, E: Element> {
    query: QueryRef<'a, E>,
    references: References<'a, E>,
    options: &'a RadiusOptions,
    edge: Edge,
    problem: Problem,
    monitor: &'a Monitor,
    /// Queries and references are the same rows, and a query leaves out those before itself.
    mirrored: bool,
    /// Number of the first reference row.
    first_row: usize,
}

impl<E: Element> Job<'_, E> {
    /// Search all queries, and do `last` with what the splits of a chunk of them have found.
    fn run<T: Send>(&self, last: impl Fn(Vec<Vec<Found>>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let filter = match self.problem.filter(self.options.simd.level()) {
            Filter::Direct => {
                self.references.check_finite(self.problem.threads, self.monitor)?;
                let plan = self.plan(Filter::Direct);
                return self.run_tasks(&plan, |queries, split| self.scan_direct(&plan, queries, split), last);
            }
            // Few queries are not worth a way of their own here: an answer may be large.
            Filter::Unpacked => self.problem.packed_filter(self.options.simd.level()),
            packed => packed,
        };
        with_filter(self.options.simd, self.options.metric, filter, Filtered { job: self, filter, last })
    }

    fn plan(&self, filter: Filter) -> Plan {
        let plan = Plan::new(&self.problem, filter);
        Plan { chunk: plan.chunk.min(CHUNK_ROWS), ..plan }
    }

    /// Run `scan` on every task and `last` on what each chunk of queries found.
    fn run_tasks<F, L, T>(&self, plan: &Plan, scan: F, last: L) -> Result<Vec<T>>
    where
        F: Fn(Range<usize>, usize) -> Result<Vec<Found>> + Sync,
        L: Fn(Vec<Vec<Found>>) -> Result<T> + Sync,
        T: Send,
    {
        let chunks = 0..self.problem.queries.div_ceil(plan.chunk);
        let rows = |chunk| plan.chunk_of(&(0..self.problem.queries), chunk);
        if plan.splits == 1 && self.problem.threads == 1 {
            // Stay on this thread: small searches do not wait for a pool.
            return chunks.map(|chunk| last(vec![scan(rows(chunk), 0)?])).collect();
        }
        chunks
            .into_par_iter()
            .with_max_len(1)
            .map(|chunk| {
                let splits = (0..plan.splits).into_par_iter().with_max_len(1);
                last(splits.map(|split| scan(rows(chunk), split)).collect::<Result<_>>()?)
            })
            .collect()
    }

    /// Whether every row inside needs its value: to be returned, or to be sorted by.
    fn is_measured(&self) -> bool {
        self.options.values || self.options.order == RowOrder::Value
    }

    /// Whether a pair is the query itself, or one that is found from the other side.
    #[inline(always)]
    fn is_left_out(&self, query: usize, reference: usize) -> bool {
        (self.options.exclude_self && query == self.first_row + reference) || (self.mirrored && reference < query)
    }

    /// Add what is inside among the rows in `scratch` to `found`.
    fn keep(&self, query: usize, scratch: &mut Scratch<E>, found: &mut Found) -> Result<()> {
        reserve(&mut found.rows, scratch.sure.len())?;
        found.rows.append(&mut scratch.sure);
        if scratch.rows.is_empty() {
            return Ok(());
        }
        let prepared = Prepared::of_wide::<E>(self.options.metric, self.query.widen(query, &mut scratch.query));
        self.references.verify_each(&scratch.rows)?;
        let references = self.references.rows;
        score(self.options.simd, &prepared, references, &scratch.rows, &mut scratch.wide, &mut scratch.values);
        let scored = scratch.rows.iter().zip(&scratch.values).filter(|(_, value)| self.edge.holds(**value));
        if self.is_measured() {
            reserve(&mut found.neighbours, scratch.rows.len())?;
            found
                .neighbours
                .extend(scored.map(|(&row, &value)| Neighbour::new::<E::Output>(self.options.metric, value, row)));
        } else {
            reserve(&mut found.rows, scratch.rows.len())?;
            found.rows.extend(scored.map(|(&row, _)| row));
        }
        Ok(())
    }

    fn scan_direct(&self, plan: &Plan, queries: Range<usize>, split: usize) -> Result<Vec<Found>> {
        let references = plan.split(self.references.rows.rows(), split);
        let mut found = nothing_found(queries.len())?;
        let mut scratch = Scratch::new();
        let block = plan::block_rows(self.query.dim() * size_of::<E>()).max(DIRECT_BLOCK_ROWS);
        for start in references.clone().step_by(block) {
            let end = (start + block).min(references.end);
            for (i, found) in queries.clone().zip(&mut found) {
                self.monitor.check()?;
                scratch.rows.clear();
                scratch.rows.extend((start..end).filter(|&j| !self.is_left_out(i, j)).map(|j| j as u32));
                self.keep(i, &mut scratch, found)?;
                self.monitor.advance((end - start) as u64);
            }
        }
        Ok(found)
    }

    /// Join the splits of a chunk of queries.
    fn gather(&self, splits: Vec<Vec<Found>>) -> Result<Vec<Found>> {
        let mut splits = splits.into_iter();
        let mut found = splits.next().unwrap_or_default();
        for split in splits {
            for (whole, more) in found.iter_mut().zip(split) {
                whole.append(more, 0)?;
            }
        }
        Ok(found)
    }

    /// Bring the rows of each query of a chunk into their order.
    fn finish(&self, found: Vec<Found>) -> Result<Part<E::Output>> {
        let mut counts = try_vec(found.len(), FOUND)?;
        counts.extend(found.iter().map(|found| found.rows.len() + found.neighbours.len()));
        let total = counts.iter().sum();
        let mut rows = try_vec(total, FOUND)?;
        let mut values = try_vec(if self.options.values { total } else { 0 }, FOUND)?;
        for Found { rows: mut sure, mut neighbours } in found {
            self.monitor.check()?;
            match self.options.order {
                RowOrder::Value => neighbours.sort_unstable(),
                RowOrder::Row => neighbours.sort_unstable_by_key(|neighbour| neighbour.row()),
            }
            // Sure rows of a run stand before those that were measured.
            sure.sort_unstable();
            rows.append(&mut sure);
            rows.extend(neighbours.iter().map(|neighbour| neighbour.row()));
            if self.options.values {
                values.extend(neighbours.iter().map(|neighbour| neighbour.value::<E::Output>(self.options.metric)));
            }
        }
        Ok(Part { counts, rows, values })
    }
}

/// What the lists of a search are called when there is no memory for them.
const FOUND: &str = "the rows within the radius";

/// Room for `more` elements behind those of `list`, growing by doubling.
fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve(more)
        .map_err(|_| Error::OutOfMemory { bytes: (list.len() + more).saturating_mul(size_of::<T>()), what: FOUND })
}

fn nothing_found(queries: usize) -> Result<Vec<Found>> {
    let mut found = try_vec(queries, FOUND)?;
    found.extend((0..queries).map(|_| Found::default()));
    Ok(found)
}

/// A search with a filter.
struct Filtered<'a, E: Element, L> {
    job: &'a Job<'a, E>,
    filter: Filter,
    /// What to do with the splits of a chunk of queries.
    last: L,
}

impl<E: Element, T: Send, L: Fn(Vec<Vec<Found>>) -> Result<T> + Sync> WithKernel for Filtered<'_, E, L> {
    type Output = Result<Vec<T>>;

    fn run<K: Kernel + 'static>(self, kernel: K) -> Self::Output {
        let job = self.job;
        let panels =
            job.references.panels::<K>(job.options.simd, job.options.metric, job.problem.threads, job.monitor)?;
        let Panels { frame, packed } = &*panels;
        let plan = job.plan(self.filter);
        let scan = |queries, split| FilteredTask { job, kernel, frame, packed, queries }.scan(&plan, split);
        job.run_tasks(&plan, scan, self.last)
    }
}

/// A chunk of queries against packed references.
struct FilteredTask<'a, E: Element, K: Kernel> {
    job: &'a Job<'a, E>,
    kernel: K,
    frame: &'a Frame,
    packed: &'a PackedReference<K>,
    queries: Range<usize>,
}

impl<E: Element, K: Kernel> FilteredTask<'_, E, K> {
    fn scan(&self, plan: &Plan, split: usize) -> Result<Vec<Found>> {
        let job = self.job;
        let mut panels = plan.split(self.packed.panels(), split);
        if job.mirrored {
            let first = (self.queries.start / K::NR).clamp(panels.start, panels.end);
            job.monitor.advance(self.cells(panels.start..first));
            panels.start = first;
        }
        let rows: Vec<u32> = self.queries.clone().map(|i| i as u32).collect();
        let query = PackedQuery::<K>::pack(job.options.simd, self.frame, job.query, &rows)?;
        let limits = self.limits(&query);
        let mut found = nothing_found(self.queries.len())?;
        let mut candidates = CandidateLists::new(K::MR, K::NR);
        let mut scratch = Scratch::new();
        let block = plan::block_panels(self.packed.panel_bytes());
        for start in panels.clone().step_by(block) {
            let end = (start + block).min(panels.end);
            for group in 0..self.queries.len().div_ceil(K::MR) {
                job.monitor.check()?;
                self.scan_run(&query, &limits, group, start..end, &mut found, &mut candidates, &mut scratch)?;
            }
            job.monitor.advance(self.cells(start..end));
        }
        Ok(found)
    }

    /// Pairs of these queries with the rows of `panels`.
    fn cells(&self, panels: Range<usize>) -> u64 {
        let rows = self.job.references.rows.rows();
        (((panels.end * K::NR).min(rows) - (panels.start * K::NR).min(rows)) * self.queries.len()) as u64
    }

    fn limits(&self, query: &PackedQuery<K>) -> Vec<Limits> {
        let (metric, edge) = (self.job.options.metric, self.job.edge.last);
        let (dim, scale2) = (self.job.query.dim(), self.frame.scale2());
        let limits = |&(shift, size): &(f64, f64)| {
            // The edge stands between rounded values: there is no rounding to allow for.
            let floor = Bound::new(metric, dim, shift, size, scale2, 0.0);
            let sure = if self.job.is_measured() { f32::INFINITY } else { floor.accept_above(edge) };
            Limits { out: floor.reject_below(edge), sure }
        };
        query.shifts.iter().map(limits).collect()
    }

    /// Scan one run of panels for one panel of queries and take in what was reported.
    #[expect(clippy::too_many_arguments, reason = "the state of the loop nest, called from one place")]
    fn scan_run(
        &self,
        query: &PackedQuery<K>,
        limits: &[Limits],
        group: usize,
        panels: Range<usize>,
        found: &mut [Found],
        candidates: &mut CandidateLists,
        scratch: &mut Scratch<E>,
    ) -> Result<()> {
        let first = group * K::MR;
        let lanes = K::MR.min(self.queries.len() - first);
        let mut bars = Thresholds::closed();
        for m in 0..lanes {
            bars.open(m, limits[first + m].out, query.terms[first + m]);
        }
        let panel = QueryPanel { codes: query.panel(group), thresholds: &bars };
        self.kernel.scan(&panel, &self.packed.run(panels.start, panels.end, Visit::All)?, candidates);
        for m in 0..K::MR {
            let (rows, keys) = candidates.take(m);
            if m >= lanes {
                continue;
            }
            let i = first + m;
            let (number, sure) = (self.queries.start + i, limits[i].sure);
            // Panels are padded with rows that do not exist.
            let exists = |row: u32| {
                (row as usize) < self.job.references.rows.rows() && !self.job.is_left_out(number, row as usize)
            };
            scratch.rows.clear();
            if sure == f32::INFINITY {
                scratch.rows.extend(rows.iter().filter(|row| exists(**row)));
            } else {
                // A bar for each panel, not for each row: the candidates come panel by panel.
                let (mut panel, mut bar) = (usize::MAX, f32::INFINITY);
                for (&row, &key) in rows.iter().zip(keys).filter(|(row, _)| exists(**row)) {
                    if row as usize / K::NR != panel {
                        panel = row as usize / K::NR;
                        bar = sure_bar(sure, self.packed.panel_error(panel, query.terms[i]));
                    }
                    // What is not a number is not above.
                    if key > bar { scratch.sure.push(row) } else { scratch.rows.push(row) }
                }
            }
            self.job.keep(number, scratch, &mut found[i])?;
        }
        Ok(())
    }
}

/// One answer from those of the chunks; each is given up once it is copied.
fn join<O: Output>(parts: Vec<Part<O>>, queries: usize, with_values: bool, threads: usize) -> Result<Within<O>> {
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
fn join_mirrored<O: Output>(parts: Vec<Part<O>>, with_values: bool) -> Result<Within<O>> {
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
