//! Counting the references before each target of one query, from the keys of a filter.
//!
//! ```text
//! key, its error ──> lower and upper bound
//!   few targets:   each limit against sixteen bounds at once             before[t] = rows with low > limit
//!   many:          low ──bucket──> first targets it may be before ──a few steps──> place; one count at it
//!   either way:    a row between the limits of some target is open
//! ```
//!
//! Limits fall from the nearest target to the farthest, made so where rounding would have it otherwise: then a row that is
//! surely before a target is so before all behind it, and one comparison says whether it is surely behind all others.

use crate::arch::level::{Simd, multiversion};
use crate::filter::bound::Bound;

/// Keys that are counted in one go: they and their bounds stay in the first-level cache.
pub(crate) const BLOCK: usize = 256;

/// Bounds that are looked at side by side.
const LANES: usize = 16;

/// Up to this many targets each limit is held against all bounds: a limit takes about an eighth of a cycle for each row, a
/// place about ten.
const COMPARED_TARGETS: usize = 64;

/// Buckets at most; [`Places::bucket`] needs fewer than 2 to the 23.
const MOST_BUCKETS: usize = 1 << 20;

/// Steps from the beginning of a bucket that are taken without a branch.
const STEPS: usize = 2;

/// Bounds of some neighbouring keys; never NaN, an unknown key has infinite ones.
pub(crate) struct Bounds {
    pub(crate) low: [f32; BLOCK],
    pub(crate) high: [f32; BLOCK],
}

impl Bounds {
    pub(crate) fn new() -> Self {
        Self { low: [0.0; BLOCK], high: [0.0; BLOCK] }
    }

    /// A row that is not counted: surely behind all targets.
    pub(crate) fn exclude(&mut self, at: usize) {
        self.low[at] = f32::NEG_INFINITY;
        self.high[at] = f32::NEG_INFINITY;
    }
}

/// What keys prove about the targets of a query: a row is surely before target `t` if the lower bound of its key is above
/// `before[t]`, and surely behind it if the upper bound is below `behind[t]`.
pub(crate) struct Limits {
    /// One a target, falling; and some that stop a search at the end.
    before: Vec<f32>,
    /// `behind[t]` at `t + 1`, falling; infinity first.
    behind: Vec<f32>,
    places: Option<Places>,
}

/// Where to begin among many limits.
struct Places {
    base: f32,
    scale: f32,
    /// For each bucket, the first target whose limit is not in an earlier one.
    starts: Vec<u32>,
}

impl Places {
    fn new(before: &[f32]) -> Self {
        let finite = || before.iter().copied().filter(|limit| limit.is_finite());
        let (base, last) = (finite().next().unwrap_or(0.0), finite().next_back().unwrap_or(0.0));
        let buckets = (4 * before.len()).next_power_of_two().min(MOST_BUCKETS);
        let scale = (buckets - 1) as f32 / (base - last);
        let mut places = Self { base, scale: if scale.is_finite() { scale } else { 0.0 }, starts: vec![0; buckets] };
        let mut target = 0;
        for bucket in 0..buckets {
            while before.get(target).is_some_and(|limit| places.bucket(*limit) < bucket) {
                target += 1;
            }
            places.starts[bucket] = target as u32;
        }
        places
    }

    /// The bucket of a bound or a limit: the lower, the later. Every step is monotone, rounding included.
    #[inline(always)]
    fn bucket(&self, bound: f32) -> usize {
        const WHOLE: f32 = (1u32 << 23) as f32;
        // `max` takes the other number for one that is not a number.
        let place = ((self.base - bound) * self.scale).max(0.0).min((self.starts.len() - 1) as f32);
        // The last bits of the sum are the rounded place.
        ((place + WHOLE).to_bits() & ((1 << 23) - 1)) as usize
    }
}

impl Limits {
    /// - `edges`: for each target in its order the last float64 values that rank before it, and not behind it
    /// - `floor`: what turns values into keys for this query
    pub(crate) fn new(floor: &Bound, edges: impl ExactSizeIterator<Item = (f64, f64)>) -> Self {
        Self::of(edges.map(|(before, at)| (floor.accept_above(before), floor.reject_below(at))))
    }

    /// From the limits of each target: above the first a row is surely before it, below the second surely behind.
    fn of(limits: impl ExactSizeIterator<Item = (f32, f32)>) -> Self {
        let count = limits.len();
        let (mut before, mut behind) = (Vec::with_capacity(count + STEPS + 1), Vec::with_capacity(count + 1));
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
        let places = (count > COMPARED_TARGETS).then(|| Places::new(&before));
        // No bound is at most this.
        before.resize(count + STEPS + 1, f32::NAN);
        Self { before, behind, places }
    }

    /// Whether a row stands in one place among the targets, counted at the first it is before; else it counts at each.
    pub(crate) fn by_place(&self) -> bool {
        self.places.is_some()
    }

    pub(crate) fn targets(&self) -> usize {
        self.behind.len() - 1
    }

    /// Whether bounds prove nothing about target `t`.
    #[inline(always)]
    pub(crate) fn leave_open(&self, t: usize, low: f32, high: f32) -> bool {
        (low <= self.before[t]) & (high >= self.behind[t + 1])
    }

    /// Count the rows with these bounds, and append to `open` the places of those that the bounds do not decide.
    pub(crate) fn count(&self, simd: Simd, bounds: &Bounds, before: &mut [u32], open: &mut Vec<u32>) {
        let highest = highest(simd, bounds);
        if highest < self.behind[self.targets()] {
            // Behind all targets: so it is with most blocks where targets are near.
            return;
        }
        match &self.places {
            None => compare(simd, bounds, self, highest, before, open),
            Some(places) => place(simd, bounds, self, places, before, open),
        }
    }
}

multiversion! {
    /// The bounds of up to [`BLOCK`] keys, one error each; minus infinity where there is no key.
    ///
    /// A bound may be rounded: no rounded number is on the other side of a float32 number than the exact one was.
    pub(crate) fn bound(keys: &[f32], errors: &[f32], bounds: &mut Bounds) {
        let ((keys, last_keys), (errors, last_errors)) = (keys.as_chunks::<LANES>(), errors.as_chunks::<LANES>());
        let lows = bounds.low.as_chunks_mut::<LANES>().0.iter_mut();
        let mut places = lows.zip(bounds.high.as_chunks_mut::<LANES>().0);
        for ((keys, errors), (low, high)) in keys.iter().zip(errors).zip(&mut places) {
            for n in 0..LANES {
                // `max` and `min` take the infinity where the other is NaN.
                low[n] = (keys[n] - errors[n]).max(f32::NEG_INFINITY);
                high[n] = (keys[n] + errors[n]).min(f32::INFINITY);
            }
        }
        let mut rest = last_keys.iter().zip(last_errors);
        for (low, high) in places {
            for n in 0..LANES {
                let (key, error) = rest.next().map_or((f32::NEG_INFINITY, 0.0), |(key, error)| (*key, *error));
                low[n] = (key - error).max(f32::NEG_INFINITY);
                high[n] = (key + error).min(f32::INFINITY);
            }
        }
    }
}

multiversion! {
    /// The highest of the upper bounds.
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
    /// Add to `before` the rows that are surely before each target.
    fn compare(bounds: &Bounds, limits: &Limits, highest: f32, before: &mut [u32], open: &mut Vec<u32>) {
        let mut is_open = [0u32; BLOCK];
        let mut any = 0;
        for (t, before) in before.iter_mut().enumerate() {
            let (last_before, last_at) = (limits.before[t], limits.behind[t + 1]);
            if highest < last_at {
                continue;
            }
            let (mut not_before, mut undecided) = (0, 0);
            for i in 0..BLOCK {
                let left = bounds.low[i] <= last_before;
                not_before += u32::from(left);
                undecided |= u32::from(left & (bounds.high[i] >= last_at));
            }
            *before += BLOCK as u32 - not_before;
            if undecided != 0 {
                any = 1;
                for i in 0..BLOCK {
                    is_open[i] |= u32::from((bounds.low[i] <= last_before) & (bounds.high[i] >= last_at));
                }
            }
        }
        if any != 0 {
            open.extend((0..BLOCK as u32).filter(|at| is_open[*at as usize] != 0));
        }
    }
}

multiversion! {
    /// Count each row at the first target that it is surely before, if it is surely behind all others.
    fn place(bounds: &Bounds, limits: &Limits, places: &Places, before: &mut [u32], open: &mut Vec<u32>) {
        let mut buckets = [0u32; BLOCK];
        for i in 0..BLOCK {
            buckets[i] = places.bucket(bounds.low[i]) as u32;
        }
        for i in 0..BLOCK {
            let (low, high) = (bounds.low[i], bounds.high[i]);
            let mut target = places.starts[buckets[i] as usize] as usize;
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
                open.push(i as u32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arch::level::Level;

    /// Of `count` targets, `spread` apart from each other or equal, `width` between the two.
    fn limits(numbers: &[f32], count: usize, spread: f32, width: f32) -> Vec<(f32, f32)> {
        let mut keys: Vec<f32> = (0..count).map(|t| (numbers[t % numbers.len()] * spread * t as f32).round()).collect();
        keys.sort_unstable_by(|x, y| y.total_cmp(x));
        keys.into_iter().map(|key| (key + width, key - width)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        /// What either way of counting says of each target is what the limits say.
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
            let limits = Limits::of(given.into_iter());
            let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0];
            let keys: Vec<f32> = (0..BLOCK)
                .map(|i| match i {
                    0..6 => special[i],
                    _ => (numbers[i % numbers.len()] * spread * (i * 7 % 400) as f32).round() + (i % 3) as f32 * 0.5,
                })
                .collect();
            let keys = &keys[..BLOCK - 8];
            let mut errors = vec![error; BLOCK];
            errors[..8].fill(f32::NAN);
            errors[24..32].fill(f32::INFINITY);
            for simd in Level::available().into_iter().filter_map(Simd::new) {
                let (mut bounds, mut before, mut open) = (Bounds::new(), vec![0u32; count], Vec::new());
                bound(simd, keys, &errors, &mut bounds);
                bounds.exclude(100);
                limits.count(simd, &bounds, &mut before, &mut open);
                if limits.by_place() {
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
                    let is_open = (0..count).any(|t| limits.leave_open(t, low, high));
                    if is_open {
                        left.push(i as u32);
                    }
                    for t in 0..count {
                        let counts = if limits.by_place() { !is_open } else { true };
                        wanted[t] += u32::from(counts && low > limits.before[t]);
                    }
                }
                if limits.by_place() {
                    // A row of unknown key may be left open though it is before all.
                    prop_assert!(left.iter().all(|row| open.contains(row)));
                    prop_assert!(open.iter().all(|&row| left.contains(&row) || bounds.high[row as usize] == f32::INFINITY));
                    for row in open.iter().filter(|row| !left.contains(row)) {
                        for t in 0..count {
                            wanted[t] -= u32::from(bounds.low[*row as usize] > limits.before[t]);
                        }
                    }
                } else {
                    prop_assert_eq!(&open, &left);
                }
                prop_assert_eq!(before, wanted);
            }
        }
    }
}
