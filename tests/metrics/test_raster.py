"""The rectangles, painted back, are what each step could read and read, token by token."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest

from kvsim.metrics.raster import STATES, Place, pages_recorded, raster, telling_places
from kvsim.metrics.run import open_run
from tests.report.runs import FULL, H2O, KIVI, QUEST, RANDOM, write_run

PROMPT, STEPS, PLACE = 24, 6, Place(0, 3, 1, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("raster") / "run", prompt=PROMPT, steps=STEPS))


def painted(rectangles, width, steps=STEPS):
    """[steps][cells] -> (state, share) or None."""
    cells = -(-(PROMPT + STEPS) // width)
    grid = [[None] * cells for _ in range(steps)]
    for r in rectangles.iter_rows(named=True):
        assert r["stop"] == r["start"] + width
        for step in range(r["first"], r["last"]):
            assert grid[step][r["start"] // width] is None  # never twice
            grid[step][r["start"] // width] = (r["state"], r["share"])
    return grid


def token_states(run, policy, step):
    """{position: state} by the definitions, from the tables row by row."""
    visible = range(PROMPT + step + 1)
    tier = dict.fromkeys(visible, 2)
    rows = run.tables["tiers"].collect().filter(policy=policy, request=0, layer=3, kv_head=1).sort("step")
    for row in rows.filter(pl.col("step") < step).iter_rows(named=True):
        for r in row["runs"]:
            tier |= dict.fromkeys(range(r["start"], r["stop"]), r["tier"] & 3)
    plan = run.tables["plans"].collect().filter(policy=policy, request=0, layer=3, q_head=2, step=step)
    read = (
        {t for row in plan.iter_rows(named=True) for p in row["pages"] for t in range(p * 4, p * 4 + 4)}
        if len(plan)
        else set(visible)
    )
    return {t: STATES[1 if t not in read else 3 if tier[t] == 1 else 2] for t in visible if tier[t]}


@pytest.mark.parametrize("width", [1, 4, 5])
@pytest.mark.parametrize("policy", [QUEST, RANDOM, H2O, KIVI, FULL])
def test_cells(run, policy, width):
    found = raster(run.tables, policy, PLACE, range(STEPS), width, selective=policy in (QUEST, RANDOM))
    assert found.rows() == sorted(found.rows())
    for step, row in enumerate(painted(found, width)):
        states = token_states(run, policy, step)
        for cell, shown in enumerate(row):
            inside = [states.get(t) for t in range(cell * width, min((cell + 1) * width, PROMPT + step + 1))]
            read = [s for s in inside if s and s.startswith("read")]
            if not any(inside):
                assert shown is None
                continue
            state = max(sorted(set(read), reverse=True), key=read.count) if read else STATES[1]
            assert shown == (state, math.ceil(inside.count(state) / len(inside) * 4) / 4)


def test_what_changed_and_the_whole_placement_are_the_same_story(run):
    whole, tier = [], np.zeros(0, int)
    rows = run.tables["tiers"].collect().filter(policy=H2O, request=0, layer=3, kv_head=1).sort("step")
    for row in rows.iter_rows(named=True):
        tier = np.append(tier, np.full(PROMPT + row["step"] + 1 - len(tier), 2))
        for r in row["runs"]:
            tier[r["start"] : r["stop"]] = r["tier"]
        whole.append([{"start": t, "stop": t + 1, "tier": int(x), "level": None} for t, x in enumerate(tier)])
    told = rows.with_columns(pl.Series("runs", whole, rows.schema["runs"])).lazy()
    tables = run.tables | {"tiers": told}
    assert raster(tables, H2O, PLACE, range(STEPS), 4, False).equals(raster(run.tables, H2O, PLACE, range(STEPS), 4, False))


def test_a_sliding_window_hides_what_left_it(run):
    tables = run.tables | {"ledger": run.ledger.with_columns(visible_tokens=pl.lit(10, pl.Int32))}
    grid = painted(raster(tables, FULL, PLACE, range(STEPS), 1, False), 1)
    assert [[t for t, x in enumerate(row) if x] for row in grid] == [
        list(range(PROMPT + s - 9, PROMPT + s + 1)) for s in range(STEPS)
    ]


def test_pages_not_recorded_are_not_claimed_as_read(run):
    tables = run.tables | {"plans": run.tables["plans"].clear()}
    assert set(raster(tables, QUEST, PLACE, range(STEPS), 4, selective=True)["state"]) == {STATES[1]}


def test_a_step_left_out_looks_like_the_one_before(run):
    steps = [0, 3]
    grid = painted(raster(run.tables, QUEST, PLACE, steps, 4, True), 4)
    assert grid[0] == grid[1] == grid[2]
    whole = painted(raster(run.tables, QUEST, PLACE, range(STEPS), 4, True), 4)
    assert (grid[0], grid[3]) == (whole[0], whole[3])


def test_places_are_where_most_is_at_stake_and_none_twice(run):
    layer, head = pl.col("layer"), pl.col("q_head")

    def there(n, h):
        return (layer == n) & (head == h)

    heads = run.heads.with_columns(
        evidence_dense=pl.when(there(3, 3)).then(0.9).otherwise(0.1),
        evidence_read=pl.when(there(0, 1)).then(0.0).otherwise(0.1),
        rel_l2=pl.when(there(0, 2)).then(9.0).otherwise(1.0),
        mass_unread=pl.when(there(0, 2)).then(0.9).otherwise(0.1),
    )
    assert telling_places(heads, run.ledger) == {
        "looks at the evidence most": Place(0, 3, 1, 3),
        "has the largest output error": Place(0, 0, 1, 2),
    }  # (3, 3) misses most evidence as well, (0, 2) most mass
    seen = heads.with_columns(evidence_read=pl.when(there(0, 1)).then(0.0).otherwise(pl.col("evidence_dense")))
    assert telling_places(seen, run.ledger)["misses most of the evidence"] == Place(0, 0, 0, 1)


def test_places_without_evidence_are_those_with_most_error(run):
    bare = run.heads.with_columns(evidence_dense=pl.lit(None), evidence_read=pl.lit(None))
    worst = bare.with_columns(rel_l2=pl.when(pl.col("q_head") == 1).then(2.0).otherwise(1.0), mass_unread=0.0, mass_evicted=0.0)
    assert telling_places(worst, run.ledger) == {"has the largest output error": Place(0, 0, 0, 1)}


def test_places_are_all_of_one_context(tmp_path):
    run = open_run(write_run(tmp_path / "run", contexts=3))
    second = pl.col("request") == 2
    heads = run.heads.with_columns(
        evidence_dense=pl.when(second).then(0.9).otherwise(0.1), rel_l2=pl.when(second).then(1.0).otherwise(2.0)
    )
    assert {place.request for place in telling_places(heads, run.ledger).values()} == {2}


def test_whose_pages_are_recorded(run):
    assert pages_recorded(run.tables["plans"], PLACE).keys() == {p for p in run.heads.collect()["policy"] if "read=tokens" in p}
