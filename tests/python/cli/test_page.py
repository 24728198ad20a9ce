"""The HTML report of ``exactknn evaluate``."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from exactknn._retrieval.evaluate import evaluate as evaluate_task
from exactknn._retrieval.metrics import BUILT_IN, mean_of
from exactknn._retrieval.names import known_metrics
from exactknn.cli import main
from exactknn.cli.figures import _up
from exactknn.cli.page import page as page_text
from tests.python.cli.evaluate_helpers import CLASSES, FILES, MEANS, OTHERS, POINTS, evaluate, task_of


class Page(HTMLParser):
    """Tables by their name, text by tag, and whether all that is opened is closed."""

    VOID = ("meta", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.tables[dict(attrs)["aria-label"]] = self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def page_of(*arguments: object) -> tuple[Page, str]:
    assert evaluate(*arguments, "--report", "r.html") == 0
    text = Path("r.html").read_text(encoding="utf-8")
    return Page(text), text


def test_the_page_shows_the_numbers(example):
    page, _ = page_of(*FILES)
    assert page.texts["title"][0] == page.texts["h1"][0] == "Retrieval evaluation: e.npy"
    head, *metrics = page.tables["Metrics"]
    assert head == ["metric, and what it shows", "value", "queries"]
    for (name, mean), (text, value, queries) in zip(MEANS.items(), metrics, strict=True):
        assert text.startswith(name) and len(text) > len(name) + 20
        assert (value, queries) == (f"{mean:.4f}", "5")
    assert "1 query without positives" in page.texts["p"][1]
    assert page.tables["Recall and precision by number of neighbours"] == [
        ["k", "1", "2", "5"],
        ["recall@k", "0.8000", "0.8000", "1.0000"],
        ["precision@k", "0.8000", "0.6000", "0.3200"],
        ["highest possible", "1.0000", "0.8000", "0.3200"],
    ]
    assert page.tables["Worst classes"] == [
        ["class", "queries", "mean_average_precision", "confused with"],
        ["1", "3", f"{29 / 36:.4f}", "0 (33.3%)"],
        ["0", "2", "1.0000", "\u2013"],
    ]
    assert page.tables["Classes most often confused"] == [
        ["class of the query", "class of the nearest", "queries", "share of the class"],
        ["1", "0", "1", "33.3%"],
    ]
    text = " ".join(page.texts["p"])
    assert "Same-class pairs: all 8; median 28.62." in text
    assert "Other-class pairs: all 22; median 121." in text


def test_every_metric_is_explained():
    metrics = [name.replace("<k>", "3") for name in known_metrics()]
    task = task_of(np.arange(8.0)[:, None], [0, 0, 1, 1, 0, 0, 1, 1])
    text = page_text(task, evaluate_task(task, metrics, details=True), {"embeddings": "rows.npy"})
    explained = re.findall(r"<code>([a-z_0-9<>]+?)</code><small>([^<]+\.)</small>", text)
    assert [name.replace("<wbr>", "") for name, _ in explained] == metrics
    assert len(metrics) == 12


def test_the_first_metric_orders_the_classes(example):
    page, _ = page_of(*FILES, "--metrics", "found_fraction_at_1", "precision_at_1")
    assert page.tables["Worst classes"] == [
        ["class", "queries", "found_fraction_at_1", "confused with"],
        ["1", "3", "0.3333", "0 (33.3%)"],
        ["0", "2", "1.0000", "\u2013"],
    ]


def test_the_figures_are_described_and_their_points_are_the_curve(example):
    page, text = page_of(*FILES)
    figures = re.findall(r"<svg .*?</svg>", text)
    assert len(figures) == 3
    for figure in figures:
        names = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', figure)
        assert names is not None
        assert f'<title id="{names[1]}">' in figure and f'<desc id="{names[2]}">' in figure
    assert len({value for _, name, value in page.attributes if name == "id"}) == 6
    points = re.findall(r"<circle [^>]*><title>k = (\d+): ([\d.]+)</title>", figures[0])
    assert points == [("1", "0.8000"), ("2", "0.8000"), ("5", "1.0000")]
    # On an axis from 0.8 to 1 the first point lies on its lower end and the last on its upper.
    heights = [float(height) for height in re.findall(r'<circle [^>]*cy="([\d.]+)"', figures[0])]
    assert heights == [_up(0), _up(0), _up(1)]
    assert "The axis begins at 0.8." in page.texts["figcaption"][0]


def test_the_page_stands_alone_and_does_not_change(example):
    page, text = page_of(*FILES)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img", text)
    assert not [name for _, name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("html", "lang", "en") in page.attributes
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert {value for tag, name, value in page.attributes if (tag, name) == ("th", "scope")} == {"row", "col"}
    assert page_of(*FILES)[1] == text


def test_names_are_text_whatever_they_hold(example):
    names = ["<script>alert('x')</script> & \"co\"", "שלום " * 30, "日本語"]
    np.save("l.npy", [names[code] for code in CLASSES])
    embeddings = "<b>\"e\" & 'x'.npy"
    np.save(embeddings, POINTS)
    page, text = page_of("--embeddings", embeddings, "--labels", "l.npy")
    assert "<script" not in text and '<b>"e' not in text
    assert page.texts["h1"][0] == f"Retrieval evaluation: {embeddings}"
    assert [row[0] for row in page.tables["Worst classes"][1:]] == [names[1][:59] + "…", names[0]]
    assert ("bdi", "title", names[1]) in page.attributes


def test_a_label_without_text_is_called_empty(example):
    np.save("l.npy", np.array(["", "x", "z"])[CLASSES])
    page, _ = page_of(*FILES)
    assert page.tables["Classes most often confused"][1] == ["x", "(empty)", "1", "33.3%"]


def test_a_path_that_is_no_text_is_shown_all_the_same(example):
    os.rename(b"l.npy", b"l\xff.npy")
    assert main(["evaluate", "--embeddings", "e.npy", "--labels", "l\udcff.npy", "--report", "r.html"]) == 0
    assert "<bdi>l\\udcff.npy</bdi>" in Path("r.html").read_text(encoding="utf-8")


EDGES = {
    "one class": (POINTS, [3] * 6, "Other-class pairs: there are none."),
    "all lone": (POINTS, range(6), "No figure: no query has positives."),
    "one row": (POINTS[:1], ["x"], "No figure: there are no pairs"),
    "two rows": (POINTS[:2], ["x", "x"], "None: the nearest reference of every query is of the same class."),
    "equal rows": (np.ones((8, 2), np.float32), [0, 1] * 4, "Same-class pairs: all 24; median 0."),
    "beyond float64": (POINTS.astype(np.float64) * 1e200, CLASSES, "or none with a value below 1e300"),
    "two classes": (np.arange(300, dtype=np.float32)[:, None], [0, 1] * 150, "All 2 classes by"),
    "many classes": (np.arange(5000.0)[:, None], np.arange(5000) // 2, "The lowest 10 of 2,500 classes by"),
}


@pytest.mark.parametrize("kind", EDGES)
def test_the_page_of_unusual_sets(kind):
    rows, labels, words = EDGES[kind]
    task = task_of(rows, labels)
    evaluation = evaluate_task(task, [*BUILT_IN, *OTHERS], details=True)
    text = page_text(task, evaluation, {"embeddings": "e.npy"})
    shown = re.sub("<[^>]*>", "", text)
    assert words in shown
    assert "nan" not in shown and not re.search(r'="[^"]*(nan|inf)[^"]*"', text)
    page = Page(text)
    assert [row[1] for row in page.tables["Metrics"][1:]] == [
        "undefined" if kind in ("all lone", "one row") else f"{mean_of(values):.4f}"
        for values in evaluation.values.values()
    ]
