//! Searches of every question.

use exactknn_core::{
    Argument, BlockSearch, Groups, Metric, Options, Pairwise, PairwiseOptions, PanelCache, RadiusOptions, RadiusSearch,
    RankOptions, RankSearch, References, RowOrder, Search, SelfRule, f16,
};

use crate::{THREADS, best, data, matrix, sweep};

/// Columns of which one row, widened to float64, is above the size that may fail.
const WIDE: usize = 520;

fn options(k: usize, metric: Metric, exclude: SelfRule<'_>) -> Options<'_> {
    Options { k, metric, exclude, simd: best(), threads: THREADS }
}

#[test]
fn nearest_neighbours_by_each_metric() {
    let (query, reference) = (data(1, 40, WIDE, |x| x as f32), data(2, 300, WIDE, |x| x as f32));
    let (query, reference) = (matrix(&query, WIDE, Argument::Query), matrix(&reference, WIDE, Argument::Reference));
    for metric in [Metric::SqEuclidean, Metric::Cosine, Metric::InnerProduct, Metric::Cityblock] {
        let options = options(150, metric, SelfRule::None);
        sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
    }
}

#[test]
fn nearest_neighbours_by_minkowski() {
    let (query, reference) = (data(1, 35, WIDE, |x| x as f32), data(2, 200, WIDE, |x| x as f32));
    let (query, reference) = (matrix(&query, WIDE, Argument::Query), matrix(&reference, WIDE, Argument::Reference));
    let options = options(150, Metric::minkowski(3.0).expect("above 0"), SelfRule::None);
    sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
}

#[test]
fn nearest_neighbours_of_each_type() {
    let options = options(5, Metric::SqEuclidean, SelfRule::None);
    let (query, reference) = (data(1, 40, WIDE, f16::from_f64), data(2, 400, WIDE, f16::from_f64));
    let (query, reference) = (matrix(&query, WIDE, Argument::Query), matrix(&reference, WIDE, Argument::Reference));
    sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
    let (query, reference) = (data(1, 40, WIDE, |x| x), data(2, 400, WIDE, |x| x));
    let (query, reference) = (matrix(&query, WIDE, Argument::Query), matrix(&reference, WIDE, Argument::Reference));
    sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
}

/// Few queries are searched without panels, one or two without a filter; little work stays on the calling thread.
#[test]
fn nearest_neighbours_of_few_queries() {
    for (queries, references) in [(8, 4000), (1, 4000), (8, 100)] {
        let (query, reference) = (data(1, queries, WIDE, |x| x as f32), data(2, references, WIDE, |x| x as f32));
        let (query, reference) = (matrix(&query, WIDE, Argument::Query), matrix(&reference, WIDE, Argument::Reference));
        let options = options(80, Metric::SqEuclidean, SelfRule::None);
        sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
    }
}

/// All references, sorted by digits.
#[test]
fn all_neighbours() {
    for (queries, references, dim) in [(2, 6000, 1), (70, 3000, 8)] {
        let (query, reference) = (data(1, queries, dim, |x| x as f32), data(2, references, dim, |x| x as f32));
        let (query, reference) = (matrix(&query, dim, Argument::Query), matrix(&reference, dim, Argument::Reference));
        let options = options(references, Metric::Euclidean, SelfRule::None);
        sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
    }
}

/// Symmetric tiles need a few thousand rows.
#[test]
fn neighbours_within_one_set() {
    let rows = data(3, 4200, 24, |x| x as f32);
    let (query, reference) = (matrix(&rows, 24, Argument::Query), matrix(&rows, 24, Argument::Reference));
    let options = options(10, Metric::SqEuclidean, SelfRule::From(0));
    sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
}

/// Rows in two distant groups: eight bits separate only the groups, and the search steps down to float32.
#[test]
fn a_search_that_steps_down() {
    let far = |(i, x): (usize, f32)| if i % 32 == 0 { if i % 64 == 0 { 100.0 } else { -100.0 } } else { x };
    let rows: Vec<f32> = data(11, 2000, 32, |x| x as f32).into_iter().enumerate().map(far).collect();
    let (query, reference) = (matrix(&rows[..300 * 32], 32, Argument::Query), matrix(&rows, 32, Argument::Reference));
    let options = options(10, Metric::SqEuclidean, SelfRule::None);
    sweep(|monitor| Search::new(query, reference, options)?.run(monitor));
}

#[test]
fn a_panel_cache_that_could_not_be_filled() {
    let (query, reference) = (data(1, 300, 32, |x| x as f32), data(2, 2000, 32, |x| x as f32));
    let (query, reference) = (matrix(&query, 32, Argument::Query), matrix(&reference, 32, Argument::Reference));
    let options = options(10, Metric::Cosine, SelfRule::None);
    sweep(|monitor| {
        let cache = PanelCache::new(Metric::Cosine);
        let references = References::cached(reference, &cache);
        Search::new(query, references, options)?.run(monitor)?;
        Search::new(query, references, options)?.run(monitor)
    });
}

#[test]
fn rows_within_a_radius() {
    let (query, reference) = (data(1, 150, 16, |x| x as f32), data(2, 700, 16, |x| x as f32));
    let few = matrix(&query[..16 * 8], 16, Argument::Query);
    let (query, reference) = (matrix(&query, 16, Argument::Query), matrix(&reference, 16, Argument::Reference));
    for (values, order) in [(true, RowOrder::Value), (false, RowOrder::Row), (true, RowOrder::Row)] {
        for (query, exclude) in [(query, SelfRule::None), (reference, SelfRule::From(0)), (few, SelfRule::None)] {
            let (metric, simd, threads) = (Metric::SqEuclidean, best(), THREADS);
            let options = RadiusOptions { radius: 25.0, metric, exclude, values, from_row: 0, order, simd, threads };
            sweep(|monitor| RadiusSearch::new(query, reference, options)?.run(monitor));
        }
    }
}

#[test]
fn ranks_of_many_targets() {
    let (query, reference) = (data(1, 120, 64, |x| x as f32), data(2, 1500, 64, |x| x as f32));
    let (query, reference) = (matrix(&query, 64, Argument::Query), matrix(&reference, 64, Argument::Reference));
    for targets in [700, 3] {
        let rows: Vec<i64> = (0..targets).map(|i| i * 2).collect();
        let group = vec![0; query.rows()];
        let groups = Groups { query_group: &group, offsets: &[0, targets], rows: &rows };
        let options =
            RankOptions { metric: Metric::Euclidean, exclude: SelfRule::None, simd: best(), threads: THREADS };
        sweep(|monitor| RankSearch::new(query, reference, groups, options)?.run(monitor));
    }
}

#[test]
fn references_in_blocks() {
    let (query, reference) = (data(1, 90, 64, |x| x as f32), data(2, 1500, 64, |x| x as f32));
    let (query, blocks) = (matrix(&query, 64, Argument::Query), reference.chunks(64 * 500));
    let options = options(30, Metric::SqEuclidean, SelfRule::None);
    sweep(|monitor| {
        let mut search = BlockSearch::new(query, options)?;
        for block in blocks.clone() {
            search = search.with(query, matrix(block, 64, Argument::Reference), monitor)?;
        }
        let (ranks, rows) = search.state()?;
        let mut restored = BlockSearch::new(query, options)?;
        restored.restore(&ranks, &rows, search.rows())?;
        restored.result::<f32>()
    });
}

#[test]
fn pairs_by_position() {
    let options = PairwiseOptions { metric: Metric::Cosine, simd: best(), threads: THREADS };
    for (rows, dim) in [(1200, 600), (2500, 260)] {
        let (query, reference) = (data(1, rows, dim, |x| x as f32), data(2, rows, dim, |x| x as f32));
        let (query, reference) = (matrix(&query, dim, Argument::Query), matrix(&reference, dim, Argument::Reference));
        sweep(|monitor| Pairwise::new(query, reference, options)?.run(monitor));
    }
}
