//! Sorting neighbours: a comparison sort for few, a radix sort for many.
//!
//! Ranks are nearly always float32 numbers. A neighbour then fits one 64-bit integer, the rank above the row, whose order is
//! the total order.

use crate::error::Result;
use crate::order::Neighbour;
use crate::runtime::alloc::{try_vec, try_zeroed};
use crate::runtime::{Monitor, POLLED};

/// The purpose of the buffers in [`crate::Error::OutOfMemory`].
const SORTED: &str = "the sorted neighbours";

/// Below this number of neighbours a comparison sort is faster.
const FEW: usize = 4096;

/// Bits of one radix pass, and values of one digit: the counters of a pass fit in the first-level cache.
const BITS: u32 = 11;
const DIGITS: usize = 1 << BITS;

/// Pass the first `k` neighbours to `emit`, in the total order.
pub(crate) fn sorted(
    mut neighbours: Vec<Neighbour>,
    k: usize,
    monitor: &Monitor,
    mut emit: impl FnMut(Neighbour),
) -> Result<()> {
    let mut keys = try_vec(neighbours.len(), SORTED)?;
    let narrow =
        |neighbour: &Neighbour| Some(u64::from(neighbour.narrow_bits()?) << u32::BITS | u64::from(neighbour.row()));
    for neighbours in neighbours.chunks(POLLED) {
        monitor.check()?;
        keys.extend(neighbours.iter().map_while(narrow));
    }
    if keys.len() < neighbours.len() {
        neighbours.sort_unstable();
        neighbours.into_iter().take(k).for_each(emit);
        return Ok(());
    }
    if keys.len() < FEW {
        keys.sort_unstable();
        keys.into_iter().take(k).map(of_key).for_each(emit);
        return Ok(());
    }
    if neighbours.is_sorted_by_key(|neighbour| neighbour.row()) {
        // Radix passes are stable: neighbours that arrive by row stay by row among equal ranks, so the row bits need no pass.
        radix(&mut keys, u32::BITS, monitor)?;
    } else {
        radix(&mut keys, 0, monitor)?;
    }
    drop(neighbours);
    for keys in keys[..k.min(keys.len())].chunks(POLLED) {
        monitor.check()?;
        keys.iter().copied().map(of_key).for_each(&mut emit);
    }
    Ok(())
}

fn of_key(key: u64) -> Neighbour {
    Neighbour::from_narrow((key >> u32::BITS) as u32, key as u32)
}

/// Sort by the bits from `low` up, least significant digit first.
fn radix(keys: &mut Vec<u64>, low: u32, monitor: &Monitor) -> Result<()> {
    const PASSES: usize = u64::BITS.div_ceil(BITS) as usize;
    let digit = |key: u64, pass: usize| (key >> (low + pass as u32 * BITS)) as usize % DIGITS;
    let passes = (u64::BITS - low).div_ceil(BITS) as usize;
    let mut ends = [[0u32; DIGITS]; PASSES];
    for keys in keys.chunks(POLLED) {
        monitor.check()?;
        for &key in keys {
            for (pass, ends) in ends.iter_mut().enumerate().take(passes) {
                ends[digit(key, pass)] += 1;
            }
        }
    }
    let mut other = try_zeroed::<u64>(keys.len(), SORTED)?;
    for (pass, ends) in ends.iter_mut().enumerate().take(passes) {
        if ends.iter().any(|&count| count as usize == keys.len()) {
            continue;
        }
        let mut start = 0;
        for end in ends.iter_mut() {
            start += std::mem::replace(end, start);
        }
        for keys in keys.chunks(POLLED) {
            monitor.check()?;
            for &key in keys {
                let at = &mut ends[digit(key, pass)];
                other[*at as usize] = key;
                *at += 1;
            }
        }
        std::mem::swap(keys, &mut other);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn the_radix_sort_agrees_with_the_comparison_sort() {
        for count in [3000u32, 9000] {
            for spread in [3u32, 1000, u32::MAX] {
                for scale in [1e-60, 1.0, 1e30, 1e200] {
                    for (metric, reversed) in [(Metric::SqEuclidean, false), (Metric::InnerProduct, true)] {
                        let neighbours: Vec<Neighbour> = (0..count)
                            .map(|row| {
                                let value = f64::from(row.wrapping_mul(2_654_435_761) % spread) * scale - 5.0 * scale;
                                Neighbour::new::<f32>(metric, value, if reversed { count - row } else { row })
                            })
                            .collect();
                        let mut wanted = neighbours.clone();
                        wanted.sort();
                        let mut found = Vec::new();
                        sorted(neighbours, 2500, &Monitor::new(), |neighbour| found.push(neighbour)).expect("memory");
                        assert!(found.iter().eq(&wanted[..2500]));
                    }
                }
            }
        }
    }
}
