"""The spellings of pytorch-metric-learning 2.9 for losses, distances and reducers, beside that library."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import reducers as pml_reducers

from exactknn import distances, losses, reducers
from exactknn.compat import distances as compat_distances
from exactknn.compat import losses as compat_losses
from exactknn.compat import reducers as compat_reducers


def test_the_old_names_of_the_temperatures():
    loss = compat_losses.RankedListLoss(margin=0.4, Tn=10, imbalance=0.3, alpha=1, Tp=2)
    assert (loss.Tn, loss.Tp, loss.neg_temperature, loss.pos_temperature) == (10, 2, 10, 2)
    assert compat_losses.RankedListLoss(0.4, 10).Tp == 0
    x, labels = torch.randn(8, 3, generator=torch.manual_seed(0)), torch.arange(8) % 3
    assert loss(x, labels).equal(losses.RankedListLoss(0.4, 10, 0.3, 1, 2)(x, labels))
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin(x, labels).equal(loss(x, labels))
    with pytest.raises(TypeError, match="neg_temperature"):
        compat_losses.RankedListLoss(0.4, 10, neg_temperature=10)
    with pytest.raises(ValueError, match="imbalance"):
        compat_losses.RankedListLoss(0.4, 10, imbalance=2)


@pytest.mark.parametrize(("Tn", "Tp"), [(0, 0), (2, 3), (0.8, 0.5)])
def test_the_loss_differs_only_by_what_2_9_adds_to_the_weights(Tn, Tp):
    x, labels = torch.randn(32, 64, dtype=torch.float64, generator=torch.manual_seed(1)), torch.arange(32) % 5
    ours = compat_losses.RankedListLoss(margin=0.4, Tn=Tn, Tp=Tp)(x, labels)
    theirs = pml_losses.RankedListLoss(margin=0.4, Tn=Tn, Tp=Tp)(x, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


def test_the_dot_product_normalises_by_default():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.manual_seed(2))
    for options in ({}, {"normalize_embeddings": False}, {"p": 1}, {"power": 2}):
        ours = compat_distances.DotProductSimilarity(**options)
        theirs = pml_distances.DotProductSimilarity(**options)
        torch.testing.assert_close(ours(x), theirs(x))
        assert isinstance(ours, distances.DotProductSimilarity)


def test_the_names_are_those_of_the_library():
    for ours, module, theirs in (
        (compat_distances, distances, pml_distances),
        (compat_reducers, reducers, pml_reducers),
    ):
        assert set(ours.__all__) == set(module.__all__)
        assert all(hasattr(theirs, name) for name in ours.__all__)
        same = set(ours.__all__) - {"DotProductSimilarity"}
        assert all(getattr(ours, name) is getattr(module, name) for name in same)
