//! Rows that might be among the k nearest, by bounds of their keys.
//!
//! Selecting the k-th best lower bound costs time in proportion to the reservoir, so it is done only when due: when there
//! are k rows for the first time, and when the reservoir has grown by a quarter of k since. If a selection cannot throw out
//! enough (ties, or a band as wide as the data), the caller settles the reservoir by exact values instead.

/// A row with bounds of its key; keys are larger for nearer rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) lower: f32,
    pub(crate) upper: f32,
    pub(crate) row: u32,
}

/// See the module header.
#[derive(Debug, Clone)]
pub(crate) struct Reservoir {
    k: usize,
    candidates: Vec<Candidate>,
    /// Below this key a row cannot be among the k nearest. The one place where a query's threshold lives; it may start
    /// from a hint: the keys of any k rows are a valid bound.
    floor: f32,
    due: usize,
}

impl Reservoir {
    pub(crate) fn new(k: usize) -> Self {
        Self { k, candidates: Vec::new(), floor: f32::NEG_INFINITY, due: k }
    }

    /// More candidates than this are settled rather than kept.
    pub(crate) fn limit(k: usize) -> usize {
        4 * k + 256
    }

    #[inline(always)]
    pub(crate) fn floor(&self) -> f32 {
        self.floor
    }

    /// Raise the floor to a bound found elsewhere.
    pub(crate) fn raise(&mut self, floor: f32) {
        self.floor = self.floor.max(floor);
    }

    /// Keep a row, unless its key is surely below the floor.
    #[inline(always)]
    pub(crate) fn push(&mut self, candidate: Candidate) {
        #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "a bound that is not a number must be kept")]
        if !(candidate.upper < self.floor) {
            self.candidates.push(candidate);
        }
    }

    /// Whether [`Reservoir::select`] is worth its time.
    #[inline(always)]
    pub(crate) fn is_due(&self) -> bool {
        self.candidates.len() >= self.due
    }

    /// Find the k-th best lower bound, raise the floor to what `floor_of` makes of it, and forget rows below it.
    ///
    /// Returns whether the reservoir should be settled.
    pub(crate) fn select(&mut self, floor_of: impl Fn(f32) -> f32) -> bool {
        if self.candidates.len() >= self.k {
            let (_, kth, _) = self.candidates.select_nth_unstable_by(self.k - 1, |x, y| y.lower.total_cmp(&x.lower));
            let floor = floor_of(kth.lower);
            self.raise(floor);
        }
        let floor = self.floor;
        #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "a bound that is not a number must be kept")]
        self.candidates.retain(|candidate| !(candidate.upper < floor));
        self.due = self.candidates.len().max(self.k) + (self.k / 4).max(16);
        self.candidates.len() > Self::limit(self.k) / 2
    }

    /// Take all candidates that are not below the floor.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = u32> + '_ {
        self.due = (self.k / 4).max(64);
        let floor = self.floor;
        #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "a bound that is not a number must be kept")]
        self.candidates.drain(..).filter(move |candidate| !(candidate.upper < floor)).map(|candidate| candidate.row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(lower: f32, upper: f32, row: u32) -> Candidate {
        Candidate { lower, upper, row }
    }

    #[test]
    fn selection_keeps_every_row_that_reaches_the_floor() {
        let mut reservoir = Reservoir::new(2);
        for (row, key) in [1.0f32, 5.0, 3.0, 2.9, 0.0].into_iter().enumerate() {
            reservoir.push(candidate(key - 0.2, key + 0.2, row as u32));
        }
        assert!(!reservoir.select(|lower| lower));
        assert_eq!(reservoir.floor(), 2.8);
        reservoir.push(candidate(2.0, 2.5, 7));
        reservoir.push(candidate(f32::NEG_INFINITY, f32::NAN, 8));
        let mut rows: Vec<u32> = reservoir.drain().collect();
        rows.sort_unstable();
        assert_eq!(rows, [1, 2, 3, 8]);
    }

    #[test]
    fn ties_ask_to_be_settled() {
        let mut reservoir = Reservoir::new(1);
        for row in 0..200 {
            reservoir.push(candidate(1.0, 1.1, row));
        }
        assert!(reservoir.select(|lower| lower));
    }
}
