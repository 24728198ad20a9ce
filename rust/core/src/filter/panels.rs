//! Packing: from rows as passed to panels for a kernel.
//!
//! ```text
//! row ──frame: widen, normalise, centre──> Centred (float32 row, norms) ──encode──> lane of a panel
//!                           └─ not finite? an error names the row; the check costs nothing here
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use crate::arch::kernel::{
    Encoding, MAX_MR, MAX_RUN, Microkernel, PanelRun, PanelTerms, QueryTerms, SAMPLE_STRIDE, Visit,
};
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::rows::Rows;
use crate::filter::codes::Codes;
use crate::filter::frame::Frame;
use crate::runtime::Monitor;
use crate::runtime::alloc::{Aligned, try_filled, try_vec, try_zeroed};

/// The first row that is not finite, as found by many threads in any order.
pub(crate) struct FirstBad(AtomicUsize);

impl FirstBad {
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(usize::MAX))
    }

    pub(crate) fn report(&self, row: usize) {
        self.0.fetch_min(row, Ordering::Relaxed);
    }

    pub(crate) fn check(&self, matrix: &dyn Rows, argument: Argument) -> Result<()> {
        let row = self.0.load(Ordering::Relaxed);
        if row == usize::MAX {
            return Ok(());
        }
        Err(matrix.first_non_finite(argument, row).unwrap_or_else(|| Error::Panic("a finite row was refused".into())))
    }
}

/// All reference rows as panels of kernel `K`.
pub(crate) struct PackedReference<K: Microkernel> {
    pub(super) codes: Codes<K::Code>,
    pub(super) offsets: Aligned<f32>,
    pub(super) scales: Aligned<f32>,
    pub(super) terms: Vec<PanelTerms>,
    pub(super) panel_len: usize,
}

impl<K: Microkernel> PackedReference<K> {
    /// Encode all rows, in parallel over panels; without a rayon call if `threads` is 1, since this may be the caller's
    /// thread.
    pub(crate) fn pack(
        simd: Simd,
        frame: &Frame,
        reference: &dyn Rows,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Self> {
        let panels = reference.rows().div_ceil(K::NR);
        let panel_len = reference.dim().div_ceil(K::COLUMNS) * K::NR;
        let mut codes = Aligned::zeroed(panels * panel_len, "the packed reference")?;
        let mut offsets = Aligned::zeroed(panels * K::NR, "the packed reference")?;
        let mut scales = Aligned::zeroed(panels * K::NR, "the packed reference")?;
        let mut terms = try_filled(PanelTerms::default(), panels, "the packed reference")?;
        let bad = FirstBad::new();
        let pack_panel = |(scratch, out): &mut (Vec<f32>, Vec<f32>),
                          panel: usize,
                          codes: &mut [K::Code],
                          offsets: &mut [f32],
                          scales: &mut [f32],
                          terms: &mut PanelTerms|
         -> Result<()> {
            monitor.check()?;
            for lane in 0..K::NR {
                let row = panel * K::NR + lane;
                if row >= reference.rows() {
                    offsets[lane] = f32::INFINITY;
                    continue;
                }
                let wide = reference.widen(row, scratch);
                let centred = if K::Encoding::CENTER_F32 {
                    frame.reference_row_f32(simd, wide, out)
                } else {
                    frame.reference_row(simd, wide, out)
                };
                let Some(centred) = centred else {
                    bad.report(row);
                    continue;
                };
                let encoded = K::Encoding::encode_reference(simd, &centred, lane, K::NR, codes);
                offsets[lane] = centred.offset as f32;
                scales[lane] = encoded.scale;
                *terms = terms.max(encoded.error);
            }
            Ok(())
        };
        let buffers = || Ok((reference.scratch()?, try_zeroed::<f32>(reference.dim(), "the packed reference")?));
        let (codes_out, offsets_out, scales_out) =
            (codes.as_mut_slice(), offsets.as_mut_slice(), scales.as_mut_slice());
        if threads == 1 {
            let mut buffers = buffers()?;
            let panels = codes_out
                .chunks_mut(panel_len)
                .zip(offsets_out.chunks_mut(K::NR))
                .zip(scales_out.chunks_mut(K::NR))
                .zip(&mut terms);
            for (panel, (((codes, offsets), scales), terms)) in panels.enumerate() {
                pack_panel(&mut buffers, panel, codes, offsets, scales, terms)?;
            }
        } else {
            codes_out
                .par_chunks_mut(panel_len)
                .zip(offsets_out.par_chunks_mut(K::NR))
                .zip(scales_out.par_chunks_mut(K::NR))
                .zip(&mut terms)
                .enumerate()
                .with_min_len(((1 << 16) / panel_len).max(1))
                .try_for_each_init(buffers, |buffers, (panel, (((codes, offsets), scales), terms))| {
                    let buffers = buffers.as_mut().map_err(|error: &mut Error| error.clone())?;
                    pack_panel(buffers, panel, codes, offsets, scales, terms)
                })?;
        }
        bad.check(reference, Argument::Reference)?;
        Ok(Self { codes: Codes::Owned(codes), offsets, scales, terms, panel_len })
    }

    /// Bytes of memory; mapped codes do not count.
    pub(crate) fn bytes(&self) -> usize {
        self.codes.bytes()
            + size_of_val(self.offsets.as_slice())
            + size_of_val(self.scales.as_slice())
            + size_of_val(self.terms.as_slice())
    }

    pub(crate) fn panels(&self) -> usize {
        self.terms.len()
    }

    /// The offset of a row, and the terms of its panel.
    pub(crate) fn row(&self, row: usize) -> (f32, PanelTerms) {
        (self.offsets.as_slice()[row], self.terms[row / K::NR])
    }

    /// Bytes of its codes, in memory or mapped.
    pub(crate) fn code_bytes(&self) -> usize {
        size_of_val(self.codes.as_slice())
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_len * size_of::<K::Code>()
    }

    /// A run of the panels `start .. end` that `visit` selects.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they are mapped from a file and damaged.
    #[inline(always)]
    pub(crate) fn run(&self, start: usize, end: usize, visit: Visit) -> Result<PanelRun<'_, K::Code>> {
        let most = if visit == Visit::Sample { MAX_RUN * SAMPLE_STRIDE } else { MAX_RUN };
        assert!(
            start <= end && end <= self.panels() && end - start <= most,
            "a run longer than the lists of candidates"
        );
        self.codes.verify(start * self.panel_len..end * self.panel_len)?;
        Ok(PanelRun {
            codes: self.codes.as_slice(),
            offsets: self.offsets.as_slice(),
            scales: self.scales.as_slice(),
            terms: &self.terms,
            start,
            end,
            visit,
        })
    }

    /// The error bound of one key.
    #[cfg(test)]
    pub(crate) fn error(&self, row: u32, query: QueryTerms) -> f32 {
        self.errors(query).of_row(row)
    }

    /// The error bounds of one query's keys.
    pub(crate) fn errors(&self, query: QueryTerms) -> KeyErrors<'_> {
        const { assert!(K::NR.is_power_of_two() && K::NR >= 8) };
        KeyErrors { terms: &self.terms, query, panel_rows: K::NR }
    }
}

/// The error bounds of one query's keys: one bound per panel.
#[derive(Clone, Copy)]
pub(crate) struct KeyErrors<'a> {
    terms: &'a [PanelTerms],
    query: QueryTerms,
    /// Rows of a panel.
    pub(crate) panel_rows: usize,
}

impl KeyErrors<'_> {
    /// The bound for all rows of a panel. Its roundings are covered by the inflation of the terms.
    #[inline(always)]
    pub(crate) fn of_panel(&self, panel: usize) -> f32 {
        let terms = self.terms[panel];
        self.query.alpha * terms.a + self.query.beta * terms.b + terms.c
    }

    /// The bound for one row.
    #[cfg(test)]
    pub(crate) fn of_row(&self, row: u32) -> f32 {
        self.of_panel(row as usize / self.panel_rows)
    }
}

/// A chunk of query rows as panels of kernel `K`.
pub(crate) struct PackedQuery<K: Microkernel> {
    codes: Aligned<K::Code>,
    panel_len: usize,
    /// One per row.
    pub(crate) terms: Vec<QueryTerms>,
    /// One per row: the shift between its values and keys, and the size of the shift; see [`crate::filter::bound::KeyMap`].
    pub(crate) shifts: Vec<(f64, f64)>,
}

impl<K: Microkernel> PackedQuery<K> {
    /// Encode the query rows numbered in `rows`.
    pub(crate) fn pack(simd: Simd, frame: &Frame, query: &dyn Rows, rows: &[u32]) -> Result<Self> {
        const { assert!(K::MR <= MAX_MR) };
        let panel_len = query.dim().div_ceil(K::COLUMNS) * K::MR;
        let mut codes = Aligned::<K::Code>::zeroed(rows.len().div_ceil(K::MR) * panel_len, "packed queries")?;
        let mut terms = try_vec(rows.len(), "packed queries")?;
        let mut shifts = try_vec(rows.len(), "packed queries")?;
        let (mut scratch, mut out) = (query.scratch()?, try_zeroed::<f32>(query.dim(), "packed queries")?);
        for (i, &row) in rows.iter().enumerate() {
            let row = row as usize;
            let wide = query.widen(row, &mut scratch);
            let Some((centred, shift, size)) = frame.query_row(simd, wide, &mut out) else {
                return Err(query
                    .first_non_finite(Argument::Query, row)
                    .unwrap_or_else(|| Error::Panic("a finite row was refused".into())));
            };
            let (panel, lane) = (i / K::MR, i % K::MR);
            let codes = &mut codes.as_mut_slice()[panel * panel_len..][..panel_len];
            terms.push(K::Encoding::encode_query(simd, &centred, lane, K::MR, codes));
            shifts.push((shift, size));
        }
        Ok(Self { codes, panel_len, terms, shifts })
    }

    pub(crate) fn panel(&self, panel: usize) -> &[K::Code] {
        &self.codes.as_slice()[panel * self.panel_len..][..self.panel_len]
    }
}
