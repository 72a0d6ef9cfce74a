"""A policy in a running model: identical to full attention where it must be, and the engine's own decisions where it differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsim.capture.layers import probe
from kvsim.capture.prompt import CONTEXT, QUESTION, Prompt
from kvsim.capture.run import capture
from kvsim.engine.fate import tiers_and_events
from kvsim.errors import WrongUse
from kvsim.geometry import Span
from kvsim.live.decode import Decoded, decode, following_own, rows_of, sampling
from kvsim.live.needs import attended, check, needs_of
from kvsim.live.prefill import prefill, recorded
from kvsim.live.row import BLOCK
from kvsim.live.twins import twins
from kvsim.policies.language import parse_policy, per_layer
from kvsim.trace.open import open_trace
from tests.capture import tiny

PROMPT, STEPS = 40, 20
FAMILIES = [*tiny.FAMILIES]
EVERYTHING = (
    "h2o(hold=tokens(999))",
    "tova(hold=tokens(999))",
    "quest(read=pages(99), page=4)",
    "streaming_llm(hold=tokens(999))",
)
READ = ("quest(read=pages(4), page=4)", "oracle(read=pages(3), page=4)", "quest(read=exact(r=3), page=4)")
KEEP = ("h2o(hold=tokens(20))", "tova(hold=tokens(20))", "streaming_llm(hold=tokens(20))", "snapkv(hold=tokens(20), window=8)")
MORE = (
    "adakv(hold=tokens(20), window=8)",
    "criticalkv(hold=tokens(20), window=8)",
    'defensivekv(hold=tokens(20), window=8, scope="model")',
    "knorm(hold=tokens(20))",
    "r_kv(hold=tokens(20), window=4, period=6)",
    "expected_attention(hold=tokens(20))",
    "h2o(hold=tokens(24)) >> quest(read=pages(3), page=4)",
    'quest(read=pages(3), page=4, heads="share", refresh=3)',
    "quest(read=pages(2), page=4)",  # ranked with the other budget of READ
    'quest(read=pages(3), page=4, heads="max")',
    'quest(read=pages(3), page=4, heads="share", sinks=2)',
    "random_read(read=pages(3), page=4)",
    'kivi(bits=2, group=8, residual=8) >> quest(read=pages(4), page=4, index=boxes(keys="recon"))',
    'kivi(bits=2, group=8, residual=8) >> quest(read=exact(r=3), page=4, index=boxes(keys="recon"))',
)
CODED = ("kivi(bits=2, group=8, residual=8)", "qevict(hold=tokens(30), recent=tokens(8), sinks=2)")


def made(
    family: str, policies: Any, steps: int = STEPS, prompt: Prompt | None = None, follow: Any = None, **more: Any
) -> Decoded:
    model = tiny.model(family, **more)
    given = prompt or Prompt(tuple(tiny.tokens(PROMPT)), (CONTEXT,) * PROMPT, PROMPT)
    parsed, anatomy = [parse_policy(x) for x in policies], probe(model)
    layers = attended(anatomy)
    check(parsed, layers, anatomy)
    found = prefill(model, anatomy, layers, given, recorded(needs_of(parsed, layers), given.prefill))
    options = {} if follow is None else {"follow": follow}
    return decode(model, anatomy, found, rows_of(parsed), steps, keep_picks=True, keep_logits=True, **options)


def kl(found: Decoded) -> np.ndarray:
    """f64[N, B]."""
    log = torch.tensor(found.logits).double().log_softmax(-1)
    return (log[:, :1].exp() * (log[:, :1] - log)).sum(-1).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_full_attention_says_what_the_model_says_and_budgets_beyond_the_context_change_nothing(family):
    found = made(family, EVERYTHING)
    model = tiny.model(family)
    assert found.fed[:, 0].tolist() == tiny.generated(model, tiny.tokens(PROMPT), STEPS)
    assert (kl(found) == 0).all()
    assert (found.logits == found.logits[:, :1]).all()
    assert (found.rel_l2 == 0).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_row_decides_what_the_engine_decides_on_the_same_queries_keys_and_values(family):
    policies = [*READ, *KEEP, *(MORE if family == "llama" else ()), *(CODED if family == "llama" else CODED[:1])]
    found = made(family, policies)
    assert (kl(found)[:, 1:].mean(0) > 0).all()
    for b, row in enumerate(found.rows[1:], 1):
        same_decisions(found, b, twins(found.sources(b), [row.policy], plans=True)[0], range(STEPS), found.layers)


def same_decisions(found: Decoded, b: int, tables: dict[str, Any], steps: Any, layers: Any) -> None:
    """Pages read and the fate of every token, of row b and of a replay."""
    for layer in layers:
        part = found.parts[layer][b].parts[0]
        if part.picks:
            for h in range(found.sources(b)[layer].layer.kv_heads):
                for step in steps:
                    picked = part.picks[step][h]
                    mine = [picked.ids[x].tolist() for x in picked.chosen]
                    rows = [r for r in tables["plans"].to_pylist() if (r["layer"], r["kv_head"], r["step"]) == (layer, h, step)]
                    theirs = [r["pages"] for r in sorted(rows, key=lambda r: r["q_head"])]
                    assert theirs == (mine if len(theirs) > 1 else mine[:1]), (found.rows[b].id, layer, h, step)
        if part.now is not None:
            source = found.sources(b)[layer]
            for h in range(source.layer.kv_heads):
                tiers, _ = tiers_and_events(source, part.now.bank.record, part.now.bank.codecs, h)
                placed = {r["step"]: r["runs"] for r in tiers if r["step"] in (-1, *steps)}
                replayed = {
                    r["step"]: r["runs"]
                    for r in tables["tiers"].to_pylist()
                    if (r["layer"], r["kv_head"]) == (layer, h) and r["step"] in (-1, *steps)
                }
                assert placed == replayed, (found.rows[b].id, layer, h)


def test_open_loop_is_closed_loop_in_the_first_layer_and_at_the_first_cut_in_all():
    policies = [parse_policy(x) for x in (*READ, *KEEP, *CODED)]
    found = made("llama", policies)
    for b, tables in enumerate(twins(found.sources(0), policies, plans=True), 1):
        same_decisions(found, b, tables, range(STEPS), found.layers[:1])
        if policies[b - 1].default.part("read").page is None:
            same_decisions(found, b, tables, range(0), found.layers)
        first = np.array([r["rel_l2"] for r in tables["heads"].to_pylist() if (r["layer"], r["step"]) == (found.layers[0], 0)])
        assert found.rel_l2[0, 0, b] == pytest.approx(first.mean(), abs=2e-6)


def test_policies_without_feedback_take_the_same_decisions_open_and_closed_in_all_layers():
    policies = [parse_policy(x) for x in ("streaming_llm(hold=tokens(20))", "recency(read=pages(3), page=4)", CODED[0])]
    found = made("llama", policies)
    for b, tables in enumerate(twins(found.sources(0), policies, plans=True), 1):
        same_decisions(found, b, tables, range(STEPS), found.layers)


def test_a_repeat_is_the_same_to_the_last_bit_and_so_is_a_row_whatever_its_neighbours_decide():
    a, b = made("llama", (*READ, *KEEP)), made("llama", (*READ, *KEEP))
    assert (a.logits == b.logits).all()
    assert (a.fed == b.fed).all()


def test_held_rows_never_come_back_and_budgets_hold():
    found = made("llama", KEEP[:3])
    for b in (1, 2, 3):
        assert (found.read[:, :, b] <= 21).all()
        assert (found.held[:, :, b] == found.read[:, :, b]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rows_differ_only_by_policy(dtype):
    found = made("llama", (*EVERYTHING[:2], *KEEP[:1]), dtype=dtype)
    assert (kl(found)[:, :3] == 0).all()
    assert kl(found)[:, 3].mean() > 0


def test_a_policy_per_layer_and_head_is_sparse_there_only():
    policy = per_layer({(1, 1): "streaming_llm(hold=tokens(8))"}, default="full()")
    found = made("llama", [policy])
    read = found.parts[1][1].source
    assert (found.read[0, :, 1] == found.read[0, :, 0]).all()
    assert found.read[1, 0, 1] == pytest.approx((read.request.prompt + 1 + 9) / 2)


def test_the_question_is_fed_to_every_row_and_each_then_goes_its_own_way():
    ids = tuple(tiny.tokens(PROMPT + 5))
    prompt = Prompt(ids, (CONTEXT,) * PROMPT + (QUESTION,) * 5, PROMPT)
    found = made("llama", KEEP[:2], prompt=prompt, follow=following_own)
    assert (found.fed[:5] == np.array(ids[PROMPT:])[:, None]).all()
    assert (found.fed[5:] == found.logits[4:-1].argmax(-1)).all()
    drawn = [made("llama", EVERYTHING[:1], prompt=prompt, follow=sampling(seed)).fed for seed in (0, 0, 1)]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0][:, 0] == drawn[0][:, 1]).all()
    assert (drawn[0] != drawn[2]).any()


def test_injected_evidence_is_read_where_it_is_held_and_nowhere_else():
    prompt = Prompt(tuple(tiny.tokens(PROMPT)), (CONTEXT,) * PROMPT, PROMPT, (Span("needle", 10, 14, "evidence"),))
    model, policies = (
        tiny.model("llama"),
        [parse_policy(x) for x in ("recency(read=pages(1), page=4)", "streaming_llm(hold=tokens(9))")],
    )
    anatomy = probe(model)
    layers = attended(anatomy)
    found = decode(
        model, anatomy, prefill(model, anatomy, layers, prompt, recorded(frozenset(), 40)), rows_of(policies, inject=[1]), 4
    )
    assert [r.id.endswith("evidence in layers 1-1") for r in found.rows] == [False, False, False, True, True]
    assert (found.injected[1, :, 3] == 4).all()
    assert (found.injected[0] == 0).all()
    assert (found.injected[:, :, 4] == 0).all()  # it was evicted before: nothing to read
    assert (found.read[1, :, 3] == found.read[1, :, 1] + 4).all()


def test_what_a_running_model_cannot_supply_is_refused_by_name():
    model = tiny.model("llama")
    anatomy = probe(model)
    layers = attended(anatomy)
    with pytest.raises(WrongUse, match="oracle_keep needs future: a running model has none"):
        check([parse_policy("oracle_keep(hold=tokens(9))")], layers, anatomy)
    with pytest.raises(WrongUse, match="kv dtype 'int3'"):
        attended(anatomy, "int3")


def test_divergence_and_likelihood_are_those_of_the_logits():
    found = made("llama", KEEP[:2])
    assert found.kl == pytest.approx(kl(found), abs=1e-9)
    assert (found.said == found.logits.argmax(-1)).all()
    log = torch.tensor(found.logits).double().log_softmax(-1).numpy()
    nll = -np.take_along_axis(log[:-1], found.fed[1:, :, None], 2)[..., 0]
    assert found.nll[:-1] == pytest.approx(nll, abs=1e-9)
    assert np.isnan(found.nll[-1]).all()


def test_rows_go_on_deciding_alike_when_the_dead_have_left_their_places():
    found = made("llama", ("h2o(hold=tokens(20)) >> quest(read=pages(3), page=4)", "tova(hold=tokens(12))"), steps=BLOCK + 8)
    for b, row in enumerate(found.rows[1:], 1):
        same_decisions(found, b, twins(found.sources(b), [row.policy], plans=True)[0], range(BLOCK + 8), found.layers)


def test_a_row_is_fed_what_a_capture_records(tmp_path):
    """All side tables, of the prompt and of what follows it; products of a batch may round otherwise."""
    found = made("llama", [MORE[1], CODED[1], KEEP[0]])
    capture(tiny.model("llama"), tiny.tokens(PROMPT), tmp_path / "t", steps=STEPS)
    trace = open_trace(tmp_path / "t")
    for layer in trace.captured_layers:
        mine, theirs = found.sources(0)[layer.id], trace.lane(trace.requests[0], layer)
        for name in ("k", "v", "k_pre", "q", "wo_norm", "mass"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-4, err_msg=name)
        rows = len(mine.window_q)
        assert rows == 8
        np.testing.assert_allclose(mine.window_q, theirs.window_q[-rows:], rtol=1e-4, atol=1e-4)
