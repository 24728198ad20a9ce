//! Search by radius, compared with the oracle at every level: same rows, same bytes.
//!
//! [`check`] runs a case at every level, with 1 to 3 threads, with and without distances, in both orders. Radii are chosen
//! where rounding decides: values that are returned, and the float64 numbers next to them.

use std::num::NonZero;

use exactknn_core::{
    Argument, Element, Error, Level, MatrixRef, Metric, Monitor, Output, PoolHandle, RadiusOptions, RadiusSearch,
    RowOrder, SelfRule, Simd, Within, bf16, f16, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Rows, Type, affordable, any_metric, convert, dims, levels, metrics, rows, types};

#[derive(Debug, Clone, Copy)]
struct Case {
    metric: Metric,
    r: f64,
    exclude_self: bool,
    values: bool,
    order: RowOrder,
}

fn run<E: Element>(
    query: &[Vec<E>],
    references: &[Vec<E>],
    case: Case,
    simd: Simd,
    threads: usize,
) -> Result<Within<E::Output>, Error> {
    let dim = references[0].len();
    let (q, r) = (query.concat(), references.concat());
    let query = MatrixRef::new(&q, query.len(), dim, Argument::Query)?;
    let references = MatrixRef::new(&r, references.len(), dim, Argument::Reference)?;
    let threads = NonZero::new(threads).expect("positive");
    let Case { metric, r: radius, exclude_self, values, order } = case;
    let search = RadiusSearch::new(
        query,
        references,
        RadiusOptions { radius, metric, exclude: exclude_self.into(), from_row: 0, values, order, simd, threads },
    )?;
    PoolHandle::get(threads)?.pool().install(|| search.run(&Monitor::new()))
}

/// The complete result. Debug output is unique for the bits of a float, including the sign of zero.
fn bits<T: Output>(found: &Within<T>) -> (Vec<i64>, Vec<i64>, Vec<String>) {
    (found.starts.clone(), found.rows.clone(), found.values.iter().map(|value| format!("{value:?}")).collect())
}

/// The rows of one query.
fn of_query<T: Copy>(within: &Within<T>, i: usize) -> (Vec<i64>, Vec<T>) {
    let places = within.starts[i] as usize..within.starts[i + 1] as usize;
    (within.rows[places.clone()].to_vec(), within.values[places].to_vec())
}

fn check<E: Element>(query: &[Vec<E>], references: &[Vec<E>], metric: Metric, r: f64, exclude_self: bool)
where
    E::Output: Into<f64>,
{
    for order in [RowOrder::Value, RowOrder::Row] {
        let truth = oracle::radius(metric, query, references, r, exclude_self, order == RowOrder::Row);
        for &value in &truth.values {
            let value: f64 = value.into();
            assert!(if metric.largest_first() { value >= r } else { value <= r }, "{value:e} is not within {r:e}");
        }
        for simd in levels() {
            for (threads, values) in [(1, true), (2, true), (3, true), (1, false), (2, false)] {
                let case = Case { metric, r, exclude_self, values, order };
                let found = run(query, references, case, simd, threads).expect("a good search");
                let wanted = if values { truth.clone() } else { Within { values: Vec::new(), ..truth.clone() } };
                assert_eq!(bits(&found), bits(&wanted), "{case:?}, {:?}, {threads} threads", simd.level());
            }
            if exclude_self {
                continue;
            }
            for (i, row) in query.iter().enumerate().step_by(1 + query.len() / 3) {
                let case = Case { metric, r, exclude_self, values: true, order };
                let alone = run(std::slice::from_ref(row), references, case, simd, 2).expect("a good search");
                let (rows, values) = of_query(&truth, i);
                assert_eq!((alone.rows, alone.values), (rows, values), "query {i} alone");
            }
        }
    }
}

/// A choice of the radius.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Radius {
    /// The value of some pair: it is inside.
    Tie,
    /// The float64 number above, or below, such a value.
    Above,
    Below,
    /// The midpoint between the value of some pair and the next number, where rounding changes direction.
    Middle,
    /// A fraction of the range of values.
    Plain,
    Zero,
}

fn radii() -> impl Strategy<Value = Radius> {
    prop_oneof![
        3 => Just(Radius::Tie),
        1 => Just(Radius::Above),
        1 => Just(Radius::Below),
        1 => Just(Radius::Middle),
        1 => Just(Radius::Plain),
        1 => Just(Radius::Zero),
    ]
}

/// A radius with the fraction `share` of the rows inside, for the first query.
fn radius_for<E: Element>(kind: Radius, metric: Metric, query: &[Vec<E>], references: &[Vec<E>], share: f64) -> f64
where
    E::Output: Into<f64>,
{
    let all = oracle::knn(metric, &query[..1], references, references.len(), false);
    let at = ((share * all.values.len() as f64) as usize).min(all.values.len() - 1);
    let value: f64 = all.values[at].into();
    let value = value.clamp(-1e300, 1e300);
    match kind {
        Radius::Tie => value,
        Radius::Above => value.next_up(),
        Radius::Below => value.next_down(),
        Radius::Middle => (value + f64::from((value as f32).next_up()).clamp(-1e300, 1e300)) * 0.5,
        Radius::Plain => value * 1.01 + 1e-3,
        Radius::Zero => 0.0,
    }
}

/// Convert queries and references to one type, scaled to its range, and check.
pub(crate) fn check_as(
    element: Type,
    query: &[Vec<f64>],
    references: &[Vec<f64>],
    metric: Metric,
    (kind, share): (Radius, f64),
    exclude_self: bool,
) {
    fn go<E: Element>(q: &[Vec<E>], r: &[Vec<E>], metric: Metric, kind: Radius, share: f64, exclude_self: bool)
    where
        E::Output: Into<f64>,
    {
        check(q, r, metric, radius_for(kind, metric, q, r, share), exclude_self);
    }
    match element {
        Type::F32 => {
            let to = |x: f64| x as f32;
            go(&convert(query, to), &convert(references, to), metric, kind, share, exclude_self);
        }
        Type::F64 => go(query, references, metric, kind, share, exclude_self),
        Type::F16 => {
            let to = |x: f64| f16::from_f64(x.clamp(-65504.0, 65504.0));
            go(&convert(query, to), &convert(references, to), metric, kind, share, exclude_self);
        }
        Type::Bf16 => {
            let to = bf16::from_f64;
            go(&convert(query, to), &convert(references, to), metric, kind, share, exclude_self);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random sizes, kinds of rows, types, metrics and radii; few and many queries; none to all rows inside.
    #[test]
    fn every_level_equals_the_oracle(
        seed: u64,
        kind in 0..KINDS.len(),
        dim in dims(),
        references in 1usize..500,
        queries in 1usize..40,
        share in 0.0f64..1.0,
        few: bool,
        radius in radii(),
        metric in any_metric(),
        element in types(),
        self_search: bool,
    ) {
        let (kind, references) = (KINDS[kind], affordable(references, metric));
        let mut random = Random(seed);
        let data = rows(kind, references, dim, &mut random);
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
        let share = if few { share * 0.02 } else { share };
        check_as(element, &query, &data, metric, (radius, share), self_search);
    }
}

/// Every kind of rows through the filter, with a radius on a value, independent of the random cases.
#[test]
fn every_kind_of_rows_is_filtered_exactly() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        for (dim, share) in [(3, 0.01), (64, 0.3)] {
            let mut random = Random(i as u64 * 100 + dim as u64);
            let data = rows(kind, 400, dim, &mut random);
            // The oracle's powers are slow: wide rows are left to the property test above.
            let metrics = if dim < 50 { metrics() } else { Metric::ALL.to_vec() };
            for metric in metrics {
                check_as(Type::F32, &data[..14], &data, metric, (Radius::Tie, share), true);
            }
            check_as(Type::F64, &data[388..], &data, Metric::SqEuclidean, (Radius::Tie, share), false);
        }
    }
}

/// The rows within the k-th value are the k nearest and the rows tied with the k-th, in the same order.
#[test]
fn the_k_nearest_are_within_the_kth_value() {
    let data = convert(&rows(Rows::Grid, 500, 4, &mut Random(2)), |x| x as f32);
    let all = oracle::knn(Metric::SqEuclidean, &data[..12], &data, 500, false);
    for simd in levels() {
        let case =
            Case { metric: Metric::SqEuclidean, r: 3.0, exclude_self: false, values: true, order: RowOrder::Value };
        let found = run(&data[..12], &data, case, simd, 2).expect("good");
        for i in 0..12 {
            let (rows, values) = of_query(&found, i);
            assert_eq!(rows, all.rows[i * 500..][..rows.len()]);
            assert_eq!(values, all.values[i * 500..][..rows.len()]);
            assert_eq!(values.last(), Some(&3.0));
            assert!(all.values[i * 500 + rows.len()] > 3.0);
        }
    }
}

/// Splits of the references, blocks and merges: few queries, many references, ties across all boundaries.
#[test]
fn ties_across_splits_and_blocks() {
    let data = convert(&rows(Rows::Grid, 9000, 5, &mut Random(5)), |x| x as f32);
    for queries in [1, 3, 20] {
        check(&data[..queries], &data, Metric::SqEuclidean, 1.0, true);
        check(&data[4000..4000 + queries], &data, Metric::InnerProduct, 15.0, false);
    }
}

/// Values that round to zero or infinity are inside or outside by the rounded number.
#[test]
fn the_rounded_value_decides() {
    let squared = Metric::SqEuclidean;
    // Squares from 1e-60 to 1e76: the first ones are returned as 0, the last ones as infinity.
    let references: Vec<Vec<f32>> = (0..300).map(|i| vec![10f32.powi(i % 69 - 30), 0.0]).collect();
    let query = vec![vec![0.0f32, 0.0]; 20];
    for r in [0.0, 1e-60, 1e-45, 1.5e-45, 1e-40, 1.0, f64::from(f32::MAX), 1e40, 1e300] {
        check(&query, &references, squared, r, false);
    }
    let simd = Simd::new(Level::Scalar).expect("always there");
    let case = |r| Case { metric: squared, r, exclude_self: false, values: true, order: RowOrder::Value };
    let zeros = run(&query, &references, case(0.0), simd, 2).expect("good");
    assert!(zeros.starts[1] > 0 && zeros.values.iter().all(|&value| value == 0.0));
    let most = run(&query, &references, case(1e300), simd, 2).expect("good");
    assert!(most.starts[1] < 300 && most.values.iter().all(|value| value.is_finite()), "infinity is above every r");
    let dot = Case { metric: Metric::InnerProduct, ..case(1e300) };
    let huge: Vec<Vec<f32>> = (0..300).map(|i| vec![if i % 3 == 0 { 1e30 } else { -1e30 }, 1.0]).collect();
    let found = run(&huge[..12], &huge, dot, simd, 2).expect("good");
    assert_eq!(found.starts[1], 100);
    assert_eq!(found.values[0], f32::INFINITY);
}

#[test]
fn no_distance_is_within_a_negative_radius() {
    let data = convert(&rows(Rows::Duplicates, 300, 3, &mut Random(4)), |x| x as f32);
    for metric in metrics() {
        check(&data[..15], &data, metric, -1.0, false);
        check(&data[..15], &data, metric, -5e-324, true);
        check(&data[..15], &data, metric, -f64::MAX, true);
    }
}

#[test]
fn squares_beyond_float64_are_compared_as_rounded() {
    for scale in [1e-170, 1e-160, 1e-5, 1e150, 1e156] {
        let data: Vec<Vec<f64>> = rows(Rows::Normal, 400, 3, &mut Random(6))
            .iter()
            .map(|row| row.iter().map(|x| x * scale).collect())
            .collect();
        for metric in [Metric::SqEuclidean, Metric::Cosine, Metric::NormalizedEuclidean] {
            // The oracle squares without scaling: out of range, both give 0 or infinity.
            for share in [0.0, 0.1] {
                if metric != Metric::SqEuclidean && !(1e-140..1e140).contains(&scale) {
                    continue;
                }
                check(&data[..12], &data, metric, radius_for(Radius::Tie, metric, &data, &data, share), true);
            }
        }
    }
}

/// A self-search has the results of a search in a copy, for which the upper triangle is not used.
fn check_self_search<E: Element>(data: &[Vec<E>], metric: Metric, r: f64) {
    let (flat, copy, dim) = (data.concat(), data.concat(), data[0].len());
    let one = MatrixRef::new(&flat, data.len(), dim, Argument::Query).expect("good");
    let other = MatrixRef::new(&copy, data.len(), dim, Argument::Reference).expect("good");
    for simd in levels() {
        for (exclude_self, values, threads) in [(true, false, 3), (false, true, 2)] {
            let threads = NonZero::new(threads).expect("positive");
            let order = RowOrder::Row;
            let options = RadiusOptions {
                radius: r,
                metric,
                exclude: exclude_self.into(),
                from_row: 0,
                values,
                order,
                simd,
                threads,
            };
            let run = |reference| {
                let (search, monitor) = (RadiusSearch::new(one, reference, options).expect("good"), Monitor::new());
                let found = PoolHandle::get(threads).expect("threads").pool().install(|| search.run(&monitor));
                assert_eq!(monitor.fraction(), 1.0);
                found.expect("a good search")
            };
            assert!(run(one) == run(other), "{metric:?}, r={r}, {exclude_self}, {values}, {:?}", simd.level());
        }
    }
}

#[test]
fn each_pair_of_a_self_search_is_in_both_lists() {
    let mut random = Random(7);
    let kinds = [Rows::Normal, Rows::Grid, Rows::Duplicates, Rows::FarFromOrigin, Rows::OneGiant, Rows::ManyScales];
    for (i, kind) in kinds.into_iter().enumerate() {
        // Fewer rows than the upper triangle needs, and more, which do not fill their panels and chunks.
        let count = [1025, 1000, 1101][i % 3];
        let data = rows(kind, count, [3, 17, 40][i % 3], &mut random);
        let metric = Metric::ALL[i];
        let narrow = convert(&data, |x| x as f32);
        let share = [0.0, 0.01, 0.6][i / 2];
        check_self_search(&narrow, metric, radius_for(Radius::Tie, metric, &narrow, &narrow, share));
    }
    let wide = rows(Rows::Normal, 1030, 9, &mut random);
    check_self_search(&wide, Metric::InnerProduct, 7.0);
    check_self_search(&wide, Metric::Euclidean, radius_for(Radius::Tie, Metric::Euclidean, &wide, &wide, 0.02));
    let halves = convert(&rows(Rows::Normal, 1100, 20, &mut random), f16::from_f64);
    check_self_search(&halves, Metric::CosineSimilarity, 0.3);
}

fn refusal(query: &[Vec<f32>], references: &[Vec<f32>], r: f64, exclude_self: bool) -> Error {
    let simd = Simd::new(Level::Scalar).expect("always there");
    let case = Case { metric: Metric::SqEuclidean, r, exclude_self, values: true, order: RowOrder::Value };
    run(query, references, case, simd, 2).expect_err("must be refused")
}

#[test]
fn invalid_arguments_are_refused() {
    let data = convert(&rows(Rows::Normal, 400, 3, &mut Random(3)), |x| x as f32);
    assert_eq!(refusal(&data, &data[..9], 1.0, true), Error::ReferenceLacksQueries { queries: 400, references: 9 });
    assert_eq!(refusal(&data, &data, f64::INFINITY, false), Error::BadRadius { given: f64::INFINITY });
    assert!(matches!(refusal(&data, &data, f64::NAN, false), Error::BadRadius { .. }));
    for value in [f32::NAN, f32::INFINITY] {
        // Direct, filtered, and with a result that is empty in advance.
        for (queries, r) in [(1, 1.0), (100, 1.0), (100, -1.0)] {
            let mut bad = data.clone();
            bad[311][2] = value;
            bad[399][0] = value;
            let error = refusal(&data[..queries], &bad, r, false);
            assert!(
                matches!(error, Error::NonFinite { argument: Argument::Reference, row: 311, column: 2, .. }),
                "{error}"
            );
            let error = refusal(&bad[311 - queries + 1..=311], &bad, r, false);
            assert!(matches!(error, Error::NonFinite { argument: Argument::Query, row, .. } if row == queries - 1));
        }
    }
}

#[test]
fn a_cancelled_search_stops_and_a_finished_one_has_full_progress() {
    let data: Vec<f32> = (0..4000 * 8).map(|i| (i % 97) as f32).collect();
    let matrix = MatrixRef::new(&data, 4000, 8, Argument::Query).expect("good");
    let simd = Simd::new(Level::Scalar).expect("always there");
    let threads = NonZero::<usize>::MIN;
    let options = RadiusOptions {
        radius: 0.5,
        metric: Metric::Cosine,
        exclude: SelfRule::From(0),
        from_row: 0,
        values: false,
        order: RowOrder::Row,
        simd,
        threads,
    };
    let search = RadiusSearch::new(matrix, matrix, options).expect("good");
    let monitor = Monitor::new();
    search.run(&monitor).expect("good");
    assert_eq!(monitor.fraction(), 1.0);
    monitor.cancel();
    assert_eq!(search.run(&monitor), Err(Error::Cancelled));
}
