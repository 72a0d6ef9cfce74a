"""The serving view: what fits, when a policy pays, batches as they come."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvsim.cost
from kvsim.cli import main
from kvsim.cost.fixed import fixed
from kvsim.cost.heads import Geometry, geometry
from kvsim.cost.model import calibrate, read_model, write_model
from kvsim.cost.plain import Fixed, resident_bytes, row_bytes
from kvsim.cost.prices import priced_for
from kvsim.cost.serve import Asked, lines, serve
from kvsim.cost.serving import (
    LONGEST,
    Engine,
    Memory,
    batches,
    beyond,
    break_even,
    crossover,
    filled,
    longest,
    most_requests,
    recovery,
    resident,
    sharing,
)
from kvsim.errors import WrongUse
from kvsim.units import share, tokens

BARS = Path(kvsim.cost.__file__).parent / "published" / "quest-figure-10.csv"
LLAMA2 = geometry("Llama-2-7b-hf")
SMALL = Geometry(layers=4, q_heads=8, kv_heads=2, head_dim=64, value_dim=64, dtype="bfloat16")
QUEST = fixed("quest(read=tokens(2048), dense_layers=2)", LLAMA2)


@pytest.fixture(scope="module")
def model():
    return calibrate([BARS], draws=20)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(priced_for(model, (32, 32, 128), rest="FP16"), LLAMA2)


POLICIES = st.sampled_from(
    [Fixed(), Fixed(hold=tokens(300)), Fixed(hold=share(0.3)), Fixed(read=share(0.2), summary_numbers=128), QUEST]
)


@given(POLICIES, st.integers(1, 4000), st.integers(0, 700), st.integers(1, 10**9))
@example(Fixed(read=share(0.2), summary_numbers=128), 352, 455, 19_818_590)  # a prefix as long as the requests
@settings(deadline=None, max_examples=80)
def test_the_largest_batch_fits_and_one_more_does_not(policy, length, prefix, room):
    memory, prefix = Memory(room, share=1.0), min(prefix, length)
    n = most_requests(policy, SMALL, length, memory, prefix)
    assert n == 0 or resident(policy, SMALL, [length] * n, prefix) <= room
    assert resident(policy, SMALL, [length] * (n + 1), prefix) > room


@given(POLICIES, st.integers(1, 5), st.integers(10**4, 10**8))
@settings(deadline=None, max_examples=60)
def test_the_longest_context_fits_and_one_token_more_does_not(policy, batch, room):
    memory = Memory(room, share=1.0)
    n = longest(policy, SMALL, batch, memory)
    assert n == 0 or resident(policy, SMALL, [n] * batch) <= room
    assert n == LONGEST or resident(policy, SMALL, [n + 1] * batch) > room


def test_memory_by_hand():
    assert Memory(80e9, 0.9, weights=16 * 10**9, workspace=2 * 10**9).usable == 54 * 10**9
    assert Memory(10e9, 0.5, weights=6 * 10**9).usable == 0
    assert resident(Fixed(), SMALL, [1000]) == 1000 * 2 * 4 * row_bytes(SMALL) == 1000 * 2 * 4 * 256


def test_a_shared_prefix_is_there_once_unless_rows_are_evicted():
    lengths = [1000, 700, 500]
    whole = resident_bytes(Fixed(), SMALL, lengths)
    page = resident_bytes(Fixed(), SMALL, [16])
    assert resident(Fixed(), SMALL, lengths, 100) == whole - 2 * 6 * page  # 6 whole pages of 100 tokens
    assert resident(Fixed(), SMALL, lengths, 15) == whole
    evicting = Fixed(hold=tokens(400))
    assert resident(evicting, SMALL, lengths, 100) == resident_bytes(evicting, SMALL, lengths)


# ------------------------------------------------------------------------------------------------ time
def test_from_the_crossover_on_a_policy_is_faster_and_below_it_it_is_not(engine):
    at = crossover(engine, QUEST, 1)
    lengths = [at // 2, at * 97 // 100, at, at * 2, at * 8]
    ours, full = ([x for x in engine.step_us([(p, [n]) for n in lengths])] for p in (QUEST, Fixed()))
    assert [a < b for a, b in zip(ours, full, strict=True)] == [False, False, True, True, True]
    dear = fixed("quest(read=share(1.0))", LLAMA2)  # reads all and ranks beside
    assert crossover(engine, dear, 1) is None


def test_the_break_even_budget_is_the_last_that_is_faster(engine):
    even = break_even(engine, QUEST, 32768, 1)
    full = engine.step_us([(Fixed(), [32768])])[0]
    faster = [
        engine.step_us([(fixed(f"quest(read=share({x}), dense_layers=2)", LLAMA2), [32768])])[0] < full
        for x in (even, round(even + 0.01, 2))
    ]
    assert faster == [True, False]
    assert break_even(engine, Fixed(hold=tokens(64)), 32768, 1) is None


def test_ragged_is_at_most_bucketed_is_at_most_padded(engine):
    found = batches(engine, Fixed(), [3000, 9000, 30000], bucket=4096)
    assert found["ragged"] < found["bucketed"] < found["padded"]
    assert found["padded"] == engine.step_us([(Fixed(), [30000] * 3)])[0]
    alike = batches(engine, Fixed(), [4096, 4096], bucket=4096)
    assert alike["ragged"] == alike["bucketed"] == alike["padded"]


def test_batches_drawn_from_a_mix_fill_the_memory(engine):
    memory = Memory(30e9, share=1.0)
    n = most_requests(Fixed(), engine.heads, 5000, memory)
    alike = filled(engine, Fixed(), [5000, 5000], memory, draws=3)
    assert (alike["requests_p50"], alike["requests_p1"]) == (n, n)
    assert alike["tpot_us_p50"] == alike["tpot_us_p99"] == engine.step_us([(Fixed(), [5000] * n)])[0]
    mixed = filled(engine, Fixed(), [1000, 5000], memory, draws=40)
    fewest, most = (most_requests(Fixed(), engine.heads, length, memory) for length in (5000, 1000))
    assert fewest <= mixed["requests_p1"] < mixed["requests_p50"] <= most
    assert mixed["tpot_us_p50"] < mixed["tpot_us_p99"]
    assert filled(engine, Fixed(), [1000, 5000], memory, draws=40) == mixed
    assert filled(engine, Fixed(), [10**8], memory, draws=2)["tpot_us_p50"] is None


def test_a_mix_beyond_a_length():
    assert beyond([1000, 3000, 4000], 3000) == {"requests": 2 / 3, "tokens": 7 / 8}
    assert beyond([1000], None) == {"requests": 0, "tokens": 0}


def test_a_prefix_read_once_costs_no_more_than_read_by_each(engine):
    found = sharing(engine, Fixed(), 8192, 4, 2048)
    assert found["read_once"] < found["read_by_each"] == engine.step_us([(Fixed(), [8192] * 4)])[0]
    none = sharing(engine, Fixed(), 8192, 4, 0)
    assert none["read_once"] == none["read_by_each"]
    with pytest.raises(WrongUse, match="only a trace can tell"):
        sharing(engine, QUEST, 8192, 4, 2048)


def test_what_is_wanted_again(engine):
    found = recovery(engine, 4096, 13_500_000_000)
    assert found["bytes"] == 4096 * 32 * 32 * 512
    gpu = engine.prices.model.gpu
    assert found["fetch_us"] == pytest.approx(found["bytes"] / gpu.pcie_gbps / 1e3)
    assert found["prefill_floor_us"] == pytest.approx(13.5e9 / gpu.bandwidth_gbps / 1e3)
    assert recovery(engine, 4096, 0)["prefill_floor_us"] is None


# ------------------------------------------------------------------------------------------------ the command
def test_amdahl_holds_what_is_about_the_cache(model):
    found = serve(model, LLAMA2, Asked(["quest(read=tokens(2048))"], [32768], variant="FP16"))
    full, quest = found["rows"]
    assert full["policy"] == "full()"
    assert quest["amdahl"] == pytest.approx(1 / (1 - quest["attention_share"]))
    assert full["step_us"] / quest["step_us"] < quest["amdahl"]
    assert quest["reading_all_over_full"] > 1
    assert full["tokens_per_s"] == pytest.approx(full["requests"] / full["step_us_of_all"] * 1e6)


def test_heads_taken_to_share_no_page_are_told():
    """As `cost what-if` tells it; nobody said how far they share, and how much they read hangs on it."""
    model, grouped, each = read_model("h100-vllm-0.14"), geometry("meta-llama/Llama-3.1-8B"), "quest(read=tokens(2048))"
    told = "query heads of a group are taken to share no page: together they read 4 times"
    for asked, said in (
        (Asked([each], [32768]), True),
        (Asked([each], [32768], union=4), False),
        (Asked(["quest(read=tokens(2048), heads='max')"], [32768]), False),
    ):
        assert any(told in line for line in lines(serve(model, grouped, asked))) == said


def test_a_device_of_unknown_memory_says_nothing_of_what_fits(model):
    bare = replace(model, gpu=replace(model.gpu, memory_gb=0.0))
    found = serve(bare, LLAMA2, Asked(["streaming_llm(hold=tokens(512))"], [8192], variant="FP16"))
    assert found["usable_bytes"] is None
    assert "requests" not in found["rows"][0]


def test_the_command(model, tmp_path, capsys):
    file = tmp_path / "m.json"
    write_model(model, file)
    call = [
        "cost",
        "serve",
        "--model",
        str(file),
        "-p",
        "quest(read=tokens(2048))",
        "--geometry",
        "Llama-2-7b-hf",
        "--variant",
        "FP16",
    ]
    assert main([*call, "--context", "8192,32768", "--lengths", "4000,9000", "--prefix", "512", "--span", "64"]) == 0
    said = capsys.readouterr().out
    for word in ("for the cache", "full()", "mix: ragged", "when it is read once", "evicted tokens back"):
        assert word in said
    assert main([*call, "--context", "8192", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
    for words, line in (
        (["--context", "0"], "1 token"),
        (["--context", "8192", "--weights", "500GB"], "leave nothing"),
        (["--context", "8192", "--memory-share", "2"], "--memory-share 2: expected a part of the memory, above 0 and at most 1"),
        (["--context", "8192", "--memory-share", "nan"], "--memory-share nan: expected a part"),
    ):
        assert main([*call, *words]) == 2
        assert line in capsys.readouterr().err
