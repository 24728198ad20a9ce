//! The k first neighbours seen so far, under the total order.
//!
//! ```text
//! neighbour ──not before the threshold?──> dropped
//!           └──> buffer ──a quarter of k above k──> select: the first k stay, the k-th is the new threshold
//! ```
//!
//! Selecting from a buffer costs constant time per neighbour for any k; a heap costs `log k`.

use crate::error::Result;
use crate::order::Neighbour;
use crate::runtime::Monitor;
use crate::runtime::alloc::{try_extend, try_reserve, try_vec};

/// See the module header.
#[derive(Debug, Clone)]
pub(crate) struct TopK {
    k: usize,
    candidates: Vec<Neighbour>,
    /// The threshold: the k-th of all neighbours seen up to the last selection, or the one given initially. Neighbours that
    /// do not come before it are dropped.
    kth: Option<Neighbour>,
    /// Candidates at which [`TopK::push`] selects.
    capacity: usize,
}

impl TopK {
    /// Room for the first `k >= 1` of at most `most` neighbours.
    pub(crate) fn new(k: usize, most: usize) -> Result<Self> {
        let capacity = Self::capacity_for(k, most);
        Ok(Self { k, candidates: try_vec(capacity, "candidates")?, kth: None, capacity })
    }

    /// [`TopK::new`] with an initial threshold.
    pub(crate) fn with_threshold(threshold: Option<Neighbour>, k: usize, most: usize) -> Result<Self> {
        Ok(Self { kth: threshold, ..Self::new(k, most)? })
    }

    /// The first `k`, beginning with the candidates of `found` and a threshold. The threshold may itself be a candidate.
    pub(crate) fn resume(k: usize, most: usize, found: Self, threshold: Neighbour) -> Result<Self> {
        let mut nearest = Self::new(k, most)?;
        try_extend(&mut nearest.candidates, &found.candidates, "candidates")?;
        nearest.kth = Some(threshold);
        Ok(nearest)
    }

    /// Bytes of a buffer for the first `k` of `most`.
    pub(crate) fn bytes(k: usize, most: usize) -> usize {
        Self::capacity_for(k, most).saturating_mul(size_of::<Neighbour>())
    }

    fn capacity_for(k: usize, most: usize) -> usize {
        // If k is a large share of all neighbours, keep all of them and select once, at the end.
        if k.saturating_mul(4) >= most { most.max(k) } else { k + (k / 4).max(16) }
    }

    /// Add `neighbour` if it comes before the threshold.
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

    /// The threshold, if there is one: no neighbour at or behind it is among the first k.
    #[inline(always)]
    pub(crate) fn kth(&self) -> Option<Neighbour> {
        self.kth
    }

    /// Whether a selection would improve the threshold enough to pay.
    #[inline(always)]
    pub(crate) fn should_select(&self) -> bool {
        let len = self.candidates.len();
        if self.kth.is_some() { len > self.k + self.k / 4 } else { len >= self.k }
    }

    /// Drop all but the first k, if there are k; the k-th becomes the threshold.
    pub(crate) fn select(&mut self) {
        if self.candidates.len() >= self.k {
            let (_, kth, _) = self.candidates.select_nth_unstable(self.k - 1);
            self.kth = Some(*kth);
            self.candidates.truncate(self.k);
        }
    }

    /// Add the candidates of `other`: all at once, then one selection. A buffer without room beyond k would select for each.
    pub(crate) fn merge(&mut self, other: Self) -> Result<()> {
        try_reserve(&mut self.candidates, other.candidates.len(), "candidates")?;
        let kth = self.kth;
        self.candidates.extend(other.candidates.into_iter().filter(|neighbour| kth.is_none_or(|kth| *neighbour < kth)));
        if self.candidates.len() > self.k {
            self.select();
        }
        Ok(())
    }

    /// Number of candidates, at most k.
    pub(crate) fn len(&self) -> usize {
        self.candidates.len().min(self.k)
    }

    /// Pass the first k to `emit`, nearest first.
    pub(crate) fn sorted(mut self, monitor: &Monitor, emit: impl FnMut(Neighbour)) -> Result<()> {
        if self.candidates.len() > self.k + self.k / 2 {
            self.select();
        }
        super::sort::sorted(self.candidates, self.k, monitor, emit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn the_first_k_include_ties_of_the_lowest_rows() {
        for most in [6, 1000] {
            let mut nearest = TopK::new(3, most).expect("memory");
            for (value, row) in [(2.0, 0), (1.0, 9), (1.0, 4), (1.0, 7), (3.0, 1), (1.0, 5)] {
                nearest.push(Neighbour::new::<f32>(Metric::SqEuclidean, value, row));
            }
            assert_eq!(nearest.len(), 3);
            let mut rows = Vec::new();
            nearest.sorted(&Monitor::new(), |neighbour| rows.push(neighbour.row())).expect("memory");
            assert_eq!(rows, [4, 5, 7]);
        }
    }

    #[test]
    fn selection_loses_no_neighbour() {
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
            nearest.sorted(&Monitor::new(), |neighbour| found.push(neighbour)).expect("memory");
            assert_eq!(found.len(), k);
            assert!(found.iter().zip(&all).all(|(x, y)| x.row() == y.row()));
        }
    }
}
