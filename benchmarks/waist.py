"""How much of a replay is spent inside policies, and how long they are: what the waist costs and what it asks of an author."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import kvsim.engine.run as run
from benchmarks.h2o import source_of
from benchmarks.lanes import lane
from benchmarks.race import pinned
from kvsim.policies.language import known, parse

CHAINS = (
    "h2o(hold=tokens(2048))",
    "tova(hold=tokens(2048))",
    "quest(read=tokens(2048))",
    "h2o(hold=tokens(4096)) >> quest(read=tokens(1024))",
)


def timed(part: Any, name: str, spent: list[float]) -> None:
    """Adds the CPU time of every call of a policy's method to spent[0]."""
    cls, inner = type(part), getattr(type(part), name)

    def outer(self: Any, *args: Any) -> Any:
        start = time.process_time()
        try:
            return inner(self, *args)
        finally:
            spent[0] += time.process_time() - start

    setattr(cls, name, outer)


def main(rounds: int = 3) -> bool:
    pinned()
    data = lane()
    spent = [0.0]
    for cls, name in ((c, n) for c in known().values() for n in ("start", "step", "place", "score") if n in vars(c)):
        timed(object.__new__(cls), name, spent)
    print("CPU time inside policies, of a whole replay of one lane (T = 32 768, 256 steps x 4 heads):")
    for text in CHAINS:
        job = run.Job(parse(text))
        run.run_layer(source_of(data), [job])
        spent[0], start = 0.0, time.process_time()
        for _ in range(rounds):
            run.run_layer(source_of(data), [job])
        print(f"  {spent[0] / (time.process_time() - start):6.1%}  {text}")
    print("lines of every policy file:")
    home = Path(run.__file__).parent.parent / "policies"
    for path in sorted(p for kind in ("keep", "store", "read", "index") for p in (home / kind).glob("[a-z]*.py")):
        print(f"  {len(path.read_text().splitlines()):4d}  {path.relative_to(home)}")
    return True


if __name__ == "__main__":
    main()
