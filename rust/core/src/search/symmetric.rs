//! Self-search by symmetric tiles: each tile of products serves both of its blocks of rows as queries.
//!
//! ```text
//! diagonal: each block ──scan of itself and of rows that are not queries──> a KnnCollector with thresholds    in parallel
//! upper triangle: for each pair of blocks (I, J), I < J                                                       in parallel
//!     scan, floors of both sides ──i may be near j, or j near i──> one float64 value ──> collectors of I and of J
//! ```
//!
//! This computes about half of the products, and a pair that is a candidate for both sides is rescored once: its value has
//! the same bits either way. The diagonal comes first, so that all rows have thresholds before the many pairs of the
//! triangle.
//!
//! A block's collector is locked only to enter pairs, never during a scan or while pairs are rescored: those take nearly all
//! of the time, and tasks with a block in common would wait for each other. Thresholds are copied before a scan; a stale one
//! is only lower. The order in which pairs are entered affects how many rows are rejected, but not the result, since the
//! order of neighbours is total.
//!
//! Inner products centre the two sides of a pair differently, and the kernels of Minkowski distances (cityblock and Chebyshev
//! among them) have no symmetric scan: `knn.rs` searches these without pairs of blocks. So are
//! searches for which `plan.rs` expects no gain: here all collectors live until the end, and no sample raises the thresholds
//! of a large k.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use super::Context;
use super::engine::Scanner;
use super::nearest::{KnnCollector, Out, State};
use super::plan::{self, Problem};
use super::scan::{Collector, Pass};
use crate::error::{Error, Result};
use crate::runtime::alloc::{try_collect, try_filled, try_map_parallel, try_reserve, try_vec};

/// The purpose of buffers in [`Error::OutOfMemory`].
const BLOCKS: &str = "the blocks of a self-search";

/// Rows of a block; `None` if symmetric tiles are impossible or do not pay.
pub(crate) fn block(context: &Context<'_>, scanner: &dyn Scanner, queries: &[u32]) -> Option<usize> {
    if !context.metric.is_symmetric() {
        return None;
    }
    // Whole panels, so that no panel of a scan is shared by two blocks.
    let problem = Problem { queries: queries.len(), ..context.problem };
    let rows = plan::symmetric_block(&problem, size_of::<State>())?.next_multiple_of(scanner.unit_rows());
    // Last, since it may compare all queries with the references.
    context.is_self_search().then_some(rows)
}

/// Write the k nearest neighbours of `queries`, which are consecutive rows of the reference, to `place`.
pub(crate) fn search(
    context: &Context<'_>,
    scanner: &dyn Scanner,
    queries: &[u32],
    block_rows: usize,
    place: Out<'_>,
) -> Result<()> {
    let (Some(&first), Some(&last)) = (queries.first(), queries.last()) else { return Ok(()) };
    // They start at 0 only if no query was used to probe the filter: the first and last blocks may be incomplete.
    let queries = first as usize..last as usize + 1;
    let search = SelfSearch { context, scanner, queries: queries.clone(), block_rows };
    let numbers = try_collect(queries.start / block_rows..queries.end.div_ceil(block_rows), BLOCKS)?;
    let blocks = try_map_parallel(numbers, BLOCKS, |number| search.diagonal(number))?;
    let span = plan::symmetric_span(blocks.len(), context.problem.threads);
    // By rows of the triangle, the longest first, so that the last tasks are short and the threads finish together.
    let tasks = || {
        (0..blocks.len()).flat_map(|i| {
            let count = blocks.len();
            (i + 1..count).step_by(span).map(move |start| (i, start..(start + span).min(count)))
        })
    };
    let mut listed: Vec<(usize, Range<usize>)> = try_vec(tasks().count(), BLOCKS)?;
    listed.extend(tasks());
    listed.into_par_iter().with_max_len(1).try_for_each(|(i, others)| search.pairs(i, others, &blocks))?;

    // Sorting a large k takes a while: in parallel too.
    let (mut rest, mut parts) = (place, try_vec(blocks.len(), BLOCKS)?);
    for block in blocks {
        let found = block.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (here, more) = rest.split_at(found.queries() * context.problem.k);
        rest = more;
        parts.push((found, here));
    }
    parts
        .into_par_iter()
        .with_max_len(1)
        .try_for_each(|(found, place)| found.write(context.problem.k, 0, place, context.monitor))
}

/// A block of rows and their neighbours so far.
struct Block {
    rows: Range<usize>,
    found: Mutex<KnnCollector>,
}

impl Block {
    fn lock(&self) -> MutexGuard<'_, KnnCollector> {
        // Only a panic of another task poisons the lock, and it ends the search.
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SelfSearch<'a> {
    context: &'a Context<'a>,
    scanner: &'a dyn Scanner,
    queries: Range<usize>,
    block_rows: usize,
}

impl SelfSearch<'_> {
    fn pass(&self, rows: &Range<usize>) -> Result<Pass<'_>> {
        let queries = try_collect(rows.clone().map(|row| row as u32), BLOCKS)?;
        Pass::new(self.context, self.scanner, &queries, rows.clone())
    }

    /// A block, after a scan of its own rows and of all rows that are not queries. The latter appear in no pair of blocks.
    fn diagonal(&self, number: usize) -> Result<Block> {
        let start = (number * self.block_rows).max(self.queries.start);
        let rows = start..((number + 1) * self.block_rows).min(self.queries.end);
        let references = self.context.source.rows.rows();
        let mut pass = self.pass(&rows)?;
        let mut found = KnnCollector::new(&pass, self.context.ranking, |_| None, self.context.problem.k, references)?;
        for others in [rows.clone(), 0..self.queries.start, self.queries.end..references] {
            pass.visit_rows(others, &mut found)?;
        }
        Ok(Block { rows, found: Mutex::new(found) })
    }

    /// All pairs of block `i` with the blocks `others`. Several blocks per task, since each task packs block `i` again.
    fn pairs(&self, i: usize, others: Range<usize>, blocks: &[Block]) -> Result<()> {
        let (mine, unit) = (&blocks[i], self.scanner.unit_rows());
        let mut pass = self.pass(&mine.rows)?;
        for theirs in &blocks[others] {
            let padding = theirs.rows.start % unit;
            // The first and the last unit may have rows outside the block: their floor is infinity, which no key reaches.
            let count = (padding + theirs.rows.len()).next_multiple_of(unit);
            let mut floors = try_filled(f32::INFINITY, count, BLOCKS)?;
            for (floor, now) in floors[padding..].iter_mut().zip(theirs.lock().floors()) {
                *floor = now;
            }
            // The lock is released before the scan.
            let mut my_floors = try_vec(mine.rows.len(), BLOCKS)?;
            my_floors.extend(mine.lock().floors());
            let mut pairs = Pairs { mine, theirs, floors: my_floors, found: Vec::new() };
            pass.visit_pairs(theirs.rows.clone(), &floors, &mut pairs)?;
            pairs.enter();
            // The pass has advanced by the pairs (i, j); the progress also counts (j, i).
            self.context.monitor.advance(mine.rows.len() as u64 * theirs.rows.len() as u64);
        }
        Ok(())
    }
}

/// The candidates among the pairs of two blocks, for both.
struct Pairs<'a> {
    mine: &'a Block,
    theirs: &'a Block,
    /// Floors of `mine`, copied before the scan.
    floors: Vec<f32>,
    /// Query of `mine`, value, reference row.
    found: Vec<(usize, f64, u32)>,
}

impl Pairs<'_> {
    /// Enter the pairs into both collectors, one after the other: no task ever holds two locks, so none can deadlock.
    fn enter(&mut self) {
        self.mine.lock().enter(self.found.iter().copied());
        let (mine, theirs) = (self.mine.rows.start, self.theirs.rows.start);
        let transposed =
            |&(query, value, row): &(usize, f64, u32)| (row as usize - theirs, value, (mine + query) as u32);
        self.theirs.lock().enter(self.found.iter().map(transposed));
        self.found.clear();
    }
}

impl Collector for Pairs<'_> {
    fn reject_below(&self, query: usize) -> f32 {
        self.floors[query]
    }

    fn take(&mut self, query: usize, rows: &[u32], values: &[f64]) -> Result<u64> {
        try_reserve(&mut self.found, rows.len(), BLOCKS)?;
        self.found.extend(rows.iter().zip(values).map(|(&row, &value)| (query, value, row)));
        // Bounds the memory where nearly every pair is a candidate.
        if self.found.len() > plan::PAIRS_BUFFERED {
            self.enter();
        }
        Ok(0)
    }

    fn merge(&mut self, _: Self) -> Result<()> {
        Err(Error::Panic("the pairs of two blocks were split".into()))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use proptest::prelude::*;

    use super::*;
    use crate::Argument;
    use crate::arch::level::{Level, Simd};
    use crate::exact::Widened;
    use crate::exact::rows::Rows;
    use crate::filter::Filter;
    use crate::matrix::{Element, MatrixRef, Output};
    use crate::metric::Metric;
    use crate::order::{Neighbour, Ranking};
    use crate::runtime::{Monitor, PoolHandle};
    use crate::search::SelfRule;
    use crate::search::engine::scanner;
    use crate::search::references::Source;

    /// A self-search in blocks of about 32 rows, smaller than any plan's.
    fn check<E: Element>(data: &[E], dim: usize, queries: Range<usize>, k: usize, metric: Metric) {
        let reference = MatrixRef::new(data, data.len() / dim, dim, Argument::Reference).expect("good");
        let query = MatrixRef::new(&data[..queries.end * dim], queries.end, dim, Argument::Query).expect("good");
        let numbers: Vec<u32> = queries.clone().map(|row| row as u32).collect();
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            let threads = NonZero::new(1 + k % 3).expect("positive");
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
            let ranking = Ranking::new(metric, E::PRECISION);
            let context = Context {
                query: &query,
                source: Source::one_shot(&reference),
                first_reference: 0,
                rows: 0..reference.rows(),
                metric,
                ranking,
                exclude: SelfRule::From(0),
                upper_triangle: false,
                simd,
                problem,
                monitor: &monitor,
            };
            let scanner = scanner(&context, Filter::Int8).expect("finite");
            if !scanner.is_symmetric() {
                continue;
            }
            let len = queries.len() * k;
            let (mut values, mut rows) = (vec![E::Output::default(); len], vec![0; len]);
            let place = Out::Answer(E::Output::erase(&mut values), &mut rows);
            let pool = PoolHandle::get(threads).expect("a pool");
            let block = 32usize.next_multiple_of(scanner.unit_rows());
            pool.pool().install(|| search(&context, &*scanner, &numbers, block, place)).expect("finite");
            assert_eq!(monitor.fraction(), 1.0, "progress ends where the work does");
            let (mut scratch, mut wide, mut found) = (Vec::new(), Widened::new(), Vec::new());
            for (at, i) in queries.clone().enumerate() {
                let others: Vec<u32> = (0..reference.rows() as u32).filter(|&row| row as usize != i).collect();
                let prepared = query.prepare(metric, i, &mut scratch).expect("memory");
                Rows::score(&reference, simd, &prepared, &others, &mut wide, &mut found).expect("memory");
                let mut wanted: Vec<Neighbour> =
                    others.iter().zip(&found).map(|(&row, &value)| ranking.neighbour(value, row)).collect();
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

        /// Rows of all magnitudes, ties, queries that start and end anywhere in the reference.
        #[test]
        fn symmetric_tiles_agree_with_sorting(
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
                check(&data, dim, queries, k, metric);
            } else {
                check(&data, dim, queries, k, metric);
            }
        }
    }
}
