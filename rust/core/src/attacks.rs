//! Attacks on the certified bound: rows chosen to break it, at every level.
//!
//! For every pair of rows the key of the kernel must lie within its stated error of the key that float64 gives, and no row
//! below a floor may rank at or before the row that the floor was made from.

use proptest::prelude::*;

use crate::Argument;
use crate::arch;
use crate::arch::lp_f32::{self, Logarithms, LpF32, Minkowski, Products};
use crate::bound::{Floor, lp_relative_error};
use crate::cancel::Monitor;
use crate::kernel::{Bars, Hits, Kernel, MAX_MR, QueryPanel, RowTerms};
use crate::level::{Level, Simd};
use crate::matrix::{MatrixRef, Output};
use crate::metric::{Geometry, Metric};
use crate::order::Neighbour;
use crate::pack::{Frame, PackedQuery, PackedReference, lower};
use crate::rescore::{Prepared, score};

/// The metrics of the kernels that multiply.
const METRICS: [Metric; 7] = [
    Metric::SqEuclidean,
    Metric::Euclidean,
    Metric::NormalizedSqEuclidean,
    Metric::NormalizedEuclidean,
    Metric::Cosine,
    Metric::CosineSimilarity,
    Metric::InnerProduct,
];

/// Keys of every pair, with their errors, through kernel `K`.
struct Keys {
    key: Vec<f32>,
    error: Vec<f32>,
}

fn keys<K: Kernel>(kernel: K, simd: Simd, frame: &Frame, query: MatrixRef<'_, f32>, refs: MatrixRef<'_, f32>) -> Keys {
    let packed = PackedReference::<K>::pack(simd, frame, refs, 1, &Monitor::new()).expect("finite");
    let queries = PackedQuery::<K>::pack(simd, frame, query, 0, query.rows()).expect("finite");
    let mut keys = Keys { key: vec![f32::NAN; query.rows() * refs.rows()], error: Vec::new() };
    let mut hits = Hits::new(K::MR, K::NR);
    for group in 0..query.rows().div_ceil(K::MR) {
        let first = group * K::MR;
        let lanes = K::MR.min(query.rows() - first);
        let mut bars = Bars { floor: [f32::INFINITY; MAX_MR], alpha: [0.0; MAX_MR], beta: [0.0; MAX_MR] };
        bars.floor[..lanes].fill(f32::NEG_INFINITY);
        kernel.scan(
            &QueryPanel { codes: queries.panel(group), bars: &bars },
            &packed.run(0, packed.panels()),
            &mut hits,
        );
        for m in 0..K::MR {
            let (rows, found) = hits.take(m);
            if m >= lanes {
                continue;
            }
            for (&row, &key) in rows.iter().zip(found).filter(|(row, _)| (**row as usize) < refs.rows()) {
                keys.key[(first + m) * refs.rows() + row as usize] = key;
            }
        }
    }
    for i in 0..query.rows() {
        let terms: RowTerms = queries.terms[i];
        keys.error.extend((0..refs.rows()).map(|j| packed.error(j as u32, terms)));
    }
    keys
}

fn keys_at(simd: Simd, frame: &Frame, query: MatrixRef<'_, f32>, refs: MatrixRef<'_, f32>) -> Keys {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(token) = simd.avx512() {
            return keys(arch::x86_64::avx512_f32::Avx512F32(token), simd, frame, query, refs);
        }
        if let Some(token) = simd.avx2() {
            return keys(arch::x86_64::avx2_f32::Avx2F32(token), simd, frame, query, refs);
        }
    }
    keys(arch::scalar::ScalarF32, simd, frame, query, refs)
}

/// Shapes of rows that stress one term of the bound each.
fn row(kind: u8, dim: usize, seeds: &[f32]) -> Vec<f32> {
    let at = |i: usize| seeds[(i * 7 + kind as usize) % seeds.len()];
    (0..dim)
        .map(|i| match kind % 8 {
            0 => at(i),
            // One huge coordinate.
            1 => {
                if i == dim / 2 {
                    1e12 * at(i)
                } else {
                    at(i)
                }
            }
            // All equal: every rounding has the same sign.
            2 => at(0) * 1.000_000_1,
            // Tiny differences after centring.
            3 => 100.0 + at(i) * 1e-5,
            // Alternating signs of one size: the sum cancels, the bound does not.
            4 => {
                if i % 2 == 0 {
                    1.0 + f32::EPSILON
                } else {
                    -1.0
                }
            }
            // Growing: early terms are lost in a running sum.
            5 => at(i) * (i as f32 + 1.0).powi(6),
            6 => at(i) * 1e-20,
            _ => {
                if i % 5 == 0 {
                    at(i)
                } else {
                    0.0
                }
            }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_key_leaves_its_bound_and_no_floor_hides_a_neighbour(
        dim in prop_oneof![1usize..=130, Just(513), Just(2048)],
        kinds in prop::collection::vec(any::<u8>(), 2..60),
        seeds in prop::collection::vec(-2.0f32..2.0, 5..90),
        metric in 0..METRICS.len(),
        same_kind: bool,
    ) {
        let metric = METRICS[metric];
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
            let frame = Frame::choose(simd, metric, refs);
            let keys = keys_at(simd, &frame, query, refs);
            // The queries' shifts do not depend on the kernel.
            let shifts = PackedQuery::<arch::scalar::ScalarF32>::pack(simd, &frame, query, 0, queries).expect("finite").shifts;
            let all: Vec<u32> = (0..data.len() as u32).collect();
            for i in 0..queries {
                let mut values = Vec::new();
                let prepared = Prepared::new(metric, query.row(i));
                score(simd, &prepared, refs, &all, &mut Vec::new(), &mut values);
                let (shift, size) = shifts[i];
                let floor = Floor::new(metric, dim, shift, size, frame.scale2(), f32::UNIT_ROUNDOFF);
                for (j, &value) in values.iter().enumerate() {
                    let (key, error) = (keys.key[i * data.len() + j], keys.error[i * data.len() + j]);
                    prop_assert!(!error.is_nan());
                    let exact = match metric.geometry() {
                        Geometry::Euclidean => {
                            let squared = if metric == Metric::Euclidean || metric == Metric::NormalizedEuclidean {
                                value * value
                            } else {
                                value
                            };
                            (shift - squared * frame.scale2()) * 0.5
                        }
                        Geometry::Dot => {
                            let similarity = if metric == Metric::Cosine { 1.0 - value } else { value };
                            similarity * frame.scale2() - shift
                        }
                        Geometry::Lp => unreachable!("has kernels of its own"),
                    };
                    // What this reconstruction itself loses.
                    let noise = 1e-12 * (shift.abs() + size + exact.abs());
                    prop_assert!(
                        (f64::from(key) - exact).abs() <= f64::from(error) + noise,
                        "key {key:e} of an exact {exact:e} is off by more than {error:e}"
                    );
                    let rank = Neighbour::new::<f32>(metric, value, j as u32);
                    let made = floor.below_value(rank.ranked_value(metric));
                    let below_key = floor.below_key(f64::from(lower(key, error)));
                    for (other, &other_value) in values.iter().enumerate() {
                        let other_rank = Neighbour::new::<f32>(metric, other_value, other as u32);
                        let at = i * data.len() + other;
                        let upper = -lower(-keys.key[at], keys.error[at]);
                        if other_rank <= rank {
                            prop_assert!(upper >= made || upper.is_nan(), "a floor from a value hides a row that ranks before it");
                            prop_assert!(upper >= below_key || upper.is_nan(), "a floor from a key hides a row that ranks before it");
                        }
                    }
                }
            }
        }
    }
}

/// The bound must also be worth something: on ordinary data it is a few millionths of the keys.
#[test]
fn the_bound_is_tight_on_ordinary_rows() {
    let data: Vec<f32> = (0..64 * 128).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let matrix = MatrixRef::new(&data, 64, 128, Argument::Reference).expect("good");
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, Metric::SqEuclidean, matrix);
        let keys = keys_at(simd, &frame, matrix, matrix);
        let largest = keys.key.iter().fold(0.0f32, |m, k| m.max(k.abs()));
        assert!(keys.error.iter().all(|&error| error > 0.0 && error < 2e-5 * largest));
    }
}

/// A row too large to filter takes its panel out of the filter, and nothing else.
#[test]
fn a_giant_row_is_reported_and_leaves_the_others_alone() {
    let mut data: Vec<f32> = (0..300 * 4).map(|i| ((i * 31) % 17) as f32).collect();
    data[299 * 4] = 1e38;
    let matrix = MatrixRef::new(&data, 300, 4, Argument::Reference).expect("good");
    let query = MatrixRef::new(&data[..4 * 4], 4, 4, Argument::Query).expect("good");
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, Metric::SqEuclidean, matrix);
        let keys = keys_at(simd, &frame, query, matrix);
        for i in 0..4 {
            assert_eq!(keys.error[i * 300 + 299], f32::INFINITY);
            assert!(keys.error[i * 300..][..256].iter().all(|error| *error < 1e-3));
        }
    }
}

fn lp_keys(metric: Metric, simd: Simd, frame: &Frame, query: MatrixRef<'_, f32>, refs: MatrixRef<'_, f32>) -> Keys {
    fn at<S: lp_f32::Shape>(
        shape: S,
        simd: Simd,
        frame: &Frame,
        query: MatrixRef<'_, f32>,
        refs: MatrixRef<'_, f32>,
    ) -> Keys {
        if simd.avx2().is_some() {
            keys(LpF32::<S, { lp_f32::WIDE }> { simd, shape }, simd, frame, query, refs)
        } else {
            keys(LpF32::<S, { lp_f32::NARROW }> { simd, shape }, simd, frame, query, refs)
        }
    }
    match metric {
        Metric::Cityblock => at(lp_f32::Cityblock, simd, frame, query, refs),
        Metric::Chebyshev => at(lp_f32::Chebyshev, simd, frame, query, refs),
        Metric::Minkowski(power) => match power.halves() {
            Some(3) => at(Minkowski(Products::<3>), simd, frame, query, refs),
            Some(6) => at(Minkowski(Products::<6>), simd, frame, query, refs),
            Some(8) => at(Minkowski(Products::<8>), simd, frame, query, refs),
            _ => at(Minkowski(Logarithms { p: power.get() as f32 }), simd, frame, query, refs),
        },
        _ => unreachable!("the kernels that multiply are attacked above"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The same for distances that are no sums of squares: a key is off by its stated error and by a share of itself.
    #[test]
    fn no_distance_leaves_its_bound_and_no_floor_hides_a_neighbour(
        dim in prop_oneof![1usize..=130, Just(513), Just(2048)],
        kinds in prop::collection::vec(any::<u8>(), 2..60),
        seeds in prop::collection::vec(-2.0f32..2.0, 5..90),
        metric in prop_oneof![
            2 => Just(Metric::Cityblock),
            2 => Just(Metric::Chebyshev),
            3 => prop::sample::select(vec![1.000_001, 1.25, 1.5, 2.5, 3.0, 3.7, 4.0, 17.3, 100.0, 1e4, 1e6])
                .prop_map(|p| Metric::minkowski(p).expect("above 0")),
        ],
        same_kind: bool,
    ) {
        let data: Vec<Vec<f32>> = kinds
            .iter()
            .enumerate()
            .map(|(i, &kind)| row(if same_kind { kinds[0] } else { kind }, dim, &seeds[i % (seeds.len() / 2)..]))
            .collect();
        let flat = data.concat();
        let refs = MatrixRef::new(&flat, data.len(), dim, Argument::Reference).expect("good");
        let queries = data.len().min(5);
        let query = MatrixRef::new(&flat[..queries * dim], queries, dim, Argument::Query).expect("good");
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            let frame = Frame::choose(simd, metric, refs);
            let keys = lp_keys(metric, simd, &frame, query, refs);
            let scale = frame.scale2().sqrt();
            let all: Vec<u32> = (0..data.len() as u32).collect();
            for i in 0..queries {
                let mut values = Vec::new();
                score(simd, &Prepared::new(metric, query.row(i)), refs, &all, &mut Vec::new(), &mut values);
                let floor = Floor::new(metric, dim, 0.0, 0.0, frame.scale2(), f32::UNIT_ROUNDOFF);
                for (j, &value) in values.iter().enumerate() {
                    let (key, error) = (keys.key[i * data.len() + j], keys.error[i * data.len() + j]);
                    prop_assert!(!error.is_nan() && !key.is_nan() && key <= 0.0);
                    let exact = value * scale;
                    let share = (1.0 + 1e-12) * lp_relative_error(metric, dim) * exact;
                    prop_assert!(
                        (f64::from(key) + exact).abs() <= f64::from(error) + share,
                        "key {key:e} of a distance {exact:e} is off by more than {error:e} + {share:e}"
                    );
                    let rank = Neighbour::new::<f32>(metric, value, j as u32);
                    let made = floor.below_value(rank.ranked_value(metric));
                    let below_key = floor.below_key(f64::from(lower(key, error)));
                    for (other, &other_value) in values.iter().enumerate() {
                        let other_rank = Neighbour::new::<f32>(metric, other_value, other as u32);
                        let at = i * data.len() + other;
                        let upper = -lower(-keys.key[at], keys.error[at]);
                        if other_rank <= rank {
                            prop_assert!(upper >= made, "a floor from a value hides a row that ranks before it");
                            prop_assert!(upper >= below_key, "a floor from a key hides a row that ranks before it");
                        }
                    }
                }
            }
        }
    }
}

/// The share of a key that may be wrong is small beside the spread of ordinary distances.
#[test]
fn the_bound_of_distances_is_tight_on_ordinary_rows() {
    let data: Vec<f32> = (0..64 * 128).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let matrix = MatrixRef::new(&data, 64, 128, Argument::Reference).expect("good");
    let minkowski = Metric::minkowski(3.0).expect("above 0");
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        for (metric, share) in [(Metric::Cityblock, 2e-5), (Metric::Chebyshev, 3e-6), (minkowski, 6e-5)] {
            let frame = Frame::choose(simd, metric, matrix);
            let keys = lp_keys(metric, simd, &frame, matrix, matrix);
            let largest = keys.key.iter().fold(0.0f32, |m, k| m.max(-k));
            let relative = lp_relative_error(metric, 128) as f32 * largest;
            assert!(keys.error.iter().all(|&error| error > 0.0 && error + relative < share * largest), "{metric:?}");
        }
    }
}
