//! Codes of the float32 filter: the centred row itself, one column a code.
//!
//! Every float32 kernel shares these two functions; only the panel widths differ.

use crate::arch::kernel::{Centred, PanelTerms, QueryTerms, ReferenceTerms};
use crate::filter::bound::{TAU, U32, UNDERFLOW, f32_dot_error, up};

/// Write a row into lane `lane` of a panel `lanes` wide.
#[inline]
pub(crate) fn interleave(row: &[f32], lane: usize, lanes: usize, panel: &mut [f32]) {
    for (step, &x) in panel.chunks_exact_mut(lanes).zip(row) {
        step[lane] = x;
    }
}

/// See `docs/exactness.md`, "The float32 filter".
pub(crate) fn encode_reference(row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> ReferenceTerms {
    interleave(row.row, lane, lanes, panel);
    let error = PanelTerms {
        a: up(row.norm + TAU + row.raw_norm * (row.noise / f32_dot_error(row.row.len()))),
        b: 0.0,
        c: up(4.0 * U32 * row.offset_size + row.offset_error + UNDERFLOW),
    };
    ReferenceTerms { error, scale: 1.0 }
}

/// See `docs/exactness.md`, "The float32 filter".
pub(crate) fn encode_query(row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> QueryTerms {
    interleave(row.row, lane, lanes, panel);
    let alpha = f32_dot_error(row.row.len()) * (row.norm.max(row.raw_norm) + TAU);
    QueryTerms { alpha: up(alpha), beta: 0.0, scale: 1.0, bias: 0 }
}
