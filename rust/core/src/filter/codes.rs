//! The codes of packed rows: in memory, or mapped from a file.

use std::ops::Range;

use crate::error::Result;
use crate::runtime::alloc::Aligned;
use crate::saved::{Mapped, Stored};

/// The codes of all panels.
pub(crate) enum Codes<T> {
    Owned(Aligned<T>),
    Mapped(Mapped<T>),
}

impl<T: Default + Stored> Codes<T> {
    #[inline(always)]
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::Owned(codes) => codes.as_slice(),
            Self::Mapped(codes) => codes.unverified(),
        }
    }

    /// Bytes of memory; mapped codes do not count.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Owned(codes) => size_of_val(codes.as_slice()),
            Self::Mapped(_) => 0,
        }
    }

    /// Verify codes before they are read.
    #[inline(always)]
    pub(crate) fn verify(&self, range: Range<usize>) -> Result<()> {
        match self {
            Self::Owned(_) => Ok(()),
            Self::Mapped(codes) => codes.verify(range),
        }
    }
}
