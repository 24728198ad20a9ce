//! From rows as given to panels that a kernel reads.
//!
//! ```text
//! reference ──strided sample──> Frame (centre c, scale sigma)
//! row ──widen, normalise──> r ──(r - c) sigma──> Centred (float32 row, norms) ──Kernel::encode_*──> lane of a panel
//!                           └─ not finite? the row is named in an error; finding it costs nothing here
//! ```
//!
//! Any centre, and any power of two between 2^-400 and 2^400 as scale, leave the bound of `bound.rs` valid; good ones make it
//! tight. So both come
//! from a sample in which rows of outlying size do not count: one giant row must not ruin the bound for all others.

pub(crate) mod coarse;
pub(crate) mod f32;
pub(crate) mod i8;
pub(crate) mod stored;

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use self::stored::Codes;
use crate::bound::{LARGEST_NORM, TAU, U32};
use crate::cancel::Monitor;
use crate::error::{Argument, Error, Result, try_vec};
use crate::kernel::{Centred, Kernel, MAX_MR, MAX_RUN, PanelRun, PanelTerms, QueryTerms, SAMPLE_STRIDE, Visit};
use crate::level::{Simd, multiversion};
use crate::matrix::{Element, MatrixRef, QueryRef, Wide};
use crate::metric::{Geometry, Metric};
use crate::rescore::{UnitScale, exponent, power_of_two, relative_error, unit_scale_of};

/// Rows looked at to choose centre and scale.
const SAMPLE: usize = 256;

/// The scale stays between 2 to the minus and to the plus this: its square is then a normal number, and what underflows
/// in float64 stays negligible when scaled by it (`docs/exactness.md`, "Range").
const LARGEST_SCALE_EXPONENT: i32 = 400;

/// Sampled rows larger than this many times the median do not count.
const OUTLIER: f64 = 8.0;

/// Zeros, without touching the pages: they are touched by the threads that fill them.
pub(crate) fn try_zeroed<T: Copy + Default>(len: usize, what: &'static str) -> Result<Vec<T>> {
    // `vec!` asks for zeroed pages but aborts when it gets none; the probe refuses first.
    drop(try_vec::<T>(len, what)?);
    Ok(vec![T::default(); len])
}

/// Ask for pages of 2 MiB under a large buffer that nobody has touched yet and that will be read again and again: faults and
/// address translations of 4 KiB pages took a fifth of the time of a search of 256 queries. (Not for results, which are
/// written once: clearing large pages first costs them more than it saves.)
fn prefer_huge_pages<T>(buffer: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 2 << 20;
        let bytes = std::mem::size_of_val(buffer);
        let start = buffer.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(PAGE);
        if bytes >= 2 * PAGE && skip < bytes {
            // SAFETY: the range lies inside the buffer; the advice changes neither its contents nor who may use it. A system
            // that does not know it refuses, which changes nothing either.
            unsafe { libc::madvise(start.add(skip).cast(), (bytes - skip) / PAGE * PAGE, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = buffer;
}

/// A zeroed buffer that begins on a cache line, so that no vector load of a panel straddles two.
pub(crate) struct Aligned<T> {
    buffer: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    const LINE: usize = 64;

    pub(crate) fn zeroed(len: usize, what: &'static str) -> Result<Self> {
        let spare = Self::LINE / size_of::<T>();
        let mut buffer = try_zeroed::<T>(len + spare, what)?;
        prefer_huge_pages(&mut buffer);
        let start = buffer.as_ptr().align_offset(Self::LINE).min(spare);
        Ok(Self { buffer, start, len })
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        &self.buffer[self.start..][..self.len]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.buffer[self.start..][..self.len]
    }
}

/// Where rows are moved to before they are encoded.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    metric: Metric,
    /// Subtracted from reference rows.
    centre: Vec<f64>,
    /// Subtracted from query rows: the centre, or zeros.
    query_centre: Vec<f64>,
    /// A power of two.
    scale: f64,
    query_centre_norm: f64,
    centre_norm: f64,
    /// The same in float32, where float32 holds it; see `coarse.rs`.
    coarse: Option<coarse::Frame>,
}

/// Sums over one row that was centred.
#[derive(Debug, Clone, Copy)]
struct Sums {
    /// Squared norm after centring, before scaling.
    centred2: f64,
    /// Squared norm before centring.
    raw2: f64,
    /// Inner product of the centred row with `other`.
    centred_other: f64,
    /// Inner product of the row before centring with `other`.
    raw_other: f64,
}

multiversion! {
    /// `out = ((row * pre) * inverse - centre) * scale` in float32, and the sums that the bound needs.
    fn centre_row<W: Wide>(
        row: &[W], unit: UnitScale, centre: &[f64], other: &[f64], scale: f64, out: &mut [f32],
    ) -> Sums {
        // One array and one loop for each sum: the shape that the compiler turns into whole vectors.
        let (mut centred2, mut raw2) = ([0.0f64; LANES], [0.0f64; LANES]);
        let (mut centred_other, mut raw_other) = ([0.0f64; LANES], [0.0f64; LANES]);
        let mut chunk = |row: &[W; LANES], centre: &[f64; LANES], other: &[f64; LANES], out: &mut [f32; LANES]| {
            let raw: [f64; LANES] = std::array::from_fn(|l| (row[l].to_f64() * unit.pre) * unit.inverse);
            let moved: [f64; LANES] = std::array::from_fn(|l| raw[l] - centre[l]);
            for l in 0..LANES {
                out[l] = (moved[l] * scale) as f32;
            }
            for l in 0..LANES {
                centred2[l] += moved[l] * moved[l];
            }
            for l in 0..LANES {
                raw2[l] += raw[l] * raw[l];
            }
            for l in 0..LANES {
                centred_other[l] += moved[l] * other[l];
            }
            for l in 0..LANES {
                raw_other[l] += raw[l] * other[l];
            }
        };
        let (rows, row_rest) = row.as_chunks::<LANES>();
        let (centres, centre_rest) = centre.as_chunks::<LANES>();
        let (others, other_rest) = other.as_chunks::<LANES>();
        let (outs, out_rest) = out.as_chunks_mut::<LANES>();
        for (((row, centre), other), out) in rows.iter().zip(centres).zip(others).zip(outs) {
            chunk(row, centre, other, out);
        }
        if !row_rest.is_empty() {
            // Columns that do not exist are zeros on both sides: they add nothing.
            let mut last = [0.0f32; LANES];
            chunk(&padded(row_rest), &padded(centre_rest), &padded(other_rest), &mut last);
            out_rest.copy_from_slice(&last[..row_rest.len()]);
        }
        Sums {
            centred2: centred2.iter().sum(),
            raw2: raw2.iter().sum(),
            centred_other: centred_other.iter().sum(),
            raw_other: raw_other.iter().sum(),
        }
    }
}

const LANES: usize = 8;

#[inline(always)]
fn padded<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut chunk = [T::default(); LANES];
    chunk[..rest.len()].copy_from_slice(rest);
    chunk
}

const NO_UNIT: UnitScale = UnitScale { pre: 1.0, inverse: 1.0, norm2: 1.0 };

impl Frame {
    /// Choose centre and scale from a strided sample of the reference (references are often sorted by class).
    pub(crate) fn choose<E: Element>(simd: Simd, metric: Metric, reference: MatrixRef<'_, E>) -> Self {
        let dim = reference.dim();
        let stride = reference.rows().div_ceil(SAMPLE).max(1);
        let mut scratch = Vec::new();
        let mut rows: Vec<(f64, Vec<f64>)> = Vec::new();
        // Wide rows make the sample expensive and are rarely many; bound its numbers, not only its rows.
        let most = (1 << 20) / dim + 16;
        for row in (0..reference.rows()).step_by(stride).take(most) {
            let wide = E::widen(reference.row(row), &mut scratch);
            let unit = if metric.normalizes() { unit_scale_of::<E>(simd, wide) } else { NO_UNIT };
            let row: Vec<f64> = wide.iter().map(|x| (x.to_f64() * unit.pre) * unit.inverse).collect();
            let size = row.iter().fold(0.0f64, |m, x| if x.is_nan() { f64::INFINITY } else { m.max(x.abs()) });
            if size.is_finite() {
                rows.push((size, row));
            }
        }
        let mut sizes: Vec<f64> = rows.iter().map(|(size, _)| *size).collect();
        sizes.sort_unstable_by(f64::total_cmp);
        let median = sizes.get(sizes.len() / 2).copied().unwrap_or(0.0);
        rows.retain(|(size, _)| *size <= OUTLIER * median);

        let count = rows.len().max(1) as f64;
        let mut centre = vec![0.0f64; dim];
        for (_, row) in &rows {
            for (c, x) in centre.iter_mut().zip(row) {
                *c += x / count;
            }
        }
        if !centre.iter().all(|c| c.is_finite()) {
            centre.fill(0.0);
        }
        if !E::DOUBLE {
            // Any centre will do; one that float32 holds serves both ways of centring.
            centre.iter_mut().for_each(|c| *c = f64::from(*c as f32));
        }
        let spread = rows
            .iter()
            .flat_map(|(_, row)| row.iter().zip(&centre).map(|(x, c)| (x - c).abs()))
            .fold(0.0f64, |m, x| if x.is_finite() { m.max(x) } else { m });
        let scale = if spread > 0.0 {
            power_of_two(-exponent(spread).clamp(-LARGEST_SCALE_EXPONENT, LARGEST_SCALE_EXPONENT))
        } else {
            1.0
        };
        Self::new(metric, centre, scale, E::DOUBLE)
    }

    /// The frame of this centre and scale; `double` says whether the rows are float64.
    fn new(metric: Metric, centre: Vec<f64>, scale: f64, double: bool) -> Self {
        let query_centre = if metric == Metric::InnerProduct { vec![0.0; centre.len()] } else { centre.clone() };
        let norm = |x: &[f64]| x.iter().map(|c| c * c).sum::<f64>().sqrt();
        let coarse = if double { None } else { coarse::Frame::new(&centre, &query_centre, scale) };
        Self {
            metric,
            scale,
            centre_norm: norm(&centre),
            query_centre_norm: norm(&query_centre),
            centre,
            query_centre,
            coarse,
        }
    }

    pub(crate) fn scale2(&self) -> f64 {
        self.scale * self.scale
    }

    fn unit<E: Element>(&self, simd: Simd, wide: &[E::Wide]) -> UnitScale {
        if self.metric.normalizes() { unit_scale_of::<E>(simd, wide) } else { NO_UNIT }
    }

    /// Centre a reference row; `None` if the row is not finite.
    fn reference_row<'a, E: Element>(&self, simd: Simd, wide: &[E::Wide], out: &'a mut [f32]) -> Option<Centred<'a>> {
        let unit = self.unit::<E>(simd, wide);
        let sums = centre_row(simd, wide, unit, &self.centre, &self.query_centre, self.scale, out);
        let (offset, size) = match self.metric.geometry() {
            Geometry::Euclidean | Geometry::Lp => {
                let half = 0.5 * sums.centred2 * self.scale2();
                (half, half)
            }
            Geometry::Dot => {
                let size = self.query_centre_norm * sums.centred2.sqrt() * self.scale2();
                (-sums.centred_other * self.scale2(), size)
            }
        };
        self.finish(wide, sums, offset, size, out)
    }

    /// As [`Frame::reference_row`], in float32 where that can be done and the codes are coarser than that.
    fn coarse_reference_row<'a, E: Element>(
        &self,
        simd: Simd,
        wide: &[E::Wide],
        out: &'a mut [f32],
    ) -> Option<Centred<'a>> {
        if let (Some(frame), Some(row)) = (&self.coarse, E::Wide::as_f32(wide))
            && let Some(sums) = frame.centre(simd, self.metric, row, out)
        {
            return Some(sums.into_centred(out));
        }
        self.reference_row::<E>(simd, wide, out)
    }

    /// Centre a query row; `None` if the row is not finite. Also the shift between its values and keys, with its size.
    fn query_row<'a, E: Element>(
        &self,
        simd: Simd,
        wide: &[E::Wide],
        out: &'a mut [f32],
    ) -> Option<(Centred<'a>, f64, f64)> {
        let unit = self.unit::<E>(simd, wide);
        let sums = centre_row(simd, wide, unit, &self.query_centre, &self.centre, self.scale, out);
        let (shift, size) = match self.metric.geometry() {
            Geometry::Euclidean | Geometry::Lp => (sums.centred2 * self.scale2(), sums.centred2 * self.scale2()),
            Geometry::Dot => (sums.raw_other * self.scale2(), sums.raw2.sqrt() * self.centre_norm * self.scale2()),
        };
        // A shift that left the range of float64 makes the row unusable, as an offset does for a reference.
        self.finish(wide, sums, shift, size, out).map(|centred| (centred, shift, size))
    }

    fn finish<'a, W: Wide>(
        &self,
        wide: &[W],
        sums: Sums,
        offset: f64,
        offset_size: f64,
        out: &'a mut [f32],
    ) -> Option<Centred<'a>> {
        // A sum of finite squares may still overflow; only then is it worth looking at the row itself.
        if !sums.raw2.is_finite() && !wide.iter().all(|x| x.to_f64().is_finite()) {
            return None;
        }
        let dim = wide.len();
        // The factor covers the rounding of the norm itself.
        let norm = sums.centred2.sqrt() * self.scale * (1.0 + relative_error(dim));
        let raw_norm = match self.metric.geometry() {
            Geometry::Euclidean | Geometry::Lp => 0.0,
            Geometry::Dot => sums.raw2.sqrt() * self.scale * (1.0 + relative_error(dim)),
        };
        let usable = norm <= LARGEST_NORM
            && raw_norm <= LARGEST_NORM * LARGEST_NORM
            // Keys subtract it in float32.
            && (offset as f32).is_finite()
            && offset_size.is_finite();
        if !usable {
            out.fill(0.0);
        }
        Some(Centred {
            row: out,
            norm: if usable { norm } else { f64::INFINITY },
            raw_norm,
            offset: if usable { offset } else { 0.0 },
            offset_size: if usable { offset_size } else { 0.0 },
            offset_error: 0.0,
            row_error: if usable { 2.0 * U32 * (norm + TAU) } else { 0.0 },
            noise: relative_error(dim),
        })
    }
}

/// The first row that was found not to be finite, seen from many threads.
pub(crate) struct FirstBad(AtomicUsize);

impl FirstBad {
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(usize::MAX))
    }

    pub(crate) fn report(&self, row: usize) {
        self.0.fetch_min(row, Ordering::Relaxed);
    }

    pub(crate) fn check<E: Element>(&self, matrix: MatrixRef<'_, E>, argument: Argument) -> Result<()> {
        let row = self.0.load(Ordering::Relaxed);
        if row == usize::MAX {
            return Ok(());
        }
        Err(matrix.first_non_finite(argument, row).unwrap_or_else(|| Error::Panic("a finite row was refused".into())))
    }
}

/// All reference rows as panels of kernel `K`.
pub(crate) struct PackedReference<K: Kernel> {
    codes: Codes<K::Code>,
    offsets: Aligned<f32>,
    scales: Aligned<f32>,
    terms: Vec<PanelTerms>,
    panel_len: usize,
}

impl<K: Kernel> PackedReference<K> {
    /// Encode every row, in parallel over panels; with one thread on this one, without asking rayon for anything.
    pub(crate) fn pack<E: Element>(
        simd: Simd,
        frame: &Frame,
        reference: MatrixRef<'_, E>,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Self> {
        let panels = reference.rows().div_ceil(K::NR);
        let panel_len = reference.dim().div_ceil(K::COLUMNS) * K::NR;
        let mut codes = Aligned::zeroed(panels * panel_len, "the packed reference")?;
        let mut offsets = Aligned::zeroed(panels * K::NR, "the packed reference")?;
        let mut scales = Aligned::zeroed(panels * K::NR, "the packed reference")?;
        let mut terms = try_zeroed::<PanelTerms>(panels, "the packed reference")?;
        let bad = FirstBad::new();
        let pack_panel = |(scratch, out): &mut (Vec<E::Wide>, Vec<f32>),
                          panel: usize,
                          codes: &mut [K::Code],
                          offsets: &mut [f32],
                          scales: &mut [f32],
                          terms: &mut PanelTerms| {
            if monitor.check().is_err() {
                return;
            }
            for lane in 0..K::NR {
                let row = panel * K::NR + lane;
                if row >= reference.rows() {
                    offsets[lane] = f32::INFINITY;
                    continue;
                }
                let wide = E::widen(reference.row(row), scratch);
                let centred = if K::COARSE {
                    frame.coarse_reference_row::<E>(simd, wide, out)
                } else {
                    frame.reference_row::<E>(simd, wide, out)
                };
                let Some(centred) = centred else {
                    bad.report(row);
                    continue;
                };
                let encoded = K::encode_reference(simd, &centred, lane, codes);
                offsets[lane] = centred.offset as f32;
                scales[lane] = encoded.scale;
                *terms = terms.max(encoded.error);
            }
        };
        let buffers = || (Vec::new(), vec![0.0f32; reference.dim()]);
        let (codes_out, offsets_out, scales_out) =
            (codes.as_mut_slice(), offsets.as_mut_slice(), scales.as_mut_slice());
        if threads == 1 {
            let mut buffers = buffers();
            let panels = codes_out
                .chunks_mut(panel_len)
                .zip(offsets_out.chunks_mut(K::NR))
                .zip(scales_out.chunks_mut(K::NR))
                .zip(&mut terms);
            for (panel, (((codes, offsets), scales), terms)) in panels.enumerate() {
                pack_panel(&mut buffers, panel, codes, offsets, scales, terms);
            }
        } else {
            codes_out
                .par_chunks_mut(panel_len)
                .zip(offsets_out.par_chunks_mut(K::NR))
                .zip(scales_out.par_chunks_mut(K::NR))
                .zip(&mut terms)
                .enumerate()
                .with_min_len(((1 << 16) / panel_len).max(1))
                .for_each_init(buffers, |buffers, (panel, (((codes, offsets), scales), terms))| {
                    pack_panel(buffers, panel, codes, offsets, scales, terms);
                });
        }
        monitor.check()?;
        bad.check(reference, Argument::Reference)?;
        Ok(Self { codes: Codes::Owned(codes), offsets, scales, terms, panel_len })
    }

    /// Bytes of memory that it takes; codes in a file do not count.
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

    /// Bytes of its codes, wherever they lie.
    pub(crate) fn code_bytes(&self) -> usize {
        size_of_val(self.codes.as_slice())
    }

    pub(crate) fn panel_bytes(&self) -> usize {
        self.panel_len * size_of::<K::Code>()
    }

    /// The panels of `start .. end` that `visit` names, as a kernel reads them.
    ///
    /// # Errors
    /// [`Error::BadFile`], where they come from a file that is damaged there.
    #[inline(always)]
    pub(crate) fn run(&self, start: usize, end: usize, visit: Visit) -> Result<PanelRun<'_, K::Code>> {
        let most = if visit == Visit::Sample { MAX_RUN * SAMPLE_STRIDE } else { MAX_RUN };
        assert!(start <= end && end <= self.panels() && end - start <= most, "a run longer than the lists of hits");
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

    /// The error bound of one key, on the safe side.
    #[cfg(test)]
    pub(crate) fn error(&self, row: u32, query: QueryTerms) -> f32 {
        self.panel_error(row as usize / K::NR, query)
    }

    /// The error bound of every key of one panel, on the safe side.
    pub(crate) fn panel_error(&self, panel: usize, query: QueryTerms) -> f32 {
        let terms = self.terms[panel];
        query.alpha * terms.a + query.beta * terms.b + terms.c
    }
}

/// A chunk of query rows as panels of kernel `K`.
pub(crate) struct PackedQuery<K: Kernel> {
    codes: Aligned<K::Code>,
    panel_len: usize,
    /// One a row.
    pub(crate) terms: Vec<QueryTerms>,
    /// One a row: see [`crate::bound::Floor`].
    pub(crate) shifts: Vec<(f64, f64)>,
}

impl<K: Kernel> PackedQuery<K> {
    /// Encode the query rows named by `rows`.
    pub(crate) fn pack<E: Element>(simd: Simd, frame: &Frame, query: QueryRef<'_, E>, rows: &[u32]) -> Result<Self> {
        const { assert!(K::MR <= MAX_MR) };
        let panel_len = query.dim().div_ceil(K::COLUMNS) * K::MR;
        let mut codes = Aligned::<K::Code>::zeroed(rows.len().div_ceil(K::MR) * panel_len, "packed queries")?;
        let mut terms = try_vec(rows.len(), "packed queries")?;
        let mut shifts = try_vec(rows.len(), "packed queries")?;
        let (mut scratch, mut out) = (Vec::new(), vec![0.0f32; query.dim()]);
        for (i, &row) in rows.iter().enumerate() {
            let row = row as usize;
            let wide = query.widen(row, &mut scratch);
            let Some((centred, shift, size)) = frame.query_row::<E>(simd, wide, &mut out) else {
                return Err(query
                    .first_non_finite(row)
                    .unwrap_or_else(|| Error::Panic("a finite row was refused".into())));
            };
            let (panel, lane) = (i / K::MR, i % K::MR);
            let codes = &mut codes.as_mut_slice()[panel * panel_len..][..panel_len];
            terms.push(K::encode_query(simd, &centred, lane, codes));
            shifts.push((shift, size));
        }
        Ok(Self { codes, panel_len, terms, shifts })
    }

    pub(crate) fn panel(&self, panel: usize) -> &[K::Code] {
        &self.codes.as_slice()[panel * self.panel_len..][..self.panel_len]
    }
}
