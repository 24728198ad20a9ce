//! The tests of the core's public interface, as one binary, so that the core is linked once.

mod common;
mod contract;
mod filters;
mod index;
mod pairwise;
mod questions;
mod radius;
mod ranks;
mod saved;
