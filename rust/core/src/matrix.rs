//! Checked views of row-major matrices, and their element types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use crate::error::{Argument, Error, Result};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A number that float64 arithmetic loads directly: `f32` or `f64`.
pub trait Wide: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// Exact conversion.
    fn to_f64(self) -> f64;
    /// The row itself, if it is `f32`.
    fn as_f32(row: &[Self]) -> Option<&[f32]>;
}

impl Wide for f32 {
    #[inline(always)]
    fn as_f32(row: &[Self]) -> Option<&[f32]> {
        Some(row)
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Wide for f64 {
    #[inline(always)]
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
}

/// The precision in which results are returned and ranked, chosen at run time; see [`Output`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// `f32`.
    Single,
    /// `f64`.
    Double,
}

/// The precision in which results are returned and ranked: `f32` or `f64`.
pub trait Output:
    Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + FromZeros + 'static + sealed::Sealed
{
    /// This type, for code that is not generic over it.
    const PRECISION: Precision;
    /// Half the distance from 1 to the next number: the relative error of rounding to this type.
    const UNIT_ROUNDOFF: f64;
    /// A buffer of results as an enum, for code that is not generic over their type.
    fn erase(values: &mut [Self]) -> Values<'_>;
    /// Round to this type.
    fn round(value: f64) -> Self;
    /// The ranked value: `value` rounded to this type, or `value` itself if rounding overflows or underflows.
    ///
    /// Monotone in `value`, so it never contradicts the order of the float64 values.
    fn ranked(value: f64) -> f64;
    /// The largest `f64` that rounds to at most `bound`, a finite number. So one comparison of the float64 value decides
    /// whether the rounded value is within `bound`.
    fn largest_within(bound: f64) -> f64;
    /// The largest `f64` that ranks before `rank`, a result of [`Output::ranked`], and the largest that ranks at `rank` or
    /// before.
    fn edges_of_rank(rank: f64) -> (f64, f64);
}

/// A buffer of results.
#[derive(Debug)]
pub enum Values<'a> {
    /// Rounded to `f32`.
    Single(&'a mut [f32]),
    /// Not rounded.
    Double(&'a mut [f64]),
}

impl Values<'_> {
    /// The first `middle` places and the rest.
    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::Single(values) => {
                let (head, tail) = values.split_at_mut(middle);
                (Self::Single(head), Self::Single(tail))
            }
            Self::Double(values) => {
                let (head, tail) = values.split_at_mut(middle);
                (Self::Double(head), Self::Double(tail))
            }
        }
    }
}

impl Precision {
    /// [`Output::UNIT_ROUNDOFF`].
    pub(crate) fn unit_roundoff(self) -> f64 {
        match self {
            Self::Single => f32::UNIT_ROUNDOFF,
            Self::Double => f64::UNIT_ROUNDOFF,
        }
    }

    /// [`Output::ranked`].
    #[inline(always)]
    pub(crate) fn ranked(self, value: f64) -> f64 {
        match self {
            Self::Single => f32::ranked(value),
            Self::Double => value,
        }
    }

    /// [`Output::largest_within`].
    pub(crate) fn largest_within(self, bound: f64) -> f64 {
        match self {
            Self::Single => f32::largest_within(bound),
            Self::Double => f64::largest_within(bound),
        }
    }

    /// [`Output::edges_of_rank`].
    pub(crate) fn edges_of_rank(self, rank: f64) -> (f64, f64) {
        match self {
            Self::Single => f32::edges_of_rank(rank),
            Self::Double => f64::edges_of_rank(rank),
        }
    }
}

impl Output for f32 {
    const PRECISION: Precision = Precision::Single;
    const UNIT_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;

    fn erase(values: &mut [Self]) -> Values<'_> {
        Values::Single(values)
    }

    #[inline(always)]
    fn round(value: f64) -> Self {
        value as f32
    }

    #[inline(always)]
    fn ranked(value: f64) -> f64 {
        let rounded = value as f32;
        if rounded.is_normal() { f64::from(rounded) } else { value }
    }

    fn largest_within(bound: f64) -> f64 {
        let nearest = bound as f32;
        let below = if f64::from(nearest) > bound { nearest.next_down() } else { nearest };
        // Rounding treats infinity as the next power of two.
        let wide =
            |x: f32| if x.is_finite() { f64::from(x) } else { ((1u128 << 127) as f64 * 2.0).copysign(f64::from(x)) };
        // Exact in float64: the midpoint of adjacent float32 numbers has one more bit. It rounds to the even one.
        let middle = wide(below) * 0.5 + wide(below.next_up()) * 0.5;
        if f64::from(middle as f32) <= bound { middle } else { middle.next_down() }
    }

    fn edges_of_rank(rank: f64) -> (f64, f64) {
        let narrow = rank as f32;
        if narrow.is_normal() {
            (Self::largest_within(f64::from(narrow.next_down())), Self::largest_within(rank))
        } else {
            // The rank is the float64 value itself, which no other value shares.
            (rank.next_down(), rank)
        }
    }
}

impl Output for f64 {
    const PRECISION: Precision = Precision::Double;
    const UNIT_ROUNDOFF: f64 = 1.0 / (1u64 << 53) as f64;

    fn erase(values: &mut [Self]) -> Values<'_> {
        Values::Double(values)
    }

    #[inline(always)]
    fn round(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn ranked(value: f64) -> f64 {
        value
    }

    fn largest_within(bound: f64) -> f64 {
        bound
    }

    fn edges_of_rank(rank: f64) -> (f64, f64) {
        (rank.next_down(), rank)
    }
}

/// A widened row.
#[derive(Debug, Clone, Copy)]
pub enum WideRow<'a> {
    /// Of `f32`, `f16` or `bf16` elements.
    F32(&'a [f32]),
    /// Of `f64` elements.
    F64(&'a [f64]),
}

/// An element type of a matrix.
pub trait Element: Copy + Send + Sync + IntoBytes + Immutable + 'static + sealed::Sealed {
    /// The type to which rows are widened, exactly.
    type Wide: Wide + Element;
    /// The type of the results.
    type Output: Output;
    /// Whether squares of these numbers can leave the range of `f64`.
    const DOUBLE: bool;
    /// [`Output::PRECISION`] of the results.
    const PRECISION: Precision = <Self::Output as Output>::PRECISION;

    /// The widened row: the row itself, or a copy in `scratch`.
    fn widen<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [Self::Wide];

    /// The same slice, if it is `f32`.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// A widened row as an enum, for code that is not generic over its type.
    fn wide_row(row: &[Self::Wide]) -> WideRow<'_>;

    /// Exact conversion of one number.
    fn to_f64(self) -> f64;
}

impl Element for f32 {
    type Wide = f32;
    type Output = f32;
    const DOUBLE: bool = false;

    #[inline(always)]
    fn widen<'a>(row: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        row
    }

    fn as_f32(numbers: &[Self]) -> Option<&[f32]> {
        Some(numbers)
    }

    fn wide_row(row: &[f32]) -> WideRow<'_> {
        WideRow::F32(row)
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Element for f64 {
    type Wide = f64;
    type Output = f64;
    const DOUBLE: bool = true;

    #[inline(always)]
    fn widen<'a>(row: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f64] {
        row
    }

    fn wide_row(row: &[f64]) -> WideRow<'_> {
        WideRow::F64(row)
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
}

macro_rules! half_element {
    ($half:ty) => {
        impl Element for $half {
            type Wide = f32;
            type Output = f32;
            const DOUBLE: bool = false;

            #[inline]
            fn widen<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
                scratch.resize(row.len(), 0.0);
                row.convert_to_f32_slice(scratch);
                scratch
            }

            fn wide_row(row: &[f32]) -> WideRow<'_> {
                WideRow::F32(row)
            }

            #[inline]
            fn to_f64(self) -> f64 {
                <$half>::to_f64(self)
            }
        }
    };
}
half_element!(f16);
half_element!(bf16);

/// Most rows of a matrix.
const MAX_ROWS: usize = u32::MAX as usize - 64;

/// Refuse more than [`MAX_ROWS`] rows.
pub(crate) fn check_row_count(rows: usize, argument: Argument) -> Result<()> {
    // The padding rows of the last panel have row numbers too, which must not wrap around.
    if rows > MAX_ROWS { Err(Error::TooManyRows { argument, rows }) } else { Ok(()) }
}

/// A borrowed row-major matrix with at least one column.
#[derive(Debug, Clone, Copy)]
pub struct MatrixRef<'a, E> {
    data: &'a [E],
    rows: usize,
    dim: usize,
}

impl<'a, E> MatrixRef<'a, E> {
    /// View `data` as `rows` rows of `dim` numbers.
    ///
    /// # Errors
    /// [`Error::NoColumns`] for `dim == 0`, [`Error::BadBuffer`] if the length is not `rows * dim`, [`Error::TooManyRows`] if
    /// row numbers do not fit in 32 bits.
    pub fn new(data: &'a [E], rows: usize, dim: usize, argument: Argument) -> Result<Self> {
        if dim == 0 {
            return Err(Error::NoColumns(argument));
        }
        if rows.checked_mul(dim) != Some(data.len()) {
            return Err(Error::BadBuffer { rows, dim, elements: data.len() });
        }
        check_row_count(rows, argument)?;
        Ok(Self { data, rows, dim })
    }

    /// Number of rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, at least 1.
    #[inline(always)]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// All rows, one after the other.
    pub(crate) fn as_slice(&self) -> &'a [E] {
        self.data
    }

    /// One row.
    ///
    /// # Panics
    /// If `row` is at least [`MatrixRef::rows`].
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [E] {
        &self.data[row * self.dim..][..self.dim]
    }
}

/// The first NaN or infinity at or after row `start`, as an error that names it.
pub(crate) fn first_non_finite<E: Element>(rows: MatrixRef<'_, E>, argument: Argument, start: usize) -> Option<Error> {
    (start..rows.rows).find_map(|row| {
        let numbers = rows.row(row).iter().map(|x| x.to_f64());
        let (column, value) = numbers.enumerate().find(|(_, x)| !x.is_finite())?;
        Some(Error::NonFinite { argument, row, column, value })
    })
}

/// Queries for references of type `E`: of the same type, or widened.
#[derive(Debug, Clone, Copy)]
pub enum QueryRef<'a, E: Element> {
    /// Of the type of the references.
    Same(MatrixRef<'a, E>),
    /// Widened.
    Wide(MatrixRef<'a, E::Wide>),
}

impl<'a, E: Element> QueryRef<'a, E> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Same(rows) => rows.rows(),
            Self::Wide(rows) => rows.rows(),
        }
    }

    /// Number of columns, at least 1.
    pub fn dim(&self) -> usize {
        match self {
            Self::Same(rows) => rows.dim(),
            Self::Wide(rows) => rows.dim(),
        }
    }
}

impl<'a, E: Element> From<MatrixRef<'a, E>> for QueryRef<'a, E> {
    fn from(rows: MatrixRef<'a, E>) -> Self {
        Self::Same(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_rounded_and_monotone() {
        let mut previous = f64::NEG_INFINITY;
        for value in [-1e300, -1e39, -1.0, -1e-60, 0.0, 1e-60, 1e-40, 1e-39, 1.0, 1.0 + 1e-12, 1.1, 1e38, 1e39, 1e300] {
            let rank = f32::ranked(value);
            assert!(rank >= previous, "{value} ranks below its predecessor");
            previous = rank;
        }
        assert_eq!(f32::ranked(1.0 + 1e-12), 1.0);
        assert_eq!(f32::ranked(1e39), 1e39);
        assert_eq!(f32::ranked(1e-60), 1e-60);
    }

    #[test]
    fn the_largest_number_within_a_bound_is_the_last_that_rounds_to_it() {
        let mut bounds =
            vec![0.0, -0.0, 5e-324, 1e-60, 0.1, 1.0, 16_777_216.0, 16_777_217.0, 1e38, 1e39, 1e300, f64::MAX];
        for exponent in [-160, -149, -140, -126, -3, 0, 24, 127] {
            for step in [0, 1, 2, 3] {
                let near = f64::from(f32::from_bits((2f64.powi(exponent) as f32).to_bits() + step));
                bounds.extend([near, near.next_up(), near.next_down()]);
            }
        }
        bounds.extend([f64::from(f32::MAX), f64::from(f32::MAX).next_up(), f64::from(f32::MIN_POSITIVE)]);
        for bound in bounds.clone().into_iter().chain(bounds.into_iter().map(|bound| -bound)) {
            let last = f32::largest_within(bound);
            assert!(f64::from(<f32 as Output>::round(last)) <= bound, "{last:e} rounds beyond {bound:e}");
            assert!(
                f64::from(<f32 as Output>::round(last.next_up())) > bound,
                "{last:e} is not the last within {bound:e}"
            );
            assert_eq!(f64::largest_within(bound), bound);
        }
        // 1 + 2^-24 is the midpoint of 1 and the next number, and rounds to 1, which is even.
        assert_eq!(f32::largest_within(1.0), 1.0 + 1.0 / 16_777_216.0);
        assert_eq!(f32::largest_within(0.0), 2f64.powi(-150));
    }

    #[test]
    fn the_edges_of_a_rank_enclose_its_values() {
        let mut values = vec![0.0, 5e-324, 1e-60, 0.1, 1.0, 1.5, 3e38, 1e39, f64::MAX, f64::from(f32::MAX)];
        for exponent in [-150, -149, -140, -127, -126, -3, 0, 24, 127] {
            for step in [0, 1, 2, 3] {
                let near = f64::from(f32::from_bits((2f64.powi(exponent) as f32).to_bits() + step));
                values.extend([near, near.next_up(), near.next_down(), near * (1.0 + 1.0 / 16_777_216.0)]);
            }
        }
        for value in values.clone().into_iter().chain(values.into_iter().map(|value| -value)) {
            let rank = f32::ranked(value);
            let (before, at) = f32::edges_of_rank(rank);
            assert!(f32::ranked(before) < rank, "{before:e} does not rank before {rank:e}");
            assert!(f32::ranked(before.next_up()) == rank, "{before:e} is not the last before {rank:e}");
            assert!(f32::ranked(at) == rank, "{at:e} does not rank at {rank:e}");
            assert!(f32::ranked(at.next_up()) > rank, "{at:e} is not the last at {rank:e}");
            assert_eq!(f64::edges_of_rank(value), (value.next_down(), value));
        }
    }

    #[test]
    fn an_inconsistent_view_is_refused() {
        let data = [0f32; 6];
        assert!(MatrixRef::new(&data, 2, 3, Argument::Query).is_ok());
        assert_eq!(MatrixRef::new(&data, 6, 0, Argument::Query).err(), Some(Error::NoColumns(Argument::Query)));
        assert!(MatrixRef::new(&data, 2, 2, Argument::Query).is_err());
        assert!(MatrixRef::new(&data, usize::MAX, 2, Argument::Query).is_err());
    }
}
