"""Stopping rules against loops that open one round after the other, over scores made for the purpose: ties, forced pages, caps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvsim.engine.pages import Pages
from kvsim.engine.stop import DOUBT, Ordered, certificate, depths
from kvsim.kernels.dense import LOG2E
from kvsim.policies.rules import Rule, exact, gap, mass, top_p
from kvsim.units import pages, tokens
from tests import naive

SCENES = 1500
FAR = 10**6


@dataclass
class Scene:
    """One row: pages in the order of their bounds, the forced ones first; tokens' logits, page by page. A soft cap bends both."""

    bound: list[float]
    tokens: list[list[float]]
    forced: int
    softcap: float

    def bent(self, x):
        return [self.softcap * float(np.tanh(y / self.softcap)) if self.softcap else y for y in x]


def scene(rng) -> Scene:
    many, size = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    ties, spread = rng.random() < 0.5, float(rng.choice([0.5, 3, 40]))
    draw = (lambda n: rng.integers(-3, 4, n) * 1.0) if ties else (lambda n: rng.standard_normal(n) * spread)
    tokens = [draw(int(rng.integers(1, size + 1))).tolist() for _ in range(many)]
    loose = np.abs(draw(many)) if rng.random() < 0.7 else np.zeros(many)  # zeros: every bound is the best token, as with S = 1
    bound = np.array([max(t) for t in tokens]) + loose
    forced = int(rng.integers(0, many + 1)) if rng.random() < 0.5 else 0
    order = np.lexsort((np.arange(many), np.where(np.arange(many) < forced, 0, -bound), np.arange(many) >= forced))
    return Scene([float(bound[p]) for p in order], [tokens[p] for p in order], forced, float(rng.choice([0, 0, 2, 30])))


class Known:
    """stop.Truth of one scene."""

    def __init__(self, s: Scene):
        self.all = [x for page in s.tokens for x in page]
        self.logits = [s.bent(page) for page in s.tokens]

    def peak(self, _):
        return np.array([[[max(x) for x in self.logits]]])

    def mass(self, _):
        top = max(map(max, self.logits))
        return np.array([[[sum(2.0 ** (y - top) for y in x) for x in self.logits]]])

    def top(self, _):
        return np.array([[max(map(max, self.logits))]])

    def kth(self, r):
        return np.array([[sorted(self.all, reverse=True)[r - 1] if r <= len(self.all) else -np.inf]])

    def size(self):
        return np.array([[max(map(abs, self.all))]])


def told(s: Scene, beyond: int = 2) -> Ordered:
    """With `beyond` places for pages that do not exist."""
    many, none = len(s.bound), [-np.inf] * beyond
    order = np.arange(many + beyond, dtype=np.int32).reshape(1, 1, -1)
    rows = np.array([len(t) for t in s.tokens] + [0] * beyond).reshape(1, 1, -1)
    plain, bent = (np.array([*x, *none]).reshape(1, 1, -1) for x in (s.bound, s.bent(s.bound)))
    return Ordered(
        Pages(np.arange(many), np.zeros(1, np.int64), 1), order, plain, bent, rows, np.array([[many]]), np.array([[s.forced]])
    )


class Padded(Known):
    """Truth has no mass where there is no page."""

    def mass(self, _):
        return np.concatenate([super().mass(_), np.zeros((1, 1, 2))], -1)


def depth(rule: Rule, s: Scene, cap: int = FAR, floor: int = 0) -> tuple[int, int, bool | None]:
    got = depths(rule, told(s), np.array([[cap]]), np.array([[floor]]), Padded(s))
    return int(got.pages[0, 0]), int(got.rounds[0, 0]), None if got.certified is None else bool(got.certified[0, 0])


def scenes(seed: int, many: int = SCENES):
    rng = np.random.default_rng(seed)
    for _ in range(many):
        yield scene(rng), rng


def test_exact_stops_where_a_loop_does():
    for s, rng in scenes(0):
        r, batch, cap = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.choice([FAR, 1, 2, 5]))
        want = naive.opened(naive.top_found(s.bound, s.tokens, r), len(s.bound), s.forced, batch, cap)
        assert depth(exact(r=r, batch=batch), s, cap) == want, s


def test_mass_stops_where_a_loop_does():
    for s, rng in scenes(1):
        eps, batch, cap = (
            float(rng.choice([0.01, 0.05, 0.25, 0.5, 0.9])),
            int(rng.integers(1, 4)),
            int(rng.choice([FAR, 1, 2, 5])),
        )
        bound, tokens, rows = s.bent(s.bound), [s.bent(t) for t in s.tokens], [len(t) for t in s.tokens]
        every = [naive.unread_bound(bound, rows, tokens, k) for k in range(len(bound) + 1)]
        if min(abs(e - eps) for e in every) < 1e-12:  # a tie that the last bit decides
            continue
        want = naive.opened(lambda k, every=every, eps=eps: every[k] <= eps, len(bound), s.forced, batch, cap)
        assert depth(mass(eps=eps, batch=batch), s, cap) == want, s


def test_the_certificate_is_never_below_what_is_unread():
    for s, _ in scenes(2):
        bound, tokens, rows = s.bent(s.bound), [s.bent(t) for t in s.tokens], [len(t) for t in s.tokens]
        got = certificate(told(s), Padded(s))[0, 0]
        for k in range(len(bound) + 1):
            assert got[k] >= naive.unread_share(tokens, k) * (1 - 1e-12)
            assert got[k] == pytest.approx(naive.unread_bound(bound, rows, tokens, k), rel=1e-11, abs=1e-300)
        assert (np.diff(got) <= 1e-15).all()  # reading a page never raises it
        assert (got[len(bound) :] == 0).all()


def test_top_p_is_the_shortest_prefix():
    for s, rng in scenes(3):
        p, cap, rows = float(rng.choice([0.3, 0.5, 0.9, 1.0])), int(rng.choice([FAR, 1, 3])), [len(t) for t in s.tokens]
        share = [naive.estimated(s.bent(s.bound), rows, k) for k in range(len(rows) + 1)]
        if min(abs(x - (p - 1e-12)) for x in share) < 1e-13:
            continue
        need = next((k for k in range(1, len(rows) + 1) if share[k] >= p - 1e-12), len(rows))
        assert depth(top_p(p=p), s, cap) == (min(len(rows), max(s.forced, min(need, cap))), 1, None), s


def test_gap_is_the_first_fall():
    for s, rng in scenes(4):
        least, floor, cap, many = (
            float(rng.choice([0, 0.5, 1, 3])),
            int(rng.integers(1, 5)),
            int(rng.integers(1, 9)),
            len(s.bound),
        )
        rule = gap(min=least / LOG2E, floor=pages(1), cap=pages(9))
        falls = [s.bound[k - 1] - s.bound[k] if k < many else np.inf for k in range(1, many + 1)]
        if any(0 < abs(f - least) < 1e-12 for f in falls):
            continue
        good = [k for k in range(max(floor, s.forced + 1), min(cap, many) + 1) if falls[k - 1] / LOG2E >= rule.min]
        assert depth(rule, s, cap, floor) == (min(many, max(s.forced, good[0] if good else cap)), 1, None), (s, falls)


# ------------------------------------------------------------------------------------------------ by hand
def of(bound, *tokens, forced=0, softcap=0.0):
    return Scene(list(map(float, bound)), [list(map(float, t)) for t in tokens], forced, softcap)


def test_the_four_pages_of_the_paper():
    s = of((14, 12, 10, 4), (3, 1), (2, 2), (10, 0), (1, -1))
    assert [depth(exact(r=r), s)[0] for r in (1, 2, 3)] == [3, 4, 4]
    assert depth(exact(r=1), s) == (3, 3, True)
    assert depth(exact(r=1, batch=2), s) == (4, 2, True)
    assert depth(exact(r=1), s, cap=2) == (2, 2, False)


def test_the_two_steps_of_the_mass_example():
    q, keys = np.sqrt(2) * np.array([2, 0.5]), [[(4, 0), (3.5, 0.5)], [(1, 1), (-1, 2)], [(0, -2), (-2, 0)]]
    tokens = [[float(q @ k / np.sqrt(2)) * LOG2E for k in page] for page in map(np.array, keys)]
    s = of(np.array([8.25, 3, 0]) * LOG2E, *tokens)
    assert certificate(told(s), Padded(s))[0, 0, 1:3] == pytest.approx([0.009517, 0.000454], abs=1e-6)
    assert [naive.unread_share(tokens, k) for k in (1, 2)] == pytest.approx([0.002939, 0.0000877], abs=1e-6)
    assert [depth(mass(eps=e), s)[0] for e in (0.01, 0.009, 0.0004)] == [1, 2, 3]


def test_more_tokens_than_there_are_means_all():
    s = of((5, 4), (5,), (1,))
    assert depth(exact(r=2), s) == (2, 2, True)
    assert depth(exact(r=3), s) == (2, 2, True)
    assert depth(exact(r=3), s, cap=1) == (1, 1, False)


def test_forced_pages_alone_may_prove_it_and_are_read_below_any_cap():
    s = of((9, 9, 3), (9,), (8,), (2,), forced=2)
    assert depth(exact(r=2), s) == (2, 0, True)
    assert depth(exact(r=2), s, cap=1) == (2, 0, True)
    assert depth(exact(r=3), s, cap=1) == (2, 0, False)
    assert depth(mass(eps=0.001), s, cap=1) == (2, 0, False)
    assert depth(top_p(p=0.1), s, cap=1)[0] == depth(gap(min=0, floor=tokens(1), cap=tokens(1)), s, cap=1)[0] == 2


def test_far_above_a_soft_cap_logits_still_differ():
    s = of((900, 800, 700), (900,), (800,), (700,), softcap=2.0)
    assert s.bent(s.bound) == [2.0, 2.0, 2.0]
    assert depth(exact(r=1), s) == (1, 1, True)


def test_numbers_closer_than_float64_can_tell_count_as_equal():
    s = of((10, 7 - 3 * DOUBT), (10,), (1,))
    s.tokens[0].append(7.0)
    assert depth(exact(r=2), s) == (2, 2, True)
    s.bound[1] = 7 - 30 * DOUBT
    assert depth(exact(r=2), s) == (1, 1, True)


def test_an_unbounded_page_proves_nothing_until_it_is_read():
    s = of((1e200, 5, 1), (3,), (2,), (1,))
    got = certificate(told(s), Padded(s))[0, 0]
    assert (got[0], got[3]) == (1, 0)
    assert got[1:3] == pytest.approx([(2**5 + 2**1) / (2**3 + 2**5 + 2**1), 2**1 / (2**3 + 2**2 + 2**1)])
    assert depth(exact(r=1), s)[0] == 2
    assert depth(mass(eps=0.2), s)[0] == 2
