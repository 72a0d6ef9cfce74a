"""Rows of launches that read pages: their shape is known to who ran them, and no profiler writes it down."""

from __future__ import annotations

from typing import Any

import polars as pl

from kvsim.cost.heads import Geometry
from kvsim.cost.measure.shapes import BY_PAGE, Shape, traffic
from kvsim.cost.readers.ncu import SECOND
from kvsim.cost.samples import SCHEMA
from kvsim.errors import WrongUse


def shaped(
    samples: pl.DataFrame, g: Geometry | None, batch: int | None, context: int | None, pages: int, page: int
) -> pl.DataFrame:
    """Rows of page classes without bytes get `pages`, `page` and the bytes of the class.

    pages: what a kv head reads, all requests together. A second launch (`combine`, `reduce`) reads no pages and gets nothing.
    Raises WrongUse when the rest of the shape is not told."""
    if g is None or batch is None or context is None or page < 1:
        raise WrongUse("--pages needs --page, --batch, --context and --geometry: bytes follow from all of them")
    rows = [_with_bytes(row, g, Shape(batch, context, pages, page)) for row in samples.iter_rows(named=True)]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _with_bytes(row: dict[str, Any], g: Geometry, s: Shape) -> dict[str, Any]:
    if row["class"] not in BY_PAGE or row["bytes"] is not None or SECOND.search(row["variant"]):
        return row
    return row | {"pages": s.pages, "page": s.page, "bytes": row["n"] * row["layers"] * traffic(row["class"], g, s)}
