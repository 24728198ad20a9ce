//! The exactness contract, compared with the oracle at every level: same rows, same bytes.
//!
//! The harness [`check`] runs a case at every available level, with 1, 2 and 3 threads, all queries together and each alone.
//! Unavailable levels are printed; `EXACTKNN_TEST_LEVELS=avx512` turns their absence into a failure.

use std::num::NonZero;

use exactknn_core::saved::Stored;
use exactknn_core::{
    Argument, BlockSearch, Element, Error, Index, Level, MatrixRef, Metric, Monitor, Neighbours, Options, PoolHandle,
    QueryRef, Search, SelfRule, Simd, bf16, f16, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Rows, Type, affordable, any_metric, convert, dims, levels, metrics, rows, types};

fn run<E: Element>(
    query: &[Vec<E>],
    references: &[Vec<E>],
    k: usize,
    metric: Metric,
    exclude_self: bool,
    simd: Simd,
    threads: usize,
) -> Result<Neighbours<E::Output>, Error> {
    let dim = references[0].len();
    let (q, r) = (query.concat(), references.concat());
    let query = MatrixRef::new(&q, query.len(), dim, Argument::Query)?;
    let references = MatrixRef::new(&r, references.len(), dim, Argument::Reference)?;
    let threads = NonZero::new(threads).expect("positive");
    let options = Options { k, metric, exclude: exclude_self.into(), simd, threads };
    let search = Search::new(query, references, options)?;
    let pool = PoolHandle::get(threads)?;
    pool.pool().install(|| search.run(&Monitor::new()))
}

/// The same with references in blocks of up to `most` rows, and with a checkpoint halfway.
fn run_by_blocks<E: Element>(
    query: &[Vec<E>],
    references: &[Vec<E>],
    k: usize,
    metric: Metric,
    exclude_self: bool,
    simd: Simd,
    most: usize,
) -> Result<Neighbours<E::Output>, Error> {
    let dim = references[0].len();
    let q = query.concat();
    let query = MatrixRef::new(&q, query.len(), dim, Argument::Query)?;
    let threads = NonZero::new(2).expect("positive");
    let options = Options { k, metric, exclude: exclude_self.into(), simd, threads };
    let mut search = BlockSearch::new(query, options)?;
    let mut moved = false;
    while search.rows() < references.len() {
        let start = search.rows();
        let size = 1 + start.wrapping_mul(31) % most;
        let end = (start + size).min(references.len());
        let r = references[start..end].concat();
        search = search.with(query, MatrixRef::new(&r, end - start, dim, Argument::Reference)?, &Monitor::new())?;
        if !moved && 2 * end > references.len() {
            moved = true;
            let (ranks, rows) = search.state()?;
            let mut other = BlockSearch::new(query, options)?;
            other.restore(&ranks, &rows, end)?;
            search = other;
        }
    }
    search.result::<E>()
}

/// The same with an index of several segments, some of them sealed; the queries have the widened type.
fn run_by_index<E: Element + Stored>(
    query: &[Vec<E>],
    references: &[Vec<E>],
    k: usize,
    metric: Metric,
    exclude_self: bool,
    simd: Simd,
) -> Result<Neighbours<E::Output>, Error> {
    let dim = references[0].len();
    let mut scratch = Vec::new();
    let wide: Vec<E::Wide> = query.iter().flat_map(|row| E::widen(row, &mut scratch).to_vec()).collect();
    let query = QueryRef::Wide(MatrixRef::new(&wide, query.len(), dim, Argument::Query)?);
    let threads = NonZero::new(2).expect("positive");
    let index = Index::new(dim, metric)?.sealed_at(60);
    let mut start = 0;
    while start < references.len() {
        let end = (start + 1 + start.wrapping_mul(31) % 150).min(references.len());
        let r = references[start..end].concat();
        let rows = MatrixRef::new(&r, end - start, dim, Argument::Reference)?;
        PoolHandle::get(threads)?.pool().install(|| index.add(rows, simd, 2, &Monitor::new()))?;
        start = end;
    }
    assert_eq!(index.rows(), references.len());
    let options = Options { k, metric, exclude: exclude_self.into(), simd, threads };
    index.snapshot().search(query, options, &Monitor::new())
}

fn bits<T: exactknn_core::Output>(found: &Neighbours<T>) -> (Vec<String>, Vec<i64>) {
    // Debug output is unique for the bits of a float, including the sign of zero.
    (found.values.iter().map(|value| format!("{value:?}")).collect(), found.rows.clone())
}

/// The harness: every level, 1 to 3 threads, all queries together and each alone give the oracle's bytes.
fn check<E: Element + Stored>(query: &[Vec<E>], references: &[Vec<E>], k: usize, metric: Metric, exclude_self: bool) {
    let truth = bits(&oracle::knn(metric, query, references, k, exclude_self));
    for simd in levels() {
        for threads in 1..=3 {
            let found = run(query, references, k, metric, exclude_self, simd, threads).expect("a good search");
            assert_eq!(bits(&found), truth, "{:?}, {threads} threads, {metric:?}", simd.level());
        }
        // Few blocks and many, of different sizes.
        for most in [references.len().div_ceil(3), 90] {
            let found = run_by_blocks(query, references, k, metric, exclude_self, simd, most).expect("a good search");
            assert_eq!(bits(&found), truth, "{:?}, blocks of up to {most}, {metric:?}", simd.level());
        }
        let found = run_by_index(query, references, k, metric, exclude_self, simd).expect("a good search");
        assert_eq!(bits(&found), truth, "{:?}, an index, {metric:?}", simd.level());
        if exclude_self {
            continue;
        }
        for (i, row) in query.iter().enumerate().step_by(1 + query.len() / 5) {
            let alone = run(std::slice::from_ref(row), references, k, metric, false, simd, 2).expect("a good search");
            let (values, rows) = bits(&alone);
            assert_eq!((&values[..], &rows[..]), (&truth.0[i * k..][..k], &truth.1[i * k..][..k]), "query {i} alone");
        }
    }
}

/// Convert queries and references to one type, scaled to its range, and check.
pub(crate) fn check_as(
    kind: Type,
    query: &[Vec<f64>],
    references: &[Vec<f64>],
    k: usize,
    metric: Metric,
    exclude_self: bool,
) {
    match kind {
        Type::F32 => {
            check(&convert(query, |x| x as f32), &convert(references, |x| x as f32), k, metric, exclude_self);
        }
        Type::F64 => check(query, references, k, metric, exclude_self),
        Type::F16 => {
            let to = |x: f64| f16::from_f64(x.clamp(-65504.0, 65504.0));
            check(&convert(query, to), &convert(references, to), k, metric, exclude_self);
        }
        Type::Bf16 => {
            check(&convert(query, bf16::from_f64), &convert(references, bf16::from_f64), k, metric, exclude_self);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random sizes, kinds of rows, types and metrics; few and many queries; k from 1 to all.
    #[test]
    fn every_level_equals_the_oracle(
        seed: u64,
        kind in 0..KINDS.len(),
        dim in dims(),
        references in 2usize..700,
        queries in 1usize..40,
        share in 0.0f64..1.0,
        small_k: bool,
        metric in any_metric(),
        element in types(),
        self_search: bool,
    ) {
        let (kind, references) = (KINDS[kind], affordable(references, metric));
        let mut random = Random(seed);
        let data = rows(kind, references, dim, &mut random);
        let most = if self_search { references - 1 } else { references };
        let k = if small_k { 1 + (share * 12.0) as usize } else { 1 + (share * most as f64) as usize }.min(most);
        let query = if self_search {
            data[..queries.min(references)].to_vec()
        } else {
            // Half of the queries are references, half are new rows of the same kind.
            let mut query = rows(kind, queries, dim, &mut random);
            for i in (0..queries).step_by(2) {
                query[i] = data[random.below(references)].clone();
            }
            query
        };
        check_as(element, &query, &data, k, metric, self_search);
    }
}

/// Every kind of rows through the filter, independent of the random cases.
#[test]
fn every_kind_of_rows_is_filtered_exactly() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        for (dim, k) in [(3, 5), (64, 10), (130, 1)] {
            let mut random = Random(i as u64 * 100 + dim as u64);
            let data = rows(kind, 900, dim, &mut random);
            // The oracle's powers are slow: wide rows are left to the property test above.
            let metrics = if dim < 50 { metrics() } else { Metric::ALL.to_vec() };
            for metric in metrics {
                let references = affordable(data.len(), metric);
                check_as(Type::F32, &data[..25], &data[..references], k, metric, true);
            }
            check_as(Type::F64, &data[880..], &data, k, Metric::SqEuclidean, false);
        }
    }
}

/// k = n - 1 in a self-search, k = n otherwise.
#[test]
fn k_may_be_all_references() {
    let data = rows(Rows::Grid, 60, 4, &mut Random(1));
    check_as(Type::F32, &data, &data, 59, Metric::SqEuclidean, true);
    check_as(Type::F32, &data[..9], &data, 60, Metric::InnerProduct, false);
    check_as(Type::F32, &data[..2], &data[..2], 1, Metric::Euclidean, true);
}

/// Top k is a prefix of top K, and trailing zero columns change no byte.
#[test]
fn prefixes_and_zero_columns() {
    let data = convert(&rows(Rows::Grid, 600, 4, &mut Random(2)), |x| x as f32);
    let padded: Vec<Vec<f32>> = data.iter().map(|row| [row.as_slice(), &[0.0; 13]].concat()).collect();
    for simd in levels() {
        for metric in metrics() {
            let ten = run(&data[..50], &data, 10, metric, false, simd, 2).expect("good");
            let fifty = run(&data[..50], &data, 50, metric, false, simd, 2).expect("good");
            let wide = run(&padded[..50], &padded, 10, metric, false, simd, 2).expect("good");
            assert_eq!(bits(&ten), bits(&wide));
            for i in 0..50 {
                assert_eq!(ten.rows[i * 10..][..10], fifty.rows[i * 50..][..10]);
                assert_eq!(ten.values[i * 10..][..10], fifty.values[i * 50..][..10]);
            }
        }
    }
}

/// Values out of the range of float32: infinite or zero in the result, ordered by float64.
#[test]
fn values_out_of_range_keep_their_order() {
    for scale in [1e20f32, 1e-30] {
        let references: Vec<Vec<f32>> = (1..=300).rev().map(|i| vec![i as f32 * scale, 0.0]).collect();
        for simd in levels() {
            let query = vec![vec![0.0f32, 0.0]; 20];
            let found = run(&query, &references, 3, Metric::SqEuclidean, false, simd, 2).expect("good");
            assert_eq!(found.rows[..3], [299, 298, 297]);
            assert_eq!(found.values[0], (f64::from(scale) * f64::from(scale)) as f32);
        }
    }
}

/// A self-search in which queries and references are the same memory; `own` off: in which they are not.
fn run_self(data: &[f32], own: bool, queries: usize, dim: usize, options: Options) -> Neighbours<f32> {
    let copy;
    let query = if own {
        &data[..queries * dim]
    } else {
        copy = data[..queries * dim].to_vec();
        &copy
    };
    let query = MatrixRef::new(query, queries, dim, Argument::Query).expect("good");
    let reference = MatrixRef::new(data, data.len() / dim, dim, Argument::Reference).expect("good");
    let search = Search::new(query, reference, options).expect("good");
    PoolHandle::get(options.threads).expect("a pool").pool().install(|| search.run(&Monitor::new())).expect("finite")
}

/// A self-search that is large enough for symmetric tiles has the bytes of a search in a copy, and of the oracle for some
/// queries. There may be more references than queries; k 50 and the inner product use no symmetric tiles.
#[test]
fn self_search_by_symmetric_tiles() {
    for (i, (kind, dim, queries, references, metric, ks)) in [
        (Rows::Normal, 33, 4500, 4500, Metric::SqEuclidean, &[1, 7, 50][..]),
        (Rows::Normal, 130, 4200, 4300, Metric::Euclidean, &[5]),
        (Rows::Grid, 12, 4300, 5003, Metric::NormalizedSqEuclidean, &[3]),
        (Rows::Unit, 20, 4400, 4400, Metric::Cosine, &[6]),
        (Rows::Sparse, 24, 4300, 6000, Metric::CosineSimilarity, &[2]),
        (Rows::OneGiant, 20, 4300, 4311, Metric::NormalizedEuclidean, &[1]),
        (Rows::Duplicates, 7, 4200, 4200, Metric::SqEuclidean, &[4]),
        (Rows::Normal, 8, 4200, 4200, Metric::InnerProduct, &[2]),
    ]
    .into_iter()
    .enumerate()
    {
        let data = convert(&rows(kind, references, dim, &mut Random(40 + i as u64)), |x| x as f32);
        let flat = data.concat();
        for &k in ks {
            // At the best level only: `symmetric.rs` tests small blocks at every level.
            let simd = levels().pop().expect("at least one");
            let options = |threads| Options {
                k,
                metric,
                exclude: SelfRule::From(0),
                simd,
                threads: NonZero::new(threads).expect("positive"),
            };
            let truth = bits(&run_self(&flat, false, queries, dim, options(2)));
            for threads in 1..=3 {
                let found = bits(&run_self(&flat, true, queries, dim, options(threads)));
                assert!(found == truth, "{kind:?}, {metric:?}, k {k}, {threads} threads");
            }
            let (values, rows) = truth;
            for i in (1..queries).step_by(queries / 3) {
                // One more than k, without the own row.
                let oracle = oracle::knn(metric, &data[i..=i], &data, k + 1, false);
                let oracle = oracle.rows.iter().zip(&oracle.values).filter(|(row, _)| **row != i as i64).take(k);
                for (at, (row, value)) in oracle.enumerate() {
                    assert_eq!((rows[i * k + at], &values[i * k + at]), (*row, &format!("{value:?}")));
                }
            }
        }
    }
}

fn refusal<E: Element>(query: &[Vec<E>], references: &[Vec<E>], k: usize, exclude_self: bool) -> Error {
    let simd = Simd::new(Level::Scalar).expect("always there");
    run(query, references, k, Metric::SqEuclidean, exclude_self, simd, 2).expect_err("must be refused")
}

#[test]
fn invalid_arguments_are_refused() {
    let data = convert(&rows(Rows::Normal, 400, 3, &mut Random(3)), |x| x as f32);
    assert_eq!(refusal(&data, &data, 401, false), Error::KTooLarge { k: 401, references: 400 });
    assert_eq!(refusal(&data, &data, 400, true), Error::KTooLargeWithoutSelf { k: 400, references: 400 });
    assert_eq!(refusal(&data, &data[..9], 1, true), Error::ReferenceLacksQueries { queries: 400, references: 9 });
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (queries, k) in [(1, 1), (100, 1), (100, 0)] {
            let mut bad = data.clone();
            bad[311][2] = value;
            bad[399][0] = value;
            let error = refusal(&data[..queries], &bad, k, false);
            assert!(
                matches!(error, Error::NonFinite { argument: Argument::Reference, row: 311, column: 2, .. }),
                "{error}"
            );
            let error = refusal(&bad[311 - queries + 1..=311], &bad, k, false);
            assert!(matches!(error, Error::NonFinite { argument: Argument::Query, row, .. } if row == queries - 1));
        }
    }
}

#[test]
fn a_cancelled_search_stops() {
    let data: Vec<f32> = (0..4000 * 8).map(|i| (i % 97) as f32).collect();
    let matrix = MatrixRef::new(&data, 4000, 8, Argument::Query).expect("good");
    let simd = Simd::new(Level::Scalar).expect("always there");
    let threads = NonZero::<usize>::MIN;
    for k in [5, 3999] {
        let options = Options { k, metric: Metric::Cosine, exclude: SelfRule::From(0), simd, threads };
        let monitor = Monitor::new();
        monitor.cancel();
        let search = Search::new(matrix, matrix, options).expect("good");
        let outcome = PoolHandle::get(threads).expect("a pool").pool().install(|| search.run(&monitor));
        assert_eq!(outcome, Err(Error::Cancelled));
    }
}

/// Splits of the references, blocks and merges: few queries, many references, ties across all boundaries.
#[test]
fn ties_across_splits_and_blocks() {
    let mut random = Random(5);
    let data = convert(&rows(Rows::Grid, 12_000, 5, &mut random), |x| x as f32);
    for queries in [1, 3, 20] {
        check(&data[..queries], &data, 30, Metric::SqEuclidean, true);
        check(&data[6000..6000 + queries], &data, 7, Metric::InnerProduct, false);
    }
}

/// Float64 rows whose squares overflow or underflow: many queries (filtered) have the results of each query alone (direct),
/// for all kinds of clusters near the centre.
#[test]
fn float64_at_the_ends_of_its_range() {
    for (bulk, near, query) in [
        (1e163, 1e153, 1e151),
        (1e-153, 1e-163, 1e-163),
        (1e-160, 1e-170, 1e-162),
        (1e150, 1e140, 1e141),
        (1e-305, 1e-310, 1e-308),
        (1e300, 1e290, 1e280),
        (1e120, 1e-120, 1e-119),
        (1.0, 1e-162, 1e-162),
    ] {
        let references: Vec<Vec<f64>> = (0..1000)
            .map(|i| {
                let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
                match i {
                    40..50 => vec![-query * (1.0 + f64::from(i) * 0.01), 0.0],
                    104..114 => vec![query * 10.0, query],
                    0..128 => vec![near * sign, 0.0],
                    _ => vec![bulk * sign * (1.0 + f64::from(i % 7)), bulk * f64::from(i % 5)],
                }
            })
            .collect();
        let queries: Vec<Vec<f64>> = (0..20).map(|i| vec![query * (1.0 + f64::from(i) * 0.1), 0.0]).collect();
        for simd in levels() {
            for metric in metrics() {
                let together = run(&queries, &references, 5, metric, false, simd, 2).expect("good");
                let (values, rows) = bits(&together);
                for (i, row) in queries.iter().enumerate() {
                    let alone = run(std::slice::from_ref(row), &references, 5, metric, false, simd, 1).expect("good");
                    let (alone_values, alone_rows) = bits(&alone);
                    assert_eq!(
                        (&values[i * 5..][..5], &rows[i * 5..][..5]),
                        (&alone_values[..], &alone_rows[..]),
                        "{metric:?}, bulk {bulk:e}, query {i}"
                    );
                }
            }
        }
    }
}

/// Errors of a block name the row among all references.
#[test]
fn a_bad_row_of_a_block_is_named_by_its_row_among_all() {
    let simd = levels()[0];
    let threads = NonZero::new(1).expect("positive");
    for k in [0, 1, 4] {
        let options = Options { k, metric: Metric::SqEuclidean, exclude: SelfRule::None, simd, threads };
        let query = MatrixRef::new(&[0.0f32, 1.0], 2, 1, Argument::Query).expect("good");
        let block = |rows: &'static [f32]| MatrixRef::new(rows, rows.len(), 1, Argument::Reference).expect("good");
        let mut search = BlockSearch::new(query, options).expect("good");
        search = search.with(query, block(&[5.0, 4.0, 3.0]), &Monitor::new()).expect("good");
        let error = search.with(query, block(&[0.0, f32::NAN]), &Monitor::new()).expect_err("not finite");
        assert!(matches!(error, Error::NonFinite { argument: Argument::Reference, row: 4, column: 0, .. }), "{error}");
        assert_eq!(search.rows(), 3);
        if k == 4 {
            assert_eq!(search.result::<f32>().expect_err("too few"), Error::KTooLarge { k: 4, references: 3 });
        }
        search = search.with(query, block(&[1.0, 5.0]), &Monitor::new()).expect("good");
        let found = search.result::<f32>().expect("enough");
        let wanted: [&[i64]; 2] = [&[3, 2, 1, 0], &[3, 2, 1, 0]];
        assert_eq!(found.rows, wanted.map(|rows| &rows[..k]).concat());
    }
}

/// A checkpoint that no search can have is refused.
#[test]
fn a_bad_state_is_refused() {
    let simd = levels()[0];
    let threads = NonZero::new(1).expect("positive");
    let options = Options { k: 2, metric: Metric::SqEuclidean, exclude: SelfRule::From(0), simd, threads };
    let query = MatrixRef::new(&[0.0f32], 1, 1, Argument::Query).expect("good");
    let mut search = BlockSearch::new(query, options).expect("good");
    for (ranks, rows, so_far) in [
        (&[1.0][..], &[1][..], 5),
        (&[2.0, 1.0], &[1, 2], 5),
        (&[1.0, 1.0], &[2, 1], 5),
        (&[1.0, 2.0], &[1, 5], 5),
        (&[1.0, 2.0], &[0, 1], 5),
        (&[1.0, f64::NAN], &[1, 2], 5),
        (&[1.0, f64::INFINITY], &[1, -1], 5),
        (&[1.0, 2.0], &[1, -1], 2),
        (&[1.0, 2.0], &[1, -2], 5),
    ] {
        let refused = search.restore(ranks, rows, so_far);
        assert!(matches!(refused, Err(Error::BadArray { .. })), "{ranks:?} {rows:?} {so_far}");
    }
    search.restore(&[1.0, f64::INFINITY], &[1, -1], 2).expect("itself and one more");
    search.restore(&[1.0, 1.0], &[1, 2], 5).expect("a tie");
}
