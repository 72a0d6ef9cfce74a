"""Runs the closed-loop study: python -m analyses.closed_loop.measure [FOLDER]. One that was stopped goes on."""

from __future__ import annotations

import sys
from pathlib import Path

from analyses.closed_loop.cells import cells
from kvsim.live.command import command


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for asked in cells(out):
        if not Path(asked.out).exists():
            for line in command(asked):
                print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/closed_loop"))
