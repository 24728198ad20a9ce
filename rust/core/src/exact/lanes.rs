//! The fixed order of float64 sums: eight lanes, added as a tree; and exact powers of two.

use crate::matrix::Wide;

pub(crate) const LANES: usize = 8;

#[inline(always)]
pub(crate) fn reduce(lane: [f64; LANES]) -> f64 {
    ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))
}

/// Rows that are scored at once: a single row is limited by the latency of its own additions.
pub(crate) const ROWS: usize = 4;

/// Sum `term(r, a[i], rows[r][i])` over the columns in the fixed order, for `R` rows; `N` sums at once.
#[inline(always)]
pub(crate) fn sum_rows<const R: usize, const N: usize, A: Wide, B: Wide>(
    a: &[A],
    rows: [&[B]; R],
    term: impl Fn(usize, f64, f64) -> [f64; N],
) -> [[f64; N]; R] {
    let mut lanes = [[[0.0f64; LANES]; N]; R];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    // Slices of the length of `a`, so that the loops have no bounds checks.
    let rows = rows.map(|row| row[..a.len()].as_chunks::<LANES>());
    for (c, x) in a_chunks.iter().enumerate() {
        for r in 0..R {
            let y = &rows[r].0[c];
            for l in 0..LANES {
                let terms = term(r, x[l].to_f64(), y[l].to_f64());
                for n in 0..N {
                    lanes[r][n][l] += terms[n];
                }
            }
        }
    }
    for r in 0..R {
        for (l, (x, y)) in a_rest.iter().zip(rows[r].1).enumerate() {
            let terms = term(r, x.to_f64(), y.to_f64());
            for n in 0..N {
                lanes[r][n][l] += terms[n];
            }
        }
    }
    lanes.map(|row| row.map(reduce))
}

/// `floor(log2(x))` of a positive finite number.
pub(crate) fn exponent(x: f64) -> i32 {
    let biased = ((x.to_bits() >> 52) & 0x7ff) as i32;
    if biased > 0 { biased - 1023 } else { exponent(x * power_of_two(64)) - 64 }
}

/// `2^e`, with `e` clamped to -1022 ..= 1023.
pub(crate) fn power_of_two(e: i32) -> f64 {
    f64::from_bits(((e.clamp(-1022, 1023) + 1023) as u64) << 52)
}
