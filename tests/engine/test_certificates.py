"""Certificates of whole runs against exact arithmetic: what is read is what a reader must open to know, and what it proves is true.

LANES=2000 in the environment runs as many lanes, of some 65 rows each, for every law."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvsim.engine import attend
from kvsim.engine import run as engine
from kvsim.engine.stop import DOUBT, certificate, ordered
from kvsim.kernels.sparse import ALIVE, KEY_BLUR
from tests import naive
from tests.engine.lanes import chain, lane, run, stored

LANES = int(os.environ.get("LANES", "160"))
BLOCKS, NO_CAP = 8, 10**6


# ------------------------------------------------------------------------------------------------ lanes
def drawn(seed: int) -> Any:
    """A small lane, from harmless to mean."""
    rng = np.random.default_rng(seed)
    pick = lambda *of: of[rng.integers(len(of))]  # noqa: E731
    source = lane(
        prompt=pick(1, 3, 9, 26, 60, 90), steps=pick(4, 20), kv_heads=2, group=pick(1, 2, 4), key_dim=pick(1, 2, 4, 7), seed=seed,
        dtype=pick("float32", "float32", "float16", "bfloat16"), size=pick(0.1, 1.0, 10.0, 300.0), whole=rng.random() < 0.3,
        softcap=pick(None, None, 2.0, 50.0), sinks=rng.random() < 0.3, window=pick(None, None, None, 5, 17),
    )  # fmt: skip
    k, q = source.k, source.q
    match pick("plain", "drift", "drift", "drift", "twins", "flat", "near", "cancel", "wide"):
        case "drift":  # neighbours alike, so that pages differ
            waves = np.sin(np.arange(k.shape[1])[:, None] / 7 + rng.random(k[:, :1].shape) * 9)
            k = stored(waves.astype(np.float32), source.layer.dtype)
        case "twins":  # the same few keys all over
            k = k[:, rng.integers(0, min(3, k.shape[1]), k.shape[1])]
        case "flat":  # no query can tell anything apart
            q = np.zeros_like(q)
        case "near" if source.k.dtype == np.float32:  # keys a few bits apart
            one = k[:, :1] * (1 + rng.integers(-2, 3, k.shape) * np.float32(2.0**-23))
            k = one.astype(np.float32)
        case "cancel" if source.k.dtype == np.float32:  # large parts that cancel
            k, q = k.copy(), q.copy()
            if k.shape[2] > 1:
                k[..., 0], q[..., 1] = k[..., 1] + 1e4, -q[..., 0]
                k[..., 1] += np.float32(1e4)
        case "wide":  # channels of very different size
            scales = 4.0 ** rng.integers(-4, 5, k.shape[2])
            wide = (k.astype(np.float32) if k.dtype != np.uint16 else (k.astype(np.uint32) << 16).view(np.float32)) * scales
            k = stored(np.ascontiguousarray(wide.astype(np.float32)), source.layer.dtype)
    return replace(source, k=np.ascontiguousarray(k), q=q, _one={})


INDEXES = [
    "boxes(",
    "boxes(",
    "boxes(n={n}, ",
    'boxes(n={n}, by="cluster", ',
    'boxes(dtype="fp8", ',
    'boxes(dtype="float16", ',
    'boxes(rotate="random", ',
    'boxes(rotate="pca", dtype="bfloat16", ',
    "sphere(",
    'sphere(dtype="fp8", ',
]


def policy(seed: int, rule: str) -> str:
    rng = np.random.default_rng(seed + 10**6)
    pick = lambda *of: of[rng.integers(len(of))]  # noqa: E731
    page = pick(1, 1, 2, 3, 4, 16, 64)
    keep = pick(
        "full()",
        "full()",
        "full()",
        "streaming_llm(sinks=2, hold=tokens(9))",
        'h2o(hold=tokens(12), recent=0.3, prefill="zeros")',
    )
    store = pick("", "", "", " >> kivi(bits=2, group=2, residual=4)", " >> kivi(k_bits=4, group=4, residual=8)")
    index = pick(*INDEXES).format(n=min(page, 2))
    keys = "exact" if not store else "recon" if "sphere" in index else pick("recon", "expanded")
    index = f'{index}keys="{keys}")'
    more = f', sinks={pick(0, 0, 3)}, recent={pick(0, 0, 6)}, tail="{pick("forced", "free")}", heads="{pick("each", "share")}"'
    return f"{keep}{store} >> quest(read={rule}, page={page}, index={index}{more})"


# ------------------------------------------------------------------------------------------------ what the engine did
@dataclass
class Row:
    """One step of one query head: the pages in the order they are opened, with their scores and their tokens' positions."""

    score: list[float]
    tokens: list[list[int]]
    forced: int
    exact_logits: dict[int, Any]  # position -> q·k in whole numbers
    logits: dict[int, float]  # as the softmax sees them, in powers of 2
    size: Any  # |q| |k|, in the same whole numbers as the logits
    read: set[int]
    rounds: int
    certified: bool | None
    eps: Any  # of every prefix, as the engine proves it


def rows_of(source: Any, policy: str) -> list[Row]:
    """Runs a policy and takes down what each head was shown and what it read."""
    with mock.patch.object(engine, "attend", side_effect=attend.attend) as attended:
        heads = run(source, policy)["heads"]
    found = [row for call in attended.call_args_list for row in _rows(source, chain(policy), *call.args)]
    assert len(found) == len(heads["certified"])
    return found


def _rows(source: Any, chain: Any, dense: Any, held: Any, picked: Any, record: Any) -> list[Row]:
    q, read = source.queries(dense.head, dense.index), chain.part("read")
    captured = source.rows("k", dense.head, held.pos)
    stored = record.decoded["k"][dense.head, held.pos] if record and "k" in record.decoded else captured
    whole = [naive.whole_numbers(x) for x in (captured, stored)]
    truth = attend.truth_of(dense, held, record, read.index)
    told = ordered(source, picked.pages, picked.score, picked.pages.rows(held.flags), picked.forced)
    eps = certificate(told, truth)
    out = []
    for i, t in enumerate(dense.t.tolist()):
        alive = (held.flags[i] & ALIVE) > 0
        blurred = (alive & ((held.flags[i] & KEY_BLUR) > 0))[:, None]
        keys, exact = np.where(blurred, stored, captured), np.where(blurred, *whole[::-1])
        pages = {int(p): held.pos[alive & (held.pos // read.page == p)].tolist() for p in np.unique(held.pos[alive] // read.page)}
        forced = {p for p in pages if _forced(read, p, t)}
        for g in range(dense.group):
            dots = (naive.whole_numbers(q[i, g]) * exact).sum(1)
            score = dict(zip(picked.pages.id.tolist(), picked.score[i, g].tolist(), strict=True))
            order = sorted(pages, key=lambda p: (p not in forced, -score[p] if p not in forced else 0, p))
            logit = naive.bent(q[i, g].astype(float) @ keys.T.astype(float), source.unit, source.cap)
            out.append(
                Row(
                    [score[p] for p in order], [pages[p] for p in order], len(forced),
                    dict(zip(held.pos.tolist(), dots, strict=True)), dict(zip(held.pos.tolist(), logit.tolist(), strict=True)),
                    _norms(q[i, g], keys), set(picked.pages.id[picked.chosen[i, g]].tolist()), int(picked.rounds[i, g]),
                    None if picked.certified is None else bool(picked.certified[i, g]), eps[i, g],
                )
            )  # fmt: skip
            out[-1].read = {pos for p in out[-1].read for pos in pages[p]}
    return out


def _forced(read: Any, p: int, t: int) -> bool:
    first, last = p * read.page, (p + 1) * read.page - 1
    tail = read.tail == "forced" and first <= t <= last
    return tail or first < read.sinks or (read.recent > 0 and last >= t + 1 - read.recent)


def _norms(q: Any, keys: Any) -> int:
    """At least |q| |k| of every key, in whole numbers of 2**-400."""
    return int(np.linalg.norm(q.astype(float)) * np.linalg.norm(keys.astype(float), axis=1).max(initial=0) * 2.0**60 + 1) << 340


def exactly(score: float) -> int:
    """A score in the units of whole_numbers' products."""
    n, d = score.as_integer_ratio()
    return (n << 400) // d


# ------------------------------------------------------------------------------------------------ the laws
def asked(seed: int, values: list[Any]) -> tuple[Any, int, int, str]:
    """(value, batch, cap in pages, batch and cap as the language has them)."""
    rng = np.random.default_rng(seed + 2 * 10**6)
    value, batch, cap = values[rng.integers(len(values))], int(rng.choice([1, 1, 2, 3])), int(rng.choice([0, 0, 0, 2, 5]))
    return value, batch, cap or NO_CAP, f"batch={batch}, cap={f'pages({cap})' if cap else None}"


def lanes(block: int, many: int = LANES) -> range:
    return range(block, many, BLOCKS)


def as_opened(row: Row, text: str, pages: int, most: int | None = None) -> bool:
    """The pages up to `pages` were read, and none after `most`; with "share", those of the other heads as well."""
    upto = [{p for page in row.tokens[:k] for p in page} for k in (pages, pages if most is None else most)]
    return upto[0] <= row.read and (row.read <= upto[1] or 'heads="share"' in text)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_exact_finds_the_best_tokens_and_opens_nothing_else(block):
    pruned = 0
    for seed in lanes(block):
        r, batch, cap, more = asked(seed, [1, 1, 2, 5, 17])
        text = policy(seed, f"exact(r={r}, {more})")
        for row in rows_of(drawn(seed), text):
            check_exact(row, r, batch, cap, text)
            pruned += len(row.read) < sum(map(len, row.tokens))
    assert pruned > 20


def check_exact(row: Row, r: int, batch: int, cap: int, text: str) -> None:
    bound, tokens = [exactly(u) for u in row.score], [[row.exact_logits[p] for p in page] for page in row.tokens]
    doubt = int(2 * DOUBT * 2**60) * (row.size >> 60)
    assert all(u >= max(page) - doubt for u, page in zip(bound, tokens, strict=True)), text
    best = sorted((p for page in row.tokens for p in page), key=lambda p: (-row.exact_logits[p], p))[:r]
    assert not row.certified or {*best} <= row.read, text  # the proof holds
    pages, rounds, proved = naive.opened(naive.top_found(bound, tokens, r), len(bound), row.forced, batch, cap)
    most, *_ = naive.opened(naive.top_found([u + doubt for u in bound], tokens, r), len(bound), row.forced, batch, cap)
    assert as_opened(row, text, pages, most), text
    level = row.exact_logits[best[-1]] if len(best) == r else None
    if level is None or not any(0 < abs(u - level) <= doubt for u in bound):  # nothing that float64 may take for a tie
        assert (row.rounds, row.certified) == (rounds, proved), text
        assert as_opened(row, text, pages), text


@pytest.mark.parametrize("block", range(BLOCKS))
def test_mass_stops_at_the_first_prefix_that_proves_it(block):
    pruned = 0
    for seed in lanes(block):
        eps, batch, cap, more = asked(seed, [0.005, 0.05, 0.2, 0.5, 0.9])
        source, text = drawn(seed + 50_000), policy(seed, f"mass(eps={eps}, {more})")
        for row in rows_of(source, text):
            check_mass(row, source, eps, batch, cap, text)
            pruned += len(row.read) < sum(map(len, row.tokens))
    assert pruned > 20


def check_mass(row: Row, source: Any, eps: float, batch: int, cap: int, text: str) -> None:
    bound, tokens = (
        naive.bent(np.array(row.score), source.unit, source.cap).tolist(),
        [[row.logits[p] for p in page] for page in row.tokens],
    )
    many, near = len(bound), 1e-9 + 1e-14 * max(map(abs, [*bound, *(x for page in tokens for x in page)]))
    proved = [naive.unread_bound(bound, [len(t) for t in tokens], tokens, k) for k in range(many + 1)]
    for k in range(many + 1):
        assert row.eps[k] >= naive.unread_share(tokens, k) * (1 - near) - 1e-300, text
        assert row.eps[k] == pytest.approx(proved[k], rel=near, abs=1e-300), text
    parts = [[row.logits[p] for page in row.tokens for p in page if (p in row.read) == wanted] for wanted in (True, False)]
    assert not row.certified or naive.unread_share(parts, 1) <= eps * (1 + near), text  # the proof holds
    if min(abs(x - eps) for x in proved) > near:
        pages, rounds, sure = naive.opened(lambda k: proved[k] <= eps, many, row.forced, batch, cap)
        assert (row.rounds, row.certified) == (rounds, sure), text
        assert as_opened(row, text, pages), text


def test_rules_that_prove_nothing_stop_where_a_loop_does():
    for seed in range(LANES // 8):
        source = drawn(seed + 90_000)
        p, _, cap, more = asked(seed, [0.3, 0.8, 0.99])
        text = policy(seed, f"top_p(p={p}, {more.partition(', ')[2]})")
        for row in rows_of(source, text):
            bound, rows = naive.bent(np.array(row.score), source.unit, source.cap).tolist(), [len(t) for t in row.tokens]
            share = [naive.estimated(bound, rows, k) for k in range(len(rows) + 1)]
            need = next((k for k in range(1, len(rows) + 1) if share[k] >= p - 1e-12), len(rows))
            if min(abs(x - p) for x in share) > 1e-9:
                assert as_opened(row, text, min(len(rows), max(row.forced, min(need, cap)))), text
            assert (row.rounds, row.certified) == (1, None), text
        text = policy(seed, "gap(min=0.7, floor=pages(2), cap=pages(6))")
        for row in rows_of(source, text):
            many, u = len(row.score), [source.layer.scale * x for x in row.score]
            falls = [u[k - 1] - u[k] if k < many else np.inf for k in range(1, many + 1)]
            good = [k for k in range(max(2, row.forced + 1), min(6, many) + 1) if falls[k - 1] >= 0.7]
            if min(abs(fall - 0.7) for fall in falls) > 1e-9:
                assert as_opened(row, text, min(many, max(row.forced, good[0] if good else 6))), text
