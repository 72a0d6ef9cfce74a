"""An index behind a store that codes keys: which keys its summaries enclose, when they are made anew, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvsim.engine import reads
from kvsim.errors import WrongUse
from kvsim.policies.language import parse
from tests.engine.lanes import lane, run

KIVI = "kivi(bits=2, group=4, residual=8)"


def taken(source: Any, policy: str) -> list[Any]:
    """(kv head, positions, coded, keys, error) of every page state that was summarised."""
    seen: list[Any] = []
    make = reads.Summaries._keys

    def keys(self, pos, blurred):
        found = make(self, pos, blurred)
        seen.append((self, pos, blurred, *found))
        return found

    with mock.patch.object(reads.Summaries, "_keys", keys):
        run(source, policy)
    return seen


@pytest.mark.parametrize("keep", ["full()", "streaming_llm(sinks=3, hold=tokens(20))", "h2o(hold=tokens(24))"])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_no_stored_key_lies_farther_than_its_error(keep, offset):
    for seed in range(4):
        source = lane(prompt=40, steps=30, seed=seed)
        source = replace(source, k=(source.k * (1e-3 if offset else 1) + np.float32(offset)).astype(np.float32))
        coded = 0
        for s, pos, blurred, keys, more in taken(
            source, f'{keep} >> {KIVI} >> quest(read=pages(2), page=3, index=boxes(keys="expanded"))'
        ):
            error = more["error"]
            assert (error[~blurred] == 0).all()
            if blurred.any():
                stored = s.record.decoded["k"][s.head, pos[blurred]].astype(float)
                assert (np.abs(stored - keys[blurred]) <= error[blurred]).all()
                assert (error[blurred] > 0).any()
                coded += int(blurred.sum())
            assert np.array_equal(keys, s.source.rows("k", s.head, pos.ravel()).reshape(keys.shape))
        assert coded > 100


@pytest.mark.parametrize("keep", ["full()", "streaming_llm(sinks=3, hold=tokens(20))", "h2o(hold=tokens(24))"])
def test_a_page_is_summarised_anew_when_its_rows_are_coded(keep):
    source, size = lane(prompt=21, steps=30, kv_heads=1), 3
    last: dict[int, list[int]] = {}
    ever: set[int] = set()
    for s, pos, blurred, keys, _ in taken(
        source, f'{keep} >> {KIVI} >> quest(read=pages(2), page={size}, index=boxes(keys="recon"))'
    ):
        for p, b, k in zip(pos, blurred, keys, strict=True):
            want = [s.record.decoded["k"][0, x] if c else source.k[0, x] for x, c in zip(p, b, strict=True)]
            assert np.array_equal(k, np.array(want, float))
            now = sorted(p[b].tolist())
            ever |= {int(p[0]) // size} if now and last.get(int(p[0]) // size) == [] else set()
            last[int(p[0]) // size] = now
    assert len(ever) >= 3  # pages seen first as captured, then coded


def test_summaries_of_captured_keys_do_not_ask_how_they_are_stored():
    plain, coded = (
        [pos.tolist() for _, pos, *_ in taken(lane(prompt=30, steps=20), f"{store}quest(read=pages(2), page=3)")]
        for store in ("", f"{KIVI} >> ")
    )
    assert plain == coded


@pytest.mark.parametrize(
    "index",
    ['boxes(keys="recon")', 'boxes(keys="expanded")', 'sphere(keys="recon")', 'boxes(n=2, keys="expanded", rotate="hadamard")'],
)
def test_only_boxes_over_captured_keys_are_below_what_attention_reads(index):
    source = lane(prompt=60, steps=20, dtype="bfloat16")
    found = run(source, f"{KIVI} >> quest(read=pages(4), page=2, index={index})", explain=True)["explain"]
    assert not found["below"].any()
    found = run(source, f"{KIVI} >> quest(read=pages(4), page=2)", explain=True)["explain"]
    assert all(found["below"][found["q_head"] == h].any() for h in range(source.layer.q_heads))


def test_slack_and_eps_hat_are_about_the_keys_of_the_index():
    source = lane(prompt=60, steps=20)
    page = f"{KIVI} >> quest(read=mass(eps=0.3), page=1, index=sphere(keys="
    stored = run(source, f'{page}"recon", dtype="float32"), tail="free")')["heads"]
    assert np.abs(stored["slack_max"]).max() < 1e-4  # a page of one key: its sphere is the stored key
    captured = run(source, f"{KIVI} >> quest(read=pages(5), page=1)")["heads"]
    assert np.abs(captured["slack_max"]).max() < 1e-4
    assert (stored["eps_hat"][stored["certified"].astype(bool)] <= 0.3 + 1e-5).all()


def test_the_certificate_matches_the_column_behind_a_store():
    for keep in ("full()", "h2o(hold=tokens(30))"):
        heads = run(
            lane(prompt=60, steps=20), f'{keep} >> {KIVI} >> quest(read=mass(eps=0.2), page=4, index=boxes(keys="recon"))'
        )["heads"]
        assert heads["certified"].all()
        assert (heads["eps_hat"] <= 0.2 + 1e-5).all()


REFUSED = {
    f"{KIVI} >> quest(read=exact(r=1))": 'expected keys="recon" or "expanded", because exact() proves by bounds of the keys that are read',
    "qevict() >> quest(read=mass(eps=0.1))": 'expected keys="recon" or "expanded", because mass() proves',
    'qevict() >> quest(read=pages(2), index=boxes(keys="expanded"))': 'expected keys="recon": how far these codes can move a key',
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    with pytest.raises(WrongUse) as refused:
        parse(text)
    assert REFUSED[text] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [f"{KIVI} >> quest(read=pages(1))", f"{KIVI} >> quest(read=top_p(p=0.9))", "kivi(k_bits=16) >> quest(read=exact(r=1))"]
    + ['qevict() >> quest(read=exact(r=1), index=sphere(keys="recon"))', 'quest(read=exact(r=1), index=boxes(keys="expanded"))'],
)
def test_not_refused(text):
    assert parse(text).part("read")


def test_a_codec_of_unknown_error_cannot_widen():
    class rounding:
        tokens = 1

    class coded(type(parse("kivi()").part("store"))):
        codecs = replace(parse("kivi()").part("store").codecs, k=rounding())

    with pytest.raises(WrongUse, match='keys="recon"'):
        coded() >> parse('quest(read=pages(1), index=boxes(keys="expanded"))').part("read")
