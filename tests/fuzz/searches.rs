//! The fuzz targets of the core's public interface: every question, and histories of an index, compared with the oracle; and
//! damaged files.
//!
//! The comparisons are those of the tests in `tests/core`, at every level with several threads. The rows of a case are
//! harder: mixtures of kinds, rows that differ in one bit, any bit pattern.

use std::fs;
use std::num::NonZero;

use exactknn_core::saved::Saved;
use exactknn_core::{
    Argument, Error, Index, MatrixRef, Metric, Monitor, Options, QueryRef, Result, SelfRule, Simd, bf16, f16,
};
use xxhash_rust::xxh3::Xxh3;

use crate::common::{KINDS, Type, affordable, convert, levels, metrics, rows};
use crate::contract;
use crate::fuzz::{Random, fuzz, replay};
use crate::index::{Pair, history};
use crate::radius::{self, Radius};
use crate::ranks;
use crate::saved::{Folder, all, small};

/// Seeds that failed once, for each target.
const FAILED_ONCE: [(&str, &[u64]); 5] =
    [("knn", &[]), ("radius", &[]), ("ranks", &[]), ("index", &[]), ("saved", &[])];

/// A finite float32 number of any exponent between two, subnormal numbers included.
fn number(exponents: (usize, usize), random: &mut Random) -> f64 {
    let bits = random.bits() as u32;
    let mantissa = random.pick(&[0, 1, 0x7f_ffff, bits & 0x7f_ffff]);
    let exponent = (exponents.0 + random.below(exponents.1 - exponents.0 + 1)) as u32;
    f64::from(f32::from_bits((bits & 0x8000_0000) | (exponent << 23) | mantissa))
}

/// Change the last bit of one number of a row.
fn touch(row: &mut [f64], random: &mut Random) {
    let at = random.below(row.len());
    let bits = (row[at] as f32).to_bits() ^ (1 << random.below(3));
    let touched = f32::from_bits(bits);
    row[at] = if touched.is_finite() { f64::from(touched) } else { row[at] };
}

fn any_rows(count: usize, dim: usize, random: &mut Random) -> Vec<Vec<f64>> {
    match random.below(6) {
        // One kind, as in the other tests.
        0 | 1 => rows(random.pick(&KINDS), count, dim, random),
        // Two kinds, mixed.
        2 => {
            let kinds = [random.pick(&KINDS), random.pick(&KINDS)].map(|kind| rows(kind, count, dim, random));
            (0..count).map(|i| kinds[random.below(2)][i].clone()).collect()
        }
        // Any bit pattern, of a narrow or wide range of exponents.
        3 => {
            let least = random.below(255);
            let exponents = (least, (least + random.pick(&[0, 1, 3, 20, 254])).min(254));
            (0..count).map(|_| (0..dim).map(|_| number(exponents, random)).collect()).collect()
        }
        // Copies of a few rows that differ in a bit or not at all.
        4 => {
            let distinct = 1 + random.below(5);
            let few = rows(random.pick(&KINDS), distinct, dim, random);
            (0..count)
                .map(|_| {
                    let mut row = few[random.below(distinct)].clone();
                    (0..random.below(3)).for_each(|_| touch(&mut row, random));
                    row
                })
                .collect()
        }
        // A large common part, and columns of different sizes.
        _ => {
            let offset: Vec<f64> = (0..dim).map(|_| number((100, 150), random)).collect();
            let sizes: Vec<f64> = (0..dim).map(|_| 2f64.powi(random.below(60) as i32 - 40)).collect();
            (0..count)
                .map(|_| (0..dim).map(|c| f64::from((offset[c] + sizes[c] * random.normal()) as f32)).collect())
                .collect()
        }
    }
}

/// What all questions have in common.
struct Any {
    data: Vec<Vec<f64>>,
    query: Vec<Vec<f64>>,
    metric: Metric,
    element: Type,
    /// The first query's own row, if queries are rows.
    first_row: Option<usize>,
}

fn any(random: &mut Random, from_any_row: bool) -> Any {
    // Powers take long.
    let metric = if random.below(12) == 0 { random.pick(&metrics()) } else { random.pick(&Metric::ALL) };
    let dim = match random.below(12) {
        0 => 131 + random.below(400),
        1..4 => 1 + random.below(130),
        _ => 1 + random.below(20),
    };
    let count = affordable(2 + random.pick(&[6, 70, 300, 700]).min(40_000 / dim), metric);
    let count = 2 + random.below(count - 1);
    let data = any_rows(count, dim, random);
    let queries = 1 + random.below(40);
    let queries = if metric.name() == "minkowski" { queries.min(8) } else { queries };
    let (query, first_row) = if random.below(2) == 0 {
        let queries = queries.min(count);
        let first = if from_any_row { random.below(count - queries + 1) } else { 0 };
        (data[first..first + queries].to_vec(), Some(first))
    } else {
        // Half of the queries are references or nearly so, half are new rows.
        let mut query = any_rows(queries, dim, random);
        for row in query.iter_mut().step_by(2) {
            row.clone_from(&data[random.below(count)]);
            if random.below(3) == 0 {
                touch(row, random);
            }
        }
        (query, None)
    };
    let element = random.pick(&[Type::F32, Type::F32, Type::F32, Type::F64, Type::F16, Type::Bf16]);
    let fits = |rows: Vec<Vec<f64>>| match element {
        // Rounded to bfloat16, larger numbers would be infinite.
        Type::Bf16 => convert(&rows, |x| x.clamp(-3.3e38, 3.3e38)),
        _ => rows,
    };
    Any { data: fits(data), query: fits(query), metric, element, first_row }
}

fn knn(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let Any { data, query, metric, element, first_row } = any(random, false);
    let most = data.len() - usize::from(first_row.is_some());
    let most = if random.below(2) == 0 { most.min(12) } else { most };
    let k = 1 + random.below(most);
    contract::check_as(element, &query, &data, k, metric, first_row.is_some());
    (query.len() * data.len()) as u64
}

fn within(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let Any { data, query, metric, element, first_row } = any(random, false);
    let share = random.unit() * random.pick(&[1.0, 0.02]);
    let kind = random.pick(&[
        Radius::Tie,
        Radius::Tie,
        Radius::Above,
        Radius::Below,
        Radius::Middle,
        Radius::Plain,
        Radius::Zero,
    ]);
    radius::check_as(element, &query, &data, metric, (kind, share), first_row.is_some());
    (query.len() * data.len()) as u64
}

fn ranking(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let Any { data, query, metric, element, first_row } = any(random, true);
    let most = random.pick(&[20, data.len()]);
    let groups = ranks::random_groups(data.len(), most, random);
    let query_group: Vec<usize> = query.iter().map(|_| random.below(groups.len())).collect();
    ranks::check_as(element, &query, &data, (&query_group, &groups), metric, first_row);
    (query.len() * data.len()) as u64
}

fn index(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let Any { data, metric, element, .. } = any(random, false);
    if data.len() < 3 {
        return 1;
    }
    let (k, exclude_self) = (random.below(20), random.below(2) == 0);
    match element {
        Type::F32 => history(&convert(&data, |x| x as f32), metric, k, exclude_self, seed),
        Type::F64 => history(&data, metric, k, exclude_self, seed),
        Type::F16 => {
            let to = |x: f64| f16::from_f64(x.clamp(-65504.0, 65504.0));
            history(&convert(&data, to), metric, k, exclude_self, seed);
        }
        Type::Bf16 => {
            history(&convert(&data, bf16::from_f64), metric, k, exclude_self, seed);
        }
    }
    data.len() as u64
}

/// Change bytes: flipped, set, removed, inserted, copied, cut off, or another number in the header's text.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(3) {
        let header = bytes.len().min(1500);
        let at = if random.below(2) == 0 { random.below(header) } else { random.below(bytes.len()) };
        let end = (at + 1 + random.below(16)).min(bytes.len());
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.pick(&[0, b'0', b'9', b'"', b'[', b'}', 0x7f, 0xff]),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            4 => {
                let to = random.below(bytes.len() - (end - at) + 1);
                bytes.copy_within(at..end, to);
            }
            5 => bytes.truncate(at.max(1)),
            _ => {
                // A number of the header.
                let digits: Vec<usize> = (8..header).filter(|&i| bytes[i].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    let at = random.pick(&digits);
                    let texts: [&[u8]; 6] =
                        [b"0", b"1", b"18446744073709551615", b"9223372036854775808", b"4294967296", b"-1"];
                    bytes.splice(at..=at, random.pick(&texts).iter().copied());
                }
            }
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
}

/// Make the header's length and checksum fit what is there, so that damage gets past them. Returns whether that was possible.
fn repair(bytes: &mut [u8]) -> bool {
    let start = br#"{"__metadata__":{"checksum":""#;
    let Some(end) = bytes.windows(start.len()).position(|window| window == start).map(|at| at + start.len()) else {
        return false;
    };
    // As written: the header is padded with spaces to a multiple of 64, and the table of checksums follows it.
    let text = String::from_utf8_lossy(bytes).into_owned();
    let table = text
        .split_once(r#""checksums":{"#)
        .and_then(|(_, entry)| entry.split_once("\"data_offsets\":[0,"))
        .and_then(|(_, number)| number.split_once(']'))
        .and_then(|(number, _)| number.parse::<usize>().ok());
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let Some(head) = table.and_then(|table| header.checked_add(8)?.checked_add(table)) else { return false };
    if head > bytes.len() || end + 16 > head {
        return false;
    }
    bytes[end..end + 16].fill(b'0');
    let mut hasher = Xxh3::new();
    hasher.update(&bytes[..head]);
    bytes[end..end + 16].copy_from_slice(format!("{:016x}", hasher.digest()).as_bytes());
    true
}

/// The neighbours from a file, read or mapped.
fn search(path: &std::path::Path, numbers: &[f32], dim: usize, simd: Simd, read: bool) -> Result<String> {
    let saved = if read { Saved::read(path, &Monitor::new())? } else { Saved::open(path)? };
    let index = Index::<f32>::load(&saved)?;
    let metric = index.metric();
    let query = QueryRef::Same(MatrixRef::new(numbers, numbers.len() / dim, dim, Argument::Query)?);
    let threads = NonZero::<usize>::MIN;
    let options = Options { k: 3, metric, exclude: SelfRule::None, simd, threads };
    let found = index.snapshot().search(query, options, &Monitor::new())?;
    Ok(format!("{metric:?} {} {found:?}", index.dim()))
}

/// A file of tensors, or of an index, with changed bytes: refused, or read as it was written. With a checksum that fits, it is
/// not known to be damaged; then it must not panic.
fn saved(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let folder = Folder::new();
    let path = folder.file("x");
    let as_index = random.below(2) == 0;
    let (dim, simd) = (1 + random.below(12), random.pick(&levels()));
    let mut query = Vec::new();
    if as_index {
        let metric = random.pick(&Metric::ALL);
        let numbers = convert(&rows(random.pick(&KINDS), 10 + random.below(200), dim, random), |x| x as f32);
        let mut pair = Pair::new(dim, metric);
        numbers.chunks(1 + random.below(150)).for_each(|some| pair.add(some, simd));
        pair.index.save(&path, simd, 1, &Monitor::new()).expect("a good folder");
        query = numbers[..random.pick(&[1, 10])].concat();
    } else {
        small(&path);
    }
    let good = fs::read(&path).expect("the file");
    let read = random.below(2) == 0;
    let contents = |read| if as_index { search(&path, &query, dim, simd, read) } else { all(&path) };
    let truth = contents(read).expect("a good file");
    let mut checks = 0;
    for _ in 0..40 {
        let mut bytes = good.clone();
        mutate(&mut bytes, random);
        let repaired = bytes.len() > 8 && random.below(2) == 0 && repair(&mut bytes);
        // A new file: a mapped one is not changed in place.
        fs::remove_file(&path).expect("our own file");
        fs::write(&path, &bytes).expect("our own file");
        match contents(read) {
            Ok(found) => assert!(found == truth || repaired, "other contents: {found} for {truth}"),
            Err(error) => {
                let known = matches!(error, Error::BadFile { .. })
                    || (repaired && !matches!(error, Error::Panic(_) | Error::OutOfMemory { .. }));
                assert!(known, "{error}");
                assert!(!error.to_string().contains('\n'), "{error}");
            }
        }
        checks += 1;
    }
    checks
}

fn failed_once(target: &str) -> &'static [u64] {
    FAILED_ONCE.iter().find(|(name, _)| *name == target).expect("a target").1
}

macro_rules! targets {
    ($($target:literal, $case:ident, $more:literal: $replayed:ident, $fuzzed:ident;)*) => {
        $(
            #[test]
            fn $replayed() {
                replay($target, failed_once($target), $more, $case);
            }

            #[test]
            #[ignore = "runs for as long as it is told to: make fuzz"]
            fn $fuzzed() {
                fuzz($target, $case);
            }
        )*
    };
}

targets! {
    "knn", knn, 12: seeds_of_knn_equal_the_oracle, fuzz_knn;
    "radius", within, 12: seeds_of_radius_equal_the_oracle, fuzz_radius;
    "ranks", ranking, 12: seeds_of_ranks_equal_the_oracle, fuzz_ranks;
    "index", index, 12: seeds_of_an_index_equal_the_oracle, fuzz_index;
    "saved", saved, 6: seeds_of_damaged_files_are_refused, fuzz_saved;
}
