"""Summaries of pages that lost rows: made again from the rows left, or kept as they were written."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from kvsim.engine import reads
from kvsim.engine.pages import pages_of, versions
from kvsim.errors import WrongUse
from kvsim.policies.allocate import for_layer
from kvsim.policies.language import parse, parse_policy
from tests.engine.lanes import by_step, lane, placement, run

KEEPS = ("h2o(hold=tokens(24))", "streaming_llm(sinks=3, hold=tokens(20))", "snapkv(hold=tokens(20), window=4)")
PAGE = 4
LANES = ({"prompt": 41, "steps": 14}, {"prompt": 41, "steps": 14, "window": 30, "group": 3}, {"prompt": 3, "steps": 14})


def scored(source, policy):
    """[(kv head, step's t, page ids, scores f64[N, G, P])] of every block, and the tables."""
    seen, score = [], reads.Reader.score

    def noted(self, t, pages, *rest):
        found = score(self, t, pages, *rest)
        seen.append((self.head, t, pages.id, found))
        return found

    with mock.patch.object(reads.Reader, "score", noted):
        return run(source, policy, plans=True), seen


@pytest.mark.parametrize("options", LANES)
@pytest.mark.parametrize("keep", KEEPS)
def test_a_stale_box_is_that_of_all_rows_ever_written(keep, options):
    if "snapkv" in keep and options["prompt"] < 20:
        keep = "snapkv(hold=share(1), window=1)"
    source = lane(**options)
    for head, t, ids, score in scored(source, f'{keep} >> quest(read=pages(2), page={PAGE}, summaries="stale")')[1]:
        keys = source.rows("k", head, np.arange(source.request.total))
        for i, now in enumerate(t.tolist()):
            q = source.queries(head, slice(now - source.request.prompt, now - source.request.prompt + 1))[0].astype(float)
            for p, page in enumerate(ids.tolist()):
                if np.isfinite(score[i, :, p]).all():
                    rows = keys[page * PAGE : min((page + 1) * PAGE, now + 1)]
                    want = np.maximum(q * rows.min(0), q * rows.max(0)).sum(1)
                    assert np.allclose(score[i, :, p], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", KEEPS[:2])
def test_stale_is_looser_than_tight_and_both_are_bounds(keep):
    source = lane(prompt=41, steps=14)
    tight, stale = (scored(source, f'{keep} >> quest(read=pages(99), page={PAGE}, summaries="{s}")') for s in ("tight", "stale"))
    looser = 0
    for (_, _, _, a), (_, _, _, b) in zip(tight[1], stale[1], strict=True):
        live = np.isfinite(a)
        assert (b[live] >= a[live]).all()
        looser += int((b[live] > a[live]).sum())
    assert looser > 50
    for tables in (tight[0], stale[0]):
        assert (tables["heads"]["slack_mean"] >= -1e-6).all()
    assert (stale[0]["heads"]["slack_mean"] >= tight[0]["heads"]["slack_mean"] - 1e-6).all()


@pytest.mark.parametrize("rule", ["exact(r=3)", "mass(eps=0.2)"])
def test_a_rule_proves_by_stale_bounds_too_and_reads_no_less(rule):
    source = lane(prompt=41, steps=14, size=3.0)
    policy = f'streaming_llm(sinks=9, hold=tokens(30)) >> quest(read={rule}, page={PAGE}, summaries="{{}}")'
    tight, stale = (run(source, policy.format(s))["heads"] for s in ("tight", "stale"))
    assert tight["certified"].all()
    assert stale["certified"].all()
    assert stale["read_pages"].sum() > tight["read_pages"].sum()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_of_pages_is_what_is_made_anew(seed):
    """Blocks of steps over pages that come, lose rows, go and come back, in a run or with gaps."""
    rng, source = np.random.default_rng(seed), lane(prompt=41, steps=14, kv_heads=1)
    read = for_layer(parse(f"quest(read=pages(2), page={PAGE})"), source.layer).part("read")
    kept = reads.Summaries(read, source, 0, None)
    for _ in range(15):
        pos, t = np.arange(PAGE * rng.integers(1, 11)), source.t[10:14]  # all of them are written by then
        if rng.random() < 0.4:
            pos = pos[rng.random(len(pos)) < 0.5] if rng.random() < 0.5 else pos[len(pos) // 2 :]
        if len(pos):
            flags = np.ones((len(t), len(pos)), np.uint8)
            flags[1:] &= rng.random((len(t) - 1, len(pos))) > rng.choice([0.0, 0.05])
            pages = pages_of(pos, PAGE)
            v = versions(pages, flags, t)
            got, want = kept.of(v, pages, pos), reads.Summaries(read, source, 0, None).of(v, pages, pos)
            assert all((got[name] == want[name]).all() for name in want)


def test_what_making_them_again_costs():
    """One page that lost a row and still has some: its summary is written, the keys left in it are read."""
    source, index = lane(prompt=41, steps=14), 2 * 4 * 4
    policy = f'h2o(hold=tokens(24)) >> quest(read=pages(99), page={PAGE}, summaries="{{}}")'
    tight, stale = (run(source, policy.format(s)) for s in ("tight", "stale"))
    live = placement(source, tight["tiers"]) > 0  # [Hkv, N, T] after each step
    for h, i in np.ndindex(live.shape[0], live.shape[1] - 1):
        before, after = live[h, i].copy(), live[h, i + 1]
        before[source.t[i + 1]] = True
        pages = {p // PAGE for p in np.flatnonzero(before & ~after).tolist()}
        left = [n for p in pages if (n := int(after[p * PAGE : (p + 1) * PAGE].sum()))]
        assert by_step(tight["ledger"], "rebuilt_pages")[h, i + 1] == len(left)
        assert by_step(tight["ledger"], "rebuild_bytes")[h, i + 1] == sum(left) * source.layer.key_bytes
    more = by_step(tight["ledger"], "write_bytes") - by_step(stale["ledger"], "write_bytes")
    assert np.array_equal(more, by_step(tight["ledger"], "rebuilt_pages") * index)
    assert more.any()
    assert not by_step(stale["ledger"], "rebuild_bytes").any()


def test_stale_summaries_are_of_captured_keys():
    with pytest.raises(WrongUse, match=r'summaries.*"tight" with keys="recon" or "expanded"'):
        parse('quest(read=pages(2), summaries="stale", index=boxes(keys="recon"))')


def test_the_name_of_a_policy_says_it_only_where_it_is_not_the_rule():
    assert "summaries" not in parse_policy("quest(read=pages(2))").id
    assert parse_policy('quest(read=pages(2), summaries="stale")').id.endswith('summaries="stale")')
