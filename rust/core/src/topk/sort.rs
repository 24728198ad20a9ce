//! Sorting neighbours: by counting where there are many, by comparing where there are few.

use crate::order::Neighbour;

/// Below this many a comparison sort is faster.
const FEW: usize = 256;

/// Bits of one pass, and values of one digit.
const BITS: u32 = 11;
const DIGITS: usize = 1 << BITS;

/// Sort by the total order.
pub(crate) fn sort(neighbours: &mut Vec<Neighbour>) {
    if neighbours.len() < FEW {
        neighbours.sort_unstable();
        return;
    }
    // Ranks that are float32 numbers sort by 32 bits instead of 64.
    if neighbours.iter().all(|neighbour| neighbour.narrow_bits().is_some()) {
        radix(neighbours, u32::BITS, |neighbour| u64::from(neighbour.narrow_bits().unwrap_or_default()));
    } else {
        radix(neighbours, u64::BITS, Neighbour::bits);
    }
}

/// Sort by `bits` bits of `key`, and by row among equals: least significant digit first, each pass stable.
fn radix(neighbours: &mut Vec<Neighbour>, bits: u32, key: impl Fn(&Neighbour) -> u64) {
    let by_row = neighbours.is_sorted_by_key(|neighbour| neighbour.row());
    let rows = if by_row { 0 } else { u32::BITS };
    let digit = |neighbour: &Neighbour, pass: u32| -> usize {
        let shift = pass * BITS;
        let value = if shift < rows.next_multiple_of(BITS) {
            u64::from(neighbour.row()) >> shift
        } else {
            key(neighbour) >> (shift - rows.next_multiple_of(BITS))
        };
        value as usize % DIGITS
    };
    let passes = rows.div_ceil(BITS) + bits.div_ceil(BITS);
    let mut other = neighbours.clone();
    for pass in 0..passes {
        let mut ends = [0u32; DIGITS];
        for neighbour in neighbours.iter() {
            ends[digit(neighbour, pass)] += 1;
        }
        if ends.iter().any(|&count| count as usize == neighbours.len()) {
            continue;
        }
        let mut start = 0;
        for end in &mut ends {
            start += std::mem::replace(end, start);
        }
        for &neighbour in neighbours.iter() {
            let at = &mut ends[digit(&neighbour, pass)];
            other[*at as usize] = neighbour;
            *at += 1;
        }
        std::mem::swap(neighbours, &mut other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn counting_agrees_with_comparing() {
        for spread in [3u32, 1000, u32::MAX] {
            for scale in [1e-60, 1.0, 1e30, 1e200] {
                for (metric, reversed) in [(Metric::SqEuclidean, false), (Metric::InnerProduct, true)] {
                    let mut neighbours: Vec<Neighbour> = (0..3000u32)
                        .map(|row| {
                            let value = f64::from(row.wrapping_mul(2_654_435_761) % spread) * scale - 5.0 * scale;
                            Neighbour::new::<f32>(metric, value, if reversed { 3000 - row } else { row })
                        })
                        .collect();
                    let mut wanted = neighbours.clone();
                    wanted.sort();
                    sort(&mut neighbours);
                    assert!(neighbours.iter().eq(&wanted));
                }
            }
        }
    }
}
