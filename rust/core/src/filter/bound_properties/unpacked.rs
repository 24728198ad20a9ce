//! Property tests of the thresholds of unpacked rows: a threshold computed from any row rejects no row that ranks at or
//! before it.

use proptest::prelude::*;

use super::{matrix, row};
use crate::arch::UNPACKED_LANES;
use crate::arch::kernel::{CandidateLists, MAX_RUN};
use crate::arch::level::{Level, Simd};
use crate::exact::{Prepared, Widened, score};
use crate::filter::unpacked::{MOST_ROWS, Panel};
use crate::matrix::{Element, MatrixRef, Output};
use crate::metric::{Geometry, Metric};
use crate::order::Neighbour;

/// The rows that a panel reports for each query, with thresholds from the value of row `made_from` in `ranks`.
fn reported<E: Element>(
    simd: Simd,
    metric: Metric,
    prepared: &[Prepared],
    ranks: &[Vec<Neighbour>],
    made_from: usize,
    refs: MatrixRef<'_, E>,
) -> Vec<Vec<u32>> {
    let mut panel = Panel::new(metric, prepared).expect("memory");
    for (lane, (query, ranks)) in prepared.iter().zip(ranks).enumerate() {
        let (keys, terms) = Panel::terms(metric, query);
        let bound = keys.bound(<E::Output as Output>::UNIT_ROUNDOFF);
        panel.reject_below(lane, terms, bound.reject_below(ranks[made_from].ranked_value(metric)));
    }
    let mut candidates = CandidateLists::new(UNPACKED_LANES, MOST_ROWS / MAX_RUN).expect("memory");
    panel.scan(simd, &refs, 0, refs.rows(), &mut Widened::new(), &mut candidates);
    (0..prepared.len()).map(|lane| candidates.take(lane).0.to_vec()).collect()
}

fn ranks<E: Element>(simd: Simd, metric: Metric, query: &Prepared, refs: MatrixRef<'_, E>) -> Vec<Neighbour> {
    let all: Vec<u32> = (0..refs.rows() as u32).collect();
    let mut values = Vec::new();
    score(simd, query, refs, &all, &mut Widened::new(), &mut values);
    all.iter().zip(values).map(|(&row, value)| Neighbour::new::<E::Output>(metric, value, row)).collect()
}

/// The metrics with unpacked keys.
fn metrics() -> Vec<Metric> {
    Metric::ALL.into_iter().filter(|metric| metric.geometry() != Geometry::Lp).collect()
}

/// No row that ranks at or before row `made_from` is rejected by the threshold of that row.
pub(super) fn check_thresholds<E: Element>(
    metric: Metric,
    query: MatrixRef<'_, E>,
    refs: MatrixRef<'_, E>,
) -> Result<(), TestCaseError> {
    if metric.geometry() == Geometry::Lp {
        return Ok(());
    }
    let prepared: Vec<Prepared> = (0..query.rows()).map(|i| Prepared::new(metric, query.row(i))).collect();
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let ranks: Vec<_> = prepared.iter().map(|query| ranks(simd, metric, query, refs)).collect();
        for made_from in 0..refs.rows() {
            // Fewer queries have more lanes each: every width has its turn.
            let count = [UNPACKED_LANES, 1, 2, 4, 8][made_from % 5].min(prepared.len());
            let reported = reported(simd, metric, &prepared[..count], &ranks, made_from, refs);
            for (reported, ranks) in reported.iter().zip(&ranks) {
                for rank in ranks.iter().filter(|rank| !rank.is_behind(ranks[made_from])) {
                    prop_assert!(
                        reported.contains(&rank.row()),
                        "{:?}: row {} ranks up to row {made_from} and is rejected",
                        simd.level(),
                        rank.row()
                    );
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 50, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_threshold_rejects_a_neighbour(
        dim in prop_oneof![1usize..=130, Just(2048)],
        kinds in prop::collection::vec(any::<u8>(), 2..40),
        seeds in prop::collection::vec(-2.0f32..2.0, 5..90),
        metric in prop::sample::select(metrics()),
        same_kind: bool,
    ) {
        let data: Vec<f32> = kinds
            .iter()
            .enumerate()
            .flat_map(|(i, &kind)| row(if same_kind { kinds[0] } else { kind }, dim, &seeds[i % (seeds.len() / 2)..]))
            .collect();
        let queries = kinds.len().min(UNPACKED_LANES) * dim;
        check_thresholds(metric, matrix(&data[..queries], dim), matrix(&data, dim))?;
    }
}

/// The thresholds are also tight: on ordinary data hardly more rows reach them than rank before them.
#[test]
fn thresholds_reject_ordinary_rows() {
    let data: Vec<f32> = (0..300 * 64).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    let (query, refs) = (matrix(&data[..16 * 64], 64), matrix(&data, 64));
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        for metric in metrics() {
            let prepared: Vec<Prepared> = (0..16).map(|i| Prepared::new(metric, query.row(i))).collect();
            let ranks: Vec<_> = prepared.iter().map(|query| ranks(simd, metric, query, refs)).collect();
            let reported = reported(simd, metric, &prepared, &ranks, 100, refs);
            for (reported, ranks) in reported.iter().zip(&ranks) {
                let count = ranks.iter().filter(|rank| !rank.is_behind(ranks[100])).count();
                assert!(reported.len() <= count + 8, "{metric:?}: {} reported, {count} count", reported.len());
            }
        }
    }
}
