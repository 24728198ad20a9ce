//! The certified filter: which rows can be rejected without their float64 value.
//!
//! ```text
//! reference ──frame: centre, scale──> encode_{f32,i8}: codes, error terms ──> panels
//! panels, query panel ──arch: keys──> key below the threshold of `bound`?  ──> rejected, provably
//! few queries ──unpacked: float32 arithmetic on the rows as passed─────────> the same
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

/// What decides whether a row needs its float64 value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub(crate) enum Filter {
    /// Nothing: every pair is formed in float64.
    #[default]
    Direct,
    /// Float32 arithmetic on the rows as passed, without packing.
    Unpacked,
    /// Centred float32 rows and their certified bound.
    Float32,
    /// Centred rows in 8-bit codes and their certified bound.
    Int8,
}

/// Do `work` with the kernel that a level has for a metric and a filter of packed rows.
pub(crate) fn with_filter<W: WithKernel>(simd: Simd, metric: Metric, filter: Filter, work: W) -> W::Output {
    match (metric.geometry(), filter) {
        (Geometry::Lp, _) => with_minkowski(simd, metric, work),
        (_, Filter::Int8) => with_int8(simd, work),
        _ => with_float32(simd, work),
    }
}

impl Filter {
    /// Whether it reads packed rows.
    pub(crate) fn is_packed(self) -> bool {
        matches!(self, Self::Float32 | Self::Int8)
    }
}
