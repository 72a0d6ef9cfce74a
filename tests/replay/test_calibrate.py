"""kvsim calibrate: a file that says where it came from, replayed on another trace, refused on its own."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvsim
from kvsim import cli
from kvsim.codecs.calibration import Sample, load
from kvsim.errors import WrongUse
from kvsim.policies.store.oscar_cov import mixed, query_covariance, value_covariance
from kvsim.replay.calibrate import calibrate
from kvsim.replay.run import replay
from kvsim.synth.generate import synthesize
from kvsim.trace.open import open_trace
from tools.fuzz.mutate import huge


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "other", seed=5, layers=2, prompt=120, steps=4)


@pytest.fixture(scope="module")
def file(other, tmp_path_factory):
    return calibrate(other, "kvquant(bits=4, outliers=0.02)", tmp_path_factory.mktemp("files") / "c.npz")


def policy(file):
    return f'kvquant(bits=4, outliers=0.02, calibration="{file}")'


def test_the_command_prints_the_file_and_the_file_its_origin(other, tmp_path, capsys):
    out = tmp_path / "c.npz"
    assert cli.main(["calibrate", str(other.path), "-p", "kvquant(bits=4, outliers=0.02)", "-o", str(out), "--layers", "1"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    about = load(str(out)).about
    assert about["trace"] == {"id": other.id, "sha256": other.sha256}
    assert (about["kind"], about["layers"]) == ("kvquant", [1])
    assert about["options"] == {"k_bits": 4, "v_bits": 4, "outliers": 0.02}
    assert str(tmp_path) not in json.dumps(about)


def test_the_same_trace_gives_the_same_bytes(other, file, tmp_path):
    assert calibrate(other, "kvquant(bits=4, outliers=0.02)", tmp_path / "c.npz").read_bytes() == file.read_bytes()


def test_ranges_are_those_of_the_keys_before_rope(other, file):
    lane = other.lane(other.requests[0], other.captured_layers[1])
    low, high = np.quantile(lane.k_pre.astype(float), [0.01, 0.99], axis=1)
    edges = load(str(file)).arrays[f"{other.captured_layers[1].id}.k.edges"]
    assert np.allclose(edges[:, 0], low, atol=1e-6)
    assert np.allclose(edges[:, 1], high, atol=1e-6)


def test_replayed_on_another_trace(trace, file, tmp_path):
    run = replay(trace, policy(file), tmp_path / "run", workers=1, strict=True)
    assert run.heads["rel_l2"].mean() < 0.2
    assert run.info["policies"][0]["id"].endswith(f'calibration="{file}@{load(str(file)).digest}") >> everything()')


def test_refused_on_the_trace_it_was_made_from(other, file, tmp_path, capsys):
    assert cli.main(["replay", str(other.path), "-p", policy(file), "-o", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "kvquant: its calibration was made from the trace that is replayed" in said
    assert not (tmp_path / "run").exists()


def test_refused(other, file, trace, tmp_path):
    for call, words in (
        (lambda: calibrate(other, "kivi()", tmp_path / "c"), "nothing in it is calibrated"),
        (lambda: calibrate(other, "kvquant()", file), "exists already"),
        (lambda: calibrate(other, "kvquant()", tmp_path / "c", layers=[7]), "layers 7"),
        (lambda: replay(trace, "kvquant()", tmp_path / "r"), "expected a calibration file of another trace"),
    ):
        with pytest.raises(WrongUse) as e:
            call()
        assert words in str(e.value)


def test_a_layer_it_does_not_cover_is_refused_before_any_work(other, trace, tmp_path):
    out = calibrate(other, "kvquant(bits=4, outliers=0.02)", tmp_path / "c.npz", layers=[0])
    with pytest.raises(WrongUse, match="nothing for layer 1, it covers the layers"):
        replay(trace, policy(out), tmp_path / "run")


def test_a_trace_without_keys_before_rope_is_refused(tmp_path):
    bare = synthesize(tmp_path / "bare", layers=1, prompt=20, steps=2, without=("k_pre",))
    with pytest.raises(WrongUse, match=r"calibrated on keys before RoPE, which trace .* does not have; capture with --k-pre"):
        calibrate(open_trace(bare.path), "kvquant()", tmp_path / "c")


# ------------------------------------------------------------------------------------------------ a rotation
@pytest.fixture(scope="module")
def basis(other, tmp_path_factory):
    return calibrate(other, "oscar_cov()", tmp_path_factory.mktemp("files") / "basis.npz")


def test_a_file_says_what_it_is_and_where_from(other, basis):
    about = load(str(basis)).about
    assert about["trace"] == {"id": other.id, "sha256": other.sha256}
    assert about["contexts"] == [other.requests[0].digest]
    assert about["kvsim"] == kvsim.__version__
    assert about["model"] == other.manifest["source"].get("model")
    assert "rotation" in about["computed"]


def test_a_rotation_is_that_of_the_queries_of_each_group(other, basis):
    """Those of the prompt's end and of every step, a kv head's group together."""
    layer = other.captured_layers[1]
    lane = other.lane(other.requests[0], layer)
    q = np.concatenate([lane.window_q, lane.q]).astype(float)
    groups = [q[:, h * layer.group : (h + 1) * layer.group].reshape(-1, layer.key_dim) for h in range(layer.kv_heads)]
    sample = Sample(lane.k.astype(float), lane.v.astype(float), np.stack(groups))
    arrays = load(str(basis)).arrays
    assert np.allclose(arrays[f"{layer.id}.k.rotation"], mixed(query_covariance(sample)), atol=1e-6)
    assert np.allclose(arrays[f"{layer.id}.v.rotation"], mixed(value_covariance(sample)), atol=1e-6)


def test_a_rotation_is_replayed_elsewhere_and_at_home_only_when_told(other, trace, basis, tmp_path):
    policy = f'oscar_cov(sinks=4, recent=8, calibration="{basis}"'
    run = replay(trace, f"{policy})", tmp_path / "run", workers=1, strict=True)
    assert 0 < run.heads["rel_l2"].mean() < 1
    with pytest.raises(
        WrongUse, match=r"oscar_cov: its calibration was made from the trace that is replayed, .* or say in_sample=True"
    ):
        replay(other, f"{policy})", tmp_path / "home")
    home = replay(other, f"{policy}, in_sample=True)", tmp_path / "home", workers=1)
    assert "in_sample=True" in home.info["policies"][0]["id"]


# ------------------------------------------------------------------------------------------------ files that somebody altered
def rewritten(file, to, arrays=(), **about):
    """The file with other arrays, or saying other things; None: without it."""
    with np.load(file) as old:
        told, mine = json.loads(str(old["about"])), {n: old[n] for n in old.files if n != "about"}
    told, mine = ({n: x for n, x in (was | dict(new)).items() if x is not None} for was, new in ((told, about), (mine, arrays)))
    np.savez(to, about=np.array(json.dumps(told)), **mine)
    return to


LEVELS = np.linspace(-1, 1, 16)


@pytest.mark.parametrize(
    ("arrays", "about", "words"),
    [
        ({"²": LEVELS}, {}, "expected LAYER.NAME"),
        ({"0.v.level": np.array(3.0)}, {}, "no array of numbers"),
        ({"0.v.level": LEVELS * np.nan}, {}, "no array of numbers"),
        ({"0.v.level": LEVELS.astype(complex)}, {}, "no array of numbers"),
        ({"0.v.level": LEVELS[:9]}, {}, "not 16 ascending levels"),
        ({"0.v.level": LEVELS[::-1]}, {}, "not 16 ascending levels"),
        ({"0.k.level": LEVELS * 3e30}, {}, "not 16 ascending levels"),
        ({"0.k.edges": np.ones(128)}, {}, "have 1 numbers there, here 16"),
        ({"0.k.edges": np.full((2, 4, 16), 1e30)}, {}, "no ranges"),
        ({"0.k.edges": -np.ones((2, 4, 16))}, {}, "no ranges"),
        ({}, {"trace": ["other"]}, "trace is ['other'], expected a dict"),
        ({}, {"contexts": "all"}, "contexts is 'all', expected a list"),
        ({}, {"options": None}, "was made for kvquant with {}"),
    ],
)
def test_an_altered_file_is_refused_by_name(arrays, about, words, file, trace, tmp_path):
    altered = rewritten(file, tmp_path / "altered.npz", arrays, **about)
    with pytest.raises(WrongUse) as e:
        replay(trace, policy(altered), tmp_path / "run", workers=1)
    assert words in str(e.value)
    assert str(altered) in str(e.value)


@pytest.mark.parametrize(
    ("arrays", "about", "words"),
    [
        ({}, {"contexts": []}, "of which contexts"),
        ({}, {"options": {"levels": [2, 2]}}, "levels are [2, 2]"),
        ({}, {"options": {"levels": "2"}}, "levels are '2'"),
        ({"0.gap": np.ones((2, 3))}, {}, "numbers of shape (3,), expected (5, 5)"),
    ],
)
def test_an_altered_gap_is_refused_by_name(arrays, about, words, other, trace, tmp_path):
    whole = calibrate(other, "quest(read=gap(min=0, floor=pages(2), cap=pages(8)), page=4)", tmp_path / "gap.npz")
    altered = rewritten(whole, tmp_path / "altered.npz", arrays, **about)
    with pytest.raises(WrongUse) as e:
        replay(trace, f'quest(read=gap(file="{altered}"), page=4)', tmp_path / "run", workers=1)
    assert words in str(e.value)


def test_a_file_that_claims_more_than_it_holds_is_refused(file, trace, tmp_path):
    bomb, liar = tmp_path / "bomb.npz", tmp_path / "liar.npz"
    with np.load(file) as old:
        np.savez_compressed(bomb, **{n: old[n] for n in old.files} | {"0.v.level": np.zeros(10**7)})
        liar.write_bytes(huge(dict(old), "0.v.level"))
    for claimed in (bomb, liar):
        with pytest.raises(WrongUse, match="not a calibration file"):
            replay(trace, policy(claimed), tmp_path / "run", workers=1)
