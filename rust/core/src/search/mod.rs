//! Every question about the nearest rows, and what they share: the checks, the rule for a query's own row, the execution.
//!
//! ```text
//! knn │ radius │ ranks        one question each: what to collect, and the form of the answer
//!   └─ scan: the loop nest    chunks of queries x splits of the references ──> blocks ──> candidates ──> a Collector
//!        └─ engine            keys of a group of queries with some rows: packed, unpacked, direct
//! symmetric                   a self-search in pairs of blocks: the same nest, two collectors
//! incremental                 k nearest among references that arrive in blocks
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
use crate::exact::rows::Rows;
use crate::metric::Metric;
use crate::order::Ranking;
use crate::runtime::{Monitor, pool};

/// Which reference row is the query itself: it is never among a query's neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelfRule<'a> {
    /// None: queries are not rows of the reference, or may return themselves.
    None,
    /// Query `i` is reference row `first_query + i`.
    From(usize),
    /// Query `i` is the `i`-th of these reference rows.
    Rows(&'a [u32]),
}

impl SelfRule<'_> {
    /// The reference row that query `query` is.
    #[inline(always)]
    pub(crate) fn own_row(self, query: usize) -> Option<usize> {
        match self {
            Self::None => None,
            Self::From(first_query) => Some(first_query + query),
            Self::Rows(rows) => Some(rows[query] as usize),
        }
    }

    /// How many rows of the reference a query cannot return.
    pub(crate) fn excluded(self) -> usize {
        usize::from(self != Self::None)
    }

    /// Refuse queries that are not all rows of the reference.
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

/// The checks of sizes that all questions share.
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

/// Whether all queries are rows of the reference, where they exclude themselves.
///
/// # Errors
/// As for [`check_sizes`].
fn check_rows(queries: usize, references: usize, exclude: SelfRule<'_>) -> Result<()> {
    exclude.check(queries, references)
}

/// The rule for `k`: it counts rows that a query may return.
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

/// Refuse queries that hold a NaN or an infinity.
fn check_finite(query: &dyn Rows) -> Result<()> {
    query.first_non_finite(Argument::Query, 0).map_or(Ok(()), Err)
}

/// On which threads a call runs, decided once.
#[derive(Debug, Clone, Copy)]
pub struct Execution {
    threads: NonZero<usize>,
    inline: bool,
}

impl Execution {
    /// On the calling thread where the work is over before a hand-over to other threads would be, else on the pool.
    pub(crate) fn decide(simd: Simd, threads: NonZero<usize>, problem: &Problem) -> Self {
        Self { threads, inline: plan::is_small(problem, simd.level()) }
    }

    /// Whether the work stays on the calling thread.
    pub fn is_inline(self) -> bool {
        self.inline
    }

    /// Threads that the work may use.
    pub(crate) fn threads(self) -> usize {
        if self.inline { 1 } else { self.threads.get() }
    }

    /// Run `work` where it was decided; in the current pool, if the call is made in one.
    pub(crate) fn run<T: Send>(self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        pool::enter(self.threads, self.inline, work)
    }
}

/// What the scan of one source of references needs to know, whatever the question.
pub(crate) struct Context<'a> {
    pub(crate) query: &'a dyn Rows,
    pub(crate) source: Source<'a>,
    /// Number of the first row of `source` among all references.
    pub(crate) first_reference: usize,
    /// Rows of `source` that queries meet.
    pub(crate) rows: Range<usize>,
    pub(crate) metric: Metric,
    pub(crate) ranking: Ranking,
    pub(crate) exclude: SelfRule<'a>,
    /// Queries are the references, and each meets only the rows at or after its own: a pair has one side.
    pub(crate) upper_triangle: bool,
    pub(crate) simd: Simd,
    /// Sizes; its threads are those that may be used.
    pub(crate) problem: Problem,
    pub(crate) monitor: &'a Monitor,
}

impl Context<'_> {
    /// The row of the source that a query is, if it is one.
    #[inline(always)]
    pub(crate) fn own_row(&self, query: u32) -> Option<usize> {
        let own = self.exclude.own_row(query as usize)?.checked_sub(self.first_reference)?;
        (own < self.source.rows.rows()).then_some(own)
    }

    /// Whether the queries are the first rows of the references, in the same memory, and exclude themselves.
    pub(crate) fn is_self_search(&self) -> bool {
        self.exclude == SelfRule::From(0)
            && self.first_reference == 0
            && self.query.precision() == self.source.rows.precision()
            && self.query.row_bytes() == self.source.rows.row_bytes()
            && self.query.identity().0 == self.source.rows.identity().0
    }
}

/// All queries by number.
fn all_queries(queries: usize) -> Result<Vec<u32>> {
    let mut numbers = crate::runtime::alloc::try_vec(queries, "the queries")?;
    numbers.extend(0..queries as u32);
    Ok(numbers)
}
