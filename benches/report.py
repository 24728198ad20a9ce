"""The measurements as tables, a figure and a dated file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exactknn
from benches import workloads
from benches.data import CLUSTERS, commit, cores, cpu, versions

RECORDS = Path(__file__).parent / "record"
MIB = 1 << 20
# Named where they are installed.
OPTIONAL = (
    *("usearch", "hnswlib", "scikit-learn-intelex", "scann", "scalable-vs"),
    *("duckdb", "sqlite-vec", "lancedb", "milvus-lite"),
)
SAMPLE = 48  # queries whose answers are compared with float64


@dataclass
class Result:
    """What one library did with one work; every `over_ours` is its time over the time of exactknn in turns with it."""

    work: str
    queries: int
    peer: str
    runs: int
    median: float  # seconds
    minimum: float
    over_ours: float  # median over median
    over_ours_minimum: float  # minimum over minimum
    gops: float
    recall: float  # share of its neighbours that are no farther than the true k-th
    ids_differ: int  # entries of the sample with another row number than the truth
    ids_compared: int
    goal: float | None = None  # at least what `over_ours` should be


@dataclass
class Ours:
    """What only exactknn is asked: None where it was not measured, or the core does not tell."""

    work: str
    filter: str | None
    survivors: float | None  # float64 values formed, per query
    memory_added: int | None  # bytes
    memory_allowed: int


@dataclass
class Report:
    """One run of the command."""

    threads: int
    results: list[Result]
    ours: list[Ours]
    notes: list[str]  # what was skipped, and why
    product: float  # Gop/s of torch's float32 matrix product
    peaks: dict[str, float]  # Gop/s that the core measured, by kind of number
    kernels: list[str]  # the matrix kernels of the libraries
    tuned: list[str]  # the blocking of faiss at its best, by workload

    def text(self) -> str:
        """The whole text of a record: where and with what it was measured, then the tables."""
        built = exactknn.build_info()
        info = ", ".join(built[name] for name in ("profile", "target", "rustc") if name in built)
        libraries = versions("numpy", "faiss-cpu", "torch", "pytorch-metric-learning", "scikit-learn", *OPTIONAL)
        peaks = "".join(f"; peak of {kind} multiply-adds: {peak:,.0f} Gop/s" for kind, peak in self.peaks.items())
        lines = [
            f"- exactknn {exactknn.__version__}, commit {commit()}, level {exactknn.simd_level()} ({info})",
            f"- {cpu()}, {self.threads} of {cores()} cores",
            f"- {_python()}, {libraries}",
            f"- float32 matrix product by torch: {self.product:,.0f} Gop/s{peaks}",
            f"- clustered rows: float32, unit length, around {CLUSTERS:,} centres",
            f"- answers of {SAMPLE} queries of each work compared with float64",
            "- times over exactknn's are of medians, runs in turns: exactknn, the library, exactknn, the library ...",
            *(f"- {kernel}" for kernel in self.kernels),
            *(f"- {note}" for note in self.notes),
        ]
        parts = [("Times over exactknn's", self.summary()), ("exactknn", self.own_table())]
        parts += [("Times over the number of queries", self.curve_table()), ("All times", self.full_table())]
        tuned = "\n".join(f"- {line}" for line in self.tuned)
        parts += [("Blocking of faiss at its best, where it is not its own", tuned)]
        for title, table in parts:
            if table:
                lines += ["", f"## {title}", "", table]
        return "\n".join(lines)

    def named(self, *, curve: bool = False) -> dict[str, dict[str, Result]]:
        """The results by work and library, of the curve or of everything else."""
        found: dict[str, dict[str, Result]] = {}
        for result in self.results:
            if result.work.startswith(f"{workloads.CURVE}-") == curve:
                found.setdefault(result.work, {})[result.peer] = result
        return found

    def summary(self) -> str:
        """Return a table with one line per workload, one column per library."""
        named = self.named()
        peers = [name for name in workloads.SHOWN if any(name in several for several in named.values())]
        rows = []
        for work, several in named.items():
            ratios = [f"{several[peer].over_ours:.2f}x" if peer in several else "" for peer in peers]
            goals = [_goal(result) for result in several.values() if result.goal is not None]
            rows.append([work, _seconds(several[workloads.OURS].median), *ratios, "; ".join(goals)])
        return _markdown(["work", workloads.OURS, *peers, "at least"], rows)

    def own_table(self) -> str:
        """How exactknn did it."""
        named, rows = self.named(), []
        for ours in self.ours:
            if ours.work not in named:
                continue
            result = named[ours.work][workloads.OURS]
            added = "" if ours.memory_added is None else f"{ours.memory_added / MIB:,.0f} MiB"
            rows.append(
                [
                    ours.work,
                    _seconds(result.median),
                    f"{result.gops:,.0f}",
                    *(f"{result.gops / peak:.0%}" for peak in self.peaks.values()),
                    ours.filter or "",
                    "" if ours.survivors is None else f"{ours.survivors:,.1f}",
                    added,
                    added and f"{ours.memory_allowed / MIB:,.0f} MiB",
                ]
            )
        shares = [f"of the {kind} peak" for kind in self.peaks]
        return _markdown(
            ["work", "median", "Gop/s", *shares, "filter", "float64 values a query", "memory added", "may add"], rows
        )

    def curve_table(self) -> str:
        """Times over the number of queries, and each over the time of half as many."""
        rows, before = [], dict[str, float]()
        for several in self.named(curve=True).values():
            row = [f"{several[workloads.OURS].queries:,}"]
            for peer in (workloads.OURS, workloads.FAISS):
                seconds = several[peer].median if peer in several else None
                last = before.get(peer)
                row += [
                    "" if seconds is None else _seconds(seconds),
                    "" if seconds is None or last is None else f"{seconds / last:.2f}x",
                ]
                if seconds is not None:
                    before[peer] = seconds
            rows.append([*row, f"{several[workloads.FAISS].over_ours:.2f}x" if workloads.FAISS in several else ""])
        titles = ["queries", workloads.OURS, "over half as many", workloads.FAISS, "over half as many", "over exactknn"]
        return _markdown(titles, rows)

    def full_table(self) -> str:
        """Return a table with one line per library and workload."""
        rows = [
            [
                r.work if r.peer == workloads.OURS else "",
                r.peer,
                str(r.runs),
                _seconds(r.median),
                _seconds(r.minimum),
                f"{r.gops:,.0f}",
                f"{r.over_ours:.2f}x",
                f"{r.over_ours_minimum:.2f}x",
                f"{r.recall:.4f}",
                f"{r.ids_differ:,} of {r.ids_compared:,}",
            ]
            for r in self.results
        ]
        titles = ["work", "library", "runs", "median", "minimum", "Gop/s", "median over ours", "minimum over ours"]
        return _markdown([*titles, "recall by distance", "other ids"], rows)


def _python() -> str:
    import platform

    return f"{platform.python_implementation()} {platform.python_version()}"


def _goal(result: Result) -> str:
    met = result.goal is not None and result.over_ours >= result.goal
    return f"{result.goal:g}x {workloads.SHORT_NAMES[result.peer]} ({'met' if met else 'not met'})"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.1 else f"{seconds:,.3f} s"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that no row has something in; an empty text without rows."""
    kept = [column for column in range(len(titles)) if any(row[column] for row in rows)]
    if not kept:
        return ""
    lines = [[titles[column] for column in kept], ["---" if column == 0 else "--:" for column in kept]]
    lines += [[row[column] for column in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(path: Path, report: Report) -> list[Path]:
    """Draw each library's time over ours at `path`, and beside it the times over the number of queries.

    Returns:
        The pictures drawn: none of what was not measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = []
    for draw, place in ((_bars, path), (_curve, path.with_stem(f"{path.stem}-queries"))):
        figure, axes = plt.subplots(layout="constrained")
        if draw(figure, axes, report):
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            figure.savefig(place, dpi=120)
            drawn.append(place)
        plt.close(figure)
    return drawn


def _bars(figure: Any, axes: Any, report: Report) -> bool:
    named = {
        work: [several[peer] for peer in workloads.SHOWN if peer in several and peer != workloads.ONE_THREAD]
        for work, several in report.named().items()
    }
    named = {work: shown for work, shown in named.items() if shown}
    if not named:
        return False
    bottom, ticks, legend = 0, [], {}
    for shown in named.values():
        ticks.append(bottom + (len(shown) - 1) / 2)
        for result in shown:
            # Bars begin at 1: to the right where exactknn is faster, to the left where it is slower.
            width, colour = result.over_ours - 1, f"C{workloads.SHOWN.index(result.peer)}"
            legend[result.peer] = axes.barh(bottom, width, 0.9, left=1, color=colour)
            place = (3, "left") if width >= 0 else (-3, "right")
            axes.annotate(
                f"{result.over_ours:.3g}x",
                (result.over_ours, bottom),
                xytext=(place[0], 0),
                textcoords="offset points",
                ha=place[1],
                va="center",
                fontsize=7,
            )
            bottom += 1
        bottom += 1
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", yticks=ticks, yticklabels=list(named), xlabel="time over exactknn's (1: equally fast)")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.margins(x=0.12, y=0.01)
    axes.invert_yaxis()
    figure.set_size_inches(9, 1.6 + 0.17 * bottom)
    order = [peer for peer in workloads.SHOWN if peer in legend]
    figure.legend(
        [legend[peer] for peer in order], order, fontsize=8, loc="outside lower center", ncols=3, frameon=False
    )
    return True


def _curve(figure: Any, axes: Any, report: Report) -> bool:
    points = report.named(curve=True)
    if not points:
        return False
    for peer, colour in ((workloads.OURS, "black"), (workloads.FAISS, "C0")):
        found = [several[peer] for several in points.values() if peer in several]
        axes.plot([r.queries for r in found], [r.median * 1e3 for r in found], "o-", color=colour, label=peer)
    searched = next(iter(points)).split("x", 1)[1]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel=f"queries at once, among {searched}", ylabel="ms a call (median)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.set_size_inches(7, 4.5)
    return True


def write_record(text: str, threads: int) -> Path:
    """Write `text` to `benches/record/`, named after the day and the processor; a second run of the day replaces it."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    machine = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:R|TM)\)", "", cpu(), flags=re.IGNORECASE).lower()).strip("-")
    path = RECORDS / f"{today}-{machine}-{threads}-threads.md"
    path.write_text(f"# Peers, {today}\n\n{text}\n", encoding="utf-8")
    return path
