"""Whole chains against the engine written out: the same sets and counts, the same masses and outputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvsim.errors import WrongUse
from tests.engine.lanes import by_step, chain, lane, placement, run
from tests.engine.twin import Twin

SNAP = st.builds(
    'hold={}, window={}, kernel={}, pool="{}"'.format,
    st.sampled_from(["tokens(9)", "share(0.5)"]), st.integers(1, 4), st.sampled_from([1, 3, 5]), st.sampled_from(["avg", "max"]),
)  # fmt: skip
KEEPS = st.one_of(
    st.just("full()"),
    st.builds("streaming_llm(sinks={}, hold={})".format, st.integers(0, 3), st.sampled_from(["tokens(9)", "share(0.5)"])),
    st.builds(
        'h2o(hold={}, recent={}, sinks={}, decay={}, prefill="{}", norm="{}")'.format,
        st.sampled_from(["tokens(8)", "tokens(30)", "share(0.6)"]),
        st.sampled_from([0, 0.3, 0.5]),
        st.integers(0, 2),
        st.sampled_from([1, 0.9]),
        st.sampled_from(["zeros", "captured"]),
        st.sampled_from(["none", "queries"]),
    ),
    st.builds(
        'qevict(hold={}, quant_share={}, window={}, period={}, sinks={}, recent={}, promotion="{}", decay={}, scope="{}", init="{}", score_from="{}")'.format,
        st.sampled_from(["tokens(18)", "share(0.3)", "share(0.6)"]),
        st.sampled_from([0, 0.5, 0.7, 1]),
        st.sampled_from([1, 3, 4]),
        st.sampled_from([1, 2, 5]),
        st.integers(0, 3),
        st.sampled_from([0, 5]),
        st.sampled_from(["ledger", "shadow", "never"]),
        st.sampled_from([1, 0.5]),
        st.sampled_from(["layer", "head"]),
        st.sampled_from(["last", "window", "column", "zeros"]),
        st.sampled_from(["birth", "age"]),
    ),
    st.builds("tova(hold={})".format, st.sampled_from(["tokens(3)", "tokens(12)", "share(0.4)"])),
    st.builds("{}(hold={})".format, st.sampled_from(["knorm", "oracle_keep"]), st.sampled_from(["tokens(3)", "share(0.4)"])),
    st.builds("random_keep(hold={}, seed={})".format, st.sampled_from(["tokens(3)", "share(0.4)"]), st.integers(0, 9)),
    st.builds(
        'pools(hold={}, sinks={}, recent={}, pinned="{}")'.format,
        st.sampled_from(["tokens(14)", "share(0.7)"]),
        st.integers(0, 2),
        st.integers(1, 4),
        st.sampled_from(["", "", "evidence"]),
    ),
    st.builds("snapkv({})".format, SNAP),
    st.builds("pyramidkv({}, beta={})".format, SNAP, st.sampled_from([1, 2, 20])),
    st.builds(
        'adakv({}, alpha={}, ada_mode="{}")'.format, SNAP, st.sampled_from([0, 0.2, 0.5]), st.sampled_from(["mix", "safeguard"])
    ),
    st.builds(
        'criticalkv({}, base="{}", alpha={}, first={}, compat={})'.format,
        SNAP,
        st.sampled_from(["snapkv", "adakv"]),
        st.sampled_from([0, 0.2]),
        st.sampled_from([0.3, 0.5]),
        st.booleans(),
    ),
    st.builds(
        'defensivekv(hold={}, window={}, kernel={}, cover={}, compat={}, scope="{}")'.format,
        st.sampled_from(["tokens(9)", "share(0.5)"]),
        st.integers(1, 4),
        st.sampled_from([1, 3]),
        st.sampled_from([0.5, 0.9]),
        st.booleans(),
        st.sampled_from(["layer", "layer", "model"]),
    ),
)
STORES = st.one_of(
    st.just(""),
    st.just(""),
    st.builds(
        "kivi(k_bits={0}, v_bits={1}, group={2[0]}, residual={2[1]}) >> ".format,
        st.sampled_from([2, 4, 16]),
        st.sampled_from([2, 4, 16]),
        st.sampled_from([(2, 2), (2, 8), (4, 4), (4, 8)]),  # a group of two is coded without loss
    ),
    st.builds(
        'fp8(k_bits={}, v_bits={}, scale="{}", residual={}) >> '.format,
        st.sampled_from([8, 16]),
        st.sampled_from([8, 16]),
        st.sampled_from(["token", "none"]),
        st.sampled_from([0, 3]),
    ),
    st.builds(
        'zipcache(high={}, low={}, unimportant={}, period={}, probes="{}", window={}, divisor="{}") >> '.format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 2]),
        st.sampled_from([0, 0.4, 1]),
        st.sampled_from([1, 3, 100]),
        st.sampled_from(["window", "columns"]),
        st.sampled_from([1, 8]),
        st.sampled_from(["tokens", "probes"]),
    ),
)
COMMON = st.builds(
    'read={}, page={}, sinks={}, recent={}, tail="{}", refresh={}'.format,
    st.sampled_from(["pages(1)", "pages(2)", "pages(4)", "tokens(9)", "share(0.4)", "pages(99)"]),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(0, 3),
    st.sampled_from([0, 0, 5]),
    st.sampled_from(["forced", "free"]),
    st.sampled_from([1, 1, 3, '"never"']),
)
READS = st.one_of(
    st.just("everything()"),
    st.builds(
        'quest({}, heads="{}", private={}, index=boxes(n={}))'.format,
        COMMON,
        st.sampled_from(["each", "share", "max", "mean", "softmax_mean", "split"]),
        st.integers(0, 2),
        st.sampled_from([1, 1, 2]),
    ),
    st.builds('oracle({}, by="{}")'.format, COMMON, st.sampled_from(["mass", "logit"])),
    st.builds("recency({})".format, COMMON),
)
LANES = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([1, 5, 17, 30, 80]),
        "steps": st.integers(1, 9),
        "kv_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "key_dim": st.sampled_from([1, 4, 5]),
        "value_dim": st.sampled_from([2, 4, 6]),
        "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
        "size": st.sampled_from([1.0, 1.0, 4.0, 40.0]),
        "whole": st.booleans(),
        "softcap": st.sampled_from([None, None, 3.0, 50.0]),
        "sinks": st.booleans(),
        "window": st.sampled_from([None, None, 1, 6, 20]),
        "evidence": st.sampled_from([(), ((2, 5),), ((0, 1), (3, 9))]),
        "stride": st.sampled_from([1, 1, 1, 2]),
        "among": st.sampled_from([(3,), (3, 5), (0, 3, 4, 9)]),
        "seed": st.integers(0, 2**32),
    }
)


OF_A_PAGE = {  # what is evicted leaves a page that is summarised again
    "keep": 'qevict(hold=tokens(18), quant_share=0, window=1, period=1, sinks=0, recent=0, promotion="ledger", init="last", score_from="birth")',
    "store": "",
    "read": "quest(read=pages(1), page=3, index=boxes(n=1))",
    "options": {
        "prompt": 17,
        "steps": 2,
        "kv_heads": 1,
        "group": 1,
        "key_dim": 1,
        "value_dim": 2,
        "dtype": "float32",
        "stride": 1,
    }
    | {"size": 1.0, "whole": False, "softcap": None, "sinks": False, "window": None, "evidence": (), "among": (3,), "seed": 0},
}


@example(**OF_A_PAGE)
@given(KEEPS, STORES, READS, LANES)
@settings(deadline=None, max_examples=250)
def test_a_chain_is_what_its_definition_says(keep, store, read, options):
    assume("page=1," not in read or "boxes(n=2)" not in read)  # no more boxes than tokens
    assume("qevict" not in keep or not (store or options["window"]))
    policy = chain(f"{keep} >> {store}{read}")
    if options["stride"] > 1:
        watching = keep.split("(")[0] in ("h2o", "tova", "pools", "qevict")
        assume(not store and not watching and "refresh=1" in f"{read} refresh=1")
    if 'scope="model"' in keep:
        options["among"] = (3,)
    source = lane(**options)
    try:
        got = run(source, policy, plans=True)
    except WrongUse as e:
        assume("it protects" not in str(e) and "no span is called" not in str(e))  # of a share of a few tokens
        raise
    twin = Twin(source, policy)
    assume(twin.margin > 1e-9)
    compare(source, twin, got)


LONG = [
    "h2o(hold=tokens(40)) >> kivi(group=4, residual=4) >> oracle(read=pages(2), page=4)",
    'tova(hold=tokens(40)) >> kivi(group=4, residual=8, v_bits=16) >> oracle(read=pages(3), page=4, by="logit")',
    'h2o(hold=share(0.5), sinks=1) >> kivi(group=4, residual=8) >> quest(read=pages(3), page=4, heads="share", refresh=4)',
    "streaming_llm(hold=tokens(40)) >> kivi(group=4, residual=4) >> oracle(read=pages(2), page=4, refresh=3)",
    'tova(hold=tokens(40)) >> quest(read=share(0.2), page=4, heads="split", recent=6)',
    "qevict(hold=share(0.5), window=4, period=3, sinks=2, recent=6, offset=1)",
    'qevict(hold=tokens(30), window=4, period=2, sinks=2, recent=6, scope="head", score_from="birth", promotion="shadow")',
    'qevict(hold=share(0.5), window=3, period=3, sinks=1, recent=5, init="window", promotion="never", decay=0.5) >> quest(read=pages(4), page=4)',
    "h2o(hold=tokens(40)) >> zipcache(period=5, window=6) >> quest(read=pages(4), page=4)",
    'zipcache(period=4, probes="columns", divisor="tokens") >> oracle(read=pages(4), page=4)',
    'h2o(hold=tokens(30), decay=0.9, norm="queries") >> quest(read=pages(3), page=4)',
    "pools(hold=tokens(30), sinks=2, recent=6) >> kivi(group=4, residual=8)",
    "oracle_keep(hold=tokens(20))",
    "knorm(hold=tokens(20)) >> recency(read=pages(2), page=4)",
    "random_keep(hold=share(0.4), seed=5) >> kivi(group=4, residual=4)",
    'criticalkv(hold=tokens(24), window=6, base="adakv")',
    'criticalkv(hold=tokens(24), window=6, base="adakv", compat=True)',
    "criticalkv(hold=tokens(24), window=8, first=0.3, compat=True) >> quest(read=pages(3), page=4)",
    "defensivekv(hold=tokens(24), window=6) >> kivi(group=4, residual=8)",
    'defensivekv(hold=tokens(24), window=6, cover=0.5, scope="model", compat=True)',
]


@pytest.mark.parametrize("policy", LONG)
@pytest.mark.parametrize("seed", range(3))
def test_long_chains(policy, seed):
    """All parts at work on more tokens: coded rows, evictions and rankings at every step."""
    source = lane(prompt=60, steps=16, kv_heads=2, group=2, value_dim=6, size=3.0, sinks=seed == 1, seed=seed)
    twin = Twin(source, chain(policy))
    assert twin.margin > 1e-9
    compare(source, twin, run(source, policy, plans=True))


def compare(source, twin, got):
    kv, q = range(source.layer.kv_heads), range(source.layer.q_heads)
    error = 1e-5 + 3e-7 * twin.largest  # what float32 logits may add
    for name, rows, head in (("ledger", twin.ledger, "kv_head"), ("heads", twin.heads, "q_head")):
        for column in rows[0][0]:
            want = np.array([[rows[i][h][column] for i in range(len(rows))] for h in (kv if name == "ledger" else q)])
            found = by_step(got[name], column, head)
            if want.dtype == object:  # None: the twin cannot say
                found, want = found[want != None], want[want != None].astype(float)  # noqa: E711
            if want.dtype.kind == "i" or column.startswith(("top", "page_recall")):
                assert np.array_equal(found, want), (name, column, found, want)
            else:
                scale = (
                    1 if column.startswith(("mass", "far", "evidence", "eps", "learned")) else 20 * np.maximum(1, np.abs(want))
                )
                assert (np.isnan(found) == np.isnan(want)).all(), (name, column, found, want)
                assert np.nanmax(np.abs(found - want) / scale, initial=0) < error, (name, column, found, want)
    if got["tiers"]:
        tiers = placement(source, got["tiers"])
        for h, i in np.ndindex(tiers.shape[:2]):
            assert {p: "full" if tiers[h, i, p] & 3 == 2 else "coded" for p in np.flatnonzero(tiers[h, i])} == twin.held[i][h]
    if got["plans"]:
        plans = {}
        for h, g, step, pages in zip(*(got["plans"][c] for c in ("kv_head", "q_head", "step", "pages")), strict=True):
            for j in range(source.layer.group) if g < 0 else [g - h * source.layer.group]:
                plans[step, h * source.layer.group + j] = pages
        assert plans == {(s, j): twin.pages[i][j] for i, s in enumerate(source.steps.tolist()) for j in q}
