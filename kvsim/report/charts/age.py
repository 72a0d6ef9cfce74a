"""What is an old set of pages worth, and are old keys harder to bound?"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import polars as pl

from kvsim.metrics.floor import Floor
from kvsim.report import theme
from kvsim.report.charts.along import focus_on_policy, lines
from kvsim.report.charts.measure import layered, tooltip
from kvsim.report.theme import Style

MEASURES = ("rel_l2", "mass_recall", "evidence_recall")


def loss_by_age(found: pl.DataFrame, look: Sequence[Style], floor: Floor | None) -> alt.HConcatChart:
    """found (policy, role, age, MEASURES) -> a line per policy and role over the age of its set, a panel per measure."""
    shown = [m for m in MEASURES if found[m].is_not_null().any()]
    x = alt.X("age:Q", title="steps since the ranking", scale=alt.Scale(nice=False), axis=alt.Axis(format="d", tickMinStep=1))
    panels = lines(found, [(m, 240) for m in shown], look, x, floor=floor, age="steps since the ranking", role="query's token")
    said = "Output error and recall by the age of the set of pages that is read, one line per policy and role."
    return alt.hconcat(*(p.properties(width=290) for p in panels), spacing=34).properties(description=said)


def slack_by_key_age(found: pl.DataFrame, look: Sequence[Style]) -> alt.LayerChart:
    """found (policy, key_age, slack_mean, slack_max, pages) -> mean slack over the age of keys, a line per policy."""
    focus, opacity = focus_on_policy()
    x = alt.X("key_age:O", title="tokens since the page's last position, from", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    y = alt.Y("slack_mean:Q", title="bound above the best logit (scaled logits), mean over pages", scale=alt.Scale(zero=True))
    said = [
        *tooltip((), key_age="tokens since, from"),
        *(alt.Tooltip(f"{n}:Q", format=".2f") for n in ("slack_mean", "slack_max")),
    ]
    base = alt.Chart(theme.prepare(found)).encode(x=x, y=y, opacity=opacity, tooltip=[*said, alt.Tooltip("pages:Q", format=",d")])
    line = base.mark_line(aria=False, point=True).encode(**theme.policy_channels(look, "line"))
    return layered(
        line.add_params(focus),
        width=560,
        height=260,
        description="How far the bound of a page lies above its best logit, by the age of its keys.",
    )
