//! The plan of a search: its filter, block sizes and parallel axis. The tuned sizes of searches are here; those
//! of a kernel or a format (tile heights, the bits of a sort) are beside it.
//!
//! ```text
//! filter?  few references, or k a large share of them  ──> Direct: float64 values, no packing
//!          neither squares nor products (Lp)           ──> Float32, if there is a bound
//!          few queries, no cached panels, not float64  ──> Unpacked: float32 keys of the rows as passed
//!          a level that multiplies 8-bit integers      ──> Int8: packed codes, certified bound
//!          else                                        ──> Float32: packed panels, certified bound
//!          Int8 and Float32 are probed by the first queries: if they reject too little, the rest steps down
//!          self-search, small k                        ──> symmetric tiles, if the kernel has them
//! axis?    enough chunks of queries for all threads    ──> chunks of queries
//!          else                                        ──> chunks x splits of the references, merged at the end
//! ```
//!
//! The plan affects the time of a search, never its result.

use std::ops::Range;

use crate::arch::kernel::{MAX_RUN, SAMPLE_STRIDE};
use crate::arch::level::Level;
use crate::arch::{self, ByteProducts};
use crate::filter::Filter;
use crate::filter::bound::{LARGEST_DIM, LARGEST_INT8_DIM};
use crate::metric::{Geometry, Metric};
use crate::topk::TopK;

/// Up to this number of queries, values of all rows take less time than packing; they are bound by memory bandwidth.
const DIRECT_QUERIES: usize = 2;

/// Up to this number of queries, float32 keys of unpacked rows take less time than packing.
const UNPACKED_QUERIES: usize = 32;

/// With at most this number of references the thresholds of a filter do not settle before the scan ends.
const FEW_REFERENCES: usize = 192;

/// A filter pays if `k` is at most this fraction of the references, one in `SHARE`.
const SHARE: usize = 8;

/// The same if float64 values are costly: one takes far longer than a key with its share of the packing.
const COSTLY_SHARE: usize = 2;

/// As [`DIRECT_QUERIES`], for Lp distances whose values are not costly.
const LP_DIRECT_QUERIES: usize = 8;

/// The time of a key over that of a value for Lp distances, and for costly ones.
const LP_KEY: f64 = 0.5;
const COSTLY_KEY: f64 = 0.05;

/// Bytes of reference codes that stay in the second-level cache while a chunk of queries passes over them.
const BLOCK_BYTES: usize = 256 << 10;

/// Most queries of a chunk.
const CHUNK_ROWS: usize = 768;

/// Tasks per thread: enough that the threads finish at about the same time.
const TASKS_PER_THREAD: usize = 4;

/// Most memory for the candidates of all running tasks together.
const CANDIDATE_BYTES: usize = 24 << 20;

/// Fewest references of a split.
const SPLIT_ROWS: usize = 2048;

/// Most bytes of a chunk's queries in float64: if they leave the second-level cache, rescoring waits for the query too.
const QUERY_BYTES: usize = 2 << 20;

/// A chunk of this size is not split further: another pass over the references costs more than better balance saves.
const FULL_CHUNK: usize = 132;

/// Smallest k for which a sample of the references pays: without it, most candidates come from thresholds that are still low.
const SAMPLED_K: usize = 8;

/// Queries per thread that probe a filter.
const PROBE_ROWS: usize = 24;

/// Cycles per pair, `a + b dim`, of an int8 key, a float32 key and a float64 value. Only their ratios matter, and these vary
/// little between CPUs. `PAIRS_CYCLES`: of an int8 key where products of bytes take three instructions.
const INT8_CYCLES: (f64, f64) = (0.3, 0.007);
const PAIRS_CYCLES: (f64, f64) = (0.3, 0.02);
const FLOAT32_CYCLES: (f64, f64) = (0.3, 0.033);
const VALUE_CYCLES: (f64, f64) = (40.0, 0.25);

/// Most rows of a block of symmetric tiles, and most bytes of these rows in float64.
const SYMMETRIC_BLOCK: usize = 1344;
const SYMMETRIC_BYTES: usize = 8 << 20;

/// Fewest queries for which symmetric tiles pay; twice as many for a k that would otherwise be sampled.
const SYMMETRIC_ROWS: usize = 4096;

/// For such a k they pay for wide rows only, up to one neighbour per this number of columns. Speedup by
/// symmetric tiles in CPU time, one thread, int8, squared Euclidean: 30,000 x 384 at k 1 / 10 / 20 / 50: 1.5 / 1.3 / 1.05 /
/// 0.95; 10,000 x 384 at k 1 / 10 / 20: 1.3 / 1.15 / 0.99; 5,000 x 384 at k 1 / 10: 1.1 / 0.99; 20,000 x 128 at k 1 / 5 / 10 / 20: 1.4 /
/// 1.3 / 1.1 / 0.95; 20,000 x 64 at k 1 / 7 / 10: 1.5 / 1.15 / 0.98. Cosine, whose values cost more: 30,000 x 384 at k 1 /
/// 10: 1.3 / 1.15.
const SYMMETRIC_COLUMNS: usize = 24;

/// Up to this number of multiply-adds a search takes less time than handing it to the pool.
const INLINE_WORK: u64 = 1 << 21;

/// Time of a multiply-add of a direct search over one of a filtered search.
const DIRECT_COST: u64 = 8;

/// Fewer queries of unpacked rows take as long as these: the time of reading the rows.
const READING_QUERIES: usize = 8;

/// As [`DIRECT_COST`] if each takes a power.
const COSTLY_DIRECT_COST: u64 = 256;

/// Panels of the first run of queries without a threshold; doubled up to a whole block.
pub(crate) const WARM_UP_PANELS: usize = 2;

/// The same for unpacked rows.
pub(crate) const WARM_UP_ROWS: usize = 64;

/// Most queries of a chunk of a search by radius: bounds the lists in memory beside the result. A multiple of the tallest
/// panel.
pub(crate) const RADIUS_CHUNK_ROWS: usize = 192;

/// Fewest rows for which a self-search by radius scans the upper triangle only.
pub(crate) const TRIANGLE_ROWS: usize = 1024;

/// Undecided rows of a query for ranks at which they are rescored, as a batch.
pub(crate) const RANK_BATCH: usize = 32;

/// Pairs that a task of symmetric tiles buffers before it enters them. Usually two blocks have fewer candidates.
pub(crate) const PAIRS_BUFFERED: usize = 1 << 16;

/// Pairs of a task of [`crate::Pairwise`]: a few hundred microseconds for rows of usual width.
pub(crate) const PAIRWISE_TASK: usize = 1024;

/// Rows at which a segment of an index is sealed and packed. Smaller segments are searched unpacked or packed for each
/// search, which costs little.
pub(crate) const SEALED_ROWS: usize = 8192;

/// The sizes of a search, from which its plan follows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) queries: usize,
    pub(crate) references: usize,
    pub(crate) dim: usize,
    pub(crate) k: usize,
    pub(crate) threads: usize,
    /// Whether the rows are float64.
    pub(crate) double: bool,
    /// Whether the panels of the references are cached, so that the cost of packing is ignored.
    pub(crate) packed: bool,
    pub(crate) metric: Metric,
}

impl Problem {
    /// Number of pairs of a query and a reference.
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
    /// Queries of a chunk.
    pub(crate) chunk: usize,
    /// Splits of the references.
    pub(crate) splits: usize,
}

impl Problem {
    /// The first filter to try.
    pub(crate) fn filter(&self, level: Level) -> Filter {
        let is_costly = self.metric.is_costly();
        // For few queries, cached panels only save memory traffic, and only int8 codes are smaller than rows.
        let packed = self.packed && self.packed_filter(level) == Filter::Int8;
        let direct_queries = match self.metric.geometry() {
            _ if is_costly || packed => 0,
            Geometry::Lp => LP_DIRECT_QUERIES,
            Geometry::Euclidean | Geometry::Dot if self.double => DIRECT_QUERIES,
            // Values of one query take no longer than reading the rows, unless each row is normalised.
            Geometry::Euclidean | Geometry::Dot => usize::from(!self.metric.normalizes()),
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

    /// The first filter to try on packed references.
    pub(crate) fn packed_filter(&self, level: Level) -> Filter {
        let has_int8 = arch::has_int8(level) && self.metric.geometry() != Geometry::Lp;
        if has_int8 && self.dim <= LARGEST_INT8_DIM { Filter::Int8 } else { Filter::Float32 }
    }

    /// The packed filter of this search, if it uses one.
    pub(crate) fn filter_of_panels(&self, level: Level) -> Option<Filter> {
        match self.filter(level) {
            Filter::Direct | Filter::Unpacked => None,
            packed => Some(packed),
        }
    }

    /// The first filter to try for ranks.
    pub(crate) fn rank_filter(&self, level: Level) -> Filter {
        match self.filter(level) {
            Filter::Direct => Filter::Direct,
            Filter::Unpacked if self.queries <= DIRECT_QUERIES => Filter::Direct,
            // For targets in the middle of the ranking, 8-bit keys leave many rows undecided: not without a probe.
            _ if self.probe() == 0 => Filter::Float32,
            _ => self.packed_filter(level),
        }
    }

    /// The number of queries that probe a filter; 0 if there are too few for a probe to pay.
    pub(crate) fn probe(&self) -> usize {
        let probe = self.threads.saturating_mul(PROBE_ROWS);
        if probe.saturating_mul(8) > self.queries { 0 } else { probe }
    }

    /// The filter for the remaining queries, after a probe of `filter`: `rescored` is the fraction of pairs that it did not
    /// reject, `false_positives` the fraction (of all pairs) that a sharper filter would have rejected.
    pub(crate) fn next_filter(&self, level: Level, filter: Filter, rescored: f64, false_positives: f64) -> Filter {
        if self.metric.geometry() == Geometry::Lp {
            let key = if self.metric.is_costly() { COSTLY_KEY } else { LP_KEY };
            return if key + rescored <= 1.0 { filter } else { Filter::Direct };
        }
        let cycles = |(a, b): (f64, f64)| a + b * self.dim as f64;
        let value = cycles(VALUE_CYCLES);
        let key = if arch::byte_products(level) == ByteProducts::Pairs { PAIRS_CYCLES } else { INT8_CYCLES };
        let int8 = cycles(key) + rescored * value;
        let float32 =
            cycles(FLOAT32_CYCLES) + (rescored - if filter == Filter::Int8 { false_positives } else { 0.0 }) * value;
        match filter {
            Filter::Int8 if int8 <= float32.min(value) => Filter::Int8,
            Filter::Int8 | Filter::Float32 if float32 <= value => Filter::Float32,
            _ => Filter::Direct,
        }
    }
}

/// The rank, in a sample of one row in [`SAMPLE_STRIDE`], of a row that is very likely a little behind rank `k` of `rows`:
/// the expected rank plus 2.5 standard deviations. `None` if a sample does not pay.
pub(crate) fn sample_rank(k: usize, rows: usize) -> Option<usize> {
    let mean = k as f64 / SAMPLE_STRIDE as f64;
    let rank = (mean + 2.5 * mean.sqrt() + 2.0) as usize;
    (k >= SAMPLED_K && rows / SAMPLE_STRIDE >= 4 * rank).then_some(rank)
}

impl Plan {
    pub(crate) fn new(problem: &Problem, filter: Filter) -> Self {
        let tasks = problem.threads.saturating_mul(TASKS_PER_THREAD);
        // With many threads and a large k not even one query fits the budget. A chunk has at least one.
        let bytes = TopK::bytes(problem.k.max(16), problem.references).saturating_add(8 * problem.dim);
        let affordable = (CANDIDATE_BYTES / problem.threads / bytes).max(1);
        let wanted = problem.queries.div_ceil(tasks);
        let chunk = match filter {
            Filter::Direct => wanted.clamp(1, CHUNK_ROWS).min(affordable),
            // One chunk, so that the rows are read once.
            Filter::Unpacked => problem.queries.clamp(1, affordable),
            Filter::Float32 | Filter::Int8 => {
                let least = problem.queries.div_ceil(problem.threads).clamp(24, FULL_CHUNK);
                // A multiple of 12, the tallest panel: kernels with other heights waste lanes in the last panel only.
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

    /// The part of `units` (panels or rows) in one split.
    pub(crate) fn split(&self, units: Range<usize>, split: usize) -> Range<usize> {
        let at = |split: usize| units.start + units.len() * split / self.splits;
        at(split)..at(split + 1)
    }
}

/// Rows of a block of symmetric tiles, or `None` if they do not pay. `bytes` is the memory of a query's state without its
/// candidates.
pub(crate) fn symmetric_block(problem: &Problem, bytes: usize) -> Option<usize> {
    let memory = TopK::bytes(problem.k, problem.references).saturating_add(bytes).saturating_mul(problem.queries);
    // The candidates of all queries live until the end. They may take half as much memory as the rows in float32.
    let affordable = CANDIDATE_BYTES.max(problem.references.saturating_mul(problem.dim).saturating_mul(2));
    let least = if problem.k < SAMPLED_K { SYMMETRIC_ROWS } else { 2 * SYMMETRIC_ROWS };
    let pays = problem.queries >= least
        && problem.queries.saturating_mul(2) >= problem.references
        && problem.k <= (problem.dim / SYMMETRIC_COLUMNS).max(SAMPLED_K - 1)
        && memory <= affordable;
    let blocks = problem.threads.saturating_mul(4).max(8);
    let most = (SYMMETRIC_BYTES / (size_of::<f64>() * problem.dim)).clamp(96, SYMMETRIC_BLOCK);
    // A multiple of all panel heights and widths.
    pays.then(|| problem.queries.div_ceil(blocks).min(most).next_multiple_of(96))
}

/// Blocks that a task pairs with one block. Each task packs that one block again, so not too few.
pub(crate) fn symmetric_span(blocks: usize, threads: usize) -> usize {
    (blocks * blocks / 2 / threads.saturating_mul(TASKS_PER_THREAD)).clamp(1, 16)
}

/// Whether a search should stay on the calling thread.
pub(crate) fn is_small(problem: &Problem, level: Level) -> bool {
    let (queries, cost) = match problem.filter(level) {
        Filter::Direct if problem.metric.is_costly() => (problem.queries, COSTLY_DIRECT_COST),
        Filter::Direct => (problem.queries, DIRECT_COST),
        Filter::Unpacked => (problem.queries.max(READING_QUERIES), 1),
        Filter::Float32 | Filter::Int8 => (problem.queries, 1),
    };
    Problem { queries, ..*problem }.work().saturating_mul(cost) <= INLINE_WORK
}

/// Panels of a block: they stay in cache while a chunk of queries scans them.
pub(crate) fn block_panels(panel_bytes: usize) -> usize {
    (BLOCK_BYTES / panel_bytes).clamp(1, MAX_RUN)
}

/// Rows of a block of unpacked references.
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
    fn many_queries_are_split_into_chunks() {
        // 4,096 queries in 2 threads x 4 tasks = 512 per task, rounded up to a multiple of 12: 516; 8 chunks for 2 threads.
        let plan = Plan::new(&problem(4096, 65536, 128, 10, 2), Filter::Int8);
        assert_eq!(plan, Plan { chunk: 516, splits: 1 });
    }

    #[test]
    fn few_chunks_split_the_references() {
        // 64 queries on 4 threads: 3 chunks of 24 rows; 8 tasks are needed, hence 3 splits.
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
    fn any_number_of_threads_has_a_plan() {
        // 24 MiB over 64 threads are 384 KiB; k 30,000 needs 600 KiB per query: one query, rounded up to a panel.
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
        // Every vector level multiplies bytes, by one instruction or by three.
        assert_eq!(problem(1000, 1000, 8, 125, 2).filter(Level::Avx2), Filter::Int8);
        assert_eq!(problem(1000, 1000, 8, 125, 2).filter(Level::Avx512), Filter::Int8);
        assert_eq!(problem(1000, 1000, 8, 125, 2).filter(Level::Scalar), Filter::Float32);
        assert_eq!(problem(1000, 1000, 70_000, 125, 2).filter(Level::AvxVnni), Filter::Float32);
        assert_eq!(problem(1000, 150, 8, 5, 2).filter(Level::Scalar), Filter::Direct);
        assert_eq!(problem(1, 1000, 8, 5, 2).filter(Level::Avx512Vnni), Filter::Direct);
        assert_eq!(problem(2, 1000, 8, 5, 2).filter(Level::Avx512Vnni), Filter::Unpacked);
        let cosine = Problem { metric: Metric::Cosine, ..problem(1, 1000, 8, 5, 2) };
        assert_eq!(cosine.filter(Level::Avx512Vnni), Filter::Unpacked);
        assert_eq!(problem(8, 1000, 8, 5, 2).filter(Level::Avx512Vnni), Filter::Unpacked);
        // Unpacked keys are of float32 rows.
        assert_eq!(Problem { double: true, ..problem(2, 1000, 8, 5, 2) }.filter(Level::Avx512), Filter::Direct);
        assert_eq!(Problem { double: true, ..problem(8, 1000, 8, 5, 2) }.filter(Level::Avx512), Filter::Int8);
        assert_eq!(Problem { double: true, ..problem(8, 1000, 8, 5, 2) }.filter(Level::Scalar), Filter::Float32);
    }

    #[test]
    fn ranks_use_8_bits_only_after_a_probe() {
        let level = Level::Avx512Vnni;
        assert_eq!(problem(4096, 65536, 128, 1, 2).rank_filter(level), Filter::Int8);
        assert_eq!(problem(4096, 65536, 128, 1, 2).rank_filter(Level::Avx512), Filter::Int8);
        assert_eq!(problem(4096, 65536, 128, 1, 2).rank_filter(Level::Scalar), Filter::Float32);
        assert_eq!(problem(100, 65536, 128, 1, 2).rank_filter(level), Filter::Float32);
        assert_eq!(problem(8, 65536, 128, 1, 2).rank_filter(level), Filter::Float32);
        assert_eq!(problem(2, 65536, 128, 1, 2).rank_filter(level), Filter::Direct, "no packing for two queries");
        assert_eq!(problem(4096, 150, 128, 1, 2).rank_filter(level), Filter::Direct);
    }

    #[test]
    fn a_filter_that_rejects_too_little_is_replaced() {
        let problem = problem(4096, 65536, 128, 10, 2);
        // 300 of 65,536 rows survive: int8 stays, even if all are false positives.
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Int8, 0.005, 0.005), Filter::Int8);
        // A fifth survives for lack of precision: float32 has it.
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Int8, 0.2, 0.19), Filter::Float32);
        // A fifth survives because of ties: float32 would not help.
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Int8, 0.2, 0.0), Filter::Int8);
        // Everything survives.
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Int8, 1.0, 0.0), Filter::Direct);
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Float32, 1.0, 0.9), Filter::Direct);
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Float32, 0.3, 0.2), Filter::Float32);
        // Three false positives in 100 cost less than float32 keys, but more than what int8 keys of three instructions save.
        assert_eq!(problem.next_filter(Level::Avx512Vnni, Filter::Int8, 0.04, 0.03), Filter::Int8);
        assert_eq!(problem.next_filter(Level::Avx512, Filter::Int8, 0.04, 0.03), Filter::Float32);
        assert_eq!(problem.next_filter(Level::Avx512, Filter::Int8, 0.03, 0.02), Filter::Int8);
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
        assert_eq!(costly(100, 10).next_filter(Level::Avx512Vnni, Filter::Float32, 0.9, 0.0), Filter::Float32);
        assert_eq!(costly(100, 10).next_filter(Level::Avx512Vnni, Filter::Float32, 1.0, 0.0), Filter::Direct);
    }

    #[test]
    fn a_search_stays_on_its_thread_by_the_time_of_reading_its_rows() {
        let level = Level::Avx512Vnni;
        // 2^21 multiply-adds of eight queries or more; of fewer, the same rows.
        assert!(is_small(&problem(8, 2048, 128, 5, 2), level));
        assert!(is_small(&problem(2, 2048, 128, 5, 2), level));
        assert!(!is_small(&problem(2, 2049, 128, 5, 2), level));
        assert!(!is_small(&problem(16, 2048, 128, 5, 2), level));
        assert!(is_small(&problem(16, 1024, 128, 5, 2), level));
    }

    #[test]
    fn lp_distances_have_one_filter() {
        let level = Level::Avx512Vnni;
        let cityblock = |queries| Problem { metric: Metric::Cityblock, ..problem(queries, 1000, 8, 10, 2) };
        assert_eq!(cityblock(8).filter(level), Filter::Direct);
        assert_eq!(cityblock(9).filter(level), Filter::Float32);
        assert_eq!(cityblock(500).filter(level), Filter::Float32);
        assert_eq!(cityblock(500).packed_filter(level), Filter::Float32);
        assert_eq!(cityblock(500).next_filter(Level::Avx512Vnni, Filter::Float32, 0.1, 0.1), Filter::Float32);
        assert_eq!(cityblock(500).next_filter(Level::Avx512Vnni, Filter::Float32, 0.9, 0.0), Filter::Direct);
        let below_1 = Metric::minkowski(0.7).expect("above 0");
        assert_eq!(Problem { metric: below_1, ..cityblock(500) }.filter(level), Filter::Direct);
    }

    #[test]
    fn symmetric_tiles_are_used_if_they_pay() {
        let block = |problem: &Problem| symmetric_block(problem, 150);
        assert_eq!(block(&problem(30_000, 30_000, 384, 10, 2)), Some(1344));
        assert_eq!(block(&problem(60_000, 60_000, 512, 10, 2)), Some(1344), "candidates of 34 MB, codes of 31 MB");
        assert_eq!(block(&problem(8000, 16_000, 128, 5, 2)), Some(1056), "eight blocks: 1,000 rows and up");
        assert_eq!(block(&problem(30_000, 30_000, 2048, 10, 2)), Some(576), "512 rows are 8 MiB");
        assert_eq!(block(&problem(8000, 16_001, 128, 5, 2)), None, "most rows are not queries");
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
