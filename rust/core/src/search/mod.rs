//! All searches, and what they share: argument checks, the rule for a query's own row, the execution.
//!
//! ```text
//! knn │ radius │ ranks        one question each: a collector, and the form of the results
//!   └─ scan: the loop nest    chunks of queries x splits of the references ──> blocks ──> candidates ──> Collector
//!        └─ engine            keys of a group of queries and a run of rows: packed, unpacked, direct
//! symmetric                   self-search for the k nearest by symmetric tiles: the same nest, two collectors
//! incremental                 the k nearest among references that arrive in blocks
//! pairwise                    values of pairs of rows, no search
//! references │ plan           rows and their panel cache │ filter, sizes, every tuned constant
//! ```

pub(crate) mod compressed_rows;
mod engine;
pub(crate) mod groups;
pub(crate) mod incremental;
pub(crate) mod knn;
mod nearest;
pub(crate) mod pairwise;
pub(crate) mod plan;
pub(crate) mod radius;
mod rank_counts;
pub(crate) mod ranks;
pub(crate) mod references;
mod scan;
mod symmetric;

use std::num::NonZero;
use std::ops::Range;

use self::plan::Problem;
use self::references::Source;
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::rows::{Rows, begins_with};
use crate::metric::Metric;
use crate::order::Ranking;
use crate::runtime::{Monitor, pool};

/// Which reference row is the query itself. It is excluded from the query's results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelfRule<'a> {
    /// Nothing is excluded: queries are not rows of the reference, or may return themselves.
    None,
    /// Query `i` is reference row `first_query + i`.
    From(usize),
    /// Query `i` is the `i`-th of these reference rows.
    Rows(&'a [u32]),
}

impl SelfRule<'_> {
    /// The reference row of a query.
    #[inline(always)]
    pub(crate) fn own_row(self, query: usize) -> Option<usize> {
        match self {
            Self::None => None,
            Self::From(first_query) => Some(first_query + query),
            Self::Rows(rows) => Some(rows[query] as usize),
        }
    }

    /// The number of excluded rows of a query.
    pub(crate) fn excluded(self) -> usize {
        usize::from(self != Self::None)
    }

    /// Refuse own rows that the reference does not have.
    fn check(self, queries: usize, references: usize) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::From(0) if queries > references => Err(Error::ReferenceLacksQueries { queries, references }),
            Self::From(first_query) if first_query.checked_add(queries).is_none_or(|end| end > references) => {
                Err(Error::QueriesOutsideReference { first_query, queries, references })
            }
            Self::From(_) => Ok(()),
            Self::Rows(rows) => {
                let bad = |wanted, given| Err(Error::BadArray { argument: "self rows", wanted, given });
                if rows.len() != queries {
                    let wanted = format!("have one entry for each of the {queries} queries");
                    return bad(wanted, format!("{} entries", rows.len()));
                }
                match rows.iter().position(|row| *row as usize >= references) {
                    Some(at) => {
                        bad(format!("name rows from 0 to below {references}"), format!("{} at position {at}", rows[at]))
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

impl From<bool> for SelfRule<'_> {
    /// `true`: query `i` is reference row `i`.
    fn from(exclude_self: bool) -> Self {
        if exclude_self { Self::From(0) } else { Self::None }
    }
}

/// Check the sizes of queries and references.
///
/// # Errors
/// [`Error::DimensionMismatch`], [`Error::ReferenceLacksQueries`], [`Error::QueriesOutsideReference`] and, for
/// [`SelfRule::Rows`], [`Error::BadArray`].
fn check_sizes(query: &dyn Rows, dim: usize, references: usize, exclude: SelfRule<'_>) -> Result<()> {
    if query.dim() != dim {
        return Err(Error::DimensionMismatch { query: query.dim(), reference: dim });
    }
    check_rows(query.rows(), references, exclude)
}

/// Check that all own rows exist in the reference.
///
/// # Errors
/// As for [`check_sizes`].
fn check_rows(queries: usize, references: usize, exclude: SelfRule<'_>) -> Result<()> {
    exclude.check(queries, references)
}

/// Check that `k` is at most the number of rows that a query can return.
///
/// # Errors
/// [`Error::KTooLarge`] and [`Error::KTooLargeWithoutSelf`].
fn check_k(k: usize, references: usize, exclude: SelfRule<'_>) -> Result<()> {
    if k > references {
        return Err(Error::KTooLarge { k, references });
    }
    if k > 0 && k + exclude.excluded() > references {
        return Err(Error::KTooLargeWithoutSelf { k, references });
    }
    Ok(())
}

/// Refuse queries with a NaN or an infinity.
fn check_finite(query: &dyn Rows) -> Result<()> {
    query.first_non_finite(Argument::Query, 0).map_or(Ok(()), Err)
}

/// Where a call runs, decided once: on the calling thread or on the pool.
#[derive(Debug, Clone, Copy)]
pub struct Execution {
    threads: NonZero<usize>,
    inline: bool,
}

impl Execution {
    /// The calling thread if the work takes less time than handing it to the pool.
    pub(crate) fn decide(simd: Simd, threads: NonZero<usize>, problem: &Problem) -> Self {
        Self { threads, inline: plan::is_small(problem, simd.level()) }
    }

    /// Whether the work stays on the calling thread.
    pub fn is_inline(self) -> bool {
        self.inline
    }

    /// Number of threads that the work may use.
    pub(crate) fn threads(self) -> usize {
        if self.inline { 1 } else { self.threads.get() }
    }

    /// Run `work` there. A call from a worker of the pool stays in it.
    pub(crate) fn run<T: Send>(self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        pool::enter(self.threads, self.inline, work)
    }
}

/// The arguments of a scan of one source of references, for any question.
pub(crate) struct Context<'a> {
    pub(crate) query: &'a dyn Rows,
    pub(crate) source: Source<'a>,
    /// Number of the first row of `source` among all references.
    pub(crate) first_reference: usize,
    /// Rows of `source` to search.
    pub(crate) rows: Range<usize>,
    pub(crate) metric: Metric,
    pub(crate) ranking: Ranking,
    pub(crate) exclude: SelfRule<'a>,
    /// Queries are the references, and only the upper triangle of pairs is searched: query `i` with the rows from `i`.
    pub(crate) upper_triangle: bool,
    pub(crate) simd: Simd,
    /// The sizes of the search; `threads` is 1 if it runs on the calling thread.
    pub(crate) problem: Problem,
    pub(crate) monitor: &'a Monitor,
}

impl Context<'_> {
    /// The query's own row in the source, if the source has it.
    #[inline(always)]
    pub(crate) fn own_row(&self, query: u32) -> Option<usize> {
        let own = self.exclude.own_row(query as usize)?.checked_sub(self.first_reference)?;
        (own < self.source.rows.rows()).then_some(own)
    }

    /// Whether the queries are the first rows of the references, or equal to them, and exclude their own rows.
    pub(crate) fn is_self_search(&self) -> bool {
        self.exclude == SelfRule::From(0) && self.first_reference == 0 && begins_with(self.source.rows, self.query)
    }
}

/// The numbers of all queries.
fn all_queries(queries: usize) -> Result<Vec<u32>> {
    let mut numbers = crate::runtime::alloc::try_vec(queries, "the queries")?;
    numbers.extend(0..queries as u32);
    Ok(numbers)
}
