//! Distances and similarities, and the geometry of each for a filter.

use std::fmt;

use crate::error::{Error, Result};

/// A distance or similarity between two rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Metric {
    /// Sum of squared differences; smallest first.
    SqEuclidean,
    /// Root of the sum of squared differences; smallest first.
    Euclidean,
    /// [`Metric::SqEuclidean`] of rows divided by their 2-norm (zero rows stay zero); smallest first.
    NormalizedSqEuclidean,
    /// [`Metric::Euclidean`] of rows divided by their 2-norm (zero rows stay zero); smallest first.
    NormalizedEuclidean,
    /// One minus the cosine similarity; smallest first.
    Cosine,
    /// Cosine of the angle, 0 when a row is zero; largest first.
    CosineSimilarity,
    /// Sum of products; largest first.
    InnerProduct,
    /// Sum of absolute differences; smallest first.
    Cityblock,
    /// Largest absolute difference; smallest first.
    Chebyshev,
    /// `(sum |q - r|^p)^(1/p)`; smallest first. Made by [`Metric::minkowski`], which handles exponents that need no powers.
    Minkowski(Power),
}

/// Twice the largest exponent whose powers are computed as products.
const MOST_HALVES: u32 = 128;

/// The exponent of [`crate::Metric::Minkowski`]: finite, above 0, neither 1 nor 2. Made by [`crate::Metric::minkowski`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Power {
    /// The bits of a positive number: equal numbers have equal bits.
    bits: u64,
}

impl fmt::Debug for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl Power {
    /// The exponent `p`; the caller has handled exponents that need no powers.
    pub(crate) fn new(p: f64) -> Result<Self> {
        if p > 0.0 && p.is_finite() { Ok(Self { bits: p.to_bits() }) } else { Err(Error::BadPower { given: p }) }
    }

    /// The number.
    pub fn get(self) -> f64 {
        f64::from_bits(self.bits)
    }

    /// Twice the exponent, if that is an integer of at most [`MOST_HALVES`].
    #[inline(always)]
    pub(crate) fn halves(self) -> Option<u32> {
        let twice = 2.0 * self.get();
        let whole = twice as u32; // saturates
        (whole <= MOST_HALVES && f64::from(whole) == twice).then_some(whole)
    }
}

/// Largest exponent for which the powers of the filter stay in the range of float32.
const LARGEST_FILTERED_POWER: f64 = (1u64 << 20) as f64;

const MINKOWSKI: &str = "minkowski";

/// The form of a filter's keys: see `filter/bound.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Geometry {
    /// `q.r - |r|^2 / 2`, with the same centre for queries and references. The larger, the nearer, as for all keys.
    Euclidean,
    /// `q.r`, with the references centred.
    Dot,
    /// The negated distance itself, with the same centre for queries and references.
    Lp,
}

impl Metric {
    /// All metrics without an exponent.
    pub const ALL: [Self; 9] = [
        Self::SqEuclidean,
        Self::Euclidean,
        Self::NormalizedSqEuclidean,
        Self::NormalizedEuclidean,
        Self::Cosine,
        Self::CosineSimilarity,
        Self::InnerProduct,
        Self::Cityblock,
        Self::Chebyshev,
    ];

    /// The Minkowski distance of exponent `p`. For 1, 2 and infinity, the metric that computes the same distance without
    /// powers.
    ///
    /// # Errors
    /// [`Error::BadPower`] unless `p` is above 0.
    pub fn minkowski(p: f64) -> Result<Self> {
        Ok(if p == 1.0 {
            Self::Cityblock
        } else if p == 2.0 {
            Self::Euclidean
        } else if p == f64::INFINITY {
            Self::Chebyshev
        } else {
            Self::Minkowski(Power::new(p)?)
        })
    }

    /// The name used by the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::SqEuclidean => "sqeuclidean",
            Self::Euclidean => "euclidean",
            Self::NormalizedSqEuclidean => "normalized_sqeuclidean",
            Self::NormalizedEuclidean => "normalized_euclidean",
            Self::Cosine => "cosine",
            Self::CosineSimilarity => "cosine_similarity",
            Self::InnerProduct => "inner_product",
            Self::Cityblock => "cityblock",
            Self::Chebyshev => "chebyshev",
            Self::Minkowski(_) => MINKOWSKI,
        }
    }

    /// The metric of this name; `p` is the exponent of `minkowski`, 2 by default.
    ///
    /// # Errors
    /// [`Error::UnknownMetric`], [`Error::BadPower`] and [`Error::UnusedPower`].
    pub fn parse(name: &str, p: Option<f64>) -> Result<Self> {
        if name == MINKOWSKI {
            return Self::minkowski(p.unwrap_or(2.0));
        }
        let metric = Self::ALL.into_iter().find(|metric| metric.name() == name).ok_or_else(|| {
            let choices: Vec<_> = Self::ALL.into_iter().map(Self::name).chain([MINKOWSKI]).collect();
            Error::UnknownMetric { name: name.to_owned(), choices: choices.join(", ") }
        })?;
        match p {
            Some(p) => Err(Error::UnusedPower { p, metric: metric.name() }),
            None => Ok(metric),
        }
    }

    /// Whether larger values are nearer.
    pub fn largest_first(self) -> bool {
        matches!(self, Self::CosineSimilarity | Self::InnerProduct)
    }

    /// Whether rows are divided by their norm first.
    pub(crate) fn normalizes(self) -> bool {
        match self {
            Self::NormalizedSqEuclidean | Self::NormalizedEuclidean | Self::Cosine | Self::CosineSimilarity => true,
            Self::SqEuclidean | Self::Euclidean | Self::InnerProduct => false,
            Self::Cityblock | Self::Chebyshev | Self::Minkowski(_) => false,
        }
    }

    pub(crate) fn geometry(self) -> Geometry {
        match self {
            Self::SqEuclidean | Self::Euclidean | Self::NormalizedSqEuclidean | Self::NormalizedEuclidean => {
                Geometry::Euclidean
            }
            Self::Cosine | Self::CosineSimilarity | Self::InnerProduct => Geometry::Dot,
            Self::Cityblock | Self::Chebyshev | Self::Minkowski(_) => Geometry::Lp,
        }
    }

    /// Whether there is a filter for the metric. If not, every pair gets its float64 value.
    pub(crate) fn is_filterable(self) -> bool {
        // The bound needs the triangle inequality, which fails below 1.
        match self {
            Self::Minkowski(power) => (1.0..=LARGEST_FILTERED_POWER).contains(&power.get()),
            _ => true,
        }
    }

    /// Whether each term of a value takes a power that is not a product.
    pub(crate) fn is_costly(self) -> bool {
        matches!(self, Self::Minkowski(power) if power.halves().is_none())
    }

    /// Whether queries and references have the same centre, and exchanging them does not change the bits of a value, so that
    /// one product serves both sides of a pair.
    pub(crate) fn is_symmetric(self) -> bool {
        self.geometry() != Geometry::Lp && self != Self::InnerProduct
    }

    /// Whether the value is the root of the sum of squares.
    pub(crate) fn has_root(self) -> bool {
        matches!(self, Self::Euclidean | Self::NormalizedEuclidean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exponent_without_powers_is_the_metric_that_needs_none() {
        assert_eq!(Metric::minkowski(1.0), Ok(Metric::Cityblock));
        assert_eq!(Metric::minkowski(2.0), Ok(Metric::Euclidean));
        assert_eq!(Metric::minkowski(f64::INFINITY), Ok(Metric::Chebyshev));
        assert_eq!(Metric::parse("minkowski", None), Ok(Metric::Euclidean));
        assert_eq!(Metric::parse("minkowski", Some(1.0)), Ok(Metric::Cityblock));
        assert_ne!(Metric::minkowski(3.0), Metric::minkowski(3.0f64.next_up()));
        assert_eq!(Metric::minkowski(3.0).map(Metric::name), Ok("minkowski"));
    }

    #[test]
    fn an_exponent_that_cannot_be_is_refused() {
        for given in [0.0, -0.0, -1.0, f64::NEG_INFINITY] {
            assert_eq!(Metric::minkowski(given), Err(Error::BadPower { given }));
        }
        let text = |outcome: Result<Metric>| outcome.expect_err("refused").to_string();
        assert_eq!(text(Metric::minkowski(f64::NAN)), "p must be a number above 0, or infinity, got NaN");
        assert_eq!(
            text(Metric::parse("cityblock", Some(3.0))),
            "p is for metric \"minkowski\" only, got p=3 with metric \"cityblock\""
        );
        assert!(text(Metric::parse("l1", None)).contains("inner_product, cityblock, chebyshev, minkowski, got \"l1\""));
    }
}
