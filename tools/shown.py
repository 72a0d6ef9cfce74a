"""What a page says that a command prints, run again: python tools/shown.py docs/what-if.md [--write]

In an indented block `    $ kvsim ...` is a command whose output stands below it, up to the next one, and `    kvsim ...` one whose output is
not shown; both may go on after a backslash. Fences of python are code."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvsim import cli

ROOT = Path(__file__).parents[1]
COMMAND = r"^    (?P<shown>\$ )?kvsim (?P<words>(?:.*\\\n)*.*)\n(?P<said>(?:    (?!(?:\$ )?kvsim ).*\n)*)"
STEP = re.compile(COMMAND + r"|^```python\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)
SHOWN = re.compile(COMMAND.replace(")?kvsim", ")kvsim", 1), re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
HASH = re.compile(r"@[0-9a-f]{12}")  # a policy file by its content


class Step(NamedTuple):
    """A command with the output that the page shows of it (None: it shows none), or code."""

    words: list[str]
    said: str | None = None
    code: str = ""


def steps(text: str) -> list[Step]:
    """Commands and code of a page, in order."""
    return [_step(m) for m in STEP.finditer(text)]


def _step(m: re.Match[str]) -> Step:
    if m["code"]:
        return Step([], code=m["code"])
    return Step(shlex.split(m["words"].replace("\\\n", " "), comments=True), textwrap.dedent(m["said"]) if m["shown"] else None)


def run(words: list[str]) -> str:
    """One command -> what it prints to stdout; a path alone, which only says where things were written, is left out. Raises SystemExit."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(words)
    if code:
        raise SystemExit(f"kvsim {shlex.join(words)}: exit code {code}")
    return "".join(line + "\n" for line in out.getvalue().splitlines() if line not in words)


def alike(one: str, two: str, within: float = 0.0) -> bool:
    """The same text, where numbers may differ by 1 in their last digit, because sums in another order round otherwise on another machine,
    or by the part `within` of themselves."""
    one, two = HASH.sub("@", one), HASH.sub("@", two)
    if NUMBER.sub("0", one).split() != NUMBER.sub("0", two).split():
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(two), strict=True)
    return all(abs(float(a) - float(b)) <= max(1.01 * 10.0 ** -len(a.partition(".")[2]), within * float(a)) for a, b in pairs)


@contextlib.contextmanager
def inside(folder: Path, *names: str) -> Iterator[None]:
    """Work in a folder that has parts of the checkout beside, by their names."""
    before = Path.cwd()
    for name in names:
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def written(text: str) -> str:
    """The page with what its commands print now."""

    def again(block: re.Match[str]) -> str:
        words = _step(STEP.match(block[0])).words  # type: ignore[arg-type]
        print(f"kvsim {shlex.join(words)}"[:100], file=sys.stderr)
        return f"    $ kvsim {block['words']}\n" + textwrap.indent(run(words), "    ")

    return SHOWN.sub(again, text)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("page", type=Path)
    asked.add_argument("--write", action="store_true", help="put what is printed now into the page")
    args = asked.parse_args()
    before, page = args.page.read_text(), args.page.resolve()
    with TemporaryDirectory() as folder, inside(Path(folder), "traces", "kvsim"):
        now = written(before)
    if args.write:
        page.write_text(now)
    return int(not args.write and not alike(before, now))


if __name__ == "__main__":
    sys.exit(main())
