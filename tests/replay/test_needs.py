"""What a trace cannot supply is refused by name before work starts: the policy, the need, the capture option that records it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvsim.errors import WrongUse
from kvsim.geometry import ALL_LAYERS, FUTURE, TRUTH, WO_NORM, Need
from kvsim.policies.keep.full import full
from kvsim.replay.asked import resolve
from kvsim.replay.needs import check_needs
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize

NEEDS = {str(n): n for n in (ALL_LAYERS, FUTURE, TRUTH, WO_NORM, Need("moon"))}


@dataclass(frozen=True, kw_only=True)
class picky(full):
    """full(), with a need."""

    wants: str

    @property
    def needs(self):
        return frozenset({NEEDS[self.wants]})


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Nothing optional, and one prompt query."""
    path = tmp_path_factory.mktemp("traces") / "bare"
    return synthesize(path, layers=2, captured=[0], window_rows=1, without=("k_pre", "prefill_mass", "wo_norm"))


@pytest.fixture(scope="module")
def strided(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "strided", steps=24, stride=4)


def refusal(trace, policy, **options):
    with pytest.raises(WrongUse) as refused:
        check_needs(trace, resolve(trace, policy, **options))
    return str(refused.value)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("h2o(hold=tokens(20))", "h2o needs prefill_mass | prefill table | --prefill-mass"),
        ("snapkv(hold=tokens(40), window=32)", "snapkv needs window(32) | the window captured has 1 | --window-rows 32"),
        ("qevict(hold=share(0.5))", "qevict needs k_pre | before RoPE | --k-pre"),
        (picky(wants="wo_norm"), "picky needs wo_norm | values table | --wo-norm"),
        (picky(wants="all_layers"), "picky needs all_layers | layers 1 are not captured | --layers all"),
        (picky(wants="moon"), "picky needs moon | no trace has it"),
    ],
)
def test_a_missing_need_is_named(bare, policy, words):
    told = refusal(bare, policy)
    assert not [w for w in words.split(" | ") if w not in told]
    assert told.endswith("(trace bare, request 0, layer 0)")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            'h2o(hold=tokens(20), prefill="zeros")',
            "h2o needs attention | every decode step | gaps (0, 4, 8, 12, ...) | --steps N",
        ),
        ("tova(hold=tokens(20))", "tova needs attention | gaps"),
        ("quest(read=pages(2), page=8, refresh=4)", "quest(refresh=4) | gaps | --steps N"),
        ('quest(read=pages(2), page=8, refresh="never")', 'quest(refresh="never") | gaps'),
        ("kivi(group=8, residual=16)", "kivi codes rows | gaps | --steps N"),
    ],
)
def test_gaps_between_steps_are_refused_for_what_counts_every_step(strided, policy, words):
    told = refusal(strided, policy)
    assert not [w for w in words.split(" | ") if w not in told]


def test_what_looks_at_no_other_step_is_replayed_over_gaps(strided):
    run = replay(strided, ["quest(read=pages(2), page=8)", "streaming_llm(hold=tokens(12))"], workers=1)
    assert run.ledger["step"].unique().sort().to_list() == [0, 4, 8, 12, 16, 20]
    assert run.info["requests"][0]["steps"] == 6


def test_layers_that_were_not_asked_for_are_missing_too(trace):
    policy = picky(wants="all_layers")
    check_needs(trace, resolve(trace, policy))
    assert "layers 1 are not captured or not asked for" in refusal(trace, policy, layers=[0])


@pytest.mark.parametrize("need", ["truth", "future"])
def test_a_trace_always_has_the_truth(bare, need):
    check_needs(bare, resolve(bare, picky(wants=need)))


def test_a_window_as_long_as_the_prompt_is_enough(tmp_path):
    short = synthesize(tmp_path / "short", prompt=12, window_rows=12)
    check_needs(short, resolve(short, "snapkv(hold=tokens(40), window=32)"))


def test_what_is_protected_must_fit_from_the_first_cut_on(trace):
    check_needs(trace, resolve(trace, "streaming_llm(hold=share(0.1))"))  # 6 of 60 tokens, 5 of them protected
    assert "streaming_llm(hold=share(0.08" in refusal(trace, "streaming_llm(hold=share(0.08))")


FLOOR_ABOVE_CAP = "quest(read=gap(min=1, floor=tokens(64), cap=pages(2)), page=16)"


def test_a_floor_above_the_cap_in_another_unit_is_refused_before_any_work(trace):
    told = refusal(trace, FLOOR_ABOVE_CAP)
    assert told.startswith("gap(floor=tokens(64), cap=pages(2)): with page=16 and 61 visible tokens")
    assert told.endswith("the floor is 4 pages and the cap 2; lower floor= or raise cap=")
    assert "\n" not in told
    check_needs(trace, resolve(trace, FLOOR_ABOVE_CAP.replace("tokens(64)", "tokens(47)")))  # 2 whole pages


def test_a_floor_that_grows_past_the_cap_is_refused_too(trace):
    check_needs(trace, resolve(trace, "quest(read=gap(min=1, floor=share(0.5), cap=pages(4)), page=8)"))  # 3, later 4 pages
    assert "and 70 visible tokens" in refusal(trace, "quest(read=gap(min=1, floor=share(0.58), cap=pages(4)), page=8)")
