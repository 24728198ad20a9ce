//! What is measured, and how a filter has to see it.

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
}

/// How a filter ranks: see `bound.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Geometry {
    /// By `q.r - |r|^2 / 2` of rows centred alike: the larger, the nearer.
    Euclidean,
    /// By `q.r`, the reference rows centred.
    Dot,
}

impl Metric {
    /// Every metric.
    pub const ALL: [Self; 7] = [
        Self::SqEuclidean,
        Self::Euclidean,
        Self::NormalizedSqEuclidean,
        Self::NormalizedEuclidean,
        Self::Cosine,
        Self::CosineSimilarity,
        Self::InnerProduct,
    ];

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
        }
    }

    /// The metric of this name.
    ///
    /// # Errors
    /// [`Error::UnknownMetric`], which lists the names.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|metric| metric.name() == name).ok_or_else(|| {
            let choices: Vec<_> = Self::ALL.into_iter().map(Self::name).collect();
            Error::UnknownMetric { name: name.to_owned(), choices: choices.join(", ") }
        })
    }

    /// Whether the largest values are the nearest.
    pub fn largest_first(self) -> bool {
        matches!(self, Self::CosineSimilarity | Self::InnerProduct)
    }

    /// Whether rows are divided by their norm first.
    pub(crate) fn normalizes(self) -> bool {
        !matches!(self, Self::SqEuclidean | Self::Euclidean | Self::InnerProduct)
    }

    pub(crate) fn geometry(self) -> Geometry {
        match self {
            Self::SqEuclidean | Self::Euclidean | Self::NormalizedSqEuclidean | Self::NormalizedEuclidean => {
                Geometry::Euclidean
            }
            Self::Cosine | Self::CosineSimilarity | Self::InnerProduct => Geometry::Dot,
        }
    }

    /// Whether the value is the root of the sum of squares.
    pub(crate) fn has_root(self) -> bool {
        matches!(self, Self::Euclidean | Self::NormalizedEuclidean)
    }
}
