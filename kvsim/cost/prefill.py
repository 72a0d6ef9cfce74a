"""What a policy adds to prefill, and so to the time to the first token: summaries of pages, attention it must see, the first cut."""

from __future__ import annotations

from typing import Any

import polars as pl

from kvsim.cost.launches import TABLE, Kernels, score_factors
from kvsim.errors import WrongUse
from kvsim.geometry import PREFILL_MASS
from kvsim.policies.language import parse_policy
from kvsim.policies.protocol import Chain

NUMBER = 4  # bytes of a probability
PARTS = ("summaries", "scores", "first_cut")


def extra(policies: dict[str, str], first: pl.DataFrame, how: Kernels, batch: int = 1) -> tuple[pl.DataFrame, list[str]]:
    """policies {id: form}; first: ledger.Work.first -> (launches of TABLE and `part`, notes).

    One launch a part and layer. `step` numbers (policy, request) as in `first`. summaries: the prompt's keys are read, their summaries
    written. scores: attention of the prompt's queries that the policy sums up, all of them or a window of the last. first_cut: what is held
    is copied together."""
    found, notes = [], []
    for row in first.sort("policy", "request").iter_rows(named=True):
        try:
            chain = parse_policy(policies[row["policy"]]).default
        except WrongUse:
            notes.append(f"{row['policy']}: not one expression, so what it adds to prefill is not known")
            continue
        found += [
            {
                "step": row["id"],
                "part": part,
                "class": "prefill_extra",
                "bytes": round(bytes * batch),
                "n": row["layers"],
                "layers": row["layers"],
                "batch": batch,
                "context": row["visible"],
                "kv_bits": round(row["row_bytes"] * 8 / (row["key_dim"] + row["value_dim"])),
            }
            | {k: row[k] for k in ("q_heads", "kv_heads")}
            | {"head_dim": row["key_dim"], "variant": "", "cache": "cold", "status": "ok"}
            for part, bytes in _bytes(chain, row, how).items()
            if bytes
        ]
    schema = TABLE | {"part": pl.String}
    return pl.DataFrame([{k: r.get(k) for k in schema} for r in found], schema=schema, orient="row"), list(dict.fromkeys(notes))


def _bytes(chain: Chain, row: dict[str, Any], how: Kernels) -> dict[str, float]:
    """Bytes of all layers by part."""
    keep, read = chain.part("keep"), chain.part("read")
    prompt, share = row["visible"], row["key_dim"] / (row["key_dim"] + row["value_dim"])
    keys = prompt * row["kv_heads"] * row["row_bytes"] * share
    queries = _queries(keep, prompt)
    one, _, kept = score_factors(how.scores, 1)
    probabilities = 2 * row["q_heads"] * NUMBER * queries * (prompt - (queries - 1) / 2)
    cut = keep.hold is not None
    return {
        "summaries": (keys * row["layers"] + row["index_resident_bytes"]) if read.index is not None else 0,
        "scores": (one * keys + kept * probabilities) * row["layers"] if queries else 0,
        "first_cut": 2 * (row["resident_bytes"] + row["meta_resident_bytes"]) if cut else 0,
    }


def _queries(keep: Any, prompt: int) -> int:
    """Prompt queries whose attention the policy looks at."""
    if PREFILL_MASS in keep.needs:
        return prompt
    return min(prompt, max((need.rows for need in keep.needs), default=0))
