"""MatchFinder.pairwise of pairs that are given by row numbers."""

import pytest
import torch

from exactknn.distances import CosineSimilarity, LpDistance, SNRDistance
from exactknn.evaluation import MatchFinder, match

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
PAIRS = torch.stack([torch.arange(100) % 30, torch.arange(100) * 7 % 20], dim=1)


@pytest.mark.parametrize("distance", [LpDistance(), CosineSimilarity(), SNRDistance()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pairs_have_the_values_of_their_rows(distance, dtype, monkeypatch):
    monkeypatch.setattr(match, "_BLOCK_ELEMENTS", 28)  # blocks of 7 pairs, and a rest of 2
    finder, x, y = MatchFinder(distance), X.to(dtype), Y.to(dtype)
    wanted = finder.pairwise(x[PAIRS[:, 0]], y[PAIRS[:, 1]])
    found = finder.pairwise(x, y, PAIRS)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert torch.equal(finder.pairwise(x, y, PAIRS.int().numpy()), wanted)
    assert finder.pairwise(x, y, PAIRS[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        (PAIRS.float(), TypeError, "pairs must hold integers, got torch.float32"),
        (PAIRS[:, :1], ValueError, r"pairs must have shape \(n, 2\), got \(100, 1\)"),
        ([[0, 0], [30, 0]], ValueError, "pairs must name rows of x from 0 to below 30, got 30 in pair 1"),
        ([[0, -1]], ValueError, "pairs must name rows of y from 0 to below 20, got -1 in pair 0"),
    ],
)
def test_what_names_no_rows_is_refused(pairs, error, message):
    with pytest.raises(error, match=message):
        MatchFinder(LpDistance()).pairwise(X, Y, pairs)
