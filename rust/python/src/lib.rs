//! `exactknn._core`: the core as a Python extension module. Thin on purpose: no arithmetic happens here.
//!
//! ```text
//! NumPy array ──array.rs: checked, borrowed──> MatrixRef ┐
//! arguments ──args.rs: read, dispatched by type──────────┴─ knn, radius, ranks, ... ──interrupt.rs: detached, watched──> core
//! result or Error <──error.rs: the only map from errors to exceptions───────────────────────────────────────────────┘
//! ```

mod args;
mod array;
mod error;
mod incremental;
mod index;
mod interrupt;
mod knn;
mod pairwise;
mod radius;
mod ranks;
mod references;

use std::num::NonZero;

use exactknn_core::measure::{Codes, peak, tile};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::{PyImportError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::IntoPy;

/// Set the number of threads of later searches; `None` resets to the default.
#[pyfunction]
#[pyo3(signature = (num_threads))]
fn set_num_threads(num_threads: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let threads = num_threads.map(args::positive_threads).transpose()?;
    exactknn_core::set_num_threads(threads);
    Ok(())
}

/// The default number of threads of a search.
#[pyfunction]
fn get_num_threads() -> PyResult<usize> {
    args::default_threads().map(NonZero::get)
}

/// Set the default floating-point environment of this thread and return its state before, for `restore_float_env`.
#[pyfunction]
fn replace_float_env() -> u32 {
    exactknn_core::float_env::replace()
}

/// Set the state that `replace_float_env` returned.
#[pyfunction]
fn restore_float_env(state: u32) {
    exactknn_core::float_env::restore(state);
}

/// Wait until no thread holds a lock of this module; for the time before a fork.
#[pyfunction]
fn before_fork() {
    exactknn_core::fork::before();
}

/// End what `before_fork` began, in the parent and in the child.
#[pyfunction]
fn after_fork() {
    exactknn_core::fork::after();
}

/// The SIMD level of new searches.
#[pyfunction]
fn simd_level() -> PyResult<&'static str> {
    Ok(exactknn_core::active_level().into_py()?.level().name())
}

/// The SIMD levels that this CPU can run, slowest first.
#[pyfunction]
fn available_simd_levels() -> Vec<&'static str> {
    exactknn_core::Level::available().into_iter().map(exactknn_core::Level::name).collect()
}

/// Set the SIMD level of new searches; `None` resets to the environment or the best.
#[pyfunction]
#[pyo3(signature = (level))]
fn set_simd_level(level: Option<&str>) -> PyResult<()> {
    exactknn_core::set_level(level).into_py()
}

/// Operations per second of one thread, for benchmarks: the peak of the level's instructions, or with `dim` its microkernel.
#[pyfunction]
#[pyo3(signature = (codes, dim=None))]
fn measure(py: Python<'_>, codes: &str, dim: Option<usize>) -> PyResult<Option<f64>> {
    let codes = match codes {
        "int8" => Codes::Int8,
        "float32" => Codes::Float32,
        other => return Err(PyValueError::new_err(format!("codes must be 'int8' or 'float32', got {other:?}"))),
    };
    let simd = exactknn_core::active_level().into_py()?;
    py.detach(|| match dim {
        None => Ok(peak(simd, codes)),
        Some(dim) => tile(simd, codes, dim).map(Some),
    })
    .into_py()
}

/// How this module was built.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("target", env!("EXACTKNN_TARGET"))?;
    info.set_item("rustc", env!("EXACTKNN_RUSTC"))?;
    Ok(info)
}

/// Load NumPy's C interface now. Its first use runs Python code and aborts the process on any exception, such as that of
/// Ctrl-C. Signal handlers run on the main thread only, so it is loaded on another thread.
fn load_numpy(py: Python<'_>) -> PyResult<()> {
    py.import("numpy")?;
    py.detach(|| {
        std::thread::scope(|scope| {
            let loading =
                scope.spawn(|| Python::attach(|py| PyArray1::from_slice(py, &[0_f32]).try_readonly().is_ok()));
            loading.join().is_ok_and(|readable| readable)
        })
    })
    .then_some(())
    .ok_or_else(|| PyImportError::new_err("exactknn cannot use the C interface of the installed NumPy"))
}

/// A number of threads.
pub(crate) type Threads = NonZero<usize>;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    load_numpy(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(knn::py_knn, module)?)?;
    module.add_function(wrap_pyfunction!(interrupt::last_search, module)?)?;
    module.add_class::<incremental::PyBlockSearch>()?;
    module.add_class::<index::PyIndex>()?;
    module.add_class::<references::PyReferences>()?;
    module.add_function(wrap_pyfunction!(radius::py_radius, module)?)?;
    module.add_function(wrap_pyfunction!(ranks::py_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(pairwise::pairwise, module)?)?;
    module.add_function(wrap_pyfunction!(set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(get_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(replace_float_env, module)?)?;
    module.add_function(wrap_pyfunction!(restore_float_env, module)?)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(simd_level, module)?)?;
    module.add_function(wrap_pyfunction!(available_simd_levels, module)?)?;
    module.add_function(wrap_pyfunction!(set_simd_level, module)?)?;
    module.add_function(wrap_pyfunction!(build_info, module)?)?;
    module.add_function(wrap_pyfunction!(measure, module)?)?;
    Ok(())
}
