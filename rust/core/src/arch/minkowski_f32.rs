//! The float32 kernels of the Lp metrics other than the Euclidean one, in plain Rust.
//!
//! ```text
//! cityblock   one pass over the columns     sum |q - r|
//! Chebyshev   one pass                      max |q - r|
//! Minkowski   two passes                    M = max |q - r|, then M (sum (|q - r| / M)^p)^(1/p), p at least 1
//!             key = the negated distance: the larger, the nearer
//! ```
//!
//! A term takes three to forty instructions, where a product takes one, and the compiler vectorises them. So there is one
//! source, compiled for each level, and no intrinsics. The error of a key is relative to the key itself
//! (`bound::lp_relative_error`), except for the rounding of the rows, which is in the terms of the panels.
//!
//! Offsets are not read: a missing row of the last panel has the key of a row of zeros, and the caller drops it.
//!
//! Dividing by `M` keeps every power in range for any `p`: the sum is between 1 and the number of columns.

use crate::arch::kernel::{CandidateLists, MAX_MR, Microkernel, MinkowskiFloat32, PanelRun, QueryPanel};
use crate::arch::level::{Simd, multiversion};
use crate::metric::Metric;

/// A distance between rows.
trait Shape: Copy + Send + Sync + 'static {
    /// Distances of `MR` query rows, interleaved, and `NR` reference rows.
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR];
}

/// Rows of a query panel. With [`WIDE`], their sums take eight of the sixteen AVX2 registers; the terms need the others.
const MR: usize = 4;

/// The accumulation of the differences `t` of one query row and one column. A trait and not a closure: a closure that is not
/// inlined into the copy for a level is compiled without that level's instructions.
trait Accumulate<const NR: usize> {
    fn take(&self, m: usize, sums: &mut [f32; NR], t: [f32; NR]);
}

/// Fold `step` over the columns of a tile.
#[inline(always)]
fn fold<const NR: usize>(q: &[f32], r: &[f32], step: impl Accumulate<NR>) -> [[f32; NR]; MR] {
    let mut tile = [[0.0f32; NR]; MR];
    // Panels are whole, so there are no remainders.
    let (q, _) = q.as_chunks::<MR>();
    let (r, _) = r.as_chunks::<NR>();
    for (q, r) in q.iter().zip(r) {
        // Unrolled by hand: in a loop the compiler vectorises over the query rows, with a gather for each sum.
        step.take(0, &mut tile[0], differences(q[0], r));
        step.take(1, &mut tile[1], differences(q[1], r));
        step.take(2, &mut tile[2], differences(q[2], r));
        step.take(3, &mut tile[3], differences(q[3], r));
    }
    tile
}

/// The absolute differences of one column: of a query row and all reference rows of the panel.
#[inline(always)]
fn differences<const NR: usize>(q: f32, r: &[f32; NR]) -> [f32; NR] {
    let mut t = [0.0f32; NR];
    for n in 0..NR {
        t[n] = (q - r[n]).abs();
    }
    t
}

/// Adds the differences.
struct Sum;

impl<const NR: usize> Accumulate<NR> for Sum {
    #[inline(always)]
    fn take(&self, _: usize, sums: &mut [f32; NR], t: [f32; NR]) {
        for n in 0..NR {
            sums[n] += t[n];
        }
    }
}

/// Keeps the largest difference.
struct Max;

impl<const NR: usize> Accumulate<NR> for Max {
    #[inline(always)]
    fn take(&self, _: usize, largest: &mut [f32; NR], t: [f32; NR]) {
        for n in 0..NR {
            // A comparison, which is one instruction, and not `f32::max`, which also has to handle NaN.
            largest[n] = if t[n] > largest[n] { t[n] } else { largest[n] };
        }
    }
}

/// Sums of powers of the differences times `inverse`.
struct SumOfPowers<P, const NR: usize> {
    /// One over the largest difference of each pair; 0 if that is negligible.
    inverse: [[f32; NR]; MR],
    power: P,
}

impl<P: Powers, const NR: usize> Accumulate<NR> for SumOfPowers<P, NR> {
    #[inline(always)]
    fn take(&self, m: usize, sums: &mut [f32; NR], t: [f32; NR]) {
        for n in 0..NR {
            sums[n] += self.power.of(t[n] * self.inverse[m][n]);
        }
    }
}

/// Sum of absolute differences.
#[derive(Debug, Clone, Copy)]
struct Cityblock;

impl Shape for Cityblock {
    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        fold(q, r, Sum)
    }
}

/// Largest absolute difference.
#[derive(Debug, Clone, Copy)]
struct Chebyshev;

impl Shape for Chebyshev {
    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        fold(q, r, Max)
    }
}

/// Powers of numbers between 0 and 1.
trait Powers: Copy + Send + Sync + 'static {
    /// The exponent, at least 1.
    fn exponent(self) -> f32;

    /// `x` to the power of the exponent.
    fn of(self, x: f32) -> f32;
}

/// By logarithms, for any exponent.
#[derive(Debug, Clone, Copy)]
struct Logarithms {
    p: f32,
}

impl Powers for Logarithms {
    #[inline(always)]
    fn exponent(self) -> f32 {
        self.p
    }

    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        exp2(self.p * log2(x))
    }
}

/// By products, for the common exponents 3/2, 3 and 4: `HALVES / 2`. They take a few instructions instead of about forty.
#[derive(Debug, Clone, Copy)]
struct Products<const HALVES: u32>;

impl<const HALVES: u32> Powers for Products<HALVES> {
    #[inline(always)]
    fn exponent(self) -> f32 {
        HALVES as f32 / 2.0
    }

    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        const { assert!(matches!(HALVES, 3 | 6 | 8)) };
        match HALVES {
            3 => x * x.sqrt(),
            6 => x * x * x,
            _ => (x * x) * (x * x),
        }
    }
}

/// Minkowski distance of an exponent of at least 1.
#[derive(Debug, Clone, Copy)]
struct Minkowski<P>(P);

/// If the largest difference is at most this, it is taken for the distance: the error is below the slack of every key, and
/// its inverse could be infinite.
const NEGLIGIBLE: f32 = 1.0 / (1u128 << 120) as f32;

/// `M (sum (t / M)^p)^(1/p)`, see the module header.
impl<P: Powers> Shape for Minkowski<P> {
    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        let largest: [[f32; NR]; MR] = fold(q, r, Max);
        // A second pass over codes that are in the first-level cache: dividing by `M` needs all columns first.
        let mut inverse = [[0.0f32; NR]; MR];
        for m in 0..MR {
            for n in 0..NR {
                inverse[m][n] = if largest[m][n] > NEGLIGIBLE { 1.0 / largest[m][n] } else { 0.0 };
            }
        }
        let sums = fold(q, r, SumOfPowers { inverse, power: self.0 });
        let mut tile = [[0.0f32; NR]; MR];
        for m in 0..MR {
            for n in 0..NR {
                // By logarithms for every exponent: once per pair, not per column.
                let root = exp2(log2(sums[m][n]) * (1.0 / self.0.exponent()));
                tile[m][n] = if largest[m][n] > NEGLIGIBLE { largest[m][n] * root } else { largest[m][n] };
            }
        }
        tile
    }
}

/// `log2(x)` of a positive normal number with an error of at most `2^-20 + 2^-23 |log2 x|`; below -125 for 0 and denormals.
#[inline(always)]
fn log2(x: f32) -> f32 {
    // x = 2^e m with m in [sqrt(1/2), sqrt(2)); log2 m is a polynomial without constant term in m - 1.
    const ROOT_OF_HALF: i32 = 0x3f35_04f3;
    let bits = x.to_bits() as i32;
    let e = (bits - ROOT_OF_HALF) >> 23;
    let f = f32::from_bits((bits - (e << 23)) as u32) - 1.0;
    let mut sum = 0.172_128_74;
    for c in [-0.269_506_28, 0.295_633_6, -0.359_350_65, 0.480_629_15, -0.721_364, 1.442_696_5] {
        sum = sum * f + c;
    }
    sum * f + e as f32
}

/// `2^x` for `x` up to 100 with a relative error of at most `2^-20`; at most `2^-124` for `x` below -125.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    // Added to `x`, it leaves the nearest integer in the low bits of the sum, which are then added to the exponent.
    const WHOLE: f32 = (3u32 << 22) as f32;
    // Below, the exponent would wrap around. Also for NaN, which the comparison replaces.
    let x = if x > -125.0 { x } else { -125.0 };
    let shifted = x + WHOLE;
    let f = x - (shifted - WHOLE);
    let mut sum = 0.001_340_043_3;
    for c in [0.009_676_037, 0.055_503_27, 0.240_221_07, std::f32::consts::LN_2, 1.0] {
        sum = sum * f + c;
    }
    f32::from_bits(sum.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// The kernel; `NR` is [`WIDE`] or [`NARROW`]. The metric is a value and not a type, since the engine around a kernel is
/// compiled for each type. Only `CHEBYSHEV` has a type of its own: its encoding has other error terms.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LpF32<const NR: usize, const CHEBYSHEV: bool> {
    pub(crate) simd: Simd,
    pub(crate) metric: Metric,
}

impl<const NR: usize, const CHEBYSHEV: bool> LpF32<NR, CHEBYSHEV> {
    fn scan_shape<S: Shape>(
        &self,
        shape: S,
        query: &QueryPanel<'_, f32>,
        run: &PanelRun<'_, f32>,
        candidates: &mut CandidateLists,
    ) {
        const { assert!(NR == WIDE || NR == NARROW) };
        if NR == WIDE {
            scan_wide(self.simd, shape, query, run, candidates);
        } else {
            scan::<S, NARROW>(shape, query, run, candidates);
        }
    }
}

impl<const NR: usize, const CHEBYSHEV: bool> Microkernel for LpF32<NR, CHEBYSHEV> {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = MinkowskiFloat32<CHEBYSHEV>;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        match self.metric {
            Metric::Chebyshev => self.scan_shape(Chebyshev, query, run, candidates),
            Metric::Minkowski(power) => match power.halves() {
                Some(3) => self.scan_shape(Minkowski(Products::<3>), query, run, candidates),
                Some(6) => self.scan_shape(Minkowski(Products::<6>), query, run, candidates),
                Some(8) => self.scan_shape(Minkowski(Products::<8>), query, run, candidates),
                _ => self.scan_shape(Minkowski(Logarithms { p: power.get() as f32 }), query, run, candidates),
            },
            // Of the metrics with Lp geometry only cityblock is left; a new one needs an arm of its own.
            _ => self.scan_shape(Cityblock, query, run, candidates),
        }
    }
}

/// Rows of a reference panel for AVX2 and AVX-512.
pub(crate) const WIDE: usize = 16;
/// Rows of a reference panel for 128-bit vectors.
pub(crate) const NARROW: usize = 8;

multiversion! {
    /// The wide scan, compiled for each level. The narrow one runs only at levels without AVX2, so it needs no copies.
    fn scan_wide<S: Shape>(shape: S, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        scan::<S, WIDE>(shape, query, run, candidates);
    }
}

/// The scan of a run; see [`Microkernel::scan`].
#[inline(always)]
fn scan<S: Shape, const NR: usize>(
    shape: S,
    query: &QueryPanel<'_, f32>,
    run: &PanelRun<'_, f32>,
    candidates: &mut CandidateLists,
) {
    let panel_len = query.codes.len() / MR * NR;
    // Of each query row, for the current panel.
    let mut thresholds = [0.0; MAX_MR];
    for p in run.start..run.end {
        if run.visit.skips(p) {
            continue;
        }
        let codes = &run.codes[p * panel_len..][..panel_len];
        let tile = shape.tile::<NR>(query.codes, codes);
        query.thresholds.for_panel(run.terms[p], &mut thresholds);
        for (m, distances) in tile.iter().enumerate() {
            // First whether any key is reported: this loop has no branch, so it is vectorised, and usually the answer is no.
            let mut any = false;
            for distance in distances {
                // Not `>=`: a NaN key must be reported.
                #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
                let reaches = !(-distance < thresholds[m]);
                any |= reaches;
            }
            if !any {
                continue;
            }
            // In ascending order, as from every kernel.
            for (n, distance) in distances.iter().enumerate() {
                #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
                if !(-distance < thresholds[m]) {
                    candidates.push(m, (p * NR + n) as u32, -distance);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unit roundoff of float32.
    const U32: f64 = f32::EPSILON as f64 / 2.0;
    const SMALL: f64 = 1.0 / (1u64 << 20) as f64;

    /// Every mantissa, at exponents for which adding the exponent rounds finely and coarsely.
    #[test]
    fn logarithms_keep_their_bound() {
        for exponent in [-126, -64, -3, -1, 0, 5] {
            for mantissa in (0..1u32 << 23).step_by(if exponent == -1 || exponent == 0 { 1 } else { 61 }) {
                let x = f32::from_bits((((exponent + 127) as u32) << 23) | mantissa);
                let exact = f64::from(x).log2();
                assert!((f64::from(log2(x)) - exact).abs() <= SMALL + exact.abs() * 2.0 * U32, "{x:e}");
            }
        }
        for tiny in [0.0, f32::from_bits(1), f32::MIN_POSITIVE.next_down()] {
            assert!(log2(tiny) < -125.0);
        }
    }

    #[test]
    fn powers_of_two_keep_their_bound() {
        for i in -125 * (1i64 << 14)..=20 * (1 << 14) {
            let x = (i as f64 / f64::from(1 << 14)) as f32;
            let exact = f64::from(x).exp2();
            assert!((f64::from(exp2(x)) - exact).abs() <= SMALL * exact, "{x:e}");
        }
        let mut x = -0.6f32;
        while x < 0.6 {
            assert!((f64::from(exp2(x)) - f64::from(x).exp2()).abs() <= SMALL * f64::from(x).exp2(), "{x:e}");
            x += 3e-7;
        }
        for x in [-125.0, -126.0, -1e6, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp2(x), 2f32.powi(-125));
        }
    }
}
