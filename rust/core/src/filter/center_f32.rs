//! Centring in float32, for codes that are much coarser than float32.
//!
//! ```text
//! row ──(times 1 / norm, if the metric normalises)──> minus centre, times scale ──> float32 row, sums, their errors
//! ```
//!
//! Every error is bounded (`docs/exactness.md`, "Centring in float32"); nothing relies on float32 being accurate enough. Rows
//! whose sums leave the safe range of float32 are centred in float64 instead.

use crate::arch::kernel::Centred;
use crate::arch::level::{Simd, multiversion};
use crate::error::Result;
use crate::exact::relative_error;
use crate::filter::bound::{LARGEST_NORM, U32, VANISHED, f32_lane_error};
use crate::metric::{Geometry, Metric};
use crate::runtime::alloc::{FRAME, try_collect};

pub(crate) const LANES: usize = 16;

/// Squared norms between `1 / SAFE` and `SAFE` can be computed in float32 without overflow or underflow.
const SAFE: f32 = (1u128 << 80) as f32;

/// Reduce lanes as a tree: a chain of sixteen dependent operations would take longer than the row.
#[inline(always)]
pub(crate) fn fold<T: Copy>(lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    // `black_box`: if the compiler sees the tree, it splits the accumulators into its branches instead of keeping vectors.
    let mut lanes = std::hint::black_box(lanes);
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] = join(lanes[l], lanes[l + half]);
        }
    }
    lanes[0]
}

#[inline(always)]
fn move_chunk(x: &[f32; LANES], centre: &[f32; LANES], inverse: f32, scale: f32) -> [f32; LANES] {
    std::array::from_fn(|l| (x[l] * inverse - centre[l]) * scale)
}

multiversion! {
    /// `out = (row * inverse - centre) * scale`, and the sum of its squares.
    fn centre_row(row: &[f32], inverse: f32, centre: &[f32], scale: f32, out: &mut [f32]) -> f32 {
        let mut squares = [0.0f32; LANES];
        let (rows, row_rest) = row.as_chunks::<LANES>();
        let (centres, centre_rest) = centre.as_chunks::<LANES>();
        let (outs, out_rest) = out.as_chunks_mut::<LANES>();
        for ((x, c), out) in rows.iter().zip(centres).zip(outs) {
            *out = move_chunk(x, c, inverse, scale);
            for l in 0..LANES {
                squares[l] += out[l] * out[l];
            }
        }
        if !row_rest.is_empty() {
            let last = move_chunk(&padded(row_rest), &padded(centre_rest), inverse, scale);
            for l in 0..LANES {
                squares[l] += last[l] * last[l];
            }
            out_rest.copy_from_slice(&last[..row_rest.len()]);
        }
        fold(squares, |x, y| x + y)
    }
}

multiversion! {
    /// The inner product of two rows.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut products = [0.0f32; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (x, y) in a.iter().zip(b) {
            for l in 0..LANES {
                products[l] += x[l] * y[l];
            }
        }
        if !a_rest.is_empty() {
            let (x, y) = (padded(a_rest), padded(b_rest));
            for l in 0..LANES {
                products[l] += x[l] * y[l];
            }
        }
        fold(products, |x, y| x + y)
    }
}

/// An incomplete chunk of columns, padded with zeros.
#[inline(always)]
pub(crate) fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut chunk = [0.0; LANES];
    chunk[..rest.len()].copy_from_slice(rest);
    chunk
}

/// [`super::frame::Frame`] in float32, if that is exact.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    centre: Vec<f32>,
    /// The centre of the queries, scaled.
    other: Vec<f32>,
    other_norm: f64,
    scale: f32,
}

/// [`Centred`] without the row itself.
pub(crate) struct Sums {
    norm: f64,
    row_error: f64,
    raw_norm: f64,
    offset: f64,
    offset_size: f64,
    offset_error: f64,
    noise: f64,
}

impl Sums {
    pub(crate) fn into_centred(self, row: &[f32]) -> Centred<'_> {
        let Self { norm, row_error, raw_norm, offset, offset_size, offset_error, noise } = self;
        Centred { row, norm, row_error, raw_norm, offset, offset_size, offset_error, noise }
    }
}

impl Frame {
    /// `None` if the frame is not exact in float32.
    pub(crate) fn new(centre: &[f64], query_centre: &[f64], scale: f64) -> Result<Option<Self>> {
        let is_exact = |x: f64| f64::from(x as f32) == x;
        let other = || query_centre.iter().map(|c| c * scale);
        if !centre.iter().copied().chain(other()).chain([scale]).all(is_exact) || !(scale as f32).is_normal() {
            return Ok(None);
        }
        Ok(Some(Self {
            centre: try_collect(centre.iter().map(|&c| c as f32), FRAME)?,
            other: try_collect(other().map(|c| c as f32), FRAME)?,
            other_norm: other().map(|c| c * c).sum::<f64>().sqrt() * (1.0 + relative_error(centre.len())),
            scale: scale as f32,
        }))
    }

    /// Centre a reference row; `None` if that is not safe in float32, in particular if the row is not finite.
    pub(crate) fn centre(&self, simd: Simd, metric: Metric, row: &[f32], out: &mut [f32]) -> Option<Sums> {
        let lanes = f32_lane_error(row.len());
        let scale = f64::from(self.scale);
        let is_safe = |sum: f32| (1.0 / SAFE..=SAFE).contains(&sum);
        let dot_geometry = metric.geometry() == Geometry::Dot;

        let (mut inverse, mut unit_error, mut raw_norm) = (1.0, 0.0, 0.0);
        if metric.normalizes() || dot_geometry {
            let raw2 = dot(simd, row, row);
            if !is_safe(raw2) {
                return None;
            }
            if metric.normalizes() {
                inverse = 1.0 / raw2.sqrt();
                // Half the error of the sum, and one rounding each for the root, the quotient and the product.
                unit_error = (0.5 * lanes + 4.0 * U32) * scale;
            }
            raw_norm = if metric.normalizes() { 1.0 } else { f64::from(raw2).sqrt() } * scale * (1.0 + lanes);
        }
        let squares = centre_row(simd, row, inverse, &self.centre, self.scale, out);
        if squares.is_nan() || squares > SAFE {
            return None;
        }
        let computed = f64::from(squares).sqrt() * (1.0 + lanes);
        let row_error = unit_error * (1.0 + 1.0 / 64.0) + 2.0 * U32 * (computed + VANISHED);
        let norm = computed + row_error + VANISHED;
        if norm > LARGEST_NORM || raw_norm > LARGEST_NORM {
            return None;
        }
        let (offset, offset_size, offset_error) = if dot_geometry {
            let offset = -f64::from(dot(simd, out, &self.other));
            (offset, self.other_norm * norm, self.other_norm * (lanes * norm + row_error))
        } else {
            let half = 0.5 * f64::from(squares);
            (half, 0.5 * norm * norm, lanes * half + row_error * norm)
        };
        Some(Sums {
            norm,
            row_error,
            raw_norm: if dot_geometry { raw_norm } else { 0.0 },
            offset,
            offset_size,
            offset_error: offset_error * (1.0 + 1.0 / 64.0),
            noise: relative_error(row.len()),
        })
    }
}
