"""The language: expressions and Python are one, canonical forms parse back, and everything else is refused by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.errors import WrongUse
from kvsim.policies.index.boxes import boxes
from kvsim.policies.index.sphere import sphere
from kvsim.policies.language import LONGEST, canonical, complete, known, parse, parse_policy
from kvsim.policies.names import named
from kvsim.policies.parameters import TOLD, parameters
from kvsim.policies.protocol import Chain
from kvsim.units import kib, mib, pages, shards, share, tokens

# ------------------------------------------------------------------------------------------------ generated chains
counts = st.integers(0, 50)
parts_of_one = st.floats(0, 1, exclude_min=True)
shares = st.builds(share, parts_of_one, st.sampled_from(["visible", "prompt", "total"]))
sizes = st.floats(1e-3, 1e6)
holds = st.one_of(st.builds(tokens, st.integers(200, 10**9)), shares, st.builds(kib, sizes), st.builds(mib, sizes))
reads = st.one_of(holds, st.builds(pages, st.integers(1, 10**6)))
indexes = st.builds(
    boxes,
    n=st.integers(1, 16),
    by=st.sampled_from(["order", "cluster"]),
    dtype=st.sampled_from(["kv", "float32", "float16", "bfloat16", "fp8"]),
    rounding=st.sampled_from(["outward", "nearest"]),
    keys=st.sampled_from(["exact", "recon", "expanded"]),
    rotate=st.sampled_from(["none", "hadamard", "pca", "random"]),
)
spheres = st.builds(sphere, dtype=st.sampled_from(["kv", "fp8"]), keys=st.sampled_from(["exact", "recon"]))
over = st.builds(shards, st.integers(1, 9), st.sampled_from(["global", "split", "each"]))
pages_read = {
    "read": reads,
    "page": st.integers(1, 256),
    "sinks": counts,
    "recent": counts,
    "tail": st.sampled_from(["forced", "free"]),
    "refresh": st.one_of(st.integers(1, 99), st.just("never")),
}
heads = st.sampled_from(["each", "share", "max", "mean", "softmax_mean", "split"])
bits = st.sampled_from([*range(1, 9), 16])


def made(name, **values):
    """Some of these parameters, the required ones always."""
    required = {k: v for k, v in values.items() if parameters(named("policy", name))[k][1]}
    optional = {k: v for k, v in values.items() if k not in required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda given: named("policy", name)(**given))


keeps = st.one_of(
    made("full"),
    made("tova", hold=holds),
    made("streaming_llm", hold=holds, sinks=counts),
    made(
        "h2o",
        hold=holds,
        recent=st.floats(0, 0.7),
        sinks=counts,
        decay=parts_of_one,
        prefill=st.sampled_from(["captured", "zeros"]),
    ),
)
stores = st.builds(
    lambda group, blocks, more: named("policy", "kivi")(group=group, residual=group * blocks, **more),
    st.integers(1, 64),
    st.integers(1, 9),
    st.fixed_dictionaries({}, optional={"bits": bits, "k_bits": bits, "v_bits": bits}),
)
readers = st.one_of(
    made("everything"),
    made("recency", **pages_read),
    made("random_read", seed=st.integers(0, 2**50), **pages_read),
    made("oracle", by=st.sampled_from(["mass", "logit"]), **pages_read),
    made("quest", heads=heads, private=counts, dense_layers=counts, tile=st.integers(1, 64), **pages_read),
    made("quest", index=st.one_of(indexes, spheres), shards=over, **pages_read | {"page": st.integers(16, 256)}),
)


@st.composite
def chains(draw):
    parts = [draw(p) for p in (keeps, stores, readers) if draw(st.booleans())]
    return Chain(tuple(parts))


@given(chains())
@settings(max_examples=150, deadline=None)
def test_a_canonical_form_parses_back_to_the_same_chain(chain):
    text = canonical(complete(chain))
    assert parse(text) == complete(chain)
    assert canonical(parse(text)) == text
    assert parse_policy(chain).id == parse_policy(text).id == text


@given(chains())
@settings(max_examples=30, deadline=None)
def test_a_chain_is_plain_data(chain):
    assert pickle.loads(pickle.dumps(chain)) == copy.deepcopy(chain) == chain
    assert hash(chain) == hash(pickle.loads(pickle.dumps(chain)))


def test_the_canonical_form_shows_every_parameter():
    text = canonical(parse('h2o(hold=share(0.2)) >> kivi(bits=4) >> quest(read=tokens(512), heads="max")'))
    assert text == (
        'h2o(hold=share(0.2, of="visible"), recent=0.5, sinks=0, decay=1, norm="none", prefill="captured")'
        " >> kivi(k_bits=4, v_bits=4, group=32, residual=128)"
        ' >> quest(read=tokens(512), page=16, sinks=0, recent=0, tail="forced", refresh=1,'
        ' index=boxes(n=1, by="order", dtype="kv", rounding="outward", keys="exact", rotate="none"), heads="max", private=1,'
        " dense_layers=0, tile=None, shards=None)"
    )


def test_what_is_left_out_is_full_and_everything():
    assert canonical(parse("kivi()")).startswith("full() >> kivi(")
    assert canonical(parse("kivi()")).endswith(" >> everything()")
    assert parse("quest(read=tokens(8))") == parse("full() >> quest(read=tokens(8))")
    assert parse("full()") == parse("everything()") == parse("full() >> everything()")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("h2o(hold=tokens(64), decay=1.0)", "h2o(hold=tokens(64), decay=1)"),
        ("quest(read=tokens(64), sinks=tokens(4))", "quest(read=tokens(64), sinks=4)"),
        ("kivi(bits=4)", "kivi(k_bits=4, v_bits=4)"),
        ("kivi(bits=4, k_bits=2)", "kivi(v_bits=4)"),
        ("full() >> (kivi() >> everything())", "full() >> kivi()"),
        (" quest( read = tokens( n = 64 ) )  # why", "quest(read=tokens(64))"),
    ],
)
def test_the_same_policy_has_one_id(one, other):
    assert parse(one) == parse(other)
    assert parse_policy(one).id == parse_policy(other).id


# ------------------------------------------------------------------------------------------------ Python
def test_python_and_the_expression_are_one():
    text = 'h2o(hold=share(0.2), recent=0.25) >> quest(read=tokens(1024), page=32, index=boxes(n=2, by="cluster"))'
    python = kvsim.h2o(hold=kvsim.share(0.2), recent=0.25) >> kvsim.quest(
        read=kvsim.tokens(1024), page=32, index=kvsim.boxes(n=2, by="cluster")
    )
    assert python == parse(text)
    assert parse_policy(kvsim.quest(read=kvsim.tokens(8))).default == parse("quest(read=tokens(8))")
    assert kvsim.full() >> (kvsim.kivi() >> kvsim.everything()) == parse("kivi()")


@pytest.mark.parametrize(
    "call",
    [
        "h2o()",
        "h2o(hold=0.2)",
        "h2o(tokens(8))",
        "h2o(hold=tokens(8), decy=1)",
        "h2o(hold=tokens(8), decay=2)",
        "h2o(hold=tokens(4), sinks=4)",
        "quest(read=512)",
        "quest(read=tokens(8), index=3)",
        'quest(preset="mit")',
        "kivi(residual=33)",
        "quest(read=tokens(1)) >> full()",
        "boxes(3)",
        "boxes(n=0)",
    ],
)
def test_python_is_refused_with_the_words_of_the_expression(call):
    names = {n: getattr(kvsim, n) for n in ("h2o", "quest", "kivi", "full", "boxes", "tokens")}
    with pytest.raises(WrongUse) as python:
        eval(call, names)
    with pytest.raises(WrongUse) as expression:
        parse(f"quest(read=tokens(1), index={call})" if call.startswith("boxes") else call)
    assert str(python.value) == str(expression.value)


def test_only_policies_are_joined():
    with pytest.raises(TypeError):
        _ = kvsim.full() >> 3
    with pytest.raises(TypeError):
        _ = kvsim.full() >> kvsim.tokens


def test_a_copy_with_other_parameters_is_checked_too():
    quest = kvsim.quest(read=kvsim.tokens(8))
    assert replace(quest, page=4) == kvsim.quest(read=kvsim.tokens(8), page=4)
    assert replace(kvsim.kivi(bits=4), group=64) == kvsim.kivi(bits=4, group=64)
    with pytest.raises(WrongUse, match="page=0"):
        replace(quest, page=0)


# ------------------------------------------------------------------------------------------------ presets
def test_a_preset_fills_in_and_what_is_given_wins():
    assert parse('quest(preset="mit-kernel")') == parse("quest(read=tokens(512), page=16, dense_layers=2)")
    assert parse('quest(preset="mit-kernel", page=8)') == parse("quest(read=tokens(512), page=8, dense_layers=2)")
    assert kvsim.kivi(preset="examples") == kvsim.kivi(bits=2, group=32, residual=32)
    assert "preset" not in canonical(parse('quest(preset="mit-kernel")'))


def test_every_preset_has_a_source_and_makes_a_policy():
    listed: list[tuple[Any, str, Any]] = [(c, name, p) for c in known().values() for name, p in c.presets.items()]
    assert len(listed) >= 8
    for cls, name, preset in listed:
        assert preset["source"]
        missing = {n: tokens(1024) for n, (_, required) in parameters(cls).items() if required and n not in preset}
        made = cls(preset=name, **missing)
        kept = {k: v for k, v in preset.items() if k not in (*TOLD, "bits")}
        assert {k: getattr(made, k) for k in kept} == kept


def test_every_policy_says_what_it_does():
    assert {"full", "streaming_llm", "h2o", "tova", "kivi", "everything", "quest", "oracle", "recency", "random_read"} <= {
        *known()
    }
    assert all(cls.act and cls.kind in ("keep", "store", "estimate", "read") for cls in known().values())


# ------------------------------------------------------------------------------------------------ refusals
READ = "a read budget is one of tokens(), pages(), share(), kib(), mib(), for example tokens(512)"
HOLD = "a hold budget is one of tokens(), share(), kib(), mib(), for example tokens(512)"
LITERAL = "expected a number, a text in quotes, True, False, None or a call: tokens(512)"
WRITTEN = "expected a policy, written NAME(...), for example h2o(hold=share(0.2)) >> quest(read=tokens(1024))"
KNOWN = "one of " + ", ".join(sorted(known()))

REFUSED = {
    # names
    "x" * 400 + "()": f"unknown policy '{'x' * 400}': {KNOWN}",  # no file can be called so
    "qest(read=tokens(32))": "unknown policy 'qest', did you mean 'quest'?",
    "quest(read=tokens(32), pages=16)": "unknown parameter of quest 'pages', did you mean 'page'?",
    "quest(read=tokens(32), index=boxs())": "unknown unit, rule or index 'boxs', did you mean 'boxes'?",
    "quest(read=token(32))": "unknown unit, rule or index 'token', did you mean 'tokens'?",
    "quest(read=tokens(1), index=boxes(m=3))": "unknown parameter of boxes 'm': one of by, dtype, keys, n, rotate, rounding",
    "quest(read=share(0.2, off='x'))": "unknown parameter of share 'off', did you mean 'of'?",
    "quest(read=__import__('os'))": "unknown unit, rule or index '__import__': one of block_mean, boxes, digest, exact, gap, kib, mass, mib, pages, shards, share, sphere, tokens, top_p",
    "quest(preset='mit-kernl')": "unknown preset of quest 'mit-kernl', did you mean 'mit-kernel'?",
    "tova(preset='x')": "unknown preset of tova 'x': there are none",
    "tokens(4)": f"unknown policy 'tokens': {KNOWN}",
    # budgets
    "quest(read=512)": f"quest(read=512): {READ}",
    "quest()": f"quest: read= is missing; {READ}",
    "h2o()": f"h2o: hold= is missing; {HOLD}",
    "h2o(hold=0.2)": f"h2o(hold=0.2): {HOLD}",
    "tova(hold=None)": f"tova(hold=None): {HOLD}",
    "streaming_llm(hold=pages(4))": f"streaming_llm(hold=pages(4)): {HOLD}",
    "quest(read=share(2))": "share(2): expected at most 1, the whole; a count of tokens is written tokens(2)",
    "quest(read=share(0.2, of='x'))": "share(of='x'): expected 'visible', 'prompt' or 'total'",
    "quest(read=tokens(0))": "tokens(0): expected a whole number above 0, for example tokens(16)",
    "quest(read=tokens(9e999))": "tokens(inf): expected a whole number above 0, for example tokens(16)",
    "quest(read=tokens(True))": "tokens(True): expected a whole number above 0, for example tokens(16)",
    "quest(read=tokens())": "tokens(): expected one number, for example tokens(512)",
    "quest(read=tokens(1, 2))": "tokens(1, 2): expected one number, for example tokens(512)",
    "h2o(hold=tokens(4), sinks=4)": "h2o(hold=tokens(4)): expected at least the 6 tokens that it protects",
    "streaming_llm(hold=tokens(4))": "streaming_llm(hold=tokens(4)): expected at least the 5 tokens that it protects",
    # values
    "quest(read=tokens(1), page=True)": "quest(page=True): expected a whole number",
    "quest(read=tokens(1), page=1.5)": "quest(page=1.5): expected a whole number",
    "quest(read=tokens(1), page='a')": 'quest(page="a"): expected a whole number',
    "quest(read=tokens(1), page=0)": "quest(page=0): expected a page size of 1 to 32767 tokens",
    "quest(read=tokens(1), sinks=-1)": "quest(sinks=-1): expected 0 tokens or more",
    "quest(read=tokens(1), recent=-1)": "quest(recent=-1): expected 0 tokens or more",
    "quest(read=tokens(1), refresh=0)": 'quest(refresh=0): expected a number of steps, 1 or more, or "never"',
    "quest(read=tokens(1), refresh='once')": 'quest(refresh="once"): expected a whole number or "never"',
    "quest(read=tokens(1), tail='open')": 'quest(tail="open"): expected "forced" or "free"',
    "quest(read=tokens(1), private=-1)": "quest(private=-1): expected 0 pages or more",
    "quest(read=tokens(1), dense_layers=-1)": "quest(dense_layers=-1): expected 0 layers or more",
    "quest(read=tokens(1), index=3)": "quest(index=3): expected an index, for example boxes()",
    "quest(read=tokens(1), index=boxes(n=0))": "boxes(n=0): expected 1 box per page or more",
    "quest(read=tokens(1), index=boxes(dtype='int8'))": 'boxes(dtype="int8"): expected "kv" or "float32" or "float16" or "bfloat16" or "fp8"',
    "quest(read=tokens(1), index=boxes(keys='old'))": 'boxes(keys="old"): expected "exact" or "recon" or "expanded"',
    "h2o(hold=tokens(8), recent=2)": "h2o(recent=2): expected a part of the hold budget, 0 to 1",
    "h2o(hold=tokens(8), decay=0)": "h2o(decay=0): expected a factor per step, above 0 and at most 1",
    "h2o(hold=tokens(8), sinks=-1)": "h2o(sinks=-1): expected 0 tokens or more",
    "streaming_llm(hold=tokens(8), sinks=-1)": "streaming_llm(sinks=-1): expected 0 tokens or more",
    "h2o(hold=tokens(8), prefill='all')": 'h2o(prefill="all"): expected "captured" or "zeros"',
    "kivi(bits=9)": "kivi(k_bits=9): expected 1 to 8 bits, or 16 for exact",
    "kivi(bits='2')": 'kivi(bits="2"): expected a whole number',
    "kivi(group=0)": "kivi(group=0): expected 1 or more",
    "kivi(residual=33)": "kivi(residual=33): expected a multiple of group=32, because keys are coded in whole groups",
    "random_read(read=tokens(1), seed=-1)": "random_read(seed=-1): expected 0 or more",
    "oracle(read=tokens(8), page=4294967297)": "oracle(page=4294967297): expected a page size of 1 to 32767 tokens",
    "snapkv(hold=tokens(99), kernel=4294967297)": "snapkv(kernel=4294967297): expected an odd number of tokens up to 9999, so that pooling is centred",
    "r_kv(hold=tokens(99), kernel=4294967297)": "r_kv(kernel=4294967297): expected an odd number of tokens up to 9999, so that pooling is centred",
    "expected_attention(hold=tokens(9), future=4294967297)": "expected_attention(future=4294967297): expected 1 to 65536 positions",
    "everything(page=0)": "everything(page=0): expected a page size of 1 to 32767 tokens",
    # shape
    "quest(tokens(3))": "quest(tokens(3)): its parameters are given by name, such as quest(read=...)",
    "full(3)": "full(3): its parameters are none",
    "quest(read=tokens(1), read=tokens(2))": "quest: read= is given twice",
    "quest(**x)": "quest(**...): parameters are given one by one, as parameter=value",
    "quest(*x)": f"'*x': {LITERAL}",
    "h2o(hold=tokens)": f"'tokens': {LITERAL}",
    "quest(read=tokens(10**9))": f"'10 ** 9': {LITERAL}",
    "quest(read=tokens(-True))": f"'-True': {LITERAL}",
    "quest(read=[1])": f"'[1]': {LITERAL}",
    "quest(read=f'{1}')": f"\"f'{{1}}'\": {LITERAL}",
    "quest(read=...)": f"'...': {LITERAL}",
    "full": f"'full': {WRITTEN}",
    "full()()": f"'full()()': {WRITTEN}",
    "kvsim.full()": f"'kvsim.full()': {WRITTEN}",
    "full() > kivi()": f"'full() > kivi()': {WRITTEN}",
    "__import__('os').system('x')": f"\"__import__('os').system('x')\": {WRITTEN}",
    "quest(read=tokens(1)) >> full()": "quest (read) >> full (keep): the order is keep >> store >> estimate >> read, each at most once",
    "full() >> full()": "full (keep) >> full (keep): the order is keep >> store >> estimate >> read, each at most once",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_with_one_line_that_says_how_to_mend_it(text):
    with pytest.raises(WrongUse) as refused:
        parse(text)
    assert str(refused.value) == REFUSED[text]


@pytest.mark.parametrize(
    "text",
    ["", " ", "(", "full(", "full() >>", "full()\nfull()", "a := 3", "\0", "\ud800", "(" * 500, "-" * 3000 + "1", "[" * 900]
    + ["f(" * 90 + ")" * 90, "a" + ".b" * 1900, "not " * 900 + "1", "full()" + " >> full()" * 300, "x" * (LONGEST + 1)]
    + ["quest(read=tokens(" + "9" * 3900 + "))", "quest(read=tokens(1), page=" + "9" * 400 + ")", "1 if " * 700 + "1"],
    ids=lambda text: f"{text[:8]!a} x {len(text)}",
)
def test_hostile_text_is_refused_in_one_line(text):
    with pytest.raises(WrongUse) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


PIECES = [
    "quest",
    "h2o",
    "tokens",
    "read",
    "hold",
    "page",
    "boxes",
    "(",
    ")",
    "=",
    ">>",
    ",",
    " ",
    "512",
    "0.5",
    "-",
    "'x'",
    "None",
    "*",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@settings(max_examples=150, deadline=None)
def test_any_text_parses_or_is_refused(text):
    try:
        chain = parse(text)
    except WrongUse:
        return
    assert parse(canonical(chain)) == chain
