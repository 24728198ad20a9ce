"""The ranked list loss: values against a plain loop, gradients, extremes, types, options and errors."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import reducers as pml_reducers
from pytorch_metric_learning import regularizers as pml_regularizers
from pytorch_metric_learning.losses import RankedListLoss as PMLRankedListLoss

from exactknn import distances, reducers
from exactknn.losses import BaseMetricLossFunction, RankedListLoss
from exactknn.losses.ranked_list import _Average, average_of_excess

HALF = (torch.float16, torch.bfloat16)
X = torch.tensor(
    [
        [length * math.cos(math.radians(angle)), length * math.sin(math.radians(angle))]
        for length, angle in [(1, 0), (2, 12), (0.5, 55), (3, 25), (1, 70), (1, 130)]
    ],
    dtype=torch.float64,
)
LABELS = torch.tensor([0, 0, 0, 1, 1, 1])

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


def row_losses(loss, embeddings, labels):
    return loss.loss_terms(embeddings, labels)["loss"]["losses"]


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


@pytest.mark.parametrize("imbalance", [-0.1, 1.1])
def test_imbalance_is_checked(imbalance):
    with pytest.raises(ValueError, match="imbalance must be between 0 and 1, got"):
        RankedListLoss(0.4, 10, imbalance=imbalance)


@pytest.mark.parametrize("name", ["margin", "neg_temperature", "imbalance", "alpha", "pos_temperature"])
def test_numbers_are_finite_numbers(name):
    given = {"margin": 0.4, "neg_temperature": 10}
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"{name} must be a finite number, got {value}"):
            RankedListLoss(**given | {name: value})
    with pytest.raises(ValueError, match=f"{name} must be a finite number"):
        RankedListLoss(**given | {name: 10**400})
    for value in ("0.5", [0.5]):
        with pytest.raises(TypeError, match=f"{name} must be a real number, got"):
            RankedListLoss(**given | {name: value})


def test_refused_options():
    for similarity in (distances.CosineSimilarity(), pml_distances.DotProductSimilarity()):
        with pytest.raises(ValueError, match=f"got the similarity {type(similarity).__name__}"):
            RankedListLoss(0.4, 10, distance=similarity)
    with pytest.raises(TypeError, match="Tn"):
        RankedListLoss(0.4, 10, Tn=1)


def test_refused_arguments():
    loss = RankedListLoss(0.4, 10)
    x, labels = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="labels must be given for RankedListLoss"):
        loss(x)
    for name, value in (("indices_tuple", (labels,) * 3), ("ref_emb", x), ("ref_labels", labels)):
        for call in (loss, loss.loss_terms):
            with pytest.raises(ValueError, match=f"{name} must be None"):
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


def test_a_regularizer_that_returns_a_number():
    loss = RankedListLoss(0.4, 10, embedding_regularizer=lambda x: 3.0)
    assert loss(X, LABELS).item() == pytest.approx(0.521970803615 + 3)


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
    with pytest.raises(ValueError, match=r"distance must give shape \(6, 6\) for 6 rows, got \(6, 5\)"):
        RankedListLoss(0.4, 10, distance=lambda rows: torch.cdist(rows, rows[1:]))(X, LABELS)
