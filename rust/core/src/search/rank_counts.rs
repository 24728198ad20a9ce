//! Counting the references before each target of a query, from the keys of a filter.
//!
//! ```text
//! block of keys ──largest key, largest error──> behind all targets: nothing to count, the usual case
//! key, its error ──> lower and upper bound
//!   few targets:   each limit is compared with sixteen bounds at once    before[t] = rows with low > limit
//!   many targets:  low ──bucket──> first candidate target ──a few steps──> first target it is before; one count there
//!   in both cases: a row between the limits of some target is undecided
//! ```
//!
//! Limits decrease from the nearest target to the farthest; where rounding breaks that order, they are adjusted to the safe
//! side. So a row that is surely before a target is surely before all targets behind it, and one comparison decides whether
//! it is surely behind the others.

use crate::arch::level::{Simd, multiversion};
use crate::error::Result;
use crate::filter::bound::Bound;
use crate::filter::panels::KeyErrors;
use crate::runtime::alloc::{try_filled, try_vec};

/// Keys of one block: they and their bounds stay in the first-level cache.
pub(crate) const BLOCK: usize = 256;

/// Bounds that are compared at once: the lanes of the widest vector.
const LANES: usize = 16;

/// Up to this number of targets each limit is compared with all bounds. A comparison takes about an eighth of a cycle per row
/// and target, a bucket search about ten cycles per row.
const COMPARED_TARGETS: usize = 64;

/// Most buckets; [`Buckets::of`] needs fewer than `2^23`.
const MOST_BUCKETS: usize = 1 << 20;

/// Steps from the start of a bucket that are taken without a branch: with four buckets per target, more are rare.
const STEPS: usize = 2;

/// Lower and upper bounds of a block of keys. Never NaN: an unknown key has infinite bounds.
pub(crate) struct Bounds {
    pub(crate) low: [f32; BLOCK],
    pub(crate) high: [f32; BLOCK],
}

impl Bounds {
    pub(crate) fn new() -> Self {
        Self { low: [0.0; BLOCK], high: [0.0; BLOCK] }
    }

    /// Make a row uncounted: surely behind all targets.
    pub(crate) fn exclude(&mut self, at: usize) {
        self.low[at] = f32::NEG_INFINITY;
        self.high[at] = f32::NEG_INFINITY;
    }
}

/// The limits of all targets of a query: a row is surely before target `t` if the lower bound of its key is above the
/// target's limit in `before`, and surely behind it if the upper bound is below its limit in `behind`.
pub(crate) struct Limits {
    /// One per target, decreasing; then NaN as sentinels, which end a search.
    before: Vec<f32>,
    /// Of target `t` at `t + 1`, decreasing; the first is infinity, so that `behind[t]` is the limit of the target before.
    behind: Vec<f32>,
    buckets: Option<Buckets>,
}

/// The purpose of limits in [`crate::Error::OutOfMemory`].
const LIMITS: &str = "the limits of targets";

/// An index of many limits: where to start searching for a bound.
struct Buckets {
    base: f32,
    scale: f32,
    /// For each bucket, the first target whose limit is not in an earlier bucket.
    starts: Vec<u32>,
}

impl Buckets {
    fn new(before: &[f32]) -> Result<Self> {
        let finite = || before.iter().copied().filter(|limit| limit.is_finite());
        let (base, last) = (finite().next().unwrap_or(0.0), finite().next_back().unwrap_or(0.0));
        let count = (4 * before.len()).next_power_of_two().min(MOST_BUCKETS);
        let scale = (count - 1) as f32 / (base - last);
        let scale = if scale.is_finite() { scale } else { 0.0 };
        let mut buckets = Self { base, scale, starts: try_filled(0, count, LIMITS)? };
        let mut target = 0;
        for bucket in 0..count {
            while before.get(target).is_some_and(|limit| buckets.of(*limit) < bucket) {
                target += 1;
            }
            buckets.starts[bucket] = target as u32;
        }
        Ok(buckets)
    }

    /// The bucket of a bound or a limit; lower numbers have later buckets. Every step is monotone, rounding included, so that
    /// all limits in earlier buckets than a bound are above it.
    #[inline(always)]
    fn of(&self, bound: f32) -> usize {
        const WHOLE: f32 = (1u32 << 23) as f32;
        // `max` returns the other operand for NaN.
        let place = ((self.base - bound) * self.scale).max(0.0).min((self.starts.len() - 1) as f32);
        // The low bits of the sum are the rounded number: cheaper than a conversion, and it vectorises.
        ((place + WHOLE).to_bits() & ((1 << 23) - 1)) as usize
    }
}

impl Limits {
    /// - `bound`: of the query's keys
    /// - `edges`: for each target, in order, the last float64 value that ranks before it and the last that does not rank behind
    pub(crate) fn new(bound: &Bound, edges: impl ExactSizeIterator<Item = (f64, f64)>) -> Result<Self> {
        Self::of(edges.map(|(before, at)| (bound.accept_above(before), bound.reject_below(at))))
    }

    /// From the limits of each target, nearest first: above the first a row is surely before it, below the second surely
    /// behind.
    fn of(limits: impl ExactSizeIterator<Item = (f32, f32)>) -> Result<Self> {
        let count = limits.len();
        let (mut before, mut behind) = (try_vec(count + STEPS + 1, LIMITS)?, try_vec(count + 1, LIMITS)?);
        let mut lowest = f32::INFINITY;
        behind.push(lowest);
        for (last_before, last_behind) in limits {
            lowest = lowest.min(last_behind);
            before.push(last_before);
            behind.push(lowest);
        }
        for t in (1..count).rev() {
            before[t - 1] = before[t - 1].max(before[t]);
        }
        let buckets = if count > COMPARED_TARGETS { Some(Buckets::new(&before)?) } else { None };
        // No bound is at most NaN.
        before.resize(count + STEPS + 1, f32::NAN);
        Ok(Self { before, behind, buckets })
    }

    /// Whether a row is counted only at the first target that it is before, instead of at each.
    pub(crate) fn counts_once(&self) -> bool {
        self.buckets.is_some()
    }

    pub(crate) fn targets(&self) -> usize {
        self.behind.len() - 1
    }

    /// Whether a row with these bounds may be before or behind target `t`.
    #[inline(always)]
    pub(crate) fn leave_undecided(&self, t: usize, low: f32, high: f32) -> bool {
        (low <= self.before[t]) & (high >= self.behind[t + 1])
    }

    /// Whether all rows with upper bounds of at most `highest` are surely behind all targets. Not if it is NaN.
    #[inline(always)]
    pub(crate) fn are_behind_all(&self, highest: f32) -> bool {
        highest < self.behind[self.targets()]
    }

    /// Count the rows with these bounds, and append the positions of undecided rows to `undecided`.
    pub(crate) fn count(&self, simd: Simd, bounds: &Bounds, before: &mut [u32], undecided: &mut Vec<u32>) {
        let highest = highest(simd, bounds);
        if self.are_behind_all(highest) {
            return;
        }
        match &self.buckets {
            None => count_each(simd, bounds, self, highest, before, undecided),
            Some(buckets) => count_once(simd, bounds, self, buckets, before, undecided),
        }
    }
}

multiversion! {
    /// The largest key; infinity if one is unknown.
    pub(super) fn largest(keys: &[f32]) -> f32 {
        let (mut largest, mut unknown) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
        let (whole, rest) = keys.as_chunks::<LANES>();
        for keys in whole {
            for l in 0..LANES {
                largest[l] = if keys[l] > largest[l] { keys[l] } else { largest[l] };
                unknown[l] |= u32::from(keys[l].is_nan());
            }
        }
        for (l, key) in rest.iter().enumerate() {
            largest[l] = largest[l].max(*key);
            unknown[l] |= u32::from(key.is_nan());
        }
        if unknown.iter().any(|unknown| *unknown != 0) {
            return f32::INFINITY;
        }
        largest.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

multiversion! {
    /// The bounds of up to [`BLOCK`] keys, one error for each [`GROUP`]; minus infinity in places without a key.
    ///
    /// Bounds are rounded to nearest. That is safe, since they are compared with float32 limits: rounding is monotone and
    /// does not change the limits.
    pub(super) fn bound(keys: &[f32], errors: &Errors, bounds: &mut Bounds) {
        let mut places = bounds.low.as_chunks_mut::<GROUP>().0.iter_mut().zip(bounds.high.as_chunks_mut::<GROUP>().0);
        let (whole, rest) = keys.as_chunks::<GROUP>();
        for ((keys, error), (low, high)) in whole.iter().zip(errors).zip(&mut places) {
            for n in 0..GROUP {
                // `max` and `min` take the infinity where the other is NaN.
                low[n] = (keys[n] - error).max(f32::NEG_INFINITY);
                high[n] = (keys[n] + error).min(f32::INFINITY);
            }
        }
        let mut rest = rest.iter();
        for ((low, high), error) in places.zip(&errors[whole.len().min(errors.len())..]) {
            for n in 0..GROUP {
                let key = rest.next();
                low[n] = key.map_or(f32::NEG_INFINITY, |key| (key - error).max(f32::NEG_INFINITY));
                high[n] = key.map_or(f32::NEG_INFINITY, |key| (key + error).min(f32::INFINITY));
            }
        }
    }
}

multiversion! {
    /// The largest upper bound.
    fn highest(bounds: &Bounds) -> f32 {
        let mut highest = [f32::NEG_INFINITY; LANES];
        for high in bounds.high.as_chunks::<LANES>().0 {
            for l in 0..LANES {
                highest[l] = if high[l] > highest[l] { high[l] } else { highest[l] };
            }
        }
        highest.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

multiversion! {
    /// Count each row at every target that it is surely before.
    fn count_each(bounds: &Bounds, limits: &Limits, highest: f32, before: &mut [u32], undecided: &mut Vec<u32>) {
        let mut is_undecided = [0u32; BLOCK];
        let mut any = 0;
        for (t, before) in before.iter_mut().enumerate() {
            let (last_before, last_at) = (limits.before[t], limits.behind[t + 1]);
            if highest < last_at {
                continue;
            }
            let (mut not_before, mut between) = (0, 0);
            for i in 0..BLOCK {
                let left = bounds.low[i] <= last_before;
                not_before += u32::from(left);
                between |= u32::from(left & (bounds.high[i] >= last_at));
            }
            *before += BLOCK as u32 - not_before;
            if between != 0 {
                any = 1;
                for i in 0..BLOCK {
                    is_undecided[i] |= u32::from((bounds.low[i] <= last_before) & (bounds.high[i] >= last_at));
                }
            }
        }
        if any != 0 {
            undecided.extend((0..BLOCK as u32).filter(|at| is_undecided[*at as usize] != 0));
        }
    }
}

multiversion! {
    /// Count each row at the first target that it is surely before, if it is surely behind all targets before that one.
    fn count_once(bounds: &Bounds, limits: &Limits, buckets: &Buckets, before: &mut [u32], undecided: &mut Vec<u32>) {
        let mut numbers = [0u32; BLOCK];
        for i in 0..BLOCK {
            numbers[i] = buckets.of(bounds.low[i]) as u32;
        }
        for i in 0..BLOCK {
            let (low, high) = (bounds.low[i], bounds.high[i]);
            let mut target = buckets.starts[numbers[i] as usize] as usize;
            for _ in 0..STEPS {
                target += usize::from(low <= limits.before[target]);
            }
            if low <= limits.before[target] {
                target += limits.before[target..limits.targets()].partition_point(|limit| low <= *limit);
            }
            if high < limits.behind[target] {
                if let Some(before) = before.get_mut(target) {
                    *before += 1;
                }
            } else {
                undecided.push(i as u32);
            }
        }
    }
}

/// Neighbouring keys that share an error: the width of the narrowest panel.
pub(super) const GROUP: usize = 8;

/// One error for each [`GROUP`] of the keys of a block.
pub(super) type Errors = [f32; BLOCK / GROUP];

/// The largest error of consecutive rows; infinity if a panel has no bound.
pub(super) fn largest_error(rows: &[u32], key_errors: KeyErrors<'_>) -> f32 {
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return f32::INFINITY };
    let shift = key_errors.panel_rows.trailing_zeros();
    let errors = (first >> shift..=last >> shift).map(|panel| key_errors.of_panel(panel as usize));
    errors.fold(0.0, |largest, error| if error.is_nan() { f32::INFINITY } else { f32::max(largest, error) })
}

/// The errors of the keys of a block. Where the query's own row is missing, a group may reach into the next panel: it takes
/// the larger of the two errors, which is on the safe side.
pub(super) fn fill_errors(rows: &[u32], key_errors: KeyErrors<'_>, errors: &mut Errors) {
    // A shift: a division for each group would take longer than the rest.
    let shift = key_errors.panel_rows.trailing_zeros();
    let (mut last, mut error) = (u32::MAX, f32::NAN);
    for (rows, group) in rows.chunks(GROUP).zip(errors) {
        let (panel, end) = (rows[0] >> shift, rows[rows.len() - 1] >> shift);
        if panel != last {
            (last, error) = (panel, key_errors.of_panel(panel as usize));
        }
        *group = error;
        if end != panel {
            let next = key_errors.of_panel(end as usize);
            // NaN, of a panel without a bound, counts as the larger.
            *group = if error > next || error.is_nan() { error } else { next };
        }
    }
}

/// The position of `row` among consecutive rows, of which at most one (the query's own) is missing.
pub(super) fn position(rows: &[u32], row: u32) -> usize {
    let at = (row - rows[0]) as usize;
    if rows.get(at) == Some(&row) { at } else { at - 1 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arch::level::Level;

    /// Limits of `count` targets, about `spread` apart or equal, with a gap of twice `width` between the two limits of each.
    fn limits(numbers: &[f32], count: usize, spread: f32, width: f32) -> Vec<(f32, f32)> {
        let mut keys: Vec<f32> = (0..count).map(|t| (numbers[t % numbers.len()] * spread * t as f32).round()).collect();
        keys.sort_unstable_by(|x, y| y.total_cmp(x));
        keys.into_iter().map(|key| (key + width, key - width)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// Both methods count the rows that the limits decide.
        #[test]
        fn every_row_is_counted_by_the_limits(
            numbers in prop::collection::vec(-1.0f32..1.0, 1..50),
            count in prop_oneof![0usize..=3, 60usize..=70, 100usize..=400],
            spread in prop_oneof![Just(0.0f32), Just(0.1), Just(1.0), Just(1e3), Just(1e30)],
            width in prop_oneof![Just(0.0f32), Just(0.5), Just(3.0)],
            unsure in prop::option::of(0usize..400),
            error in prop_oneof![Just(0.0f32), Just(0.5), Just(2.0)],
        ) {
            let mut given = limits(&numbers, count, spread, width);
            if let Some(unsure) = unsure.and_then(|t| given.get_mut(t)) {
                *unsure = (f32::INFINITY, f32::NEG_INFINITY);
            }
            let limits = Limits::of(given.into_iter()).expect("memory");
            let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0];
            let keys: Vec<f32> = (0..BLOCK)
                .map(|i| match i {
                    0..6 => special[i],
                    _ => (numbers[i % numbers.len()] * spread * (i * 7 % 400) as f32).round() + (i % 3) as f32 * 0.5,
                })
                .collect();
            let keys = &keys[..BLOCK - 8];
            let mut errors = [error; BLOCK / GROUP];
            (errors[0], errors[3]) = (f32::NAN, f32::INFINITY);
            for simd in Level::available().into_iter().filter_map(Simd::new) {
                let (mut bounds, mut before, mut undecided) = (Bounds::new(), vec![0u32; count], Vec::new());
                bound(simd, keys, &errors, &mut bounds);
                prop_assert!(largest(simd, keys) == f32::INFINITY, "a key is unknown");
                let known = &keys[1..keys.len() - numbers.len() % LANES];
                prop_assert_eq!(largest(simd, known), known.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                bounds.exclude(100);
                limits.count(simd, &bounds, &mut before, &mut undecided);
                if limits.counts_once() {
                    let mut sum = 0;
                    for before in &mut before {
                        sum += *before;
                        *before = sum;
                    }
                }
                let mut wanted = vec![0u32; count];
                let mut left = Vec::new();
                for i in 0..BLOCK {
                    let (low, high) = (bounds.low[i], bounds.high[i]);
                    let missing = i == 100 || i >= keys.len();
                    prop_assert!(low <= high && (missing || i >= 8 || high == f32::INFINITY));
                    prop_assert!(!missing || high == f32::NEG_INFINITY);
                    let is_undecided = (0..count).any(|t| limits.leave_undecided(t, low, high));
                    if is_undecided {
                        left.push(i as u32);
                    }
                    for t in 0..count {
                        let counts = if limits.counts_once() { !is_undecided } else { true };
                        wanted[t] += u32::from(counts && low > limits.before[t]);
                    }
                }
                if limits.counts_once() {
                    // A row of unknown key may be undecided although it is before all targets.
                    prop_assert!(left.iter().all(|row| undecided.contains(row)));
                    prop_assert!(undecided.iter().all(|&row| left.contains(&row) || bounds.high[row as usize] == f32::INFINITY));
                    for row in undecided.iter().filter(|row| !left.contains(row)) {
                        for t in 0..count {
                            wanted[t] -= u32::from(bounds.low[*row as usize] > limits.before[t]);
                        }
                    }
                } else {
                    prop_assert_eq!(&undecided, &left);
                }
                prop_assert_eq!(before, wanted);
            }
        }
    }
}
