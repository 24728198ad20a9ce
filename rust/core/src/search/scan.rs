//! The loops of a search, written once for every kernel.
//!
//! ```text
//! for each task = (chunk of queries, split of the references)          in parallel
//!     for each block of reference panels that fits the cache
//!         for each panel of the chunk's queries
//!             Kernel::scan ──CandidateLists──> float64 values ──> TopK of each query ──> its floor rises
//! merge the splits of each query ──> k neighbours                      self is skipped here and nowhere else
//! ```
//!
//! Where the queries are rows of the reference, `symmetric.rs` does the same by tiles that serve both sides.
//!
//! A direct task has the same shape without kernel and floor: every row of a block gets its float64 value. Where `k` is
//! large, a strided sample of the panels is scanned first, and what it suggests as a floor is verified at the end.

use std::ops::Range;

use rayon::prelude::*;

use crate::arch::kernel::{CandidateLists, Kernel, MAX_RUN, QueryPanel, SAMPLE_STRIDE, Thresholds, Visit};
use crate::arch::{self, WithKernel};
use crate::error::{Argument, Error, Result};
use crate::exact::lanes::ROWS;
use crate::exact::{Prepared, Widened, prefetch, score};
use crate::filter::bound::Bound;
use crate::filter::frame::Frame;
use crate::filter::panels::{FirstBad, PackedQuery, PackedReference};
use crate::filter::unpacked::{MOST_ROWS, Panel, Threshold};
use crate::filter::{Filter, with_filter};
use crate::matrix::{Element, MatrixRef, Output, QueryRef};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;
use crate::search::plan::{self, Options, Plan, Problem};
use crate::search::references::{Panels, References};
use crate::search::symmetric::SelfSearch;
use crate::topk::{self, TopK};

/// One search, ready to run.
pub(crate) struct Job<'a, E: Element> {
    pub(crate) query: QueryRef<'a, E>,
    pub(crate) references: References<'a, E>,
    pub(crate) options: &'a Options,
    pub(crate) problem: Problem,
    pub(crate) monitor: &'a Monitor,
    /// Number of the first reference row, where others were searched before.
    pub(crate) first_row: usize,
    /// What each query's neighbours must come before, where k rows are known already; empty if of no query.
    pub(crate) bars: &'a [Option<Neighbour>],
}

/// Where the neighbours of some queries go, `k` of each.
pub(crate) enum Out<'a, E: Element> {
    /// The answer of the search; there are `k` neighbours.
    Answer(&'a mut [E::Output], &'a mut [i64]),
    /// The nearest so far, in their order, among references that come one after the other; see `incremental.rs`.
    SoFar(&'a mut [Neighbour]),
}

impl<'a, E: Element> Out<'a, E> {
    fn len(&self) -> usize {
        match self {
            Self::Answer(_, rows) => rows.len(),
            Self::SoFar(places) => places.len(),
        }
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::Answer(values, rows) => {
                let ((values, more_values), (rows, more_rows)) =
                    (values.split_at_mut(middle), rows.split_at_mut(middle));
                (Self::Answer(values, rows), Self::Answer(more_values, more_rows))
            }
            Self::SoFar(places) => {
                let (places, more) = places.split_at_mut(middle);
                (Self::SoFar(places), Self::SoFar(more))
            }
        }
    }

    /// Pieces of `len` places, the last one may be shorter.
    fn chunks(mut self, len: usize) -> Vec<Self> {
        let mut chunks = Vec::new();
        while self.len() > len {
            let (chunk, rest) = self.split_at(len);
            chunks.push(chunk);
            self = rest;
        }
        chunks.push(self);
        chunks
    }
}

/// Panels of the first scan of a query, before it has any threshold; doubled until a block is scanned at once.
pub(crate) const WARM_UP_PANELS: usize = 2;

/// The same for rows that are not packed.
const WARM_UP_ROWS: usize = 64;

/// Buffers of a task that are filled again for each query.
pub(crate) struct Scratch<E: Element> {
    pub(crate) rows: Vec<u32>,
    pub(crate) values: Vec<f64>,
    wide: Widened<E>,
}

impl<E: Element> Scratch<E> {
    pub(crate) fn new() -> Self {
        Self { rows: Vec::new(), values: Vec::new(), wide: Widened::new() }
    }
}

impl<'a, E: Element> Job<'a, E> {
    /// A search of all references there are.
    pub(crate) fn whole(
        query: MatrixRef<'a, E>,
        reference: MatrixRef<'a, E>,
        options: &'a Options,
        problem: Problem,
        monitor: &'a Monitor,
    ) -> Self {
        let references = References::one_shot(reference);
        Self { query: query.into(), references, options, problem, monitor, first_row: 0, bars: &[] }
    }

    /// Fill `out`, `k` places for every query.
    pub(crate) fn run(&self, out: Out<'_, E>) -> Result<()> {
        let mut filter = self.problem.filter(self.options.simd.level());
        let mut rest = Some((0..self.problem.queries, out));
        while let Some((queries, out)) = rest {
            self.monitor.set_filter(filter as u8);
            rest = match filter {
                Filter::Direct | Filter::Unpacked => {
                    self.run_unpacked(queries, filter, out)?;
                    None
                }
                Filter::Float32 | Filter::Int8 => {
                    let work = Filtered { job: self, filter, queries, out };
                    let left = with_filter(self.options.simd, self.metric(), filter, work)?;
                    left.map(|(queries, out, next)| {
                        filter = next;
                        (queries, out)
                    })
                }
            };
        }
        Ok(())
    }

    fn plan(&self, queries: &Range<usize>, filter: Filter) -> Plan {
        Plan::new(&Problem { queries: queries.len(), ..self.problem }, filter)
    }

    /// Search `queries` among the rows as they lie.
    fn run_unpacked(&self, queries: Range<usize>, filter: Filter, out: Out<'_, E>) -> Result<()> {
        let bad = FirstBad::new();
        let plan = self.plan(&queries, filter);
        let outcome = self.run_tasks(&plan, queries, out, |queries, split| {
            let references = plan.split(self.reference().rows(), split);
            match filter {
                Filter::Unpacked => self.scan_bare(queries, references, &bad),
                _ => self.scan_direct(queries, references, &bad),
            }
        });
        self.monitor.check()?;
        // A chunk of queries has looked at every row, so the first bad one is known now.
        bad.check(self.reference(), Argument::Reference)?;
        outcome
    }

    /// Run `scan` on every task and write what the queries found.
    fn run_tasks<F>(&self, plan: &Plan, queries: Range<usize>, out: Out<'_, E>, scan: F) -> Result<()>
    where
        F: Fn(Range<usize>, usize) -> Result<Vec<TopK>> + Sync,
    {
        let chunks = out.chunks(plan.chunk * self.problem.k);
        if plan.splits == 1 && self.problem.threads == 1 {
            // Stay on this thread: small searches do not wait for a pool.
            for (chunk, out) in chunks.into_iter().enumerate() {
                let queries = plan.chunk_of(&queries, chunk);
                self.write(scan(queries, 0)?, out)?;
            }
            return Ok(());
        }
        chunks.into_par_iter().enumerate().with_max_len(1).try_for_each(|(chunk, out)| {
            let queries = plan.chunk_of(&queries, chunk);
            let parts: Vec<Vec<TopK>> = (0..plan.splits)
                .into_par_iter()
                .with_max_len(1)
                .map(|split| scan(queries.clone(), split))
                .collect::<Result<_>>()?;
            let merged = parts.into_iter().reduce(|mut whole, part| {
                for (nearest, other) in whole.iter_mut().zip(part) {
                    nearest.merge(other);
                }
                whole
            });
            self.write(merged.unwrap_or_default(), out)
        })
    }

    /// Write what some queries found.
    fn write(&self, found: Vec<TopK>, out: Out<'_, E>) -> Result<()> {
        match out {
            Out::Answer(values, rows) => self.answer(found, values, rows),
            Out::SoFar(places) => {
                let mut scratch = Vec::new();
                for (nearest, places) in found.into_iter().zip(places.chunks_mut(self.problem.k)) {
                    scratch.clear();
                    nearest.sorted(|neighbour| scratch.push(neighbour.offset_by(self.first_row)));
                    topk::merge(places, &scratch);
                }
                Ok(())
            }
        }
    }

    /// Write the answers of some queries.
    pub(crate) fn answer(&self, found: Vec<TopK>, values: &mut [E::Output], rows: &mut [i64]) -> Result<()> {
        let k = self.problem.k;
        for ((nearest, values), rows) in found.into_iter().zip(values.chunks_mut(k)).zip(rows.chunks_mut(k)) {
            if nearest.len() < k {
                return Err(Error::Panic("a query found too few neighbours".into()));
            }
            let mut places = values.iter_mut().zip(rows);
            nearest.sorted(|neighbour| {
                if let Some((value, row)) = places.next() {
                    *value = neighbour.value(self.options.metric);
                    *row = i64::from(neighbour.row());
                }
            });
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn reference(&self) -> MatrixRef<'a, E> {
        self.references.rows
    }

    pub(crate) fn metric(&self) -> Metric {
        self.options.metric
    }

    /// Form the float64 values of `scratch.rows`.
    pub(crate) fn score(&self, query: &Prepared, scratch: &mut Scratch<E>) -> Result<()> {
        self.references.verify_each(&scratch.rows)?;
        score(self.options.simd, query, self.reference(), &scratch.rows, &mut scratch.wide, &mut scratch.values);
        Ok(())
    }

    pub(crate) fn prepare(&self, queries: impl ExactSizeIterator<Item = usize>) -> Result<Vec<Prepared>> {
        let mut prepared = try_vec(queries.len(), "prepared queries")?;
        let mut wide = Vec::new();
        prepared.extend(queries.map(|i| Prepared::of_wide::<E>(self.metric(), self.query.widen(i, &mut wide))));
        Ok(prepared)
    }

    /// Every pair in float64.
    fn scan_direct(&self, queries: Range<usize>, references: Range<usize>, bad: &FirstBad) -> Result<Vec<TopK>> {
        let prepared = self.prepare(queries.clone())?;
        let mut found = self.nearest(&queries, &references)?;
        let mut scratch = Scratch::new();
        let block = plan::block_rows(self.reference().dim() * size_of::<E>());
        for start in references.clone().step_by(block) {
            let end = (start + block).min(references.end);
            for ((i, query), nearest) in queries.clone().zip(&prepared).zip(&mut found) {
                self.monitor.check()?;
                scratch.rows.clear();
                scratch.rows.extend(start as u32..end as u32);
                self.take_in(i, query, nearest, &mut scratch, bad)?;
                self.monitor.advance((end - start) as u64);
            }
        }
        Ok(found)
    }

    /// Every pair in float32 on the rows as they lie, and what survives in float64.
    fn scan_bare(&self, queries: Range<usize>, references: Range<usize>, bad: &FirstBad) -> Result<Vec<TopK>> {
        let prepared = self.prepare(queries.clone())?;
        let mut found = self.nearest(&queries, &references)?;
        let mut panels: Vec<Panel> =
            prepared.chunks(arch::UNPACKED_LANES).map(|queries| Panel::new(self.metric(), queries)).collect();
        let thresholds: Vec<Threshold> = prepared
            .iter()
            .map(|query| Panel::threshold(self.metric(), query, <E::Output as Output>::UNIT_ROUNDOFF))
            .collect();
        for (i, (query, threshold)) in queries.clone().zip(&thresholds).enumerate() {
            if let Some(bar) = self.bar(query) {
                panels[i / arch::UNPACKED_LANES].raise(
                    i % arch::UNPACKED_LANES,
                    threshold,
                    bar.ranked_value(self.metric()),
                );
            }
        }
        let mut candidates = CandidateLists::new(arch::UNPACKED_LANES, MOST_ROWS / MAX_RUN);
        let mut scratch = Scratch::new();
        let block = plan::block_rows(self.reference().dim() * size_of::<E>()).min(MOST_ROWS);
        let (mut start, mut step) = (references.start, WARM_UP_ROWS.min(block));
        while start < references.end {
            let end = (start + step).min(references.end);
            step = (step * 2).min(block);
            self.references.verify(start..end)?;
            for (p, panel) in panels.iter_mut().enumerate() {
                self.monitor.check()?;
                panel.scan(self.options.simd, self.reference(), start, end, &mut scratch.wide, &mut candidates);
                for lane in 0..arch::UNPACKED_LANES {
                    let (rows, _) = candidates.take(lane);
                    let i = p * arch::UNPACKED_LANES + lane;
                    if rows.is_empty() || i >= prepared.len() {
                        continue;
                    }
                    scratch.rows.clear();
                    scratch.rows.extend_from_slice(rows);
                    self.take_in(queries.start + i, &prepared[i], &mut found[i], &mut scratch, bad)?;
                    if found[i].should_select() {
                        found[i].select();
                    }
                    if let Some(kth) = found[i].kth() {
                        panel.raise(lane, &thresholds[i], kth.ranked_value(self.metric()));
                    }
                }
            }
            self.monitor.advance((end - start) as u64 * queries.len() as u64);
            start = end;
        }
        Ok(found)
    }

    /// Score `scratch.rows` for query `i` and keep the nearest; a row that is not finite is reported.
    fn take_in(
        &self,
        i: usize,
        query: &Prepared,
        nearest: &mut TopK,
        scratch: &mut Scratch<E>,
        bad: &FirstBad,
    ) -> Result<()> {
        self.score(query, scratch)?;
        for (&row, &value) in scratch.rows.iter().zip(&scratch.values) {
            if !value.is_finite() && !self.reference().row(row as usize).iter().all(|x| x.to_f64().is_finite()) {
                bad.report(row as usize);
            } else if !self.is_self(i, row as usize) {
                nearest.push(Neighbour::new::<E::Output>(self.metric(), value, row));
            }
        }
        self.monitor.tally(scratch.rows.len() as u64, 0);
        Ok(())
    }

    fn nearest(&self, queries: &Range<usize>, references: &Range<usize>) -> Result<Vec<TopK>> {
        queries.clone().map(|i| TopK::with_threshold(self.bar(i), self.problem.k, references.len())).collect()
    }

    /// What the neighbours of query `i` must come before.
    fn bar(&self, i: usize) -> Option<Neighbour> {
        self.bars.get(i).copied().flatten()
    }

    #[inline(always)]
    fn is_self(&self, query: usize, reference: usize) -> bool {
        self.options.exclude_self && query == self.first_row + reference
    }
}

/// A search, or what is left of one, with a filter.
struct Filtered<'a, E: Element> {
    job: &'a Job<'a, E>,
    filter: Filter,
    queries: Range<usize>,
    out: Out<'a, E>,
}

/// Queries that are still to be searched, their places, and the filter to go on with.
type Left<'a, E> = Option<(Range<usize>, Out<'a, E>, Filter)>;

impl<'a, E: Element> WithKernel for Filtered<'a, E> {
    type Output = Result<Left<'a, E>>;

    fn run<K: Kernel + 'static>(self, kernel: K) -> Self::Output {
        let Self { job, filter, queries, out } = self;
        let panels = job.references.panels::<K>(job.options.simd, job.metric(), job.problem.threads, job.monitor)?;
        let Panels { frame, packed } = &*panels;
        let search = |queries: Range<usize>, out: Out<'_, E>| {
            let plan = job.plan(&queries, filter);
            job.run_tasks(&plan, queries, out, |queries, split| {
                let panels = plan.split(packed.panels(), split);
                FilteredTask { job, kernel, frame, packed, panels }.scan(queries)
            })
        };
        let probe = queries.start..queries.start + Problem { queries: queries.len(), ..job.problem }.probe();
        let (first, out) = out.split_at(probe.len() * job.problem.k);
        if !probe.is_empty() {
            let before = job.monitor.tallied();
            search(probe.clone(), first)?;
            let after = job.monitor.tallied();
            let pairs = probe.len() as f64 * job.problem.references as f64;
            let share = |before: u64, after: u64| (after - before) as f64 / pairs;
            let next = job.problem.next_filter(filter, share(before.0, after.0), share(before.1, after.1));
            if next != filter {
                return Ok(Some((probe.end..queries.end, out, next)));
            }
        }
        let rest = probe.end..queries.end;
        match (SelfSearch::new(job, kernel, frame, packed, rest.clone()), out) {
            (Some(tiles), Out::Answer(values, rows)) => tiles.run(values, rows)?,
            (_, out) => search(rest, out)?,
        }
        Ok(None)
    }
}

/// A part of the packed references, for whatever queries are to be held against it.
struct FilteredTask<'a, E: Element, K: Kernel> {
    job: &'a Job<'a, E>,
    kernel: K,
    frame: &'a Frame,
    packed: &'a PackedReference<K>,
    panels: Range<usize>,
}

impl<'a, E: Element, K: Kernel> FilteredTask<'a, E, K> {
    /// The neighbours of `queries` among these references.
    fn scan(&self, queries: Range<usize>) -> Result<Vec<TopK>> {
        let queries: Vec<u32> = queries.map(|i| i as u32).collect();
        match plan::sample_rank(self.job.problem.k, self.rows()) {
            // Known bars are as good as those that a sample suggests.
            Some(rank) if self.job.bars.is_empty() => self.scan_by_sample(&queries, rank),
            _ => self.scan_all(&queries),
        }
    }

    /// Reference rows of these panels.
    fn rows(&self) -> usize {
        (self.panels.end * K::NR).min(self.job.reference().rows()).saturating_sub(self.panels.start * K::NR)
    }

    fn scan_all(&self, queries: &[u32]) -> Result<Vec<TopK>> {
        let mut pass = Pass::new(self, queries, self.job.problem.k)?;
        pass.visit(Visit::All)?;
        Ok(pass.finish())
    }

    /// The same with the floor that a sample suggests: of the rows in every eighth panel, the one of rank `rank` is likely to
    /// stand a little behind rank k of all. A query for which it does not is searched again.
    fn scan_by_sample(&self, queries: &[u32], rank: usize) -> Result<Vec<TopK>> {
        let k = self.job.problem.k;
        let mut pass = Pass::new(self, queries, rank)?;
        pass.visit(Visit::Sample)?;
        for i in 0..queries.len() {
            pass.expect(i, k)?;
        }
        pass.visit(Visit::Rest)?;
        let mut found = pass.finish();
        let failed: Vec<usize> = (0..queries.len()).filter(|&i| found[i].len() < k).collect();
        if !failed.is_empty() {
            let again: Vec<u32> = failed.iter().map(|&i| queries[i]).collect();
            for (i, nearest) in failed.into_iter().zip(self.scan_all(&again)?) {
                found[i] = nearest;
            }
        }
        Ok(found)
    }
}

/// One query of a pass.
struct State {
    prepared: Prepared,
    nearest: TopK,
    /// See [`crate::filter::bound`]. The one place where a query's threshold lives; it starts from the bar of [`Job`], if there is one.
    floor: f32,
    floors: Bound,
}

/// A chunk of queries on its way through the panels of a task.
struct Pass<'a, E: Element, K: Kernel> {
    task: &'a FilteredTask<'a, E, K>,
    queries: &'a [u32],
    packed: PackedQuery<K>,
    states: Vec<State>,
    candidates: CandidateLists,
    scratch: Scratch<E>,
    /// Pairs scored, and those that a sharper filter would have left out.
    tally: (u64, u64),
    is_cold: bool,
}

impl<'a, E: Element, K: Kernel> Pass<'a, E, K> {
    fn new(task: &'a FilteredTask<'a, E, K>, queries: &'a [u32], k: usize) -> Result<Self> {
        let job = task.job;
        let packed = PackedQuery::<K>::pack(job.options.simd, task.frame, job.query, queries)?;
        let roundoff = <E::Output as Output>::UNIT_ROUNDOFF;
        let (dim, scale2) = (job.query.dim(), task.frame.scale2());
        let mut states = try_vec(queries.len(), "candidates")?;
        let prepared = job.prepare(queries.iter().map(|&i| i as usize))?;
        for ((&i, prepared), &(shift, size)) in queries.iter().zip(prepared).zip(&packed.shifts) {
            let bar = job.bar(i as usize);
            let floors = Bound::new(job.metric(), dim, shift, size, scale2, roundoff);
            states.push(State {
                prepared,
                nearest: TopK::with_threshold(bar, k, task.rows())?,
                floor: bar.map_or(f32::NEG_INFINITY, |bar| floors.reject_below(bar.ranked_value(job.metric()))),
                floors,
            });
        }
        let (candidates, scratch) = (CandidateLists::new(K::MR, K::NR), Scratch::new());
        Ok(Self { task, queries, packed, states, candidates, scratch, tally: (0, 0), is_cold: true })
    }

    /// Expect that the last of the neighbours found so far stands behind rank `k`.
    fn expect(&mut self, i: usize, k: usize) -> Result<()> {
        let state = &mut self.states[i];
        state.nearest.select();
        if let Some(last) = state.nearest.kth() {
            let rows = self.task.rows();
            let found = std::mem::replace(&mut state.nearest, TopK::new(1, 1)?);
            state.nearest = TopK::resume(k, rows, found, last)?;
            state.floor = state.floors.reject_below(last.ranked_value(self.task.job.metric()));
        }
        Ok(())
    }

    fn finish(self) -> Vec<TopK> {
        self.task.job.monitor.tally(self.tally.0, self.tally.1);
        self.states.into_iter().map(|state| state.nearest).collect()
    }

    fn visit(&mut self, visit: Visit) -> Result<()> {
        let task = self.task;
        let scale = if visit == Visit::Sample { SAMPLE_STRIDE } else { 1 };
        let block = plan::block_panels(task.packed.panel_bytes()) * scale;
        for start in task.panels.clone().step_by(block) {
            let end = (start + block).min(task.panels.end);
            for group in 0..self.queries.len().div_ceil(K::MR) {
                task.job.monitor.check()?;
                let mut step = if self.is_cold { WARM_UP_PANELS * scale } else { block };
                let mut at = start;
                while at < end {
                    let until = (at + step).min(end);
                    step *= 2;
                    self.scan_run(group, at..until, visit)?;
                    at = until;
                }
            }
            self.is_cold = false;
            let panels = (start..end).filter(|&panel| !visit.leaves_out(panel)).count();
            task.job.monitor.advance((panels * K::NR * self.queries.len()) as u64);
        }
        Ok(())
    }

    /// Scan one run of panels for one panel of queries and take in what was reported.
    fn scan_run(&mut self, group: usize, panels: Range<usize>, visit: Visit) -> Result<()> {
        let (task, job) = (self.task, self.task.job);
        let first = group * K::MR;
        let lanes = K::MR.min(self.queries.len() - first);
        let mut bars = Thresholds::closed();
        for m in 0..lanes {
            bars.open(m, self.states[first + m].floor, self.packed.terms[first + m]);
        }
        let panel = QueryPanel { codes: self.packed.panel(group), thresholds: &bars };
        task.kernel.scan(&panel, &task.packed.run(panels.start, panels.end, visit)?, &mut self.candidates);
        for m in 0..K::MR {
            if m + 1 < lanes {
                for &row in self
                    .candidates
                    .rows(m + 1)
                    .iter()
                    .take(ROWS)
                    .filter(|&&row| (row as usize) < job.reference().rows())
                {
                    prefetch(job.reference().row(row as usize));
                }
            }
            let (rows, _) = self.candidates.take(m);
            if rows.is_empty() || m >= lanes {
                continue;
            }
            let query = self.queries[first + m] as usize;
            self.scratch.rows.clear();
            // Panels are padded with rows that do not exist.
            let counts = |row: usize| row < job.reference().rows() && !job.is_self(query, row);
            self.scratch.rows.extend(rows.iter().filter(|&&row| counts(row as usize)));
            let state = &mut self.states[first + m];
            job.score(&state.prepared, &mut self.scratch)?;
            self.tally.0 += self.scratch.rows.len() as u64;
            let kth = state.nearest.kth();
            for (&row, &value) in self.scratch.rows.iter().zip(&self.scratch.values) {
                let neighbour = Neighbour::new::<E::Output>(job.metric(), value, row);
                self.tally.1 += u64::from(kth.is_some_and(|kth| neighbour.is_behind(kth)));
                state.nearest.push(neighbour);
            }
            if state.nearest.should_select() {
                state.nearest.select();
            }
            // A cut may also have happened on the way.
            if let Some(kth) = state.nearest.kth().filter(|now| Some(*now) != kth) {
                state.floor = state.floor.max(state.floors.reject_below(kth.ranked_value(job.metric())));
            }
        }
        Ok(())
    }
}
