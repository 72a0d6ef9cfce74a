"""python -m tools.fuzz [SURFACE ...] --minutes 10: odd input for every reader, until something breaks or the time is up.

Each surface runs in a process of its own, with limits on memory and on the time of one case, so that a crash, a hang or a bomb is a finding
like any exception that is not kvsim's own. A case is told by its number: --case N --seed S makes it again, alone, with the traceback."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from kvsim.errors import KvsimError
from tools.fuzz.surfaces import SURFACES

MEMORY = 2 << 30  # bytes of address space beyond what the good example took
SECONDS = 60  # of one case, of CPU time: a machine may be busy
PATIENCE = 600  # of the wall clock, until a case answers
BEGIN = 600  # until the first: kernels may have to be compiled
ENOUGH = 20  # different findings of one surface


class Hang(Exception):
    """A case took longer than SECONDS."""


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("surface", nargs="*", metavar="SURFACE", help=f"of {', '.join(SURFACES)} (default: all)")
    p.add_argument("--minutes", type=float, default=10, help="for each surface (default: 10)")
    p.add_argument("--cases", type=int, default=10**9, help="at most, for each surface")
    p.add_argument("--seed", type=int, default=None, help="of all cases (default: a new one, which is printed)")
    p.add_argument("--case", type=int, help="this one only, here, with its traceback")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = p.parse_args(argv)
    if wrong := [s for s in asked.surface if s not in SURFACES]:
        p.error(f"no surface {wrong[0]!r}; expected {', '.join(SURFACES)}")
    seed = random.SystemRandom().randrange(10**9) if asked.seed is None else asked.seed
    if asked.child or asked.case is not None:
        return cases(asked.surface[0], seed, asked.case, alone=not asked.child)
    found = [fuzz(name, seed, asked.minutes * 60, asked.cases) for name in asked.surface or SURFACES]
    return 1 if sum(found) else 0


# ----------------------------------------------------------------------------------------------- the process that tries
def cases(name: str, seed: int, first: int | None, alone: bool) -> int:
    """Cases from `first` on, one line each before and after, until the process is ended; alone: that one, errors and all."""
    surface = SURFACES[name]
    with TemporaryDirectory() as place:
        root = Path(place)
        (root / "good").mkdir()
        good = surface.prepare(root / "good")
        if not alone:
            _limit_memory()
        signal.signal(signal.SIGPROF, _late)
        n = first or 0
        while True:
            print(f"case {n}", flush=True)
            folder, rng = _empty(root), random.Random(f"{name} {seed} {n}")
            try:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                surface.attempt(rng, good, folder)
            except KvsimError as e:
                if alone:
                    print(f"refused: {e}")
                elif "\n" in str(e) or len(str(e)) > 2000:
                    print(
                        "found " + json.dumps(["long", f"a refusal of more than a line: {type(e).__name__}", str(e)[:300]]),
                        flush=True,
                    )
            except Exception as e:  # everything else is what is looked for
                if alone:
                    raise
                print("found " + json.dumps([_where(e), type(e).__name__, str(e)[:300]]), flush=True)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if alone:
                return 0
            n += 1


def _empty(root: Path) -> Path:
    folder = root / "case"
    rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _late(*_: Any) -> None:
    raise Hang(f"more than {SECONDS} s of CPU time")


def _limit_memory() -> None:
    here = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, here + MEMORY))


def _where(e: BaseException) -> str:
    """The last line of kvsim's own that the error passed."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/kvsim/" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside kvsim"


# ------------------------------------------------------------------------------------------------ the one that watches
def fuzz(name: str, seed: int, seconds: float, most: int) -> int:
    """How many different findings; each is printed with the command that makes it again."""
    found: dict[tuple[str, str], str] = {}
    end, n, done = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end and done < most and len(found) < ENOUGH:
        child = subprocess.Popen(
            [sys.executable, "-m", "tools.fuzz", name, "--seed", str(seed), "--case", str(n), "--child"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert child.stdout is not None
        buffer, why, patience = b"", "ended the process", BEGIN
        while time.monotonic() < end and done < most:
            if not select.select([child.stdout], [], [], patience)[0]:
                why = "neither ended nor answered"
                break
            piece = os.read(child.stdout.fileno(), 1 << 16)
            if not piece:
                break
            patience = PATIENCE
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"case "):
                    n, done = int(line[5:]), done + 1
                elif line.startswith(b"found "):
                    _tell(found, name, seed, n, *json.loads(line[6:]))
        else:
            child.kill()
            child.wait()
            break
        child.kill()
        _tell(found, name, seed, n, "the process", why, f"status {child.wait()}")
        n += 1
    print(
        f"{name}: {done} cases in {seconds - max(0, end - time.monotonic()):.0f} s, {len(found)} findings; {SURFACES[name].what}; seed {seed}",
        flush=True,
    )
    return len(found)


def _tell(found: dict[tuple[str, str], str], name: str, seed: int, n: int, where: str, kind: str, said: str) -> None:
    if (where, kind) not in found:
        found[where, kind] = said
        print(f"  {name}: {kind} at {where}: {said!r}\n    python -m tools.fuzz {name} --seed {seed} --case {n}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
