//! Packed references that are kept between searches.
//!
//! ```text
//! Filtered::run::<K> ──made before for K?──> the panels
//!                    └── no ──Panels::make──> kept, if somebody keeps them ──> the panels
//! ```

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cancel::Monitor;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::level::Simd;
use crate::matrix::{Element, MatrixRef};
use crate::metric::Metric;
use crate::pack::{Frame, PackedReference};

/// Rows to search, and where their panels are kept; nowhere, if nobody wants them again.
#[derive(Clone, Copy)]
pub(crate) struct References<'a, E> {
    pub(crate) rows: MatrixRef<'a, E>,
    pub(crate) kept: Option<&'a Kept>,
}

impl<E: Element> References<'_, E> {
    /// The rows as kernel `K` reads them.
    pub(crate) fn panels<K: Kernel + 'static>(
        &self,
        simd: Simd,
        metric: Metric,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Arc<Panels<K>>> {
        let make = || Panels::make(simd, metric, self.rows, threads, monitor);
        match self.kept {
            Some(kept) => kept.panels(make),
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
    pub(crate) fn make<E: Element>(
        simd: Simd,
        metric: Metric,
        reference: MatrixRef<'_, E>,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Self> {
        let frame = Frame::choose(simd, metric, reference);
        let packed = PackedReference::pack(simd, &frame, reference, threads, monitor)?;
        Ok(Self { frame, packed })
    }
}

/// The panels of one matrix and one metric: a form for each kernel that has asked.
#[derive(Default)]
pub(crate) struct Kept(Mutex<Vec<Form>>);

/// One form, and the bytes it takes.
struct Form {
    panels: Arc<dyn Any + Send + Sync>,
    bytes: usize,
}

fn find<K: Kernel + 'static>(forms: &[Form]) -> Option<Arc<Panels<K>>> {
    forms.iter().find_map(|form| Arc::clone(&form.panels).downcast().ok())
}

impl Kept {
    /// The panels for kernel `K`, which `make` makes where nobody has asked for them before.
    pub(crate) fn panels<K: Kernel + 'static>(
        &self,
        make: impl FnOnce() -> Result<Panels<K>>,
    ) -> Result<Arc<Panels<K>>> {
        // A panic elsewhere cannot have left the list half changed.
        let forms = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(panels) = find(&forms()) {
            return Ok(panels);
        }
        // Never under the lock: a worker that waits for others may take up a task that wants the same panels.
        let made = Arc::new(make()?);
        let mut forms = forms();
        // Another search may have been first; then there is one form all the same.
        if let Some(panels) = find(&forms) {
            return Ok(panels);
        }
        let panels: Arc<Panels<K>> = Arc::clone(&made);
        forms.push(Form { bytes: made.packed.bytes(), panels });
        Ok(made)
    }

    /// Bytes of all forms.
    pub(crate) fn bytes(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|form| form.bytes).sum()
    }
}
