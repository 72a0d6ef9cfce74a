"""Tensors to the raw numbers of a trace, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsim.errors import WrongUse

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_name(dtype: torch.dtype) -> str:
    """Raises WrongUse: a dtype no trace is written in."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise WrongUse(f"attention runs in {str(dtype).removeprefix('torch.')}; expected {', '.join(DTYPES)}")


def bits(x: torch.Tensor) -> torch.Tensor:
    """The numbers in a row; bfloat16, which numpy does not know, as its 16 bits."""
    x = x.detach().contiguous()
    return x.view(torch.uint16) if x.dtype == torch.bfloat16 else x


def raw(x: torch.Tensor) -> NDArray[Any]:
    """A copy on the host, never a view of a live tensor; bfloat16 as its 16 bits."""
    return np.asarray(bits(x).to("cpu", copy=True).numpy())


def tensor(x: NDArray[Any], dtype: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Raw numbers -> the tensor they were taken from."""
    found = torch.from_numpy(np.array(x))
    return (found.view(torch.bfloat16) if dtype == "bfloat16" else found).to(device)
