//! Codes of the float32 filter: the centred row itself, one column a step.
//!
//! Every float32 kernel shares these two functions; only the panel widths differ.

use crate::bound::{TAU, U32, UNDERFLOW, up};
use crate::kernel::{Centred, PanelTerms, RowTerms};

/// Write a row into lane `lane` of a panel `lanes` wide.
#[inline]
pub(crate) fn interleave(row: &[f32], lane: usize, lanes: usize, panel: &mut [f32]) {
    for (step, &x) in panel.chunks_exact_mut(lanes).zip(row) {
        step[lane] = x;
    }
}

/// See `docs/exactness.md`, "The float32 filter".
pub(crate) fn encode_reference(row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> PanelTerms {
    interleave(row.row, lane, lanes, panel);
    PanelTerms {
        a: up(row.norm + TAU + row.raw_norm * (row.noise / row.dot_error)),
        b: up(4.0 * U32 * row.offset_size + UNDERFLOW),
    }
}

/// See `docs/exactness.md`, "The float32 filter".
pub(crate) fn encode_query(row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [f32]) -> RowTerms {
    interleave(row.row, lane, lanes, panel);
    RowTerms { alpha: up(row.dot_error * (row.norm.max(row.raw_norm) + TAU)), beta: up(1.0) }
}
