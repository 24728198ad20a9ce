//! Few queries and rows as they were passed, written once over the vectors of an instruction set.
//!
//! ```text
//! one step of sixteen lanes      width 1      q0 q1 q2 q3 .. q15       one column of sixteen queries
//!                                width 4      q0 q0 q0 q0 q1 q1 ..     four columns of four queries
//!                                width 16     q0 q0 q0 q0 q0 q0 ..     sixteen columns of one query
//! the row's columns, repeated    ────────>    sums ──add the lanes of a query──> keys >= thresholds? ──> one bit a query
//! ```
//!
//! Few queries would leave most lanes idle if each had one: two queries then take as long as sixteen. With as many columns
//! as fit, the time follows the number of queries, down to the time of reading the rows. Loading a few numbers into all
//! lanes again and again is one instruction, as loading one number is.

use crate::arch::generic::Vector;
use crate::arch::kernel::{UNPACKED_LANES, UnpackedQueries};

/// [`unpacked_over`](crate::arch::unpacked_over) for `ROWS` rows, the sixteen lanes in `PARTS` vectors. `PARTS * ROWS` sums
/// must fit in the registers.
#[inline(always)]
pub(super) fn over<V: Vector, const PARTS: usize, const ROWS: usize, const PRODUCTS: bool>(
    vector: V,
    queries: &UnpackedQueries,
    rows: [&[f32]; ROWS],
    norms: [f32; ROWS],
) -> [u32; ROWS] {
    match queries.width {
        1 => over_of_width::<V, PARTS, ROWS, 1, PRODUCTS>(vector, queries, rows, norms),
        2 => over_of_width::<V, PARTS, ROWS, 2, PRODUCTS>(vector, queries, rows, norms),
        4 => over_of_width::<V, PARTS, ROWS, 4, PRODUCTS>(vector, queries, rows, norms),
        8 => over_of_width::<V, PARTS, ROWS, 8, PRODUCTS>(vector, queries, rows, norms),
        _ => over_of_width::<V, PARTS, ROWS, UNPACKED_LANES, PRODUCTS>(vector, queries, rows, norms),
    }
}

#[inline(always)]
fn over_of_width<V: Vector, const PARTS: usize, const ROWS: usize, const WIDTH: usize, const PRODUCTS: bool>(
    vector: V,
    queries: &UnpackedQueries,
    rows: [&[f32]; ROWS],
    norms: [f32; ROWS],
) -> [u32; ROWS] {
    const { assert!(PARTS * V::LANES == UNPACKED_LANES) };
    let whole = rows[0].len() / WIDTH;
    let (columns, rest) = queries.columns.split_at(whole);
    // Slices of one length, so that one bounds check serves all rows.
    let steps = rows.map(|row| &row.as_chunks::<WIDTH>().0[..whole]);
    let mut sums = [[vector.splat(0.0); PARTS]; ROWS];
    for (s, column) in columns.iter().enumerate() {
        for r in 0..ROWS {
            sums[r] = add_step::<V, PARTS, WIDTH, PRODUCTS>(vector, column, &steps[r][s], sums[r]);
        }
    }
    if let [column] = rest {
        // The last columns, followed by zeros on both sides.
        for r in 0..ROWS {
            let (mut padded, rest) = ([0.0; WIDTH], &rows[r][whole * WIDTH..]);
            padded[..rest.len()].copy_from_slice(rest);
            sums[r] = add_step::<V, PARTS, WIDTH, PRODUCTS>(vector, column, &padded, sums[r]);
        }
    }
    let mut over = [0; ROWS];
    for r in 0..ROWS {
        let keys = sums_of_queries::<V, PARTS, WIDTH>(vector, sums[r]);
        for part in 0..PARTS {
            let fixed = vector.load(&queries.fixed[part * V::LANES..]);
            let threshold = if PRODUCTS {
                vector.mul_add(vector.load(&queries.slope[part * V::LANES..]), vector.splat(norms[r]), fixed)
            } else {
                fixed
            };
            // A key that is not finite is proved to be below no threshold.
            let bits = vector.not_less(keys[part], threshold) | vector.not_less(vector.splat(f32::MIN), keys[part]);
            over[r] |= bits << (part * V::LANES);
        }
        over[r] &= queries.first_lanes;
    }
    over
}

/// Add the terms of `WIDTH` columns of a row to its sums.
#[inline(always)]
fn add_step<V: Vector, const PARTS: usize, const WIDTH: usize, const PRODUCTS: bool>(
    vector: V,
    column: &[f32; UNPACKED_LANES],
    row: &[f32; WIDTH],
    mut sums: [V::Floats; PARTS],
) -> [V::Floats; PARTS] {
    for part in 0..PARTS {
        let query = vector.load(&column[part * V::LANES..]);
        let x =
            if WIDTH > V::LANES { vector.load(&row[part * V::LANES % WIDTH..]) } else { vector.repeat::<WIDTH>(row) };
        sums[part] = if PRODUCTS {
            vector.mul_add(query, x, sums[part])
        } else {
            let difference = vector.sub(query, x);
            vector.neg_mul_add(difference, difference, sums[part])
        };
    }
    sums
}

/// The sum over the lanes of each query, in all of them.
#[inline(always)]
fn sums_of_queries<V: Vector, const PARTS: usize, const WIDTH: usize>(
    vector: V,
    mut sums: [V::Floats; PARTS],
) -> [V::Floats; PARTS] {
    for part in 0..PARTS {
        sums[part] = vector.sum_groups::<WIDTH>(sums[part]);
    }
    // Queries wider than a vector.
    let mut reach = 1;
    while reach * V::LANES < WIDTH {
        let before = sums;
        for part in 0..PARTS {
            sums[part] = vector.add(before[part], before[part ^ reach]);
        }
        reach *= 2;
    }
    sums
}

#[cfg(test)]
mod tests {
    use crate::arch::kernel::{UNPACKED_LANES, UNPACKED_ROWS, UnpackedQueries};
    use crate::arch::level::{Level, Simd};
    use crate::arch::unpacked_over;

    /// Whole numbers, whose sums are exact in any order.
    fn number(at: usize, column: usize) -> f32 {
        ((at * 31 + column * 17) % 23) as f32 - 11.0
    }

    fn key<const PRODUCTS: bool>(query: usize, row: usize, dim: usize) -> f32 {
        let term = |column| {
            let (q, r) = (number(query, column), number(row + 100, column));
            if PRODUCTS { q * r } else { -(q - r) * (q - r) }
        };
        (0..dim).map(term).sum()
    }

    /// `fixed` and `slope` make the threshold of each query for a row.
    fn queries(
        width: usize,
        dim: usize,
        fixed: impl Fn(usize) -> f32,
        slope: impl Fn(usize) -> f32,
    ) -> UnpackedQueries {
        let mut columns = vec![[0.0; UNPACKED_LANES]; dim.div_ceil(width)];
        for column in 0..dim {
            for query in 0..UNPACKED_LANES / width {
                columns[column / width][query * width + column % width] = number(query, column);
            }
        }
        let first_lanes = (0..UNPACKED_LANES).step_by(width).map(|lane| 1 << lane).sum();
        let fixed = std::array::from_fn(|lane| fixed(lane / width));
        let slope = std::array::from_fn(|lane| slope(lane / width));
        UnpackedQueries { width, columns, fixed, slope, first_lanes }
    }

    fn check<const PRODUCTS: bool>(simd: Simd, width: usize, dim: usize) {
        let rows: [Vec<f32>; UNPACKED_ROWS] =
            std::array::from_fn(|row| (0..dim).map(|column| number(row + 100, column)).collect());
        let rows = rows.each_ref().map(|row| &row[..]);
        for compared in 0..UNPACKED_ROWS {
            // A key equal to its threshold is reported, the next smaller one is not.
            let fixed = |query| key::<PRODUCTS>(query, compared, dim);
            let equal = unpacked_over::<PRODUCTS>(simd, &queries(width, dim, fixed, |_| 0.0), rows, [1.0; 4]);
            let above = |query| if PRODUCTS { fixed(query) - 1.0 } else { fixed(query) + 1.0 };
            // A slope counts for products only: here it adds 2 to the threshold.
            let norms = [4.0; UNPACKED_ROWS];
            let next = unpacked_over::<PRODUCTS>(simd, &queries(width, dim, above, |_| 0.5), rows, norms);
            for row in 0..UNPACKED_ROWS {
                for query in 0..UNPACKED_LANES / width {
                    let (key, wanted) = (key::<PRODUCTS>(query, row, dim), fixed(query));
                    let bit = |over: u32| over >> (query * width) & 1 == 1;
                    let case = (simd.level(), width, dim, row, query);
                    assert_eq!(bit(equal[row]), key >= wanted, "{case:?}");
                    assert_eq!(bit(next[row]), key > wanted, "{case:?}");
                }
                let others: u32 =
                    (0..UNPACKED_LANES as u32).filter(|lane| lane % width as u32 != 0).map(|l| 1 << l).sum();
                assert_eq!((equal[row] | next[row]) & others, 0, "one bit per query");
            }
        }
    }

    #[test]
    fn every_width_gives_the_key_of_every_query() {
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            for width in [1, 2, 4, 8, 16] {
                for dim in [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 50] {
                    check::<true>(simd, width, dim);
                    check::<false>(simd, width, dim);
                }
            }
        }
    }

    #[test]
    fn keys_that_are_not_finite_are_reported() {
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            for (width, bad) in
                [1, 2, 4, 8, 16].into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, f32::NAN])
            {
                let mut rows = [[1.0; 20]; UNPACKED_ROWS];
                // In a whole step, and among the last columns.
                (rows[1][0], rows[2][19]) = (bad, bad);
                let rows = rows.each_ref().map(|row| &row[..]);
                let queries = queries(width, 20, |_| f32::MAX, |_| 0.0);
                let over = unpacked_over::<false>(simd, &queries, rows, [1.0; UNPACKED_ROWS]);
                assert_eq!(over, [0, queries.first_lanes, queries.first_lanes, 0], "{:?} {width} {bad}", simd.level());
            }
        }
    }
}
