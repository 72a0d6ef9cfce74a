"""StreamingLLM: the first positions and the most recent ones; positions are the original ones, not re-numbered in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.policies.protocol import Hold, Keep, Prefix, Ranking, Seen, State, expect
from kvsim.units import tokens


@dataclass(frozen=True, kw_only=True)
class streaming_llm(Keep):
    act = "holds the first `sinks` tokens and the most recent ones"
    paper = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"
    presets: ClassVar = {
        "class": {"source": "mit-han-lab/streaming-llm 2e50426, StartRecentKVCache", "sinks": 4, "hold": tokens(516)},
        "chat": {"source": "mit-han-lab/streaming-llm 2e50426, run_streaming_llama.py", "sinks": 4, "hold": tokens(2004)},
        "perplexity": {"source": "mit-han-lab/streaming-llm 2e50426, streaming_llm/utils.py", "sinks": 1, "hold": tokens(256)},
        "kvpress": {"source": "NVIDIA/kvpress 8bb29b9, StreamingLLMPress", "sinks": 4},
    }

    sinks: int = 4
    hold: Hold

    def __post_init__(self) -> None:
        expect(self, "sinks", self.sinks >= 0, "0 tokens or more")
        super().__post_init__()

    def protected(self, limit: int) -> int:
        return self.sinks + 1

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        return State(), self.step(State(), seen)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        recent = (seen.limit - self.sinks)[:, None]
        kept = (seen.pos < self.sinks) | (seen.pos > seen.t - recent)
        return Ranking(seen.pos.astype(float), protect=kept & seen.valid, stages=())
