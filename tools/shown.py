"""What a page says that a command prints, run again: python tools/shown.py docs/what-if.md [--write]

A block of a page is shown when its first line is `    $ kvsim ...`, which may go on after a backslash; the lines after it up to the next
`$` are what was printed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

from kvsim import cli

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"^    \$ kvsim ((?:.*\\\n)*.*)\n((?:    (?!\$ ).*\n)*)", re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def shown(text: str) -> list[tuple[list[str], str]]:
    """-> (the words of a command, what the page says that it prints), in order."""
    return [(shlex.split(words.replace("\\\n", " ")), textwrap.dedent(said)) for words, said in SHOWN.findall(text)]


def run(words: list[str]) -> str:
    """One command -> what it prints to stdout; a path alone, which only says where things were written, is left out. Raises SystemExit."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(words)
    if code:
        raise SystemExit(f"kvsim {shlex.join(words)}: exit code {code}")
    return "".join(line + "\n" for line in out.getvalue().splitlines() if line not in words)


def alike(one: str, two: str) -> bool:
    """The same text, where numbers may differ by 1 in their last digit: sums in another order round otherwise on another machine."""
    if one == two:
        return True
    if NUMBER.sub("", one).split() != NUMBER.sub("", two).split():
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(two), strict=True)
    return all(abs(float(a) - float(b)) <= 1.01 * 10.0 ** -len(a.partition(".")[2]) for a, b in pairs)


@contextlib.contextmanager
def checkout(folder: Path):  # type: ignore[no-untyped-def]
    """Work in an empty folder that has the checkout's traces and kvsim beside."""
    before = Path.cwd()
    for name in ("traces", "kvsim"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def written(text: str) -> str:
    """The page with what its commands print now."""

    def again(block: re.Match[str]) -> str:
        [(words, _)] = shown(block[0])
        print(f"kvsim {shlex.join(words)}"[:100], file=sys.stderr)
        return f"    $ kvsim {block[1]}\n" + textwrap.indent(run(words), "    ")

    return SHOWN.sub(again, text)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("page", type=Path)
    asked.add_argument("--write", action="store_true", help="put what is printed now into the page")
    args = asked.parse_args()
    before, page = args.page.read_text(), args.page.resolve()
    with TemporaryDirectory() as folder, checkout(Path(folder)):
        now = written(before)
    if args.write:
        page.write_text(now)
    return int(not args.write and not alike(before, now))


if __name__ == "__main__":
    sys.exit(main())
