//! Who is among the k nearest so far. Knows orders, nothing of kernels or bounds.
//!
//! ```text
//! filter hits ──rescored in float64──> Nearest ──sort──> k neighbours ──merge──> k of several parts
//! direct values ─────────────────────> Nearest
//! ```

mod merge;
pub(crate) mod nearest;
mod sort;

pub(crate) use merge::merge;
pub(crate) use nearest::Nearest;
