"""Laws of windows in tiers: budgets, bytes recounted from where every row lies, the host and SSD, encoding again."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest

from kvsim.engine import evolve as evolving
from kvsim.engine.evolve import evolve
from kvsim.policies import allocate
from kvsim.policies.keep.qevict import qevict
from kvsim.units import share
from tests.engine.lanes import by_step, chain, differing, first_steps, lane, placement, run

BASE = "sinks=2, window=4, period=3, recent=6"
POLICIES = [
    f"qevict(hold=share(0.5), {BASE})",
    f'qevict(hold=tokens(30), {BASE}, scope="head", score="defensive", bits=3)',
    f'qevict(hold=share(0.5), {BASE}, promotion="never", score="critical", offset=1)',
    f'qevict(hold=share(0.5), {BASE}, promotion="shadow", score="snapkv", domain="post")',
    f'qevict(hold=share(0.4), {BASE}, requantise="each", score_from="birth", init="window", scope="head")',
    f'qevict(hold=share(0.3), {BASE}, host=tokens(6), ssd=share(0.1), scope="head")',
    f"qevict(hold=share(0.3), {BASE}, host=share(0.1), quant_share=0.5, decay=0.5)",
    f"qevict(hold=share(0.3), {BASE}, ssd=tokens(9)) >> quest(read=pages(4), page=4)",
]
AWAY = [p for p in POLICIES if "host" in p or "ssd" in p]
MASSES = ("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass")


def roped(offset: float = 0.0, **options):
    """A lane whose keys are rotated, `offset` added to them before."""
    source = lane(**{"prompt": 60, "steps": 24, "kv_heads": 2, "key_dim": 8, "value_dim": 6, "size": 3.0} | options)
    rope = json.dumps({"kind": "default", "theta": 100.0, "rotary_dim": 6, "layout": "half", "scaling": None, "magnitude": 1.25})
    layer = dataclasses.replace(source.layer, rope=rope)
    assert source.k_pre is not None
    pre, pos = source.k_pre.astype(np.float64) + offset, np.arange(source.request.total)
    k = np.stack([layer.rotate(x, pos) for x in pre]).astype(np.float32)
    return dataclasses.replace(source, layer=layer, k=k, k_pre=pre.astype(np.float32), v=source.v + np.float32(offset))


@pytest.fixture(scope="module")
def runs():
    source = roped()
    return source, dict(zip(POLICIES, run(source, *POLICIES), strict=True))


def where(tier):
    """Tiers as the table has them -> 0 gone, 1 SSD, 2 host, 3 device; the better the higher."""
    return np.where(tier & 3 > 0, 3, np.where(tier & 8 > 0, 2, np.where(tier & 16 > 0, 1, 0)))


def coded_bytes(keep, layer, mask):
    """Codes and scales of the rows that a mask names, window by window."""
    pos = np.flatnonzero(mask)
    windows = len({(p - keep.sinks - keep.offset) // keep.window for p in pos.tolist()})
    codes = len(pos) * layer.key_dim * keep.bits // 8 + len(pos) * layer.value_dim * keep.bits // 8
    return codes, windows * 4 * layer.key_dim + len(pos) * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_those_of_the_live_rows(runs, policy):
    source, tables = runs[0], runs[1][policy]
    keep, lay, tiers = chain(policy).part("keep"), source.layer, placement(source, tables["tiers"])
    ledger = {c: by_step(x, c) for x, c in ((tables["ledger"], c) for c in tables["ledger"] if c.endswith(("_bytes", "_tokens")))}
    for h, i in np.ndindex(tiers.shape[:2]):
        tier = tiers[h, i]
        full, coded, beside = tier & 3 == 2, tier & 3 == 1, tier & 4 > 0
        codes, scales = coded_bytes(keep, lay, coded)
        assert ledger["resident_bytes"][h, i] == full.sum() * lay.row_bytes + codes
        assert ledger["meta_resident_bytes"][h, i] == scales + sum(coded_bytes(keep, lay, beside))
        copies = (
            lay.row_bytes * (tier & 8 > 0).sum() if keep.promotion == "shadow" else sum(coded_bytes(keep, lay, where(tier) == 2))
        )
        assert ledger["host_resident_bytes"][h, i] == copies
        assert ledger.get("ssd_resident_bytes", np.zeros(tiers.shape[:2]))[h, i] == sum(coded_bytes(keep, lay, where(tier) == 1))
        held = (tier & 3 > 0).sum()
        assert (ledger["held_tokens"][h, i], ledger["quant_tokens"][h, i]) == (held, coded.sum())
        assert ledger["host_tokens"][h, i] == (tier >= 8).sum()
        assert ledger["visible_tokens"][h, i] == held + ledger["evicted_tokens"][h, i] + ((tier & 3 == 0) & (tier >= 8)).sum()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_event_leaves_more_than_the_budget(runs, policy):
    """Rows, codes and scales on the device after every cut, and beyond it; codes kept beside full rows are billed apart (A19)."""
    source, tables = runs[0], runs[1][policy]
    keep, lay, tiers = chain(policy).part("keep"), source.layer, placement(source, tables["tiers"])
    for i, t in enumerate(source.t.tolist()):
        if (i + 1) % keep.period:
            continue
        limit = allocate.hold_limit(keep, t + 1, source.request, lay) * lay.row_bytes
        for tier in tiers[:, i]:
            assert (tier & 3 == 2).sum() * lay.row_bytes + sum(coded_bytes(keep, lay, tier & 3 == 1)) <= limit
            for place, hold in ((2, keep.host), (1, keep.ssd)):
                if hold is not None:
                    most = allocate.to_tokens(hold, t + 1, source.request, lay) * lay.row_bytes
                    assert sum(coded_bytes(keep, lay, where(tier) == place)) <= most


@pytest.mark.parametrize("policy", POLICIES)
def test_events_count_windows_and_their_tokens(runs, policy):
    source, tables = runs[0], runs[1][policy]
    keep, tiers = chain(policy).part("keep"), placement(source, tables["tiers"])
    events = {c: by_step(tables["events"], c)[:, 1:] for c in tables["events"] if c not in ("kv_head", "asked_unit")}
    first = keep.sinks + keep.offset
    for h, i in np.ndindex(tiers.shape[:2]):
        t = int(source.t[i])
        assert (events["windows_aged_in"][h, i] is None) == bool((i + 1) % keep.period)
        if (i + 1) % keep.period == 0:
            ends = [(x + 1 - keep.recent - first) // keep.window for x in (t, t - keep.period)]
            assert events["windows_aged_in"][h, i] == max(0, ends[0]) - max(0, ends[1])
            assert events["aged_in"][h, i] == events["windows_aged_in"][h, i] * keep.window
            before, after = tiers[h, i - 1], tiers[h, i]
            assert events["windows_evicted"][h, i] * keep.window == events["evicted"][h, i]
            demoted = (before & 3 == 2) & (after & 3 != 2) & (where(after) > 0)
            assert events["windows_demoted"][h, i] * keep.window == demoted.sum()
            full = [{(p - first) // keep.window for p in np.flatnonzero(x & 3 == 2) if p >= first} for x in (before, after)]
            ranked_before, ranked = ({*range(max(0, end))} for end in (ends[1], ends[0]))
            a, b = full[0] & ranked_before, full[1] & ranked & ranked_before
            assert events["churn_full"][h, i] == pytest.approx(1 - len(a & b) / len(a | b) if a | b else 0)
        else:
            assert not any(events[c][h, i] for c in ("promoted", "demoted", "evicted", "aged_in", "requantised"))


@pytest.mark.parametrize("policy", POLICIES)
def test_masses_sum_to_one_and_the_parts_are_parts(runs, policy):
    heads = runs[1][policy]["heads"]
    assert np.allclose(sum(heads[m] for m in MASSES), 1, atol=2e-6)
    assert (heads["mass_quant"] + heads["mass_host"] <= heads["mass_recall"] + 1e-6).all()
    assert heads["mass_host"].any() == (policy in AWAY)


def test_every_policy_here_moves_windows_up_and_down(runs):
    for policy, tables in runs[1].items():
        assert sum(tables["events"]["promoted"] > 0) or 'promotion="never"' in policy, policy
        assert sum(tables["events"]["demoted"] > 0), policy


# ------------------------------------------------------------------------------------------------ the host and SSD
@pytest.mark.parametrize("policy", AWAY)
def test_what_is_fetched_and_moved(runs, policy):
    """Codes and scales of every fetched row are read where they lie; moves are the codes of the windows that changed places."""
    source, tables = runs[0], runs[1][policy]
    keep, lay, tiers = chain(policy).part("keep"), source.layer, placement(source, tables["tiers"])
    ledger, all_read = tables["ledger"], "quest" not in policy
    moved = 0
    for h, i in np.ndindex(tiers.shape[:2]):
        if i == 0:
            continue
        before, after, t = where(tiers[h, i - 1]), where(tiers[h, i]), int(source.t[i])
        before[t] = 3  # born here
        if all_read:
            for name, place in (("host", 2), ("ssd", 1)):
                fetched = sum(coded_bytes(keep, lay, before == place))
                assert by_step(ledger, f"{name}_read_bytes")[h, i] == fetched
        for name, changed in (("moved_in_bytes", after > before), ("moved_out_bytes", (after < before) & (after > 0))):
            assert by_step(ledger, name)[h, i] == sum(coded_bytes(keep, lay, changed))
            moved += changed.sum()
    assert moved


def test_a_host_that_holds_all_is_a_larger_device_that_reads_slower():
    """With room for every window off the device nothing is evicted, and what is read is the same as if it were coded here."""
    source = roped()
    there = run(source, f"qevict(hold=share(0.3), {BASE}, host=share(1))")
    assert not there["ledger"]["evicted_tokens"].any()
    assert (there["heads"]["mass_evicted"] < 1e-6).all()
    here = run(source, f"qevict(hold=share(0.3), {BASE})")
    assert (there["heads"]["mass_recall"] >= here["heads"]["mass_recall"] - 1e-6).all()
    assert (here["heads"]["mass_evicted"] > 0.1).any()


# ------------------------------------------------------------------------------------------------ encoding again
def test_encoding_again_changes_nothing_where_it_is_idempotent(runs):
    source, policy = runs[0], f'qevict(hold=share(0.4), {BASE}, requantise="{{}}")'
    never, each = (run(source, policy.format(x)) for x in ("never", "each"))
    assert each["events"]["requantised"].any()
    assert not never["events"]["requantised"].any()
    assert np.array_equal(placement(source, never["tiers"]) & 3, placement(source, each["tiers"]) & 3)
    assert np.allclose(never["heads"]["rel_l2"], each["heads"]["rel_l2"], rtol=1e-3, atol=1e-5)
    assert (never["ledger"]["meta_resident_bytes"] >= each["ledger"]["meta_resident_bytes"]).all()
    assert each["ledger"]["write_bytes"].sum() > never["ledger"]["write_bytes"].sum()


AGAIN = f'qevict(hold=share(0.4), {BASE}, requantise="each", scope="head", decay=0.2, domain="{{}}")'


@pytest.mark.parametrize("policy", [AGAIN.format("pre"), AGAIN.format("post"), AWAY[0]])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_what_codes_decode_to_later_does_not_change_what_was_read(policy, offset):
    """An offset that fp16 holds badly: then a second round of codes decodes to other numbers than the first."""
    source = roped(offset, steps=60, size=0.1 if offset else 3.0)
    if offset and "each" in policy:
        assert evolve(source, chain(policy)).recoded
    whole = run(source, policy)
    for steps in (7, 22, 45):
        assert differing(whole, run(first_steps(source, steps), policy), range(steps)) == []
    some = [2, 3, 8, 21, 39, 58]
    assert differing(whole, run(source, policy, steps=some), some) == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class recorded(qevict):
    """qevict that notes what attention it was shown."""

    act = "for tests"
    shown: ClassVar[list] = []

    def step(self, state, seen):
        self.shown.append(
            [
                dict(zip(pos[ok].tolist(), a[:, ok].T, strict=True))
                for pos, ok, a in zip(seen.pos, seen.valid, seen.a, strict=True)
            ]
        )
        return super().step(state, seen)


def test_its_own_attention_is_over_what_codes_decode_to_now(monkeypatch):
    """Whether the keys of a block of steps are gathered anew, or were changed in their place when codes were."""
    source = roped(1000.0, steps=60, size=0.1)
    policy = recorded(
        hold=share(0.4), sinks=2, window=4, period=3, recent=6, requantise="each", scope="head", decay=0.2, domain="post"
    )
    logs = []
    for rows in (64, 2):
        monkeypatch.setattr(evolving, "OBSERVED_ROWS", rows)
        recorded.shown.clear()
        evolve(source, chain(policy))
        logs.append(list(recorded.shown))
    for a, b in zip(*logs, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.keys() == y.keys()
            assert all(np.allclose(x[p], y[p], rtol=1e-7, atol=0) for p in x)


# ------------------------------------------------------------------------------------------------ baselines and scopes
def test_windows_that_were_coded_never_come_back_when_promotion_is_never(runs):
    source, policy = runs[0], POLICIES[2]
    tiers = placement(source, runs[1][policy]["tiers"]) & 3
    for t in range(1, tiers.shape[1]):
        assert not ((tiers[:, t - 1] == 1) & (tiers[:, t] == 2)).any()
    assert not runs[1][policy]["events"]["promoted"].any()
    assert (tiers == 1).any()


def test_one_kv_head_decides_alike_in_both_scopes():
    source = roped(kv_heads=1)
    layer, head = (run(source, f'qevict(hold=share(0.5), {BASE}, scope="{scope}")') for scope in ("layer", "head"))
    assert differing(layer, head) == []


def test_kv_heads_decide_apart_in_the_scope_of_a_head(runs):
    source = runs[0]
    layer, head = (
        placement(source, run(source, f'qevict(hold=share(0.5), {BASE}, scope="{s}")')["tiers"]) for s in ("layer", "head")
    )
    assert np.array_equal(layer[0], layer[1])
    assert not np.array_equal(head[0], head[1])


def test_kv_heads_in_another_order_are_the_same_heads():
    source, turn = roped(), np.array([1, 0])
    q = (turn[:, None] * source.layer.group + np.arange(source.layer.group)).ravel()
    fields = {n: getattr(source, n)[turn] for n in ("k", "v", "k_pre")} | {n: getattr(source, n)[q] for n in ("mass", "wo_norm")}
    other = dataclasses.replace(source, q=source.q[:, q], window_q=source.window_q[:, q], _one={}, **fields)
    for policy in (POLICIES[1], POLICIES[4], POLICIES[5]):
        a, b = run(source, policy), run(other, policy)
        for name in ("ledger", "heads", "tiers", "events"):
            for column, back in (("kv_head", turn), ("q_head", q)):
                if column in b[name]:
                    b[name][column] = np.array([back[int(x)] for x in b[name][column]])
        assert differing(a, b) == []


def test_enough_room_codes_and_keeps_every_window(runs):
    ledger = run(runs[0], f"qevict(hold=share(1), {BASE}, quant_share=1)")["ledger"]
    assert not ledger["evicted_tokens"].any()
    assert (ledger["quant_tokens"] > 40).all()
