"""The life of a page and its box: any sequence of operations against lists of plain Python, and every bug of such a life planted once."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from kvsim.codecs.minmax import minmax
from kvsim.errors import WrongUse
from kvsim.paging import Mirror, Pool, inflation

SEQUENCES = int(os.environ.get("KVSIM_SEQUENCES", "150"))  # `make test-pages` runs 10 000
SLOTS, SIZE, DIM = 12, 4, 2
CODECS = {
    "exact": None,
    "per page": minmax(2, "tokens", SIZE),
    "per pair": minmax(2, "tokens", 2),
    "per token": minmax(2, "channels"),
}
KEYS = st.lists(st.tuples(*[st.integers(-4, 4)] * DIM), min_size=1, max_size=6)


class Page(list):
    """The rows of one page; requests that share it hold the same object."""


class Life(RuleBasedStateMachine):
    """Naive twin: {request: [Page, ...]}; who shares a page is found by looking at all requests."""

    pool = Pool
    codec = None
    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.real = self.pool(SLOTS, SIZE, DIM, self.codec)
        self.mirror, self.model = Mirror(self.real), {}

    def own(self, request):
        """The request's last page, not shared."""
        pages = self.model[request]
        if sum(p is pages[-1] for other in self.model.values() for p in other) > 1:
            pages[-1] = Page(pages[-1])
        return pages[-1]

    def room(self, new):
        """Whether new pages, and a copy, surely fit."""
        return len({id(p) for pages in self.model.values() for p in pages}) + new + 1 <= SLOTS

    @rule(target=requests)
    def open(self):
        request = self.real.open()
        self.model[request] = []
        return request

    @rule(request=requests, keys=KEYS)
    def append(self, request, keys):
        if not self.room(-(-len(keys) // SIZE)):
            return
        self.real.append(request, np.array(keys, float))
        pages = self.model[request]
        for key in keys:
            if not pages or len(pages[-1]) == SIZE:
                pages.append(Page())
            page = self.own(request)
            page.append(np.array(key, float))
            if self.codec and len(page) % self.codec.tokens == 0:
                group = page[-self.codec.tokens :]
                page[-self.codec.tokens :] = list(self.codec.roundtrip(np.array([group]))[0])

    @rule(target=requests, request=requests)
    def fork(self, request):
        new = self.real.fork(request)
        self.model[new] = list(self.model[request])
        return new

    @rule(request=requests, part=st.floats(0, 1))
    def rollback(self, request, part):
        pages = self.model[request]
        length = sum(map(len, pages))
        n = round(part * length)
        if not self.room(0):
            return
        self.real.rollback(request, n)
        while n and n >= len(pages[-1]):
            n -= len(pages.pop())
        if n:
            del self.own(request)[-n:]

    @rule(request=consumes(requests))
    def free(self, request):
        self.real.free(request)
        del self.model[request]

    @invariant()
    def every_request_reads_its_own_keys(self):
        for request, pages in self.model.items():
            want = [row for page in pages for row in page]
            assert np.array_equal(self.real.read(request), np.array(want).reshape(-1, DIM))

    @invariant()
    def every_box_is_that_of_the_valid_keys(self):
        for request, pages in self.model.items():
            for boxes in (self.real.boxes(request), self.mirror.boxes(request)):
                for got, ends in zip(boxes, (np.min, np.max), strict=True):
                    assert np.array_equal(got, np.array([ends(page, 0) for page in pages]).reshape(-1, DIM))

    @invariant()
    def a_page_is_resident_once_and_read_once_per_request(self):
        pages = [p for mine in self.model.values() for p in mine]
        distinct = len({id(p) for p in pages})
        assert self.real.resident_pages == distinct
        assert self.real.billed({r: range(len(p)) for r, p in self.model.items()}) == (len(pages), distinct)
        assert len(self.real.free_pages) == len(set(self.real.free_pages)) == SLOTS - distinct


def lived(pool=Pool, codec=None, examples=SEQUENCES, **options):
    machine = type("Machine", (Life,), {"pool": pool, "codec": codec})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.parametrize("codec", CODECS)
def test_any_sequence_of_operations(codec):
    lived(codec=CODECS[codec], examples=max(1, SEQUENCES // len(CODECS)))


class Stale(Pool):
    def _rescan(self, page):
        """Leaves the box as wide as it was."""


class SharedOpenPage(Pool):
    def _own(self, request):
        return self.tables[request][-1]


class ReusedSlot(Pool):
    def _take(self):
        page = self.free_pages[-1]
        lo, hi = self.lo[page].copy(), self.hi[page].copy()
        taken = super()._take()
        if self.version[page]:
            self.lo[page], self.hi[page] = lo, hi
        return taken


class ForgottenVersion(Pool):
    def rollback(self, request, n, rescan=True):
        kept = self.version.copy()
        super().rollback(request, n, rescan)
        self.version = kept


@pytest.mark.parametrize("codec", ["exact", "per page"])
@pytest.mark.parametrize("bug", [Stale, SharedOpenPage, ReusedSlot, ForgottenVersion])
def test_every_bug_of_a_pages_life_is_caught(bug, codec):
    with pytest.raises(AssertionError):
        lived(bug, CODECS[codec], examples=300, phases=[Phase.generate], derandomize=True, database=None)


# ------------------------------------------------------------------------------------------------ worked
def test_the_page_of_the_card():
    pool = Pool(4, 3, 2)
    a = pool.open()
    pool.append(a, np.array([(1, 2), (-1, 4), (-2, 5)], float))
    q = np.array([(0.0, 1.0)])
    pool.rollback(a, 1, rescan=False)
    assert [x.tolist() for x in pool.boxes(a)] == [[[-2, 2]], [[1, 5]]]
    assert inflation(pool, a, q).tolist() == [[5 - 4]]
    b = pool.open()
    pool.append(b, np.array([(1, 2), (-1, 4), (-2, 5)], float))
    pool.rollback(b, 1)
    assert [x.tolist() for x in pool.boxes(b)] == [[[-1, 2]], [[1, 4]]]
    assert inflation(pool, b, q).tolist() == [[0]]
    assert pool.rescanned_rows == 2


def test_a_prefix_is_resident_once_and_branches_write_their_own_tail():
    pool = Pool(16, 4, 1)
    a = pool.open()
    pool.append(a, np.arange(10.0)[:, None])
    beams = [a] + [pool.fork(a) for _ in range(3)]
    assert pool.resident_pages == 3
    assert pool.copied_pages == 0
    for i, beam in enumerate(beams):
        pool.append(beam, np.array([[100.0 + i]]))
    assert pool.copied_pages == 3  # the last to write has the open page for itself by then
    assert pool.resident_pages == 2 + 4
    assert [pool.read(b)[-1, 0] for b in beams] == [100, 101, 102, 103]
    assert pool.billed({b: [0, 2] for b in beams}) == (8, 5)
    pool.free(a)
    assert pool.resident_pages == 5
    assert pool.read(beams[1])[:10, 0].tolist() == [*range(10)]


def test_a_mirror_fetches_only_what_changed():
    pool = Pool(8, 4, 1)
    a = pool.open()
    pool.append(a, np.arange(10.0)[:, None])
    mirror = Mirror(pool)
    for _ in range(2):
        mirror.boxes(a)
    assert mirror.fetched == 3
    pool.append(a, np.array([[10.0]]))
    mirror.boxes(a)
    mirror.boxes(pool.fork(a))  # the same pages
    assert mirror.fetched == 4


# ------------------------------------------------------------------------------------------------ refusals
def test_what_cannot_be_is_refused_by_name():
    pool = Pool(2, 4, 1)
    a = pool.open()
    pool.append(a, np.zeros((5, 1)))
    before = [x.copy() for x in (pool.rows, pool.refs, pool.version)]
    with pytest.raises(WrongUse, match=r"rollback: 6 tokens of request 1, which has 5; take 0 to 5"):
        pool.rollback(a, 6)
    with pytest.raises(WrongUse, match="rollback: -1 tokens"):
        pool.rollback(a, -1)
    with pytest.raises(WrongUse, match=r"append: keys of shape \(1, 2\), expected \[n, 1\]"):
        pool.append(a, np.zeros((1, 2)))
    assert all(np.array_equal(x, y) for x, y in zip(before, (pool.rows, pool.refs, pool.version), strict=True))
    with pytest.raises(WrongUse, match=r"all 2 pages are taken; free\(\) a request, or make the pool with more slots"):
        pool.append(a, np.zeros((9, 1)))
    pool.free(a)
    for call in (pool.fork, pool.free, pool.boxes, lambda r: pool.append(r, np.zeros((1, 1))), lambda r: pool.rollback(r, 0)):
        with pytest.raises(WrongUse, match=r"request 1 was freed; open\(\) and fork\(\) give"):
            call(a)
    with pytest.raises(WrongUse, match="request 9 was never opened"):
        pool.fork(9)
    with pytest.raises(WrongUse, match="groups of 3 rows do not fill pages of 4"):
        Pool(2, 4, 1, minmax(2, "tokens", 3))
    with pytest.raises(WrongUse, match=r"Pool\(slots=0, size=4, dim=1\): expected 1 or more of each"):
        Pool(0, 4, 1)


def test_a_rollback_that_finds_no_page_for_its_copy_does_nothing():
    pool = Pool(2, 4, 1)
    a = pool.open()
    pool.append(a, np.arange(7.0)[:, None])
    b = pool.fork(a)
    for n in (1, 5):
        with pytest.raises(WrongUse, match="all 2 pages are taken"):
            pool.rollback(b, n)
    assert pool.read(b)[:, 0].tolist() == [*range(7)]
    assert pool.boxes(b)[1].tolist() == [[3], [6]]
    pool.free(a)
    pool.rollback(b, 5)
    assert pool.boxes(b)[1].tolist() == [[1]]
    assert pool.resident_pages == 1
