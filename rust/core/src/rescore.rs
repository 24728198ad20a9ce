//! The value of a pair in float64, in one fixed order: the same bits at every level and on every machine.
//!
//! ```text
//! query row ──widen, normalise──> Prepared (float64) ──┐
//! reference row ──widen (exact)────────────────────────┴──> 8 lanes, multiply then add ──tree──> value
//! ```
//!
//! Lane `l` sums the terms of columns `l, l + 8, l + 16, ...` in that order; the lanes are added as a tree
//! `((0+4)+(2+6)) + ((1+5)+(3+7))`. Trailing zero columns add `+0`, so they change nothing. No multiply is fused with an
//! add: a fused one would round differently where the CPU lacks it. The bodies are plain Rust, compiled once for each
//! level; vectorising eight independent lanes does not reorder anything.
//!
//! Range: squares of `f32` cannot leave the range of `f64`, so those inputs need no care. For `f64` rows, a row whose
//! largest magnitude is extreme is first scaled by a power of two (exact) where the metric normalises, and sums that
//! overflowed or underflowed are formed again from scaled rows where the result itself is in range.

use crate::level::multiversion;
use crate::lp;
use crate::matrix::{Element, MatrixRef, Wide};
use crate::metric::Metric;

pub(crate) const LANES: usize = 8;

#[inline(always)]
pub(crate) fn reduce(lane: [f64; LANES]) -> f64 {
    ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))
}

/// Sum `term(a[i], b[i])` over the columns in the fixed order; `N` sums at once.
#[inline(always)]
fn sum<const N: usize, A: Wide, B: Wide>(a: &[A], b: &[B], term: impl Fn(f64, f64) -> [f64; N]) -> [f64; N] {
    let mut lanes = [[0.0f64; LANES]; N];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (x, y) in a_chunks.zip(b_chunks) {
        for l in 0..LANES {
            let terms = term(x[l].to_f64(), y[l].to_f64());
            for n in 0..N {
                lanes[n][l] += terms[n];
            }
        }
    }
    for (l, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
        let terms = term(x.to_f64(), y.to_f64());
        for n in 0..N {
            lanes[n][l] += terms[n];
        }
    }
    lanes.map(reduce)
}

/// How a row is brought to norm 1: `x -> (x * pre) * inverse`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UnitScale {
    /// A power of two, 1 unless the row's magnitudes are extreme.
    pub(crate) pre: f64,
    /// One over the norm of the row times `pre`; 0 for a zero row.
    pub(crate) inverse: f64,
    /// Squared norm of the row times `pre`.
    pub(crate) norm2: f64,
}

/// Magnitudes up to this power of two (and down to its inverse) can be squared and multiplied without care.
const SAFE_EXPONENT: i32 = 200;

/// A power of two that brings the largest magnitude of the row near 1.
#[inline(always)]
fn power_for<W: Wide>(row: &[W]) -> f64 {
    let largest = row.iter().fold(0.0f64, |m, x| m.max(x.to_f64().abs()));
    if largest == 0.0 || !largest.is_finite() {
        return 1.0;
    }
    power_of_two(-exponent(largest))
}

/// `floor(log2(x))` of a positive finite number.
pub(crate) fn exponent(x: f64) -> i32 {
    let biased = ((x.to_bits() >> 52) & 0x7ff) as i32;
    if biased > 0 { biased - 1023 } else { exponent(x * power_of_two(64)) - 64 }
}

/// `2^e`, for `e` in -1022 ..= 1023; exponents outside are brought to the ends.
pub(crate) fn power_of_two(e: i32) -> f64 {
    f64::from_bits(((e.clamp(-1022, 1023) + 1023) as u64) << 52)
}

#[inline(always)]
fn unit_scale<E: Element>(row: &[E::Wide]) -> UnitScale {
    let mut pre = 1.0;
    let mut norm2 = sum(row, row, |x, _| [x * x])[0];
    let safe = power_of_two(-2 * SAFE_EXPONENT)..=power_of_two(2 * SAFE_EXPONENT);
    if E::DOUBLE && !safe.contains(&norm2) {
        pre = power_for(row);
        norm2 = sum(row, row, |x, _| [(x * pre) * (x * pre)])[0];
    }
    let inverse = if norm2 > 0.0 { 1.0 / norm2.sqrt() } else { 0.0 };
    UnitScale { pre, inverse, norm2 }
}

/// A query row, widened and normalised as the metric asks.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    metric: Metric,
    /// For the Euclidean metrics of normalised rows: the unit row. For cosines: the row times `unit.pre`. Else the row.
    row: Vec<f64>,
    unit: UnitScale,
}

impl Prepared {
    pub(crate) fn new<E: Element>(metric: Metric, row: &[E]) -> Self {
        let mut scratch = Vec::new();
        let wide = E::widen(row, &mut scratch);
        let unit =
            if metric.normalizes() { unit_scale::<E>(wide) } else { UnitScale { pre: 1.0, inverse: 1.0, norm2: 1.0 } };
        let row = match metric {
            Metric::SqEuclidean | Metric::Euclidean | Metric::InnerProduct => wide.iter().map(|x| x.to_f64()).collect(),
            Metric::Cityblock | Metric::Chebyshev | Metric::Minkowski(_) => wide.iter().map(|x| x.to_f64()).collect(),
            Metric::Cosine | Metric::CosineSimilarity => wide.iter().map(|x| x.to_f64() * unit.pre).collect(),
            Metric::NormalizedSqEuclidean | Metric::NormalizedEuclidean => {
                wide.iter().map(|x| (x.to_f64() * unit.pre) * unit.inverse).collect()
            }
        };
        Self { metric, row, unit }
    }
}

/// The value of one pair; see the module header for the order.
#[inline(always)]
fn value<E: Element>(query: &Prepared, reference: &[E::Wide]) -> f64 {
    let q = query.row.as_slice();
    match query.metric {
        Metric::SqEuclidean => sq_euclidean(q, reference),
        Metric::Euclidean => root::<E>(q, reference, sq_euclidean(q, reference)),
        Metric::NormalizedSqEuclidean => sq_euclidean_of_unit::<E>(q, reference),
        Metric::NormalizedEuclidean => sq_euclidean_of_unit::<E>(q, reference).sqrt(),
        Metric::Cosine => 1.0 - cosine::<E>(query, reference),
        Metric::CosineSimilarity => cosine::<E>(query, reference),
        Metric::InnerProduct => inner_product::<E>(q, reference),
        Metric::Cityblock => lp::cityblock(q, reference),
        Metric::Chebyshev => lp::chebyshev(q, reference),
        Metric::Minkowski(power) => lp::minkowski(q, reference, power),
    }
}

#[inline(always)]
fn sq_euclidean<W: Wide>(q: &[f64], r: &[W]) -> f64 {
    sum(q, r, |x, y| {
        let t = x - y;
        [t * t]
    })[0]
}

#[inline(always)]
fn root<E: Element>(q: &[f64], r: &[E::Wide], squared: f64) -> f64 {
    if E::DOUBLE && !(power_of_two(-900)..=power_of_two(1000)).contains(&squared) {
        return scaled_root(q, r);
    }
    squared.sqrt()
}

/// The Euclidean distance where its square leaves the range of `f64`.
#[cold]
#[inline(never)]
fn scaled_root<W: Wide>(q: &[f64], r: &[W]) -> f64 {
    let largest_of = |half: f64| q.iter().zip(r).fold(0.0f64, |m, (x, y)| m.max((x * half - y.to_f64() * half).abs()));
    // Halved only where the difference of two finite numbers overflows: subnormal numbers would lose their last bit.
    let half = if largest_of(1.0).is_finite() { 1.0 } else { 0.5 };
    let largest = largest_of(half);
    if largest == 0.0 {
        return 0.0;
    }
    let e = exponent(largest);
    // Two factors: 2^-e alone may be out of range.
    let (a, b) = (power_of_two(-e / 2), power_of_two(-e - (-e / 2)));
    let squared = sum(q, r, |x, y| {
        let t = ((x * half - y * half) * a) * b;
        [t * t]
    })[0];
    ((squared.sqrt() / a) / b) / half
}

#[inline(always)]
fn sq_euclidean_of_unit<E: Element>(q: &[f64], r: &[E::Wide]) -> f64 {
    let unit = unit_scale::<E>(r);
    sum(q, r, |x, y| {
        let t = x - (y * unit.pre) * unit.inverse;
        [t * t]
    })[0]
}

#[inline(always)]
fn cosine<E: Element>(query: &Prepared, r: &[E::Wide]) -> f64 {
    let (dot, pre_norm2) = if E::DOUBLE {
        let unit = unit_scale::<E>(r);
        (sum(&query.row, r, |x, y| [x * (y * unit.pre)])[0], unit.norm2)
    } else {
        let [dot, norm2] = sum(&query.row, r, |x, y| [x * y, y * y]);
        (dot, norm2)
    };
    let product = query.unit.norm2 * pre_norm2;
    // sqrt(x * x) is x exactly, so equal rows have cosine exactly 1.
    if product > 0.0 { (dot / product.sqrt()).clamp(-1.0, 1.0) } else { 0.0 }
}

#[inline(always)]
fn inner_product<E: Element>(q: &[f64], r: &[E::Wide]) -> f64 {
    let dot = sum(q, r, |x, y| [x * y])[0];
    if E::DOUBLE && !dot.is_finite() { scaled_inner_product(q, r) } else { dot }
}

/// The inner product where its terms leave the range of `f64`; the sum may still be inside, or is a signed infinity.
#[cold]
#[inline(never)]
fn scaled_inner_product<W: Wide>(q: &[f64], r: &[W]) -> f64 {
    let (a, b) = (power_for(q), power_for(r));
    let dot = sum(q, r, |x, y| [(x * a) * (y * b)])[0];
    (dot / a) / b
}

multiversion! {
    /// Values of `query` with the reference rows named by `rows`, in their order.
    pub(crate) fn score<E: Element>(
        query: &Prepared,
        reference: MatrixRef<'_, E>,
        rows: &[u32],
        scratch: &mut Vec<<E as Element>::Wide>,
        values: &mut Vec<f64>,
    ) {
        values.clear();
        for &row in rows {
            let wide = E::widen(reference.row(row as usize), scratch);
            values.push(value::<E>(query, wide));
        }
    }
}

multiversion! {
    /// The unit scale of one widened row.
    pub(crate) fn unit_scale_of<E: Element>(row: &[<E as Element>::Wide]) -> UnitScale {
        unit_scale::<E>(row)
    }
}

/// The largest relative error of a float64 value against real arithmetic, in terms of the sum of its terms' magnitudes.
///
/// A lane sum takes `dim / 8` additions, the tree three, the product one; a cosine needs three such sums and, where the
/// filter sees unit rows, the norms of both once more: at most `3 dim / 8 + 21` roundings (`docs/exactness.md`).
pub(crate) fn relative_error(dim: usize) -> f64 {
    (dim as f64 / 2.0 + 64.0) * f64::EPSILON / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Argument;
    use crate::level::{Level, Simd};
    use crate::matrix::MatrixRef;

    fn pair<E: Element>(metric: Metric, q: &[E], r: &[E]) -> f64 {
        let prepared = Prepared::new(metric, q);
        let reference = MatrixRef::new(r, 1, r.len(), Argument::Reference).expect("a row");
        let mut values = Vec::new();
        let mut bits = Vec::new();
        for level in Level::available() {
            let simd = Simd::new(level).expect("available");
            score(simd, &prepared, reference, &[0], &mut Vec::new(), &mut values);
            bits.push(values[0].to_bits());
        }
        assert!(bits.iter().all(|&b| b == bits[0]), "levels differ: {bits:?}");
        values[0]
    }

    #[test]
    fn known_values() {
        let (q, r) = ([0f32, 3.0, 4.0], [1f32, 1.0, 1.0]);
        assert_eq!(pair(Metric::SqEuclidean, &q, &r), 14.0);
        assert_eq!(pair(Metric::Euclidean, &q, &r), 14f64.sqrt());
        assert_eq!(pair(Metric::InnerProduct, &q, &r), 7.0);
        assert!((pair(Metric::CosineSimilarity, &q, &r) - 7.0 / 75f64.sqrt()).abs() < 1e-15);
        assert!((pair(Metric::NormalizedSqEuclidean, &q, &r) - (2.0 - 14.0 / 75f64.sqrt())).abs() < 1e-15);
    }

    #[test]
    fn equal_rows_are_exact_at_any_scale() {
        for scale in [1.0, 1e-160, 1e-300, 1e160, 1e300, 5e-324] {
            let row: Vec<f64> = (1..=13).map(|i| f64::from(i) * scale).collect();
            assert_eq!(pair(Metric::CosineSimilarity, &row, &row), 1.0, "scale {scale}");
            assert_eq!(pair(Metric::Cosine, &row, &row), 0.0, "scale {scale}");
            assert_eq!(pair(Metric::NormalizedEuclidean, &row, &row), 0.0, "scale {scale}");
            assert_eq!(pair(Metric::Euclidean, &row, &row), 0.0, "scale {scale}");
        }
    }

    #[test]
    fn roots_and_products_survive_the_range_of_float64() {
        for exponent in [-1000, -700, 700, 1000] {
            let unit = power_of_two(exponent);
            assert_eq!(pair(Metric::Euclidean, &[3.0 * unit, 0.0], &[0.0, 4.0 * unit]), 5.0 * unit);
        }
        for subnormal in [5e-324, 15e-324, 25e-324, 1e-310] {
            assert_eq!(pair(Metric::Euclidean, &[subnormal], &[0.0f64]), subnormal);
        }
        assert_eq!(pair(Metric::Euclidean, &[1.5e308f64], &[-1.5e308]), f64::INFINITY);
        assert_eq!(pair(Metric::InnerProduct, &[1e200f64, 1e200], &[1e200, -1e200]), 0.0);
        assert_eq!(pair(Metric::InnerProduct, &[1e200f64, 1e100], &[-1e200, 1.0]), f64::NEG_INFINITY);
        assert_eq!(pair(Metric::CosineSimilarity, &[1e200f64, 0.0], &[1e-200, 0.0]), 1.0);
    }

    #[test]
    fn zero_columns_and_zero_rows_change_nothing() {
        let (q, r) = ([0.3f32, -1.7, 2.9], [1.1f32, 0.2, -0.4]);
        for metric in Metric::ALL {
            for zeros in 1..20 {
                let pad = |x: &[f32]| [x, &vec![0.0; zeros]].concat();
                assert_eq!(pair(metric, &q, &r).to_bits(), pair(metric, &pad(&q), &pad(&r)).to_bits());
            }
        }
        assert_eq!(pair(Metric::CosineSimilarity, &[0f32, 0.0], &[1.0, 0.0]), 0.0);
        assert_eq!(pair(Metric::NormalizedEuclidean, &[0f32, 0.0], &[2.0, 0.0]), 1.0);
    }
}
