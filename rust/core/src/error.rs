//! All errors of the core, in one enum.
//!
//! The texts are for the caller: each names the argument, what was expected and what was given. The bindings add nothing to
//! them; they only choose the type of the exception.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The input of a search that an error refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// The rows whose neighbours are searched for.
    Query,
    /// The rows that are searched.
    Reference,
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Query => "query",
            Self::Reference => "reference",
        })
    }
}

/// The reason why a call failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The buffer does not hold `rows * dim` elements.
    #[error("a matrix of {rows} rows and {dim} columns needs {rows} * {dim} elements, got {elements}")]
    BadBuffer {
        /// Expected rows.
        rows: usize,
        /// Expected columns.
        dim: usize,
        /// Elements in the buffer.
        elements: usize,
    },
    /// A matrix without columns.
    #[error("{0} must have at least one column, got 0")]
    NoColumns(Argument),
    /// More rows than row numbers.
    #[error("{argument} must have fewer than 2**32 - 64 rows, got {rows}")]
    TooManyRows {
        /// The argument.
        argument: Argument,
        /// Its rows.
        rows: usize,
    },
    /// Query and reference differ in their number of columns.
    #[error("query and reference must have the same number of columns, got {query} and {reference}")]
    DimensionMismatch {
        /// Columns of the query.
        query: usize,
        /// Columns of the reference.
        reference: usize,
    },
    /// Query and reference differ in their number of rows, but are paired by position.
    #[error("query and reference must have the same number of rows to be paired, got {query} and {reference}")]
    RowsMismatch {
        /// Rows of the query.
        query: usize,
        /// Rows of the reference.
        reference: usize,
    },
    /// More neighbours than there are references.
    #[error("k must be at most the number of references, got k={k} with {references} references")]
    KTooLarge {
        /// The given k.
        k: usize,
        /// Rows of the reference.
        references: usize,
    },
    /// More neighbours than there are references besides the query itself.
    #[error(
        "k must be at most the number of references without the query itself, \
         got k={k} with {references} references"
    )]
    KTooLargeWithoutSelf {
        /// The given k.
        k: usize,
        /// Rows of the reference, the query's own row included.
        references: usize,
    },
    /// With self excluded the reference must begin with the queries.
    #[error(
        "the reference must begin with the queries when self is excluded: \
         wanted at least {queries} references, got {references}"
    )]
    ReferenceLacksQueries {
        /// Rows of the query.
        queries: usize,
        /// Rows of the reference.
        references: usize,
    },
    /// With self excluded the queries must be rows of the reference.
    #[error(
        "the reference must hold the queries, row {first_query} first, when self is excluded: \
         wanted at least {first_query} + {queries} references, got {references}"
    )]
    QueriesOutsideReference {
        /// The reference row of the first query.
        first_query: usize,
        /// Rows of the query.
        queries: usize,
        /// Rows of the reference.
        references: usize,
    },
    /// An array (groups of target rows, own rows, a mask, the state of a search) that is inconsistent.
    #[error("{argument} must {wanted}, got {given}")]
    BadArray {
        /// The argument.
        argument: &'static str,
        /// What was expected of it.
        wanted: String,
        /// What was given.
        given: String,
    },
    /// A radius that is not finite.
    #[error("r must be a finite number, got {given}")]
    BadRadius {
        /// What was given.
        given: f64,
    },
    /// A NaN or an infinity.
    #[error("{argument} must be finite, got {value} in row {row}, column {column}")]
    NonFinite {
        /// The argument.
        argument: Argument,
        /// The first row with such a value.
        row: usize,
        /// The first such column of that row.
        column: usize,
        /// The value.
        value: f64,
    },
    /// A metric name that does not exist.
    #[error("metric must be one of {choices}, got {name:?}")]
    UnknownMetric {
        /// The name given.
        name: String,
        /// The names that exist.
        choices: String,
    },
    /// An exponent that is not above 0.
    #[error("p must be a number above 0, or infinity, got {given}")]
    BadPower {
        /// The exponent given.
        given: f64,
    },
    /// An exponent for a metric without one.
    #[error("p is for metric \"minkowski\" only, got p={p} with metric {metric:?}")]
    UnusedPower {
        /// The exponent given.
        p: f64,
        /// The metric.
        metric: &'static str,
    },
    /// A SIMD level that does not exist or that this CPU lacks.
    #[error("SIMD level must be one of {choices} on this CPU, got {name:?}{origin}")]
    UnavailableLevel {
        /// The name given.
        name: String,
        /// The names of available levels.
        choices: String,
        /// Where the name came from; empty for a call.
        origin: &'static str,
    },
    /// A number of threads below 1.
    #[error("num_threads must be at least 1, got {given}{origin}")]
    BadThreads {
        /// What was given.
        given: String,
        /// Where it came from; empty for a call.
        origin: &'static str,
    },
    /// The system cannot start the worker threads.
    #[error("could not start {threads} worker threads: {reason}")]
    NoThreads {
        /// Number of threads.
        threads: usize,
        /// The system's reason.
        reason: String,
    },
    /// The process was forked by a callback of a running call, and the child has none of the threads that run it.
    #[error("a forked child cannot continue a call of its parent that was running when it was forked")]
    Forked,
    /// An allocation failed.
    #[error("could not allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// Size of the allocation.
        bytes: usize,
        /// Purpose of the memory.
        what: &'static str,
    },
    /// The system cannot open, read or write a file.
    #[error("{}: could not {action}: {reason}", path.display())]
    File {
        /// The path as passed.
        path: PathBuf,
        /// The operation that failed.
        action: String,
        /// The system's error number, if there is one.
        code: Option<i32>,
        /// The system's error message.
        reason: String,
    },
    /// A file that is damaged or of another format.
    #[error("{}: wanted {wanted}, found {found}", path.display())]
    BadFile {
        /// The path as passed.
        path: PathBuf,
        /// What was expected.
        wanted: String,
        /// What was found.
        found: String,
    },
    /// The caller cancelled the search.
    #[error("the search was cancelled")]
    Cancelled,
    /// An internal error: a bug of this library.
    #[error("exactknn met an internal error (please report it as a bug): {0}")]
    Panic(String),
}

impl Error {
    /// The system's error for `action` on `path`.
    pub(crate) fn file(path: &Path, action: impl Into<String>, error: &io::Error) -> Self {
        let code = error.raw_os_error();
        let mut reason = error.to_string();
        // The number has a field of its own.
        if let Some(code) = code
            && let Some(text) = reason.strip_suffix(&format!(" (os error {code})"))
        {
            reason.truncate(text.len());
        }
        Self::File { path: path.to_owned(), action: action.into(), code, reason }
    }

    /// An error for the contents of `path`.
    pub(crate) fn bad_file(path: &Path, wanted: impl Into<String>, found: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_owned(), wanted: wanted.into(), found: found.into() }
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
