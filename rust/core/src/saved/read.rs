//! Reading: the header when the file is opened, a block of a tensor when it is first used.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::marker::PhantomData;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use memmap2::{Mmap, MmapMut};
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use xxhash_rust::xxh3::xxh3_64;
use zerocopy::FromBytes;

use super::{
    BLOCK, CHECKSUMS, DIGITS, FORMAT, FORMAT_VERSION, HEADER_START, LENGTH, OWN_KEYS, Stored, head_digits, table_len,
};
use crate::error::{Error, Result};
use crate::runtime::Monitor;
use crate::runtime::alloc::try_collect;

/// Bytes that are read between two looks at the monitor.
const READ_BYTES: usize = 1 << 24;

/// An open saved index; clones share it. The file is mapped as long as a clone or a [`Mapped`] exists.
#[derive(Debug, Clone)]
pub struct Saved {
    contents: Arc<Contents>,
}

#[derive(Debug)]
struct Contents {
    path: PathBuf,
    map: Mmap,
    /// `None` if the file was read to memory, which no other process can change.
    mapped: Option<Origin>,
    head: Head,
    /// One bit per block.
    verified: Vec<AtomicU64>,
}

/// The open file of a map, and its size and time of modification when it was mapped.
///
/// The file of a path can be replaced, which leaves this one unchanged. Writing to it in place changes what is mapped.
#[derive(Debug)]
struct Origin {
    file: File,
    len: u64,
    modified: Option<SystemTime>,
}

impl Origin {
    fn new(file: File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { len: metadata.len(), modified: metadata.modified().ok(), file })
    }

    fn check(&self, path: &Path) -> Result<()> {
        let now = self.file.metadata().map_err(|error| Error::file(path, "read its size", &error))?;
        if now.len() == self.len && now.modified().ok() == self.modified {
            return Ok(());
        }
        Err(Error::bad_file(
            path,
            format!("the {} bytes that were there when the index was loaded", self.len),
            format!(
                "{} bytes that were written to the same file since (replace a file in use, or load it without a map)",
                now.len()
            ),
        ))
    }
}

/// The header, verified.
#[derive(Debug)]
struct Head {
    metadata: BTreeMap<String, String>,
    /// In the order of the file, without the table.
    tensors: Vec<Entry>,
    /// Bytes of the table, in the file.
    table: Range<usize>,
    blocks: usize,
}

#[derive(Debug)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// In the file.
    bytes: Range<usize>,
    blocks: Range<usize>,
}

/// What was expected of a file, and what was found.
struct Mismatch {
    wanted: String,
    found: String,
}

impl Mismatch {
    fn new(wanted: impl Into<String>, found: impl Into<String>) -> Self {
        Self { wanted: wanted.into(), found: found.into() }
    }

    fn foreign(found: impl Into<String>) -> Self {
        Self::new("a saved exactknn index", found)
    }

    fn damaged(found: impl Into<String>) -> Self {
        Self::new("the header that was written", found)
    }
}

impl Saved {
    /// Map the file and verify its header and its table of checksums. No tensor is read, so it takes the same time for files
    /// of every size.
    ///
    /// The file must not be modified in place or truncated while it is open; see the module and [`Saved::check_unchanged`].
    ///
    /// # Errors
    /// [`Error::File`] if the system cannot open it; [`Error::BadFile`] if it is not a saved index, or is of a newer format,
    /// truncated, too long, or has a damaged header or table.
    pub fn open(path: &Path) -> Result<Self> {
        let file = Self::open_file(path)?;
        // SAFETY: the map is read-only, and by the contract of this function the file is not modified or truncated while it
        // is open. This library itself replaces such files and never modifies them.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| match (error.kind(), file.metadata()) {
            (io::ErrorKind::OutOfMemory, Ok(there)) => {
                Error::OutOfMemory { bytes: usize::try_from(there.len()).unwrap_or(usize::MAX), what: "the index" }
            }
            _ => Error::file(path, "open it", &error),
        })?;
        let origin = Origin::new(file).map_err(|error| Error::file(path, "open it", &error))?;
        Self::of(path, map, Some(origin))
    }

    /// Read the file to memory and verify its header and its table of checksums. Later changes of the file have no effect.
    ///
    /// # Errors
    /// As for [`Saved::open`], and [`Error::OutOfMemory`], [`Error::Cancelled`].
    pub fn read(path: &Path, monitor: &Monitor) -> Result<Self> {
        let mut file = Self::open_file(path)?;
        let failed = |error: io::Error| Error::file(path, "read it", &error);
        let len = file.metadata().map_err(failed)?.len();
        let out_of_memory =
            || Error::OutOfMemory { bytes: usize::try_from(len).unwrap_or(usize::MAX), what: "the index" };
        let len = usize::try_from(len).map_err(|_| out_of_memory())?;
        // Anonymous pages rather than a `Vec`: aligned for every type, and then read-only.
        let mut memory = MmapMut::map_anon(len).map_err(|_| out_of_memory())?;
        for part in memory.chunks_mut(READ_BYTES) {
            monitor.check()?;
            file.read_exact(part).map_err(failed)?;
        }
        Self::of(path, memory.make_read_only().map_err(failed)?, None)
    }

    fn open_file(path: &Path) -> Result<File> {
        let failed = |error: io::Error| Error::file(path, "open it", &error);
        let there = fs::metadata(path).map_err(failed)?;
        if !there.is_file() && !there.is_dir() {
            return Err(Error::bad_file(path, "a regular file", "a device or pipe"));
        }
        let mut file = File::open(path).map_err(failed)?;
        // For the system's own error message for a folder, which can be opened but not read.
        file.read(&mut [0]).map_err(failed)?;
        file.rewind().map_err(failed)?;
        Ok(file)
    }

    fn of(path: &Path, map: Mmap, mapped: Option<Origin>) -> Result<Self> {
        let head = Head::parse(&map).map_err(|Mismatch { wanted, found }| Error::bad_file(path, wanted, found))?;
        let words = (0..head.blocks.div_ceil(64)).map(|_| AtomicU64::new(0));
        let verified = try_collect(words, "the index")?;
        Ok(Self { contents: Arc::new(Contents { path: path.to_owned(), map, mapped, head, verified }) })
    }

    /// Whether the file was read to memory instead of mapped.
    pub fn is_in_memory(&self) -> bool {
        self.contents.mapped.is_none()
    }

    /// Check that the mapped file was not written to since it was opened; a few hundred nanoseconds.
    ///
    /// # Errors
    /// [`Error::BadFile`] if its size or time of modification is another.
    pub fn check_unchanged(&self) -> Result<()> {
        self.contents.check_unchanged()
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.contents.path
    }

    /// The texts that were given when the file was written.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.contents.head.metadata
    }

    /// Name, type and shape of each tensor, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Dtype, &[usize])> {
        self.contents.head.tensors.iter().map(|entry| (&*entry.name, entry.dtype, &*entry.shape))
    }

    /// A tensor of this name and type.
    ///
    /// # Errors
    /// [`Error::BadFile`] if there is none.
    pub fn tensor<T: Stored>(&self, name: &str) -> Result<Mapped<T>> {
        let Contents { path, map, head, .. } = &*self.contents;
        let missing = |found: String| {
            Error::bad_file(path, format!("a tensor {name:?} of type {}, aligned to it", T::DTYPE), found)
        };
        let index = head.tensors.iter().position(|entry| entry.name == name).ok_or_else(|| missing("none".into()))?;
        let entry = &head.tensors[index];
        if entry.dtype != T::DTYPE {
            return Err(missing(format!("one of type {}", entry.dtype)));
        }
        let Ok(numbers) = <[T]>::ref_from_bytes(&map[entry.bytes.clone()]) else {
            return Err(missing(format!("one that begins at byte {}", entry.bytes.start)));
        };
        Ok(Mapped {
            index,
            start: entry.bytes.start,
            len: numbers.len(),
            first_block: entry.blocks.start,
            contents: Arc::clone(&self.contents),
            numbers: PhantomData,
        })
    }

    /// Verify all blocks that are not verified yet, on the current rayon pool.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the first damaged block, [`Error::Cancelled`].
    pub fn verify_all(&self, monitor: &Monitor) -> Result<()> {
        let contents = &*self.contents;
        monitor.begin(contents.head.blocks as u64);
        let verify = |block| {
            monitor.check()?;
            if !contents.is_verified(block) {
                contents.verify_block(block)?;
            }
            monitor.advance(1);
            Ok(())
        };
        (0..contents.head.blocks).into_par_iter().find_map_first(|block| verify(block).err()).map_or(Ok(()), Err)
    }
}

impl Head {
    /// Every number of the header is checked against the size of the file before it is used.
    fn parse(file: &[u8]) -> std::result::Result<Self, Mismatch> {
        let Some((length, rest)) = file.split_first_chunk::<LENGTH>() else {
            return Err(Mismatch::foreign(format!("a file of {} bytes", file.len())));
        };
        let length = u64::from_le_bytes(*length);
        let is_ours = rest.starts_with(HEADER_START.as_bytes());
        let Some(header) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            return Err(if is_ours {
                Mismatch::new(
                    format!("a header of {length} bytes"),
                    format!("{} bytes (the file is truncated or damaged)", rest.len()),
                )
            } else {
                Mismatch::foreign("a file that is not in the safetensors format")
            });
        };
        // This checks that tensors are contiguous and that the size of each matches its type and shape.
        let parsed: Metadata = serde_json::from_slice(header).map_err(|error| {
            if is_ours {
                Mismatch::damaged(format!("a damaged one ({error})"))
            } else {
                Mismatch::foreign("a file that is not in the safetensors format")
            }
        })?;
        let Some(metadata) = parsed.metadata().as_ref().filter(|texts| texts.contains_key("format")) else {
            return Err(Mismatch::foreign("a safetensors file of something else"));
        };
        if metadata["format"] != FORMAT {
            return Err(Mismatch::foreign(format!("a safetensors file of format {:?}", metadata["format"])));
        }
        let text = |key| metadata.get(key).map_or("", String::as_str);
        match text("format_version").parse::<u64>() {
            Ok(version) if version > FORMAT_VERSION => {
                return Err(Mismatch::new(
                    format!("format version {FORMAT_VERSION} or older"),
                    format!("version {version}, written by exactknn {}", text("exactknn_version")),
                ));
            }
            Ok(_) => {}
            Err(_) => return Err(Mismatch::damaged(format!("format version {:?}", text("format_version")))),
        }
        if !is_ours {
            return Err(Mismatch::damaged("one that another program wrote"));
        }
        let data = LENGTH + header.len();
        let wanted = (data as u64).saturating_add(parsed.data_len() as u64);
        match file.len() as u64 {
            found if found < wanted => {
                return Err(Mismatch::new(format!("{wanted} bytes"), format!("{found} (the file is truncated)")));
            }
            found if found > wanted => {
                return Err(Mismatch::new(format!("{wanted} bytes"), format!("{found} (something was appended)")));
            }
            _ => {}
        }
        let mut tensors = Vec::new();
        let mut table = None;
        let mut blocks = 0;
        for name in parsed.offset_keys() {
            let Some(info) = parsed.info(&name) else { continue };
            let bytes = data + info.data_offsets.0..data + info.data_offsets.1;
            if name == CHECKSUMS {
                table = Some(bytes);
                continue;
            }
            let first = blocks;
            blocks += bytes.len().div_ceil(BLOCK);
            tensors.push(Entry { name, dtype: info.dtype, shape: info.shape.clone(), bytes, blocks: first..blocks });
        }
        let table = table
            .filter(|table| table.start == data && table.len() == table_len(blocks) * size_of::<u64>())
            .ok_or_else(|| Mismatch::damaged("one without the checksums of its tensors"))?;
        // `is_ours`, and the format comes after the digits: so they are within the file.
        let digits = &file[LENGTH + HEADER_START.len()..][..DIGITS];
        let found = head_digits(&file[..table.end]);
        if digits != found.as_bytes() {
            return Err(Mismatch::new(
                format!("checksum {} for the header and the table of checksums", String::from_utf8_lossy(digits)),
                format!("{found} (the file is damaged)"),
            ));
        }
        let metadata = metadata.iter().filter(|(key, _)| !OWN_KEYS.contains(&key.as_str()));
        let metadata = metadata.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(Self { metadata, tensors, table, blocks })
    }
}

impl Contents {
    fn check_unchanged(&self) -> Result<()> {
        self.mapped.as_ref().map_or(Ok(()), |origin| origin.check(&self.path))
    }

    #[inline(always)]
    fn is_verified(&self, block: usize) -> bool {
        // Relaxed: the bit protects bytes that are never written.
        self.verified[block / 64].load(Ordering::Relaxed) >> (block % 64) & 1 != 0
    }

    /// Two threads may verify a block at the same time, with the same outcome.
    #[cold]
    fn verify_block(&self, block: usize) -> Result<()> {
        let tensors = &self.head.tensors;
        let entry = &tensors[tensors.partition_point(|entry| entry.blocks.end <= block)];
        let start = (block - entry.blocks.start) * BLOCK;
        let end = entry.bytes.len().min(start + BLOCK);
        let found = xxh3_64(&self.map[entry.bytes.clone()][start..end]);
        let wanted = u64::from_le_bytes(self.map[self.head.table.clone()].as_chunks().0[block]);
        if found != wanted {
            return Err(Error::bad_file(
                &self.path,
                format!("checksum {wanted:0DIGITS$x} for bytes {start} to {end} of tensor {:?}", entry.name),
                format!("{found:0DIGITS$x} (the file is damaged)"),
            ));
        }
        self.verified[block / 64].fetch_or(1 << (block % 64), Ordering::Relaxed);
        Ok(())
    }
}

/// The numbers of a tensor in the file; cheap to clone.
#[derive(Debug, Clone)]
pub struct Mapped<T> {
    contents: Arc<Contents>,
    /// Index of the entry.
    index: usize,
    /// First byte in the file.
    start: usize,
    /// Number of elements.
    len: usize,
    first_block: usize,
    numbers: PhantomData<T>,
}

impl<T: Stored> Mapped<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// As [`Saved::check_unchanged`].
    ///
    /// # Errors
    /// As [`Saved::check_unchanged`].
    pub fn check_unchanged(&self) -> Result<()> {
        self.contents.check_unchanged()
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.contents.head.tensors[self.index].shape
    }

    /// The elements at these positions, verified. The first use of a block computes its checksum, about 0.1 ms; later uses
    /// test one bit per block.
    ///
    /// # Errors
    /// [`Error::BadFile`] if a block of the range is damaged.
    ///
    /// # Panics
    /// If the range is not within [`Mapped::len`].
    #[inline]
    pub fn range(&self, range: Range<usize>) -> Result<&[T]> {
        self.verify(range.clone())?;
        Ok(&self.unverified()[range])
    }

    /// Verify the elements at these positions, for loops that take the slice of [`Mapped::unverified`] once.
    ///
    /// # Errors
    /// As [`Mapped::range`].
    ///
    /// # Panics
    /// As [`Mapped::range`].
    #[inline]
    pub fn verify(&self, range: Range<usize>) -> Result<()> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} numbers", self.len);
        if range.is_empty() {
            return Ok(());
        }
        let first = range.start * size_of::<T>() / BLOCK;
        let last = (range.end * size_of::<T>() - 1) / BLOCK;
        for block in self.first_block + first..=self.first_block + last {
            if !self.contents.is_verified(block) {
                self.contents.verify_block(block)?;
            }
        }
        Ok(())
    }

    /// All elements, unverified. Verify elements before reading them, by [`Mapped::verify`] or [`Saved::verify_all`]:
    /// otherwise damage becomes a wrong result.
    #[inline]
    pub fn unverified(&self) -> &[T] {
        let bytes = &self.contents.map[self.start..][..self.len * size_of::<T>()];
        <[T]>::ref_from_bytes(bytes).expect("size and alignment were checked by Saved::tensor")
    }
}
