"""What a keep is shown of its rows beside their attention: norms and the future, as declared, aligned with the slots."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest

from kvsim.geometry import FUTURE, KEY_NORM, KEYS, QUERIES, VALUES, WO_NORM, Window
from kvsim.policies.protocol import Keep, Ranking, State
from kvsim.units import tokens
from tests.engine.lanes import chain, lane, run
from tests.engine.twin import Twin

LOOKS: list = []


@dataclass(frozen=True)
class looking(Keep):
    """Drops all but seven tokens, by a score that leaves holes."""

    wants: frozenset = frozenset({WO_NORM, KEY_NORM, KEYS, VALUES, QUERIES, Window(3), FUTURE})
    hold = tokens(7)

    @property
    def needs(self):
        return self.wants

    def start(self, prefix, seen):
        LOOKS.append(copy.deepcopy(seen))  # its arrays are views of what is cut next
        if self.wants:
            LOOKS.append(
                {name: getattr(prefix, name)() for name in ("wo_norm", "key_norm", "keys", "values", "future")}
                | {"where": prefix.where, "last_queries": prefix.last_queries(3)}
            )
        return State(), self.step(State(), seen, first=True)

    def step(self, state, seen, first=False):
        if not first:
            LOOKS.append(copy.deepcopy(seen))
        return Ranking(np.sin(seen.pos * 7.0 + np.arange(len(seen.pos))[:, None]))


@pytest.fixture(autouse=True)
def clean():
    LOOKS.clear()


@pytest.mark.parametrize(("window", "dim"), [(None, 4), (9, 4), (None, 40)])  # also rows of more numbers than there are slots
def test_every_slot_shows_its_own_row(window, dim):
    source = lane(prompt=15, steps=10, group=3, window=window, dtype="float16", key_dim=dim)
    twin = Twin(source, chain("oracle_keep(hold=tokens(9))"))
    run(source, looking())
    seen, prompt, *later = LOOKS
    first = source.layer.first_visible(14)
    assert np.array_equal(prompt["wo_norm"], source.wo_norm[:, first:15])
    assert np.array_equal(prompt["wo_norm"].reshape(seen.wo_norm.shape), seen.wo_norm)
    assert np.array_equal(prompt["key_norm"], seen.key_norm)
    assert np.array_equal(prompt["future"], seen.future)
    assert np.array_equal(prompt["keys"], seen.keys)
    assert np.array_equal(prompt["values"], seen.values)
    assert prompt["where"] == (7, 3)
    assert np.array_equal(prompt["last_queries"], source.window_q[-3:].reshape(3, 2, 3, dim))
    assert seen.q is None
    for i, now in enumerate([seen, *later], -1):
        assert now.step == i
        for h, s in np.argwhere(now.valid):
            p = now.pos[h, s]
            assert np.array_equal(now.wo_norm[h, :, s], source.wo_norm[3 * h : 3 * h + 3, p])
            assert np.isclose(now.key_norm[h, s], np.linalg.norm(source.k[h, p].astype(float)))
            assert np.isclose(now.future[h, s], twin.paid[i + 1 :, h, p].sum(), atol=1e-12)
            assert np.array_equal(now.keys[h, s], source.k[h, p].astype(float))
            assert np.array_equal(now.values[h, s], source.v[h, p].astype(float))
        assert now.keys.shape == (*now.pos.shape, dim)
        assert i < 0 or np.array_equal(now.q, source.q[i].reshape(2, 3, dim))
        assert not now.future[~now.valid].any()
        assert not now.values[~now.valid].any()


def test_what_was_not_asked_for_is_not_shown():
    run(lane(), looking(wants=frozenset()))
    assert all(
        x is None for seen in LOOKS for x in (seen.wo_norm, seen.key_norm, seen.keys, seen.values, seen.q, seen.future, seen.a)
    )


def test_prompt_queries_are_counted_as_far_as_they_see():
    from kvsim.engine.source import Prefix

    for window in (None, 4):
        source = lane(prompt=10, window=window)
        seen = [[p for p in range(10) if source.layer.first_visible(t) <= p <= t] for t in range(10)]
        want = [sum(p in row for row in seen) for p in range(source.layer.first_visible(9), 10)]
        assert Prefix(source, frozenset(), "x").queries().tolist() == [want] * 2
