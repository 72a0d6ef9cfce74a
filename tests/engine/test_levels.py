"""Three levels of loss: an oracle over all, one over what is held, the policy; as errors of the output, too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.lanes import lane, run

PAGED = "h2o(hold=tokens(24)) >> quest(read=pages(2), page=4)"
CODED = "h2o(hold=tokens(24)) >> kivi(group=2, residual=4) >> quest(read=pages(2), page=4)"
WHOLE = "tova(hold=tokens(15))"
NAMES = ("oracle_rel_l2", "oracle_held_rel_l2", "oracle_coded_rel_l2", "rel_l2")


def columns(source, policy, **options):
    return run(source, policy, explain=True, **options)["heads"]


def naive(source, heads, row, page):
    """The error of reading the pages of most dense mass, as many as the policy did, over all visible tokens."""
    lay, q, i = source.layer, int(heads["q_head"][row]), int(heads["step"][row])
    h, t = q // lay.group, int(source.t[i])
    e = np.exp(lay.scale * (source.k[h, : t + 1].astype(float) @ source.q[i, q].astype(float)))
    many = int(heads["read_pages"][row] if page > 1 else heads["read_tokens"][row])
    of = np.arange(t + 1) // page
    mass = np.bincount(of, e)
    best = sorted(range(len(mass)), key=lambda p: (-mass[p], p))[:many]
    kept, v = np.where(np.isin(of, best), e, 0), source.v[h, : t + 1].astype(float)
    whole = e @ v / e.sum()
    return np.linalg.norm(kept @ v / kept.sum() - whole) / np.linalg.norm(whole), kept.sum() / e.sum()


@pytest.mark.parametrize(("policy", "page"), [(PAGED, 4), (CODED, 4), (WHOLE, 1)])
def test_the_first_level_is_an_oracle_over_everything(policy, page):
    source = lane(prompt=40, steps=7)
    heads = columns(source, policy)
    for row in range(len(heads["step"])):
        error, recall = naive(source, heads, row, page)
        assert heads["oracle_rel_l2"][row] == pytest.approx(error, abs=1e-5)
        assert heads["oracle_recall"][row] == pytest.approx(recall, abs=1e-6)


def test_levels_of_recall_fall_and_coding_has_a_level_of_its_own():
    source = lane(prompt=60, steps=12)
    for policy in (PAGED, CODED, WHOLE):
        heads = columns(source, policy)
        assert (heads["oracle_recall"] >= heads["oracle_held_recall"] - 1e-9).all()
        assert (heads["oracle_held_recall"] >= heads["mass_recall"] - 1e-9).all()
        assert np.isnan(heads["oracle_coded_rel_l2"].astype(float)).all() == (policy != CODED)
    assert (heads["oracle_held_rel_l2"] == heads["rel_l2"]).all()  # exact rows, all of them read: the policy is its own oracle


def test_who_reads_as_its_oracle_loses_nothing_to_its_ranking():
    heads = columns(lane(prompt=60, steps=12), 'h2o(hold=tokens(24)) >> oracle(read=pages(2), page=4, by="mass")')
    assert heads["oracle_held_rel_l2"] == pytest.approx(heads["rel_l2"], abs=1e-12)


def test_who_holds_and_reads_everything_has_no_error_at_any_level():
    heads = columns(lane(prompt=30, steps=5), "full()")
    assert (heads["oracle_rel_l2"] == 0).all()
    assert (heads["oracle_held_rel_l2"] == 0).all()


def test_without_explain_there_is_nothing_of_it():
    heads = run(lane(), PAGED)["heads"]
    assert not set(NAMES[:3]) & set(heads)
