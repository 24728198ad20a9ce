//! The only map from the core's errors to Python exceptions.

use std::ffi::OsString;

use exactknn_core::Error;
use pyo3::exceptions::{PyKeyboardInterrupt, PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Turns a core result into a Python one.
pub(crate) trait IntoPy<T> {
    /// The value, or the exception for the error.
    fn into_py(self) -> PyResult<T>;
}

impl<T> IntoPy<T> for Result<T, Error> {
    fn into_py(self) -> PyResult<T> {
        self.map_err(|error| {
            let text = error.to_string();
            match error {
                Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
                Error::Cancelled => PyKeyboardInterrupt::new_err(text),
                Error::Panic(_) | Error::NoThreads { .. } | Error::Forked => PyRuntimeError::new_err(text),
                Error::File { path, action, code: Some(code), reason } => {
                    os_error(code, format!("could not {action}: {reason}"), path.into_os_string())
                }
                Error::File { .. } => PyOSError::new_err(text),
                // All others are invalid arguments, including variants that are added later.
                _ => PyValueError::new_err(text),
            }
        })
    }
}

/// The subclass of OSError for an error number, such as FileNotFoundError.
fn os_error(code: i32, text: String, path: OsString) -> PyErr {
    // Only calling the type selects the subclass in every version of Python. The last argument is the number on Windows and
    // ignored elsewhere.
    let raised = Python::attach(|py| py.get_type::<PyOSError>().call1((code, text, path, code)).map(PyErr::from_value));
    raised.unwrap_or_else(|error| error)
}
