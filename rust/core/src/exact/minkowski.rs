//! Values of the Lp metrics other than the Euclidean one: cityblock, Chebyshev, Minkowski.
//!
//! ```text
//! t_i = |q_i - r_i|
//! cityblock   sum t_i                      ┐ eight lanes in the order of `lanes.rs`
//! Minkowski   (sum t_i^p)^(1/p)            ┘ out of range? ──> M (sum (t_i / M)^p)^(1/p) with M = max t_i
//! Chebyshev   max t_i                        `max` is exact, so the order does not matter
//! ```
//!
//! If `2p` is an integer of at most 128, a power is a product of squares and at most one square root, else `pow` of the crate
//! `libm`. Both are IEEE arithmetic in a fixed order; the platform's `pow` is not used, since its last bit differs between
//! machines. `p` = 1, 2 and infinity are other metrics ([`crate::Metric::minkowski`]).
//!
//! Range: differences and their sums are in range if the distance is. Sums of powers may not be, for rows of any type:
//! `2000^100` overflows float64. If digits may have been lost, the sum is computed again from `t_i / M`: it is then between 1
//! and the number of columns.

use crate::exact::lanes::{LANES, power_of_two, reduce, sum_rows};
use crate::matrix::Wide;
use crate::metric::Power;

/// `sum^(1/p)`.
#[inline(always)]
fn root(power: Power, sum: f64) -> f64 {
    match power.halves() {
        Some(1) => sum * sum,
        Some(6) => libm::cbrt(sum),
        Some(8) => sum.sqrt().sqrt(),
        _ => libm::pow(sum, 1.0 / power.get()),
    }
}

/// `t^(halves / 2)` of each lane: repeated squares multiplied from the lowest bit of the exponent, then the square root.
#[inline(always)]
fn product(t: [f64; LANES], halves: u32) -> [f64; LANES] {
    let mut power = [1.0f64; LANES];
    let (mut square, mut left) = (t, halves / 2);
    while left > 0 {
        if left & 1 == 1 {
            for l in 0..LANES {
                power[l] *= square[l];
            }
        }
        left >>= 1;
        if left > 0 {
            for l in 0..LANES {
                square[l] *= square[l];
            }
        }
    }
    if halves & 1 == 1 {
        for l in 0..LANES {
            power[l] *= t[l].sqrt();
        }
    }
    power
}

/// Fold `step(lanes, |q - r|)` over the columns, eight at a time; missing columns have a difference of 0.
#[inline(always)]
fn fold<W: Wide>(q: &[f64], r: &[W], half: f64, step: impl Fn(&mut [f64; LANES], [f64; LANES])) -> [f64; LANES] {
    let mut lanes = [0.0f64; LANES];
    let (q_chunks, q_rest) = q.as_chunks::<LANES>();
    let (r_chunks, r_rest) = r.as_chunks::<LANES>();
    for (x, y) in q_chunks.iter().zip(r_chunks) {
        let mut t = [0.0f64; LANES];
        for l in 0..LANES {
            t[l] = (x[l] * half - y[l].to_f64() * half).abs();
        }
        step(&mut lanes, t);
    }
    if !q_rest.is_empty() {
        let mut t = [0.0f64; LANES];
        for (t, (x, y)) in t.iter_mut().zip(q_rest.iter().zip(r_rest)) {
            *t = (x * half - y.to_f64() * half).abs();
        }
        step(&mut lanes, t);
    }
    lanes
}

#[inline(always)]
fn add(lanes: &mut [f64; LANES], terms: [f64; LANES]) {
    for l in 0..LANES {
        lanes[l] += terms[l];
    }
}

/// The larger of two non-negative numbers; NaN if one of them is. Their bits have the same order as integers.
#[inline(always)]
fn larger(x: f64, y: f64) -> f64 {
    f64::from_bits((x.to_bits() as i64).max(y.to_bits() as i64) as u64)
}

/// The largest difference, both rows times `half`.
#[inline(always)]
fn largest<W: Wide>(q: &[f64], r: &[W], half: f64) -> f64 {
    let lanes = fold(q, r, half, |lanes, t| {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], t[l]);
        }
    });
    lanes.into_iter().fold(0.0, larger)
}

#[inline(always)]
fn sum_of_powers<W: Wide>(q: &[f64], r: &[W], half: f64, divisor: f64, power: Power) -> f64 {
    let divided = |mut t: [f64; LANES]| {
        if divisor != 1.0 {
            for l in 0..LANES {
                t[l] /= divisor;
            }
        }
        t
    };
    let lanes = match power.halves() {
        Some(halves) => fold(q, r, half, |lanes, t| add(lanes, product(divided(t), halves))),
        None => {
            let p = power.get();
            fold(q, r, half, |lanes, t| add(lanes, divided(t).map(|t| if t == 0.0 { 0.0 } else { libm::pow(t, p) })))
        }
    };
    reduce(lanes)
}

/// `sum |q_i - r_i|` of `R` pairs. It overflows only where the distance does, and nothing in it underflows.
#[inline(always)]
pub(crate) fn cityblock<W: Wide, const R: usize>(q: &[f64], rows: [&[W]; R]) -> [f64; R] {
    sum_rows(q, rows, |_, x, y| [(x - y).abs()]).map(|[sum]| sum)
}

/// `max |q_i - r_i|` of `R` pairs.
#[inline(always)]
pub(crate) fn chebyshev<W: Wide, const R: usize>(q: &[f64], rows: [&[W]; R]) -> [f64; R] {
    let mut most = [0.0; R];
    for r in 0..R {
        most[r] = largest(q, rows[r], 1.0);
    }
    most
}

/// `(sum |q_i - r_i|^p)^(1/p)`.
#[inline(always)]
pub(crate) fn minkowski<W: Wide>(q: &[f64], r: &[W], power: Power) -> f64 {
    let sum = sum_of_powers(q, r, 1.0, 1.0, power);
    // In this range, terms that underflowed are far below the last digit of the sum.
    if (power_of_two(-900)..=power_of_two(1000)).contains(&sum) { root(power, sum) } else { scaled(q, r, power) }
}

/// The Minkowski distance if its sum leaves the range of `f64`.
#[cold]
#[inline(never)]
fn scaled<W: Wide>(q: &[f64], r: &[W], power: Power) -> f64 {
    let mut half = 1.0;
    let mut most = largest(q, r, half);
    if most == 0.0 {
        return 0.0;
    }
    if most.is_infinite() {
        // The difference of two finite numbers overflowed; that of their halves does not.
        half = 0.5;
        most = largest(q, r, half);
    }
    let sum = sum_of_powers(q, r, half, most, power);
    let root = root(power, sum);
    if root.is_finite() {
        return (most * root) / half;
    }
    // For p far below 1 the root may overflow although its product with a small `most` does not: multiply by its fourth root
    // four times.
    let part = libm::pow(sum, 0.25 / power.get());
    ((((most * part) * part) * part) * part) / half
}

#[cfg(test)]
mod tests {
    use crate::Argument;
    use crate::arch::level::{Level, Simd};
    use crate::exact::lanes::ROWS;
    use crate::exact::{Prepared, Widened, score};
    use crate::matrix::{Element, MatrixRef};
    use crate::metric::Metric;

    /// The distance at every level, of rows scored at once and of a padded group.
    fn values<E: Element>(metric: Metric, q: &[E], r: &[E]) -> Vec<f64> {
        let prepared = Prepared::new(metric, q);
        let reference = MatrixRef::new(r, 1, r.len(), Argument::Reference).expect("a row");
        let mut all = Vec::new();
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            let mut values = Vec::new();
            score(simd, &prepared, reference, &[0; ROWS + 1], &mut Widened::new(), &mut values);
            all.extend(values);
        }
        all
    }

    fn distance<E: Element>(metric: Metric, q: &[E], r: &[E]) -> f64 {
        let values = values(metric, q, r);
        assert!(values.iter().all(|x| x.to_bits() == values[0].to_bits()), "levels differ: {values:?}");
        values[0]
    }

    fn minkowski(p: f64) -> Metric {
        Metric::minkowski(p).expect("above 0")
    }

    #[track_caller]
    fn assert_close(given: f64, wanted: f64) {
        assert!((given - wanted).abs() <= 1e-13 * wanted, "{given:e} is not {wanted:e}");
    }

    const EXPONENTS: [f64; 12] = [0.3, 0.5, 0.75, 1.25, 1.5, 2.5, 3.0, 3.3, 4.0, 7.5, 64.0, 300.0];

    #[test]
    fn known_values() {
        let (q, r) = ([0f32, 3.0, -4.0, 5.0], [3f32, -1.0, 1.0, 5.0]);
        assert_eq!(distance(Metric::Cityblock, &q, &r), 12.0);
        assert_eq!(distance(Metric::Chebyshev, &q, &r), 5.0);
        // 27 + 64 + 125 = 216
        assert_eq!(distance(minkowski(3.0), &q, &r), 6.0);
        assert_eq!(distance(minkowski(4.0), &[0f32, 2.0], &[4f32, 2.0]), 4.0);
        assert_eq!(distance(minkowski(0.5), &[0f32, 4.0], &[1f32, 0.0]), 9.0);
        assert_close(distance(minkowski(1.5), &[0f64], &[-4.0]), 4.0);
        assert_close(
            distance(minkowski(3.7), &q, &r),
            (3f64.powf(3.7) + 4f64.powf(3.7) + 5f64.powf(3.7)).powf(1.0 / 3.7),
        );
    }

    #[test]
    fn sums_that_leave_the_range_of_float64_do_not_cost_the_distance() {
        let (q, r) = ([1.0, -2.0, 0.25, 3.0], [0.5, 1.0, 0.125, -4.0]);
        for p in EXPONENTS {
            let unscaled = distance::<f64>(minkowski(p), &q, &r);
            for exponent in [-1000, -700, -330, 100, 330, 700, 1000] {
                let scale = 2f64.powi(exponent);
                let scaled = distance(minkowski(p), &q.map(|x| x * scale), &r.map(|x| x * scale));
                assert_close(scaled / scale, unscaled);
            }
        }
        assert_close(distance(minkowski(100.0), &[2000f32, 0.0], &[0f32, 2000.0]), 2000.0 * 2f64.powf(0.01));
        for metric in [Metric::Cityblock, Metric::Chebyshev, minkowski(3.0), minkowski(0.7)] {
            assert_eq!(distance(metric, &[5e-324f64], &[0.0]), 5e-324);
            assert_eq!(distance(metric, &[15e-324f64], &[0.0]), 15e-324);
            assert_eq!(distance(metric, &[1.5e308f64], &[-1.5e308]), f64::INFINITY);
        }
        // The sum of 16 roots of 1e-300, to the power 200: 1e-300 * 16^200 is in range, 16^200 alone is too, 16^400 is not.
        assert_close(distance(minkowski(0.005), &[1e-300; 16], &[0f64; 16]), 1e-300 * 16f64.powi(200));
        let wanted = 1e-200 * 16f64.powi(200) * 1e-100 * 16f64.powi(200);
        assert!((distance(minkowski(0.0025), &[1e-300; 16], &[0f64; 16]) - wanted).abs() < 1e-11 * wanted);
    }

    #[test]
    fn a_large_exponent_is_nearly_the_largest_difference() {
        let (q, r) = ([1f32, 2.0, 9.0], [1.5f32, 7.0, 1.0]);
        for p in [1e3, 1e6, 1e15, 1e300] {
            assert_close(distance(minkowski(p), &q, &r), 8.0);
        }
    }

    #[test]
    fn equal_rows_have_distance_0_and_distances_are_symmetric() {
        for scale in [1.0, 1e-300, 1e300, 5e-324] {
            let row: Vec<f64> = (1..=13).map(|i| f64::from(i) * scale).collect();
            let other: Vec<f64> = (1..=13).map(|i| f64::from(i % 5) * scale).collect();
            let metrics = EXPONENTS.map(minkowski).into_iter().chain([Metric::Cityblock, Metric::Chebyshev]);
            for metric in metrics {
                assert_eq!(distance(metric, &row, &row).to_bits(), 0);
                assert_eq!(distance(metric, &row, &other), distance(metric, &other, &row));
            }
        }
    }

    /// Unpacked searches find a row that is not finite by its value.
    #[test]
    fn a_row_that_is_not_finite_gives_a_value_that_is_not() {
        for bad in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for dim in [1, 7, 8, 9, 30] {
                for at in [0, dim / 2, dim - 1] {
                    let query: Vec<f64> = (0..dim).map(|i| i as f64).collect();
                    let mut row: Vec<f64> = (0..dim).map(|i| (i % 4) as f64).collect();
                    row[at] = bad;
                    let metrics = EXPONENTS.map(minkowski).into_iter().chain([Metric::Cityblock, Metric::Chebyshev]);
                    for metric in metrics {
                        let value = values(metric, &query, &row)[0];
                        assert!(!value.is_finite(), "{metric:?}: {value:e} with {bad} in column {at} of {dim}");
                    }
                }
            }
        }
    }

    #[test]
    fn zero_columns_change_nothing() {
        let (q, r) = ([0.3f32, -1.7, 2.9], [1.1f32, 0.2, -0.4]);
        for metric in EXPONENTS.map(minkowski) {
            for zeros in 1..20 {
                let pad = |x: &[f32]| [x, &vec![0.0; zeros]].concat();
                assert_eq!(distance(metric, &q, &r).to_bits(), distance(metric, &pad(&q), &pad(&r)).to_bits());
            }
        }
    }
}
