"""The schemas of a trace and of a run, their versions, and the one way columns become Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TRACE_SCHEMA = "kvsim.trace/1"
RUN_SCHEMA = "kvsim.run/1"

_i8, _i16, _i32, _i64, _f32, _f64 = pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()
_text, _flag = pa.string(), pa.bool_()


def _schema(required: dict[str, pa.DataType], optional: dict[str, pa.DataType] | None = None) -> pa.Schema:
    fields = [pa.field(n, t, nullable=False) for n, t in required.items()] + [pa.field(n, t) for n, t in (optional or {}).items()]
    return pa.schema(fields)


# ------------------------------------------------------------------------------------------------ trace
SPAN = pa.struct([pa.field("label", _text), pa.field("start", _i32), pa.field("stop", _i32), pa.field("kind", _text)])

REQUESTS = _schema(
    {"request": _i32, "prompt_tokens": _i32, "total_tokens": _i32, "mode": _text},
    {"token_ids": pa.list_(_i32), "roles": pa.list_(_i8), "spans": pa.list_(SPAN), "text": _text, "meta": _text},
)
LAYERS = _schema(
    {"layer": _i16, "kind": _text, "q_heads": _i16, "kv_heads": _i16, "key_dim": _i16, "value_dim": _i16, "scale": _f64},
    {
        "softcap": _f64,
        "window": _i32,
        "sinks": pa.list_(_f64),
        "rope": _text,
        "row_bytes": _i32,
        "kv_source_layer": _i16,
        "captured": _flag,
        "shared_row_bytes": _i32,
        "index_topk": _i32,
    },
)
RARE = ("shared_row_bytes", "index_topk")  # columns of `layers` that are left out where no layer has them
PREFILL = _schema({"q_head": _i16, "pos": _i32, "mass": _f32, "queries": _i32})
VALUES = _schema({"q_head": _i16, "pos": _i32, "wo_norm": _f32})


def index_k_schema(key_bytes: int) -> pa.Schema:
    """keys of a layer's learned indexer."""
    return _schema({"pos": _i32, "k": pa.binary(key_bytes)})


def index_q_schema(key_bytes: int) -> pa.Schema:
    """queries of a layer's learned indexer and what their scores are weighted by."""
    return _schema(
        {"index_head": _i16, "pos": _i32, "decode_step": _i32, "score_fn": _text, "w": _f32, "q": pa.binary(key_bytes)}
    )


def q_stats_schema(key_dim: int) -> pa.Schema:
    """statistics of a layer's prompt queries before RoPE; vectors are raw float32 bits of fixed size, whatever the trace's dtype."""
    vectors = {"mean": pa.binary(4 * key_dim), "covariance": pa.binary(4 * key_dim**2)}
    return _schema({"q_head": _i16, "pos": _i32, "queries": _i32} | vectors)


def kv_schema(key_bytes: int, value_bytes: int, k_pre: bool) -> pa.Schema:
    """kv rows of one layer; vectors are raw little-endian bits of fixed size."""
    columns = {"kv_head": _i16, "pos": _i32, "k": pa.binary(key_bytes), "v": pa.binary(value_bytes)}
    return _schema(columns | ({"k_pre": pa.binary(key_bytes)} if k_pre else {}))


def q_schema(key_bytes: int, value_bytes: int, out: bool, lse: bool) -> pa.Schema:
    """query rows of one layer."""
    columns = {"kv_head": _i16, "q_head": _i16, "pos": _i32, "decode_step": _i32, "q": pa.binary(key_bytes)}
    optional = ({"lse": _f32} if lse else {}) | {"first_key": _i32}
    return _schema(columns | ({"out": pa.binary(value_bytes)} if out else {}), optional)


# ------------------------------------------------------------------------------------------------ run
_policy = pa.dictionary(_i32, _text)
_UNIT = {"policy": _policy, "request": _i32, "layer": _i16}

LEDGER = _schema(
    _UNIT
    | {"kv_head": _i16, "step": _i32, "pos": _i32}
    | dict.fromkeys(("visible_tokens", "held_tokens", "full_tokens", "quant_tokens", "host_tokens", "evicted_tokens"), _i32)
    | {"read_tokens": _i32}
    | dict.fromkeys(
        (
            "resident_bytes",
            "index_resident_bytes",
            "meta_resident_bytes",
            "host_resident_bytes",
            "ssd_resident_bytes",
            "read_bytes",
        )
        + ("index_bytes", "meta_bytes", "score_bytes", "host_read_bytes", "ssd_read_bytes", "write_bytes", "moved_in_bytes")
        + ("moved_out_bytes", "collective_bytes"),
        _i64,
    ),
    {"asked": _f64, "asked_unit": _text, "read_pages": _i32, "read_runs": _i32, "resident_page_bytes": _i64, "page_bytes": _i64}
    | dict.fromkeys(("coded_numbers", "coded_nominal_bits", "coded_bytes"), _i64)
    | dict.fromkeys(("missed_pages", "missed_runs", "prefetched_pages", "prefetch_hits"), _i32)
    | {"rebuilt_pages": _i32, "rebuild_bytes": _i64}
    | {"page_imbalance": _f32},
)
HEADS = _schema(
    _UNIT
    | {"q_head": _i16, "step": _i32, "role": _i8, "dense": _flag}
    | dict.fromkeys(
        ("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass", "mass_quant", "mass_host", "far_mass"), _f32
    )
    | dict.fromkeys(("top1_recall", "top10_recall", "top64_recall", "rel_l2", "cosine", "out_bound"), _f32)
    | {"read_tokens": _i32, "rounds": _i32},
    dict.fromkeys(("far_recall", "evidence_dense", "evidence_read", "evidence_mass", "page_recall", "page_recall10"), _f32)
    | dict.fromkeys(("err_select", "err_k", "err_v"), _f32)
    | {"read_pages": _i32, "held_pages": _i32, "certified": _flag, "eps_hat": _f32, "slack_mean": _f32, "slack_max": _f32}
    | dict.fromkeys(("read_churn", "mass_evicted_prefill", "oracle_recall", "oracle_held_recall"), _f32)
    | {"set_age": _i32, "false_read_bytes": _i64, "page_precision": _f32, "out_bound_centred": _f32}
    | dict.fromkeys(("oracle_rel_l2", "oracle_held_rel_l2", "oracle_coded_rel_l2"), _f32)
    | dict.fromkeys(("rel_l2_without", "mass_estimated"), _f32),
)
CURVES = _schema(
    _UNIT
    | {"q_head": _i16, "role": _i8, "pages": _i32, "tokens": _i32}
    | dict.fromkeys(("union_pages_mean", "read_bytes_mean"), _f64)
    | dict.fromkeys(
        ("mass_recall_mean", "mass_recall_p5", "mass_recall_p50", "mass_recall_min", "top10_recall_mean", "top10_recall_p5"), _f32
    ),
    dict.fromkeys(("far_recall", "rel_l2_mean", "rel_l2_p95", "evidence_recall"), _f32)
    | dict.fromkeys(("top1_recall_mean", "top64_recall_mean"), _f32)
    | {"read_pages_mean": _f64},
)
PLANS = _schema(
    _UNIT | {"kv_head": _i16, "q_head": _i16, "step": _i32, "page_size": _i16, "pages": pa.list_(_i32)},
    {"exists": _i32, "forced": pa.list_(_i32)},
)
RUNS = pa.list_(pa.struct([pa.field("start", _i32), pa.field("stop", _i32), pa.field("tier", _i8), pa.field("level", _i8)]))
TIERS = _schema(_UNIT | {"kv_head": _i16, "step": _i32, "runs": RUNS})
EVENTS = _schema(
    _UNIT | {"kv_head": _i16, "step": _i32} | dict.fromkeys(("promoted", "demoted", "evicted", "aged_in", "requantised"), _i32),
    {"churn": _f32, "hold_tokens": _i32, "asked": _f64, "asked_unit": _text}
    | dict.fromkeys(("windows_promoted", "windows_demoted", "windows_evicted", "windows_aged_in"), _i32)
    | {"churn_full": _f64, "state_bytes": _i64},
)

# What is 0 in a run without a host tier, a disk tier or shards.
UNUSED = ("host_tokens", "mass_host", "host_resident_bytes", "ssd_resident_bytes", "host_read_bytes", "ssd_read_bytes") + (
    "moved_in_bytes",
    "moved_out_bytes",
    "collective_bytes",
)
EXPLAIN = _schema(
    _UNIT | {"q_head": _i16, "step": _i32},
    {"role": _i8, "k_needed": _i32, "score_gap": _f32}
    | dict.fromkeys(("exact_pages_r1", "exact_pages_r10", "exact_pages_r64"), _i32)
    | dict.fromkeys(("mass_pages_001", "mass_pages_005", "mass_pages_01", "mass_pages_02"), _i32)
    | {"regret": _f32, "missed_pages": _i32, "displaced_slack": _f32, "slack_norm": _f32}
    | dict.fromkeys(("churn_summary", "churn_query", "recovered_1", "recovered_4", "recovered_16"), _f32)
    | {"pages": _i32, "below": _i32, "below_max": _f32, "fp16_changed": _flag},
)
SLACK = _schema(
    _UNIT | {"q_head": _i16, "role": _i8, "page_size": _i32, "key_dim": _i16, "key_age": _i32, "pages": _i64},
    {"slack_mean": _f32, "slack_max": _f32},
)
LAGS = _schema(
    _UNIT
    | {
        "kv_head": _i16,
        "q_head": _i16,
        "step": _i32,
        "mass": pa.list_(_f32),
        "needed": _i8,
        "again": pa.list_(_i32),
        "again_lag": pa.list_(_i32),
    }
    | {"evicted_tokens": _i32}
)
RECURRENCE = _schema(
    _UNIT
    | {"kv_head": _i16, "set": _text, "dormancy": _i16, "events": _i32}
    | dict.fromkeys(("returns", "spells", "pairs", "spells_alive", "pairs_alive"), _i64)
    | dict.fromkeys(("churn_full", "churn_held"), _f64),
    {"score_cosine": _f64},
)
_CLASSES = ("sinks", "recent", "full", "coded", "host")
BY_TIER = _schema(
    _UNIT
    | {"q_head": _i16, "step": _i32, "sinks": _i32, "recent": _i32}
    | dict.fromkeys([f"{part}_{name}" for part in ("held", "read", "own") for name in _CLASSES], _f32),
    dict.fromkeys([f"without_{name}" for name in _CLASSES], _f32),
)
EVIDENCE = _schema(_UNIT | {"q_head": _i16, "step": _i32, "span": _text, "dense": _f32, "read": _f32})
REUSE = _schema(
    _UNIT
    | {"q_head": _i16, "step": _i32, "distance": _i16, "pages": _i32, "mass_recall": _f32}
    | {"layer_pages": _i32, "layer_mass_recall": _f32},
    {"evidence_read": _f32, "layer_evidence_read": _f32},
)

RUN_TABLES: dict[str, pa.Schema] = {
    "ledger": LEDGER,
    "heads": HEADS,
    "curves": CURVES,
    "plans": PLANS,
    "tiers": TIERS,
    "events": EVENTS,
    "explain": EXPLAIN,
    "slack": SLACK,
    "evidence": EVIDENCE,
    "lags": LAGS,
    "recurrence": RECURRENCE,
    "by_tier": BY_TIER,
    "reuse": REUSE,
}

# ------------------------------------------------------------------------------------------------ closed loop
_ROW = {"policy": _policy, "request": _i32, "mode": _text, "sample": _i16}
ANSWERS = _schema(
    _ROW | {"task": _text, "context": _text, "answer_tokens": _i32},
    {"score": _f32, "full_score": _f32, "first_divergent": _i32, "nll": _f32, "full_nll": _f32, "text": _text},
)
STEPS = _schema(
    _ROW | {"step": _i32, "pos": _i32, "role": _i8, "token": _i32, "said": _i32},
    {"kl": _f32, "top1_agree": _flag, "nll": _f32},
)
LAYER_STEPS = _schema(
    _UNIT
    | {"step": _i32, "role": _i8}
    | dict.fromkeys(("held_tokens", "read_tokens", "injected_tokens", "rel_l2", "cosine"), _f32),
    dict.fromkeys(("open_read_tokens", "open_mass_recall", "open_rel_l2", "open_cosine"), _f32)
    | dict.fromkeys(("open_evidence_read", "open_evidence_dense"), _f32),
)
LIVE_TABLES: dict[str, pa.Schema] = {"answers": ANSWERS, "steps": STEPS, "layers": LAYER_STEPS}
LIVE_SCHEMA = "kvsim.live/1"


def table(name: str, columns: Mapping[str, Any], schema: pa.Schema | None = None) -> pa.Table:
    """Columns (numpy arrays, lists, or one scalar for all rows) -> a run table of that name; NaN is null where null is allowed.
    A column that is left out or None is null where null is allowed, and 0 if it is one of UNUSED.

    Raises pyarrow.ArrowInvalid when a column does not fit its type, KeyError when a required one is missing."""
    schema = schema or RUN_TABLES[name]
    rows = next(len(c) for c in columns.values() if not np.isscalar(c) and c is not None)
    arrays = []
    for f in schema:
        x = columns.get(f.name)
        if x is None and not f.nullable and f.name not in UNUSED:
            raise KeyError(f"{name}: no column {f.name}")
        if x is None:
            arrays.append(pa.nulls(rows, f.type) if f.nullable else pa.repeat(pa.scalar(0, f.type), rows))
        elif pa.types.is_dictionary(f.type) and not np.isscalar(x):
            arrays.append(pa.array(x, _text).dictionary_encode())
        elif pa.types.is_dictionary(f.type):
            arrays.append(pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), [x]))
        elif np.isscalar(x):
            arrays.append(pa.repeat(pa.scalar(x, f.type), rows))
        else:
            arrays.append(pa.array(x, f.type, from_pandas=f.nullable))
    return pa.Table.from_arrays(arrays, schema=schema)


def write(path: Path, tables: Sequence[pa.Table]) -> None:
    """The rows of `tables`, one after the other, as one zstd Parquet file."""
    whole = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    pq.write_table(whole, path, compression="zstd")
