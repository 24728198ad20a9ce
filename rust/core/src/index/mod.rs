//! References that are prepared once and searched many times.
//!
//! ```text
//! prepare ──few rows──append──> the growing segment: rows only, until it has `sealed_rows` rows
//!         └─many rows: packed──append──> a sealed segment of their own
//! search, radius, ranks ──snapshot of the segments──> search: segment by segment, each with its panels
//! remove ──> segments that lose rows are replaced, the others are shared with the old state
//! save, load ──> file.rs: rows and codes are mapped, and verified when they are used
//! ```
//!
//! A segment never changes while a search uses it, so a search holds no lock: it takes a snapshot. Searches do not wait for
//! long changes either, since new segments are complete before they replace old ones. Rows are numbered across all segments,
//! in the order in which they were added.

mod file;
mod segment;

use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::matrix::{Element, MatrixRef, QueryRef, check_row_count};
use crate::metric::Metric;
use crate::runtime::Monitor;
use crate::runtime::alloc::{try_collect, try_reserve, try_vec};
use crate::runtime::fork::Held;
use crate::runtime::pool;
use crate::saved::Stored;
use crate::search::Execution;
use crate::search::compressed_rows::Within;
use crate::search::groups::Groups;
use crate::search::incremental::BlockSearch;
use crate::search::knn::{Neighbours, Options};
use crate::search::plan::{self, Problem};
use crate::search::radius::{self, RadiusOptions};
use crate::search::ranks::{self, RankOptions, Ranks};
use crate::search::references::Source;
use segment::{Layout, Segment};

/// See the module header.
pub struct Index<E: Element + Stored> {
    layout: Layout,
    segments: RwLock<Vec<Arc<Segment<E>>>>,
    /// Held during a change of the segments, which may take long. Searches do not take it.
    changing: Mutex<()>,
}

impl<E: Element + Stored> Index<E> {
    /// An empty index for rows of `dim` columns.
    ///
    /// # Errors
    /// [`Error::NoColumns`].
    pub fn new(dim: usize, metric: Metric) -> Result<Self> {
        if dim == 0 {
            return Err(Error::NoColumns(Argument::Reference));
        }
        let layout = Layout { metric, dim, sealed_rows: plan::SEALED_ROWS };
        Ok(Self { layout, segments: RwLock::default(), changing: Mutex::default() })
    }

    /// Seal segments at `rows` rows. This affects no results.
    #[must_use]
    pub fn sealed_at(self, rows: usize) -> Self {
        Self { layout: Layout { sealed_rows: rows, ..self.layout }, ..self }
    }

    /// The metric.
    pub fn metric(&self) -> Metric {
        self.layout.metric
    }

    /// Number of columns.
    pub fn dim(&self) -> usize {
        self.layout.dim
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        rows_of(&self.read())
    }

    /// Bytes of memory of rows and panels; mapped rows and codes do not count.
    pub fn bytes(&self) -> usize {
        self.read().iter().map(|segment| segment.bytes()).sum()
    }

    // Each change of the list is one operation on a whole segment, so a panic cannot have left it inconsistent.
    fn read(&self) -> Held<RwLockReadGuard<'_, Vec<Arc<Segment<E>>>>> {
        Held::new(|| self.segments.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> Held<RwLockWriteGuard<'_, Vec<Arc<Segment<E>>>>> {
        Held::new(|| self.segments.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Exclude other changes of the segments.
    fn change(&self) -> Held<MutexGuard<'_, ()>> {
        Held::new(|| self.changing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Append rows. After an error nothing has been appended. Runs on the calling thread if `threads` is 1, else on the pool
    /// of this process.
    ///
    /// # Errors
    /// As for [`Index::prepare`] and [`Index::append`].
    pub fn add(&self, rows: MatrixRef<'_, E>, simd: Simd, threads: usize, monitor: &Monitor) -> Result<()> {
        self.append(self.prepare(rows, simd, threads, monitor)?, simd)
    }

    /// The slow step of adding rows: check, copy and pack them. It can be cancelled and does not change the index.
    ///
    /// # Errors
    /// [`Error::DimensionMismatch`], [`Error::NonFinite`] with the row of `rows`, [`Error::TooManyRows`],
    /// [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn prepare(
        &self,
        rows: MatrixRef<'_, E>,
        simd: Simd,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Addition<E>> {
        if rows.dim() != self.layout.dim {
            return Err(Error::DimensionMismatch { query: self.layout.dim, reference: rows.dim() });
        }
        self.check_total(&self.read(), rows.rows())?;
        let pool_threads = NonZero::new(threads).unwrap_or(NonZero::<usize>::MIN);
        pool::enter(pool_threads, threads <= 1, || {
            Source::one_shot(&rows).check_finite(threads, monitor)?;
            let segment = Segment::new(rows, self.layout)?;
            segment.pack(simd, threads, monitor)?;
            Ok(Addition(segment))
        })
    }

    /// The fast step of adding rows: append rows that were prepared by this index.
    ///
    /// # Errors
    /// [`Error::TooManyRows`], [`Error::OutOfMemory`]; then nothing has been appended.
    pub fn append(&self, Addition(segment): Addition<E>, simd: Simd) -> Result<()> {
        if segment.rows() == 0 {
            return Ok(());
        }
        if segment.layout() != self.layout {
            let wanted = "be prepared for this index".to_owned();
            return Err(Error::BadArray { argument: "rows", wanted, given: "rows prepared for another".to_owned() });
        }
        let changing = self.change();
        let mut segments = self.write();
        self.check_total(&segments, segment.rows())?;
        match segments.last_mut().filter(|last| last.is_growing() && segment.is_growing()) {
            Some(growing) => Segment::append(growing, segment.matrix()?)?,
            None => {
                try_reserve(&mut segments, 1, "the segments")?;
                segments.push(Arc::new(segment));
            }
        }
        let last = segments.last().filter(|last| !last.is_growing()).map(Arc::clone);
        drop(segments);
        drop(changing);
        if let Some(sealed) = last {
            // An error does not matter: the rows are appended, and a search makes missing panels.
            let _ = pool::enter(NonZero::<usize>::MIN, true, || sealed.pack(simd, 1, &Monitor::new()));
        }
        Ok(())
    }

    fn check_total(&self, segments: &[Arc<Segment<E>>], more: usize) -> Result<()> {
        check_row_count(rows_of(segments).saturating_add(more), Argument::Reference)
    }

    /// Remove the rows whose entry in `mask` is true; later rows move up. After an error nothing has been removed.
    ///
    /// # Errors
    /// [`Error::BadArray`] for a mask of another length, [`Error::BadFile`], [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn remove(&self, mask: &[bool], monitor: &Monitor) -> Result<()> {
        let _changing = self.change();
        let segments = self.read().clone();
        if mask.len() != rows_of(&segments) {
            return Err(Error::BadArray {
                argument: "mask",
                wanted: format!("have one entry for each of the {} rows", rows_of(&segments)),
                given: mask.len().to_string(),
            });
        }
        let mut remaining: Vec<Arc<Segment<E>>> = try_vec(segments.len(), "the segments")?;
        check_files(&segments)?;
        let mut rest = mask;
        for segment in &segments {
            monitor.check()?;
            let here;
            (here, rest) = rest.split_at(segment.rows());
            let segment = match (here.contains(&true), here.contains(&false)) {
                (false, _) => Arc::clone(segment),
                (true, true) => Arc::new(segment.without(here, monitor)?),
                (true, false) => continue,
            };
            match remaining.last_mut().filter(|last| last.is_growing() && segment.is_growing()) {
                // Merge adjacent growing segments, so that small ones do not accumulate.
                Some(growing) => Segment::append(growing, segment.matrix()?)?,
                None => remaining.push(segment),
            }
        }
        check_files(&segments)?;
        *self.write() = remaining;
        Ok(())
    }

    /// Remove all rows.
    pub fn reset(&self) {
        let _changing = self.change();
        self.write().clear();
    }

    /// A copy of the rows `start .. end`, row-major; to the last row if `end` is `None`.
    ///
    /// # Errors
    /// [`Error::BadArray`] unless they are rows of the index, [`Error::BadFile`], [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn copy(&self, start: usize, end: Option<usize>, monitor: &Monitor) -> Result<Vec<E>> {
        let segments = self.read().clone();
        let rows = rows_of(&segments);
        let end = end.unwrap_or(rows);
        if start > end || end > rows {
            let wanted = format!("lie within the {rows} rows of the index");
            return Err(Error::BadArray { argument: "rows", wanted, given: format!("{start} to {end}") });
        }
        let mut copy = try_vec((end - start) * self.layout.dim, "the rows")?;
        reading(&segments, || {
            let mut first = 0;
            for segment in &segments {
                let clamp = |row: usize| row.clamp(first, first + segment.rows()) - first;
                let (here, step) = (clamp(start)..clamp(end), segment::polled_rows(self.layout.dim));
                for row in here.clone().step_by(step) {
                    monitor.check()?;
                    copy.extend_from_slice(segment.range(row..here.end.min(row + step))?);
                }
                first += segment.rows();
            }
            Ok(())
        })?;
        Ok(copy)
    }

    /// The current rows, for any number of searches. Later changes of the index do not affect it.
    pub fn snapshot(&self) -> Snapshot<E> {
        Snapshot { layout: self.layout, segments: self.read().clone() }
    }
}

/// Rows prepared by [`Index::prepare`], ready to be appended to the same index.
pub struct Addition<E>(Segment<E>);

fn rows_of<E: Element + Stored>(segments: &[Arc<Segment<E>>]) -> usize {
    segments.iter().map(|segment| segment.rows()).sum()
}

/// Check that the files of mapped segments were not written to since they were loaded.
fn check_files<E: Element + Stored>(segments: &[Arc<Segment<E>>]) -> Result<()> {
    segments.iter().try_for_each(|segment| segment.check_file())
}

/// Run `work`, which reads these segments, between two checks of their files.
fn reading<E: Element + Stored, T>(segments: &[Arc<Segment<E>>], work: impl FnOnce() -> Result<T>) -> Result<T> {
    check_files(segments)?;
    let result = work();
    // The first error is reported: damage found by `work` follows from the change.
    check_files(segments)?;
    result
}

/// The rows of an index at one moment.
pub struct Snapshot<E: Element + Stored> {
    layout: Layout,
    segments: Vec<Arc<Segment<E>>>,
}

impl<E: Element + Stored> Snapshot<E> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        rows_of(&self.segments)
    }

    fn matrices(&self) -> Result<Vec<MatrixRef<'_, E>>> {
        let mut matrices = try_vec(self.segments.len(), "the segments")?;
        for segment in &self.segments {
            matrices.push(segment.unverified()?);
        }
        Ok(matrices)
    }

    fn sources<'a>(&'a self, matrices: &'a [MatrixRef<'a, E>]) -> Result<Vec<Source<'a>>> {
        let sources = self.segments.iter().zip(matrices).map(|(segment, rows)| segment.source(rows));
        try_collect(sources, "the segments")
    }

    /// The sizes of a search for the `k` nearest.
    fn problem(&self, queries: usize, k: usize, threads: NonZero<usize>) -> Problem {
        Problem {
            queries,
            references: self.rows(),
            dim: self.layout.dim,
            k,
            threads: threads.get(),
            double: E::DOUBLE,
            packed: self.segments.iter().any(|segment| !segment.is_growing()),
            metric: self.layout.metric,
        }
    }

    /// How a search for the `k` nearest of `queries` queries runs. Searches by radius and for ranks run like `k = 1`.
    pub fn execution(&self, queries: usize, k: usize, simd: Simd, threads: NonZero<usize>) -> Execution {
        Execution::decide(simd, threads, &self.problem(queries, k, threads))
    }

    /// The k nearest rows of each query, by the metric of the index.
    ///
    /// # Errors
    /// As for [`crate::Search`], and [`Error::BadFile`] if the rows or codes are mapped from a damaged file.
    pub fn search(
        &self,
        query: QueryRef<'_, E>,
        options: Options<'_>,
        monitor: &Monitor,
    ) -> Result<Neighbours<E::Output>> {
        let options = Options { metric: self.layout.metric, ..options };
        let query = query.erase();
        options.check(query, self.layout.dim, self.rows())?;
        let execution = self.execution(query.rows(), options.k, options.simd, options.threads);
        let search = || {
            monitor.begin(self.problem(query.rows(), options.k, options.threads).pairs());
            let mut search = BlockSearch::of(query, options)?;
            for source in self.sources(&self.matrices()?)? {
                search.add(query, source, monitor)?;
            }
            search.result::<E>()
        };
        execution.run(|| reading(&self.segments, search))
    }

    /// All rows within a radius of each query, by the metric of the index.
    ///
    /// # Errors
    /// As for [`crate::RadiusSearch`], and [`Error::BadFile`] if the rows or codes are mapped from a damaged file.
    pub fn radius(
        &self,
        query: QueryRef<'_, E>,
        options: RadiusOptions<'_>,
        monitor: &Monitor,
    ) -> Result<Within<E::Output>> {
        let options = RadiusOptions { metric: self.layout.metric, ..options };
        let query = query.erase();
        options.check(query, self.layout.dim, self.rows())?;
        let execution = self.execution(query.rows(), 1, options.simd, options.threads);
        let problem = options.problem(query, self.rows(), E::DOUBLE, false);
        let problem = Problem { threads: execution.threads(), ..problem };
        let search = || radius::search(query, &self.sources(&self.matrices()?)?, options, problem, monitor);
        execution.run(|| reading(&self.segments, search))
    }

    /// The ranks of each query's target rows, by the metric of the index.
    ///
    /// # Errors
    /// As for [`crate::RankSearch`], and [`Error::BadFile`] if the rows or codes are mapped from a damaged file.
    pub fn ranks(
        &self,
        query: QueryRef<'_, E>,
        groups: &Groups<'_>,
        options: RankOptions<'_>,
        monitor: &Monitor,
    ) -> Result<Ranks> {
        let options = RankOptions { metric: self.layout.metric, ..options };
        let query = query.erase();
        options.check(query, self.layout.dim, self.rows(), groups)?;
        let execution = self.execution(query.rows(), 1, options.simd, options.threads);
        let problem = options.problem(query, self.rows(), E::DOUBLE, false);
        let problem = Problem { threads: execution.threads(), ..problem };
        let search = || ranks::search(query, &self.sources(&self.matrices()?)?, groups, options, problem, monitor);
        execution.run(|| reading(&self.segments, search))
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::arch::level::Level;
    use crate::runtime::float_env::while_flushing;
    use crate::search::SelfRule;

    /// A thread that treats denormals as zero would read and pack other rows.
    #[test]
    fn panels_do_not_depend_on_the_callers_float_state() {
        // Below twice the smallest normal number, half of all numbers are denormals.
        let numbers: Vec<f32> = (0..4000u32).map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761) >> 8)).collect();
        let rows = MatrixRef::new(&numbers, 500, 8, Argument::Reference).expect("a good matrix");
        let queries = MatrixRef::new(&numbers[..800], 100, 8, Argument::Query).expect("a good matrix");
        let simd = Level::available().into_iter().filter_map(Simd::new).next_back().expect("a level");
        let monitor = Monitor::new();
        let options = Options {
            k: 3,
            metric: Metric::SqEuclidean,
            exclude: SelfRule::None,
            simd,
            threads: NonZero::<usize>::MIN,
        };
        let index = || Index::new(8, Metric::SqEuclidean).expect("columns").sealed_at(64);
        let (plain, flushed) = (index(), index());
        plain.add(rows, simd, 1, &monitor).expect("good rows");
        while_flushing(|| flushed.add(rows, simd, 1, &monitor)).expect("good rows");
        let found = |index: &Index<f32>| index.snapshot().search(queries.into(), options, &monitor);
        assert_eq!(found(&flushed), found(&plain));
    }
}
