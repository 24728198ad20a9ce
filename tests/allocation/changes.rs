//! Changes of an index, its file, and searches of it.

use std::fs;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use exactknn_core::saved::Saved;
use exactknn_core::{
    Argument, Error, Groups, Index, Metric, Monitor, Options, QueryRef, RadiusOptions, RankOptions, Result, RowOrder,
    SelfRule,
};

use crate::failing::{TURN, each_failure, with_failures};
use crate::{THREADS, best, data, matrix, sweep};

const DIM: usize = 24;

/// The segments of the index are sealed at this number of rows.
const SEALED: usize = 300;

/// An index of a sealed and a growing segment.
fn index() -> Index<f32> {
    let index = Index::new(DIM, Metric::Euclidean).expect("columns").sealed_at(SEALED);
    for (seed, count) in [(1, SEALED + 50), (2, 100)] {
        add(&index, seed, count).expect("memory");
    }
    index
}

fn add(index: &Index<f32>, seed: u64, count: usize) -> Result<()> {
    let rows = data(seed, count, DIM, |x| x as f32);
    index.add(matrix(&rows, DIM, Argument::Reference), best(), 2, &Monitor::new())
}

/// Everything that a search of the index can see.
fn answers(index: &Index<f32>) -> (Vec<f32>, String) {
    let query = data(9, 40, DIM, |x| x as f32);
    let query = QueryRef::Wide(matrix(&query, DIM, Argument::Query));
    let found = index.snapshot().search(query, options(5), &Monitor::new()).expect("memory");
    (index.copy(0, None, &Monitor::new()).expect("memory"), format!("{found:?}"))
}

fn options(k: usize) -> Options<'static> {
    Options { k, metric: Metric::Euclidean, exclude: SelfRule::None, simd: best(), threads: THREADS }
}

/// Make each allocation of `change` fail in turn: after a failure the index is as before, and the change with memory works.
fn sweep_change(change: impl Fn(&Index<f32>) -> Result<()>) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = index();
    let before = answers(&changed);
    change(&changed).expect("memory");
    let after = answers(&changed);
    assert_ne!(before.0, after.0);
    let tried = each_failure(|granted, refused| {
        let index = index();
        let (result, failed) = with_failures(granted, refused, || change(&index));
        match result {
            Err(Error::OutOfMemory { .. }) => {
                assert!(failed);
                assert_eq!(answers(&index), before);
                change(&index).expect("memory");
            }
            // Panels that cannot be made in advance are made by a search.
            result => assert_eq!(result, Ok(())),
        }
        assert_eq!(answers(&index), after);
        failed
    });
    assert!(tried >= 2, "an input too small to fail");
}

#[test]
fn rows_are_added_or_not() {
    let (few, many) = (data(5, 60, DIM, |x| x as f32), data(6, 2 * SEALED, DIM, |x| x as f32));
    // To a growing segment, which stays so or is sealed, and as a segment of their own.
    for rows in [few.clone(), few.repeat(4), many] {
        let rows = matrix(&rows, DIM, Argument::Reference);
        for threads in [1, 2] {
            sweep_change(|index| index.add(rows, best(), threads, &Monitor::new()));
        }
    }
}

#[test]
fn rows_are_removed_or_not() {
    let rows = SEALED + 150;
    for kept in [3, 2] {
        let mask: Vec<bool> = (0..rows).map(|row| row % kept == 0).collect();
        sweep_change(|index| index.remove(&mask, &Monitor::new()));
    }
}

#[test]
fn an_index_is_searched() {
    let index = index();
    let numbers = data(9, 60, DIM, |x| x as f32);
    let query = || QueryRef::Wide(matrix(&numbers, DIM, Argument::Query));
    sweep(|monitor| index.snapshot().search(query(), options(150), monitor));
    let (metric, exclude, simd, threads) = (Metric::Euclidean, SelfRule::None, best(), THREADS);
    let (values, order) = (true, RowOrder::Value);
    let within = RadiusOptions { radius: 6.0, metric, exclude, values, from_row: 0, order, simd, threads };
    sweep(|monitor| index.snapshot().radius(query(), within, monitor));
    let (group, rows) = (vec![0; 60], (0..400).collect::<Vec<i64>>());
    let groups = Groups { query_group: &group, offsets: &[0, 400], rows: &rows };
    let ranks = RankOptions { metric, exclude, simd, threads };
    sweep(|monitor| index.snapshot().ranks(query(), &groups, ranks, monitor));
    sweep(|monitor| {
        // Several allocations, so that a few failures are tried.
        Ok([index.copy(0, Some(100), monitor)?, index.copy(100, Some(200), monitor)?, index.copy(200, None, monitor)?])
    });
}

/// A folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("exactknn-allocation-{process}-{count}"));
        fs::create_dir(&path).expect("a folder of our own");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_file_is_replaced_or_not() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Folder::new();
    let path = folder.0.join("rows.index");
    let (small, large) = (Index::<f32>::new(3, Metric::Cosine).expect("columns"), index());
    large.save(&path, best(), 2, &Monitor::new()).expect("memory");
    let wanted = fs::read(&path).expect("a file");
    small.save(&path, best(), 1, &Monitor::new()).expect("memory");
    let old = fs::read(&path).expect("a file");
    let tried = each_failure(|granted, refused| {
        let (result, failed) = with_failures(granted, refused, || large.save(&path, best(), 2, &Monitor::new()));
        let there = fs::read(&path).expect("a file");
        match result {
            Err(Error::OutOfMemory { .. }) => assert!(failed && there == old),
            result => assert!(result == Ok(()) && there == wanted),
        }
        assert_eq!(fs::read_dir(&folder.0).expect("our own folder").count(), 1, "a temporary file is left");
        fs::write(&path, &old).expect("a good folder");
        failed
    });
    assert!(tried >= 2, "an input too small to fail");
}

#[test]
fn a_file_is_loaded_or_not() {
    let folder = Folder::new();
    let path = folder.0.join("rows.index");
    index().save(&path, best(), 2, &Monitor::new()).expect("memory");
    let numbers = data(9, 60, DIM, |x| x as f32);
    let query = || QueryRef::Wide(matrix(&numbers, DIM, Argument::Query));
    for mapped in [true, false] {
        sweep(|monitor| {
            let saved = if mapped { Saved::open(&path)? } else { Saved::read(&path, monitor)? };
            let index = Index::<f32>::load(&saved)?;
            index.snapshot().search(query(), options(150), monitor)
        });
    }
}
