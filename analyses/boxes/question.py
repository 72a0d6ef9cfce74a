"""Are min–max boxes tight? Slack by page size, layer, channels and key age; what it costs a fixed budget; which page size is best where."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from analyses.boxes.time import BATCHES, BEHIND, DEVICE, FULL, HOST, gpu, times
from analyses.contexts import Context, Tables
from analyses.figures import Claim, Draws, Figures, at_least, at_most, mean, rows, share
from analyses.measures import bytes_for, doubling
from analyses.panels import axis, styled, sweep
from analyses.question import SHORT, WIDE, Chart, Question

PAGES = (4, 8, 16, 32, 64)
PAGE = "pages of 16"
BUDGETS = (64, 128, 256)
QUALITY = ["mass recall", "output error", "false positives", "effective tokens"]
INDEXED, ROWS, BEST = "rows and index", "rows only", "oracle, rows only"
MASS = 0.9
ASKED = 128  # tokens, of the chart by page size
USUAL = 16  # tokens of a page where nothing else is said
YOUNG, OLD = "16", "512"  # tokens since the page ended, from


def quality(run: Tables, line: str) -> pl.DataFrame:
    row = pl.col("layer").replace_strict(run.row_bytes(), return_dtype=pl.Int64)
    figures = {
        "mass recall": mean("mass_recall"),
        "false positives": share("false_read_bytes", pl.col("read_tokens") * row),
        "effective tokens": mean("page_precision"),
        "output error": mean("rel_l2"),
    }
    return rows(run("heads"), figures, line=pl.lit(line), at="policy")


def measure(context: Context) -> pl.DataFrame:
    sizes = {str(n): f"quest(read=tokens({ASKED}), page={n})" for n in PAGES}
    best = {str(n): f"oracle(read=tokens({ASKED}), page={n})" for n in PAGES}
    run, ranked = context.replay(sizes, explain=True), context.replay(best)
    heads, explain, slack, curves = run("heads"), run("explain"), run("slack"), run("curves")
    size, needed = "policy", bytes_for(run, MASS)
    layers = heads.with_columns(line=pl.format("layer {}", "layer"))
    channels = pl.lit(f"{context.trace.captured_layers[0].key_dim} channels")
    aged = slack.filter(pl.col("policy") == str(USUAL)).with_columns(line=pl.lit(PAGE))
    pages = ASKED / pl.col("policy").cast(pl.Float64)
    ranking = {
        "part of the diagonal": mean("slack_norm"),
        "slack of what displaced": mean("displaced_slack"),
        "regret a page": share("regret", pages),
        "missed pages": share("missed_pages", pages),
    }
    return pl.concat(
        [
            rows(layers, {"slack": mean("slack_mean"), "loosest page": mean("slack_max")}, line="line", at=size),
            rows(heads, {"slack": mean("slack_mean")}, line=pl.lit("all layers"), at=size),
            rows(explain, ranking, line=pl.lit("quest"), at=size),
            rows(heads, {"slack by channels": mean("slack_mean")}, line=channels, at=size),
            rows(explain, {"part of the diagonal by channels": mean("slack_norm")}, line=channels, at=size),
            rows(needed, {"bytes needed": mean(pl.col("rows") + pl.col("index"))}, line=pl.lit(INDEXED), at=size),
            rows(needed, {"bytes needed": mean("rows")}, line=pl.lit(ROWS), at=size),
            rows(bytes_for(ranked, MASS), {"bytes needed": mean("rows")}, line=pl.lit(BEST), at=size),
            *(
                rows(one, {f"step, batch {n}": mean("us")}, line="where", at=size)
                for (n,), one in times(context.trace, needed).group_by("batch", maintain_order=True)
            ),
            quality(run, "quest"),
            quality(ranked, "oracle"),
            displaced(context),
            rows(aged, {"slack by key age": share(pl.col("slack_mean") * pl.col("pages"), "pages")}, line="line", at="key_age"),
            rows(
                curves.filter(pl.col("tokens").is_in(BUDGETS)),
                {"mass read": mean("mass_recall_mean")},
                pl.format("{} tokens", "tokens"),
                size,
            ),
        ]
    )


def displaced(context: Context) -> pl.DataFrame:
    """Rows by how long ago a page ended: of the pages of the best logits those that quest leaves, and of those it reads the ones that stand
    in their place; as many pages for both, without those that both must read."""
    asked = {
        name: f"{name}(read=tokens({ASKED}), page={USUAL}{more})"
        for name, more in (("quest", ""), ("oracle", ", by='logit', tail='forced'"))
    }
    run = context.replay(asked, plans=True)
    each = run("plans").with_columns(page=pl.col("pages").list.set_difference("forced")).explode("page").drop_nulls("page")
    at = ["role", "request", "layer", "q_head", "step", "page"]
    quest, best = (each.filter(pl.col("policy") == name).select(*at, pl.lit(True).alias(name)) for name in asked)
    both = quest.join(best, on=at, how="full", coalesce=True).sort(at).with_columns(pl.col(*asked).fill_null(False))
    prompt = pl.col("request").replace_strict({r.id: r.prompt for r in context.trace.requests}, return_dtype=pl.Int64)
    age = (prompt + pl.col("step") - (pl.col("page") + 1) * USUAL + 1).clip(0)
    figures = {
        "left by key age": share(pl.col("oracle") & ~pl.col("quest"), "oracle"),
        "in their place by key age": share(pl.col("quest") & ~pl.col("oracle"), "quest"),
    }
    return rows(both.with_columns(at=doubling(age)), figures, line=pl.lit(PAGE))


def best(where: str, batch: int) -> Callable[[Figures], Draws]:
    """The page size whose step takes the least time."""

    def found(f: Figures) -> Draws:
        us = [f(f"step, batch {batch}", where, n) for n in PAGES]
        return np.array(PAGES, np.float64)[np.argmin(us, axis=0)]

    return found


def over(one: Callable[[Figures], Draws], other: Callable[[Figures], Draws]) -> Callable[[Figures], Draws]:
    return lambda f: one(f) / other(f)


FEW, MANY = BATCHES[0], BATCHES[-1]
NAME = gpu().name
CLAIMS = [
    Claim(
        notes="a larger page holds keys that are less alike, so its box is looser (on Quest, 1.1).",
        of="slack of pages of 64 tokens over that of pages of 4",
        number=lambda f: f("slack", "all layers", 64) / f("slack", "all layers", 4),
        claimed=at_least(1),
        so="a box of 64 tokens is {} times as loose as one of 4: sixteen times the tokens, not sixteen times the slack.",
        if_not="larger pages are not looser.",
        form=".2f",
    ),
    Claim(
        notes="an upper bound may touch the best key of its page (the hand example), and is loose in many dimensions (on Quest, 1.1, 3.1).",
        of="mean slack of pages of 16, in scaled logits",
        number=lambda f: f("slack", "all layers", 16),
        claimed=at_least(1),
        so="a bound lies {} above the best key: e to the slack is a factor of thousands, which says next to nothing of a logit.",
        if_not="bounds lie within a factor of e of the truth.",
        form=".1f",
    ),
    Claim(
        notes="a page that was chosen wrongly usually has a large slack (on Quest, 3.1).",
        of="slack of the pages that displaced a better one, over the mean slack (pages of 16)",
        number=lambda f: f("slack of what displaced", "quest", 16) / f("slack", "all layers", 16),
        claimed=at_least(1),
        so="pages that take a better one's place are looser than the mean.",
        if_not="pages that take a better one's place are not looser than others: differences between slacks decide, not their size.",
        form=".2f",
    ),
    Claim(
        notes="with a budget of tokens held fixed, larger pages lower the quality (on Quest, 2).",
        of=f"mass read with {ASKED} tokens by pages of 4, less that by pages of 64",
        number=lambda f: f("mass recall", "quest", 4) - f("mass recall", "quest", 64),
        claimed=at_least(0),
        so="a fixed budget of tokens reads less of the mass with larger pages ({}).",
        form="+.1%",
        if_not="larger pages do not lower the mass that is read.",
    ),
    Claim(
        notes="and the reason is mainly the looseness of the bound (on Quest, 2).",
        of="of what larger pages lose (4 to 64 tokens), the part that the oracle does not lose",
        number=lambda f: (
            1
            - (f("mass recall", "oracle", 4) - f("mass recall", "oracle", 64))
            / (f("mass recall", "quest", 4) - f("mass recall", "quest", 64))
        ),
        claimed=at_least(0.5),
        so="most of the loss is the bound's ({}): the oracle with the same pages loses less than half as much.",
        if_not="most of the loss is the page's, not the bound's ({}): an oracle that ranks the same pages by true mass loses most of it, too, "
        "because a large page carries tokens that nobody wants.",
    ),
    Claim(
        notes="a fixed budget is taken up by false positives (on Quest, 1.1).",
        of="of the bytes that quest reads, those in pages that are not among the best (pages of 16)",
        number=lambda f: f("false positives", "quest", 16),
        claimed=at_least(0.5),
        so="more than half of what is read is in pages that an oracle would not have read.",
        if_not="{} of what is read is in pages that an oracle would not have read: a part, not most.",
    ),
    Claim(
        notes="the best page size moves with where the cache lies; it is no constant of the algorithm (on reading and evicting, 5).",
        of=f"bytes for {MASS:.0%} of the mass with pages of 4 over those with pages of 16, rows and index on the device",
        number=lambda f: f("bytes needed", INDEXED, 4) / f("bytes needed", INDEXED, 16),
        claimed=at_least(1),
        so="on the device pages of 16 are cheaper than pages of 4, whose index costs more than it saves ({} times the bytes).",
        if_not="on the device pages of 4 are cheaper than pages of 16, index and all ({} times the bytes).",
        form=".2f",
    ),
    Claim(
        notes="and the smaller it is, the less is brought from a slower memory, where the index stays on the device (on Quest, 3).",
        of=f"bytes for {MASS:.0%} of the mass with pages of 4 over those with pages of 16, rows alone",
        number=lambda f: f("bytes needed", ROWS, 4) / f("bytes needed", ROWS, 16),
        claimed=at_most(1),
        so="over the link to the host pages of 4 need {} of the bytes of pages of 16: where the cache lies does move the best page size.",
        if_not="over the link to the host pages of 4 need {} times the bytes of pages of 16.",
        form=".2f",
    ),
    Claim(
        notes="with a page size belongs how many tokens of a page that was read count (on reading and evicting, 5).",
        of="effective tokens for each page of 16 that was read (e to the entropy of the attention over all that was read, by pages read)",
        number=lambda f: f("effective tokens", "quest", 16),
        claimed=None,
        so="of the 16 tokens of a page that was read, {} carry the attention.",
        form=".1f",
    ),
    Claim(
        notes="in time, too, the best page size moves with where the cache lies (on reading and evicting, 5).",
        of=f"page size of the shortest step with the cache on the host and fetched first, over that on the device, {MANY} requests",
        number=over(best(HOST, MANY), best(DEVICE, MANY)),
        claimed=at_most(0.5),
        so=f"by the bandwidths of an {NAME} the best pages of a cache on the host are {{}} times as large as those on the device.",
        if_not=f"by the bandwidths of an {NAME} the best pages of a cache on the host are {{}} times as large as those on the device.",
        form=".2f",
    ),
    Claim(
        notes="and with the batch (on reading and evicting, 5).",
        of=f"best page size of {FEW} request over that of {MANY}, cache on the host and fetched behind the rest of the step",
        number=over(best(BEHIND, FEW), best(BEHIND, MANY)),
        claimed=at_least(2),
        so=f"of one request the fetch hides behind the weights, so that the best pages are {{}} times as large as with {MANY} requests.",
        if_not=f"the best page size of one request is {{}} times that of {MANY}: the batch moves it little.",
        form=".2f",
    ),
    Claim(
        notes="and with the head dimension (on reading and evicting, 5).",
        of=f"page size of the shortest step, {MANY} requests, cache on the device",
        number=best(DEVICE, MANY),
        claimed=None,
        so="on the device the step is shortest with pages of {}. Two models, so two head dimensions and much else.",
        form=".0f",
    ),
    Claim(
        notes="bounds are loose in many dimensions (on Quest, 1.1, 3.1).",
        of="slack of pages of 16, in parts of |q| × half the box's diagonal, which itself grows with the channels",
        number=lambda f: f("part of the diagonal", "quest", USUAL),
        claimed=None,
        so="a bound lies {} of the query's length × half the diagonal above the best key.",
    ),
    Claim(
        notes="whether boxes of old keys are looser is not said.",
        of="slack of pages that ended 512–1023 tokens ago over that of pages 16–31 tokens ago",
        number=lambda f: f("slack by key age", PAGE, OLD) / f("slack by key age", PAGE, YOUNG),
        claimed=None,
        so="boxes of keys 512 tokens old are {} times as loose as those of 16.",
        form=".2f",
    ),
    Claim(
        notes="nor whether it is old pages that are displaced.",
        of="of the pages of the best logits those that quest leaves, 512–1023 tokens old, over the same share of those 16–31 tokens old",
        number=lambda f: f("left by key age", PAGE, OLD) / f("left by key age", PAGE, YOUNG),
        claimed=None,
        so="an old page that belongs to the best is left {} times as often as a young one.",
        form=".2f",
    ),
]
SIZES = [str(n) for n in PAGES]
SIZE = "page size (tokens)"


def _slack(frame: pl.DataFrame) -> object:
    lines = sorted((x for x in frame["line"].unique() if x != "all layers"), key=lambda x: int(x.removeprefix("layer ")))
    y = {"slack": axis("slack, mean of pages (scaled logits)", 0), "loosest page": axis("slack, loosest page (scaled logits)", 0)}
    return sweep(frame, y, SIZE, styled(lines), "Slack of the bound by page size: a line per layer, a column per cell.", SIZES)


def _quality(frame: pl.DataFrame) -> object:
    y = {
        "mass recall": axis("dense mass read", 0, 1, ".0%"),
        "output error": axis("output error (relative L2)", 0),
        "false positives": axis("bytes in pages not among the best", 0, 1, ".0%"),
        "effective tokens": axis("effective tokens a page", 0),
    }
    return sweep(frame, y, SIZE, styled(["quest", "oracle"]), "Quality by page size at a fixed budget of tokens.", SIZES)


def _age(frame: pl.DataFrame) -> object:
    y = {
        "slack by key age": axis("slack, mean of pages (scaled logits)", 0),
        "left by key age": axis("of the best pages, left", 0, 1, ".0%"),
        "in their place by key age": axis("of the pages read, in their place", 0, 1, ".0%"),
    }
    places = sorted(frame["at"].unique(), key=int)
    return sweep(frame, y, "tokens since the page ended (from)", styled([PAGE]), "Slack and displaced pages by key age.", places)


def _budget(frame: pl.DataFrame) -> object:
    y = {"mass read": axis("dense mass read", 0, 1, ".0%")}
    return sweep(frame, y, SIZE, styled([f"{n} tokens" for n in BUDGETS]), "Mass read by page size and budget.", SIZES)


def _regret(frame: pl.DataFrame) -> object:
    y = {
        "regret a page": axis("regret a page read (scaled logits)", 0),
        "missed pages": axis("better pages missed, of those read", 0, 1, ".0%"),
        "part of the diagonal": axis("slack, of |q| × half the box's diagonal", 0),
    }
    return sweep(frame, y, SIZE, styled(["quest"]), "Regret of the ranking by page size.", SIZES)


def _needed(frame: pl.DataFrame) -> object:
    y = {"bytes needed": axis("bytes, of full attention's", 0, None, ".0%")}
    return sweep(frame, y, SIZE, styled([INDEXED, ROWS, BEST]), "Bytes for a share of the mass by page size.", SIZES)


def _steps(frame: pl.DataFrame) -> object:
    y = {f"step, batch {n}": axis(f"step of {n} request{'s' if n > 1 else ''} (µs)", log=True) for n in BATCHES}
    return sweep(frame, y, SIZE, styled([DEVICE, HOST, BEHIND, FULL]), "A step's time by page size, batch and place.", SIZES)


def _channels(frame: pl.DataFrame) -> object:
    """Models side by side: the last part of a cell is the line's, the rest is the panel's."""
    model = pl.col("cell").str.extract("([^/:]+):")
    named = frame.with_columns(line=pl.format("{} ({})", "line", model), cell=pl.col("cell").str.replace("/[^/:]+:", ":"))
    shared = named.filter(pl.col("line").n_unique().over("cell") > 1)
    mine = shared if shared.height else named
    y = {
        "slack by channels": axis("slack, mean of pages (scaled logits)", 0),
        "part of the diagonal by channels": axis("slack, of |q| × half the box's diagonal", 0),
    }
    lines = mine["line"].unique(maintain_order=True).to_list()
    return sweep(mine, y, SIZE, styled(lines), "Slack by page size, a line per model.", SIZES)


ALSO = "Not drawn: full attention, which reads everything and has no error."
QUESTION = Question(
    name="boxes",
    title="Are min–max boxes tight?",
    lead="Quest ranks a page by the largest logit that its box of keys allows. How far above its best key is that, what does it depend on, "
    "and what does the looseness cost a fixed budget?",
    measure=measure,
    claims=CLAIMS,
    charts=[
        Chart(
            "slack",
            "How loose is a box, by page size and layer?",
            f"Score less the page's best logit. {ALSO} Nor the oracle, whose scores are the truth.",
            ["slack", "loosest page"],
            _slack,
        ),
        Chart(
            "quality",
            "What does a budget of tokens buy, by page size?",
            f"{ASKED} tokens per query head and step. Quest ranks pages by boxes, the oracle by true mass; both read whole pages. {ALSO}",
            QUALITY,
            _quality,
        ),
        Chart(
            "needed",
            f"What does {MASS:.0%} of the mass cost, by page size?",
            f"Read by a group's heads together; on the device the index is scanned, too, from a host rows alone are brought. {ALSO}",
            ["bytes needed"],
            _needed,
        ),
        Chart(
            "steps",
            "Which page size is best, by batch and by where the cache lies?",
            f"A step that reads {MASS:.0%} of the mass: bytes over the bandwidths of an {NAME} ({gpu().bandwidth_gbps:,.0f} GB/s, "
            f"{gpu().pcie_gbps:g} GB/s to the host), weights in 16 bits included. Rows fetched first, or hidden as far as the rest of the step "
            "goes; the index stays on the device. A floor: neither launches nor small transfers are priced, which favours small pages. "
            "Full attention is drawn. Not drawn: the oracle, whose index costs nothing.",
            [f"step, batch {n}" for n in BATCHES],
            _steps,
        ),
        Chart(
            "channels",
            "And by head dimension?",
            f"Two models with keys of 64 and of 256 channels, on the same texts: what differs is not the head dimension alone, and a small "
            f"model with 128 is not in the study. {ALSO} Nor the oracle, which has no boxes.",
            ["slack by channels", "part of the diagonal by channels"],
            _channels,
        ),
        Chart(
            "regret",
            "What does the ranking give away?",
            f"Against as many pages by their true best logit: the best logits given away, and the pages missed. {ASKED} tokens. "
            f"Not drawn: that oracle, at 0. {ALSO}",
            ["regret a page", "missed pages", "part of the diagonal"],
            _regret,
        ),
        Chart(
            "budget",
            "Page size × budget",
            f"Mass that quest reads; the oracle's with {ASKED} tokens is in the second chart. {ALSO}",
            ["mass read"],
            _budget,
        ),
        Chart(
            "age",
            "Does slack depend on how old the keys are, and which pages does it displace?",
            f"Pages of 16, by how long ago they ended. Best: as many pages by their true best logit, {ASKED} tokens, which is the oracle here. "
            f"{ALSO}",
            ["slack by key age", "left by key age", "in their place by key age"],
            _age,
        ),
    ],
    labels=["quest", "oracle"],
    cells=(*SHORT, WIDE),
)
