"""The reducers: values, kinds of losses, types, and what they refuse."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import reducers as pml

from exactknn import reducers
from exactknn.reducers import (
    AvgNonZeroReducer,
    BaseReducer,
    ClassWeightedReducer,
    DivisorReducer,
    DoNothingReducer,
    MeanReducer,
    MultipleReducers,
    PerAnchorReducer,
    SumReducer,
    ThresholdReducer,
)
from exactknn.types import PairIndices, TripletIndices

HALF = (torch.float16, torch.bfloat16)
LOSSES = [0.0, 2.0, -1.0, 3.0]
LABELS = torch.tensor([0, 1, 1, 2])
ROWS = torch.arange(4)
PAIRS = (torch.tensor([0, 0, 2, 2]), torch.tensor([1, 3, 0, 1]))
TRIPLETS = (*PAIRS, torch.tensor([3, 1, 3, 3]))
INDICES = {"element": ROWS, "pos_pair": PAIRS, "neg_pair": PAIRS, "triplet": TRIPLETS}

SINGLE = [
    (MeanReducer(), 1),
    (SumReducer(), 4),
    (AvgNonZeroReducer(), 2.5),
    (ThresholdReducer(low=1), 2.5),
    (ThresholdReducer(high=2.5), 1 / 3),
    (ThresholdReducer(high=3), 1 / 3),
    (ThresholdReducer(low=0, high=2.5), 2),
    (ThresholdReducer(0, 2.5), 2),
]


def embeddings(dtype=torch.float64, n=4):
    return torch.ones(n, 3, dtype=dtype, requires_grad=True)


def term(losses, indices, kind=None, dtype=torch.float64, **more):
    losses = torch.tensor(losses, dtype=dtype, requires_grad=True) if isinstance(losses, list) else losses
    return {"losses": losses, "indices": indices} | ({} if kind is None else {"reduction_type": kind}) | more


def reduce(reducer, losses, indices, kind=None, labels=LABELS, dtype=torch.float64, **more):
    return reducer({"loss": term(losses, indices, kind, dtype, **more)}, embeddings(dtype), labels)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize(("reducer", "wanted"), SINGLE, ids=lambda value: repr(value))
def test_values(reducer, wanted, kind, dtype):
    for given in (kind, None):
        value = reduce(reducer, LOSSES, INDICES[kind], given, dtype=dtype)
        assert value.dtype == dtype
        assert value.shape == ()
        assert value == torch.tensor(wanted, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_class_weights(dtype):
    for weights in ([1, 0.5, 2], torch.tensor([1, 0.5, 2]), torch.tensor([1, 0.5, 2], dtype=torch.float64)):
        reducer = ClassWeightedReducer(weights)
        assert reduce(reducer, LOSSES, ROWS, dtype=dtype) == torch.tensor(1.625, dtype=dtype)
        # Anchors 0, 0, 2, 2: weights 1, 1, 0.5, 0.5.
        for kind in ("pos_pair", "neg_pair", "triplet"):
            value = reduce(reducer, LOSSES, INDICES[kind], kind, dtype=dtype)
            assert value == torch.tensor(0.75, dtype=dtype)
    # The sum is not divided by the weights'.
    assert reduce(ClassWeightedReducer(torch.tensor([2, 2, 2])), LOSSES, ROWS).item() == 2


def test_class_weights_keep_their_digits():
    reducer = ClassWeightedReducer(torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64))
    reduce(reducer, LOSSES, ROWS, dtype=torch.float16)
    assert reduce(reducer, [1.0] * 4, ROWS).item() == pytest.approx(0.1, rel=1e-15)
    assert reducer.state_dict() == {}


def test_class_weights_need_classes():
    for weights in (1.0, [[1.0, 2.0]]):
        with pytest.raises(ValueError, match=r"^weights must be 1-D, one per class, got shape \("):
            ClassWeightedReducer(weights)
    for labels in (None, LABELS.float()):
        with pytest.raises(ValueError, match="labels must be integer class numbers for ClassWeightedReducer"):
            reduce(ClassWeightedReducer([1.0, 1, 1]), LOSSES, ROWS, labels=labels)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_divisor(kind, dtype):
    for divisor in (8, 8.0, torch.tensor(8)):
        value = reduce(DivisorReducer(), LOSSES, INDICES[kind], kind, dtype=dtype, divisor=divisor)
        assert value == torch.tensor(0.5, dtype=dtype)
        assert value.dtype == dtype
    for divisor in (0, torch.tensor(0.0)):
        assert reduce(DivisorReducer(), LOSSES, INDICES[kind], kind, dtype=dtype, divisor=divisor).item() == 0
    with pytest.raises(KeyError, match="divisor"):
        reduce(DivisorReducer(), LOSSES, INDICES[kind], kind, dtype=dtype)


def test_a_divisor_of_a_sum_out_of_range():
    value = reduce(DivisorReducer(), [60000.0] * 4, ROWS, dtype=torch.float16, divisor=8)
    assert (value.item(), value.dtype) == (30000, torch.float16)


def test_a_divisor_is_used_or_refused():
    terms = {"loss": term(LOSSES, ROWS, "element", divisor=2)}
    for reducer in (MeanReducer(), AvgNonZeroReducer(), PerAnchorReducer(), ClassWeightedReducer([1.0, 1, 1])):
        message = rf"loss_dict\['loss'\] has a divisor, which {type(reducer).__name__} would ignore"
        with pytest.raises(ValueError, match=message):
            reducer(terms, embeddings(), LABELS)
    assert MultipleReducers({"loss": DivisorReducer()})(terms, embeddings(), LABELS).item() == 2
    assert DoNothingReducer()(terms, embeddings(), LABELS) is terms


def test_values_that_are_reduced_already():
    for losses in (torch.tensor(3.0), torch.tensor([3.0])):
        for kind in ("already_reduced", None):
            for reducer in (MeanReducer(), SumReducer(), ThresholdReducer(low=5), DivisorReducer(), PerAnchorReducer()):
                assert reduce(reducer, losses, None, kind) is losses
    with pytest.raises(ValueError, match=r"must be one value for already_reduced, got shape \(2,\)"):
        reduce(MeanReducer(), torch.zeros(2), None, "already_reduced")


ALL = [
    MeanReducer(),
    SumReducer(),
    AvgNonZeroReducer(),
    ThresholdReducer(high=-9),
    ClassWeightedReducer([1.0, 1.0, 1.0]),
    PerAnchorReducer(),
    MultipleReducers({}),
]


@pytest.mark.parametrize("reducer", ALL, ids=lambda value: type(value).__name__)
def test_nothing_to_reduce_is_a_zero_with_a_zero_gradient(reducer):
    x = embeddings()
    with torch.no_grad():
        x[0, 0] = torch.inf  # nothing of the rows enters the value
    nothing = torch.zeros(0, dtype=torch.int64)
    cases = [
        {},
        {"loss": term(0, None, "already_reduced")},
        {"loss": term(0, ROWS, "element")},
        {"loss": term(0.0, PAIRS, "pos_pair")},
        {"loss": term([], nothing, "element")},
        {"loss": term([], (nothing, nothing), "neg_pair")},
    ]
    for terms in cases:
        x.grad = None
        value = reducer(terms, x, LABELS)
        value.backward()
        assert value.item() == 0
        assert (x.grad == 0).all()


def test_nothing_past_the_threshold_is_a_zero_with_a_zero_gradient():
    for dtype in (torch.float64, torch.float16):
        x, losses = embeddings(dtype), torch.tensor(LOSSES, dtype=dtype, requires_grad=True)
        value = ThresholdReducer(low=3)({"loss": term(losses, ROWS)}, x, LABELS)
        value.backward()
        assert (value.item(), value.dtype) == (0, dtype)
        assert (x.grad == 0).all()
        assert losses.grad is None or (losses.grad == 0).all()


def test_a_threshold_needs_a_bound():
    with pytest.raises(ValueError, match="low or high must be given, got None for both"):
        ThresholdReducer()
    for name in ("low", "high"):
        with pytest.raises(ValueError, match=f"^{name} must be a number or an infinity, got nan"):
            ThresholdReducer(**{name: float("nan")})
        with pytest.raises(TypeError, match=f"^{name} must be a real number, got '1'"):
            ThresholdReducer(**{name: "1"})
    assert reduce(ThresholdReducer(low=-float("inf")), LOSSES, ROWS).item() == 1


def test_per_anchor():
    losses = [1.0, 3.0, 2.0, 6.0]
    for kind in ("pos_pair", "neg_pair", None):
        assert reduce(PerAnchorReducer(), losses, PAIRS, kind).item() == 1.5
        assert reduce(PerAnchorReducer(SumReducer()), losses, PAIRS, kind).item() == 6
        assert reduce(PerAnchorReducer(AvgNonZeroReducer()), losses, PAIRS, kind).item() == 3
        assert reduce(PerAnchorReducer(pml.SumReducer()), losses, PAIRS, kind).item() == 6
    assert reduce(PerAnchorReducer(), LOSSES, ROWS).item() == 1
    with pytest.raises(NotImplementedError, match="got triplets"):
        reduce(PerAnchorReducer(), losses, TRIPLETS)


def test_an_anchor_with_one_pair_has_its_loss():
    assert reduce(PerAnchorReducer(SumReducer()), [3.0, 1.0, 2.0], (ROWS[:3] // 2, ROWS[1:])).item() == 4


def test_a_pair_that_is_listed_twice_counts_twice():
    pairs = (torch.tensor([0, 0, 0]), torch.tensor([1, 1, 2]))
    assert reduce(PerAnchorReducer(SumReducer()), [3.0, 3.0, 6.0], pairs).item() == 4


def test_per_anchor_with_another_aggregation():
    def largest(values, counts):
        assert counts.tolist() == [2, 0, 2, 0]
        return values.max(dim=1).values

    assert reduce(PerAnchorReducer(SumReducer(), largest), [1.0, 3.0, 2.0, 6.0], PAIRS).item() == 9


def test_per_anchor_in_half_precision():
    pairs = (torch.tensor([0, 0]), torch.tensor([1, 2]))
    value = PerAnchorReducer()({"loss": term([6e4, 6e4], pairs, dtype=torch.float16)}, embeddings(n=3), None)
    assert (value.item(), value.dtype) == (20000, torch.float32)

    trio = (torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3]))
    losses = term([1.0, 1.0, 1.0078125], trio, dtype=torch.bfloat16)
    value = PerAnchorReducer(ThresholdReducer(low=1.0))({"loss": losses}, embeddings(), None)
    assert value.item() == pytest.approx(1.0026042, rel=1e-7)

    losses = torch.tensor([2**-24, 0], dtype=torch.float16, requires_grad=True)
    value = PerAnchorReducer(AvgNonZeroReducer())({"loss": term(losses, pairs)}, embeddings(n=3), None)
    assert (value.item(), value.dtype) == (2**-25, torch.float32)
    value.backward()
    assert losses.grad.tolist() == [0.5, 0.5]

    nothing = torch.zeros(0, dtype=torch.int64)
    x = embeddings(torch.float16)
    value = PerAnchorReducer()({"loss": term([], (nothing, nothing), dtype=torch.float16)}, x, None)
    value.backward()
    assert (value.item(), value.dtype) == (0, torch.float16)


def test_several_terms():
    terms = {"a": term(LOSSES, ROWS), "b": term(LOSSES, PAIRS)}
    assert MultipleReducers({"a": SumReducer()})(terms, embeddings(), LABELS).item() == 5
    assert MultipleReducers({"a": SumReducer()}, SumReducer())(terms, embeddings(), LABELS).item() == 8
    of_rows = {name: one | {"reduction_type": "element", "indices": ROWS} for name, one in terms.items()}
    assert MultipleReducers({"c": SumReducer()}, pml.MeanReducer())(of_rows, embeddings(), LABELS).item() == 2
    # A single reducer reduces each and adds.
    assert SumReducer()(terms, embeddings(), LABELS).item() == 8


def test_named_indices():
    assert reduce(MeanReducer(), LOSSES, PairIndices(*PAIRS)).item() == 1
    assert reduce(MeanReducer(), LOSSES, TripletIndices(*TRIPLETS)).item() == 1
    assert reduce(MeanReducer(), LOSSES, list(PAIRS)).item() == 1
    assert reduce(PerAnchorReducer(), LOSSES, tuple(one.int() for one in PAIRS)).item() == 0.5
    assert reduce(ClassWeightedReducer([1, 0.5, 2]), LOSSES, ROWS.int()).item() == 1.625


@pytest.mark.parametrize("reducer", [MeanReducer(), DivisorReducer(), MultipleReducers({})], ids=repr)
@pytest.mark.parametrize(
    ("losses", "indices", "kind", "message"),
    [
        (LOSSES, ROWS[:3], "element", r"as many losses as indices.*got shapes \(4,\), \(3,\)"),
        (LOSSES, (PAIRS[0], PAIRS[1][:2]), "pos_pair", r"got shapes \(4,\), \(4,\), \(2,\)"),
        (torch.zeros(4, 1), ROWS, "element", r"got shapes \(4, 1\), \(4,\)"),
        (torch.tensor(1.0), ROWS, "element", r"got shapes \(\), \(4,\)"),
        (LOSSES, PAIRS, "element", "must be a tensor for element, got tuple"),
        (LOSSES, ROWS, "neg_pair", "must be 2 tensors for neg_pair, got Tensor"),
        (LOSSES, PAIRS, "triplet", "must be 3 tensors for triplet, got tuple"),
        (LOSSES, None, "element", "must be a tensor for element, got NoneType"),
        (LOSSES, ROWS, "quadruplet", "must be element, pos_pair, .*already_reduced, got 'quadruplet'"),
        (LOSSES, (*TRIPLETS, ROWS), None, "must be one to three tensors, got 4"),
        (2.0, ROWS, "element", "must be a tensor or the number 0, got 2.0"),
    ],
)
def test_terms_are_checked(reducer, losses, indices, kind, message):
    more = {"divisor": 2} if isinstance(reducer, DivisorReducer) else {}
    with pytest.raises(ValueError, match=message):
        reduce(reducer, losses, indices, kind, **more)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_indices_are_row_numbers(dtype):
    with pytest.raises(TypeError, match=f"must be int64 or int32, got {dtype}"):
        reduce(MeanReducer(), LOSSES, ROWS.to(dtype))
    with pytest.raises(TypeError, match=f"must be int64 or int32, got {dtype}"):
        reduce(MeanReducer(), LOSSES, (PAIRS[0], PAIRS[1].to(dtype)))


def test_do_nothing():
    terms = {"loss": term(LOSSES, ROWS)}
    assert DoNothingReducer()(terms, None, None) is terms
    assert DoNothingReducer()(terms) is terms


def test_statistics():
    reducer = ThresholdReducer(low=-0.5, high=2.5, collect_stats=True)
    for _ in range(2):
        reduce(reducer, LOSSES, ROWS)
        assert (reducer.losses_size, reducer.num_past_filter) == (4, 2)
        assert (reducer.num_above_low, reducer.num_below_high) == (3, 3)
    assert not hasattr(MeanReducer(), "losses_size")
    for name in reducers.__all__:
        arguments = {"ClassWeightedReducer": ([1.0],), "MultipleReducers": ({},), "ThresholdReducer": (0,)}
        assert getattr(reducers, name)(*arguments.get(name, ()), collect_stats=True).collect_stats is True


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MeanReducer(), pml.MeanReducer()),
        (SumReducer(), pml.SumReducer()),
        (AvgNonZeroReducer(), pml.AvgNonZeroReducer()),
        (ThresholdReducer(-0.5, 0.5), pml.ThresholdReducer(-0.5, 0.5)),
        (ClassWeightedReducer([1.0, 0.5, 2]), pml.ClassWeightedReducer(torch.tensor([1.0, 0.5, 2]))),
        (MultipleReducers({"loss": SumReducer()}), pml.MultipleReducers({"loss": pml.SumReducer()})),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("kind", INDICES)
def test_values_and_gradients_are_those_of_pytorch_metric_learning(ours, theirs, kind):
    labels = torch.arange(30) % 3
    generator = torch.manual_seed(0)
    pair = torch.randperm(900, generator=generator)[:50]
    anchors, others = pair % 30, pair // 30
    indices = {"element": anchors, "triplet": (anchors, others, others)}.get(kind, (anchors, others))
    found = []
    for reducer in (ours, theirs):
        losses = torch.randn(50, dtype=torch.float64, generator=torch.manual_seed(1)).requires_grad_()
        value = reducer({"loss": term(losses, indices, kind)}, embeddings(n=30), labels)
        value.backward()
        found.append((value.detach(), losses.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "reducer", [*ALL, DivisorReducer(), DoNothingReducer()], ids=lambda value: type(value).__name__
)
def test_copies(reducer):
    assert isinstance(reducer, (BaseReducer, torch.nn.Module))
    terms = {"loss": term([0.5, 2.0], torch.tensor([0, 2]), "element")}
    if isinstance(reducer, DivisorReducer):
        terms["loss"]["divisor"] = 4
    wanted = reducer(terms, embeddings(), LABELS)
    for twin in (pickle.loads(pickle.dumps(reducer)), copy.deepcopy(reducer)):
        assert twin(terms, embeddings(), LABELS) == wanted


def test_a_subclass_with_one_method_for_each_kind():
    class ByKind(BaseReducer):
        def element_reduction(self, losses, loss_indices, embeddings, labels):
            return losses.sum()

        def neg_pair_reduction(self, losses, loss_indices, embeddings, labels):
            return losses.max()

    assert reduce(ByKind(), LOSSES, PAIRS, "neg_pair").item() == 3
    assert reduce(ByKind(), LOSSES, PAIRS, "pos_pair").item() == 4
    with pytest.raises(NotImplementedError):
        reduce(BaseReducer(), LOSSES, ROWS)
