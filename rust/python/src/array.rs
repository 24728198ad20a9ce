//! NumPy arrays as borrowed matrices, zero-copy.

use exactknn_core::{Argument, Element, MatrixRef};
use half::{bf16, f16};
use numpy::{
    PyArray1, PyArray2, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::IntoPy;

/// The element type of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    F32,
    F64,
    F16,
    Bf16,
}

impl Kind {
    /// The name of the type.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// The type to which rows are widened.
    pub(crate) fn wide(self) -> Self {
        if self == Self::F64 { Self::F64 } else { Self::F32 }
    }
}

/// The element type of `array`; with `bfloat16` the array has bit patterns of type uint16.
pub(crate) fn kind(array: &Bound<'_, PyUntypedArray>, argument: Argument, bfloat16: bool) -> PyResult<Kind> {
    let py = array.py();
    let dtype = array.dtype();
    let found = if bfloat16 {
        dtype.is_equiv_to(&numpy::dtype::<u16>(py)).then_some(Kind::Bf16)
    } else if dtype.is_equiv_to(&numpy::dtype::<f32>(py)) {
        Some(Kind::F32)
    } else if dtype.is_equiv_to(&numpy::dtype::<f64>(py)) {
        Some(Kind::F64)
    } else if dtype.is_equiv_to(&numpy::dtype::<f16>(py)) {
        Some(Kind::F16)
    } else {
        None
    };
    found.ok_or_else(|| {
        let wanted = if bfloat16 {
            "uint16 that hold bfloat16 bits"
        } else {
            "float32, float64 or float16 in native byte order"
        };
        PyTypeError::new_err(format!("{argument} must be an array of {wanted}, got {dtype}"))
    })
}

/// The element type of both arrays, which must be the same.
pub(crate) fn common_kind(
    query: &Bound<'_, PyUntypedArray>,
    reference: &Bound<'_, PyUntypedArray>,
    bfloat16: bool,
) -> PyResult<Kind> {
    let query_kind = kind(query, Argument::Query, bfloat16)?;
    let reference_kind = kind(reference, Argument::Reference, bfloat16)?;
    if query_kind != reference_kind {
        return Err(PyTypeError::new_err(format!(
            "query and reference must have one dtype, got {} and {}",
            query.dtype(),
            reference.dtype()
        )));
    }
    Ok(query_kind)
}

/// An element type with its NumPy storage.
pub(crate) trait Stored: Element {
    /// The element type in NumPy.
    type Storage: numpy::Element;
    /// View elements of NumPy as elements of the core.
    fn cast(stored: &[Self::Storage]) -> &[Self];
    /// Convert elements of the core to elements of NumPy.
    fn into_storage(numbers: Vec<Self>) -> Vec<Self::Storage>;
}

macro_rules! stored_as_itself {
    ($($ty:ty),*) => {$(
        impl Stored for $ty {
            type Storage = $ty;
            fn cast(stored: &[$ty]) -> &[$ty] {
                stored
            }
            fn into_storage(numbers: Vec<$ty>) -> Vec<$ty> {
                numbers
            }
        }
    )*};
}
stored_as_itself!(f32, f64, f16);

impl Stored for bf16 {
    type Storage = u16;
    fn cast(stored: &[u16]) -> &[Self] {
        use half::slice::HalfBitsSliceExt;
        stored.reinterpret_cast()
    }
    fn into_storage(numbers: Vec<Self>) -> Vec<u16> {
        use half::vec::HalfFloatVecExt;
        numbers.reinterpret_into()
    }
}

/// Borrow `array` for as long as the returned guard lives.
pub(crate) fn borrow<'py, E: Stored>(
    array: &Bound<'py, PyUntypedArray>,
    argument: Argument,
) -> PyResult<PyReadonlyArray2<'py, E::Storage>> {
    if array.ndim() != 2 {
        return Err(PyValueError::new_err(format!(
            "{argument} must be a matrix (rows, columns), got {} dimensions",
            array.ndim()
        )));
    }
    let array = array.cast::<PyArray2<E::Storage>>()?;
    // `as_slice` accepts Fortran order too and would read the transposed matrix. An empty array has every order.
    if !array.is_c_contiguous() && !array.is_empty() {
        return Err(PyValueError::new_err(format!("{argument} must be C-contiguous")));
    }
    array.try_readonly().map_err(|_| {
        PyValueError::new_err(format!("{argument} is being written to by a running call, it cannot be read now"))
    })
}

/// The borrowed array as a matrix of the core.
pub(crate) fn matrix<'a, E: Stored>(
    array: &'a PyReadonlyArray2<'_, E::Storage>,
    argument: Argument,
) -> PyResult<MatrixRef<'a, E>> {
    let [rows, dim] = [array.shape()[0], array.shape()[1]];
    let data = if rows == 0 {
        &[]
    } else {
        // An error if the array is not aligned or not contiguous.
        array.as_slice().map_err(|_| PyValueError::new_err(format!("{argument} must be C-contiguous and aligned")))?
    };
    MatrixRef::new(E::cast(data), rows, dim, argument).into_py()
}

/// Borrow a list of integers for as long as the returned guard lives.
pub(crate) fn borrow_integers<'py>(
    array: &Bound<'py, PyUntypedArray>,
    name: &str,
) -> PyResult<PyReadonlyArray1<'py, i64>> {
    let dtype = array.dtype();
    if array.ndim() != 1 {
        return Err(PyValueError::new_err(format!("{name} must have one dimension, got {}", array.ndim())));
    }
    if !dtype.is_equiv_to(&numpy::dtype::<i64>(array.py())) {
        return Err(PyTypeError::new_err(format!(
            "{name} must be an array of int64 in native byte order, got {dtype}"
        )));
    }
    array.cast::<PyArray1<i64>>()?.try_readonly().map_err(|_| {
        PyValueError::new_err(format!("{name} is being written to by a running call, it cannot be read now"))
    })
}

/// The borrowed integers.
pub(crate) fn integers<'a>(array: &'a PyReadonlyArray1<'_, i64>, name: &str) -> PyResult<&'a [i64]> {
    array.as_slice().map_err(|_| PyValueError::new_err(format!("{name} must be C-contiguous and aligned")))
}
