//! Some rows of an index and, from some number of rows on, their panels.

use std::ops::Range;
use std::sync::Arc;

use crate::arch::WithKernel;
use crate::arch::kernel::Kernel;
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;
use crate::saved::{Mapped, Stored};
use crate::search::plan::Problem;
use crate::search::references::{Guard, PanelCache, References, StoredPanels};

/// See the module header.
pub(super) struct Segment<E> {
    numbers: Numbers<E>,
    rows: usize,
    dim: usize,
    /// From so many rows on it takes no more.
    sealed_rows: usize,
    /// `None` while it takes more.
    panels: Option<PanelCache>,
}

/// All rows, one after the other.
enum Numbers<E> {
    Owned(Vec<E>),
    Mapped(Mapped<E>),
}

const ROWS: &str = "the rows of the index";

impl<E: Element + Stored> Segment<E> {
    /// A segment that takes more rows until there are `sealed_rows`.
    pub(super) fn new(rows: MatrixRef<'_, E>, sealed_rows: usize) -> Result<Self> {
        let mut numbers = try_vec(rows.rows() * rows.dim(), ROWS)?;
        numbers.extend_from_slice(rows.as_slice());
        Ok(Self::of(Numbers::Owned(numbers), rows.rows(), rows.dim(), sealed_rows))
    }

    /// A segment whose rows lie in a file, and its panels if it has any.
    pub(super) fn mapped(
        numbers: Mapped<E>,
        rows: usize,
        dim: usize,
        filed: Option<StoredPanels>,
        sealed_rows: usize,
    ) -> Self {
        let mut segment = Self::of(Numbers::Mapped(numbers), rows, dim, sealed_rows);
        if let Some(filed) = filed {
            segment.panels = Some(PanelCache::filed(filed));
        }
        segment
    }

    fn of(numbers: Numbers<E>, rows: usize, dim: usize, sealed_rows: usize) -> Self {
        let panels = (rows >= sealed_rows).then(PanelCache::default);
        Self { numbers, rows, dim, sealed_rows, panels }
    }

    /// Make the panels that searches of this level begin with, unless they are there.
    pub(super) fn pack(&self, metric: Metric, simd: Simd, threads: usize, monitor: &Monitor) -> Result<()> {
        if self.is_growing() || !metric.is_filterable() {
            return Ok(());
        }
        let problem = Problem {
            queries: usize::MAX,
            references: self.rows,
            dim: self.dim,
            k: 1,
            threads,
            double: E::DOUBLE,
            packed: true,
            metric,
        };
        let Some(filter) = problem.filter_of_panels(simd.level()) else {
            return Ok(());
        };
        let packing = Packing { references: self.references(self.dim)?, metric, simd, threads, monitor };
        crate::filter::with_filter(simd, metric, filter, packing)
    }

    /// Append rows to an open segment: in place, unless a search is looking at it.
    pub(super) fn append(segment: &mut Arc<Self>, rows: MatrixRef<'_, E>) -> Result<()> {
        let count = segment.rows + rows.rows();
        let sealed = count >= segment.sealed_rows;
        let (dim, sealed_rows) = (segment.dim, segment.sealed_rows);
        if let Some(Self { numbers: Numbers::Owned(numbers), rows: so_far, panels, .. }) = Arc::get_mut(segment) {
            let more = rows.as_slice();
            if numbers.capacity() < count * dim {
                // Room for as many again, since more may come one by one, but for no more than the segment will take.
                let room = so_far.saturating_mul(2).min(sealed_rows).max(count) * dim;
                let bytes = room * size_of::<E>();
                let reserved = numbers.try_reserve_exact(room - numbers.len());
                reserved.map_err(|_| Error::OutOfMemory { bytes, what: ROWS })?;
            }
            numbers.extend_from_slice(more);
            *so_far = count;
            *panels = sealed.then(PanelCache::default);
            return Ok(());
        }
        let mut numbers = try_vec(count * segment.dim, ROWS)?;
        numbers.extend_from_slice(segment.range(0..segment.rows)?);
        numbers.extend_from_slice(rows.as_slice());
        *segment = Arc::new(Self::of(Numbers::Owned(numbers), count, segment.dim, segment.sealed_rows));
        Ok(())
    }

    /// The rows whose place in `mask` is false, as a segment of its own. Its panels are made when they are first needed.
    pub(super) fn without(&self, mask: &[bool]) -> Result<Self> {
        let count = mask.iter().filter(|removed| !**removed).count();
        let mut numbers = try_vec(count * self.dim, ROWS)?;
        for row in (0..self.rows).filter(|&row| !mask[row]) {
            numbers.extend_from_slice(self.range(row..row + 1)?);
        }
        let mut segment = Self::of(Numbers::Owned(numbers), count, self.dim, self.sealed_rows);
        // A segment that was just large enough stays packed, or each search would pack it.
        if !self.is_growing() && segment.is_growing() && count >= self.sealed_rows.div_ceil(2) {
            segment.panels = Some(PanelCache::default());
        }
        Ok(segment)
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Whether it takes more rows.
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
            Numbers::Mapped(_) => 0,
        };
        numbers + self.panels.as_ref().map_or(0, PanelCache::bytes)
    }

    /// The numbers of some rows, which may be read.
    pub(super) fn range(&self, rows: Range<usize>) -> Result<&[E]> {
        let range = rows.start * self.dim..rows.end * self.dim;
        match &self.numbers {
            Numbers::Owned(numbers) => Ok(&numbers[range]),
            Numbers::Mapped(numbers) => numbers.range(range),
        }
    }

    /// All rows, which may be read.
    pub(super) fn matrix(&self) -> Result<MatrixRef<'_, E>> {
        MatrixRef::new(self.range(0..self.rows)?, self.rows, self.dim, Argument::Reference)
    }

    /// The rows as a search wants them.
    pub(super) fn references(&self, dim: usize) -> Result<References<'_, E>> {
        let (numbers, guard) = match &self.numbers {
            Numbers::Owned(numbers) => (numbers.as_slice(), None),
            Numbers::Mapped(numbers) => (numbers.unverified(), Some(self as &dyn Guard)),
        };
        let rows = MatrixRef::new(numbers, self.rows, dim, Argument::Reference)?;
        Ok(References { rows, kept: self.panels.as_ref(), guard, finite: true })
    }
}

impl<E: Element + Stored> Guard for Segment<E> {
    #[inline]
    fn verify(&self, rows: Range<usize>) -> Result<()> {
        match &self.numbers {
            Numbers::Owned(_) => Ok(()),
            Numbers::Mapped(numbers) => numbers.verify(rows.start * self.dim..rows.end * self.dim),
        }
    }
}

/// Makes panels and keeps them.
struct Packing<'a, E> {
    references: References<'a, E>,
    metric: Metric,
    simd: Simd,
    threads: usize,
    monitor: &'a Monitor,
}

impl<E: Element> WithKernel for Packing<'_, E> {
    type Output = Result<()>;

    fn run<K: Kernel + 'static>(self, _: K) -> Self::Output {
        self.references.panels::<K>(self.simd, self.metric, self.threads, self.monitor).map(drop)
    }
}
