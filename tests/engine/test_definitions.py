"""The worked lines of docs/definitions.md, recomputed: each number from the engine, and found in the text."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvsim.codecs.minmax import minmax
from kvsim.engine.source import Source
from kvsim.geometry import Layer, Request, Span
from kvsim.policies import allocate
from kvsim.policies.index.boxes import boxes
from kvsim.units import share
from tests.engine.lanes import lane, run

TEXT = (Path(__file__).parents[2] / "docs/definitions.md").read_text()
P = np.array([0.30, 0.05, 0.05, 0.20, 0.02, 0.03, 0.25, 0.10])
QUEST, STREAMING = "quest(read=pages(2), page=2)", "streaming_llm(sinks=1, hold=tokens(4))"


def example(**layer):
    """Keys ln p and a query of 1, so that a softmax over all 8 tokens is p."""
    k, v = np.log(P).astype(np.float32)[None, :, None], np.tile([[1, 0], [0, 1]], (4, 1)).astype(np.float32)[None]
    q = np.ones((2, 1, 1), np.float32)
    request = Request(0, 6, 8, "synthetic", np.zeros(8, np.int8), (Span("e", 6, 8, "evidence"),))
    of = Layer(0, "full", 1, 1, 1, 2, 1.0, 12, "float32", **layer)
    return Source(of, request, k, v, np.arange(2), np.array([6, 7]), q, q[:1], mass=np.ones((1, 6), np.float32))


def told(line, *numbers):
    """The numbers stand in the row of the table that begins with `line`, written with as many digits as they have there."""
    [row] = [row for row in TEXT.splitlines() if row.startswith(f"| {line}")]
    written = [x.replace("−", "-") for x in re.findall(r"[−-]?(?:\d+\.?\d*|\.\d+)", row)]
    for number in numbers:
        near = [
            abs(float(x) - float(number)) <= (0.51 * 10.0 ** -len(x.partition(".")[2]) if "." in x else 1e-6) for x in written
        ]
        assert any(near), (line, number, written)


@pytest.fixture(scope="module")
def quest():
    return run(example(), QUEST)


def test_the_example_is_what_it_says(quest):
    assert "p = " + " ".join(f"{x:.2f}"[1:] for x in P) in TEXT
    assert "`.35 .25 .05 .35`" in TEXT
    assert np.allclose(P.reshape(4, 2).sum(1), [0.35, 0.25, 0.05, 0.35])
    assert run(example(), QUEST, plans=True)["plans"]["pages"].tolist() == [[0, 3], [0, 3]]
    assert allocate.to_pages(share(0.75), 2, 8, example().request, example().layer) == 3


def test_attention():
    told("logit", 3 * np.tanh(1))
    sunk = run(example(sinks=(float(np.log(0.25)),)), "full()")["heads"]
    told("dense probability", 0.30 / 1.25)
    told("`learned_sink_mass`", sunk["learned_sink_mass"][1])
    told("own probability", 0.30 / 0.70)
    told("output", 0.62, 0.38, 0.55 / 0.7, 0.15 / 0.7)


def test_paging():
    page = {"keys": np.array([[[2.0, 0], [0, 2]]]), "valid": np.ones((1, 2), bool), "closed": np.ones(1, bool)}
    summary = {name: x[None] for name, x in boxes(dtype="float32").summarise(**page).items()}
    score = boxes(dtype="float32").score(np.ones((1, 1, 1, 2)), summary)
    told("bound U", score.item())
    told("`slack_mean`", (score.item() - 2) / 2)


def test_ledger(quest):
    ledger = quest["ledger"]
    last = {c: x[1] for c, x in ledger.items() if c not in ("asked_unit", "_pages")}
    told("`visible_tokens`", last["visible_tokens"])
    told("`read_tokens`", last["read_tokens"], last["read_pages"], last["read_runs"])
    told("`read_bytes`", *ledger["read_bytes"])
    told("`page_bytes`", *ledger["page_bytes"])
    assert (ledger["page_bytes"] == 48).all()
    told("`resident_page_bytes`", last["resident_page_bytes"])
    told("`index_resident_bytes`", last["index_resident_bytes"])
    told("`index_bytes`", last["index_bytes"])
    told("`write_bytes`", last["write_bytes"])
    held = run(example(), STREAMING)["ledger"]
    told("`held_tokens`", held["held_tokens"][1], held["evicted_tokens"][1])
    assert (held["held_tokens"][1], held["evicted_tokens"][1]) == (4, 4)
    told("`score_bytes`", 2 * 4 * 1025 * 4)
    watched = run(lane(prompt=20, steps=1, group=4), 'h2o(hold=tokens(9), prefill="zeros")')["ledger"]
    assert (watched["score_bytes"] == 2 * 4 * 10 * 4).all()


def test_coded_bytes():
    source = lane(prompt=69, steps=1, kv_heads=1, key_dim=128, dtype="bfloat16")
    ledger = run(source, "kivi(bits=2, group=32, residual=32)")["ledger"]
    told("`kivi`", 64, 38)
    told("`full_tokens`", ledger["full_tokens"][0], ledger["quant_tokens"][0])
    told("`resident_bytes`", ledger["resident_bytes"][0])
    told("`meta_resident_bytes`", ledger["meta_resident_bytes"][0])
    told("`meta_bytes`", ledger["meta_bytes"][0])
    decoded = minmax(2, "tokens", 4).roundtrip(np.array([-1, -0.2, 0.4, 2]).reshape(1, 4, 1)).ravel()
    told("codes", *decoded)
    assert decoded.tolist() == [-1, 0, 0, 2]


def test_heads(quest):
    heads = {c: x[1] for c, x in quest["heads"].items()}
    for column in (
        "mass_recall", "mass_unread", "evidence_dense", "evidence_mass", "top1_recall", "page_recall", "page_recall10", "rel_l2", "cosine",
        "out_bound", "out_bound_centred", "false_read_bytes", "page_precision", "rounds", "eps_hat",
    ):  # fmt: skip
        told(f"`{column}`", heads[column])
    told("`top1_recall`", heads["top10_recall"], heads["top64_recall"])
    told("`evidence_dense`", heads["evidence_read"])
    told("`rel_l2`", np.hypot(0.55 / 0.7 - 0.62, 0.15 / 0.7 - 0.38), np.hypot(0.62, 0.38))
    assert heads["eps_hat"] > heads["mass_unread"]
    gone = run(example(), STREAMING)["heads"]
    told("`mass_evicted`", gone["mass_evicted"][1])
    assert gone["mass_recall"][1] == pytest.approx(0.70, abs=1e-6)
    coded = run(example(), "kivi(k_bits=4, v_bits=16, group=2, residual=2)")["heads"]  # keys 0 ... 5, at position 7
    assert coded["mass_quant"][1] == pytest.approx(P[:6].sum(), abs=1e-6)
    told("`mass_quant`", P[:2].sum())


def test_far_tokens():
    source = lane(prompt=79, steps=1, kv_heads=1, group=1)
    k, q = source.k[0].astype(float), source.q[0, 0].astype(float)
    p = np.exp(source.layer.scale * k @ q)
    assert run(source, "full()")["heads"]["far_mass"] == pytest.approx(p[4:16].sum() / p.sum(), abs=1e-6)
    told("`far_mass`", 4, 15)


def test_curves():
    curves = run(example(), QUEST)["curves"]
    at = lambda k: {c: x[(curves["pages"] == k) & (curves["role"] == -1)].item() for c, x in curves.items()}  # noqa: E731
    told("`mass_recall_mean`", at(1)["mass_recall_mean"], at(1)["mass_recall_min"], 0.35)
    told("`mass_recall_p5`", at(1)["mass_recall_p5"], at(1)["mass_recall_p50"])
    told("`far_recall`", at(1)["evidence_recall"])
    told("`top10_recall_mean`", at(1)["top10_recall_mean"])
    told("`read_pages_mean`", at(1)["read_pages_mean"])
    told("`union_pages_mean`", at(1)["union_pages_mean"], at(1)["read_bytes_mean"])
    assert at(4)["rel_l2_mean"] == pytest.approx(0, abs=1e-6)
    assert at(2)["mass_recall_mean"] == pytest.approx((0.60 / 0.90 + 0.70) / 2, abs=1e-6)
    assert curves["pages"].max() == 4


def test_tiers_and_events():
    tables = run(example(), STREAMING)
    for step, runs, evicted, aged, churn in zip(
        tables["tiers"]["step"],
        tables["tiers"]["runs"],
        *(tables["events"][c] for c in ("evicted", "aged_in", "churn")),
        strict=True,
    ):
        name = "−1, the cut" if step == -1 else f"{step} |"
        told(name, evicted, churn, *([aged] if aged else []))
        shown = " ".join(f"({r['start']}, {r['stop']}, {r['tier']})" for r in runs)
        assert any(row.startswith(f"| {name}") and f"| {shown} |" in row for row in TEXT.splitlines()), shown


def test_what_keeping_costs():
    tables = run(example(), STREAMING, explain=True)
    mass = {int(s): m for s, m in zip(tables["lags"]["step"], tables["lags"]["mass"], strict=True)}
    told("`lags.mass`", mass[1][0])
    assert mass[1] == pytest.approx([0.20, 0.05 + 0.05], abs=1e-6)
    told("`fmm_lag_H`", mass[1].sum(), mass[1][1])
    assert P[[0, 1]] / P[[0, 1, 6, 7]].sum() == pytest.approx([0.30 / 0.70, 0.05 / 0.70])
    told("`own_c`", (P[0] + P[1]) / P[[0, 1, 6, 7]].sum())


def test_pages_that_could_be_read_and_those_read_by_rule():
    made = run(example(), QUEST, plans=True)
    assert made["heads"]["held_pages"].tolist() == made["plans"]["exists"].tolist() == [4, 4]
    assert [sorted({*p} - {*f}) for p, f in zip(made["plans"]["pages"], made["plans"]["forced"], strict=True)] == [[0], [0]]
    whole = run(example(), "quest(read=exact(r=9), page=2)")["heads"]
    assert (whole["read_pages"] == whole["held_pages"]).all()
    assert f"{16 / 100 / (8 - 16 / 100):.4f}" == "0.0204"
    assert "s = .16, .0204" in TEXT


def test_by_class_and_beside_an_oracle(quest):
    tables = run(example(), STREAMING, explain=True)
    last = {name: column[-1] for name, column in tables["by_tier"].items()}
    held, own = ([float(last[f"{kind}_{c}"]) for c in ("sinks", "recent", "full", "coded", "host")] for kind in ("held", "own"))
    assert np.allclose(held, [0.30, 0.40, 0, 0, 0])
    assert np.allclose(own, [0.30 / 0.70, 0.40 / 0.70, 0, 0, 0])
    told("`held_sinks`", *held, 0.30)
    told("`own_sinks`", *own)
    told("`mass_evicted_prefill`", tables["heads"]["mass_evicted_prefill"][-1])
    told("`oracle_recall`", quest["heads"]["oracle_recall"][-1], quest["heads"]["oracle_held_recall"][-1])


def test_every_worked_cell_is_filled():
    """In every table with a column `worked`."""
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        head, _, *rows = table.splitlines()
        if "| worked" in head:
            cells = [re.split(r"(?<!\\)\|", r) for r in (head, *rows)]
            assert [c[1] for c in cells if len(c) != len(cells[0]) or not c[-2].strip()] == []
