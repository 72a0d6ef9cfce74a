"""One style per policy, colours that a colour-blind reader can tell apart, and frames that are safe to embed."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import polars as pl
import pytest

from kvsim.errors import WrongUse
from kvsim.metrics.loss import LOSSES
from kvsim.metrics.quality import FATES
from kvsim.metrics.raster import STATES
from kvsim.metrics.tokens import CHANGES, TIERS
from kvsim.metrics.traffic import KEPT_CLASSES, STEP_CLASSES
from kvsim.report import theme
from tests.report.runs import FULL, H2O, QUEST

# What a viewer with full colour vision, without M, L or S cones sees of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
VISION = {
    "normal": np.eye(3),
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def lab(colour, vision):
    """#RRGGBB -> CIE L*a*b* as that viewer sees it."""
    s = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)
    x = XYZ @ np.clip(np.array(vision) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("dark", "least"), [(0, 25), (1, 21)])
def test_families_can_be_told_apart_by_every_eye(dark, least):
    greys = {"full", "random_read", "recency"}  # told apart by dash and shape
    colours = [style[dark] for family, style in theme.FAMILIES.items() if family not in greys]
    for vision in VISION.values():
        for a, b in combinations(colours, 2):
            assert math.dist(lab(a, vision), lab(b, vision)) >= least, (a, b)


TOGETHER = {  # colours that stand in one chart
    "states": [pair for name, pair in theme.FATES.items() if name != "learned sink"],
    "tiers": list(theme.TIERS.values()),
    "blame": list(theme.LOST.values()),
    "bytes of a step": [theme.BYTES[n] for n in STEP_CLASSES],
    "bytes that stay": [theme.BYTES[n] for n in KEPT_CLASSES],
    "an ordered few": [*theme.STEPS, theme.INK],
}


@pytest.mark.parametrize("dark", [0, 1])
@pytest.mark.parametrize("name", TOGETHER)
def test_colours_of_one_chart_can_be_told_apart_by_every_eye(name, dark):
    for vision in VISION.values():
        for a, b in combinations([pair[dark] for pair in TOGETHER[name]], 2):
            assert math.dist(lab(a, vision), lab(b, vision)) >= 20, (a, b)


def test_every_class_has_a_colour():
    assert theme.FATES.keys() == set(FATES)
    assert theme.TIERS.keys() == set(TIERS)
    assert theme.LOST.keys() == set(LOSSES.values())
    assert theme.BYTES.keys() == {*STEP_CLASSES, *KEPT_CLASSES}
    assert len(theme.STEPS) >= len(CHANGES)
    assert theme.STATES.keys() == set(STATES.values())


def test_dark_colours_are_found_from_light_ones():
    pairs = [(a, b) for a, b, _, _ in theme.FAMILIES.values()] + [
        *theme.SPARE,
        *theme.FATES.values(),
        *theme.TIERS.values(),
        *theme.LOST.values(),
        *theme.BYTES.values(),
        *theme.STEPS,
        *(theme.EVIDENCE, theme.PICKED, theme.TICK, theme.NOISE, theme.INK),
    ]
    assert all(theme.SWAP[light] == dark for light, dark in pairs)  # no light colour with two dark ones


def test_a_family_keeps_its_look_and_its_members_differ():
    quests = [QUEST.replace("tokens(8)", f"tokens({n})") for n in (8, 16, 32)]
    look = theme.styles([*quests, H2O, "own.toml@1", "own.toml@2", FULL])
    assert {s.colour for s in look[:3]} == {theme.FAMILIES["quest"][0]}
    assert len({(tuple(s.dash), s.shape) for s in look[:3]}) == 3
    assert look[3] == theme.styles([H2O])[0]
    assert look[4].colour != look[5].colour


def test_baselines_of_one_colour_differ():
    ids = [f"full() >> {name}(read=tokens({n}))" for n in (8, 16, 32) for name in ("oracle", "random_read", "recency")]
    look = theme.styles(ids)
    assert len({(s.colour, s.shape) for s in look}) == len({(s.colour, tuple(s.dash)) for s in look}) == len(ids)


def test_marks_of_the_first_policy_come_last():
    look = theme.styles([QUEST, H2O])
    frame = pl.DataFrame({"policy": [QUEST, "other", H2O], "x": [1, 2, 3]})
    assert theme.labelled(frame, look).rows() == [("h2o 12", 3), ("quest 8", 1)]


def test_prepare_makes_numbers_that_json_can_hold():
    frame = pl.DataFrame({"a": [1.0, math.nan, math.inf, 0.123456789], "b": ["x", None, "y", "z"], "c": [1, 2, 3, 4]})
    found = theme.prepare(frame.with_columns(a32=pl.col("a").cast(pl.Float32)))
    assert found["a"].to_list() == [1.0, None, None, 0.12346]
    assert found["a32"].to_list() == [1.0, None, None, 0.12346]
    assert found["c"].to_list() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (pl.DataFrame({"a": range(theme.ROW_CAP + 1)}), "5,001 rows: expected at most 5,000; aggregate first"),
        (pl.DataFrame({"a": range(1_000_000)}), "1,000,000 rows: .* kvsim report --layers"),
        (pl.DataFrame({"a.b": [1]}), "'a.b'"),
        (pl.DataFrame({"a": [[1]]}), "List"),
        (pl.DataFrame({"a": [1]}).cast(pl.Decimal(10, 2)), "Decimal"),
        (pl.DataFrame({"a": [1]}).cast(pl.Duration), "Duration"),
    ],
)
def test_prepare_refuses_what_a_chart_cannot_hold(frame, said):
    with pytest.raises(WrongUse, match=said):
        theme.prepare(frame)


def test_the_axis_of_errors_starts_where_rounding_is_seen():
    assert theme.error_scale(pl.Series([0.5])).domain == [theme.LEAST_ERROR, 1]  # the next decade is near
    assert theme.error_scale(pl.Series([2.0])).domain == [theme.LEAST_ERROR, 2.4]
    assert theme.error_axis(pl.Series([2.0])).values == [0.0001, 0.001, 0.01, 0.1, 1]
    assert theme.error_scale(pl.Series([], dtype=pl.Float64)).domain[1] > 1


def test_evenly():
    assert theme.evenly(100) == [0, 16, 32, 48, 64, 80, 96]
    assert theme.evenly(1) == [0, 1]


def test_doublings():
    assert theme.doublings(16, 100) == [16, 32, 64, 128]
    assert len(theme.doublings(1, 2**40)) <= 10
