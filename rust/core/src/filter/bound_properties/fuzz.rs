//! The fuzz target of the bound: whole panels through every kernel, and every key compared with its float64 value.
//!
//! The properties are those of the tests beside this file. A case here has thousands of rows, so that a check of a pair
//! costs a few nanoseconds.

use super::{Keys, check_transposed, keys_at, lower, matrix, row, rows_of_any_size, unpacked};
use crate::arch;
use crate::arch::level::{Level, Simd};
use crate::exact::{Prepared, Widened, score};
use crate::filter::bound::{Bound, accept_threshold, lp_relative_error};
use crate::filter::frame::Frame;
use crate::filter::panels::PackedQuery;
use crate::fuzz::{Random, fuzz, replay};
use crate::matrix::{Element, Output};
use crate::metric::{Geometry, Metric};
use crate::order::Neighbour;
use half::{bf16, f16};

const TARGET: &str = "bound";
/// Seeds that failed once.
const FAILED_ONCE: [u64; 0] = [];

const QUERIES: usize = 16;

/// What keys are compared with, for one query: values of all rows, and the relation between them and keys.
struct Truth {
    values: Vec<f64>,
    ranks: Vec<Neighbour>,
    shift: f64,
    size: f64,
}

impl Truth {
    fn exact(&self, metric: Metric, scale2: f64, value: f64) -> f64 {
        match metric.geometry() {
            Geometry::Euclidean => {
                let squared = if metric.has_root() { value * value } else { value };
                (self.shift - squared * scale2) * 0.5
            }
            Geometry::Dot => {
                let similarity = if metric == Metric::Cosine { 1.0 - value } else { value };
                similarity * scale2 - self.shift
            }
            Geometry::Lp => -value * scale2.sqrt(),
        }
    }
}

/// All pairs at every level and kernel; returns their number.
fn check<E: Element>(metric: Metric, data: &[E], dim: usize, random: &mut Random) -> u64 {
    let refs = matrix(data, dim);
    let count = refs.rows();
    let queries = count.min(QUERIES);
    let query = matrix(&data[..queries * dim], dim);
    let all: Vec<u32> = (0..count as u32).collect();
    let roundoff = <E::Output as Output>::UNIT_ROUNDOFF;
    let simds: Vec<Simd> = Level::available().into_iter().filter_map(Simd::new).collect();
    let best = *simds.last().expect("a level");
    let frame = Frame::choose(best, metric, &refs).expect("memory");
    let scale2 = frame.scale2();
    // The shifts do not depend on the kernel, and values do not depend on the level.
    let shifts =
        PackedQuery::<arch::scalar::ScalarF32>::pack(best, &frame, &query, &all[..queries]).expect("finite").shifts;
    let truths: Vec<Truth> = (0..queries)
        .map(|i| {
            let mut values = Vec::new();
            score(best, &Prepared::new(metric, query.row(i)), refs, &all, &mut Widened::new(), &mut values);
            let rank = |(j, value): (usize, &f64)| Neighbour::new::<E::Output>(metric, *value, j as u32);
            let ranks = values.iter().enumerate().map(rank).collect();
            Truth { values, ranks, shift: shifts[i].0, size: shifts[i].1 }
        })
        .collect();
    let share = if metric.geometry() == Geometry::Lp { lp_relative_error(metric, dim) } else { 0.0 };
    let pivots: Vec<usize> = (0..3).map(|_| random.below(count)).collect();
    let mut pairs = 0;
    for &simd in &simds {
        // The scalar kernel takes most of the time and has the simplest code.
        if simd.level() == Level::Scalar && simds.len() > 1 && random.below(8) > 0 {
            continue;
        }
        for Keys { kernel, key, error } in keys_at(simd, metric, &frame, query, refs) {
            for (i, truth) in truths.iter().enumerate() {
                let (key, error) = (&key[i * count..][..count], &error[i * count..][..count]);
                check_keys(metric, kernel, truth, (key, error), share, scale2);
                let bounds = |roundoff| Bound::new(metric, dim, truth.shift, truth.size, scale2, roundoff);
                for &pivot in &pivots {
                    check_pivot(metric, kernel, truth, (key, error), pivot, (bounds(roundoff), bounds(0.0)));
                }
                pairs += count as u64;
            }
        }
    }
    pairs
}

/// Every key is within its error.
fn check_keys(metric: Metric, kernel: &str, truth: &Truth, (key, error): (&[f32], &[f32]), share: f64, scale2: f64) {
    for ((&value, &key), &error) in truth.values.iter().zip(key).zip(error) {
        let exact = truth.exact(metric, scale2, value);
        // The error of computing `exact`.
        let noise = 1e-12 * (truth.shift.abs() + truth.size + exact.abs());
        let within = (f64::from(key) - exact).abs() <= f64::from(error) + share * exact.abs() + noise;
        assert!(within, "{metric:?} {kernel}: key {key:e} of an exact {exact:e} has a larger error than {error:e}");
    }
}

/// The floor of row `pivot` rejects no row that ranks before it, and its ceiling accepts no row behind it.
fn check_pivot(
    metric: Metric,
    kernel: &str,
    truth: &Truth,
    (key, error): (&[f32], &[f32]),
    pivot: usize,
    (bound, edge_bound): (Bound, Bound),
) {
    let (rank, edge) = (truth.ranks[pivot], truth.values[pivot]);
    let floor = f64::from(bound.reject_below(rank.ranked_value(metric)));
    let ceiling = edge_bound.accept_above(edge);
    let outside = |value: f64| if metric.largest_first() { value < edge } else { value > edge };
    for (j, &value) in truth.values.iter().enumerate() {
        if truth.ranks[j] <= rank {
            let upper = -lower(-key[j], error[j]);
            assert!(
                upper >= floor || upper.is_nan(),
                "{metric:?} {kernel}: a floor rejects a row that ranks before it"
            );
        }
        if outside(value) {
            let accepted = key[j] > accept_threshold(ceiling, error[j]);
            assert!(!accepted, "{metric:?} {kernel}: a ceiling accepts {value:e}, which is not within {edge:e}");
        }
    }
}

fn any_dim(random: &mut Random) -> usize {
    match random.below(16) {
        0 => random.pick(&[257, 513, 2048]),
        1..4 => 1 + random.below(130),
        _ => 1 + random.below(24),
    }
}

fn any_metric(random: &mut Random) -> Metric {
    if random.below(12) > 0 {
        return random.pick(&Metric::ALL);
    }
    let exponents = [1.000_001, 1.25, 1.5, 2.5, 3.0, 3.7, 4.0, 17.3, 100.0, 1e4, 1e6];
    Metric::minkowski(random.pick(&exponents)).expect("above 0")
}

fn any_rows(count: usize, dim: usize, random: &mut Random) -> Vec<f32> {
    if random.below(2) == 0 {
        let bits: Vec<u32> = (0..count * dim).map(|_| random.bits() as u32).collect();
        let base = if random.below(2) == 0 { random.below(277) as i32 - 149 } else { random.below(7) as i32 - 3 };
        let spread = random.pick(&[0, 1, 4, 40, 270]);
        return rows_of_any_size(dim, base, spread, random.below(2) == 0, random.below(2) == 0, &bits);
    }
    let seeds: Vec<f32> = (0..97 + random.below(900)).map(|_| (random.unit() * 4.0 - 2.0) as f32).collect();
    let (same_kind, kind) = (random.below(2) == 0, random.bits() as u8);
    (0..count)
        .flat_map(|_| {
            let kind = if same_kind { kind } else { random.bits() as u8 };
            row(kind, dim, &seeds[random.below(seeds.len() - 5)..])
        })
        .collect()
}

fn case(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let (dim, metric) = (any_dim(random), any_metric(random));
    let most = (100_000 / dim).clamp(40, 4000) / if matches!(metric, Metric::Minkowski(_)) { 20 } else { 1 };
    let data = any_rows(2 + random.below(most.max(40)), dim, random);
    let small = &data[..data.len().min(24 * dim)];
    let few = &small[..small.len().min(5 * dim)];
    if random.below(16) == 0 {
        check_transposed(metric, few.len() / dim, matrix(small, dim)).expect("the property of symmetric tiles");
        unpacked::check_thresholds(metric, matrix(few, dim), matrix(small, dim)).expect("the property of thresholds");
    }
    match random.below(8) {
        0 => {
            // Numbers that are not exact in float32, also beyond its range.
            let exponent = if random.below(2) == 0 { 0 } else { random.below(361) as i32 - 180 };
            let factor = (1.0 + 1e-10) * 2f64.powi(exponent);
            let data: Vec<f64> = data.iter().map(|&x| f64::from(x) * factor).collect();
            check(metric, &data, dim, random)
        }
        1 => {
            let data: Vec<f16> = data.iter().map(|&x| f16::from_f32(x.clamp(-65504.0, 65504.0))).collect();
            check(metric, &data, dim, random)
        }
        2 => {
            let to = |x: &f32| Some(bf16::from_f32(*x)).filter(|x| x.is_finite()).unwrap_or(bf16::MAX);
            let data: Vec<bf16> = data.iter().map(to).collect();
            check(metric, &data, dim, random)
        }
        _ => check(metric, &data, dim, random),
    }
}

#[test]
fn seeds_keep_the_bound() {
    replay(TARGET, &FAILED_ONCE, 16, case);
}

#[test]
#[ignore = "runs for as long as it is told to: make fuzz"]
fn fuzz_bound() {
    fuzz(TARGET, case);
}
