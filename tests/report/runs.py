"""Small run directories with numbers that are consistent but mean nothing, for metrics and report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsim import tables

ROW_BYTES = 64
READ_TAIL = "sinks=0, recent=0, tail='forced', refresh=1"
FULL = "full() >> everything()"
QUEST = f"full() >> quest(read=tokens(8), page=4, {READ_TAIL}, heads='each')"
ORACLE = f"full() >> oracle(read=tokens(8), page=4, {READ_TAIL}, by='mass')"
RANDOM = f"full() >> random_read(read=tokens(8), page=4, {READ_TAIL}, seed=0)"
H2O = "h2o(hold=tokens(12), recent=0.5, sinks=0) >> everything()"
AGED = QUEST.replace("refresh=1", "refresh=4")
KIVI = "full() >> kivi(k_bits=2, v_bits=2, group=4, residual=8) >> everything()"
POLICIES = (QUEST, H2O, KIVI, FULL, ORACLE, RANDOM)
BASELINES = (FULL, ORACLE, RANDOM)


def write_run(
    path: Path,
    policies: Sequence[str] = POLICIES,
    layers: Sequence[int] = (0, 3),
    q_heads: int = 4,
    kv_heads: int = 2,
    prompt: int = 24,
    steps: int = 6,
    contexts: int = 1,
    roles: Sequence[int] = (3,),
    evidence: bool = True,
    without: Sequence[str] = (),
    floor: float | None = None,
    seed: int = 0,
) -> Path:
    """A run directory. roles: in turn along the steps, in equal stretches. without: tables not written. floor: p95 of the noise floor."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    made: dict[str, list[Any]] = {name: [] for name in tables.RUN_TABLES}
    role = np.array(roles)[np.arange(steps) * len(roles) // steps]
    for policy in policies:
        for request in range(contexts):
            for layer in layers:
                unit = {"policy": policy, "request": request, "layer": layer}
                _ledger(made, unit, policy, kv_heads, prompt, steps)
                _heads(made, unit, policy, rng, q_heads, prompt, steps, role, evidence)
                if "quest" in policy and policy != AGED:
                    _slack(made, unit, rng, q_heads, sorted({-1, *roles}))
                    _explain(made, unit, rng, q_heads, (prompt + 3) // 4, steps)
                if any(name in policy for name in ("quest", "oracle", "random_read")):
                    _curves(made, unit, rng, q_heads, (prompt + 3) // 4, sorted({-1, *roles}), evidence)
                    _plans(made, unit, rng, q_heads, q_heads // kv_heads, prompt, steps)
                    if evidence:
                        _evidence(made, unit, q_heads, steps)
                    _reuse(made, unit, rng, q_heads, steps, [n for n in (0, 1, 2, 4, 8) if layer - n in layers], evidence)
                if any(name in policy for name in ("h2o", "kivi")):
                    _tiers(made, unit, policy, kv_heads, prompt, steps)
                    _kept(made, unit, rng, q_heads, kv_heads, steps, "kivi" in policy)
    for name, parts in made.items():
        if parts and name not in without:
            tables.write(path / f"{name}.parquet", parts)
    spans = [
        {"label": "needle", "start": 5, "stop": 9, "kind": "evidence"},
        {"label": "noise", "start": 1, "stop": 2, "kind": "other"},
    ]
    about = _about(policies, layers, q_heads, kv_heads, prompt, steps, contexts, spans if evidence else [])
    about["noise_floor"] = [
        {"request": r, "layer": n, "median": floor / 2, "p95": floor} for r in range(contexts) for n in layers if floor
    ]
    (path / "run.json").write_text(json.dumps(about))
    return path


def edit(path: Path, **entries: Any) -> Path:
    """Entries of run.json, changed."""
    file = path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path


def _about(policies, layers, q_heads, kv_heads, prompt, steps, contexts, spans) -> dict[str, Any]:
    shape = {"kind": "full", "q_heads": q_heads, "kv_heads": kv_heads, "key_dim": 16, "value_dim": 16, "row_bytes": ROW_BYTES}
    request = {"prompt_tokens": prompt, "total_tokens": prompt + steps, "mode": "greedy", "spans": spans, "steps": steps}
    return {
        "schema": tables.RUN_SCHEMA,
        "kvsim": "0.0.test",
        "trace": {
            "id": "toy",
            "sha256": "0" * 64,
            "dtype": "float32",
            "source": {"model": "toy-model", "weight_format": "float32"},
        },
        "kv_dtype": "bfloat16",
        "policies": [{"id": p, "name": p, "role": "baseline" if p in BASELINES else "asked", "beside": None} for p in policies],
        "layers": [shape | {"layer": n, "captured": n in layers} for n in range(max(layers) + 1)],
        "requests": [request | {"request": r} for r in range(contexts)],
        "options": {},
        "open_loop": True,
    }


def _ledger(made, unit, policy, kv_heads, prompt, steps) -> None:
    n = kv_heads * steps
    pos = np.tile(prompt + np.arange(steps), kv_heads)
    visible = pos + 1
    held = np.full(n, 12) if "h2o" in policy else visible
    read = np.minimum(8, visible) if "read=tokens" in policy else held
    columns = dict.fromkeys((f.name for f in tables.LEDGER if not f.nullable), 0) | unit
    columns |= {
        "kv_head": np.repeat(np.arange(kv_heads), steps),
        "step": np.tile(np.arange(steps), kv_heads),
        "pos": pos,
        "visible_tokens": visible,
    }
    columns |= {"held_tokens": held, "full_tokens": held, "read_tokens": read, "evicted_tokens": visible - held}
    columns |= {
        "resident_bytes": held * ROW_BYTES,
        "read_bytes": read * ROW_BYTES,
        "index_bytes": visible * 8 if "quest" in policy else 0,
    }
    if "read=tokens" in policy:
        columns |= {"asked": 8.0, "asked_unit": "tokens", "read_pages": 2, "read_runs": 1 + np.arange(n) % 2}
        columns |= {"page_bytes": 8 * ROW_BYTES}
    if "kivi" in policy:
        columns |= {"full_tokens": np.full(n, 8), "quant_tokens": visible - 8}
        numbers = (visible - 8) * 32
        columns |= {"coded_numbers": numbers, "coded_nominal_bits": 2 * numbers, "coded_bytes": 3 * numbers // 8}
    made["ledger"].append(tables.table("ledger", columns))
    if "hold=" in policy:
        events = dict.fromkeys(("promoted", "demoted", "evicted", "aged_in", "requantised"), 0) | unit
        events |= {n: columns[n] for n in ("kv_head", "step")} | {"hold_tokens": 12, "asked": 12.0, "asked_unit": "tokens"}
        cut = events | {"kv_head": np.arange(kv_heads), "step": np.full(kv_heads, -1), "evicted": prompt - 12}
        made["events"] += [tables.table("events", cut), tables.table("events", events | {"evicted": 1})]


def _heads(made, unit, policy, rng, q_heads, prompt, steps, role, evidence) -> None:
    n = q_heads * steps
    lost = np.zeros(n) if policy == FULL else rng.uniform(0.05, 0.5, n)
    far, dense = rng.uniform(0.0005, 0.6, n), np.abs(np.sin(np.arange(n))) * 0.3  # the same dense attention under every policy
    columns = dict.fromkeys((f.name for f in tables.HEADS if not f.nullable), 0.5) | unit | {"dense": False, "rounds": 0}
    columns |= {
        "q_head": np.repeat(np.arange(q_heads), steps),
        "step": np.tile(np.arange(steps), q_heads),
        "role": np.tile(role, q_heads),
    }
    columns |= {
        "mass_recall": 1 - lost,
        "mass_evicted": lost if "h2o" in policy else 0.0,
        "mass_unread": 0.0 if "h2o" in policy else lost,
    }
    columns |= {
        "mass_quant": (1 - lost) / 2 if "kivi" in policy else 0.0,
        "mass_host": 0.0,
        "learned_sink_mass": 0.0,
        "far_mass": far,
    }
    columns |= {
        "far_recall": np.where(far >= 1e-3, 1 - lost, np.nan),
        "rel_l2": lost * 2,
        "read_tokens": prompt if policy == FULL else 8,
    }
    columns["read_churn"] = np.where(columns["step"] > 0, 0.25, np.nan)
    if "read=tokens" in policy:
        columns |= {"page_recall": 1 - lost, "page_recall10": 1 - lost / 2, "read_pages": 2, "held_pages": prompt // 4}
        columns |= {"oracle_recall": 0.98, "oracle_held_recall": 0.97}
    if "hold=" in policy:
        columns |= {"oracle_rel_l2": lost / 2, "oracle_held_rel_l2": lost}
    if policy == AGED:
        columns["set_age"] = columns["step"] % 4
    if "quest" in policy:
        columns |= {"slack_mean": 1.0 + lost, "slack_max": 4.0 + lost, "eps_hat": 0.9}
    if "kivi" in policy:
        columns |= {"err_select": 0.0, "err_k": lost, "err_v": lost * 2}
    if evidence:
        columns |= {"evidence_dense": dense, "evidence_read": dense * (1 - lost), "evidence_mass": dense}
    made["heads"].append(tables.table("heads", columns))


def _curves(made, unit, rng, q_heads, pages, roles, evidence) -> None:
    budgets = np.tile(np.arange(1, pages + 1), q_heads)
    share = budgets / pages
    for role in roles:
        columns = dict.fromkeys((f.name for f in tables.CURVES if not f.nullable), 0.5) | unit
        columns |= {"q_head": np.repeat(np.arange(q_heads), pages), "role": role, "pages": budgets, "tokens": budgets * 4}
        columns |= {
            "union_pages_mean": budgets * 1.5,
            "read_bytes_mean": budgets * 4.0 * ROW_BYTES,
            "mass_recall_mean": share**0.5,
        }
        columns |= {
            "far_recall": share * rng.uniform(0.9, 1, len(share)),
            "rel_l2_mean": 1.01 - share,
            "rel_l2_p95": 1.02 - share,
        }
        made["curves"].append(tables.table("curves", columns | ({"evidence_recall": share} if evidence else {})))


def _explain(made, unit, rng, q_heads, pages, steps) -> None:
    n = q_heads * steps
    columns = {"q_head": np.repeat(np.arange(q_heads), steps), "step": np.tile(np.arange(steps), q_heads), "score_gap": 0.5}
    depths = [f.name for f in tables.EXPLAIN if f.name.split("_")[0] in ("k", "exact", "mass")]
    counted = {"pages": pages, "below": np.arange(n) % 2, "below_max": 0.5, "fp16_changed": np.arange(n) % 3 == 0}
    means = {
        "regret": 1.5,
        "recovered_1": 0.25,
        "recovered_4": 0.5,
        "recovered_16": np.nan,
        "churn_query": 0.75,
        "churn_summary": 0.125,
    }
    columns |= counted | means | {name: rng.integers(1, pages + 1, n) for name in depths}
    made["explain"].append(tables.table("explain", columns | unit))


def _slack(made, unit, rng, q_heads, roles) -> None:
    age = [0, 1, 2, 4, 8]
    for role in roles:
        mean = rng.uniform(0.5, 1.5, q_heads * len(age))
        columns = {"q_head": np.repeat(np.arange(q_heads), len(age)), "role": role, "key_age": age * q_heads, "pages": 6}
        columns |= {"page_size": 4, "key_dim": 8, "slack_mean": mean, "slack_max": 2 * mean}
        made["slack"].append(tables.table("slack", columns | unit))


def _plans(made, unit, rng, q_heads, group, prompt, steps) -> None:
    for head in range(q_heads):
        rows = {
            "kv_head": [head // group] * steps,
            "q_head": [head] * steps,
            "step": list(range(steps)),
            "page_size": [4] * steps,
        }
        rows["pages"] = [sorted({*rng.choice((prompt + s) // 4, 1).tolist(), (prompt + s) // 4}) for s in range(steps)]
        rows |= {"exists": [(prompt + s) // 4 + 1 for s in range(steps)], "forced": [[] for _ in range(steps)]}
        made["plans"].append(tables.table("plans", rows | unit))


def _evidence(made, unit, q_heads, steps) -> None:
    """Nothing of it is read in layer 0, all of it above."""
    n = q_heads * steps
    columns = {"q_head": np.repeat(np.arange(q_heads), steps), "step": np.tile(np.arange(steps), q_heads), "span": ["needle"] * n}
    read = 0.2 * (unit["layer"] > 0)
    made["evidence"].append(tables.table("evidence", columns | unit | {"dense": np.full(n, 0.2), "read": np.full(n, read)}))


def _reuse(made, unit, rng, q_heads, steps, distances, evidence) -> None:
    n = q_heads * steps
    for distance in distances if len(distances) > 1 else ():
        columns = {
            "q_head": np.repeat(np.arange(q_heads), steps),
            "step": np.tile(np.arange(steps), q_heads),
            "distance": distance,
        }
        columns |= {
            "pages": 2,
            "mass_recall": rng.uniform(0.3, 0.6, n),
            "layer_pages": 4,
            "layer_mass_recall": rng.uniform(0.6, 0.9, n),
        }
        if evidence:
            columns |= {"evidence_read": rng.uniform(0, 0.05, n), "layer_evidence_read": rng.uniform(0.05, 0.1, n)}
        made["reuse"].append(tables.table("reuse", columns | unit))


def _tiers(made, unit, policy, kv_heads, prompt, steps) -> None:
    for head in range(kv_heads):
        if "kivi" in policy:
            at, runs = [-1], [[_run(0, prompt - 8, 1), _run(prompt - 8, prompt, 2)]]
        else:
            at, runs = list(range(-1, steps)), [[_run(0, prompt - 12, 0), _run(prompt - 12, prompt, 2)]]
            runs += [[_run(prompt - 12 + s, prompt - 11 + s, 0)] for s in range(steps)]  # only what changed
        made["tiers"].append(tables.table("tiers", {"kv_head": [head] * len(at), "step": at, "runs": runs} | unit))


def _kept(made, unit, rng, q_heads, kv_heads, steps, coded) -> None:
    n = q_heads * steps
    rows = {"q_head": np.repeat(np.arange(q_heads), steps), "step": np.tile(np.arange(steps), q_heads)} | unit
    lag = [[0.01] * int(s + 1).bit_length() for s in rows["step"]]
    hits = [[5] if s % 2 else [] for s in rows["step"]]
    gone = {"again": hits, "again_lag": [[int(s) + 1] * len(h) for s, h in zip(rows["step"], hits, strict=True)]}
    lags = {"kv_head": rows["q_head"] * kv_heads // q_heads, "mass": lag, "needed": np.full(n, 10), "evicted_tokens": 12}
    made["lags"].append(tables.table("lags", rows | lags | gone))
    tier = dict.fromkeys((f"{part}_{c}" for part in ("held", "read", "own") for c in ("sinks", "recent", "full", "coded")), 0.2)
    tier |= {f"{part}_host": 0.0 for part in ("held", "read", "own")} | {"sinks": 4, "recent": 64}
    tier |= {f"without_{c}": rng.uniform(0.1, 1, n) for c in ("sinks", "recent", "full", *(["coded"] if coded else []))}
    made["by_tier"].append(tables.table("by_tier", rows | tier))
    sets = ["deployed", "oracle", "oracle_interval"]
    counts = {"kv_head": [0] * 9, "set": [s for s in sets for _ in range(3)], "dormancy": [1, 4, 16] * 3, "events": 7}
    counts |= {name: [4, 2, 0] * 3 for name in ("spells", "pairs", "spells_alive", "pairs_alive")}
    counts |= {"returns": [2, 1, 0] * 3, "churn_full": [0.5] * 9, "churn_held": [0.25] * 9}
    made["recurrence"].append(tables.table("recurrence", counts | unit))


def _run(start: int, stop: int, tier: int) -> dict[str, int | None]:
    return {"start": start, "stop": stop, "tier": tier, "level": None}
