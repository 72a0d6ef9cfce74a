"""What a reader must know to trust a number: the run in facts, the policies in a table, what is missing in sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.metrics.interval import FEWEST, contexts, intervals
from kvsim.metrics.quality import dense_layers, quality
from kvsim.metrics.run import RunTables
from kvsim.metrics.traffic import asked, traffic
from kvsim.report.html import Table
from kvsim.report.names import BASELINES, budget, family, forced, parts
from kvsim.report.theme import LEAST_ERROR, Style

UNKNOWN = "not recorded"
NOTHING = "—"
ROLES = {-1: "all decode steps", 0: "context", 1: "question", 2: "forced answer", 3: "free answer"}

OPEN_LOOP = (
    "Replay is open-loop: at every step the query comes from the run with full attention, so what a policy loses at one step does not "
    "change what is asked at the next. In a running model it would. Read the numbers as the loss of each step, not as task accuracy; "
    "that takes a closed-loop run with the model in it."
)
RECALL = (
    "Attention-mass recall says what a larger budget buys one policy. It does not rank policies of different kinds: in closed-loop runs "
    "of a small model on retrieval tasks it ordered them poorly, while evidence recall and output error did better. So no chart shows "
    "it alone and no table ranks by it."
)
TELLING = (
    "The 5th percentile and the worst head of far and evidence recall are over heads with at least 1 % of their dense mass there."
)
NUMBERS = {"mass_recall": "attention-mass recall", "evidence": "evidence recall", "rel_l2": "output error"}
TASKS = {"needle": "on needles", "plain": "on plain text"}


def foretold() -> str:
    """How well these numbers ordered policies as a running model does, as analyses/closed_loop found it."""
    found = json.loads(files("kvsim.report").joinpath("foretold.json").read_text("utf-8"))
    parts = []
    for number, name in NUMBERS.items():
        by_task = [(word, x[number]) for t, word in TASKS.items() if number in (x := found["rank_correlation_with_kl"][t])]
        told = ", ".join(
            f"{rho:.2f}{'' if low is None else f' ({low:.2f} to {high:.2f})'} {task}" for task, (rho, low, high) in by_task
        )
        parts.append(f"{name} {told}")
    inside = f"a running {found['model']}, {found['policies']} policies at {found['tokens']} tokens"
    return f"How well such numbers order policies as KL does in {inside}, as rank correlations: {'; '.join(parts)}."


FORETOLD = foretold()
FLOOR_OF_AXIS = f"An output error below {LEAST_ERROR:g}, as full attention's, stands at {LEAST_ERROR:g}."
COLUMNS = (
    "policy",
    "kind",
    "read asked (tokens unless said)",
    "read per query head (tokens)",
    "read per KV head (tokens)",
    "hold asked (tokens unless said)",
    "held per KV head (tokens)",
    "forced reads (tokens)",
    "dense layers",
    "evidence recall",
    "far recall",
    "output error (relative L2)",
    "bytes read (of full)",
    "bytes resident (of full)",
)


# ---------------------------------------------------------------------------------------------- the run
def facts(run: RunTables) -> list[tuple[str, str]]:
    """(term, value): what was captured, what is billed, how much was replayed."""
    about = run.about
    trace = _dict(about.get("trace"))
    source = _dict(trace.get("source"))
    used = run.heads.select(pl.col("layer").unique().sort()).collect()["layer"].to_list()
    known = [r for r in about.get("layers") or [] if isinstance(r, dict)]
    mine = [r for r in known if r.get("layer") in used]
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
        ("Layers replayed", spans(used) + (f" ({len(used)} of {len(known)})" if known else "")),
        ("Contexts", f"{contexts(run.heads)} ({', '.join(sorted({_said(r.get('mode')) for r in run.requests})) or UNKNOWN})"),
        ("Prompt tokens", _range([r["prompt_tokens"] for r in run.requests if r.get("prompt_tokens") is not None])),
        ("Decode steps", _steps(run)),
        ("Loop", "open" if about.get("open_loop") else UNKNOWN),
        ("kvsim", _said(about.get("kvsim"))),
    ]


def _steps(run: RunTables) -> str:
    told = run.heads.select(pl.col("step").n_unique(), pl.col("role").unique().sort().implode()).collect().row(0)
    return f"{told[0]} ({', '.join(role(r) for r in told[1])})"


def _each(layers: Sequence[Mapping[str, Any]], *keys: str) -> str:
    """The distinct combinations over the layers replayed."""
    return "; ".join(dict.fromkeys(", ".join(_said(r.get(k)) for k in keys) for r in layers)) or UNKNOWN


def _groups(layers: Sequence[Mapping[str, Any]]) -> str:
    return (
        ", ".join(dict.fromkeys(str(r["q_heads"] // r["kv_heads"]) for r in layers if r.get("q_heads") and r.get("kv_heads")))
        or UNKNOWN
    )


def _range(values: Sequence[int]) -> str:
    if not values:
        return UNKNOWN
    return " to ".join(f"{v:,}" for v in dict.fromkeys((min(values), max(values))))


# ---------------------------------------------------------------------------------------------- the policies
def policy_table(run: RunTables, look: Sequence[Style]) -> Table:
    """One row per policy, in the order of `look`: what was asked, what was achieved, what was lost."""
    lost = {r["policy"]: r for r in quality(run.heads).iter_rows(named=True)}
    moved = {r["policy"]: r for r in traffic(run.ledger, run.layers).iter_rows(named=True)}
    budgets, dense = asked(run.ledger, run.tables["events"]), dense_layers(run.heads)
    sure = {(p, m): (low, high) for p, m, low, high in intervals(run.heads).iter_rows()}
    known = {p.id: p for p in run.policies}

    def measure(policy: str, name: str, form: Callable[[float | None], str]) -> str:
        low, high = sure.get((policy, name), (None, None))
        return form(lost[policy][name]) + ("" if low is None else f"\n{form(low).removesuffix(' %')}–{form(high)}")

    rows = [
        (
            s.label,
            known[s.policy].role,
            _asked(budgets, s.policy, "read"),
            _number(lost[s.policy]["read_tokens"]),
            _number(moved[s.policy]["union_tokens"]),
            _asked(budgets, s.policy, "hold"),
            _number(moved[s.policy]["held_tokens"]),
            forced(s.policy),
            which(dense.filter(pl.col("policy") == s.policy)["layer"].to_list()),
            measure(s.policy, "evidence_recall", percent),
            measure(s.policy, "far_recall", percent),
            measure(s.policy, "rel_l2", error),
            percent(moved[s.policy]["read_share"]),
            percent(moved[s.policy]["resident_share"]),
        )
        for s in look
    ]
    caption = "Over all decode steps, layers and heads: means, and recalls as ratios of sums."
    return Table(caption, COLUMNS, rows, [known[s.policy].form or s.policy for s in look], _notes(run, look))


def rounding(floor: Floor | None) -> str:
    """The noise floor in a sentence."""
    if floor is None:
        return (
            "No outputs of attention over all tokens are in the trace, so the model's own rounding is not known and no noise floor is "
            "drawn; kvsim capture records them of models that do not choose for themselves what they attend to."
        )
    seen = "Grey in every chart of output error." if floor.p95 > LEAST_ERROR else "That is below every axis of output error."
    return (
        f"Noise floor: the outputs that the capture recorded differ from dense attention over the same rows by {error_size(floor.median)} "
        f"(median) and {error_size(floor.p95)} (p95, relative L2), the model's own rounding. A policy's error below it says nothing. {seen}"
    )


def worst_table(spread: pl.DataFrame, look: Sequence[Style]) -> Table:
    """The heads that a mean hides: for each policy, the tail and the worst head of the measures."""
    rows = {r["policy"]: r for r in spread.iter_rows(named=True)}
    measures = (
        ("evidence_recall", "evidence recall", percent),
        ("far_recall", "far recall", percent),
        ("rel_l2", "output error", error),
    )
    columns = ["policy"]
    for _, name, _ in measures:
        columns += [f"{name}, mean", f"{name}, {'p95' if name == 'output error' else 'p5'} of heads", f"{name}, worst head"]
    body = [
        [s.label, *(form(rows[s.policy][m + end]) for m, _, form in measures for end in ("", "_tail", "_worst"))] for s in look
    ]
    caption = "The heads that a mean hides: over query heads of all layers and contexts, each over all decode steps."
    return Table(caption, columns, body, notes=[TELLING])


def role_table(run: RunTables, look: Sequence[Style]) -> Table | None:
    """The measures by the role of the query's token; None when there is but one role."""
    lost = {(r["policy"], r["role"]): r for r in quality(run.heads, "role").iter_rows(named=True)}
    kinds = sorted({k for _, k in lost})
    if len(kinds) < 2:
        return None
    measures = (
        ("evidence_recall", "evidence recall", percent),
        ("far_recall", "far recall", percent),
        ("rel_l2", "output error", error),
    )
    rows = [[s.label, *(form(lost.get((s.policy, k), {}).get(m)) for m, _, form in measures for k in kinds)] for s in look]
    columns = ["policy", *(f"{name}, {role(k)}" for _, name, _ in measures for k in kinds)]
    return Table("The same by the role of the query's token: a loss on the question is not a loss on the answer.", columns, rows)


def _asked(budgets: pl.DataFrame, policy: str, side: str) -> str:
    """The budget that the tables record, else the one that the canonical form states, else none."""
    recorded = budgets.filter(pl.col("policy") == policy, pl.col("side") == side).select("unit", "low", "high").rows()
    if recorded:
        return ", ".join(_stated(*row) for row in recorded)
    chain = parts(policy)
    return next((budget(p.parameters[side]) for p in chain if side in p.parameters), NOTHING if chain else UNKNOWN)


def _stated(unit: str | None, low: float, high: float) -> str:
    return " to ".join(budget(f"{unit or UNKNOWN}({x:g})") for x in dict.fromkeys((low, high)))


# ---------------------------------------------------------------------------------------------- what is missing
def _notes(run: RunTables, look: Sequence[Style]) -> list[str]:
    """What qualifies the table: contexts, units, baselines that are missing or are forced to read other tokens."""
    n = contexts(run.heads)
    few = f"{n} context{'s' if n > 1 else ''}: no interval. It takes at least {FEWEST}, because the steps of one are not independent."
    empty = [p.id for p in run.policies if not p.rows]
    return [
        few if n < FEWEST else f"Under a number: its 95 % bootstrap interval over {n} contexts.",
        "A hold budget is per KV head; a read budget per query head, unless the heads of a group share one set, and it counts the forced "
        "reads. Bytes read: K and V rows, index, scales and scores. Bytes resident: those on the device, index and scales included. Both "
        "against full attention in the KV dtype billed.",
        f"{NOTHING}: no such budget, no evidence in the prompt, or less than 0.001 of dense attention mass to divide by.",
        *([f"Without rows in the tables: {', '.join(empty)}."] if empty else []),
        *absent(run),
        *other_forced(run, look),
    ]


def absent(run: RunTables) -> list[str]:
    """One sentence that names the baselines this run does not have, if any."""
    there = {family(p.id) for p in run.policies}
    missing = [b for b in BASELINES if b not in there]
    return [f"Not in this run: {', '.join(missing)}; kvsim replay --baselines adds what is missing."] if missing else []


def other_forced(run: RunTables, look: Sequence[Style]) -> list[str]:
    """A sentence for each baseline and read policy that may be compared but are forced to read other tokens."""
    label = {s.policy: s.label for s in look}
    readers = [
        p.id for p in run.policies if p.role != "baseline" and p.id in label and any("read" in x.parameters for x in parts(p.id))
    ]
    return [
        f"{label[p.id]} and {label[r]} are no like-for-like pair: forced to read {forced(p.id)}; {forced(r)}."
        for p in run.policies
        if p.role == "baseline" and p.id in label and family(p.id) != "full"
        for r in readers
        if p.beside in (None, r) and forced(p.id) != forced(r)
    ]


# ---------------------------------------------------------------------------------------------- in words
def role(number: int) -> str:
    return ROLES.get(number, f"role {number}")


def role_words() -> pl.Expr:
    """Column `role` in words."""
    return pl.col("role").map_elements(role, return_dtype=pl.String)


def error(x: float | None) -> str:
    """An output error; what rounding alone leaves is 0."""
    return NOTHING if x is None else "0" if x < 1e-6 else f"{x:.3g}"


def logits(x: float | None) -> str:
    return NOTHING if x is None else f"{x:.3g}"


def error_size(x: float) -> str:
    return f"{x:.2g}"


def percent(x: float | None) -> str:
    return NOTHING if x is None else f"{x * 100:.1f} %"


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0–2, 5"."""
    groups: list[list[int]] = []
    for n in sorted(numbers):
        if groups and n == groups[-1][-1] + 1:
            groups[-1].append(n)
        else:
            groups.append([n])
    return ", ".join("–".join(str(n) for n in dict.fromkeys((g[0], g[-1]))) for g in groups)


def which(layers: Sequence[int]) -> str:
    """0, 1, 2 -> "layers 0–2"."""
    return f"layer{'s' * (len(layers) > 1)} {spans(layers)}" if layers else "none"


def _number(x: float | None) -> str:
    return NOTHING if x is None else f"{x:,.0f}"


def _said(x: Any) -> str:
    return str(x) if x not in (None, "") else UNKNOWN


def _dict(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else {}
