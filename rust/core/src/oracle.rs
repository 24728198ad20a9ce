//! The oracle: every value by its definition, all rows sorted. Simple, slow, and independent of the rest of the crate.
//!
//! It repeats the order in which a float64 sum is computed, which is part of the contract, one column at a time.

use crate::matrix::{Element, Output};
use crate::metric::Metric;
use crate::metric::Power;
use crate::search::compressed_rows::Within;
use crate::search::knn::Neighbours;
use crate::search::ranks::Ranks;

fn sum(terms: impl Iterator<Item = f64>) -> f64 {
    let mut lanes = [0.0f64; 8];
    for (column, term) in terms.enumerate() {
        lanes[column % 8] += term;
    }
    let fours: Vec<f64> = (0..4).map(|l| lanes[l] + lanes[l + 4]).collect();
    (fours[0] + fours[2]) + (fours[1] + fours[3])
}

fn unit(row: &[f64]) -> Vec<f64> {
    let norm2 = sum(row.iter().map(|x| x * x));
    let inverse = if norm2 > 0.0 { 1.0 / norm2.sqrt() } else { 0.0 };
    row.iter().map(|x| x * inverse).collect()
}

/// `t^p` as specified in `exact/minkowski.rs`: products for multiples of 1/2 up to 64, else `libm`.
fn raised(t: f64, p: f64) -> f64 {
    if p > 64.0 || (2.0 * p).fract() != 0.0 {
        return libm::pow(t, p);
    }
    // t, t^2, t^4, ...: the squares for the binary digits of p, smallest first.
    let squares = std::iter::successors(Some(t), |square| Some(square * square));
    let digits = (0..7).map(|bit| (p as u32 >> bit) & 1 == 1);
    let whole = squares.zip(digits).filter(|(_, wanted)| *wanted).fold(1.0, |product, (square, _)| product * square);
    if p.fract() == 0.5 { whole * t.sqrt() } else { whole }
}

fn minkowski(q: &[f64], r: &[f64], power: Power) -> f64 {
    let p = power.get();
    let root = |sum: f64| match p {
        0.5 => sum * sum,
        3.0 => libm::cbrt(sum),
        4.0 => sum.sqrt().sqrt(),
        _ => libm::pow(sum, 1.0 / p),
    };
    let differences = || q.iter().zip(r).map(|(x, y)| (x - y).abs());
    let plain = sum(differences().map(|t| raised(t, p)));
    if (2f64.powi(-900)..=2f64.powi(1000)).contains(&plain) {
        return root(plain);
    }
    let most = differences().fold(0.0, f64::max);
    if most == 0.0 { 0.0 } else { most * root(sum(differences().map(|t| raised(t / most, p)))) }
}

/// The float64 value of a pair of rows whose squares are in the range of `f64`.
pub fn value(metric: Metric, q: &[f64], r: &[f64]) -> f64 {
    let squared = |q: &[f64], r: &[f64]| sum(q.iter().zip(r).map(|(x, y)| (x - y) * (x - y)));
    let dot = |q: &[f64], r: &[f64]| sum(q.iter().zip(r).map(|(x, y)| x * y));
    let cosine = || {
        let product = dot(q, q) * dot(r, r);
        if product > 0.0 { (dot(q, r) / product.sqrt()).clamp(-1.0, 1.0) } else { 0.0 }
    };
    match metric {
        Metric::SqEuclidean => squared(q, r),
        Metric::Euclidean => squared(q, r).sqrt(),
        Metric::NormalizedSqEuclidean => squared(&unit(q), &unit(r)),
        Metric::NormalizedEuclidean => squared(&unit(q), &unit(r)).sqrt(),
        Metric::Cosine => 1.0 - cosine(),
        Metric::CosineSimilarity => cosine(),
        Metric::InnerProduct => dot(q, r),
        Metric::Cityblock => sum(q.iter().zip(r).map(|(x, y)| (x - y).abs())),
        Metric::Chebyshev => q.iter().zip(r).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max),
        Metric::Minkowski(power) => minkowski(q, r, power),
    }
}

/// The `k` nearest neighbours of each query by definition; with `exclude_self` query `i` excludes row `i`.
pub fn knn<E: Element>(
    metric: Metric,
    query: &[Vec<E>],
    reference: &[Vec<E>],
    k: usize,
    exclude_self: bool,
) -> Neighbours<E::Output> {
    let widen = |row: &[E]| row.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
    let sign = if metric.largest_first() { -1.0 } else { 1.0 };
    let (mut values, mut rows) = (Vec::new(), Vec::new());
    for (i, q) in query.iter().enumerate() {
        let mut all: Vec<(f64, usize, f64)> = reference
            .iter()
            .enumerate()
            .filter(|(j, _)| !(exclude_self && i == *j))
            .map(|(j, r)| {
                let value = value(metric, &widen(q), &widen(r)) + 0.0;
                (sign * E::Output::ranked(value) + 0.0, j, value)
            })
            .collect();
        all.sort_by(|x, y| x.0.total_cmp(&y.0).then(x.1.cmp(&y.1)));
        for &(_, row, value) in &all[..k] {
            values.push(E::Output::round(value));
            rows.push(row as i64);
        }
    }
    Neighbours { values, rows }
}

/// All rows within `r` of each query by definition: rows whose rounded value is at most `r` (at least, for a similarity),
/// sorted by (value, row) or, with `by_row`, by row; with `exclude_self` query `i` excludes row `i`.
pub fn radius<E: Element>(
    metric: Metric,
    query: &[Vec<E>],
    reference: &[Vec<E>],
    r: f64,
    exclude_self: bool,
    by_row: bool,
) -> Within<E::Output>
where
    E::Output: Into<f64>,
{
    let mut within = Within { starts: vec![0], rows: Vec::new(), values: Vec::new() };
    for (i, q) in query.iter().enumerate() {
        // All neighbours of this query, sorted, including its own row.
        let all = knn(metric, std::slice::from_ref(q), reference, reference.len(), false);
        let mut found: Vec<(i64, E::Output)> = all
            .rows
            .into_iter()
            .zip(all.values)
            .filter(|&(row, _)| !(exclude_self && row == i as i64))
            .filter(|&(_, value)| if metric.largest_first() { value.into() >= r } else { value.into() <= r })
            .collect();
        if by_row {
            found.sort_by_key(|&(row, _)| row);
        }
        within.starts.push(within.starts[i] + found.len() as i64);
        for (row, value) in found {
            within.rows.push(row);
            within.values.push(value);
        }
    }
    within
}

/// The 1-based ranks of each query's target rows by definition: all references are sorted and the targets looked up. With
/// `first_row` query `i` is reference row `first_row + i`, which gets no rank and is not counted.
pub fn ranks<E: Element>(
    metric: Metric,
    query: &[Vec<E>],
    reference: &[Vec<E>],
    targets: &[Vec<usize>],
    first_row: Option<usize>,
) -> Ranks {
    let mut found = Ranks { starts: vec![0], ranks: Vec::new() };
    for (i, (q, targets)) in query.iter().zip(targets).enumerate() {
        let own = first_row.map(|first| (first + i) as i64);
        let all = knn(metric, std::slice::from_ref(q), reference, reference.len(), false);
        let others = all.rows.into_iter().filter(|row| Some(*row) != own);
        let ranked = others.zip(1..).filter(|(row, _)| targets.contains(&(*row as usize)));
        found.ranks.extend(ranked.map(|(_, rank)| rank));
        found.starts.push(found.ranks.len() as i64);
    }
    found
}
