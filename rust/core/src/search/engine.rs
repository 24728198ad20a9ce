//! Keys of a group of queries and a run of references: three engines behind one trait.
//!
//! ```text
//! Packed<K>   query panel of MR rows x panels of NR rows     kernel K of arch, int8 or float32 codes
//! Unpacked    1 to 16 queries x rows as passed, in float32   no packing: few queries
//! Direct      one query x rows as passed                     no keys: every row is a candidate
//! ```
//!
//! The three trade preparation for speed per pair. Packing reads all references once and then rejects most rows by a fraction
//! of a multiply-add per column, which pays for many queries, or for few if the panels are cached. Unpacked keys cost no
//! preparation, but a float32 pass over the rows. A direct scan has no key to compute, which pays for one query, for two
//! of float64 rows, and where a filter would reject too little.
//!
//! A [`Scanner`] serves all queries of a search; an [`Engine`] holds one chunk of them. Both are object-safe, so that the
//! loop nest is compiled once and not per kernel and question. A virtual call per run costs nothing measurable: a run is
//! thousands of multiply-adds at least.

use std::ops::Range;
use std::sync::Arc;

use super::references::Panels;
use super::{Context, plan};
use crate::arch::kernel::{CandidateLists, Microkernel, QueryPanel, Thresholds, Transposed, Visit};
use crate::arch::{UNPACKED_LANES, WithKernel};
use crate::error::{Argument, Error, Result};
use crate::exact::{Prepared, Widened};
use crate::filter::bound::KeyMap;
use crate::filter::panels::{FirstBad, KeyErrors, PackedQuery};
use crate::filter::unpacked::{MOST_ROWS, Panel, UnpackedTerms};
use crate::filter::{Filter, with_filter};
use crate::runtime::alloc::{try_collect, try_vec};

/// The purpose of encoded queries in [`Error::OutOfMemory`].
const PREPARED: &str = "prepared queries";

/// A filter, prepared for one source of references and shared by all threads.
pub(crate) trait Scanner: Sync {
    /// Rows of a unit, the smallest piece of the references that can be scanned: a panel, or one row.
    fn unit_rows(&self) -> usize;
    /// An engine for a chunk of queries.
    fn engine<'s>(&'s self, queries: &[u32], prepared: &[Prepared]) -> Result<Box<dyn Engine + 's>>;
    /// Whether engines accept floors for both sides of a pair.
    fn is_symmetric(&self) -> bool {
        false
    }
    /// Where rows that are not finite are reported; `None` if all rows are known to be finite.
    fn bad_rows(&self) -> Option<&FirstBad> {
        None
    }
}

/// A chunk of queries, encoded for one filter.
pub(crate) trait Engine {
    /// Most queries in a group: they are scanned together.
    fn lanes(&self) -> usize;
    /// Most units in a block, so that it stays in cache while all queries of the chunk scan it.
    fn block_units(&self) -> usize;
    /// Units of the first run of queries without a floor; doubled up to a whole block.
    fn warm_up_units(&self) -> usize;
    /// Candidate lists with room for a group and a block.
    fn lists(&self) -> Result<CandidateLists>;
    /// The relation of a query's keys to its values; `None` if this engine has no keys.
    fn key_map(&self, query: usize) -> Option<KeyMap>;
    /// The error bounds of a query's keys; `None` if candidates are reported without keys.
    fn errors(&self, query: usize) -> Option<KeyErrors<'_>>;
    /// Report every row of `units` whose exact key may reach the floor of a query, in ascending order. `floors` has one floor
    /// for each query from `first`. With `theirs`, `unit_rows` floors per unit, a row is also reported if the pair may reach
    /// the floor of the row as a query.
    fn scan(
        &mut self,
        first: usize,
        units: Range<usize>,
        visit: Visit,
        floors: &[f32],
        theirs: Option<&[f32]>,
        candidates: &mut CandidateLists,
    ) -> Result<()>;
}

/// Prepare `filter` for the references of a search. Packed filters pack all references here, or take them from the cache.
pub(crate) fn scanner<'a>(context: &'a Context<'a>, filter: Filter) -> Result<Box<dyn Scanner + 'a>> {
    match filter {
        Filter::Direct => Ok(Box::new(Direct::new(context))),
        Filter::Unpacked => Ok(Box::new(Unpacked(Direct::new(context)))),
        Filter::Float32 | Filter::Int8 => with_filter(context.simd, context.metric, filter, MakePacked { context }),
    }
}

/// [`Packed`] for the kernel of a level, a metric and a filter.
struct MakePacked<'a> {
    context: &'a Context<'a>,
}

impl<'a> WithKernel for MakePacked<'a> {
    type Output = Result<Box<dyn Scanner + 'a>>;

    fn run<K: Microkernel + 'static>(self, kernel: K) -> Self::Output {
        let Self { context } = self;
        let panels =
            context.source.panels::<K>(context.simd, context.metric, context.problem.threads, context.monitor)?;
        Ok(Box::new(Packed { context, kernel, panels }))
    }
}

/// All references as panels of kernel `K`; shared, since a cache may hold them too.
struct Packed<'a, K: Microkernel> {
    context: &'a Context<'a>,
    /// Holds the token that proves its instruction set.
    kernel: K,
    panels: Arc<Panels<K>>,
}

impl<K: Microkernel> Scanner for Packed<'_, K> {
    fn unit_rows(&self) -> usize {
        K::NR
    }

    fn engine<'s>(&'s self, queries: &[u32], _: &[Prepared]) -> Result<Box<dyn Engine + 's>> {
        let Panels { frame, packed } = &*self.panels;
        let query = PackedQuery::pack(self.context.simd, frame, self.context.query, queries)?;
        // In a self-search queries and references have the same numbers. The tile needs their offsets as references too.
        let own: &[u32] = if self.is_symmetric() { queries } else { &[] };
        let as_references = try_collect(own.iter().copied(), PREPARED)?;
        let scale2 = frame.scale2();
        Ok(Box::new(PackedEngine { scanner: self, packed, query, as_references, scale2 }))
    }

    fn is_symmetric(&self) -> bool {
        K::SCAN_SYMMETRIC.is_some()
    }
}

/// A chunk of queries as panels of `MR` rows. A panel stays in the first-level cache while it is scanned against a run of
/// reference panels.
struct PackedEngine<'s, K: Microkernel> {
    scanner: &'s Packed<'s, K>,
    packed: &'s crate::filter::panels::PackedReference<K>,
    query: PackedQuery<K>,
    /// The numbers of the queries, used as reference rows by symmetric tiles; empty if the kernel has none.
    as_references: Vec<u32>,
    /// The square of the frame's scale: keys are of scaled rows.
    scale2: f64,
}

impl<K: Microkernel> Engine for PackedEngine<'_, K> {
    fn lanes(&self) -> usize {
        K::MR
    }

    fn block_units(&self) -> usize {
        // By bytes: wide rows make large panels. At most `MAX_RUN`, for which the candidate lists have room.
        plan::block_panels(self.packed.panel_bytes())
    }

    fn warm_up_units(&self) -> usize {
        plan::WARM_UP_PANELS
    }

    fn lists(&self) -> Result<CandidateLists> {
        CandidateLists::new(K::MR, K::NR)
    }

    fn key_map(&self, query: usize) -> Option<KeyMap> {
        let context = self.scanner.context;
        // Keys are of centred rows: the shift of the query leads back to its values.
        let (shift, shift_size) = self.query.shifts[query];
        Some(KeyMap { metric: context.metric, dim: context.query.dim(), shift, shift_size, scale2: self.scale2 })
    }

    fn errors(&self, query: usize) -> Option<KeyErrors<'_>> {
        Some(self.packed.errors(self.query.terms[query]))
    }

    fn scan(
        &mut self,
        first: usize,
        units: Range<usize>,
        visit: Visit,
        floors: &[f32],
        theirs: Option<&[f32]>,
        candidates: &mut CandidateLists,
    ) -> Result<()> {
        let kernel = self.scanner.kernel;
        // Lanes without a query stay closed: their threshold is infinity, and the kernel may skip them.
        let mut thresholds = Thresholds::closed();
        for (m, floor) in floors.iter().enumerate() {
            thresholds.open(m, *floor, self.query.terms[first + m]);
        }
        let panel = QueryPanel { codes: self.query.panel(first / K::MR), thresholds: &thresholds };
        // Verifies the codes first, if they are mapped from a file.
        let run = self.packed.run(units.start, units.end, visit)?;
        match (theirs, K::SCAN_SYMMETRIC) {
            (None, _) => kernel.scan(&panel, &run, candidates),
            (Some(theirs), Some(scan_symmetric)) => {
                // The products of a tile are the same both ways; only offsets and floors are those of the other side.
                let mut transposed = Transposed::closed(theirs);
                for m in 0..floors.len() {
                    let (offset, terms) = self.packed.row(self.as_references[first + m] as usize);
                    transposed.open(m, offset, terms);
                }
                scan_symmetric(kernel, &panel, &run, &transposed, candidates);
            }
            (Some(_), None) => return Err(Error::Panic("this kernel has no symmetric tiles".into())),
        }
        Ok(())
    }
}

/// Unpacked rows without a filter: each pair gets its float64 value.
struct Direct<'a> {
    context: &'a Context<'a>,
    /// The lowest row of any thread that is not finite.
    bad: FirstBad,
}

impl<'a> Direct<'a> {
    fn new(context: &'a Context<'a>) -> Self {
        Self { context, bad: FirstBad::new() }
    }

    /// Rows of a block: in cache for all queries of the chunk, and at most the rows of one unpacked scan.
    fn block(&self) -> usize {
        plan::block_rows(self.context.source.rows.row_bytes()).min(MOST_ROWS)
    }
}

impl Scanner for Direct<'_> {
    fn unit_rows(&self) -> usize {
        1
    }

    fn engine<'s>(&'s self, _: &[u32], _: &[Prepared]) -> Result<Box<dyn Engine + 's>> {
        Ok(Box::new(DirectEngine(self)))
    }

    fn bad_rows(&self) -> Option<&FirstBad> {
        // Rows of an index were checked when they were added.
        (!self.context.source.finite).then_some(&self.bad)
    }
}

/// No state: without keys, an engine needs nothing from its queries.
struct DirectEngine<'s>(&'s Direct<'s>);

impl Engine for DirectEngine<'_> {
    fn lanes(&self) -> usize {
        // Every row is a candidate of every query, so scanning queries together would share nothing.
        1
    }

    fn block_units(&self) -> usize {
        self.0.block()
    }

    fn warm_up_units(&self) -> usize {
        // No threshold rejects anything here: short first runs would not pay.
        usize::MAX
    }

    fn lists(&self) -> Result<CandidateLists> {
        CandidateLists::of_rows(1, self.0.block())
    }

    fn key_map(&self, _: usize) -> Option<KeyMap> {
        None
    }

    fn errors(&self, _: usize) -> Option<KeyErrors<'_>> {
        None
    }

    fn scan(
        &mut self,
        _: usize,
        units: Range<usize>,
        _: Visit,
        _: &[f32],
        _: Option<&[f32]>,
        candidates: &mut CandidateLists,
    ) -> Result<()> {
        // Lists of rows, as from any engine: exclusion, prefetching and rescoring exist once, in the loop nest.
        candidates.extend(0, units.start as u32..units.end as u32);
        Ok(())
    }
}

/// Unpacked rows, filtered by float32 keys.
struct Unpacked<'a>(Direct<'a>);

impl Scanner for Unpacked<'_> {
    fn unit_rows(&self) -> usize {
        1
    }

    fn engine<'s>(&'s self, _: &[u32], prepared: &[Prepared]) -> Result<Box<dyn Engine + 's>> {
        let metric = self.0.context.metric;
        // The grouping of queries decides in which order the columns are added up; the bound holds for any.
        let chunks = prepared.chunks(UNPACKED_LANES);
        let mut panels = try_vec(chunks.len(), PREPARED)?;
        for queries in chunks {
            panels.push(Panel::new(metric, queries)?);
        }
        let terms = try_collect(prepared.iter().map(|query| Panel::terms(metric, query)), PREPARED)?;
        Ok(Box::new(UnpackedEngine { scanner: &self.0, panels, terms, wide: Widened::new() }))
    }

    fn bad_rows(&self) -> Option<&FirstBad> {
        self.0.bad_rows()
    }
}

/// A chunk of queries in panels of up to sixteen.
struct UnpackedEngine<'s> {
    scanner: &'s Direct<'s>,
    panels: Vec<Panel>,
    /// One per query: how its keys relate to values, and the terms of its thresholds.
    terms: Vec<(KeyMap, UnpackedTerms)>,
    /// Rows of half precision, widened.
    wide: Widened,
}

impl Engine for UnpackedEngine<'_> {
    fn lanes(&self) -> usize {
        UNPACKED_LANES
    }

    fn block_units(&self) -> usize {
        self.scanner.block()
    }

    fn warm_up_units(&self) -> usize {
        plan::WARM_UP_ROWS
    }

    fn lists(&self) -> Result<CandidateLists> {
        CandidateLists::of_rows(UNPACKED_LANES, self.scanner.block())
    }

    fn key_map(&self, query: usize) -> Option<KeyMap> {
        Some(self.terms[query].0)
    }

    fn errors(&self, _: usize) -> Option<KeyErrors<'_>> {
        // The error depends on the norm of each row and is part of its threshold, which is not reported.
        None
    }

    fn scan(
        &mut self,
        first: usize,
        units: Range<usize>,
        _: Visit,
        floors: &[f32],
        _: Option<&[f32]>,
        candidates: &mut CandidateLists,
    ) -> Result<()> {
        let context = self.scanner.context;
        // Groups are panels: `first` is a multiple of the lanes.
        let panel = &mut self.panels[first / UNPACKED_LANES];
        for (lane, floor) in floors.iter().enumerate() {
            panel.reject_below(lane, self.terms[first + lane].1, *floor);
        }
        // Before any row is read: the rows may be mapped from a damaged file.
        context.source.verify(units.clone())?;
        context.source.rows.make_room(&mut self.wide)?;
        panel.scan(context.simd, context.source.rows, units.start, units.end, &mut self.wide, candidates);
        Ok(())
    }
}

/// `outcome`, or an error if the scan has found a row that is not finite. Such a row was dropped, so a query may have too few
/// neighbours: that failure is due to the row. Other failures come first, since not all rows were seen then.
pub(crate) fn check_bad_rows<T>(context: &Context<'_>, scanner: &dyn Scanner, outcome: Result<T>) -> Result<T> {
    let Some(bad) = scanner.bad_rows() else { return outcome };
    // A cancelled scan has not seen all rows. Otherwise a chunk of queries has, so the first bad row is known.
    context.monitor.check()?;
    match outcome {
        Ok(_) | Err(Error::Panic(_)) => bad.check(context.source.rows, Argument::Reference).and(outcome),
        failed => failed,
    }
}
