"""Rows and helpers that the tests of this folder share."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exactknn import _core
from exactknn.evaluation._device import filter as device_filter
from exactknn.evaluation._dispatch import NativeSupport, native_pair

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def rows(n, d, kind="plain", dtype=torch.float32, seed=0):
    generator = torch.manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    if kind == "offset":
        x = 100 + 0.1 * x
    elif kind == "far":
        x = 1e4 + x
    elif kind == "duplicates":
        x = x[torch.randint(0, n // 6 + 1, (n,), generator=generator)]
    elif kind == "tiny":
        x = x * torch.finfo(dtype).tiny * 8
    elif kind == "huge":
        x = x.clamp(-3, 3) * (largest / 4)
    elif kind == "zeros":
        x[::3] = 0
    elif kind == "giant":
        x[n // 2] *= largest / 64
    elif kind == "whole":
        x = x.round()
    elif kind == "equal":
        x = x[:1].expand(n, d).clone()
    elif kind == "sphere":  # all equally far from zero, up to rounding
        x = 3 * x / x.norm(dim=1, keepdim=True)
    elif kind == "mixed":
        x = x * torch.logspace(-30, 30, n, dtype=torch.float64).unsqueeze(1)
    return x.clamp(-largest, largest).to(dtype)


def by_the_core(metric, query, reference, k, exclude_self=False):
    pair = native_pair(query, reference)
    return _core.knn(pair.query, pair.searched, k, metric, exclude_self=exclude_self, bfloat16=pair.bfloat16)


def search(metric, query, reference, k, exclude_self=False):
    return device_filter.search(NativeSupport(metric, False, ""), query, k, reference, exclude_self)


def check(metric, query, reference, k, exclude_self=False):
    wanted = by_the_core(metric, query, reference, k, exclude_self)
    distances, indices = search(metric, query, reference, k, exclude_self)
    assert indices.numpy().tobytes() == wanted[1].tobytes()
    assert distances.numpy().tobytes() == wanted[0].tobytes()


class Products(TorchDispatchMode):
    """Inspects each matrix product first."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            args = self.before(*args)
        return func(*args, **(kwargs or {}))
