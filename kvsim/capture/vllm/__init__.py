"""Capture from a running vLLM: the attention backend it would take anyway, watched.

    KVSIM_CAPTURE=traces/mine python serve.py          any engine, in whatever process it runs
    with kvsim.capture.vllm.capturing("traces/mine"):   the same, for engines made inside
        LLM(...).generate(...)

vLLM finds the plug-in by its entry point; without KVSIM_CAPTURE it does nothing. See docs/serving.md."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER, LAYERS, ANY_VERSION = "KVSIM_CAPTURE", "KVSIM_CAPTURE_LAYERS", "KVSIM_CAPTURE_ANY_VERSION"


@contextmanager
def capturing(folder: str | Path, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Every request of the engines made inside becomes a trace in `folder`; layers: ids (None: all). Leaving ends the requests that
    engines of this process still hold. Raises WrongUse: a version of vLLM that was not tested, or an engine that cannot be captured."""
    from kvsim.capture.vllm.plugin import register
    from kvsim.capture.vllm.watch import WATCH

    mine = {FOLDER: str(Path(folder).absolute())} | ({} if layers is None else {LAYERS: ",".join(map(str, layers))})
    before = {name: os.environ.get(name) for name in (FOLDER, LAYERS)}
    os.environ.update(mine)
    try:
        register()
        yield
        WATCH.close()
    finally:
        WATCH.abandon()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
