//! An allocator that fails when told to.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Allocations of up to this number of bytes never fail. They are those of a fixed size: tasks of the thread pool, names and
/// messages.
pub(crate) const SMALL: usize = 2048;

/// The system's allocator, which refuses larger allocations from a given one on.
pub(crate) struct Failing;

static ARMED: AtomicBool = AtomicBool::new(false);
/// Larger allocations that are granted first.
static GRANTED: AtomicUsize = AtomicUsize::new(0);
/// Allocations that are refused after those.
static REFUSED: AtomicUsize = AtomicUsize::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn is_refused(bytes: usize) -> bool {
    if bytes <= SMALL || !ARMED.load(Ordering::SeqCst) {
        return false;
    }
    let number = COUNT.fetch_add(1, Ordering::SeqCst);
    let first = GRANTED.load(Ordering::SeqCst);
    let is_refused = number >= first && number - first < REFUSED.load(Ordering::SeqCst);
    if is_refused && std::env::var_os("EXACTKNN_TEST_TRACE").is_some() {
        ARMED.store(false, Ordering::SeqCst);
        eprintln!("refused {bytes} bytes, number {number}:\n{}", std::backtrace::Backtrace::force_capture());
        ARMED.store(true, Ordering::SeqCst);
    }
    is_refused
}

// SAFETY: every call is passed on as it is, or answered with null, which says that there is no memory.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of the system's allocator.
        if is_refused(layout.size()) { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        if is_refused(layout.size()) { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as above.
        if is_refused(bytes) { std::ptr::null_mut() } else { unsafe { System.realloc(start, layout, bytes) } }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

/// One sweep at a time: the allocator is that of the whole process.
pub(crate) static TURN: Mutex<()> = Mutex::new(());

/// The result of `work`, in which `refused` allocations above [`SMALL`] fail after the first `granted`, and whether one has.
pub(crate) fn with_failures<T>(granted: usize, refused: usize, work: impl FnOnce() -> T) -> (T, bool) {
    GRANTED.store(granted, Ordering::SeqCst);
    REFUSED.store(refused, Ordering::SeqCst);
    COUNT.store(0, Ordering::SeqCst);
    ARMED.store(true, Ordering::SeqCst);
    let result = work();
    ARMED.store(false, Ordering::SeqCst);
    (result, COUNT.load(Ordering::SeqCst) > granted)
}

/// The failures of a sweep: a single allocation, and all from one on, for each of the first and a sample of the later ones.
pub(crate) fn each_failure(mut attempt: impl FnMut(usize, usize) -> bool) -> usize {
    let mut tried = 0;
    for refused in [1, usize::MAX] {
        let mut granted = 0;
        while attempt(granted, refused) {
            tried += 1;
            granted += 1 + granted / 4;
        }
    }
    tried
}
