"""Text output of ``exactknn evaluate``: a table, JSON, and a CSV file of classes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from exactknn._retrieval.evaluate import Evaluation
from exactknn._retrieval.metrics import class_means, mean_of
from exactknn._retrieval.task import Task

_LONE = "lone: queries without positives (no reference of their class), excluded from all metrics"


def as_table(task: Task, evaluation: Evaluation) -> str:
    """Return the metrics as lines of text."""
    counted, lone = counted_and_lone(evaluation)
    width = max(map(len, evaluation.values))
    lines = [
        f"{subject(task)}; {distance_name(task)}, {count(evaluation.k, 'neighbour', 'neighbours')}",
        "",
        f"{'metric':<{width}}  {'value':>7}  {'queries':>9}  {'lone':>9}",
        *(
            f"{name:<{width}}  {mean_of(values):>7.4f}  {counted:>9,}  {lone:>9,}"
            for name, values in evaluation.values.items()
        ),
    ]
    return "\n".join([*lines, "", _LONE])


def as_json(task: Task, evaluation: Evaluation) -> str:
    """Return the metrics and the facts of the evaluation as one JSON object; null stands for NaN."""
    counted, lone = counted_and_lone(evaluation)
    means = {name: mean_of(values) for name, values in evaluation.values.items()}
    facts = {
        "queries": len(task.query_class),
        "queries_counted": counted,
        "queries_lone": lone,
        "classes": len(np.unique(task.query_class)),
        "references": len(task.reference),
        "reference_is_query": task.excludes_self,
        "distance": task.distance,
        "p": task.p,
        "neighbours": evaluation.k,
        "metrics": {name: None if math.isnan(mean) else mean for name, mean in means.items()},
    }
    return json.dumps(facts, indent=2)


def per_class_csv(task: Task, evaluation: Evaluation) -> str:
    """Return one line per class of the queries, in label order; values are empty if none of them has positives."""
    number = len(task.classes)
    queries = np.bincount(task.query_class, minlength=number)
    means = [class_means(values, task.query_class, number) for values in evaluation.values.values()]
    lines = [",".join(["class", "queries", *evaluation.values])]
    for code in np.flatnonzero(queries):
        values = (float(mean[code]) for mean in means)
        numbers = ("" if math.isnan(value) else repr(value) for value in values)
        lines.append(",".join([_field(class_name(task, code)), str(queries[code]), *numbers]))
    return "".join(f"{line}\n" for line in lines)


def _field(text: str) -> str:
    """Return a field of a CSV file, quoted if necessary.

    ``csv.writer`` of Python below 3.13 leaves a carriage return unquoted unless it ends lines, and its reader then
    refuses the file. A space at an end is quoted for readers that strip fields.
    """
    if text == text.strip() and not set(text) & set(',"\r\n'):
        return text
    return '"' + text.replace('"', '""') + '"'


def counted_and_lone(evaluation: Evaluation) -> tuple[int, int]:
    """Return the numbers of queries with and without positives."""
    counted = int(evaluation.counted.sum())
    return counted, len(evaluation.counted) - counted


def subject(task: Task) -> str:
    """Return what was evaluated: the numbers of queries, classes and references."""
    queries = f"{count(len(task.query_class), 'query', 'queries')} of {classes(len(np.unique(task.query_class)))}"
    if task.excludes_self:
        return f"{queries}, each against {count(task.candidates, 'other', 'others')}"
    return f"{queries} against {count(len(task.reference), 'reference', 'references')}"


def count(number: int, one: str, many: str) -> str:
    """Return the number with its noun, in the singular or the plural."""
    return f"{number:,} {one if number == 1 else many}"


def classes(number: int) -> str:
    """Return a number of classes with its noun."""
    return count(number, "class", "classes")


def distance_name(task: Task) -> str:
    """Return the name of the metric, with its exponent if it has one."""
    return task.distance if task.p is None else f"{task.distance} with p = {task.p:g}"


def class_name(task: Task, code: int | np.integer[Any]) -> str:
    """Return the label of a class."""
    return str(task.classes[code].item())
