//! The file of a saved index: named tensors that are mapped, not read, and verified when they are used.
//!
//! ```text
//! write:  tensors ──block by block, with checksums──> .exactknn-*.tmp ──fsync──rename──> path
//! open:   path ──map──> header and table of checksums verified (a page or two; no tensor is read)
//! use:    Mapped<T>::range ──block not verified yet? its checksum──> &[T]
//! ```
//!
//! This module stores texts and tensors; it does not depend on what an index is.
//!
//! # Format, version 1
//!
//! The file is a [safetensors](https://github.com/huggingface/safetensors) file, and every reader of that format can
//! read it. All numbers are little-endian. From its first byte:
//!
//! | part | bytes |
//! |---|---|
//! | length of the header | 8, a `u64` |
//! | header | JSON, then spaces up to a multiple of 64 from the beginning of the file |
//! | tensor `checksums` | `u64` each, zeros at the end up to a multiple of 64 bytes |
//! | tensors whose bytes are a multiple of 64 | each begins on a multiple of 64 from the beginning of the file |
//! | all other tensors, larger types first | the first begins on a multiple of 64, each on a multiple of its type's size |
//!
//! Within a group, tensors keep the order in which they were given. The entry `__metadata__` is the first of the header and
//! has, in this order,
//!
//! - `checksum`: 16 hexadecimal digits, the XXH3 (64 bits, seed 0) of the file from its first byte to the end of the tensor
//!   `checksums`, with these 16 digits replaced by zeros. So it covers every byte that no block covers;
//! - `format`: `exactknn-index`;
//! - `format_version`: a decimal number, raised when older readers would misread the file. Later versions keep these three
//!   keys;
//! - `exactknn_version`: the version of this library that wrote the file;
//! - the pairs of the caller.
//!
//! `checksums` has the XXH3 of each block of 1 MiB of each tensor, in the order of the file; the last block of a tensor may
//! be shorter, an empty tensor has none. A flipped bit anywhere in the file is detected: in the header or the table by
//! [`Saved::open`], in a tensor by the first use of its block. Checksums detect accidents, not deliberate manipulation.
//!
//! The same tensors and texts give the same bytes.
//!
//! # Requirements on the file system
//!
//! [`write()`] replaces a file atomically: existing maps of the old contents stay valid, and any interruption leaves either
//! the old file or the new one, with the permissions of the old. A killed process may leave `.exactknn-<process>-<16
//! digits>.tmp` in the folder; it can be deleted once that process has ended.
//!
//! An open file must not be modified in place or truncated: a map shows the change, and reading beyond the new end ends the
//! process (SIGBUS). [`Saved::check_unchanged`], before and after each use, detects a change but cannot prevent one during
//! the use; a file that other programs write is read to memory by [`Saved::read`]. On Windows the system refuses to replace an open file.

#[cfg(target_endian = "big")]
compile_error!("a saved index is mapped in little-endian order: big-endian machines are not supported");

mod read;
mod write;

pub use read::{Mapped, Saved};
pub use safetensors::Dtype;
pub(crate) use write::write_if;
pub use write::{Push, Tensor, write};

use half::{bf16, f16};
use xxhash_rust::xxh3::Xxh3;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a tensor that share a checksum.
pub const BLOCK: usize = 1 << 20;

/// The newest format that this version reads, and the format that it writes.
pub const FORMAT_VERSION: u64 = 1;

/// The value of `format` of a saved index.
const FORMAT: &str = "exactknn-index";

/// Tensors begin on multiples of this: a cache line, and the widest vector load.
const ALIGNMENT: usize = 64;

/// Bytes of the length of the header, at the start of the file.
const LENGTH: usize = size_of::<u64>();

/// The start of the header, up to the digits of its checksum.
const HEADER_START: &str = r#"{"__metadata__":{"checksum":""#;

/// Hexadecimal digits of the header's checksum.
const DIGITS: usize = 16;

/// Name of the tensor of the blocks' checksums.
const CHECKSUMS: &str = "checksums";

/// The keys of `__metadata__` that are reserved for this module.
const OWN_KEYS: [&str; 4] = ["checksum", "format", "format_version", "exactknn_version"];

/// An element type of a tensor.
pub trait Stored: FromBytes + IntoBytes + Immutable + KnownLayout + Copy + Send + Sync + 'static {
    /// Its name in the file.
    const DTYPE: Dtype;
}

macro_rules! stored {
    ($($number:ty: $dtype:ident),*) => {
        $(impl Stored for $number {
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}
stored!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, u64: U64, i64: I64, f16: F16, bf16: BF16, f32: F32, f64: F64);

/// Entries of the tensor `checksums` for a number of blocks.
fn table_len(blocks: usize) -> usize {
    blocks.next_multiple_of(ALIGNMENT / size_of::<u64>())
}

/// The digits of the checksum of everything except the blocks. `head` is the file from its first byte to the end of the
/// table, with at least the place of the digits.
fn head_digits(head: &[u8]) -> String {
    let (before, rest) = head.split_at(LENGTH + HEADER_START.len());
    let mut hasher = Xxh3::new();
    hasher.update(before);
    hasher.update(&[b'0'; DIGITS]);
    hasher.update(&rest[DIGITS..]);
    format!("{:0DIGITS$x}", hasher.digest())
}
