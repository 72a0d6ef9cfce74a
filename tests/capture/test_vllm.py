"""The adapter of vLLM on hand-made metadata: whose rows are whose, what a trace tells, and what is refused. `make vllm` runs the engine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvsim.capture.serving import Part
from kvsim.capture.vllm import FOLDER, LAYERS, facts, refuse
from kvsim.capture.vllm.plugin import check_version
from kvsim.capture.vllm.watch import WATCH, order_of, parts_of, wrap
from kvsim.errors import WrongUse
from kvsim.trace.open import open_trace
from tests.capture.serving_engine import LAYERS as SPECS
from tests.capture.test_serving import ROOT, is_drawn
from tests.capture.vllm_engine import Attention, config, metadata, new, wrapper

A, B = Part("a", 0, 6), Part("b", 3, 1)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """KVSIM_CAPTURE names a folder, and vLLM says which it is."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    yield tmp_path
    WATCH.abandon()


# ------------------------------------------------------------------------------------------------ whose rows are whose
@pytest.mark.parametrize("parts", [[A], [B], [A, B], [B, A], [Part("c", 17, 16), B, A]], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_are_split_by_request(parts, padding):
    order = [p.request for p in parts]
    assert parts_of(metadata(*parts, padding=padding), order, {p.request: p.count for p in parts}) == parts


def test_requests_that_are_only_padding_are_left_out():
    common = metadata(A, Part("", 0, 0))
    assert parts_of(common, ["a", ""], {"a": 6}) == [A]


@pytest.mark.parametrize(
    ("changes", "scheduled", "words"),
    [
        ({"positions": torch.tensor([0, 1, 2, 3, 4, 4])}, {"a": 6}, "rows 0 to 5 have positions .*4, 4"),
        ({"positions": torch.zeros(3, 6)}, {"a": 6}, "M-RoPE"),
        ({"positions": None}, {"a": 6}, "M-RoPE"),
        ({"seq_lens": torch.tensor([9])}, {"a": 6}, "expected 6 that end at 8"),
        ({}, {"a": 5}, "expected 5 that end"),
        ({}, {"a": 6, "b": 1}, r"a forward of \['a'\]; scheduled were \['a', 'b'\]"),
    ],
)
def test_rows_that_contradict_the_scheduler_are_refused(changes, scheduled, words):
    with pytest.raises(WrongUse, match=words):
        parts_of(metadata(A, **changes), ["a"], scheduled)


def test_the_order_of_rows_in_both_model_runners():
    first = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["b", "a", "old"]))
    assert order_of(first, metadata(B, A)) == ["b", "a"]
    second = SimpleNamespace(req_states=SimpleNamespace(index_to_req_id={4: "a", 9: "b"}))
    assert order_of(second, metadata(B, A, req_idx=np.array([9, 4]))) == ["b", "a"]


# ------------------------------------------------------------------------------------------------ traces
def test_two_requests_in_chunks_and_batches(asked):
    engine = wrapper()
    assert engine.step(Part("a", 0, 16), begins=[new("a", 20)]) == "ran"
    engine.step(Part("b", 0, 7), Part("a", 16, 4), begins=[new("b", 7)])
    engine.step(Part("a", 20, 1), Part("b", 7, 1))
    engine.step(Part("b", 8, 1), ends=["a"])
    is_drawn(asked / "request-00000", "a", 20, 21)  # complete as soon as the scheduler says that it ended
    assert engine.step(ends=["b"]) == "nothing to run"
    is_drawn(asked / "request-00001", "b", 7, 9)


def test_a_trace_tells_what_the_modules_are(asked, monkeypatch):
    monkeypatch.setenv(LAYERS, "1")
    engine = wrapper()
    engine.step(Part("a", 0, 9), begins=[new("a", 9, sampling_params=SimpleNamespace(temperature=0.7, max_tokens=None))])
    engine.step(Part("a", 9, 1))
    engine.shutdown()
    trace = open_trace(asked / "request-00000")
    assert trace.requests[0].mode == "sampled"
    assert [x.id for x in trace.captured_layers] == [1]
    for found, spec in zip(trace.layers, SPECS, strict=True):
        for name in ("kind", "q_heads", "kv_heads", "key_dim", "value_dim", "scale", "softcap", "window", "sinks", "row_bytes"):
            assert getattr(found, name) == getattr(spec, name), name
        assert (
            found.rope
            == '{"kind": "default", "theta": 10000.0, "rotary_dim": 8, "layout": "half", "scaling": null, "magnitude": 1.0}'
        )
    told = trace.manifest["capture"]
    assert (told["tool"], told["versions"]["vllm"], told["attention_backend"]) == ("kvsim.capture.vllm", "0.32.0", "CPU_ATTN")
    assert trace.manifest["source"]["model"] == "random"  # without the path to it


def test_other_rope_is_never_taken_for_the_plain_kind():
    class YaRNScalingRotaryEmbedding:
        base, rotary_dim, is_neox_style = 1e6, 64, True

    config = SimpleNamespace(rope_parameters={"rope_theta": 1e6})
    assert '"scaling": {"kind": "YaRNScalingRotaryEmbedding"}' in str(
        facts.rope_of(SimpleNamespace(rotary_emb=YaRNScalingRotaryEmbedding()), config)
    )
    assert '"kind": "unknown"' in str(facts.rope_of(None, config))  # it is somewhere, but not where it is looked for
    assert facts.rope_of(None, SimpleNamespace()) is None


def test_warm_up_and_engines_that_nobody_asked_about_leave_nothing(asked, monkeypatch):
    engine = wrapper()
    engine.forward(None, [A])  # no metadata
    engine.forward(engine.builder.build(0, metadata(A)), [A])  # metadata, but no step of the scheduler
    assert engine.step() == "nothing to run"
    monkeypatch.delenv(FOLDER)
    assert engine.step(Part("a", 0, 16), begins=[new("a", 20)]) == "ran"
    assert not list(asked.iterdir())


def test_a_worker_is_wrapped_once():
    assert not wrap(type(wrapper()))


# ------------------------------------------------------------------------------------------------ refusals
FULL = SimpleNamespace(has_full_cudagraphs=lambda: True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("parallel_config.tensor_parallel_size", 2, "tensor_parallel_size 2: tensor parallelism"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config.data_parallel_size", 4, "data parallelism"),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config.use_ubatching", True, "micro-batches"),
        ("model_config.use_mla", True, "MLA"),
        ("model_config.runner_type", "pooling", "runs pooling"),
        ("speculative_config", SimpleNamespace(), "speculative"),
        ("cache_config.cache_dtype", "fp8", "KV cache is fp8"),
        ("cache_config.kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("compilation_config.cudagraph_mode", FULL, "full CUDA graphs.*enforce_eager"),
    ],
)
def test_engines_are_refused_as_they_start(asked, name, value, words):
    engine = wrapper(config(**{name: value}))
    with pytest.raises(WrongUse, match=words) as e:
        engine.init_device()
    assert "\n" not in str(e.value)
    with pytest.raises(WrongUse, match=words):  # and one that was there before capture was asked for, at its first step
        engine.step(A, begins=[new("a", 6)])


def test_an_engine_starts_as_ever_when_nobody_asks(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    wrapper(config(**{"model_config.use_mla": True})).init_device()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32"])
def test_versions_that_were_tested(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.320.0", "1.0"])
def test_other_versions(version):
    with pytest.raises(WrongUse, match=rf"vLLM {version}: tested with 0.32.*KVSIM_CAPTURE_ANY_VERSION=1"):
        check_version(version)
    check_version(version, anyway=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "cache of another layer"),
        ({"impl": SimpleNamespace(alibi_slopes=[1.0])}, "ALiBi"),
        ({"query_quant": object()}, "quantised"),
    ],
)
def test_layers_that_are_not_plain_attention(change, words):
    modules = {m.layer_name: m for m in (Attention(0), Attention(1))}
    refuse.layers(modules, config())
    vars(modules["model.layers.1.self_attn.attn"]).update(change)
    with pytest.raises(WrongUse, match=rf"layer model.layers.1.self_attn.attn: .*{words}"):
        refuse.layers(modules, config())


def test_other_kinds_of_attention_and_hybrid_models():
    class MLAAttention(Attention): ...

    with pytest.raises(WrongUse, match="MLAAttention is not plain attention"):
        refuse.layers({"model.layers.0.attn": MLAAttention(0)}, config())
    with pytest.raises(WrongUse, match=r"attention in layers \[1\] of 2: hybrid"):
        refuse.layers({"model.layers.1.attn": Attention(1)}, config())
    with pytest.raises(WrongUse, match=r"attention in layers \[\] of 2"):
        refuse.layers({}, config())


@pytest.mark.parametrize(("name", "layer"), [("model.layers.7.self_attn.attn", 7), ("transformer.h.11.attn", 11)])
def test_layers_are_known_by_the_number_in_their_name(name, layer):
    assert facts.layer_id(name) == layer


@pytest.mark.parametrize("name", ["model.layers.7.experts.3.attn", "attn"])
def test_names_without_one_number(name):
    with pytest.raises(WrongUse, match=f"layer {name}: expected one number"):
        facts.layer_id(name)


@pytest.mark.parametrize(
    ("request_", "step", "words"),
    [
        (
            {"num_computed_tokens": 16},
            {},
            "request a: its first 16 tokens come from the prefix cache.*enable_prefix_caching=False",
        ),
        ({"prompt_token_ids": None}, {}, "images, sound or embeddings"),
        ({"mm_features": [object()]}, {}, "images, sound or embeddings"),
        ({"sampling_params": None}, {}, "generates nothing"),
        ({}, {"scheduled_spec_decode_tokens": {"a": [1, 2]}}, "speculative decoding"),
        ({}, {"scheduled_cached_reqs": SimpleNamespace(resumed_req_ids={"z"})}, "request z was preempted"),
    ],
)
def test_requests_are_refused_at_their_step(asked, request_, step, words):
    with pytest.raises(WrongUse, match=words) as e:
        wrapper().step(A, begins=[new("a", 6, **request_)], **step)
    assert "\n" not in str(e.value)
    assert not list(asked.rglob("manifest.json"))


@pytest.mark.parametrize(("silent", "words"), [((0, 1), r"layers \[0, 1\] did not show"), ((1,), r"layers \[1\] did not show")])
def test_a_layer_that_is_replayed_unseen(asked, silent, words):
    engine = wrapper(silent=silent)
    engine.step(A, begins=[new("a", 6)])
    with pytest.raises(WrongUse, match=words):
        engine.step(Part("a", 6, 1))


def test_a_forward_replayed_as_one_graph(asked, monkeypatch):
    engine = wrapper()
    monkeypatch.setattr(engine.builder, "build", lambda *given: SimpleNamespace(out={}))  # the unwatched backend's
    with pytest.raises(WrongUse, match=r"a forward showed no attention.*enforce_eager=True"):
        engine.step(A, begins=[new("a", 6)])


def test_an_error_of_the_engine_leaves_partial_traces(asked, monkeypatch):
    engine = wrapper()
    engine.step(A, begins=[new("a", 6)])
    monkeypatch.setattr(engine.builder, "build", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step(Part("a", 6, 1))
    assert (asked / "request-00000/journal.jsonl").exists()
    assert not list(asked.rglob("manifest.json"))


# ------------------------------------------------------------------------------------------------ the plug-in
def test_the_entry_point_does_nothing_unless_asked():
    """In a fresh interpreter: found by its group, called, and neither vLLM nor torch loaded."""
    code = (
        "import sys; from importlib.metadata import entry_points\n"
        "[p] = [p for p in entry_points(group='vllm.general_plugins') if p.name == 'kvsim']\n"
        "p.load()()\n"
        "import kvsim.capture.vllm\n"
        "print(sorted({'vllm', 'torch', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env={"PATH": ""})
    assert done.stdout.strip() == "[]"


def test_capturing_restores_the_environment(asked, monkeypatch):
    import os

    from kvsim.capture.vllm import capturing

    called: list[Any] = []
    monkeypatch.setattr("kvsim.capture.vllm.plugin.register", lambda: called.append(os.environ[FOLDER]))
    with capturing(asked / "mine", layers=[0, 1]):
        assert os.environ[LAYERS] == "0,1"
        engine = wrapper()
        engine.step(A, begins=[new("a", 6)])
        engine.step(Part("a", 6, 1))
    assert called == [str(asked / "mine")]
    assert os.environ[FOLDER] == str(asked)
    assert LAYERS not in os.environ
    is_drawn(asked / "mine/request-00000", "a", 6, 7)
