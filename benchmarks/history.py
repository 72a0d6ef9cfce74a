"""What the races measured, by commit: benchmarks/history.json, and of it a chart and a table in docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks/history.json"
PICTURE = ROOT / "docs/pictures/benchmarks.svg"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- the newest of history.json -->", "<!-- end -->"
RECENT = 12  # commits that the chart shows


def keep(race: str, gates: Mapping[str, tuple[float, float | None]], machine: str) -> None:
    """The gates of a race under this commit and machine; a later run of the same replaces an earlier one."""
    commit = _commit()
    told = json.loads(FILE.read_text()) if FILE.exists() else []
    mine = [e for e in told if (e["commit"], e["machine"]) == (commit, machine)] or [
        {"commit": commit, "machine": machine, "gates": {}}
    ]
    mine[0]["date"] = datetime.now(UTC).date().isoformat()
    mine[0]["gates"][race] = {text: [float(f"{value:.4g}"), asked] for text, (value, asked) in gates.items()}
    rest = [e for e in told if e is not mine[0]]
    FILE.write_text(json.dumps([*rest, mine[0]], indent=1) + "\n")


def _commit() -> str:
    command = ["git", "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def rows(told: list[dict[str, Any]]) -> pl.DataFrame:
    """run, gate, measured, asked, part (measured over asked: 1 is what was asked)."""
    found = []
    for e in told[-RECENT:]:
        for race, gates in e["gates"].items():
            for text, (measured, asked) in gates.items():
                if asked is None:
                    continue
                run = f"{e['commit']}, {e['machine'].partition(',')[0]}"
                found.append(
                    {"run": run, "gate": f"{race}: {text}", "part": measured / asked, "measured": measured, "asked": asked}
                )
    return pl.DataFrame(found)


def draw() -> None:
    """A dot for each gate and run, 1 where it is just met."""
    found = rows(json.loads(FILE.read_text()))
    order = found["gate"].unique(maintain_order=True).to_list()
    base = alt.Chart(found, width=420, height=alt.Step(16), title="What the races measured, as a part of what was asked")
    dots = base.mark_point(filled=True, size=60).encode(
        x=alt.X("part:Q", title="measured / asked (1: met; log)", scale=alt.Scale(type="log")),
        y=alt.Y("gate:N", title=None, sort=order, axis=alt.Axis(labelLimit=420)),
        color=alt.Color(
            "run:N", title="commit and machine", scale=alt.Scale(scheme="viridis"), sort=None, legend=alt.Legend(labelLimit=420)
        ),
        shape=alt.Shape("run:N", sort=None),
        tooltip=["gate", "run", "measured", "asked"],
    )
    line = alt.Chart(pl.DataFrame({"part": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(x="part:Q")
    PICTURE.parent.mkdir(exist_ok=True)
    # a browser's font may be wider than the one that the picture was set in
    (line + dots).properties(padding={"left": 90, "right": 5, "top": 5, "bottom": 5}).save(PICTURE)


def table(told: list[dict[str, Any]]) -> str:
    """The newest run of every race on every machine, side by side: a row for each race and what it measured."""
    newest: dict[str, dict[str, dict[str, Any]]] = {}
    for e in told:
        for race in e["gates"]:
            newest.setdefault(e["machine"], {})[race] = e
    lines: list[str] = []
    cells: dict[tuple[str, str, str], list[str]] = {}
    for i, (machine, races) in enumerate(newest.items()):
        runs = dict.fromkeys(f"{e['commit']} ({e['date']})" for e in races.values())
        lines.append(f"*{chr(65 + i)}*: {machine}; {', '.join(runs)}.")
        for race, e in races.items():
            for text, (measured, asked) in e["gates"][race].items():
                missed = " (missed)" if asked is not None and measured < asked else ""
                row = cells.setdefault((race, text, "" if asked is None else f"{asked:g}"), [""] * len(newest))
                row[i] = f"{measured:.3g}{missed}"
    head = ["race", "what", "asked", *(f"*{chr(65 + i)}*" for i in range(len(newest)))]
    rows = [[f"`{race}`", text.replace("|", "\\|"), asked, *row] for (race, text, asked), row in cells.items()]
    lines += ["", *(f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *rows))]
    return "\n".join(lines)


def publish() -> None:
    """The chart, and the page's part between two marks."""
    draw()
    told, text = json.loads(FILE.read_text()), PAGE.read_text()
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    chart = f"![each race's result as a part of what was asked, by commit](pictures/{PICTURE.name})"
    PAGE.write_text(f"{text[:start]}\n{table(told)}\n\n{chart}\n{text[stop:]}")


if __name__ == "__main__":
    publish()
