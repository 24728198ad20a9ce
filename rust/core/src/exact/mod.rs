//! The value of a pair in float64, in one fixed order: the same bits at every level and on every machine.
//!
//! ```text
//! query row ──widen, normalise──> Prepared (float64) ──┐
//! reference row ──widen (exact)────────────────────────┴──> 8 lanes, multiply then add ──tree──> value
//! ```
//!
//! Lane `l` sums the terms of columns `l, l + 8, l + 16, ...` in that order; the lanes are added as a tree
//! `((0+4)+(2+6)) + ((1+5)+(3+7))`. Trailing zero columns add `+0`, so they change nothing. No multiply is fused with an
//! add: CPUs without fused operations would round differently. The bodies are plain Rust, compiled once for each level;
//! vectorising eight independent lanes reorders nothing.
//!
//! Exchanging the two rows gives the same bits, since every operation is commutative in them (except for inner products that
//! leave the range of `f64`). Symmetric tiles and the upper triangle of a search by radius rely on it.
//!
//! Range: squares of `f32` numbers are always in the range of `f64`. Rows of `f64` with extreme magnitudes are scaled by a
//! power of two first, which is exact, if the metric normalises; sums that overflow or underflow are computed again from
//! scaled rows if the result itself is in range.

pub(crate) mod lanes;
pub(crate) mod minkowski;
pub(crate) mod rows;

use lanes::{ROWS, exponent, power_of_two, sum_rows};

use crate::arch::level::multiversion;
use crate::error::Result;
use crate::matrix::{Element, MatrixRef, Wide};
use crate::metric::Metric;
use crate::runtime::alloc::try_vec;

/// [`sum_rows`] of one row.
#[inline(always)]
fn sum<const N: usize, A: Wide, B: Wide>(a: &[A], b: &[B], term: impl Fn(f64, f64) -> [f64; N]) -> [f64; N] {
    sum_rows(a, [b], |_, x, y| term(x, y))[0]
}

/// The scaling of a row to norm 1: `x -> (x * pre) * inverse`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UnitScale {
    /// A power of two, 1 unless the row's magnitudes are extreme.
    pub(crate) pre: f64,
    /// One over the norm of the row times `pre`; 0 for a zero row.
    pub(crate) inverse: f64,
    /// Squared norm of the row times `pre`.
    pub(crate) norm2: f64,
}

/// Magnitudes between `2^-200` and `2^200` can be squared and multiplied without overflow or underflow.
const SAFE_EXPONENT: i32 = 200;

/// A power of two that scales the largest magnitude of the row to near 1.
#[inline(always)]
fn power_for<W: Wide>(row: &[W]) -> f64 {
    let largest = row.iter().fold(0.0f64, |m, x| m.max(x.to_f64().abs()));
    if largest == 0.0 || !largest.is_finite() {
        return 1.0;
    }
    power_of_two(-exponent(largest))
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
    UnitScale { pre, inverse: inverse_root(norm2), norm2 }
}

#[inline(always)]
fn inverse_root(norm2: f64) -> f64 {
    if norm2 > 0.0 { 1.0 / norm2.sqrt() } else { 0.0 }
}

/// A query row, widened, and normalised if the metric normalises.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    metric: Metric,
    /// For the Euclidean metrics of normalised rows: the unit row. For cosines: the row times `unit.pre`. Else the row.
    row: Vec<f64>,
    unit: UnitScale,
}

impl Prepared {
    #[cfg(test)]
    pub(crate) fn new<E: Element>(metric: Metric, row: &[E]) -> Self {
        Self::of_wide::<E>(metric, E::widen(row, &mut Vec::new())).expect("memory")
    }

    /// The query of a widened row.
    pub(crate) fn of_wide<E: Element>(metric: Metric, wide: &[E::Wide]) -> Result<Self> {
        let unit =
            if metric.normalizes() { unit_scale::<E>(wide) } else { UnitScale { pre: 1.0, inverse: 1.0, norm2: 1.0 } };
        let mut row = try_vec(wide.len(), "prepared queries")?;
        match metric {
            Metric::SqEuclidean | Metric::Euclidean | Metric::InnerProduct => {
                row.extend(wide.iter().map(|x| Wide::to_f64(*x)));
            }
            Metric::Cityblock | Metric::Chebyshev | Metric::Minkowski(_) => {
                row.extend(wide.iter().map(|x| Wide::to_f64(*x)));
            }
            Metric::Cosine | Metric::CosineSimilarity => row.extend(wide.iter().map(|x| Wide::to_f64(*x) * unit.pre)),
            Metric::NormalizedSqEuclidean | Metric::NormalizedEuclidean => {
                row.extend(wide.iter().map(|x| (Wide::to_f64(*x) * unit.pre) * unit.inverse));
            }
        }
        Ok(Self { metric, row, unit })
    }

    /// The row from which values are computed.
    pub(crate) fn row(&self) -> &[f64] {
        &self.row
    }

    /// The factor that scales [`Prepared::row`] to norm 1, if the metric normalises; 0 for a zero row.
    pub(crate) fn to_unit(&self) -> f64 {
        match self.metric {
            Metric::NormalizedSqEuclidean | Metric::NormalizedEuclidean if self.unit.inverse > 0.0 => 1.0,
            _ => self.unit.inverse,
        }
    }
}

/// The values of `R` pairs, of which the first `wanted` are used; see the module header for the order.
#[inline(always)]
fn values_of<E: Element, const R: usize>(query: &Prepared, rows: [&[E::Wide]; R], wanted: usize) -> [f64; R] {
    let q = query.row.as_slice();
    match query.metric {
        Metric::SqEuclidean => sq_euclidean(q, rows),
        Metric::Euclidean => {
            let squared = sq_euclidean(q, rows);
            std::array::from_fn(|r| root::<E>(q, rows[r], squared[r]))
        }
        Metric::NormalizedSqEuclidean => sq_euclidean_of_unit::<E, R>(q, rows),
        Metric::NormalizedEuclidean => sq_euclidean_of_unit::<E, R>(q, rows).map(f64::sqrt),
        Metric::Cosine => cosine::<E, R>(query, rows).map(|cosine| 1.0 - cosine),
        Metric::CosineSimilarity => cosine::<E, R>(query, rows),
        Metric::InnerProduct => inner_product::<E, R>(q, rows),
        Metric::Cityblock => minkowski::cityblock(q, rows),
        Metric::Chebyshev => minkowski::chebyshev(q, rows),
        Metric::Minkowski(power) => {
            // Powers are not limited by the latency of additions, so padding rows would cost their full time.
            let mut values = [0.0; R];
            for r in 0..wanted.min(R) {
                values[r] = minkowski::minkowski(q, rows[r], power);
            }
            values
        }
    }
}

#[inline(always)]
fn sq_euclidean<W: Wide, const R: usize>(q: &[f64], rows: [&[W]; R]) -> [f64; R] {
    sum_rows(q, rows, |_, x, y| {
        let t = x - y;
        [t * t]
    })
    .map(|[sum]| sum)
}

#[inline(always)]
fn root<E: Element>(q: &[f64], r: &[E::Wide], squared: f64) -> f64 {
    // NaN must not be lost: the maximum of `scaled_root` would ignore it.
    if E::DOUBLE && !squared.is_nan() && !(power_of_two(-900)..=power_of_two(1000)).contains(&squared) {
        return scaled_root(q, r);
    }
    squared.sqrt()
}

/// The Euclidean distance where its square leaves the range of `f64`.
#[cold]
#[inline(never)]
fn scaled_root<W: Wide>(q: &[f64], r: &[W]) -> f64 {
    let largest_of = |half: f64| q.iter().zip(r).fold(0.0f64, |m, (x, y)| m.max((x * half - y.to_f64() * half).abs()));
    // Halved only if a difference of two finite numbers overflows: denormals would lose their last bit.
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
fn unit_scales<E: Element, const R: usize>(q: &[f64], rows: [&[E::Wide]; R]) -> [UnitScale; R] {
    if E::DOUBLE {
        return rows.map(unit_scale::<E>);
    }
    // The same sums as in `unit_scale`, for `R` rows at once; the query's numbers are not used.
    sum_rows(q, rows, |_, _, y| [y * y]).map(|[norm2]| UnitScale { pre: 1.0, inverse: inverse_root(norm2), norm2 })
}

#[inline(always)]
fn sq_euclidean_of_unit<E: Element, const R: usize>(q: &[f64], rows: [&[E::Wide]; R]) -> [f64; R] {
    let unit = unit_scales::<E, R>(q, rows);
    sum_rows(q, rows, |r, x, y| {
        let t = x - (y * unit[r].pre) * unit[r].inverse;
        [t * t]
    })
    .map(|[sum]| sum)
}

#[inline(always)]
fn cosine<E: Element, const R: usize>(query: &Prepared, rows: [&[E::Wide]; R]) -> [f64; R] {
    let sums = if E::DOUBLE {
        let unit = rows.map(unit_scale::<E>);
        let dots = sum_rows(&query.row, rows, |r, x, y| [x * (y * unit[r].pre)]);
        std::array::from_fn(|r| [dots[r][0], unit[r].norm2])
    } else {
        sum_rows(&query.row, rows, |_, x, y| [x * y, y * y])
    };
    sums.map(|[dot, norm2]| {
        let product = query.unit.norm2 * norm2;
        // sqrt(x * x) is exactly x, so equal rows have cosine exactly 1. NaN and infinity are not lost.
        if product == 0.0 { 0.0 } else { (dot / product.sqrt()).clamp(-1.0, 1.0) }
    })
}

#[inline(always)]
fn inner_product<E: Element, const R: usize>(q: &[f64], rows: [&[E::Wide]; R]) -> [f64; R] {
    let dots = sum_rows(q, rows, |_, x, y| [x * y]);
    std::array::from_fn(|r| {
        let dot = dots[r][0];
        if E::DOUBLE && !dot.is_finite() { scaled_inner_product(q, rows[r]) } else { dot }
    })
}

/// The inner product if its terms leave the range of `f64`: the sum may still be in range, or is a signed infinity.
#[cold]
#[inline(never)]
fn scaled_inner_product<W: Wide>(q: &[f64], r: &[W]) -> f64 {
    let (a, b) = (power_for(q), power_for(r));
    let dot = sum(q, r, |x, y| [(x * a) * (y * b)])[0];
    (dot / a) / b
}

multiversion! {
    /// Values of `query` with the reference rows `rows`, in their order. The value of a row that is not finite is not finite.
    pub(crate) fn score<E: Element>(
        query: &Prepared,
        reference: MatrixRef<'_, E>,
        rows: &[u32],
        scratch: &mut Widened,
        values: &mut Vec<f64>,
    ) {
        values.clear();
        values.reserve(rows.len() + ROWS);
        for start in (0..rows.len()).step_by(ROWS) {
            for &row in rows[start..].iter().skip(ROWS).take(ROWS) {
                prefetch(reference.row(row as usize));
            }
            // The last group is padded with its last row: four rows at once take little longer than one.
            let row = |r: usize| reference.row(rows[(start + r).min(rows.len() - 1)] as usize);
            let [a, b, c, d] = &mut scratch.0;
            let wide = [E::widen(row(0), a), E::widen(row(1), b), E::widen(row(2), c), E::widen(row(3), d)];
            values.extend_from_slice(&values_of::<E, ROWS>(query, wide, rows.len() - start));
        }
        values.truncate(rows.len());
    }
}

/// Bytes of a row that are prefetched: the hardware prefetcher continues a row once its beginning is accessed.
const PREFETCHED: usize = 512;

/// Prefetch the beginning of a row that will be scored soon. Candidates are scattered over the references, so the hardware
/// prefetcher misses them: without this, a third of the time of scoring is memory latency.
#[inline(always)]
pub(crate) fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in row.chunks(64 / size_of::<T>()).take(PREFETCHED / 64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint without effect on memory, and the address is that of a borrowed number. SSE is part of
        // every x86-64 CPU.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}

/// Buffers for the rows that are scored at once, if they have to be widened.
pub(crate) struct Widened(pub(crate) [Vec<f32>; ROWS]);

impl Widened {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Vec::new()))
    }

    /// Make room for rows of `dim` columns, so that widening a row allocates nothing.
    #[inline(always)]
    pub(crate) fn make_room(&mut self, dim: usize) -> Result<()> {
        for row in &mut self.0 {
            if row.capacity() < dim {
                *row = try_vec(dim, "widened rows")?;
            }
        }
        Ok(())
    }
}

multiversion! {
    /// The unit scale of one widened row.
    pub(crate) fn unit_scale_of<E: Element>(row: &[<E as Element>::Wide]) -> UnitScale {
        unit_scale::<E>(row)
    }
}

/// An upper bound of the error of a float64 value, relative to the sum of its terms' magnitudes.
///
/// A lane sum takes `dim / 8` additions, the tree three, the product one. A cosine takes three such sums and, if the filter
/// uses unit rows, the norms of both once more: at most `3 dim / 8 + 21` roundings (`docs/exactness.md`).
pub(crate) fn relative_error(dim: usize) -> f64 {
    (dim as f64 / 2.0 + 64.0) * f64::EPSILON / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Argument;
    use crate::arch::level::{Level, Simd};
    use crate::matrix::MatrixRef;

    fn pair<E: Element>(metric: Metric, q: &[E], r: &[E]) -> f64 {
        let prepared = Prepared::new(metric, q);
        let reference = MatrixRef::new(r, 1, r.len(), Argument::Reference).expect("a row");
        let mut values = Vec::new();
        let mut bits = Vec::new();
        for level in Level::available() {
            let simd = Simd::new(level).expect("available");
            score(simd, &prepared, reference, &[0; ROWS + 1], &mut Widened::new(), &mut values);
            // Four rows at once, and the last one padded.
            bits.extend(values.iter().map(|value| if value.is_nan() { f64::NAN } else { *value }.to_bits()));
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
    fn a_row_that_is_not_finite_has_no_finite_value() {
        fn check<E: Element>(to: impl Fn(f64) -> E) {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                for metric in Metric::ALL {
                    // Alone, among columns that agree with the query, among zeros and among others.
                    for (q, r) in [
                        (vec![0.5], vec![bad]),
                        (vec![0.0], vec![bad]),
                        (vec![0.5, 0.25, -2.0], vec![0.5, bad, -2.0]),
                        (vec![0.0, 0.0], vec![bad, 0.0]),
                        (vec![1.0; 9], [vec![3.0; 8], vec![bad]].concat()),
                    ] {
                        let row = |x: &[f64]| x.iter().map(|&x| to(x)).collect::<Vec<E>>();
                        let value = pair(metric, &row(&q), &row(&r));
                        assert!(!value.is_finite(), "{metric:?} of {q:?} and {r:?} is {value}");
                    }
                }
            }
        }
        check(|x| x as f32);
        check(|x| x);
        check(half::f16::from_f64);
        check(half::bf16::from_f64);
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
