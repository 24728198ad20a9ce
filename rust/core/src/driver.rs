//! The loops of a search, written once for every kernel.
//!
//! ```text
//! for each task = (chunk of queries, split of the references)          in parallel
//!     for each block of reference panels that fits the cache
//!         for each panel of the chunk's queries
//!             Kernel::scan ──Hits──> Reservoir of each query           self is skipped here and nowhere else
//! for each query: merge its splits ──> settle in float64 ──> k neighbours
//! ```
//!
//! A direct task has the same shape without kernel and reservoir: every row of a block gets its float64 value.

use std::ops::Range;

use rayon::prelude::*;

use crate::arch;
use crate::arch::lp_f32::{self, Logarithms, LpF32, Minkowski, NARROW, Products, WIDE};
use crate::bound::Floor;
use crate::cancel::Monitor;
use crate::error::{Argument, Result, try_vec};
use crate::kernel::{Bars, Hits, Kernel, MAX_MR, QueryPanel};
use crate::matrix::{Element, MatrixRef, Output};
use crate::metric::{Geometry, Metric};
use crate::order::Neighbour;
use crate::pack::{Frame, PackedQuery, PackedReference, lower};
use crate::plan::{self, Filter, Options, Plan, Problem};
use crate::rescore::{Prepared, score};
use crate::topk::{Candidate, Heap, Reservoir};

/// One search, ready to run.
pub(crate) struct Job<'a, E> {
    pub(crate) query: MatrixRef<'a, E>,
    pub(crate) reference: MatrixRef<'a, E>,
    pub(crate) options: &'a Options,
    pub(crate) problem: Problem,
    pub(crate) monitor: &'a Monitor,
}

/// Panels of the first scan of a query, before it has any threshold; doubled until a block is scanned at once.
const WARM_UP_PANELS: usize = 2;

/// What one query of a task has found.
struct Found {
    reservoir: Reservoir,
    heap: Heap,
}

/// Buffers of a task that are filled again for each query.
struct Scratch<E: Element> {
    rows: Vec<u32>,
    values: Vec<f64>,
    wide: Vec<E::Wide>,
}

impl<E: Element> Scratch<E> {
    fn new() -> Self {
        Self { rows: Vec::new(), values: Vec::new(), wide: Vec::new() }
    }
}

impl<E: Element> Job<'_, E> {
    /// Fill `values` and `rows`, `k` of each for every query.
    pub(crate) fn run(&self, values: &mut [E::Output], rows: &mut [i64]) -> Result<()> {
        let plan = Plan::new(&self.problem);
        match plan.filter {
            Filter::Direct => self.run_direct(&plan, values, rows),
            Filter::Float32 if self.options.metric.geometry() == Geometry::Lp => self.run_lp(&plan, values, rows),
            Filter::Float32 => {
                #[cfg(target_arch = "x86_64")]
                {
                    if let Some(token) = self.options.simd.avx512() {
                        return self.run_filtered(&plan, arch::x86_64::avx512_f32::Avx512F32(token), values, rows);
                    }
                    if let Some(token) = self.options.simd.avx2() {
                        return self.run_filtered(&plan, arch::x86_64::avx2_f32::Avx2F32(token), values, rows);
                    }
                }
                self.run_filtered(&plan, arch::scalar::ScalarF32, values, rows)
            }
        }
    }

    /// The kernels for metrics that are no sums of squares.
    fn run_lp(&self, plan: &Plan, values: &mut [E::Output], rows: &mut [i64]) -> Result<()> {
        match self.options.metric {
            Metric::Cityblock => self.run_shape(plan, lp_f32::Cityblock, values, rows),
            Metric::Chebyshev => self.run_shape(plan, lp_f32::Chebyshev, values, rows),
            Metric::Minkowski(power) => match power.halves() {
                Some(3) => self.run_shape(plan, Minkowski(Products::<3>), values, rows),
                Some(6) => self.run_shape(plan, Minkowski(Products::<6>), values, rows),
                Some(8) => self.run_shape(plan, Minkowski(Products::<8>), values, rows),
                _ => self.run_shape(plan, Minkowski(Logarithms { p: power.get() as f32 }), values, rows),
            },
            _ => self.run_direct(plan, values, rows),
        }
    }

    fn run_shape<S: lp_f32::Shape>(
        &self,
        plan: &Plan,
        shape: S,
        values: &mut [E::Output],
        rows: &mut [i64],
    ) -> Result<()> {
        let simd = self.options.simd;
        if simd.avx2().is_some() {
            self.run_filtered(plan, LpF32::<S, WIDE> { simd, shape }, values, rows)
        } else {
            self.run_filtered(plan, LpF32::<S, NARROW> { simd, shape }, values, rows)
        }
    }

    fn run_filtered<K: Kernel>(
        &self,
        plan: &Plan,
        kernel: K,
        values: &mut [E::Output],
        rows: &mut [i64],
    ) -> Result<()> {
        let frame = Frame::choose(self.options.simd, self.options.metric, self.reference);
        let packed =
            PackedReference::<K>::pack(self.options.simd, &frame, self.reference, self.problem.threads, self.monitor)?;
        self.run_tasks(plan, values, rows, |queries, split| {
            FilteredTask { job: self, kernel, frame: &frame, packed: &packed, queries }.scan(plan, split)
        })
    }

    fn run_direct(&self, plan: &Plan, values: &mut [E::Output], rows: &mut [i64]) -> Result<()> {
        // Without packing nobody has looked at the references yet; a pass over them is cheap beside what follows.
        let all = 0..self.reference.rows();
        let is_bad = |row: &usize| !self.reference.row(*row).iter().all(|x| x.to_f64().is_finite());
        let bad = if self.problem.threads == 1 {
            all.into_iter().find(is_bad)
        } else {
            all.into_par_iter().with_min_len(1024).find_first(is_bad)
        };
        if let Some(error) = bad.and_then(|row| self.reference.first_non_finite(Argument::Reference, row)) {
            return Err(error);
        }
        self.run_tasks(plan, values, rows, |queries, split| self.scan_direct(plan, queries, split))
    }

    /// Run `scan` on every task and write what the queries found.
    fn run_tasks<F>(&self, plan: &Plan, values: &mut [E::Output], rows: &mut [i64], scan: F) -> Result<()>
    where
        F: Fn(Range<usize>, usize) -> Result<Vec<Heap>> + Sync,
    {
        self.monitor.begin(self.problem.queries as u64 * self.problem.references as u64);
        let k = self.problem.k;
        let out = values.par_chunks_mut(plan.chunk * k).zip(rows.par_chunks_mut(plan.chunk * k)).enumerate();
        if plan.splits == 1 && self.problem.threads == 1 {
            // Stay on this thread: small searches do not wait for a pool.
            let out = values.chunks_mut(plan.chunk * k).zip(rows.chunks_mut(plan.chunk * k)).enumerate();
            for (chunk, (values, rows)) in out {
                self.write(scan(plan.chunk_rows(&self.problem, chunk), 0)?, values, rows);
            }
            return Ok(());
        }
        out.with_max_len(1).try_for_each(|(chunk, (values, rows))| {
            let queries = plan.chunk_rows(&self.problem, chunk);
            let parts: Vec<Vec<Heap>> = (0..plan.splits)
                .into_par_iter()
                .with_max_len(1)
                .map(|split| scan(queries.clone(), split))
                .collect::<Result<_>>()?;
            let merged = parts.into_iter().reduce(|mut whole, part| {
                for (heap, other) in whole.iter_mut().zip(part) {
                    heap.merge(other);
                }
                whole
            });
            self.write(merged.unwrap_or_default(), values, rows);
            Ok(())
        })
    }

    fn write(&self, heaps: Vec<Heap>, values: &mut [E::Output], rows: &mut [i64]) {
        let k = self.problem.k;
        for ((heap, values), rows) in heaps.into_iter().zip(values.chunks_mut(k)).zip(rows.chunks_mut(k)) {
            let sorted = heap.into_sorted();
            assert_eq!(sorted.len(), k, "a query found too few neighbours");
            for ((neighbour, value), row) in sorted.into_iter().zip(values).zip(rows) {
                *value = neighbour.value(self.options.metric);
                *row = i64::from(neighbour.row());
            }
        }
    }

    fn metric(&self) -> Metric {
        self.options.metric
    }

    /// Push the float64 values of `scratch.rows` into a heap.
    fn rescore(&self, query: &Prepared, scratch: &mut Scratch<E>, heap: &mut Heap) {
        score(self.options.simd, query, self.reference, &scratch.rows, &mut scratch.wide, &mut scratch.values);
        for (&row, &value) in scratch.rows.iter().zip(&scratch.values) {
            heap.push(Neighbour::new::<E::Output>(self.metric(), value, row));
        }
    }

    fn scan_direct(&self, plan: &Plan, queries: Range<usize>, split: usize) -> Result<Vec<Heap>> {
        let references = plan.split(self.reference.rows(), split);
        let prepared: Vec<Prepared> =
            queries.clone().map(|i| Prepared::new(self.metric(), self.query.row(i))).collect();
        let mut heaps: Vec<Heap> = queries.clone().map(|_| Heap::new(self.problem.k)).collect();
        let mut scratch = Scratch::new();
        let block = plan::block_rows(self.reference.dim() * size_of::<E>());
        for start in references.clone().step_by(block) {
            let end = (start + block).min(references.end);
            for ((i, query), heap) in queries.clone().zip(&prepared).zip(&mut heaps) {
                self.monitor.check()?;
                scratch.rows.clear();
                scratch.rows.extend((start..end).filter(|&j| !self.is_self(i, j)).map(|j| j as u32));
                self.rescore(query, &mut scratch, heap);
                self.monitor.advance((end - start) as u64);
            }
        }
        Ok(heaps)
    }

    #[inline(always)]
    fn is_self(&self, query: usize, reference: usize) -> bool {
        self.options.exclude_self && query == reference
    }
}

/// A chunk of queries against packed references.
struct FilteredTask<'a, E, K: Kernel> {
    job: &'a Job<'a, E>,
    kernel: K,
    frame: &'a Frame,
    packed: &'a PackedReference<K>,
    queries: Range<usize>,
}

impl<E: Element, K: Kernel> FilteredTask<'_, E, K> {
    fn scan(&self, plan: &Plan, split: usize) -> Result<Vec<Heap>> {
        let job = self.job;
        let panels = plan.split(self.packed.panels(), split);
        let query =
            PackedQuery::<K>::pack(job.options.simd, self.frame, job.query, self.queries.start, self.queries.end)?;
        let floors = self.floors(&query);
        let mut found: Vec<Found> = try_vec(self.queries.len(), "candidates")?;
        found.extend(
            self.queries
                .clone()
                .map(|_| Found { reservoir: Reservoir::new(job.problem.k), heap: Heap::new(job.problem.k) }),
        );
        let mut hits = Hits::new(K::MR, K::NR);
        let mut scratch = Scratch::new();
        let block = plan::block_panels(self.packed.panel_bytes());
        for start in panels.clone().step_by(block) {
            let end = (start + block).min(panels.end);
            for group in 0..self.queries.len().div_ceil(K::MR) {
                job.monitor.check()?;
                let mut step = if start == panels.start { WARM_UP_PANELS } else { block };
                let mut at = start;
                while at < end {
                    let until = (at + step).min(end);
                    step *= 2;
                    self.scan_run(&query, &floors, group, at..until, &mut found, &mut hits, &mut scratch);
                    at = until;
                }
            }
            let rows = (end * K::NR).min(job.reference.rows()).saturating_sub(start * K::NR);
            job.monitor.advance((rows * self.queries.len()) as u64);
        }
        for (i, found) in found.iter_mut().enumerate() {
            job.monitor.check()?;
            self.settle(i, &floors[i], found, &mut scratch);
        }
        Ok(found.into_iter().map(|found| found.heap).collect())
    }

    fn floors(&self, query: &PackedQuery<K>) -> Vec<Floor> {
        let roundoff = <E::Output as Output>::UNIT_ROUNDOFF;
        let (dim, scale2) = (self.job.query.dim(), self.frame.scale2());
        query
            .shifts
            .iter()
            .map(|&(shift, size)| Floor::new(self.job.metric(), dim, shift, size, scale2, roundoff))
            .collect()
    }

    /// Scan one run of panels for one panel of queries and take in what was reported.
    #[expect(clippy::too_many_arguments, reason = "the state of the loop nest, called from one place")]
    fn scan_run(
        &self,
        query: &PackedQuery<K>,
        floors: &[Floor],
        group: usize,
        panels: Range<usize>,
        found: &mut [Found],
        hits: &mut Hits,
        scratch: &mut Scratch<E>,
    ) {
        let first = group * K::MR;
        let lanes = K::MR.min(self.queries.len() - first);
        let mut bars = Bars { floor: [f32::INFINITY; MAX_MR], alpha: [0.0; MAX_MR], beta: [0.0; MAX_MR] };
        for m in 0..lanes {
            bars.floor[m] = found[first + m].reservoir.floor();
            bars.alpha[m] = query.terms[first + m].alpha;
            bars.beta[m] = query.terms[first + m].beta;
        }
        let panel = QueryPanel { codes: query.panel(group), bars: &bars };
        self.kernel.scan(&panel, &self.packed.run(panels.start, panels.end), hits);
        for m in 0..K::MR {
            let (rows, keys) = hits.take(m);
            if m >= lanes {
                continue;
            }
            let i = first + m;
            let state = &mut found[i];
            for (&row, &key) in rows.iter().zip(keys) {
                // Panels are padded with rows that do not exist.
                if row as usize >= self.job.reference.rows() || self.job.is_self(self.queries.start + i, row as usize) {
                    continue;
                }
                let error = self.packed.error(row, query.terms[i]);
                state.reservoir.push(Candidate { lower: lower(key, error), upper: -lower(-key, error), row });
            }
            if state.reservoir.is_due() {
                let floor = &floors[i];
                if state.reservoir.select(|key| floor.below_key(f64::from(key))) {
                    self.settle(i, floor, state, scratch);
                }
            }
        }
    }

    /// Give every candidate its float64 value and raise the floor by what is then known.
    fn settle(&self, i: usize, floor: &Floor, found: &mut Found, scratch: &mut Scratch<E>) {
        scratch.rows.clear();
        scratch.rows.extend(found.reservoir.drain());
        if scratch.rows.is_empty() {
            return;
        }
        let query = Prepared::new(self.job.metric(), self.job.query.row(self.queries.start + i));
        self.job.rescore(&query, scratch, &mut found.heap);
        if let Some(worst) = found.heap.worst() {
            found.reservoir.raise(floor.below_value(worst.ranked_value(self.job.metric())));
        }
    }
}
