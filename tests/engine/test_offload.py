"""Offloading against a cache written out page by page, and what must be true of any cache."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.conformance import check_policy
from kvsim.errors import WrongUse
from kvsim.policies.language import parse
from tests.engine.lanes import by_step, differing, lane, run

SIZE = 4
PAGES = ("missed_pages", "missed_runs", "prefetched_pages", "prefetch_hits")


class Naive:
    """A list of pages on the device, the one that leaves first at its head. One kv head, `full()` kept."""

    def __init__(self, most, evict, prefetch):
        self.most, self.evict, self.prefetch = most, evict, prefetch
        self.cache, self.ahead, self.last, self.score = [], set(), {}, {}

    def step(self, t, asked, score):
        tail = t // SIZE
        if t % SIZE == 0:  # its only row was made here
            self.cache.append(tail)
            self.last[tail] = t
        ahead = sorted(p for p in self.ahead if p not in self.cache)
        missed = [p for p in sorted(asked) if p not in self.cache and p not in ahead]
        rows = sum((t % SIZE if p == tail else SIZE) for p in [*missed, *ahead])
        hits = sum(p in asked for p in ahead)
        self.cache += [p for p in asked if p not in self.cache]
        self.last |= dict.fromkeys(asked, t)
        self.score |= score
        self.cache.sort(key=lambda p: (self.score[p] if self.evict == "score" else 0, self.last[p], -p))
        self.cache = self.cache[max(0, len(self.cache) - self.most) :]
        near = {p + d for p in asked for d in ((-1, 0, 1) if self.prefetch == "neighbour" else (0,))}
        self.ahead = {p for p in near if 0 <= p <= tail and p not in self.cache} if self.prefetch else set()
        runs = sum(p - 1 not in missed for p in missed)
        held = sum(t % SIZE + 1 if p == tail else SIZE for p in self.cache)
        return {"missed_pages": len(missed), "missed_runs": runs, "prefetched_pages": len(ahead), "prefetch_hits": hits,
                "host_read_bytes": rows, "held_tokens": held, "_missed": missed}  # fmt: skip


def plans(got, source):
    """[kv head][step]: the pages that its query heads read."""
    out = [[set() for _ in source.steps] for _ in range(source.layer.kv_heads)]
    for h, i, pages in zip(got["plans"]["kv_head"], got["plans"]["step"], got["plans"]["pages"], strict=True):
        out[h][i] |= {*pages}
    return out


@given(
    st.integers(0, 2**32), st.sampled_from([7, 21, 44]), st.integers(1, 9), st.sampled_from(["None", '"last"', '"neighbour"']),
    st.sampled_from(["quest(read=pages(3), page=4)", 'quest(read=pages(2), page=4, tail="free")', "oracle(read=share(0.2), page=4)"]),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_a_cache_written_out(seed, prompt, most, prefetch, read):
    source = lane(prompt=prompt, steps=15, seed=seed)
    got = run(source, f"offload(device=pages({most}), prefetch={prefetch}) >> {read}", plans=True)
    read_pages = plans(got, source)
    mass = by_step(got["heads"], "mass_host", "q_head")
    for h in range(source.layer.kv_heads):
        twin = Naive(most, "lru", eval(prefetch))
        for i, t in enumerate(source.t.tolist()):
            want = twin.step(t, read_pages[h][i], dict.fromkeys(range(t // SIZE + 1), 0.0))
            want["host_read_bytes"] *= source.layer.row_bytes
            for column in want.keys() - {"_missed"}:
                assert by_step(got["ledger"], column)[h, i] == want[column], (column, h, i)
            if not want["_missed"]:
                assert not mass[2 * h : 2 * h + 2, i].any()


def test_the_page_of_lowest_score_leaves():
    """Pages score by their number here, and page 0 is read at every step: once there are two newer ones it is fetched every time."""
    source, read = lane(prompt=41, steps=15), "recency(read=pages(2), page=4, sinks=1)"
    by_score, by_use = (
        by_step(run(source, f'offload(device=pages(2), evict="{evict}") >> {read}')["ledger"], "missed_pages")
        for evict in ("score", "lru")
    )
    assert by_score.tolist() == [[2, 0, 0, 0, *[1] * 11]] * 2  # page 11 begins at the fourth step
    assert by_use.tolist() == [[2, *[0] * 14]] * 2


READS = [
    "quest(read=pages(3), page=4)",
    "oracle(read=pages(3), page=4)",
    "quest(read=mass(eps=0.3), page=4)",
    "everything(page=4)",
]


@pytest.mark.parametrize("read", READS)
def test_with_room_for_all_every_page_of_the_prompt_is_fetched_once(read):
    """And those made while decoding never."""
    source = lane(prompt=41, steps=15)
    got = run(source, f"offload(device=pages(99)) >> {read}", plans=True)
    for h, by in enumerate(plans(got, source)):
        assert by_step(got["ledger"], "missed_pages")[h].sum() == len({p for pages in by for p in pages if p * SIZE < 41})
        first = [i for i, pages in enumerate(by) if 10 in pages][:1]  # the page that the prompt left open: its rows so far
        rows = 4 * len({p for pages in by for p in pages if p < 10}) + sum(41 + i - 40 if i < 3 else 4 for i in first)
        assert by_step(got["ledger"], "host_read_bytes")[h].sum() == rows * source.layer.row_bytes


@pytest.mark.parametrize("keep", ["full()", "h2o(hold=tokens(30))", "streaming_llm(hold=tokens(20))"])
def test_a_larger_cache_never_misses_more(keep):
    source = lane(prompt=60, steps=25)
    missed = [
        by_step(run(source, f"{keep} >> offload(device=pages({n})) >> quest(read=pages(3), page=4)")["ledger"], "missed_pages")
        for n in (1, 2, 3, 5, 8, 99)
    ]
    assert all((a.cumsum(1) >= b.cumsum(1)).all() for a, b in pairwise(missed))
    assert missed[0].sum() > missed[-1].sum()


def test_oracle_reads_again_what_a_small_cache_let_go():
    """Misses beyond the first of every page are re-reads; a cache that holds what each step reads has fewer than one that holds half."""
    source, again = lane(prompt=61, steps=25), []
    for n in (2, 6, 99):
        got = run(source, f"offload(device=pages({n})) >> oracle(read=pages(4), page=4)", plans=True)
        distinct = [len({p for pages in by for p in pages if p * SIZE < 61}) for by in plans(got, source)]
        again.append(by_step(got["ledger"], "missed_pages").sum() - sum(distinct))
    assert again[0] > again[1] > again[2] == 0


def test_only_where_rows_are_changes():
    """What is read, weighed and lost is what it is without offloading."""
    source, read = lane(prompt=50, steps=12), "quest(read=pages(3), page=4)"
    for keep in ("full()", "h2o(hold=tokens(24))"):
        with_, without = (run(source, f"{keep} >> {o}{read}", plans=True) for o in ("offload(device=pages(3)) >> ", ""))
        moved = {"held_tokens", "full_tokens", "resident_bytes", "resident_page_bytes", "host_tokens", "host_resident_bytes"}
        moved |= {"host_read_bytes", "moved_out_bytes"}
        changed = differing(with_, without, names=("ledger", "heads", "plans"))
        assert {c.partition(".")[2] for c in changed} - set(PAGES) == moved | {"mass_host"}
        x = with_["ledger"]
        assert (x["held_tokens"] <= 12).all()
        assert np.array_equal(x["host_tokens"] + x["evicted_tokens"], x["visible_tokens"])


def test_summaries_on_the_host_are_scanned_from_there():
    source = lane(prompt=50, steps=5)
    here, there = (
        run(source, f'offload(device=pages(3), summaries="{s}") >> quest(read=pages(3), page=4)')["ledger"]
        for s in ("device", "host")
    )
    for gone, came in (("index_bytes", "host_read_bytes"), ("index_resident_bytes", "host_resident_bytes")):
        assert not there[gone].any()
        assert np.array_equal(there[came], here[came] + here[gone])


@pytest.mark.parametrize("refresh", [1, 3])
def test_the_same_rows_whatever_steps_are_written(refresh):
    source = lane(prompt=50, steps=20)
    policy = f'offload(device=pages(9), prefetch="last") >> quest(read=pages(3), page=4, refresh={refresh})'
    whole = run(source, policy)
    for steps in ([13], [0, 5, 6, 19]):
        assert differing(whole, run(source, policy, steps=steps), steps) == []


@pytest.mark.parametrize(
    "chain",
    ["offload(device=pages(3))", 'h2o(hold=tokens(20)) >> offload(device=share(0.3), evict="score", prefetch="neighbour")'],
)
def test_laws(chain):
    assert check_policy(f"{chain} >> quest(read=pages(2), page=4)") == []


REFUSED = {
    "offload(device=pages(1)) >> everything()": "expected a read part that reads pages, which everything() does not",
    'offload(device=pages(1), evict="score") >> everything(page=4)': '"lru": everything() gives pages no score',
    "qevict() >> offload(device=pages(1)) >> recency(read=pages(2))": "because it codes rows itself; leave out offload",
    "offload(device=3) >> recency(read=pages(2))": "a device budget is one of tokens(), pages()",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    with pytest.raises(WrongUse) as refused:
        parse(text)
    assert REFUSED[text] in str(refused.value)
