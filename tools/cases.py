"""Replay every case of a folder of cases with known answers through the kvsim command, and compare.

    python tools/cases.py FOLDER [PART OF A NAME] [--strict] [--jobs N] [--kvsim COMMAND]

FOLDER holds cases.json, traces, tables, and the modules check_all.py and compare.py, which know how to run and compare one case.
A case whose policy the language does not know (yet) is counted apart: it neither passes nor fails. Exit 0 when none failed."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

Case = dict[str, Any]
PASSED, UNBUILT, FAILED = "passed", "not yet built", "failed"
UNKNOWN = re.compile(r"\bunknown (?P<what>[^']+) '(?P<name>[^']+)'")  # as kvsim.policies.parameters.unknown says it


def unbuilt(case: Case, exit_code: int, line: str, policies: set[str]) -> bool:
    """Whether the language lacks a word of the case; where a refusal is expected, only a policy that other cases use."""
    unknown = UNKNOWN.search(line)
    if exit_code != 2 or not unknown:
        return False
    return case["expect"] == "tables" or (unknown["what"] == "policy" and unknown["name"] in policies)


def policies_used(book: list[Case]) -> set[str]:
    """The words that are called in the policies of all cases that expect tables."""
    texts = [text for case in book if case["expect"] == "tables" for text in [case["policy"]]]
    return set(re.findall(r"(\w+)\(", " ".join(" ".join(t) if isinstance(t, list) else t for t in texts)))


def run(
    case: Case, book: list[Case], folder: Path, runs: Path, command: list[str], driver: ModuleType, strict: bool = False
) -> tuple[str, str]:
    """One case -> (outcome, the line to print). strict: columns that the cases only propose must agree, too."""
    out = str(runs / case["case"])
    done = driver.replay(command, case, str(folder), out)
    line = (done.stderr.strip().splitlines() or [""])[-1]
    if case["expect"] == "refuse":
        wrong = driver.refused(done, case, out)
    elif done.returncode != 0:
        wrong = f"replay exited {done.returncode}: {line}"
    else:
        same, said = driver.compare.compare_case(out, case, str(folder), strict, book)
        return (PASSED if same else FAILED), said.removeprefix("PASS ").removeprefix("FAIL ")
    if not wrong:
        return PASSED, case["case"]
    return (UNBUILT if unbuilt(case, done.returncode, line, policies_used(book)) else FAILED), f"{case['case']}: {wrong}"


def main() -> int:
    parser = argparse.ArgumentParser(description="replay cases with known answers and compare")
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", nargs="?", default="", help="only cases whose name holds this")
    parser.add_argument("--strict", action="store_true", help="columns that the cases only propose must agree, too")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--kvsim", default=str(Path(sys.executable).with_name("kvsim")), help="the command (default: beside this python)"
    )
    args = parser.parse_args()
    if not (args.folder / "cases.json").is_file():
        parser.error(f"{args.folder}: no cases.json there; name the folder with make cases CASES=FOLDER")
    sys.path.insert(0, str(args.folder))
    sys.dont_write_bytecode = True
    driver = importlib.import_module("check_all")
    book = json.loads((args.folder / "cases.json").read_text())["cases"]
    chosen = [case for case in book if args.part in case["case"]]
    outcomes = Counter({PASSED: 0, UNBUILT: 0, FAILED: 0})
    with tempfile.TemporaryDirectory(prefix="kvsim-cases-") as runs, ThreadPoolExecutor(args.jobs) as pool:
        one = partial(
            run,
            book=book,
            folder=args.folder,
            runs=Path(runs),
            command=shlex.split(args.kvsim),
            driver=driver,
            strict=args.strict,
        )
        for outcome, line in pool.map(one, chosen):
            outcomes[outcome] += 1
            print(f"{outcome:13} {line}", flush=True)
    print(", ".join(f"{outcome} {n}" for outcome, n in outcomes.items()))
    return int(outcomes[FAILED] > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
