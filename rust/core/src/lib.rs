//! Exact k-nearest-neighbour search: the rows that float64 arithmetic would find, at the speed of float32 and faster.
//!
//! | step | what happens | where |
//! |---|---|---|
//! | 1 | arguments checked, sizes known | [`Search::new`] |
//! | 2 | filter, block sizes and parallel axis planned | `search::plan` |
//! | 3 | rows centred, packed into panels, their error terms stated; a row that is not finite is found here | `filter` |
//! | 4 | a microkernel forms approximate keys, tile by tile | `search::scan`, `arch` |
//! | 5 | rows whose key might still reach the k nearest survive; self is skipped | `search`, `topk` |
//! | 6 | survivors get their float64 value in one fixed order and are sorted by (value, row) | `exact`, `order` |
//!
//! [`RadiusSearch`] finds all rows within a radius by the same steps.
//! [`BlockSearch`] does them for references that come block by block.
//! [`Pairwise`] measures pairs of rows named by position: step 6 alone.
//!
//! [`RankSearch`] counts how many references come before given ones; `ranks` has its loops.
//!
//! [`Index`] keeps references, and the panels of step 3, for many searches.
//! [`saved`] is the file of an index: checked tensors that are mapped, not read.
//!
//! The answer is the same bytes for every level, thread count and batch. See `docs/exactness.md` for the proof.

mod arch;
mod error;
mod exact;
mod filter;
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
pub use runtime::{Monitor, PoolHandle, Report, THREADS_VARIABLE, float_env, num_threads, set_num_threads};
pub use search::compressed_rows::Within;
pub use search::groups::Groups;
pub use search::incremental::BlockSearch;
pub use search::knn::{Neighbours, Options, Search};
pub use search::pairwise::{Pairwise, PairwiseOptions};
pub use search::radius::{RadiusOptions, RadiusSearch, RowOrder};
pub use search::ranks::{RankOptions, RankSearch, Ranks};
pub use search::references::{PanelCache, References};
pub use search::{Execution, SelfRule};
