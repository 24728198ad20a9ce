//! An index, compared with a plain list of rows and the oracle at every level: same rows, same bytes, after any sequence of
//! adding, removing, saving and loading.

use std::fs;
use std::num::NonZero;
use std::path::PathBuf;

use exactknn_core::saved::{Saved, Stored};
use exactknn_core::{
    Argument, Element, Error, Index, MatrixRef, Metric, Monitor, Options, PoolHandle, QueryRef, RadiusOptions,
    RowOrder, SelfRule, Simd, bf16, f16, oracle,
};
use proptest::prelude::*;

use crate::common::{KINDS, Random, Type, affordable, any_metric, convert, levels, rows, types};

const THREADS: NonZero<usize> = NonZero::new(2).expect("positive");

/// A file that is removed at the end of the test.
pub(crate) struct Temporary(pub(crate) PathBuf);

impl Temporary {
    pub(crate) fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("exactknn-index-{}-{name}", std::process::id())))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// An index, and its expected rows.
pub(crate) struct Pair<E: Element + Stored> {
    pub(crate) index: Index<E>,
    rows: Vec<Vec<E>>,
}

impl<E: Element + Stored> Pair<E> {
    pub(crate) fn new(dim: usize, metric: Metric) -> Self {
        Self { index: Index::new(dim, metric).expect("columns").sealed_at(64), rows: Vec::new() }
    }

    pub(crate) fn add(&mut self, rows: &[Vec<E>], simd: Simd) {
        let numbers = rows.concat();
        let matrix =
            MatrixRef::new(&numbers, rows.len(), self.index.dim(), Argument::Reference).expect("a good matrix");
        let pool = PoolHandle::get(THREADS).expect("threads");
        pool.pool().install(|| self.index.add(matrix, simd, 2, &Monitor::new())).expect("good rows");
        self.rows.extend_from_slice(rows);
    }

    fn remove(&mut self, mask: &[bool]) {
        self.index.remove(mask, &Monitor::new()).expect("a good mask");
        let mut places = mask.iter();
        self.rows.retain(|_| !places.next().expect("a place for each row"));
    }

    /// Search for the k nearest and by radius, with queries of the rows' type and widened.
    fn check(&self, queries_as_rows: &[Vec<E>], k: usize, exclude_self: bool, simd: Simd)
    where
        E::Output: Into<f64>,
    {
        let query = queries_as_rows;
        assert_eq!(self.index.rows(), self.rows.len());
        let exclude_self = exclude_self && query.len() <= self.rows.len();
        let k = k.min(self.rows.len().saturating_sub(usize::from(exclude_self)));
        let (metric, dim) = (self.index.metric(), self.index.dim());
        let narrow = query.concat();
        let mut scratch = Vec::new();
        let wide: Vec<E::Wide> = query.iter().flat_map(|row| E::widen(row, &mut scratch).to_vec()).collect();
        let queries = [
            QueryRef::Same(MatrixRef::new(&narrow, query.len(), dim, Argument::Query).expect("a good matrix")),
            QueryRef::Wide(MatrixRef::new(&wide, query.len(), dim, Argument::Query).expect("a good matrix")),
        ];
        let truth = oracle::knn(metric, query, &self.rows, k, exclude_self);
        let radius = truth.values.last().map_or(0.5, |&value| value.into());
        let snapshot = self.index.snapshot();
        for query in queries {
            let options = Options { k, metric, exclude: exclude_self.into(), simd, threads: THREADS };
            let found = snapshot.search(query, options, &Monitor::new()).expect("a good search");
            assert_eq!(format!("{found:?}"), format!("{truth:?}"), "{:?} {metric:?} k {k}", simd.level());
            if !radius.is_finite() {
                continue;
            }
            for order in [RowOrder::Value, RowOrder::Row] {
                for values in [true, false] {
                    let options = RadiusOptions {
                        radius,
                        metric,
                        exclude: exclude_self.into(),
                        from_row: 0,
                        values,
                        order,
                        simd,
                        threads: THREADS,
                    };
                    let found = snapshot.radius(query, options, &Monitor::new()).expect("a good search");
                    let mut wanted = oracle::radius(
                        metric,
                        queries_as_rows,
                        &self.rows,
                        radius,
                        exclude_self,
                        order == RowOrder::Row,
                    );
                    if !values {
                        wanted.values.clear();
                    }
                    assert_eq!(format!("{found:?}"), format!("{wanted:?}"), "{:?} {metric:?} {order:?}", simd.level());
                }
            }
        }
    }
}

/// One history of an index at every level, saved at one and loaded at the next.
pub(crate) fn history<E: Element + Stored>(all: &[Vec<E>], metric: Metric, k: usize, exclude_self: bool, seed: u64)
where
    E::Output: Into<f64>,
{
    let dim = all[0].len();
    let levels = levels();
    for (l, &simd) in levels.iter().enumerate() {
        let mut random = Random(seed);
        let mut pair = Pair::new(dim, metric);
        let file = Temporary::new(&format!("{seed:x}-{l}"));
        let mut rest = all;
        while !rest.is_empty() {
            let more;
            (more, rest) = rest.split_at((1 + random.below(180)).min(rest.len()));
            pair.add(more, simd);
            if random.below(3) == 0 {
                let one_in = 2 + random.below(9);
                let mask: Vec<bool> = pair.rows.iter().map(|_| random.below(one_in) == 0).collect();
                pair.remove(&mask);
            }
            if random.below(3) == 0 {
                let other = levels[(l + 1) % levels.len()];
                pair.index.save(&file.0, simd, 2, &Monitor::new()).expect("a good file");
                let saved = Saved::open(&file.0).expect("a good file");
                pair.index = Index::load(&saved).expect("a good file").sealed_at(64);
                // With kernels whose codes are in the file, and with others.
                pair.check(&all[..3], k, false, other);
            }
        }
        let query: Vec<Vec<E>> = if exclude_self {
            pair.rows.iter().take(all.len() / 4).cloned().collect()
        } else {
            all.iter().step_by(1 + all.len() / 20).cloned().collect()
        };
        pair.check(&query, k, exclude_self, simd);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_gives_the_oracles_bytes(
        seed: u64,
        kind in 0..KINDS.len(),
        dim in 1usize..40,
        count in 1usize..900,
        k in 0usize..20,
        metric in any_metric(),
        element in types(),
        exclude_self: bool,
    ) {
        let mut random = Random(seed);
        let all = rows(KINDS[kind], affordable(count, metric), dim, &mut random);
        match element {
            Type::F32 => history(&convert(&all, |x| x as f32), metric, k, exclude_self, seed),
            Type::F64 => history(&all, metric, k, exclude_self, seed),
            Type::F16 => {
                let to = |x: f64| f16::from_f64(x.clamp(-65504.0, 65504.0));
                history(&convert(&all, to), metric, k, exclude_self, seed);
            }
            Type::Bf16 => history(&convert(&all, bf16::from_f64), metric, k, exclude_self, seed),
        }
    }
}

/// A damaged byte is an error when it is used, or has no effect.
#[test]
fn a_flipped_byte_gives_no_wrong_result() {
    let mut random = Random(7);
    let all = convert(&rows(KINDS[0], 3000, 24, &mut random), |x| x as f32);
    for simd in levels() {
        let mut pair = Pair::new(24, Metric::SqEuclidean);
        pair.add(&all[..2000], simd);
        pair.add(&all[2000..2990], simd);
        pair.add(&all[2990..], simd);
        let file = Temporary::new(&format!("flip-{:?}", simd.level()));
        pair.index.save(&file.0, simd, 2, &Monitor::new()).expect("a good file");
        let good = fs::read(&file.0).expect("our file");
        let query: Vec<Vec<f32>> = all.iter().step_by(300).cloned().collect();
        let numbers = query.concat();
        let query = QueryRef::Same(MatrixRef::new(&numbers, query.len(), 24, Argument::Query).expect("a good matrix"));
        let options = Options { k: 5, metric: Metric::SqEuclidean, exclude: SelfRule::None, simd, threads: THREADS };
        let search = |bytes: &[u8]| {
            fs::write(&file.0, bytes).expect("our file");
            let index = Index::<f32>::load(&Saved::open(&file.0)?)?;
            index.snapshot().search(query, options, &Monitor::new())
        };
        let truth = search(&good).expect("a good file");
        let mut found = 0;
        for _ in 0..60 {
            let mut bytes = good.clone();
            bytes[random.below(good.len())] ^= 1 << random.below(8);
            match search(&bytes) {
                Ok(neighbours) => assert_eq!(neighbours, truth, "a wrong result"),
                Err(error) => {
                    found += 1;
                    assert!(matches!(error, Error::BadFile { .. }), "{error}");
                }
            }
        }
        assert!(found > 10, "{found} of 60: the result depends on a good part of the file");
    }
}

/// Mapped rows and codes do not count as memory of the index, also after they have been used.
#[test]
fn mapped_rows_and_codes_do_not_count_as_memory() {
    let mut random = Random(11);
    let all = convert(&rows(KINDS[0], 2000, 32, &mut random), |x| x as f32);
    for simd in levels() {
        let mut pair = Pair::new(32, Metric::SqEuclidean);
        pair.add(&all, simd);
        assert!(pair.index.bytes() > 2000 * 32 * 5, "rows and codes");
        let file = Temporary::new(&format!("bytes-{:?}", simd.level()));
        pair.index.save(&file.0, simd, 2, &Monitor::new()).expect("a good file");
        pair.index = Index::load(&Saved::open(&file.0).expect("a good file")).expect("a good file");
        assert_eq!(pair.index.bytes(), 0, "nothing has been used");
        pair.check(&all[..50], 3, false, simd);
        let bytes = pair.index.bytes();
        assert!((2000 * 8..2000 * 32).contains(&bytes), "{bytes}: offset and scale of each row, but no codes");
    }
}

/// A segment that grew row by row has no unused capacity once it is sealed.
#[test]
fn a_sealed_segment_has_no_spare_capacity() {
    // A metric without a filter, so that no panels are made.
    let metric = Metric::minkowski(0.5).expect("above 0");
    let mut pair = Pair::new(3, metric);
    pair.add(&vec![vec![0.5f32; 3]; 3], levels()[0]);
    for row in 3..64u8 {
        pair.add(&[vec![f32::from(row); 3]], levels()[0]);
    }
    assert_eq!(pair.index.bytes(), 64 * 3 * 4);
}

/// A cancelled addition leaves the index unchanged.
#[test]
fn a_cancelled_addition_adds_nothing() {
    let numbers = [0.5f32; 200];
    for count in [10, 100] {
        let index = Index::new(2, Metric::SqEuclidean).expect("columns").sealed_at(64);
        let rows = MatrixRef::new(&numbers[..2 * count], count, 2, Argument::Reference).expect("a good matrix");
        let monitor = Monitor::new();
        monitor.cancel();
        assert_eq!(index.add(rows, levels()[0], 1, &monitor), Err(Error::Cancelled));
        assert_eq!(index.rows(), 0);
    }
}

/// A search during changes returns the results of one state of the index.
#[test]
fn searches_are_isolated_from_changes() {
    let simd = *levels().last().expect("a level");
    let mut random = Random(3);
    let all = convert(&rows(KINDS[0], 1200, 8, &mut random), |x| x as f32);
    let mut pair = Pair::new(8, Metric::SqEuclidean);
    pair.add(&all[..600], simd);
    let before = pair.index.snapshot();
    let query = MatrixRef::new(&all[0], 1, 8, Argument::Query).expect("a good matrix");
    let options = Options { k: 3, metric: Metric::SqEuclidean, exclude: SelfRule::None, simd, threads: THREADS };
    let old = before.search(query.into(), options, &Monitor::new()).expect("a good search");
    std::thread::scope(|scope| {
        let searching = scope.spawn(|| {
            for _ in 0..200 {
                let found = before.search(query.into(), options, &Monitor::new()).expect("a good search");
                assert_eq!(found, old);
                let now = pair.index.snapshot().search(query.into(), options, &Monitor::new()).expect("a good search");
                assert!(now.values[0] == 0.0 && now.rows[0] < 2, "the row itself stays");
            }
        });
        for step in 0..40 {
            let numbers = all[600 + step * 10..][..10].concat();
            let rows = MatrixRef::new(&numbers, 10, 8, Argument::Reference).expect("a good matrix");
            pair.index.add(rows, simd, 1, &Monitor::new()).expect("good rows");
            let count = pair.index.rows();
            let mask: Vec<bool> = (0..count).map(|row| row > 0 && row % 97 == step).collect();
            pair.index.remove(&mask, &Monitor::new()).expect("a good mask");
        }
        searching.join().expect("no wrong result");
    });
}

/// The errors of an index.
#[test]
fn errors_name_the_argument() {
    let simd = levels()[0];
    assert!(matches!(Index::<f32>::new(0, Metric::Euclidean), Err(Error::NoColumns(_))));
    let mut pair = Pair::new(2, Metric::Euclidean);
    pair.add(&[vec![1.0f32, 2.0], vec![3.0, 4.0]], simd);
    let rows = MatrixRef::new(&[1.0f32, 2.0, 3.0], 1, 3, Argument::Reference).expect("a good matrix");
    let refused = pair.index.add(rows, simd, 1, &Monitor::new());
    assert!(matches!(refused, Err(Error::DimensionMismatch { .. })));
    let rows = MatrixRef::new(&[1.0f32, 2.0, 3.0, f32::NAN], 2, 2, Argument::Reference).expect("a good matrix");
    let refused = pair.index.add(rows, simd, 1, &Monitor::new());
    assert!(matches!(refused, Err(Error::NonFinite { argument: Argument::Reference, row: 1, column: 1, .. })));
    assert!(matches!(pair.index.remove(&[true], &Monitor::new()), Err(Error::BadArray { argument: "mask", .. })));
    assert!(matches!(pair.index.copy(1, Some(3), &Monitor::new()), Err(Error::BadArray { argument: "rows", .. })));
    assert_eq!(pair.index.copy(1, Some(2), &Monitor::new()).expect("a row"), [3.0, 4.0]);
    assert_eq!(pair.index.copy(1, None, &Monitor::new()).expect("the last row"), [3.0, 4.0]);
    let query = MatrixRef::new(&[1.0f32, 2.0], 1, 2, Argument::Query).expect("a good matrix");
    let options = Options { k: 3, metric: Metric::Euclidean, exclude: SelfRule::None, simd, threads: THREADS };
    let refused = pair.index.snapshot().search(query.into(), options, &Monitor::new());
    assert_eq!(refused, Err(Error::KTooLarge { k: 3, references: 2 }));
    pair.index.reset();
    assert_eq!(pair.index.rows(), 0);
    let none = pair.index.snapshot().search(query.into(), Options { k: 0, ..options }, &Monitor::new());
    assert!(none.expect("nothing to find").rows.is_empty());
}
