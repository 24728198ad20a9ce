//! The frame in which rows are encoded: a centre and a scale.
//!
//! ```text
//! reference ──strided sample──> Frame (centre c, scale sigma)
//! row ──widen, normalise──> r ──(r - c) sigma──> Centred (float32 row, norms)
//! ```
//!
//! The bound of `bound.rs` is valid for any centre and for any power of two between 2^-400 and 2^400 as scale; a good choice
//! makes it tight. So both come from a sample without outliers: one huge row must not spoil the bound of all others.

use crate::arch::kernel::Centred;
use crate::arch::level::{Simd, multiversion};
use crate::error::Result;
use crate::exact::lanes::{exponent, power_of_two};
use crate::exact::rows::Rows;
use crate::exact::{UnitScale, relative_error, unit_scale_of};
use crate::filter::bound::{LARGEST_NORM, TAU, U32};
use crate::filter::center_f32;
use crate::matrix::{Element, Precision, Wide, WideRow};
use crate::metric::{Geometry, Metric};
use crate::runtime::alloc::{FRAME, try_collect, try_vec, try_zeroed};

/// Most rows in the sample.
const SAMPLE: usize = 256;

/// The scale is between `2^-400` and `2^400`: its square is then a normal number, and underflow in float64 remains negligible
/// when it is multiplied by the square (`docs/exactness.md`, "Range of float64").
const LARGEST_SCALE_EXPONENT: i32 = 400;

/// Whether a frame may have this scale.
pub(crate) fn is_scale(scale: f64) -> bool {
    let range = power_of_two(-LARGEST_SCALE_EXPONENT)..=power_of_two(LARGEST_SCALE_EXPONENT);
    range.contains(&scale) && scale == power_of_two(exponent(scale))
}

/// Sampled rows of more than this multiple of the median size are outliers.
const OUTLIER: f64 = 8.0;

/// See the module header.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    metric: Metric,
    /// Subtracted from reference rows.
    pub(super) centre: Vec<f64>,
    /// Subtracted from query rows: the centre, or zeros.
    query_centre: Vec<f64>,
    /// A power of two.
    pub(super) scale: f64,
    query_centre_norm: f64,
    centre_norm: f64,
    /// The same in float32, if that is exact; see `center_f32.rs`.
    center_f32: Option<center_f32::Frame>,
}

/// Sums over the columns of a centred row.
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

/// Sums over columns, in lanes: of squares and of products with the other centre, for the centred and for the raw row.
type Lanes = [f64; LANES];

/// Centre some columns and add them to the sums. Not a closure of its only caller: a closure that is called twice is not
/// inlined, so it is not compiled for the instructions of the caller.
#[inline(always)]
fn centre_chunk<W: Wide>(
    (row, centre, other, out): (&[W; LANES], &Lanes, &Lanes, &mut [f32; LANES]),
    (unit, scale): (UnitScale, f64),
    (centred2, raw2): (&mut Lanes, &mut Lanes),
    (centred_other, raw_other): (&mut Lanes, &mut Lanes),
) {
    let raw: Lanes = std::array::from_fn(|l| (row[l].to_f64() * unit.pre) * unit.inverse);
    let moved: Lanes = std::array::from_fn(|l| raw[l] - centre[l]);
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
}

multiversion! {
    /// `out = ((row * pre) * inverse - centre) * scale` in float32, and the sums that the bound needs.
    fn centre_row<W: Wide>(
        row: &[W], unit: UnitScale, centre: &[f64], other: &[f64], scale: f64, out: &mut [f32],
    ) -> Sums {
        // One array and one loop per sum: the compiler vectorises this form.
        let (mut centred2, mut raw2) = ([0.0f64; LANES], [0.0f64; LANES]);
        let (mut centred_other, mut raw_other) = ([0.0f64; LANES], [0.0f64; LANES]);
        let (rows, row_rest) = row.as_chunks::<LANES>();
        let (centres, centre_rest) = centre.as_chunks::<LANES>();
        let (others, other_rest) = other.as_chunks::<LANES>();
        let (outs, out_rest) = out.as_chunks_mut::<LANES>();
        let by = (unit, scale);
        for (((row, centre), other), out) in rows.iter().zip(centres).zip(others).zip(outs) {
            let (squares, products) = ((&mut centred2, &mut raw2), (&mut centred_other, &mut raw_other));
            centre_chunk((row, centre, other, out), by, squares, products);
        }
        if !row_rest.is_empty() {
            // Missing columns are zeros in all three rows and add nothing.
            let (row, mut last) = (padded(row_rest), [0.0f32; LANES]);
            let columns = (&row, &padded(centre_rest), &padded(other_rest), &mut last);
            centre_chunk(columns, by, (&mut centred2, &mut raw2), (&mut centred_other, &mut raw_other));
            out_rest.copy_from_slice(&last[..row_rest.len()]);
        }
        // `black_box`: if the compiler sees the sums of single lanes, it splits the accumulators instead of keeping vectors.
        let [centred2, raw2, centred_other, raw_other] =
            std::hint::black_box([centred2, raw2, centred_other, raw_other]).map(|lanes| lanes.iter().sum());
        Sums { centred2, raw2, centred_other, raw_other }
    }
}

const LANES: usize = 8;

#[inline(always)]
fn padded<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut chunk = [T::default(); LANES];
    chunk[..rest.len()].copy_from_slice(rest);
    chunk
}

/// The row before centring: divided by its norm if the metric normalises.
fn unit_row<E: Element>(simd: Simd, metric: Metric, wide: &[E::Wide]) -> Result<Vec<f64>> {
    let unit = if metric.normalizes() { unit_scale_of::<E>(simd, wide) } else { NO_UNIT };
    try_collect(wide.iter().map(|x| (Wide::to_f64(*x) * unit.pre) * unit.inverse), FRAME)
}

const NO_UNIT: UnitScale = UnitScale { pre: 1.0, inverse: 1.0, norm2: 1.0 };

impl Frame {
    /// Choose centre and scale from a strided sample of the reference (references are often sorted by class).
    pub(crate) fn choose(simd: Simd, metric: Metric, reference: &dyn Rows) -> Result<Self> {
        let dim = reference.dim();
        let stride = reference.rows().div_ceil(SAMPLE).max(1);
        let mut scratch = reference.scratch()?;
        // Bound the elements of the sample too, not only its rows: wide rows would make it expensive.
        let most = (1 << 20) / dim + 16;
        let mut rows: Vec<(f64, Vec<f64>)> = try_vec(most.min(SAMPLE), FRAME)?;
        for row in (0..reference.rows()).step_by(stride).take(most) {
            let row = match reference.widen(row, &mut scratch) {
                WideRow::F32(row) => unit_row::<f32>(simd, metric, row)?,
                WideRow::F64(row) => unit_row::<f64>(simd, metric, row)?,
            };
            let size = row.iter().fold(0.0f64, |m, x| if x.is_nan() { f64::INFINITY } else { m.max(x.abs()) });
            if size.is_finite() {
                rows.push((size, row));
            }
        }
        let mut sizes = try_collect(rows.iter().map(|(size, _)| *size), FRAME)?;
        sizes.sort_unstable_by(f64::total_cmp);
        let median = sizes.get(sizes.len() / 2).copied().unwrap_or(0.0);
        rows.retain(|(size, _)| *size <= OUTLIER * median);

        let count = rows.len().max(1) as f64;
        let mut centre = try_zeroed::<f64>(dim, FRAME)?;
        for (_, row) in &rows {
            for (c, x) in centre.iter_mut().zip(row) {
                *c += x / count;
            }
        }
        if !centre.iter().all(|c| c.is_finite()) {
            centre.fill(0.0);
        }
        let double = reference.precision() == Precision::Double;
        if !double {
            // Rounded to float32, which is as good, so that centring in float32 and in float64 use the same centre.
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
        Self::new(metric, centre, scale, double)
    }

    /// The frame of this centre and scale; `double` says whether the rows are float64.
    pub(super) fn new(metric: Metric, centre: Vec<f64>, scale: f64, double: bool) -> Result<Self> {
        let query_centre = if metric == Metric::InnerProduct {
            try_zeroed(centre.len(), FRAME)?
        } else {
            try_collect(centre.iter().copied(), FRAME)?
        };
        let norm = |x: &[f64]| x.iter().map(|c| c * c).sum::<f64>().sqrt();
        let center_f32 = if double { None } else { center_f32::Frame::new(&centre, &query_centre, scale)? };
        Ok(Self {
            metric,
            scale,
            centre_norm: norm(&centre),
            query_centre_norm: norm(&query_centre),
            centre,
            query_centre,
            center_f32,
        })
    }

    pub(crate) fn scale2(&self) -> f64 {
        self.scale * self.scale
    }

    fn unit<E: Element>(&self, simd: Simd, wide: &[E::Wide]) -> UnitScale {
        if self.metric.normalizes() { unit_scale_of::<E>(simd, wide) } else { NO_UNIT }
    }

    /// Centre a reference row; `None` if the row is not finite.
    pub(crate) fn reference_row<'a>(&self, simd: Simd, row: WideRow<'_>, out: &'a mut [f32]) -> Option<Centred<'a>> {
        match row {
            WideRow::F32(row) => self.reference_row_of::<f32>(simd, row, out),
            WideRow::F64(row) => self.reference_row_of::<f64>(simd, row, out),
        }
    }

    fn reference_row_of<'a, E: Element>(
        &self,
        simd: Simd,
        wide: &[E::Wide],
        out: &'a mut [f32],
    ) -> Option<Centred<'a>> {
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

    /// [`Frame::reference_row`] in float32 if that is safe, for codes that are coarser than float32.
    pub(crate) fn reference_row_f32<'a>(
        &self,
        simd: Simd,
        row: WideRow<'_>,
        out: &'a mut [f32],
    ) -> Option<Centred<'a>> {
        if let (Some(frame), WideRow::F32(row)) = (&self.center_f32, row)
            && let Some(sums) = frame.centre(simd, self.metric, row, out)
        {
            return Some(sums.into_centred(out));
        }
        self.reference_row(simd, row, out)
    }

    /// Centre a query row; `None` if the row is not finite. Also returns the shift between its values and keys, and the size
    /// of the shift.
    pub(crate) fn query_row<'a>(
        &self,
        simd: Simd,
        row: WideRow<'_>,
        out: &'a mut [f32],
    ) -> Option<(Centred<'a>, f64, f64)> {
        match row {
            WideRow::F32(row) => self.query_row_of::<f32>(simd, row, out),
            WideRow::F64(row) => self.query_row_of::<f64>(simd, row, out),
        }
    }

    fn query_row_of<'a, E: Element>(
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
        // A shift that overflows makes the row unusable, like the offset of a reference.
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
        // A sum of finite squares may overflow too, so only an infinite or NaN sum needs a check of the row itself.
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
            // It is subtracted in float32.
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
