"""What `kvsim demo` replays: the bundled trace, under one policy of every kind."""

from __future__ import annotations

from kvsim.errors import WrongUse
from kvsim.replay.asked import resolve
from kvsim.replay.needs import check_needs
from kvsim.trace.open import Trace

POLICIES = (
    "quest(read=share(0.1))",
    'quest(read=share(0.1), heads="max")',
    "h2o(hold=share(0.2))",
    "tova(hold=share(0.2))",
    'snapkv(hold=share(0.2, of="prompt"))',
    "qevict(hold=share(0.2))",
    "streaming_llm(hold=share(0.2))",
    "kivi(bits=2, group=32, residual=32)",
    "h2o(hold=share(0.5)) >> quest(read=share(0.1))",
)


def suppliable(trace: Trace) -> tuple[list[str], list[str]]:
    """(policies that the trace can be replayed under, why the others cannot be)."""
    can, cannot = [], []
    for policy in POLICIES:
        try:
            check_needs(trace, resolve(trace, policy))
            can.append(policy)
        except WrongUse as e:
            cannot.append(str(e))
    return can, cannot
