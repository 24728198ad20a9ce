//! The rows of a matrix as a trait object, independent of their element type.
//!
//! ```text
//! MatrixRef<E> ──as &dyn Rows──> widen a row │ prepare a query │ float64 values of a batch │ prefetch │ find a bad row
//! ```
//!
//! Loops over pairs are compiled once per kernel, and not again for each element type. Everything that depends on the type is
//! a virtual call for a row or a batch of rows, never for a single number.

use std::any::TypeId;

use super::{Prepared, Widened, prefetch, score};
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::lanes::ROWS;
use crate::matrix::{Element, MatrixRef, Precision, QueryRef, WideRow, first_non_finite};
use crate::metric::Metric;
use crate::runtime::alloc::{try_reserve, try_vec};
use zerocopy::IntoBytes;

/// See the module header.
pub(crate) trait Rows: Sync {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// Number of columns, at least 1.
    fn dim(&self) -> usize;
    /// Bytes of one row.
    fn row_bytes(&self) -> usize;
    /// The precision of results for such rows.
    fn precision(&self) -> Precision;
    /// All rows as one slice, if they are float32.
    fn as_f32(&self) -> Option<&[f32]>;
    /// One row, widened exactly; copied to `scratch` only if its type requires it.
    fn widen<'s>(&'s self, row: usize, scratch: &'s mut Vec<f32>) -> WideRow<'s>;
    /// One row as a query.
    fn prepare(&self, metric: Metric, row: usize, scratch: &mut Vec<f32>) -> Result<Prepared>;
    /// A buffer for [`Rows::widen`] and [`Rows::prepare`], large enough that they need not grow it.
    fn scratch(&self) -> Result<Vec<f32>>;
    /// Make room for rows of this matrix, so that widening them allocates nothing.
    fn make_room(&self, scratch: &mut Widened) -> Result<()>;
    /// Float64 values of `query` with the rows `rows`; see [`super::score`].
    fn score(
        &self,
        simd: Simd,
        query: &Prepared,
        rows: &[u32],
        scratch: &mut Widened,
        values: &mut Vec<f64>,
    ) -> Result<()>;
    /// Prefetch the beginning of these rows.
    fn prefetch(&self, rows: &[u32]);
    /// Whether a row has neither NaN nor infinity.
    fn is_finite(&self, row: usize) -> bool;
    /// The first NaN or infinity at or after row `start`, as an error that names it.
    fn first_non_finite(&self, argument: Argument, start: usize) -> Option<Error>;
    /// The address and the size in bytes: equal for two views of the same memory.
    fn identity(&self) -> (usize, usize);
    /// The element type, and all elements as bytes.
    fn bytes(&self) -> (TypeId, &[u8]);
}

/// Whether widening a row copies it.
fn needs_copy<E: Element>() -> bool {
    size_of::<E>() < size_of::<E::Wide>()
}

/// Whether `rows` begins with the rows `first`, bit by bit. Rows in the same memory are not read. Others are, up to the first
/// that differs: a copy of the references, as `torch.cat` makes, searches as fast as the references themselves.
pub(crate) fn begins_with(rows: &dyn Rows, first: &dyn Rows) -> bool {
    let ((of_rows, rows_bytes), (of_first, first_bytes)) = (rows.bytes(), first.bytes());
    of_rows == of_first
        && rows.dim() == first.dim()
        && rows.rows() >= first.rows()
        && (rows.identity().0 == first.identity().0 || rows_bytes[..first_bytes.len()] == *first_bytes)
}

impl<E: Element> Rows for MatrixRef<'_, E> {
    fn rows(&self) -> usize {
        MatrixRef::rows(self)
    }

    fn dim(&self) -> usize {
        MatrixRef::dim(self)
    }

    fn row_bytes(&self) -> usize {
        MatrixRef::dim(self).saturating_mul(size_of::<E>())
    }

    fn precision(&self) -> Precision {
        E::PRECISION
    }

    fn as_f32(&self) -> Option<&[f32]> {
        E::as_f32(self.as_slice())
    }

    fn widen<'s>(&'s self, row: usize, scratch: &'s mut Vec<f32>) -> WideRow<'s> {
        E::wide_row(E::widen(self.row(row), scratch))
    }

    fn scratch(&self) -> Result<Vec<f32>> {
        try_vec(if needs_copy::<E>() { MatrixRef::dim(self) } else { 0 }, "widened rows")
    }

    fn make_room(&self, scratch: &mut Widened) -> Result<()> {
        if needs_copy::<E>() { scratch.make_room(MatrixRef::dim(self)) } else { Ok(()) }
    }

    fn prepare(&self, metric: Metric, row: usize, scratch: &mut Vec<f32>) -> Result<Prepared> {
        Prepared::of_wide::<E>(metric, E::widen(self.row(row), scratch))
    }

    fn score(
        &self,
        simd: Simd,
        query: &Prepared,
        rows: &[u32],
        scratch: &mut Widened,
        values: &mut Vec<f64>,
    ) -> Result<()> {
        // All that `score` needs, so that it allocates nothing.
        self.make_room(scratch)?;
        values.clear();
        try_reserve(values, rows.len() + ROWS, "the values of candidates")?;
        score(simd, query, *self, rows, scratch, values);
        Ok(())
    }

    fn prefetch(&self, rows: &[u32]) {
        for &row in rows {
            prefetch(self.row(row as usize));
        }
    }

    fn is_finite(&self, row: usize) -> bool {
        self.row(row).iter().all(|x| x.to_f64().is_finite())
    }

    fn first_non_finite(&self, argument: Argument, start: usize) -> Option<Error> {
        first_non_finite(*self, argument, start)
    }

    fn identity(&self) -> (usize, usize) {
        (self.as_slice().as_ptr().addr(), size_of_val(self.as_slice()))
    }

    fn bytes(&self) -> (TypeId, &[u8]) {
        (TypeId::of::<E>(), self.as_slice().as_bytes())
    }
}

impl<E: Element> QueryRef<'_, E> {
    /// The rows as a trait object.
    pub(crate) fn erase(&self) -> &dyn Rows {
        match self {
            Self::Same(rows) => rows,
            Self::Wide(rows) => rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn matrix<E: Element>(data: &[E], dim: usize) -> MatrixRef<'_, E> {
        MatrixRef::new(data, data.len() / dim, dim, Argument::Reference).expect("whole rows")
    }

    #[test]
    fn first_rows_are_equal_bit_by_bit() {
        let rows = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
        let (whole, copy) = (matrix(&rows, 2), rows.to_vec());
        assert!(begins_with(&whole, &whole));
        assert!(begins_with(&whole, &matrix(&rows[..4], 2)), "the first rows in the same memory");
        assert!(begins_with(&whole, &matrix(&copy, 2)));
        assert!(begins_with(&whole, &matrix(&copy[..4], 2)));
        assert!(!begins_with(&matrix(&rows[..4], 2), &matrix(&copy, 2)), "more rows");
        assert!(!begins_with(&whole, &matrix(&copy, 3)), "wider rows");
        assert!(!begins_with(&whole, &matrix(&rows, 3)), "wider rows in the same memory");
        assert!(!begins_with(&whole, &matrix(&rows[2..], 2)), "later rows");
        for at in 0..copy.len() {
            let mut other = copy.clone();
            other[at] = if at == 0 { -0.0 } else { 9.0 };
            assert!(!begins_with(&whole, &matrix(&other, 2)), "element {at}");
        }
        let halves = [f16::from_bits(15360); 4];
        let others = [bf16::from_bits(15360); 4];
        assert!(!begins_with(&matrix(&halves, 2), &matrix(&others, 2)), "equal bits of two types");
    }
}
