"""Several requests or beams over one prefix: what a keep policy really frees of pages that they share, and what they read of them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.errors import WrongUse
from kvsim.metrics.run import RunTables

Branch = tuple[int, int]  # request, decode step: a branch as that request is after that step
HEAD = ["policy", "layer", "kv_head"]
GONE, CODED, FULL = 0, 1, 2  # of the tiers table, once & 3


def shared(
    run: RunTables, prefix: int, page: int, branches: Iterable[Branch] | None = None, allocator: str = "head"
) -> pl.DataFrame:
    """Branches that share the first `prefix` tokens in pages of `page` -> one row per policy and layer, sorted:

    branches · prefix_tokens (in whole pages: an open page is copied by whoever writes to it) · held_tokens: of them, that a branch and kv
    head still holds, meaned · claimed_bytes: rows that branches have dropped, summed over branches and kv heads: what each counts as
    freed · freed_alone_bytes: whole pages that one branch alone would give back, meaned over branches · freed_bytes: pages that are
    given back, because no branch needs a row of them · resident_pages: the others, summed over kv heads · coded_pages: of the prefix,
    those that some branch holds coded: a copy beside the exact page, whose bytes no column counts, so bytes are null then ·
    reusable_tokens: the unbroken start of the prefix whose pages are exact and resident in every kv head, what a next turn can take
    from here; over layers take the least · state_bytes: what forking has copied of the keep's own memory: all branches but one.

    branches: (request, step) each, one request at several steps standing for beams; by default every request at its last step. That
    they share a prefix is the caller's word, as a run does not have the text. allocator "layer": a page holds the rows of all kv heads.
    Raises WrongUse for a branch that the run does not have, and for a prefix that is longer than a prompt or shorter than a page."""
    if allocator not in ("head", "layer"):
        raise WrongUse(f"allocator {allocator!r}: expected 'head' or 'layer', whose rows keep a physical page")
    chosen = _branches(run, prefix, page, branches)
    rows = []
    for (policy, layer), heads in _held(run, chosen, prefix // page * page).items():
        row_bytes = run.layers.filter(pl.col("layer") == layer).collect()["row_bytes"].item()
        tiers = np.stack([np.stack(mine) for mine in heads.values()], 1)  # u8[branches, Hkv, tokens]
        rows.append({"policy": policy, "layer": layer} | _freed(tiers, page, row_bytes, allocator))
    schema = {"policy": pl.String, "layer": pl.Int16, "branches": pl.Int32, "prefix_tokens": pl.Int32, "held_tokens": pl.Float64}
    schema |= {"claimed_bytes": pl.Int64, "freed_alone_bytes": pl.Float64, "freed_bytes": pl.Int64}
    schema |= {"resident_pages": pl.Int32, "coded_pages": pl.Int32, "reusable_tokens": pl.Int32}
    frame = pl.DataFrame(rows, schema=schema)
    return frame.join(_state(run, chosen), on=["policy", "layer"], how="left").sort("policy", "layer")


def batch_reads(run: RunTables, prefix: int, branches: Iterable[Branch] | None = None) -> pl.DataFrame:
    """Branches that decode one step together -> policy, layer, branches, read_pages (of every kv head's union, once per branch),
    distinct_pages (the same page of the shared prefix once for all of them), prefix_pages (of those, in the prefix), sorted.

    Needs the plans of the run: policies without have no rows. branches and refusals as of `shared`."""
    sizes = run.tables["plans"].select("policy", "layer", "page_size").unique().collect()
    chosen = _branches(run, prefix, int(sizes["page_size"].min() or 1), branches)  # type: ignore[arg-type]
    at = pl.LazyFrame(
        {"request": [r for r, _ in chosen], "step": [s for _, s in chosen]}, schema={"request": pl.Int32, "step": pl.Int32}
    )
    read = run.tables["plans"].join(at, on=["request", "step"]).explode("pages").unique([*HEAD, "request", "step", "pages"])
    in_prefix = (pl.col("pages") + 1) * pl.col("page_size") <= prefix
    pages = pl.struct("kv_head", "pages")
    return (
        read.with_columns(in_prefix.alias("shared"))
        .group_by("policy", "layer")
        .agg(
            pl.lit(len(chosen)).cast(pl.Int32).alias("branches"),
            pl.len().cast(pl.Int64).alias("read_pages"),
            (pages.filter(pl.col("shared")).n_unique() + (~pl.col("shared")).sum()).cast(pl.Int64).alias("distinct_pages"),
            pages.filter(pl.col("shared")).n_unique().cast(pl.Int64).alias("prefix_pages"),
        )
        .sort("policy", "layer")
        .collect()
    )


def _branches(run: RunTables, prefix: int, page: int, branches: Iterable[Branch] | None) -> list[Branch]:
    there = run.ledger.select("request", "step").unique().sort("request", "step").collect().rows()
    chosen = list(branches) if branches is not None else list({r: (r, s) for r, s in there}.values())
    if lost := [b for b in chosen if b not in set(there)]:
        raise WrongUse(f"branch {lost[0]}: the run has no such (request, step); its requests are {sorted({r for r, _ in there})}")
    if len(set(chosen)) != len(chosen) or not chosen:
        raise WrongUse(f"branches {chosen}: expected one or more, each (request, step) once")
    prompts = {r["request"]: r["prompt_tokens"] for r in run.requests}
    for request, _ in chosen:
        if not page <= prefix <= prompts[request]:
            raise WrongUse(
                f"prefix={prefix}: expected between a page of {page} tokens and the prompt of request {request}, {prompts[request]} tokens"
            )
    return chosen


def _held(run: RunTables, chosen: list[Branch], tokens: int) -> dict[tuple[str, int], dict[int, list[NDArray[np.uint8]]]]:
    """{(policy, layer): {kv head: [u8[tokens] of every branch]}}: the tiers of the prefix after the branch's step."""
    out: dict[tuple[str, int], dict[int, list[NDArray[np.uint8]]]] = {}
    for request, step in chosen:
        now = pl.col("request") == request, pl.col("step") <= step
        changes = run.tables["tiers"].filter(*now).sort("step").collect().rows_by_key(HEAD, named=True)
        for row in _rows(run.ledger.filter(now[0], pl.col("step") == step).sort(HEAD)):
            key = row["policy"], row["layer"], row["kv_head"]
            tier = np.full(tokens, FULL, np.uint8)  # until a change says otherwise
            for change in changes.get(key, []):
                for part in change["runs"]:
                    tier[part["start"] : part["stop"]] = part["tier"] & 3
            tier[: max(0, row["pos"] + 1 - row["visible_tokens"])] = GONE  # has left a sliding window
            out.setdefault(key[:2], {}).setdefault(key[2], []).append(tier)
    return out


def _rows(frame: pl.LazyFrame) -> Iterator[dict[str, Any]]:
    return frame.select(*HEAD, "pos", "visible_tokens").collect().iter_rows(named=True)


def _freed(tiers: NDArray[np.uint8], page: int, row_bytes: int | None, allocator: str) -> dict[str, Any]:
    """tiers u8[branches, Hkv, tokens]."""
    branches, heads, tokens = tiers.shape
    by_page = tiers.reshape(branches, heads, -1, page)
    exact, coded = ((by_page == tier).any(3) for tier in (FULL, CODED))  # bool[branches, Hkv, P]
    if allocator == "layer":
        exact, coded = (np.repeat(x.any(1, keepdims=True), heads, 1) for x in (exact, coded))
    needed = exact.any(0)
    unbroken = np.logical_and.accumulate(needed.all(0)).sum()
    of_page = page * row_bytes if row_bytes is not None and not coded.any() else None
    return {
        "branches": branches,
        "prefix_tokens": tokens,
        "held_tokens": float((tiers != GONE).sum(2).mean()),
        "claimed_bytes": None if of_page is None else int((tiers == GONE).sum()) * of_page // page,
        "freed_alone_bytes": None if of_page is None else float((~exact).sum((1, 2)).mean()) * of_page,
        "freed_bytes": None if of_page is None else int((~needed).sum()) * of_page,
        "resident_pages": int(needed.sum()),
        "coded_pages": int(coded.any(0).sum()),
        "reusable_tokens": int(unbroken) * page,
    }


def _state(run: RunTables, chosen: list[Branch]) -> pl.DataFrame:
    """policy, layer, state_bytes: the mean of the branches, times all but one; 0 for a policy that remembers nothing, null where a run
    does not tell."""
    at = pl.LazyFrame(
        {"request": [r for r, _ in chosen], "step": [s for _, s in chosen]}, schema={"request": pl.Int32, "step": pl.Int32}
    )
    copies = len(chosen) - 1
    told = run.tables["events"].join(at, on=["request", "step"]).group_by("policy", "layer", "request", "step")
    state = told.agg(pl.when(pl.col("state_bytes").is_not_null().all()).then(pl.col("state_bytes").sum()))
    mean = state.group_by("policy", "layer").agg(
        pl.when(pl.col("state_bytes").is_not_null().all()).then(pl.col("state_bytes").mean())
    )
    every = run.ledger.select("policy", "layer").unique()
    keeps = mean.with_columns(known=pl.lit(True))
    return (
        every.join(keeps, on=["policy", "layer"], how="left")
        .with_columns(state_bytes=pl.when(pl.col("known")).then(pl.col("state_bytes") * copies).otherwise(0.0))
        .select("policy", "layer", "state_bytes")
        .collect()
    )
