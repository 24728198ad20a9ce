//! Every allocation that grows with the input may fail: the call returns an error, nothing is half changed, and the same call
//! with memory returns the right bytes. An allocation without a check aborts the process, which fails these tests.
//!
//! `EXACTKNN_TEST_TRACE=1` prints where each refused allocation was made.

mod changes;
#[path = "../core/common.rs"]
mod common;
mod failing;
#[path = "../fuzz/driver.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "only its random numbers are used")]
mod fuzz;
mod searches;

use std::fmt::Debug;
use std::num::NonZero;
use std::sync::PoisonError;

use exactknn_core::{Argument, Element, Error, MatrixRef, Monitor, Result, Simd};

use common::{Random, Rows, rows};
use failing::{Failing, TURN, each_failure, with_failures};

#[global_allocator]
static ALLOCATOR: Failing = Failing;

const THREADS: NonZero<usize> = NonZero::new(2).expect("positive");

fn best() -> Simd {
    exactknn_core::active_level().expect("a level of this CPU")
}

fn data<E: Copy>(seed: u64, count: usize, dim: usize, to: impl Fn(f64) -> E) -> Vec<E> {
    common::convert(&rows(Rows::Normal, count, dim, &mut Random(seed)), to).concat()
}

fn matrix<E: Element>(numbers: &[E], dim: usize, argument: Argument) -> MatrixRef<'_, E> {
    MatrixRef::new(numbers, numbers.len() / dim, dim, argument).expect("a good matrix")
}

/// Make each allocation of `call` fail in turn; after each failure the call with memory must return the same as before.
fn sweep<T: PartialEq + Debug>(call: impl Fn(&Monitor) -> Result<T>) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let call = || call(&Monitor::new());
    // It also starts the pool.
    let wanted = call().expect("memory");
    let tried = each_failure(|granted, refused| {
        let (found, failed) = with_failures(granted, refused, call);
        match found {
            Err(Error::OutOfMemory { .. }) => assert!(failed),
            found => assert!(found.as_ref() == Ok(&wanted), "another result with {granted} granted"),
        }
        // Half of the failures, to save time.
        if failed && refused == 1 {
            assert!(call().as_ref() == Ok(&wanted), "another result after {granted} granted");
        }
        failed
    });
    assert!(tried >= 2, "an input too small to fail");
}
