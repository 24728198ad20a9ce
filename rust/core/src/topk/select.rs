//! The k first neighbours seen so far, under the total order.
//!
//! ```text
//! neighbour ──behind the k-th known?──> dropped
//!           └──> kept ──grown by a quarter of k──> cut: the k first stay, the k-th is known
//! ```
//!
//! A buffer that is cut now and then costs a constant time a neighbour, whatever k is; a heap costs `log k`.

use crate::error::Result;
use crate::order::Neighbour;
use crate::runtime::alloc::try_vec;

/// See the module header.
#[derive(Debug, Clone)]
pub(crate) struct TopK {
    k: usize,
    candidates: Vec<Neighbour>,
    /// The k-th of all neighbours seen up to the last cut.
    kth: Option<Neighbour>,
    /// How many are kept at most.
    capacity: usize,
}

impl TopK {
    /// Room for the first `k >= 1` of at most `most` neighbours.
    pub(crate) fn new(k: usize, most: usize) -> Result<Self> {
        let capacity = Self::capacity_for(k, most);
        Ok(Self { k, candidates: try_vec(capacity, "candidates")?, kth: None, capacity })
    }

    /// The same, where nobody counts from `bar` on.
    pub(crate) fn with_threshold(bar: Option<Neighbour>, k: usize, most: usize) -> Result<Self> {
        Ok(Self { kth: bar, ..Self::new(k, most)? })
    }

    /// The first `k`, of which some are known already: `found`, and the rule that nobody from `bar` on counts.
    pub(crate) fn resume(k: usize, most: usize, found: Self, bar: Neighbour) -> Result<Self> {
        let mut nearest = Self::new(k, most)?;
        nearest.candidates.extend(found.candidates);
        nearest.kth = Some(bar);
        Ok(nearest)
    }

    /// Bytes that the first `k` of `most` take.
    pub(crate) fn bytes(k: usize, most: usize) -> usize {
        Self::capacity_for(k, most).saturating_mul(size_of::<Neighbour>())
    }

    fn capacity_for(k: usize, most: usize) -> usize {
        // A large share of everything is kept whole and cut once.
        if k.saturating_mul(4) >= most { most.max(k) } else { k + (k / 4).max(16) }
    }

    /// Keep `neighbour` if it can belong to the first k.
    #[inline(always)]
    pub(crate) fn push(&mut self, neighbour: Neighbour) {
        if self.kth.is_some_and(|kth| neighbour >= kth) {
            return;
        }
        if self.candidates.len() == self.capacity {
            self.select();
        }
        self.candidates.push(neighbour);
    }

    /// The rank from which on nobody counts any more.
    #[inline(always)]
    pub(crate) fn kth(&self) -> Option<Neighbour> {
        self.kth
    }

    /// Whether a cut would raise the bar enough to be worth its time.
    #[inline(always)]
    pub(crate) fn should_select(&self) -> bool {
        let len = self.candidates.len();
        if self.kth.is_some() { len > self.k + self.k / 4 } else { len >= self.k }
    }

    /// Keep the first k only, if there are k; the k-th is known then.
    pub(crate) fn select(&mut self) {
        if self.candidates.len() >= self.k {
            let (_, kth, _) = self.candidates.select_nth_unstable(self.k - 1);
            self.kth = Some(*kth);
            self.candidates.truncate(self.k);
        }
    }

    /// Take in everything another one holds.
    pub(crate) fn merge(&mut self, other: Self) {
        for neighbour in other.candidates {
            self.push(neighbour);
        }
    }

    /// How many of the first k are known.
    pub(crate) fn len(&self) -> usize {
        self.candidates.len().min(self.k)
    }

    /// Hand over the first k, nearest first.
    pub(crate) fn sorted(mut self, emit: impl FnMut(Neighbour)) {
        if self.candidates.len() > self.k + self.k / 2 {
            self.select();
        }
        super::sort::sorted(self.candidates, self.k, emit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn keeps_the_first_k_under_ties() {
        for most in [6, 1000] {
            let mut nearest = TopK::new(3, most).expect("memory");
            for (value, row) in [(2.0, 0), (1.0, 9), (1.0, 4), (1.0, 7), (3.0, 1), (1.0, 5)] {
                nearest.push(Neighbour::new::<f32>(Metric::SqEuclidean, value, row));
            }
            assert_eq!(nearest.len(), 3);
            let mut rows = Vec::new();
            nearest.sorted(|neighbour| rows.push(neighbour.row()));
            assert_eq!(rows, [4, 5, 7]);
        }
    }

    #[test]
    fn cuts_lose_nothing() {
        for (k, most) in [(1, 5000), (10, 5000), (100, 5000), (1300, 5000), (4999, 5000), (5000, 5000)] {
            let mut nearest = TopK::new(k, most).expect("memory");
            let mut all = Vec::new();
            for row in 0..5000u32 {
                let value = f64::from(row.wrapping_mul(2_654_435_761) % 977);
                let neighbour = Neighbour::new::<f32>(Metric::SqEuclidean, value, row);
                all.push(neighbour);
                nearest.push(neighbour);
                if row % 37 == 0 && nearest.should_select() {
                    nearest.select();
                }
            }
            all.sort();
            let mut found = Vec::new();
            nearest.sorted(|neighbour| found.push(neighbour));
            assert_eq!(found.len(), k);
            assert!(found.iter().zip(&all).all(|(x, y)| x.row() == y.row()));
        }
    }
}
