//! The floating-point environment of a thread (MXCSR on x86-64).
//!
//! Other libraries may set flush-to-zero or denormals-are-zero on the calling thread, and new threads inherit it. Results
//! must not depend on it.
//!
//! Miri has the default environment only, and no instructions to change it.

/// Round to nearest, denormals kept, exceptions masked: the environment that Rust assumes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const DEFAULT: u32 = 0x1f80;

/// The bits that may be written; any other raises a fault.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const WRITABLE: u32 = 0xffff;

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn read() -> u32 {
    let mut state = 0u32;
    // SAFETY: the instruction writes four bytes to `state`, and SSE is part of every x86-64 CPU.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut state, options(nostack, preserves_flags)) };
    state
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn write(state: u32) {
    // SAFETY: the instruction reads four bytes from `state`. The value is a constant without reserved bits, one that was read
    // from the register, or masked by `WRITABLE`.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags)) };
}

/// Set the default environment for this thread and return the state before, for [`restore`]; 0 where it is not changed.
pub fn replace() -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let state = read();
        write(DEFAULT);
        state
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    0
}

/// Set the state that [`replace`] returned.
pub fn restore(state: u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    write(state & WRITABLE);
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = state;
}

/// Set the default environment for this thread.
pub fn reset() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    write(DEFAULT);
}

#[cfg(any(test, all(target_arch = "x86_64", not(miri))))]
#[inline(never)]
fn call<T>(work: impl FnOnce() -> T) -> T {
    work()
}

/// Run `work` with flush-to-zero and denormals-are-zero set.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) fn while_flushing<T>(work: impl FnOnce() -> T) -> T {
    with_default(|| {
        #[cfg(not(miri))]
        write(DEFAULT | 0x8040);
        call(work)
    })
}

/// Run `work` in the default environment, then restore the thread's own, also if `work` panics.
pub fn with_default<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        struct Restore(u32);
        impl Drop for Restore {
            fn drop(&mut self) {
                write(self.0);
            }
        }
        let _restore = Restore(read());
        write(DEFAULT);
        // Not inlined: the compiler may move arithmetic across the write of the register.
        call(work)
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    work()
}
