//! Codes of the int8 filter: four columns per code, each an integer between -127 and 127 times the row's scale. Kernels that
//! add products in pairs of 16 bits have queries of integers between -63 and 63.
//!
//! ```text
//! centred row x ──largest magnitude / 127──> scale s
//!               └──round(x / s)──> b ──+128 for references──> bytes, four per code
//!               └──|x - s b|──> residual, the row's part of the error bound
//! ```
//!
//! References are stored as unsigned bytes, since the instruction multiplies unsigned by signed; the start value of the sums
//! undoes the added 128.

use crate::arch::kernel::{Centred, Encoding, FULL, Int8, PanelTerms, QueryTerms, ReferenceTerms};
use crate::arch::level::{Simd, multiversion};
use crate::filter::bound::{TAU, U32, UNDERFLOW, VANISHED, f32_lane_error, up};
use crate::filter::center_f32::{LANES, fold, padded};

/// Columns that one code holds.
const COLUMNS: usize = 4;

/// Added to the codes of references.
const UNSIGNED: u8 = 128;

/// Rows with a smaller largest magnitude have codes of zero, and the whole row is residual. So a scale and its inverse are
/// normal numbers.
const SMALLEST: f32 = 1.0 / (1u128 << 90) as f32;

/// A row's scale, residual and sum of codes.
struct Quantized {
    scale: f32,
    /// Sum of squares of `x - scale * code`.
    residual2: f32,
    /// Sum of the codes of a query; 0 for a reference.
    sum: i32,
}

/// Added to a number below `2^22`, it leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// Columns that are encoded at once, before they are interleaved.
const BLOCK: usize = 256;

/// Write the codes of a block. Returns the squared residuals and the sums of the codes, per lane.
#[inline(always)]
fn encode(block: &[f32], scale: f32, inverse: f32, flip: u8, codes: &mut [u8; BLOCK]) -> ([f32; LANES], [i32; LANES]) {
    let (mut left2, mut sum) = ([0.0f32; LANES], [0i32; LANES]);
    let (chunks, rest) = block.as_chunks::<LANES>();
    let (whole, after) = codes.as_chunks_mut::<LANES>().0.split_at_mut(chunks.len());
    for (x, codes) in chunks.iter().zip(whole) {
        (left2, sum) = encode_chunk(x, scale, inverse, flip, codes, left2, sum);
    }
    if !rest.is_empty() {
        (left2, sum) = encode_chunk(&padded(rest), scale, inverse, flip, &mut after[0], left2, sum);
    }
    (left2, sum)
}

#[inline(always)]
fn encode_chunk(
    x: &[f32; LANES],
    scale: f32,
    inverse: f32,
    flip: u8,
    codes: &mut [u8; LANES],
    left2: [f32; LANES],
    sum: [i32; LANES],
) -> ([f32; LANES], [i32; LANES]) {
    let units: [f32; LANES] = std::array::from_fn(|l| x[l] * inverse + ROUND);
    let whole: [i32; LANES] = std::array::from_fn(|l| (units[l].to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32));
    *codes = whole.map(|code| code as u8 ^ flip);
    let left: [f32; LANES] = std::array::from_fn(|l| x[l] - (units[l] - ROUND) * scale);
    (std::array::from_fn(|l| left2[l] + left[l] * left[l]), std::array::from_fn(|l| sum[l] + whole[l]))
}

multiversion! {
    /// Write the codes of `row`, at most `most` and each xor `flip`, into lane `lane` of a panel of `lanes` rows.
    fn quantize(row: &[f32], most: f32, flip: u8, lane: usize, lanes: usize, panel: &mut [u32]) -> Quantized {
        let (chunks, rest) = row.as_chunks::<LANES>();
        let last = padded(rest);

        let mut largest = last.map(f32::abs);
        for x in chunks {
            for l in 0..LANES {
                let size = x[l].abs();
                largest[l] = if size > largest[l] { size } else { largest[l] };
            }
        }
        let largest = fold(largest, |x, y| if x > y { x } else { y });
        let (scale, inverse) = if largest >= SMALLEST { (largest / most, most / largest) } else { (0.0, 0.0) };

        let (mut residual2, mut sum) = ([0.0f32; LANES], [0i32; LANES]);
        let mut steps = panel.chunks_exact_mut(lanes);
        for block in row.chunks(BLOCK) {
            // Whole vectors of bytes first, then words of four: in one loop the compiler would extract byte by byte.
            let mut codes = [0u8; BLOCK];
            let (left2, codes_sum) = encode(block, scale, inverse, flip, &mut codes);
            for l in 0..LANES {
                residual2[l] += left2[l];
                sum[l] += codes_sum[l];
            }
            let words = codes.as_chunks::<COLUMNS>().0;
            for (word, step) in words.iter().take(block.len().div_ceil(COLUMNS)).zip(&mut steps) {
                step[lane] = u32::from_ne_bytes(*word);
            }
        }
        Quantized { scale, residual2: fold(residual2, |x, y| x + y), sum: if flip == 0 { fold(sum, |x, y| x + y) } else { 0 } }
    }
}

impl Quantized {
    /// Upper bound of the 2-norm of the difference between the exact row and its codes.
    fn residual(&self, row: &Centred<'_>) -> f64 {
        let computed = f64::from(self.residual2).sqrt();
        computed * (1.0 + f32_lane_error(row.row.len())) + 4.0 * U32 * (row.norm + computed) + row.row_error + VANISHED
    }
}

/// See `docs/exactness.md`, "The int8 filter".
impl<const QUERY: u8> Encoding for Int8<QUERY> {
    type Code = u32;
    const COLUMNS: usize = COLUMNS;
    const CENTER_F32: bool = true;

    fn encode_reference(simd: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [u32]) -> ReferenceTerms {
        let quantized = quantize(simd, row.row, f32::from(FULL), UNSIGNED, lane, lanes, panel);
        let residual = quantized.residual(row);
        let error = PanelTerms {
            a: up(residual + 8.0 * U32 * (row.norm + residual)),
            b: up(row.norm.max(row.raw_norm) + TAU),
            c: up(4.0 * U32 * row.offset_size + row.offset_error + UNDERFLOW),
        };
        ReferenceTerms { error, scale: quantized.scale }
    }

    fn encode_query(simd: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [u32]) -> QueryTerms {
        let quantized = quantize(simd, row.row, f32::from(QUERY), 0, lane, lanes, panel);
        let residual = quantized.residual(row);
        QueryTerms {
            alpha: up(row.norm + residual),
            beta: up(residual + row.noise * row.raw_norm),
            scale: quantized.scale,
            bias: -i32::from(UNSIGNED) * quantized.sum,
        }
    }
}
