"""Bytes of launches whose shape only those know who ran them: no profiler writes it down."""

from __future__ import annotations

from typing import Any

import polars as pl

from kvsim.cost.measure.shapes import BY_PAGE, Shape, traffic
from kvsim.cost.readers.found import Told
from kvsim.cost.readers.ncu import SECOND
from kvsim.cost.samples import SCHEMA
from kvsim.errors import WrongUse

BY_CONTEXT = ("summary_update", "dequant", "scores")


def shaped(samples: pl.DataFrame, told: Told, pages: int | None, page: int | None) -> pl.DataFrame:
    """Rows without bytes get those of their class, once batch, context and heads are told; classes that read pages, once `pages` of `page`
    tokens are, too: of a kv head, all requests together.

    Attention is the readers' own; a second launch (`combine`, `reduce`) reads nothing of the cache. Raises WrongUse for pages
    without the rest."""
    g, known = told.geometry, told.geometry and told.batch and told.context
    if pages is not None and not (known and page and page > 0):
        raise WrongUse("--pages needs --page, --batch, --context and --geometry: bytes follow from all of them")
    if g is None or not told.batch or not told.context:
        return samples
    wanted = BY_CONTEXT if pages is None else BY_CONTEXT + BY_PAGE
    s = Shape(told.batch, told.context, pages or 0, page or 1)

    def with_bytes(row: dict[str, Any]) -> dict[str, Any]:
        if row["class"] not in wanted or row["bytes"] is not None or SECOND.search(row["variant"]):
            return row
        paged = {"pages": s.pages, "page": s.page} if row["class"] in BY_PAGE else {}
        return row | paged | {"bytes": row["n"] * row["layers"] * traffic(row["class"], g, s)}

    return pl.DataFrame([with_bytes(row) for row in samples.iter_rows(named=True)], schema=SCHEMA, orient="row")
