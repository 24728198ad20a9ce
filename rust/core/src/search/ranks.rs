//! The ranks of given rows in the full order of all references, without sorting them.
//!
//! ```text
//! groups ──> targets of each query ──float64 values──> their keys (value, row), sorted
//! for each task = (chunk of queries, split of the references)          in parallel
//!     with a filter   Kernel::scan, every key ──count.rs──> for each target: surely before │ surely behind │ open
//!                     open ──float64 value──> key, held against that of the target
//!     without         every reference ──float64 value──> key ──search among the targets──> its place
//! for each query: add up its splits ──> rank = 1 + nearer targets + other references before the target
//! ```
//!
//! Targets are not held against each other, and self against nobody: both are left out while references are counted.
//!
//! A target's limits are those of a search by radius whose edge stands just before its value, and just behind it: see
//! `docs/exactness.md`, "Ranks". Memory is a few numbers for each target and query of the running tasks.

use std::ops::Range;

use rayon::prelude::*;

use super::rank_counts::{BLOCK, Bounds, Limits, SAME_ERROR, bound};
use crate::arch::WithKernel;
use crate::arch::kernel::{CandidateLists, Kernel, QueryPanel, QueryTerms, Thresholds, Visit};
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::{Prepared, Widened, score};
use crate::filter::bound::Bound;
use crate::filter::frame::Frame;
use crate::filter::panels::{PackedQuery, PackedReference};
use crate::filter::{Filter, with_filter};
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;
use crate::runtime::alloc::try_zeroed;
use crate::runtime::pool;
use crate::search::plan::{self, Plan, Problem};
use crate::search::references::References;

/// What to look for.
#[derive(Debug, Clone, Copy)]
pub struct RankOptions {
    /// What is measured.
    pub metric: Metric,
    /// Query `i` is reference row `first_row + i`, which then has no rank and counts for nobody's.
    pub exclude_self: bool,
    /// The reference row of the first query; read only with `exclude_self`.
    pub first_row: usize,
    /// The level to run at.
    pub simd: Simd,
    /// Threads to search with.
    pub threads: std::num::NonZero<usize>,
}

/// The target rows of each query, by way of named groups.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// The group of each query.
    pub query_group: &'a [i64],
    /// Group `g` has the places `offsets[g] .. offsets[g + 1]` of `rows`; one more than there are groups.
    pub offsets: &'a [i64],
    /// Reference rows, each once in a group, in any order.
    pub rows: &'a [i64],
}

/// The ranks of each query's targets, as compressed rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks {
    /// Query `i` has the places `starts[i] .. starts[i + 1]` of `ranks`; one more than there are queries.
    pub starts: Vec<i64>,
    /// Ranks from 1 on, ascending within a query.
    pub ranks: Vec<i64>,
}

impl<'a> Groups<'a> {
    /// The target rows of a query.
    fn of(&self, query: usize) -> &'a [i64] {
        let group = self.query_group[query] as usize;
        &self.rows[self.offsets[group] as usize..self.offsets[group + 1] as usize]
    }

    /// Refuse groups that contradict themselves or do not fit so many rows.
    fn check(&self, queries: usize, references: usize) -> Result<()> {
        let bad = |argument, wanted, given| Err(Error::BadArray { argument, wanted, given });
        let Some((&last, &[first, ..])) = self.offsets.last().zip(Some(self.offsets)) else {
            return bad("group_offsets", "begin with 0".to_owned(), "no entries".to_owned());
        };
        if first != 0 {
            return bad("group_offsets", "begin with 0".to_owned(), first.to_string());
        }
        if let Some(at) = self.offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            let given = format!("{} at position {at} and {} behind it", self.offsets[at], self.offsets[at + 1]);
            return bad("group_offsets", "not fall".to_owned(), given);
        }
        if last != self.rows.len() as i64 {
            let wanted = format!("end with the number of group_rows, {}", self.rows.len());
            return bad("group_offsets", wanted, last.to_string());
        }
        if self.query_group.len() != queries {
            let wanted = format!("have one entry for each of the {queries} queries");
            return bad("query_group", wanted, format!("{} entries", self.query_group.len()));
        }
        let groups = self.offsets.len() - 1;
        let names = |group: &i64| usize::try_from(*group).is_ok_and(|group| group < groups);
        if let Some(at) = self.query_group.iter().position(|group| !names(group)) {
            let given = format!("{} at position {at}", self.query_group[at]);
            return bad("query_group", format!("name groups from 0 to below {groups}"), given);
        }
        // The last group that named a row; one more, so that 0 is none.
        let mut named = try_zeroed::<usize>(references, "the groups of rows")?;
        for group in 0..groups {
            for at in self.offsets[group] as usize..self.offsets[group + 1] as usize {
                let given = || format!("{} at position {at}", self.rows[at]);
                match usize::try_from(self.rows[at]).ok().and_then(|row| named.get_mut(row)) {
                    None => return bad("group_rows", format!("name rows from 0 to below {references}"), given()),
                    Some(last) if *last == group + 1 => {
                        let given = format!("{} again in group {group}", given());
                        return bad("group_rows", "name a row once in a group".to_owned(), given);
                    }
                    Some(last) => *last = group + 1,
                }
            }
        }
        Ok(())
    }
}

/// A search for ranks whose arguments were found good.
#[derive(Clone, Copy)]
pub struct RankSearch<'a, E> {
    query: MatrixRef<'a, E>,
    reference: MatrixRef<'a, E>,
    groups: Groups<'a>,
    options: RankOptions,
}

impl<'a, E: Element> RankSearch<'a, E> {
    /// Check everything that can be checked without reading the rows.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::QueriesOutsideReference`] and [`Error::BadArray`].
    pub fn new(
        query: MatrixRef<'a, E>,
        reference: MatrixRef<'a, E>,
        groups: Groups<'a>,
        options: RankOptions,
    ) -> Result<Self> {
        let (queries, references, first_row) = (query.rows(), reference.rows(), options.first_row);
        if query.dim() != reference.dim() {
            return Err(Error::DimensionMismatch { query: query.dim(), reference: reference.dim() });
        }
        if options.exclude_self && first_row.checked_add(queries).is_none_or(|end| end > references) {
            return Err(Error::QueriesOutsideReference { first_row, queries, references });
        }
        groups.check(queries, references)?;
        Ok(Self { query, reference, groups, options })
    }

    fn problem(&self) -> Problem {
        Problem {
            queries: self.query.rows(),
            references: self.reference.rows(),
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
    pub fn run(&self, monitor: &Monitor) -> Result<Ranks> {
        pool::enter(self.options.threads, self.is_small(), || self.run_here(monitor))
    }

    fn run_here(&self, monitor: &Monitor) -> Result<Ranks> {
        if let Some(error) = self.query.first_non_finite(Argument::Query, 0) {
            return Err(error);
        }
        let queries = self.query.rows();
        let mut problem = self.problem();
        if self.is_small() {
            problem.threads = 1;
        }
        let mut job = Job {
            query: self.query,
            reference: self.reference,
            groups: &self.groups,
            options: &self.options,
            starts: try_vec(queries + 1, RANKS)?,
            asking: try_vec(queries, RANKS)?,
            problem,
            monitor,
        };
        let mut total = 0;
        job.starts.push(0);
        for query in 0..queries {
            let count = job.targets(query).count();
            total += count;
            job.starts.push(total as i64);
            if count > 0 {
                job.asking.push(query as u32);
            }
        }
        let mut ranks = try_zeroed::<i64>(total, RANKS)?;
        if total == 0 {
            // Nothing to search, but what was passed must still be good.
            References::one_shot(self.reference).check_finite(problem.threads, monitor)?;
        } else {
            job.problem.queries = job.asking.len();
            job.run(&mut ranks)?;
        }
        Ok(Ranks { starts: job.starts, ranks })
    }
}

/// What the result is called when there is no memory for it.
const RANKS: &str = "the ranks";

/// Open rows of a query that are worth a pass of float64.
const MANY_OPEN: usize = 32;

/// A reference row that is not surely before or behind each target, and the bounds of its key.
struct Open {
    row: u32,
    low: f32,
    high: f32,
}

/// What is known of one query's targets.
struct Counted {
    /// In their order.
    targets: Vec<Neighbour>,
    /// References before each of them that are no targets; or the same as differences, until [`Counted::add_up`].
    before: Vec<u32>,
    /// The rows of the targets, and the query's own: those that are not counted.
    left_out: LeftOut,
}

/// Some rows, to be met while others pass in ascending order.
struct LeftOut {
    /// Ascending.
    rows: Vec<u32>,
    /// How many of them have passed.
    passed: usize,
}

impl LeftOut {
    /// Those of the rows in `range`, which begins behind what has passed.
    fn pass(&mut self, range: Range<usize>) -> &[u32] {
        let first = self.passed + self.rows[self.passed..].partition_point(|row| (*row as usize) < range.start);
        let last = first + self.rows[first..].partition_point(|row| (*row as usize) < range.end);
        self.passed = last;
        &self.rows[first..last]
    }

    fn contains(&self, row: u32) -> bool {
        self.rows.binary_search(&row).is_ok()
    }
}

impl Counted {
    /// Count a reference at the first target that it is before.
    #[inline(always)]
    fn place(&mut self, reference: Neighbour) {
        // By value first, which takes one comparison; only among equals by the row.
        let mut at = self.targets.partition_point(|target| reference.is_behind(*target));
        if self.targets.get(at).is_some_and(|target| !target.is_behind(reference)) {
            at += self.targets[at..].partition_point(|target| *target < reference);
        }
        if let Some(before) = self.before.get_mut(at) {
            *before += 1;
        }
    }

    /// What is before a target is before all behind it.
    fn add_up(&mut self) {
        let mut sum = 0;
        for before in &mut self.before {
            sum += *before;
            *before = sum;
        }
    }
}

/// Buffers of a task that are filled again for each query.
struct Scratch<E: Element> {
    rows: Vec<u32>,
    values: Vec<f64>,
    wide: Widened<E>,
}

impl<E: Element> Scratch<E> {
    fn new() -> Self {
        Self { rows: Vec::new(), values: Vec::new(), wide: Widened::new() }
    }
}

/// One search for ranks, ready to run.
struct Job<'a, E> {
    query: MatrixRef<'a, E>,
    reference: MatrixRef<'a, E>,
    groups: &'a Groups<'a>,
    options: &'a RankOptions,
    /// Where the ranks of each query begin.
    starts: Vec<i64>,
    /// Queries that have targets.
    asking: Vec<u32>,
    problem: Problem,
    monitor: &'a Monitor,
}

impl<E: Element> Job<'_, E> {
    /// Fill in the ranks of all queries.
    fn run(&self, ranks: &mut [i64]) -> Result<()> {
        self.monitor.begin(self.asking.len() as u64 * self.problem.references as u64);
        let mut filter = self.problem.rank_filter(self.options.simd.level());
        let mut done = 0;
        while done < self.asking.len() {
            let queries = done..self.asking.len();
            let ranks = &mut ranks[self.starts[self.asking[done] as usize] as usize..];
            (done, filter) = match filter {
                Filter::Direct => {
                    References::one_shot(self.reference).check_finite(self.problem.threads, self.monitor)?;
                    let plan = self.plan(&queries, filter, ranks.len());
                    self.run_tasks(&plan, queries.clone(), ranks, |queries, split| {
                        self.scan_direct(queries, plan.split(self.reference.rows(), split))
                    })?;
                    (queries.end, filter)
                }
                _ => {
                    let work = Filtered { job: self, filter, queries, ranks };
                    with_filter(self.options.simd, self.options.metric, filter, work)?
                }
            };
        }
        Ok(())
    }

    /// A plan for queries with so many targets in all. They are to a task what neighbours are to a search, but take three
    /// times the memory.
    fn plan(&self, queries: &Range<usize>, filter: Filter, targets: usize) -> Plan {
        let k = 3 * targets.div_ceil(queries.len());
        Plan::new(&Problem { queries: queries.len(), k, ..self.problem }, filter)
    }

    /// The reference row that a query is.
    #[inline(always)]
    fn own_row(&self, query: usize) -> Option<u32> {
        self.options.exclude_self.then_some((self.options.first_row + query) as u32)
    }

    /// The target rows of a query.
    fn targets(&self, query: usize) -> impl Iterator<Item = u32> {
        let own = self.own_row(query);
        self.groups.of(query).iter().map(|row| *row as u32).filter(move |row| Some(*row) != own)
    }

    /// Where the ranks of some asking queries stand.
    fn places(&self, queries: &Range<usize>) -> Range<usize> {
        let of = |query: usize, next: usize| self.starts[self.asking[query] as usize + next] as usize;
        of(queries.start, 0)..of(queries.end - 1, 1)
    }

    /// Run `scan` on every task and write the ranks that follow.
    fn run_tasks<F>(&self, plan: &Plan, queries: Range<usize>, mut ranks: &mut [i64], scan: F) -> Result<()>
    where
        F: Fn(&[u32], usize) -> Result<Vec<Counted>> + Sync,
    {
        let chunks = queries.len().div_ceil(plan.chunk);
        let mut parts = try_vec(chunks, "the tasks of a search")?;
        for chunk in 0..chunks {
            let queries = plan.chunk_of(&queries, chunk);
            let part;
            (part, ranks) = ranks.split_at_mut(self.places(&queries).len());
            parts.push((&self.asking[queries], part));
        }
        if plan.splits == 1 && self.problem.threads == 1 {
            // Stay on this thread: small searches do not wait for a pool.
            return parts.into_iter().try_for_each(|(queries, ranks)| {
                write(&scan(queries, 0)?, ranks);
                Ok(())
            });
        }
        parts.into_par_iter().with_max_len(1).try_for_each(|(queries, ranks)| {
            let splits: Vec<Vec<Counted>> = (0..plan.splits)
                .into_par_iter()
                .with_max_len(1)
                .map(|split| scan(queries, split))
                .collect::<Result<_>>()?;
            let whole = splits.into_iter().reduce(|mut whole, part| {
                for (counted, more) in whole.iter_mut().zip(&part) {
                    for (before, more) in counted.before.iter_mut().zip(&more.before) {
                        *before += more;
                    }
                }
                whole
            });
            write(&whole.unwrap_or_default(), ranks);
            Ok(())
        })
    }

    fn prepare(&self, queries: &[u32]) -> Result<Vec<Prepared>> {
        let mut prepared = try_vec(queries.len(), "prepared queries")?;
        prepared.extend(queries.iter().map(|&i| Prepared::new(self.options.metric, self.query.row(i as usize))));
        Ok(prepared)
    }

    /// Form the float64 values of `scratch.rows`.
    fn score(&self, query: &Prepared, scratch: &mut Scratch<E>) {
        score(self.options.simd, query, self.reference, &scratch.rows, &mut scratch.wide, &mut scratch.values);
    }

    fn neighbour(&self, value: f64, row: u32) -> Neighbour {
        Neighbour::new::<E::Output>(self.options.metric, value, row)
    }

    /// The targets of some queries in their order, with nobody before them yet.
    fn counted(&self, queries: &[u32], prepared: &[Prepared], scratch: &mut Scratch<E>) -> Result<Vec<Counted>> {
        let mut counted = try_vec(queries.len(), RANKS)?;
        for (&query, prepared) in queries.iter().zip(prepared) {
            scratch.rows.clear();
            scratch.rows.extend(self.targets(query as usize));
            self.score(prepared, scratch);
            let mut targets = try_vec(scratch.rows.len(), RANKS)?;
            targets.extend(scratch.rows.iter().zip(&scratch.values).map(|(&row, &value)| self.neighbour(value, row)));
            targets.sort_unstable();
            let before = try_zeroed(targets.len(), RANKS)?;
            let mut rows = try_vec(targets.len() + 1, RANKS)?;
            rows.extend(scratch.rows.iter().copied().chain(self.own_row(query as usize)));
            rows.sort_unstable();
            counted.push(Counted { targets, before, left_out: LeftOut { rows, passed: 0 } });
        }
        Ok(counted)
    }

    /// Every reference in float64.
    fn scan_direct(&self, queries: &[u32], references: Range<usize>) -> Result<Vec<Counted>> {
        let mut scratch = Scratch::new();
        let prepared = self.prepare(queries)?;
        let mut counted = self.counted(queries, &prepared, &mut scratch)?;
        let block = plan::block_rows(self.reference.dim() * size_of::<E>());
        for start in references.clone().step_by(block) {
            let end = (start + block).min(references.end);
            for (prepared, counted) in prepared.iter().zip(&mut counted) {
                self.monitor.check()?;
                scratch.rows.clear();
                let mut next = start as u32;
                for &row in counted.left_out.pass(start..end) {
                    scratch.rows.extend(next..row);
                    next = row + 1;
                }
                scratch.rows.extend(next..end as u32);
                self.score(prepared, &mut scratch);
                for (&row, &value) in scratch.rows.iter().zip(&scratch.values) {
                    counted.place(self.neighbour(value, row));
                }
                self.monitor.advance((end - start) as u64);
            }
        }
        counted.iter_mut().for_each(Counted::add_up);
        Ok(counted)
    }
}

/// Write the ranks that follow from what is before each target.
fn write(counted: &[Counted], mut ranks: &mut [i64]) {
    for Counted { before, .. } in counted {
        let part;
        (part, ranks) = ranks.split_at_mut(before.len());
        for (t, (rank, before)) in part.iter_mut().zip(before).enumerate() {
            *rank = 1 + t as i64 + i64::from(*before);
        }
    }
}

/// A search, or what is left of one, with a filter.
struct Filtered<'a, E: Element> {
    job: &'a Job<'a, E>,
    filter: Filter,
    queries: Range<usize>,
    ranks: &'a mut [i64],
}

impl<E: Element> WithKernel for Filtered<'_, E> {
    /// Where the searched queries end, and how to go on.
    type Output = Result<(usize, Filter)>;

    fn run<K: Kernel + 'static>(self, kernel: K) -> Self::Output {
        let Self { job, filter, queries, ranks } = self;
        let frame = Frame::choose(job.options.simd, job.options.metric, job.reference);
        let packed =
            PackedReference::<K>::pack(job.options.simd, &frame, job.reference, job.problem.threads, job.monitor)?;
        let search = |queries: Range<usize>, ranks: &mut [i64]| {
            let plan = job.plan(&queries, filter, ranks.len());
            job.run_tasks(&plan, queries, ranks, |queries, split| {
                let task = FilteredTask { job, kernel, frame: &frame, packed: &packed, queries };
                task.scan(plan.split(packed.panels(), split))
            })
        };
        let probe = queries.start..queries.start + Problem { queries: queries.len(), ..job.problem }.probe();
        let mut rest = ranks;
        if !probe.is_empty() {
            let before = job.monitor.tallied().0;
            let part;
            (part, rest) = rest.split_at_mut(job.places(&probe).len());
            search(probe.clone(), part)?;
            let pairs = probe.len() as f64 * job.problem.references as f64;
            let share = (job.monitor.tallied().0 - before) as f64 / pairs;
            // What float32 leaves open is little beside what 8 bits do.
            let needless = if filter == Filter::Int8 { share } else { 0.0 };
            let next = job.problem.next_filter(filter, share, needless);
            if next != filter {
                return Ok((probe.end, next));
            }
        }
        search(probe.end..queries.end, rest)?;
        Ok((queries.end, filter))
    }
}

/// A chunk of queries against packed references.
struct FilteredTask<'a, E: Element, K: Kernel> {
    job: &'a Job<'a, E>,
    kernel: K,
    frame: &'a Frame,
    packed: &'a PackedReference<K>,
    queries: &'a [u32],
}

/// What a query of a task with a filter has besides.
struct Filtering {
    limits: Limits,
    /// Rows to be decided by their value.
    open: Vec<Open>,
}

/// What a task with a filter fills again for each query.
struct Buffers<E: Element> {
    candidates: CandidateLists,
    errors: Vec<f32>,
    bounds: Bounds,
    /// Places of open rows in a block.
    open: Vec<u32>,
    scratch: Scratch<E>,
}

impl<E: Element, K: Kernel> FilteredTask<'_, E, K> {
    fn scan(&self, panels: Range<usize>) -> Result<Vec<Counted>> {
        let job = self.job;
        let query = PackedQuery::<K>::pack(job.options.simd, self.frame, job.query.into(), self.queries)?;
        let prepared = job.prepare(self.queries)?;
        let mut buffers = Buffers {
            candidates: CandidateLists::new(K::MR, K::NR),
            errors: Vec::new(),
            bounds: Bounds::new(),
            open: Vec::new(),
            scratch: Scratch::new(),
        };
        let mut counted = job.counted(self.queries, &prepared, &mut buffers.scratch)?;
        let mut filtering = try_vec(counted.len(), RANKS)?;
        for (counted, &(shift, size)) in counted.iter().zip(&query.shifts) {
            let metric = job.options.metric;
            // The edges stand between rounded values: there is no rounding to allow for.
            let floor = Bound::new(metric, job.query.dim(), shift, size, self.frame.scale2(), 0.0);
            let edges = counted.targets.iter().map(|target| target.edges::<E::Output>(metric));
            filtering.push(Filtering { limits: Limits::new(&floor, edges), open: Vec::new() });
        }
        let block = plan::block_panels(self.packed.panel_bytes());
        for start in panels.clone().step_by(block) {
            let end = (start + block).min(panels.end);
            for group in 0..self.queries.len().div_ceil(K::MR) {
                job.monitor.check()?;
                let lanes = group * K::MR..((group + 1) * K::MR).min(self.queries.len());
                let mut bars = Thresholds::closed();
                for (m, i) in lanes.clone().enumerate() {
                    // Every key reaches it: all are reported, in their order.
                    bars.open(m, f32::NEG_INFINITY, query.terms[i]);
                }
                let panel = QueryPanel { codes: query.panel(group), thresholds: &bars };
                self.kernel.scan(&panel, &self.packed.run(start, end, Visit::All)?, &mut buffers.candidates);
                for m in 0..K::MR {
                    let i = lanes.start + m;
                    if i < lanes.end {
                        self.count(m, query.terms[i], start..end, &mut counted[i], &mut filtering[i], &mut buffers)?;
                        if filtering[i].open.len() >= MANY_OPEN {
                            self.decide(&prepared[i], &mut counted[i], &mut filtering[i], &mut buffers.scratch);
                        }
                    } else {
                        buffers.candidates.take(m);
                    }
                }
            }
            let rows = (end * K::NR).min(job.reference.rows()).saturating_sub(start * K::NR);
            job.monitor.advance((rows * self.queries.len()) as u64);
        }
        for ((prepared, counted), filtering) in prepared.iter().zip(&mut counted).zip(&mut filtering) {
            self.decide(prepared, counted, filtering, &mut buffers.scratch);
            if filtering.limits.by_place() {
                counted.add_up();
            }
        }
        Ok(counted)
    }

    /// Count what the keys of some panels decide for the query in lane `m`; keep the rest.
    fn count(
        &self,
        m: usize,
        terms: QueryTerms,
        panels: Range<usize>,
        counted: &mut Counted,
        filtering: &mut Filtering,
        buffers: &mut Buffers<E>,
    ) -> Result<()> {
        const { assert!(K::NR.is_multiple_of(SAME_ERROR)) };
        let simd = self.job.options.simd;
        let (_, keys) = buffers.candidates.take(m);
        if keys.len() != panels.len() * K::NR {
            return Err(Error::Panic("a kernel has left out keys".into()));
        }
        buffers.errors.clear();
        for panel in panels.clone() {
            let error = self.packed.panel_error(panel, terms);
            buffers.errors.extend(std::iter::repeat_n(error, K::NR / SAME_ERROR));
        }
        let blocks = keys.chunks(BLOCK).zip(buffers.errors.chunks(BLOCK / SAME_ERROR));
        for (start, (keys, errors)) in (panels.start * K::NR..).step_by(BLOCK).zip(blocks) {
            bound(simd, keys, errors, &mut buffers.bounds);
            for &row in counted.left_out.pass(start..start + keys.len()) {
                buffers.bounds.leave_out(row as usize - start);
            }
            // Panels are padded with rows that do not exist.
            for at in self.job.reference.rows().saturating_sub(start)..BLOCK {
                buffers.bounds.leave_out(at);
            }
            filtering.limits.count(simd, &buffers.bounds, &mut counted.before, &mut buffers.open);
            for at in buffers.open.drain(..) {
                let row = start as u32 + at;
                // Where a query cannot be filtered, so are rows that are left out, and places that have no key: the rows
                // there are those of the next run.
                let has_key = (at as usize) < keys.len() && (row as usize) < self.job.reference.rows();
                if has_key && !counted.left_out.contains(row) {
                    let (low, high) = (buffers.bounds.low[at as usize], buffers.bounds.high[at as usize]);
                    filtering.open.push(Open { row, low, high });
                }
            }
        }
        Ok(())
    }

    /// Count the open rows of a query by their values.
    fn decide(&self, query: &Prepared, counted: &mut Counted, filtering: &mut Filtering, scratch: &mut Scratch<E>) {
        let (job, limits) = (self.job, &filtering.limits);
        scratch.rows.clear();
        scratch.rows.extend(filtering.open.iter().map(|open| open.row));
        job.score(query, scratch);
        job.monitor.tally(scratch.rows.len() as u64, 0);
        for (open, &value) in filtering.open.drain(..).zip(&scratch.values) {
            let reference = job.neighbour(value, open.row);
            if limits.by_place() {
                counted.place(reference);
                continue;
            }
            // For other targets it was counted.
            for (t, (target, before)) in counted.targets.iter().zip(&mut counted.before).enumerate() {
                *before += u32::from(limits.leave_open(t, open.low, open.high) & (reference < *target));
            }
        }
    }
}
