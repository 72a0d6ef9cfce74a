"""Traces from an engine's forwards: the same rows in whatever parts they come, and nothing that is not a request from its start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from kvsim.capture.serving import Engine, Part, Serving
from kvsim.errors import BadTrace, WrongUse
from kvsim.trace.check import check_trace
from kvsim.trace.open import open_trace
from tests.capture.serving_engine import ENGINE, LAYERS, ROWS, TOTAL, drawn, ids, rows, tokens

ROOT = Path(__file__).parents[2]
PROMPT = 40


def forward(serving: Serving, *parts: Part, padding: int = 0) -> None:
    serving.forward(parts, ids(parts))
    for layer in LAYERS:
        serving.attention(layer.id, *rows(parts, layer.id, padding))


def serve(folder: Path, chunks: list[int], steps: int = 5) -> Path:
    """One request in a prompt of these chunks and so many steps -> its trace."""
    serving = Serving(folder, ENGINE)
    serving.begin("a", tokens("a")[: sum(chunks)])
    at = 0
    for n in [*chunks, *[1] * steps]:
        forward(serving, Part("a", at, n))
        at += n
    serving.end("a")
    return folder / "request-00000"


def is_drawn(path: Path, request: str, prompt: int, total: int) -> None:
    """A trace holds what was drawn for a request, all of it."""
    assert not list(check_trace(path))
    trace = open_trace(path)
    assert (trace.requests[0].prompt, trace.requests[0].total) == (prompt, total)
    for layer in trace.captured_layers:
        lane = trace.lane(trace.requests[0], layer)
        q, k, v, out = (x[:total] for x in drawn(request, layer.id))
        assert (lane.k == k.swapaxes(0, 1)).all()
        assert (lane.v == v.swapaxes(0, 1)).all()
        assert lane.out is not None
        assert (lane.q == q[prompt:]).all()
        assert (lane.out == out[prompt:]).all()
        assert (lane.window_q == q[:prompt]).all()
    [row] = pq.read_table(next((path / "requests").iterdir()), partitioning=None).to_pylist()
    assert row["token_ids"] == tokens(request)[:total]
    assert row["roles"] == [0] * prompt + [3] * (total - prompt)
    assert json.loads(row["meta"]) == {"engine_request": request}


@pytest.mark.parametrize("chunks", [[1], [PROMPT], [1, 1, 1], [20, 20, 3], [7, 1, 20, 12]], ids=str)
def test_a_prompt_comes_in_any_chunks(tmp_path, chunks):
    is_drawn(serve(tmp_path, chunks), "a", sum(chunks), sum(chunks) + 5)


def test_attention_mass_is_that_of_one_chunk(tmp_path):
    whole, parts = (open_trace(serve(tmp_path / str(len(c)), c)) for c in ([PROMPT], [7, 1, 20, 12]))
    for layer in LAYERS:
        one, other = (t.lane(t.requests[0], layer).mass for t in (whole, parts))
        assert one is not None
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_requests_share_forwards_in_any_order_and_with_padding(tmp_path):
    serving = Serving(tmp_path, ENGINE)
    serving.begin("a", tokens("a")[:PROMPT])
    forward(serving, Part("a", 0, 30), padding=3)
    serving.begin("b", tokens("b")[:6])
    forward(serving, Part("b", 0, 6), Part("a", 30, 10))
    forward(serving, Part("a", 40, 1), Part("b", 6, 1), padding=2)
    serving.end("a")
    forward(serving, Part("b", 7, 1))
    serving.close()
    is_drawn(tmp_path / "request-00000", "a", PROMPT, 41)
    is_drawn(tmp_path / "request-00001", "b", 6, 8)


def test_only_the_layers_marked_are_captured(tmp_path):
    serving = Serving(tmp_path, Engine([ROWS[0] | {"captured": False}, ROWS[1]], "float32", {}, {}))
    serving.begin("a", tokens("a")[:5])
    forward(serving, Part("a", 0, 5))
    forward(serving, Part("a", 5, 1))
    serving.close()
    trace = open_trace(tmp_path / "request-00000")
    assert [x.id for x in trace.layers] == [0, 1]
    assert [x.id for x in trace.captured_layers] == [1]
    assert trace.manifest["capture"]["options"]["k_pre"] is False


def test_a_request_without_a_step_stays_partial(tmp_path):
    serving = Serving(tmp_path, ENGINE)
    serving.begin("a", tokens("a")[:5])
    serving.begin("b", tokens("b")[:5])
    forward(serving, Part("a", 0, 5))
    serving.close()
    with pytest.raises(BadTrace, match="partial"):
        open_trace(tmp_path / "request-00000")
    assert not (tmp_path / "request-00001").exists()  # of which nothing was seen


def begun(folder: Path, seen: int = 0) -> Serving:
    serving = Serving(folder, ENGINE)
    serving.begin("a", tokens("a")[:10])
    if seen:
        forward(serving, Part("a", 0, min(seen, 10)))
    for at in range(10, seen):
        forward(serving, Part("a", at, 1))
    return serving


@pytest.mark.parametrize(
    ("seen", "part", "words"),
    [
        (0, Part("a", 4, 6), "request a starts at position 4: .*prefix cach"),
        (10, Part("a", 0, 10), "goes on at position 0 after 10 tokens: preempted"),
        (12, Part("a", 11, 1), "goes on at position 11 after 12 tokens: .*speculative"),
        (10, Part("a", 10, 3), "3 tokens at position 10 of a prompt of 10.*speculative"),
        (0, Part("a", 0, 11), "11 tokens at position 0 of a prompt of 10"),
        (0, Part("b", 0, 3), "request b was never begun"),
    ],
)
def test_what_is_not_the_next_part_of_a_request_is_refused(tmp_path, seen, part, words):
    serving = begun(tmp_path, seen)
    with pytest.raises(WrongUse, match=words) as e:
        serving.forward([part])
    assert "\n" not in str(e.value)
    serving.abandon()
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_layer_that_shows_nothing_is_refused(tmp_path):
    serving = begun(tmp_path, 10)
    part = Part("a", 10, 1)
    serving.forward([part])
    serving.attention(0, *rows([part], 0))
    with pytest.raises(WrongUse, match=r"layers \[1\] did not show their attention.*eager"):
        serving.forward([Part("a", 11, 1)])


@pytest.mark.parametrize("wrong", ["scale", "window", "softcap", "sinks"])
def test_a_layer_that_is_not_what_was_told_is_refused(tmp_path, wrong):
    other: dict[str, Any] = {"scale": 0.5, "window": 3, "softcap": 1.0, "sinks": None}
    serving = Serving(tmp_path, Engine([ROWS[0], ROWS[1] | {wrong: other[wrong]}], "float32", {}, {}))
    serving.begin("a", tokens("a")[:20])
    with pytest.raises(WrongUse, match="layer 1 is not plain attention"):
        forward(serving, Part("a", 0, 20))


def test_rows_of_other_heads_are_refused(tmp_path):
    serving = Serving(tmp_path, ENGINE)
    serving.begin("a", tokens("a")[:20])
    parts = [Part("a", 0, 20)]
    q, k, v, out = rows(parts, 0)
    serving.forward(parts)
    with pytest.raises(WrongUse, match=r"layer 0: q, k, v, out are .*\(4, 8\).*expected"):
        serving.attention(0, q, torch.cat([k, k], dim=1), v, out)


@pytest.mark.parametrize(("prompt", "words"), [([], "no token ids"), ([1], "begins twice")])
def test_a_request_begins_once_with_tokens(tmp_path, prompt, words):
    with pytest.raises(WrongUse, match=words):
        begun(tmp_path).begin("a" if prompt else "b", prompt)


def test_nothing_to_capture_and_a_folder_in_use(tmp_path):
    with pytest.raises(WrongUse, match="no layer"):
        Serving(tmp_path, Engine([ROWS[0] | {"captured": False}], "float32", {}, {}))
    serve(tmp_path, [4])
    with pytest.raises(WrongUse, match="something already"):
        begun(tmp_path)


def test_the_adapter_of_the_docs_writes_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/serving.md").read_text()
    [code] = [x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Serving(" in x]
    exec(code, {})
    assert not list(check_trace(tmp_path / "traces/mine/request-00000"))
    trace = open_trace(tmp_path / "traces/mine/request-00000")
    assert trace.requests[0].total > trace.requests[0].prompt
    assert trace.requests[0].total < TOTAL
