"""What a ranking gave away (cards D5, D6) and the slack table, against one row at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine.slack import age_bucket
from kvsim.engine.source import Source
from kvsim.geometry import Layer, Request
from tests import naive
from tests.engine.lanes import lane, run


def worked_example(read):
    """The card's pages: bounds 14, 12, 10, 4 over best logits 3, 2, 10, 1. A key is split over two channels so that a box, which takes the best
    of each, bounds it from above: (best, bound - best) of one key and (bound - best, best) … of the other."""
    true, bound = np.array([3, 2, 10, 1.0]), np.array([14, 12, 10, 4.0])
    gap = bound - true
    keys = np.zeros((9, 2), np.float32)
    keys[0:8:2], keys[1:8:2] = np.stack([true, 0 * true], 1), np.stack([-gap, gap], 1)  # q·k of (1, 1): best, and 0
    keys[8] = -50
    layer = Layer(0, "full", 1, 1, 2, 2, 1.0, 16, "float32", among=(0,))
    request = Request(0, 8, 9, "synthetic", np.zeros(9, np.int8), ())
    q = np.ones((1, 1, 2), np.float32)
    source = Source(layer, request, keys[None], keys[None].copy(), np.array([0]), np.array([8]), q, q)
    return run(source, f'quest(read=pages({read}), page=2, tail="free")', explain=True, plans=True)


def test_the_cards_example():
    got = worked_example(2)
    explain = {c: x[0] for c, x in got["explain"].items()}
    assert got["plans"]["pages"][0] == [0, 1]
    assert explain["regret"] == 8
    assert explain["missed_pages"] == 1
    assert explain["displaced_slack"] == 12 - 10
    three = {c: x[0] for c, x in worked_example(3)["explain"].items()}
    assert (three["regret"], three["missed_pages"]) == (0, 0)
    assert np.isnan(three["displaced_slack"])


def naive_rows(source, got, page):
    """(head, step, page ids, scores, best logits, half diagonals): quest over all visible keys."""
    lay = source.layer
    for h, s in zip(got["explain"]["q_head"].tolist(), got["explain"]["step"].tolist(), strict=True):
        t, q = int(source.t[s]), source.q[s, h].astype(float)
        keys = source.rows("k", h // lay.group, np.arange(t + 1))
        parts = [keys[a : a + page] for a in range(0, t + 1, page)]
        score = np.array([naive.box_bound(q, [x.min(axis=0)], [x.max(axis=0)]) for x in parts]) * lay.scale
        best = np.array([(x @ q).max() for x in parts]) * lay.scale
        half = np.array([np.linalg.norm(x.max(axis=0) - x.min(axis=0)) / 2 for x in parts])
        yield h, s, score, best, half * np.linalg.norm(q) * lay.scale


@pytest.mark.parametrize("forced", ["", ", sinks=3, recent=6"])
def test_regret_against_one_row_at_a_time(forced):
    source = lane(prompt=50, steps=12, key_dim=8, seed=2)
    got = run(source, f"quest(read=pages(5), page=4{forced})", explain=True, plans=True)
    explain, plans = got["explain"], got["plans"]
    read = {(h, s): p for h, s, p in zip(plans["q_head"], plans["step"], plans["pages"], strict=True)}
    for i, (h, s, score, best, unit) in enumerate(naive_rows(source, got, 4)):
        t, ids = int(source.t[s]), np.arange(len(score))
        first, last = ids * 4, ids * 4 + 3
        must = (last >= t) | ((first < 3) | (last >= t + 1 - 6) if forced else False)
        oracle = ids[np.lexsort((ids, -best, ~must))][:5]
        mine = np.array(read[h, s])
        missed = np.setdiff1d(oracle, mine)
        assert explain["regret"][i] == pytest.approx(best[oracle].sum() - best[mine].sum(), abs=1e-6)
        assert explain["missed_pages"][i] == len(missed)
        if len(missed):
            lowest = score[mine[~must[mine]]].min()
            assert explain["displaced_slack"][i] == pytest.approx((lowest - best[missed]).mean(), abs=1e-6)
        some = unit > 0
        assert explain["slack_norm"][i] == pytest.approx(((score - best)[some] / unit[some]).mean(), rel=1e-5)
    assert explain["missed_pages"].any()


@pytest.mark.parametrize(
    "policy", ["quest(read=pages(2), page=4)", 'quest(read=pages(2), page=4, heads="share", index=boxes(n=2))']
)
def test_regret_and_slack_have_their_ends(policy):
    explain = run(lane(prompt=50, steps=12, size=5.0, dtype="bfloat16"), policy, explain=True)["explain"]
    assert (explain["regret"] >= 0).all()
    assert (
        (explain["slack_norm"] >= 0) & (explain["slack_norm"] <= 2)
    ).all()  # both ends of a box are within |q| · half of its middle
    if "share" not in policy:
        assert (explain["displaced_slack"][explain["missed_pages"] > 0] >= -1e-9).all()  # a bound cannot lose to less than itself


# ------------------------------------------------------------------------------------------------ slack by age of keys
def test_ages_are_told_apart_by_powers_of_two():
    assert age_bucket(np.array([0, 1, 2, 3, 4, 7, 8, 1023, 1024])).tolist() == [0, 1, 2, 2, 3, 3, 4, 10, 11]


@pytest.mark.parametrize("page", [4, 7])
def test_slack_by_age_against_one_page_at_a_time(page):
    source = lane(prompt=50, steps=12, key_dim=8, seed=3)
    got = run(source, f"quest(read=pages(3), page={page})", explain=True)
    found = {}
    for h, s, score, best, _ in naive_rows(source, got, page):
        for p, gap in enumerate(score - best):
            age = max(int(source.t[s]) - (p * page + page - 1), 0)
            for role in (-1, int(source.request.roles[source.t[s]])):
                found.setdefault((h, role, 1 << (age.bit_length() - 1) if age else 0), []).append(gap)
    table = got["slack"]
    assert set(table["page_size"]) == {page}
    assert set(table["key_dim"]) == {8}
    rows = list(zip(table["q_head"], table["role"], table["key_age"], strict=True))
    assert set(rows) == set(found)
    assert len(rows) == len(found)
    for i, key in enumerate(rows):
        assert table["pages"][i] == len(found[key])
        assert table["slack_mean"][i] == pytest.approx(np.mean(found[key]), rel=1e-6, abs=1e-9)
        assert table["slack_max"][i] == pytest.approx(max(found[key]), rel=1e-6, abs=1e-9)


def test_slack_by_age_is_over_the_steps_that_were_written_and_whatever_the_blocks():
    source = lane(prompt=130, steps=60, key_dim=16, kv_heads=1, group=9)
    policy, steps = "quest(read=pages(3), page=8)", [3, 4, 31, 58]
    some, whole = (run(source, policy, explain=True, steps=s)["slack"] for s in (steps, None))
    everyone = some["role"] == -1
    assert some["pages"][everyone].sum() == 9 * sum(-(-(int(source.t[s]) + 1) // 8) for s in steps)
    assert whole["pages"][whole["role"] == -1].sum() == whole["pages"][whole["role"] >= 0].sum()
