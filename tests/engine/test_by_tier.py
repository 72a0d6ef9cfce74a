"""Classes sum to the whole, and the output without a class is attention over the others."""

from __future__ import annotations

import numpy as np
import pytest

from kvsim.engine.by_tier import CLASSES, ends
from tests.engine.lanes import chain, lane, run

QEVICT = "qevict(hold=share(0.5), sinks=2, window=4, period=3, recent=tokens(6))"
POLICIES = [
    QEVICT,
    "h2o(hold=tokens(18), recent=0.3, sinks=1)",
    "streaming_llm(sinks=2, hold=tokens(17)) >> kivi(group=2, residual=4) >> oracle(read=pages(2), page=4)",
    "tova(hold=tokens(20)) >> quest(read=pages(3), page=4)",
    "kivi(group=2, residual=8)",
]
LANES = {"full": {}, "sinks": {"sinks": True, "softcap": 2.0}, "sliding": {"window": 21}, "sharp": {"size": 6.0}}


def joined(tables):
    """{column: array} of heads and by_tier, row by row the same (q_head, step)."""
    out = {}
    for name in ("heads", "by_tier"):
        order = np.lexsort((tables[name]["step"].astype(int), tables[name]["q_head"].astype(int)))
        out[name] = {c: x[order] for c, x in tables[name].items()}
    return out["heads"], out["by_tier"]


@pytest.mark.parametrize("options", LANES.values(), ids=LANES)
@pytest.mark.parametrize("policy", POLICIES)
def test_classes_sum_to_the_whole(policy, options):
    heads, found = joined(run(lane(prompt=40, steps=14, **options), policy, explain=True))
    held, read, own = (sum(found[f"{part}_{c}"] for c in CLASSES) for part in ("held", "read", "own"))
    assert held + heads["mass_evicted"] + heads["learned_sink_mass"] == pytest.approx(1, abs=1e-6)
    assert read == pytest.approx(heads["mass_recall"], abs=1e-6)
    assert (own <= 1 + 1e-12).all()
    if "sinks" not in options:
        assert own == pytest.approx(1, abs=1e-12)
    for c in CLASSES:
        assert (np.isnan(found[f"without_{c}"]) == (found[f"own_{c}"] == 0)).all()


def test_coded_mass_is_what_heads_says_where_all_is_read():
    heads, found = joined(run(lane(prompt=40, steps=14), QEVICT, explain=True))
    assert found["read_coded"] == pytest.approx(heads["mass_quant"], abs=1e-6)
    assert found["held_coded"].max() > 0.1


@pytest.mark.parametrize("sinks", [False, True])
def test_the_output_without_a_class_is_attention_over_the_others(sinks):
    """Exact rows, all held read: recomputed with the class's positions taken out."""
    source = lane(prompt=40, steps=9, sinks=sinks, seed=4)
    tables = run(source, "streaming_llm(sinks=3, hold=tokens(80))", explain=True)
    _, found = joined(tables)
    lay = source.layer
    for row in range(len(found["step"])):
        q, i = int(found["q_head"][row]), int(found["step"][row])
        h, t = q // lay.group, int(source.t[i])
        pos = np.arange(t + 1)
        kind = np.where(pos < 3, "sinks", np.where(pos > t - 64, "recent", "full"))
        e = np.exp(lay.scale * (source.k[h, : t + 1].astype(float) @ source.q[i, q].astype(float)))
        rest, v = np.exp(lay.sinks[q]) if sinks else 0.0, source.v[h, : t + 1].astype(float)
        whole = e @ v / (e.sum() + rest)
        for c in ("sinks", "recent"):
            left = np.where(kind == c, 0, e)
            got = left @ v / max(left.sum() + rest, 1e-300)
            want = np.linalg.norm(got - whole) / np.linalg.norm(whole)
            assert found[f"without_{c}"][row] == pytest.approx(want, rel=1e-5, abs=1e-6)
            assert found[f"own_{c}"][row] == pytest.approx(e[kind == c].sum() / (e.sum() + rest), rel=1e-5)


def test_sinks_and_recent_are_the_policys_own_where_it_has_them():
    assert ends(chain(QEVICT)) == (2, 6)
    assert ends(chain("h2o(hold=tokens(18), recent=0.3, sinks=1)")) == (1, 64)  # a share of the budget is no number of tokens
    assert ends(chain("tova(hold=tokens(18))")) == (4, 64)
