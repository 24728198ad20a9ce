//! The only map from the core's errors to Python exceptions.

use exactknn_core::Error;
use pyo3::exceptions::{PyKeyboardInterrupt, PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Turns a core result into a Python one.
pub(crate) trait IntoPy<T> {
    /// The value, or the exception that belongs to the error.
    fn into_py(self) -> PyResult<T>;
}

impl<T> IntoPy<T> for Result<T, Error> {
    fn into_py(self) -> PyResult<T> {
        self.map_err(|error| {
            let text = error.to_string();
            match error {
                Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
                Error::Cancelled => PyKeyboardInterrupt::new_err(text),
                Error::Panic(_) | Error::NoThreads { .. } => PyRuntimeError::new_err(text),
                // Python picks the subclass by the number: FileNotFoundError, PermissionError. The last place is the number
                // on Windows; elsewhere it is ignored.
                Error::File { path, action, code: Some(code), reason } => {
                    PyOSError::new_err((code, format!("could not {action}: {reason}"), path.into_os_string(), code))
                }
                Error::File { .. } => PyOSError::new_err(text),
                // Everything else is an argument that cannot be used; new kinds of refusal included.
                _ => PyValueError::new_err(text),
            }
        })
    }
}
