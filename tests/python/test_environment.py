"""Results do not depend on the float mode of the calling thread, nor on torch's threads in a forked child."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from exactknn import Index, _core
from exactknn._environment import undisturbed

PROGRAM = Path(__file__).with_name("public_calls.py")


@pytest.mark.parametrize(
    "change",
    ["flush", pytest.param("fork", marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"))],
)
def test_public_calls_give_the_same_bytes(change):
    done = subprocess.run([sys.executable, PROGRAM, change], capture_output=True, text=True, timeout=55, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_callers_float_mode_is_restored_after_an_error():
    tiny = torch.tensor(2.0**-149)

    @undisturbed
    def fail():
        assert bool(tiny > 0)
        raise KeyError

    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(KeyError):
            fail()
        assert not bool(tiny > 0)
    finally:
        torch.set_flush_denormal(False)
    state = _core.replace_float_env()
    _core.restore_float_env(state | 0xFFFF_0000)  # reserved bits are not written
    assert _core.replace_float_env() == state


def test_half_rows_are_rounded_to_the_other_half_type():
    index = Index(dtype="bfloat16")
    index.add(np.array([[1.0, 1.00390625], [1.01171875, 2.0**-24]], np.float16))
    assert index.rows().tolist() == [[1.0, 1.0], [1.015625, 2.0**-24]]  # ties to even
    index = Index(dtype="float16")
    index.add(torch.tensor([[3.0, 2.0**-25]], dtype=torch.bfloat16))
    assert index.rows().tolist() == [[3.0, 0.0]]
