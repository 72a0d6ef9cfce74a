"""The generator's answers are known: they are recomputed here from what it wrote, by attention written out from its definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvsim.errors import WrongUse
from kvsim.synth.generate import OPTIONAL, WORKLOADS, synthesize
from kvsim.trace.bits import widen
from kvsim.trace.check import check_trace
from kvsim.trace.reference import attend

OPTIONS: list[dict[str, Any]] = [
    {},
    {"prompt": 200, "head_dim": 32, "q_heads": 6, "kv_heads": 3},
    {"prompt": 200, "dtype": "bfloat16", "softcap": 20.0},
    {"prompt": 200, "dtype": "float32", "learned_sinks": True, "value_dim": 5, "layers": 2},
    {"prompt": 200, "rope": False, "needles": 3, "head_dim": 4},
]


def attention(trace, which):
    """Probabilities [Hq, n, T] of the decode queries, or of the window's, in every captured layer of the first request."""
    for layer in trace.captured_layers:
        lane, g = trace.lane(trace.requests[0], layer), layer.group
        q, t = (lane.q, lane.t) if which == "decode" else (lane.window_q, lane.window_t)
        heads = [attend(widen(q[:, h * g : h * g + g]), t, widen(lane.k[h]), layer, h)[0] for h in range(layer.kv_heads)]
        yield lane, t, np.concatenate(heads, axis=1).swapaxes(0, 1)


# ------------------------------------------------------------------------------------------------ attention itself
def test_attention_is_its_definition(tmp_path):
    trace = synthesize(tmp_path / "t", prompt=20, steps=3, window=9, softcap=6.0, learned_sinks=True, value_dim=3)
    layer, (lane, t, p) = trace.layers[0], next(attention(trace, "decode"))
    k, q = widen(lane.k), widen(lane.q)
    assert layer.sinks
    for head in range(layer.q_heads):
        for n, pos in enumerate(t.tolist()):
            logits = {}
            for j in range(pos - 9 + 1, pos + 1):
                dot = sum(a * b for a, b in zip(q[n, head], k[head // 2, j], strict=True))
                logits[j] = 6.0 * math.tanh(layer.scale * dot / 6.0)
            z = sum(map(math.exp, logits.values())) + math.exp(layer.sinks[head])
            for j in range(trace.requests[0].total):
                assert p[head, n, j] == pytest.approx(math.exp(logits[j]) / z if j in logits else 0.0, abs=1e-12)
            assert lane.lse[n, head] == pytest.approx(math.log(z), abs=1e-5)


# ------------------------------------------------------------------------------------------------ planted answers
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_looks_at_the_needles_and_the_context_does_not(tmp_path, seed, options):
    trace = synthesize(tmp_path / "t", seed=seed, **options)
    (r,) = trace.requests
    needle = r.evidence_mask()
    assert needle.sum() == sum(s.stop - s.start for s in r.evidence)
    assert len(r.evidence) == options.get("needles", 1)
    assert [s.kind for s in r.spans if s.kind != "evidence"] == ["other"]
    for _, _, p in attention(trace, "decode"):
        assert p[:, :, needle].sum(axis=2).min() > 0.3
        assert p[:, :, needle].sum(axis=2).mean() > 0.6
        other = next(s for s in r.spans if s.kind == "other")
        assert p[:, :, other.start : other.stop].sum(axis=2).mean() < 0.1
    for _, t, p in attention(trace, "window"):
        asked = r.roles[t] == 1
        assert p[:, asked][:, :, needle].sum(axis=2).mean() > 0.6
        assert p[:, ~asked][:, :, needle].sum(axis=2).mean() < 0.3


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "needles": 3, "head_dim": 8, "q_heads": 6, "kv_heads": 3}])
def test_what_the_answer_looks_at_swings(tmp_path, options):
    trace = synthesize(tmp_path / "t", **({"prompt": 200, "steps": 12, "needles": 2, "swing": 3} | options))
    (r,) = trace.requests
    sides = [sum(np.isin(np.arange(r.total), range(s.start, s.stop)) for s in r.evidence[i::2]).astype(bool) for i in (0, 1)]
    for lane, _, p in attention(trace, "decode"):
        for step, row in zip(lane.steps.tolist(), p.swapaxes(0, 1), strict=True):
            now = step // 3 % 2
            assert row[:, sides[now]].sum(axis=1).min() > 0.2
            assert row[:, sides[now]].sum(axis=1).mean() > 0.4
            assert row[:, sides[1 - now]].sum(axis=1).mean() < 0.1


def wanted(workload, r, needles, step, head):
    """The needles that a query head looks at, by number: written out once more."""
    steps, every = r.total - r.prompt, list(range(needles))
    return {
        "needle": every,
        "anchors": every,
        "drift": [step * needles // steps],
        "reversal": every[0::2] if 2 * step < steps else every[1::2],
        "sudden": [] if step < steps // 2 else every,
        "several": [head % needles],
        "oscillation": every[step // 2 % 2 :: 2],
    }[workload]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("seed", range(2))
def test_every_step_looks_at_the_needles_of_its_workload(tmp_path, workload, seed):
    swing = 2 if workload == "oscillation" else 0
    trace = synthesize(tmp_path / "t", workload=workload, swing=swing, needles=3, prompt=240, steps=12, seed=seed)
    (r,) = trace.requests
    assert len(r.evidence) == 3
    for lane, _, p in attention(trace, "decode"):
        on = np.stack([p[:, :, s.start : s.stop].sum(axis=2) for s in r.evidence])  # [needles, Hq, steps]
        looks = np.array([[[i in wanted(workload, r, 3, s, h) for s in lane.steps.tolist()] for h in range(4)] for i in range(3)])
        total, somebody = np.where(looks, on, 0).sum(axis=0), looks.any(axis=(0, 1))
        assert total[:, somebody].mean(axis=0).min() > 0.4
        assert total[looks.any(axis=0)].mean() > 0.6
        assert np.where(looks, on, 1).mean(axis=(1, 2)).min() > 0.05
        assert np.where(looks, 0, on).sum(axis=0).mean(axis=0).max() < 0.2


def test_what_the_prompt_foretells(tmp_path):
    """Anchors are looked at all along; of a reversal the question knows the first half alone; of sudden evidence it knows nothing."""
    mass = {}
    for workload in ("anchors", "reversal", "sudden"):
        trace = synthesize(tmp_path / workload, workload=workload, needles=2, prompt=240, head_dim=32, window_rows=40)
        (r,) = trace.requests
        for _, t, p in attention(trace, "window"):
            asked = r.roles[t] == 1
            on = [p[:, :, s.start : s.stop].sum(axis=2) for s in r.evidence]
            mass[workload] = [(x[:, asked].mean(), x[:, ~asked].mean()) for x in on]
    assert all(min(both) > 0.2 for both in mass["anchors"])
    (first, before), (second, _) = mass["reversal"]
    assert first > 0.5
    assert max(before, second) < 0.2
    assert max(max(both) for both in mass["sudden"]) < 0.15


def test_the_default_workload_is_the_one_without_a_name(tmp_path):
    one, other = (synthesize(tmp_path / n, prompt=60, **o) for n, o in (("a", {}), ("b", {"workload": "needle"})))
    assert one.sha256 == other.sha256
    swing, named = (
        synthesize(tmp_path / n, prompt=60, needles=2, swing=2, **o) for n, o in (("c", {}), ("d", {"workload": "oscillation"}))
    )
    assert swing.sha256 == named.sha256 != one.sha256


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workload": "drfit"}, "workload='drfit': expected one of needle, anchors, drift"),
        ({"workload": "drift"}, "workload='drift': expected needles=2 or more"),
        ({"workload": "drift", "needles": 7}, "head_dim=20 or more to hold them apart"),
        ({"workload": "sudden", "needles": 0}, "workload='sudden': expected needles=1 or more"),
        ({"workload": "oscillation", "needles": 2}, "expected swing=1 or more with oscillation"),
        ({"workload": "drift", "needles": 2, "swing": 3}, "and 0 with any other"),
    ],
)
def test_a_workload_that_cannot_be_made_is_refused(tmp_path, options, said):
    with pytest.raises(WrongUse) as e:
        synthesize(tmp_path / "t", **options)
    assert said in str(e.value)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("options", OPTIONS)
def test_the_context_looks_at_the_sink(tmp_path, options):
    trace = synthesize(tmp_path / "t", **options, window_rows=40)
    for _, t, p in attention(trace, "window"):
        assert p[:, trace.requests[0].roles[t] == 0, 0].mean() > 0.1  # one token of 40, or of 200


def test_the_context_prefers_recent_tokens(tmp_path):
    trace = synthesize(tmp_path / "t", prompt=200, window_rows=40)
    for _, t, p in attention(trace, "window"):
        near = [p[:, n, at - 8 : at + 1].sum(axis=1) for n, at in enumerate(t) if trace.requests[0].roles[at] == 0]
        assert np.mean(near) > 2 * 9 / 200


def test_prefill_masses_are_the_sum_over_all_prompt_queries(tmp_path):
    trace = synthesize(tmp_path / "t", prompt=30, window_rows=30, learned_sinks=True)
    ((lane, _, p),) = attention(trace, "window")
    assert np.allclose(lane.mass, p[:, :, :30].sum(axis=1), atol=1e-5)


def test_norms_of_values_grow_with_them(tmp_path):
    """The L1 norm of W v is a norm: 0 < it, and equal values have equal norms."""
    trace = synthesize(tmp_path / "t", value_dim=1)
    ((lane, _, _),) = attention(trace, "decode")
    v = np.abs(widen(lane.v))[:, :, 0]
    for head, norm in enumerate(lane.wo_norm):
        ratio = norm / v[head // 2]
        assert np.allclose(ratio, ratio[0], rtol=1e-5)
        assert ratio[0] > 0


# ------------------------------------------------------------------------------------------------ options
def test_the_same_arguments_write_the_same_bytes(tmp_path):
    first, again = (synthesize(tmp_path / name, requests=2, layers=2) for name in ("a", "b"))
    other = synthesize(tmp_path / "c", requests=2, layers=2, seed=1)
    files = [
        {str(p.relative_to(t.path)): p.read_bytes() for p in t.path.rglob("*") if p.is_file()} for t in (first, again, other)
    ]
    assert files[0] == files[1]
    assert files[0].keys() == files[2].keys()
    assert not any(files[0][name] == files[2][name] for name in files[0] if name.startswith(("kv", "q")))


def test_requests_and_layers_differ(tmp_path):
    trace = synthesize(tmp_path / "t", requests=2, layers=2)
    lanes = [trace.lane(r, layer) for r in trace.requests for layer in trace.layers]
    assert len({lane.k.tobytes() for lane in lanes}) == 4
    assert trace.requests[0].spans != trace.requests[1].spans


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_short_requests_are_sound(tmp_path, prompt, steps):
    trace = synthesize(tmp_path / "t", prompt=prompt, steps=steps, needles=2)
    (r,) = trace.requests
    assert list(check_trace(trace.path)) == []
    assert (r.prompt, r.total) == (prompt, prompt + steps)
    assert set(r.roles[prompt:]) <= {2, 3}
    assert all(1 <= s.start < s.stop <= prompt for s in r.spans)


def test_sliding_layers_see_their_window_only(tmp_path):
    trace = synthesize(tmp_path / "t", window=12)
    assert trace.layers[0].kind == "sliding"
    for _, t, p in attention(trace, "decode"):
        for n, at in enumerate(t):
            assert np.flatnonzero(p[:, n].sum(axis=0)).tolist() == list(range(at - 11, at + 1))


def test_what_is_left_out_is_left_out(tmp_path):
    trace = synthesize(tmp_path / "t", without=OPTIONAL)
    assert {table for table, _, _ in trace.folder.segments} == {"requests", "layers", "kv", "q"}
    columns = {c for segments in trace.folder.segments.values() for s in segments for c in s.columns}
    assert not columns & {"k_pre", "out", "lse", "mass", "wo_norm"}


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(WrongUse, match=r"without=\['keys'\]: expected some of k_pre"):
        synthesize(tmp_path / "t", without=["keys"])
    with pytest.raises(WrongUse, match="head_dim=3: expected 4 or more"):
        synthesize(tmp_path / "t", head_dim=3)
    with pytest.raises(WrongUse, match="swing=4: expected needles=2 or more"):
        synthesize(tmp_path / "t", swing=4)
    assert not (tmp_path / "t").exists()
