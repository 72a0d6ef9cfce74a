"""The evidence table, span by span, against heads and against plain float64 attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvsim.conformance import lane
from kvsim.engine.run import Job, run_layer
from kvsim.geometry import Span
from kvsim.policies.language import parse

SPANS = (
    Span("a", 3, 9, "evidence"),
    Span("b", 20, 21, "evidence"),
    Span("late", 44, 50, "evidence"),
    Span("other", 0, 3, "note"),
)


@pytest.fixture(
    params=[
        "quest(read=pages(2), page=4)",
        "h2o(hold=tokens(16))",
        "streaming_llm(sinks=2, hold=tokens(14)) >> recency(read=pages(2), page=4)",
    ]
)
def tables(request):
    source = lane()
    source = dataclasses.replace(source, request=dataclasses.replace(source.request, spans=SPANS), _one={})
    return source, run_layer(source, [Job(parse(request.param))], plans=True)[0]


def test_spans_add_up_to_heads(tables):
    _, found = tables
    for heads, part in zip(found["heads"], found["evidence"], strict=True):
        for whole, name in (("evidence_dense", "dense"), ("evidence_read", "read")):
            summed = part[name].reshape(3, -1).sum(0)
            np.testing.assert_allclose(summed, heads[whole], atol=1e-6)
    assert {s for part in found["evidence"] for s in part["span"]} == {"a", "b", "late"}


def test_a_span_has_the_mass_of_its_visible_tokens(tables):
    source, found = tables
    part = found["evidence"][1]
    for step, q_head, span, dense in zip(part["step"], part["q_head"], part["span"], part["dense"], strict=True):
        t = 37 + step
        s = source.q[step, q_head].astype(float) @ source.k[1, : t + 1].astype(float).T * source.layer.scale
        p = np.exp(s - s.max())
        p /= p.sum()
        where = next(x for x in SPANS if x.label == span)
        assert dense == pytest.approx(p[where.start : where.stop].sum(), abs=1e-6)


def test_without_plans_there_is_none():
    source = lane()
    source = dataclasses.replace(source, request=dataclasses.replace(source.request, spans=SPANS), _one={})
    assert run_layer(source, [Job(parse("full()"))])[0]["evidence"] == []
