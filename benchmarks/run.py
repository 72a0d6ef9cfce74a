"""All races: `make bench`. Prints the machine, every figure, and what was asked beside what was measured; exit 1 when one is missed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (
    budgets,
    caches,
    files,
    grid,
    h2o,
    history,
    keeps,
    page,
    presses,
    quantize,
    scale,
    start,
    study,
    truth,
    waist,
)
from benchmarks.race import GATES, machine

RACES = {
    "truth": truth.main,
    "h2o": h2o.main,
    "keeps": keeps.main,
    "presses": presses.main,
    "quantize": quantize.main,
    "budgets": budgets.main,
    "scale": scale.main,
    "study": study.main,
    "caches": caches.main,
    "files": files.main,
    "start": start.main,
    "page": page.main,
    "grid": grid.main,
    "waist": waist.main,
}


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=5, help="interleaved rounds that count (default: 5)")
    ask.add_argument(
        "--save",
        action="store_true",
        help=f"what was measured into {history.FILE.name} under the commit, and its chart and table into the docs",
    )
    ask.add_argument("race", nargs="*", choices=[*RACES, []], help="which (default: all)")
    args = ask.parse_args()
    print(machine())
    names, passed = args.race or [*RACES], []
    for name in names:
        GATES.clear()
        passed.append(RACES[name](args.rounds))
        if args.save:
            history.keep(name, GATES, machine())
    if args.save:
        history.publish()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
