"""Capture a trace from a running transformers model (`pip install 'kvsim[capture]'`).

    model = AutoModelForCausalLM.from_pretrained(...).eval()
    kvsim.capture(model, tokenizer("..."), "traces/mine", steps=256)
    kvsim.capture.verify("traces/mine", model)

Everything here is loaded when it is first asked for, torch with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvsim.errors import WrongUse

if TYPE_CHECKING:
    from kvsim.capture.check import verify
    from kvsim.capture.run import capture, recording

__all__ = ["capture", "recording", "verify"]

_HOME = {"capture": "kvsim.capture.run", "recording": "kvsim.capture.run", "verify": "kvsim.capture.check"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"kvsim.capture has no {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as e:
        if e.name in ("torch", "transformers"):
            raise WrongUse(f"capture needs {e.name}: pip install 'kvsim[capture]'") from None
        raise
