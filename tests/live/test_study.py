"""A study's tables say what its decodes did, and a study that stopped goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from kvsim import tables
from kvsim.capture import tasks
from kvsim.capture.layers import probe
from kvsim.capture.prompt import FORCED, FREE, QUESTION
from kvsim.capture.recorder import ALL
from kvsim.errors import WrongUse
from kvsim.geometry import Need
from kvsim.live.decode import decode
from kvsim.live.needs import attended, needs_of
from kvsim.live.prefill import prefill, recorded
from kvsim.live.study import How, bench, run, running
from kvsim.live.twins import twins
from kvsim.metrics import closed_loop
from kvsim.policies.keep.streaming_llm import streaming_llm
from kvsim.replay.run import replay
from kvsim.trace.open import open_trace
from kvsim.trace.write import TraceWriter
from kvsim.units import tokens
from tests.capture import tiny, words

POLICIES = ("h2o(hold=tokens(999))", "h2o(hold=share(0.2))", "quest(read=share(0.2), page=8)")
FULL = "full() >> everything()"
HOW = How(answer=6, free=True)


def model():
    return tiny.model("llama", vocab_size=words.SIZE, max_position_embeddings=512)


def prompts():
    tokenizer, text = words.tokenizer(), tasks.read_text()
    made = [("needle", tasks.make("needle", tokenizer, text, seed, tokens=200)) for seed in (0, 1)]
    return [*made, ("plain", tasks.make("plain", tokenizer, text, 0, tokens=200, steps=12))]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("live") / "study"
    return run(bench(model(), POLICIES, words.tokenizer(), HOW), prompts(), out)


def read(study: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(study / f"{name}.parquet").with_columns(pl.col("policy").cast(pl.String))


def test_every_policy_has_every_row(study):
    answers, steps, layers = (read(study, x) for x in ("answers", "steps", "layers"))
    fed = [len(p.fed) for _, p in prompts()]
    assert answers.height == 4 * (2 + 2 + 1)
    assert steps.height == 4 * (2 * (fed[0] + 6 + fed[1] + 6) + fed[2])
    assert layers.height == 4 * 2 * (fed[0] + 6 + fed[1] + 6 + fed[2])
    assert layers.filter(pl.col("policy") != FULL)["open_rel_l2"].null_count() == 0
    assert json.loads((study / "live.json").read_text())["open_loop"] is False


def test_full_attention_and_budgets_beyond_the_context_are_the_same(study):
    steps = read(study, "steps")
    same = steps.filter(pl.col("policy").is_in([FULL, read(study, "answers")["policy"].unique(maintain_order=True)[1]]))
    assert (same["kl"] == 0).all()
    assert same["top1_agree"].all()


def test_a_free_greedy_run_diverges_where_the_forced_one_says(study):
    answers = read(study, "answers").filter(pl.col("task") == "needle")
    by = {
        mode: answers.filter(pl.col("mode") == mode).sort("policy", "request")["first_divergent"].to_list()
        for mode in ("forced", "free")
    }
    assert by["forced"] == by["free"]
    assert any(x is not None for x in by["free"])
    steps = read(study, "steps").filter(pl.col("mode") == "free")
    assert steps["kl"].null_count() > 0


def test_the_answer_is_judged_by_its_text_and_its_likelihood(study):
    answers, steps = read(study, "answers"), read(study, "steps")
    for row in answers.filter(pl.col("mode") == "forced").iter_rows(named=True):
        mine = steps.filter(
            pl.col("policy") == row["policy"], pl.col("request") == row["request"], pl.col("mode") == "forced"
        ).sort("step")
        following = mine["role"].to_numpy()[1:]
        nll = mine["nll"].to_numpy()[:-1][np.isin(following, (FORCED, FREE))]
        assert row["nll"] == pytest.approx(nll.mean(), rel=1e-5)
        assert (row["score"] is None) == (row["task"] == "plain")
    text = answers.filter(pl.col("mode") == "forced", pl.col("policy") == FULL, pl.col("request") == 0)["text"].item()
    said = steps.filter(pl.col("mode") == "forced", pl.col("policy") == FULL, pl.col("request") == 0).sort("step")
    first = said.filter(pl.col("role") == QUESTION).height
    assert text == words.tokenizer().decode(said["token"].to_list()[first:], skip_special_tokens=True)


def test_a_study_that_stopped_goes_on_and_ends_with_the_same_rows(study, tmp_path):
    found = bench(model(), POLICIES, words.tokenizer(), HOW)

    for n in (0, 1):
        stopped = running(found, prompts(), tmp_path / "s")
        assert next(stopped)[0] == n
        stopped.close()
    assert not (tmp_path / "s").exists()
    assert closed_loop.scores(closed_loop.open_study(tmp_path / "s.partial"))["samples"].max() == 2
    with pytest.raises(WrongUse, match="begun with another model, policies"):
        run(bench(model(), POLICIES[1:], words.tokenizer(), HOW), prompts(), tmp_path / "s")
    assert [n for n, _ in running(found, prompts(), tmp_path / "s")] == [2]
    for name in tables.LIVE_TABLES:
        assert read(tmp_path / "s", name).equals(read(study, name))
    with pytest.raises(WrongUse, match="a study is never overwritten"):
        run(found, prompts(), tmp_path / "s")


def test_twins_that_write_heads_alone_write_the_same_heads():
    found = bench(model(), (*POLICIES, "kivi(bits=2, group=8, residual=8)", "random_read(read=pages(3))"), words.tokenizer(), HOW)
    prompt = prompts()[0][1]
    needs = recorded(needs_of(found.policies, found.layers), prompt.prefill)
    prefilled = prefill(found.model, found.anatomy, found.layers, prompt, needs)
    sources = decode(found.model, found.anatomy, prefilled, found.rows, len(prompt.fed) + 2).sources(0)
    for whole, brief in zip(twins(sources, found.policies), twins(sources, found.policies, heads_only=True), strict=True):
        assert list(brief) == ["heads"]
        measured = [c for c in brief["heads"].column_names if brief["heads"][c].null_count < brief["heads"].num_rows]
        assert {"mass_recall", "rel_l2", "evidence_read", "evidence_dense", "read_tokens"} <= set(measured)
        assert brief["heads"].select(measured).equals(whole["heads"].select(measured))


def test_a_trace_of_row_0_replays_to_the_tables_of_the_twins(tmp_path):
    """What row 0 was fed, written as a trace: the replay of the trace, on disk, is the twin in memory, byte for byte."""
    found = bench(model(), POLICIES[1:], words.tokenizer(), HOW)
    prompt = prompts()[0][1]
    prefilled = prefill(found.model, found.anatomy, found.layers, prompt, ALL)
    decoded = decode(found.model, found.anatomy, prefilled, found.rows, len(prompt.fed) + 6)
    sources, total = decoded.sources(0), decoded.request.total
    spans = [{"label": s.label, "start": s.start, "stop": s.stop, "kind": s.kind} for s in prompt.spans]
    request = {"request": 0, "prompt_tokens": prompt.prefill, "total_tokens": total, "mode": prompt.mode, "spans": spans}
    request |= {
        "roles": decoded.request.roles.tolist(),
        "token_ids": [*prompt.tokens, *decoded.fed[len(prompt.fed) :, 0].tolist()],
    }
    rows = [row | {"captured": True} for row in found.anatomy.rows]
    with TraceWriter(tmp_path / "t", "float32", {}, {}, [request], rows) as trace:
        for i, s in sources.items():
            trace.kv(0, i, 0, s.k, s.v, s.k_pre)
            trace.values(0, i, 0, s.wo_norm)
            trace.prefill(0, i, s.mass, np.arange(prompt.prefill, 0, -1, dtype=np.int32))
            steps = np.arange(-len(s.window_q), len(s.q))
            trace.q(0, i, steps, np.concatenate([s.window_q, s.q]))
    assert open_trace(tmp_path / "t").requests[0].digest == decoded.request.digest
    again = replay(tmp_path / "t", found.policies, tmp_path / "r", workers=1)
    for policy, mine in zip(found.policies, twins(sources, found.policies), strict=True):
        for name in ("ledger", "heads"):
            theirs = (
                pl.read_parquet(again.path / f"{name}.parquet")
                .with_columns(pl.col("policy").cast(pl.String))
                .filter(pl.col("policy") == policy.id)
            )
            ours = pl.DataFrame(pl.from_arrow(mine[name])).with_columns(pl.col("policy").cast(pl.String))
            by = [x for x in ("layer", "kv_head", "q_head", "step") if x in ours.columns]
            assert ours.sort(by).select(theirs.columns).equals(theirs.sort(by))


def test_what_a_study_cannot_do_is_refused_by_name():
    small = model()
    for policies, how, line in (
        ([], How(), "no policy to run beside full attention"),
        (["full()"], How(), "no policy to run beside full attention"),
        (POLICIES, How(inject=(7,)), "inject in layers"),
        (["oracle_keep(hold=tokens(9))"], How(), "oracle_keep needs future"),
    ):
        with pytest.raises(WrongUse, match=line):
            bench(small, policies, None, how)
    small.train()
    with pytest.raises(WrongUse, match="training mode"):
        bench(small, POLICIES)
    compiled, odd = torch.compile(model()), model()
    with pytest.raises(WrongUse, match="the model is compiled"):
        bench(compiled, POLICIES)
    odd.config._attn_implementation = "flex_attention"
    with pytest.raises(WrongUse, match="attention backend"):
        bench(odd, POLICIES)
    with pytest.raises(
        WrongUse, match=r"wants needs index_table: a running model does not have it; replay a trace that does \(layer 0\)"
    ):
        bench(model(), [wants(hold=tokens(9))])


@dataclass(frozen=True, kw_only=True)
class wants(streaming_llm):
    """Asks for a table that nothing supplies."""

    @property
    def needs(self):
        return frozenset({Need("index_table")})


def test_a_layer_that_attends_to_the_rows_of_another_is_refused():
    anatomy = probe(model())
    first, second = anatomy.layers
    shared = replace(anatomy, layers=[first, replace(second, kv_source_layer=0)])
    with pytest.raises(WrongUse, match="layer 1 attends to the rows of layer 0"):
        attended(shared)
