//! The float32 kernels of the metrics that are no sums of squares, in plain Rust.
//!
//! ```text
//! cityblock   one pass over the columns     sum |q - r|
//! Chebyshev   one pass                      max |q - r|
//! Minkowski   two passes                    M = max |q - r|, then M (sum (|q - r| / M)^p)^(1/p), p at least 1
//!             key = minus that, the larger the nearer
//! ```
//!
//! Such a term takes three to forty instructions where a product takes one, and the compiler makes whole vectors of them;
//! so there is one source, compiled for each level. The error of a key is relative to the key itself
//! ([`crate::bound::lp_relative_error`]) but for what rounding the rows cost, which is what the terms of a panel state.
//!
//! Offsets are not read: a missing row of the last panel has the key of a row of zeros, and the caller drops it.
//!
//! Dividing by `M` keeps every power in range whatever `p` is: the sum lies between 1 and the number of columns.

use crate::bound::{TAU, U32, UNDERFLOW, up};
use crate::kernel::{Centred, Hits, Kernel, MAX_MR, PanelRun, PanelTerms, QueryPanel, RowTerms};
use crate::level::{Simd, multiversion};
use crate::pack;

/// What is summed over the columns.
pub(crate) trait Shape: Copy + Send + Sync + 'static {
    /// At least the `p`-norm of a row over its 2-norm.
    fn norm_ratio(dim: usize) -> f64;

    /// Distances of `MR` query rows, interleaved, and `NR` reference rows.
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR];
}

/// Rows of a query panel. With [`WIDE`] their sums take eight registers of AVX2 and leave room for the rest.
const MR: usize = 4;

/// Fold `step` over the differences of a tile.
#[inline(always)]
fn fold<const NR: usize>(
    q: &[f32],
    r: &[f32],
    mut step: impl FnMut(usize, &mut [f32; NR], [f32; NR]),
) -> [[f32; NR]; MR] {
    let mut tile = [[0.0f32; NR]; MR];
    let (q, _) = q.as_chunks::<MR>();
    let (r, _) = r.as_chunks::<NR>();
    for (q, r) in q.iter().zip(r) {
        let mut row = |m: usize| {
            let mut t = [0.0f32; NR];
            for n in 0..NR {
                t[n] = (q[m] - r[n]).abs();
            }
            step(m, &mut tile[m], t);
        };
        // Written out: a loop over `m` is what the compiler would make vectors of, with a gather for each sum.
        row(0);
        row(1);
        row(2);
        row(3);
    }
    tile
}

#[inline(always)]
fn add<const NR: usize>(sums: &mut [f32; NR], terms: [f32; NR]) {
    for n in 0..NR {
        sums[n] += terms[n];
    }
}

#[inline(always)]
fn raise<const NR: usize>(most: &mut [f32; NR], terms: [f32; NR]) {
    for n in 0..NR {
        most[n] = if terms[n] > most[n] { terms[n] } else { most[n] };
    }
}

/// Sum of absolute differences.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cityblock;

impl Shape for Cityblock {
    fn norm_ratio(dim: usize) -> f64 {
        (dim as f64).sqrt()
    }

    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        fold(q, r, |_, sums, t| add(sums, t))
    }
}

/// Largest absolute difference.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chebyshev;

impl Shape for Chebyshev {
    fn norm_ratio(_: usize) -> f64 {
        1.0
    }

    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        fold(q, r, |_, most, t| raise(most, t))
    }
}

/// Minkowski distance of exponent `p`, at least 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Minkowski {
    pub(crate) p: f32,
}

/// Below this a largest difference stands for the distance: the two differ by less than the slack of every key.
const NEGLIGIBLE: f32 = 1.0 / (1u128 << 120) as f32;

impl Shape for Minkowski {
    fn norm_ratio(dim: usize) -> f64 {
        (dim as f64).sqrt()
    }

    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        scaled(self.p, q, r, |t, inverse| exp2(self.p * log2(t * inverse)))
    }
}

/// Minkowski distance of an exponent whose powers are quick to multiply: `HALVES / 2`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Products<const HALVES: u32>;

impl<const HALVES: u32> Shape for Products<HALVES> {
    fn norm_ratio(dim: usize) -> f64 {
        (dim as f64).sqrt()
    }

    #[inline(always)]
    fn tile<const NR: usize>(self, q: &[f32], r: &[f32]) -> [[f32; NR]; MR] {
        scaled(HALVES as f32 / 2.0, q, r, |t, inverse| {
            let x = t * inverse;
            match HALVES {
                3 => x * x.sqrt(),
                6 => x * x * x,
                8 => (x * x) * (x * x),
                _ => unreachable!("no product for this exponent"),
            }
        })
    }
}

/// `M (sum power(t_i, 1 / M))^(1/p)` with `M` the largest difference `t_i`.
#[inline(always)]
fn scaled<const NR: usize>(p: f32, q: &[f32], r: &[f32], power: impl Fn(f32, f32) -> f32) -> [[f32; NR]; MR] {
    let most: [[f32; NR]; MR] = fold(q, r, |_, most, t| raise(most, t));
    let mut inverse = [[0.0f32; NR]; MR];
    for m in 0..MR {
        for n in 0..NR {
            inverse[m][n] = if most[m][n] > NEGLIGIBLE { 1.0 / most[m][n] } else { 0.0 };
        }
    }
    let sums: [[f32; NR]; MR] = fold(q, r, |m, sums, t| {
        for n in 0..NR {
            sums[n] += power(t[n], inverse[m][n]);
        }
    });
    let mut tile = [[0.0f32; NR]; MR];
    for m in 0..MR {
        for n in 0..NR {
            let root = exp2(log2(sums[m][n]) * (1.0 / p));
            tile[m][n] = if most[m][n] > NEGLIGIBLE { most[m][n] * root } else { most[m][n] };
        }
    }
    tile
}

/// `log2(x)` of a positive normal number, off by at most `2^-20 + 2^-23 |log2 x|`; below -125 of 0 and subnormal numbers.
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

/// `2^x` for x up to 100, off by at most a relative `2^-20`; at most `2^-124` for x below -125.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    // Adding it leaves the nearest whole number in the last bits.
    const WHOLE: f32 = (3u32 << 22) as f32;
    let x = if x > -125.0 { x } else { -125.0 };
    let shifted = x + WHOLE;
    let f = x - (shifted - WHOLE);
    let mut sum = 0.001_340_043_3;
    for c in [0.009_676_037, 0.055_503_27, 0.240_221_07, std::f32::consts::LN_2, 1.0] {
        sum = sum * f + c;
    }
    f32::from_bits(sum.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// A filter kernel for one shape; `NR` is [`WIDE`] or [`NARROW`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct LpF32<S, const NR: usize> {
    pub(crate) simd: Simd,
    pub(crate) shape: S,
}

impl<S: Shape, const NR: usize> LpF32<S, NR> {
    /// What rounding a row to float32 moves its distances by, and the slack for what a key's error makes of it.
    fn moved(row: &Centred<'_>) -> f64 {
        U32 * (1.0 + 1.0 / 8.0) * S::norm_ratio(row.row.len()) * (row.norm + TAU)
    }
}

impl<S: Shape, const NR: usize> Kernel for LpF32<S, NR> {
    const MR: usize = MR;
    const NR: usize = NR;
    const STEP: usize = 1;
    type QueryCode = f32;
    type ReferenceCode = f32;

    fn encode_reference(row: &Centred<'_>, lane: usize, panel: &mut [f32]) -> PanelTerms {
        pack::f32::interleave(row.row, lane, NR, panel);
        PanelTerms { a: 1.0, b: up(Self::moved(row) + 4.0 * UNDERFLOW) }
    }

    fn encode_query(row: &Centred<'_>, lane: usize, panel: &mut [f32]) -> RowTerms {
        pack::f32::interleave(row.row, lane, MR, panel);
        RowTerms { alpha: up(Self::moved(row)), beta: up(1.0) }
    }

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, hits: &mut Hits) {
        const { assert!(NR == WIDE || NR == NARROW) };
        if NR == WIDE {
            scan_wide(self.simd, self.shape, query, run, hits);
        } else {
            scan::<S, NARROW>(self.shape, query, run, hits);
        }
    }
}

/// Rows of a reference panel for AVX2 and above.
pub(crate) const WIDE: usize = 16;
/// Rows of a reference panel for vectors of 128 bits.
pub(crate) const NARROW: usize = 8;

multiversion! {
    fn scan_wide<S: Shape>(shape: S, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, hits: &mut Hits) {
        scan::<S, WIDE>(shape, query, run, hits);
    }
}

#[inline(always)]
fn scan<S: Shape, const NR: usize>(shape: S, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, hits: &mut Hits) {
    let panel_len = query.codes.len() / MR * NR;
    let mut bars = [0.0; MAX_MR];
    for (p, codes) in run.codes.chunks_exact(panel_len).enumerate() {
        let tile = shape.tile::<NR>(query.codes, codes);
        query.bars.against(run.terms[p], &mut bars);
        for (m, distances) in tile.iter().enumerate() {
            let mut any = false;
            for distance in distances {
                // Not `>=`: a key that is not a number must be reported.
                #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
                let reaches = !(-distance < bars[m]);
                any |= reaches;
            }
            if !any {
                continue;
            }
            for (n, distance) in distances.iter().enumerate() {
                #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
                if !(-distance < bars[m]) {
                    hits.push(m, run.first_row + (p * NR + n) as u32, -distance);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: f64 = 1.0 / (1u64 << 20) as f64;

    /// Every mantissa, at exponents where the sum with the exponent rounds finely and coarsely.
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
