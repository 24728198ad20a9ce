//! Every filter at its limits: the result is the oracle's, and the report names the filter.
//!
//! The filter depends on sizes and data (`plan`): with one or two queries every pair gets its float64 value, with up to 32
//! queries the rows are unpacked, with more they are packed, in 8 bits if the level has an int8 kernel. For k of 8 and more,
//! initial floors come from a sample of the references, one in eight of the panels of up to 32 rows.

use std::num::NonZero;

use exactknn_core::{
    Argument, Element, Error, Level, MatrixRef, Metric, Monitor, Neighbours, Options, PoolHandle, Search, Simd, bf16,
    f16, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Rows, convert, levels, rows};

struct Case<'a, E> {
    query: &'a [Vec<E>],
    references: &'a [Vec<E>],
    k: usize,
    metric: Metric,
    exclude_self: bool,
}

impl<E: Element> Case<'_, E> {
    /// The result at one level, and the last filter of the search.
    fn run(&self, simd: Simd, threads: usize) -> Result<(Neighbours<E::Output>, &'static str), Error> {
        let dim = self.references[0].len();
        let (query, references) = (self.query.concat(), self.references.concat());
        let query = MatrixRef::new(&query, self.query.len(), dim, Argument::Query)?;
        let references = MatrixRef::new(&references, self.references.len(), dim, Argument::Reference)?;
        let threads = NonZero::new(threads).expect("positive");
        let Self { k, metric, exclude_self, .. } = *self;
        let search =
            Search::new(query, references, Options { k, metric, exclude: exclude_self.into(), simd, threads })?;
        let monitor = Monitor::new();
        let found = PoolHandle::get(threads)?.pool().install(|| search.run(&monitor))?;
        Ok((found, monitor.report().filter))
    }

    /// The oracle's bytes at every level and with every number of threads, and the filter that `wanted` returns.
    fn check(&self, threads: &[usize], wanted: impl Fn(Level) -> Option<&'static str>) {
        let truth = oracle::knn(self.metric, self.query, self.references, self.k, self.exclude_self);
        for simd in levels() {
            for &threads in threads {
                let place = format!("{:?}, {threads} threads, {:?}, k {}", simd.level(), self.metric, self.k);
                let (found, filter) = self.run(simd, threads).expect("a good search");
                // Debug output is unique for the bits of a float, including the sign of zero.
                assert_eq!(format!("{:?}", found.values), format!("{:?}", truth.values), "{place}");
                assert_eq!(found.rows, truth.rows, "{place}");
                if let Some(wanted) = wanted(simd.level()) {
                    assert_eq!(filter, wanted, "{place}");
                }
            }
        }
    }
}

/// The filter of a search with many queries.
fn packed(level: Level) -> Option<&'static str> {
    Some(if level == Level::Scalar { "float32" } else { "int8" })
}

fn to_f32(rows: &[Vec<f64>]) -> Vec<Vec<f32>> {
    convert(rows, |x| x as f32)
}

#[test]
fn levels_have_their_names() {
    let names: Vec<_> = Level::ALL.into_iter().map(Level::name).collect();
    assert_eq!(names, ["scalar", "avx2", "avxvnni", "avx512", "avx512vnni"]);
}

/// All k nearest are in the first panel, which belongs to the sample: the floor of the sample is too high for every query,
/// and each is searched again. With k 8 they fit in the narrowest panel, with k 30 in the widest.
#[test]
fn a_floor_that_is_too_high_is_detected() {
    for (k, near) in [(8, 8), (30, 32)] {
        let mut random = Random(k as u64);
        let mut data = rows(Rows::Normal, 3000, 6, &mut random);
        data.iter_mut().skip(near).for_each(|row| row.iter_mut().for_each(|x| *x += 40.0 * x.signum()));
        let data = to_f32(&data);
        let query = to_f32(&rows(Rows::Normal, 70, 6, &mut random));
        for metric in [Metric::SqEuclidean, Metric::Euclidean] {
            Case { query: &query, references: &data, k, metric, exclude_self: false }.check(&[1, 3], packed);
        }
    }
}

/// No neighbour is in the sample: the floor of the sample is far too low, which only costs time.
#[test]
fn a_floor_that_is_too_low_is_harmless() {
    let mut random = Random(7);
    let mut data = rows(Rows::Normal, 3000, 6, &mut random);
    // Panels of 8, 16 and 32 rows: none of these rows is in a panel whose number is a multiple of 8.
    let sampled = |row: usize| [8, 16, 32].iter().any(|rows| (row / rows).is_multiple_of(8));
    let near = |row: usize| !sampled(row) && row.is_multiple_of(5);
    for (i, row) in data.iter_mut().enumerate() {
        if !near(i) {
            row.iter_mut().for_each(|x| *x += 40.0 * x.signum());
        }
    }
    let data = to_f32(&data);
    let query = to_f32(&rows(Rows::Normal, 70, 6, &mut random));
    for k in [8, 30] {
        Case { query: &query, references: &data, k, metric: Metric::SqEuclidean, exclude_self: false }
            .check(&[1, 3], packed);
    }
}

/// References sorted by distance, nearest first and last, and periodic with the stride of the sample; with other queries and
/// as a self-search.
#[test]
fn sorted_references_mislead_no_sample() {
    for order in 0..4 {
        let references: Vec<Vec<f32>> = (0..2600usize)
            .map(|i| {
                let size = match order {
                    0 => i,
                    1 => 2600 - i,
                    2 => i % 256,
                    _ => (i % 256) / 32 * 10 + i % 3,
                };
                vec![size as f32 * 0.25, (i % 7) as f32 * 0.001, 1.0]
            })
            .collect();
        let others: Vec<Vec<f32>> = (0..40).map(|i| vec![i as f32 * 0.11, 0.0, 1.0]).collect();
        for k in [8, 40, 150] {
            let metric = Metric::SqEuclidean;
            Case { query: &others, references: &references, k, metric, exclude_self: false }.check(&[1, 2], |_| None);
            Case { query: &references[..40], references: &references, k, metric, exclude_self: true }
                .check(&[1], |_| None);
        }
    }
}

/// Few queries and unpacked rows, for every metric and kind of rows.
#[test]
fn few_queries_are_searched_in_unpacked_rows() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        let mut random = Random(i as u64);
        let dim = [1, 3, 17, 64][i % 4];
        let data = rows(kind, 700, dim, &mut random);
        for (metric, queries) in Metric::ALL.into_iter().zip([3, 4, 15, 16, 17, 31, 32]) {
            let mut query = rows(kind, queries, dim, &mut random);
            query[1].clone_from(&data[600]);
            for k in [1, 9, 87] {
                Case { query: &to_f32(&query), references: &to_f32(&data), k, metric, exclude_self: false }
                    .check(&[1, 3], |_| Some("unpacked"));
            }
            let half: Vec<Vec<bf16>> = convert(&data, bf16::from_f64);
            Case { query: &half[..queries], references: &half, k: 5, metric, exclude_self: true }
                .check(&[2], |_| Some("unpacked"));
            Case { query: &query, references: &data, k: 5, metric, exclude_self: false }
                .check(&[2], |level| if kind_is_ordinary(kind) { packed(level) } else { None });
        }
    }
}

fn kind_is_ordinary(kind: Rows) -> bool {
    matches!(kind, Rows::Normal | Rows::Unit)
}

fn first_bad<E: Element>(to: impl Fn(f64) -> E, queries: usize, dim: usize, metric: Metric, value: f64) {
    // Zeros: all other columns of a bad row equal those of the queries.
    for kind in [Rows::Normal, Rows::AllEqual] {
        let mut data = rows(kind, 700, dim, &mut Random(queries as u64));
        if matches!(kind, Rows::AllEqual) {
            data.iter_mut().for_each(|row| row.fill(0.0));
        }
        let query = convert(&data[..queries], &to);
        for bad in [699, 411, 311] {
            data[bad][dim / 2] = value;
            let references = convert(&data, &to);
            for simd in levels() {
                let case = Case { query: &query, references: &references, k: 3, metric, exclude_self: false };
                for threads in [1, 2] {
                    match case.run(simd, threads) {
                        Err(Error::NonFinite { argument: Argument::Reference, row, column, .. }) => {
                            assert_eq!((row, column), (bad, dim / 2), "{metric:?}, {queries} queries, {value}");
                        }
                        other => panic!("{metric:?}, {queries} queries, {value}: {other:?}"),
                    }
                }
            }
        }
    }
}

/// Every filter names the first bad row, independent of its other columns.
#[test]
fn the_first_row_that_is_not_finite_is_named() {
    for metric in Metric::ALL {
        for (queries, dim) in [(1, 1), (2, 5), (3, 1), (16, 5), (17, 4), (32, 9), (40, 3)] {
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                first_bad(|x| x as f32, queries, dim, metric, value);
                first_bad(|x| x, queries, dim, metric, value);
            }
            first_bad(f16::from_f64, queries, dim, metric, f64::NAN);
        }
    }
}

/// Rows whose squares overflow or vanish in float32, alone and beside ordinary ones; zero rows and zero queries.
#[test]
fn squares_out_of_range_and_zero_rows() {
    for (i, scale) in [1e30, 3e38, 1e18, 1e-18, 1e-25, 1e-38, 1e-45].into_iter().enumerate() {
        for mixed in [false, true] {
            let mut random = Random(i as u64);
            let mut data = rows(Rows::Normal, 500, 5, &mut random);
            for (j, row) in data.iter_mut().enumerate() {
                if j % 7 == 3 {
                    row.fill(0.0);
                } else if !mixed || j % 3 == 0 {
                    row.iter_mut().for_each(|x| *x = (*x * scale).clamp(-3e38, 3e38));
                }
            }
            let data = to_f32(&data);
            for metric in Metric::ALL {
                for queries in [2, 20, 45] {
                    Case { query: &data[..queries], references: &data, k: 9, metric, exclude_self: true }
                        .check(&[2], |_| None);
                }
            }
        }
    }
}

/// Two distant clusters: 8 bits separate the clusters but not the rows within them, float32 does both.
#[test]
fn int8_steps_down_to_float32_if_it_does_not_pay() {
    let mut random = Random(11);
    let mut data = rows(Rows::Normal, 2000, 32, &mut random);
    data.iter_mut().enumerate().for_each(|(i, row)| row[0] = if i % 2 == 0 { 100.0 } else { -100.0 });
    let data = to_f32(&data);
    let case = Case { query: &data[..300], references: &data, k: 5, metric: Metric::SqEuclidean, exclude_self: true };
    case.check(&[1], |_| Some("float32"));
}

/// All rows are equal: no filter rejects anything, so the search steps down to none. Ties alone are not a reason to.
#[test]
fn a_filter_that_rejects_nothing_is_replaced() {
    for metric in Metric::ALL {
        let equal = vec![vec![0.3f32, -1.7, 2.9]; 600];
        Case { query: &equal[..250], references: &equal, k: 4, metric, exclude_self: true }
            .check(&[1], |_| Some("none"));
    }
    let grid = to_f32(&rows(Rows::Grid, 2500, 12, &mut Random(12)));
    for k in [4, 20] {
        Case { query: &grid[..250], references: &grid, k, metric: Metric::SqEuclidean, exclude_self: true }
            .check(&[1], |_| None);
    }
}

/// One column a million times larger than the others.
#[test]
fn a_huge_column_costs_time_only() {
    let data = to_f32(&rows(Rows::OneCoordinate, 1200, 24, &mut Random(13)));
    for metric in Metric::ALL {
        Case { query: &data[..250], references: &data, k: 6, metric, exclude_self: true }.check(&[1], |_| None);
    }
}

/// The widest rows for int8, and the first that are too wide.
#[test]
fn the_widest_rows_in_8_bits() {
    for dim in [65_536, 65_537] {
        let mut random = Random(dim as u64);
        // All codes at their limits: the largest sums of products.
        let data: Vec<Vec<f32>> = (0..200)
            .map(|i| {
                let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
                let mut row = vec![sign; dim];
                (0..50).for_each(|_| row[random.below(dim)] *= 0.5);
                row
            })
            .collect();
        let case =
            Case { query: &data[..33], references: &data, k: 2, metric: Metric::SqEuclidean, exclude_self: true };
        case.check(&[2], |level| if dim > 65_536 { Some("float32") } else { packed(level) });
    }
}

/// A float32 number from its bits; finite.
fn finite(bits: u64) -> f64 {
    let x = f32::from_bits(bits as u32);
    f64::from(if x.is_finite() { x } else { f32::from_bits(bits as u32 & 0x807f_ffff) })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any bits, or numbers of similar magnitudes; enough rows for filters and samples.
    #[test]
    fn any_bits_are_searched_exactly(
        seed: u64,
        dim in 1usize..40,
        count in 200usize..900,
        queries in 3usize..60,
        k in 1usize..25,
        metric in 0..Metric::ALL.len(),
        exponents in prop_oneof![Just(255u64), 1u64..6],
        base in 0u64..250,
        equal_columns: bool,
    ) {
        let mut random = Random(seed);
        let common: Vec<u64> = (0..dim).map(|_| random.bits()).collect();
        let data: Vec<Vec<f32>> = (0..count)
            .map(|_| {
                (0..dim)
                    .map(|c| {
                        let bits = random.bits();
                        // With equal columns, rows differ in their last bits only.
                        let mantissa = if equal_columns { common[c] & 0x7f_fff0 | bits & 0xf } else { bits & 0x7f_ffff };
                        let exponent = if equal_columns { base } else { (base + (bits >> 40) % exponents).min(254) };
                        let sign = if equal_columns { common[c] >> 32 } else { bits >> 32 } & 1;
                        finite(sign << 31 | exponent << 23 | mantissa) as f32
                    })
                    .collect()
            })
            .collect();
        let query = &data[count - queries..];
        let metric = Metric::ALL[metric];
        Case { query, references: &data, k: k.min(count / 8), metric, exclude_self: false }.check(&[1, 2], |_| None);
    }
}
