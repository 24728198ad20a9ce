//! Codes of the float32 filters: the centred row itself, one column per code.

use crate::arch::kernel::{Centred, Encoding, Float32, MinkowskiFloat32, PanelTerms, QueryTerms, ReferenceTerms};
use crate::arch::level::Simd;
use crate::filter::bound::{TAU, U32, UNDERFLOW, f32_dot_error, up};

/// Write a row into lane `lane` of a panel of `lanes` rows.
#[inline]
fn interleave(row: &[f32], lane: usize, lanes: usize, panel: &mut [f32]) {
    for (step, &x) in panel.chunks_exact_mut(lanes).zip(row) {
        step[lane] = x;
    }
}

/// See `docs/exactness.md`, "The float32 filter".
impl Encoding for Float32 {
    type Code = f32;
    const COLUMNS: usize = 1;
    const CENTER_F32: bool = false;

    fn encode_reference(_: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> ReferenceTerms {
        interleave(row.row, lane, lanes, panel);
        let error = PanelTerms {
            a: up(row.norm + TAU + row.raw_norm * (row.noise / f32_dot_error(row.row.len()))),
            b: 0.0,
            c: up(4.0 * U32 * row.offset_size + row.offset_error + UNDERFLOW),
        };
        ReferenceTerms { error, scale: 1.0 }
    }

    fn encode_query(_: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> QueryTerms {
        interleave(row.row, lane, lanes, panel);
        let alpha = f32_dot_error(row.row.len()) * (row.norm.max(row.raw_norm) + TAU);
        QueryTerms { alpha: up(alpha), beta: 0.0, scale: 1.0, bias: 0 }
    }
}

/// Bound of the change of a row's distances by rounding the row to float32, with slack for the part of a key's error that is
/// relative to it.
fn distance_error<const CHEBYSHEV: bool>(row: &Centred<'_>) -> f64 {
    // Upper bound of the metric's norm over the 2-norm.
    let norm_ratio = if CHEBYSHEV { 1.0 } else { (row.row.len() as f64).sqrt() };
    U32 * (1.0 + 1.0 / 8.0) * norm_ratio * (row.norm + TAU)
}

/// See `docs/exactness.md`, "The float32 filter of the other norms".
impl<const CHEBYSHEV: bool> Encoding for MinkowskiFloat32<CHEBYSHEV> {
    type Code = f32;
    const COLUMNS: usize = 1;
    const CENTER_F32: bool = false;

    fn encode_reference(_: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> ReferenceTerms {
        interleave(row.row, lane, lanes, panel);
        let error = PanelTerms { a: 1.0, b: 0.0, c: up(distance_error::<CHEBYSHEV>(row) + 4.0 * UNDERFLOW) };
        ReferenceTerms { error, scale: 1.0 }
    }

    fn encode_query(_: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> QueryTerms {
        interleave(row.row, lane, lanes, panel);
        QueryTerms { alpha: up(distance_error::<CHEBYSHEV>(row)), beta: 0.0, scale: 1.0, bias: 0 }
    }
}
