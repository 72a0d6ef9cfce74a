"""AIConfigurator's `generation_attention_perf` tables (Parquet or CSV): decode attention by shape, one layer, one launch."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from kvsim.cost.heads import attention_bytes
from kvsim.cost.readers.found import Found, Told
from kvsim.errors import BadProfile

TEXT = ("framework", "version", "device", "kernel_source", "kv_cache_dtype")
WHOLE = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step")
COLUMNS = {c: pl.String for c in TEXT} | {c: pl.Int64 for c in WHOLE} | {"latency": pl.Float64}
BITS = {"bfloat16": 16, "float16": 16, "fp8": 8}


def knows(columns: list[str]) -> bool:
    """Whether a table's columns are this format's."""
    return {"kernel_source", "num_key_value_heads", "latency"} <= set(columns)


def read(path: Path, told: Told) -> Found:
    """One row a shape; the step's own token is visible, so context = isl + step; a window bounds what is read.

    Raises BadProfile for a missing column, a wrong type or an unknown dtype of the cache."""
    try:
        table = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)
        table = table.with_columns([pl.col(c).cast(dtype) for c, dtype in COLUMNS.items()])
        windows = table["window_size"].cast(pl.Int64) if "window_size" in table.columns else pl.Series([0] * table.height)
    except pl.exceptions.PolarsError as e:
        raise BadProfile(
            f"{told.label}: not a table of AIConfigurator ({str(e).splitlines()[0]}); expected {', '.join(COLUMNS)}"
        ) from None
    found = Found()
    for i, (row, window) in enumerate(zip(table.iter_rows(named=True), windows, strict=True), 1):
        if row["kv_cache_dtype"] not in BITS:
            raise BadProfile(
                f"{told.label}, row {i}, column kv_cache_dtype: {row['kv_cache_dtype']!r} where one of {', '.join(BITS)} is expected"
            )
        if empty := [c for c in COLUMNS if row[c] is None and c != "latency"]:
            raise BadProfile(f"{told.label}, row {i}, column {empty[0]}: the cell is empty")
        if not row["latency"] or row["latency"] <= 0:
            found.left_out["row without a latency"] += 1
            continue
        context, bits = row["isl"] + row["step"], BITS[row["kv_cache_dtype"]]
        heads, dim = (row["num_heads"], row["num_key_value_heads"]), row["head_dim"]
        read_tokens = row["batch_size"] * (min(context, window) if window else context)
        variant = f"{row['framework']} {row['version']} {row['kernel_source']}" + (f" window {window}" if window else "")
        found.rows.append({
            "class": "dense_attn", "variant": variant, "batch": row["batch_size"], "context": context,
            "q_heads": heads[0], "kv_heads": heads[1], "head_dim": dim, "kv_bits": bits,
            "bytes": attention_bytes(row["batch_size"], read_tokens, *heads, dim, dim, bits), "t_us": row["latency"] * 1e3,
            "cache": told.cache or "unknown", "source": f"{told.label}:{i}", "gpu": row["device"],
        })  # fmt: skip
    return found
