"""Every public function that takes arrays, with arrays that are not plain numbers: served, or refused by name."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch

import exactknn
from exactknn import Index
from exactknn.distances import CosineSimilarity, LpDistance
from exactknn.evaluation import (
    AccuracyCalculator,
    CustomKNN,
    FaissKNN,
    MatchFinder,
    RustKNN,
    match_accuracy,
    select_threshold,
    threshold_curve,
)
from exactknn.losses import RankedListLoss

ROWS = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0], [-2.0, 5.0]])
LABELS = torch.tensor([0, 0, 1, 1])
SCORES = ROWS[:, 0].clone()
PAIRS = torch.tensor([True, False, True, False])


INDEX = Index()
INDEX.add(ROWS)


# The argument's name, and a call with the odd value as that argument.
CALLS = {
    "knn query": ("query", lambda v: exactknn.knn(v, ROWS, 1)),
    "knn reference": ("reference", lambda v: exactknn.knn(ROWS, v, 1)),
    "knn max_memory": ("query", lambda v: exactknn.knn(v, ROWS, 1, max_memory="1GB")),
    "radius query": ("query", lambda v: exactknn.radius(v, ROWS, 1.0)),
    "radius reference": ("reference", lambda v: exactknn.radius(ROWS, v, 1.0)),
    "Index.add": ("reference", lambda v: Index().add(v)),
    "Index.train": ("reference", lambda v: Index().train(v)),
    "Index.search": ("query", lambda v: INDEX.search(v, 1)),
    "Index.radius": ("query", lambda v: INDEX.radius(v, 1.0)),
    "Index.ranks": ("query|targets", lambda v: INDEX.ranks(v, [[0]] * 4)),
    "Index.remove": ("mask", lambda v: copy.copy(INDEX).remove(v)),
    "recall found": ("found_ids", lambda v: exactknn.recall(v, [[0]] * 4)),
    "recall true": ("true_ids", lambda v: exactknn.recall([[0]] * 4, v)),
    "recall distances": ("found_distances", lambda v: exactknn.recall([[0, 1]] * 4, [[0]] * 4, v, [[0.0]] * 4)),
    "CustomKNN query": ("query", lambda v: CustomKNN(LpDistance())(v, 1, ROWS)),
    "CustomKNN reference": ("reference", lambda v: CustomKNN(LpDistance())(ROWS, 1, v)),
    "CustomKNN of torch": ("query", lambda v: CustomKNN(LpDistance(), backend="torch")(v, 1, ROWS)),
    "RustKNN query": ("query", lambda v: RustKNN()(v, 1, ROWS)),
    "RustKNN reference": ("reference", lambda v: RustKNN()(ROWS, 1, v)),
    "RustKNN.train": ("reference", lambda v: RustKNN(reset_before=False).train(v)),
    "FaissKNN query": ("query", lambda v: FaissKNN()(v, 1, ROWS)),
    "FaissKNN reference": ("reference", lambda v: FaissKNN()(ROWS, 1, v)),
    "MatchFinder query": ("query_emb", lambda v: MatchFinder(CosineSimilarity(), 0.5).get_match_indices(v, ROWS)),
    "MatchFinder reference": ("ref_emb", lambda v: MatchFinder(CosineSimilarity(), 0.5).get_match_matrix(ROWS, v)),
    "MatchFinder.pairwise": ("x", lambda v: MatchFinder(LpDistance()).pairwise(v, ROWS)),
    "MatchFinder.is_match": ("y", lambda v: MatchFinder(LpDistance(), 1.0).is_match(ROWS, v)),
    "accuracy query": ("query", lambda v: AccuracyCalculator().get_accuracy(v, LABELS)),
    "accuracy reference": ("reference", lambda v: AccuracyCalculator().get_accuracy(ROWS, LABELS, v, LABELS)),
    "accuracy labels": ("query_labels|labels", lambda v: AccuracyCalculator().get_accuracy(ROWS, v)),
    "threshold_curve": ("scores", lambda v: threshold_curve(v, PAIRS, is_inverted=False)),
    "select_threshold": ("labels", lambda v: select_threshold(SCORES, v, match_accuracy, is_inverted=False)),
    "distance query": ("query_emb", lambda v: LpDistance()(v, ROWS)),
    "distance reference": ("ref_emb", lambda v: CosineSimilarity()(ROWS, v)),
    "distance pairwise": ("x", lambda v: LpDistance().pairwise(v, ROWS)),
    "loss embeddings": ("embeddings", lambda v: RankedListLoss(0.4, 10)(v, LABELS)),
    "loss labels": ("labels", lambda v: RankedListLoss(0.4, 10)(ROWS, v)),
}


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.ones(4, 2)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(ROWS, 0.5, 0, torch.qint8)


def sparse_rows():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ROWS.to_sparse_csr()


COMPLEX = torch.complex(ROWS, -ROWS)
ODD = {
    "meta": lambda: torch.ones(4, 2, device="meta"),
    "fake": fake,
    "conjugated": lambda: COMPLEX.conj(),
    "negated view": lambda: COMPLEX.conj().imag,
    "nested": nested,
    "quantised": quantised,
    "sparse": ROWS.to_sparse,
    "sparse rows": sparse_rows,
    "with gradients": lambda: ROWS.clone().requires_grad_(),
    "np.matrix": lambda: ROWS.clone().numpy().view(np.matrix),
    "masked": lambda: np.ma.masked_array(np.asarray(ROWS), mask=np.eye(4, 2, dtype=bool)),
    "objects": lambda: np.array([[1.0, None]] * 4, dtype=object),
    "1-D": lambda: ROWS[0],
    "0-D": lambda: ROWS[0, 0],
    "3-D": lambda: ROWS.reshape(2, 2, 2),
    "empty": lambda: ROWS[:0],
    "no columns": lambda: ROWS[:, :0],
    "list of bfloat16 vectors": lambda: list(ROWS.bfloat16()),
    "list of vectors with gradients": lambda: list(ROWS.clone().requires_grad_()),
    "list of scalars with gradients": lambda: [list(row) for row in ROWS.clone().requires_grad_()],
    "list of vectors of two types": lambda: [ROWS[0], ROWS[1].bfloat16()],
    "list of vectors of two lengths": lambda: [ROWS[0], ROWS[1, :1]],
    "text": lambda: "rows",
    "none": lambda: [[None, 1.0]],
}


def outcome(call, value, name):
    """Return whether the call is served; one that is refused must name the argument."""
    try:
        call(value)
    except (TypeError, ValueError) as error:
        assert re.search(rf"\b({name})", str(error)), f"no {name} in {type(error).__name__}: {error}"
        return False
    return True


@pytest.mark.filterwarnings("ignore:.*matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("function", CALLS)
def test_it_is_served_or_refused_by_name(function, odd):
    name, call = CALLS[function]
    if odd == "fake" and function.startswith(("distance", "loss")):
        pytest.skip("torch refuses fake tensors beside others")
    outcome(call, ODD[odd](), name)


# Distances and losses are torch's own arithmetic, which works inside transforms.
OUTSIDE = [name for name in CALLS if not name.startswith(("distance", "loss"))]


@pytest.mark.parametrize("function", OUTSIDE)
def test_tensors_inside_a_transform_are_refused_by_name(function):
    (name, call), seen = CALLS[function], []

    def inside(rows):
        # Under grad no tensor can be read, so the first argument is named.
        seen.append(outcome(call, rows, rf"({name}|query\w*|x|scores) must be a dense tensor"))
        return rows.sum()

    torch.vmap(inside)(ROWS.expand(3, 4, 2))
    torch.func.grad(inside)(ROWS)
    assert seen == [False, False]


@pytest.mark.parametrize(
    "kind", ["with gradients", "np.matrix", "list of bfloat16 vectors", "list of vectors with gradients"]
)
def test_rows_that_are_served_have_the_right_neighbours(kind):
    rows = ODD[kind]()
    assert exactknn.knn(rows, k=1)[1][:, 0].tolist() == [2, 2, 0, 2]
    assert exactknn.knn(ROWS[:1], rows, 2)[0].tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("kind", ["fake", "nested", "quantised", "sparse"])
def test_the_message_says_what_was_given(kind):
    words = {"sparse": "layout torch.sparse_coo"}.get(kind, f"a {kind} tensor")
    with pytest.raises(TypeError, match=f"query must be a dense tensor, got .*{words}"):
        exactknn.knn(ODD[kind](), ROWS, 1)
