//! Ranks of target rows, compared at every level with the oracle, which sorts all references.
//!
//! [`check`] runs a case at every level with 1 to 3 threads, and some queries alone. There are few targets, which are
//! compared with all keys, or many, which are searched for each key; or all rows are targets, or none.

use std::num::NonZero;

use exactknn_core::{
    Argument, Element, Error, Groups, Level, MatrixRef, Metric, Monitor, PoolHandle, RankOptions, RankSearch, Ranks,
    SelfRule, Simd, bf16, f16, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Rows, Type, any_metric, convert, dims, levels, metrics, rows, types};

/// The arrays of groups.
#[derive(Debug, Clone)]
struct Lists {
    query_group: Vec<i64>,
    offsets: Vec<i64>,
    rows: Vec<i64>,
}

impl Lists {
    fn new(query_group: &[usize], groups: &[Vec<usize>]) -> Self {
        let mut offsets = vec![0];
        for group in groups {
            offsets.push(offsets[offsets.len() - 1] + group.len() as i64);
        }
        Self {
            query_group: query_group.iter().map(|&group| group as i64).collect(),
            offsets,
            rows: groups.concat().into_iter().map(|row| row as i64).collect(),
        }
    }

    fn groups(&self) -> Groups<'_> {
        Groups { query_group: &self.query_group, offsets: &self.offsets, rows: &self.rows }
    }
}

fn run<E: Element>(
    (query, references): (&[Vec<E>], &[Vec<E>]),
    lists: &Lists,
    metric: Metric,
    first_row: Option<usize>,
    simd: Simd,
    threads: usize,
) -> Result<Ranks, Error> {
    let dim = references.first().or(query.first()).map_or(3, Vec::len);
    let (q, r) = (query.concat(), references.concat());
    let query = MatrixRef::new(&q, query.len(), dim, Argument::Query)?;
    let references = MatrixRef::new(&r, references.len(), dim, Argument::Reference)?;
    let threads = NonZero::new(threads).expect("positive");
    let options = RankOptions { metric, exclude: first_row.map_or(SelfRule::None, SelfRule::From), simd, threads };
    let search = RankSearch::new(query, references, lists.groups(), options)?;
    PoolHandle::get(threads)?.pool().install(|| search.run(&Monitor::new()))
}

fn check<E: Element>(
    query: &[Vec<E>],
    references: &[Vec<E>],
    (query_group, groups): (&[usize], &[Vec<usize>]),
    metric: Metric,
    first_row: Option<usize>,
) {
    let targets: Vec<Vec<usize>> = query_group.iter().map(|&group| groups[group].clone()).collect();
    let truth = oracle::ranks(metric, query, references, &targets, first_row);
    let lists = Lists::new(query_group, groups);
    for simd in levels() {
        for threads in [1, 2, 3] {
            let found = run((query, references), &lists, metric, first_row, simd, threads).expect("a good search");
            assert_eq!(found, truth, "{metric:?}, {:?}, {threads} threads", simd.level());
        }
        for i in (0..query.len()).step_by(1 + query.len() / 3) {
            let lists = Lists { query_group: vec![query_group[i] as i64], ..lists.clone() };
            let alone = (&query[i..=i], references);
            let found = run(alone, &lists, metric, first_row.map(|first| first + i), simd, 2).expect("a good search");
            let wanted = &truth.ranks[truth.starts[i] as usize..truth.starts[i + 1] as usize];
            assert_eq!(found.ranks, wanted, "query {i} alone");
        }
    }
}

/// Convert queries and references to one type, scaled to its range, and check.
pub(crate) fn check_as(
    element: Type,
    query: &[Vec<f64>],
    references: &[Vec<f64>],
    groups: (&[usize], &[Vec<usize>]),
    metric: Metric,
    first_row: Option<usize>,
) {
    match element {
        Type::F32 => {
            let to = |x: f64| x as f32;
            check(&convert(query, to), &convert(references, to), groups, metric, first_row);
        }
        Type::F64 => check(query, references, groups, metric, first_row),
        Type::F16 => {
            let to = |x: f64| f16::from_f64(x.clamp(-65504.0, 65504.0));
            check(&convert(query, to), &convert(references, to), groups, metric, first_row);
        }
        Type::Bf16 => {
            let to = bf16::from_f64;
            check(&convert(query, to), &convert(references, to), groups, metric, first_row);
        }
    }
}

/// Groups of random rows in random order: none, few, a fraction or all of them.
pub(crate) fn random_groups(references: usize, most: usize, random: &mut Random) -> Vec<Vec<usize>> {
    (0..4)
        .map(|group| {
            let mut rows: Vec<usize> = (0..references).collect();
            for i in (1..references).rev() {
                rows.swap(i, random.below(i + 1));
            }
            rows.truncate(match group {
                0 => 0,
                1 => random.below(10),
                2 => random.below(most + 1),
                _ => random.below(references + 1).min(most),
            });
            rows
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random sizes, kinds of rows, types and metrics; none to all rows are targets; blocks of queries.
    #[test]
    fn every_level_equals_the_oracle(
        seed: u64,
        kind in 0..KINDS.len(),
        dim in dims(),
        references in 1usize..450,
        queries in 1usize..40,
        few: bool,
        metric in any_metric(),
        element in types(),
        self_search: bool,
    ) {
        let kind = KINDS[kind];
        let mut random = Random(seed);
        let data = rows(kind, references, dim, &mut random);
        let queries = if self_search { queries.min(references) } else { queries };
        let first_row = self_search.then(|| random.below(references - queries + 1));
        let query = match first_row {
            Some(first) => data[first..first + queries].to_vec(),
            None => {
                // Half of the queries are references, half are new rows of the same kind.
                let mut query = rows(kind, queries, dim, &mut random);
                for i in (0..queries).step_by(2) {
                    query[i] = data[random.below(references)].clone();
                }
                query
            }
        };
        let groups = random_groups(references, if few { 20 } else { references }, &mut random);
        let query_group: Vec<usize> = (0..queries).map(|_| random.below(4)).collect();
        check_as(element, &query, &data, (&query_group, &groups), metric, first_row);
    }
}

/// Every kind of rows with both methods of counting, independent of the random cases.
#[test]
fn every_kind_of_rows_is_counted_exactly() {
    for (i, kind) in KINDS.into_iter().enumerate() {
        for dim in [3, 64] {
            let mut random = Random(i as u64 * 100 + dim as u64);
            let data = rows(kind, 500, dim, &mut random);
            // The oracle's powers are slow: wide rows are left to the property test above.
            let metrics = if dim < 50 { metrics() } else { Metric::ALL.to_vec() };
            let groups = [(0..500).step_by(61).collect(), (100..300).rev().collect()];
            let query_group: Vec<usize> = (0..14).map(|i| i % 2).collect();
            for metric in metrics {
                check_as(Type::F32, &data[100..114], &data, (&query_group, &groups), metric, Some(100));
            }
            check_as(Type::F64, &data[486..], &data, (&query_group, &groups), Metric::SqEuclidean, None);
            check_as(Type::F64, &data[486..], &data, (&query_group, &groups), Metric::InnerProduct, Some(486));
        }
    }
}

/// Enough queries for a probe, with int8 if the level has it; the filter leaves everything undecided, or little.
#[test]
fn a_filter_is_probed_and_replaced() {
    for (kind, dim) in [(Rows::Grid, 4), (Rows::Normal, 16), (Rows::Duplicates, 20)] {
        let data = convert(&rows(kind, 1200, dim, &mut Random(8)), |x| x as f32);
        let groups: Vec<Vec<usize>> = (0..40).map(|class| (class..1200).step_by(40).collect()).collect();
        let query_group: Vec<usize> = (0..1200).map(|row| row % 40).collect();
        check(&data, &data, (&query_group, &groups), Metric::SqEuclidean, Some(0));
    }
    // Close pairs far from each other: the target is near, and 8 bits suffice.
    let centres = rows(Rows::Normal, 600, 24, &mut Random(9));
    let data: Vec<Vec<f32>> = (0..1200)
        .map(|i| centres[i / 2].iter().map(|x| (x * (1.0 + (i % 2) as f64 * 1e-3)) as f32).collect())
        .collect();
    let groups: Vec<Vec<usize>> = (0..600).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
    let query_group: Vec<usize> = (0..1200).map(|row| row / 2).collect();
    check(&data, &data, (&query_group, &groups), Metric::SqEuclidean, Some(0));
    let lists = Lists::new(&query_group, &groups);
    let simd = levels()[levels().len() - 1];
    let found = run((&data[..], &data[..]), &lists, Metric::Cosine, Some(0), simd, 2).expect("good");
    assert_eq!(found.ranks, vec![1; 1200], "the other of the pair");
}

/// Splits of the references, blocks and merges: few queries, many references, ties across all boundaries.
#[test]
fn ties_across_splits_and_blocks() {
    let data = convert(&rows(Rows::Grid, 9000, 5, &mut Random(5)), |x| x as f32);
    let groups = [(0..9000).step_by(1000).collect(), (0..9000).step_by(7).rev().collect(), (0..9000).collect()];
    for queries in [1, 3, 20] {
        let query_group: Vec<usize> = (0..queries).map(|i| i % 3).collect();
        let blocks = &data[4000..4000 + queries];
        check(blocks, &data, (&query_group, &groups), Metric::SqEuclidean, Some(4000));
        check(blocks, &data, (&query_group, &groups), Metric::InnerProduct, None);
    }
}

/// Rows so wide that a run of panels is shorter than a block of keys, and queries that cannot be filtered.
#[test]
fn queries_that_cannot_be_filtered_count_each_row_once() {
    for kind in [Rows::ManyScales, Rows::OneGiant, Rows::Huge] {
        let mut random = Random(11);
        let data = rows(kind, 300, 513, &mut random);
        let query: Vec<Vec<f64>> = (0..16).map(|_| data[random.below(300)].clone()).collect();
        let groups = [vec![1, 7, 200], (0..300).step_by(3).collect()];
        let query_group: Vec<usize> = (0..16).map(|i| i % 2).collect();
        for metric in [Metric::InnerProduct, Metric::SqEuclidean, Metric::Cityblock] {
            check_as(Type::F32, &query, &data, (&query_group, &groups), metric, None);
        }
    }
}

#[test]
fn equal_rows_rank_by_number() {
    let data = vec![vec![1.0f32, 2.0]; 300];
    let groups = [vec![5, 3, 299], (0..300).rev().collect(), vec![]];
    check(&data[..30], &data, (&[0, 1, 2].repeat(10), &groups), Metric::SqEuclidean, Some(0));
    let simd = Simd::new(Level::Scalar).expect("always there");
    let found = run((&data[4..7], &data[..]), &Lists::new(&[0, 0, 2], &groups), Metric::Cosine, Some(4), simd, 2);
    // Query 5 is a target itself; for query 4, row 4 is not counted.
    assert_eq!(found, Ok(Ranks { starts: vec![0, 3, 5, 5], ranks: vec![4, 5, 299, 4, 299] }));
}

/// Values that round to zero or infinity rank by their float64 value.
#[test]
fn values_beyond_float32_keep_their_order() {
    let references: Vec<Vec<f32>> = (0..300).map(|i| vec![10f32.powi((i * 7) % 69 - 30), 0.0]).collect();
    let query = vec![[vec![0.0f32, 0.0], vec![1e30, 1.0], vec![-1e-30, 1e-30]]; 6].concat();
    let groups = [(0..300).step_by(40).collect(), (0..300).collect()];
    let query_group: Vec<usize> = (0..query.len()).map(|i| i % 2).collect();
    for metric in metrics() {
        check(&query, &references, (&query_group, &groups), metric, None);
    }
}

#[test]
fn nothing_to_rank() {
    let simd = Simd::new(Level::Scalar).expect("always there");
    let none: &[Vec<f32>] = &[];
    let one = &[vec![1.0f32, 2.0, 3.0]][..];
    let nothing = |query, references, lists: &Lists| {
        let Ranks { starts, ranks } = run((query, references), lists, Metric::Cosine, None, simd, 2).expect("good");
        assert!(ranks.is_empty() && starts.iter().all(|start| *start == 0));
        starts.len()
    };
    assert_eq!(nothing(none, none, &Lists::new(&[], &[])), 1);
    assert_eq!(nothing(none, one, &Lists::new(&[], &[vec![0]])), 1);
    assert_eq!(nothing(one, none, &Lists::new(&[0], &[vec![]])), 2);
    assert_eq!(nothing(one, one, &Lists::new(&[0], &[vec![]])), 2);
    let own = run((one, one), &Lists::new(&[0], &[vec![0]]), Metric::Cosine, Some(0), simd, 2);
    assert_eq!(own, Ok(Ranks { starts: vec![0, 0], ranks: vec![] }));
    let other = run((one, one), &Lists::new(&[0], &[vec![0]]), Metric::Cosine, None, simd, 2);
    assert_eq!(other, Ok(Ranks { starts: vec![0, 1], ranks: vec![1] }));
}

fn refusal(query: &[Vec<f32>], references: &[Vec<f32>], lists: &Lists, first_row: Option<usize>) -> Error {
    let simd = Simd::new(Level::Scalar).expect("always there");
    run((query, references), lists, Metric::SqEuclidean, first_row, simd, 2).expect_err("must be refused")
}

#[test]
fn invalid_arguments_are_refused() {
    let data = convert(&rows(Rows::Normal, 400, 3, &mut Random(3)), |x| x as f32);
    let good = Lists::new(&[0; 400], &[vec![1, 2]]);
    for first_row in [1, 400, usize::MAX] {
        let outside = Error::QueriesOutsideReference { first_query: first_row, queries: 400, references: 400 };
        assert_eq!(refusal(&data, &data, &good, Some(first_row)), outside);
    }
    for value in [f32::NAN, f32::INFINITY] {
        // Direct, filtered, and nothing to rank.
        for (queries, targets) in [(1, vec![3]), (100, vec![3]), (100, vec![])] {
            let lists = Lists::new(&vec![0; queries], &[targets]);
            let mut bad = data.clone();
            bad[311][2] = value;
            bad[399][0] = value;
            let error = refusal(&data[..queries], &bad, &lists, None);
            assert!(
                matches!(error, Error::NonFinite { argument: Argument::Reference, row: 311, column: 2, .. }),
                "{error}"
            );
            let error = refusal(&bad[311 - queries + 1..=311], &bad, &lists, None);
            assert!(matches!(error, Error::NonFinite { argument: Argument::Query, row, .. } if row == queries - 1));
        }
    }
}

#[test]
fn inconsistent_groups_are_refused() {
    let data = convert(&rows(Rows::Normal, 5, 3, &mut Random(3)), |x| x as f32);
    for (query_group, offsets, rows, text) in [
        (vec![0; 5], vec![], vec![], "group_offsets must begin with 0, got no entries"),
        (vec![0; 5], vec![1, 2], vec![0, 1], "group_offsets must begin with 0, got 1"),
        (vec![0; 5], vec![0, 2, 1, 2], vec![0, 1], "group_offsets must not fall, got 2 at position 1 and 1 behind it"),
        (vec![0; 5], vec![0, 3], vec![0, 1], "group_offsets must end with the number of group_rows, 2, got 3"),
        (vec![0; 5], vec![0, 1], vec![0, 1], "group_offsets must end with the number of group_rows, 2, got 1"),
        (vec![0; 4], vec![0, 1], vec![0], "query_group must have one entry for each of the 5 queries, got 4 entries"),
        (
            vec![0, 0, 1, 0, 0],
            vec![0, 1],
            vec![0],
            "query_group must name groups from 0 to below 1, got 1 at position 2",
        ),
        (
            vec![0, -1, 0, 0, 0],
            vec![0, 1],
            vec![0],
            "query_group must name groups from 0 to below 1, got -1 at position 1",
        ),
        (vec![0; 5], vec![0, 1, 2], vec![0, 5], "group_rows must name rows from 0 to below 5, got 5 at position 1"),
        (
            vec![0; 5],
            vec![0, 2],
            vec![i64::MIN, 5],
            &format!("group_rows must name rows from 0 to below 5, got {} at position 0", i64::MIN),
        ),
        (
            vec![0; 5],
            vec![0, 1, 4],
            vec![2, 2, 1, 2],
            "group_rows must name a row once in a group, got 2 at position 3 again in group 1",
        ),
    ] {
        let lists = Lists { query_group, offsets, rows };
        assert_eq!(refusal(&data, &data, &lists, None).to_string(), *text);
    }
}

#[test]
fn a_cancelled_search_stops_and_a_finished_one_has_full_progress() {
    let data: Vec<f32> = (0..4000 * 8).map(|i| (i % 97) as f32).collect();
    let matrix = MatrixRef::new(&data, 4000, 8, Argument::Query).expect("good");
    let simd = Simd::new(Level::Scalar).expect("always there");
    let threads = NonZero::<usize>::MIN;
    let options = RankOptions { metric: Metric::Cosine, exclude: SelfRule::From(0), simd, threads };
    for targets in [3, 300] {
        let lists = Lists::new(&[0; 4000], &[(0..targets).collect()]);
        let search = RankSearch::new(matrix, matrix, lists.groups(), options).expect("good");
        let monitor = Monitor::new();
        search.run(&monitor).expect("good");
        assert_eq!(monitor.fraction(), 1.0);
        monitor.cancel();
        assert_eq!(search.run(&monitor), Err(Error::Cancelled));
    }
}
