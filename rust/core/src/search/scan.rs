//! The loop nest of every search.
//!
//! ```text
//! for each chunk of queries x split of the references                in parallel; one Collector each
//!     for each block of units that stays in cache
//!         for each group of queries
//!             Engine::scan ──keys that may reach reject_below──> candidates
//!                 less padding, the query's own row and the lower triangle         excluded from candidates only here
//!             Collector::triage ──> decided by their keys │ undecided
//!             undecided ──float64 values──> Collector::take ──> reject_below rises
//! merge the splits of a chunk ──> Question::finish
//! ```
//!
//! The first queries probe the filter: if it rejects too few rows, the remaining queries step down to the next one. The
//! filter affects the time of a search, never its result.

use std::ops::Range;

use super::Context;
use super::engine::{Engine, Scanner, check_bad_rows, scanner};
use super::plan::{Plan, Problem};
use crate::arch::kernel::{CandidateLists, SAMPLE_STRIDE, Visit};
use crate::error::Result;
use crate::exact::lanes::ROWS;
use crate::exact::{Prepared, Widened};
use crate::filter::Filter;
use crate::filter::bound::KeyMap;
use crate::filter::panels::KeyErrors;
use crate::runtime::alloc::{try_collect, try_extend, try_map_parallel, try_reserve, try_vec};

/// The purposes of buffers in [`crate::Error::OutOfMemory`].
const TASKS: &str = "the tasks of a search";
pub(super) const CANDIDATES: &str = "candidates";

/// Rows that a filter has not rejected, in ascending order.
pub(crate) struct Candidates<'a> {
    pub(crate) rows: &'a [u32],
    /// One key per row; meaningless if `errors` is `None`.
    pub(crate) keys: &'a [f32],
    /// Error bounds of the keys; `None` for engines without keys.
    pub(crate) errors: Option<KeyErrors<'a>>,
}

/// The results of a chunk of queries while the references are scanned. Queries are numbered within the chunk.
pub(crate) trait Collector: Send {
    /// The floor of a query: rows whose exact key is below it are rejected. Kernels compare computed keys with this floor
    /// less their error. It never falls, so a row that was rejected once would be rejected again.
    fn reject_below(&self, query: usize) -> f32;

    /// Whether [`Collector::reject_below`] rises as values are taken. Then the first runs are short.
    fn rises(&self) -> bool {
        false
    }

    /// Whether most candidates need their float64 value: then their rows are prefetched.
    fn scores_candidates(&self) -> bool {
        true
    }

    /// Decide candidates by their keys where that is possible; append those that need their float64 value to `undecided`.
    fn triage(&mut self, _query: usize, candidates: Candidates<'_>, undecided: &mut Vec<u32>) -> Result<()> {
        try_extend(undecided, candidates.rows, CANDIDATES)
    }

    /// Append the rows that [`Collector::triage`] has deferred; called once per query at the end of a visit.
    fn flush(&mut self, _query: usize, _undecided: &mut Vec<u32>) -> Result<()> {
        Ok(())
    }

    /// Take the float64 values of undecided rows. Returns the number of false positives: rows that a sharper filter would
    /// have rejected.
    fn take(&mut self, query: usize, rows: &[u32], values: &[f64]) -> Result<u64>;

    /// Add the results of the same queries in another split.
    fn merge(&mut self, other: Self) -> Result<()>
    where
        Self: Sized;
}

/// What a search computes for every query: k nearest neighbours, rows within a radius, ranks.
pub(crate) trait Question: Sync {
    type Collector: Collector;
    /// Output buffers that are allocated before the search; `()` if the size of the results is unknown.
    type Place: Send;
    /// Results of a chunk that have no place in these buffers.
    type Answer: Send;

    /// The plan for some of the queries.
    fn plan(&self, problem: &Problem, _queries: &[u32], filter: Filter) -> Plan {
        Plan::new(problem, filter)
    }

    /// Split the output: the part of the queries `first`, and the rest.
    fn split(&self, place: Self::Place, first: &[u32]) -> (Self::Place, Self::Place);

    /// An empty collector for a pass.
    fn collector(&self, pass: &Pass<'_>) -> Result<Self::Collector>;

    /// Scan all references of a pass.
    fn scan(&self, pass: &mut Pass<'_>, collector: &mut Self::Collector) -> Result<()> {
        pass.visit(Visit::All, collector)
    }

    /// Answer `queries` by symmetric tiles. Returns the output unchanged if that is impossible or does not pay.
    fn scan_symmetric(
        &self,
        _scanner: &dyn Scanner,
        _queries: &[u32],
        place: Self::Place,
    ) -> Result<Option<Self::Place>> {
        Ok(Some(place))
    }

    /// The results of a chunk, from its merged collector.
    fn finish(&self, queries: &[u32], collector: Self::Collector, place: Self::Place) -> Result<Self::Answer>;
}

/// Answer `question` for `queries`, starting with `filter`. The chunks' answers are in the order of the queries.
pub(crate) fn run<Q: Question>(
    context: &Context<'_>,
    question: &Q,
    queries: &[u32],
    place: Q::Place,
    mut filter: Filter,
) -> Result<Vec<Q::Answer>> {
    let (mut answers, mut queries, mut place) = (Vec::new(), queries, place);
    loop {
        context.monitor.set_filter(filter as u8);
        let scanner = scanner(context, filter)?;
        let nest = Nest { context, question, scanner: &*scanner, filter };
        let problem = Problem { queries: queries.len(), ..context.problem };
        let probe = if filter.is_packed() { problem.probe() } else { 0 };
        if probe > 0 {
            // The probed queries keep their results whatever the outcome: each query is searched by one filter throughout.
            let (first, rest) = queries.split_at(probe);
            let (here, there) = question.split(place, first);
            (queries, place) = (rest, there);
            let before = context.monitor.rescored();
            nest.chunks(first, here, &mut answers)?;
            let after = context.monitor.rescored();
            let pairs = first.len() as f64 * problem.references as f64;
            let share = |before: u64, after: u64| (after - before) as f64 / pairs;
            let next =
                problem.next_filter(context.simd.level(), filter, share(before.0, after.0), share(before.1, after.1));
            if next != filter {
                // Probe again: float32 may not pay either.
                filter = next;
                continue;
            }
        }
        if let Some(place) = question.scan_symmetric(&*scanner, queries, place)? {
            let outcome = nest.chunks(queries, place, &mut answers);
            check_bad_rows(context, &*scanner, outcome)?;
        }
        return Ok(answers);
    }
}

/// A question and the filter that searches for it.
struct Nest<'a, Q> {
    context: &'a Context<'a>,
    question: &'a Q,
    scanner: &'a dyn Scanner,
    filter: Filter,
}

impl<Q: Question> Nest<'_, Q> {
    /// Answer `queries` in chunks, in parallel over chunks and splits of the references.
    fn chunks(&self, queries: &[u32], place: Q::Place, answers: &mut Vec<Q::Answer>) -> Result<()> {
        if queries.is_empty() {
            return Ok(());
        }
        let problem = Problem { queries: queries.len(), ..self.context.problem };
        let plan = self.question.plan(&problem, queries, self.filter);
        let mut chunks = try_vec(queries.len().div_ceil(plan.chunk), TASKS)?;
        let mut rest = Some(place);
        for chunk in queries.chunks(plan.chunk) {
            let Some(place) = rest.take() else { break };
            let (here, there) = self.question.split(place, chunk);
            rest = Some(there);
            chunks.push((chunk, here));
        }
        if plan.splits == 1 && problem.threads == 1 {
            // No rayon call: a small search runs on the caller's thread, which is not a worker of our pool.
            try_reserve(answers, chunks.len(), TASKS)?;
            for (queries, place) in chunks {
                answers.push(self.question.finish(queries, self.scan(queries, plan, 0)?, place)?);
            }
            return Ok(());
        }
        let chunk = |(queries, place): (&[u32], Q::Place)| {
            let splits = try_collect(0..plan.splits, TASKS)?;
            let mut splits = try_map_parallel(splits, TASKS, |split| self.scan(queries, plan, split))?.into_iter();
            // Any order of merging gives the same bytes: neighbours are totally ordered, lists are sorted, counts are sums.
            let Some(mut whole) = splits.next() else { unreachable!("a plan has at least one split") };
            splits.try_for_each(|split| whole.merge(split))?;
            self.question.finish(queries, whole, place)
        };
        let found = try_map_parallel(chunks, TASKS, chunk)?;
        try_reserve(answers, found.len(), TASKS)?;
        answers.extend(found);
        Ok(())
    }

    /// The results of a chunk in one split.
    fn scan(&self, queries: &[u32], plan: Plan, split: usize) -> Result<Q::Collector> {
        // Splits end at units: no panel is scanned twice. `context.rows` may start and end within a unit.
        let (rows, unit) = (&self.context.rows, self.scanner.unit_rows());
        let units = plan.split(rows.start / unit..rows.end.div_ceil(unit), split);
        let rows = (units.start * unit).max(rows.start)..(units.end * unit).min(rows.end);
        let mut pass = Pass::new(self.context, self.scanner, queries, rows)?;
        let mut collector = self.question.collector(&pass)?;
        self.question.scan(&mut pass, &mut collector)?;
        Ok(collector)
    }
}

/// A chunk of queries, prepared and packed, and the references of one split.
pub(crate) struct Pass<'a> {
    context: &'a Context<'a>,
    scanner: &'a dyn Scanner,
    engine: Box<dyn Engine + 'a>,
    queries: Vec<u32>,
    prepared: Vec<Prepared>,
    /// The references of the split.
    rows: Range<usize>,
    // Buffers, allocated once per pass and reused for every query.
    candidates: CandidateLists,
    undecided: Vec<u32>,
    values: Vec<f64>,
    wide: Widened,
    /// Pairs rescored, and the false positives among them. Summed here: the monitor's counters are shared by all threads.
    rescored: (u64, u64),
}

impl<'a> Pass<'a> {
    /// Prepare `queries` for a scan of the references `rows`.
    pub(crate) fn new(
        context: &'a Context<'a>,
        scanner: &'a dyn Scanner,
        queries: &[u32],
        rows: Range<usize>,
    ) -> Result<Self> {
        let mut prepared = try_vec(queries.len(), "prepared queries")?;
        let mut scratch = context.query.scratch()?;
        for &query in queries {
            prepared.push(context.query.prepare(context.metric, query as usize, &mut scratch)?);
        }
        let engine = scanner.engine(queries, &prepared)?;
        if let Some(bad) = scanner.bad_rows() {
            // Without panels, rows are checked where they are scored, and a query's own row is never scored. In a chunk of
            // one query no other query scores it either.
            let own = queries.iter().filter_map(|&query| context.own_row(query));
            own.filter(|&row| !context.source.rows.is_finite(row)).for_each(|row| bad.report(row));
        }
        let (candidates, wide) = (engine.lists()?, Widened::new());
        let (queries, undecided, values) =
            (try_collect(queries.iter().copied(), "prepared queries")?, Vec::new(), Vec::new());
        Ok(Self {
            context,
            scanner,
            engine,
            queries,
            prepared,
            rows,
            candidates,
            undecided,
            values,
            wide,
            rescored: (0, 0),
        })
    }

    /// A new pass of some of the queries, numbered as in this pass, over the same references.
    pub(crate) fn again(&self, queries: &[usize]) -> Result<Self> {
        let queries = try_collect(queries.iter().map(|&i| self.queries[i]), "prepared queries")?;
        Self::new(self.context, self.scanner, &queries, self.rows.clone())
    }

    /// The queries, numbered as in the search.
    pub(crate) fn queries(&self) -> &[u32] {
        &self.queries
    }

    /// The queries, widened and normalised for float64 values.
    pub(crate) fn prepared(&self) -> &[Prepared] {
        &self.prepared
    }

    /// Number of references of the split.
    pub(crate) fn references(&self) -> usize {
        self.rows.len()
    }

    /// The relation of a query's keys to its values; `None` for engines without keys.
    pub(crate) fn key_map(&self, query: usize) -> Option<KeyMap> {
        self.engine.key_map(query)
    }

    /// Whether references are packed. Only panels can be sampled.
    pub(crate) fn is_packed(&self) -> bool {
        self.scanner.unit_rows() > 1
    }

    /// Scan the references of the split.
    pub(crate) fn visit(&mut self, visit: Visit, collector: &mut dyn Collector) -> Result<()> {
        self.walk(self.rows.clone(), visit, None, collector)
    }

    /// Scan the references `rows` instead of those of the split.
    pub(crate) fn visit_rows(&mut self, rows: Range<usize>, collector: &mut dyn Collector) -> Result<()> {
        self.walk(rows, Visit::All, None, collector)
    }

    /// Scan the references `rows`, which are queries too. A pair is also a candidate if its key may reach the floor of the
    /// reference as a query; `theirs` has one floor per row of each unit.
    pub(crate) fn visit_pairs(
        &mut self,
        rows: Range<usize>,
        theirs: &[f32],
        collector: &mut dyn Collector,
    ) -> Result<()> {
        self.walk(rows, Visit::All, Some(theirs), collector)
    }

    /// The loop nest: blocks of units, groups of queries, runs of units.
    ///
    /// Blocks are outermost: the units of a block stay in cache while all groups scan them. Within a block, a group's panel
    /// of queries stays in the first-level cache.
    fn walk(
        &mut self,
        rows: Range<usize>,
        visit: Visit,
        theirs: Option<&[f32]>,
        collector: &mut dyn Collector,
    ) -> Result<()> {
        let unit = self.scanner.unit_rows();
        // A sample visits one panel in `SAMPLE_STRIDE`: that many times longer runs fit the lists of candidates.
        let scale = if visit == Visit::Sample { SAMPLE_STRIDE } else { 1 };
        let mut units = if rows.is_empty() { 0..0 } else { rows.start / unit..rows.end.div_ceil(unit) };
        if self.context.upper_triangle {
            // Queries ascend, so no query of the chunk has a pair with rows before the first.
            let first = self.queries.first().map_or(0, |query| *query as usize / unit).clamp(units.start, units.end);
            self.advance(units.start..first, visit, &rows);
            units.start = first;
        }
        let (all, most) = (units.clone(), self.engine.block_units().saturating_mul(scale));
        let blocks = units.len().div_ceil(most);
        let mut floors = Vec::with_capacity(self.engine.lanes());
        for block in 0..blocks {
            // Blocks of equal size: a last block of a few units would pay for all groups of queries, but scan little.
            let start = all.start + all.len() * block / blocks;
            let end = all.start + all.len() * (block + 1) / blocks;
            for first in (0..self.queries.len()).step_by(self.engine.lanes()) {
                self.context.monitor.check()?;
                let lanes = first..(first + self.engine.lanes()).min(self.queries.len());
                // Until a query has k candidates it rejects nothing. Short runs first: a whole block of candidates would be
                // rescored to find thresholds that a few panels give.
                let is_cold =
                    collector.rises() && lanes.clone().any(|i| collector.reject_below(i) == f32::NEG_INFINITY);
                let mut step = if is_cold { self.engine.warm_up_units().saturating_mul(scale) } else { end - start };
                let mut at = start;
                while at < end {
                    let until = at.saturating_add(step).min(end);
                    step = step.saturating_mul(2);
                    // Read once per run: floors move little within a run, and a stale floor is only lower.
                    floors.clear();
                    floors.extend(lanes.clone().map(|i| collector.reject_below(i)));
                    let theirs = theirs.map(|theirs| &theirs[(at - all.start) * unit..]);
                    self.engine.scan(first, at..until, visit, &floors, theirs, &mut self.candidates)?;
                    self.collect(lanes.clone(), &rows, collector)?;
                    at = until;
                }
            }
            self.advance(start..end, visit, &rows);
        }
        // Rows deferred by a collector are rescored in batches across blocks; these are the last, incomplete ones.
        for query in 0..self.queries.len() {
            self.undecided.clear();
            collector.flush(query, &mut self.undecided)?;
            self.score(query, collector)?;
        }
        let (rescored, false_positives) = std::mem::take(&mut self.rescored);
        self.context.monitor.count_rescored(rescored, false_positives);
        Ok(())
    }

    /// Add the pairs of all queries with the rows of `units` to the progress.
    fn advance(&self, units: Range<usize>, visit: Visit, rows: &Range<usize>) {
        let unit = self.scanner.unit_rows();
        let mut count = (units.end * unit).min(rows.end).saturating_sub((units.start * unit).max(rows.start));
        if visit != Visit::All {
            count = (units.filter(|unit| !visit.skips(*unit)).count() * unit).min(count);
        }
        self.context.monitor.advance(count as u64 * self.queries.len() as u64);
    }

    /// Pass the candidates of a group of queries to the collector.
    fn collect(&mut self, lanes: Range<usize>, rows: &Range<usize>, collector: &mut dyn Collector) -> Result<()> {
        for lane in 0..self.engine.lanes() {
            let query = lanes.start + lane;
            if query >= lanes.end {
                // A lane without a query has the threshold infinity, but still reports NaN keys.
                self.candidates.clear(lane);
                continue;
            }
            self.exclude(lane, self.queries[query], rows);
            if collector.scores_candidates() && query + 1 < lanes.end {
                // Candidates are scattered over the references, so the hardware prefetcher misses them: prefetch those of the
                // next lane while this one's are scored. Candidates ascend, so padding rows, which do not exist, come last.
                let next = self.candidates.rows(lane + 1);
                let exist = next.iter().take(ROWS).take_while(|row| (**row as usize) < rows.end).count();
                self.context.source.rows.prefetch(&next[..exist]);
            }
            let (found, keys) = self.candidates.list(lane);
            if found.is_empty() {
                continue;
            }
            self.undecided.clear();
            let errors = self.engine.errors(query);
            collector.triage(query, Candidates { rows: found, keys, errors }, &mut self.undecided)?;
            self.candidates.clear(lane);
            self.score(query, collector)?;
        }
        Ok(())
    }

    /// Drop the candidates that are excluded for a query: rows outside `rows`, which pad a unit or belong to another pass;
    /// the query's own row; the rows before it, if only the upper triangle is searched.
    ///
    /// Candidates ascend, since kernels report panel by panel and lane by lane. So the first and the last one decide whether
    /// anything is excluded at all; usually nothing is.
    #[inline(always)]
    fn exclude(&mut self, lane: usize, query: u32, rows: &Range<usize>) {
        let list = self.candidates.rows(lane);
        let (Some(&first), Some(&last)) = (list.first(), list.last()) else { return };
        // `u32::MAX` is a sentinel: matrices have fewer rows, padding included.
        let own = self.context.own_row(query).map_or(u32::MAX, |row| row as u32);
        let start = if self.context.upper_triangle { rows.start.max(query as usize) } else { rows.start };
        let (start, end) = (start as u32, rows.end as u32);
        if first < start || last >= end || (first..=last).contains(&own) {
            self.candidates.restrict(lane, start..end, own);
        }
    }

    /// Compute the float64 values of a query's undecided rows and pass them to the collector.
    fn score(&mut self, query: usize, collector: &mut dyn Collector) -> Result<()> {
        if self.undecided.is_empty() {
            return Ok(());
        }
        let source = &self.context.source;
        source.verify_each(&self.undecided)?;
        let (rows, values) = (&mut self.undecided, &mut self.values);
        source.rows.score(self.context.simd, &self.prepared[query], rows, &mut self.wide, values)?;
        let rescored = rows.len() as u64;
        if let Some(bad) = self.scanner.bad_rows()
            && values.iter().any(|value| !value.is_finite())
        {
            let mut finite = 0;
            for at in 0..rows.len() {
                // A finite row may have an infinite value, by overflow: it is ranked like any other. Only a row that is not
                // finite is dropped, and the search goes on, so that the first such row is reported.
                if values[at].is_finite() || source.rows.is_finite(rows[at] as usize) {
                    (rows[finite], values[finite]) = (rows[at], values[at]);
                    finite += 1;
                } else {
                    bad.report(rows[at] as usize);
                }
            }
            rows.truncate(finite);
            values.truncate(finite);
        }
        let false_positives = collector.take(query, rows, values)?;
        self.rescored.0 += rescored;
        self.rescored.1 += false_positives;
        Ok(())
    }
}
