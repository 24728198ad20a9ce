//! The tests of the core's public interface, as one binary, so that the core is linked once.

mod common;
mod contract;
mod filters;
#[path = "../fuzz/driver.rs"]
#[allow(unreachable_pub, missing_docs, reason = "the core has the same file")]
mod fuzz;
#[path = "../fuzz/searches.rs"]
mod fuzz_searches;
mod index;
mod interrupts;
mod pairwise;
mod questions;
mod radius;
mod ranks;
mod saved;
