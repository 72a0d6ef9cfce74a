"""ZipCache: the paper's and the authors' averages, which rows get which width when, and what all of it costs."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import zipcache
from kvsim.conformance import check_policy
from kvsim.errors import WrongUse
from kvsim.geometry import ATTENTION, PREFILL_MASS, Window
from kvsim.policies.protocol import CODED, FULL, Seen, State
from kvsim.policies.store.zipcache import HIGH, LOW, seen_by
from tests.engine.lanes import by_step, lane, run


def test_averages_worked_by_hand():
    """Eight rows under uniform causal attention, probes 6, 7, 1 and 4."""
    probes = np.array([6, 7, 1, 4])
    sums = np.array([sum(1 / (u + 1) for u in probes if u >= i) for i in range(8)])
    assert sums.round(3).tolist() == [0.968, 0.968, 0.468, 0.468, 0.468, 0.268, 0.268, 0.125]
    assert (sums / seen_by(probes, 8, "tokens")).round(3).tolist() == [0.121, 0.138, 0.078, 0.094, 0.117, 0.089, 0.134, 0.125]
    assert (sums / seen_by(probes, 8, "probes")).round(3).tolist() == [0.242, 0.242, 0.156, 0.156, 0.156, 0.134, 0.134, 0.125]


def test_the_authors_divisor_favours_the_end_of_the_prompt():
    """The factor that it takes from a row of a long prompt of which a tenth are probes: ten at the start, one at the end."""
    probes = np.concatenate([np.arange(0, 4096, 20), np.arange(3891, 4096)])
    factor = seen_by(probes, 4096, "tokens") / seen_by(probes, 4096, "probes")
    assert factor[0] == pytest.approx(10, rel=0.01)
    assert factor[4095] == pytest.approx(1)


def seen(step, score, k, a=None, valid=None):
    n = len(k)
    pos = np.arange(n)[None]
    valid = np.ones((1, n), bool) if valid is None else valid
    tiers = np.array([k], np.uint8)
    return Seen(step, n - 1, pos, valid, tiers, tiers, np.array([n]), a, State({"score": np.array([score], float)}))


def test_the_prompt_is_ranked_once_and_ties_go_to_the_lower_position():
    k, v = zipcache().place(seen(-1, [5, 1, 3, 3, 2], [FULL] * 5))
    assert k.tolist() == v.tolist() == [[HIGH, LOW, HIGH, HIGH, LOW]]
    k, _ = zipcache(unimportant=0.2).place(seen(-1, [1, 1, 1, 1, 1], [FULL] * 5))
    assert k.tolist() == [[HIGH] * 4 + [LOW]]


def test_later_rows_are_ranked_by_one_query_and_older_ones_keep_their_width():
    policy, k = zipcache(period=3, unimportant=0.5), [CODED, CODED, FULL, FULL, FULL, FULL]
    a = np.array([[[0.5, 0.25, 0.5, 0.125, 0.25, 0.25], [0.5, 0.25, 0.0, 0.25, 0.5, 0.25]]])
    waits, _ = policy.place(seen(1, [0] * 6, k))
    assert waits.tolist() == [[1, 1, 0, 0, 0, 0]]
    event, _ = policy.place(seen(2, [9] * 6, k, a))
    assert event.tolist() == [
        [1, 1, HIGH, LOW, HIGH, LOW]
    ]  # sums 1/2, 3/8, 3/4, 1/2: of two equal ones the lower position is HIGH


def test_evicted_rows_are_not_ranked():
    valid = np.array([[True, False, True, True, False]])
    k, _ = zipcache(unimportant=0.34).place(seen(-1, [1, 0, 2, 3, 0], [FULL] * 5, valid=valid))
    assert k.tolist() == [[LOW, 0, HIGH, HIGH, 0]]


def test_three_bits_and_a_fifth():
    """.6 * 4 + .4 * 2 = 3.2 nominal bits, and nothing stays exact but the rows that wait."""
    source = lane(prompt=50, steps=7, key_dim=16, dtype="bfloat16")
    ledger = {
        c: by_step(x, c) for x in [run(source, "zipcache(period=5, window=8)")["ledger"]] for c in x if not c.startswith("_")
    }
    assert ledger["full_tokens"].tolist() == [[1, 2, 3, 4, 0, 1, 2]] * 2
    assert (ledger["coded_nominal_bits"] / ledger["coded_numbers"]) == pytest.approx(3.2)
    keys, values = 2 * 4 * 16, 50 * 4 + 2 * 2 * 16  # two sets: zeros and steps of channels; of each row, and the sets' divisors
    assert ledger["meta_resident_bytes"][0, 0] == keys + values
    assert ledger["resident_bytes"][0, 0] == 32 * 3.2 * 50 / 8 + 64
    assert (ledger["score_bytes"] > 0).tolist() == [[False] * 4 + [True] + [False] * 2] * 2  # one query in five is looked at


def test_tiers_tell_the_width():
    tiers = run(lane(prompt=20, steps=3), "zipcache(window=8)")["tiers"]
    [runs] = [r for r, s, h in zip(tiers["runs"], tiers["step"], tiers["kv_head"], strict=True) if (s, h) == (-1, 0)]
    assert {run["tier"] for run in runs} == {1}
    assert sum(run["stop"] - run["start"] for run in runs if run["level"] == LOW) == 8
    assert sum(run["stop"] - run["start"] for run in runs if run["level"] == HIGH) == 12


def test_needs():
    assert zipcache(window=7).needs == {ATTENTION, Window(7)}
    assert zipcache(probes="columns").needs == {ATTENTION, PREFILL_MASS}


@pytest.mark.parametrize("given", [{"probes": "columns", "period": 4}, {"divisor": "tokens", "window": 5, "period": 7}])
def test_laws(given):
    assert check_policy(zipcache(**given)) == []


REFUSED = {
    "random early queries are not in a trace": {"probes": "random"},
    "zipcache(high=9): expected 1 to 8 bits": {"high": 9},
    "zipcache(low=4): expected at most high=2": {"high": 2, "low": 4},
    "zipcache(unimportant=1.5)": {"unimportant": 1.5},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    with pytest.raises(WrongUse) as refused:
        zipcache(**REFUSED[words])
    assert words in str(refused.value)
