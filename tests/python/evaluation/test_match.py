"""``MatchFinder``: the decisions of all methods are those of the values that ``CustomKNN`` returns."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import distances as pml

import exactknn
from exactknn.distances import (
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
)
from exactknn.evaluation import CustomKNN, MatchCounts, MatchFinder, match_accuracy, match_f1, select_threshold
from exactknn.evaluation.match import _core_bound
from tests.python.evaluation.match_helpers import (
    ALL,
    ALL_IDS,
    NATIVE,
    TORCH,
    TorchCosine,
    TorchLp,
    assert_agree,
    decided,
    rows,
    values_of_all_pairs,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("distance", [CosineSimilarity(), TorchCosine(), pml.CosineSimilarity()], ids=str)
def test_similarities_by_hand(distance):
    # Similarities [[0.995037, 0.707107, -1], [0.0995037, 0.707107, 0]].
    query, reference = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[1, 0.1], [1, 1], [-1, 0]])
    finder = MatchFinder(distance, threshold=0.9)
    assert finder.get_match_matrix(query, reference).tolist() == [[True, False, False], [False, False, False]]
    assert finder.get_match_indices(query, reference).tolist() == [[0, 0]]
    assert finder.is_match(query, reference[:2]).tolist() == [True, False]
    assert finder.get_match_matrix(query, reference, threshold=0).tolist() == [[True, True, False], [True, True, True]]
    assert finder.get_match_indices(query, reference, threshold=0.0).tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [1, 2]
    ]  # fmt: skip
    assert finder.get_match_matrix(query).equal(torch.eye(2, dtype=torch.bool))
    assert finder.get_match_indices(query).tolist() == [[0, 0], [1, 1]]
    assert finder.is_match(query, query).tolist() == [True, True]


@pytest.mark.parametrize("kind", [LpDistance, TorchLp, pml.LpDistance])
def test_the_distance_keeps_its_power(kind):
    finder = MatchFinder(kind(normalize_embeddings=False, power=2), threshold=25.0)
    assert finder.is_match(torch.zeros(2, 2), torch.tensor([[3, 4], [3, 4.001]])).tolist() == [True, False]


@pytest.mark.parametrize("kind", [LpDistance, TorchLp, pml.LpDistance])
def test_the_distance_keeps_its_normalisation(kind):
    finder = MatchFinder(kind(power=2), threshold=1e-6)
    x, y = torch.tensor([[2.0, 0], [0, 5]]), torch.tensor([[1.0, 0], [1, 0]])
    assert finder.is_match(x, y).tolist() == [True, False]
    assert finder.pairwise(x, y).tolist() == pytest.approx([0, 2])


@pytest.mark.parametrize("kind", [LpDistance, TorchLp, pml.LpDistance])
@pytest.mark.parametrize("row", [[1.0, 2.0], [1.0, 2.0, 3.0]])
def test_a_row_matches_itself_at_threshold_zero(kind, row):
    finder, x = MatchFinder(kind(normalize_embeddings=False), threshold=0), torch.tensor([row])
    assert finder.is_match(x, x).tolist() == [True]
    assert finder.get_match_matrix(x, x).tolist() == [[True]]
    assert finder.get_match_indices(x).tolist() == [[0, 0]]
    assert finder.pairwise(x, x).tolist() == [0.0]


@pytest.mark.parametrize("normalise_first", [False, True])
def test_every_row_is_at_cosine_one_of_itself(normalise_first):
    x = rows(2000, 128)
    if normalise_first:
        x = torch.nn.functional.normalize(x)
    finder = MatchFinder(CosineSimilarity(), threshold=1.0)
    assert bool(finder.is_match(x, x).all())
    assert finder.get_match_indices(x).equal(torch.arange(2000).repeat(2, 1).t())
    assert bool(finder.get_match_matrix(x).diagonal().all())
    assert finder.pairwise(x, x).eq(1).all()


@pytest.mark.parametrize("distance", [LpDistance(normalize_embeddings=False), TorchLp(normalize_embeddings=False)])
def test_equal_values_are_on_one_side(distance):
    x, y = torch.zeros(200, 3), torch.tensor([[0.0, 1.0, 0.0]]).expand(200, 3)
    for threshold, matches in ((1.0, True), (math.nextafter(1, 2), True), (0.999, False), (2, True)):
        finder = MatchFinder(distance, threshold)
        assert finder.is_match(x, y).tolist() == [matches] * 200
        assert finder.get_match_matrix(x, y).eq(matches).all()
        assert len(finder.get_match_indices(x, y)) == 40_000 * matches


def test_one_row_gives_a_tensor_of_one():
    match = MatchFinder(LpDistance(), 0.5).is_match(rows(1, 3), rows(1, 3))
    assert (match.shape, match.dtype) == ((1,), torch.bool)
    assert bool(match)


def test_a_float32_value_is_compared_in_float32():
    # 0.1 as float32 is above 0.1 as float64; torch rounds the number first, and so does the finder.
    x, y = torch.zeros(1, 1), torch.tensor([[0.1]])
    for kind in (LpDistance, TorchLp):
        finder = MatchFinder(kind(normalize_embeddings=False), 0.1)
        assert bool(y[0, 0] <= 0.1)
        assert finder.is_match(x, y).tolist() == finder.get_match_matrix(x, y)[0].tolist() == [True]
        assert finder.get_match_indices(x, y).tolist() == [[0, 0]]
    assert len(exactknn.radius(x, y, 0.1, metric="euclidean")[1]) == 0, "there the number stays as it is"


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.float64(1), np.int64(1), torch.tensor(1.0)], ids=repr)
def test_every_kind_of_number_is_a_threshold(number):
    x = torch.tensor([[0.0], [1.0], [2.0]])
    finder = MatchFinder(LpDistance(normalize_embeddings=False), number)
    assert finder.threshold == 1.0
    assert finder.get_match_indices(x, x[:1]).tolist() == [[0, 0], [1, 0]]
    assert finder.is_match(x, x.flip(0), threshold=number).tolist() == [False, True, False]


@pytest.mark.parametrize("distance", ALL, ids=ALL_IDS)
@pytest.mark.parametrize("threshold", [math.inf, -math.inf, 1e300, -1e300])
def test_the_ends_match_all_or_nothing(distance, threshold):
    x, y = rows(7, 5), rows(9, 5, seed=1)
    matches = (threshold > 0) != distance.is_inverted
    finder = MatchFinder(distance)
    assert finder.get_match_matrix(x, y, threshold).equal(torch.full((7, 9), matches))
    wanted = torch.cartesian_prod(torch.arange(7), torch.arange(9)) if matches else torch.empty((0, 2)).long()
    assert finder.get_match_indices(x, y, threshold).equal(wanted)
    assert finder.is_match(x, y[:7], threshold).tolist() == [matches] * 7


def test_values_beyond_float32_are_infinite_and_compared_so():
    x, y = torch.tensor([[3e38, 3e38]]), torch.tensor([[-3e38, 3e38], [3e38, 3e38], [0.0, 0.0]])
    squared = LpDistance(normalize_embeddings=False, power=2)
    for distance, threshold, wanted in [
        (squared, 3.4e38, [False, True, False]),
        (squared, math.inf, [True, True, True]),
        (DotProductSimilarity(), 3.4e38, [False, True, False]),
        (DotProductSimilarity(), math.inf, [False, True, False]),
        (DotProductSimilarity(), -math.inf, [True, True, True]),
    ]:
        assert_agree(distance, x, y, threshold)
        assert MatchFinder(distance, threshold).get_match_matrix(x, y)[0].tolist() == wanted


@pytest.mark.parametrize("method", ["get_match_matrix", "get_match_indices", "is_match", "get_matching_pairs"])
@pytest.mark.parametrize("distance", [CosineSimilarity(), TorchCosine()])
def test_the_threshold_of_the_call_wins_for_that_call(method, distance):
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    finder = MatchFinder(distance, threshold=0.9)
    call = getattr(finder, method)
    matches = (lambda found: len(found) == 1) if method == "get_match_indices" else (lambda found: bool(found.all()))
    assert not matches(call(x, y))
    assert matches(call(x, y, threshold=0.0))
    assert matches(call(x, y, threshold=0))
    assert not matches(call(x, y))
    assert finder.threshold == 0.9
    with pytest.raises(ValueError, match=r"threshold must be given to the finder or to the call"):
        getattr(MatchFinder(distance), method)(x, y)


@pytest.mark.parametrize(
    ("threshold", "error", "message"),
    [
        (math.nan, ValueError, "threshold must be a number or an infinity, got nan"),
        ("0.5", TypeError, "threshold must be a real number, got '0.5' of type str"),
        (True, TypeError, "threshold must be a real number, got True of type bool"),
        (1j, TypeError, "threshold must be a real number"),
        (torch.ones(1), TypeError, "threshold must be a real number"),
        (10**400, ValueError, "beyond the range of float64"),
    ],
)
def test_no_number_is_no_threshold(threshold, error, message):
    with pytest.raises(error, match=re.escape(message)):
        MatchFinder(LpDistance(), threshold)
    for method in ("get_match_matrix", "get_match_indices", "is_match", "get_matching_pairs"):
        with pytest.raises(error, match=re.escape(message)):
            getattr(MatchFinder(LpDistance()), method)(rows(2, 2), rows(2, 2), threshold)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_core_decides_as_the_values_of_knn(name, dtype, level):
    distance, query, reference = NATIVE[name], rows(23, 17, dtype=dtype), rows(260, 17, seed=1, dtype=dtype)
    reference[:3] = query[:3]
    values = values_of_all_pairs(distance, query, reference).double().flatten()
    for share in (0.0, 0.01, 0.4, 0.95):
        value = values.sort().values[int(share * len(values))].item()
        for threshold in (value, math.nextafter(value, math.inf), math.nextafter(value, -math.inf)):
            assert_agree(distance, query, reference, threshold)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_decides_as_the_values_of_knn(name, dtype):
    distance, query, reference = TORCH[name], rows(23, 17, dtype=dtype), rows(60, 17, seed=1, dtype=dtype)
    values = values_of_all_pairs(distance, query, reference).double().flatten()
    for share in (0.01, 0.4, 0.95):
        assert_agree(distance, query, reference, values.sort().values[int(share * len(values))].item(), exact=False)


@pytest.mark.parametrize("kind", [TorchLp, TorchCosine])
@pytest.mark.parametrize("dtype", HALF)
def test_torch_compares_half_values_as_they_are_returned(kind, dtype):
    distance, query, reference = kind(), rows(20, 9, dtype=dtype), rows(30, 9, seed=1, dtype=dtype)
    values = values_of_all_pairs(distance, query, reference)
    assert values.dtype == dtype
    for threshold in values.double().flatten()[:40].tolist():
        finder = MatchFinder(distance, threshold)
        assert finder.get_match_matrix(query, reference).equal(decided(values, threshold, distance))


@st.composite
def problems(draw):
    dtype = draw(st.sampled_from(DTYPES))
    n, m, d = draw(st.integers(0, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 9))
    numbers = st.integers(-3, 3) if draw(st.booleans()) else st.floats(-4, 4, width=16)
    flat = draw(st.lists(numbers, min_size=(n + m) * d, max_size=(n + m) * d))
    both = torch.tensor(flat, dtype=torch.float64).reshape(n + m, d).to(dtype)
    return both[:n], both[n:], draw(st.sampled_from(sorted(NATIVE)))


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_no_two_methods_ever_disagree(problem, data):
    query, reference, name = problem
    distance = NATIVE[name]
    values = values_of_all_pairs(distance, query, reference)
    found = sorted(set(values.double().flatten().tolist()))
    threshold = data.draw(st.sampled_from(found) if found else st.just(0.0))
    if data.draw(st.booleans()):
        # Between this value and the next, where a rounded number may fall on either.
        above = [value for value in found if value > threshold]
        threshold += data.draw(st.floats(0, 1)) * ((above[0] if above else threshold + 1) - threshold)
    assert_agree(distance, query, reference, threshold)


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_a_selected_threshold_decides_everywhere_as_it_was_counted(problem, data):
    query, reference, name = problem
    n = min(len(query), len(reference))
    if n < 2:
        return
    x, y, distance = query[:n], reference[:n], NATIVE[name]
    is_match = torch.tensor([True, False, *data.draw(st.lists(st.booleans(), min_size=n - 2, max_size=n - 2))])
    finder = MatchFinder(distance)
    for metric in (match_accuracy, match_f1):
        threshold, value = select_threshold(finder.pairwise(x, y), is_match, metric, is_inverted=distance.is_inverted)
        paired = finder.is_match(x, y, threshold)
        counts = [
            (paired == d) & (is_match == m) for d, m in ((True, True), (True, False), (False, False), (False, True))
        ]
        assert float(metric(MatchCounts(*(count.sum() for count in counts)))) == value
        matrix = finder.get_match_matrix(x, y, threshold)
        assert matrix.diagonal().equal(paired)
        assert finder.get_match_indices(x, y, threshold).equal(matrix.nonzero())
        assert decided(values_of_all_pairs(distance, x, y), threshold, distance).equal(matrix)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.floats(allow_nan=False) | st.floats(-5, 5) | st.floats(-5, 5, width=16),
    st.booleans(),
    st.integers(-3, 3),
)
def test_the_bound_of_the_core_decides_as_torch_does(dtype, threshold, inverted, steps):
    bound = _core_bound(threshold, dtype, inverted)
    computed = np.float64 if dtype == torch.float64 else np.float32
    with np.errstate(over="ignore"):
        value = computed(threshold if bound is None else bound)
        for _ in range(abs(steps)):
            value = np.nextafter(value, computed(math.copysign(math.inf, steps)))
    # Half types are for normalised rows only.
    if abs(float(value)) > (4 if dtype in HALF else sys.float_info.max / 2):
        return
    value_of_knn = torch.tensor([value]).to(dtype)
    wanted = bool(value_of_knn >= threshold if inverted else value_of_knn <= threshold)
    assert wanted == (bound is None or (float(value) >= bound if inverted else float(value) <= bound))


@pytest.mark.parametrize("dtype", HALF)
def test_all_half_numbers_as_thresholds(dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    for threshold in numbers[:: 1 + len(numbers) // 1500].tolist():
        bound = _core_bound(threshold, dtype, False)
        at = torch.tensor([bound], dtype=torch.float32)
        near = torch.cat([at, torch.nextafter(at, at + math.inf), torch.nextafter(at, at - math.inf)])
        near = near[near.isfinite()]
        assert (near.double() <= bound).equal(near.to(dtype) <= threshold)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_row_of_zeros_has_cosine_zero_with_every_row(dtype):
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    finder = MatchFinder(CosineSimilarity(), threshold=0)
    assert finder.pairwise(x[:1].expand(2, 2), x).tolist() == [0, 0]
    assert finder.get_match_matrix(x, threshold=5e-8).tolist() == [[False, False], [False, True]]
    assert finder.get_match_indices(x).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    for backend in ("rust", "torch"):
        assert CustomKNN(CosineSimilarity(), backend=backend)(x[:1], 2, x)[0].tolist() == [[0, 0]]
    assert exactknn.knn(x[:1], x, 2, metric="cosine")[0].tolist() == [[1, 1]]
