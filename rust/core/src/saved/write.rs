//! Writing: one pass over the tensors into a temporary file, which replaces the target once it is on disk.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;
use zerocopy::IntoBytes;

use super::{
    ALIGNMENT, BLOCK, CHECKSUMS, DIGITS, FORMAT, FORMAT_VERSION, HEADER_START, LENGTH, OWN_KEYS, Stored, head_digits,
    table_len,
};
use crate::error::{Error, Result};
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;

/// The purpose of buffers in [`Error::OutOfMemory`].
const WRITTEN: &str = "the file of the index";

/// Appends elements to a tensor.
pub type Push<'a, T> = &'a mut dyn FnMut(&[T]) -> Result<()>;

/// A tensor to be written: its name, type and shape, and the source of its elements.
pub struct Tensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// `None` if that overflows.
    bytes: Option<usize>,
    feed: Feed<'a>,
}

type Feed<'a> = Box<dyn FnOnce(&mut Sink<'_>) -> Result<()> + Send + 'a>;

impl<'a> Tensor<'a> {
    /// A tensor whose elements are pushed by `feed` when it is written, in C order, in pieces of any size.
    ///
    /// Elements that `feed` reads from another saved index must be verified: damage would get a valid checksum here.
    pub fn new<T: Stored>(
        name: impl Into<String>,
        shape: &[usize],
        feed: impl FnOnce(Push<'_, T>) -> Result<()> + Send + 'a,
    ) -> Self {
        Self {
            name: name.into(),
            dtype: T::DTYPE,
            shape: shape.to_vec(),
            bytes: shape.iter().try_fold(size_of::<T>(), |bytes, &size| bytes.checked_mul(size)),
            feed: Box::new(move |sink| feed(&mut |numbers: &[T]| sink.push(numbers.as_bytes()))),
        }
    }

    /// A tensor in memory.
    pub fn of_slice<T: Stored>(name: impl Into<String>, shape: &[usize], numbers: &'a [T]) -> Self {
        Self::new(name, shape, move |push: Push<'_, T>| push(numbers))
    }
}

/// Write `tensors` and the texts of `metadata` to `path`, replacing an existing file.
///
/// Memory in addition to the tensors: about 1 MiB, and 8 bytes per block. A tensor starts at a multiple of 64 bytes if its
/// size is a multiple of 64; so does the first of the others. A link is followed. `monitor` is polled after each block; only
/// the final sync of the disk cannot be cancelled.
///
/// # Errors
/// [`Error::File`] if the system fails, [`Error::BadFile`] if `path` exists and is not a regular file, [`Error::Cancelled`],
/// and the errors of a tensor's feed. Then `path` is unchanged, and no other file is left. (One exception: if the very last
/// step fails, the sync of the folder, the new file is in place.) [`Error::Panic`] for tensors that do not match their shape
/// and for reserved or duplicate names: errors of this library.
pub fn write(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: Vec<Tensor<'_>>,
    monitor: &Monitor,
) -> Result<()> {
    write_if(path, metadata, tensors, monitor, || Ok(()))
}

/// As [`write`]; `check` is called when all tensors are read, before the new file replaces the old one.
pub(crate) fn write_if(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: Vec<Tensor<'_>>,
    monitor: &Monitor,
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let plan = Plan::new(metadata, tensors)?;
    let target = Target::new(path)?;
    let action = format!("write its {} bytes", plan.file_bytes);
    let failed = |error: io::Error| Error::file(path, action.as_str(), &error);
    // Declared before the sink, which holds the file open: dropped after it, so the file is closed before it is removed.
    let (temporary, mut file) =
        Temporary::create(&target).map_err(|error| Error::file(path, "make a file in its folder", &error))?;
    file.seek(SeekFrom::Start(plan.head.len() as u64)).map_err(failed)?;
    let mut sink = Sink {
        out: Buffered { file, waiting: try_vec(BLOCK, WRITTEN)? },
        hasher: Xxh3::new(),
        in_block: 0,
        pushed: 0,
        checksums: try_vec(plan.tensors.iter().map(|(_, bytes)| bytes.div_ceil(BLOCK)).sum(), WRITTEN)?,
        failed: &failed,
        monitor,
    };
    monitor.begin(plan.file_bytes as u64);
    for (tensor, bytes) in plan.tensors {
        sink.tensor(tensor, bytes)?;
    }
    check()?;
    let mut head = plan.head;
    let blocks = sink.checksums.as_bytes();
    head[plan.table..][..blocks.len()].copy_from_slice(blocks);
    let digits = head_digits(&head);
    head[LENGTH + HEADER_START.len()..][..DIGITS].copy_from_slice(digits.as_bytes());
    sink.out.flush().map_err(failed)?;
    let mut file = &sink.out.file;
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    file.write_all(&head).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    monitor.check()?;
    drop(sink);
    temporary.replace(&target).map_err(|error| Error::file(path, "put the new file in its place", &error))
}

/// The layout of the file, known before any element is read.
struct Plan<'a> {
    /// In the order of the file, with their sizes in bytes.
    tensors: Vec<(Tensor<'a>, usize)>,
    /// The file up to the end of the table, with zeros for all checksums.
    head: Vec<u8>,
    /// First byte of the table.
    table: usize,
    file_bytes: usize,
}

impl<'a> Plan<'a> {
    fn new(metadata: &BTreeMap<String, String>, tensors: Vec<Tensor<'a>>) -> Result<Self> {
        let misuse = |what: String| Error::Panic(format!("an index cannot be saved with {what}"));
        if let Some(key) = metadata.keys().find(|key| OWN_KEYS.contains(&key.as_str())) {
            return Err(misuse(format!("metadata of the reserved name {key:?}")));
        }
        let mut names = vec![CHECKSUMS, "__metadata__"];
        for tensor in &tensors {
            if names.contains(&tensor.name.as_str()) {
                return Err(misuse(format!("a tensor of the reserved or doubled name {:?}", tensor.name)));
            }
            names.push(&tensor.name);
        }
        let mut tensors = tensors
            .into_iter()
            .map(|tensor| match tensor.bytes {
                Some(bytes) => Ok((tensor, bytes)),
                None => Err(misuse(format!("tensor {:?} of shape {:?}", tensor.name, tensor.shape))),
            })
            .collect::<Result<Vec<_>>>()?;
        // Stable: tensors of a group keep their order.
        tensors.sort_by_key(|(tensor, bytes)| match bytes % ALIGNMENT {
            0 => (0, Reverse(0)),
            _ => (1, Reverse(tensor.dtype.bitsize())),
        });

        let blocks = tensors.iter().map(|(_, bytes)| bytes.div_ceil(BLOCK)).sum();
        let table_bytes = table_len(blocks) * size_of::<u64>();
        let mut header = format!(r#"{HEADER_START}{:0DIGITS$x}""#, 0);
        let version = FORMAT_VERSION.to_string();
        let own = [("format", FORMAT), ("format_version", &version), ("exactknn_version", env!("CARGO_PKG_VERSION"))];
        let given = metadata.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        for (key, value) in own.into_iter().chain(given) {
            // Writing to a string cannot fail.
            let _ = write!(header, ",{}:{}", Value::from(key), Value::from(value));
        }
        header.push('}');
        let mut end = 0usize;
        let table = (CHECKSUMS, Dtype::U64, &[table_len(blocks)][..], table_bytes);
        let others = tensors.iter().map(|(tensor, bytes)| (&*tensor.name, tensor.dtype, &*tensor.shape, *bytes));
        for (name, dtype, shape, bytes) in std::iter::once(table).chain(others) {
            let start = end;
            end = start.checked_add(bytes).ok_or_else(|| misuse("more bytes than can be addressed".into()))?;
            let _ = write!(
                header,
                r#",{}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#,
                Value::from(name)
            );
        }
        header.push('}');
        let data = (LENGTH + header.len()).next_multiple_of(ALIGNMENT);
        let mut head = try_vec(data + table_bytes, WRITTEN)?;
        head.extend(((data - LENGTH) as u64).to_le_bytes());
        head.extend(header.into_bytes());
        head.resize(data, b' ');
        head.resize(data + table_bytes, 0);
        Ok(Self { tensors, head, table: data, file_bytes: data + end })
    }
}

/// A file, written in pieces of up to [`BLOCK`] bytes. Like [`std::io::BufWriter`], whose buffer aborts if memory ends.
struct Buffered {
    file: File,
    /// Bytes that have not been written yet; its capacity is [`BLOCK`].
    waiting: Vec<u8>,
}

impl Buffered {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.waiting.len() + bytes.len() > BLOCK {
            self.flush()?;
        }
        if bytes.len() >= BLOCK {
            return self.file.write_all(bytes);
        }
        self.waiting.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let outcome = self.file.write_all(&self.waiting);
        self.waiting.clear();
        outcome
    }
}

/// The destination of the tensors' bytes: the file, and the checksum of each block.
struct Sink<'a> {
    out: Buffered,
    hasher: Xxh3,
    in_block: usize,
    /// Bytes of the current tensor so far.
    pushed: usize,
    checksums: Vec<u64>,
    failed: &'a dyn Fn(io::Error) -> Error,
    monitor: &'a Monitor,
}

impl Sink<'_> {
    fn tensor(&mut self, tensor: Tensor<'_>, bytes: usize) -> Result<()> {
        self.pushed = 0;
        (tensor.feed)(self)?;
        if self.pushed != bytes {
            let (name, pushed) = (tensor.name, self.pushed);
            return Err(Error::Panic(format!("tensor {name:?} has {bytes} bytes, but {pushed} were given")));
        }
        if self.in_block > 0 {
            self.end_block()?;
        }
        Ok(())
    }

    fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.pushed += bytes.len();
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK - self.in_block));
            // The checksum first: the copy to the page cache then reads the bytes from the CPU's cache.
            self.hasher.update(now);
            self.out.write_all(now).map_err(self.failed)?;
            self.in_block += now.len();
            if self.in_block == BLOCK {
                self.end_block()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn end_block(&mut self) -> Result<()> {
        self.checksums.push(self.hasher.digest());
        self.hasher.reset();
        self.monitor.advance(self.in_block as u64);
        self.in_block = 0;
        self.monitor.check()
    }
}

#[cfg(unix)]
const EACCES: i32 = 13;

/// The name that a chain of links leads to, where there is no file yet.
fn end_of_links(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    // No system follows more.
    for _ in 0..40 {
        let Ok(next) = fs::read_link(&path) else { break };
        path.pop();
        path.push(next);
    }
    path
}

/// The file to be replaced or created.
struct Target {
    folder: PathBuf,
    path: PathBuf,
    /// The permissions of the replaced file, which the new one gets.
    permissions: Option<Permissions>,
}

impl Target {
    fn new(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| Error::file(path, "write to it", &error);
        let mut permissions = None;
        let path = match fs::metadata(path) {
            Ok(there) if there.is_file() || there.is_dir() => {
                // For the system's error for a folder or a read-only file: a rename would replace the latter.
                OpenOptions::new().write(true).open(path).map_err(failed)?;
                // The superuser may open it nevertheless.
                #[cfg(unix)]
                if there.permissions().readonly() {
                    return Err(failed(io::Error::from_raw_os_error(EACCES)));
                }
                permissions = Some(there.permissions());
                &fs::canonicalize(path).map_err(failed)?
            }
            Ok(_) => return Err(Error::bad_file(path, "a regular file or a free name", "a device or pipe")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => &end_of_links(path),
            Err(error) => return Err(failed(error)),
        };
        let name = path.file_name().unwrap_or(OsStr::new(""));
        if name.is_empty() {
            return Err(Error::bad_file(path, "the name of a file", "none"));
        }
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok(Self { path: folder.join(name), folder, permissions })
    }
}

/// A temporary file in the folder of the target, removed unless it has replaced the target.
struct Temporary {
    path: PathBuf,
    replaced: bool,
}

impl Temporary {
    /// Create it with the permissions of the replaced file, before anything is written.
    fn create(target: &Target) -> io::Result<(Self, File)> {
        let process = std::process::id();
        // The keys of a hasher are the only random bits in the standard library.
        let name = format!(".exactknn-{process}-{:016x}.tmp", RandomState::new().hash_one(process));
        let path = target.folder.join(name);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        if target.permissions.is_some() {
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        let file = options.open(&path)?;
        let temporary = Self { path, replaced: false };
        if let Some(permissions) = &target.permissions {
            file.set_permissions(permissions.clone())?;
        }
        Ok((temporary, file))
    }

    fn replace(mut self, target: &Target) -> io::Result<()> {
        fs::rename(&self.path, &target.path)?;
        self.replaced = true;
        sync_folder(&target.folder)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.replaced {
            // An error or a panic is already being reported; a second error is ignored.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Sync a folder, so that a new name in it is on disk.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    // A folder may be writable, but not readable.
    let Ok(folder) = File::open(folder) else { return Ok(()) };
    match folder.sync_all() {
        // Some network file systems cannot sync folders.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        outcome => outcome,
    }
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}
