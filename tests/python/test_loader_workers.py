"""The number of threads in worker processes of a torch ``DataLoader``."""

import pytest

import exactknn

torch = pytest.importorskip("torch")


class Threads(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        _, indices = exactknn.knn([[0.0], [1.0], [3.0]], k=1)
        return exactknn.get_num_threads(), torch.get_num_threads(), indices[:, 0].tolist()


def collected(context, **options):
    loader = torch.utils.data.DataLoader(
        Threads(), batch_size=1, num_workers=2, multiprocessing_context=context, collate_fn=list, **options
    )
    return [item for batch in loader for item in batch]


def set_three(_):
    exactknn.set_num_threads(3)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_uses_one_thread_as_torch_does(context, monkeypatch):
    monkeypatch.delenv("EXACTKNN_NUM_THREADS", raising=False)
    before = exactknn.get_num_threads()
    assert collected(context) == [(1, 1, [1, 0, 1])] * 2
    assert exactknn.get_num_threads() == before


def test_a_number_that_is_set_holds_in_a_worker(monkeypatch):
    assert collected("fork", worker_init_fn=set_three) == [(3, 1, [1, 0, 1])] * 2
    monkeypatch.setenv("EXACTKNN_NUM_THREADS", "5")
    assert collected("fork") == [(5, 1, [1, 0, 1])] * 2
