"""The distances: values, rules of types and shapes, gradients, memory."""

import copy
import math
import pickle

import pytest
import torch

from exactknn.distances import (
    BaseDistance,
    BatchedDistance,
    CosineSimilarity,
    DotProductSimilarity,
    LpDistance,
    SNRDistance,
)

A = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
B = torch.tensor([[0.0, 5.0], [1.0, 1.0]], dtype=torch.float64)
ALL = (LpDistance, CosineSimilarity, DotProductSimilarity, SNRDistance)
HALF = (torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan

VALUES = [
    (LpDistance(), [[0.632455532, 0.141778040], [1, 1]]),
    (LpDistance(normalize_embeddings=False), [[3.162277660, 3.605551275], [5, 1.414213562]]),
    (LpDistance(normalize_embeddings=False, power=2), [[10, 13], [25, 2]]),
    (LpDistance(normalize_embeddings=False, p=1), [[4, 5], [5, 2]]),
    (LpDistance(normalize_embeddings=False, p=INF), [[3, 3], [5, 1]]),
    (LpDistance(p=1), [[0.857142857, 0.142857143], [1, 1]]),
    (CosineSimilarity(), [[0.8, 0.989949494], [0, 0]]),
    (CosineSimilarity(p=1), [[0.571428571, 0.5], [0, 0]]),
    (DotProductSimilarity(normalize_embeddings=False), [[20, 7], [0, 0]]),
    (DotProductSimilarity(normalize_embeddings=False, power=2), [[400, 49], [0, 0]]),
    (SNRDistance(normalize_embeddings=False), [[16, 1], [INF, NAN]]),
]


@pytest.mark.parametrize(("distance", "matrix"), VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values(distance, matrix, dtype):
    wanted = torch.tensor(matrix, dtype=dtype)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-8, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(distance(A.to(dtype), B.to(dtype)), wanted, **tolerance)
    torch.testing.assert_close(distance.pairwise(A.to(dtype), B.to(dtype)), wanted.diagonal(), **tolerance)


def test_dot_product_is_plain_by_default():
    assert not DotProductSimilarity().normalize_embeddings
    assert DotProductSimilarity()(A, B).tolist() == [[20, 7], [0, 0]]


@pytest.mark.parametrize("power", [1, 2])
def test_a_root_is_taken_once(power):
    zero, two = torch.tensor([[0.0]]), torch.tensor([[2.0]])
    for p in (1, 2, 3, INF):
        distance = LpDistance(normalize_embeddings=False, p=p, power=power)
        assert distance(zero, two).item() == 2.0**power
        assert distance.pairwise(zero, two).item() == 2.0**power


def test_attributes_and_keywords():
    assert all(isinstance(kind(), (BaseDistance, torch.nn.Module)) for kind in ALL)
    distance = LpDistance(normalize_embeddings=False, p=3, power=2, collect_stats=True)
    assert (distance.normalize_embeddings, distance.p, distance.power) == (False, 3, 2)
    assert (distance.is_inverted, distance.collect_stats) == (False, True)
    assert [kind().is_inverted for kind in ALL] == [False, True, True, False]
    for kind in ALL:
        with pytest.raises(TypeError):
            kind(True)
        with pytest.raises(TypeError):
            kind(metric="l2")


def test_fixed_arguments():
    for kind in (LpDistance, SNRDistance):
        with pytest.raises(ValueError, match=f"is_inverted must be False for {kind.__name__}"):
            kind(is_inverted=True)
        assert kind(is_inverted=False).is_inverted is False
    for kind in (DotProductSimilarity, CosineSimilarity):
        with pytest.raises(TypeError, match="is_inverted"):
            kind(is_inverted=True)
    with pytest.raises(TypeError, match="normalize_embeddings"):
        CosineSimilarity(normalize_embeddings=True)
    for p in (0, -1, NAN):
        with pytest.raises(ValueError, match="p must be a number above 0"):
            LpDistance(p=p)


@pytest.mark.parametrize("kind", ALL)
def test_shapes_and_types_are_checked(kind):
    distance = kind()
    for call, left, right in ((distance, "query_emb", "ref_emb"), (distance.pairwise, "x", "y")):
        with pytest.raises(ValueError, match=rf"{left} must be 2-D .* got shape \(4,\)"):
            call(torch.zeros(4), torch.zeros(1, 4))
        with pytest.raises(ValueError, match=rf"{right} must be 2-D .* got shape \(1, 1, 4\)"):
            call(torch.zeros(1, 4), torch.zeros(1, 1, 4))
        with pytest.raises(ValueError, match="same dimension, got 4 and 3"):
            call(torch.zeros(1, 4), torch.zeros(1, 3))
        for dtype in (torch.int64, torch.bool, torch.complex64):
            with pytest.raises(ValueError, match=f"got {dtype}"):
                call(torch.zeros(2, 4), torch.zeros(2, 4, dtype=dtype))
    with pytest.raises(ValueError, match="same number of rows, got 2 and 1"):
        distance.pairwise(torch.zeros(2, 4), torch.zeros(1, 4))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("normalize", [True, False])
def test_result_types(kind, normalize):
    distance = kind() if kind is CosineSimilarity else kind(normalize_embeddings=normalize)
    normalize = distance.normalize_embeddings
    for dtype in (*HALF, torch.float32, torch.float64):
        wanted = torch.float32 if dtype in HALF and not normalize else dtype
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=dtype)
        for result in (distance(x), distance(x, x), distance.pairwise(x, x.flip(0))):
            assert result.dtype == wanted
        exact = distance(x.double()).to(wanted)
        torch.testing.assert_close(distance(x), exact, atol=1e-2 if wanted in HALF else 1e-6, rtol=1e-2)
    half, other = x.half(), x.bfloat16()
    assert distance(half, other).dtype == torch.float32
    assert distance(half, x.float()).dtype == torch.float32
    assert distance(x.float(), x.double()).dtype == torch.float64


def test_the_self_matrix_equals_the_matrix_with_oneself():
    x = torch.randn(9, 5, generator=torch.manual_seed(0))
    for kind in ALL:
        assert kind()(x).equal(kind()(x, x))
        assert kind()(x).equal(kind()(x, x.clone()))


@pytest.mark.parametrize("kind", ALL)
def test_layouts_give_the_same_values(kind):
    x = torch.randn(7, 5, generator=torch.manual_seed(0))
    distance = kind()
    wanted = distance(x)
    assert distance(x.t().contiguous().t()).equal(wanted)
    assert distance(torch.stack([x, x], 2)[..., 0], x).equal(wanted)
    assert distance.pairwise(x.t().contiguous().t(), x).equal(distance.pairwise(x, x))


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, INF])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_identical_rows_are_at_exactly_zero(p, normalize, dtype):
    x = 100 + 0.01 * torch.randn(90, 33, generator=torch.manual_seed(1))
    x = torch.cat([x, x[:40]]).to(dtype)
    distance = LpDistance(normalize_embeddings=normalize, p=p)
    for reference in (None, x, x.clone(), x.t().contiguous().t()):
        mat = distance(x, reference)
        assert (mat.diagonal() == 0).all()
        assert (mat[:40, 90:].diagonal() == 0).all()
    assert (distance.pairwise(x, x.clone()) == 0).all()


@pytest.mark.parametrize("power", [1, 2])
def test_near_rows_far_from_the_origin_keep_their_digits(power):
    x = 100 + 0.01 * torch.randn(100, 32, generator=torch.manual_seed(2))
    mat = LpDistance(normalize_embeddings=False, power=power)(x)
    exact = (x.double().unsqueeze(1) - x.double()).square().sum(2) ** (power / 2)
    torch.testing.assert_close(mat.double(), exact, rtol=1e-5, atol=0)


def test_half_rows_keep_float32_differences():
    x = torch.full((40, 64), 100.0, dtype=torch.float16)
    x[1, 0] = 100.0625
    before = torch.get_float32_matmul_precision()
    try:
        for precision in (before, "medium"):
            torch.set_float32_matmul_precision(precision)
            mat = LpDistance(normalize_embeddings=False)(x)
            assert mat[0, 1] == 0.0625
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert (mat.diagonal() == 0).all()
    assert (mat[2:, 2:] == 0).all()


def test_half_rows_of_mixed_scale():
    x = torch.tensor([[6e4, 1e-3], [6e4, 2e-3], [-6e4, 0]], dtype=torch.float16)
    mat = LpDistance(normalize_embeddings=False)(x)
    assert mat.dtype == torch.float32
    assert mat[0, 1].item() == pytest.approx(0.00100040, rel=1e-5)
    assert mat[0, 2].item() == 120000
    assert mat.equal(mat.t())
    assert (mat.diagonal() == 0).all()


def test_bfloat16_diagonals_are_zero():
    x = torch.randn(100, 128, generator=torch.manual_seed(3)).bfloat16()
    for normalize in (True, False):
        for reference in (None, x):
            assert (LpDistance(normalize_embeddings=normalize)(x, reference).diagonal() == 0).all()


def test_snr_in_half_precision():
    query = torch.tensor([[1e-4, 2e-4], [1e-3, 2e-3]], dtype=torch.float16, requires_grad=True)
    reference = torch.tensor([[2e-4, 4e-4], [1, 3]], dtype=torch.float16, requires_grad=True)
    mat = SNRDistance(normalize_embeddings=False)(query, reference)
    wanted = torch.tensor([[1, 3.99827e8], [0.640076, 3.99277e6]])
    torch.testing.assert_close(mat, wanted, rtol=1e-3, atol=0)
    mat.float().log().sum().backward()
    assert query.grad.isfinite().all()
    assert reference.grad.isfinite().all()


def test_snr_of_one_dimension_is_nan():
    x = torch.tensor([[1.0], [2.0]])
    assert SNRDistance()(x).isnan().all()
    assert SNRDistance().pairwise(x, x).isnan().all()


GRADIENTS = [
    *(
        LpDistance(p=p, normalize_embeddings=n, power=w)
        for p in (1, 1.5, 2, 3, INF)
        for n in (True, False)
        for w in (1, 2)
    ),
    CosineSimilarity(),
    DotProductSimilarity(power=3),
    SNRDistance(),
]


@pytest.mark.parametrize("distance", GRADIENTS, ids=str)
def test_gradients(distance):
    generator = torch.manual_seed(4)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    y = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(distance, (x, y))
    assert torch.autograd.gradcheck(distance.pairwise, (x, y[:3]))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_second_derivatives(p):
    generator = torch.manual_seed(5)
    x, y = (torch.randn(n, 3, dtype=torch.float64, generator=generator, requires_grad=True) for n in (3, 4))
    distance = LpDistance(p=p, normalize_embeddings=False)
    assert torch.autograd.gradgradcheck(distance, (x, y))
    for sides in ((x, y), (x,)):
        second = []
        for dtype in (torch.float64, torch.float32):
            rows = [side.detach().to(dtype).requires_grad_() for side in sides]
            first = torch.autograd.grad(distance(*rows).square().sum(), rows, create_graph=True)
            second.append(torch.autograd.grad(sum(one.pow(3).sum() for one in first), rows))
        for exact, found in zip(*second, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, INF])
@pytest.mark.parametrize("power", [1, 2])
def test_gradients_at_coinciding_points_are_zero(p, power):
    distance = LpDistance(p=p, power=power, normalize_embeddings=False)
    x = torch.ones(3, 4, requires_grad=True)
    y = torch.ones(5, 4, requires_grad=True)
    for create_graph in (False, True):
        gradients = torch.autograd.grad(distance(x, y).sum(), (x, y), create_graph=create_graph)
        assert all((gradient == 0).all() for gradient in gradients)
    gradients = torch.autograd.grad(distance.pairwise(x, y[:3]).sum(), (x, y))
    assert all((gradient == 0).all() for gradient in gradients)
    distance(x).sum().backward()
    assert (x.grad == 0).all()


def test_the_blocks_of_the_backward_pass_agree_with_the_kernel():
    x = torch.randn(300, 40, generator=torch.manual_seed(6), requires_grad=True)
    y = torch.randn(900, 40, generator=torch.manual_seed(7), requires_grad=True)
    mat = LpDistance(normalize_embeddings=False, p=3)(x, y)
    weight = torch.randn(mat.shape, generator=torch.manual_seed(8))
    one = torch.autograd.grad((mat * weight).sum(), (x, y), retain_graph=True)
    blocks = torch.autograd.grad((mat * weight).sum(), (x, y), create_graph=True)
    torch.testing.assert_close(one, blocks, rtol=1e-4, atol=1e-4)


def test_the_product_and_the_differences_agree():
    # Pairs at every distance from 1e-10 of the rows' length to that length, and rows far from the origin.
    generator = torch.manual_seed(9)
    base = torch.randn(40, 24, generator=generator)
    scales = torch.logspace(-10, 0, 40).unsqueeze(1)
    near = base + scales * torch.randn(40, 24, generator=generator)
    for offset in (0, 100):
        for scale in (1, 1e-15, 1e15):
            x, y = (scale * (rows + offset) for rows in (base, torch.cat([near, base[:5]])))
            exact = (x.double().unsqueeze(1) - y.double()).square().sum(2).sqrt()
            for found, wanted in (
                (LpDistance(normalize_embeddings=False)(x, y), exact),
                (LpDistance(normalize_embeddings=False)(y, x), exact.t()),
            ):
                torch.testing.assert_close(found.double(), wanted, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_of_near_and_of_far_pairs(alone):
    generator = torch.manual_seed(10)
    x = torch.randn(30, 8, generator=generator)
    y = x + torch.logspace(-12, 0, 30).unsqueeze(1) * torch.randn(30, 8, generator=generator)
    y[3] = x[3]
    # Rows whose distance is far below a rounding of their length: a difference in a tiny coordinate only.
    x[:, 0], y[:, 0] = 1e-20 * torch.arange(30), 2e-20 * torch.arange(30)
    y[5, 1:] = x[5, 1:]
    if alone:
        x, y = torch.cat([x, y]), None
    weights = torch.randn(len(x), len(x if alone else y), generator=generator)
    sides = [side.clone().requires_grad_() for side in (x, y) if side is not None]
    (LpDistance(normalize_embeddings=False)(*sides) * weights).sum().backward()

    wide = [side.detach().double() for side in (sides[0], sides[-1])]
    difference = wide[0].unsqueeze(1) - wide[1]
    length = difference.norm(dim=2, keepdim=True)
    slopes = difference / length.masked_fill(length == 0, INF) * weights.double().unsqueeze(2)
    wanted = [slopes.sum(1), -slopes.sum(0)]
    wanted = [wanted[0] + wanted[1]] if alone else wanted
    for side, exact in zip(sides, wanted, strict=True):
        torch.testing.assert_close(side.grad.double(), exact, rtol=1e-5, atol=2e-6)


def test_one_bad_row_does_not_spoil_the_others():
    x = torch.randn(6, 4, generator=torch.manual_seed(11))
    wanted = LpDistance(normalize_embeddings=False)(x)
    for bad in (NAN, INF, -INF, 3e38):
        spoilt = x.clone()
        spoilt[2, 1] = bad
        mat = LpDistance(normalize_embeddings=False)(spoilt)
        others = torch.arange(6) != 2
        torch.testing.assert_close(mat[others][:, others], wanted[others][:, others])
        by_difference = LpDistance(normalize_embeddings=False)(spoilt.double()).float()
        torch.testing.assert_close(mat, by_difference, equal_nan=True)


MEMORY = """
import resource, torch
from exactknn.distances import LpDistance
x = torch.randn(2048, 128).bfloat16().requires_grad_()
LpDistance(normalize_embeddings=False)(x[:64]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mat = LpDistance(normalize_embeddings=False)(x)
mat.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_backward_memory_is_far_below_one_difference_per_pair(run_python):
    # In its own process: a peak is that of the whole life of a process.
    grown = int(run_python(MEMORY)) * 1024
    assert grown < 10 * 2048 * 2048 * 4


def test_recorded_norms():
    distance = LpDistance(collect_stats=True)
    distance(A, B)
    assert distance.initial_avg_query_norm == 2.5
    assert distance.initial_avg_ref_norm == pytest.approx((5 + 2**0.5) / 2)
    assert distance.final_avg_query_norm == 0.5
    assert distance.final_avg_ref_norm == pytest.approx(1)
    assert not hasattr(LpDistance(), "initial_avg_query_norm")


def test_smallest_largest_margin_and_norms():
    values = torch.tensor([[1.0, 3.0], [4.0, 2.0]])
    near, far = LpDistance(), CosineSimilarity()
    assert near.smallest_dist(values) == far.largest_dist(values) == 1
    assert near.largest_dist(values) == far.smallest_dist(values) == 4
    assert near.smallest_dist(values, dim=1).values.tolist() == [1, 2]
    assert (near.margin(3, 1), far.margin(3, 1)) == (2, -2)
    assert near.get_norm(A).tolist() == [5, 0]
    assert near.normalize(A).tolist() == [[0.6, 0.8], [0, 0]]
    assert LpDistance(normalize_embeddings=False).maybe_normalize(A) is A


class Manhattan(BaseDistance):
    def compute_mat(self, query_emb, ref_emb):
        return (query_emb.unsqueeze(1) - ref_emb).abs().sum(2)

    def pairwise_distance(self, query_emb, ref_emb):
        return (query_emb - ref_emb).abs().sum(1)


def test_a_subclass_gives_two_hooks():
    distance = Manhattan(normalize_embeddings=False, power=2)
    assert distance(A, B).tolist() == [[16, 25], [25, 4]]
    assert distance.pairwise(A, B).tolist() == [16, 4]
    with pytest.raises(NotImplementedError):
        BaseDistance()(A, B)
    with pytest.raises(NotImplementedError):
        BaseDistance().pairwise(A, B)


def test_a_matrix_of_a_wrong_size_is_an_error():
    class Wrong(Manhattan):
        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb, ref_emb)[:1]

    with pytest.raises(ValueError, match=r"Wrong.compute_mat must return shape \(2, 2\), got \(1, 2\)"):
        Wrong()(A, B)


def test_check_shapes_can_be_overridden():
    class Stacked(LpDistance):
        def check_shapes(self, query_emb, ref_emb):
            if query_emb.ndim != 3:
                raise ValueError("three dimensions")

        def compute_mat(self, query_emb, ref_emb):
            return super().compute_mat(query_emb[:, 0], ref_emb[:, 0])

    distance = Stacked(normalize_embeddings=False)
    assert distance(A[:, None], B[:, None]).equal(LpDistance(normalize_embeddings=False)(A, B))
    with pytest.raises(ValueError, match="three dimensions"):
        distance(A, B)


def test_batched_distance():
    x, y = torch.randn(10, 3, generator=torch.manual_seed(0)), torch.randn(4, 3, generator=torch.manual_seed(1))
    seen = []
    batched = BatchedDistance(CosineSimilarity(), lambda mat, s, e: seen.append((mat, s, e)), batch_size=4)
    assert batched(x, y) is None
    assert [(s, e) for _, s, e in seen] == [(0, 4), (4, 8), (8, 12)]
    torch.testing.assert_close(torch.cat([mat for mat, _, _ in seen]), CosineSimilarity()(x, y))
    seen.clear()
    batched(x)
    assert [mat.shape for mat, _, _ in seen] == [(4, 10), (4, 10), (2, 10)]
    assert batched.is_inverted
    assert batched.p == 2
    with pytest.raises(AttributeError):
        _ = batched.no_such_thing
    with pytest.raises(TypeError, match="iter_fn must be a function"):
        BatchedDistance(CosineSimilarity())(x)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        BatchedDistance(CosineSimilarity(), batch_size=0)


@pytest.mark.parametrize("distance", [LpDistance(p=3), CosineSimilarity(), BatchedDistance(SNRDistance())], ids=str)
def test_copies(distance):
    for twin in (pickle.loads(pickle.dumps(distance)), copy.deepcopy(distance), copy.copy(distance)):
        assert type(twin) is type(distance)
        assert (twin.p, twin.is_inverted) == (distance.p, distance.is_inverted)


def test_empty_sides():
    for kind in ALL:
        assert kind()(torch.zeros(0, 3), torch.zeros(2, 3)).shape == (0, 2)
        assert kind()(torch.zeros(2, 3), torch.zeros(0, 3)).shape == (2, 0)
        assert kind().pairwise(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)


def test_gradients_where_all_rows_coincide():
    x = torch.ones(200, 50, requires_grad=True)
    y = torch.ones(100, 50, requires_grad=True)
    (LpDistance(normalize_embeddings=False)(x, y).sum() + LpDistance(normalize_embeddings=False)(x).sum()).backward()
    assert (x.grad == 0).all()
    assert (y.grad == 0).all()
