"""Calls of the public functions, as bytes, for the tests of what must not change them.

Run with ``flush`` it prints the names of the calls that differ under flush-to-zero, with ``fork`` those
that differ in a forked child.
"""

import os
import signal
import sys

import numpy as np
import torch

import exactknn
from exactknn import distances as dist
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    MatchFinder,
    RustKNN,
    equal_error_rate,
    knn_vote_metric,
    match_accuracy,
    select_threshold,
    threshold_curve,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LABEL_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 5e-324, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def rows_of(dtype, n, d, *, denormal):
    """Small whole multiples of the smallest number, or of 1: no value is rounded."""
    numbers = torch.randint(-90, 90, (n, d), generator=torch.Generator().manual_seed(n))
    scale = SMALLEST[dtype] if denormal else 1.0
    return (numbers.double() * scale).to(dtype)


def plain(distance_class):
    class Own(distance_class):  # another class: measured by torch
        pass

    return Own


def calls(n, d, denormal):
    """Return functions without arguments, by name."""
    found = {}
    labels = torch.arange(n) % 7
    for dtype in DTYPES:
        x = rows_of(dtype, n, d, denormal=denormal)
        scale = SMALLEST[dtype] if denormal else 1.0
        name = str(dtype).removeprefix("torch.")
        y = x[: n // 2]
        cityblock = dist.LpDistance(normalize_embeddings=False, p=1)
        own = plain(dist.LpDistance)(normalize_embeddings=False, p=1)
        bound = float(torch.tensor(20 * d * scale, dtype=torch.float64))
        found |= {
            f"knn {name}": lambda x=x: exactknn.knn(x, k=3, metric="cityblock"),
            f"knn in blocks {name}": lambda x=x, y=y: exactknn.knn(y, [x[:9], x[9:]], 3, metric="cityblock"),
            f"radius {name}": lambda x=x, r=bound: exactknn.radius(x, r=r, metric="cityblock"),
            f"Index {name}": lambda x=x: indexed(x),
            f"Index rounded {name}": lambda x=x: rounded(x),
            f"CustomKNN {name}": lambda x=x, c=cityblock: CustomKNN(c)(x, 3, x, True),
            f"CustomKNN of torch {name}": lambda x=x, c=own: CustomKNN(c)(x[:9], 3, x[9:])[:1],
            f"RustKNN {name}": lambda x=x, c=cityblock: RustKNN(c)(x, 3, x, True),
        }
        for kind, distance in (("core", cityblock), ("torch", own)):
            finder = MatchFinder(distance, bound)
            found |= {
                f"pairwise {kind} {name}": lambda x=x, f=finder: [f.pairwise(x[1:], x[:-1])],
                f"is_match {kind} {name}": lambda x=x, f=finder: [f.is_match(x[1:], x[:-1])],
                f"match matrix {kind} {name}": lambda x=x, f=finder: [f.get_match_matrix(x)],
                f"match indices {kind} {name}": lambda x=x, f=finder: [f.get_match_indices(x)],
            }
        scores, is_match = x[:, 0].abs(), x[:, 1] > 0
        found |= {
            f"threshold_curve {name}": lambda s=scores, m=is_match: curve(s, m),
            f"select_threshold {name}": lambda s=scores, m=is_match: select_threshold(
                s, m, match_accuracy, is_inverted=False
            ),
            f"equal_error_rate {name}": lambda s=scores, m=is_match: [equal_error_rate(s, m, is_inverted=False)],
            f"accuracy {name}": lambda x=x: accuracy(x, labels),
        }
    x = rows_of(torch.float32, n, d, denormal=denormal)
    for dtype in LABEL_DTYPES:
        own_labels = labels.to(dtype)
        if denormal and dtype.is_floating_point:
            own_labels = (labels.double() * SMALLEST[dtype]).to(dtype)
        found[f"labels {dtype}"] = lambda own_labels=own_labels: accuracy(x, own_labels)
    near = x[:, :2].abs().sort(dim=1).values
    ids = torch.tensor([[0, 1]]).expand(n, 2)
    found["recall"] = lambda: [exactknn.recall(ids + torch.tensor([0, 1]), ids, near, near, per_query=True)]
    return found


def indexed(x):
    index = exactknn.Index("cityblock")
    index.add(x)
    index.remove(np.arange(len(x)) % 5 == 0)
    return (*index.search(x, 3), index.rows())


def rounded(x):
    index = exactknn.Index("cityblock", "bfloat16" if x.dtype != torch.float64 else "float32")
    index.add(x)
    return [index.rows()]


def curve(scores, is_match):
    thresholds, counts = threshold_curve(scores, is_match, is_inverted=False)
    return (thresholds, *counts)


def accuracy(x, labels):
    metrics = {"votes": knn_vote_metric(3, weights="softmax", temperature=1e-3)}
    calculator = AccuracyCalculator(k=5, custom_metrics=metrics)
    values = calculator.get_accuracy(x, labels)
    return [value for _, value in sorted(values.items())]


def as_bytes(results):
    return [np.asarray(part.view(torch.int16) if is_bfloat16(part) else part).tobytes() for part in results]


def is_bfloat16(part):
    return isinstance(part, torch.Tensor) and part.dtype == torch.bfloat16


def under_flush():
    made = calls(60, 3, denormal=True)
    wanted = {name: as_bytes(call()) for name, call in made.items()}
    assert torch.set_flush_denormal(True)
    two = torch.tensor(SMALLEST[torch.float32])
    differing = []
    for name, call in made.items():
        if as_bytes(call()) != wanted[name]:
            differing.append(name)
        if bool(two > 0):
            differing.append(f"{name}: the mode of the caller")
    return differing


def in_a_child():
    torch.set_num_threads(4)
    exactknn.set_num_threads(2)
    made = calls(800, 48, denormal=False)
    wanted = {name: as_bytes(call()) for name, call in made.items()}
    large = torch.rand(1 << 21)
    (large * 2).sum()  # torch has started its threads
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(40)  # a hang ends the child
        for name, call in made.items():
            os.write(write, f"{name}: hangs\n".encode())
            os.write(write, f"{name}: {as_bytes(call()) == wanted[name]}\n".encode())
        threads = torch.get_num_threads()
        os.write(write, f"threads of the caller: {threads == 4}\n".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        said = lines.read().splitlines()
    _, status = os.waitpid(child, 0)
    differing = [line for line in said if line.endswith(": False")]
    if status != 0:
        differing.append(f"{said[-1]} (status {status})")
    return differing


if __name__ == "__main__":
    print({"flush": under_flush, "fork": in_a_child}[sys.argv[1]]())
