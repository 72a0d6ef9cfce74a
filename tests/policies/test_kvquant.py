"""KVQuant: its calibration file in the policy's name, numbers of every layer and head of their own, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvsim import kvquant
from kvsim.codecs.calibration import save
from kvsim.codecs.nuq import coder, nearest, of_keys, of_values
from kvsim.codecs.pipeline import pipeline
from kvsim.conformance import check_policy
from kvsim.conformance import lane as conformance_lane
from kvsim.engine.evolve import evolve
from kvsim.errors import WrongUse
from kvsim.geometry import K_PRE
from kvsim.policies import allocate
from kvsim.policies.language import canonical, complete, parse
from tests.engine.lanes import by_step, lane, run


def made(path, keys, values, layer=3, bits=3, outliers=0.01):
    """A calibration file for one layer from keys and values [Hkv, n, d]."""
    options = {"k_bits": bits, "v_bits": bits, "outliers": outliers}
    arrays = of_keys(keys, bits, outliers) | of_values(values, bits, outliers)
    about = {"kind": "kvquant", "options": options, "trace": {"id": "other", "sha256": "0" * 64}}
    save(path, about, {f"{layer}.{name}": x for name, x in arrays.items()})
    return str(path)


@pytest.fixture(scope="module")
def source():
    """Keys that a RoPE has turned, as far as the engine is told."""
    made = lane(prompt=40, steps=6, key_dim=8, seed=1)
    return dataclasses.replace(made, layer=dataclasses.replace(made.layer, rope='{"theta": 100.0, "rotary_dim": 8}'))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """From another request than it is used on."""
    other = lane(prompt=200, steps=1, key_dim=8, seed=2)
    k, v = (x.astype(float) for x in (other.k_pre, other.v))
    k[1] *= 3  # heads that differ
    return made(tmp_path_factory.mktemp("calibration") / "c.npz", k, v)


def test_the_name_shows_which_file_it_was(file, tmp_path):
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    policy = parse(f'kvquant(calibration="{file}")')
    assert f'calibration="{file}@{digest}"' in canonical(policy)
    assert parse(canonical(policy)) == policy
    twice = tmp_path / "again.npz"
    twice.write_bytes(Path(file).read_bytes())
    assert kvquant(calibration=str(twice)).codecs == kvquant(calibration=file).codecs


def test_another_file_under_the_same_name_is_refused(file):
    with pytest.raises(WrongUse, match=r"begins with .*, expected 0123456789ab: another file"):
        kvquant(calibration=f"{file}@0123456789ab")


def test_every_head_is_coded_by_its_own_ranges(source, file):
    """Decoded keys of a run, written out: outside the thresholds as they were, inside on the layer's levels in the channel's range."""
    policy = complete(kvquant(calibration=file))
    codec = policy.codecs.k
    record = evolve(source, policy)
    assert record is not None
    arrays = codec.grid.calibration.arrays
    for h in range(2):
        x = source.k_pre[h].astype(float)
        low, high, offset, span = arrays["3.k.edges"][h]
        inside = nearest((x - offset) / span, arrays["3.k.level"]) * span + offset
        want = np.where((x < low) | (x > high), x, inside)
        assert np.array_equal(record.decoded["k"][h], source.layer.rotate(want, np.arange(46)).astype(np.float32))
    assert not np.array_equal(arrays["3.k.edges"][0], arrays["3.k.edges"][1])


def test_every_byte_is_counted(source, file):
    """Codes, outliers with their places, pointers, ranges of values, and the head's tables once."""
    got = run(source, kvquant(calibration=file, first=2) >> parse("quest(read=pages(3), page=4)").part("read"), plans=True)
    codecs = kvquant(calibration=file).codecs
    plans = {(h, s): {*p} for h, s, p in zip(got["plans"]["q_head"], got["plans"]["step"], got["plans"]["pages"], strict=True)}
    for h in range(2):
        sides = [(codecs.k.at(source.layer, h), source.k_pre[h]), (codecs.v.at(source.layer, h), source.v[h])]
        coded = [codec.encode(x.astype(float)[:, None]) for codec, x in sides]
        tables = sum(codec.once(8) for codec, _ in sides)
        assert tables == 2 * (8 + 4 * 8) + 2 * 8
        for i in range(6):
            held, pages = range(2, 40 + i + 1), plans[2 * h, i] | plans[2 * h + 1, i]
            bits = [int(c.bits[[*held]].sum()) for c in coded]
            meta = sum(int(c.row_meta[[*held]].sum()) for c in coded)
            assert by_step(got["ledger"], "resident_bytes")[h, i] == 2 * source.layer.row_bytes + bits[0] // 8 + bits[1] // 8
            assert by_step(got["ledger"], "meta_resident_bytes")[h, i] == meta + tables
            read = [p for p in range(40 + i + 1) if p // 4 in pages]
            older = [p for p in read if 2 <= p < 40 + i]  # the newest is coded after its own step
            bits = [int(c.bits[older].sum()) // 8 for c in coded]
            exact = (len(read) - len(older)) * source.layer.row_bytes
            assert by_step(got["ledger"], "read_bytes")[h, i] == exact + sum(bits)
            assert by_step(got["ledger"], "meta_bytes")[h, i] == sum(int(c.row_meta[older].sum()) for c in coded) + tables


def test_bits_per_side(file):
    policy = kvquant(k_bits=16, v_bits=16, calibration=None)
    assert policy.needs == {K_PRE}
    with pytest.raises(
        WrongUse, match=r"made for kvquant with .*'k_bits': 3.*, and this is kvquant\(k_bits=16, v_bits=3, outliers=0.01\)"
    ):
        kvquant(k_bits=16, calibration=file)


def test_laws(tmp_path):
    """One range for all heads, so that heads may be permuted."""
    other = conformance_lane(prompt=200, seed=7)
    k, v = (np.repeat(x.astype(float).reshape(1, -1, 8), 3, axis=0) for x in (other.k_pre, other.v))
    assert check_policy(kvquant(calibration=made(tmp_path / "c.npz", k, v, layer=0), first=1)) == []


def refused(make):
    with pytest.raises(WrongUse) as e:
        make()
    assert "\n" not in str(e.value)
    return str(e.value)


def test_refused(file, source, tmp_path):
    assert "kvsim calibrate TRACE" in refused(lambda: kvquant().codecs)
    assert "No such file" in refused(lambda: kvquant(calibration=str(tmp_path / "gone.npz")))
    (tmp_path / "text.npz").write_text("hello")
    assert "not a calibration file" in refused(lambda: kvquant(calibration=str(tmp_path / "text.npz")))
    np.savez(tmp_path / "plain.npz", x=np.ones(3))
    assert "not a calibration file" in refused(lambda: kvquant(calibration=str(tmp_path / "plain.npz")))
    assert "made for kvquant with" in refused(lambda: kvquant(bits=4, calibration=file))
    assert "kvquant(k_bits=9): expected 1 to 8 bits" in refused(lambda: kvquant(bits=9))
    policy = complete(kvquant(calibration=file))
    for change, words in (
        ({"id": 4}, "nothing for layer 4, it covers the layers [3]"),
        ({"kv_heads": 3}, "layer 3 has 2 kv heads there"),
        ({"key_dim": 16}, "keys of layer 3 have 8 numbers there, here 16"),
    ):
        assert words in refused(lambda change=change: allocate.for_layer(policy, dataclasses.replace(source.layer, **change)))


def test_a_coder_has_no_state(source):
    x = source.v[0].astype(float)[:, None]
    level = of_values(x.swapaxes(0, 1), 2, 0.05)["v.level"]
    one = pipeline(grid=coder(2, 0.05, level))
    assert np.array_equal(one.encode(x).values, np.concatenate([one.encode(row[None]).values for row in x]))
