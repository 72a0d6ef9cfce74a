"""LLMServingSim's `attention.csv`: one layer's attention under a mix of prefill and decode; heads are not in the file."""

from __future__ import annotations

import csv

from kvsim.cost.numbers import number
from kvsim.cost.readers.found import Found, Told
from kvsim.errors import BadProfile

COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")


def knows(head: str) -> bool:
    """Whether the beginning of a file is this format's."""
    return head.startswith(",".join(COLUMNS))


def read(text: str, told: Told) -> Found:
    """The rows that only decode: kv_decode is the tokens of each request. Raises BadProfile for a cell that is no number."""
    found = Found(notes=[] if told.geometry else ["heads are not in this table: bytes stay empty without --geometry"])
    table = csv.DictReader(text.splitlines())
    if missing := [c for c in COLUMNS if c not in (table.fieldnames or [])]:
        raise BadProfile(f"{told.label}: no column {missing[0]}; expected {', '.join(COLUMNS)}")
    for i, row in enumerate(table, 2):
        where = f"{told.label}, row {i}"
        values = {c: number(row[c], f"{where}, column {c}") for c in COLUMNS}
        if any(v is None for v in values.values()):
            raise BadProfile(f"{where}: a cell is missing; expected {', '.join(COLUMNS)}")
        chunk, _, batch, context, t_us = (float(v or 0) for v in values.values())
        if chunk or not batch or not context:
            found.left_out["row with a prefill chunk, or without decode"] += 1
            continue
        size = told.geometry.decode_bytes(int(batch), int(batch * context)) if told.geometry else None
        shape = {"batch": int(batch), "context": int(context), "bytes": size, "t_us": t_us}
        found.rows.append(
            told.shape() | shape | {"class": "dense_attn", "variant": "LLMServingSim attention", "source": f"{told.label}:{i}"}
        )
    return found
