"""CPU seconds until kvsim can be used: the import, a command, and the import of what it stands beside; each in a new process."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

from benchmarks.race import gate

CODES = {
    "an empty interpreter": "pass",
    "import kvsim": "import kvsim",
    "import numpy, polars, altair": "import numpy, polars, altair",
    "import torch": "import torch",
    "kvsim policies": "import sys; sys.argv = ['kvsim', 'policies']; from kvsim.cli import main; main()",
}
MOST = 0.3  # of `import kvsim`


def seconds(code: str) -> float | None:
    """CPU seconds of a new interpreter; None where it ends with an error (a package that is not installed)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return None if done.returncode else after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int = 5) -> bool:
    found: dict[str, list[float]] = {name: [] for name in CODES}
    for n in range(rounds + 1):
        for name, code in CODES.items():
            took = seconds(code)
            if n and took is not None:
                found[name].append(took)
    print("CPU seconds of a new process")
    for name, all_ in found.items():
        print(
            f"  {name:40s} "
            + (f"{statistics.median(all_):6.3f} s [{min(all_):.3f} .. {max(all_):.3f}]" if all_ else "not installed")
        )
    return gate(f"{MOST} s / import kvsim", MOST / statistics.median(found["import kvsim"]), 1)


if __name__ == "__main__":
    raise SystemExit(not main())
