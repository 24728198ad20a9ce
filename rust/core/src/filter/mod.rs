//! The certified filter: it rejects rows without their float64 value, with proof.
//!
//! ```text
//! reference ──frame: centre, scale──> encode_{f32,i8}: codes, error terms ──> panels
//! panels, query panel ──arch: keys──> key below the threshold of `bound`?  ──> rejected
//! few queries ──unpacked: float32 keys of the rows as passed───────────────> the same
//! ```

pub(crate) mod bound;
#[cfg(test)]
mod bound_properties;
pub(crate) mod center_f32;
pub(crate) mod codes;
pub(crate) mod encode_f32;
pub(crate) mod encode_i8;
pub(crate) mod frame;
pub(crate) mod panels;
pub(crate) mod persist;
pub(crate) mod unpacked;

use crate::arch::level::Simd;
use crate::arch::{WithKernel, with_float32, with_int8, with_minkowski};
use crate::metric::{Geometry, Metric};

/// The filter of a search, which decides which pairs need their float64 value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub(crate) enum Filter {
    /// No filter: every pair gets its float64 value.
    #[default]
    Direct,
    /// Float32 keys of the rows as passed, without packing.
    Unpacked,
    /// Packed, centred float32 rows with their error bound.
    Float32,
    /// Packed, centred rows in 8-bit codes with their error bound.
    Int8,
}

/// Run `work` with the kernel of a level for a metric and a packed filter.
pub(crate) fn with_filter<W: WithKernel>(simd: Simd, metric: Metric, filter: Filter, work: W) -> W::Output {
    match (metric.geometry(), filter) {
        (Geometry::Lp, _) => with_minkowski(simd, metric, work),
        (_, Filter::Int8) => with_int8(simd, work),
        _ => with_float32(simd, work),
    }
}

impl Filter {
    /// Whether it needs packed references.
    pub(crate) fn is_packed(self) -> bool {
        matches!(self, Self::Float32 | Self::Int8)
    }
}
