//! How one search is cut up: which filter, which blocks, which parallel axis. All sizes that were tuned live here.
//!
//! ```text
//! filter?  few references, or k a large share of them  ──> Direct: float64 values, no packing
//!          no sum of squares or products               ──> Float32, if there is a bound at all
//!          few queries, and no panels kept             ──> Bare: float32 arithmetic on the rows as passed
//!          a level that multiplies bytes               ──> Int8: packed codes, certified bound
//!          else                                        ──> Float32: packed panels, certified bound
//!          Int8 and Float32 are tried on some queries first: where too many rows survive, the next one down is used
//!          queries that are rows of the reference, small k  ──> symmetric tiles, where the kernel has them
//! axis?    enough chunks of queries for the threads    ──> queries only
//!          else                                        ──> queries x splits of the references, merged at the end
//! ```
//!
//! A plan changes the time of a search, never its answer.

use std::ops::Range;

use crate::arch;
use crate::arch::kernel::{MAX_RUN, SAMPLE_STRIDE};
use crate::arch::level::Level;
use crate::filter::Filter;
use crate::filter::bound::{LARGEST_DIM, LARGEST_INT8_DIM};
use crate::metric::{Geometry, Metric};
use crate::topk::TopK;

/// Up to this many queries a pass of float64 over the rows is bound by memory.
const DIRECT_QUERIES: usize = 2;

/// Up to this many queries a pass of float32 over the rows as they lie takes less time than packing them.
const UNPACKED_QUERIES: usize = 32;

/// With fewer references than this the filter's thresholds never settle.
const FEW_REFERENCES: usize = 192;

/// The filter pays as long as the k nearest are a smaller share of the references than one in this many.
const SHARE: usize = 8;

/// The same where float64 values are costly: they take far longer than a key of the filter and its share of the packing.
const COSTLY_SHARE: usize = 2;

/// Up to this many queries a distance that is no sum of squares is formed in float64 throughout, unless that is costly.
const LP_DIRECT_QUERIES: usize = 8;

/// The time of a key over that of a value for such distances, and where values are costly.
const LP_KEY: f64 = 0.5;
const COSTLY_KEY: f64 = 0.05;

/// Bytes of reference codes that stay in the second-level cache while a chunk of queries passes over them.
const BLOCK_BYTES: usize = 256 << 10;

/// Query rows that one task carries at most.
const CHUNK_ROWS: usize = 768;

/// Tasks for each thread: enough that the last one to finish is not long alone.
const TASKS_PER_THREAD: usize = 4;

/// Memory that the candidates of all running tasks may take together.
const CANDIDATE_BYTES: usize = 24 << 20;

/// References that one split holds at least.
const SPLIT_ROWS: usize = 2048;

/// Bytes of a task's queries in float64: beyond the second-level cache every survivor waits for its query too.
const QUERY_BYTES: usize = 2 << 20;

/// Query rows of a task from which on splitting further costs more in passes over the references than it balances.
const FULL_CHUNK: usize = 132;

/// From this k on most survivors come from thresholds that are still low; a sample of the references raises them.
const SAMPLED_K: usize = 8;

/// Queries for each thread that try a filter before the others follow.
const PROBE_ROWS: usize = 24;

/// Scans by int8 and float32 and the float64 value of a pair, in cycles: `a + b dim`. Ratios matter, and these are robust.
const INT8_CYCLES: (f64, f64) = (0.3, 0.007);
const FLOAT32_CYCLES: (f64, f64) = (0.3, 0.033);
const VALUE_CYCLES: (f64, f64) = (40.0, 0.25);

/// Rows of a block of a self-search by symmetric tiles at most, and bytes of these rows in float64.
const SYMMETRIC_BLOCK: usize = 1344;
const SYMMETRIC_BYTES: usize = 8 << 20;

/// Queries from which on symmetric tiles pay; twice as many where the ordinary way would take its thresholds from a sample.
const SYMMETRIC_ROWS: usize = 4096;

/// There they pay for long rows only, up to one neighbour for so many columns. CPU time of the ordinary way over that of
/// tiles, one thread, int8, squared Euclidean: 30,000 x 384 at k 1 / 10 / 20 / 50: 1.5 / 1.3 / 1.05 / 0.95; 10,000 x 384 at
/// k 1 / 10 / 20: 1.3 / 1.15 / 0.99; 5,000 x 384 at k 1 / 10: 1.1 / 0.99; 20,000 x 128 at k 1 / 5 / 10 / 20: 1.4 / 1.3 / 1.1 /
/// 0.95; 20,000 x 64 at k 1 / 7 / 10: 1.5 / 1.15 / 0.98. Cosine, whose values cost more: 30,000 x 384 at k 1 / 10: 1.3 / 1.15.
const SYMMETRIC_COLUMNS: usize = 24;

/// Below this many multiply-adds a search is done before a hand-over to other threads would be.
const INLINE_WORK: u64 = 1 << 21;

/// Multiply-adds of a direct search that take about as long as one of a filtered one.
const DIRECT_COST: u64 = 8;

/// The same where each takes a power.
const COSTLY_DIRECT_COST: u64 = 256;

/// Panels of the first scan of queries that have no threshold yet; doubled until a block is scanned at once.
pub(crate) const WARM_UP_PANELS: usize = 2;

/// The same for rows that are not packed.
pub(crate) const WARM_UP_ROWS: usize = 64;

/// Query rows of a task of a search by radius at most, a multiple of the tallest panel: bounds what is found and not yet
/// written out.
pub(crate) const RADIUS_CHUNK_ROWS: usize = 192;

/// Rows among themselves for which a search by radius meets each pair once; fewer take no time anyway.
pub(crate) const TRIANGLE_ROWS: usize = 1024;

/// Undecided rows of a query for ranks that are worth a pass of float64.
pub(crate) const RANK_BATCH: usize = 32;

/// Pairs that a task of symmetric tiles holds before it enters them: usual tasks find fewer between two blocks.
pub(crate) const PAIRS_BUFFERED: usize = 1 << 16;

/// Pairs of a task of [`crate::Pairwise`]: a few hundred microseconds for rows of ordinary width.
pub(crate) const PAIRWISE_TASK: usize = 1024;

/// Rows of a segment of an index that is packed. Smaller ones are searched as they lie, or packed for one search: that costs
/// little.
pub(crate) const SEALED_ROWS: usize = 8192;

/// The sizes that a plan depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) queries: usize,
    pub(crate) references: usize,
    pub(crate) dim: usize,
    pub(crate) k: usize,
    pub(crate) threads: usize,
    /// Whether the rows are float64.
    pub(crate) double: bool,
    /// Whether packed references are kept, so that packing them costs nothing.
    pub(crate) packed: bool,
    pub(crate) metric: Metric,
}

impl Problem {
    /// All pairs of a query and a reference.
    pub(crate) fn pairs(&self) -> u64 {
        (self.queries as u64).saturating_mul(self.references as u64)
    }

    /// Multiply-adds of all pairs.
    pub(crate) fn work(&self) -> u64 {
        self.pairs().saturating_mul(self.dim as u64)
    }
}

/// See the module header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Query rows of a task.
    pub(crate) chunk: usize,
    /// Parts that the references are split into.
    pub(crate) splits: usize,
}

impl Problem {
    /// The filter to begin with.
    pub(crate) fn filter(&self, level: Level) -> Filter {
        let is_costly = self.metric.is_costly();
        // Panels that are kept save few queries nothing but memory traffic, of which only codes need less than rows.
        let packed = self.packed && self.packed_filter(level) == Filter::Int8;
        let direct_queries = match self.metric.geometry() {
            _ if is_costly || packed => 0,
            Geometry::Lp => LP_DIRECT_QUERIES,
            Geometry::Euclidean | Geometry::Dot => DIRECT_QUERIES,
        };
        if self.references <= FEW_REFERENCES
            || self.queries <= direct_queries
            || self.k.saturating_mul(if is_costly { COSTLY_SHARE } else { SHARE }) > self.references
            || self.dim > LARGEST_DIM
            || !self.metric.is_filterable()
        {
            Filter::Direct
        } else if self.queries <= UNPACKED_QUERIES && !packed && !self.double && self.metric.geometry() != Geometry::Lp
        {
            Filter::Unpacked
        } else {
            self.packed_filter(level)
        }
    }

    /// The filter to begin with where the references are packed.
    pub(crate) fn packed_filter(&self, level: Level) -> Filter {
        let has_int8 = arch::has_int8(level) && self.metric.geometry() != Geometry::Lp;
        if has_int8 && self.dim <= LARGEST_INT8_DIM { Filter::Int8 } else { Filter::Float32 }
    }

    /// The filter that wants panels, if any does.
    pub(crate) fn filter_of_panels(&self, level: Level) -> Option<Filter> {
        match self.filter(level) {
            Filter::Direct | Filter::Unpacked => None,
            packed => Some(packed),
        }
    }

    /// The filter to begin with for ranks.
    pub(crate) fn rank_filter(&self, level: Level) -> Filter {
        match self.filter(level) {
            Filter::Direct => Filter::Direct,
            // Where targets stand among many other rows, 8 bits leave much open: never without a try.
            _ if self.probe() == 0 => Filter::Float32,
            _ => self.packed_filter(level),
        }
    }

    /// How many of the queries try a filter before the rest follows; 0 if there are too few to bother.
    pub(crate) fn probe(&self) -> usize {
        let probe = self.threads.saturating_mul(PROBE_ROWS);
        if probe.saturating_mul(8) > self.queries { 0 } else { probe }
    }

    /// The filter to go on with, when `filter` let a share `rescored` of the pairs through, of which a sharper one would have
    /// stopped the share `false_positives` (of all pairs).
    pub(crate) fn next_filter(&self, filter: Filter, rescored: f64, false_positives: f64) -> Filter {
        if self.metric.geometry() == Geometry::Lp {
            let key = if self.metric.is_costly() { COSTLY_KEY } else { LP_KEY };
            return if key + rescored <= 1.0 { filter } else { Filter::Direct };
        }
        let cycles = |(a, b): (f64, f64)| a + b * self.dim as f64;
        let value = cycles(VALUE_CYCLES);
        let int8 = cycles(INT8_CYCLES) + rescored * value;
        let float32 =
            cycles(FLOAT32_CYCLES) + (rescored - if filter == Filter::Int8 { false_positives } else { 0.0 }) * value;
        match filter {
            Filter::Int8 if int8 <= float32.min(value) => Filter::Int8,
            Filter::Int8 | Filter::Float32 if float32 <= value => Filter::Float32,
            _ => Filter::Direct,
        }
    }
}

/// The rank, in a sample of one row in [`SAMPLE_STRIDE`], of a row that most likely stands a little behind rank `k` of
/// `rows`; `None` where a sample does not pay.
pub(crate) fn sample_rank(k: usize, rows: usize) -> Option<usize> {
    let mean = k as f64 / SAMPLE_STRIDE as f64;
    let rank = (mean + 2.5 * mean.sqrt() + 2.0) as usize;
    (k >= SAMPLED_K && rows / SAMPLE_STRIDE >= 4 * rank).then_some(rank)
}

impl Plan {
    pub(crate) fn new(problem: &Problem, filter: Filter) -> Self {
        let tasks = problem.threads.saturating_mul(TASKS_PER_THREAD);
        // With many threads and a large k not even one query fits the budget; one is carried all the same.
        let bytes = TopK::bytes(problem.k.max(16), problem.references).saturating_add(8 * problem.dim);
        let affordable = (CANDIDATE_BYTES / problem.threads / bytes).max(1);
        let wanted = problem.queries.div_ceil(tasks);
        let chunk = match filter {
            Filter::Direct => wanted.clamp(1, CHUNK_ROWS).min(affordable),
            // One pass over the memory for all of them.
            Filter::Unpacked => problem.queries.clamp(1, affordable),
            Filter::Float32 | Filter::Int8 => {
                let least = problem.queries.div_ceil(problem.threads).clamp(24, FULL_CHUNK);
                // A multiple of 12, the tallest panel; other heights lose a few lanes in the last panel only.
                let warm = (QUERY_BYTES / (size_of::<f64>() * problem.dim)).max(48);
                wanted.clamp(least.min(warm), CHUNK_ROWS.min(warm)).min(affordable).next_multiple_of(12)
            }
        };
        let chunks = problem.queries.div_ceil(chunk).max(1);
        let wanted = problem.threads.saturating_mul(2);
        let splits = if chunks >= problem.threads || problem.threads == 1 {
            1
        } else {
            wanted.div_ceil(chunks).min(problem.references.div_ceil(SPLIT_ROWS)).max(1)
        };
        Self { chunk, splits }
    }

    /// The part of `units` (panels or rows) that belongs to one split.
    pub(crate) fn split(&self, units: Range<usize>, split: usize) -> Range<usize> {
        let at = |split: usize| units.start + units.len() * split / self.splits;
        at(split)..at(split + 1)
    }
}

/// Rows of a block of a self-search by symmetric tiles, or `None` where the ordinary way is better. A candidate takes
/// `bytes` beside the neighbours it holds.
pub(crate) fn symmetric_block(problem: &Problem, bytes: usize) -> Option<usize> {
    let memory = TopK::bytes(problem.k, problem.references).saturating_add(bytes).saturating_mul(problem.queries);
    // All candidates are kept at once; half of what the rows take in float32 is in proportion.
    let affordable = CANDIDATE_BYTES.max(problem.references.saturating_mul(problem.dim).saturating_mul(2));
    let least = if problem.k < SAMPLED_K { SYMMETRIC_ROWS } else { 2 * SYMMETRIC_ROWS };
    let pays = problem.queries >= least
        && problem.queries.saturating_mul(2) >= problem.references
        && problem.k <= (problem.dim / SYMMETRIC_COLUMNS).max(SAMPLED_K - 1)
        && memory <= affordable;
    let blocks = problem.threads.saturating_mul(4).max(8);
    let most = (SYMMETRIC_BYTES / (size_of::<f64>() * problem.dim)).clamp(96, SYMMETRIC_BLOCK);
    // A multiple of the heights of all panels.
    pays.then(|| problem.queries.div_ceil(blocks).min(most).next_multiple_of(96))
}

/// Blocks that a task holds one block against: packing that one is repeated by every task.
pub(crate) fn symmetric_span(blocks: usize, threads: usize) -> usize {
    (blocks * blocks / 2 / threads.saturating_mul(TASKS_PER_THREAD)).clamp(1, 16)
}

/// Whether a search of this size should stay on the calling thread.
pub(crate) fn is_small(problem: &Problem, level: Level) -> bool {
    let cost = match problem.filter(level) {
        Filter::Direct if problem.metric.is_costly() => COSTLY_DIRECT_COST,
        Filter::Direct => DIRECT_COST,
        Filter::Unpacked | Filter::Float32 | Filter::Int8 => 1,
    };
    problem.work().saturating_mul(cost) <= INLINE_WORK
}

/// Panels of one block: they stay in cache while a chunk of queries passes over them.
pub(crate) fn block_panels(panel_bytes: usize) -> usize {
    (BLOCK_BYTES / panel_bytes).clamp(1, MAX_RUN)
}

/// Rows of one block of a direct search.
pub(crate) fn block_rows(row_bytes: usize) -> usize {
    (BLOCK_BYTES / row_bytes).clamp(1, 4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(queries: usize, references: usize, dim: usize, k: usize, threads: usize) -> Problem {
        Problem { queries, references, dim, k, threads, double: false, packed: false, metric: Metric::SqEuclidean }
    }

    #[test]
    fn many_queries_are_cut_by_queries() {
        // 4,096 queries over 2 threads x 4 tasks = 512 a task, up to a multiple of 12: 516; 8 chunks for 2 threads.
        let plan = Plan::new(&problem(4096, 65536, 128, 10, 2), Filter::Int8);
        assert_eq!(plan, Plan { chunk: 516, splits: 1 });
    }

    #[test]
    fn few_chunks_split_the_references() {
        // 64 queries on 4 threads: 3 chunks of 24 rows; 8 tasks are wanted, so 3 splits.
        assert_eq!(Plan::new(&problem(64, 65536, 128, 10, 4), Filter::Int8), Plan { chunk: 24, splits: 3 });
        // One query on two threads: 4 splits of the references.
        assert_eq!(Plan::new(&problem(1, 65536, 128, 10, 2), Filter::Direct), Plan { chunk: 1, splits: 4 });
    }

    #[test]
    fn candidates_fit_their_memory() {
        // k 1,000: 1,250 candidates of 16 bytes and 1 kB of query; 24 MiB over 2 threads = 12 MiB, hence 598 queries.
        assert_eq!(Plan::new(&problem(8192, 65536, 128, 1000, 2), Filter::Int8).chunk, 600);
    }

    #[test]
    fn no_number_of_threads_is_too_large_to_plan_for() {
        // 24 MiB over 64 threads are 384 KiB; k 30,000 needs 600 KiB a query: one query all the same, up to a panel.
        assert_eq!(Plan::new(&problem(100, 400_000, 4, 30_000, 64), Filter::Int8).chunk, 12);
        for threads in [30_000, usize::MAX / 2, usize::MAX] {
            let plan = Plan::new(&problem(200, 200, 4, 3, threads), Filter::Float32);
            assert!(plan.chunk >= 1 && plan.splits >= 1);
            assert_eq!(problem(200, 200, 4, 3, threads).probe(), 0);
        }
    }

    #[test]
    fn the_filter_follows_level_and_size() {
        assert_eq!(problem(1000, 1000, 8, 999, 2).filter(Level::Avx512Vnni), Filter::Direct);
        assert_eq!(problem(1000, 1000, 8, 125, 2).filter(Level::Avx512Vnni), Filter::Int8);
        assert_eq!(problem(1000, 1000, 8, 125, 2).filter(Level::Avx512), Filter::Float32);
        assert_eq!(problem(1000, 1000, 70_000, 125, 2).filter(Level::AvxVnni), Filter::Float32);
        assert_eq!(problem(1000, 150, 8, 5, 2).filter(Level::Scalar), Filter::Direct);
        assert_eq!(problem(2, 1000, 8, 5, 2).filter(Level::Avx512Vnni), Filter::Direct);
        assert_eq!(problem(8, 1000, 8, 5, 2).filter(Level::Avx512Vnni), Filter::Unpacked);
        assert_eq!(Problem { double: true, ..problem(8, 1000, 8, 5, 2) }.filter(Level::Avx512), Filter::Float32);
    }

    #[test]
    fn ranks_begin_with_8_bits_only_where_they_can_be_tried() {
        let level = Level::Avx512Vnni;
        assert_eq!(problem(4096, 65536, 128, 1, 2).rank_filter(level), Filter::Int8);
        assert_eq!(problem(4096, 65536, 128, 1, 2).rank_filter(Level::Avx512), Filter::Float32);
        assert_eq!(problem(100, 65536, 128, 1, 2).rank_filter(level), Filter::Float32);
        assert_eq!(problem(8, 65536, 128, 1, 2).rank_filter(level), Filter::Float32);
        assert_eq!(problem(2, 65536, 128, 1, 2).rank_filter(level), Filter::Direct);
        assert_eq!(problem(4096, 150, 128, 1, 2).rank_filter(level), Filter::Direct);
    }

    #[test]
    fn a_filter_that_lets_much_through_is_left() {
        let problem = problem(4096, 65536, 128, 10, 2);
        // 300 of 65,536 rows survive: int8 stays, whatever they are.
        assert_eq!(problem.next_filter(Filter::Int8, 0.005, 0.005), Filter::Int8);
        // A fifth survives for want of precision: float32 has it.
        assert_eq!(problem.next_filter(Filter::Int8, 0.2, 0.19), Filter::Float32);
        // A fifth survives because of ties: float32 would not help.
        assert_eq!(problem.next_filter(Filter::Int8, 0.2, 0.0), Filter::Int8);
        // Everything survives.
        assert_eq!(problem.next_filter(Filter::Int8, 1.0, 0.0), Filter::Direct);
        assert_eq!(problem.next_filter(Filter::Float32, 1.0, 0.9), Filter::Direct);
        assert_eq!(problem.next_filter(Filter::Float32, 0.3, 0.2), Filter::Float32);
    }

    #[test]
    fn samples_are_for_large_k() {
        // Mean 12.5, deviation 3.5: rank 12.5 + 8.8 + 2.
        assert_eq!(sample_rank(100, 65536), Some(23));
        assert_eq!(sample_rank(7, 65536), None);
        assert_eq!(sample_rank(100, 700), None);
    }

    #[test]
    fn costly_values_are_filtered_for_few_queries_and_large_k() {
        let costly = |queries, k| Problem {
            metric: Metric::minkowski(2.7).expect("above 0"),
            ..problem(queries, 1000, 8, k, 2)
        };
        assert_eq!(costly(1, 10).filter(Level::Scalar), Filter::Float32);
        assert_eq!(costly(100, 500).filter(Level::Scalar), Filter::Float32);
        assert_eq!(costly(100, 501).filter(Level::Scalar), Filter::Direct);
        assert!(!is_small(&costly(10, 999), Level::Scalar));
        assert_eq!(costly(100, 10).next_filter(Filter::Float32, 0.9, 0.0), Filter::Float32);
        assert_eq!(costly(100, 10).next_filter(Filter::Float32, 1.0, 0.0), Filter::Direct);
    }

    #[test]
    fn distances_that_are_no_products_know_one_filter() {
        let level = Level::Avx512Vnni;
        let cityblock = |queries| Problem { metric: Metric::Cityblock, ..problem(queries, 1000, 8, 10, 2) };
        assert_eq!(cityblock(8).filter(level), Filter::Direct);
        assert_eq!(cityblock(9).filter(level), Filter::Float32);
        assert_eq!(cityblock(500).filter(level), Filter::Float32);
        assert_eq!(cityblock(500).packed_filter(level), Filter::Float32);
        assert_eq!(cityblock(500).next_filter(Filter::Float32, 0.1, 0.1), Filter::Float32);
        assert_eq!(cityblock(500).next_filter(Filter::Float32, 0.9, 0.0), Filter::Direct);
        let below_1 = Metric::minkowski(0.7).expect("above 0");
        assert_eq!(Problem { metric: below_1, ..cityblock(500) }.filter(level), Filter::Direct);
    }

    #[test]
    fn tiles_serve_both_sides_where_it_pays() {
        let block = |problem: &Problem| symmetric_block(problem, 150);
        assert_eq!(block(&problem(30_000, 30_000, 384, 10, 2)), Some(1344));
        assert_eq!(block(&problem(60_000, 60_000, 512, 10, 2)), Some(1344), "candidates of 34 MB, codes of 31 MB");
        assert_eq!(block(&problem(8000, 16_000, 128, 5, 2)), Some(1056), "eight blocks: 1,000 rows and up");
        assert_eq!(block(&problem(30_000, 30_000, 2048, 10, 2)), Some(576), "512 rows are 8 MiB");
        assert_eq!(block(&problem(8000, 16_001, 128, 5, 2)), None, "most rows are no queries");
        assert_eq!(block(&problem(30_000, 30_000, 128, 10, 2)), None, "a sample does more for this k");
        assert_eq!(block(&problem(8000, 8000, 384, 10, 2)), None, "and here too");
        assert_eq!(block(&problem(4000, 4000, 384, 1, 2)), None, "too few rows");
        assert_eq!(block(&problem(400_000, 400_000, 8, 7, 2)), None, "candidates of 200 MB for rows of 13 MB");
    }

    #[test]
    fn splits_cover_everything_once() {
        let plan = Plan { chunk: 7, splits: 3 };
        let parts: Vec<_> = (0..3).map(|split| plan.split(5..15, split)).collect();
        assert_eq!(parts, [5..8, 8..11, 11..15]);
    }
}
