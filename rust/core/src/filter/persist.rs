//! Saving and loading panels. Codes are mapped; the small arrays beside them are copied.
//!
//! ```text
//! Frame            ──> tensor `frame`    scale, then the centre
//! PackedReference  ──> tensors `codes` [panel][step][NR], `offsets`, `scales` [panel][NR], `terms` [panel][3]
//! ```
//!
//! The format of the codes depends only on the metric and on the kernel's [`Microkernel::COLUMNS`] and [`Microkernel::NR`],
//! not on the level that encoded them. Codes of another level are valid too, since they come with their own error terms.

use super::codes::Codes;
use super::frame::{Frame, is_scale};
use super::panels::PackedReference;
use crate::arch::kernel::{Microkernel, PanelTerms};
use crate::error::{Error, Result};
use crate::metric::Metric;
use crate::runtime::alloc::{Aligned, try_collect, try_vec};
use crate::saved::{Mapped, Push, Saved, Stored, Tensor};

/// The name of the format of a kernel's codes.
pub(crate) fn codes_name<K: Microkernel>() -> String {
    format!("{}x{}", if K::COLUMNS == 1 { "float32" } else { "int8" }, K::NR)
}

impl Frame {
    pub(crate) fn tensor(&self, prefix: &str) -> Tensor<'_> {
        Tensor::new(format!("{prefix}frame"), &[1 + self.centre.len()], |push: Push<'_, f64>| {
            push(&[self.scale])?;
            push(&self.centre)
        })
    }

    /// The frame of a file; `double` says whether the rows are float64.
    pub(crate) fn read(saved: &Saved, prefix: &str, metric: Metric, dim: usize, double: bool) -> Result<Self> {
        let name = format!("{prefix}frame");
        let numbers: Vec<f64> = read(saved, &name, &[1 + dim])?;
        let (scale, centre) = (numbers[0], &numbers[1..]);
        if !is_scale(scale) || !centre.iter().all(|c| c.is_finite()) {
            let wanted = format!("a power of two and a finite centre in tensor {name:?}");
            return Err(Error::bad_file(saved.path(), wanted, "something else"));
        }
        Self::new(metric, try_collect(centre.iter().copied(), "the saved panels")?, scale, double)
    }
}

impl<K: Microkernel> PackedReference<K> {
    pub(crate) fn tensors<'a>(&'a self, prefix: &str, tensors: &mut Vec<Tensor<'a>>) {
        let panels = self.panels();
        tensors.push(Tensor::new(
            format!("{prefix}codes"),
            &[panels, self.panel_len],
            move |push: Push<'_, K::Code>| {
                let codes = self.codes.as_slice();
                for panel in 0..panels {
                    let range = panel * self.panel_len..(panel + 1) * self.panel_len;
                    self.codes.verify(range.clone())?;
                    push(&codes[range])?;
                }
                Ok(())
            },
        ));
        let numbers = [("offsets", &self.offsets), ("scales", &self.scales)];
        tensors.extend(
            numbers.map(|(name, numbers)| {
                Tensor::of_slice(format!("{prefix}{name}"), &[panels, K::NR], numbers.as_slice())
            }),
        );
        tensors.push(Tensor::new(format!("{prefix}terms"), &[panels, 3], |push: Push<'_, f32>| {
            self.terms.iter().try_for_each(|terms| push(&[terms.a, terms.b, terms.c]))
        }));
    }

    /// The panels of `rows` rows of `dim` columns.
    pub(crate) fn read(saved: &Saved, prefix: &str, rows: usize, dim: usize) -> Result<Self> {
        let (panels, panel_len) = (rows.div_ceil(K::NR), dim.div_ceil(K::COLUMNS) * K::NR);
        let codes = mapped(saved, &format!("{prefix}codes"), &[panels, panel_len])?;
        let copied = |name: &str| {
            let numbers = read(saved, &format!("{prefix}{name}"), &[panels, K::NR])?;
            let mut copy = Aligned::zeroed(numbers.len(), "the saved panels")?;
            copy.as_mut_slice().copy_from_slice(&numbers);
            Ok(copy)
        };
        let numbers: Vec<f32> = read(saved, &format!("{prefix}terms"), &[panels, 3])?;
        let terms = numbers.as_chunks().0.iter().map(|&[a, b, c]| PanelTerms { a, b, c });
        let terms = try_collect(terms, "the saved panels")?;
        Ok(Self {
            codes: Codes::Mapped(codes),
            offsets: copied("offsets")?,
            scales: copied("scales")?,
            terms,
            panel_len,
        })
    }
}

/// The tensor of this name, which must have this shape.
pub(crate) fn mapped<T: Stored>(saved: &Saved, name: &str, shape: &[usize]) -> Result<Mapped<T>> {
    let tensor = saved.tensor::<T>(name)?;
    if tensor.shape() != shape {
        let (wanted, found) = (format!("tensor {name:?} of shape {shape:?}"), format!("shape {:?}", tensor.shape()));
        return Err(Error::bad_file(saved.path(), wanted, found));
    }
    Ok(tensor)
}

/// The same, verified and copied.
fn read<T: Stored>(saved: &Saved, name: &str, shape: &[usize]) -> Result<Vec<T>> {
    let tensor = mapped::<T>(saved, name, shape)?;
    let mut numbers = try_vec(tensor.len(), "the saved panels")?;
    numbers.extend_from_slice(tensor.range(0..tensor.len())?);
    Ok(numbers)
}
