"""Rows and helpers that the tests of this folder share."""

from __future__ import annotations

import numpy as np

from exactknn._arrays.matrix import as_pair
from exactknn._retrieval.task import Task
from exactknn.cli import main

OTHERS = (
    "precision_at_3",
    "recall_at_3",
    "hit_rate_at_3",
    "found_fraction_at_3",
    "ndcg_at_3",
    "knn_accuracy_at_5",
    "knn_softmax_accuracy_at_5",
    "precision_at_500",
    "knn_accuracy_at_500",
    "ndcg_at_999999999999999999",
)

# Six points on a line. The last is lone: no other has its class.
POINTS = np.array([[0], [1], [2.5], [10], [11], [30]], np.float32)
CLASSES = np.array([0, 0, 1, 1, 1, 2])
MEANS = {
    "mean_average_precision": 53 / 60,
    "mean_average_precision_at_r": 4 / 5,
    "mean_reciprocal_rank": 13 / 15,
    "precision_at_1": 4 / 5,
    "r_precision": 4 / 5,
}


def task_of(query, labels, reference=None, reference_labels=None, distance="sqeuclidean", p=None) -> Task:
    rows = as_pair(query, reference)
    labels = np.asarray(labels)
    others = None if reference_labels is None else np.asarray(reference_labels)
    return Task.of(rows, labels, others, distance, p)


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


FILES = ("--embeddings", "e.npy", "--labels", "l.npy")
