//! A segment of an index: rows and, once it is sealed, their panels.
//!
//! ```text
//! growing: rows only ──append──> at `sealed_rows` rows: sealed, with a panel cache
//! sealed:  never appended to; its panels are packed by Segment::pack, by the first search, or mapped from a file
//! ```

use std::ops::Range;
use std::sync::Arc;

use crate::arch::WithKernel;
use crate::arch::kernel::Microkernel;
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::runtime::alloc::try_vec;
use crate::runtime::{Monitor, POLLED};
use crate::saved::{Mapped, Stored};
use crate::search::plan::Problem;
use crate::search::references::{Guard, PanelCache, Source, StoredPanels};

/// The properties that all segments of an index share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layout {
    pub(super) metric: Metric,
    /// Number of columns.
    pub(super) dim: usize,
    /// Number of rows at which a segment is sealed: it is packed and does not grow any more.
    pub(super) sealed_rows: usize,
}

/// See the module header.
pub(super) struct Segment<E> {
    numbers: Numbers<E>,
    rows: usize,
    layout: Layout,
    /// `None` while the segment grows.
    panels: Option<PanelCache>,
    /// Bytes of memory that hold the rows and codes of a file that was read instead of mapped.
    read_bytes: usize,
}

/// All rows, row-major.
enum Numbers<E> {
    Owned(Vec<E>),
    Mapped(Mapped<E>),
}

const ROWS: &str = "the rows of the index";

impl<E: Element + Stored> Segment<E> {
    /// A segment with a copy of `rows`; growing if they are few.
    pub(super) fn new(rows: MatrixRef<'_, E>, layout: Layout) -> Result<Self> {
        let mut numbers = try_vec(rows.rows() * rows.dim(), ROWS)?;
        numbers.extend_from_slice(rows.as_slice());
        Ok(Self::of(Numbers::Owned(numbers), rows.rows(), layout))
    }

    /// A segment whose rows, and panels if it has any, are in a file, of which `read_bytes` are in memory.
    pub(super) fn mapped(
        numbers: Mapped<E>,
        rows: usize,
        stored: Option<StoredPanels>,
        layout: Layout,
        read_bytes: usize,
    ) -> Self {
        let mut segment = Self { read_bytes, ..Self::of(Numbers::Mapped(numbers), rows, layout) };
        if let Some(stored) = stored {
            segment.panels = Some(PanelCache::stored(layout.metric, stored));
        }
        segment
    }

    fn of(numbers: Numbers<E>, rows: usize, layout: Layout) -> Self {
        let panels = (rows >= layout.sealed_rows).then(|| PanelCache::new(layout.metric));
        Self { numbers, rows, layout, panels, read_bytes: 0 }
    }

    /// Make the panels of the first filter of searches at this level, unless they exist.
    pub(super) fn pack(&self, simd: Simd, threads: usize, monitor: &Monitor) -> Result<()> {
        let metric = self.layout.metric;
        if self.is_growing() || !metric.is_filterable() {
            return Ok(());
        }
        let problem = Problem {
            queries: usize::MAX,
            references: self.rows,
            dim: self.layout.dim,
            k: 1,
            threads,
            double: E::DOUBLE,
            packed: true,
            metric,
        };
        let Some(filter) = problem.filter_of_panels(simd.level()) else {
            return Ok(());
        };
        let rows = self.unverified()?;
        let packing = Packing { source: self.source(&rows), metric, simd, threads, monitor };
        crate::filter::with_filter(simd, metric, filter, packing)
    }

    /// Append rows to a growing segment: in place, unless a snapshot shares it.
    pub(super) fn append(segment: &mut Arc<Self>, rows: MatrixRef<'_, E>) -> Result<()> {
        let count = segment.rows + rows.rows();
        let Layout { metric, dim, sealed_rows } = segment.layout;
        let sealed = count >= sealed_rows;
        if let Some(Self { numbers: Numbers::Owned(numbers), rows: so_far, panels, .. }) = Arc::get_mut(segment) {
            let more = rows.as_slice();
            if numbers.capacity() < count * dim {
                // Grow by doubling, since rows may be added one by one, but not beyond the rows of a full segment.
                let room = so_far.saturating_mul(2).min(sealed_rows).max(count) * dim;
                let bytes = room * size_of::<E>();
                let reserved = numbers.try_reserve_exact(room - numbers.len());
                reserved.map_err(|_| Error::OutOfMemory { bytes, what: ROWS })?;
            }
            numbers.extend_from_slice(more);
            *so_far = count;
            *panels = sealed.then(|| PanelCache::new(metric));
            return Ok(());
        }
        let mut numbers = try_vec(count * dim, ROWS)?;
        numbers.extend_from_slice(segment.range(0..segment.rows)?);
        numbers.extend_from_slice(rows.as_slice());
        *segment = Arc::new(Self::of(Numbers::Owned(numbers), count, segment.layout));
        Ok(())
    }

    /// A new segment of the rows whose entry in `mask` is false. Its panels are made when they are first needed.
    pub(super) fn without(&self, mask: &[bool], monitor: &Monitor) -> Result<Self> {
        let count = mask.iter().filter(|removed| !**removed).count();
        let mut numbers = try_vec(count * self.layout.dim, ROWS)?;
        let step = polled_rows(self.layout.dim);
        for first in (0..self.rows).step_by(step) {
            monitor.check()?;
            for row in (first..self.rows.min(first + step)).filter(|&row| !mask[row]) {
                numbers.extend_from_slice(self.range(row..row + 1)?);
            }
        }
        let mut segment = Self::of(Numbers::Owned(numbers), count, self.layout);
        // A sealed segment that falls below the limit stays sealed: otherwise each search would pack it again.
        if !self.is_growing() && segment.is_growing() && count >= self.layout.sealed_rows.div_ceil(2) {
            segment.panels = Some(PanelCache::new(self.layout.metric));
        }
        Ok(segment)
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Whether rows can be appended.
    pub(super) fn is_growing(&self) -> bool {
        self.panels.is_none()
    }

    pub(super) fn panels(&self) -> Option<&PanelCache> {
        self.panels.as_ref()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        let numbers = match &self.numbers {
            Numbers::Owned(numbers) => numbers.capacity() * size_of::<E>(),
            Numbers::Mapped(_) => self.read_bytes,
        };
        numbers + self.panels.as_ref().map_or(0, PanelCache::bytes)
    }

    /// The elements of some rows, verified.
    pub(super) fn range(&self, rows: Range<usize>) -> Result<&[E]> {
        let range = rows.start * self.layout.dim..rows.end * self.layout.dim;
        match &self.numbers {
            Numbers::Owned(numbers) => Ok(&numbers[range]),
            Numbers::Mapped(numbers) => numbers.range(range),
        }
    }

    /// Check that the file of mapped rows was not written to since it was loaded. Called before and after each use.
    pub(super) fn check_file(&self) -> Result<()> {
        match &self.numbers {
            Numbers::Owned(_) => Ok(()),
            Numbers::Mapped(numbers) => numbers.check_unchanged(),
        }
    }

    /// All rows, verified.
    pub(super) fn matrix(&self) -> Result<MatrixRef<'_, E>> {
        MatrixRef::new(self.range(0..self.rows)?, self.rows, self.layout.dim, Argument::Reference)
    }

    /// All rows, unverified: each must be verified before it is read.
    pub(super) fn unverified(&self) -> Result<MatrixRef<'_, E>> {
        let numbers = match &self.numbers {
            Numbers::Owned(numbers) => numbers.as_slice(),
            Numbers::Mapped(numbers) => numbers.unverified(),
        };
        MatrixRef::new(numbers, self.rows, self.layout.dim, Argument::Reference)
    }

    /// The source of a scan; `rows` are those of [`Segment::unverified`].
    pub(super) fn source<'a>(&'a self, rows: &'a MatrixRef<'a, E>) -> Source<'a> {
        let guard = match &self.numbers {
            Numbers::Owned(_) => None,
            Numbers::Mapped(_) => Some(self as &dyn Guard),
        };
        let cache = self.panels.as_ref();
        Source { rows, cache, guard, finite: true, packed: cache.is_some() }
    }
}

/// Rows that are copied between two polls.
pub(super) fn polled_rows(dim: usize) -> usize {
    (POLLED / dim.max(1)).max(1)
}

impl<E: Element + Stored> Guard for Segment<E> {
    #[inline]
    fn verify(&self, rows: Range<usize>) -> Result<()> {
        match &self.numbers {
            Numbers::Owned(_) => Ok(()),
            Numbers::Mapped(numbers) => numbers.verify(rows.start * self.layout.dim..rows.end * self.layout.dim),
        }
    }
}

/// Packs the rows of a source into its cache.
struct Packing<'a> {
    source: Source<'a>,
    metric: Metric,
    simd: Simd,
    threads: usize,
    monitor: &'a Monitor,
}

impl WithKernel for Packing<'_> {
    type Output = Result<()>;

    fn run<K: Microkernel + 'static>(self, _: K) -> Self::Output {
        self.source.panels::<K>(self.simd, self.metric, self.threads, self.monitor).map(drop)
    }
}
