//! Values of pairs by position: at every level the same bytes as a search returns for the two rows.

use std::num::NonZero;
use std::slice::from_ref;

use exactknn_core::{
    Argument, Element, Error, Level, MatrixRef, Metric, Monitor, Output, Pairwise, PairwiseOptions, PoolHandle, Simd,
    bf16, f16, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Rows, Type, any_metric, convert, dims, levels, rows, types};

fn run<E: Element>(
    query: &[Vec<E>],
    references: &[Vec<E>],
    metric: Metric,
    simd: Simd,
    threads: usize,
) -> Result<Vec<E::Output>, Error> {
    let (q, r) = (query.concat(), references.concat());
    let dim = |rows: &[Vec<E>]| rows.first().map_or(3, Vec::len);
    let query = MatrixRef::new(&q, query.len(), dim(query), Argument::Query)?;
    let references = MatrixRef::new(&r, references.len(), dim(references), Argument::Reference)?;
    let threads = NonZero::new(threads).expect("positive");
    let pairs = Pairwise::new(query, references, PairwiseOptions { metric, simd, threads })?;
    PoolHandle::get(threads)?.pool().install(|| pairs.run(&Monitor::new()))
}

/// Debug output is unique for the bits of a float, including the sign of zero.
fn bits<T: Output>(values: &[T]) -> Vec<String> {
    values.iter().map(|value| format!("{value:?}")).collect()
}

fn check<E: Element>(query: &[Vec<E>], references: &[Vec<E>], metric: Metric) {
    let truth: Vec<E::Output> = query
        .iter()
        .zip(references)
        .flat_map(|(q, r)| oracle::knn(metric, from_ref(q), from_ref(r), 1, false).values)
        .collect();
    for simd in levels() {
        for threads in [1, 3] {
            let found = run(query, references, metric, simd, threads).expect("good rows");
            assert_eq!(bits(&found), bits(&truth), "{metric:?}, {:?}, {threads} threads", simd.level());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_level_equals_the_oracle(
        seed: u64,
        kind in 0..KINDS.len(),
        dim in dims(),
        pairs in 1usize..40,
        metric in any_metric(),
        element in types(),
    ) {
        let mut random = Random(seed);
        let (query, references) = (rows(KINDS[kind], pairs, dim, &mut random), rows(KINDS[kind], pairs, dim, &mut random));
        match element {
            Type::F32 => check(&convert(&query, |x| x as f32), &convert(&references, |x| x as f32), metric),
            Type::F64 => check(&query, &references, metric),
            Type::F16 => {
                let to = |x: f64| f16::from_f64(x.clamp(-65504.0, 65504.0));
                check(&convert(&query, to), &convert(&references, to), metric);
            }
            Type::Bf16 => check(&convert(&query, bf16::from_f64), &convert(&references, bf16::from_f64), metric),
        }
    }
}

#[test]
fn many_pairs_are_shared_among_threads() {
    let (query, references) =
        (rows(Rows::Normal, 5000, 40, &mut Random(1)), rows(Rows::Normal, 5000, 40, &mut Random(2)));
    check(&convert(&query, |x| x as f32), &convert(&references, |x| x as f32), Metric::NormalizedEuclidean);
}

#[test]
fn no_pairs_have_no_values() {
    assert_eq!(run::<f32>(&[], &[], Metric::Cosine, Simd::new(Level::Scalar).expect("always there"), 2), Ok(vec![]));
}

#[test]
fn invalid_arguments_are_refused() {
    let simd = Simd::new(Level::Scalar).expect("always there");
    let refusal = |q: &[Vec<f32>], r: &[Vec<f32>]| run(q, r, Metric::Cosine, simd, 2).expect_err("must be refused");
    let data = convert(&rows(Rows::Normal, 3000, 5, &mut Random(3)), |x| x as f32);
    assert_eq!(refusal(&data, &data[..9]), Error::RowsMismatch { query: 3000, reference: 9 });
    let narrow = convert(&rows(Rows::Normal, 3000, 4, &mut Random(3)), |x| x as f32);
    assert_eq!(refusal(&data, &narrow), Error::DimensionMismatch { query: 5, reference: 4 });
    let mut bad = data.clone();
    bad[2311][2] = f32::NAN;
    bad[2999][0] = f32::INFINITY;
    assert!(matches!(refusal(&bad, &data), Error::NonFinite { argument: Argument::Query, row: 2311, column: 2, .. }));
    assert!(matches!(
        refusal(&data, &bad),
        Error::NonFinite { argument: Argument::Reference, row: 2311, column: 2, .. }
    ));
}

#[test]
fn a_cancelled_call_stops_and_a_finished_one_has_full_progress() {
    let data = vec![0.5f32; 3000 * 8];
    let matrix = MatrixRef::new(&data, 3000, 8, Argument::Query).expect("good");
    let simd = Simd::new(Level::Scalar).expect("always there");
    let options = PairwiseOptions { metric: Metric::Cosine, simd, threads: NonZero::<usize>::MIN };
    let pairs = Pairwise::new(matrix, matrix, options).expect("good");
    let monitor = Monitor::new();
    assert_eq!(pairs.run(&monitor).expect("good"), vec![0.0; 3000]);
    assert_eq!(monitor.fraction(), 1.0);
    monitor.cancel();
    assert_eq!(pairs.run(&monitor), Err(Error::Cancelled));
}
