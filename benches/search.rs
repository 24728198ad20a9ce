//! The microkernels alone, and whole searches over the number of queries, references, columns and neighbours, at every level of this processor.
//!
//! `cargo bench -p exactknn-core --bench search [-- NAME]`. Throughput is in multiply-adds. A group changes one size and
//! keeps the others, so that a line of a report shows what that size costs.

use std::hint::black_box;
use std::num::NonZero;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use exactknn_core::measure::{self, Codes};
use exactknn_core::{Argument, Level, MatrixRef, Metric, Monitor, Options, PoolHandle, Search, Simd};

/// Clusters that the rows lie around.
const CENTRES: usize = 512;

/// How far a row lies from its centre, where centres have coordinates within 0.5 of 0.
const SPREAD: f32 = 0.2;

/// One search; without queries the references among themselves.
#[derive(Clone, Copy)]
struct Work {
    queries: Option<usize>,
    references: usize,
    dim: usize,
    k: usize,
    metric: Metric,
}

/// Small enough for the scalar level to take its turn too.
const USUAL: Work = Work { queries: Some(512), references: 16_384, dim: 128, k: 10, metric: Metric::SqEuclidean };

/// Numbers within 0.5 of 0, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 40
    }

    fn next(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 24) as f32 - 0.5
    }
}

/// Rows around common centres, as embeddings lie: uniform rows in many columns are all equally far from each other.
fn rows(count: usize, dim: usize, seed: u64) -> Vec<f32> {
    let mut common = Numbers(dim as u64);
    let centres: Vec<f32> = (0..CENTRES * dim).map(|_| common.next()).collect();
    let mut own = Numbers(seed);
    let mut made = Vec::with_capacity(count * dim);
    for _ in 0..count {
        let centre = own.bits() as usize % CENTRES * dim;
        made.extend(centres[centre..centre + dim].iter().map(|c| c + 2.0 * SPREAD * own.next()));
    }
    made
}

/// The microkernels alone, one thread, on panels that stay in the second-level cache. Throughput is in operations.
fn tiles(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tile");
    for dim in [64, 128, 512, 768] {
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            for (codes, name) in [(Codes::Float32, "float32"), (Codes::Int8, "int8")] {
                if codes == Codes::Int8 && !measure::has_int8(simd) {
                    continue;
                }
                let mut call = measure::kernel(simd, codes, dim).expect("memory");
                group.throughput(Throughput::Elements(call() as u64));
                group.bench_function(BenchmarkId::new(format!("{name}-{}", simd.level().name()), dim), |bencher| {
                    bencher.iter(&mut call);
                });
            }
        }
    }
    group.finish();
}

/// Measure one search at every level.
fn measure_search(criterion: &mut Criterion, group: &str, parameter: &str, work: Work) {
    let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let pool = PoolHandle::get(threads).expect("threads");
    let r = rows(work.references, work.dim, 2);
    let q = work.queries.map(|count| rows(count, work.dim, 1));
    let reference = MatrixRef::new(&r, work.references, work.dim, Argument::Reference).expect("a matrix");
    let queries = work.queries.unwrap_or(work.references);
    let query = MatrixRef::new(q.as_ref().unwrap_or(&r), queries, work.dim, Argument::Query).expect("a matrix");
    let mut group = criterion.benchmark_group(group);
    group.sample_size(10);
    group.throughput(Throughput::Elements((queries * work.references * work.dim) as u64));
    for simd in Level::available().into_iter().filter_map(Simd::new) {
        let exclude_self = work.queries.is_none();
        let options = Options { k: work.k, metric: work.metric, exclude: exclude_self.into(), simd, threads };
        let search = Search::new(query, reference, options).expect("good arguments");
        group.bench_function(BenchmarkId::new(parameter, simd.level().name()), |bencher| {
            bencher.iter(|| pool.pool().install(|| black_box(search.run(&Monitor::new()).expect("an answer"))));
        });
    }
    group.finish();
}

fn queries(criterion: &mut Criterion) {
    for queries in [1, 8, 32, 256, 1024] {
        measure_search(criterion, "queries", &queries.to_string(), Work { queries: Some(queries), ..USUAL });
    }
}

fn references(criterion: &mut Criterion) {
    for references in [1024, 4096, 65_536] {
        measure_search(
            criterion,
            "references",
            &references.to_string(),
            Work { references, queries: Some(128), ..USUAL },
        );
    }
}

fn columns(criterion: &mut Criterion) {
    for dim in [3, 32, 128, 512, 768] {
        measure_search(criterion, "columns", &dim.to_string(), Work { queries: Some(256), dim, ..USUAL });
    }
}

fn neighbours(criterion: &mut Criterion) {
    for k in [1, 10, 100, 1000] {
        measure_search(criterion, "neighbours", &k.to_string(), Work { k, ..USUAL });
    }
    let all = Work { queries: None, references: 2048, dim: 64, k: 2047, ..USUAL };
    measure_search(criterion, "neighbours", "all of 2048", all);
}

fn metrics(criterion: &mut Criterion) {
    for metric in [Metric::SqEuclidean, Metric::Euclidean, Metric::Cosine, Metric::InnerProduct] {
        measure_search(criterion, "metrics", metric.name(), Work { queries: Some(256), metric, ..USUAL });
    }
}

fn against_itself(criterion: &mut Criterion) {
    for k in [1, 10, 100] {
        let work = Work { queries: None, references: 4096, k, ..USUAL };
        measure_search(criterion, "against itself", &k.to_string(), work);
    }
}

criterion_group!(benches, tiles, queries, references, columns, neighbours, metrics, against_itself);
criterion_main!(benches);
