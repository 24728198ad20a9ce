//! The loop nest of every search.
//!
//! ```text
//! for each chunk of queries x split of the references                in parallel; one Collector each
//!     for each block of units that stays in cache
//!         for each group of queries
//!             Engine::scan ──keys that may reach reject_below──> candidates
//!                 minus padding, the query itself, rows of the other triangle      here, and nowhere else
//!             Collector::triage ──what keys alone decide │ undecided
//!             undecided ──float64 values──> Collector::take ──> reject_below rises
//! merge the splits of a chunk ──> Question::finish
//! ```
//!
//! The first queries try a filter: where it rejects too little, the rest goes on with the next one down. A filter changes the
//! time of a search, never its answer.

use std::ops::Range;

use rayon::prelude::*;

use super::Context;
use super::engine::{Engine, Scanner, check_rows, scanner};
use super::plan::{Plan, Problem};
use crate::arch::kernel::{CandidateLists, SAMPLE_STRIDE, Visit};
use crate::error::Result;
use crate::exact::lanes::ROWS;
use crate::exact::{Prepared, Widened};
use crate::filter::Filter;
use crate::filter::bound::KeyMap;
use crate::filter::panels::KeyErrors;
use crate::runtime::alloc::try_vec;

/// Rows that a filter has not rejected, in ascending order.
pub(crate) struct Candidates<'a> {
    pub(crate) rows: &'a [u32],
    /// One key a row; without meaning where `errors` is `None`.
    pub(crate) keys: &'a [f32],
    /// How far the keys may be from the truth; `None` where there are none.
    pub(crate) errors: Option<KeyErrors<'a>>,
}

/// What one question does with the references that a chunk of queries meets. Queries are numbered within the chunk.
pub(crate) trait Collector: Send {
    /// Keys below it belong to rows that this query rejects. It may only rise.
    fn reject_below(&self, query: usize) -> f32;

    /// Whether [`Collector::reject_below`] rises with the rows that are taken: then the first scans are short.
    fn rises(&self) -> bool {
        false
    }

    /// Decide what keys alone can decide, and append the rows that need their float64 value to `undecided`.
    fn triage(&mut self, _query: usize, candidates: Candidates<'_>, undecided: &mut Vec<u32>) -> Result<()> {
        undecided.extend_from_slice(candidates.rows);
        Ok(())
    }

    /// Append what [`Collector::triage`] held back; called once for each query at the end.
    fn flush(&mut self, _query: usize, _undecided: &mut Vec<u32>) {}

    /// Take in float64 values. Returns how many of the rows a sharper filter would have rejected.
    fn take(&mut self, query: usize, rows: &[u32], values: &[f64]) -> Result<u64>;

    /// Take in what the same queries found in another split.
    fn merge(&mut self, other: Self) -> Result<()>
    where
        Self: Sized;
}

/// A question, asked of all queries of a search.
pub(crate) trait Question: Sync {
    type Collector: Collector;
    /// Where answers are written.
    type Place: Send;
    /// What a chunk of queries answers beside that.
    type Answer: Send;

    /// The plan for some queries.
    fn plan(&self, problem: &Problem, _queries: &[u32], filter: Filter) -> Plan {
        Plan::new(problem, filter)
    }

    /// Divide a place: that of the queries in `first`, and the rest.
    fn split(&self, place: Self::Place, first: &[u32]) -> (Self::Place, Self::Place);

    /// A collector for the queries and references of a pass.
    fn collector(&self, pass: &Pass<'_>) -> Result<Self::Collector>;

    /// Let a collector meet all references of a pass.
    fn scan(&self, pass: &mut Pass<'_>, collector: &mut Self::Collector) -> Result<()> {
        pass.visit(Visit::All, collector)
    }

    /// Answer all of `queries` in another way than chunk by chunk; gives the place back where there is none.
    fn scan_symmetric(
        &self,
        _scanner: &dyn Scanner,
        _queries: &[u32],
        place: Self::Place,
    ) -> Result<Option<Self::Place>> {
        Ok(Some(place))
    }

    /// The answer of a chunk.
    fn finish(&self, queries: &[u32], collector: Self::Collector, place: Self::Place) -> Result<Self::Answer>;
}

/// Answer `question` for `queries`, beginning with `filter`. The answers of the chunks come in the order of the queries.
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
            let (first, rest) = queries.split_at(probe);
            let (here, there) = question.split(place, first);
            (queries, place) = (rest, there);
            let before = context.monitor.rescored();
            nest.chunks(first, here, &mut answers)?;
            let after = context.monitor.rescored();
            let pairs = first.len() as f64 * problem.references as f64;
            let share = |before: u64, after: u64| (after - before) as f64 / pairs;
            let next = problem.next_filter(filter, share(before.0, after.0), share(before.1, after.1));
            if next != filter {
                filter = next;
                continue;
            }
        }
        if let Some(place) = question.scan_symmetric(&*scanner, queries, place)? {
            let outcome = nest.chunks(queries, place, &mut answers);
            check_rows(context, &*scanner, outcome)?;
        }
        return Ok(answers);
    }
}

/// A question with the filter that it is asked through.
struct Nest<'a, Q> {
    context: &'a Context<'a>,
    question: &'a Q,
    scanner: &'a dyn Scanner,
    filter: Filter,
}

impl<Q: Question> Nest<'_, Q> {
    /// Cut queries into chunks and references into splits, and answer chunk by chunk.
    fn chunks(&self, queries: &[u32], place: Q::Place, answers: &mut Vec<Q::Answer>) -> Result<()> {
        if queries.is_empty() {
            return Ok(());
        }
        let problem = Problem { queries: queries.len(), ..self.context.problem };
        let plan = self.question.plan(&problem, queries, self.filter);
        let mut chunks = try_vec(queries.len().div_ceil(plan.chunk), "the tasks of a search")?;
        let mut rest = Some(place);
        for chunk in queries.chunks(plan.chunk) {
            let Some(place) = rest.take() else { break };
            let (here, there) = self.question.split(place, chunk);
            rest = Some(there);
            chunks.push((chunk, here));
        }
        if plan.splits == 1 && problem.threads == 1 {
            // Stay on this thread: small searches do not wait for a pool.
            for (queries, place) in chunks {
                answers.push(self.question.finish(queries, self.scan(queries, plan, 0)?, place)?);
            }
            return Ok(());
        }
        let chunk = |(queries, place): (&[u32], Q::Place)| {
            let splits: Vec<Q::Collector> = (0..plan.splits)
                .into_par_iter()
                .with_max_len(1)
                .map(|split| self.scan(queries, plan, split))
                .collect::<Result<_>>()?;
            let mut splits = splits.into_iter();
            let Some(mut whole) = splits.next() else { unreachable!("a plan has at least one split") };
            splits.try_for_each(|split| whole.merge(split))?;
            self.question.finish(queries, whole, place)
        };
        let found: Vec<Q::Answer> = chunks.into_par_iter().with_max_len(1).map(chunk).collect::<Result<_>>()?;
        answers.extend(found);
        Ok(())
    }

    /// What a chunk of queries finds in one split.
    fn scan(&self, queries: &[u32], plan: Plan, split: usize) -> Result<Q::Collector> {
        let (rows, unit) = (&self.context.rows, self.scanner.unit_rows());
        let units = plan.split(rows.start / unit..rows.end.div_ceil(unit), split);
        let rows = (units.start * unit).max(rows.start)..(units.end * unit).min(rows.end);
        let mut pass = Pass::new(self.context, self.scanner, queries, rows)?;
        let mut collector = self.question.collector(&pass)?;
        self.question.scan(&mut pass, &mut collector)?;
        Ok(collector)
    }
}

/// A chunk of queries on its way through some references.
pub(crate) struct Pass<'a> {
    context: &'a Context<'a>,
    scanner: &'a dyn Scanner,
    engine: Box<dyn Engine + 'a>,
    queries: Vec<u32>,
    prepared: Vec<Prepared>,
    /// The references of the split.
    rows: Range<usize>,
    // Buffers that are filled again for each query.
    candidates: CandidateLists,
    undecided: Vec<u32>,
    values: Vec<f64>,
    wide: Widened,
    /// Rows scored, and those of them that a sharper filter would have rejected.
    rescored: (u64, u64),
}

impl<'a> Pass<'a> {
    /// Make `queries` ready to meet the references `rows`.
    pub(crate) fn new(
        context: &'a Context<'a>,
        scanner: &'a dyn Scanner,
        queries: &[u32],
        rows: Range<usize>,
    ) -> Result<Self> {
        let mut prepared = try_vec(queries.len(), "prepared queries")?;
        let mut scratch = Vec::new();
        prepared.extend(queries.iter().map(|&i| context.query.prepare(context.metric, i as usize, &mut scratch)));
        let engine = scanner.engine(queries, &prepared)?;
        if let Some(bad) = scanner.bad_rows() {
            // A query's own row is met by no other query of a chunk of one.
            let own = queries.iter().filter_map(|&query| context.own_row(query));
            own.filter(|&row| !context.source.rows.is_finite(row)).for_each(|row| bad.report(row));
        }
        let (candidates, wide) = (engine.lists(), Widened::new());
        let (queries, undecided, values) = (queries.to_vec(), Vec::new(), Vec::new());
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

    /// Some of the queries, by their numbers in this pass, before the same references.
    pub(crate) fn again(&self, queries: &[usize]) -> Result<Self> {
        let queries: Vec<u32> = queries.iter().map(|&i| self.queries[i]).collect();
        Self::new(self.context, self.scanner, &queries, self.rows.clone())
    }

    /// The queries by their numbers in the search.
    pub(crate) fn queries(&self) -> &[u32] {
        &self.queries
    }

    /// The queries as values are formed from them.
    pub(crate) fn prepared(&self) -> &[Prepared] {
        &self.prepared
    }

    /// Number of references of the split.
    pub(crate) fn references(&self) -> usize {
        self.rows.len()
    }

    /// How keys of a query relate to its values; `None` where there are no keys.
    pub(crate) fn key_map(&self, query: usize) -> Option<KeyMap> {
        self.engine.key_map(query)
    }

    /// Whether references lie in panels, of which a sample can be visited.
    pub(crate) fn is_packed(&self) -> bool {
        self.scanner.unit_rows() > 1
    }

    /// Let `collector` meet the references of the split.
    pub(crate) fn visit(&mut self, visit: Visit, collector: &mut dyn Collector) -> Result<()> {
        self.walk(self.rows.clone(), visit, None, collector)
    }

    /// Let `collector` meet other references than those of the split.
    pub(crate) fn visit_rows(&mut self, rows: Range<usize>, collector: &mut dyn Collector) -> Result<()> {
        self.walk(rows, Visit::All, None, collector)
    }

    /// Let `collector` meet other references, which are queries too: also where the query reaches their floor, of which
    /// `theirs` has one for each row of each unit.
    pub(crate) fn visit_pairs(
        &mut self,
        rows: Range<usize>,
        theirs: &[f32],
        collector: &mut dyn Collector,
    ) -> Result<()> {
        self.walk(rows, Visit::All, Some(theirs), collector)
    }

    /// The loop nest: blocks of units, groups of queries, runs of units.
    fn walk(
        &mut self,
        rows: Range<usize>,
        visit: Visit,
        theirs: Option<&[f32]>,
        collector: &mut dyn Collector,
    ) -> Result<()> {
        let unit = self.scanner.unit_rows();
        let scale = if visit == Visit::Sample { SAMPLE_STRIDE } else { 1 };
        let mut units = if rows.is_empty() { 0..0 } else { rows.start / unit..rows.end.div_ceil(unit) };
        if self.context.upper_triangle {
            // Queries ascend: none meets what lies before the first of them.
            let first = self.queries.first().map_or(0, |query| *query as usize / unit).clamp(units.start, units.end);
            self.advance(units.start..first, visit, &rows);
            units.start = first;
        }
        let (all, most) = (units.clone(), self.engine.block_units().saturating_mul(scale));
        let blocks = units.len().div_ceil(most);
        let mut floors = Vec::with_capacity(self.engine.lanes());
        for block in 0..blocks {
            // Of equal size, so that the last block is not a few units.
            let start = all.start + all.len() * block / blocks;
            let end = all.start + all.len() * (block + 1) / blocks;
            for first in (0..self.queries.len()).step_by(self.engine.lanes()) {
                self.context.monitor.check()?;
                let lanes = first..(first + self.engine.lanes()).min(self.queries.len());
                let is_cold =
                    collector.rises() && lanes.clone().any(|i| collector.reject_below(i) == f32::NEG_INFINITY);
                let mut step = if is_cold { self.engine.warm_up_units().saturating_mul(scale) } else { end - start };
                let mut at = start;
                while at < end {
                    let until = at.saturating_add(step).min(end);
                    step = step.saturating_mul(2);
                    floors.clear();
                    floors.extend(lanes.clone().map(|i| collector.reject_below(i)));
                    let theirs = theirs.map(|theirs| &theirs[(at - all.start) * unit..]);
                    self.engine.scan(first, at..until, visit, &floors, theirs, &mut self.candidates)?;
                    self.take_in(lanes.clone(), &rows, collector)?;
                    at = until;
                }
            }
            self.advance(start..end, visit, &rows);
        }
        for query in 0..self.queries.len() {
            self.undecided.clear();
            collector.flush(query, &mut self.undecided);
            self.score(query, collector)?;
        }
        let (rescored, false_positives) = std::mem::take(&mut self.rescored);
        self.context.monitor.count_rescored(rescored, false_positives);
        Ok(())
    }

    /// Report the pairs of all queries with the rows in some units as done.
    fn advance(&self, units: Range<usize>, visit: Visit, rows: &Range<usize>) {
        let unit = self.scanner.unit_rows();
        let mut count = (units.end * unit).min(rows.end).saturating_sub((units.start * unit).max(rows.start));
        if visit != Visit::All {
            count = (units.filter(|unit| !visit.skips(*unit)).count() * unit).min(count);
        }
        self.context.monitor.advance(count as u64 * self.queries.len() as u64);
    }

    /// Hand the candidates of a group of queries to the collector.
    fn take_in(&mut self, lanes: Range<usize>, rows: &Range<usize>, collector: &mut dyn Collector) -> Result<()> {
        for lane in 0..self.engine.lanes() {
            let query = lanes.start + lane;
            if query >= lanes.end {
                // A lane without a query reports keys that are not numbers.
                self.candidates.clear(lane);
                continue;
            }
            self.exclude(lane, self.queries[query], rows);
            if query + 1 < lanes.end {
                // The next query's rows lie anywhere: load them while this one's are scored.
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

    /// Drop the candidates that a query must not meet: rows beyond `rows`, which pad a unit or belong to another pass; the
    /// query itself; what lies before it, where a pair has one side.
    #[inline(always)]
    fn exclude(&mut self, lane: usize, query: u32, rows: &Range<usize>) {
        let list = self.candidates.rows(lane);
        let (Some(&first), Some(&last)) = (list.first(), list.last()) else { return };
        let own = self.context.own_row(query).map_or(u32::MAX, |row| row as u32);
        let start = if self.context.upper_triangle { rows.start.max(query as usize) } else { rows.start };
        let (start, end) = (start as u32, rows.end as u32);
        if first < start || last >= end || (first..=last).contains(&own) {
            self.candidates.retain(lane, |row| row >= start && row < end && row != own);
        }
    }

    /// Form the float64 values of the undecided rows of a query and hand them to the collector.
    fn score(&mut self, query: usize, collector: &mut dyn Collector) -> Result<()> {
        if self.undecided.is_empty() {
            return Ok(());
        }
        let source = &self.context.source;
        source.verify_each(&self.undecided)?;
        let (rows, values) = (&mut self.undecided, &mut self.values);
        source.rows.score(self.context.simd, &self.prepared[query], rows, &mut self.wide, values);
        let rescored = rows.len() as u64;
        if let Some(bad) = self.scanner.bad_rows()
            && values.iter().any(|value| !value.is_finite())
        {
            let mut kept = 0;
            for at in 0..rows.len() {
                // The value of finite rows may overflow; such rows are ranked all the same.
                if values[at].is_finite() || source.rows.is_finite(rows[at] as usize) {
                    (rows[kept], values[kept]) = (rows[at], values[at]);
                    kept += 1;
                } else {
                    bad.report(rows[at] as usize);
                }
            }
            rows.truncate(kept);
            values.truncate(kept);
        }
        let false_positives = collector.take(query, rows, values)?;
        self.rescored.0 += rescored;
        self.rescored.1 += false_positives;
        Ok(())
    }
}
