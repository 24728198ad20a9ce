"""The ranked list loss: values against a plain loop, gradients, extremes, types, options and errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import reducers as pml_reducers
from pytorch_metric_learning.losses import RankedListLoss as PMLRankedListLoss

from exactknn import distances, reducers
from exactknn.losses import RankedListLoss
from exactknn.losses.ranked_list import _Average, average_of_excess
from tests.python.losses.loss_helpers import LABELS, X, row_losses

HALF = (torch.float16, torch.bfloat16)
GOLDEN = [
    ((0.4, 10), [0.445026875, 0.486576953, 0.522066367, 0.862363169, 0.569114789, 0.246676670], 0.521970803615),
    ((0.4, 0), [0.266740588, 0.300993583, 0.467075995, 0.797199383, 0.303695917, 0.246676670], 0.397063689259),
    (
        (0.4, 1, 0.3, None, 1),
        [0.246159364, 0.220216381, 0.334555291, 0.797598645, 0.309194079, 0.403916157],
        0.385273319610,
    ),
    ((0.4, 10, 0, None, 5), [0.123497226, 0, 0.123497226, 0.786706681, 0.2, 0.757065928], 0.331794510245),
    (
        (0.4, 10, 1, None, 5),
        [0.766556524, 0.973153905, 0.920635507, 0.938019657, 0.938229577, 0],
        0.756099194927,
    ),
    ((0.4, -10, 0.5, None, -10), None, 0.268038589442),
    ((0.4, 1e4, 0.5, None, 1e4), None, 0.551050913523),
    ((1.2, 2, 0.5, 1, 3), None, 0.881449302379),
]


def published(embeddings, labels, margin, neg_temperature, imbalance, alpha, pos_temperature):
    """The formula of the paper by a plain loop over float64 numbers."""
    rows = [[value / math.hypot(*row) for value in row] for row in embeddings.double().tolist()]
    labels = labels.tolist()

    def average(values, temperature):
        if not values:
            return 0.0
        largest = max(temperature * value for value in values)
        weights = [math.exp(temperature * value - largest) for value in values]
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)

    losses = []
    for i, row in enumerate(rows):
        positive, negative = [], []
        for j, other in enumerate(rows):
            distance = math.dist(row, other)
            if i != j and labels[i] == labels[j] and distance > alpha - margin:
                positive.append(distance - (alpha - margin))
            elif labels[i] != labels[j] and distance < alpha:
                negative.append(alpha - distance)
        losses.append(
            (1 - imbalance) * average(positive, pos_temperature) + imbalance * average(negative, neg_temperature)
        )
    return losses


@pytest.mark.parametrize(("arguments", "rows", "mean"), GOLDEN, ids=[str(golden[0]) for golden in GOLDEN])
def test_worked_values(arguments, rows, mean):
    loss = RankedListLoss(*arguments)
    x = X.clone().requires_grad_()
    value = loss(x, LABELS)
    value.backward()
    assert value.item() == pytest.approx(mean, rel=1e-9)
    assert x.grad.isfinite().all()
    assert (x.grad != 0).any()
    if rows is not None:
        wanted = torch.tensor(rows, dtype=torch.float64)
        torch.testing.assert_close(row_losses(loss, X, LABELS), wanted, rtol=0, atol=1e-8)
    assert loss(X.float(), LABELS).item() == pytest.approx(mean, rel=1e-5)


def test_the_gradient_flows_through_the_weights():
    x = X.clone().requires_grad_()
    RankedListLoss(0.4, 10)(x, LABELS).backward()
    wanted = [
        [0, -0.07268424],
        [-0.01845184, 0.08680907],
        [-0.54956848, 0.38481199],
        [0.04839063, -0.10377405],
        [0.26415196, -0.09614345],
        [-0.14121903, -0.11849684],
    ]
    torch.testing.assert_close(x.grad, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6)


def test_coinciding_rows_of_different_labels_are_the_hardest():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    loss = RankedListLoss(0.4, 1)
    labels = torch.tensor([0, 1, 0])
    torch.testing.assert_close(row_losses(loss, x, labels), torch.tensor([0.907106781, 0.6, 0.307106781]))
    value = loss(x, labels)
    assert value.item() == pytest.approx(0.604737854124, rel=1e-6)
    value.backward()
    assert x.grad.isfinite().all()


def test_a_positive_at_distance_zero_counts_where_alpha_is_below_the_margin():
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert RankedListLoss(0.5, 1, imbalance=0, alpha=0.25)(x, torch.tensor([3, 3])).item() == 0.25


def test_a_solved_batch_has_loss_exactly_zero():
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    value = RankedListLoss(0.4, 10)(x, torch.tensor([0, 0, 1]))
    assert value.item() == 0
    value.backward()
    assert (x.grad == 0).all()


def test_one_class():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    loss = RankedListLoss(0.4, 10)
    wanted = torch.tensor([0.453553391, 0.307106781, 0.523879533, 0.476995438], dtype=torch.float64)
    torch.testing.assert_close(row_losses(loss, x, torch.zeros(4)), wanted, rtol=0, atol=1e-8)
    assert loss(x, torch.zeros(4)).item() == pytest.approx(0.440383785548, rel=1e-9)


def test_a_collapsed_model_is_not_solved():
    x = torch.ones(6, 4, requires_grad=True)
    loss = RankedListLoss(0.4, 10, imbalance=1)
    value = loss(x, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert value.item() == pytest.approx(loss.alpha)
    value.backward()
    assert x.grad.isfinite().all()


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 12),
    classes=st.integers(1, 5),
    margin=st.floats(-0.5, 2),
    alpha=st.floats(-0.5, 2.5),
    imbalance=st.floats(0, 1),
    temperatures=st.tuples(*[st.floats(-30, 30) | st.sampled_from([0.0, 1e6, -1e6])] * 2),
)
def test_values_are_those_of_a_plain_loop(seed, n, classes, margin, alpha, imbalance, temperatures):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    loss = RankedListLoss(margin, temperatures[0], imbalance, alpha, temperatures[1])
    wanted = published(x, labels, margin, temperatures[0], imbalance, alpha, temperatures[1])
    losses = row_losses(loss, x, labels)
    torch.testing.assert_close(losses, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert loss(x, labels).item() == pytest.approx(math.fsum(wanted) / n, rel=1e-9, abs=1e-9)


def test_the_published_loss_of_unit_rows():
    # pytorch-metric-learning adds 1e-5 for each of the 12 rows to the weights' sum and finds 0.63343 on such rows.
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    labels = torch.arange(12) % 4
    wanted = math.fsum(published(x, labels, 0.4, 1, 0.5, 1.2, 0)) / 12
    assert RankedListLoss(0.4, 1)(x, labels).item() == pytest.approx(wanted, rel=1e-14)
    theirs = PMLRankedListLoss(0.4, 1)(x, labels).item()
    assert theirs != pytest.approx(wanted, rel=1e-6)
    assert theirs == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("temperatures", [(0, 0), (10, 3), (-4, 2), (1, -10)])
@pytest.mark.parametrize(("margin", "alpha"), [(0.4, None), (1.2, 1.0), (0.1, 2.5)])
@pytest.mark.parametrize("imbalance", [0, 0.5, 1])
def test_gradients(temperatures, margin, alpha, imbalance):
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.manual_seed(1), requires_grad=True)
    labels = torch.arange(9) % 3
    loss = RankedListLoss(margin, temperatures[0], imbalance, alpha, temperatures[1])
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), x)


@pytest.mark.parametrize(
    "distance", [distances.LpDistance(p=1), distances.LpDistance(power=2), distances.SNRDistance()]
)
@pytest.mark.parametrize(
    "reducer",
    [
        reducers.SumReducer(),
        reducers.AvgNonZeroReducer(),
        reducers.ThresholdReducer(high=0.6),
        reducers.ClassWeightedReducer([1.0, 0.5, 2.0]),
        reducers.PerAnchorReducer(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_gradients_with_other_distances_and_reducers(distance, reducer):
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.manual_seed(2), requires_grad=True)
    labels = torch.arange(9) % 3
    loss = RankedListLoss(0.4, 5, pos_temperature=2, distance=distance, reducer=reducer)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), x)


def test_second_derivatives():
    x = torch.randn(7, 3, dtype=torch.float64, generator=torch.manual_seed(3), requires_grad=True)
    labels = torch.arange(7) % 2
    loss = RankedListLoss(0.8, 3, pos_temperature=2)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, labels), x)


def test_gradients_as_functions():
    x = torch.randn(7, 3, generator=torch.manual_seed(3), requires_grad=True)
    labels = torch.arange(7) % 2
    for loss in (RankedListLoss(0.8, 3), RankedListLoss(0.8, 3, distance=distances.LpDistance(p=1))):
        found = torch.func.grad(lambda x, loss=loss: loss(x, labels))(x.detach())
        torch.testing.assert_close(found, torch.autograd.grad(loss(x, labels), x)[0])


@pytest.mark.parametrize("temperature", [0.0, -0.0, 3.0, -3.0, 1e38, -1e38, 1e300])
def test_the_average_and_its_slopes_are_those_of_the_plain_formula(temperature):
    excess = torch.randn(8, 9, dtype=torch.float64, generator=torch.manual_seed(4), requires_grad=True)
    candidates = torch.rand(8, 9, generator=torch.manual_seed(5)) < 0.5
    candidates[2] = False
    plain = average_of_excess(excess, candidates, temperature)
    wanted = torch.autograd.grad(plain.square().sum(), excess)[0]
    assert plain[2] == 0
    assert (wanted[2] == 0).all()

    fast, _ = _Average.apply(excess, candidates, temperature)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(fast.square().sum(), excess)[0]
    assert found.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("arguments", "alpha", "wanted"),
    [((0.4, 1e38), 10, 4.195262146), ((0.4, -1e38), 10, 4.097631073), ((0.4, 3e38), 10, 4.195262146)],
)
def test_temperatures_beyond_the_range_of_the_type(arguments, alpha, wanted):
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
    value = RankedListLoss(*arguments, alpha=alpha)(x, torch.tensor([0, 1, 1]))
    assert value.item() == pytest.approx(wanted, rel=1e-6)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() < 10


def test_an_alpha_near_the_end_of_the_range():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    value = RankedListLoss(0.4, 1e10, alpha=1e30)(x, torch.tensor([0, 1]))
    assert value.item() == pytest.approx(5e29, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("temperature", [1000.0, -1000.0, 1e4, 1e300, -1e300])
@pytest.mark.parametrize(
    "labels", [[0] * 8, list(range(8)), [0, 0, 0, 0, 1, 1, 1, 2]], ids=["one class", "no partners", "mixed"]
)
def test_loss_and_gradient_are_finite(dtype, temperature, labels):
    x = torch.randn(8, 5, generator=torch.manual_seed(6)).to(dtype)
    x[1] = x[0]
    x[5] = x[4] * 2
    if dtype not in HALF:
        x[7] = 0  # whose gradient through the normalisation is out of the range of float16
    for imbalance in (0, 0.3, 1):
        rows = x.clone().requires_grad_()
        loss = RankedListLoss(0.4, temperature, imbalance, pos_temperature=temperature)
        value = loss(rows, torch.tensor(labels))
        value.backward()
        assert value.isfinite()
        assert rows.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"reducer": pml_reducers.MeanReducer()}, {"embedding_regularizer": lambda x: x.sum() * 0}], ids=str
)
def test_batches_of_one_row_and_of_none(dtype, n, options):
    x = torch.ones(n, 3, dtype=dtype, requires_grad=True)
    value = RankedListLoss(0.4, 10, **options)(x, torch.zeros(n, dtype=torch.int64))
    assert value.item() == 0
    assert value.dtype == dtype
    value.backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("dtype", HALF)
def test_half_types_are_computed_in_float32(dtype):
    x = torch.randn(40, 16, generator=torch.manual_seed(7)).to(dtype)
    labels = torch.arange(40) % 5
    for arguments in ((0.4, 10), (0.4, 1000, 0.5, None, 1000)):
        loss = RankedListLoss(*arguments)
        rows, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        value, wanted = loss(rows, labels), loss(exact, labels)
        value.backward()
        wanted.backward()
        assert value.dtype == dtype
        assert value == wanted.to(dtype)
        assert row_losses(loss, x, labels).dtype == torch.float32
        torch.testing.assert_close(rows.grad, exact.grad.to(dtype), rtol=2e-2, atol=1e-4)


def test_half_rows_without_normalisation_give_float32():
    x = torch.tensor([[6e4, 0], [0, 6e4]], dtype=torch.float16)
    value = RankedListLoss(0.4, 10, distance=distances.LpDistance(normalize_embeddings=False))(x, torch.tensor([0, 0]))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(42426.007, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    x = torch.randn(20, 8, generator=torch.manual_seed(8))
    labels = torch.arange(20) % 4
    for distance in (distances.LpDistance(), distances.LpDistance(p=1), pml_distances.LpDistance()):
        loss = RankedListLoss(0.4, 10, distance=distance)
        rows, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            value = loss(rows, labels)
        value.backward()
        plain = loss(wanted, labels)
        plain.backward()
        assert value.dtype == torch.float32
        assert value == plain
        assert rows.grad.equal(wanted.grad)


COMPILED = [
    {},
    {"distance": distances.LpDistance(normalize_embeddings=False)},
    {"distance": distances.LpDistance(p=1)},
    {"distance": distances.SNRDistance()},
    {"reducer": reducers.AvgNonZeroReducer()},
    {"reducer": reducers.ClassWeightedReducer([1.0, 2.0, 0.5, 1.0])},
    {"reducer": reducers.PerAnchorReducer(reducers.ThresholdReducer(low=0.3))},
    {"reducer": reducers.MultipleReducers({"loss": reducers.SumReducer()})},
    {"embedding_regularizer": lambda x: x.square().mean()},
]


@pytest.mark.parametrize("options", COMPILED, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_compiles_into_one_graph(options, dtype):
    torch.compiler.reset()
    x = torch.randn(20, 8, generator=torch.manual_seed(9)).to(dtype)
    labels = torch.arange(20) % 4
    loss = RankedListLoss(0.4, 10, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    rows, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    value, plain = compiled(rows, labels), loss(wanted, labels)
    value.backward()
    plain.backward()
    assert value.equal(plain)
    torch.testing.assert_close(rows.grad, wanted.grad)


def test_the_example_of_a_training_step():
    loss = RankedListLoss(margin=0.4, neg_temperature=10)
    embeddings = torch.randn(32, 128, generator=torch.manual_seed(10), requires_grad=True)
    value = loss(embeddings, torch.arange(32) % 8)
    value.backward()
    assert 0 < value.item() < 2
    assert embeddings.grad.isfinite().all()
    assert (embeddings.grad != 0).any(dim=1).all()


def test_no_row_meets_itself():
    # Only the row's own similarity could be a positive of a lone row, or a negative of a label that is NaN.
    x = torch.randn(4, 3, generator=torch.manual_seed(11))
    assert RankedListLoss(5, 1, imbalance=0, alpha=0)(x, torch.arange(4)).item() == 0
    nan = torch.tensor([math.nan] * 4)
    far = RankedListLoss(0, 1, imbalance=1, alpha=0.01)
    assert far(x, nan).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_seen_in_the_loss(dtype, bad):
    x = torch.randn(6, 3, generator=torch.manual_seed(14)).to(dtype)
    x[4, 1] = bad
    for imbalance in (0, 1):
        assert RankedListLoss(0.4, 10, imbalance)(x, LABELS).isnan()
    # A reducer with bounds takes it for nothing between them.
    assert RankedListLoss(0.4, 10, reducer=reducers.AvgNonZeroReducer())(x, LABELS) == 0
