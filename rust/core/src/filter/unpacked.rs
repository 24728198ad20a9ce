//! Keys of few queries and unpacked, row-major references in float32: limited by memory bandwidth.
//!
//! ```text
//! up to sixteen queries, in sixteen lanes ─┐
//!                                          ├─ keys of four rows ── key >= threshold? ──> candidates
//! rows as passed, four at a time ──────────┘
//! ```
//!
//! Of sixteen queries each lane has one; of fewer, each has as many lanes as fit, which sum up several columns at once. Keys
//! are `-|q - r|^2`, or `q.r`. Differences are computed before they are squared, so rows need not be centred. The bound is in
//! `docs/exactness.md`, "Unpacked rows". A row that is not finite is always a candidate, and its float64 value shows it.

use crate::arch::kernel::{CandidateLists, MAX_RUN, UnpackedQueries};
use crate::arch::level::Simd;
use crate::arch::{UNPACKED_LANES as LANES, UNPACKED_ROWS, unpacked_over};
use crate::error::Result;
use crate::exact::lanes::ROWS;
use crate::exact::rows::Rows;
use crate::exact::{Prepared, Widened};
use crate::filter::bound::{KeyMap, U32, UNDERFLOW, down, f32_lane_error, up};
use crate::filter::center_f32::dot;
use crate::matrix::WideRow;
use crate::metric::{Geometry, Metric};
use crate::runtime::alloc::try_filled;

const _: () = assert!(UNPACKED_ROWS == ROWS);

/// Most rows of one scan.
pub(crate) const MOST_ROWS: usize = MAX_RUN * ROWS * 8;

/// Squared norms between `1 / SAFE` and `SAFE` can be computed in float32 without overflow or underflow.
const SAFE: f32 = (1u128 << 80) as f32;

/// Whether keys are products of rows, or squared differences.
fn multiplies(metric: Metric) -> bool {
    metric.normalizes() || metric.geometry() == Geometry::Dot
}

/// The terms of a query in its thresholds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnpackedTerms {
    multiplies: bool,
    normalizes: bool,
    /// Relative error of a key.
    gamma: f64,
    /// Norm of the query in the products: 1 if the metric normalises.
    norm: f64,
}

/// Up to sixteen queries.
pub(crate) struct Panel {
    metric: Metric,
    queries: UnpackedQueries,
}

/// Lanes of each of `queries` queries: the more, the fewer steps. No more than columns, which would leave lanes idle.
fn width(queries: usize, dim: usize) -> usize {
    let fitting = (LANES / queries.clamp(1, LANES).next_power_of_two()).max(1);
    fitting.min(1 << dim.max(1).ilog2())
}

impl Panel {
    /// A panel that rejects nothing until [`Panel::reject_below`].
    pub(crate) fn new(metric: Metric, queries: &[Prepared]) -> Result<Self> {
        let dim = queries.first().map_or(0, |query| query.row().len());
        let width = width(queries.len(), dim);
        let mut columns = try_filled([0.0f32; LANES], dim.div_ceil(width), "prepared queries")?;
        let mut first_lanes = 0;
        for (number, query) in queries.iter().enumerate() {
            let unit = if metric.normalizes() { query.to_unit() } else { 1.0 };
            for (step, row) in columns.iter_mut().zip(query.row().chunks(width)) {
                for (lane, x) in step[number * width..].iter_mut().zip(row) {
                    *lane = (x * unit) as f32;
                }
            }
            first_lanes |= 1 << (number * width);
        }
        let (fixed, slope) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        Ok(Self { metric, queries: UnpackedQueries { width, columns, fixed, slope, first_lanes } })
    }

    /// The relation between the values and keys of `query`, and its terms in the thresholds.
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
            // The identity above does not hold for a zero query: an infinite norm rejects nothing.
            norm: if normalizes && query.to_unit() == 0.0 { f64::INFINITY } else { norm },
        };
        (KeyMap { metric, dim, shift, shift_size: shift, scale2: 1.0 }, terms)
    }

    /// Set the thresholds of query `number` to reject exact keys below `floor` (see [`crate::filter::bound`]).
    pub(crate) fn reject_below(&mut self, number: usize, terms: UnpackedTerms, floor: f32) {
        let floor = f64::from(floor);
        let UnpackedTerms { multiplies, normalizes, gamma, norm } = terms;
        let (fixed, slope) = if !multiplies {
            // The key `-|q - r|^2` is twice that of the floor.
            (2.0 * floor * (1.0 + gamma), 0.0)
        } else if normalizes {
            // The row is not divided by its norm, so the threshold is proportional to it.
            (0.0, floor - gamma * norm * (1.0 + floor.abs()))
        } else {
            (floor, -gamma * norm)
        };
        let (mut fixed, mut slope) = (down(fixed - UNDERFLOW), down(slope));
        if fixed.is_nan() || slope.is_nan() || slope.is_infinite() {
            (fixed, slope) = (f32::NEG_INFINITY, 0.0);
        }
        let width = self.queries.width;
        self.queries.fixed[number * width..][..width].fill(fixed);
        self.queries.slope[number * width..][..width].fill(slope);
    }

    /// Report the rows of `start .. end`, at most [`MOST_ROWS`], whose key reaches a threshold.
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
            // Rows of a known type: no virtual call per row.
            let dim = reference.dim();
            let row = |row: usize| &numbers[row * dim..][..dim];
            for first in (start..end).step_by(ROWS) {
                // The last group is padded with its last row, which is reported once.
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

    /// Report the rows from `first` that reach a threshold; those at or behind `end` are padding.
    #[inline(always)]
    fn scan_rows(&self, simd: Simd, rows: [&[f32]; ROWS], first: usize, end: usize, candidates: &mut CandidateLists) {
        let over = if multiplies(self.metric) {
            let norms = rows.map(|row| norm_of(dot(simd, row, row)));
            unpacked_over::<true>(simd, &self.queries, rows, norms)
        } else {
            unpacked_over::<false>(simd, &self.queries, rows, [0.0; ROWS])
        };
        for (r, over) in over.iter().enumerate().take(end - first) {
            let mut over = *over;
            while over != 0 {
                candidates.push(over.trailing_zeros() as usize / self.queries.width, (first + r) as u32, 0.0);
                over &= over - 1;
            }
        }
    }
}

/// The norm, rounded up; NaN if it is not safe in float32, so that all keys survive.
fn norm_of(squared: f32) -> f32 {
    if (1.0 / SAFE..=SAFE).contains(&squared) { up(f64::from(squared).sqrt()) } else { f32::NAN }
}
