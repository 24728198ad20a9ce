//! The ranks of given rows in the full order of all references, without sorting them.
//!
//! ```text
//! groups ──> targets of each query ──float64 values──> their keys (value, row), sorted
//! for each task = (chunk of queries, split of the references)          in parallel
//!     with a filter   Kernel::scan, every key ──> for each target: surely before │ surely behind │ open
//!                     open ──float64 value──> key, held against that of the target
//!     without         every reference ──float64 value──> key ──search among the targets──> counted behind its place
//! for each query: add up its splits ──> rank = 1 + references before the target      self is left out here, nowhere else
//! ```
//!
//! A target's limits are those of a search by radius whose edge stands just before its value, and just behind it: see
//! `docs/exactness.md`, "Ranks". Memory is a few numbers for each target and query of the running tasks.

use std::ops::Range;

use rayon::prelude::*;

use crate::arch::{self, WithKernel};
use crate::bound::Floor;
use crate::cancel::{Filter, Monitor};
use crate::error::{Argument, Error, Result, try_vec};
use crate::kernel::{Bars, Hits, Kernel, QueryPanel, Visit};
use crate::level::{Simd, multiversion};
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::pack::{Frame, PackedQuery, PackedReference, check_finite, try_zeroed};
use crate::plan::{self, Plan, Problem};
use crate::pool::{self, PoolHandle, float_environment};
use crate::rescore::{Prepared, Widened, score};

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
        let bad = |argument, wanted, given| Err(Error::BadGroups { argument, wanted, given });
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
    /// [`Error::DimensionMismatch`], [`Error::QueriesOutsideReference`] and [`Error::BadGroups`].
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
        if self.is_small() || pool::is_worker() {
            return float_environment::with_default(|| self.run_here(monitor));
        }
        PoolHandle::get(self.options.threads)?.pool().install(|| self.run_here(monitor))
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
            check_finite(self.reference, problem.threads)?;
        } else {
            job.problem.queries = job.asking.len();
            job.run(&mut ranks)?;
        }
        Ok(Ranks { starts: job.starts, ranks })
    }
}

/// What the result is called when there is no memory for it.
const RANKS: &str = "the ranks";

/// Keys that are held against a target in one go: they and their bounds stay in the first-level cache.
const BLOCK: usize = 256;

/// Neighbouring keys that share an error: the width of the narrowest panel.
const SAME_ERROR: usize = 8;

/// Open rows of a query that are worth a pass of float64.
const MANY_OPEN: usize = 32;

/// What keys prove about a target: the key's lower bound above `before`, or its upper bound below `behind`.
#[derive(Debug, Clone, Copy)]
struct Limits {
    before: f32,
    behind: f32,
}

impl Limits {
    /// Whether a key between these bounds proves nothing; so it is with a bound that is not a number.
    #[inline(always)]
    fn leave_open(self, low: f32, high: f32) -> bool {
        // Not `<=` and `>=`: what is not a number is open.
        #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
        let open = !(low > self.before) & !(high < self.behind);
        open
    }
}

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
    /// References before each of them.
    before: Vec<u32>,
    /// Of each of them; empty without a filter.
    limits: Vec<Limits>,
    /// Rows to be decided by their value.
    open: Vec<Open>,
}

/// Buffers of a task that are filled again for each query.
struct Scratch<E: Element> {
    rows: Vec<u32>,
    values: Vec<f64>,
    wide: Widened<E>,
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
        let mut filter = plan::rank_filter(&self.problem, ranks.len(), self.options.simd.level());
        let mut done = 0;
        while done < self.asking.len() {
            let queries = done..self.asking.len();
            let ranks = &mut ranks[self.starts[self.asking[done] as usize] as usize..];
            (done, filter) = match filter {
                Filter::Direct => {
                    check_finite(self.reference, self.problem.threads)?;
                    let plan = self.plan(&queries, filter, ranks.len());
                    self.run_tasks(&plan, queries.clone(), ranks, |queries, split| {
                        self.scan_direct(queries, plan.split(self.reference.rows(), split))
                    })?;
                    (queries.end, filter)
                }
                _ => {
                    let work = Filtered { job: self, filter, queries, ranks };
                    arch::with_filter(self.options.simd, self.options.metric, filter, work)?
                }
            };
        }
        Ok(())
    }

    /// A plan for queries with so many targets in all: they are to a task what neighbours are to a search.
    fn plan(&self, queries: &Range<usize>, filter: Filter, targets: usize) -> Plan {
        let k = targets.div_ceil(queries.len()).min(self.problem.references);
        Plan::new(&Problem { queries: queries.len(), k, ..self.problem }, filter)
    }

    /// The reference row that a query is.
    #[inline(always)]
    fn own_row(&self, query: usize) -> Option<usize> {
        self.options.exclude_self.then_some(self.options.first_row + query)
    }

    /// The target rows of a query.
    fn targets(&self, query: usize) -> impl Iterator<Item = u32> {
        let own = self.own_row(query).map(|row| row as i64);
        self.groups.of(query).iter().filter(move |row| Some(**row) != own).map(|row| *row as u32)
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
            counted.push(Counted { targets, before, limits: Vec::new(), open: Vec::new() });
        }
        Ok(counted)
    }

    /// Every reference in float64.
    fn scan_direct(&self, queries: &[u32], references: Range<usize>) -> Result<Vec<Counted>> {
        let mut scratch = Scratch { rows: Vec::new(), values: Vec::new(), wide: Widened::new() };
        let prepared = self.prepare(queries)?;
        let mut counted = self.counted(queries, &prepared, &mut scratch)?;
        let block = plan::block_rows(self.reference.dim() * size_of::<E>());
        for start in references.clone().step_by(block) {
            let end = (start + block).min(references.end);
            for ((&query, prepared), counted) in queries.iter().zip(&prepared).zip(&mut counted) {
                self.monitor.check()?;
                let own = self.own_row(query as usize);
                scratch.rows.clear();
                scratch.rows.extend((start..end).filter(|row| Some(*row) != own).map(|row| row as u32));
                self.score(prepared, &mut scratch);
                for (&row, &value) in scratch.rows.iter().zip(&scratch.values) {
                    counted.place(self.neighbour(value, row));
                }
                self.monitor.advance((end - start) as u64);
            }
        }
        // A reference is before all targets from its place on.
        for counted in &mut counted {
            let mut sum = 0;
            for before in &mut counted.before {
                sum += *before;
                *before = sum;
            }
        }
        Ok(counted)
    }
}

impl Counted {
    /// Count a reference at the first target that it is before.
    #[inline(always)]
    fn place(&mut self, reference: Neighbour) {
        // By value first, which takes one comparison; only among equals by the row.
        let mut at = self.targets.partition_point(|target| reference.is_behind(*target));
        if self.targets.get(at).is_some_and(|target| !target.is_behind(reference)) {
            at += self.targets[at..].partition_point(|target| *target <= reference);
        }
        if let Some(before) = self.before.get_mut(at) {
            *before += 1;
        }
    }
}

/// Write the ranks that follow from what is before each target.
fn write(counted: &[Counted], ranks: &mut [i64]) {
    for (rank, before) in ranks.iter_mut().zip(counted.iter().flat_map(|counted| &counted.before)) {
        *rank = 1 + i64::from(*before);
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
            let next = job.problem.next_filter(filter, share, 0.0);
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

/// Bounds of some neighbouring keys.
struct Bounds {
    low: [f32; BLOCK],
    high: [f32; BLOCK],
}

/// What a task with a filter fills again for each query.
struct Buffers<E: Element> {
    hits: Hits,
    errors: Vec<f32>,
    bounds: Bounds,
    open: [bool; BLOCK],
    scratch: Scratch<E>,
}

impl<E: Element, K: Kernel> FilteredTask<'_, E, K> {
    fn scan(&self, panels: Range<usize>) -> Result<Vec<Counted>> {
        let job = self.job;
        let query = PackedQuery::<K>::pack(job.options.simd, self.frame, job.query, self.queries)?;
        let prepared = job.prepare(self.queries)?;
        let mut buffers = Buffers {
            hits: Hits::new(K::MR, K::NR),
            errors: Vec::new(),
            bounds: Bounds { low: [0.0; BLOCK], high: [0.0; BLOCK] },
            open: [false; BLOCK],
            scratch: Scratch { rows: Vec::new(), values: Vec::new(), wide: Widened::new() },
        };
        let mut counted = job.counted(self.queries, &prepared, &mut buffers.scratch)?;
        for (counted, shift) in counted.iter_mut().zip(&query.shifts) {
            counted.limits = try_vec(counted.targets.len(), RANKS)?;
            counted.limits.extend(self.limits(*shift, &counted.targets));
        }
        let block = plan::block_panels(self.packed.panel_bytes());
        for start in panels.clone().step_by(block) {
            let end = (start + block).min(panels.end);
            for group in 0..self.queries.len().div_ceil(K::MR) {
                job.monitor.check()?;
                self.scan_run(&query, &prepared, group, start..end, &mut counted, &mut buffers)?;
            }
            let rows = (end * K::NR).min(job.reference.rows()).saturating_sub(start * K::NR);
            job.monitor.advance((rows * self.queries.len()) as u64);
        }
        for (prepared, counted) in prepared.iter().zip(&mut counted) {
            self.decide(prepared, counted, &mut buffers.scratch);
        }
        Ok(counted)
    }

    fn limits(&self, (shift, size): (f64, f64), targets: &[Neighbour]) -> impl Iterator<Item = Limits> {
        let metric = self.job.options.metric;
        // The edges stand between rounded values: there is no rounding to allow for.
        let floor = Floor::new(metric, self.job.query.dim(), shift, size, self.frame.scale2(), 0.0);
        targets.iter().map(move |target| {
            let (before, at) = target.edges::<E::Output>(metric);
            Limits { before: floor.above_value(before), behind: floor.below_value(at) }
        })
    }

    /// Scan one run of panels for one panel of queries and count what was found.
    fn scan_run(
        &self,
        query: &PackedQuery<K>,
        prepared: &[Prepared],
        group: usize,
        panels: Range<usize>,
        counted: &mut [Counted],
        buffers: &mut Buffers<E>,
    ) -> Result<()> {
        let first = group * K::MR;
        let lanes = K::MR.min(self.queries.len() - first);
        let mut bars = Bars::closed();
        for m in 0..lanes {
            // Every key reaches it: all are reported, in their order.
            bars.open(m, f32::NEG_INFINITY, query.terms[first + m]);
        }
        let panel = QueryPanel { codes: query.panel(group), bars: &bars };
        self.kernel.scan(&panel, &self.packed.run(panels.start, panels.end, Visit::All), &mut buffers.hits);
        for m in 0..K::MR {
            let (_, keys) = buffers.hits.take(m);
            if m >= lanes {
                continue;
            }
            if keys.len() != panels.len() * K::NR {
                return Err(Error::Panic("a kernel has left out keys".into()));
            }
            const { assert!(K::NR.is_multiple_of(SAME_ERROR)) };
            buffers.errors.clear();
            for panel in panels.clone() {
                let error = self.packed.panel_error(panel, query.terms[first + m]);
                buffers.errors.extend(std::iter::repeat_n(error, K::NR / SAME_ERROR));
            }
            let counted = &mut counted[first + m];
            let own = self.job.own_row(self.queries[first + m] as usize);
            // Panels are padded with rows that do not exist.
            let exists = |row: usize| row < self.job.reference.rows() && Some(row) != own;
            for ((block, keys), errors) in
                keys.chunks(BLOCK).enumerate().zip(buffers.errors.chunks(BLOCK / SAME_ERROR))
            {
                let start = panels.start * K::NR + block * BLOCK;
                bounds(self.job.options.simd, keys, errors, &mut buffers.bounds);
                // Minus infinity is behind everybody.
                let missing = self.job.reference.rows().saturating_sub(start)..BLOCK;
                let own = own.and_then(|row| row.checked_sub(start)).filter(|at| *at < BLOCK);
                for at in missing.chain(own) {
                    buffers.bounds.low[at] = f32::NEG_INFINITY;
                    buffers.bounds.high[at] = f32::NEG_INFINITY;
                }
                let any = count(
                    self.job.options.simd,
                    &buffers.bounds,
                    &counted.limits,
                    &mut counted.before,
                    &mut buffers.open,
                );
                if !any {
                    continue;
                }
                for at in 0..keys.len() {
                    if std::mem::take(&mut buffers.open[at]) && exists(start + at) {
                        let (low, high) = (buffers.bounds.low[at], buffers.bounds.high[at]);
                        counted.open.push(Open { row: (start + at) as u32, low, high });
                    }
                }
            }
            if counted.open.len() >= MANY_OPEN {
                self.decide(&prepared[first + m], counted, &mut buffers.scratch);
            }
        }
        Ok(())
    }

    /// Count the open rows of a query by their values.
    fn decide(&self, query: &Prepared, counted: &mut Counted, scratch: &mut Scratch<E>) {
        let job = self.job;
        scratch.rows.clear();
        scratch.rows.extend(counted.open.iter().map(|open| open.row));
        job.score(query, scratch);
        job.monitor.tally(scratch.rows.len() as u64, 0);
        for (open, &value) in counted.open.drain(..).zip(&scratch.values) {
            let reference = job.neighbour(value, open.row);
            for ((target, limits), before) in counted.targets.iter().zip(&counted.limits).zip(&mut counted.before) {
                *before += u32::from(limits.leave_open(open.low, open.high) & (reference < *target));
            }
        }
    }
}

multiversion! {
    /// The bounds of up to [`BLOCK`] keys, one error for each [`SAME_ERROR`] of them; minus infinity where there is no key.
    ///
    /// Rounding cannot turn a comparison with a float32 number that was right before it.
    fn bounds(keys: &[f32], errors: &[f32], bounds: &mut Bounds) {
        let (lows, _) = bounds.low.as_chunks_mut::<SAME_ERROR>();
        let (highs, _) = bounds.high.as_chunks_mut::<SAME_ERROR>();
        let (keys, _) = keys.as_chunks::<SAME_ERROR>();
        for ((low, high), (keys, error)) in lows.iter_mut().zip(highs.iter_mut()).zip(keys.iter().zip(errors)) {
            for n in 0..SAME_ERROR {
                low[n] = keys[n] - error;
                high[n] = keys[n] + error;
            }
        }
        let filled = keys.len();
        for rest in [&mut lows[filled..], &mut highs[filled..]] {
            rest.fill([f32::NEG_INFINITY; SAME_ERROR]);
        }
    }
}

multiversion! {
    /// Add to `before` the rows that are surely before each target, and mark those that some target leaves open; whether
    /// there are any.
    fn count(bounds: &Bounds, limits: &[Limits], before: &mut [u32], open: &mut [bool; BLOCK]) -> bool {
        let mut any = false;
        for (limits, before) in limits.iter().zip(before) {
            let (mut sure, mut undecided) = (0u32, 0u32);
            for i in 0..BLOCK {
                sure += u32::from(bounds.low[i] > limits.before);
                undecided += u32::from(limits.leave_open(bounds.low[i], bounds.high[i]));
            }
            *before += sure;
            if undecided > 0 {
                any = true;
                for i in 0..BLOCK {
                    open[i] |= limits.leave_open(bounds.low[i], bounds.high[i]);
                }
            }
        }
        any
    }
}
