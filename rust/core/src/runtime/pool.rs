//! Threads: one rayon pool per process, built on first use.
//!
//! A global pool hangs in a forked child, in which its threads do not exist. So the pool is keyed by the process id, and a
//! child builds its own. An inherited pool is forgotten, never dropped: dropping it would signal missing threads, through
//! locks that one of them may have held during the fork. Rayon's own global pool is never used.

use std::any::Any;
use std::cell::Cell;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use arc_swap::ArcSwapOption;

use super::float_env;
use crate::error::{Error, Result};

/// The environment variable that sets the number of threads.
pub const THREADS_VARIABLE: &str = "EXACTKNN_NUM_THREADS";

/// Threads of a call at most, unless the machine has many cores. The system would take minutes to start many more, or fail.
const MOST_THREADS: NonZero<usize> = NonZero::new(256).unwrap();

/// The threads that a call with `threads` uses: at most 256, or four for each core if those are more.
#[must_use]
pub fn capped_threads(threads: NonZero<usize>) -> NonZero<usize> {
    if threads <= MOST_THREADS {
        // The number of cores is read from files of the system.
        return threads;
    }
    let cores = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let four = NonZero::<usize>::MIN.saturating_add(3);
    threads.min(MOST_THREADS.max(cores.saturating_mul(four)))
}

struct Pool {
    process: u32,
    /// `None` only while it is dropped.
    pool: Option<rayon::ThreadPool>,
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.pool.take());
        }
    }
}

impl Pool {
    fn get(&self) -> &rayon::ThreadPool {
        let Some(pool) = &self.pool else { unreachable!("a pool is taken only when it is dropped") };
        pool
    }
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
                Ok(threads) => Ok(capped_threads(threads).get()),
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

/// Set the number of threads of later searches, as [`capped_threads`]; `None` resets to the default.
pub fn set_num_threads(threads: Option<NonZero<usize>>) {
    CHOSEN.store(threads.map_or(0, |threads| capped_threads(threads).get()), Ordering::Relaxed);
}

/// A handle of a pool, which lives at least as long.
pub struct PoolHandle(Arc<Pool>);

impl PoolHandle {
    /// The pool of this process with `threads` threads, as [`capped_threads`].
    ///
    /// # Errors
    /// [`Error::NoThreads`] if the system cannot start the threads.
    pub fn get(threads: NonZero<usize>) -> Result<Self> {
        let process = std::process::id();
        let threads = capped_threads(threads);
        let current = POOL.load_full();
        if let Some(pool) = current.filter(|pool| pool.process == process)
            && pool.get().current_num_threads() == threads.get()
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
        let pool = Arc::new(Pool { process, pool: Some(pool) });
        POOL.store(Some(Arc::clone(&pool)));
        Ok(Self(pool))
    }

    /// The rayon pool itself.
    pub fn pool(&self) -> &rayon::ThreadPool {
        self.0.get()
    }

    /// Run `work` on the pool. While this thread waits for it, it calls `poll` at this interval.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Panic`] if it panics; [`Error::Forked`] in a child that was forked in `poll`.
    pub fn watch<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T> + Send,
        interval: Duration,
        mut poll: impl FnMut(),
    ) -> Result<T> {
        let (send, results) = channel();
        let job = move || {
            // `work` and all that it borrows are gone when its result is sent. The receiver waits for it.
            let _ = send.send(catch_panic(work));
        };
        let job: Box<dyn FnOnce() + Send + '_> = Box::new(job);
        // SAFETY: only the lifetime changes. What the job borrows outlives it, since this function returns or unwinds only
        // after the result (see `Waiting`), which the job sends when it no longer has the borrows. A forked child returns
        // earlier, but has no worker that could run the job.
        let job = unsafe { std::mem::transmute::<Box<dyn FnOnce() + Send + '_>, Box<dyn FnOnce() + Send>>(job) };
        let waiting = Waiting { results, process: self.0.process };
        self.pool().spawn(job);
        loop {
            match waiting.results.recv_timeout(interval) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => poll(),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Panic("a worker ended without a result".into()));
                }
            }
            if std::process::id() != waiting.process {
                return Err(Error::Forked);
            }
        }
    }
}

/// The wait for a job that borrows from the stack of this thread: dropping it waits, but not in a forked child.
struct Waiting<T> {
    results: Receiver<T>,
    process: u32,
}

impl<T> Drop for Waiting<T> {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // An error: the job was dropped, and with it what it borrowed.
            let _ = self.results.recv();
        }
    }
}

/// Run `work` and turn a panic into an error that asks for a bug report: a panic must not end the caller's process.
///
/// # Errors
/// Those of `work`, and [`Error::Panic`].
pub fn catch_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let text = |payload: Box<dyn Any + Send>| {
        payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned())
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(Error::Panic(text(payload))))
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
    fn a_call_starts_no_more_threads_than_can_run() {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        assert_eq!(pool(usize::MAX).pool().current_num_threads(), 256.max(4 * cores));
        assert_eq!(pool(256).pool().current_num_threads(), 256);
    }

    #[test]
    fn work_may_borrow_while_it_is_watched() {
        let (numbers, mut polls) = (vec![1, 2, 3], 0);
        let (ready, wait) = channel();
        let borrowed = &numbers;
        let work = move || {
            // Not before this thread has polled.
            wait.recv().map_err(|_| Error::Cancelled)?;
            Ok(borrowed.iter().sum::<i32>())
        };
        let poll = || {
            polls += 1;
            let _ = ready.send(());
        };
        let sum = pool(2).watch(work, Duration::from_millis(1), poll);
        assert_eq!(sum, Ok(6));
        assert!(polls > 0);
        let failed: Result<()> = pool(2).watch(|| panic!("a bug"), Duration::from_millis(1), || ());
        assert_eq!(failed, Err(Error::Panic("a bug".into())));
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    #[cfg_attr(miri, ignore = "Miri has the default environment only")]
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
