"""Pages that held tokens keep in memory, by who owns a page and whether the rows of a page that lost some are moved together."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

PAGE = 16  # tokens, where nothing else is asked for
KEYS = ("policy", "request", "layer")


def resident_pages(ledger: pl.LazyFrame, tiers: pl.LazyFrame, page: int = PAGE) -> pl.DataFrame:
    """-> policy, request, layer, step, head, layer_pages, head_compact, layer_compact: pages of `page` tokens after each step, in pages of one
    kv head; policies with a tiers table, sorted.

    head: every kv head has pages of its own, and one stays while it has a held row;
    layer_pages: a page holds its tokens' rows of all kv heads, and
    stays while any head needs one. Compacted, rows are moved until pages are full: ceil(held / page) of each head; as many for every head as
    the fullest needs. Of a layer's pages every kv head pays its part, so all four count the same bytes."""
    parts = tiers.collect().partition_by(*KEYS, as_dict=True)
    steps = ledger.join(tiers.select(KEYS).unique(), on=KEYS, how="semi").collect().partition_by(*KEYS, as_dict=True)
    rows = [
        dict(zip(KEYS, key, strict=True)) | row
        for key, mine in sorted(steps.items())
        for row in _of_layer(mine.sort("step", "kv_head"), parts[key], page)
    ]
    return pl.DataFrame(rows).sort(*KEYS, "step") if rows else pl.DataFrame(schema=dict.fromkeys(KEYS))


def _of_layer(ledger: pl.DataFrame, tiers: pl.DataFrame, page: int) -> list[dict[str, Any]]:
    heads = ledger["kv_head"].unique().sort().to_list()
    total = -(-(int(ledger["pos"].max()) + 1) // page) * page  # type: ignore[arg-type]  # a whole number, at least one row
    held, born = np.zeros((len(heads), total), bool), 0
    changes: dict[int, list[tuple[int, list[dict[str, int]]]]] = {}
    for head, step, runs in tiers.select("kv_head", "step", "runs").iter_rows():
        changes.setdefault(step, []).append((heads.index(head), runs))
    _apply(held, changes.get(-1, []))
    out = []
    for (step, pos), mine in ledger.group_by("step", "pos", maintain_order=True):
        now = int(pos) + 1
        born = born or now - int(step) - 1
        held[:, born:now], born = True, now
        _apply(held, changes.get(int(step), []))
        held[:, : now - int(mine["visible_tokens"][0])] = False
        live, many = held.reshape(len(heads), -1, page).any(-1), mine["held_tokens"].to_numpy()
        out.append(
            {
                "step": step,
                "head": int(live.sum()),
                "layer_pages": int(live.any(0).sum()) * len(heads),
                "head_compact": int((-(-many // page)).sum()),
                "layer_compact": int(-(-many.max() // page)) * len(heads),
            }
        )
    return out


def _apply(held: NDArray[np.bool_], changes: list[tuple[int, list[dict[str, int]]]]) -> None:
    for head, runs in changes:
        for run in runs:
            held[head, run["start"] : run["stop"]] = run["tier"] & 3 > 0


WAYS = {  # -> in words, in the order they stand on the chart
    "layer_pages": "a page holds all KV heads",
    "head": "each KV head has its own pages",
    "layer_compact": "all KV heads, compacted",
    "head_compact": "own pages, compacted",
}


def pages_held(ledger: pl.LazyFrame, tiers: pl.LazyFrame, page: int = PAGE) -> pl.DataFrame:
    """-> policy, part (a value of WAYS), order, pages: pages per kv head, means over steps, layers and contexts; sorted."""
    found = resident_pages(ledger, tiers, page).lazy()
    heads = ledger.group_by(KEYS).agg(kv_heads=pl.col("kv_head").n_unique())
    each = found.join(heads, on=KEYS).group_by("policy").agg((pl.col(n) / pl.col("kv_heads")).mean().alias(n) for n in WAYS)
    tall = each.unpivot(index="policy", variable_name="part", value_name="pages")
    order = {n: i for i, n in enumerate(WAYS)}
    return (
        tall.with_columns(
            order=pl.col("part").replace_strict(order, return_dtype=pl.Int8),
            part=pl.col("part").replace_strict(WAYS, return_dtype=pl.String),
        )
        .sort("policy", "order")
        .collect()
    )
