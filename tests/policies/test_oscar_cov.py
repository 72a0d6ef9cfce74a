"""OSCAR: its basis from its definition, a row written out, three segments, and the calibration that it must not know itself by."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim import oscar_cov
from kvsim.codecs.calibration import Sample, save
from kvsim.conformance import check_policy
from kvsim.conformance import lane as conformance_lane
from kvsim.errors import WrongUse
from kvsim.kernels.rotate import drawn, hadamard
from kvsim.policies.language import canonical, parse
from kvsim.policies.store.oscar_cov import mixed, query_covariance, reversed_bits, value_covariance
from tests import naive
from tests.engine.lanes import by_step, lane, run
from tests.policies.test_kivi import full, placed


def sample(seed=0, heads=2, tokens=40, queries=30, dim=8):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, heads, tokens, dim))
    return Sample(k, v, rng.standard_normal((heads, queries, dim)) * np.geomspace(5, 0.1, dim))


def made(path, layer=3, dim=8, arrays=None):
    about = {"kind": "oscar_cov", "options": {}, "trace": {"id": "other", "sha256": "0" * 64}, "contexts": ["abc"]}
    found = arrays or oscar_cov(rotate="none").calibrate(sample(dim=dim))
    save(path, about, {f"{layer}.{name}": x for name, x in found.items()})
    return str(path)


# ------------------------------------------------------------------------------------------------ the basis
def test_covariances_are_those_of_the_definition():
    s = sample()
    want_k, want_v = np.zeros((8, 8)), np.zeros((8, 8))
    for q, k, v in zip(s.queries, s.keys, s.values, strict=True):
        weight = np.array([np.mean([(row @ key) ** 2 for row in q]) for key in k])  # the mean squared logit of a key
        want_k += sum(np.outer(row, row) for row in q) / len(q) / 2
        want_v += sum(w * np.outer(row, row) for w, row in zip(weight / weight.mean(), v, strict=True)) / len(v) / 2
    assert np.allclose(query_covariance(s), want_k)
    assert np.allclose(value_covariance(s), want_v)


def test_the_basis_is_orthogonal_and_spreads_the_energy_evenly():
    """Eigenvectors times Hadamard: every direction has the mean eigenvalue, whatever the order of the columns."""
    covariance = query_covariance(sample())
    basis = mixed(covariance)
    assert np.allclose(basis @ basis.T, np.eye(8))
    assert np.diag(basis.T @ covariance @ basis) == pytest.approx([np.trace(covariance) / 8] * 8)
    assert np.ptp(np.diag(covariance)) > 1


def test_a_basis_does_not_hang_on_the_signs_of_eigenvectors(monkeypatch):
    covariance, eigh = query_covariance(sample()), np.linalg.eigh
    want = mixed(covariance)
    monkeypatch.setattr(np.linalg, "eigh", lambda x: (eigh(x)[0], eigh(x)[1] * np.resize([1, -1], len(x))))
    assert np.array_equal(mixed(covariance), want)


def test_columns_are_in_bit_reversed_order_of_their_eigenvalues():
    assert reversed_bits(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert reversed_bits(1).tolist() == [0]
    spread = np.array([3.0, 1, 4, 2])  # an eigenbasis that is the axes themselves
    basis = mixed(np.diag(spread))
    plain = np.abs(np.linalg.eigh(np.diag(spread))[1]) @ hadamard(4)
    assert np.array_equal(
        basis, plain[:, [3, 1, 2, 0]]
    )  # eigh ascends: the largest is column 3, at place 0; then 2 at 2, 1 at 1, 0 at 3


def test_that_order_is_nothing_where_one_group_is_the_row():
    """So an ablation of it at group = head_dim shows nothing."""
    x = np.random.default_rng(0).standard_normal((1, 30, 8))
    basis, order = drawn(8), reversed_bits(8)
    for group, same in ((8, True), (4, False)):
        a, b = (coded(x, m, group) for m in (basis, basis[:, order]))
        assert np.allclose(a, b, atol=1e-9) is same


def coded(x, basis, group=128, clip=0.96):
    from dataclasses import replace

    from kvsim.codecs.rotate import basis as given

    return replace(oscar_cov(rotate="none", group=group, clip_k=clip).codecs.k, rotate=given(basis)).roundtrip(x)


# ------------------------------------------------------------------------------------------------ codes
@pytest.mark.parametrize("clip", [0, 0.5, 0.96])
def test_a_row_written_out(clip):
    x, basis = np.random.default_rng(1).standard_normal((1, 6, 16)) * 2, drawn(16)
    for row, got in zip(x[0], coded(x, basis, clip=clip)[0], strict=True):
        assert got == pytest.approx(naive.oscar_row(row.tolist(), basis, clip, 2)[0], abs=1e-5)


def test_bytes_of_the_card():
    """d = 128: 32 bytes of codes, and a scale and a zero in 16 or in 32 bits; a basis of each side once per layer."""
    for scales, row in ((16, 36), (32, 40)):
        codecs = oscar_cov(rotate="hadamard", scales=scales).codecs
        for codec in (codecs.k, codecs.v):
            bits, meta = codec.layout(128)
            assert bits // 8 + meta == row
            assert codec.once(128) == 0


def test_a_basis_is_billed_once_per_layer(tmp_path):
    source = lane(prompt=60, steps=3, key_dim=8, dtype="bfloat16")
    policy = {"sinks": 4, "recent": 8}
    with_file, without = (
        run(source, oscar_cov(**policy, **how))["ledger"]
        for how in ({"calibration": made(tmp_path / "c.npz")}, {"rotate": "hadamard"})
    )
    more = by_step(with_file, "meta_resident_bytes") - by_step(without, "meta_resident_bytes")
    assert (more.sum(axis=0) == 2 * 8 * 8 * 4).all()
    assert np.array_equal(by_step(with_file, "resident_bytes"), by_step(without, "resident_bytes"))


def test_three_segments():
    policy = oscar_cov(rotate="none", sinks=2, recent=3)
    k, v = placed(policy, full(9), full(9))
    assert k.tolist() == v.tolist() == [[2, 2, 1, 1, 1, 1, 2, 2, 2]]
    assert placed(policy, full(4), full(4))[0].tolist() == [[2, 2, 2, 2]]


def test_a_row_is_coded_once_when_it_leaves_the_newest():
    source = lane(prompt=20, steps=6, key_dim=8, dtype="bfloat16")
    got = run(source, oscar_cov(rotate="hadamard", sinks=2, recent=5))["ledger"]
    assert by_step(got, "quant_tokens")[0].tolist() == [14, 15, 16, 17, 18, 19]
    each = 2 * (8 * 2 // 8 + 8)  # a key and a value of 8 numbers: codes, scale and zero
    assert (by_step(got, "write_bytes") == source.layer.row_bytes + each).all()


# ------------------------------------------------------------------------------------------------ calibration
def test_the_name_shows_which_file_it_was(tmp_path):
    policy = parse(f'oscar_cov(calibration="{made(tmp_path / "c.npz")}")')
    assert parse(canonical(policy)) == policy
    assert "in_sample" not in canonical(policy)


def test_a_basis_from_its_own_context_is_refused(tmp_path):
    file = made(tmp_path / "c.npz")
    policy = oscar_cov(calibration=file)
    assert "made from the trace that is replayed, mine" in policy.foreign_to("mine", "0" * 64, "")
    assert "made from the same context" in policy.foreign_to("mine", "1" * 64, "abc")
    assert policy.foreign_to("mine", "1" * 64, "abd") is None
    assert policy.foreign_to("mine", "1" * 64, "") is None
    known = oscar_cov(calibration=file, in_sample=True)
    assert known.foreign_to("mine", "0" * 64, "abc") is None
    assert "in_sample=True" in canonical(parse(f'oscar_cov(calibration="{file}", in_sample=True)'))


def test_laws(tmp_path):
    assert check_policy(oscar_cov(rotate="hadamard", sinks=2, recent=6)) == []
    other = conformance_lane(prompt=200, seed=7)
    s = Sample(*(x.astype(float) for x in (other.k, other.v)), other.q.astype(float).reshape(3, -1, 8))
    file = made(tmp_path / "c.npz", layer=0, arrays=oscar_cov(rotate="none").calibrate(s))
    assert check_policy(oscar_cov(calibration=file, sinks=2, recent=6)) == []


def test_refused(tmp_path):
    file = made(tmp_path / "c.npz")
    for call, words in (
        (lambda: oscar_cov().codecs, "oscar_cov(calibration=None): expected a calibration file of another trace"),
        (lambda: oscar_cov(rotate="none", calibration=file), 'expected None with rotate="none"'),
        (lambda: oscar_cov(scales=8), "oscar_cov(scales=8): expected 16 or 32 bits"),
        (lambda: oscar_cov(clip_k=1.5), "a part of the numbers of a row"),
        (lambda: parse(f'kvquant(calibration="{file}")'), "was made for oscar_cov with"),
        (lambda: mixed(np.eye(12)), "oscar_cov: rows of 12 numbers have no Hadamard matrix"),
    ):
        with pytest.raises(WrongUse) as e:
            call()
        assert words in str(e.value)
