"""The memory of a device that a search may take."""

from __future__ import annotations

import torch

# A share of the free memory is used; where nobody can say how much is free, this much.
_SHARE = 2
_UNKNOWN_BYTES = 1 << 28
LEAST_BYTES = 1 << 16


def free_bytes(device: torch.device) -> int:
    """The bytes of a device that a search may take for its blocks."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    elif device.type == "xpu" and hasattr(torch.xpu, "mem_get_info"):  # from torch 2.6 on
        free = torch.xpu.mem_get_info(device)[0]
    elif device.type == "mps" and hasattr(torch.mps, "recommended_max_memory"):  # from torch 2.5 on
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        return _UNKNOWN_BYTES
    return max(LEAST_BYTES, free // _SHARE)
