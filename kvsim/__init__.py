"""kvsim: replay KV-cache policies on captured attention traces.

    import kvsim
    trace = kvsim.open_trace("traces/smollm2-needle")
    run = kvsim.replay(trace, [kvsim.full() >> kvsim.quest(read=kvsim.tokens(512))], "runs/first")

Everything here is loaded when it is first asked for. A policy needs no entry: kvsim.NAME is found in policies/*/NAME.py.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.conformance import check_policy
    from kvsim.policies.language import parse, per_layer
    from kvsim.policies.rules import exact, gap, mass, top_p
    from kvsim.replay.run import Run, replay
    from kvsim.replay.sweep import sweep
    from kvsim.report.page import report
    from kvsim.trace.open import open_trace
    from kvsim.units import kib, mib, pages, shards, share, tokens

__version__ = "0.1.0"
__all__ = [
    "Run",
    "check_policy",
    "exact",
    "gap",
    "kib",
    "mass",
    "mib",
    "open_trace",
    "pages",
    "parse",
    "per_layer",
    "replay",
    "report",
    "shards",
    "share",
    "sweep",
    "tokens",
    "top_p",
]

_HOME = {
    "Run": "kvsim.replay.run",
    "check_policy": "kvsim.conformance",
    "open_trace": "kvsim.trace.open",
    "parse": "kvsim.policies.language",
    "per_layer": "kvsim.policies.language",
} | dict.fromkeys(("kib", "mib", "pages", "shards", "share", "tokens"), "kvsim.units")
_HOME |= dict.fromkeys(("exact", "gap", "mass", "top_p"), "kvsim.policies.rules")


_VERBS = {
    "kvsim.capture": "kvsim.capture.run",
    "kvsim.live": "kvsim.live.attached",
    "kvsim.replay": "kvsim.replay.run",
    "kvsim.report": "kvsim.report.page",
}


class _Verb(ModuleType):
    """A package that is also a function: kvsim.replay(...) runs, and kvsim.replay.run is a module, whichever was used first."""

    @property
    def __wrapped__(self) -> Any:
        return getattr(import_module(_VERBS[self.__name__]), self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.__name__ == "kvsim.replay":  # replay knows nothing of metrics; together they make a whole run
            options.setdefault("also", import_module("kvsim.metrics.diagnostics").write)
        return self.__wrapped__(*args, **options)


for _package in map(import_module, _VERBS):
    _package.__class__ = _Verb


def __getattr__(name: str) -> Any:
    if name == "sweep":  # as replay, it knows nothing of metrics
        return partial(import_module("kvsim.replay.sweep").sweep, also=import_module("kvsim.metrics.diagnostics").write)
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if not name.startswith("_"):
        for kind in ("keep", "store", "estimate", "read", "index"):
            if find_spec(f"kvsim.policies.{kind}.{name}"):
                return getattr(import_module(f"kvsim.policies.{kind}.{name}"), name)
    raise AttributeError(f"kvsim has no {name!r}; 'kvsim policies' lists the policies")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
