//! Exact k-nearest-neighbour search: the results of float64 brute force, faster than a float32 matrix product.
//!
//! | step | what happens | where |
//! |---|---|---|
//! | 1 | arguments and sizes checked | [`Search::new`] |
//! | 2 | filter, block sizes and parallel axis planned | `search::plan` |
//! | 3 | rows centred and packed into panels, with error terms; rows that are not finite are refused | `filter` |
//! | 4 | a microkernel computes approximate keys, tile by tile, and rejects rows by their threshold | `search::scan`, `arch` |
//! | 5 | the other rows are candidates; the query's own row is excluded | `search::scan` |
//! | 6 | candidates get their float64 value in one fixed order and are selected and sorted by (value, row) | `exact`, `topk` |
//!
//! [`RadiusSearch`] finds all rows within a radius by the same steps, [`RankSearch`] the ranks of given rows.
//! [`BlockSearch`] searches references that arrive in blocks.
//! [`Pairwise`] computes the values of pairs of rows by position: step 6 alone.
//!
//! [`References`] with a [`PanelCache`] keeps the panels of step 3 between searches; [`Index`] also owns its rows, grows and
//! is saved to a file. [`saved`] is the format of that file: checked tensors that are mapped, not read.
//!
//! Results have the same bytes for every level, thread count and batch size. `docs/exactness.md` has the proof.

mod arch;
mod error;
mod exact;
mod filter;
#[cfg(test)]
#[path = "../../../tests/fuzz/driver.rs"]
#[allow(unreachable_pub, reason = "tests/core has the same file")]
mod fuzz;
mod index;
mod matrix;
pub mod measure;
mod metric;
#[cfg(feature = "oracle")]
pub mod oracle;
mod order;
mod runtime;
pub mod saved;
mod search;
mod topk;

pub use arch::level::{LEVEL_VARIABLE, Level, Simd, active as active_level, set_level};
pub use error::{Argument, Error, Result};
pub use half::{bf16, f16};
pub use index::{Addition, Index, Snapshot};
pub use matrix::{Element, MatrixRef, Output, Precision, QueryRef, Values, WideRow};
pub use metric::{Metric, Power};
pub use runtime::{
    Monitor, PoolHandle, Report, THREADS_VARIABLE, capped_threads, catch_panic, float_env, fork, is_num_threads_set,
    num_threads, set_num_threads,
};
pub use search::compressed_rows::Within;
pub use search::groups::Groups;
pub use search::incremental::BlockSearch;
pub use search::knn::{Neighbours, Options, Search};
pub use search::pairwise::{Pairwise, PairwiseOptions};
pub use search::radius::{RadiusOptions, RadiusSearch, RowOrder};
pub use search::ranks::{RankOptions, RankSearch, Ranks};
pub use search::references::{PanelCache, References};
pub use search::{Execution, SelfRule};
