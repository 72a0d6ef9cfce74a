"""The worked lines of docs/definitions.md that are not of the plain tables: what is ranked, coded, moved, explained and kept, recomputed."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import polars.selectors as cs
import pytest

from kvsim.codecs.minmax import minmax
from kvsim.engine.difficulty import coverage
from kvsim.engine.neighbour import OWN, Plan, reuse
from kvsim.engine.recurrence import count
from kvsim.engine.select import cut
from kvsim.engine.source import Source
from kvsim.geometry import Layer, Request
from kvsim.metrics.keeping import error_metrics, recurrence_metrics, tier_metrics
from kvsim.metrics.paired import spearman, wilson
from kvsim.policies import scores
from kvsim.policies.protocol import FULL, Ranking
from tests.engine.lanes import chain, columns, lane, run
from tests.engine.test_definitions import QUEST, STREAMING, P, example, told


def of_keys(keys, *q):
    """One step of one query head over keys [T, d], scale 1/2, the last key of its token."""
    k, (many, dim) = np.array(keys, np.float32)[None], np.shape(keys)
    of = Layer(0, "full", 1, 1, dim, 1, 0.5, 4 * (dim + 1), "float32")
    request = Request(0, many - 1, many, "synthetic", np.zeros(many, np.int8), ())
    return Source(
        of, request, k, np.ones((1, many, 1), np.float32), np.arange(1), np.array([many - 1]), *[np.array([[q]], np.float32)] * 2
    )


def asking(*q):
    """The example with a query of its own at each position, or with two query heads."""
    source = example()
    heads = len(q) // 2
    layer = dataclasses.replace(source.layer, q_heads=heads)
    return dataclasses.replace(source, layer=layer, q=np.array(q, np.float32).reshape(2, heads, 1), _one={})


def frame(tables, name):
    """A table as a run's frame."""
    columns = {c: list(x) for c, x in tables[name].items() if not c.startswith("_")}
    return (
        pl.LazyFrame(columns).with_columns(cs.float().fill_nan(None)).with_columns(policy=pl.lit("p"), request=0, layer=0, role=0)
    )


def metrics(found):
    return dict(found.collect().select("metric", "value").rows())


def test_between_rankings():
    made = run(example(), "quest(read=pages(2), page=2, refresh=2)", plans=True)
    told("between rankings", *made["plans"]["pages"][1])
    assert made["plans"]["pages"].tolist() == [[0, 3], [0, 3]]
    assert (made["heads"]["set_age"].tolist(), made["ledger"]["index_bytes"].tolist()) == ([0, 1], [32, 0])


def test_windows_are_ranked_by_their_sums():
    score, unit = np.array([[0.1, 0.1, 0.3, 0.1, 0.2, 0.0]]), np.array([[0, 0, 1, 1, 2, 2]])
    tier = cut(Ranking(score, unit=unit), np.arange(6)[None], np.ones((1, 6), bool), np.array([4]), {FULL: 12})
    told("order |", score[0, :2].sum(), score[0, 2:4].sum(), *np.unique(unit[tier > 0]))
    assert np.unique(unit[tier > 0]).tolist() == [0, 1]
    sums = np.array([[0.40, 0.10, 0.20, 0.10, 0.20]])
    told('`score="snapkv"`', *sums[0], *scores.smoothed(sums, sums > 0)[0])


def test_windows_that_leave_the_device_and_come_back():
    told("`promotion`", minmax(2, "tokens", 4).roundtrip(np.array([-1, -0.2, 0.4, 2]).reshape(1, 4, 1)).ravel()[1], -0.2)
    away = "qevict(hold=tokens(96), quant_share=0.2, host=tokens(20), period=4)"
    ledger = run(lane(prompt=160, steps=12, kv_heads=1, key_dim=128, dtype="bfloat16"), away)["ledger"]
    out, host = ledger["moved_out_bytes"], ledger["host_read_bytes"]
    assert out[out > 0].size
    assert not (out % 1056).any()
    assert not (host % 1056).any()
    told("bytes off the device", np.gcd.reduce(out), np.gcd.reduce(host))
    again = (
        'qevict(hold=share(0.5), quant_share=0.4, sinks=2, window=4, period=3, recent=tokens(6), decay=0.3, requantise="each")'
    )
    moved = run(lane(prompt=80, steps=18, size=3.0, seed=3), again)["events"]["requantised"]
    assert moved.max() > 0
    told("`requantised`", np.gcd.reduce(moved))


def test_a_page_that_lost_a_row_is_summarised_again():
    ledger = run(example(), f"{STREAMING} >> {QUEST}")["ledger"]
    assert ledger["rebuilt_pages"].tolist() == [0, 1]
    told("`rebuilt_pages`", ledger["rebuilt_pages"][1], ledger["rebuild_bytes"][1])


def test_offload():
    tables = run(example(), f"offload(device=pages(2)) >> {QUEST}")
    assert tables["ledger"]["missed_pages"].tolist() == tables["ledger"]["missed_runs"].tolist() == [1, 0]
    told("`host_read_bytes` | rows", *tables["ledger"]["host_read_bytes"])
    told("`mass_host`", *tables["heads"]["mass_host"])
    told("`moved_out_bytes` |", *tables["ledger"]["moved_out_bytes"])
    told("`host_resident_bytes`", tables["ledger"]["host_resident_bytes"][1])


def test_errors_of_codes():
    heads = run(example(), "kivi(bits=2, group=4, residual=4)")["heads"]
    told("`err_select`", *(heads[c][1] for c in ("err_select", "err_k", "err_v")))
    assert heads["err_select"][1] < 1e-6
    step = np.log(0.30 / 0.05) / 3
    told("`err_select`", P[3], np.exp(np.log(0.05) + 2 * step))


def test_proofs():
    sure, cap = (run(example(), f"quest(read=exact(r=1{c}), page=2)", plans=True) for c in ("", ", cap=pages(1)"))
    assert (sure["heads"]["certified"].tolist(), cap["heads"]["certified"].tolist()) == ([True, True], [False, False])
    told("`certified` | rows", sure["heads"]["certified"].mean(), cap["heads"]["certified"].mean())
    told("`certified` | whether", *sure["plans"]["pages"][1], *cap["plans"]["pages"][1])
    for line, rule in {
        "`mass(eps)`": "mass(eps=0.4)",
        "`top_p(p)`": "top_p(p=0.6)",
        "`gap(min": "gap(min=0.3, floor=pages(1), cap=pages(4))",
    }.items():
        made = run(example(), f"quest(read={rule}, page=2)", plans=True)
        assert made["plans"]["pages"][1] == [0, 3]
        told(line, *made["plans"]["pages"][1])
    told("`mass(eps)`", run(example(), QUEST)["heads"]["eps_hat"][1])
    told("`top_p(p)`", 1.10 / 1.56)
    told("`gap(min", np.log(0.30 / 0.20))
    told("`gap(file", np.log(0.1 / 0.9))


def test_features_of_a_query():
    [gap, top1, entropy, age] = coverage(example(), chain(QUEST).part("read"), 0, [2])[0][1, 0]
    told("gap | fall", gap)
    told("top1", top1)
    told("entropy", entropy)
    told("age |", age)
    assert gap == pytest.approx(np.log(0.30 / 0.20), abs=1e-6)


def test_scores_of_pages():
    keys = [(2, 0), (0, 2), (1, 1), (1, 1)]
    for index, line in {"boxes()": "box bound", "sphere()": "sphere", "digest()": "digest"}.items():
        made = run(of_keys(keys, 1, 1), f"quest(read=pages(1), page=2, index={index})", explain=True)
        told(line, 2 * made["heads"]["slack_max"].item() + 2)
        told("slack |", made["heads"]["slack_max"].item())
        told("`slack_norm`", made["explain"]["slack_norm"].item())
    below = run(of_keys([[0], [1], [2], [1], [1], [1]], 2), "quest(read=pages(1), page=3, index=digest())", explain=True)[
        "explain"
    ]
    told("`below`", below["below"].item(), below["below_max"].item())
    assert below["below"].item() == 1
    near = run(of_keys([[2.0], [2.0005], [1.0]], 1), 'quest(read=pages(1), page=1, tail="free")', explain=True, plans=True)
    assert (near["plans"]["pages"].tolist(), near["explain"]["fp16_changed"].tolist()) == ([[1]], [1])


def test_what_a_step_changes():
    explain = run(asking(1, -1), QUEST, explain=True)["explain"]
    told("`churn_summary`", explain["churn_summary"][1], explain["churn_query"][1])
    assert explain["churn_query"][1] == pytest.approx(0.8)
    assert run(example(), "quest(read=pages(1), page=2)", explain=True)["explain"]["recovered_1"][1] == 0


def test_pages_of_another_layer():
    source = asking(1, 1, 1, 1)
    plans = {OWN: [[0, 3]] * 4, 1: [[0, 1], [1, 3]] * 2}
    made = columns({"reuse": reuse(source, {d: plan(pages) for d, pages in plans.items()})})["reuse"]
    [row] = np.flatnonzero((made["distance"] == 1) & (made["q_head"] == 0) & (made["step"] == 1))
    names = ("pages", "mass_recall", "evidence_read")
    told("`layer_pages`", *(made[name][row] for name in names), *(made[f"layer_{name}"][row] for name in names))
    assert made["layer_mass_recall"][row] == pytest.approx(0.95, abs=1e-6)


def plan(pages):
    """The pages of two query heads, step by step."""
    head, step = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    return Plan(0 * head, head, step, 2, np.concatenate(pages), np.append(0, np.cumsum([len(p) for p in pages])))


def test_what_leaves_and_what_returns():
    full, everything = [{0, 1}, {0, 2}, {0, 2}, {0, 1}, {1, 2}], set(range(8))
    masks = lambda sets: [np.isin(np.arange(8), sorted(s)) for s in sets]  # noqa: E731
    held = [*[everything] * 4, everything - {0}]
    found = count(masks(full), masks(held), masks([set()] * 5), [0] * 5, [8] * 5, np.arange(8))
    told("`_alive`", found.spells_alive[0], found.spells[0], found.pairs_alive[0], found.pairs[0])
    told("`spells_alive`", found.spells_alive[0], found.pairs_alive[0])
    assert (found.spells_alive[0], found.pairs_alive[0]) == (2, 3)


def test_oracles_beside_the_cuts():
    tables = run(example(), "h2o(hold=tokens(4))", explain=True)
    churn = metrics(recurrence_metrics(frame(tables, "recurrence")))
    told("`churn_held`", churn["churn_held"], churn["churn_oracle"])
    told("`state_bytes`", tables["events"]["state_bytes"][-1])
    assert churn["churn_held"] == 0
    assert churn["churn_oracle"] == pytest.approx((1 - len({0}) / len({0, 1, 3})) / 2)
    first = [run_["start"] for run_ in tables["tiers"]["runs"][0] if run_["tier"] == 2]
    assert first == [0, 4]  # 0 and 1, and the newest two


def test_codes_in_scores_and_in_errors():
    coded = run(example(), "kivi(k_bits=4, v_bits=16, group=2, residual=2)", explain=True)
    told("`demoted`", *coded["events"]["demoted"])
    told("`fmm_tier_disabled`", metrics(tier_metrics(frame(coded, "by_tier"), frame(coded, "heads")))["fmm_tier_disabled"])
    windows = 'qevict(hold=tokens(5), quant_share=1, sinks=0, window=3, period=1, recent=1, domain="post")'
    cosine = run(example(), windows, explain=True)["recurrence"]
    third = np.exp(np.log(0.02) + np.log(0.20 / 0.02) / 3)
    low, full = np.array([0.40, 0.22 + third]), np.array([0.40, 0.25])
    last = low @ full / np.linalg.norm(low) / np.linalg.norm(full)
    told("`score_cosine`", third, low[1], last, cosine["score_cosine"][0])
    assert cosine["score_cosine"][0] == pytest.approx((1 + last) / 2, abs=1e-5)  # codes hold min and step in fp16
    errors = metrics(error_metrics(frame(run(example(), STREAMING, explain=True), "heads")))
    told("`error_budget`", *(errors[f"error_{part}"] for part in ("budget", "evict", "code", "index")))


def test_the_output_without_a_class():
    last = {c: x[-1] for c, x in run(example(), STREAMING, explain=True)["by_tier"].items()}
    told("`without_c`", 0.27 / 0.40, 0.13 / 0.40, last["without_sinks"])
    told("`without_sinks`", last["without_sinks"], last["without_recent"])
    assert last["without_recent"] == pytest.approx(np.hypot(0.38, 0.38) / np.hypot(0.62, 0.38), abs=1e-6)
    assert all(np.isnan(last[f"without_{c}"]) for c in ("full", "coded", "host"))


def test_intervals_and_orders():
    told("interval of a share", *wilson(0.8, 10))
    told("rank correlation", spearman(np.array([1.0, 2, 3]), np.array([2.0, 1, 3])))
    told("KL |", 0.5 * np.log(2) + 0.5 * np.log(2 / 3))
