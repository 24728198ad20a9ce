"""Options and inputs of the ranked list loss."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import reducers as pml_reducers
from pytorch_metric_learning import regularizers as pml_regularizers

from exactknn import distances, reducers
from exactknn.losses import BaseMetricLossFunction, RankedListLoss
from tests.python.losses.loss_helpers import LABELS, X, row_losses


def test_constructor():
    loss = RankedListLoss(0.4, 10)
    assert (loss.margin, loss.neg_temperature, loss.imbalance, loss.pos_temperature) == (0.4, 10, 0.5, 0)
    assert loss.alpha == 1.2
    assert RankedListLoss(0.4, 10, alpha=0).alpha == 0
    assert (type(loss.distance), loss.distance.p, loss.distance.power) == (distances.LpDistance, 2, 1)
    assert loss.distance.normalize_embeddings
    assert type(loss.reducer) is reducers.MeanReducer
    assert list(loss.parameters()) == []
    assert RankedListLoss(0.4, 10, reducer=reducers.ClassWeightedReducer([1.0])).state_dict() == {}
    loss = RankedListLoss(0.1, 2, 0.3, 0.9, 4)
    assert (loss.margin, loss.neg_temperature, loss.imbalance) == (0.1, 2, 0.3)
    assert (loss.alpha, loss.pos_temperature) == (0.9, 4)
    assert "alpha=0.9" in repr(loss)


def test_no_warning_for_large_temperatures(recwarn):
    RankedListLoss(0.4, 1000, pos_temperature=1000)
    assert len(recwarn) == 0


def test_distance_and_reducer_objects():
    distance = distances.LpDistance(p=1)
    reducer = reducers.AvgNonZeroReducer()
    loss = RankedListLoss(0.4, 10, distance=distance, reducer=reducer)
    assert loss.distance is distance
    assert type(loss.reducer) is reducers.AvgNonZeroReducer
    assert loss.reducer is not reducer
    for module in (reducers, pml_reducers):
        for shared in (module.MultipleReducers({}), module.DoNothingReducer()):
            assert RankedListLoss(0.4, 10, reducer=shared).reducer is shared


def test_what_lies_on_a_bound_does_not_take_part():
    # From the first row: positives at 0.5 = alpha - margin and 0.75, negatives at 1 = alpha and 0.25.
    x = torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.75, 0.0], [1.0, 0.0], [0.25, 0.0]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 1])
    for imbalance, wanted in ((0, 0.25), (1, 0.75)):
        loss = RankedListLoss(0.5, 0, imbalance, 1, distance=distances.LpDistance(normalize_embeddings=False))
        assert row_losses(loss, x, labels)[0] == wanted


@pytest.mark.parametrize("imbalance", [-0.1, 1.1, -1e-9, 2])
def test_imbalance_is_checked(imbalance):
    with pytest.raises(ValueError, match="imbalance must be between 0 and 1, got"):
        RankedListLoss(0.4, 10, imbalance=imbalance)


@pytest.mark.parametrize("name", ["margin", "neg_temperature", "imbalance", "alpha", "pos_temperature"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a finite number, got {value}"):
        RankedListLoss(**{"margin": 0.4, "neg_temperature": 10, "alpha": 1} | {name: value})


@pytest.mark.parametrize("name", ["margin", "neg_temperature", "imbalance", "alpha", "pos_temperature"])
def test_numbers_are_numbers(name):
    for value in ("0.5", True, 1j, [0.5], torch.tensor(0.5)):
        with pytest.raises(TypeError, match=f"^{name} must be a real number, got .* of type {type(value).__name__}$"):
            RankedListLoss(**{"margin": 0.4, "neg_temperature": 10} | {name: value})
    for value in (1, np.float32(1), np.int64(1)):
        assert getattr(RankedListLoss(**{"margin": 0.4, "neg_temperature": 10} | {name: value}), name) == 1
    with pytest.raises(ValueError, match=f"^{name} must be a finite number, got one beyond"):
        RankedListLoss(**{"margin": 0.4, "neg_temperature": 10} | {name: 10**400})


def test_refused_options():
    for similarity in (distances.CosineSimilarity(), pml_distances.DotProductSimilarity()):
        with pytest.raises(ValueError, match=f"got the similarity {type(similarity).__name__}"):
            RankedListLoss(0.4, 10, distance=similarity)
    with pytest.raises(TypeError, match="Tn"):
        RankedListLoss(0.4, 10, Tn=1)
    for name in ("distance", "reducer", "embedding_regularizer"):
        with pytest.raises(TypeError, match=f"^{name} must be callable, got 'mean' of type str$"):
            RankedListLoss(0.4, 10, **{name: "mean"})


def test_refused_arguments():
    loss = RankedListLoss(0.4, 10)
    x, labels = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="labels must be given for RankedListLoss"):
        loss(x)
    for name, value in (("indices_tuple", (labels,) * 3), ("ref_emb", x), ("ref_labels", labels)):
        for call in (loss, loss.loss_terms):
            with pytest.raises(ValueError, match=f"^{name} must be None .*, got {type(value).__name__}$"):
                call(x, labels, **{name: value})
    for wrong in (labels[:3], labels[:, None], torch.tensor(0)):
        with pytest.raises(ValueError, match=r"labels must be 1-D, one for each of the 4 embeddings, got shape"):
            loss(x, wrong)
    for wrong in (x[0], x[None], torch.zeros(0)):
        with pytest.raises(ValueError, match="2-D"):
            loss(wrong, labels)
    with pytest.raises(TypeError, match=r"embeddings must be a torch\.Tensor, got ndarray"):
        loss(x.numpy(), labels)
    with pytest.raises(TypeError, match=r"labels must be a torch\.Tensor, got list"):
        loss(x, labels.tolist())
    with pytest.raises(ValueError, match="embeddings must hold float32, float64, float16 or bfloat16"):
        loss(torch.zeros(4, 3, dtype=torch.int64), labels)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float32, torch.float64, torch.bool])
def test_labels_of_any_type(dtype):
    x = torch.randn(6, 3, generator=torch.manual_seed(12))
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    assert RankedListLoss(0.4, 10)(x, labels.to(dtype)).equal(RankedListLoss(0.4, 10)(x, labels))


def test_labels_follow_the_embeddings_to_their_device():
    x = torch.randn(6, 3, generator=torch.manual_seed(12))
    labels = torch.tensor([0, 1, 0, 1, 1, 0])

    def with_labels(terms, embeddings, labels):
        assert labels.device == embeddings.device
        return terms["loss"]["losses"].sum()

    for reducer in (None, with_labels, reducers.ClassWeightedReducer([1.0, 2.0])):
        loss = RankedListLoss(0.4, 10, reducer=reducer)
        assert loss(x.to("meta"), labels).device.type == "meta"
        if torch.cuda.is_available():
            assert loss(x.cuda(), labels).item() == pytest.approx(loss(x, labels).item(), rel=1e-5)


def test_layouts_and_inference_tensors():
    x = torch.randn(6, 3, generator=torch.manual_seed(13))
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    loss = RankedListLoss(0.4, 10)
    wanted = loss(x, labels)
    assert loss(x.t().contiguous().t(), torch.stack([labels, labels], 1)[:, 0]).equal(wanted)
    with torch.inference_mode():
        assert loss(x.clone(), labels).equal(wanted)
        frozen = x.clone()
    assert loss(frozen, labels).equal(wanted)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"reducer": pml_reducers.MeanReducer()}, lambda losses: losses.mean()),
        ({"reducer": pml_reducers.SumReducer()}, lambda losses: losses.sum()),
        ({"reducer": pml_reducers.AvgNonZeroReducer()}, lambda losses: losses[losses > 0].mean()),
        ({"reducer": pml_reducers.ThresholdReducer(low=0.5)}, lambda losses: losses[losses > 0.5].mean()),
        (
            {"reducer": pml_reducers.ClassWeightedReducer(torch.tensor([1.0, 3.0]))},
            lambda losses: (losses * torch.tensor([1.0, 1, 1, 3, 3, 3])).mean(),
        ),
        ({"reducer": pml_reducers.PerAnchorReducer()}, lambda losses: losses.mean()),
        ({"reducer": pml_reducers.MultipleReducers({"loss": pml_reducers.SumReducer()})}, lambda losses: losses.sum()),
        ({"distance": pml_distances.LpDistance()}, lambda losses: losses.mean()),
    ],
    ids=lambda value: type(next(iter(value.values()))).__name__ if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("regularizer", [None, pml_regularizers.LpRegularizer()])
def test_objects_of_pytorch_metric_learning(options, wanted, regularizer):
    x = X.float().requires_grad_()
    loss = RankedListLoss(0.4, 10, embedding_regularizer=regularizer, embedding_reg_weight=0.5, **options)
    value = loss(x, LABELS)
    expected = wanted(row_losses(RankedListLoss(0.4, 10), x.detach(), LABELS))
    if regularizer is not None:
        expected = expected + 0.5 * x.detach().norm(dim=1).mean()
    torch.testing.assert_close(value, expected)
    value.backward()
    assert x.grad.isfinite().all()


def test_reducers_that_hand_on_the_terms():
    def regularizer(x):
        return x.square().mean()

    loss = RankedListLoss(0.4, 10, embedding_regularizer=regularizer, embedding_reg_weight=2)
    terms = loss.loss_terms(X, LABELS)
    assert list(terms) == ["loss", "embedding_reg_loss"]
    assert terms["loss"]["indices"].tolist() == [0, 1, 2, 3, 4, 5]
    assert terms["loss"]["reduction_type"] == "element"
    assert terms["embedding_reg_loss"]["reduction_type"] == "already_reduced"
    assert terms["embedding_reg_loss"]["losses"] == 2 * regularizer(X)
    total = terms["loss"]["losses"].mean() + 2 * regularizer(X)
    torch.testing.assert_close(loss(X, LABELS), total)
    for module in (reducers, pml_reducers):
        nothing = RankedListLoss(
            0.4, 10, embedding_regularizer=regularizer, embedding_reg_weight=2, reducer=module.DoNothingReducer()
        )(X, LABELS)
        assert nothing["loss"]["losses"].equal(terms["loss"]["losses"])
        assert nothing["embedding_reg_loss"]["losses"].equal(terms["embedding_reg_loss"]["losses"])
        parts = module.MultipleReducers(
            {"loss": module.SumReducer(), "embedding_reg_loss": module.MeanReducer()}, module.SumReducer()
        )
        value = RankedListLoss(0.4, 10, embedding_regularizer=regularizer, embedding_reg_weight=2, reducer=parts)(
            X, LABELS
        )
        torch.testing.assert_close(value, terms["loss"]["losses"].sum() + 2 * regularizer(X))
    for module in (reducers, pml_reducers):
        with pytest.raises(KeyError, match="divisor"):
            RankedListLoss(0.4, 10, reducer=module.DivisorReducer())(X, LABELS)


@pytest.mark.parametrize("value", [3, 3.1, torch.tensor(3.1), torch.tensor([3.1])], ids=repr)
@pytest.mark.parametrize("reducer", [None, reducers.MultipleReducers({}), pml_reducers.MultipleReducers({})], ids=repr)
def test_a_regularizer_that_returns_one_value(value, reducer):
    loss = RankedListLoss(0.4, 10, embedding_regularizer=lambda x: value, reducer=reducer)
    found = loss(X, LABELS)
    assert found.shape == ()
    assert found.item() == pytest.approx(0.521970803615 + float(value), rel=1e-11)


@pytest.mark.parametrize("reducer", [None, reducers.DoNothingReducer()], ids=repr)
def test_a_regularizer_that_returns_no_value_is_refused(reducer):
    for value, error, message in (
        (X.norm(dim=1), ValueError, r"embedding_regularizer must return one value, got shape \(6,\)"),
        (X[:0, 0], ValueError, r"embedding_regularizer must return one value, got shape \(0,\)"),
        (None, TypeError, "the value of embedding_regularizer must be a real number, got None"),
    ):
        loss = RankedListLoss(0.4, 10, embedding_regularizer=lambda x, value=value: value, reducer=reducer)
        with pytest.raises(error, match=message):
            loss(X, LABELS)


def test_copies():
    loss = RankedListLoss(0.4, 10, 0.3, reducer=reducers.ClassWeightedReducer([1.0, 2.0]))
    wanted = loss(X, LABELS)
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), copy.copy(loss)):
        assert twin(X, LABELS).equal(wanted)


def test_hooks_of_subclasses():
    class Newer(RankedListLoss):
        def default_distance(self):
            return distances.LpDistance(p=1)

        def default_reducer(self):
            return reducers.SumReducer()

    class Older(RankedListLoss):
        def get_default_distance(self):
            return distances.LpDistance(p=1)

        def get_default_reducer(self):
            return reducers.SumReducer()

    wanted = RankedListLoss(0.4, 10, distance=distances.LpDistance(p=1), reducer=reducers.SumReducer())(X, LABELS)
    for kind in (Newer, Older):
        assert kind(0.4, 10)(X, LABELS).equal(wanted)

    class Nothing(BaseMetricLossFunction):
        def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
            return {}

    for reducer in (None, pml_reducers.MeanReducer()):
        x = X.clone().requires_grad_()
        value = Nothing(reducer=reducer)(x)
        value.backward()
        assert value.item() == 0
        assert (x.grad == 0).all()
    with pytest.raises(NotImplementedError):
        BaseMetricLossFunction()(X)


def test_a_distance_decides_on_shapes():
    class OfFirstParts(distances.LpDistance):
        def check_shapes(self, query_emb, ref_emb):
            if query_emb.ndim != 3:
                raise ValueError("three dimensions")

        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb[:, 0], ref_emb[:, 0])

    loss = RankedListLoss(0.4, 10, distance=OfFirstParts(normalize_embeddings=False))
    plain = RankedListLoss(0.4, 10, distance=distances.LpDistance(normalize_embeddings=False))
    assert loss(X[:, None], LABELS).equal(plain(X, LABELS))
    with pytest.raises(ValueError, match="three dimensions"):
        loss(X, LABELS)


def test_a_distance_that_is_only_a_function():
    def euclidean(rows):
        return torch.cdist(rows, rows)

    loss = RankedListLoss(0.4, 10, distance=euclidean)
    plain = RankedListLoss(0.4, 10, distance=distances.LpDistance(normalize_embeddings=False))
    torch.testing.assert_close(loss(X, LABELS), plain(X, LABELS))
    with pytest.raises(ValueError, match=r"2-D \(rows, dimensions\), got shape \(6,\)"):
        loss(X[:, 0], LABELS)
    with pytest.raises(ValueError, match=r"distance must return a tensor of shape \(6, 6\), got \(6, 5\)"):
        RankedListLoss(0.4, 10, distance=lambda rows: torch.cdist(rows, rows[1:]))(X, LABELS)
    blocks = distances.BatchedDistance(distances.LpDistance(), iter_fn=lambda mat, start, end: None)
    with pytest.raises(ValueError, match=r"distance must return a tensor of shape \(6, 6\), got NoneType"):
        RankedListLoss(0.4, 10, distance=blocks)(X, LABELS)
