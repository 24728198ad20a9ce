//! Some rows of an index and, from some number of rows on, their panels.

use std::ops::Range;
use std::sync::Arc;

use crate::arch::{self, WithKernel};
use crate::cancel::Monitor;
use crate::error::{Argument, Error, Result, try_vec};
use crate::kept::{Filed, Guard, Kept, References};
use crate::kernel::Kernel;
use crate::level::Simd;
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::plan::Problem;
use crate::saved::{Mapped, Stored};

/// See the module header.
pub(super) struct Part<E> {
    numbers: Numbers<E>,
    rows: usize,
    dim: usize,
    /// From so many rows on it takes no more.
    sealed_rows: usize,
    /// `None` while it takes more.
    kept: Option<Kept>,
}

/// All rows, one after the other.
enum Numbers<E> {
    Owned(Vec<E>),
    Mapped(Mapped<E>),
}

const ROWS: &str = "the rows of the index";

impl<E: Element + Stored> Part<E> {
    /// A part that takes more rows until there are `sealed_rows`.
    pub(super) fn new(rows: MatrixRef<'_, E>, sealed_rows: usize) -> Result<Self> {
        let mut numbers = try_vec(rows.rows() * rows.dim(), ROWS)?;
        numbers.extend_from_slice(rows.as_slice());
        Ok(Self::of(Numbers::Owned(numbers), rows.rows(), rows.dim(), sealed_rows))
    }

    /// A part whose rows lie in a file, and its panels if it has any.
    pub(super) fn mapped(
        numbers: Mapped<E>,
        rows: usize,
        dim: usize,
        filed: Option<Filed>,
        sealed_rows: usize,
    ) -> Self {
        let mut part = Self::of(Numbers::Mapped(numbers), rows, dim, sealed_rows);
        if let Some(filed) = filed {
            part.kept = Some(Kept::filed(filed));
        }
        part
    }

    fn of(numbers: Numbers<E>, rows: usize, dim: usize, sealed_rows: usize) -> Self {
        let kept = (rows >= sealed_rows).then(Kept::default);
        Self { numbers, rows, dim, sealed_rows, kept }
    }

    /// Make the panels that searches of this level begin with, unless they are there.
    pub(super) fn pack(&self, metric: Metric, simd: Simd, threads: usize, monitor: &Monitor) -> Result<()> {
        if self.is_open() || !metric.is_filterable() {
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
        arch::with_filter(simd, metric, filter, packing)
    }

    /// Append rows to an open part: in place, unless a search is looking at it.
    pub(super) fn append(part: &mut Arc<Self>, rows: MatrixRef<'_, E>) -> Result<()> {
        let count = part.rows + rows.rows();
        let sealed = count >= part.sealed_rows;
        let (dim, sealed_rows) = (part.dim, part.sealed_rows);
        if let Some(Self { numbers: Numbers::Owned(numbers), rows: so_far, kept, .. }) = Arc::get_mut(part) {
            let more = rows.as_slice();
            if numbers.capacity() < count * dim {
                // Room for as many again, since more may come one by one, but for no more than the part will take.
                let room = so_far.saturating_mul(2).min(sealed_rows).max(count) * dim;
                let bytes = room * size_of::<E>();
                let reserved = numbers.try_reserve_exact(room - numbers.len());
                reserved.map_err(|_| Error::OutOfMemory { bytes, what: ROWS })?;
            }
            numbers.extend_from_slice(more);
            *so_far = count;
            *kept = sealed.then(Kept::default);
            return Ok(());
        }
        let mut numbers = try_vec(count * part.dim, ROWS)?;
        numbers.extend_from_slice(part.range(0..part.rows)?);
        numbers.extend_from_slice(rows.as_slice());
        *part = Arc::new(Self::of(Numbers::Owned(numbers), count, part.dim, part.sealed_rows));
        Ok(())
    }

    /// The rows whose place in `mask` is false, as a part of its own. Its panels are made when they are first needed.
    pub(super) fn without(&self, mask: &[bool]) -> Result<Self> {
        let count = mask.iter().filter(|removed| !**removed).count();
        let mut numbers = try_vec(count * self.dim, ROWS)?;
        for row in (0..self.rows).filter(|&row| !mask[row]) {
            numbers.extend_from_slice(self.range(row..row + 1)?);
        }
        let mut part = Self::of(Numbers::Owned(numbers), count, self.dim, self.sealed_rows);
        // A part that was just large enough stays packed, or each search would pack it.
        if !self.is_open() && part.is_open() && count >= self.sealed_rows.div_ceil(2) {
            part.kept = Some(Kept::default());
        }
        Ok(part)
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Whether it takes more rows.
    pub(super) fn is_open(&self) -> bool {
        self.kept.is_none()
    }

    pub(super) fn kept(&self) -> Option<&Kept> {
        self.kept.as_ref()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        let numbers = match &self.numbers {
            Numbers::Owned(numbers) => numbers.capacity() * size_of::<E>(),
            Numbers::Mapped(_) => 0,
        };
        numbers + self.kept.as_ref().map_or(0, Kept::bytes)
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
        Ok(References { rows, kept: self.kept.as_ref(), guard })
    }
}

impl<E: Element + Stored> Guard for Part<E> {
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
