//! A few queries against rows as they lie in memory: float32 arithmetic without packing, bound by the memory's speed.
//!
//! ```text
//! queries, sixteen a panel [column][16] ─┐
//!                                        ├─ sixteen keys a row ── key >= threshold? ──> candidates
//! rows as passed, four at a time ────────┘
//! ```
//!
//! The sixteen lanes of a vector are sixteen queries, so no sum has to be folded. Keys are `-|q - r|^2`, or `q.r`; the
//! differences are formed before they are squared, so nothing needs to be centred. `docs/exactness.md`, "Unpacked rows", has
//! the bound. A row that is not finite is always a candidate, and its float64 value tells.

use crate::arch::kernel::{CandidateLists, MAX_RUN};
use crate::arch::level::Simd;
use crate::arch::{UNPACKED_LANES as QUERIES, UNPACKED_ROWS, unpacked_sums};
use crate::exact::lanes::ROWS;
use crate::exact::rows::Rows;
use crate::exact::{Prepared, Widened};
use crate::filter::bound::{KeyMap, U32, UNDERFLOW, down, f32_lane_error, up};
use crate::filter::center_f32::dot;
use crate::matrix::WideRow;
use crate::metric::{Geometry, Metric};

const _: () = assert!(UNPACKED_ROWS == ROWS);

/// Rows that one scan may report.
pub(crate) const MOST_ROWS: usize = MAX_RUN * ROWS * 8;

/// Squared norms between its inverse and this are formed in float32 without care.
const SAFE: f32 = (1u128 << 80) as f32;

/// Whether a panel multiplies rows, or subtracts them.
fn multiplies(metric: Metric) -> bool {
    metric.normalizes() || metric.geometry() == Geometry::Dot
}

/// What a query contributes to its thresholds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnpackedTerms {
    multiplies: bool,
    normalizes: bool,
    /// Relative error of a key.
    gamma: f64,
    /// Norm of the query as multiplied.
    norm: f64,
}

/// Up to sixteen queries.
pub(crate) struct Panel {
    metric: Metric,
    /// `[column][QUERIES]`
    columns: Vec<[f32; QUERIES]>,
    /// The threshold of a row of norm `n` is `fixed + slope n`.
    fixed: [f32; QUERIES],
    slope: [f32; QUERIES],
}

impl Panel {
    /// A panel whose lanes reject nothing until [`Panel::reject_below`]. Lanes without a query report almost nothing.
    pub(crate) fn new(metric: Metric, queries: &[Prepared]) -> Self {
        let dim = queries.first().map_or(0, |query| query.row().len());
        let mut columns = vec![[0.0f32; QUERIES]; dim];
        let mut fixed = [f32::INFINITY; QUERIES];
        for (lane, query) in queries.iter().enumerate() {
            let unit = if metric.normalizes() { query.to_unit() } else { 1.0 };
            for (column, x) in columns.iter_mut().zip(query.row()) {
                column[lane] = (x * unit) as f32;
            }
            fixed[lane] = f32::NEG_INFINITY;
        }
        Self { metric, columns, fixed, slope: [0.0; QUERIES] }
    }

    /// How the values of `query` relate to keys, and what it contributes to its thresholds.
    pub(crate) fn terms(metric: Metric, query: &Prepared) -> (KeyMap, UnpackedTerms) {
        let dim = query.row().len();
        let normalizes = metric.normalizes();
        // Of unit rows, |q - r|^2 = 2 - 2 q.r.
        let shift = if normalizes && metric.geometry() == Geometry::Euclidean { 2.0 } else { 0.0 };
        let norm = if normalizes { 1.0 } else { query.row().iter().map(|x| x * x).sum::<f64>().sqrt() };
        let terms = UnpackedTerms {
            multiplies: multiplies(metric),
            normalizes,
            gamma: (dim as f64 + 16.0) * U32 * (1.0 + 1.0 / 8.0) + f32_lane_error(dim),
            // A zero query has no direction: the identity above does not hold for it.
            norm: if normalizes && query.to_unit() == 0.0 { f64::INFINITY } else { norm },
        };
        (KeyMap { metric, dim, shift, shift_size: shift, scale2: 1.0 }, terms)
    }

    /// Make the thresholds of query `lane` those of keys below `floor` (see [`crate::filter::bound`]).
    pub(crate) fn reject_below(&mut self, lane: usize, terms: UnpackedTerms, floor: f32) {
        let floor = f64::from(floor);
        let UnpackedTerms { multiplies, normalizes, gamma, norm } = terms;
        let (fixed, slope) = if !multiplies {
            // The key is twice the floor's: `-|q - r|^2`.
            (2.0 * floor * (1.0 + gamma), 0.0)
        } else if normalizes {
            // Of the dot with a row that was not divided by its norm.
            (0.0, floor - gamma * norm * (1.0 + floor.abs()))
        } else {
            (floor, -gamma * norm)
        };
        self.fixed[lane] = down(fixed - UNDERFLOW);
        self.slope[lane] = down(slope);
        if self.fixed[lane].is_nan() || self.slope[lane].is_nan() || self.slope[lane].is_infinite() {
            (self.fixed[lane], self.slope[lane]) = (f32::NEG_INFINITY, 0.0);
        }
    }

    /// Report the rows of `start .. end` whose key reaches a threshold, at most [`MOST_ROWS`].
    pub(crate) fn scan(
        &self,
        simd: Simd,
        reference: &dyn Rows,
        start: usize,
        end: usize,
        wide: &mut Widened,
        candidates: &mut CandidateLists,
    ) {
        if let Some(numbers) = reference.as_f32() {
            // Rows of a known type: no call for each.
            let dim = reference.dim();
            let row = |row: usize| &numbers[row * dim..][..dim];
            for first in (start..end).step_by(ROWS) {
                // The last group is filled up with its last row, which is reported once.
                let rows = std::array::from_fn(|r| row((first + r).min(end - 1)));
                self.scan_rows(simd, rows, first, end, candidates);
            }
            return;
        }
        for first in (start..end).step_by(ROWS) {
            let row = |r: usize| (first + r).min(end - 1);
            let [a, b, c, d] = &mut wide.0;
            let rows = [
                reference.widen(row(0), a),
                reference.widen(row(1), b),
                reference.widen(row(2), c),
                reference.widen(row(3), d),
            ];
            let rows = rows.map(|row| match row {
                WideRow::F32(row) => row,
                WideRow::F64(_) => unreachable!("planned for rows that widen to float32 only"),
            });
            self.scan_rows(simd, rows, first, end, candidates);
        }
    }

    /// Report which of the rows from `first`, at most up to `end`, reach a threshold.
    #[inline(always)]
    fn scan_rows(&self, simd: Simd, rows: [&[f32]; ROWS], first: usize, end: usize, candidates: &mut CandidateLists) {
        let products = multiplies(self.metric);
        let keys = if products {
            unpacked_sums::<true>(simd, &self.columns, rows)
        } else {
            unpacked_sums::<false>(simd, &self.columns, rows)
        };
        for (r, keys) in keys.iter().enumerate().take(end - first) {
            let mut thresholds = self.fixed;
            if products {
                let norm = norm_of(dot(simd, rows[r], rows[r]));
                for (threshold, slope) in thresholds.iter_mut().zip(&self.slope) {
                    *threshold += slope * norm;
                }
            }
            let mut over = over(keys, &thresholds);
            while over != 0 {
                candidates.push(over.trailing_zeros() as usize, (first + r) as u32, 0.0);
                over &= over - 1;
            }
        }
    }
}

/// A norm on the large side; not a number where float32 cannot form it, so that all keys survive.
fn norm_of(squared: f32) -> f32 {
    if (1.0 / SAFE..=SAFE).contains(&squared) { up(f64::from(squared).sqrt()) } else { f32::NAN }
}

/// The lanes whose key is not certainly below its threshold; a key that is not finite is not.
#[inline(always)]
fn over(keys: &[f32; QUERIES], thresholds: &[f32; QUERIES]) -> u32 {
    let mut over = 0;
    for l in 0..QUERIES {
        let below = keys[l] < thresholds[l] && keys[l] >= f32::MIN;
        over |= u32::from(!below) << l;
    }
    over
}
