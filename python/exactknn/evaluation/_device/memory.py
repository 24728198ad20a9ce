"""Memory budget of a search on a device."""

from __future__ import annotations

import torch

# Use one part in _SHARE of the free memory, or _UNKNOWN_BYTES if the device does not report it.
_SHARE = 2
_UNKNOWN_BYTES = 1 << 28
LEAST_BYTES = 1 << 16


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device that a search may use for its blocks."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    elif device.type == "xpu" and hasattr(torch.xpu, "mem_get_info"):  # torch 2.6 or later
        free = torch.xpu.mem_get_info(device)[0]
    elif device.type == "mps" and hasattr(torch.mps, "recommended_max_memory"):  # torch 2.5 or later
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        return _UNKNOWN_BYTES
    return max(LEAST_BYTES, free // _SHARE)
