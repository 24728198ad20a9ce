//! The error bound of a filter's keys, and the floor: the key below which a row cannot be a neighbour.
//!
//! ```text
//! rows ──centre, scale──> psi (query), rho (reference)        real numbers
//!        key      g = psi . rho - h(rho)                       larger is nearer
//!        computed g~ with  |g~ - g| <= alpha A + beta B + C    alpha, beta of the query row, A, B, C of the panel
//!        floor    L: a row with g < L ranks strictly behind k known rows, rounding and ties included
//! reject a row  <=>  g~ < L - (alpha A + beta B + C)  ==>  g < L
//!        ceiling  U: a row with g > U has at most a given distance, the noise of float64 included (radius, ranks)
//! ```
//!
//! Lp geometry: `g = -N(psi - rho)`, and a computed key also has an error relative to itself, which is part of the floor.
//!
//! The derivation is in `docs/exactness.md`, with the same names. All bounds are computed in float64 and rounded to the safe
//! side by factors that exceed the rounding of these computations by far.

use crate::exact::relative_error;
use crate::metric::{Geometry, Metric};

/// Unit roundoff of float32.
pub(crate) const U32: f64 = 1.0 / (1u64 << 24) as f64;

/// Covers underflow: added to every norm. Times `U32` it exceeds `sqrt(d) * 2^-126` for every `d` below 2^36.
pub(crate) const TAU: f64 = 1.0 / (1u64 << 60) as f64;

/// Most that a 2-norm loses when squares underflow in float32: those of numbers below `2^-63`, `2^-63 sqrt(d)` in total.
pub(crate) const VANISHED: f64 = 1.0 / (1u64 << 54) as f64;

/// Absolute slack for underflow in a sum of products of centred rows: `2 d 2^-126` for `d` below 2^25.
pub(crate) const UNDERFLOW: f64 = 1.0 / (1u128 << 99) as f64;

/// Rows with a larger centred, scaled norm cannot be filtered: their products could overflow float32.
pub(crate) const LARGEST_NORM: f64 = (1u64 << 58) as f64;

/// Largest number of columns for which the float32 bound is useful.
pub(crate) const LARGEST_DIM: usize = 1 << 20;

/// Inflation of terms, for the float32 operations that compute a threshold from them.
const INFLATE: f64 = 1.0 + 1.0 / (1u64 << 20) as f64;

/// Relative error of a float32 dot product of `dim` terms, including its two rounded operands and the key.
pub(crate) fn f32_dot_error(dim: usize) -> f64 {
    let steps = (dim + 2) as f64 * U32;
    (steps / (1.0 - steps) + 4.0 * U32) * (1.0 + 1.0 / (1u64 << 18) as f64)
}

/// Relative error of a float32 key in Lp geometry, compared with the distance of the two rounded rows.
pub(crate) fn lp_relative_error(metric: Metric, dim: usize) -> f64 {
    match metric {
        // One subtraction.
        Metric::Chebyshev => 4.0 * U32,
        // Logarithms and powers, 2.3e-5 in all: see `docs/exactness.md`.
        Metric::Minkowski(_) => f32_dot_error(dim) + 1.0 / (1u64 << 15) as f64,
        _ => f32_dot_error(dim),
    }
}

/// Additional relative error of powers and a root, to [`relative_error`]: `(1 + |ln sum|) / p` units, `|ln sum|` below 700.
fn power_error(metric: Metric) -> f64 {
    if matches!(metric, Metric::Minkowski(_)) { 1024.0 * f64::EPSILON } else { 0.0 }
}

/// Largest number of columns for which sums of 8-bit products fit in 32 bits, one operand being unsigned.
pub(crate) const LARGEST_INT8_DIM: usize = 1 << 16;

/// Relative error of a float32 sum of `dim` terms of one sign in sixteen lanes, including the error of each term.
pub(crate) fn f32_lane_error(dim: usize) -> f64 {
    (dim as f64 / 16.0 + 24.0) * U32 * (1.0 + 1.0 / 64.0)
}

/// Round a term up to float32, inflated for the operations of a threshold.
pub(crate) fn up(x: f64) -> f32 {
    // The factor allows for sixteen float32 roundings. The conversion takes one of them, or the addend if it underflows.
    (x * INFLATE + f64::from(f32::MIN_POSITIVE)) as f32
}

/// Round a floor down to float32, lowered for the operations of a threshold.
pub(crate) fn down(x: f64) -> f32 {
    let lowered = x - x.abs() * (4.0 * U32) - UNDERFLOW;
    let rounded = lowered as f32;
    if f64::from(rounded) > lowered { rounded.next_down() } else { rounded }
}

/// Round a ceiling up to float32, raised like [`down`] lowers.
fn above(x: f64) -> f32 {
    -down(-x)
}

/// The threshold for accepting: a computed key above it, with an error of at most `error`, has an exact key above `ceiling`.
pub(crate) fn accept_threshold(ceiling: f32, error: f32) -> f32 {
    above(f64::from(ceiling) + f64::from(error))
}

/// The relation between the keys and the values of one query, from which [`Bound`] is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyMap {
    pub(crate) metric: Metric,
    pub(crate) dim: usize,
    /// `|psi|^2` (Euclidean) or `sigma^2 q.c` (dot), computed in float64.
    pub(crate) shift: f64,
    /// The sum of the magnitudes of the terms of `shift`.
    pub(crate) shift_size: f64,
    /// `sigma^2`.
    pub(crate) scale2: f64,
}

impl KeyMap {
    /// The bound for results of this unit roundoff; 0 if values are edges that already account for rounding.
    pub(crate) fn bound(&self, roundoff: f64) -> Bound {
        Bound::new(self.metric, self.dim, self.shift, self.shift_size, self.scale2, roundoff)
    }
}

/// Converts values of one query to floors and ceilings of its keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    metric: Metric,
    /// `|psi|^2` (Euclidean) or `sigma^2 q.c` (dot).
    shift: f64,
    /// `sigma^2`.
    scale2: f64,
    /// Relative width of a value's rounding interval, including the noise of float64 arithmetic.
    width: f64,
    /// Absolute slack in key units for the error of `shift`.
    slack: f64,
    /// Relative error of a key (Lp geometry only).
    relative: f64,
}

impl Bound {
    /// - `shift`: see the field; computed in float64
    /// - `shift_error`: the sum of the magnitudes of the terms of `shift`
    /// - `roundoff`: unit roundoff of the output type
    pub(crate) fn new(metric: Metric, dim: usize, shift: f64, shift_error: f64, scale2: f64, roundoff: f64) -> Self {
        let noise = relative_error(dim) + power_error(metric);
        Self {
            metric,
            shift,
            scale2,
            width: 8.0 * roundoff + 8.0 * noise,
            slack: match metric.geometry() {
                Geometry::Lp => UNDERFLOW, // its keys have no shift
                Geometry::Euclidean | Geometry::Dot => 4.0 * noise * shift_error + UNDERFLOW,
            },
            relative: lp_relative_error(metric, dim),
        }
    }

    /// The floor `L`: every row with a lower exact key ranks strictly behind a row of (ranked) value `value`.
    #[inline]
    pub(crate) fn reject_below(&self, value: f64) -> f32 {
        let floor = match self.metric.geometry() {
            Geometry::Euclidean => {
                let squared = if self.metric.has_root() { value * value } else { value };
                self.below_squared(squared * self.scale2)
            }
            Geometry::Dot => {
                let similarity = if self.metric == Metric::Cosine { 1.0 - value } else { value };
                let scaled = similarity * self.scale2;
                self.below_similarity(scaled - self.shift, scaled)
            }
            Geometry::Lp => self.below_distance(value * self.scale2.sqrt()),
        };
        finite_or_lowest(floor)
    }

    /// The ceiling `U`: every row with a higher exact key has a float64 value of at most `value` (at least, for a
    /// similarity).
    ///
    /// The counterpart of [`Bound::reject_below`], with all errors of the opposite sign. It does not account for rounding to
    /// the output type: use a bound with a `roundoff` of 0, and for `value` an edge between rounded values.
    pub(crate) fn accept_above(&self, value: f64) -> f32 {
        let ceiling = match self.metric.geometry() {
            Geometry::Euclidean if value < 0.0 => f64::INFINITY,
            Geometry::Euclidean => {
                let squared = if self.metric.has_root() { value * value } else { value };
                (self.shift + self.slack - squared * self.scale2 * (1.0 - self.width)) * 0.5 + self.slack
            }
            Geometry::Dot => {
                let similarity = if self.metric == Metric::Cosine { 1.0 - value } else { value };
                let scaled = similarity * self.scale2;
                scaled - self.shift + self.similarity_margin(scaled)
            }
            Geometry::Lp if value < 0.0 => f64::INFINITY,
            Geometry::Lp => -(value * self.scale2.sqrt() * (1.0 - self.relative) * (1.0 - self.width)) + self.slack,
        };
        // If it is infinite or NaN, no row is accepted.
        if ceiling.is_finite() { above(ceiling) } else { f32::INFINITY }
    }

    /// `squared`: an upper bound of the scaled squared distances of the k rows.
    fn below_squared(&self, squared: f64) -> f64 {
        (self.shift - self.slack - squared * (1.0 + self.width)) * 0.5 - self.slack
    }

    /// `distance`: an upper bound of the scaled distances of the k rows. `scale2` is an even power of two, so its root is
    /// exact.
    fn below_distance(&self, distance: f64) -> f64 {
        -(distance * (1.0 + self.relative) * (1.0 + self.width)) - self.slack
    }

    /// `key`: a lower bound of the keys of the k rows; `scaled`: its similarity times `sigma^2`.
    fn below_similarity(&self, key: f64, scaled: f64) -> f64 {
        key - self.similarity_margin(scaled)
    }

    /// The largest change of a similarity of `scaled` by rounding and the errors of float64.
    fn similarity_margin(&self, scaled: f64) -> f64 {
        let size = match self.metric {
            Metric::InnerProduct => scaled.abs() + self.slack,
            // A cosine distance rounds relative to 1 - similarity, a similarity relative to itself.
            _ => scaled.abs().max((self.scale2 - scaled).abs()) + self.slack,
        };
        size * self.width + self.slack
    }
}

/// The floor rounded down; minus infinity, which rejects nothing, for NaN.
fn finite_or_lowest(floor: f64) -> f32 {
    if floor.is_nan() { f32::NEG_INFINITY } else { down(floor) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_the_safe_side() {
        for x in [1e-30, 0.1, 1.0, 3.0e7, 1e30] {
            assert!(f64::from(up(x)) >= x && f64::from(up(x)) < x * 1.00001);
            assert!(f64::from(down(x)) <= x && f64::from(down(-x)) <= -x);
        }
        assert_eq!(up(f64::INFINITY), f32::INFINITY);
        assert_eq!(down(f64::NEG_INFINITY), f32::NEG_INFINITY);
    }

    #[test]
    fn a_floor_leaves_room_for_equal_rounded_values() {
        // Query norm 1, a row at squared distance 0.5: key (1 - 0.5) / 2.
        let bound = Bound::new(Metric::SqEuclidean, 8, 1.0, 1.0, 1.0, U32);
        let next_up = f64::from(0.5f32.next_up());
        let same_rounding = (1.0 - (0.5 + 0.49 * (next_up - 0.5))) / 2.0;
        assert!(f64::from(bound.reject_below(0.5)) < same_rounding);
        assert!(f64::from(bound.reject_below(0.5)) > 0.25 - 1e-6, "and no more room than needed");
    }

    #[test]
    fn a_ceiling_is_just_above_the_value() {
        // Query norm 1, a row at squared distance 0.5: key (1 - 0.5) / 2.
        let bound = Bound::new(Metric::SqEuclidean, 8, 1.0, 1.0, 1.0, 0.0);
        let ceiling = f64::from(bound.accept_above(0.5));
        assert!(ceiling > 0.25 && ceiling < 0.25 + 1e-6);
        assert!(f64::from(bound.reject_below(0.5)) < 0.25);
        let cosine = Bound::new(Metric::Cosine, 8, 0.0, 0.0, 1.0, 0.0);
        let ceiling = f64::from(cosine.accept_above(0.25));
        assert!(ceiling > 0.75 && ceiling < 0.75 + 1e-6);
    }

    #[test]
    fn an_unusable_bound_accepts_nothing() {
        let bound = Bound::new(Metric::Euclidean, 8, 1.0, 1.0, 1.0, 0.0);
        assert_eq!(bound.accept_above(1e200), f32::INFINITY, "its square is infinite");
        assert_eq!(bound.accept_above(-1.0), f32::INFINITY, "no distance is negative");
        let unusable = Bound::new(Metric::SqEuclidean, 8, f64::INFINITY, f64::INFINITY, 1.0, 0.0);
        assert_eq!(unusable.accept_above(1.0), f32::INFINITY);
        assert_eq!(accept_threshold(1.0, f32::INFINITY), f32::INFINITY, "a row that cannot be filtered");
        assert_eq!(accept_threshold(f32::INFINITY, 1.0), f32::INFINITY);
    }

    #[test]
    fn an_unusable_bound_rejects_nothing() {
        let bound = Bound::new(Metric::SqEuclidean, 8, 1.0, 1.0, 1.0, U32);
        assert_eq!(bound.reject_below(f64::INFINITY), f32::NEG_INFINITY);
        assert_eq!(bound.reject_below(f64::NAN), f32::NEG_INFINITY);
    }
}
