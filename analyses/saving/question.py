"""What will it save on a GPU? Steps, crossovers, ragged batches and memory, from a cost model fitted to published times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from analyses.reckoning import AT_LEAST, MORE, OPEN_ENDED, Reckoning, Sum
from analyses.saving.model import HEAVY, KIVI, QUEST, STREAM, served, step
from kvsim.report import theme
from kvsim.report.html import Figure

CONTEXTS = (2048, 4096, 8192, 16384, 32768)
NAMES = {"full()": "full attention", QUEST: "quest, reads 2048", STREAM: "streaming_llm, holds 2048", KIVI: "2 bits, KIVI"}
COLOURS = ["#4d4d4d", "#0072B2", "#D55E00", "#1b7f79"]
SCAN = "page scan and ranking priced by their bytes: transferred"


def row(policy: str, context: int) -> dict[str, Any]:
    return next(r for r in served()["rows"] if (r["policy"], r["context"]) == (policy, context))


def faster(policy: str, context: int, weights: str = "FP16", **how: Any) -> dict[str, Any]:
    """found, low, high: full attention's step over the policy's."""
    x = step(policy, context, weights, **how)["speedup"]
    return {"found": x["speedup"], "low": x["low"], "high": x["high"]}


def sums() -> list[Sum]:
    full, quest, stream = (row(p, 8192) for p in ("full()", QUEST, STREAM))
    mix = served()["mix"][0]
    fallback, twice, fused = (step(HEAVY, 32768, scores=x)["step_us"] for x in ("sdpa_fallback", "second_pass", "fused_lse"))
    dense = row("full()", 32768)["step_us"]
    return [
        Sum(
            "on Quest, 2.2",
            "below some length the index costs more than it saves",
            2048,
            quest["crossover_tokens"],
            "tokens from which on quest with 2048 tokens and 2 dense layers is faster, as bytes have it; start costs of its kernels, which "
            "nobody published, push it up",
            ",.0f",
            MORE,
        ),
        Sum("on Quest, 2", "at 32K it is 1.74 times faster with FP16 weights", 1.74, **faster(QUEST, 32768), why=SCAN),
        Sum("on Quest, 2", "and 2.23 times with 4-bit weights", 2.23, **faster(QUEST, 32768, "AWQ"), why=SCAN),
        Sum(
            "on Quest, 2.2",
            "one length says nothing of others: at 8K it gains less",
            None,
            **faster(QUEST, 8192),
            why=f"{row(QUEST, 8192)['attention_share']:.0%} of full attention's step is about the cache there, "
            f"{row(QUEST, 32768)['attention_share']:.0%} at 32K",
            kind=OPEN_ENDED,
        ),
        Sum(
            "on reading and evicting, 1",
            "reading a part leaves the memory as full as before",
            full["requests"],
            quest["requests"],
            "requests of 8K that fit beside the weights on 48 GB, with full attention and with quest: its boxes take a sixteenth more",
            ",.0f",
            kind=AT_LEAST,
        ),
        Sum(
            "on reading and evicting, opening",
            "evicting saves memory and traffic, so more requests share a step",
            full["tokens_per_s"],
            stream["tokens_per_s"],
            f"tokens a second at 8K when the memory is full: {full['requests']} requests with full attention, {stream['requests']} that "
            "hold 2048 tokens each",
            ",.0f",
            MORE,
        ),
        Sum(
            "on Quest, 2.1",
            "padding a ragged batch throws time away",
            1,
            mix["padded"] / mix["ragged"],
            "requests of 4000, 9000 and 30000 tokens with full attention, all padded to the longest, over each at its length",
            ".2f",
            MORE,
        ),
        Sum(
            "on QEvict, 6.4",
            "scores that a fused kernel does not give cost more than eviction saves",
            1,
            fallback / dense,
            f"step at 32K of h2o with 2048 tokens and unfused attention, over full attention's: {dense / 1e3:.1f} ms become "
            f"{fallback / 1e3:.1f}, "
            "because what is held is small; their step grew 2.45 times, which is launches and copies, not bytes",
            ".2f",
            MORE,
        ),
        Sum(
            "on QEvict, 8",
            "a kernel that gives scores itself would take that cost away",
            None,
            (fallback - fused) / 1e3,
            f"ms of a step between unfused attention and one that gives sums of logits; {(twice - fused) / 1e3:.3f} with a second pass. By "
            "bytes there is nothing to take away",
            ".3f",
            OPEN_ENDED,
        ),
    ]


def scan() -> pl.DataFrame:
    """policy, context, part, ms: parts of a step along the length."""
    rows = []
    for n in CONTEXTS:
        for policy, name in NAMES.items():
            if policy == "full()":
                whole = row(policy, n)["step_us"]
                rest = step(QUEST, n)["parts"]["rest"]
                parts = {"dense_attn": whole - rest, "rest": rest}
            else:
                parts = step(policy, n)["parts"]
            rows += [(name, n, cls, us / 1e3) for cls, us in parts.items()]
    return pl.DataFrame(rows, schema=["policy", "context", "part", "ms"], orient="row")


def charts(every: Sequence[Sum]) -> list[Figure]:
    del every
    colour = alt.Color(
        "policy:N",
        scale=alt.Scale(domain=list(NAMES.values()), range=COLOURS),
        title=None,
        legend=alt.Legend(orient="top", columns=2),
    )
    shape = alt.Shape("policy:N", scale=alt.Scale(domain=list(NAMES.values()), range=list(theme.SHAPES[:4])), title=None)
    across = alt.X(
        "context:Q",
        title="context (tokens)",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(values=list(CONTEXTS), format=",d"),
    )
    parts = scan()
    steps = parts.group_by("policy", "context", maintain_order=True).agg(pl.col("ms").sum())
    lines = alt.Chart(steps).mark_line(point=alt.OverlayMarkDef(size=45, filled=True), aria=False)
    lengths = lines.encode(x=across, y=alt.Y("ms:Q", title="step (ms)"), color=colour, shape=shape).properties(
        width=420, height=260
    )
    there = parts.filter(pl.col("context") == 32768)
    stacked = (
        alt.Chart(there)
        .mark_bar(aria=False)
        .encode(
            y=alt.Y("policy:N", sort=list(NAMES.values()), title=None, axis=alt.Axis(labelLimit=220)),
            x=alt.X("ms:Q", title="step at 32K tokens (ms)"),
            color=alt.Color(
                "part:N", title="part", scale=alt.Scale(range=["#999999", *COLOURS[1:], "#dddddd", "#E69F00", "#CC79A7"])
            ),
            tooltip=["policy", "part", "ms"],
        )
        .properties(width=420, height=140)
    )
    full = [(NAMES[r["policy"]], r["context"], r["requests"], r["tokens_per_s"]) for r in served()["rows"] if r["requests"]]
    served_ = pl.DataFrame(full, schema=["policy", "context", "requests", "tokens a second"], orient="row")
    points = alt.Chart(served_).mark_line(point=alt.OverlayMarkDef(size=45, filled=True), aria=False)
    memory = alt.hconcat(
        *(
            points.encode(
                x=across, y=alt.Y(f"{n}:Q", title=title, scale=alt.Scale(type="log")), color=colour, shape=shape
            ).properties(width=300, height=240)
            for n, title in (("requests", "requests that fit"), ("tokens a second", "tokens a second, memory full"))
        )
    )
    at = "One request, 16-bit weights, Llama-2-7B on an RTX 6000 Ada."
    return [
        Figure("lengths", "What does a step take, by length?", f"{at} Full attention is drawn.", lengths, "", steps),
        Figure(
            "parts",
            "What is in it?",
            f"{at} `rest` is all that is not about the cache. Full attention is drawn.",
            stacked,
            "",
            there,
        ),
        Figure(
            "memory",
            "How many fit, and what do they make together?",
            "48 GB, nine tenths of them usable, 13.5 GB of weights, requests of one length alike. A policy that holds a fixed number of "
            "tokens fits as many at any length. "
            "Full attention is drawn.",
            memory,
            "",
            served_,
        ),
    ]


QUESTION = Reckoning(
    name="saving",
    title="What will it save on a GPU?",
    lead="Bytes become time by a model of a GPU that was measured. Nobody measured one for this page: six published steps with a full "
    "cache give the rest of a step and a "
    "bandwidth, and everything else is bytes over that bandwidth. So this is what a policy can save at most, and where it starts to.",
    sums=sums,
    charts=charts,
    notes=(
        "Times of page scan, ranking, gathers and codes are transferred: their bytes are priced, their start costs are not known.",
    ),
)
