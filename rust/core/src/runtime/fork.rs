//! Forks wait until no thread holds a lock of the core: the child would have the lock, but not the thread that releases it.
//!
//! ```text
//! a change of an index ──hold──> its locks ──> release
//! fork: before ──waits for all holders, stops new ones──> the system's fork ──after, in both processes──> holders go on
//! ```
//!
//! The caller of fork calls [`before`] and [`after`], on the same thread. Without them a child may wait for ever, as in any
//! program of several threads.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Read by holders of locks, written by a fork.
static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    /// [`Hold`]s of this thread. Only the first reads the gate: a second read could wait for a fork that waits for the first.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static FORKING: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// No fork happens while this lives.
struct Hold(Option<RwLockReadGuard<'static, ()>>);

/// Hold forks off. It must be short, and must not wait for a thread that may fork.
fn hold() -> Hold {
    let depth = DEPTH.get();
    // Also nothing to read on the thread that is about to fork.
    let is_first = depth == 0 && FORKING.with_borrow(Option::is_none);
    let gate = is_first.then(|| GATE.read().unwrap_or_else(PoisonError::into_inner));
    DEPTH.set(depth + 1);
    Hold(gate)
}

impl Drop for Hold {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        self.0 = None;
    }
}

/// The guard of a lock of the core, which no fork finds locked.
pub(crate) struct Held<G> {
    // The lock is released before the gate.
    guard: G,
    _hold: Hold,
}

impl<G> Held<G> {
    /// Lock by `lock`.
    pub(crate) fn new(lock: impl FnOnce() -> G) -> Self {
        let hold = hold();
        Self { guard: lock(), _hold: hold }
    }
}

impl<G: Deref> Deref for Held<G> {
    type Target = G::Target;

    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Held<G> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guard
    }
}

/// Wait until no thread holds a lock of the core, and let none take one until [`after`].
pub fn before() {
    if FORKING.with_borrow(Option::is_some) {
        return;
    }
    let gate = GATE.write().unwrap_or_else(PoisonError::into_inner);
    FORKING.set(Some(gate));
}

/// End what [`before`] began; in the parent and in the child.
pub fn after() {
    FORKING.set(None);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_fork_waits_for_a_holder_and_holders_wait_for_a_fork() {
        let (forked, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let outer = hold();
            let fork = scope.spawn(|| {
                before();
                forked.store(true, Ordering::SeqCst);
                // A fork does not wait for itself.
                drop(hold());
                ended.store(true, Ordering::SeqCst);
                after();
            });
            // Nested, while the fork may wait already.
            for _ in 0..1000 {
                drop(hold());
                std::thread::yield_now();
            }
            assert!(!forked.load(Ordering::SeqCst));
            drop(outer);
            fork.join().expect("no panic");
            drop(hold());
            assert!(ended.load(Ordering::SeqCst));
        });
    }
}
