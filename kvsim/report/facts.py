"""What a reader must know to trust a number: the run in facts, the policies in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from kvsim.metrics.interval import FEWEST, contexts, intervals
from kvsim.metrics.quality import dense_layers, quality
from kvsim.metrics.run import RunTables
from kvsim.metrics.traffic import asked, traffic
from kvsim.report.html import Table
from kvsim.report.names import BASELINES, budget, family, forced, parts
from kvsim.report.theme import Style

UNKNOWN = "not recorded"
ROLES = {-1: "all decode steps", 0: "context", 1: "question", 2: "forced answer", 3: "free answer"}

OPEN_LOOP = (
    "Replay is open-loop: at every step the query comes from the run with full attention, so what a policy loses at one step does not "
    "change what is asked at the next. In a running model it would. Read the numbers as the loss of each step, not as task accuracy; "
    "that takes a closed-loop run with the model in it."
)
RECALL = (
    "Attention-mass recall says what a larger budget buys one policy. It does not rank policies of different kinds: in closed-loop runs "
    "of a small model on retrieval tasks it ordered them poorly, evidence recall and output error did better. So no chart shows it alone and no table sorts by it."
)


def facts(run: RunTables) -> list[tuple[str, str]]:
    """(term, value) of the run: what was captured, what is billed, how much was replayed."""
    trace, about = _dict(run.about.get("trace")), run.about
    source, layers = _dict(trace.get("source")), [r for r in about.get("layers") or []]
    used = run.heads.select(pl.col("layer").unique().sort()).collect()["layer"].to_list()
    mine = [r for r in layers if r.get("layer") in used]
    steps = run.heads.select(pl.col("step").n_unique()).collect().item()
    return [
        ("Model", _said(source.get("model"))),
        ("Weight format", _said(source.get("weight_format"))),
        ("Tokenizer", _said(source.get("tokenizer"))),
        ("Trace", _said(trace.get("id"))),
        ("Trace manifest sha256", _said(trace.get("sha256"))[:16]),
        ("KV dtype captured", _said(trace.get("dtype"))),
        ("KV dtype billed", _said(about.get("kv_dtype"))),
        ("Head dim (key, value)", _each(mine, "key_dim", "value_dim")),
        ("Query heads, KV heads", _each(mine, "q_heads", "kv_heads")),
        ("Query heads per KV head", _groups(mine)),
        ("Layers replayed", f"{spans(used)}{f' ({len(used)} of {len(layers)})' if layers else ''}"),
        ("Contexts", _contexts(run)),
        ("Prompt tokens", _range([r.get("prompt_tokens") for r in run.requests])),
        ("Decode steps", f"{steps}{_modes(run)}"),
        ("Loop", "open" if about.get("open_loop") else UNKNOWN),
        ("kvsim", _said(about.get("version") or about.get("kvsim"))),
    ]


def policy_table(run: RunTables, look: Sequence[Style]) -> Table:
    """One row per policy, in the order of `look`: what was asked, what was achieved, what was lost."""
    lost = {r["policy"]: r for r in quality(run.heads).iter_rows(named=True)}
    moved = {r["policy"]: r for r in traffic(run.ledger, run.layers).iter_rows(named=True)}
    budgets = asked(run.ledger, run.tables["events"])
    dense = dense_layers(run.heads)
    sure = {(p, m): (low, high) for p, m, low, high in intervals(run.heads).iter_rows()}
    roles = {p.id: p.role for p in run.policies}
    rows = []
    for s in look:
        q, t = lost.get(s.policy, {}), moved.get(s.policy, {})
        whole = dense.filter(pl.col("policy") == s.policy)["layer"].to_list()
        rows.append(
            (
                s.label,
                roles[s.policy],
                _asked(budgets, s.policy, "read"),
                _number(q.get("read_tokens")),
                _number(t.get("union_tokens")),
                _asked(budgets, s.policy, "hold"),
                _number(t.get("held_tokens")),
                forced(s.policy),
                spans(whole) if whole else "none",
                _measure(q, sure, s.policy, "evidence_recall", _percent),
                _measure(q, sure, s.policy, "far_recall", _percent),
                _measure(q, sure, s.policy, "rel_l2", error),
                _percent(t.get("read_share")),
                _percent(t.get("resident_share")),
            )
        )
    columns = (
        "policy", "kind", "read asked (tokens)", "read per query head (tokens)", "read per KV head (tokens)", "hold asked (tokens)", "held per KV head (tokens)",
        "forced reads (tokens)", "dense layers", "evidence recall", "far recall", "output error (relative L2)", "bytes read (of full)",
        "bytes resident (of full)",
    )  # fmt: skip
    return Table("Means over all decode steps, layers and heads; recalls are ratios of sums.", columns, rows, [s.policy for s in look], notes(run, look))


def notes(run: RunTables, look: Sequence[Style]) -> list[str]:
    """What qualifies the table: contexts, roles, baselines that are missing or were forced to read other tokens."""
    n = contexts(run.heads)
    few = f"{n} context{'s' if n > 1 else ''}: no interval (at least {FEWEST} are needed, because steps of one context are not independent)."
    many = f"In brackets: 95 % bootstrap interval over {n} contexts."
    told = [
        few if n < FEWEST else many,
        "Asked and held budgets are per KV head; a read budget counts its forced tokens. Bytes read are K and V rows, index, scales and "
        "scores; bytes resident are those on the device, index and metadata included; both against full attention in the same KV dtype.",
        "“—”: nothing to say: no budget, no evidence in the prompt, or less than 0.001 of dense attention mass to divide by.",
    ]
    return told + absent(run) + other_forced(run, look)


def absent(run: RunTables) -> list[str]:
    """One sentence that names the baselines this run does not have, if any."""
    there = {p for x in run.policies for p in family(x.id).split(" >> ")}
    missing = [b for b in BASELINES if b not in there]
    return [f"Not in this run: {', '.join(missing)}. kvsim replay --baselines adds them."] if missing else []


def other_forced(run: RunTables, look: Sequence[Style]) -> list[str]:
    """A sentence for each baseline whose forced tokens are not those of a policy it may be compared with."""
    label = {s.policy: s.label for s in look}
    readers = {p.id: forced(p.id) for p in run.policies if p.role != "baseline" and any("read" in x.parameters for x in parts(p.id))}
    said = []
    for p in run.policies:
        if p.role == "baseline" and family(p.id) != "full" and p.id in label:
            others = {label[i]: f for i, f in readers.items() if f != forced(p.id) and p.beside in (None, i) and i in label}
            said += [f"{label[p.id]} is forced to read: {forced(p.id)}; {name}: {words}. They are no like-for-like pair." for name, words in others.items()]
    return said


def role_table(run: RunTables, look: Sequence[Style]) -> Table | None:
    """The measures by the role of the query's token; None when there is but one role."""
    lost = quality(run.heads, "role")
    if lost["role"].n_unique() < 2:
        return None
    rows = []
    for s in look:
        for r in lost.filter(pl.col("policy") == s.policy).iter_rows(named=True):
            rows.append((s.label, role(r["role"]), f"{r['rows']:,}", _percent(r["evidence_recall"]), _percent(r["far_recall"]), error(r["rel_l2"])))
    columns = ("policy", "query's token", "rows", "evidence recall", "far recall", "output error (relative L2)")
    return Table("The same by the role of the token whose query it is: loss on the question and on the answer are different things.", columns, rows)


def role(number: int) -> str:
    return ROLES.get(number, f"role {number}")


def error(x: float | None) -> str:
    """An output error in words: rounding alone is 0."""
    return "—" if x is None else "0" if x < 1e-6 else f"{x:.3g}"


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0–2, 5"."""
    groups: list[list[int]] = []
    for n in sorted(numbers):
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join(f"{g[0]}–{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def _asked(budgets: pl.DataFrame, policy: str, side: str) -> str:
    """The budget the tables record, else the one the canonical form states, else none."""
    rows = budgets.filter(pl.col("policy") == policy, pl.col("side") == side).rows(named=True)
    if rows:
        return ", ".join(_stated(r) for r in rows)
    return next((budget(p.parameters[side]) for p in parts(policy) if side in p.parameters), "—" if parts(policy) else UNKNOWN)


def _stated(row: Mapping[str, Any]) -> str:
    unit, low, high = row["unit"] or "", row["low"], row["high"]
    text = f"{low:g}" if low == high else f"{low:g}–{high:g}"
    return text if unit == "tokens" else f"{unit}({text})"


def _measure(row: Mapping[str, Any], sure: Mapping[Any, Any], policy: str, measure: str, form: Any) -> str:
    low, high = sure.get((policy, measure), (None, None))
    return str(form(row.get(measure))) + (f" ({form(low)} to {form(high)})" if low is not None else "")


def _percent(x: float | None) -> str:
    return "—" if x is None else f"{x * 100:.1f} %"


def _number(x: float | None) -> str:
    return "—" if x is None else f"{x:,.0f}"


def _said(x: Any) -> str:
    return str(x) if x not in (None, "") else UNKNOWN


def _dict(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else {}


def _each(layers: Sequence[Mapping[str, Any]], *keys: str) -> str:
    """The distinct combinations over the layers replayed."""
    return "; ".join(dict.fromkeys(", ".join(_said(r.get(k)) for k in keys) for r in layers)) or UNKNOWN


def _groups(layers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(str(r["q_heads"] // r["kv_heads"]) for r in layers if r.get("q_heads") and r.get("kv_heads"))) or UNKNOWN


def _range(values: Sequence[int | None]) -> str:
    told = [v for v in values if v is not None]
    return UNKNOWN if not told else f"{min(told):,}" if min(told) == max(told) else f"{min(told):,} to {max(told):,}"


def _contexts(run: RunTables) -> str:
    modes = sorted({_said(r.get("mode")) for r in run.requests})
    return f"{contexts(run.heads)}{f' ({chr(44).join(modes)})' if modes else ''}"


def _modes(run: RunTables) -> str:
    kinds = run.heads.select(pl.col("role").unique().sort()).collect()["role"].to_list()
    return f" ({', '.join(role(k) for k in kinds)})"
