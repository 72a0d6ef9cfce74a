"""Charts as images: the specification of the page, drawn by vl-convert with nothing to fetch from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvsim.report.html import Figure, specification, vega_lite
from kvsim.report.theme import config


def write_images(figures: Sequence[Figure], folder: Path, kind: str) -> list[Path]:
    """Each figure as FOLDER/NAME.png or .svg (kind "png" or "svg") -> the paths."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures:
        path = folder / f"{figure.name}.{kind}"
        options = {"vl_version": vega_lite(), "config": config(), "allowed_base_urls": []}
        if kind == "png":
            path.write_bytes(vl_convert.vegalite_to_png(specification(figure.chart), scale=2.0, **options))
        else:
            path.write_text(vl_convert.vegalite_to_svg(specification(figure.chart), **options), encoding="utf-8")
        paths.append(path)
    return paths
