"""Rows of the tables `requests` and `layers` -> geometry, refusing what contradicts itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from kvsim.errors import BadTrace
from kvsim.geometry import ITEMSIZE, Layer, Request, Span
from kvsim.places import from_json

KINDS = ("full", "sliding", "mla_expanded", "linear")

Row = Mapping[str, Any]


def requests_of(rows: Sequence[Row], where: object) -> tuple[Request, ...]:
    """Rows of `requests`, ascending by id. Raises BadTrace."""
    found = [_request(row, f"{where}: request {row['request']}") for row in rows]
    return tuple(sorted(_unique(found, where, "request"), key=lambda r: r.id))


def layers_of(rows: Sequence[Row], dtype: str, where: object) -> tuple[Layer, ...]:
    """Rows of `layers`, ascending by id, captured or not. Raises BadTrace."""
    found = [_layer(row, dtype, f"{where}: layer {row['layer']}") for row in rows]
    among = tuple(sorted(layer.id for layer in found if layer.kind != "linear"))
    return tuple(replace(layer, among=among) for layer in sorted(_unique(found, where, "layer"), key=lambda x: x.id))


def _unique(found: list[Any], where: object, what: str) -> list[Any]:
    ids = [x.id for x in found]
    for i in ids:
        if i < 0 or ids.count(i) > 1:
            raise BadTrace(
                f"{where}: {what} {i} is {'negative' if i < 0 else 'listed twice'}; expected one row for each, from 0 up"
            )
    return found


def _request(row: Row, where: str) -> Request:
    prompt, total, roles = row["prompt_tokens"], row["total_tokens"], row.get("roles")
    _require(1 <= prompt <= total, where, f"prompt_tokens {prompt} of total_tokens {total}", "1 <= prompt_tokens <= total_tokens")
    for name in ("roles", "token_ids"):
        n = total if row.get(name) is None else len(row[name])
        _require(n == total, where, f"{name} has {n} entries", f"one for each of the {total} tokens")
    if roles is None:
        roles = np.repeat([0, 2 if row["mode"] == "teacher_forced" else 3], [prompt, total - prompt])
    strange = np.setdiff1d(roles, (0, 1, 2, 3)).tolist()
    _require(not strange, where, f"roles has {strange}", "0, 1, 2 or 3")
    spans = tuple(Span(s["label"], s["start"], s["stop"], s["kind"]) for s in row.get("spans") or ())
    for s in spans:
        _require(
            s.start is not None and s.stop is not None and 0 <= s.start < s.stop <= total,
            where,
            f"the span {s.label!r} is [{s.start}, {s.stop})",
            f"a range inside [0, {total})",
        )
    ids = row.get("token_ids")
    digest = "" if ids is None else sha256(np.array(ids[:prompt], "<i4").tobytes()).hexdigest()[:12]
    return Request(row["request"], prompt, total, row["mode"], np.array(roles, np.int8), spans, digest)


def _layer(row: Row, dtype: str, where: str) -> Layer:
    kind, window, sinks, rope = row["kind"], row.get("window"), row.get("sinks"), row.get("rope")
    _require(kind in KINDS, where, f"kind is {kind!r}", " | ".join(KINDS))
    names = ("q_heads", "kv_heads", "key_dim", "value_dim")
    q_heads, kv_heads, key_dim, value_dim = sizes = tuple(row[n] for n in names)
    scale, softcap, plain = row["scale"], row.get("softcap"), (key_dim + value_dim) * ITEMSIZE[dtype]
    row_bytes = plain if row.get("row_bytes") is None else row["row_bytes"]
    captured = kind != "linear" if row.get("captured") is None else row["captured"]
    if kind == "linear":
        _require(not captured, where, "kind is 'linear' and captured is true", "captured false: a linear layer has no rows")
    else:
        for name, n in zip((*names, "row_bytes"), (*sizes, row_bytes), strict=True):
            _require(n >= 1, where, f"{name} is {n}", "1 or more")
        for name in ("shared_row_bytes", "index_topk"):
            _require(row.get(name) is None or row[name] >= 1, where, f"{name} is {row.get(name)}", "null or 1 or more")
        _require(q_heads % kv_heads == 0, where, f"{q_heads} q_heads over {kv_heads} kv_heads", "q_heads a multiple of kv_heads")
        _require(math.isfinite(scale) and scale > 0, where, f"scale is {scale}", "a number above 0")
        _require(
            softcap is None or (math.isfinite(softcap) and softcap > 0),
            where,
            f"softcap is {softcap}",
            "null or a number above 0",
        )
        _require(window is None or window >= 1, where, f"window is {window}", "null or 1 or more")
        _require((window is None) <= (kind != "sliding"), where, "kind is 'sliding' and window is null", "the window in tokens")
        _require(
            sinks is None or len(sinks) == q_heads,
            where,
            f"sinks has {len(sinks or ())} logits",
            f"null or one for each of {q_heads} q_heads",
        )
        _require(
            all(x is not None and math.isfinite(x) for x in sinks or ()),
            where,
            "sinks has NaN, infinity or null",
            "finite logits",
        )
        _require(
            rope is None or _is_object(rope), where, f"rope is {rope!r}", "null or a JSON object (kind, theta, rotary_dim, ...)"
        )
    return Layer(
        id=row["layer"],
        kind=kind,
        q_heads=q_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
        row_bytes=row_bytes,
        dtype=dtype,
        softcap=softcap,
        window=window,
        sinks=None if sinks is None else tuple(sinks),
        rope=rope,
        kv_source_layer=row.get("kv_source_layer"),
        captured=captured,
        shared_row_bytes=row.get("shared_row_bytes"),
        index_topk=row.get("index_topk"),
    )


def _require(holds: bool, where: str, found: str, expected: str) -> None:
    if not holds:
        raise BadTrace(f"{where}: {found}; expected {expected}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text), dict)
    except ValueError:
        return False
