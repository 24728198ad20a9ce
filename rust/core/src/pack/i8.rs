//! Codes of the int8 filter: four columns a code, each an integer between -127 and 127 times the row's scale.
//!
//! ```text
//! centred row x ──largest magnitude / 127──> scale s
//!               └──round(x / s)──> b ──+128 for references──> bytes, four a code
//!               └──|x - s b|──> residual, the row's part of the error bound
//! ```
//!
//! References are stored as unsigned bytes, as the instructions want one operand; the sums of the query's codes undo it.

use crate::bound::{TAU, U32, UNDERFLOW, VANISHED, f32_lane_error, up};
use crate::kernel::{Centred, PanelTerms, QueryTerms, ReferenceTerms};
use crate::level::{Simd, multiversion};

/// Columns that one code holds.
pub(crate) const COLUMNS: usize = 4;

/// Added to the codes of references.
const UNSIGNED: u8 = 128;

/// Rows whose largest magnitude is below this are zeros in codes; all of the row is residual then.
const SMALLEST: f32 = 1.0 / (1u128 << 90) as f32;

const LANES: usize = 16;

/// What quantising a row left.
struct Quantized {
    scale: f32,
    /// Sum of squares of `x - scale * code`.
    residual2: f32,
    /// Sum of the codes.
    sum: i32,
}

multiversion! {
    /// Write the codes of `row` into lane `lane` of a panel of `lanes` rows, each code exclusive-or'ed with `flip`.
    fn quantize(row: &[f32], flip: u8, lane: usize, lanes: usize, panel: &mut [u32]) -> Quantized {
        let (chunks, rest) = row.as_chunks::<LANES>();
        let mut last = [0.0f32; LANES];
        last[..rest.len()].copy_from_slice(rest);

        let mut largest = [0.0f32; LANES];
        for x in chunks.iter().chain([&last]) {
            for l in 0..LANES {
                largest[l] = if x[l].abs() > largest[l] { x[l].abs() } else { largest[l] };
            }
        }
        let largest = largest.iter().fold(0.0f32, |m, &x| m.max(x));
        let (scale, inverse) = if largest >= SMALLEST { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };

        // Adding it to a number below 2^22 leaves the nearest integer in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        let (mut residual2, mut sum) = ([0.0f32; LANES], [0i32; LANES]);
        let mut steps = panel.chunks_exact_mut(lanes);
        let mut encode = |x: &[f32; LANES], columns: usize| {
            let mut codes = [0u8; LANES];
            for l in 0..LANES {
                let rounded = x[l] * inverse + ROUND;
                let code = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
                sum[l] += code;
                codes[l] = code as u8;
                let left = x[l] - (rounded - ROUND) * scale;
                residual2[l] += left * left;
            }
            let (words, _) = codes.as_chunks::<COLUMNS>();
            for word in &words[..columns.div_ceil(COLUMNS)] {
                if let Some(step) = steps.next() {
                    step[lane] = u32::from_ne_bytes(*word) ^ u32::from_ne_bytes([flip; COLUMNS]);
                }
            }
        };
        for chunk in chunks {
            encode(chunk, LANES);
        }
        if !rest.is_empty() {
            encode(&last, rest.len());
        }
        Quantized { scale, residual2: residual2.iter().sum(), sum: sum.iter().sum() }
    }
}

impl Quantized {
    /// An upper bound of the distance between the exact row and its codes.
    fn residual(&self, row: &Centred<'_>) -> f64 {
        let computed = f64::from(self.residual2).sqrt();
        computed * (1.0 + f32_lane_error(row.row.len())) + 4.0 * U32 * (row.norm + computed) + row.row_error + VANISHED
    }
}

/// See `docs/exactness.md`, "The int8 filter".
pub(crate) fn encode_reference(
    simd: Simd,
    row: &Centred<'_>,
    lane: usize,
    lanes: usize,
    panel: &mut [u32],
) -> ReferenceTerms {
    let quantized = quantize(simd, row.row, UNSIGNED, lane, lanes, panel);
    let residual = quantized.residual(row);
    let error = PanelTerms {
        a: up(residual + 8.0 * U32 * (row.norm + residual)),
        b: up(row.norm.max(row.raw_norm) + TAU),
        c: up(4.0 * U32 * row.offset_size + row.offset_error + UNDERFLOW),
    };
    ReferenceTerms { error, scale: quantized.scale }
}

/// See `docs/exactness.md`, "The int8 filter".
pub(crate) fn encode_query(simd: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [u32]) -> QueryTerms {
    let quantized = quantize(simd, row.row, 0, lane, lanes, panel);
    let residual = quantized.residual(row);
    QueryTerms {
        alpha: up(row.norm + residual),
        beta: up(residual + row.noise * row.raw_norm),
        scale: quantized.scale,
        bias: -i32::from(UNSIGNED) * quantized.sum,
    }
}
