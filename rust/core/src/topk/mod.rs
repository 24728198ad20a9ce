//! Who is among the k nearest so far. Knows orders and bounds, nothing of kernels.
//!
//! ```text
//! filter hits (key, error) ──> Reservoir ──settle: rescored in float64──> Heap ──> k neighbours, sorted
//! direct values ────────────────────────────────────────────────────────> Heap
//! ```
//!
//! [`Heap`] holds the k first rows under the total order, by exact values. [`Reservoir`] holds rows that *might* be among
//! them, by bounds of their keys, and knows the key below which nobody else can be.

pub(crate) mod heap;
pub(crate) mod reservoir;

pub(crate) use heap::Heap;
pub(crate) use reservoir::{Candidate, Reservoir};
