//! The k nearest candidates so far, under the total order. Independent of kernels and bounds.
//!
//! ```text
//! candidates of a filter ──rescored in float64──> TopK ──sort──> k neighbours ──merge──> k of all blocks
//! pairs of a direct scan ──float64 values───────> TopK
//! ```

mod merge;
#[cfg(test)]
mod properties;
mod select;
mod sort;

pub(crate) use merge::merge;
pub(crate) use select::TopK;
