"""python tools/changelog.py VERSION: the fragments of changes/ become the top section of CHANGELOG.md, and are removed."""

from __future__ import annotations

import sys
from pathlib import Path

KINDS = ("added", "changed", "fixed")


def section(version: str, fragments: list[Path]) -> str:
    """One release: a heading per kind, one item per fragment."""
    lines = [f"## {version}"]
    for kind in KINDS:
        items = [" ".join(f.read_text().split()) for f in fragments if f.suffixes[-2] == f".{kind}"]
        lines += ["", f"### {kind.capitalize()}", "", *(f"* {item}" for item in items)] if items else []
    return "\n".join(lines) + "\n"


def main(version: str, root: Path) -> None:
    fragments = sorted(p for kind in KINDS for p in (root / "changes").glob(f"*.{kind}.md"))
    log = root / "CHANGELOG.md"
    older = log.read_text().removeprefix("# Changelog\n") if log.exists() else ""
    log.write_text(f"# Changelog\n\n{section(version, fragments)}{older}")
    for fragment in fragments:
        fragment.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1], Path(__file__).parents[1])
