"""The cells of a head, read back from their letters, are what it kept and read; pairs are what metrics.difference counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvsim.metrics.difference import by_layer, difference
from kvsim.metrics.grids import ALPHABET, LEVELS, Grid, grids
from kvsim.metrics.raster import CODED, KEPT, READ, Place, states
from kvsim.metrics.run import open_run
from tests.report.runs import FULL, H2O, KIVI, QUEST, write_run

PROMPT, STEPS, TOTAL = 24, 6, 30
SELECTIVE = {QUEST: True, H2O: False, KIVI: False, FULL: False}
PLACES = [Place(0, layer, head // 2, head) for layer in (0, 3) for head in range(4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("grids") / "run", prompt=PROMPT, steps=STEPS))


def evidence():
    out = np.zeros(TOTAL, bool)
    out[5:9] = True
    return out


def read_back(letters, grid):
    """[steps][cells] -> code."""
    codes = [code for letter in letters for code in (ALPHABET.index(letter) % 8, ALPHABET.index(letter) // 8)]
    return [codes[i * grid.across : (i + 1) * grid.across] for i in range(len(grid.steps))]


@pytest.mark.parametrize("grid", [Grid(range(STEPS), 4, 8), Grid((0, 2, 5), 10, 3), Grid((1,), 1, 30), Grid((3,), 7, 5)])
def test_the_cells_of_every_head_are_what_it_kept_and_read(run, grid):
    cells, _ = grids(run.tables, SELECTIVE, PLACES, grid, evidence())
    assert cells.height == len(SELECTIVE) * len(PLACES)
    for row in cells.iter_rows(named=True):
        place = next(p for p in PLACES if (p.layer, p.q_head) == (row["layer"], row["q_head"]))
        seen = dict(states(run.tables, row["policy"], place, SELECTIVE[row["policy"]]))
        for step, codes in zip(grid.steps, read_back(row["cells"], grid), strict=True):
            for cell, code in enumerate(codes):
                mine = seen[step][cell * grid.width : (cell + 1) * grid.width].tolist()
                read = mine.count(READ) + mine.count(CODED)
                if read:
                    level = math.ceil(LEVELS * read / len(mine))
                    assert code == 1 + level + (LEVELS if mine.count(CODED) > mine.count(READ) else 0)
                else:
                    assert code == int(KEPT in mine)


def test_pairs_are_what_diff_counts(run):
    """Over the same steps: the two count in different ways, and agree."""
    _, pairs = grids(run.tables, SELECTIVE, PLACES, Grid(range(STEPS), 4, 8), evidence())
    assert pairs.height == 2 * len(SELECTIVE) ** 2
    for first, second in ((QUEST, H2O), (H2O, QUEST), (FULL, H2O), (QUEST, QUEST)):
        mine = pairs.filter(first=first, second=second).sort("layer")
        counted = by_layer(difference(run, first, second))
        for name in ("both", "only_first", "only_second", "evidence_first", "evidence_second"):
            assert mine[name].to_list() == pytest.approx(counted[name].to_list())


def test_what_one_alone_reads_turns_round_with_the_pair(run):
    _, pairs = grids(run.tables, SELECTIVE, PLACES, Grid((0, 5), 4, 8), evidence())
    turned = pairs.rename({"first": "second", "second": "first", "only_first": "only_second", "only_second": "only_first"})
    both = pairs.join(turned, on=["first", "second", "layer"], suffix="_turned")
    assert both.height == pairs.height
    assert both["only_first"].to_list() == both["only_first_turned"].to_list()
    assert pairs.filter(first=QUEST, second=H2O)["only_first"].max() > 0
