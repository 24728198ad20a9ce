//! The tests of the core's public interface, in one binary: the core is compiled for them once.

mod common;
mod contract;
mod filters;
mod index;
mod pairwise;
mod questions;
mod radius;
mod ranks;
mod saved;
