//! Self-search by symmetric tiles: the products of two blocks of rows serve both as queries.
//!
//! ```text
//! blocks of rows ──each against itself and the rows that are no queries──> Candidates of each block, with floors
//! for each pair of blocks (I, J), I < J                                   in parallel
//!     Kernel::SCAN_SYMMETRIC ──CandidateLists: i might be near j, or j near i──> one float64 value ──> Candidates of i and of j
//! ```
//!
//! Nearly half of the products are never formed, and a pair that matters to both sides is scored once: its value is the same
//! bits either way. A block's candidates are locked only while found pairs are entered, never while pairs are scored. The
//! order in which pairs arrive decides how much is pruned, not what is found: the order of neighbours is total.
//!
//! This needs queries and references that are centred alike, so inner products, and distances that are not made of
//! products, are left to the ordinary way. So is what `plan.rs` says does not pay: every candidate lives until the end
//! here, and no sample raises the floors of a large k.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use crate::arch::kernel::{CandidateLists, Kernel, QueryPanel, ScanSymmetric, Thresholds, Transposed, Visit};
use crate::error::Result;
use crate::exact::lanes::ROWS;
use crate::exact::{Prepared, prefetch};
use crate::filter::bound::Bound;
use crate::filter::frame::Frame;
use crate::filter::panels::{PackedQuery, PackedReference};
use crate::matrix::{Element, Output};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::alloc::try_vec;
use crate::search::plan::{self, Problem};
use crate::search::scan::{Job, Scratch, WARM_UP_PANELS};
use crate::topk::TopK;

/// Pairs that a task keeps before it enters them: usual ones find fewer between two blocks.
const MOST_FOUND: usize = 1 << 16;

/// A self-search, ready to run.
pub(crate) struct SelfSearch<'a, E: Element, K: Kernel> {
    job: &'a Job<'a, E>,
    kernel: K,
    scan_symmetric: ScanSymmetric<K>,
    frame: &'a Frame,
    packed: &'a PackedReference<K>,
    queries: Range<usize>,
    /// Rows of a block.
    block: usize,
}

/// The k nearest of one query so far, and the key below which nobody counts any more.
struct Candidates {
    nearest: TopK,
    floor: f32,
    floors: Bound,
}

impl Candidates {
    /// Cut if it is worth it, and let the floor follow.
    fn settle(&mut self, metric: Metric) {
        if self.nearest.should_select() {
            self.nearest.select();
        }
        if let Some(kth) = self.nearest.kth() {
            self.floor = self.floor.max(self.floors.reject_below(kth.ranked_value(metric)));
        }
    }
}

type Block = Mutex<Vec<Candidates>>;

fn lock(block: &Block) -> MutexGuard<'_, Vec<Candidates>> {
    // Only a panic elsewhere poisons a lock, and that ends the search.
    block.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rows of a block as queries.
struct Side<K: Kernel> {
    rows: Range<usize>,
    packed: PackedQuery<K>,
    prepared: Vec<Prepared>,
}

/// Buffers of a task.
struct Buffers<E: Element> {
    candidates: CandidateLists,
    scratch: Scratch<E>,
    /// Query row of the side, reference row, value.
    found: Vec<(u32, u32, f64)>,
}

impl<E: Element> Buffers<E> {
    fn new<K: Kernel>() -> Self {
        Self { candidates: CandidateLists::new(K::MR, K::NR), scratch: Scratch::new(), found: Vec::new() }
    }
}

impl<'a, E: Element, K: Kernel> SelfSearch<'a, E, K> {
    /// `None` where the ordinary way is the only or the better one.
    pub(crate) fn new(
        job: &'a Job<'a, E>,
        kernel: K,
        frame: &'a Frame,
        packed: &'a PackedReference<K>,
        queries: Range<usize>,
    ) -> Option<Self> {
        let scan_symmetric = K::SCAN_SYMMETRIC?;
        let same_rows = job.options.exclude_self && job.query.begins_with(job.reference());
        if !same_rows || !job.metric().is_symmetric() {
            return None;
        }
        let block = plan::symmetric_block(&Problem { queries: queries.len(), ..job.problem }, size_of::<Candidates>())?;
        Some(Self { job, kernel, scan_symmetric, frame, packed, queries, block: block.next_multiple_of(K::NR) })
    }

    /// Fill `values` and `rows`, `k` neighbours for every query.
    pub(crate) fn run(&self, mut values: &mut [E::Output], mut rows: &mut [i64]) -> Result<()> {
        let numbers = self.queries.start / self.block..self.queries.end.div_ceil(self.block);
        let first = numbers.start;
        let blocks: Vec<Block> = numbers
            .clone()
            .into_par_iter()
            .with_max_len(1)
            .map(|block| self.alone(self.rows_of(block)).map(Mutex::new))
            .collect::<Result<_>>()?;
        let span = plan::symmetric_span(blocks.len(), self.job.problem.threads);
        // The longest rows of pairs first.
        let tasks: Vec<(usize, Range<usize>)> = (0..blocks.len())
            .flat_map(|i| {
                let count = blocks.len();
                (i + 1..count).step_by(span).map(move |start| (i, start..(start + span).min(count)))
            })
            .collect();
        tasks.into_par_iter().with_max_len(1).try_for_each(|(i, others)| self.pairs(first, i, others, &blocks))?;

        let mut parts = Vec::new();
        for block in blocks {
            let candidates = block.into_inner().unwrap_or_else(PoisonError::into_inner);
            let (head, tail) = std::mem::take(&mut values).split_at_mut(candidates.len() * self.job.problem.k);
            let (row_head, row_tail) = std::mem::take(&mut rows).split_at_mut(head.len());
            (values, rows) = (tail, row_tail);
            parts.push((candidates, head, row_head));
        }
        parts.into_par_iter().with_max_len(1).try_for_each(|(candidates, values, rows)| {
            self.job.answer(candidates.into_iter().map(|candidates| candidates.nearest).collect(), values, rows)
        })
    }

    /// The queries of one block.
    fn rows_of(&self, block: usize) -> Range<usize> {
        (block * self.block).max(self.queries.start)..((block + 1) * self.block).min(self.queries.end)
    }

    /// The panels that hold `rows`.
    fn panels_of(rows: &Range<usize>) -> Range<usize> {
        rows.start / K::NR..rows.end.div_ceil(K::NR)
    }

    fn side(&self, rows: Range<usize>) -> Result<Side<K>> {
        let numbers: Vec<u32> = rows.clone().map(|row| row as u32).collect();
        let packed = PackedQuery::pack(self.job.options.simd, self.frame, self.job.query, &numbers)?;
        let prepared = self.job.prepare(rows.clone())?;
        Ok(Side { rows, packed, prepared })
    }

    /// The candidates of a block after its own rows and those that are no queries of this search.
    fn alone(&self, rows: Range<usize>) -> Result<Vec<Candidates>> {
        let job = self.job;
        let side = self.side(rows.clone())?;
        let roundoff = <E::Output as Output>::UNIT_ROUNDOFF;
        let mut block = try_vec(rows.len(), "candidates")?;
        for &(shift, size) in &side.packed.shifts {
            block.push(Candidates {
                nearest: TopK::new(job.problem.k, job.reference().rows())?,
                floor: f32::NEG_INFINITY,
                floors: Bound::new(job.metric(), job.query.dim(), shift, size, self.frame.scale2(), roundoff),
            });
        }
        let mut buffers = Buffers::new::<K>();
        for others in [rows, 0..self.queries.start, self.queries.end..job.reference().rows()] {
            self.one_sided(&side, &mut block, others, &mut buffers)?;
        }
        Ok(block)
    }

    /// Hold the queries of a block against the reference rows `others`.
    fn one_sided(
        &self,
        side: &Side<K>,
        block: &mut [Candidates],
        others: Range<usize>,
        buffers: &mut Buffers<E>,
    ) -> Result<()> {
        let panels = if others.is_empty() { 0..0 } else { Self::panels_of(&others) };
        let most = plan::block_panels(self.packed.panel_bytes());
        for start in panels.clone().step_by(most) {
            let end = (start + most).min(panels.end);
            for group in 0..side.rows.len().div_ceil(K::MR) {
                self.job.monitor.check()?;
                let lanes = group * K::MR..((group + 1) * K::MR).min(side.rows.len());
                let (mut at, mut step) = (start, most);
                if block[lanes.clone()].iter().any(|candidates| candidates.floor == f32::NEG_INFINITY) {
                    step = WARM_UP_PANELS;
                }
                while at < end {
                    let until = (at + step).min(end);
                    step *= 2;
                    let mut bars = Thresholds::closed();
                    for (m, i) in lanes.clone().enumerate() {
                        bars.open(m, block[i].floor, side.packed.terms[i]);
                    }
                    let panel = QueryPanel { codes: side.packed.panel(group), thresholds: &bars };
                    self.kernel.scan(&panel, &self.packed.run(at, until, Visit::All)?, &mut buffers.candidates);
                    self.score(side, group, &others, buffers)?;
                    for &(i, row, value) in &buffers.found {
                        block[i as usize].nearest.push(Neighbour::new::<E::Output>(self.job.metric(), value, row));
                    }
                    buffers.found.clear();
                    block[lanes.clone()].iter_mut().for_each(|candidates| candidates.settle(self.job.metric()));
                    at = until;
                }
            }
        }
        self.job.monitor.advance(side.rows.len() as u64 * others.len() as u64);
        Ok(())
    }

    /// Hold block `i` against the blocks `others`, and those against it; `first` is the number of block 0.
    fn pairs(&self, first: usize, i: usize, others: Range<usize>, blocks: &[Block]) -> Result<()> {
        let side = self.side(self.rows_of(first + i))?;
        let mut buffers = Buffers::new::<K>();
        let most = plan::block_panels(self.packed.panel_bytes());
        let mut mine = Vec::new();
        for j in others {
            let rows = self.rows_of(first + j);
            let panels = Self::panels_of(&rows);
            mine.clear();
            mine.extend(lock(&blocks[i]).iter().map(|candidates| candidates.floor));
            // No key reaches the rows of the panels that are not in the block.
            let mut theirs = vec![f32::INFINITY; panels.len() * K::NR];
            for (floor, candidates) in theirs[rows.start - panels.start * K::NR..].iter_mut().zip(&*lock(&blocks[j])) {
                *floor = candidates.floor;
            }
            let runs = panels.len().div_ceil(most);
            for run in 0..runs {
                let run = panels.start + panels.len() * run / runs..panels.start + panels.len() * (run + 1) / runs;
                let floors = &theirs[(run.start - panels.start) * K::NR..];
                for group in 0..side.rows.len().div_ceil(K::MR) {
                    self.job.monitor.check()?;
                    let lanes = group * K::MR..((group + 1) * K::MR).min(side.rows.len());
                    let (mut bars, mut columns) = (Thresholds::closed(), Transposed::closed(floors));
                    for (m, i) in lanes.enumerate() {
                        bars.open(m, mine[i], side.packed.terms[i]);
                        let (offset, terms) = self.packed.row(side.rows.start + i);
                        columns.open(m, offset, terms);
                    }
                    let panel = QueryPanel { codes: side.packed.panel(group), thresholds: &bars };
                    let run = self.packed.run(run.start, run.end, Visit::All)?;
                    (self.scan_symmetric)(self.kernel, &panel, &run, &columns, &mut buffers.candidates);
                    self.score(&side, group, &rows, &mut buffers)?;
                    if buffers.found.len() > MOST_FOUND {
                        self.enter_both(&side, &rows, (&blocks[i], &blocks[j]), &mut buffers.found);
                    }
                }
            }
            self.enter_both(&side, &rows, (&blocks[i], &blocks[j]), &mut buffers.found);
            self.job.monitor.advance(2 * side.rows.len() as u64 * rows.len() as u64);
        }
        Ok(())
    }

    /// Enter the pairs found between a side and the rows of another block.
    fn enter_both(
        &self,
        side: &Side<K>,
        rows: &Range<usize>,
        (mine, theirs): (&Block, &Block),
        found: &mut Vec<(u32, u32, f64)>,
    ) {
        self.enter(mine, found.iter().map(|&(i, row, value)| (i as usize, value, row)));
        let turned =
            |&(i, row, value): &(u32, u32, f64)| (row as usize - rows.start, value, side.rows.start as u32 + i);
        self.enter(theirs, found.iter().map(turned));
        found.clear();
    }

    /// Enter values and rows as candidates of the numbered queries of a block.
    fn enter(&self, block: &Block, found: impl Iterator<Item = (usize, f64, u32)>) {
        let metric = self.job.metric();
        let mut block = lock(block);
        for (query, value, row) in found {
            block[query].nearest.push(Neighbour::new::<E::Output>(metric, value, row));
        }
        block.iter_mut().for_each(|candidates| candidates.settle(metric));
    }

    /// Form the values of the pairs that were reported, those of other rows than `others` and of a row with itself left out.
    fn score(&self, side: &Side<K>, group: usize, others: &Range<usize>, buffers: &mut Buffers<E>) -> Result<()> {
        let first = group * K::MR;
        let lanes = K::MR.min(side.rows.len() - first);
        let mut scored = 0;
        for m in 0..K::MR {
            if m + 1 < lanes {
                for &row in
                    buffers.candidates.rows(m + 1).iter().take(ROWS).filter(|&&row| others.contains(&(row as usize)))
                {
                    prefetch(self.job.reference().row(row as usize));
                }
            }
            let (rows, _) = buffers.candidates.take(m);
            if rows.is_empty() || m >= lanes {
                continue;
            }
            let i = first + m;
            let scratch = &mut buffers.scratch;
            scratch.rows.clear();
            let counts = |row: usize| others.contains(&row) && row != side.rows.start + i;
            scratch.rows.extend(rows.iter().filter(|&&row| counts(row as usize)));
            self.job.score(&side.prepared[i], scratch)?;
            scored += scratch.rows.len();
            buffers.found.extend(scratch.rows.iter().zip(&scratch.values).map(|(&row, &value)| (i as u32, row, value)));
        }
        self.job.monitor.tally(scored as u64, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use proptest::prelude::*;

    use super::*;
    use crate::Argument;
    use crate::arch::level::{Level, Simd};
    use crate::arch::{self, WithKernel};
    use crate::matrix::MatrixRef;
    use crate::runtime::Monitor;
    use crate::runtime::PoolHandle;
    use crate::search::plan::Options;

    /// A self-search in blocks of 32 rows, which no plan would make.
    struct Tiles<'a, E: Element> {
        job: &'a Job<'a, E>,
        queries: Range<usize>,
    }

    impl<E: Element> WithKernel for Tiles<'_, E> {
        type Output = Option<(Vec<E::Output>, Vec<i64>)>;

        fn run<K: Kernel>(self, kernel: K) -> Self::Output {
            let Self { job, queries } = self;
            let scan_symmetric = K::SCAN_SYMMETRIC?;
            let frame = Frame::choose(job.options.simd, job.metric(), job.reference());
            let packed = PackedReference::<K>::pack(job.options.simd, &frame, job.reference(), 1, job.monitor);
            let packed = packed.expect("finite");
            let len = queries.len() * job.problem.k;
            let (mut values, mut rows) = (vec![E::Output::default(); len], vec![0; len]);
            let tiles = SelfSearch { job, kernel, scan_symmetric, frame: &frame, packed: &packed, queries, block: 32 };
            tiles.run(&mut values, &mut rows).expect("finite");
            assert_eq!(job.monitor.fraction(), 1.0, "progress ends where the work does");
            Some((values, rows))
        }
    }

    fn search<E: Element>(data: &[E], dim: usize, queries: Range<usize>, k: usize, metric: Metric) {
        let reference = MatrixRef::new(data, data.len() / dim, dim, Argument::Reference).expect("good");
        let query = MatrixRef::new(&data[..queries.end * dim], queries.end, dim, Argument::Query).expect("good");
        let all: Vec<u32> = (0..reference.rows() as u32).collect();
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            let threads = NonZero::new(1 + k % 3).expect("positive");
            let options = Options { k, metric, exclude_self: true, simd, threads };
            let problem = Problem {
                metric,
                queries: queries.end,
                references: reference.rows(),
                dim,
                k,
                threads: threads.get(),
                double: E::DOUBLE,
                packed: false,
            };
            let monitor = Monitor::new();
            monitor.begin(queries.len() as u64 * reference.rows() as u64);
            let job = Job::whole(query, reference, &options, problem, &monitor);
            let pool = PoolHandle::get(threads).expect("a pool");
            let tiles = Tiles { job: &job, queries: queries.clone() };
            let Some((values, rows)) = pool.pool().install(|| arch::with_int8(simd, tiles)) else { continue };
            let mut scratch = Scratch::new();
            for (at, i) in queries.clone().enumerate() {
                scratch.rows.clear();
                scratch.rows.extend(all.iter().filter(|&&row| row as usize != i));
                job.score(&Prepared::new(metric, query.row(i)), &mut scratch).expect("in memory");
                let mut wanted: Vec<Neighbour> = (scratch.rows.iter().zip(&scratch.values))
                    .map(|(&row, &value)| Neighbour::new::<E::Output>(metric, value, row))
                    .collect();
                wanted.sort_unstable();
                for (n, wanted) in wanted.iter().take(k).enumerate() {
                    let place = at * k + n;
                    assert_eq!(rows[place], i64::from(wanted.row()), "{metric:?}: query {i}, neighbour {n}");
                    let value: E::Output = wanted.value(metric);
                    assert_eq!(format!("{:?}", values[place]), format!("{value:?}"));
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        /// Rows of every size, ties, queries that begin and end anywhere in the reference.
        #[test]
        fn tiles_find_what_sorting_finds(
            count in 20usize..300,
            dim in 1usize..40,
            begin in 0.0f64..1.0,
            end in 0.0f64..1.0,
            k in 1usize..20,
            metric in 0..Metric::ALL.len(),
            spread in prop_oneof![Just(2u32), Just(1000)],
            giants in prop_oneof![Just(0usize), Just(97), Just(5)],
            exponent in prop_oneof![Just(0i32), Just(-60), Just(60), -30..30],
            offset in prop_oneof![Just(0.0f32), Just(100.0)],
            double: bool,
            seed: u32,
        ) {
            let metric = Metric::ALL[metric];
            prop_assume!(metric.is_symmetric());
            let mut state = seed;
            let data: Vec<f32> = (0..count * dim)
                .map(|at| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let x = offset + ((state >> 16) % spread) as f32 / spread as f32 - 0.3;
                    let giant = giants > 0 && (at / dim).is_multiple_of(giants);
                    x * if giant { 1e12 } else { 1.0 } * 2f32.powi(exponent)
                })
                .collect();
            let end = 1 + (end * (count - 1) as f64) as usize;
            let queries = (begin * end as f64) as usize..end;
            if double {
                let data: Vec<f64> = data.iter().map(|&x| f64::from(x) * (1.0 + 1e-10)).collect();
                search(&data, dim, queries, k, metric);
            } else {
                search(&data, dim, queries, k, metric);
            }
        }
    }
}
