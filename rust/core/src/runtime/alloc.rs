//! Buffers whose size depends on the input: a failed allocation is an error, not an abort.

use crate::error::{Error, Result};

/// An empty vector with room for `len` elements, or [`Error::OutOfMemory`] instead of an abort.
pub(crate) fn try_vec<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: len.saturating_mul(size_of::<T>()), what })?;
    Ok(vec)
}

/// Room for `more` elements, or [`Error::OutOfMemory`] instead of an abort.
pub(crate) fn try_reserve<T>(list: &mut Vec<T>, more: usize, what: &'static str) -> Result<()> {
    list.try_reserve(more).map_err(|_| Error::OutOfMemory { what, bytes: more.saturating_mul(size_of::<T>()) })
}

/// Zeros, without touching the pages: page faults happen in the threads that fill them.
pub(crate) fn try_zeroed<T: Copy + Default>(len: usize, what: &'static str) -> Result<Vec<T>> {
    // `vec!` gets zeroed pages from the system, but aborts on failure: try the same allocation first.
    drop(try_vec::<T>(len, what)?);
    Ok(vec![T::default(); len])
}

/// Request 2 MiB pages for a large, untouched buffer that will be read many times: page faults and TLB misses of 4 KiB pages
/// took a fifth of the time of a search of 256 queries. (Not for results, which are written once: clearing huge pages costs
/// more than they save.)
fn prefer_huge_pages<T>(buffer: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 2 << 20;
        let bytes = std::mem::size_of_val(buffer);
        let start = buffer.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(PAGE);
        if bytes >= 2 * PAGE && skip < bytes {
            // SAFETY: the range is inside the buffer, and the advice affects neither its contents nor its validity. A system
            // without huge pages returns an error, which is ignored.
            unsafe { libc::madvise(start.add(skip).cast(), (bytes - skip) / PAGE * PAGE, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = buffer;
}

/// A zeroed buffer that starts at a cache line, so that no vector load of a panel crosses two lines.
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
