//! Keys of a group of queries with some references: the three ways to form them, behind one trait.
//!
//! ```text
//! Packed<K>   query panel of MR rows x panels of NR rows     kernel K of arch, int8 or float32 codes
//! Unpacked    sixteen queries x rows as passed, in float32   no packing: few queries
//! Direct      one query x rows as passed                     no keys: every row is a candidate
//! ```
//!
//! A [`Scanner`] is ready for all queries of a search; an [`Engine`] holds one chunk of them. Both are object-safe: the loop
//! nest calls them once for a run of rows, and is compiled once.

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

/// A filter made ready for one source of references.
pub(crate) trait Scanner: Sync {
    /// References of a unit: a panel, or one row.
    fn unit_rows(&self) -> usize;
    /// The engine for some queries.
    fn engine<'s>(&'s self, queries: &[u32], prepared: &[Prepared]) -> Result<Box<dyn Engine + 's>>;
    /// Whether engines take thresholds of both sides of a pair.
    fn is_symmetric(&self) -> bool {
        false
    }
    /// Where rows that are not finite are reported; `None` where all rows are known to be finite.
    fn bad_rows(&self) -> Option<&FirstBad> {
        None
    }
}

/// A chunk of queries ready to meet references.
pub(crate) trait Engine {
    /// Queries that are scanned together, at most.
    fn lanes(&self) -> usize;
    /// Units of a block: they stay in cache while all queries of the chunk meet them.
    fn block_units(&self) -> usize;
    /// Units of the first scan of queries that have no threshold yet; doubled until a block is scanned at once.
    fn warm_up_units(&self) -> usize;
    /// Lists for the candidates of a group.
    fn lists(&self) -> CandidateLists;
    /// How keys of a query relate to its values; `None` where there are no keys.
    fn key_map(&self, query: usize) -> Option<KeyMap>;
    /// How far keys of a query may be from the truth; `None` where candidates have no keys.
    fn errors(&self, query: usize) -> Option<KeyErrors<'_>>;
    /// Report every row of `units` whose key may reach the floor of a query. Queries are `first` and those after it, one
    /// floor each. With `theirs` a row is also reported where the query may reach the floor of the row, `unit_rows` floors a
    /// unit.
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

/// Make `filter` ready for the references of a search.
pub(crate) fn scanner<'a>(context: &'a Context<'a>, filter: Filter) -> Result<Box<dyn Scanner + 'a>> {
    match filter {
        Filter::Direct => Ok(Box::new(Direct::new(context))),
        Filter::Unpacked => Ok(Box::new(Unpacked(Direct::new(context)))),
        Filter::Float32 | Filter::Int8 => with_filter(context.simd, context.metric, filter, MakePacked { context }),
    }
}

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

/// All references as panels of kernel `K`.
struct Packed<'a, K: Microkernel> {
    context: &'a Context<'a>,
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
        let as_references = if self.is_symmetric() { queries.to_vec() } else { Vec::new() };
        let scale2 = frame.scale2();
        Ok(Box::new(PackedEngine { scanner: self, packed, query, as_references, scale2 }))
    }

    fn is_symmetric(&self) -> bool {
        K::SCAN_SYMMETRIC.is_some()
    }
}

struct PackedEngine<'s, K: Microkernel> {
    scanner: &'s Packed<'s, K>,
    packed: &'s crate::filter::panels::PackedReference<K>,
    query: PackedQuery<K>,
    /// The numbers of the queries, which are those of the same rows as references in a self-search; empty otherwise.
    as_references: Vec<u32>,
    scale2: f64,
}

impl<K: Microkernel> Engine for PackedEngine<'_, K> {
    fn lanes(&self) -> usize {
        K::MR
    }

    fn block_units(&self) -> usize {
        plan::block_panels(self.packed.panel_bytes())
    }

    fn warm_up_units(&self) -> usize {
        plan::WARM_UP_PANELS
    }

    fn lists(&self) -> CandidateLists {
        CandidateLists::new(K::MR, K::NR)
    }

    fn key_map(&self, query: usize) -> Option<KeyMap> {
        let context = self.scanner.context;
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
        let mut thresholds = Thresholds::closed();
        for (m, floor) in floors.iter().enumerate() {
            thresholds.open(m, *floor, self.query.terms[first + m]);
        }
        let panel = QueryPanel { codes: self.query.panel(first / K::MR), thresholds: &thresholds };
        let run = self.packed.run(units.start, units.end, visit)?;
        match (theirs, K::SCAN_SYMMETRIC) {
            (None, _) => kernel.scan(&panel, &run, candidates),
            (Some(theirs), Some(scan_symmetric)) => {
                let mut transposed = Transposed::closed(theirs);
                for m in 0..floors.len() {
                    let (offset, terms) = self.packed.row(self.as_references[first + m] as usize);
                    transposed.open(m, offset, terms);
                }
                scan_symmetric(kernel, &panel, &run, &transposed, candidates);
            }
            (Some(_), None) => return Err(Error::Panic("a kernel without symmetric tiles was asked for one".into())),
        }
        Ok(())
    }
}

/// Rows as they lie, each scored in float64.
struct Direct<'a> {
    context: &'a Context<'a>,
    bad: FirstBad,
}

impl<'a> Direct<'a> {
    fn new(context: &'a Context<'a>) -> Self {
        Self { context, bad: FirstBad::new() }
    }

    /// Rows of a block.
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
        (!self.context.source.finite).then_some(&self.bad)
    }
}

struct DirectEngine<'s>(&'s Direct<'s>);

impl Engine for DirectEngine<'_> {
    fn lanes(&self) -> usize {
        1
    }

    fn block_units(&self) -> usize {
        self.0.block()
    }

    fn warm_up_units(&self) -> usize {
        usize::MAX
    }

    fn lists(&self) -> CandidateLists {
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
        candidates.extend(0, units.start as u32..units.end as u32);
        Ok(())
    }
}

/// Rows as they lie, filtered in float32.
struct Unpacked<'a>(Direct<'a>);

impl Scanner for Unpacked<'_> {
    fn unit_rows(&self) -> usize {
        1
    }

    fn engine<'s>(&'s self, _: &[u32], prepared: &[Prepared]) -> Result<Box<dyn Engine + 's>> {
        let metric = self.0.context.metric;
        let panels = prepared.chunks(UNPACKED_LANES).map(|queries| Panel::new(metric, queries)).collect();
        let terms = prepared.iter().map(|query| Panel::terms(metric, query)).collect();
        Ok(Box::new(UnpackedEngine { scanner: &self.0, panels, terms, wide: Widened::new() }))
    }

    fn bad_rows(&self) -> Option<&FirstBad> {
        self.0.bad_rows()
    }
}

struct UnpackedEngine<'s> {
    scanner: &'s Direct<'s>,
    panels: Vec<Panel>,
    terms: Vec<(KeyMap, UnpackedTerms)>,
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

    fn lists(&self) -> CandidateLists {
        CandidateLists::of_rows(UNPACKED_LANES, self.scanner.block())
    }

    fn key_map(&self, query: usize) -> Option<KeyMap> {
        Some(self.terms[query].0)
    }

    fn errors(&self, _: usize) -> Option<KeyErrors<'_>> {
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
        let panel = &mut self.panels[first / UNPACKED_LANES];
        for (lane, floor) in floors.iter().enumerate() {
            panel.reject_below(lane, self.terms[first + lane].1, *floor);
        }
        context.source.verify(units.clone())?;
        panel.scan(context.simd, context.source.rows, units.start, units.end, &mut self.wide, candidates);
        Ok(())
    }
}

/// The outcome of a scan, unless a row was found not to be finite.
pub(crate) fn check_rows<T>(context: &Context<'_>, scanner: &dyn Scanner, outcome: Result<T>) -> Result<T> {
    let Some(bad) = scanner.bad_rows() else { return outcome };
    context.monitor.check()?;
    // A chunk of queries has met every row, so the first bad one is known now.
    bad.check(context.source.rows, Argument::Reference)?;
    outcome
}
