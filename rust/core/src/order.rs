//! The total order of results: by ranked value, then by row number.
//!
//! Neighbours are compared as [`Neighbour`]s only, so the tie rule exists once.

use std::cmp::Ordering;

use crate::matrix::{Output, Precision};
use crate::metric::Metric;

/// A row and its rank. Smaller is nearer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neighbour {
    /// The ranked value, negated for similarities. Never NaN.
    rank: f64,
    row: u32,
}

/// The ranking of the values of a search.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranking {
    precision: Precision,
    largest_first: bool,
}

impl Ranking {
    /// The ranking of a metric's values for results of a precision.
    pub(crate) fn new(metric: Metric, precision: Precision) -> Self {
        Self { precision, largest_first: metric.largest_first() }
    }

    /// Half the distance from 1 to the next number of the output type.
    pub(crate) fn unit_roundoff(self) -> f64 {
        self.precision.unit_roundoff()
    }

    /// The neighbour `row` with this float64 `value`.
    #[inline(always)]
    pub(crate) fn neighbour(self, value: f64, row: u32) -> Neighbour {
        debug_assert!(!value.is_nan(), "finite rows have no NaN distance");
        let ranked = self.precision.ranked(value);
        // 0 - x instead of -x, and x + 0: a zero is always +0, with one order and one byte pattern.
        let rank = if self.largest_first { 0.0 - ranked } else { ranked + 0.0 };
        Neighbour { rank, row }
    }

    /// The ranked value, in float64.
    #[inline(always)]
    pub(crate) fn value(self, neighbour: Neighbour) -> f64 {
        if self.largest_first { 0.0 - neighbour.rank } else { neighbour.rank }
    }

    /// By value alone, the last float64 value that ranks before this neighbour, and the last that does not rank behind it.
    pub(crate) fn edges(self, neighbour: Neighbour) -> (f64, f64) {
        let (before, at) = self.precision.edges_of_rank(neighbour.rank);
        if self.largest_first { (-before, -at) } else { (before, at) }
    }
}

impl Neighbour {
    /// The neighbour `row` with this float64 `value`, for results of type `O`.
    #[inline(always)]
    pub(crate) fn new<O: Output>(metric: Metric, value: f64, row: u32) -> Self {
        Ranking::new(metric, O::PRECISION).neighbour(value, row)
    }

    /// The ranked value, in float64.
    #[cfg(test)]
    pub(crate) fn ranked_value(self, metric: Metric) -> f64 {
        if metric.largest_first() { 0.0 - self.rank } else { self.rank }
    }

    /// The value to return.
    #[inline(always)]
    pub(crate) fn value<O: Output>(self, metric: Metric) -> O {
        O::round(Ranking::new(metric, O::PRECISION).value(self))
    }

    #[inline(always)]
    pub(crate) fn row(self) -> u32 {
        self.row
    }

    /// The sentinel of an empty place: it ranks behind all rows.
    pub(crate) const EMPTY: Self = Self { rank: f64::INFINITY, row: u32::MAX };

    /// The same neighbour with its row number offset by `first`, the number of the first row of its block.
    #[inline(always)]
    pub(crate) fn offset_by(self, first: usize) -> Self {
        Self { row: self.row + first as u32, ..self }
    }

    /// The threshold for rows of later blocks: to rank before this neighbour they must be strictly nearer, since they have
    /// higher row numbers. `None` for an empty place.
    pub(crate) fn threshold(self) -> Option<Self> {
        (self != Self::EMPTY).then_some(Self { row: 0, ..self })
    }

    /// The rank, smaller is nearer, and the row.
    pub(crate) fn parts(self) -> (f64, u32) {
        (self.rank, self.row)
    }

    /// The inverse of [`Neighbour::parts`].
    pub(crate) fn from_parts(rank: f64, row: u32) -> Self {
        Self { rank, row }
    }

    /// Whether it ranks behind `other` by value alone.
    #[inline(always)]
    pub(crate) fn is_behind(self, other: Self) -> bool {
        self.rank > other.rank
    }

    /// The rank as a 32-bit integer of the same order, if it is exact in float32.
    #[inline(always)]
    pub(crate) fn narrow_bits(&self) -> Option<u32> {
        let narrow = self.rank as f32;
        let bits = narrow.to_bits();
        (f64::from(narrow) == self.rank).then_some(bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 })
    }

    /// The inverse of [`Neighbour::narrow_bits`].
    #[inline(always)]
    pub(crate) fn from_narrow(bits: u32, row: u32) -> Self {
        let narrow = f32::from_bits(bits ^ if bits >> 31 == 1 { 1 << 31 } else { u32::MAX });
        Self { rank: f64::from(narrow), row }
    }
}

impl Ord for Neighbour {
    #[inline(always)]
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank.total_cmp(&other.rank).then(self.row.cmp(&other.row))
    }
}

impl PartialOrd for Neighbour {
    #[inline(always)]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Neighbour {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Neighbour {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_row() {
        let at = |value, row| Neighbour::new::<f32>(Metric::SqEuclidean, value, row);
        assert!(at(1.0, 5) < at(1.0 + 1e-12, 6), "equal as float32: the row decides");
        assert!(at(1.0 + 1e-12, 4) < at(1.0, 5));
        assert!(at(1e39, 9) < at(2e39, 1), "both infinite as float32: float64 decides");
        let similar = |value, row| Neighbour::new::<f32>(Metric::InnerProduct, value, row);
        assert!(similar(2.0, 9) < similar(1.0, 1));
        assert_eq!(similar(-0.0, 1), similar(0.0, 1));
    }
}
