//! Shared by all questions: the rule for a query's own row, panel caches, the reported filter, stepping down.

use std::num::NonZero;

use exactknn_core::{
    Argument, Element, Error, Groups, Index, MatrixRef, Metric, Monitor, Neighbours, Options, PanelCache, QueryRef,
    RadiusOptions, RadiusSearch, RankOptions, RankSearch, References, RowOrder, Search, SelfRule, Simd, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Rows, any_metric, convert, levels, rows};

const THREADS: NonZero<usize> = NonZero::new(2).expect("positive");

fn matrix<E>(numbers: &[E], dim: usize, argument: Argument) -> MatrixRef<'_, E> {
    MatrixRef::new(numbers, numbers.len() / dim, dim, argument).expect("a good matrix")
}

/// The neighbours of each query by definition, without its own row.
fn without_own<E: Element>(
    metric: Metric,
    query: &[Vec<E>],
    references: &[Vec<E>],
    k: usize,
    own: &[usize],
) -> Neighbours<E::Output> {
    let mut found = Neighbours { values: Vec::new(), rows: Vec::new() };
    for (query, own) in query.iter().zip(own) {
        let all = oracle::knn(metric, std::slice::from_ref(query), references, references.len(), false);
        let others = all.rows.iter().zip(all.values).filter(|(row, _)| **row != *own as i64).take(k);
        for (row, value) in others {
            found.rows.push(*row);
            found.values.push(value);
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Queries that start anywhere in the reference, or are any of its rows, with and without a panel cache.
    #[test]
    fn a_query_never_returns_its_own_row(
        kind in 0..KINDS.len(),
        count in 2usize..420,
        dim in 1usize..30,
        queries in 1usize..80,
        k in 0usize..12,
        metric in any_metric(),
        seed: u64,
    ) {
        let mut random = Random(seed);
        let data = convert(&rows(KINDS[kind], count, dim, &mut random), |x| x as f32);
        let queries = queries.min(count);
        let k = k.min(count - 1);
        let first = random.below(count - queries + 1);
        let numbers: Vec<u32> = (0..queries).map(|_| random.below(count) as u32).collect();
        let neighbours = |own: &[usize]| {
            let query: Vec<Vec<f32>> = own.iter().map(|&row| data[row].clone()).collect();
            (query.concat(), without_own(metric, &query, &data, k, own))
        };
        let from: Vec<usize> = (first..first + queries).collect();
        let picked: Vec<usize> = numbers.iter().map(|row| *row as usize).collect();
        let flat = data.concat();
        let reference = matrix(&flat, dim, Argument::Reference);
        for (own, exclude) in [(&from, SelfRule::From(first)), (&picked, SelfRule::Rows(&numbers))] {
            let (query, truth) = neighbours(own);
            let query = matrix(&query, dim, Argument::Query);
            for simd in levels() {
                let options = Options { k, metric, exclude, simd, threads: THREADS };
                let cache = PanelCache::new(metric);
                let once: References<'_, f32> = reference.into();
                for references in [once, References::cached(reference, &cache), References::cached(reference, &cache)] {
                    let found = Search::new(query, references, options).expect("good").run(&Monitor::new());
                    let found = found.expect("finite");
                    prop_assert_eq!(&found.rows, &truth.rows, "{:?}, {:?}", simd.level(), exclude);
                    prop_assert_eq!(format!("{:?}", found.values), format!("{:?}", truth.values));
                }
                prop_assert!(cache.packings() <= 2, "a search and the filter it may step down to");
            }
        }
    }
}

#[test]
fn own_rows_outside_the_reference_are_refused() {
    let data = [0f32, 1.0, 2.0, 3.0];
    let (query, reference) = (matrix(&data[..2], 1, Argument::Query), matrix(&data, 1, Argument::Reference));
    let simd = levels()[0];
    let refusal = |exclude: SelfRule<'_>| {
        let options = Options { k: 1, metric: Metric::SqEuclidean, exclude, simd, threads: THREADS };
        Search::new(query, reference, options).err().map(|error| error.to_string())
    };
    assert_eq!(refusal(SelfRule::From(2)), None);
    assert_eq!(
        refusal(SelfRule::From(3)).as_deref(),
        Some(
            "the reference must hold the queries, row 3 first, when self is excluded: wanted at least 3 + 2 references, \
             got 4"
        )
    );
    assert_eq!(
        refusal(SelfRule::Rows(&[0])).as_deref(),
        Some("self rows must have one entry for each of the 2 queries, got 1 entries")
    );
    assert_eq!(
        refusal(SelfRule::Rows(&[0, 4])).as_deref(),
        Some("self rows must name rows from 0 to below 4, got 4 at position 1")
    );
}

#[test]
fn a_panel_cache_is_for_one_metric_and_one_matrix() {
    let data = convert(&rows(Rows::Normal, 600, 8, &mut Random(1)), |x| x as f32).concat();
    let reference = matrix(&data, 8, Argument::Reference);
    let query = matrix(&data[..800], 8, Argument::Query);
    let cache = PanelCache::new(Metric::SqEuclidean);
    let simd = levels()[0];
    let search = |rows, metric| {
        let options = Options { k: 3, metric, exclude: SelfRule::None, simd, threads: THREADS };
        Search::new(query, References::cached(rows, &cache), options).expect("good").run(&Monitor::new())
    };
    let found = search(reference, Metric::SqEuclidean).expect("finite");
    assert_eq!(search(reference, Metric::SqEuclidean).expect("finite"), found);
    assert_eq!(cache.packings(), 1);
    assert!(matches!(search(reference, Metric::Cosine), Err(Error::Panic(_))));
    // Also where the other matrix would need panels of another kernel.
    let others = data.clone();
    assert!(matches!(search(matrix(&others, 8, Argument::Reference), Metric::SqEuclidean), Err(Error::Panic(_))));
}

/// The reported filter and number of rescored pairs, of a search by radius and one for ranks.
fn reports<E: Element>(query: &[E], reference: &[E], dim: usize, radius: f64, simd: Simd) -> [(&'static str, u64); 2] {
    let query = matrix(query, dim, Argument::Query);
    let reference = matrix(reference, dim, Argument::Reference);
    let metric = Metric::SqEuclidean;
    let threads = NonZero::<usize>::MIN;
    let groups: Vec<i64> = vec![0; query.rows()];
    let groups = Groups { query_group: &groups, offsets: &[0, 2], rows: &[1, 5] };
    let exclude = SelfRule::None;
    let monitors = [Monitor::new(), Monitor::new()];
    let options =
        RadiusOptions { radius, metric, exclude, values: true, from_row: 0, order: RowOrder::Value, simd, threads };
    RadiusSearch::new(query, reference, options).expect("good").run(&monitors[0]).expect("finite");
    let options = RankOptions { metric, exclude, simd, threads };
    RankSearch::new(query, reference, groups, options).expect("good").run(&monitors[1]).expect("finite");
    monitors.map(|monitor| (monitor.report().filter, monitor.report().rescored))
}

/// Two distant clusters: 8 bits separate the clusters but not the rows within them, float32 does both.
#[test]
fn radius_and_ranks_step_down_from_int8_and_report_it() {
    let mut data = rows(Rows::Normal, 2000, 32, &mut Random(11));
    data.iter_mut().enumerate().for_each(|(i, row)| row[0] = if i % 2 == 0 { 100.0 } else { -100.0 });
    let data = convert(&data, |x| x as f32).concat();
    for simd in levels() {
        for (filter, rescored) in reports(&data[..300 * 32], &data, 32, 30.0, simd) {
            assert_eq!(filter, "float32", "{:?}", simd.level());
            assert!(rescored > 0 && rescored < 300 * 2000, "{rescored}");
        }
    }
}

#[test]
fn radius_of_few_queries_needs_no_packing() {
    let data = convert(&rows(Rows::Normal, 2000, 32, &mut Random(3)), |x| x as f32).concat();
    for simd in levels() {
        assert_eq!(reports(&data[..8 * 32], &data, 32, 30.0, simd)[0].0, "unpacked");
        let [radius, ranks] = reports(&data[..2 * 32], &data, 32, 30.0, simd);
        assert_eq!((radius.0, ranks.0), ("unpacked", "none"));
    }
}

/// With `from_row`, blocks of queries find each pair once.
#[test]
fn rows_before_from_row_are_not_searched() {
    let data = convert(&rows(Rows::Grid, 700, 6, &mut Random(9)), |x| x as f32);
    let flat = data.concat();
    let reference = matrix(&flat, 6, Argument::Reference);
    for simd in levels() {
        for (start, stop) in [(0, 300), (300, 301), (301, 700)] {
            let query = matrix(&flat[start * 6..stop * 6], 6, Argument::Query);
            for from_row in [0, start, 699, 700] {
                let (metric, threads) = (Metric::SqEuclidean, THREADS);
                let exclude = SelfRule::From(start);
                let order = RowOrder::Row;
                let options =
                    RadiusOptions { radius: 20.0, metric, exclude, values: false, from_row, order, simd, threads };
                let found = RadiusSearch::new(query, reference, options).expect("good").run(&Monitor::new());
                let found = found.expect("finite");
                let truth = oracle::radius(metric, &data[start..stop], &data, 20.0, false, true);
                for i in 0..stop - start {
                    let of = |starts: &[i64]| starts[i] as usize..starts[i + 1] as usize;
                    let wanted = truth.rows[of(&truth.starts)].iter();
                    let wanted: Vec<i64> =
                        wanted.copied().filter(|&row| row >= from_row as i64 && row != (start + i) as i64).collect();
                    assert_eq!(found.rows[of(&found.starts)], wanted, "query {}, from {from_row}", start + i);
                }
            }
        }
    }
}

/// An index of several segments, growing and sealed.
#[test]
fn ranks_in_an_index_are_those_of_its_rows() {
    let data = convert(&rows(Rows::Grid, 500, 7, &mut Random(21)), |x| x as f32);
    let flat = data.concat();
    let (metric, threads) = (Metric::Euclidean, THREADS);
    let targets: Vec<usize> = (0..500).step_by(4).collect();
    let row_numbers: Vec<i64> = targets.iter().map(|row| *row as i64).collect();
    for simd in levels() {
        let index = Index::new(7, metric).expect("columns").sealed_at(220);
        for (start, stop) in [(0, 250), (250, 320), (320, 500)] {
            let rows = matrix(&flat[start * 7..stop * 7], 7, Argument::Reference);
            index.add(rows, simd, 1, &Monitor::new()).expect("good rows");
        }
        for (first, queries) in [(None, 300), (Some(0), 300), (Some(150), 200), (Some(499), 1)] {
            let start = first.unwrap_or(0);
            let query = &data[start..start + queries];
            let groups: Vec<i64> = vec![0; queries];
            let groups = Groups { query_group: &groups, offsets: &[0, 125], rows: &row_numbers };
            let exclude = first.map_or(SelfRule::None, SelfRule::From);
            let options = RankOptions { metric, exclude, simd, threads };
            let numbers = query.concat();
            let found = index
                .snapshot()
                .ranks(QueryRef::Same(matrix(&numbers, 7, Argument::Query)), &groups, options, &Monitor::new())
                .expect("good");
            let truth = oracle::ranks(metric, query, &data, &vec![targets.clone(); queries], first);
            assert_eq!(found, truth, "{:?}, {first:?}", simd.level());
        }
    }
}

/// Rows that a search by radius skips are refused like all others, whatever filter it takes.
#[test]
fn skipped_rows_that_are_not_finite_are_refused() {
    let mut data = convert(&rows(Rows::Normal, 400, 8, &mut Random(5)), |x| x as f32).concat();
    data[3] = f32::NAN;
    let reference = matrix(&data, 8, Argument::Reference);
    for simd in levels() {
        for queries in [1, 8, 100] {
            let query = matrix(&data[800..800 + queries * 8], 8, Argument::Query);
            let (metric, order, threads) = (Metric::SqEuclidean, RowOrder::Row, THREADS);
            let exclude = SelfRule::None;
            let options =
                RadiusOptions { radius: 9.0, metric, exclude, values: true, from_row: 50, order, simd, threads };
            let found = RadiusSearch::new(query, reference, options).expect("good").run(&Monitor::new());
            assert!(matches!(found, Err(Error::NonFinite { row: 0, column: 3, .. })), "{queries} queries");
        }
    }
}

/// Neighbours of two splits of which neither has k rows.
#[test]
fn k_larger_than_a_split_is_merged() {
    let data = convert(&rows(Rows::Normal, 5000, 3, &mut Random(8)), |x| x as f32);
    let flat = data.concat();
    for simd in levels() {
        let options = Options { k: 4900, metric: Metric::SqEuclidean, exclude: SelfRule::None, simd, threads: THREADS };
        let (query, reference) = (matrix(&flat[..3], 3, Argument::Query), matrix(&flat, 3, Argument::Reference));
        let found = Search::new(query, reference, options).expect("good").run(&Monitor::new()).expect("finite");
        let truth = oracle::knn(Metric::SqEuclidean, &data[..1], &data, 4900, false);
        assert_eq!(found.rows, truth.rows);
    }
}

#[test]
fn rows_prepared_for_another_index_are_refused() {
    let data = convert(&rows(Rows::Normal, 20, 6, &mut Random(2)), |x| x as f32).concat();
    let simd = levels()[0];
    let (one, other) = (Index::new(6, Metric::SqEuclidean), Index::new(6, Metric::Cosine));
    let (one, other) = (one.expect("columns"), other.expect("columns"));
    let rows = one.prepare(matrix(&data, 6, Argument::Reference), simd, 1, &Monitor::new()).expect("good rows");
    assert!(matches!(other.append(rows, simd), Err(Error::BadArray { argument: "rows", .. })));
    assert_eq!(other.rows(), 0);
}
