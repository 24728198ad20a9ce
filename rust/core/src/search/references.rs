//! References between searches: what is searched, and the panels that are kept of it.
//!
//! ```text
//! Filtered::run::<K> ──made for K before?───────> the panels
//!                    ├── no, but in a file ─map─> kept ──> the panels
//!                    └── no ──Panels::make──────> kept, if somebody keeps them ──> the panels
//! ```

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use crate::arch::kernel::Kernel;
use crate::arch::level::Simd;
use crate::error::{Argument, Result};
use crate::filter::frame::Frame;
use crate::filter::panels::{FirstBad, PackedReference};
use crate::filter::persist::codes_name;
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::runtime::Monitor;
use crate::saved::{Saved, Tensor};
use crate::search::plan;

/// Rows to search.
#[derive(Clone, Copy)]
pub(crate) struct References<'a, E> {
    pub(crate) rows: MatrixRef<'a, E>,
    /// Where their panels are kept; nowhere, if nobody wants them again.
    pub(crate) kept: Option<&'a PanelCache>,
    /// What to ask before a row is read; nothing, if they may all be read.
    pub(crate) guard: Option<&'a dyn Guard>,
    /// Whether all rows are known to be finite.
    pub(crate) finite: bool,
}

/// Knows whether rows may be read.
pub(crate) trait Guard: Sync {
    /// Asked for every row before its first use, and again at every other: it must be quick to say yes.
    fn verify(&self, rows: Range<usize>) -> Result<()>;
}

impl<'a, E> References<'a, E> {
    /// Rows that are searched once.
    pub(crate) fn one_shot(rows: MatrixRef<'a, E>) -> Self {
        Self { rows, kept: None, guard: None, finite: false }
    }

    /// Ask before `rows` are read.
    #[inline(always)]
    pub(crate) fn verify(&self, rows: Range<usize>) -> Result<()> {
        self.guard.map_or(Ok(()), |guard| guard.verify(rows))
    }

    /// Ask before these rows are read.
    #[inline(always)]
    pub(crate) fn verify_each(&self, rows: &[u32]) -> Result<()> {
        match self.guard {
            None => Ok(()),
            Some(guard) => rows.iter().try_for_each(|&row| guard.verify(row as usize..row as usize + 1)),
        }
    }
}

impl<E: Element> References<'_, E> {
    /// Whether all rows are finite, where nobody packs them; a pass over them is cheap beside a search in float64.
    pub(crate) fn check_finite(&self, threads: usize, monitor: &Monitor) -> Result<()> {
        if self.finite {
            return Ok(());
        }
        let bad = FirstBad::new();
        let is_bad = |row: &usize| !self.rows.row(*row).iter().all(|x| x.to_f64().is_finite());
        self.each_piece(threads, monitor, |mut rows| {
            if let Some(row) = rows.find(is_bad) {
                bad.report(row);
            }
        })?;
        bad.check(self.rows, Argument::Reference)
    }

    /// Do `work` for all rows, piece by piece, each when it may be read.
    fn each_piece(&self, threads: usize, monitor: &Monitor, work: impl Fn(Range<usize>) + Sync) -> Result<()> {
        let rows = self.rows.rows();
        let step = plan::block_rows(self.rows.dim().saturating_mul(size_of::<E>()));
        let piece = |number: usize| {
            monitor.check()?;
            let piece = number * step..((number + 1) * step).min(rows);
            self.verify(piece.clone())?;
            work(piece);
            Ok(())
        };
        let pieces = 0..rows.div_ceil(step);
        if threads == 1 { pieces.into_iter().try_for_each(piece) } else { pieces.into_par_iter().try_for_each(piece) }
    }

    /// The rows as kernel `K` reads them.
    pub(crate) fn panels<K: Kernel + 'static>(
        &self,
        simd: Simd,
        metric: Metric,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Arc<Panels<K>>> {
        let make = || {
            if self.guard.is_some() {
                self.each_piece(threads, monitor, |_| ())?;
            }
            Panels::make(simd, metric, self.rows, threads, monitor)
        };
        match self.kept {
            Some(kept) => kept.panels(self.rows, metric, make),
            None => make().map(Arc::new),
        }
    }
}

/// References as kernel `K` reads them, and how they got there.
pub(crate) struct Panels<K: Kernel> {
    pub(crate) frame: Frame,
    pub(crate) packed: PackedReference<K>,
}

impl<K: Kernel> Panels<K> {
    fn make<E: Element>(
        simd: Simd,
        metric: Metric,
        rows: MatrixRef<'_, E>,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Self> {
        let frame = Frame::choose(simd, metric, rows);
        let packed = PackedReference::pack(simd, &frame, rows, threads, monitor)?;
        Ok(Self { frame, packed })
    }
}

/// Panels of a kernel that is not named here.
pub(crate) trait AnyPanels: Any + Send + Sync {
    /// See [`codes_name`].
    fn codes_name(&self) -> String;
    /// Bytes of memory that they take.
    fn bytes(&self) -> usize;
    /// Bytes of their codes, wherever they lie.
    fn code_bytes(&self) -> usize;
    /// What a file has to hold to give them again; the names begin with `prefix`.
    fn tensors<'a>(&'a self, prefix: &str, tensors: &mut Vec<Tensor<'a>>);
}

impl<K: Kernel + 'static> AnyPanels for Panels<K> {
    fn codes_name(&self) -> String {
        codes_name::<K>()
    }

    fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    fn code_bytes(&self) -> usize {
        self.packed.code_bytes()
    }

    fn tensors<'a>(&'a self, prefix: &str, tensors: &mut Vec<Tensor<'a>>) {
        tensors.push(self.frame.tensor(prefix));
        self.packed.tensors(prefix, tensors);
    }
}

/// Panels in a file.
pub(crate) struct StoredPanels {
    pub(crate) saved: Saved,
    /// What the names of their tensors begin with.
    pub(crate) prefix: String,
    /// See [`codes_name`].
    pub(crate) codes_name: String,
}

/// The panels of one matrix and one metric: a form for each kernel that has asked.
#[derive(Default)]
pub(crate) struct PanelCache {
    forms: Mutex<Vec<Arc<dyn AnyPanels>>>,
    filed: Option<StoredPanels>,
}

fn find<K: Kernel + 'static>(forms: &[Arc<dyn AnyPanels>]) -> Option<Arc<Panels<K>>> {
    forms.iter().find_map(|form| (Arc::clone(form) as Arc<dyn Any + Send + Sync>).downcast().ok())
}

impl PanelCache {
    /// Panels that lie in a file until somebody asks for them.
    pub(crate) fn filed(filed: StoredPanels) -> Self {
        Self { forms: Mutex::default(), filed: Some(filed) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<dyn AnyPanels>>> {
        // A panic elsewhere cannot have left the list half changed.
        self.forms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The panels for kernel `K`, which `make` makes where nobody has asked for them before and no file holds them.
    fn panels<E: Element, K: Kernel + 'static>(
        &self,
        rows: MatrixRef<'_, E>,
        metric: Metric,
        make: impl FnOnce() -> Result<Panels<K>>,
    ) -> Result<Arc<Panels<K>>> {
        if let Some(panels) = find(&self.lock()) {
            return Ok(panels);
        }
        // Never under the lock: a worker that waits for others may take up a task that wants the same panels.
        let made = Arc::new(match &self.filed {
            Some(filed) if filed.codes_name == codes_name::<K>() => filed.read(rows, metric)?,
            _ => make()?,
        });
        let mut forms = self.lock();
        // Another search may have been first; then there is one form all the same.
        if let Some(panels) = find(&forms) {
            return Ok(panels);
        }
        forms.push(Arc::clone(&made) as Arc<dyn AnyPanels>);
        Ok(made)
    }

    /// Bytes of memory that all forms take.
    pub(crate) fn bytes(&self) -> usize {
        self.lock().iter().map(|form| form.bytes()).sum()
    }

    /// The form that takes the least in a file.
    pub(crate) fn smallest(&self) -> Option<Arc<dyn AnyPanels>> {
        self.lock().iter().min_by_key(|form| form.code_bytes()).map(Arc::clone)
    }
}

impl StoredPanels {
    fn read<E: Element, K: Kernel>(&self, rows: MatrixRef<'_, E>, metric: Metric) -> Result<Panels<K>> {
        let frame = Frame::read(&self.saved, &self.prefix, metric, rows.dim(), E::DOUBLE)?;
        let packed = PackedReference::read(&self.saved, &self.prefix, rows.rows(), rows.dim())?;
        Ok(Panels { frame, packed })
    }
}
