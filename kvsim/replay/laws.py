"""`--strict`: what must be true of the tables of every policy, checked for one (request, layer) before its part is written.

A law is stated once, as a sentence and as a comparison of whole columns; the first row that breaks it is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvsim.engine.account import page_rows
from kvsim.errors import BadTrace, BrokenLaw
from kvsim.geometry import Layer, Request
from kvsim.policies import allocate
from kvsim.policies.language import Policy
from kvsim.policies.protocol import Chain
from kvsim.replay.asked import jobs_of
from kvsim.tables import RUN_TABLES

MASS = 5e-5  # what float32 columns may miss of a sum of masses
FAR = 0.01  # what they may miss where nobody is strict: logits of thousands have few digits left in float32
ERROR = 1e-4  # relative output error of attention over everything
CAPPED = (
    "h2o",
    "tova",
    "streaming_llm",
    "random_keep",
    "pools",
    "knorm",
    "oracle_keep",
)  # never hold more than their budget, at any step
KEYS = ("request", "layer", "kv_head", "q_head", "role", "pages", "step")
BYTES = [f.name for f in RUN_TABLES["ledger"] if f.name.endswith("_bytes")]
MASSES = ("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass")
RECALLS = ("top1_recall", "top10_recall", "top64_recall")
CURVES = ("union_pages_mean", "read_bytes_mean", "mass_recall_mean", "mass_recall_p5", "mass_recall_p50", "mass_recall_min")
TOPS = ("top1_recall_mean", "top10_recall_mean", "top10_recall_p5", "top64_recall_mean")
EXACT = ("exact_pages_r1", "exact_pages_r10", "exact_pages_r64")
PROVED = ("mass_pages_001", "mass_pages_005", "mass_pages_01", "mass_pages_02")
RISING = (*CURVES, "far_recall", *TOPS, "evidence_recall")

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rows:
    """Some rows of one table as float64 columns, null as NaN; lists stay lists."""

    policy: str
    table: str
    columns: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def must(self, law: str, holds: Any) -> None:
        """Raises BrokenLaw for the first row where `holds` is False."""
        wrong = ~np.broadcast_to(holds, (len(self),))
        if wrong.any():
            i = int(wrong.argmax())
            at = " ".join(f"{k}={int(self[k][i])}" for k in KEYS if isinstance(self.columns.get(k), np.ndarray))
            raise BrokenLaw(f"{self.table} of {self.policy}, row {at}: broken law: {law}")

    def where(self, mask: Mask) -> Rows:
        keep = np.flatnonzero(mask)
        columns = {n: x[keep] if isinstance(x, np.ndarray) else [x[i] for i in keep] for n, x in self.columns.items()}
        return Rows(self.policy, self.table, columns)


def check_laws(policy: Policy, request: Request, layer: Layer, tables: Mapping[str, pa.Table]) -> None:
    """The tables of one policy for one (request, layer). Raises BrokenLaw."""
    whole = {name: rows_of(policy.id, name, table) for name, table in tables.items()}
    for job in jobs_of(policy, layer):
        chain = allocate.for_layer(job.chain, layer)
        heads = range(layer.kv_heads) if job.heads is None else job.heads
        if layer.shared_row_bytes is not None:
            _shared_bytes(whole["ledger"], heads, layer.shared_row_bytes)
        for head in heads:
            mine = {name: rows.where(_of_head(rows, head, layer)) for name, rows in whole.items()}
            _ledger(mine["ledger"], chain, request, layer)
            _heads(mine["heads"], mine["ledger"], chain)
            for name, check in CHECKS.items():
                if name in mine and len(mine[name]):
                    check(mine[name], mine, chain, request, layer)


def check_masses(name: str, tables: Mapping[str, pa.Table]) -> None:
    """Without --strict, too: raises BadTrace where masses are nowhere near 1 in sum, because float32 products do not hold the logits."""
    heads = tables["heads"]
    total = np.sum([heads[column].to_numpy() for column in MASSES], axis=0)
    far = ~(np.abs(total - 1) <= FAR)
    if far.any():
        i = int(far.argmax())
        raise BadTrace(
            f"{name}, q head {heads['q_head'][i]}, step {heads['step'][i]}: attention masses sum to {total[i]:.3g}, expected 1: "
            "keys and queries whose products are beyond float32; look for what captured them"
        )


def rows_of(policy: str, name: str, table: pa.Table) -> Rows:
    numbers = {f.name: f.type for f in table.schema if not pa.types.is_string(f.type) and not pa.types.is_dictionary(f.type)}
    columns: dict[str, Any] = {}
    for column, kind in numbers.items():
        x = table[column]
        lists = pa.types.is_list(kind)
        columns[column] = x.to_pylist() if lists else pc.fill_null(pc.cast(x, pa.float64()), np.nan).to_numpy()
    return Rows(policy, name, columns)


def _of_head(rows: Rows, head: int, layer: Layer) -> Mask:
    return np.asarray(rows["kv_head"] == head if "kv_head" in rows.columns else rows["q_head"] // layer.group == head)


def _same(rows: Rows, *keys: str) -> Mask:
    """Rows that follow the one before in every key but the last, where they are the next."""
    here = np.ones(len(rows), bool)
    here[:1] = False
    for key in keys[:-1]:
        here[1:] &= np.diff(rows[key]) == 0
    here[1:] &= np.diff(rows[keys[-1]]) == 1
    return here


def _before(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([x[:1], x[:-1]])


def _ledger(x: Rows, chain: Chain, request: Request, layer: Layer) -> None:
    held, evicted, visible, host = x["held_tokens"], x["evicted_tokens"], x["visible_tokens"], x["host_tokens"]
    gone = visible - held - evicted
    x.must("visible = held + evicted + tokens only on the host", (gone >= 0) & (gone <= host))
    x.must("held = full + quantised", held == x["full_tokens"] + x["quant_tokens"])
    x.must(
        "a step reads at least one token, and none that is not visible", (x["read_tokens"] >= 1) & (x["read_tokens"] <= visible)
    )
    x.must("no count of bytes is negative", ~np.any([x[name] < 0 for name in BYTES], axis=0))
    then = _same(x, "step")
    x.must("only the new token joins what is held", ~then | (held <= _before(held) + 1 + _before(host)))
    x.must("a step reads what was held and its own token", ~then | (x["read_tokens"] <= _before(held) + 1 + _before(host)))
    if layer.window is None:
        x.must("what is gone stays gone", ~then | (evicted >= _before(evicted) - host))
    keep = chain.part("keep")
    if type(keep).__name__ in CAPPED:
        limit = [allocate.hold_limit(keep, int(v), request, layer) for v in visible]
        x.must("no more is held than the budget", held <= limit)
    _ledger_bytes(x, chain, layer)


def _ledger_bytes(x: Rows, chain: Chain, layer: Layer) -> None:
    x.must("every step writes its own row", x["write_bytes"] >= layer.row_bytes)
    if chain.codecs is None:
        no_meta = (x["meta_resident_bytes"] == 0) & (x["meta_bytes"] == 0)
        sums = chain.part("estimate") is not None
        x.must("without a codec nothing is quantised", (x["quant_tokens"] == 0) & (sums | no_meta))
    page = chain.part("read").page
    if page is not None and not np.isnan(x["read_pages"]).any():
        x.must("pages read hold the tokens read", x["read_pages"] * page >= x["read_tokens"])
        x.must("runs are made of pages", (x["read_runs"] >= 1) & (x["read_runs"] <= x["read_pages"]))
    if layer.shared_row_bytes is None:
        _row_bytes(x, chain, layer.row_bytes)


def _row_bytes(x: Rows, chain: Chain, row: int) -> None:
    """Of rows that a kv head has for itself."""
    held, read = x["held_tokens"] * row, x["read_tokens"] * row
    grows = chain.codecs is not None and chain.codecs.grows
    x.must("held rows cost no more than exact ones", grows | (x["resident_bytes"] <= held))
    x.must("rows read cost no more than exact ones", grows | (x["read_bytes"] <= read))
    if chain.codecs is None:
        x.must("held rows cost row_bytes each", x["resident_bytes"] == held)
        x.must("rows read cost row_bytes each", x["read_bytes"] == read)
    page = chain.part("read").page
    if page is not None and not np.isnan(x["read_pages"]).any():
        x.must("page_bytes = pages read, whole", x["page_bytes"] == x["read_pages"] * page_rows(chain.part("read")) * row)


def _shared_bytes(x: Rows, heads: Sequence[int], row: int) -> None:
    """Of a row that all kv heads share."""
    each = [x.where(x["kv_head"] == head) for head in heads]
    for tokens, paid in (("held_tokens", "resident_bytes"), ("read_tokens", "read_bytes")):
        n, total = np.array([head[tokens] for head in each]), sum(head[paid] for head in each)
        each[0].must("heads that share rows pay for all that one of them has", total >= n.max(0) * row)
        each[0].must("heads that share rows pay no more than if they shared none", total <= n.sum(0) * row)


def _heads(x: Rows, ledger: Rows, chain: Chain) -> None:
    x.must("the four masses sum to 1", np.abs(sum(x[name] for name in MASSES) - 1) <= MASS)
    for name in (*MASSES, "mass_quant", "mass_host", "far_mass", *RECALLS):
        x.must(f"{name} is between 0 and 1", (x[name] >= -MASS) & (x[name] <= 1 + MASS))
    x.must("quantised and host mass are parts of what is recalled", x["mass_quant"] + x["mass_host"] <= x["mass_recall"] + MASS)
    x.must("far recall is at most 1", ~(x["far_recall"] > 1 + ERROR))
    x.must("evidence read is a part of the evidence", ~(x["evidence_read"] > x["evidence_dense"] + MASS))
    if chain.part("estimate") is not None:
        x.must("the estimated part of a softmax is between 0 and 1", (x["mass_estimated"] >= 0) & (x["mass_estimated"] <= 1))
    if chain.part("keep").hold is None:
        x.must("without a hold budget no mass is evicted", x["mass_evicted"] <= MASS)
    place = {step: i for i, step in enumerate(ledger["step"])}
    at = np.array([place[step] for step in x["step"]], np.int64)
    x.must("a head reads no more than its group", x["read_tokens"] <= ledger["read_tokens"][at])
    x.must("a head reads no more pages than are held", ~(x["read_pages"] > x["held_pages"]))
    whole = x["read_tokens"] == ledger["visible_tokens"][at]
    x.must("who reads all that is visible misses nothing", ~whole | (x["mass_evicted"] + x["mass_unread"] <= MASS))
    x.must("who reads all that is visible has every top token", ~whole | np.all([x[name] == 1 for name in RECALLS], axis=0))
    if chain.codecs is None:
        x.must("who reads all that is visible, exactly, has the dense output", ~whole | (x["rel_l2"] <= ERROR))
    index, coded = chain.part("read").index, chain.codecs is not None
    captured = not coded or getattr(index, "keys", "exact") == "exact"  # else the bounds are of other keys than these masses
    if index is not None and index.bound and captured:
        x.must("eps_hat bounds the mass not read", ~(x["mass_unread"] > x["eps_hat"] + MASS))


def _curves(x: Rows, mine: Mapping[str, Rows], chain: Chain, request: Request, layer: Layer) -> None:
    page = chain.part("read").page
    x.must("tokens = pages * page size", x["tokens"] == x["pages"] * page)
    x.must("the group reads at least what one head reads", x["union_pages_mean"] >= x["pages"] * (1 - 1e-9))
    then = _same(x, "q_head", "role", "pages")
    x.must("every budget from 1 page on is there", then | (x["pages"] == 1))
    for name in RISING:
        x.must(
            f"{name} never falls as the budget grows",
            ~then | ~(x[name] < _before(x[name]) - 1e-6 * np.maximum(1, np.abs(x[name]))),
        )


def _plans(x: Rows, mine: Mapping[str, Rows], chain: Chain, request: Request, layer: Layer) -> None:
    size, last = x["page_size"], (request.prompt + x["step"]) // x["page_size"]
    first = layer.first_of_each(request.prompt + x["step"]) // size
    x.must("pages are in ascending order, each once", [bool((np.diff(pages) > 0).all()) for pages in x["pages"]])
    inside = [len(p) > 0 and a <= p[0] and p[-1] <= b for p, a, b in zip(x["pages"], first, last, strict=True)]
    x.must("a step reads pages it can see, at least one", inside)
    heads = mine["heads"]
    read = dict(zip(zip(heads["q_head"], heads["step"], strict=True), heads["read_pages"], strict=True))
    keys = zip(x["q_head"], x["step"], x["pages"], strict=True)
    x.must("heads counts the pages of the plan", [q < 0 or read[q, step] == len(pages) for q, step, pages in keys])
    x.must("no more pages are read than there are", [len(p) <= there for p, there in zip(x["pages"], x["exists"], strict=True)])
    x.must("what is forced is read", [{*f} <= {*p} for f, p in zip(x["forced"], x["pages"], strict=True)])


def _explain(x: Rows, mine: Mapping[str, Rows], chain: Chain, request: Request, layer: Layer) -> None:
    heads = mine["heads"]
    at, each = _in_heads(x, heads)
    x.must("explain has one row for every row of heads", (at >= 0) & (each == 1) & (len(x) == len(heads)))
    x.must("explain has the roles of heads", x["role"] == heads["role"][at])
    pages = heads["held_pages"][at]
    for name in ("k_needed", *EXACT, *PROVED):
        x.must(f"{name} is between 1 and the pages there are", ~((x[name] < 1) | (x[name] > pages)))
    x.must("a proof of more tokens is no shallower", ~np.any([x[a] > x[b] for a, b in pairwise(EXACT)], axis=0))
    x.must("a proof of more of the mass is no shallower", ~np.any([x[a] < x[b] for a, b in pairwise(PROVED)], axis=0))


def _evidence(x: Rows, mine: Mapping[str, Rows], chain: Chain, request: Request, layer: Layer) -> None:
    heads, spans = mine["heads"], len(request.evidence)
    at, each = _in_heads(x, heads)
    x.must("every row of heads has its spans of evidence", (at >= 0) & (each == spans) & (len(x) == spans * len(heads)))
    x.must("what is read of a span is a part of it", (x["read"] >= 0) & (x["read"] <= x["dense"] + MASS))
    x.must("a span holds no more than all the evidence", x["dense"] <= heads["evidence_dense"][at] + MASS)


def _in_heads(x: Rows, heads: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of every row: the row of heads with its query head and step (-1: none), and how many rows of x have these."""
    place = {key: i for i, key in enumerate(zip(heads["q_head"], heads["step"], strict=True))}
    keys = list(zip(x["q_head"], x["step"], strict=True))
    many = Counter(keys)
    return np.array([place.get(key, -1) for key in keys]), np.array([many[key] for key in keys])


def _tiers(x: Rows, mine: Mapping[str, Rows], chain: Chain, request: Request, layer: Layer) -> None:
    ends = request.prompt + x["step"] + 1
    x.must(
        "runs are ranges of positions up to the step's own, in order",
        [_in_order(r, e) for r, e in zip(x["runs"], ends, strict=True)],
    )
    known = [all(run["tier"] & 3 <= 2 and 0 <= run["tier"] < 32 for run in runs) for runs in x["runs"]]
    x.must("a tier is 0, 1 or 2, with 4, 8 and 16 for copies", known)


def _in_order(runs: list[dict[str, int]], end: float) -> bool:
    edges = [edge for run in runs for edge in (run["start"], run["stop"])]
    return (
        edges == sorted(edges)
        and all(r["start"] < r["stop"] for r in runs)
        and (not edges or (edges[0] >= 0 and edges[-1] <= end))
    )


def _events(x: Rows, mine: Mapping[str, Rows], chain: Chain, request: Request, layer: Layer) -> None:
    counts = ("promoted", "demoted", "evicted", "aged_in", "requantised")
    x.must("no count is negative", ~np.any([x[name] < 0 for name in counts], axis=0))
    x.must("churn is a share", ~((x["churn"] < 0) | (x["churn"] > 1)))
    ledger = mine["ledger"]
    every = len(x) == len(ledger) + 1 and (x["step"] == np.arange(-1, len(ledger))).all()
    if every and layer.window is None and not ledger["host_tokens"].any():
        gone = np.cumsum(x["evicted"])[1:]
        x.must("evictions add up to what is gone", np.append(True, gone == ledger["evicted_tokens"]))


CHECKS = {"curves": _curves, "plans": _plans, "explain": _explain, "evidence": _evidence, "tiers": _tiers, "events": _events}
