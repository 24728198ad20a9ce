//! Interrupts at any place, without a clock: a monitor cancels at a chosen poll, and work between two polls is bounded by
//! counting them.

use std::fmt::Debug;
use std::num::NonZero;

use exactknn_core::{
    Argument, Error, Groups, Index, MatrixRef, Metric, Monitor, Options, RadiusOptions, RadiusSearch, RankOptions,
    RankSearch, Result, RowOrder, Search, SelfRule, Simd,
};

use crate::common::{Random, Rows, convert, levels, rows};

const THREADS: NonZero<usize> = NonZero::<usize>::MIN.saturating_add(1);

/// Elements between two polls of a copy or a sort, at most.
const POLLED: usize = 1 << 18;

/// Calls of each kind that are interrupted.
const MOMENTS: u64 = 100;

fn best() -> Simd {
    *levels().last().expect("the scalar level")
}

fn numbers(count: usize, dim: usize) -> Vec<f32> {
    convert(&rows(Rows::Normal, count, dim, &mut Random(7)), |x| x as f32).concat()
}

fn matrix(numbers: &[f32], dim: usize, argument: Argument) -> MatrixRef<'_, f32> {
    MatrixRef::new(numbers, numbers.len() / dim, dim, argument).expect("whole rows")
}

/// Interrupt `call` at moments spread over all of its polls. Each ends it at once, and the next call is not affected.
/// Returns the number of polls of a whole call.
fn interrupted<T: PartialEq + Debug>(call: impl Fn(&Monitor) -> Result<T>) -> u64 {
    let monitor = Monitor::cancelling_at(u64::MAX);
    let whole = call(&monitor).expect("no interrupt");
    let polls = monitor.polls();
    assert!(polls > 0, "never polled");
    for moment in 0..MOMENTS.min(polls) {
        let poll = 1 + moment * polls / MOMENTS.min(polls);
        let monitor = Monitor::cancelling_at(poll);
        assert_eq!(call(&monitor).err(), Some(Error::Cancelled), "poll {poll} of {polls}");
        // Tasks that have begun poll once more each.
        assert!(monitor.polls() < poll + 64, "{} polls after the one that cancels", monitor.polls() - poll);
    }
    assert_eq!(call(&Monitor::new()), Ok(whole));
    polls
}

#[test]
fn searches_end_at_every_poll() {
    let (dim, metric, exclude, simd, threads) = (8, Metric::Euclidean, SelfRule::None, best(), THREADS);
    let data = numbers(6000, dim);
    let some = 2500;
    let reference = || matrix(&data[..some * dim], dim, Argument::Reference);
    for queries in [1, 20, 300] {
        let query = || matrix(&data[..queries * dim], dim, Argument::Query);
        for k in [1, 100, some] {
            let options = Options { k, metric, exclude, simd, threads };
            interrupted(|monitor| Search::new(query(), reference(), options).expect("good").run(monitor));
        }
        for order in [RowOrder::Value, RowOrder::Row] {
            let options =
                RadiusOptions { radius: 2.0, metric, exclude, values: true, from_row: 0, order, simd, threads };
            interrupted(|monitor| RadiusSearch::new(query(), reference(), options).expect("good").run(monitor));
        }
        let (group, rows) = (vec![0; queries], (0..500).collect::<Vec<i64>>());
        let groups = Groups { query_group: &group, offsets: &[0, 500], rows: &rows };
        let options = RankOptions { metric, exclude, simd, threads };
        interrupted(|monitor| RankSearch::new(query(), reference(), groups, options).expect("good").run(monitor));
    }
    // Among themselves: symmetric tiles, and the upper triangle.
    let exclude = SelfRule::From(0);
    let (query, reference) = (|| matrix(&data, dim, Argument::Query), || matrix(&data, dim, Argument::Reference));
    let options = Options { k: 3, metric, exclude, simd, threads };
    interrupted(|monitor| Search::new(query(), reference(), options).expect("good").run(monitor));
    let order = RowOrder::Row;
    let options = RadiusOptions { radius: 1.0, metric, exclude, values: false, from_row: 0, order, simd, threads };
    interrupted(|monitor| RadiusSearch::new(query(), reference(), options).expect("good").run(monitor));
}

#[test]
fn an_interrupted_change_is_none() {
    let (dim, simd) = (16, best());
    let data = numbers(20_000, dim);
    let index = || {
        let index = Index::<f32>::new(dim, Metric::Euclidean).expect("columns").sealed_at(5000);
        index.add(matrix(&data, dim, Argument::Reference), simd, 2, &Monitor::new()).expect("memory");
        index
    };
    let mask: Vec<bool> = (0..20_000).map(|row| row % 3 == 0).collect();
    let removed = |monitor: &Monitor| {
        let index = index();
        let changed = index.remove(&mask, monitor);
        let rows = index.copy(0, None, &Monitor::new()).expect("memory");
        assert_eq!(rows.len() == data.len(), changed.is_err(), "all or nothing");
        changed.map(|()| rows)
    };
    assert!(interrupted(removed) >= (data.len() / POLLED) as u64);
    let added = |monitor: &Monitor| {
        let index = index();
        let changed = index.add(matrix(&data, dim, Argument::Reference), simd, 2, monitor);
        assert_eq!(index.rows(), if changed.is_ok() { 40_000 } else { 20_000 }, "all or nothing");
        changed
    };
    interrupted(added);
    let index = index();
    assert!(interrupted(|monitor| index.copy(0, None, monitor)) >= (data.len() / POLLED) as u64);
}

/// Sorting all neighbours of one query, and joining long lists, poll too.
#[test]
fn work_between_polls_is_bounded() {
    let (dim, metric, exclude, simd) = (1, Metric::Euclidean, SelfRule::None, best());
    let data = numbers(1 << 20, dim);
    let reference = || matrix(&data, dim, Argument::Reference);
    let query = || matrix(&data[..1], dim, Argument::Query);
    let monitor = Monitor::cancelling_at(u64::MAX);
    let options = Options { k: 1 << 20, metric, exclude, simd, threads: NonZero::<usize>::MIN };
    Search::new(query(), reference(), options).expect("good").run(&monitor).expect("memory");
    // Counting, at least two passes of the sort, and the output.
    assert!(monitor.polls() >= 4 * (data.len() / POLLED) as u64, "{}", monitor.polls());
    let monitor = Monitor::cancelling_at(u64::MAX);
    let options = RadiusOptions {
        radius: f64::MAX,
        metric,
        exclude,
        values: true,
        from_row: 0,
        order: RowOrder::Row,
        simd,
        threads: NonZero::<usize>::MIN,
    };
    let found = RadiusSearch::new(query(), reference(), options).expect("good").run(&monitor).expect("memory");
    assert_eq!(found.rows.len(), data.len());
    // Rows and values are copied.
    assert!(monitor.polls() >= 2 * (data.len() / POLLED) as u64, "{}", monitor.polls());
}
