"""First-hit layer and hit count of evidence: the worked example of card D13, and sets in plain Python."""

from __future__ import annotations

import numpy as np
import polars as pl

from kvsim.metrics.evidence import ANY, EVERY, ONE, hits, through_layers

UNIT = {"policy": "p", "request": 0}
EXAMPLE = ({1, 4}, {2, 4}, {2, 3}, {3, 7}, {3, 9})  # the pages that five layers read


def tables(read, spans, dense=(), roles=(3,)):
    """read[layer][step] = {q_head: pages}; spans {label: page}."""
    evidence, heads = [], []
    for layer, steps in enumerate(read):
        for step, by_head in enumerate(steps):
            row = UNIT | {"layer": layer, "step": step}
            for h, pages in by_head.items():
                heads.append(row | {"q_head": h, "role": roles[step % len(roles)], "dense": layer in dense})
                evidence += [
                    row | {"q_head": h, "span": s, "dense": 0.1, "read": 0.1 * (page in pages)} for s, page in spans.items()
                ]
    return pl.LazyFrame(evidence), pl.LazyFrame(heads, schema_overrides={"role": pl.Int8})


def told(frame, **where):
    [row] = frame.filter(**where).select("layers", "first", "count").rows()
    return row


def test_the_worked_example():
    found = through_layers(*tables([[{0: pages}] for pages in EXAMPLE], {"e": 3})).collect()
    assert {scope: told(found, scope=scope) for scope in (ONE, ANY, EVERY)} == dict.fromkeys((ONE, ANY, EVERY), (5, 2, 3))


def test_layers_read_whole_stand_apart():
    read = [[{0: {1, 2, 3, 4}}], *([{0: pages}] for pages in EXAMPLE)]
    found = through_layers(*tables(read, {"e": 3}, dense=(0,))).collect()
    assert told(found, scope=ONE, dense=True) == (1, 0, 1)
    assert told(found, scope=ONE, dense=False) == (5, 3, 3)


def test_spans_alone_and_together_are_those_of_sets():
    draw = np.random.default_rng(0)
    spans = {"a": 3, "b": 5, "c": 6}
    read = [[{h: set(draw.choice(8, 2).tolist()) for h in (0, 1)} for _ in range(7)] for _ in range(4)]
    found = through_layers(*tables(read, spans, roles=(1, 3))).collect()
    for step in range(7):
        layers = [read[layer][step][0] | read[layer][step][1] for layer in range(4)]
        wanted = {("one", s): [p in pages for pages in layers] for s, p in spans.items()}
        wanted["any", None] = [bool(pages & {*spans.values()}) for pages in layers]
        wanted["all", None] = [pages >= {*spans.values()} for pages in layers]
        for (scope, span), hit in wanted.items():
            named = {"one": ONE, "any": ANY, "all": EVERY}[scope]
            row = found.filter(pl.col("span").eq_missing(pl.lit(span)), step=step, scope=named)
            assert row.select("layers", "first", "count", "role").rows() == [
                (4, hit.index(True) if any(hit) else None, sum(hit), (1, 3)[step % 2])
            ]


def test_means_over_steps_are_by_role_and_say_how_often_nothing_was_seen():
    read = [[{0: {3}}, {0: set()}, {0: {3}}, {0: set()}], [{0: {3}}, {0: {3}}, {0: set()}, {0: set()}]]
    found = hits(*tables(read, {"e": 3}, roles=(1, 3)))
    assert found.columns == ["policy", "role", "scope", "layers", "first", "count", "never"]
    assert found.filter(scope=ANY).rows() == [("p", 1, ANY, 2.0, 0.0, 1.5, 0.0), ("p", 3, ANY, 2.0, 1.0, 0.5, 0.5)]
