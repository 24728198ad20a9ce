//! The file of a saved index: it returns what was written, or an error.

mod writing;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use exactknn_core::saved::{BLOCK, Dtype, FORMAT_VERSION, Push, Saved, Stored, Tensor, write};
use exactknn_core::{Error, Monitor, Result, bf16, f16};

use crate::common::Random;

/// A folder that is removed at the end of the test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("exactknn-saved-{process}-{count}"));
        fs::create_dir(&path).expect("a folder of our own");
        Self(path)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("our own folder");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn texts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn save(path: &Path, tensors: Vec<Tensor<'_>>) -> Result<()> {
    write(path, &texts(&[("metric", "cosine"), ("a \"name\"\n", "\u{1f980} \\ \u{0}")]), tensors, &Monitor::new())
}

/// Tensors of several types and shapes, whose sizes are and are not multiples of 64 bytes.
pub(crate) fn small(path: &Path) {
    let tensors = vec![
        Tensor::of_slice("bytes", &[3], &[1u8, 2, 3]),
        Tensor::of_slice("codes", &[2, 16], &[7u32; 32]),
        Tensor::of_slice("half", &[1, 3], &[f16::ONE, f16::NAN, f16::INFINITY]),
        Tensor::of_slice("none", &[0, 5], &[0f64; 0]),
        Tensor::of_slice("wide", &[2], &[1.5f64, -0.0]),
    ];
    save(path, tensors).expect("a good folder");
}

/// The complete contents of a file, if all of it is verified.
pub(crate) fn all(path: &Path) -> Result<String> {
    let saved = Saved::open(path)?;
    saved.verify_all(&Monitor::new())?;
    let mut text = format!("{:?}", saved.metadata());
    for (name, dtype, shape) in saved.tensors() {
        let numbers = match dtype {
            Dtype::U8 => format!("{:?}", saved.tensor::<u8>(name)?.unverified()),
            Dtype::U32 => format!("{:?}", saved.tensor::<u32>(name)?.unverified()),
            Dtype::F16 => format!("{:?}", saved.tensor::<f16>(name)?.unverified()),
            Dtype::F64 => format!("{:?}", saved.tensor::<f64>(name)?.unverified()),
            other => panic!("no such tensor was written: {other}"),
        };
        text += &format!(" {name} {shape:?} {numbers}");
    }
    Ok(text)
}

pub(crate) fn message<T: std::fmt::Debug>(outcome: Result<T>, path: &Path) -> String {
    let text = outcome.expect_err("a refusal").to_string();
    let rest = text.strip_prefix(&format!("{}: ", path.display())).expect("the path comes first");
    assert!(!rest.contains('\n'), "{rest:?}");
    rest.to_owned()
}

fn round_trip<T: Stored + PartialEq + std::fmt::Debug>(numbers: &[T]) {
    let folder = Folder::new();
    let path = folder.file("x");
    let shapes = [vec![numbers.len()], vec![1, numbers.len(), 1]];
    let tensors = vec![
        Tensor::of_slice("flat", &shapes[0], numbers),
        Tensor::of_slice("deep", &shapes[1], numbers),
        Tensor::of_slice("one", &[], &numbers[..1]),
        Tensor::of_slice::<T>("none", &[3, 0], &[]),
    ];
    save(&path, tensors).expect("a good folder");
    let saved = Saved::open(&path).expect("a good file");
    for (name, numbers, shape) in [
        ("flat", numbers, &*shapes[0]),
        ("deep", numbers, &*shapes[1]),
        ("one", &numbers[..1], &[]),
        ("none", &[], &[3, 0]),
    ] {
        let mapped = saved.tensor::<T>(name).expect("a tensor of this type");
        assert_eq!(mapped.range(0..mapped.len()), Ok(numbers), "{name}");
        assert_eq!(mapped.unverified(), numbers, "{name}");
        assert_eq!((mapped.shape(), mapped.len(), mapped.is_empty()), (shape, numbers.len(), numbers.is_empty()));
        assert_eq!(mapped.unverified().as_ptr() as usize % align_of::<T>(), 0);
    }
    assert_eq!(saved.metadata(), &texts(&[("metric", "cosine"), ("a \"name\"\n", "\u{1f980} \\ \u{0}")]));
}

#[test]
fn every_type_is_restored() {
    round_trip(&[0u8, 1, 255]);
    round_trip(&[-128i8, 127]);
    round_trip(&[0u16, u16::MAX]);
    round_trip(&[i16::MIN, 1]);
    round_trip(&[0u32, 1, u32::MAX]);
    round_trip(&[i32::MIN, 1]);
    round_trip(&[1u64, u64::MAX]);
    round_trip(&[i64::MIN, 1]);
    round_trip(&[f16::MAX, f16::MIN_POSITIVE_SUBNORMAL]);
    round_trip(&[bf16::MAX, bf16::MIN_POSITIVE_SUBNORMAL, bf16::NEG_ZERO]);
    round_trip(&[f32::MAX, 1e-45, -0.0]);
    round_trip(&[f64::MAX, 5e-324, f64::NEG_INFINITY]);
}

#[test]
fn tensors_begin_on_cache_lines_where_they_can() {
    let folder = Folder::new();
    let path = folder.file("x");
    let bytes = [5u8; 129];
    let tensors = vec![
        Tensor::of_slice("odd bytes", &[3], &bytes[..3]),
        Tensor::of_slice("odd halves", &[3], &[f16::ONE; 3]),
        Tensor::of_slice("lines of bytes", &[128], &bytes[..128]),
        Tensor::of_slice("odd doubles", &[3], &[1.0f64; 3]),
        Tensor::of_slice("lines of singles", &[16], &[1.0f32; 16]),
        Tensor::of_slice("more odd bytes", &[129], &bytes),
    ];
    save(&path, tensors).expect("a good folder");
    let saved = Saved::open(&path).expect("a good file");
    let names: Vec<_> = saved.tensors().map(|(name, ..)| name).collect();
    assert_eq!(
        names,
        ["lines of bytes", "lines of singles", "odd doubles", "odd halves", "odd bytes", "more odd bytes"]
    );
    let lines = [
        saved.tensor::<u8>("lines of bytes").expect("bytes").unverified().as_ptr() as usize,
        saved.tensor::<f32>("lines of singles").expect("singles").unverified().as_ptr() as usize,
        saved.tensor::<f64>("odd doubles").expect("doubles").unverified().as_ptr() as usize,
    ];
    assert_eq!(lines.map(|address| address % 64), [0; 3]);
}

#[test]
fn a_file_may_have_no_tensors_and_no_texts() {
    let folder = Folder::new();
    let path = folder.file("x");
    write(&path, &BTreeMap::new(), Vec::new(), &Monitor::new()).expect("a good folder");
    let saved = Saved::open(&path).expect("a good file");
    assert_eq!((saved.metadata().len(), saved.tensors().count()), (0, 0));
    assert_eq!(saved.verify_all(&Monitor::new()), Ok(()));
}

#[test]
fn the_same_contents_give_the_same_bytes_in_pieces_of_any_size() {
    let folder = Folder::new();
    let numbers: Vec<u16> = (0..BLOCK + 12_345).map(|i| ((i * 7919) >> 3) as u16).collect();
    let path = folder.file("whole");
    save(&path, vec![Tensor::of_slice("n", &[numbers.len()], &numbers)]).expect("a good folder");
    let whole = fs::read(&path).expect("the file");
    for piece in [1_001, BLOCK / 2, BLOCK / 2 + 1, BLOCK + 1] {
        let path = folder.file("pieces");
        let feed = |push: Push<'_, u16>| numbers.chunks(piece).try_for_each(push);
        save(&path, vec![Tensor::new("n", &[numbers.len()], feed)]).expect("a good folder");
        assert!(fs::read(&path).expect("the file") == whole, "pieces of {piece}");
    }
}

#[test]
fn every_flipped_bit_is_detected() {
    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let truth = all(&path).expect("a good file");
    let good = fs::read(&path).expect("the file");
    // In place, while nothing is mapped: writing the whole file each time takes much longer.
    let mut file = fs::OpenOptions::new().write(true).open(&path).expect("our own file");
    let mut put = |position: usize, byte: u8| {
        file.seek(SeekFrom::Start(position as u64)).expect("a file that can be sought");
        file.write_all(&[byte]).expect("our own file");
    };
    for position in 0..good.len() {
        for mask in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
            put(position, good[position] ^ mask);
            let text = message(all(&path), &path);
            assert!(text.starts_with("wanted "), "byte {position}: {text}");
        }
        put(position, good[position]);
    }
    assert_eq!(all(&path), Ok(truth));
}

#[test]
fn every_scrambled_file_is_refused() {
    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let good = fs::read(&path).expect("the file");
    let mut random = Random(7);
    for round in 0..3_000 {
        let mut bytes = good.clone();
        let (from, to, len) = (random.below(bytes.len()), random.below(bytes.len()), 1 + random.below(40));
        match round % 3 {
            // A piece of the file copied over another, removed, or inserted.
            0 => {
                let len = len.min(bytes.len() - from.max(to));
                bytes.copy_within(from..from + len, to);
            }
            1 => drop(bytes.drain(from..(from + len).min(good.len()))),
            _ => drop(bytes.splice(to..to, good[from..(from + len).min(good.len())].iter().copied())),
        }
        if bytes == good {
            continue;
        }
        fs::write(&path, &bytes).expect("our own file");
        message(all(&path), &path);
    }
}

#[test]
fn a_shorter_or_longer_file_is_refused_when_it_is_opened() {
    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let good = fs::read(&path).expect("the file");
    let len = good.len();
    for cut in 0..len {
        fs::write(&path, &good[..cut]).expect("our own file");
        message(Saved::open(&path), &path);
    }
    fs::write(&path, &good[..len - 1]).expect("our own file");
    let text = message(Saved::open(&path), &path);
    assert_eq!(text, format!("wanted {len} bytes, found {} (the file is truncated)", len - 1));
    for more in [1, 64, BLOCK] {
        let mut bytes = good.clone();
        bytes.resize(len + more, b'x');
        fs::write(&path, &bytes).expect("our own file");
        let text = message(Saved::open(&path), &path);
        assert_eq!(text, format!("wanted {len} bytes, found {} (something was appended)", len + more));
    }
}

/// A safetensors file with this header.
fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

#[test]
fn errors_distinguish_other_files_from_damaged_ones() {
    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let good = fs::read(&path).expect("the file");
    let refusal = |bytes: &[u8]| {
        fs::write(&path, bytes).expect("our own file");
        message(Saved::open(&path), &path)
    };
    let wanted = "wanted a saved exactknn index, found a";
    assert_eq!(refusal(b""), format!("{wanted} file of 0 bytes"));
    assert_eq!(refusal(b"1234567"), format!("{wanted} file of 7 bytes"));
    assert_eq!(refusal(&[0xff; 100]), format!("{wanted} file that is not in the safetensors format"));
    assert_eq!(refusal(&[0; 100]), format!("{wanted} file that is not in the safetensors format"));
    assert_eq!(refusal(b"\x93NUMPY\x01\x00 and so on"), format!("{wanted} file that is not in the safetensors format"));
    let tensor = r#""w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let foreign = safetensors(&format!("{{{tensor}}}"), &[0; 8]);
    assert_eq!(refusal(&foreign), format!("{wanted} safetensors file of something else"));
    let foreign = safetensors(&format!(r#"{{"__metadata__":{{"format":"pt"}},{tensor}}}"#), &[0; 8]);
    assert_eq!(refusal(&foreign), format!("{wanted} safetensors file of format \"pt\""));
    let metadata = r#""__metadata__":{"format":"exactknn-index","format_version":"1"}"#;
    let rewritten = safetensors(&format!("{{{metadata},{tensor}}}"), &[0; 8]);
    assert_eq!(refusal(&rewritten), "wanted the header that was written, found one that another program wrote");

    let header_len = u64::from_le_bytes(good[..8].try_into().expect("8 bytes")) as usize;
    let header = std::str::from_utf8(&good[8..8 + header_len]).expect("JSON");
    let edited = |from: &str, to: &str| {
        assert!(header.contains(from), "{header}");
        safetensors(&header.replacen(from, to, 1), &good[8 + header_len..])
    };
    assert_eq!(
        refusal(&edited(
            r#""format_version":"1","exactknn_version":"0.1.0""#,
            r#""format_version":"2","exactknn_version":"9.8.7""#
        )),
        format!("wanted format version {FORMAT_VERSION} or older, found version 2, written by exactknn 9.8.7")
    );
    assert_eq!(
        refusal(&edited(r#""format_version":"1""#, r#""format_version":"one""#)),
        "wanted the header that was written, found format version \"one\""
    );
    assert_eq!(
        refusal(&edited(r#""checksums":"#, r#""checksumS":"#)),
        "wanted the header that was written, found one without the checksums of its tensors"
    );
    let text = refusal(&edited("[2, 16]", "[2, 17]"));
    assert!(text.starts_with("wanted the header that was written, found a damaged one ("), "{text}");
    let text = refusal(&edited("cosine", "cosinE"));
    assert!(text.starts_with("wanted checksum ") && text.ends_with(" (the file is damaged)"), "{text}");
    // Sizes that overflow.
    for shape in ["[18446744073709551615]", "[4294967296,4294967296]"] {
        let text = refusal(&edited("[2, 16]", shape));
        assert!(text.starts_with("wanted the header that was written, found a damaged one ("), "{text}");
    }
    let mut bytes = good.clone();
    bytes[7] = 0x7f;
    let text = refusal(&bytes);
    assert!(text.starts_with("wanted a header of 9151314442816") && text.contains("truncated or damaged"), "{text}");
}

#[test]
fn damage_is_detected_on_use_and_only_there() {
    let folder = Folder::new();
    let path = folder.file("x");
    let numbers: Vec<u32> = (0..(5 * BLOCK / 8) as u32).collect();
    let tensors = vec![
        Tensor::of_slice("first", &[3], &[1u8, 2, 3]),
        Tensor::of_slice("n", &[numbers.len()], &numbers),
        Tensor::of_slice("last", &[2], &[4u8, 5]),
    ];
    save(&path, tensors).expect("a good folder");
    let mut bytes = fs::read(&path).expect("the file");
    let per_block = BLOCK / 4;
    let start = bytes.len() - 5 - numbers.len() * 4;
    for damaged in [per_block, per_block + 77, 2 * per_block - 1] {
        bytes[start + damaged * 4] ^= 0x10;
        fs::write(&path, &bytes).expect("our own file");
        let saved = Saved::open(&path).expect("no tensor is read");
        let n = saved.tensor::<u32>("n").expect("numbers");
        assert_eq!(n.range(0..per_block), Ok(&numbers[..per_block]));
        assert_eq!(n.range(2 * per_block..n.len()), Ok(&numbers[2 * per_block..]));
        assert_eq!(n.verify(damaged..damaged), Ok(()), "an empty range uses no block");
        for range in [per_block - 1..per_block + 1, damaged..damaged + 1, 2 * per_block - 1..2 * per_block, 0..n.len()]
        {
            for _ in 0..2 {
                let text = message(n.verify(range.clone()), &path);
                let (place, rest) = (" for bytes 1048576 to 2097152 of tensor \"n\", found ", " (the file is damaged)");
                assert!(text.starts_with("wanted checksum ") && text.contains(place) && text.ends_with(rest), "{text}");
            }
        }
        assert_eq!(saved.tensor::<u8>("first").expect("bytes").range(0..3), Ok(&[1, 2, 3][..]));
        assert_eq!(saved.tensor::<u8>("last").expect("bytes").range(1..2), Ok(&[5][..]));
        assert!(message(saved.verify_all(&Monitor::new()), &path).contains("bytes 1048576 to 2097152 of tensor \"n\""));
        let monitor = Monitor::new();
        monitor.cancel();
        assert_eq!(saved.verify_all(&monitor), Err(Error::Cancelled));
        drop((saved, n));
        bytes[start + damaged * 4] ^= 0x10;
    }
    fs::write(&path, &bytes).expect("our own file");
    let monitor = Monitor::new();
    let saved = Saved::open(&path).expect("a good file");
    assert_eq!((saved.verify_all(&monitor), monitor.fraction()), (Ok(()), 1.0));
    assert_eq!(saved.tensor::<u32>("n").expect("numbers").unverified(), numbers);
}

#[test]
fn a_tensor_has_its_own_type_only() {
    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let saved = Saved::open(&path).expect("a good file");
    assert_eq!(
        message(saved.tensor::<f32>("codes"), &path),
        "wanted a tensor \"codes\" of type F32, aligned to it, found one of type U32"
    );
    assert_eq!(
        message(saved.tensor::<u32>("x"), &path),
        "wanted a tensor \"x\" of type U32, aligned to it, found none"
    );
    assert!(saved.tensor::<u64>("checksums").is_err(), "the table is not the caller's");
    let codes = saved.tensor::<u32>("codes").expect("codes");
    for range in [0..33, 33..33, 40..41] {
        assert!(catch_unwind(|| codes.verify(range.clone())).is_err(), "{range:?}");
    }
}
