//! The ranks of target rows among all references, without sorting the references.
//!
//! ```text
//! groups ──> targets of each query ──float64 values──> sorted by (value, row)
//! scan, all keys ──rank_counts.rs──> for each target: surely before │ surely behind │ undecided
//!                  undecided ──float64 value──> compared with the targets
//! no filter: every reference ──float64 value──> binary search among the targets
//! for each query: sum over its splits ──> rank = 1 + nearer targets + other references before the target
//! ```
//!
//! Targets and the query's own row are excluded while references are counted: the order of the targets is known.
//!
//! The limits of a target are those of two searches by radius, with the edge just before its value and just behind it: see
//! `docs/exactness.md`, "Ranks". Memory is a few numbers per target and query of the running tasks.

use std::ops::Range;

use super::groups::Groups;
use super::knn::numbered_from;
use super::plan::{self, Plan, Problem};
use super::rank_counts::{BLOCK, Bounds, Errors, Limits, bound, fill_errors, largest, largest_error, position};
use super::references::{References, Source};
use super::scan::{self, Candidates, Collector, Pass, Question};
use super::{Context, Execution, SelfRule, check_finite, check_sizes};
use crate::arch::level::Simd;
use crate::error::{Error, Result};
use crate::exact::rows::Rows;
use crate::exact::{Prepared, Widened};
use crate::filter::Filter;
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::order::{Neighbour, Ranking};
use crate::runtime::Monitor;
use crate::runtime::alloc::{try_reserve, try_vec, try_zeroed};

/// Options of a search for ranks.
#[derive(Debug, Clone, Copy)]
pub struct RankOptions<'a> {
    /// The distance or similarity.
    pub metric: Metric,
    /// Which reference row is the query itself: it gets no rank and is not counted.
    pub exclude: SelfRule<'a>,
    /// The SIMD level.
    pub simd: Simd,
    /// Threads that the search may use.
    pub threads: std::num::NonZero<usize>,
}

/// The ranks of each query's targets, in CSR form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks {
    /// The row pointer: the ranks of query `i` are `starts[i] .. starts[i + 1]` of `ranks`. Queries + 1 entries.
    pub starts: Vec<i64>,
    /// 1-based ranks, ascending within a query.
    pub ranks: Vec<i64>,
}

/// A search for ranks whose arguments have been checked.
#[derive(Clone, Copy)]
pub struct RankSearch<'a, E> {
    query: MatrixRef<'a, E>,
    reference: References<'a, E>,
    groups: Groups<'a>,
    options: RankOptions<'a>,
}

impl<'a, E: Element> RankSearch<'a, E> {
    /// Check all arguments, but not the elements of the rows.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::BadArray`], and if self is excluded [`Error::ReferenceLacksQueries`] and
    /// [`Error::QueriesOutsideReference`].
    pub fn new(
        query: MatrixRef<'a, E>,
        reference: impl Into<References<'a, E>>,
        groups: Groups<'a>,
        options: RankOptions<'a>,
    ) -> Result<Self> {
        let reference = reference.into();
        options.check(&query, reference.rows().dim(), reference.rows().rows(), &groups)?;
        Ok(Self { query, reference, groups, options })
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
    pub fn run(&self, monitor: &Monitor) -> Result<Ranks> {
        let execution = self.execution();
        let problem = Problem { threads: execution.threads(), ..self.problem() };
        execution.run(|| search(&self.query, &[self.reference.source()], &self.groups, self.options, problem, monitor))
    }
}

impl RankOptions<'_> {
    /// Check the groups, and the sizes of queries and references.
    ///
    /// # Errors
    /// As for [`check_sizes`] and [`Groups::check`].
    pub(crate) fn check(&self, query: &dyn Rows, dim: usize, references: usize, groups: &Groups<'_>) -> Result<()> {
        check_sizes(query, dim, references, self.exclude)?;
        groups.check(query.rows(), references)
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
}

/// The purpose of the results in [`Error::OutOfMemory`].
const RANKS: &str = "the ranks";

/// The ranks of each query's targets among consecutive `sources`. Sizes have been checked.
pub(crate) fn search(
    query: &dyn Rows,
    sources: &[Source<'_>],
    groups: &Groups<'_>,
    options: RankOptions<'_>,
    problem: Problem,
    monitor: &Monitor,
) -> Result<Ranks> {
    check_finite(query)?;
    let queries = query.rows();
    let mut targets =
        Targets { groups, exclude: options.exclude, starts: try_vec(queries + 1, RANKS)?, sources, simd: options.simd };
    // Queries that have targets.
    let mut active: Vec<u32> = try_vec(queries, RANKS)?;
    let mut total = 0;
    targets.starts.push(0);
    for query in 0..queries {
        let count = targets.of(query as u32).count();
        total += count;
        targets.starts.push(total as i64);
        if count > 0 {
            active.push(query as u32);
        }
    }
    let mut ranks = try_zeroed::<i64>(total, RANKS)?;
    let problem = Problem { queries: active.len(), ..problem };
    let mut first_reference = 0;
    if total > 0 {
        monitor.begin(problem.pairs());
        for places in targets.starts.windows(2) {
            let ranks = &mut ranks[places[0] as usize..places[1] as usize];
            (1..).zip(ranks).for_each(|(nearer, rank)| *rank = nearer);
        }
    }
    for source in sources {
        let level = options.simd.level();
        let problem = Problem { references: source.rows.rows(), packed: source.packed, ..problem };
        let filter = problem.rank_filter(level);
        if total == 0 || !filter.is_packed() {
            // Targets are excluded from the scan, so a scan without a filter may not score every row.
            source.check_finite(problem.threads, monitor).map_err(numbered_from(first_reference))?;
        }
        if total > 0 && problem.references > 0 {
            let precision = source.rows.precision();
            let context = Context {
                query,
                source: *source,
                first_reference,
                rows: 0..source.rows.rows(),
                metric: options.metric,
                ranking: Ranking::new(options.metric, precision),
                exclude: options.exclude,
                upper_triangle: false,
                simd: options.simd,
                problem,
                monitor,
            };
            let question = RankQuestion { context: &context, targets: &targets };
            scan::run(&context, &question, &active, &mut ranks[..], filter).map_err(numbered_from(first_reference))?;
        }
        first_reference += source.rows.rows();
    }
    Ok(Ranks { starts: targets.starts, ranks })
}

/// The targets of all queries.
struct Targets<'a> {
    groups: &'a Groups<'a>,
    exclude: SelfRule<'a>,
    /// The row pointer of the ranks.
    starts: Vec<i64>,
    sources: &'a [Source<'a>],
    simd: Simd,
}

impl Targets<'_> {
    /// The target rows of a query.
    fn of(&self, query: u32) -> impl Iterator<Item = usize> {
        let own = self.exclude.own_row(query as usize);
        self.groups.of(query as usize).iter().map(|row| *row as usize).filter(move |row| Some(*row) != own)
    }

    /// The number of targets of consecutive active queries. Inactive queries between them have none.
    fn count(&self, queries: &[u32]) -> usize {
        let (Some(first), Some(last)) = (queries.first(), queries.last()) else { return 0 };
        (self.starts[*last as usize + 1] - self.starts[*first as usize]) as usize
    }

    /// The targets of a query, sorted.
    fn ranked(
        &self,
        query: u32,
        prepared: &Prepared,
        ranking: Ranking,
        buffers: &mut Buffers,
    ) -> Result<Vec<Neighbour>> {
        let mut targets = try_vec(self.of(query).count(), RANKS)?;
        let mut first = 0;
        for source in self.sources {
            let rows = first..first + source.rows.rows();
            buffers.rows.clear();
            try_reserve(&mut buffers.rows, self.of(query).count(), RANKS)?;
            let here = self.of(query).filter(|row| rows.contains(row));
            buffers.rows.extend(here.map(|row| (row - first) as u32));
            source.verify_each(&buffers.rows)?;
            source.rows.score(self.simd, prepared, &buffers.rows, &mut buffers.wide, &mut buffers.values)?;
            let values = buffers.rows.iter().zip(&buffers.values);
            targets.extend(values.map(|(&row, &value)| ranking.neighbour(value, row).offset_by(first)));
            first = rows.end;
        }
        targets.sort_unstable();
        Ok(targets)
    }
}

/// Buffers for the values of targets.
struct Buffers {
    rows: Vec<u32>,
    values: Vec<f64>,
    wide: Widened,
}

/// Ranks among the rows of one source, as a question.
struct RankQuestion<'a> {
    context: &'a Context<'a>,
    targets: &'a Targets<'a>,
}

impl<'a> Question for RankQuestion<'a> {
    type Collector = RankCollector;
    type Place = &'a mut [i64];
    type Answer = ();

    /// A target takes about three times the memory of a neighbour.
    fn plan(&self, problem: &Problem, queries: &[u32], filter: Filter) -> Plan {
        let k = 3 * self.targets.count(queries).div_ceil(queries.len());
        Plan::new(&Problem { k, ..*problem }, filter)
    }

    fn split(&self, place: &'a mut [i64], first: &[u32]) -> (&'a mut [i64], &'a mut [i64]) {
        place.split_at_mut(self.targets.count(first))
    }

    fn collector(&self, pass: &Pass<'_>) -> Result<RankCollector> {
        let Context { ranking, first_reference, simd, source, .. } = *self.context;
        let mut buffers = Buffers { rows: Vec::new(), values: Vec::new(), wide: Widened::new() };
        let mut counts = try_vec(pass.queries().len(), RANKS)?;
        let here = first_reference..first_reference + source.rows.rows();
        for (i, (&query, prepared)) in pass.queries().iter().zip(pass.prepared()).enumerate() {
            let targets = self.targets.ranked(query, prepared, ranking, &mut buffers)?;
            let before = try_zeroed(targets.len(), RANKS)?;
            let mut excluded = try_vec(targets.len(), RANKS)?;
            let rows = targets.iter().map(|target| target.row() as usize).filter(|row| here.contains(row));
            excluded.extend(rows.map(|row| (row - first_reference) as u32));
            excluded.sort_unstable();
            // The edges account for rounding, so the bound needs no margin for it.
            let edges = || targets.iter().map(|target| ranking.edges(*target));
            let limits = pass.key_map(i).map(|keys| Limits::new(&keys.bound(0.0), edges())).transpose()?;
            let excluded = Excluded { rows: excluded, passed: 0 };
            counts.push(TargetCounts { targets, before, excluded, limits, undecided: Vec::new() });
        }
        let (bounds, positions) = (Bounds::new(), Vec::new());
        Ok(RankCollector { ranking, first_reference, simd, counts, errors: Errors::default(), bounds, positions })
    }

    fn finish(&self, _: &[u32], mut collector: RankCollector, mut ranks: &'a mut [i64]) -> Result<()> {
        for counted in &mut collector.counts {
            if counted.counts_once() {
                counted.add_up();
            }
            let part;
            (part, ranks) = ranks.split_at_mut(counted.before.len());
            for (rank, before) in part.iter_mut().zip(&counted.before) {
                *rank += i64::from(*before);
            }
        }
        Ok(())
    }
}

/// A reference row that is neither surely before nor surely behind some target, with the bounds of its key.
struct Undecided {
    row: u32,
    low: f32,
    high: f32,
}

/// The targets of one query, and the references before each.
struct TargetCounts {
    /// Sorted.
    targets: Vec<Neighbour>,
    /// References before each target, other targets excluded; if [`TargetCounts::counts_once`], differences of these counts
    /// until [`TargetCounts::add_up`].
    before: Vec<u32>,
    /// The target rows in this source.
    excluded: Excluded,
    /// Limits of the keys for each target; `None` if there are no keys.
    limits: Option<Limits>,
    /// Rows that wait for their float64 value.
    undecided: Vec<Undecided>,
}

/// Rows to exclude from ascending candidates.
struct Excluded {
    /// Ascending.
    rows: Vec<u32>,
    /// Rows before the candidates seen so far: candidates ascend, so these are not searched again.
    passed: usize,
}

impl Excluded {
    /// The rows in `range`, which starts behind all earlier ranges.
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

impl TargetCounts {
    /// Whether a row is counted only at the first target that it comes before, instead of at each.
    fn counts_once(&self) -> bool {
        self.limits.as_ref().is_none_or(Limits::counts_once)
    }

    /// Count a reference at the first target that it comes before.
    #[inline(always)]
    fn count_at_first(&mut self, reference: Neighbour) {
        // By value first, which is one comparison; by row only among equal values.
        let mut at = self.targets.partition_point(|target| reference.is_behind(*target));
        if self.targets.get(at).is_some_and(|target| !target.is_behind(reference)) {
            at += self.targets[at..].partition_point(|target| *target < reference);
        }
        if let Some(before) = self.before.get_mut(at) {
            *before += 1;
        }
    }

    /// Turn differences into counts: a row before one target is before all targets behind it.
    fn add_up(&mut self) {
        let mut sum = 0;
        for before in &mut self.before {
            sum += *before;
            *before = sum;
        }
    }
}

/// Counts the references before each target of each query of a chunk.
struct RankCollector {
    ranking: Ranking,
    first_reference: usize,
    simd: Simd,
    counts: Vec<TargetCounts>,
    // Buffers, reused for every query.
    errors: Errors,
    bounds: Bounds,
    /// Positions of undecided rows in a block.
    positions: Vec<u32>,
}

impl Collector for RankCollector {
    /// No row is rejected: every key is counted.
    fn reject_below(&self, _: usize) -> f32 {
        f32::NEG_INFINITY
    }

    /// Every row is a candidate, and nearly all are decided by their keys.
    fn scores_candidates(&self) -> bool {
        false
    }

    fn triage(&mut self, query: usize, candidates: Candidates<'_>, undecided: &mut Vec<u32>) -> Result<()> {
        let Self { simd, counts, errors, bounds, positions, .. } = self;
        let counted = &mut counts[query];
        let (Some(key_errors), Some(limits)) = (candidates.errors, &counted.limits) else {
            try_reserve(undecided, candidates.rows.len(), RANKS)?;
            undecided.extend(candidates.rows.iter().filter(|row| !counted.excluded.contains(**row)));
            return Ok(());
        };
        let rows = candidates.rows;
        if let (Some(first), Some(last)) = (rows.first(), rows.last())
            && (last - first) as usize > rows.len()
        {
            // A missing row would go uncounted.
            return Err(Error::Panic("a kernel has left out keys".into()));
        }
        let error = largest_error(rows, key_errors);
        for (rows, keys) in rows.chunks(BLOCK).zip(candidates.keys.chunks(BLOCK)) {
            if limits.are_behind_all(largest(*simd, keys) + error) {
                continue;
            }
            fill_errors(rows, key_errors, errors);
            bound(*simd, keys, errors, bounds);
            for &row in counted.excluded.pass(rows[0] as usize..rows[rows.len() - 1] as usize + 1) {
                bounds.exclude(position(rows, row));
            }
            limits.count(*simd, bounds, &mut counted.before, positions);
            try_reserve(&mut counted.undecided, positions.len(), RANKS)?;
            for at in positions.drain(..) {
                let at = at as usize;
                // If a target has no finite limit, padding and excluded rows are undecided too.
                if at < rows.len() && !counted.excluded.contains(rows[at]) {
                    counted.undecided.push(Undecided { row: rows[at], low: bounds.low[at], high: bounds.high[at] });
                }
            }
        }
        if counted.undecided.len() >= plan::RANK_BATCH {
            try_reserve(undecided, counted.undecided.len(), RANKS)?;
            undecided.extend(counted.undecided.iter().map(|undecided| undecided.row));
        }
        Ok(())
    }

    fn flush(&mut self, query: usize, undecided: &mut Vec<u32>) -> Result<()> {
        let left = &self.counts[query].undecided;
        try_reserve(undecided, left.len(), RANKS)?;
        undecided.extend(left.iter().map(|undecided| undecided.row));
        Ok(())
    }

    fn take(&mut self, query: usize, rows: &[u32], values: &[f64]) -> Result<u64> {
        let (ranking, first_reference) = (self.ranking, self.first_reference);
        let counted = &mut self.counts[query];
        let reference = |row: u32, value: f64| ranking.neighbour(value, row).offset_by(first_reference);
        if counted.counts_once() {
            counted.undecided.clear();
            for (&row, &value) in rows.iter().zip(values) {
                counted.count_at_first(reference(row, value));
            }
        } else if let Some(limits) = &counted.limits {
            for (bounds, (&row, &value)) in counted.undecided.drain(..).zip(rows.iter().zip(values)) {
                let reference = reference(row, value);
                // The targets that its key decides have counted it already.
                for (t, (target, before)) in counted.targets.iter().zip(&mut counted.before).enumerate() {
                    *before += u32::from(limits.leave_undecided(t, bounds.low, bounds.high) & (reference < *target));
                }
            }
        }
        // All count as false positives: float32 keys leave far fewer rows undecided than 8-bit keys.
        Ok(rows.len() as u64)
    }

    fn merge(&mut self, other: Self) -> Result<()> {
        for (counted, more) in self.counts.iter_mut().zip(&other.counts) {
            for (before, more) in counted.before.iter_mut().zip(&more.before) {
                *before += more;
            }
        }
        Ok(())
    }
}
