//! Saving and loading an index.
//!
//! ```text
//! texts:   dtype, metric, p, columns, segments; for segment i with panels: `i.codes`, the name of the format of their codes
//! tensors: `i.rows` [rows][columns] and, with the prefix `i.`, those of its panels (`filter/persist.rs`)
//! ```

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;

use super::{Index, Layout, Segment, check_files};
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::filter::persist::mapped;
use crate::matrix::{Element, check_row_count};
use crate::metric::Metric;
use crate::runtime::Monitor;
use crate::runtime::pool;
use crate::saved::{self, Dtype, Saved, Stored, Tensor};
use crate::search::references::{PanelCache, StoredPanels};

/// The name of the rows' type in the file.
fn dtype_name<E: Stored>() -> Result<&'static str> {
    match E::DTYPE {
        Dtype::F16 => Ok("float16"),
        Dtype::BF16 => Ok("bfloat16"),
        Dtype::F32 => Ok("float32"),
        Dtype::F64 => Ok("float64"),
        other => Err(Error::Panic(format!("an index of {other:?}"))),
    }
}

/// Bytes of the tensors whose names begin with `prefix`.
fn tensor_bytes(saved: &Saved, prefix: &str) -> usize {
    let tensors = saved.tensors().filter(|(name, ..)| name.starts_with(prefix));
    tensors.map(|(_, dtype, shape)| shape.iter().product::<usize>() * dtype.bitsize() / 8).sum()
}

impl<E: Element + Stored> Index<E> {
    /// Write the index to `path`, replacing an existing file; see [`saved`] for interruptions. Runs on the calling thread if
    /// `threads` is 1, else on the pool of this process.
    ///
    /// # Errors
    /// [`Error::File`] if the system fails, [`Error::BadFile`], [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn save(&self, path: &Path, simd: Simd, threads: usize, monitor: &Monitor) -> Result<()> {
        let pool_threads = NonZero::new(threads).unwrap_or(NonZero::<usize>::MIN);
        pool::enter(pool_threads, threads <= 1, || self.save_here(path, simd, threads, monitor))
    }

    fn save_here(&self, path: &Path, simd: Simd, threads: usize, monitor: &Monitor) -> Result<()> {
        let Layout { metric, dim, .. } = self.layout;
        let segments = self.snapshot().segments;
        let mut texts = BTreeMap::from([
            ("dtype".to_owned(), dtype_name::<E>()?.to_owned()),
            ("metric".to_owned(), metric.name().to_owned()),
            ("columns".to_owned(), dim.to_string()),
            ("segments".to_owned(), segments.len().to_string()),
        ]);
        if let Metric::Minkowski(p) = metric {
            // The shortest decimal that parses to the same number.
            texts.insert("p".to_owned(), format!("{:?}", p.get()));
        }
        check_files(&segments)?;
        let mut forms = Vec::new();
        for segment in &segments {
            // Before the file is started: packing uses all threads.
            segment.pack(simd, threads, monitor)?;
            forms.push(segment.panels().and_then(PanelCache::smallest));
        }
        let mut tensors = Vec::new();
        for (i, (segment, form)) in segments.iter().zip(&forms).enumerate() {
            // In pieces: rows that are mapped from another file are verified block by block.
            let rows = move |push: saved::Push<'_, E>| {
                let step = (saved::BLOCK / dim.saturating_mul(size_of::<E>())).max(1);
                (0..segment.rows())
                    .step_by(step)
                    .try_for_each(|start| push(segment.range(start..(start + step).min(segment.rows()))?))
            };
            tensors.push(Tensor::new(format!("{i}.rows"), &[segment.rows(), dim], rows));
            if let Some(form) = form {
                texts.insert(format!("{i}.codes"), form.codes_name());
                form.tensors(&format!("{i}."), &mut tensors);
            }
        }
        saved::write_if(path, &texts, tensors, monitor, || check_files(&segments))
    }

    /// The index in an open file. Rows and codes are read when they are searched, and verified before.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the file is not an index of this element type.
    pub fn load(saved: &Saved) -> Result<Self> {
        let bad = |wanted: String, found: &str| Error::bad_file(saved.path(), wanted, found.to_owned());
        let text = |key: &str| {
            saved.metadata().get(key).map(String::as_str).ok_or_else(|| bad(format!("the entry {key:?}"), "none"))
        };
        let number = |key: &str| {
            let text = text(key)?;
            text.parse::<usize>().map_err(|_| bad(format!("a number as the entry {key:?}"), text))
        };
        let p = match saved.metadata().get("p") {
            Some(p) => Some(p.parse::<f64>().map_err(|_| bad("a number as the entry \"p\"".to_owned(), p))?),
            None => None,
        };
        let metric = text("metric")?;
        let metric =
            Metric::parse(metric, p).map_err(|_| bad("a metric that this version knows".to_owned(), metric))?;
        let dim = number("columns")?;
        let index = Self::new(dim, metric).map_err(|_| bad("at least one column".to_owned(), "none"))?;
        let mut segments = Vec::new();
        let mut total = 0usize;
        for i in 0..number("segments")? {
            let name = format!("{i}.rows");
            let shape = saved.tensor::<E>(&name)?.shape().to_vec();
            let &[rows, _] = shape.as_slice() else {
                return Err(bad(format!("a matrix as tensor {name:?}"), &format!("shape {shape:?}")));
            };
            let numbers = mapped::<E>(saved, &name, &[rows, dim])?;
            let stored = saved.metadata().get(&format!("{i}.codes")).map(|codes_name| StoredPanels {
                saved: saved.clone(),
                prefix: format!("{i}."),
                codes_name: codes_name.clone(),
            });
            let read_bytes = if saved.is_in_memory() { tensor_bytes(saved, &format!("{i}.")) } else { 0 };
            segments.push(Arc::new(Segment::mapped(numbers, rows, stored, index.layout, read_bytes)));
            total = total.saturating_add(rows);
        }
        check_row_count(total, Argument::Reference)?;
        *index.write() = segments;
        Ok(index)
    }
}
