"""kvsim trace convert: what somebody saved becomes a trace, bit for bit, or one line says why not."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim import cli
from kvsim.errors import BadTrace, WrongUse
from kvsim.geometry import Layer
from kvsim.trace.bits import narrow, widen
from kvsim.trace.check import check_trace
from kvsim.trace.convert import convert
from kvsim.trace.open import Lane, open_trace
from kvsim.trace.reference import attend

HQ, HKV, T, PROMPT, DK, DV = 4, 2, 11, 8, 6, 4
SCALE, WINDOW = 0.7, 5
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def arrays(dtype: str = "float32", layers: int = 2, queries: int = T - PROMPT + 2, window: int | None = None) -> dict[str, Any]:
    """A dump of attention as its definition has it, outputs and log sums with it; raw numbers."""
    rng, made = np.random.default_rng(7), {"prompt_tokens": np.array(PROMPT), "scale": np.array(SCALE)}
    spec = Layer(0, "full", HQ, HKV, DK, DV, SCALE, 1, dtype, window=window)
    for i in range(layers):
        q, k, v = (narrow(rng.normal(size=s), dtype) for s in ((HQ, queries, DK), (HKV, T, DK), (HKV, T, DV)))
        heads = [slice(h * spec.group, (h + 1) * spec.group) for h in range(HKV)]
        t = np.arange(T - queries, T)
        found = [attend(widen(q[x]).swapaxes(0, 1), t, widen(k[h]), spec, h) for h, x in enumerate(heads)]
        out = np.concatenate([(p @ widen(v[h])).swapaxes(0, 1) for h, (p, _) in enumerate(found)])
        lse = np.concatenate([x.T for _, x in found]).astype(np.float32)
        rows = {"q": q, "k": k, "v": v, "out": narrow(out, dtype), "lse": lse}
        made |= {f"layers.{i}.{name}": x for name, x in rows.items()}
    return made | ({} if window is None else {"window": np.array(window)})


def npz(path: Path, given: dict[str, Any]) -> Path:
    np.savez(path, **{name: x.view("V2") if x.dtype == np.uint16 else x for name, x in given.items()})
    return path


def safetensors(path: Path, given: dict[str, Any], **texts: str) -> Path:
    """The format as it is published: the length of a header in JSON, the header, the bytes of the tensors."""
    header: dict[str, Any] = {"__metadata__": texts} if texts else {}
    data = b""
    for name, x in given.items():
        kind = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "float64": "F64"}[x.dtype.name]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def lanes(path: Path) -> list[Lane]:
    trace = open_trace(path)
    return [trace.lane(r, layer) for r in trace.requests for layer in trace.captured_layers]


def assert_holds(lane: Lane, given: dict[str, Any]) -> None:
    """Every number of the dump, bit for bit, at its place."""
    of, n = {name: given[f"layers.{lane.layer.id}.{name}"] for name in ("q", "k", "v", "out", "lse")}, T - PROMPT
    assert np.array_equal(lane.k, of["k"])
    assert np.array_equal(lane.v, of["v"])
    assert np.array_equal(lane.q, of["q"][:, -n:].swapaxes(0, 1))
    assert lane.out is not None
    assert np.array_equal(lane.out, of["out"][:, -n:].swapaxes(0, 1))
    assert lane.lse is not None
    assert np.array_equal(lane.lse, of["lse"][:, -n:].T)
    assert np.array_equal(lane.window_q, of["q"][:, :-n].swapaxes(0, 1))
    assert list(lane.t) == list(range(PROMPT, T))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("save", [npz, safetensors])
def test_every_number_of_a_dump_is_in_the_trace(tmp_path, dtype, save):
    given = arrays(dtype)
    path = convert([save(tmp_path / f"d.{save.__name__}", given)], tmp_path / "t")
    found = lanes(path)
    assert [x.layer.id for x in found] == [0, 1]
    for lane in found:
        assert_holds(lane, given)
        assert (lane.dtype, lane.layer.scale, lane.layer.kind) == (dtype, SCALE, "full")
    assert not list(check_trace(path))
    assert json.loads((path / "manifest.json").read_text())["capture"]["tool"] == "kvsim trace convert"
    assert str(tmp_path) not in (path / "manifest.json").read_text()


def test_a_leading_axis_of_one_is_that_of_the_batch(tmp_path):
    given = arrays()
    batch = {name: x[None] if name.startswith("layers") else x for name, x in given.items()}
    for lane in lanes(convert([npz(tmp_path / "d.npz", batch)], tmp_path / "t")):
        assert_holds(lane, given)


def test_a_folder_is_one_dump_and_several_are_requests(tmp_path):
    given = arrays()
    (tmp_path / "parts").mkdir()
    for i in range(2):
        npz(tmp_path / f"parts/{i}.npz", {name: x for name, x in given.items() if name.startswith(f"layers.{i}.")})
    npz(tmp_path / "parts/facts.npz", {name: x for name, x in given.items() if not name.startswith("layers")})
    path = convert([tmp_path / "parts", npz(tmp_path / "whole.npz", given)], tmp_path / "t")
    found = lanes(path)
    assert [(x.request.id, x.layer.id) for x in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for lane in found:
        assert_holds(lane, given)


def test_facts_of_a_layer_come_before_those_of_all(tmp_path):
    given = arrays(window=WINDOW) | {"model": np.array("mine"), "token_ids": np.arange(T), "rope": np.array("none")}
    given["layers.1.scale"] = given["scale"]
    given["layers.1.window"] = given.pop("window")
    given["layers.0.window"] = np.array(WINDOW)
    given["scale"] = np.array(99.0)
    given["layers.0.scale"] = np.array(SCALE)
    path = convert([npz(tmp_path / "d.npz", given)], tmp_path / "t")
    assert [(x.kind, x.window, x.scale, x.rope) for x in open_trace(path).layers] == [("sliding", WINDOW, SCALE, None)] * 2
    assert json.loads((path / "manifest.json").read_text())["source"] == {"model": "mine"}


def test_text_of_a_safetensors_file_tells_facts_too(tmp_path):
    given = arrays("bfloat16")
    facts = {name: str(given.pop(name)) for name in ("scale", "prompt_tokens")}
    path = convert([safetensors(tmp_path / "d.safetensors", given, **facts, rope="none")], tmp_path / "t")
    assert [x.scale for x in open_trace(path).layers] == [SCALE] * 2


def test_keys_whose_rope_is_not_told_are_not_keys_before_rope(tmp_path):
    path = convert([npz(tmp_path / "d.npz", arrays())], tmp_path / "t")
    trace = open_trace(path)
    assert not trace.supplies(trace.requests[0], trace.layers[0]).k_pre
    told = open_trace(convert([npz(tmp_path / "e.npz", arrays() | {"rope": np.array("none")})], tmp_path / "u"))
    assert told.supplies(told.requests[0], told.layers[0]).k_pre


def test_what_policies_may_need_is_taken_along(tmp_path):
    given = arrays(layers=1)
    mass = np.full((HQ, PROMPT), 1.0, np.float32)
    norm = np.arange(HQ * T, dtype=np.float32).reshape(HQ, T)
    given |= {"layers.0.mass": mass, "layers.0.wo_norm": norm, "rope": np.array("none")}
    [lane] = lanes(convert([npz(tmp_path / "d.npz", given)], tmp_path / "t"))
    assert np.array_equal(lane.mass, mass)
    assert np.array_equal(lane.wo_norm, norm)


def changed(name: str, x: Any) -> dict[str, Any]:
    """The dump with one array changed, or left out."""
    given = arrays() | {name: x}
    return {k: v for k, v in given.items() if v is not None}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (changed("layers.1.v", None), r"layers\.1\.v is missing"),
        (changed("scale", None), r"scale or layers\.0\.scale is missing"),
        (changed("prompt_tokens", None), "prompt_tokens is missing"),
        (changed("prompt_tokens", np.array(T)), "queries of the last 5 of 11 tokens, a prompt of 11"),
        (changed("prompt_tokens", np.array(2)), "queries of all of them"),
        (changed("prompt_tokens", np.array("x")), "expected one number"),
        (changed("layers.0.sink", np.zeros(HQ)), r"'layers\.0\.sink' means nothing here"),
        (changed("layers.0.k", np.zeros((HKV, T, DK))), r"layers\.0\.k is float64; expected"),
        (changed("layers.0.k", np.zeros((HKV, T, DK), np.int16)), r"layers\.0\.k is int16; expected.*V2"),
        (changed("layers.0.k", np.zeros((HKV, T, DK), np.float16)), "float16, float32; expected one dtype"),
        (changed("layers.0.k", np.zeros((HKV, T, DK + 1), np.float32)), r"layers\.0\.q is \[4, 5, 6\].*expected \[4, 5, 7\]"),
        (changed("layers.0.v", np.zeros((HKV, T - 1, DV), np.float32)), r"layers\.0\.v is \[2, 10, 4\].*expected \[2, 11, 4\]"),
        (changed("layers.0.k", np.zeros((2, HKV, T, DK), np.float32)), "of one sequence"),
        (changed("layers.0.out", np.zeros((HQ, 3, DV), np.float32)), r"layers\.0\.out is \[4, 3, 4\].*expected \[4, 5, 4\]"),
        (changed("layers.0.out", np.ones((HQ, 5, DV), np.float32)), "q head 0: `out` is .* away from attention"),
        (changed("scale", np.array(1.4)), "`out` is .* away from attention"),
        (changed("scale", np.array(-1.0)), "scale is -1.0; expected a number above 0"),
        (changed("layers.0.v", np.full((HKV, T, DV), np.nan, np.float32)), "NaN"),
        (changed("layers.0.mass", np.ones((HQ, 3), np.float32)), r"layers\.0\.mass is \[4, 3\].*expected \[4, 8\]"),
        (changed("rope", np.array("llama")), "expected null or a JSON object"),
        (changed("roles", np.full(T, 9)), "roles has"),
        ({"scale": np.array(1.0)}, r"no arrays of any layer; expected layers\.0\.q"),
    ],
)
def test_what_makes_no_trace_is_one_line(tmp_path, given, line):
    with pytest.raises(BadTrace, match=line) as e:
        convert([npz(tmp_path / "d.npz", given)], tmp_path / "t")
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["d.npz"]


def test_files_that_are_not_what_they_are_called(tmp_path):
    whole = safetensors(tmp_path / "d.safetensors", arrays()).read_bytes()
    for name, content in {
        "a.npz": b"mine",
        "h.npz": b"",
        "b.safetensors": whole[:-9],
        "c.safetensors": b"",
        "e.safetensors": b"\xff" * 64,
        "g.safetensors": whole.replace(b'"F32"', b'"F\\n"', 1),  # a newline, in JSON
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadTrace, match=r"not a \.") as e:
            convert([tmp_path / name], tmp_path / "t")
        assert "\n" not in str(e.value)
    np.savez(tmp_path / "f.npz", x=np.array([{}], object))
    with pytest.raises(BadTrace, match=r"f\.npz"):
        convert([tmp_path / "f.npz"], tmp_path / "t")


def test_an_encrypted_archive_is_refused(tmp_path):
    """numpy has no password: the flag of a member's headers, in both places, is enough."""
    content = bytearray(npz(tmp_path / "d.npz", arrays()).read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + flags] |= 1
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(BadTrace, match=r"cannot be read \(File .* is encrypted"):
        convert([tmp_path / "d.npz"], tmp_path / "t")


def test_places_and_files_that_are_not_there(tmp_path):
    dump = npz(tmp_path / "d.npz", arrays())
    (tmp_path / "taken").mkdir()
    (tmp_path / "empty").mkdir()
    for given, out, line in (
        (dump, "taken", "something already"),
        (tmp_path / "gone.npz", "t", r"expected a \.npz or \.safetensors file"),
        (tmp_path / "empty", "t", r"expected a \.npz or \.safetensors file"),
        (tmp_path / "d.pt", "t", r"expected a \.npz or \.safetensors file"),
    ):
        with pytest.raises(WrongUse, match=line):
            convert([given], tmp_path / out)


def test_dumps_of_different_models_make_no_trace(tmp_path):
    a, b = npz(tmp_path / "a.npz", arrays()), npz(tmp_path / "b.npz", arrays(layers=1))
    with pytest.raises(BadTrace, match=r"b\.npz: its layers, their facts or its dtype are not those of .*a\.npz"):
        convert([a, b], tmp_path / "t")


def test_a_name_in_two_files_of_a_folder(tmp_path):
    (tmp_path / "d").mkdir()
    for name in "ab":
        npz(tmp_path / f"d/{name}.npz", arrays())
    with pytest.raises(BadTrace, match="in more than one of its files"):
        convert([tmp_path / "d"], tmp_path / "t")


def test_the_command(tmp_path, capsys):
    dump = npz(tmp_path / "d.npz", arrays())
    assert cli.main(["trace", "convert", str(dump), "-o", str(tmp_path / "t"), "--compression", "zstd"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 't'}\n", "")
    assert cli.main(["trace", "check", str(tmp_path / "t")]) == 0
    assert cli.main(["trace", "convert", str(dump), "-o", str(tmp_path / "t")]) == 2
    npz(tmp_path / "bad.npz", changed("scale", None))
    assert cli.main(["trace", "convert", str(tmp_path / "bad.npz"), "-o", str(tmp_path / "u")]) == 1
    assert capsys.readouterr().err.count("\n") == 2


def test_the_example_of_the_docs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/capture.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    exec(next(block for block in page.split("```python\n") if "trace.convert" in block).split("```")[0])
    assert not list(check_trace(tmp_path / "traces/mine"))
    assert [len(x.t) for x in lanes(tmp_path / "traces/mine")] == [10]
