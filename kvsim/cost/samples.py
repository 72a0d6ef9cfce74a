"""`kvsim.samples/1`: one measured launch group a row, the table that every reader writes and the fit reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from kvsim.errors import BadProfile

CLASSES = (
    "dense_attn", "page_scan", "topk", "gather_attn", "summary_update", "dequant", "scores", "routing", "tier_move", "host_fetch",
    "ssd_fetch", "collective", "prefill_extra", "step", "rest",
)  # fmt: skip
CACHES = ("cold", "hot", "unknown")
STATUSES = ("ok", "l2_hot", "impossible", "conflicting")
GRAPHS = ("eager", "piecewise", "full")

# t_us and bytes are those of all n launches of the group together, over `layers` layers (none: one); pages and batch are of one layer.
COLUMNS: dict[str, Any] = {
    "class": pl.String, "variant": pl.String, "batch": pl.Int64, "context": pl.Int64, "pages": pl.Int64, "page": pl.Int64,
    "q_heads": pl.Int64, "kv_heads": pl.Int64, "head_dim": pl.Int64, "layers": pl.Int64, "kv_bits": pl.Int64, "bytes": pl.Int64,
    "t_us": pl.Float64, "n": pl.Int64, "cache": pl.String, "status": pl.String, "source": pl.String,
}  # fmt: skip
OPTIONAL: dict[str, Any] = {"bytes_measured": pl.Int64, "graph": pl.String, "gpu": pl.String}
SCHEMA = COLUMNS | OPTIONAL
WORDS = {"class": CLASSES, "cache": CACHES, "status": STATUSES, "graph": GRAPHS}
NEEDED = ("class", "variant", "t_us", "n", "cache", "status", "source")  # never empty
LARGEST = 2**63 - 1  # of pl.Int64
DEFAULTS = {"variant": "", "layers": 1, "n": 1, "cache": "unknown", "status": "ok"}


def frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows of readers, with what they leave out, as a table of samples. Raises BadProfile for a whole number that the table cannot hold."""
    filled = [{name: row.get(name, DEFAULTS.get(name)) for name in SCHEMA} for row in rows]
    for row in filled:
        for name, x in row.items():
            if isinstance(x, int) and abs(x) > LARGEST:
                raise BadProfile(
                    f"{row['source']}: {name} is {x:.3g}, expected a number up to {LARGEST:.2g}; nothing was measured so large"
                )
    return pl.DataFrame(filled, schema=SCHEMA, orient="row")


def write_samples(samples: pl.DataFrame, path: str | Path) -> None:
    """Writes the canonical CSV; columns nobody filled are left out when the format lets them be absent."""
    empty = [name for name in OPTIONAL if samples[name].null_count() == samples.height]
    write_whole(path, samples.drop(empty).write_csv())


def write_whole(path: str | Path, text: str) -> None:
    """Writes a file that is either complete under its name or not there."""
    partial = Path(path).with_name(Path(path).name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_samples(path: str | Path) -> pl.DataFrame:
    """A samples CSV -> its table, every cell checked. Raises BadProfile with the row and the column."""
    name = Path(path).name
    try:
        text = pl.read_csv(path, infer_schema=False)
    except (pl.exceptions.PolarsError, UnicodeDecodeError) as e:
        raise BadProfile(f"{name}: not a samples CSV ({str(e).splitlines()[0]}); make one with kvsim cost import") from None
    if missing := [c for c in COLUMNS if c not in text.columns]:
        raise BadProfile(
            f"{name}: no column {missing[0]!r}, so it is not a kvsim.samples/1 table; make one with kvsim cost import"
        )
    text = text.select([c for c in SCHEMA if c in text.columns])
    samples = text.with_columns([_typed(text, c, name) for c in text.columns])
    samples = samples.with_columns([pl.lit(None, dtype).alias(c) for c, dtype in OPTIONAL.items() if c not in samples.columns])
    for column in NEEDED:
        blank = samples[column].is_null() if column != "variant" else pl.Series([False] * samples.height)
        _refuse(name, column, text, blank, "a value")
    for column, words in WORDS.items():
        _refuse(name, column, text, samples[column].is_not_null() & ~samples[column].is_in(words), f"one of {', '.join(words)}")
    for column in ("t_us", "n"):
        _refuse(name, column, text, ~((samples[column] > 0) & samples[column].is_finite()), "a number above 0")
    for column in ("batch", "context", "pages", "page", "q_heads", "kv_heads", "head_dim", "layers", "kv_bits", "bytes"):
        _refuse(name, column, text, (samples[column] < 0).fill_null(False), "a number of 0 or more")
    return samples.with_columns(pl.col("variant").fill_null(""), pl.col("layers").fill_null(1)).select(list(SCHEMA))


def _typed(text: pl.DataFrame, column: str, name: str) -> pl.Series:
    typed = text[column].cast(SCHEMA[column], strict=False)
    wrong = text[column].is_not_null() & typed.is_null()
    _refuse(name, column, text, wrong, "a whole number" if SCHEMA[column] == pl.Int64 else "a plain number such as 12.5")
    return typed


def _refuse(name: str, column: str, text: pl.DataFrame, wrong: pl.Series, expected: str) -> None:
    """Raises for the first wrong cell; rows are counted as an editor counts lines."""
    if wrong.any():
        row = int(wrong.arg_true()[0])
        cell = text[column][row] if column in text.columns else None
        raise BadProfile(f"{name}, row {row + 2}, column {column}: {cell!r} where {expected} is expected")
