"""Which rows can be true: status `l2_hot`, `impossible` or `conflicting` for those that cannot be plain reads of memory."""

from __future__ import annotations

import polars as pl

from kvsim.cost.hardware import Gpu

OVER = 1.02  # of the peak: what clocks and rounding explain
HOT_SIZE = 4  # L2 sizes up to which a cache explains a time that memory cannot
CONFLICT = 1.25  # slowest over fastest of one shape
SHAPE = (
    "class",
    "variant",
    "batch",
    "context",
    "pages",
    "page",
    "q_heads",
    "kv_heads",
    "head_dim",
    "layers",
    "kv_bits",
    "bytes",
    "n",
    "cache",
    "graph",
    "gpu",
)


def marked(samples: pl.DataFrame, gpu: Gpu | None) -> pl.DataFrame:
    """The samples with `status` filled in; a status that a reader gave other than ok stays.

    bytes / t above 1.02 of the link is `l2_hot` up to four L2 sizes a layer and `impossible` above. One shape measured twice with times
    1.25 apart is `conflicting`, all of its rows. Without a GPU only conflicts are found."""
    twice = pl.col("t_us").max().over(SHAPE) > CONFLICT * pl.col("t_us").min().over(SHAPE)
    sized = pl.any_horizontal(pl.col(c).is_not_null() for c in ("batch", "context", "pages", "bytes"))
    marks = pl.when(False).then(pl.lit("")).when(pl.col("status") != "ok").then(pl.col("status"))
    if gpu:
        links = {cls: link for cls in samples["class"].unique() if (link := gpu.link_gbps(cls))}
        limit = pl.col("class").replace_strict(links, default=None, return_dtype=pl.Float64)
        fast = (pl.col("bytes") / pl.col("t_us") * 1e-3 > OVER * limit).fill_null(False)
        cached = (limit == gpu.bandwidth_gbps) & (pl.col("bytes") / pl.col("layers") <= HOT_SIZE * gpu.l2_bytes)
        marks = marks.when(fast & cached).then(pl.lit("l2_hot")).when(fast).then(pl.lit("impossible"))
    return samples.with_columns(marks.when(twice & sized).then(pl.lit("conflicting")).otherwise(pl.lit("ok")).alias("status"))
