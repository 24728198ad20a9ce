//! Buffers whose size depends on the input: a failed allocation is an error, not an abort.

use rayon::prelude::*;
use zerocopy::FromZeros;

use crate::error::{Error, Result};

/// The purpose of the buffers of frames in [`Error::OutOfMemory`].
pub(crate) const FRAME: &str = "the centre of the references";

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

/// `items`, whose number is known, as a vector, or [`Error::OutOfMemory`] instead of an abort.
pub(crate) fn try_collect<T>(items: impl ExactSizeIterator<Item = T>, what: &'static str) -> Result<Vec<T>> {
    let mut vec = try_vec(items.len(), what)?;
    vec.extend(items);
    Ok(vec)
}

/// `len` copies of `value`, or [`Error::OutOfMemory`] instead of an abort.
pub(crate) fn try_filled<T: Clone>(value: T, len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut vec = try_vec(len, what)?;
    vec.resize(len, value);
    Ok(vec)
}

/// Append `items`, or [`Error::OutOfMemory`] instead of an abort.
pub(crate) fn try_extend<T: Copy>(list: &mut Vec<T>, items: &[T], what: &'static str) -> Result<()> {
    try_reserve(list, items.len(), what)?;
    list.extend_from_slice(items);
    Ok(())
}

/// Zeros, without touching the pages: page faults happen in the threads that fill them.
pub(crate) fn try_zeroed<T: FromZeros>(len: usize, what: &'static str) -> Result<Vec<T>> {
    T::new_vec_zeroed(len).map_err(|_| Error::OutOfMemory { bytes: len.saturating_mul(size_of::<T>()), what })
}

/// `work` for all items, in parallel, one task an item; the results are in the order of the items. Only rayon's own buffers,
/// of a fixed size, are allocated without a check.
pub(crate) fn try_map_parallel<T: Send, R: Send>(
    items: Vec<T>,
    what: &'static str,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let mut places = try_vec(items.len(), what)?;
    places.resize_with(items.len(), || None);
    // `with_max_len(1)`: rayon would group the tasks, and the last group delays the call.
    items.into_par_iter().zip(&mut places).with_max_len(1).try_for_each(|(item, place)| {
        *place = Some(work(item)?);
        Ok(())
    })?;
    let mut results = try_vec(places.len(), what)?;
    results.extend(places.into_iter().flatten());
    Ok(results)
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

impl<T: FromZeros> Aligned<T> {
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
