"""What will it save on a GPU? Steps, crossovers, ragged batches and memory, from a cost model fitted to published times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import altair as alt
import polars as pl

from analyses.reckoning import AT_LEAST, MORE, OPEN_ENDED, Reckoning, Sum
from analyses.saving.model import HEAVY, KIVI, QUEST, STREAM, served, step
from kvsim.report import theme
from kvsim.report.charts.measure import layered
from kvsim.report.charts.rows import stacked
from kvsim.report.html import Figure
from kvsim.report.sections.cost import PARTS
from kvsim.report.theme import Style

CONTEXTS = (2048, 4096, 8192, 16384, 32768)
DRAWN = {  # name -> policy, how its codes are decoded, whose look it has
    "full attention": ("full()", "separate", "full"),
    "quest, reads 2048": (QUEST, "separate", "quest"),
    "streaming_llm, holds 2048": (STREAM, "separate", "streaming_llm"),
    "2 bits, KIVI, decoded in attention": (KIVI, "fused", "kivi"),
    "2 bits, KIVI, decoded apart": (KIVI, "separate", "qevict"),
}
LOOK = [Style(n, n, x[0], x[2], x[3]) for n, x in ((n, theme.FAMILIES[kin]) for n, (_, _, kin) in DRAWN.items())]
SCAN = "page scan and ranking priced by their bytes: transferred"


def row(policy: str, context: int, **how: Any) -> dict[str, Any]:
    return next(r for r in served(**how)["rows"] if (r["policy"], r["context"]) == (policy, context))


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
    """policy, context, part, order, ms: what a step is spent on along the length."""
    rows = []
    for n, (name, (policy, dequant, _)) in product(CONTEXTS, DRAWN.items()):
        if policy == "full()":
            rest = step(QUEST, n)["parts"]["rest"]
            parts = {"dense_attn": row(policy, n)["step_us"] - rest, "rest": rest}
        else:
            parts = step(policy, n, dequant=dequant)["parts"]
        rows += [(name, n, PARTS[cls], us / 1e3) for cls, us in parts.items()]
    found = pl.DataFrame(rows, schema=["policy", "context", "part", "ms"], orient="row")
    order = {part: i for i, part in enumerate(theme.TIMES)}
    each = found.group_by("policy", "context", "part", maintain_order=True).agg(pl.col("ms").sum())
    return each.with_columns(order=pl.col("part").replace_strict(order, return_dtype=pl.Int64))


def fits() -> pl.DataFrame:
    """policy, context, requests, tokens_per_s: how many requests of a length fit into the memory, and what they make together."""
    return pl.DataFrame(
        [
            (name, n, r["requests"], r["tokens_per_s"])
            for name, (policy, dequant, _) in DRAWN.items()
            for n in CONTEXTS
            if (r := row(policy, n, dequant=dequant))["requests"]
        ],
        schema=["policy", "context", "requests", "tokens_per_s"],
        orient="row",
    )


def along(frame: pl.DataFrame, y: alt.Y, width: int) -> alt.LayerChart:
    """A line for each policy over the length of the context."""
    ticks = alt.Axis(values=list(CONTEXTS), labelExpr=theme.TOKENS)
    x = alt.X("context:Q", title="context (tokens)", scale=alt.Scale(type="log", base=2), axis=ticks)
    base = alt.Chart(theme.prepare(theme.labelled(frame, LOOK))).encode(x=x, y=y)
    channels = theme.policy_channels(LOOK, "point")
    tip = ["policy:N", alt.Tooltip("context:Q", format=",d"), alt.Tooltip(f"{str(y.shorthand).split(':')[0]}:Q", format=",.3~g")]
    points = base.mark_point(filled=True, size=55, opacity=1, aria=False).encode(**channels, tooltip=tip)
    return layered(base.mark_line(aria=False).encode(color=channels["color"]), points, width=width, height=250)


def charts(every: Sequence[Sum]) -> list[Figure]:
    del every
    parts, served_ = scan(), fits()
    steps = parts.group_by("policy", "context", maintain_order=True).agg(pl.col("ms").sum())
    there = parts.filter(pl.col("context") == CONTEXTS[-1]).drop("context")
    lengths = along(steps, alt.Y("ms:Q", title="step (ms)"), 480)
    across = alt.X("ms:Q", title="step at 32K tokens (ms)", stack="zero", axis=alt.Axis(tickCount=6))
    ticks = alt.Axis(values=[x * 10**e for e in range(4) for x in (1, 2, 5)], grid=True)
    both = {"requests": "requests that fit", "tokens_per_s": "tokens a second, memory full"}
    memory = alt.hconcat(
        *(along(served_, alt.Y(f"{n}:Q", title=t, scale=alt.Scale(type="log"), axis=ticks), 300) for n, t in both.items())
    )
    at = "One request, 16-bit weights, Llama-2-7B on an RTX 6000 Ada."
    coded = (
        "Codes that a kernel of its own decodes are written in 16 bits and read again, which takes longer than the full cache; decoded in "
        "attention they save what they do not read."
    )
    return [
        Figure("lengths", "What does a step take, by length?", f"{at} {coded} Full attention is drawn.", lengths, "", steps),
        Figure(
            "parts",
            "What is in it?",
            f"{at} Full attention is drawn.",
            stacked(there, across, theme.TIMES, LOOK).properties(width=480, height=32 * len(LOOK)),
            "",
            there,
        ),
        Figure(
            "memory",
            "How many fit, and what do they make together?",
            "48 GB, nine tenths of them usable, 13.5 GB of weights, requests of one length alike. A policy that holds a fixed number of "
            "tokens fits as many at any length; quest fits as many as full attention, and codes as many wherever they are decoded. "
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
