"""RankedListLoss beside pytorch-metric-learning's: value and gradient compared first, then times, in one process.

    python -m benches.ranked_list_loss [--rows N] [--dimension D] [--classes C] [--threads T] [--turns R]

    embeddings, labels -> the paper's formula in float64 -> both values and gradients -> forward and backward, in turns

Both have the same setting (margin 0.4, temperatures 1 and 0, normalised Euclidean distance, the mean of the rows). The
other library adds 1e-5 for each row of the batch to the sums of the weights, so its value is a little below the
formula's. The exit code is 1 when ours is not the formula's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from pytorch_metric_learning.losses import RankedListLoss as PMLRankedListLoss
from torch import Tensor

from exactknn.losses import RankedListLoss

MARGIN, TEMPERATURE = 0.4, 1.0
TOLERANCE = 1e-6  # relative, of float32 values that are means of many

Step = Callable[[], tuple[float, Tensor]]


def formula(embeddings: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The loss as published and its gradient, in float64, by plain means and softmax.

    Args:
        embeddings: ``(n, d)``.
        labels: ``(n,)``.
    """
    alpha = 1 + MARGIN / 2
    wide = embeddings.double().requires_grad_()
    rows = torch.nn.functional.normalize(wide)
    # A root has no slope at 0, where a row meets itself.
    squares = (2 - 2 * rows @ rows.t()).masked_fill(torch.eye(len(rows), dtype=torch.bool), 1)
    distances = squares.sqrt()
    same = labels.unsqueeze(1) == labels
    positive = (distances > alpha - MARGIN) & same & ~torch.eye(len(rows), dtype=torch.bool)
    negative = (distances < alpha) & ~same
    first = ((distances - (alpha - MARGIN)) * positive).sum(1) / positive.sum(1).clamp(min=1)
    weights = torch.softmax((TEMPERATURE * (alpha - distances)).masked_fill(~negative, -1e9), dim=1) * negative
    loss = (first + (weights * (alpha - distances)).sum(1)).mean() / 2
    (gradient,) = torch.autograd.grad(loss, wide)
    return loss.item(), gradient


def step(loss: torch.nn.Module, embeddings: Tensor, labels: Tensor) -> Step:
    """One forward and backward pass: the value and the gradient."""
    rows = embeddings.clone().requires_grad_()

    def run() -> tuple[float, Tensor]:
        value = loss(rows, labels)
        (gradient,) = torch.autograd.grad(value, rows)
        return value.item(), gradient

    return run


def main() -> int:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description="RankedListLoss beside pytorch-metric-learning's")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the batch")
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--classes", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--turns", type=int, default=25, help="timed turns of each")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)

    labels = torch.arange(settings.rows) % settings.classes
    generator = torch.manual_seed(0)
    centres = torch.randn(settings.classes, settings.dimension, generator=generator)
    embeddings = centres[labels] + 1.5 * torch.randn(settings.rows, settings.dimension, generator=generator)
    steps = {
        "exactknn": step(RankedListLoss(MARGIN, TEMPERATURE), embeddings, labels),
        "pytorch-metric-learning": step(PMLRankedListLoss(MARGIN, TEMPERATURE), embeddings, labels),
    }
    print(f"{settings.rows} x {settings.dimension}, {settings.classes} classes, {settings.threads} threads")
    value, gradient = formula(embeddings, labels)
    print(f"{'the formula in float64':26}value {value:.9f}")
    right = True
    for name, run in steps.items():
        found, slopes = run()
        error = abs(found - value) / value
        gradient_error = ((slopes.double() - gradient).norm() / gradient.norm()).item()
        print(f"{name:26}value {found:.9f}, off by {error:.1e}; gradient off by {gradient_error:.1e}")
        if name == "exactknn":
            right = error < TOLERANCE and gradient_error < TOLERANCE
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(settings.turns):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        print(f"{name:26}median {1e3 * statistics.median(seconds):7.1f} ms, least {1e3 * min(seconds):7.1f} ms")
    ours, theirs = (statistics.median(seconds) for seconds in times.values())
    print(f"speed-up of the medians   {theirs / ours:.2f}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
