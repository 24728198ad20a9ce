"""``FaissKNN`` and ``FaissKMeans`` with the real Faiss; GPUs by a fake of the symbols that only GPU builds have."""

from __future__ import annotations

import contextlib
import pickle

import faiss
import pytest
import torch

from exactknn.evaluation import AccuracyCalculator, FaissKMeans, FaissKNN
from tests.python.evaluation.faiss_helpers import expected, rows_of, warnings_in


def test_the_defaults_are_attributes():
    knn = FaissKNN()
    assert (knn.reset_before, knn.reset_after, knn.gpus, knn.index) == (True, True, None, None)
    assert knn.index_init_fn is faiss.IndexFlatL2


@pytest.mark.parametrize("name", ["FaissKNN", "FaissKMeans"])
def test_without_faiss_the_constructor_names_the_extra(run_python, name):
    program = f"""
import sys
sys.modules["faiss"] = None
from exactknn.evaluation import {name}
try:
    {name}()
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    printed = run_python(program)
    assert printed.startswith("faiss ")
    assert "exactknn[faiss]" in printed


def test_the_import_leaves_no_faiss(run_python):
    program = """
import sys
from exactknn.evaluation import FaissKNN, FaissKMeans
print([name for name in sys.modules if name.startswith(("faiss", "sklearn"))])
FaissKNN()
print("faiss" in sys.modules)
"""
    assert run_python(program).splitlines() == ["[]", "True"]


@pytest.mark.parametrize("gpus", ["0", 0, {0}, [0.5], ["0"], [True]])
def test_gpus_of_another_type(gpus):
    with pytest.raises(TypeError, match="gpus"):
        FaissKNN(gpus=gpus)


@pytest.mark.parametrize("gpus", [[], (), [-1]])
def test_gpus_that_are_none(gpus):
    with pytest.raises(ValueError, match="gpus"):
        FaissKNN(gpus=gpus)


@pytest.mark.parametrize("gpus", [[0], (0, 1)])
def test_gpus_without_a_gpu_build_mean_the_cpu(gpus, caplog):
    query, reference = rows_of(5), rows_of(20, seed=1)
    distances, indices = FaissKNN(gpus=gpus)(query, 3, reference)
    assert indices.equal(expected(query, reference, 3)[1])
    assert distances.device.type == "cpu"
    assert warnings_in(caplog) == []


def test_an_index_init_fn_that_is_no_function():
    with pytest.raises(TypeError, match="index_init_fn"):
        FaissKNN(index_init_fn=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_neighbours_by_squared_distance(dtype):
    query, reference = rows_of(7).to(dtype), rows_of(30, seed=1).to(dtype)
    distances, indices = FaissKNN()(query, 5, reference)
    values, columns = expected(query, reference, 5)
    assert indices.equal(columns)
    assert (distances.dtype, indices.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(distances, values, rtol=1e-5, atol=1e-5)


def test_another_index_type_has_its_own_order():
    query, reference = rows_of(7), rows_of(30, seed=1)
    knn = FaissKNN(reset_after=False, index_init_fn=faiss.IndexFlatIP)
    distances, indices = knn(query, 4, reference)
    found = (query @ reference.T).topk(4)
    assert indices.equal(found.indices)
    torch.testing.assert_close(distances, found.values)
    assert isinstance(knn.index, faiss.IndexFlatIP)


def test_each_call_has_an_index_of_its_own():
    knn = FaissKNN(reset_after=False)
    for seed in (1, 2):
        query, reference = rows_of(4), rows_of(12, seed=seed)
        assert knn(query, 3, reference)[1].equal(expected(query, reference, 3)[1])
        assert isinstance(knn.index, faiss.IndexFlatL2)
        assert knn.index.ntotal == 12


@pytest.mark.parametrize("k", [3, 50])
def test_the_index_is_dropped_after_a_call_failed_or_not(k):
    knn = FaissKNN(reset_before=False)
    knn.train(rows_of(10))
    with contextlib.nullcontext() if k < 10 else pytest.raises(ValueError, match="k must be at most"):
        knn(rows_of(2), k)
    assert knn.index is None


def test_own_rows_are_left_out_by_number():
    x = torch.tensor([[0.0], [0.0], [0.0], [5.0], [9.0]])
    distances, indices = FaissKNN()(x[:4], 2, x, True)
    assert [set(row) for row in indices.tolist()] == [{1, 2}, {0, 2}, {0, 1}, {4, indices[3, 1].item()}]
    assert indices[3, 1].item() in (0, 1, 2)
    assert distances.tolist() == [[0, 0], [0, 0], [0, 0], [16, 25]]


def test_a_row_whose_own_is_not_found_loses_the_last():
    # Eight equal rows: Faiss finds three of them, not each row among its own.
    x = torch.zeros(8, 2)
    distances, indices = FaissKNN()(x, 2, x, True)
    assert distances.tolist() == [[0, 0]] * 8
    for row, found in enumerate(indices.tolist()):
        assert row not in found
        assert len(set(found)) == 2


def test_an_index_type_that_learns_is_trained_on_the_reference():
    def init(d):
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(d), d, 2)

    reference = rows_of(200)
    knn = FaissKNN(index_init_fn=init, reset_after=False)
    _, indices = knn(reference[:20], 1, reference)
    assert indices.flatten().tolist() == list(range(20))
    assert knn.index.is_trained
    assert knn.index.ntotal == 200
    knn = FaissKNN(reset_before=False, reset_after=False, index_init_fn=init)
    with pytest.raises(ValueError, match="the rows to train on must be small enough"):
        knn.train(reference * 1e30)
    knn.train(reference)
    assert knn.index.is_trained
    assert knn(reference[:20], 1)[1].flatten().tolist() == list(range(20))


@pytest.mark.parametrize(("n", "k", "own"), [(0, 3, False), (0, 3, True), (4, 0, False), (4, 0, True), (0, 0, True)])
def test_nothing_to_find(n, k, own):
    x = rows_of(9)
    distances, indices = FaissKNN()(x[:n], k, x, own)
    assert distances.shape == indices.shape == (n, k)
    assert (distances.dtype, indices.dtype) == (torch.float32, torch.int64)


def test_layouts_and_modes():
    wide = rows_of(20, 16)
    with torch.inference_mode():
        query = rows_of(5)[:, ::2] * 1
    reference = wide[:, ::4]
    columns = expected(query, reference, 3)[1]
    knn = FaissKNN()
    assert knn(query, 3, reference)[1].equal(columns)
    assert knn(query.clone().requires_grad_(), 3, reference.numpy())[1].equal(columns)
    read_only = reference.numpy().copy()
    read_only.flags.writeable = False
    assert knn(query, 3, read_only)[1].equal(columns)
    negative = torch.complex(torch.zeros(5, 4), -query.clone()).conj().imag
    assert negative.is_neg()
    assert knn(negative, 3, reference)[1].equal(columns)


def test_float64_rows_that_float32_cannot_tell_apart_are_warned_of_once(caplog):
    x = (1e8 + torch.arange(6, dtype=torch.float64)).unsqueeze(1)
    knn = FaissKNN()
    for _ in range(2):
        distances, _ = knn(x, 2, x)
    assert distances.dtype == torch.float32
    assert distances[:5].max() == 0  # they all become 1e8; the sixth row becomes 1e8 + 8
    assert distances[5].tolist() == [0, 64]
    messages = warnings_in(caplog)
    assert len(messages) == 1
    assert "float32" in messages[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((rows_of(2).numpy(), 1, rows_of(3)), TypeError, "query must be a torch tensor"),
        ((rows_of(2)[0], 1, rows_of(3)), ValueError, "query must be 2-D"),
        ((rows_of(2), 1, rows_of(3)[0]), ValueError, "reference must be 2-D"),
        ((rows_of(2), 1, rows_of(3, 4)), ValueError, "got 8 and 4 dimensions"),
        ((rows_of(2)[:, :0], 1, rows_of(3)[:, :0]), ValueError, "at least one column"),
        ((rows_of(2).long(), 1, rows_of(3)), ValueError, "query must hold float32"),
        ((rows_of(2).to_sparse(), 1, rows_of(3)), ValueError, "query must be a dense tensor"),
        ((rows_of(2), 1.0, rows_of(3)), TypeError, "k must be"),
        ((rows_of(2), -1, rows_of(3)), ValueError, "k must be"),
        (
            (rows_of(2), 4, rows_of(3)),
            ValueError,
            "the number of references, got k=4 with 3 references",
        ),
        ((rows_of(3), 3, rows_of(3), True), ValueError, "without the query itself, got k=3 with 3 references"),
        (
            (rows_of(4), 1, rows_of(3), True),
            ValueError,
            "the index must begin with the queries when ref_includes_query",
        ),
        ((rows_of(2), 1), ValueError, "reference must be given"),
        ((torch.tensor([[0.0], [torch.nan]]), 1, torch.ones(3, 1)), ValueError, "query must be finite.* row 1"),
        ((torch.ones(3, 1), 1, torch.tensor([[0.0], [torch.inf]])), ValueError, "reference must be finite.* row 1"),
        ((torch.tensor([[1e300]]).double() * 1e300, 1, torch.ones(3, 1)), ValueError, "query must be finite"),
        ((torch.tensor([[1e200]], dtype=torch.float64), 1, torch.ones(3, 1)), ValueError, "query rounded to float32"),
    ],
)
def test_what_cannot_be_searched(arguments, error, message):
    with pytest.raises(error, match=message):
        FaissKNN()(*arguments)


def test_an_index_of_another_dimension():
    with pytest.raises(ValueError, match="index_init_fn must return an index of dimension 8, got 9"):
        FaissKNN(index_init_fn=lambda d: faiss.IndexFlatL2(d + 1))(rows_of(2), 1, rows_of(3))
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(rows_of(5))
    with pytest.raises(ValueError, match="query must have the dimension of the index, 8, got 4"):
        knn(rows_of(2, 4), 1)
    with pytest.raises(ValueError, match="reference must have the dimension of the index, 8, got 4"):
        knn(rows_of(2), 1, rows_of(2, 4))
    with pytest.raises(ValueError, match="embeddings must have the dimension of the index, 8, got 4"):
        knn.add(rows_of(2, 4))
    assert knn.index.ntotal == 5


def test_without_an_index(tmp_path):
    knn = FaissKNN(reset_before=False)
    for call in (
        lambda: knn(rows_of(2), 1),
        lambda: knn(rows_of(2), 1, rows_of(5)),
        lambda: knn.add(rows_of(2)),
        lambda: knn.save(tmp_path / "index"),
    ):
        with pytest.raises(ValueError, match=r"there is no index to .*train"):
            call()


def test_a_refused_call_adds_nothing():
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(rows_of(5))
    for k, reference in ((8, rows_of(2)), (1, torch.full((2, 8), torch.nan))):
        with pytest.raises(ValueError, match=r"k must|reference must"):
            knn(rows_of(2), k, reference)
    assert knn.index.ntotal == 5


def test_an_error_of_faiss_is_raised_and_nothing_tried_again():
    class Refusing(faiss.IndexFlatL2):
        added = 0

        def add(self, x):
            Refusing.added += 1
            raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        FaissKNN(index_init_fn=Refusing)(rows_of(2), 1, rows_of(3))
    assert Refusing.added == 1


@pytest.mark.parametrize("as_array", [False, True])
def test_train_add_search_save_load(tmp_path, as_array):
    x = rows_of(70, 16)
    given = x.numpy() if as_array else x
    knn = FaissKNN(reset_before=False, reset_after=False)
    knn.train(given[:50])
    knn.add(given[50:])
    assert knn.index.ntotal == 70
    query = rows_of(6, 16, seed=3)
    distances, indices = knn(query, 10)
    assert indices.equal(expected(query, x, 10)[1])

    knn.save(tmp_path / "rows.index")
    other = FaissKNN(reset_before=False, reset_after=False)
    other.load(str(tmp_path / "rows.index"))
    loaded_distances, loaded_indices = other(query, 10)
    assert loaded_indices.equal(indices)
    assert loaded_distances.equal(distances)
    assert faiss.read_index(str(tmp_path / "rows.index")).ntotal == 70

    knn.train(given[:5])
    assert knn.index.ntotal == 5
    knn.reset()
    assert knn.index is None


def test_references_accumulate():
    knn = FaissKNN(reset_before=False, reset_after=False)
    first, second, query = rows_of(10), rows_of(5, seed=1), rows_of(4, seed=2)
    knn.train(first)
    assert knn(query, 6, second)[1].equal(expected(query, torch.cat([first, second]), 6)[1])
    knn(query, 1, second)
    assert knn.index.ntotal == 20
    _, indices = knn(second, 2)
    assert [sorted(row) for row in indices.tolist()] == [[10 + row, 15 + row] for row in range(5)]


def test_an_approximate_index_that_finds_fewer_says_so_once(caplog):
    def init(d):
        return faiss.IndexIVFFlat(faiss.IndexFlatL2(d), d, 2)

    reference = torch.cat([torch.zeros(50, 2), torch.full((50, 2), 9.0)]) + rows_of(100, 2) / 10
    _, indices = FaissKNN(index_init_fn=init)(reference[:3], 60, reference)
    assert ((indices == -1).sum(dim=1) == 10).all()
    messages = warnings_in(caplog)
    assert len(messages) == 1
    assert "fewer than 60 rows for 3 of 3 queries" in messages[0]

    labels = torch.arange(100) // 50
    calculator = AccuracyCalculator(include=("recall_at_60",), knn_func=FaissKNN(index_init_fn=init))
    with pytest.raises(ValueError, match="indices from 0 to 99, got -1"):
        calculator.get_accuracy(reference, labels)


@pytest.mark.parametrize("knn", [FaissKNN(), FaissKMeans(seed=3)], ids=repr)
def test_pickled_and_back(knn):
    again = pickle.loads(pickle.dumps(knn))
    assert repr(again) == repr(knn)


def test_distances_beyond_float32_are_not_found(caplog):
    _, indices = FaissKNN()(torch.zeros(1, 2), 2, torch.tensor([[1e30, 0.0], [1.0, 0.0]]))
    assert indices.tolist() == [[1, -1]]
    assert "overflow float32" in warnings_in(caplog)[0]
