//! Property tests of floor and ceiling: rows below the floor are outside a radius, rows above the ceiling inside.
//!
//! The edge is the float64 value of each pair and the numbers next to it, where a single wrong rounding shows. The rows are
//! those of the tests of keys.

use proptest::prelude::*;

use super::{Keys, keys_at, metrics, row};
use crate::Argument;
use crate::arch;
use crate::arch::level::{Level, Simd};
use crate::exact::{Prepared, Widened, score};
use crate::filter::bound::{Bound, accept_threshold};
use crate::filter::frame::Frame;
use crate::filter::panels::PackedQuery;
use crate::matrix::MatrixRef;
use crate::metric::Metric;

/// Values of a query with all rows, and their keys with errors.
struct Judged {
    bound: Bound,
    values: Vec<f64>,
    keys: Vec<(f32, f32)>,
}

/// The kernel's threshold: keys below it are not reported.
fn reject_threshold(floor: f32, error: f32) -> f32 {
    floor - error
}

fn judge(simd: Simd, metric: Metric, query: MatrixRef<'_, f32>, refs: MatrixRef<'_, f32>) -> Vec<Vec<Judged>> {
    let frame = Frame::choose(simd, metric, &refs).expect("memory");
    // The queries' shifts do not depend on the kernel.
    let rows: Vec<u32> = (0..query.rows() as u32).collect();
    let shifts = PackedQuery::<arch::scalar::ScalarF32>::pack(simd, &frame, &query, &rows).expect("finite").shifts;
    let all: Vec<u32> = (0..refs.rows() as u32).collect();
    let judged = |keys: &Keys, i: usize, (shift, size): (f64, f64)| {
        let mut values = Vec::new();
        score(simd, &Prepared::new(metric, query.row(i)), refs, &all, &mut Widened::new(), &mut values);
        let of = |at: usize| (keys.key[at], keys.error[at]);
        Judged {
            bound: Bound::new(metric, query.dim(), shift, size, frame.scale2(), 0.0),
            values,
            keys: (0..refs.rows()).map(|j| of(i * refs.rows() + j)).collect(),
        }
    };
    let by_kernel = |keys: Keys| shifts.iter().enumerate().map(|(i, shift)| judged(&keys, i, *shift)).collect();
    keys_at(simd, metric, &frame, query, refs).into_iter().map(by_kernel).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_row_inside_is_below_the_floor_and_no_row_outside_above_the_ceiling(
        dim in prop_oneof![1usize..=130, Just(513), Just(2048)],
        kinds in prop::collection::vec(any::<u8>(), 2..60),
        seeds in prop::collection::vec(-2.0f32..2.0, 5..90),
        metric in metrics(),
        same_kind: bool,
        other in -3.0f64..3.0,
    ) {
        let data: Vec<Vec<f32>> = kinds
            .iter()
            .enumerate()
            .map(|(i, &kind)| row(if same_kind { kinds[0] } else { kind }, dim, &seeds[i % (seeds.len() / 2)..]))
            .collect();
        let flat = data.concat();
        let refs = MatrixRef::new(&flat, data.len(), dim, Argument::Reference).expect("good");
        let queries = data.len().min(7);
        let query = MatrixRef::new(&flat[..queries * dim], queries, dim, Argument::Query).expect("good");
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            for Judged { bound, values, keys } in judge(simd, metric, query, refs).into_iter().flatten() {
                let edges = values.iter().flat_map(|v| [*v, v.next_up(), v.next_down(), v * 1.000_001, v * other]);
                for edge in edges.chain([0.0, 1.0, 2.0, -1.0, other, f64::MAX, f64::MIN_POSITIVE]) {
                    let (out, sure) = (bound.reject_below(edge), bound.accept_above(edge));
                    for (&value, &(key, error)) in values.iter().zip(&keys) {
                        let inside = if metric.largest_first() { value >= edge } else { value <= edge };
                        let (low, high) = (reject_threshold(out, error), accept_threshold(sure, error));
                        if inside {
                            // Not `>=`: NaN is reported.
                            #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
                            let reported = !(key < low);
                            prop_assert!(reported, "{metric:?}: {value:e} is within {edge:e}, but {key:e} below {low:e}");
                        } else {
                            let sure = key > high;
                            prop_assert!(!sure, "{metric:?}: {value:e} is not within {edge:e}, but {key:e} above {high:e}");
                        }
                    }
                }
            }
        }
    }
}

/// The bounds are also tight: on ordinary data they decide nearly every pair, in 8 bits most.
#[test]
fn few_ordinary_rows_are_between_the_bounds() {
    let data: Vec<f32> = (0..300 * 64).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    let matrix = MatrixRef::new(&data, 300, 64, Argument::Reference).expect("good");
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        for metric in Metric::ALL {
            for (judged, most) in judge(simd, metric, matrix, matrix).into_iter().zip([1_500, 30_000]) {
                let mut undecided = 0;
                for Judged { bound, values, keys } in judged {
                    let mut sorted = values.clone();
                    sorted.sort_by(f64::total_cmp);
                    let edge = sorted[150];
                    let (out, sure) = (bound.reject_below(edge), bound.accept_above(edge));
                    assert!(out < sure);
                    let decided = |key: f32, error: f32| {
                        key < reject_threshold(out, error) || key > accept_threshold(sure, error)
                    };
                    undecided += keys.iter().filter(|(key, error)| !decided(*key, *error)).count();
                }
                // The row on the edge itself, and the rows within the error of it.
                assert!((300..most).contains(&undecided), "{metric:?}: {undecided} of 90,000 pairs are undecided");
            }
        }
    }
}
