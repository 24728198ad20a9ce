//! Shared by all tests of the core: rows that are hard for a search, and the levels to test.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "no test uses everything")]

use exactknn_core::{Level, Metric, Simd};
use proptest::prelude::*;

pub use crate::fuzz::Random;

/// A kind of rows. Each kind has broken some library or some bound.
#[derive(Debug, Clone, Copy)]
pub enum Rows {
    Normal,
    Unit,
    /// Small integers: most distances are tied.
    Grid,
    /// A few distinct rows, repeated many times.
    Duplicates,
    /// All coordinates of a row equal.
    Constant,
    AllEqual,
    /// Offset 100, spread 0.01.
    FarFromOrigin,
    Large,
    Small,
    /// Squares overflow float32.
    Huge,
    Sparse,
    /// One row a billion times larger than the others.
    OneGiant,
    /// One coordinate a million times larger than the others.
    OneCoordinate,
    /// Rows that differ in their last bits only.
    LastBits,
    /// Powers of two across the range of float32.
    ManyScales,
    /// Denormal float32 numbers.
    Subnormal,
}

pub const KINDS: [Rows; 16] = [
    Rows::Normal,
    Rows::Unit,
    Rows::Grid,
    Rows::Duplicates,
    Rows::Constant,
    Rows::AllEqual,
    Rows::FarFromOrigin,
    Rows::Large,
    Rows::Small,
    Rows::Huge,
    Rows::Sparse,
    Rows::OneGiant,
    Rows::OneCoordinate,
    Rows::LastBits,
    Rows::ManyScales,
    Rows::Subnormal,
];

/// Every metric; Minkowski with exponents that need products, a root, powers, and with one far from 1.
pub fn metrics() -> Vec<Metric> {
    Metric::ALL.into_iter().chain(minkowski(&PRODUCTS)).chain(minkowski(&POWERS)).collect()
}

const PRODUCTS: [f64; 4] = [0.5, 1.5, 3.0, 4.0];
const POWERS: [f64; 4] = [0.7, 1.25, 3.7, 100.0];

fn minkowski(exponents: &[f64]) -> Vec<Metric> {
    exponents.iter().map(|&p| Metric::minkowski(p).expect("above 0")).collect()
}

/// One of [`metrics`]; those with powers are slow, so they are less frequent.
pub fn any_metric() -> impl Strategy<Value = Metric> {
    let of = |metrics: Vec<Metric>| prop::sample::select(metrics);
    prop_oneof![18 => of(Metric::ALL.to_vec()), 4 => of(minkowski(&PRODUCTS)), 2 => of(minkowski(&POWERS))]
}

/// The number of rows for a case of about `rows`: fewer if each value takes powers, which are a hundred times slower.
pub fn affordable(rows: usize, metric: Metric) -> usize {
    if minkowski(&POWERS).contains(&metric) { rows.div_ceil(4).max(rows.min(2)) } else { rows }
}

pub fn rows(kind: Rows, count: usize, dim: usize, random: &mut Random) -> Vec<Vec<f64>> {
    let mut data: Vec<Vec<f64>> = (0..count)
        .map(|_| {
            (0..dim)
                .map(|_| match kind {
                    Rows::Grid => random.below(3) as f64,
                    Rows::FarFromOrigin => 100.0 + 0.01 * random.normal(),
                    Rows::Large => 1e6 * random.normal(),
                    Rows::Small => 1e-6 * random.normal(),
                    Rows::Huge => 1e20 * random.normal(),
                    Rows::Sparse => {
                        if random.below(10) == 0 {
                            random.normal()
                        } else {
                            0.0
                        }
                    }
                    Rows::LastBits => 1.0 + random.below(4) as f64 * f64::from(f32::EPSILON),
                    Rows::Subnormal => 1e-40 * random.normal(),
                    _ => random.normal(),
                })
                .collect()
        })
        .collect();
    match kind {
        Rows::Unit => {
            for row in &mut data {
                let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-9);
                row.iter_mut().for_each(|x| *x /= norm);
            }
        }
        Rows::Duplicates => {
            for i in 7..count {
                data[i] = data[random.below(7)].clone();
            }
        }
        Rows::Constant => {
            for row in &mut data {
                let first = row[0];
                row.fill(first);
            }
        }
        Rows::AllEqual => {
            for i in 1..count {
                data[i] = data[0].clone();
            }
        }
        Rows::OneGiant => data[random.below(count)].iter_mut().for_each(|x| *x *= 1e9),
        Rows::OneCoordinate => data.iter_mut().for_each(|row| row[0] *= 1e6),
        Rows::ManyScales => {
            for (i, row) in data.iter_mut().enumerate() {
                row.iter_mut().for_each(|x| *x *= 2f64.powi((i as i32 * 7) % 240 - 120));
            }
        }
        _ => {}
    }
    data
}

pub fn levels() -> Vec<Simd> {
    let wanted = std::env::var("EXACTKNN_TEST_LEVELS").unwrap_or_default();
    for name in wanted.split(',').filter(|name| !name.is_empty()) {
        let level = Level::ALL.into_iter().find(|level| level.name() == name).expect("a level's name");
        assert!(level.is_available(), "this CPU lacks {name}, which EXACTKNN_TEST_LEVELS requires");
    }
    Level::ALL
        .into_iter()
        .filter_map(|level| {
            let simd = Simd::new(level);
            if simd.is_none() {
                eprintln!("NOT TESTED: this CPU lacks {}", level.name());
            }
            simd
        })
        .collect()
}

pub fn convert<E: Copy>(rows: &[Vec<f64>], to: impl Fn(f64) -> E) -> Vec<Vec<E>> {
    rows.iter().map(|row| row.iter().map(|&x| to(x)).collect()).collect()
}

#[derive(Debug, Clone, Copy)]
pub enum Type {
    F32,
    F64,
    F16,
    Bf16,
}

pub fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..=130, Just(513)]
}

pub fn types() -> impl Strategy<Value = Type> {
    prop_oneof![4 => Just(Type::F32), 1 => Just(Type::F64), 1 => Just(Type::F16), 1 => Just(Type::Bf16)]
}
