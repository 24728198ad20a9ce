//! Buffers that grow with the input: an allocation that fails is an error, never an abort.

use crate::error::{Error, Result};

/// An empty vector with room for `len` elements, or [`Error::OutOfMemory`] instead of an abort.
pub(crate) fn try_vec<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: len.saturating_mul(size_of::<T>()), what })?;
    Ok(vec)
}

/// Zeros, without touching the pages: they are touched by the threads that fill them.
pub(crate) fn try_zeroed<T: Copy + Default>(len: usize, what: &'static str) -> Result<Vec<T>> {
    // `vec!` asks for zeroed pages but aborts when it gets none; the probe refuses first.
    drop(try_vec::<T>(len, what)?);
    Ok(vec![T::default(); len])
}

/// Ask for pages of 2 MiB under a large buffer that nobody has touched yet and that will be read again and again: faults and
/// address translations of 4 KiB pages took a fifth of the time of a search of 256 queries. (Not for results, which are
/// written once: clearing large pages first costs them more than it saves.)
fn prefer_huge_pages<T>(buffer: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 2 << 20;
        let bytes = std::mem::size_of_val(buffer);
        let start = buffer.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(PAGE);
        if bytes >= 2 * PAGE && skip < bytes {
            // SAFETY: the range lies inside the buffer; the advice changes neither its contents nor who may use it. A system
            // that does not know it refuses, which changes nothing either.
            unsafe { libc::madvise(start.add(skip).cast(), (bytes - skip) / PAGE * PAGE, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = buffer;
}

/// A zeroed buffer that begins on a cache line, so that no vector load of a panel straddles two.
pub(crate) struct Aligned<T> {
    buffer: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    const LINE: usize = 64;

    pub(crate) fn zeroed(len: usize, what: &'static str) -> Result<Self> {
        let spare = Self::LINE / size_of::<T>();
        let mut buffer = try_zeroed::<T>(len + spare, what)?;
        prefer_huge_pages(&mut buffer);
        let start = buffer.as_ptr().align_offset(Self::LINE).min(spare);
        Ok(Self { buffer, start, len })
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        &self.buffer[self.start..][..self.len]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.buffer[self.start..][..self.len]
    }
}
