"""What vLLM calls in each of its processes as it starts: entry point `kvsim` of the group vllm.general_plugins."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from kvsim.capture.vllm import ANY_VERSION, FOLDER
from kvsim.errors import WrongUse

TESTED = ("0.32",)  # releases whose attention backends and workers are as this adapter takes them
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")  # of a GPU; which of them runs is vLLM's choice


def register() -> None:
    """Puts watched subclasses in place of the platform's attention backends; nothing, unless KVSIM_CAPTURE names a folder. May be
    called again. Raises WrongUse: a version that was not tested."""
    if not os.environ.get(FOLDER):
        return
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    check_version(vllm.__version__, bool(os.environ.get(ANY_VERSION)))
    from kvsim.capture.vllm import backend, watch

    for name in ("CPU_ATTN",) if current_platform.is_cpu() else BACKENDS:
        with suppress(ImportError):  # a backend whose library is not installed is none that could be chosen
            member = AttentionBackendEnum[name]
            base = member.get_class()
            if base.__module__ != backend.__name__:  # not watched yet
                register_backend(member, backend.watched(base))
    if watch.wrap(WorkerWrapperBase):
        atexit.register(watch.WATCH.close)


def check_version(version: str, anyway: bool = False) -> None:
    """Raises WrongUse: not among the releases that were tested."""
    if not anyway and not any(version == x or version.startswith(f"{x}.") for x in TESTED):
        raise WrongUse(
            f"vLLM {version}: tested with {', '.join(x + '.*' for x in TESTED)}; install one of these, or set {ANY_VERSION}=1 and compare "
            "a trace with kvsim trace check"
        )
