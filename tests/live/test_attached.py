"""`with kvsim.live(model, policy)`: the model as it is used, under one policy, and as it was afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kvsim
from kvsim.capture.prompt import CONTEXT, Prompt
from kvsim.errors import WrongUse
from tests.capture import tiny, words
from tests.capture.test_run import touched
from tests.live.test_decode import FAMILIES, made

PROMPT, STEPS = 40, 16
POLICY = "h2o(hold=tokens(20)) >> quest(read=pages(3), page=4)"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_beyond_the_context_says_what_the_model_says(family):
    model, prompt = tiny.model(family), tiny.tokens(PROMPT)
    alone = tiny.generated(model, prompt, STEPS)
    with kvsim.live(model, "h2o(hold=tokens(999))", steps=STEPS) as found:
        assert tiny.generated(model, prompt, STEPS) == alone
    window = found.layers[0].window
    assert found.held[-1] == (PROMPT + STEPS - 1 if all(x.window is None for x in found.layers) else found.held[-1])
    assert window is None or found.held[0] <= PROMPT + 1
    assert tiny.generated(model, prompt, STEPS) == alone


def test_a_policy_says_what_its_row_of_a_batch_says():
    from kvsim.live.decode import following_own

    model, prompt = tiny.model("llama"), tiny.tokens(PROMPT)
    batch = made("llama", [POLICY], STEPS, Prompt(tuple(prompt), (CONTEXT,) * PROMPT, PROMPT), following_own)
    with kvsim.live(model, POLICY) as found:
        said = tiny.generated(model, prompt, STEPS)
        again = tiny.generated(model, prompt, STEPS)  # a new prompt begins anew
    assert said == batch.fed[:, 1].tolist() == again
    assert said != tiny.generated(model, prompt, STEPS)
    assert found.read == pytest.approx(batch.read[:, : STEPS - 1, 1].mean(0).tolist())


def test_the_example_of_the_docs_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "live.md").read_text()
    example = next(x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "kvsim.live(" in x)
    model = tiny.model("llama", vocab_size=words.SIZE)
    exec(example, {"kvsim": kvsim, "model": model, "tokenizer": words.tokenizer()})
    read, held = map(float, capsys.readouterr().out.split())
    assert read == held < 60


def test_all_is_put_back_even_after_an_error():
    model = tiny.model("llama")
    before = touched(model)

    def fails() -> None:
        with kvsim.live(model, POLICY):
            assert touched(model) != before
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert touched(model) == before


def test_what_cannot_be_lived_is_refused_by_name():
    model, ids = tiny.model("llama"), torch.tensor([tiny.tokens(8)])
    with kvsim.live(model, POLICY, steps=3), torch.no_grad():
        with pytest.raises(WrongUse, match="more than 3 decode steps"):
            tiny.generated(model, tiny.tokens(8), 5)
        with pytest.raises(WrongUse, match="a forward of batch 2"):
            model.generate(ids.repeat(2, 1), attention_mask=torch.ones(2, 8), max_new_tokens=2)
        with pytest.raises(WrongUse, match="without a cache"):
            model(ids, use_cache=False)
    with pytest.raises(WrongUse, match="the model is compiled"), kvsim.live(torch.compile(model), POLICY):
        pass
    with pytest.raises(WrongUse, match="oracle_keep needs future"), kvsim.live(model, "oracle_keep(hold=tokens(9))"):
        pass
    odd = tiny.model("llama")
    odd.config._attn_implementation = "flex_attention"
    with pytest.raises(WrongUse, match="attention backend"), kvsim.live(odd, POLICY):
        pass
