"""Charts as images: the specification of the page under its title, drawn by vl-convert with nothing to fetch from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from kvsim.report.html import Figure, vega_lite
from kvsim.report.theme import config

SCALE = 2.0  # image pixels per chart pixel
LINE = 130  # letters of a line under the title


def write_png(figures: Sequence[Figure], folder: Path) -> None:
    """Each figure as FOLDER/NAME.png, in the light colours."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    for f in figures:
        image = vl_convert.vegalite_to_png(_titled(f), vega_lite(), scale=SCALE, config=config(), allowed_base_urls=[])
        (folder / f"{f.name}.png").write_bytes(image)


def write_svg(figures: Sequence[Figure], folder: Path) -> None:
    """Each figure as FOLDER/NAME.svg, in the light colours."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    for f in figures:
        image = vl_convert.vegalite_to_svg(_titled(f), vega_lite(), config=config(), allowed_base_urls=[])
        (folder / f"{f.name}.svg").write_text(image, encoding="utf-8")


def _titled(figure: Figure) -> dict[str, Any]:
    """What stands above the chart on the page, inside it."""
    title = {"text": figure.title, "subtitle": wrap(figure.how, LINE), "fontSize": 16, "offset": 28}
    return figure.spec | {"title": title}
