//! How one search is cut up: which filter, which blocks, which parallel axis. All sizes that were tuned live here.
//!
//! ```text
//! filter?  few queries, or k a large share of the references  ──> Direct: float64 values, no packing
//!          else                                               ──> Float32: packed panels, certified bound
//! axis?    enough chunks of queries for the threads           ──> queries only
//!          else                                               ──> queries x splits of the references, merged at the end
//! ```
//!
//! A plan changes the time of a search, never its answer.

use std::num::NonZero;
use std::ops::Range;

use crate::bound::LARGEST_DIM;
use crate::kernel::MAX_RUN;
use crate::level::Simd;
use crate::metric::Metric;

/// Below this many queries a pass of float64 over the bare rows is memory-bound, and packing cannot pay.
const FEW_QUERIES: usize = 8;

/// With fewer references than this the filter's thresholds never settle.
const FEW_REFERENCES: usize = 192;

/// The filter pays as long as the k nearest are a smaller share of the references than one in this many.
const SHARE: usize = 8;

/// The same where float64 values are costly.
const COSTLY_SHARE: usize = 2;

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

/// Bytes of a reservoir and a heap for one query, for each of its k.
const BYTES_PER_NEIGHBOUR: usize = 4 * 12 + 16;

/// Below this many multiply-adds a search is done before a hand-over to other threads would be.
const INLINE_WORK: u64 = 1 << 21;

/// Multiply-adds of a direct search that take about as long as one of a filtered one.
const DIRECT_COST: u64 = 8;

/// The same where each takes a power.
const COSTLY_DIRECT_COST: u64 = 256;

/// What decides whether a row needs its float64 value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Nothing: every pair is formed in float64.
    Direct,
    /// Centred float32 rows and their certified bound.
    Float32,
}

/// What to look for.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Neighbours of each query.
    pub k: usize,
    /// What is measured.
    pub metric: Metric,
    /// Query `i` is reference row `i` and must not return it.
    pub exclude_self: bool,
    /// The level to run at.
    pub simd: Simd,
    /// Threads to search with.
    pub threads: NonZero<usize>,
}

/// The sizes that a plan depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    pub(crate) queries: usize,
    pub(crate) references: usize,
    pub(crate) dim: usize,
    pub(crate) k: usize,
    pub(crate) threads: usize,
    /// Whether there is a filter for the metric.
    pub(crate) filterable: bool,
    /// Whether a float64 value takes far longer than a key of the filter and its share of the packing.
    pub(crate) costly: bool,
}

impl Problem {
    /// Multiply-adds of all pairs.
    pub(crate) fn work(&self) -> u64 {
        (self.queries as u64).saturating_mul(self.references as u64).saturating_mul(self.dim as u64)
    }
}

/// See the module header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) filter: Filter,
    /// Query rows of a task.
    pub(crate) chunk: usize,
    /// Parts that the references are split into.
    pub(crate) splits: usize,
}

impl Plan {
    pub(crate) fn new(problem: &Problem) -> Self {
        let filter = if (problem.queries <= FEW_QUERIES && !problem.costly)
            || problem.references <= FEW_REFERENCES
            || problem.k.saturating_mul(if problem.costly { COSTLY_SHARE } else { SHARE }) > problem.references
            || problem.dim > LARGEST_DIM
            || !problem.filterable
        {
            Filter::Direct
        } else {
            Filter::Float32
        };
        let tasks = problem.threads.saturating_mul(TASKS_PER_THREAD);
        // With many threads and a large k not even one query fits the budget; one is carried all the same.
        let affordable =
            (CANDIDATE_BYTES / problem.threads / problem.k.max(16).saturating_mul(BYTES_PER_NEIGHBOUR)).max(1);
        let chunk = match filter {
            Filter::Float32 => {
                // A multiple of 12, the tallest panel; other heights lose a few lanes in the last panel only.
                (problem.queries.div_ceil(tasks)).clamp(48, CHUNK_ROWS).min(affordable).next_multiple_of(12)
            }
            Filter::Direct => problem.queries.div_ceil(tasks).clamp(1, CHUNK_ROWS).min(affordable),
        };
        let chunks = problem.queries.div_ceil(chunk).max(1);
        let wanted = problem.threads.saturating_mul(2);
        let splits = if chunks >= wanted || problem.threads == 1 {
            1
        } else {
            wanted.div_ceil(chunks).min(problem.references.div_ceil(SPLIT_ROWS)).max(1)
        };
        Self { filter, chunk, splits }
    }

    /// The rows of one chunk of queries.
    pub(crate) fn chunk_rows(&self, problem: &Problem, chunk: usize) -> Range<usize> {
        chunk * self.chunk..((chunk + 1) * self.chunk).min(problem.queries)
    }

    /// The part of `items` (rows or panels) that belongs to one split.
    pub(crate) fn split(&self, items: usize, split: usize) -> Range<usize> {
        items * split / self.splits..items * (split + 1) / self.splits
    }
}

/// Whether a search of this size should stay on the calling thread.
pub(crate) fn is_small(problem: &Problem) -> bool {
    let cost = match Plan::new(problem).filter {
        Filter::Direct if problem.costly => COSTLY_DIRECT_COST,
        Filter::Direct => DIRECT_COST,
        Filter::Float32 => 1,
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
        Problem { queries, references, dim, k, threads, filterable: true, costly: false }
    }

    #[test]
    fn many_queries_are_cut_by_queries() {
        // 4,096 queries over 2 threads x 4 tasks = 512 a task, up to a multiple of 12: 516; 8 chunks >= 2 x 2 threads.
        let plan = Plan::new(&problem(4096, 65536, 128, 10, 2));
        assert_eq!(plan, Plan { filter: Filter::Float32, chunk: 516, splits: 1 });
    }

    #[test]
    fn few_chunks_split_the_references() {
        // 64 queries: chunks of 48 rows, hence 2 chunks; 4 threads want 8 tasks, so 4 splits.
        let plan = Plan::new(&problem(64, 65536, 128, 10, 4));
        assert_eq!(plan, Plan { filter: Filter::Float32, chunk: 48, splits: 4 });
        // One query on two threads: 4 splits of the references.
        assert_eq!(Plan::new(&problem(1, 65536, 128, 10, 2)), Plan { filter: Filter::Direct, chunk: 1, splits: 4 });
    }

    #[test]
    fn candidates_fit_their_memory() {
        // k 1,000: 64 kB a query; 24 MiB over 2 threads = 12 MiB, hence 196 queries, up to a multiple of 12: 204.
        assert_eq!(Plan::new(&problem(4096, 65536, 128, 1000, 2)).chunk, 204);
    }

    #[test]
    fn no_number_of_threads_is_too_large_to_plan_for() {
        // 24 MiB over 64 threads are 384 KiB; k 12,000 needs 750 KiB a query: one query all the same, up to a panel.
        assert_eq!(Plan::new(&problem(100, 200_000, 4, 12_000, 64)).chunk, 12);
        for threads in [30_000, usize::MAX / 2, usize::MAX] {
            let plan = Plan::new(&problem(200, 200, 4, 3, threads));
            assert!(plan.chunk >= 1 && plan.splits >= 1);
        }
    }

    #[test]
    fn a_large_k_is_direct() {
        assert_eq!(Plan::new(&problem(1000, 1000, 8, 999, 2)).filter, Filter::Direct);
        assert_eq!(Plan::new(&problem(1000, 1000, 8, 125, 2)).filter, Filter::Float32);
    }

    #[test]
    fn costly_values_are_filtered_for_few_queries_and_large_k() {
        let costly = |queries, k| Problem { costly: true, ..problem(queries, 1000, 8, k, 2) };
        assert_eq!(Plan::new(&costly(1, 10)).filter, Filter::Float32);
        assert_eq!(Plan::new(&costly(100, 500)).filter, Filter::Float32);
        assert_eq!(Plan::new(&costly(100, 501)).filter, Filter::Direct);
        assert!(!is_small(&costly(10, 999)));
    }

    #[test]
    fn splits_cover_everything_once() {
        let plan = Plan { filter: Filter::Direct, chunk: 7, splits: 3 };
        let parts: Vec<_> = (0..3).map(|split| plan.split(10, split)).collect();
        assert_eq!(parts, [0..3, 3..6, 6..10]);
        assert_eq!(plan.chunk_rows(&problem(10, 1, 1, 1, 1), 1), 7..10);
    }
}
