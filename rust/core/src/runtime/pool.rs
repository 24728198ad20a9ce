//! Threads: one rayon pool per process, built on first use.
//!
//! A global pool hangs in a forked child, in which its threads do not exist. So the pool is keyed by the process id, and a
//! child builds its own. An inherited pool is forgotten, never dropped: dropping it would signal missing threads, through
//! locks that one of them may have held during the fork. Rayon's own global pool is never used.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;

use super::float_env;
use crate::error::{Error, Result};

/// The environment variable that sets the number of threads.
pub const THREADS_VARIABLE: &str = "EXACTKNN_NUM_THREADS";

struct Pool {
    process: u32,
    pool: rayon::ThreadPool,
}

// Lock-free: a lock that another thread holds during a fork stays locked in the child.
static POOL: ArcSwapOption<Pool> = ArcSwapOption::const_empty();

thread_local! {
    /// Whether this thread is a worker of our pool.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a worker of our pool; a search called from it stays in the pool.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// The number set by [`set_num_threads`]; 0 if none is set.
static CHOSEN: AtomicUsize = AtomicUsize::new(0);

/// The default number of threads of a search: the number set, else `EXACTKNN_NUM_THREADS`, else the cores available to this
/// process (respecting affinity and control-group quotas).
///
/// # Errors
/// [`Error::BadThreads`] if the environment variable is not a positive integer.
pub fn num_threads() -> Result<usize> {
    match CHOSEN.load(Ordering::Relaxed) {
        0 => match std::env::var(THREADS_VARIABLE) {
            Ok(text) if !text.is_empty() => match text.parse::<NonZero<usize>>() {
                Ok(threads) => Ok(threads.get()),
                Err(_) => Err(Error::BadThreads {
                    given: format!("{text:?}"),
                    origin: " from the environment variable EXACTKNN_NUM_THREADS",
                }),
            },
            _ => Ok(std::thread::available_parallelism().map_or(1, NonZero::get)),
        },
        threads => Ok(threads),
    }
}

/// Whether the default number of threads was set, by [`set_num_threads`] or the environment variable.
pub fn is_num_threads_set() -> bool {
    CHOSEN.load(Ordering::Relaxed) != 0 || std::env::var(THREADS_VARIABLE).is_ok_and(|text| !text.is_empty())
}

/// Set the number of threads of later searches; `None` resets to the default.
pub fn set_num_threads(threads: Option<NonZero<usize>>) {
    CHOSEN.store(threads.map_or(0, NonZero::get), Ordering::Relaxed);
}

/// A handle of a pool, which lives at least as long.
pub struct PoolHandle(Arc<Pool>);

impl PoolHandle {
    /// The pool of this process with `threads` threads.
    ///
    /// # Errors
    /// [`Error::NoThreads`] if the system cannot start the threads.
    pub fn get(threads: NonZero<usize>) -> Result<Self> {
        let process = std::process::id();
        let current = POOL.load_full();
        if let Some(pool) = current.filter(|pool| pool.process == process)
            && pool.pool.current_num_threads() == threads.get()
        {
            return Ok(Self(pool));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.get())
            .thread_name(|i| format!("exactknn-{i}"))
            .start_handler(|_| {
                float_env::reset();
                IS_WORKER.set(true);
            })
            .build()
            .map_err(|error| Error::NoThreads { threads: threads.get(), reason: error.to_string() })?;
        let pool = Arc::new(Pool { process, pool });
        if let Some(old) = POOL.swap(Some(Arc::clone(&pool)))
            && old.process != process
        {
            std::mem::forget(old);
        }
        Ok(Self(pool))
    }

    /// The rayon pool itself.
    pub fn pool(&self) -> &rayon::ThreadPool {
        &self.0.pool
    }
}

/// Run `work` on the pool of this process with `threads` threads, or on this thread if the work is small or this thread is a
/// worker of the pool. In both cases in the default floating-point environment.
pub(crate) fn enter<T: Send>(
    threads: NonZero<usize>,
    is_small: bool,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    if is_small || is_worker() {
        return float_env::with_default(work);
    }
    PoolHandle::get(threads)?.pool().install(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> PoolHandle {
        PoolHandle::get(NonZero::new(threads).expect("positive")).expect("threads")
    }

    #[test]
    fn the_pool_has_the_given_number_of_threads() {
        assert_eq!(pool(3).pool().current_num_threads(), 3);
        assert_eq!(pool(2).pool().install(rayon::current_num_threads), 2);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_callers_float_state_neither_leaks_in_nor_is_lost() {
        #[inline(never)]
        fn half() -> u32 {
            // Bits: a comparison of denormals would depend on the caller's environment.
            std::hint::black_box(std::hint::black_box(f32::MIN_POSITIVE) * std::hint::black_box(0.5)).to_bits()
        }
        float_env::while_flushing(|| {
            assert_eq!(half(), 0, "the caller flushes");
            assert_ne!(float_env::with_default(half), 0, "the work does not");
            assert_eq!(half(), 0, "the caller has its state back");
            assert_ne!(PoolHandle::get(NonZero::<usize>::MIN).expect("a thread").pool().install(half), 0);
        });
    }
}
