//! Everything the core can refuse, in one enum.
//!
//! The texts are written for the person who made the call: each names the argument, what was wanted and what was
//! given. The bindings add nothing to them; they only choose the exception type.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Which input of a search an error speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// The rows whose neighbours are sought.
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

/// A refused or stopped search.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The buffer does not hold `rows * dim` elements.
    #[error("a matrix of {rows} rows and {dim} columns needs {rows} * {dim} elements, got {elements}")]
    BadBuffer {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        dim: usize,
        /// Elements in the buffer.
        elements: usize,
    },
    /// A matrix without columns.
    #[error("{0} must have at least one column, got 0")]
    NoColumns(Argument),
    /// More rows than a row number can name.
    #[error("{argument} must have fewer than 2**32 - 64 rows, got {rows}")]
    TooManyRows {
        /// The offending input.
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
    /// Rows that are to be paired by position, but differ in number.
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
        /// Neighbours asked for.
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
        /// Neighbours asked for.
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
    /// An array of numbers (groups of target rows, the state of a search) that contradicts itself or the rows.
    #[error("{argument} must {wanted}, got {given}")]
    BadArray {
        /// The array that cannot be used.
        argument: &'static str,
        /// What it must hold.
        wanted: String,
        /// What it holds.
        given: String,
    },
    /// A radius that no distance can be held against.
    #[error("r must be a finite number, got {given}")]
    BadRadius {
        /// What was given.
        given: f64,
    },
    /// A NaN or an infinity.
    #[error("{argument} must be finite, got {value} in row {row}, column {column}")]
    NonFinite {
        /// The offending input.
        argument: Argument,
        /// The first row that holds such a value.
        row: usize,
        /// Its first column that does.
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
    /// An exponent that no distance has.
    #[error("p must be a number above 0, or infinity, got {given}")]
    BadPower {
        /// The exponent given.
        given: f64,
    },
    /// An exponent for a metric that takes none.
    #[error("p is for metric \"minkowski\" only, got p={p} with metric {metric:?}")]
    UnusedPower {
        /// The exponent given.
        p: f64,
        /// The metric it was given with.
        metric: &'static str,
    },
    /// A SIMD level that does not exist or that this CPU lacks.
    #[error("SIMD level must be one of {choices} on this CPU, got {name:?}{origin}")]
    UnavailableLevel {
        /// The name given.
        name: String,
        /// The names that can be used here.
        choices: String,
        /// Where the name came from, empty for a call.
        origin: &'static str,
    },
    /// A thread count that cannot be used.
    #[error("num_threads must be at least 1, got {given}{origin}")]
    BadThreads {
        /// What was given.
        given: String,
        /// Where it came from, empty for a call.
        origin: &'static str,
    },
    /// The system refused to start a worker thread.
    #[error("could not start {threads} worker threads: {reason}")]
    NoThreads {
        /// Threads asked for.
        threads: usize,
        /// The system's reason.
        reason: String,
    },
    /// An allocation failed.
    #[error("could not allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// Size asked for.
        bytes: usize,
        /// Purpose of the memory.
        what: &'static str,
    },
    /// The system refused to open, read or write a file.
    #[error("{}: could not {action}: {reason}", path.display())]
    File {
        /// The file as the caller named it.
        path: PathBuf,
        /// What was tried.
        action: String,
        /// The system's number for its reason, where it gave one.
        code: Option<i32>,
        /// The system's reason.
        reason: String,
    },
    /// A file that was read, but is not what it should be.
    #[error("{}: wanted {wanted}, found {found}", path.display())]
    BadFile {
        /// The file as the caller named it.
        path: PathBuf,
        /// What it should hold.
        wanted: String,
        /// What it holds.
        found: String,
    },
    /// The caller asked the search to stop.
    #[error("the search was cancelled")]
    Cancelled,
    /// The core broke one of its own rules.
    #[error("exactknn met an internal error (please report it as a bug): {0}")]
    Panic(String),
}

impl Error {
    /// What the system said when `action` was tried on `path`.
    pub(crate) fn file(path: &Path, action: impl Into<String>, error: &io::Error) -> Self {
        let code = error.raw_os_error();
        let mut reason = error.to_string();
        // The number is kept beside the text.
        if let Some(code) = code
            && let Some(text) = reason.strip_suffix(&format!(" (os error {code})"))
        {
            reason.truncate(text.len());
        }
        Self::File { path: path.to_owned(), action: action.into(), code, reason }
    }

    /// `path` does not hold what it should.
    pub(crate) fn bad_file(path: &Path, wanted: impl Into<String>, found: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_owned(), wanted: wanted.into(), found: found.into() }
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
