"""The HTML report of ``exactknn evaluate``.

    Task, Evaluation --> sections of tables and SVG figures --> one HTML text

The report is self-contained: style and figures are inline, without scripts or external requests. The same evaluation
gives the same text, so there is no date. Text from a file or a path is escaped.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence, Set

import numpy as np

from exactknn import _core
from exactknn._retrieval.evaluate import Evaluation
from exactknn._retrieval.metrics import class_means, mean_of
from exactknn._retrieval.pairs import Confusion, PairSample, confusions, pair_sample
from exactknn._retrieval.task import Task
from exactknn._retrieval.types import Floats, Ints
from exactknn.cli.figures import axis_words, curve, histogram, span
from exactknn.cli.report import class_name, classes, count, counted_and_lone, subject

WORST_CLASSES = 10
CONFUSIONS = 15
_LABEL_LENGTH = 60
_WHAT_IT_SHOWS = {
    "precision_at_1": "How often the nearest reference is of the same class.",
    "r_precision": "Share of the first R neighbours that are of the same class, R being its number of references.",
    "mean_average_precision_at_r": "As R-precision, but an early mistake costs more.",
    "mean_average_precision": "The precision at the rank of each reference of the class, averaged: it also falls if "
    "the last of them are ranked far behind.",
    "mean_reciprocal_rank": "1 / rank of the nearest reference of the class: 1 if it is first, 0.5 if second.",
}
_WHAT_IT_SHOWS_AT = {
    "precision": "Share of the first {k} neighbours that are of the same class. Below 1 where a class has "
    "fewer than {k} references, however good the embeddings are.",
    "recall": "How often at least one of the first {k} neighbours is of the same class.",
    "hit_rate": "How often at least one of the first {k} neighbours is of the same class.",
    "found_fraction": "Share of the references of the same class that are among the first {k} neighbours.",
    "ndcg": "1 if all references of the class, or {k} of them, come first; an early mistake costs more.",
    "knn_accuracy": "How often the right class has the most votes among the first {k} neighbours.",
    "knn_softmax_accuracy": "The same vote of the first {k} neighbours, weighted by similarity.",
}
_DISTANCE_WORDS = {
    "sqeuclidean": "squared Euclidean distance",
    "euclidean": "Euclidean distance",
    "cosine": "cosine distance (1 &minus; similarity)",
    "inner_product": "inner product",
    "cityblock": "cityblock distance",
    "chebyshev": "Chebyshev distance",
    "minkowski": "Minkowski distance",
}
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2128; --soft: #59626e; --line: #dde1e6;
  --blue: #1d5fa6; --orange: #b4500b; --track: #eaedf1; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e7e5e1; --soft: #a3abb6; --line: #333a43;
  --blue: #79b4f2; --orange: #f2a560; --track: #262c34; } }
@media print { :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --soft: #454c55; --line: #bbc1c9;
  --blue: #1d5fa6; --orange: #b4500b; --track: #eaedf1; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 .35rem; }
section { margin-top: 2.75rem; }
p { margin: 0 0 .9rem; max-width: 44rem; text-wrap: pretty; }
.soft, figcaption, footer { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 1rem 0 0; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: baseline; padding: .4rem 1rem .4rem 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
thead th { color: var(--soft); font-weight: 500; }
th small { display: block; max-width: 38rem; font-size: .92em; font-weight: 400; color: var(--soft);
  text-wrap: pretty; }
bdi { overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
.name { min-width: 6rem; }
.bar { display: inline-block; width: 6rem; height: .5rem; margin-left: .7rem; background: var(--track);
  border-radius: .25rem; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--blue); }
.bar, .bar i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem 2rem; }
.values { margin-top: 1.25rem; }
figure { margin: 0; }
figcaption { font-size: .88rem; margin-top: .25rem; }
figcaption b { color: var(--ink); font-weight: 600; }
svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .one { stroke: var(--blue); stroke-width: 2; fill: none; stroke-linejoin: round; }
svg .two { stroke: var(--orange); stroke-width: 2; fill: none; stroke-dasharray: 5 3; stroke-linejoin: round; }
svg .area.one { fill: var(--blue); fill-opacity: .22; }
svg .area.two { fill: var(--orange); fill-opacity: .22; }
svg .dot { fill: var(--blue); }
.key { display: inline-block; width: 1.5rem; border-top: 2px solid var(--blue); margin-right: .35rem;
  vertical-align: middle; }
.key.two { border-top: 2px dashed var(--orange); }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid var(--line); font-size: .88rem; }
@media (max-width: 34rem) { main { padding-top: 1.5rem; } h1 { font-size: 1.45rem; } .bar { display: none; } }
@media print { main { padding: 0; max-width: none; } figure, tr, .pair { break-inside: avoid; }
  p { break-inside: avoid; } h2, h2 + p, thead { break-after: avoid; } body { font-size: 11pt; } }
"""


def page(task: Task, evaluation: Evaluation, files: Mapping[str, str]) -> str:
    """Return the report as HTML.

    Args:
        task: the evaluated rows and classes.
        evaluation: the scores, with details.
        files: paths by name, shown at the top.
    """
    confused = confusions(task, evaluation, len(task.query_class))
    title = f"Retrieval evaluation: {_text(os.path.basename(files['embeddings']))}"
    sections = [
        _metrics_section(evaluation),
        _curves_section(evaluation),
        _pairs_section(task),
        _worst_section(task, evaluation, confused),
        _confusions_section(task, evaluation, confused[:CONFUSIONS]),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<header>",
            f"<h1>{title}</h1>\n<p>{subject(task)}.</p>",
            _facts(task, evaluation, files),
            "</header>",
            *sections,
            f"<footer>exactknn {_core.__version__}. Neighbours are exact: ordered by float64 distances, ties by row "
            "number.</footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def _facts(task: Task, evaluation: Evaluation, files: Mapping[str, str]) -> str:
    looked_at = f"all {evaluation.k:,}" if evaluation.k == task.candidates else f"the first {evaluation.k:,}"
    facts = {name.replace("_", " "): f"<bdi>{_text(path)}</bdi>" for name, path in files.items()}
    facts["distance"] = _DISTANCE_WORDS[task.distance] + ("" if task.p is None else f", p = {task.p:g}")
    facts["neighbours used"] = f"{looked_at}, unless the metric's name gives a number"
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{fact}</dd>" for name, fact in facts.items()) + "</dl>"


def _metrics_section(evaluation: Evaluation) -> str:
    counted, lone = counted_and_lone(evaluation)
    rows = []
    for name, values in evaluation.values.items():
        mean = mean_of(values)
        shows = f"{_metric_name(name)}<small>{_what_it_shows(name)}</small>"
        rows.append([shows, _value(mean) + _bar(mean), f"{counted:,}"])
    left_out = (
        f"Excluded: {count(lone, 'query', 'queries')} without positives (lone: no reference of the same class)."
        if lone
        else "Every query has positives: references of its class."
    )
    table = _table("Metrics", ["metric, and what it shows", "value", "queries"], rows, numbers={1, 2})
    return _section("Metrics", f"<p>Each value is a mean over queries, from 0 to 1. {left_out}</p>{table}")


def _metric_name(name: str) -> str:
    """Return the name as HTML that may break after an underscore."""
    return f"<code>{name.replace('_', '_<wbr>')}</code>"


def _what_it_shows(name: str) -> str:
    if name in _WHAT_IT_SHOWS:
        return _WHAT_IT_SHOWS[name]
    family, k = name.rsplit("_at_", 1)
    return _WHAT_IT_SHOWS_AT[family].format(k=k)


def _curves_section(evaluation: Evaluation) -> str:
    title = "Recall and precision by number of neighbours"
    assert evaluation.details is not None
    counts = evaluation.relevant_counts[evaluation.counted]
    if not len(counts):
        return _section(title, "<p>No figure: no query has positives.</p>")
    number = np.arange(1, len(evaluation.details.first_at) + 1)
    recall = np.cumsum(evaluation.details.first_at) / len(counts)
    precision = np.cumsum(evaluation.details.relevant_at) / (len(counts) * number)
    best = _best_precision(counts, number)
    # Always the last one, and none so close to it that their labels would overlap.
    shown = [k for k in (1, 2, 5, 10, 20, 50) if k < 0.8 * len(number)] + [len(number)]
    figures = (
        _figure(
            curve("Recall at k", number, [recall], shown),
            "<b>Recall@k.</b> How often at least one of the first k neighbours is of the same class."
            + axis_words([recall]),
        ),
        _figure(
            curve("Precision at k", number, [precision, best], shown),
            '<b>Precision@k.</b> <span class="key"></span>Share of the first k neighbours that are of the same '
            'class. <span class="key two"></span>The highest possible value: a class with fewer than k references '
            "cannot reach 1." + axis_words([precision, best]),
        ),
    )
    rows = [
        [name, *(_value(float(curve[k - 1])) for k in shown)]
        for name, curve in (("recall@k", recall), ("precision@k", precision), ("highest possible", best))
    ]
    table = _table(title, ["k", *map(str, shown)], rows, numbers=set(range(1, len(shown) + 1)))
    return _section(title, f'<div class="pair">{"".join(figures)}</div><div class="values">{table}</div>')


def _best_precision(relevant_counts: Ints, number: Ints) -> Floats:
    """Return the mean precision at each of ``number`` if all relevant references came first."""
    most = len(number)
    # The number of queries with at least j relevant references, which can all be right at rank j.
    at_least = np.bincount(np.minimum(relevant_counts, most), minlength=most + 1)[::-1].cumsum()[::-1][1:]
    best: Floats = np.cumsum(at_least) / (len(relevant_counts) * number)
    return best


def _pairs_section(task: Task) -> str:
    title = "Distances within and between classes"
    if task.distance == "inner_product":
        title = "Similarities within and between classes"
    same, other = pair_sample(task, same_class=True), pair_sample(task, same_class=False)
    kinds = [("same-class pairs", same, "one"), ("other-class pairs", other, "two")]
    drawn = [(name, sample, style) for name, sample, style in kinds if len(sample.values)]
    if not drawn:
        return _section(title, "<p>No figure: there are no pairs, or none with a value below 1e300.</p>")
    larger = task.distance == "inner_product"
    words = [
        f'<p><span class="key {style}"></span>{name.capitalize()}: {_pairs_words(sample)}</p>'
        for name, sample, style in kinds
    ]
    if len(drawn) == 2:
        middle = float(np.median(same.values))
        nearer = float(np.mean(other.values > middle if larger else other.values < middle))
        words.append(
            f"<p>{nearer:.2%} of the other-class pairs are nearer than the median same-class pair. The less the two "
            "distributions overlap, the better a single threshold separates the classes.</p>"
        )
    axis = f"{_DISTANCE_WORDS[task.distance]}; {'larger' if larger else 'smaller'} is nearer"
    low, high = span([sample.values for _, sample, _ in drawn])
    beyond = [float(np.mean((sample.values < low) | (sample.values > high))) for _, sample, _ in drawn]
    outside = ", ".join(f"{share:.1%} of {name}" for (name, _, _), share in zip(drawn, beyond, strict=True) if share)
    figure = _figure(
        histogram(title, axis, drawn, low, high),
        f"Share of the pairs of each kind by value.{f' Beyond the axis: {outside}.' if outside else ''}",
    )
    return _section(title, f'<div class="pair">{figure}<div>{"".join(words)}</div></div>')


def _pairs_words(sample: PairSample) -> str:
    if not sample.total:
        return "there are none."
    if not len(sample.values):
        return f"{sample.total:,}, none with a value below 1e300."
    taken = f"{sample.measured:,} drawn of {sample.total:,}" if sample.drawn else f"all {sample.total:,}"
    return f"{taken}; median {np.median(sample.values):.4g}."


def _worst_section(task: Task, evaluation: Evaluation, confused: Sequence[Confusion]) -> str:
    title = "Worst classes"
    name, values = next(iter(evaluation.values.items()))
    queries = np.bincount(task.query_class, minlength=len(task.classes))
    means = class_means(values, task.query_class, len(task.classes))
    scored = np.flatnonzero(~np.isnan(means))
    # Ties: the class with more queries first.
    worst = scored[np.lexsort((scored, -queries[scored], means[scored]))][:WORST_CLASSES]
    instead: dict[int, Confusion] = {}
    for confusion in confused:
        instead.setdefault(confusion.query_class, confusion)
    rows = []
    for code in map(int, worst):
        other = instead.get(code)
        mistaken = (
            "&ndash;"
            if other is None
            else f"{_label(task, other.nearest_class)} ({_share(other.count, queries[code])})"
        )
        rows.append([_label(task, code), f"{queries[code]:,}", _value(means[code]) + _bar(means[code]), mistaken])
    if not rows:
        return _section(title, "<p>No table: no query has positives.</p>")
    if len(rows) < len(scored):
        which = f"The lowest {len(rows)} of {classes(len(scored))}"
    else:
        which = "The only class" if len(rows) == 1 else f"All {len(rows)} classes"
    words = (
        f"{which} by {_metric_name(name)}, lowest first. The last column is the most frequent class of a wrong "
        "nearest reference, with its share of the queries."
    )
    table = _table(title, ["class", "queries", _metric_name(name), "confused with"], rows, numbers={1, 2})
    return _section(title, f"<p>{words}</p>{table}")


def _confusions_section(task: Task, evaluation: Evaluation, confused: Sequence[Confusion]) -> str:
    title = "Classes most often confused"
    if not evaluation.counted.any():
        return _section(title, "<p>No table: no query has positives.</p>")
    if not confused:
        return _section(title, "<p>None: the nearest reference of every query is of the same class.</p>")
    queries = np.bincount(task.query_class, minlength=len(task.classes))
    rows = [
        [
            _label(task, confusion.query_class),
            _label(task, confusion.nearest_class),
            f"{confusion.count:,}",
            _share(confusion.count, queries[confusion.query_class]),
        ]
        for confusion in confused
    ]
    words = "Queries whose nearest reference is of another class, by pair of classes, most frequent first."
    heads = ["class of the query", "class of the nearest", "queries", "share of the class"]
    return _section(title, f"<p>{words}</p>{_table(title, heads, rows, numbers={2, 3})}")


def _text(text: str) -> str:
    """Return the text as HTML, with lone surrogates (undecodable paths), which UTF-8 cannot encode, escaped."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


def _label(task: Task, code: int) -> str:
    name = class_name(task, code)
    if not name.strip():
        return '<span class="soft">(empty)</span>'
    if len(name) <= _LABEL_LENGTH:
        return f"<bdi>{_text(name)}</bdi>"
    return f'<bdi title="{_text(name)}">{_text(name[: _LABEL_LENGTH - 1])}…</bdi>'


def _value(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def _share(count: int, of: int) -> str:
    return f"{count / of:.1%}"


def _bar(value: float) -> str:
    if math.isnan(value):
        return ""
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * value:.1f}%"></i></span>'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Set[int],
) -> str:
    """Return a table of HTML cells; the first cell of each row is its header."""

    def kind(column: int) -> str:
        return f' class="{"number" if column in numbers else "name"}"'

    heads = "".join(f'<th scope="col"{kind(column)}>{text}</th>' for column, text in enumerate(head))
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{kind(column)}>{text}</td>" for column, text in enumerate(others, start=1))
        lines.append(f'<tr><th scope="row" class="name">{first}</th>{cells}</tr>')
    body = "\n".join(lines)
    table = f'<table aria-label="{title}">\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'
    return f'<div class="scroll">{table}</div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"
