//! Who is among the k nearest so far. Knows orders, nothing of kernels or bounds.
//!
//! ```text
//! filter candidates ──rescored in float64──> TopK ──sort──> k neighbours ──merge──> k of several parts
//! direct values ─────────────────────> TopK
//! ```

mod merge;
mod select;
mod sort;

pub(crate) use merge::merge;
pub(crate) use select::TopK;
