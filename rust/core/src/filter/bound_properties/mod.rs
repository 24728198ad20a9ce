//! Property tests of the error bound, with rows chosen to break it, at every level.
//!
//! For every pair of rows the kernel's key is within its error bound of the key computed in float64, and no row below a floor
//! ranks at or before the row from which the floor was computed.

mod fuzz;
mod radius;
mod unpacked;

use proptest::prelude::*;

use crate::Argument;
use crate::arch::kernel::{CandidateLists, MAX_RUN, Microkernel, QueryPanel, Thresholds, Transposed, Visit};
use crate::arch::level::{Level, Simd};
use crate::arch::{self, WithKernel};
use crate::exact::{Prepared, Widened, score};
use crate::filter::bound::{Bound, lp_relative_error};
use crate::filter::frame::Frame;
use crate::filter::panels::{PackedQuery, PackedReference};
use crate::filter::{Filter, with_filter};
use crate::matrix::{Element, MatrixRef, Output};
use crate::metric::{Geometry, Metric};
use crate::order::Neighbour;
use crate::runtime::Monitor;

/// Keys of all pairs, with their errors, from one kernel.
struct Keys {
    kernel: &'static str,
    key: Vec<f32>,
    error: Vec<f32>,
}

struct AllKeys<'a, E> {
    simd: Simd,
    frame: &'a Frame,
    query: MatrixRef<'a, E>,
    refs: MatrixRef<'a, E>,
}

impl<E: Element> WithKernel for AllKeys<'_, E> {
    type Output = Keys;

    fn run<K: Microkernel + 'static>(self, kernel: K) -> Keys {
        let Self { simd, frame, query, refs } = self;
        let packed = PackedReference::<K>::pack(simd, frame, &refs, 1, &Monitor::new()).expect("finite");
        let rows: Vec<u32> = (0..query.rows() as u32).collect();
        let queries = PackedQuery::<K>::pack(simd, frame, &query, &rows).expect("finite");
        let mut keys = Keys {
            kernel: std::any::type_name::<K>(),
            key: vec![f32::NAN; query.rows() * refs.rows()],
            error: Vec::new(),
        };
        let mut candidates = CandidateLists::new(K::MR, K::NR).expect("memory");
        for group in 0..query.rows().div_ceil(K::MR) {
            let first = group * K::MR;
            let lanes = K::MR.min(query.rows() - first);
            let mut thresholds = Thresholds::closed();
            for m in 0..lanes {
                thresholds.open(m, f32::NEG_INFINITY, queries.terms[first + m]);
            }
            let panel = QueryPanel { codes: queries.panel(group), thresholds: &thresholds };
            for start in (0..packed.panels()).step_by(MAX_RUN) {
                let end = packed.panels().min(start + MAX_RUN);
                kernel.scan(&panel, &packed.run(start, end, Visit::All).expect("in memory"), &mut candidates);
                for m in 0..K::MR {
                    let (rows, found) = candidates.take(m);
                    if m >= lanes {
                        continue;
                    }
                    for (&row, &key) in rows.iter().zip(found).filter(|(row, _)| (**row as usize) < refs.rows()) {
                        keys.key[(first + m) * refs.rows() + row as usize] = key;
                    }
                }
            }
        }
        for terms in &queries.terms {
            keys.error.extend((0..refs.rows()).map(|j| packed.error(j as u32, *terms)));
        }
        keys
    }
}

/// Which pairs (query row `i`, row `j`) a kernel reports if only the floors of the reference rows are finite: `[i][j]`. The
/// query rows are the first rows of `refs`.
struct TransposedPairs<'a, E> {
    simd: Simd,
    frame: &'a Frame,
    queries: usize,
    refs: MatrixRef<'a, E>,
    /// The floor of every row as a query.
    floors: &'a [f32],
}

impl<E: Element> WithKernel for TransposedPairs<'_, E> {
    type Output = Option<Vec<bool>>;

    fn run<K: Microkernel>(self, kernel: K) -> Self::Output {
        let Self { simd, frame, queries, refs, floors } = self;
        let scan_symmetric = K::SCAN_SYMMETRIC?;
        let packed = PackedReference::<K>::pack(simd, frame, &refs, 1, &Monitor::new()).expect("finite");
        let rows: Vec<u32> = (0..queries as u32).collect();
        let query = PackedQuery::<K>::pack(simd, frame, &refs, &rows).expect("finite");
        let mut padded = floors.to_vec();
        padded.resize(packed.panels() * K::NR, f32::INFINITY);
        let mut reported = vec![false; queries * refs.rows()];
        let mut candidates = CandidateLists::new(K::MR, K::NR).expect("memory");
        for group in 0..queries.div_ceil(K::MR) {
            let first = group * K::MR;
            let lanes = K::MR.min(queries - first);
            let (mut thresholds, mut columns) = (Thresholds::closed(), Transposed::closed(&padded));
            for m in 0..lanes {
                thresholds.open(m, f32::INFINITY, query.terms[first + m]);
                let (offset, terms) = packed.row(first + m);
                columns.open(m, offset, terms);
            }
            let panel = QueryPanel { codes: query.panel(group), thresholds: &thresholds };
            let run = packed.run(0, packed.panels(), Visit::All).expect("in memory");
            scan_symmetric(kernel, &panel, &run, &columns, &mut candidates);
            for m in 0..K::MR {
                let (rows, _) = candidates.take(m);
                for &row in rows.iter().filter(|&&row| m < lanes && (row as usize) < refs.rows()) {
                    reported[(first + m) * refs.rows() + row as usize] = true;
                }
            }
        }
        Some(reported)
    }
}

/// A symmetric tile reports every pair that reaches the floor of its reference row as a query, and values have the same bits
/// with the sides exchanged.
fn check_transposed<E: Element>(metric: Metric, queries: usize, refs: MatrixRef<'_, E>) -> Result<(), TestCaseError> {
    if !metric.is_symmetric() {
        return Ok(());
    }
    let (dim, count) = (refs.dim(), refs.rows());
    let all: Vec<u32> = (0..count as u32).collect();
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, metric, &refs).expect("memory");
        let shifts = PackedQuery::<arch::scalar::ScalarF32>::pack(simd, &frame, &refs, &all).expect("finite").shifts;
        let roundoff = <E::Output as Output>::UNIT_ROUNDOFF;
        let values: Vec<Vec<f64>> = (0..count)
            .map(|j| {
                let mut values = Vec::new();
                score(simd, &Prepared::new(metric, refs.row(j)), refs, &all, &mut Widened::new(), &mut values);
                values
            })
            .collect();
        let rank = |j: usize, i: usize| Neighbour::new::<E::Output>(metric, values[j][i], i as u32);
        for i in 0..queries {
            for j in 0..count {
                prop_assert_eq!(values[i][j].to_bits(), values[j][i].to_bits(), "{:?}: rows {} and {}", metric, i, j);
            }
        }
        for pivot in 0..queries {
            let floors: Vec<f32> = (0..count)
                .map(|j| {
                    let (shift, size) = shifts[j];
                    Bound::new(metric, dim, shift, size, frame.scale2(), roundoff)
                        .reject_below(rank(j, pivot).ranked_value(metric))
                })
                .collect();
            let pairs = TransposedPairs { simd, frame: &frame, queries, refs, floors: &floors };
            let Some(reported) = arch::with_int8(simd, pairs) else { break };
            for i in 0..queries {
                for j in 0..count {
                    prop_assert!(
                        reported[i * count + j] || rank(j, i) > rank(j, pivot),
                        "{metric:?}: row {i} is rejected for query {j}, though it ranks before row {pivot}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Keys from every kernel of a level for a metric.
fn keys_at<E: Element>(
    simd: Simd,
    metric: Metric,
    frame: &Frame,
    query: MatrixRef<'_, E>,
    refs: MatrixRef<'_, E>,
) -> Vec<Keys> {
    let mut filters = vec![Filter::Float32];
    if arch::has_int8(simd.level()) && metric.geometry() != Geometry::Lp {
        filters.push(Filter::Int8);
    }
    let keys = |filter| with_filter(simd, metric, filter, AllKeys { simd, frame, query, refs });
    filters.into_iter().map(keys).collect()
}

/// Every metric with a filter; Minkowski with several exponents.
fn metrics() -> impl Strategy<Value = Metric> {
    let exponents = vec![1.000_001, 1.25, 1.5, 2.5, 3.0, 3.7, 4.0, 17.3, 100.0, 1e4, 1e6];
    prop_oneof![
        9 => prop::sample::select(Metric::ALL.to_vec()),
        4 => prop::sample::select(exponents).prop_map(|p| Metric::minkowski(p).expect("above 0")),
    ]
}

/// A lower bound of the exact key behind a computed one.
fn lower(key: f32, error: f32) -> f64 {
    (f64::from(key) - f64::from(error)).next_down()
}

/// Rows of a kind; each kind stresses one term of the bound.
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
            // Alternating signs of one magnitude: the sum cancels, the bound does not.
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

fn matrix<E>(data: &[E], dim: usize) -> MatrixRef<'_, E> {
    MatrixRef::new(data, data.len() / dim, dim, Argument::Reference).expect("good")
}

/// Every key is within its error, and no floor rejects a row that ranks at or before the row from which it was computed.
fn check_keys<E: Element>(
    metric: Metric,
    query: MatrixRef<'_, E>,
    refs: MatrixRef<'_, E>,
) -> Result<(), TestCaseError> {
    let (dim, count) = (refs.dim(), refs.rows());
    let all: Vec<u32> = (0..count as u32).collect();
    let rows: Vec<u32> = (0..query.rows() as u32).collect();
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, metric, &refs).expect("memory");
        // The queries' shifts do not depend on the kernel.
        let shifts = PackedQuery::<arch::scalar::ScalarF32>::pack(simd, &frame, &query, &rows).expect("finite").shifts;
        for Keys { kernel, key, error } in keys_at(simd, metric, &frame, query, refs) {
            for i in 0..query.rows() {
                let mut values = Vec::new();
                let prepared = Prepared::new(metric, query.row(i));
                score(simd, &prepared, refs, &all, &mut Widened::new(), &mut values);
                let (shift, size) = shifts[i];
                let roundoff = <E::Output as Output>::UNIT_ROUNDOFF;
                let bound = Bound::new(metric, dim, shift, size, frame.scale2(), roundoff);
                for (j, &value) in values.iter().enumerate() {
                    let (key_j, error_j) = (key[i * count + j], error[i * count + j]);
                    prop_assert!(!error_j.is_nan());
                    let exact = match metric.geometry() {
                        Geometry::Euclidean => {
                            let squared = if metric.has_root() { value * value } else { value };
                            (shift - squared * frame.scale2()) * 0.5
                        }
                        Geometry::Dot => {
                            let similarity = if metric == Metric::Cosine { 1.0 - value } else { value };
                            similarity * frame.scale2() - shift
                        }
                        Geometry::Lp => -value * frame.scale2().sqrt(),
                    };
                    // An Lp key also has a relative error.
                    let share = if metric.geometry() == Geometry::Lp { lp_relative_error(metric, dim) } else { 0.0 };
                    // The error of computing `exact`.
                    let noise = 1e-12 * (shift.abs() + size + exact.abs());
                    prop_assert!(
                        (f64::from(key_j) - exact).abs() <= f64::from(error_j) + share * exact.abs() + noise,
                        "{kernel}: key {key_j:e} of an exact {exact:e} has a larger error than {error_j:e}"
                    );
                    let rank = Neighbour::new::<E::Output>(metric, value, j as u32);
                    let made = f64::from(bound.reject_below(rank.ranked_value(metric)));
                    for (other, &other_value) in values.iter().enumerate() {
                        let at = i * count + other;
                        let upper = -lower(-key[at], error[at]);
                        if Neighbour::new::<E::Output>(metric, other_value, other as u32) <= rank {
                            prop_assert!(
                                upper >= made || upper.is_nan(),
                                "{kernel}: a floor rejects a row that ranks before it"
                            );
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_key_leaves_its_bound_and_no_floor_rejects_a_neighbour(
        dim in prop_oneof![1usize..=130, Just(513), Just(2048)],
        kinds in prop::collection::vec(any::<u8>(), 2..60),
        seeds in prop::collection::vec(-2.0f32..2.0, 5..90),
        metric in metrics(),
        same_kind: bool,
        double: bool,
    ) {
        let data: Vec<f32> = kinds
            .iter()
            .enumerate()
            .flat_map(|(i, &kind)| row(if same_kind { kinds[0] } else { kind }, dim, &seeds[i % (seeds.len() / 2)..]))
            .collect();
        let queries = kinds.len().min(7) * dim;
        if double {
            // Numbers that are not exact in float32.
            let data: Vec<f64> = data.iter().map(|&x| f64::from(x) * (1.0 + 1e-10)).collect();
            check_keys(metric, matrix(&data[..queries], dim), matrix(&data, dim))?;
            check_transposed(metric, queries / dim, matrix(&data, dim))?;
        } else {
            check_keys(metric, matrix(&data[..queries], dim), matrix(&data, dim))?;
            check_transposed(metric, queries / dim, matrix(&data, dim))?;
        }
    }
}

/// A float32 number of exponent `exponent`, from denormals to the largest numbers. Mantissas with all bits set or none, which
/// round the most, are frequent.
fn number(bits: u32, exponent: i32) -> f32 {
    let mantissa = match bits >> 29 {
        0 => 0,
        1 => 0x7f_ffff,
        2 => 1,
        _ => bits & 0x7f_ffff,
    };
    let biased = (exponent + 127).clamp(-22, 254);
    let size = match u32::try_from(biased) {
        Ok(biased @ 1..) => f32::from_bits(biased << 23 | mantissa),
        _ => f32::from_bits((1 << 23 | mantissa) >> (1 - biased)),
    };
    if bits >> 28 & 1 == 1 { -size } else { size }
}

/// Rows of such numbers: `base` and `spread` give the exponents, `by_row` whether they vary by row or by element.
fn rows_of_any_size(dim: usize, base: i32, spread: u32, by_row: bool, offset: bool, bits: &[u32]) -> Vec<f32> {
    let count = (bits.len() / dim).max(2);
    let at = |i: usize| bits[i % bits.len()];
    let mut data = Vec::new();
    for r in 0..count {
        for c in 0..dim {
            let place = at(if by_row { r } else { r * dim + c });
            let bits = at(r * dim + c).wrapping_mul(2_654_435_761);
            let x = number(bits, base - (place % (spread + 1)) as i32);
            let common = if offset { number(at(c).wrapping_mul(40503), base + 12) } else { 0.0 };
            data.push(if place % 11 == 0 { 0.0 } else { (common + x).clamp(f32::MIN, f32::MAX) });
        }
    }
    data
}

fn sizes() -> impl Strategy<Value = (i32, u32)> {
    (prop_oneof![-149i32..=127, -3i32..=3], prop_oneof![Just(0u32), 1u32..6, 20u32..60, Just(270u32)])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bit_pattern_leaves_its_bound(
        dim in prop_oneof![1usize..=40, Just(257)],
        (base, spread) in sizes(),
        by_row: bool,
        offset: bool,
        bits in prop::collection::vec(any::<u32>(), 40..1200),
        metric in 0..Metric::ALL.len(),
        double: bool,
    ) {
        let metric = Metric::ALL[metric];
        let mut data = rows_of_any_size(dim, base, spread, by_row, offset, &bits);
        data.truncate(40 * dim);
        let queries = (data.len() / dim).min(5) * dim;
        if double {
            let data: Vec<f64> = data.iter().map(|&x| f64::from(x) * (1.0 + 1e-10)).collect();
            check_keys(metric, matrix(&data[..queries], dim), matrix(&data, dim))?;
        } else {
            check_keys(metric, matrix(&data[..queries], dim), matrix(&data, dim))?;
            unpacked::check_thresholds(metric, matrix(&data[..queries], dim), matrix(&data, dim))?;
        }
    }
}

/// The bound is also tight: on ordinary data a few millionths of the keys, in 8 bits a few hundredths.
#[test]
fn the_bound_is_tight_on_ordinary_rows() {
    let data: Vec<f32> = (0..64 * 128).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let matrix = matrix(&data, 128);
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, Metric::SqEuclidean, &matrix).expect("memory");
        for (Keys { kernel, key, error }, limit) in
            keys_at(simd, Metric::SqEuclidean, &frame, matrix, matrix).iter().zip([2e-5, 2e-2])
        {
            let largest = key.iter().fold(0.0f32, |m, k| m.max(k.abs()));
            assert!(error.iter().all(|&error| error > 0.0 && error < limit * largest), "{kernel}: {error:?}");
        }
    }
}

/// A symmetric tile also rejects far rows: on ordinary data, nearly all that are below a floor.
#[test]
fn a_symmetric_tile_rejects_ordinary_rows() {
    let data: Vec<f32> = (0..64 * 128).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let (refs, metric) = (matrix(&data, 128), Metric::SqEuclidean);
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, metric, &refs).expect("memory");
        let all: Vec<u32> = (0..64).collect();
        let shifts = PackedQuery::<arch::scalar::ScalarF32>::pack(simd, &frame, &refs, &all).expect("finite").shifts;
        let floors: Vec<f32> = shifts
            .iter()
            .map(|&(shift, size)| Bound::new(metric, 128, shift, size, frame.scale2(), 0.0).reject_below(1.0))
            .collect();
        let Some(reported) =
            arch::with_int8(simd, TransposedPairs { simd, frame: &frame, queries: 64, refs, floors: &floors })
        else {
            continue;
        };
        // Squared distances of different rows are far above 1, so each row is near itself only.
        let pairs: Vec<usize> = (0..64 * 64).filter(|&pair| reported[pair]).collect();
        let near = |pair: &usize| {
            let (i, j) = (pair / 64, pair % 64);
            refs.row(i).iter().zip(refs.row(j)).map(|(x, y)| (x - y) * (x - y)).sum::<f32>() < 8.0
        };
        assert!(pairs.iter().all(near), "{pairs:?}");
        assert!((0..64).all(|i| reported[i * 65]));
    }
}

/// A row too large to filter disables the filter for its own panel only.
#[test]
fn a_huge_row_is_reported_and_affects_its_panel_only() {
    let mut data: Vec<f32> = (0..300 * 4).map(|i| ((i * 31) % 17) as f32).collect();
    data[299 * 4] = 1e38;
    let (query, refs) = (matrix(&data[..4 * 4], 4), matrix(&data, 4));
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let frame = Frame::choose(simd, Metric::SqEuclidean, &refs).expect("memory");
        for (Keys { kernel, error, .. }, limit) in
            keys_at(simd, Metric::SqEuclidean, &frame, query, refs).iter().zip([1e-3, 0.2])
        {
            for i in 0..4 {
                assert_eq!(error[i * 300 + 299], f32::INFINITY, "{kernel}");
                assert!(error[i * 300..][..256].iter().all(|error| *error < limit), "{kernel}");
            }
        }
    }
}

/// The error of a distance is small compared with the spread of ordinary distances.
#[test]
fn the_bound_of_distances_is_tight_on_ordinary_rows() {
    let data: Vec<f32> = (0..64 * 128).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let matrix = matrix(&data, 128);
    let minkowski = Metric::minkowski(3.0).expect("above 0");
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        for (metric, share) in [(Metric::Cityblock, 2e-5), (Metric::Chebyshev, 3e-6), (minkowski, 6e-5)] {
            let frame = Frame::choose(simd, metric, &matrix).expect("memory");
            for Keys { kernel, key, error } in keys_at(simd, metric, &frame, matrix, matrix) {
                let largest = key.iter().fold(0.0f32, |m, k| m.max(-k));
                let relative = lp_relative_error(metric, 128) as f32 * largest;
                assert!(error.iter().all(|&error| error > 0.0 && error + relative < share * largest), "{kernel}");
            }
        }
    }
}
