//! The floating-point control state of a thread (MXCSR on x86-64).
//!
//! Other libraries may set flush-to-zero on the calling thread, and new threads inherit it. The bytes of an answer must not
//! depend on it.

/// Rounds to nearest, keeps subnormal numbers, raises no exceptions: what Rust assumes everywhere.
#[cfg(target_arch = "x86_64")]
const DEFAULT: u32 = 0x1f80;

#[cfg(target_arch = "x86_64")]
fn read() -> u32 {
    let mut state = 0u32;
    // SAFETY: the instruction writes four bytes to the address given, and SSE is part of every x86-64 CPU.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut state, options(nostack, preserves_flags)) };
    state
}

#[cfg(target_arch = "x86_64")]
fn write(state: u32) {
    // SAFETY: the instruction reads four bytes from the address given; the state written is one that it was read as,
    // or Rust's own default.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags)) };
}

/// Give this thread the default state.
pub fn reset() {
    #[cfg(target_arch = "x86_64")]
    write(DEFAULT);
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn call<T>(work: impl FnOnce() -> T) -> T {
    work()
}

/// Run `work` as a caller would that has told its thread to flush subnormal numbers to zero.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) fn while_flushing<T>(work: impl FnOnce() -> T) -> T {
    const FLUSHING: u32 = DEFAULT | 0x8040;
    with_default(|| {
        write(FLUSHING);
        call(work)
    })
}

/// Run `work` under the default state, then put the thread's own state back, also when `work` panics.
pub fn with_default<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    {
        struct Restore(u32);
        impl Drop for Restore {
            fn drop(&mut self) {
                write(self.0);
            }
        }
        let _restore = Restore(read());
        write(DEFAULT);
        // A call that is not inlined: the compiler may move plain arithmetic past a write of the state.
        call(work)
    }
    #[cfg(not(target_arch = "x86_64"))]
    work()
}
