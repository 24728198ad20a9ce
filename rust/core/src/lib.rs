//! Exact k-nearest-neighbour search: the rows that float64 arithmetic would find, at the speed of float32 and faster.
//!
//! | step | what happens | where |
//! |---|---|---|
//! | 1 | arguments checked, sizes known | [`Search::new`], `search` |
//! | 2 | filter, block sizes and parallel axis planned | `plan` |
//! | 3 | rows centred, packed into panels, their error terms stated; a row that is not finite is found here | `pack`, `bound` |
//! | 4 | a microkernel forms approximate keys, tile by tile | `driver`, `symmetric`, `bare`, `kernel`, `arch` |
//! | 5 | rows whose key might still reach the k nearest survive; self is skipped | `driver`, `topk` |
//! | 6 | survivors get their float64 value in one fixed order and are sorted by (value, row) | `rescore`, `order` |
//!
//! [`RadiusSearch`] finds all rows within a radius by the same steps; `radius` has the loops of its steps 4 to 6.
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
#[cfg(test)]
mod attacks;
mod bare;
mod blocks;
mod bound;
mod cancel;
mod driver;
mod error;
mod index;
mod kept;
mod kernel;
mod level;
mod lp;
mod matrix;
pub mod measure;
mod metric;
mod order;
mod pack;
mod pairwise;
mod plan;
mod pool;
mod radius;
mod ranks;
#[cfg(feature = "reference")]
pub mod reference;
mod rescore;
pub mod saved;
mod search;
mod symmetric;
mod topk;

pub use blocks::BlockSearch;
pub use cancel::{Monitor, Report};
pub use error::{Argument, Error, Result};
pub use half::{bf16, f16};
pub use index::{Addition, Index, Snapshot};
pub use level::{LEVEL_VARIABLE, Level, Simd, active as active_level, set_level};
pub use lp::Power;
pub use matrix::{Element, MatrixRef, Output, QueryRef};
pub use metric::Metric;
pub use pairwise::{Pairwise, PairwiseOptions};
pub use plan::Options;
pub use pool::{PoolHandle, THREADS_VARIABLE, float_environment, num_threads, set_num_threads};
pub use radius::{RadiusOptions, RadiusSearch, RowOrder, Within};
pub use ranks::{Groups, RankOptions, RankSearch, Ranks};
pub use search::{Neighbours, Search};
