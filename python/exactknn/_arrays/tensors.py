"""Tensors that have no plain numbers to read. torch is never imported here."""

from __future__ import annotations

import sys
from typing import Any

IN_TRANSFORM = "a tensor inside torch.vmap or a transform of torch.func, which has no numbers of its own"


def oddity(tensor: Any) -> str | None:
    """Return what keeps the numbers of a torch tensor from being read, for an error message; ``None``: nothing."""
    if tensor.is_nested:
        return "a nested tensor: pad or concatenate its parts"
    if str(tensor.layout) != "torch.strided":
        return f"layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantised tensor of {tensor.dtype}: call .dequantize()"
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    if isinstance(tensor, fake):
        return "a fake tensor, which has no numbers"
    if _is_transformed(sys.modules["torch"], tensor):
        return IN_TRANSFORM
    return None


def resolved(tensor: Any, name: str) -> Any:
    """Return the tensor without its graph and without pending conjugation and negation.

    Raises:
        TypeError: it was made inside a transform of ``torch.func``, whose operations return tensors without numbers.
    """
    # Without an operation that is not needed: inside a transform it would wrap a plain tensor.
    plain = tensor.detach() if tensor.requires_grad else tensor
    plain = plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
    if _is_transformed(sys.modules["torch"], plain):
        raise TypeError(f"{name} must be a dense tensor, got {IN_TRANSFORM}")
    return plain


def _is_transformed(torch: Any, tensor: Any) -> bool:
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor):
        return True
    if functorch.peek_interpreter_stack() is None:
        return False
    try:
        torch.empty(0).numpy()  # in some transforms not even a plain tensor can be read
    except RuntimeError:
        return True
    return False
