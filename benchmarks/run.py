"""All races: `make bench`. Prints the machine, every figure, and what was asked beside what was measured; exit 1 when one is missed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import budgets, grid, h2o, keeps, quantize, scale, truth, waist
from benchmarks.race import machine

RACES = {
    "truth": truth.main,
    "h2o": h2o.main,
    "keeps": keeps.main,
    "quantize": quantize.main,
    "budgets": budgets.main,
    "scale": scale.main,
    "grid": grid.main,
    "waist": waist.main,
}


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=5, help="interleaved rounds that count (default: 5)")
    ask.add_argument("race", nargs="*", choices=[*RACES, []], help="which (default: all)")
    args = ask.parse_args()
    print(machine())
    passed = [RACES[name](args.rounds) for name in args.race or RACES]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
