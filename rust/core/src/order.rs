//! The total order of results: by ranked value, then by row number.
//!
//! Every place that compares neighbours compares [`Neighbour`]s, so the tie rule exists once.

use std::cmp::Ordering;

use crate::matrix::{Output, Precision};
use crate::metric::Metric;

/// One row as it stands in a ranking. Smaller is nearer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neighbour {
    /// The ranked value, negated where the largest is the nearest. Never NaN.
    rank: f64,
    row: u32,
}

/// How the values of one search are ranked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranking {
    precision: Precision,
    largest_first: bool,
}

impl Ranking {
    /// The ranking of a metric's values in the precision of the results.
    pub(crate) fn new(metric: Metric, precision: Precision) -> Self {
        Self { precision, largest_first: metric.largest_first() }
    }

    /// Half the distance from 1 to the next number of the results' type.
    pub(crate) fn unit_roundoff(self) -> f64 {
        self.precision.unit_roundoff()
    }

    /// Place `row` by its float64 `value`.
    #[inline(always)]
    pub(crate) fn neighbour(self, value: f64, row: u32) -> Neighbour {
        debug_assert!(!value.is_nan(), "finite rows have no NaN distance");
        let ranked = self.precision.ranked(value);
        // 0 - x rather than -x, and + 0: a zero is always +0, whose order and bytes are unique.
        let rank = if self.largest_first { 0.0 - ranked } else { ranked + 0.0 };
        Neighbour { rank, row }
    }

    /// The number that ranked the row, still in float64.
    #[inline(always)]
    pub(crate) fn value(self, neighbour: Neighbour) -> f64 {
        if self.largest_first { 0.0 - neighbour.rank } else { neighbour.rank }
    }

    /// The last float64 values whose rows rank before this one by value alone, and not behind it by value alone.
    pub(crate) fn edges(self, neighbour: Neighbour) -> (f64, f64) {
        let (before, at) = self.precision.edges_of_rank(neighbour.rank);
        if self.largest_first { (-before, -at) } else { (before, at) }
    }
}

impl Neighbour {
    /// Place `row` by its float64 `value`, as results of type `O`.
    #[inline(always)]
    pub(crate) fn new<O: Output>(metric: Metric, value: f64, row: u32) -> Self {
        Ranking::new(metric, O::PRECISION).neighbour(value, row)
    }

    /// The number that ranked the row, still in float64.
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

    /// An empty place: it ranks behind all rows.
    pub(crate) const EMPTY: Self = Self { rank: f64::INFINITY, row: u32::MAX };

    /// The same value in row `first + row`: the row of a part of the references as one of the whole.
    #[inline(always)]
    pub(crate) fn offset_by(self, first: usize) -> Self {
        Self { row: self.row + first as u32, ..self }
    }

    /// The threshold that rows of later references must stay below to rank before this one: among equal values this one
    /// stays the first. `None` for an empty place.
    pub(crate) fn threshold(self) -> Option<Self> {
        (self != Self::EMPTY).then_some(Self { row: 0, ..self })
    }

    /// The number that orders rows, smaller is nearer, and the row.
    pub(crate) fn parts(self) -> (f64, u32) {
        (self.rank, self.row)
    }

    /// What [`Neighbour::parts`] gave.
    pub(crate) fn from_parts(rank: f64, row: u32) -> Self {
        Self { rank, row }
    }

    /// Whether the value itself is worse, not only the row number.
    #[inline(always)]
    pub(crate) fn is_behind(self, other: Self) -> bool {
        self.rank > other.rank
    }

    /// The rank as a 32-bit integer of the same order, if it is a float32 number.
    #[inline(always)]
    pub(crate) fn narrow_bits(&self) -> Option<u32> {
        let narrow = self.rank as f32;
        let bits = narrow.to_bits();
        (f64::from(narrow) == self.rank).then_some(bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 })
    }

    /// What [`Neighbour::narrow_bits`] and the row came from.
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
