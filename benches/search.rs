//! Whole searches at every level, over the number of queries, references, columns and neighbours.
//!
//! `cargo bench -p exactknn-core`. Throughput is in multiply-adds.

use std::hint::black_box;
use std::num::NonZero;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use exactknn_core::{Argument, Level, MatrixRef, Metric, Monitor, Options, PoolHandle, Search, Simd};

/// Deterministic rows, roughly uniform in a cube.
fn rows(count: usize, dim: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..count * dim)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        })
        .collect()
}

fn searches(criterion: &mut Criterion) {
    let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let pool = PoolHandle::get(threads).expect("threads");
    let mut group = criterion.benchmark_group("knn");
    group.sample_size(10);
    for (queries, references, dim, k) in [
        (1, 32_768, 128, 10),
        (64, 32_768, 128, 10),
        (1024, 32_768, 128, 10),
        (1024, 32_768, 128, 100),
        (512, 8192, 768, 10),
    ] {
        let (q, r) = (rows(queries, dim, 1), rows(references, dim, 2));
        let query = MatrixRef::new(&q, queries, dim, Argument::Query).expect("a matrix");
        let reference = MatrixRef::new(&r, references, dim, Argument::Reference).expect("a matrix");
        group.throughput(Throughput::Elements((queries * references * dim) as u64));
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            let options = Options { k, metric: Metric::SqEuclidean, exclude_self: false, simd, threads };
            let search = Search::new(query, reference, options).expect("good arguments");
            let name = format!("{queries}x{references}x{dim} k{k}");
            group.bench_function(BenchmarkId::new(name, simd.level().name()), |bencher| {
                bencher.iter(|| pool.pool().install(|| black_box(search.run(&Monitor::new()).expect("an answer"))));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, searches);
criterion_main!(benches);
