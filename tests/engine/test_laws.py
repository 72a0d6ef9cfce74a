"""What must be true of every run, whatever the policy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvsim.geometry import INDEX, ITEMSIZE
from kvsim.policies import allocate
from tests.engine.lanes import ROWS, by_step, chain, differing, lane, placement, run
from tests.engine.policies import ALL, CHAINS, EVICTING, STATELESS

LANES = {
    "plain": {"prompt": 40, "steps": 12, "kv_heads": 3, "evidence": ((3, 9), (38, 43))},
    "all at once": {
        "prompt": 90,
        "steps": 9,
        "value_dim": 6,
        "dtype": "bfloat16",
        "softcap": 4.0,
        "sinks": True,
        "size": 3.0,
        "group": 3,
    },
    "sliding": {"prompt": 40, "steps": 12, "window": 26, "dtype": "float16"},
    "ties": {"prompt": 33, "steps": 12, "whole": True},
    "huge": {"prompt": 40, "steps": 12, "size": 60.0, "seed": 1},
}
MASSES = ("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass")
everywhere = pytest.mark.parametrize("kind", LANES)


@pytest.fixture(scope="module", params=LANES)
def runs(request):
    """(lane, {policy: tables}) of every policy."""
    source = lane(**LANES[request.param])
    return source, dict(zip(ALL, run(source, *ALL, plans=True), strict=True))


# ------------------------------------------------------------------------------------------------ masses
@pytest.mark.parametrize("policy", ALL)
def test_the_four_masses_sum_to_one(runs, policy):
    heads = runs[1][policy]["heads"]
    assert np.allclose(sum(heads[m] for m in MASSES), 1, atol=2e-6)
    assert all((heads[m] >= 0).all() for m in MASSES)
    assert (heads["mass_quant"] <= heads["mass_recall"] + 1e-6).all()


def test_reading_everything_is_dense_attention(runs):
    source = runs[0]
    whole = [f'quest(read=pages(99), page=5, heads="{h}")' for h in ("each", "share", "max", "mean", "softmax_mean", "split")]
    whole += ["recency(read=pages(99), page=5)", "random_read(read=share(1), page=1)", "h2o(hold=tokens(999))", "kivi(bits=16)"]
    for policy in ["full()", *whole]:
        got = run(source, policy)
        heads, ledger = got["heads"], got["ledger"]
        assert np.array_equal(heads["mass_recall"], 1 - heads["learned_sink_mass"])
        assert not np.any([heads[c] for c in ("rel_l2", "mass_evicted", "mass_unread", "out_bound")])
        assert np.all([heads[f"top{r}_recall"] == 1 for r in (1, 10, 64)])
        assert not ledger["index_bytes"].any()  # nothing had to be ranked
        assert np.array_equal(ledger["read_tokens"], ledger["visible_tokens"])


@pytest.mark.parametrize("by", ["mass", "logit"])
def test_a_larger_budget_of_the_oracle_never_loses(runs, by):
    recalls = [run(runs[0], f'oracle(read=pages({k}), page=4, by="{by}")')["heads"]["mass_recall"] for k in range(1, 9)]
    assert (np.diff(recalls, axis=0) >= -1e-6).all()


def test_no_ranking_beats_the_oracle_of_its_page_count(runs):
    best = run(runs[0], "oracle(read=pages(3), page=4)")["heads"]["mass_recall"]
    for policy in STATELESS:
        if "read=pages(3), page=4" in policy and "heads" not in policy and "refresh" not in policy:
            assert (runs[1][policy]["heads"]["mass_recall"] <= best + 1e-6).all()


# ------------------------------------------------------------------------------------------------ tokens
@pytest.mark.parametrize("policy", ALL)
def test_read_held_visible(runs, policy):
    source, tables = runs[0], runs[1][policy]
    ledger = tables["ledger"]
    assert np.array_equal(ledger["visible_tokens"], ledger["held_tokens"] + ledger["evicted_tokens"])
    assert np.array_equal(ledger["held_tokens"], ledger["full_tokens"] + ledger["quant_tokens"])
    assert (ledger["read_tokens"] >= 1).all()
    held, read = by_step(ledger, "held_tokens"), by_step(ledger, "read_tokens")
    assert (held[:, 1:] <= held[:, :-1] + 1).all()
    assert (read[:, 1:] <= held[:, :-1] + 1).all()
    if source.layer.window is None:
        assert (np.diff(by_step(ledger, "evicted_tokens")) >= 0).all()


@pytest.mark.parametrize("policy", EVICTING)
def test_what_is_gone_stays_gone_and_the_capacity_holds(runs, policy):
    source, tables = runs[0], runs[1][policy]
    keep, live = chain(policy).part("keep"), placement(source, tables["tiers"]) & 3
    for t in range(1, live.shape[1]):
        back = (live[:, t - 1] == 0) & (live[:, t] > 0)
        assert not back[:, : source.t[t - 1] + 1].any()
    if type(keep).__name__ in ("h2o", "tova", "streaming_llm", "random_keep", "pools", "knorm", "oracle_keep"):
        limit = [allocate.hold_limit(keep, int(v), source.request, source.layer) for v in tables["ledger"]["visible_tokens"]]
        assert (tables["ledger"]["held_tokens"] <= limit).all()


@pytest.mark.parametrize("policy", [p for p in EVICTING + CHAINS if "qevict" not in p])
def test_tiers_and_events_add_up_to_the_ledger(runs, policy):
    source, tables = runs[0], runs[1][policy]
    tiers, ledger, events = placement(source, tables["tiers"]), tables["ledger"], tables["events"]
    assert np.array_equal((tiers > 0).sum(2), by_step(ledger, "held_tokens"))
    assert np.array_equal((tiers == 2).sum(2), by_step(ledger, "full_tokens"))
    assert np.array_equal((tiers == 1).sum(2), by_step(ledger, "quant_tokens"))
    if source.layer.window is None:
        assert np.array_equal(np.cumsum(by_step(events, "evicted"), 1)[:, 1:], by_step(ledger, "evicted_tokens"))
        left = np.cumsum(by_step(events, "demoted"), 1)[:, 1:] - by_step(ledger, "quant_tokens")
        assert (left >= 0).all()  # coded tokens may be evicted later


# ------------------------------------------------------------------------------------------------ bytes
@pytest.mark.parametrize("policy", ALL)
def test_bytes_are_those_of_the_rows(runs, policy):
    source, tables = runs[0], runs[1][policy]
    lay, ledger, parts = source.layer, tables["ledger"], chain(policy)
    exact = (parts.part("store") or parts.part("keep")).codecs is None
    for tokens, size, meta in (
        ("held_tokens", "resident_bytes", "meta_resident_bytes"),
        ("read_tokens", "read_bytes", "meta_bytes"),
    ):
        most = ledger[tokens] * lay.row_bytes
        assert (ledger[size] == most).all() if exact else (ledger[size] <= most).all()
        assert not (exact and ledger[meta].any())
    assert (ledger["write_bytes"] >= lay.row_bytes).all()
    read = parts.part("read")
    if read.page:
        assert (ledger["page_bytes"] >= ledger["read_tokens"] * lay.row_bytes).all()
        assert np.array_equal(ledger["page_bytes"], ledger["read_pages"] * read.page * lay.row_bytes)
        assert (ledger["resident_page_bytes"] >= ledger["held_tokens"] * lay.row_bytes).all()
    if read.index:
        page = read.index.numbers(lay.key_dim) * ITEMSIZE[lay.dtype]
        assert (ledger["index_bytes"] % page == 0).all()
        assert np.array_equal(ledger["index_resident_bytes"], ledger["resident_page_bytes"] // (read.page * lay.row_bytes) * page)
        assert (ledger["index_bytes"] // page <= -(-ledger["visible_tokens"] // read.page) + 1).all()
    elif INDEX in read.needs:  # the layer's, on its first kv head
        row = read.index_row_bytes(source.indexer.k.shape[1], ITEMSIZE[lay.dtype])
        held, scanned = (by_step(ledger, name) for name in ("index_resident_bytes", "index_bytes"))
        assert np.array_equal(held[0], by_step(ledger, "held_tokens")[0] * row)
        assert ((scanned[0] == 0) | (scanned[0] == by_step(ledger, "visible_tokens")[0] * row)).all()
        assert not held[1:].any()
        assert not scanned[1:].any()
    else:
        assert not ledger["index_bytes"].any()
        assert not ledger["index_resident_bytes"].any()


def test_codes_and_scales_are_counted_one_by_one(runs):
    """kivi: a bit for every code, and two fp16 numbers for every group that still has a row."""
    source, group, residual, bits = runs[0], 2, 8, 3
    lay, ledger = source.layer, run(source, f"kivi(bits={bits}, group={group}, residual={residual})")["ledger"]
    first = lay.first_visible(source.request.prompt - 1)
    for i, t in enumerate(source.t.tolist()):
        born = [*range(first, t + 1)]
        keys = born[: len(born) // residual * residual] if lay.window is None else None
        if keys is None:
            continue
        values, held = born[: max(0, len(born) - residual)], len(born)
        key_bytes = lay.row_bytes * lay.key_dim // (lay.key_dim + lay.value_dim)
        codes = len(keys) * lay.key_dim * bits // 8 + len(values) * lay.value_dim * bits // 8
        rows = (held - len(keys)) * key_bytes + (held - len(values)) * (lay.row_bytes - key_bytes)
        meta = len(keys) // group * 4 * lay.key_dim + len(values) * 4 * -(-lay.value_dim // group)
        assert (by_step(ledger, "resident_bytes")[:, i] == codes + rows).all()
        assert (by_step(ledger, "meta_resident_bytes")[:, i] == meta).all()


def test_a_page_of_the_layer_stays_while_any_head_needs_it():
    source, policy = lane(**LANES["plain"]), "h2o(hold=tokens(15)) >> recency(read=pages(3), page=4)"
    head, layer = (run(source, policy, allocator=a) for a in ("head", "layer"))
    live = placement(source, head["tiers"]) > 0
    pages = np.add.reduceat(live, np.arange(0, live.shape[2], 4), axis=2) > 0
    size = 4 * source.layer.row_bytes
    assert np.array_equal(by_step(head["ledger"], "resident_page_bytes"), pages.sum(2) * size)
    assert np.array_equal(by_step(layer["ledger"], "resident_page_bytes"), np.tile(pages.any(0).sum(1) * size, (3, 1)))
    assert set(differing(head, layer)) == {"ledger.resident_page_bytes"}


# ------------------------------------------------------------------------------------------------ heads
@pytest.mark.parametrize("policy", [p for p in ALL if "random" not in p and "adakv" not in p])  # its shares tie to the lower head
def test_permuted_kv_heads_permute_the_tables(policy):
    source = lane(**LANES["plain"])
    turn = np.array([2, 0, 1])
    q = (turn[:, None] * source.layer.group + np.arange(source.layer.group)).ravel()
    fields = {name: getattr(source, name)[turn] for name in ("k", "v", "k_pre")} | {
        name: getattr(source, name)[q] for name in ("mass", "wo_norm")
    }
    stats = dataclasses.replace(source.q_stats, mean=source.q_stats.mean[q], covariance=source.q_stats.covariance[q])
    fields |= {"q_stats": stats, "before": source.before[:, q]}
    turned = dataclasses.replace(source, q=source.q[:, q], window_q=source.window_q[:, q], _one={}, **fields)
    a, b = run(source, policy, plans=True), run(turned, policy, plans=True)
    for name in ROWS:
        for column, back in (("kv_head", turn), ("q_head", q)):
            if column in b[name]:
                b[name][column] = np.array([back[int(x)] if x >= 0 else x for x in b[name][column]])
    # What a layer remembers, and a learned index, is told of head 0.
    once = {"events.state_bytes"} if any(name in str(policy) for name in ("qevict", "tova", "r_kv")) else set()
    learned = {f"ledger.{name}" for name in ("index_bytes", "index_resident_bytes", "write_bytes")}
    assert set(differing(a, b)) <= once | (learned if "dsa" in str(policy) else set())
    assert np.sum(a["events"].get("state_bytes", 0)) == np.sum(b["events"].get("state_bytes", 0))


def test_a_job_for_some_heads_is_that_of_all_of_them():
    source = lane(**LANES["plain"])
    for policy in ("h2o(hold=tokens(15)) >> quest(read=pages(2), page=4)", "kivi(group=2, residual=8)"):
        whole, some = run(source, policy, plans=True), run(source, policy, plans=True, heads=(0, 2))
        for name in ("ledger", "tiers", "events"):
            keep = np.isin(whole[name]["kv_head"].astype(int), [0, 2])
            whole[name] = {c: x[keep] for c, x in whole[name].items()}
        assert differing(whole, some, names=("ledger", "tiers", "events")) == []
        assert sorted(set(some["heads"]["q_head"].tolist())) == [0, 1, 4, 5]
