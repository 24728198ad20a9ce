//! The runtime of a search: threads, progress and cancellation, forks, the floating-point environment,
//! memory.

pub(crate) mod alloc;
pub mod float_env;
pub mod fork;
mod monitor;
pub(crate) mod pool;

pub(crate) use monitor::POLLED;
pub use monitor::{Monitor, Report};
pub use pool::{
    PoolHandle, THREADS_VARIABLE, capped_threads, catch_panic, is_num_threads_set, num_threads, set_num_threads,
};
