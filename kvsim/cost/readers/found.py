"""What a reader hands back, and what it is told that the file does not hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvsim.cost.classes import UNCLASSED, Rules, classify
from kvsim.cost.heads import Geometry


@dataclass(frozen=True)
class Told:
    """What the user says about a file: its label (name and hash), the rules, and what no profiler writes down."""

    label: str
    rules: Rules = field(default_factory=list)
    geometry: Geometry | None = None
    batch: int | None = None
    context: int | None = None
    cache: str | None = None

    def shape(self) -> dict[str, Any]:
        """The columns that follow from what was told."""
        g = self.geometry
        heads = {"q_heads": g.q_heads, "kv_heads": g.kv_heads, "head_dim": g.head_dim, "kv_bits": g.kv_bits} if g else {}
        return {"batch": self.batch, "context": self.context, "cache": self.cache or "unknown"} | heads

    def layer_bytes(self) -> int | None:
        """Of decode attention in one layer, if batch, context and heads are told."""
        if self.geometry and self.batch and self.context:
            return self.geometry.decode_bytes(self.batch, self.batch * self.context)
        return None


@dataclass
class Found:
    """Rows of samples; every line that became none, counted by reason; classed and all kernel time; facts of the GPU."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    time_us: Counter[str] = field(default_factory=Counter)  # by class, "unclassed" among them
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, kernel: str, t_us: float, rules: Rules) -> str | None:
        """Books a kernel's time under its class -> the class, or None: left out, its share of the time reported."""
        cls = classify(kernel, rules)
        self.time_us[cls] += t_us  # type: ignore[assignment]  # a Counter of floats
        if cls == UNCLASSED:
            self.left_out["kernel of no class"] += 1
            return None
        return cls

    @property
    def unclassed_share(self) -> float | None:
        """Of all kernel time; None where the file has no kernels but a table of shapes."""
        whole = sum(self.time_us.values())
        return self.time_us[UNCLASSED] / whole if whole else None
