//! The loops of a search, written once for every kernel.
//!
//! ```text
//! for each task = (chunk of queries, split of the references)          in parallel
//!     for each block of reference panels that fits the cache
//!         for each panel of the chunk's queries
//!             Kernel::scan ──Hits──> float64 values ──> Nearest of each query ──> its floor rises
//! merge the splits of each query ──> k neighbours                      self is skipped here and nowhere else
//! ```
//!
//! Where the queries are rows of the reference, `symmetric.rs` does the same by tiles that serve both sides.
//!
//! A direct task has the same shape without kernel and floor: every row of a block gets its float64 value. Where `k` is
//! large, a strided sample of the panels is scanned first, and what it suggests as a floor is verified at the end.

use std::ops::Range;

use rayon::prelude::*;

use crate::arch::{self, WithKernel};
use crate::bare::{self, Panel, Threshold};
use crate::bound::Floor;
use crate::cancel::{Filter, Monitor};
use crate::error::{Argument, Error, Result, try_vec};
use crate::kernel::{Bars, Hits, Kernel, MAX_RUN, QueryPanel, SAMPLE_STRIDE, Visit};
use crate::matrix::{Element, MatrixRef, Output};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::pack::{FirstBad, Frame, PackedQuery, PackedReference};
use crate::plan::{self, Options, Plan, Problem};
use crate::rescore::{Prepared, ROWS, Widened, prefetch, score};
use crate::symmetric::SelfSearch;
use crate::topk::Nearest;

/// One search, ready to run.
pub(crate) struct Job<'a, E> {
    pub(crate) query: MatrixRef<'a, E>,
    pub(crate) reference: MatrixRef<'a, E>,
    pub(crate) options: &'a Options,
    pub(crate) problem: Problem,
    pub(crate) monitor: &'a Monitor,
}

/// Where the neighbours of some queries go, `k` of each.
pub(crate) struct Out<'a, E: Element> {
    pub(crate) values: &'a mut [E::Output],
    pub(crate) rows: &'a mut [i64],
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

impl<E: Element> Job<'_, E> {
    /// Fill `values` and `rows`, `k` of each for every query.
    pub(crate) fn run(&self, values: &mut [E::Output], rows: &mut [i64]) -> Result<()> {
        self.monitor.begin(self.problem.queries as u64 * self.problem.references as u64);
        let mut filter = self.problem.filter(self.options.simd.level());
        let mut done = 0;
        while done < self.problem.queries {
            self.monitor.filter(filter);
            let at = done * self.problem.k;
            let queries = done..self.problem.queries;
            let out = Out { values: &mut values[at..], rows: &mut rows[at..] };
            (done, filter) = match filter {
                Filter::Direct | Filter::Bare => (self.run_unpacked(queries, filter, out)?, filter),
                Filter::Float32 | Filter::Int8 => {
                    let work = Filtered { job: self, filter, queries, out };
                    arch::with_filter(self.options.simd, self.metric(), filter, work)?
                }
            };
        }
        Ok(())
    }

    fn plan(&self, queries: &Range<usize>, filter: Filter) -> Plan {
        Plan::new(&Problem { queries: queries.len(), ..self.problem }, filter)
    }

    /// Search `queries` among the rows as they lie; returns where they end.
    fn run_unpacked(&self, queries: Range<usize>, filter: Filter, out: Out<'_, E>) -> Result<usize> {
        let end = queries.end;
        let bad = FirstBad::new();
        let plan = self.plan(&queries, filter);
        let outcome = self.run_tasks(&plan, queries, out, |queries, split| {
            let references = plan.split(self.reference.rows(), split);
            match filter {
                Filter::Bare => self.scan_bare(queries, references, &bad),
                _ => self.scan_direct(queries, references, &bad),
            }
        });
        self.monitor.check()?;
        // A chunk of queries has looked at every row, so the first bad one is known now.
        bad.check(self.reference, Argument::Reference)?;
        outcome.map(|()| end)
    }

    /// Run `scan` on every task and write what the queries found.
    fn run_tasks<F>(&self, plan: &Plan, queries: Range<usize>, out: Out<'_, E>, scan: F) -> Result<()>
    where
        F: Fn(Range<usize>, usize) -> Result<Vec<Nearest>> + Sync,
    {
        let len = plan.chunk * self.problem.k;
        if plan.splits == 1 && self.problem.threads == 1 {
            // Stay on this thread: small searches do not wait for a pool.
            for (chunk, (values, rows)) in out.values.chunks_mut(len).zip(out.rows.chunks_mut(len)).enumerate() {
                let chunk = plan.chunk_of(&queries, chunk);
                self.write(scan(chunk, 0)?, values, rows)?;
            }
            return Ok(());
        }
        let out = out.values.par_chunks_mut(len).zip(out.rows.par_chunks_mut(len)).enumerate();
        out.with_max_len(1).try_for_each(|(chunk, (values, rows))| {
            let queries = plan.chunk_of(&queries, chunk);
            let parts: Vec<Vec<Nearest>> = (0..plan.splits)
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
            self.write(merged.unwrap_or_default(), values, rows)
        })
    }

    /// Write what some queries found.
    pub(crate) fn write(&self, found: Vec<Nearest>, values: &mut [E::Output], rows: &mut [i64]) -> Result<()> {
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

    pub(crate) fn metric(&self) -> Metric {
        self.options.metric
    }

    /// Form the float64 values of `scratch.rows`.
    pub(crate) fn score(&self, query: &Prepared, scratch: &mut Scratch<E>) {
        score(self.options.simd, query, self.reference, &scratch.rows, &mut scratch.wide, &mut scratch.values);
    }

    pub(crate) fn prepare(&self, queries: impl ExactSizeIterator<Item = usize>) -> Result<Vec<Prepared>> {
        let mut prepared = try_vec(queries.len(), "prepared queries")?;
        prepared.extend(queries.map(|i| Prepared::new(self.metric(), self.query.row(i))));
        Ok(prepared)
    }

    /// Every pair in float64.
    fn scan_direct(&self, queries: Range<usize>, references: Range<usize>, bad: &FirstBad) -> Result<Vec<Nearest>> {
        let prepared = self.prepare(queries.clone())?;
        let mut found = self.nearest(&queries, &references)?;
        let mut scratch = Scratch::new();
        let block = plan::block_rows(self.reference.dim() * size_of::<E>());
        for start in references.clone().step_by(block) {
            let end = (start + block).min(references.end);
            for ((i, query), nearest) in queries.clone().zip(&prepared).zip(&mut found) {
                self.monitor.check()?;
                scratch.rows.clear();
                scratch.rows.extend(start as u32..end as u32);
                self.take_in(i, query, nearest, &mut scratch, bad);
                self.monitor.advance((end - start) as u64);
            }
        }
        Ok(found)
    }

    /// Every pair in float32 on the rows as they lie, and what survives in float64.
    fn scan_bare(&self, queries: Range<usize>, references: Range<usize>, bad: &FirstBad) -> Result<Vec<Nearest>> {
        let prepared = self.prepare(queries.clone())?;
        let mut found = self.nearest(&queries, &references)?;
        let mut panels: Vec<Panel> =
            prepared.chunks(arch::BARE_QUERIES).map(|queries| Panel::new(self.metric(), queries)).collect();
        let thresholds: Vec<Threshold> = prepared
            .iter()
            .map(|query| Panel::threshold(self.metric(), query, <E::Output as Output>::UNIT_ROUNDOFF))
            .collect();
        let mut hits = Hits::new(arch::BARE_QUERIES, bare::MOST_ROWS / MAX_RUN);
        let mut scratch = Scratch::new();
        let block = plan::block_rows(self.reference.dim() * size_of::<E>()).min(bare::MOST_ROWS);
        let (mut start, mut step) = (references.start, WARM_UP_ROWS.min(block));
        while start < references.end {
            let end = (start + step).min(references.end);
            step = (step * 2).min(block);
            for (p, panel) in panels.iter_mut().enumerate() {
                self.monitor.check()?;
                panel.scan(self.options.simd, self.reference, start, end, &mut scratch.wide, &mut hits);
                for lane in 0..arch::BARE_QUERIES {
                    let (rows, _) = hits.take(lane);
                    let i = p * arch::BARE_QUERIES + lane;
                    if rows.is_empty() || i >= prepared.len() {
                        continue;
                    }
                    scratch.rows.clear();
                    scratch.rows.extend_from_slice(rows);
                    self.take_in(queries.start + i, &prepared[i], &mut found[i], &mut scratch, bad);
                    if found[i].is_due() {
                        found[i].cut();
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
    fn take_in(&self, i: usize, query: &Prepared, nearest: &mut Nearest, scratch: &mut Scratch<E>, bad: &FirstBad) {
        self.score(query, scratch);
        for (&row, &value) in scratch.rows.iter().zip(&scratch.values) {
            if !value.is_finite() && !self.reference.row(row as usize).iter().all(|x| x.to_f64().is_finite()) {
                bad.report(row as usize);
            } else if !self.is_self(i, row as usize) {
                nearest.push(Neighbour::new::<E::Output>(self.metric(), value, row));
            }
        }
        self.monitor.tally(scratch.rows.len() as u64, 0);
    }

    fn nearest(&self, queries: &Range<usize>, references: &Range<usize>) -> Result<Vec<Nearest>> {
        queries.clone().map(|_| Nearest::new(self.problem.k, references.len())).collect()
    }

    #[inline(always)]
    fn is_self(&self, query: usize, reference: usize) -> bool {
        self.options.exclude_self && query == reference
    }
}

/// A search, or what is left of one, with a filter.
struct Filtered<'a, E: Element> {
    job: &'a Job<'a, E>,
    filter: Filter,
    queries: Range<usize>,
    out: Out<'a, E>,
}

impl<E: Element> WithKernel for Filtered<'_, E> {
    /// Where the searched queries end, and how to go on.
    type Output = Result<(usize, Filter)>;

    fn run<K: Kernel + 'static>(self, kernel: K) -> Self::Output {
        let Self { job, filter, queries, out } = self;
        let frame = Frame::choose(job.options.simd, job.options.metric, job.reference);
        let packed =
            PackedReference::<K>::pack(job.options.simd, &frame, job.reference, job.problem.threads, job.monitor)?;
        let search = |queries: Range<usize>, out: Out<'_, E>| {
            let plan = job.plan(&queries, filter);
            job.run_tasks(&plan, queries, out, |queries, split| {
                let panels = plan.split(packed.panels(), split);
                FilteredTask { job, kernel, frame: &frame, packed: &packed, panels }.scan(queries)
            })
        };
        let probe = queries.start..queries.start + Problem { queries: queries.len(), ..job.problem }.probe();
        let (first_values, values) = out.values.split_at_mut(probe.len() * job.problem.k);
        let (first_rows, rows) = out.rows.split_at_mut(probe.len() * job.problem.k);
        if !probe.is_empty() {
            let before = job.monitor.tallied();
            search(probe.clone(), Out { values: first_values, rows: first_rows })?;
            let after = job.monitor.tallied();
            let pairs = probe.len() as f64 * job.problem.references as f64;
            let share = |before: u64, after: u64| (after - before) as f64 / pairs;
            let next = job.problem.next_filter(filter, share(before.0, after.0), share(before.1, after.1));
            if next != filter {
                return Ok((probe.end, next));
            }
        }
        let rest = probe.end..queries.end;
        match SelfSearch::new(job, kernel, &frame, &packed, rest.clone()) {
            Some(tiles) => tiles.run(Out { values, rows })?,
            None => search(rest, Out { values, rows })?,
        }
        Ok((queries.end, filter))
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
    fn scan(&self, queries: Range<usize>) -> Result<Vec<Nearest>> {
        let queries: Vec<u32> = queries.map(|i| i as u32).collect();
        match plan::sample_rank(self.job.problem.k, self.rows()) {
            Some(rank) => self.scan_by_sample(&queries, rank),
            None => self.scan_all(&queries),
        }
    }

    /// Reference rows of these panels.
    fn rows(&self) -> usize {
        (self.panels.end * K::NR).min(self.job.reference.rows()).saturating_sub(self.panels.start * K::NR)
    }

    fn scan_all(&self, queries: &[u32]) -> Result<Vec<Nearest>> {
        let mut pass = Pass::new(self, queries, self.job.problem.k)?;
        pass.visit(Visit::All)?;
        Ok(pass.finish())
    }

    /// The same with the floor that a sample suggests: of the rows in every eighth panel, the one of rank `rank` is likely to
    /// stand a little behind rank k of all. A query for which it does not is searched again.
    fn scan_by_sample(&self, queries: &[u32], rank: usize) -> Result<Vec<Nearest>> {
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
    nearest: Nearest,
    /// See [`crate::bound`]. The one place where a query's threshold lives; it may start from a hint: the values of any k
    /// rows make a valid one.
    floor: f32,
    floors: Floor,
}

/// A chunk of queries on its way through the panels of a task.
struct Pass<'a, E: Element, K: Kernel> {
    task: &'a FilteredTask<'a, E, K>,
    queries: &'a [u32],
    packed: PackedQuery<K>,
    states: Vec<State>,
    hits: Hits,
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
        for (prepared, &(shift, size)) in
            job.prepare(queries.iter().map(|&i| i as usize))?.into_iter().zip(&packed.shifts)
        {
            states.push(State {
                prepared,
                nearest: Nearest::new(k, task.rows())?,
                floor: f32::NEG_INFINITY,
                floors: Floor::new(job.metric(), dim, shift, size, scale2, roundoff),
            });
        }
        let (hits, scratch) = (Hits::new(K::MR, K::NR), Scratch::new());
        Ok(Self { task, queries, packed, states, hits, scratch, tally: (0, 0), is_cold: true })
    }

    /// Expect that the last of the neighbours found so far stands behind rank `k`.
    fn expect(&mut self, i: usize, k: usize) -> Result<()> {
        let state = &mut self.states[i];
        state.nearest.cut();
        if let Some(last) = state.nearest.kth() {
            let rows = self.task.rows();
            let found = std::mem::replace(&mut state.nearest, Nearest::new(1, 1)?);
            state.nearest = Nearest::resume(k, rows, found, last)?;
            state.floor = state.floors.below_value(last.ranked_value(self.task.job.metric()));
        }
        Ok(())
    }

    fn finish(self) -> Vec<Nearest> {
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
                    self.scan_run(group, at..until, visit);
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
    fn scan_run(&mut self, group: usize, panels: Range<usize>, visit: Visit) {
        let (task, job) = (self.task, self.task.job);
        let first = group * K::MR;
        let lanes = K::MR.min(self.queries.len() - first);
        let mut bars = Bars::closed();
        for m in 0..lanes {
            bars.open(m, self.states[first + m].floor, self.packed.terms[first + m]);
        }
        let panel = QueryPanel { codes: self.packed.panel(group), bars: &bars };
        task.kernel.scan(&panel, &task.packed.run(panels.start, panels.end, visit), &mut self.hits);
        for m in 0..K::MR {
            if m + 1 < lanes {
                for &row in
                    self.hits.rows(m + 1).iter().take(ROWS).filter(|&&row| (row as usize) < job.reference.rows())
                {
                    prefetch(job.reference.row(row as usize));
                }
            }
            let (rows, _) = self.hits.take(m);
            if rows.is_empty() || m >= lanes {
                continue;
            }
            let query = self.queries[first + m] as usize;
            self.scratch.rows.clear();
            // Panels are padded with rows that do not exist.
            let counts = |row: usize| row < job.reference.rows() && !job.is_self(query, row);
            self.scratch.rows.extend(rows.iter().filter(|&&row| counts(row as usize)));
            let state = &mut self.states[first + m];
            job.score(&state.prepared, &mut self.scratch);
            self.tally.0 += self.scratch.rows.len() as u64;
            let kth = state.nearest.kth();
            for (&row, &value) in self.scratch.rows.iter().zip(&self.scratch.values) {
                let neighbour = Neighbour::new::<E::Output>(job.metric(), value, row);
                self.tally.1 += u64::from(kth.is_some_and(|kth| neighbour.is_behind(kth)));
                state.nearest.push(neighbour);
            }
            if state.nearest.is_due() {
                state.nearest.cut();
            }
            // A cut may also have happened on the way.
            if let Some(kth) = state.nearest.kth().filter(|now| Some(*now) != kth) {
                state.floor = state.floor.max(state.floors.below_value(kth.ranked_value(job.metric())));
            }
        }
    }
}
