"""python tools/release.py [PYTHON ...] [--lowest] [--clone]: is what would be released what people need?

Builds wheel and sdist; then for every interpreter, in a new environment and a new HOME: installs the wheel, runs the demo, lets mypy check a
program that uses it, takes it out again, and lists what stays behind. --lowest: the first interpreter with the lowest versions that
pyproject.toml allows, and the laws of the engine under them. --clone: also README's two commands in a fresh clone of the last commit, with the
newest versions there are. Needs a package index."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13")
KEPT = (".cache/kvsim",)  # what may stay in HOME (docs/footguns.md)
CONSUMER = """
from pathlib import Path

import kvsim

trace = kvsim.open_trace("trace")
policy = kvsim.full() >> kvsim.quest(read=kvsim.tokens(512), page=16)
run = kvsim.replay(trace, [policy, "h2o(hold=share(0.5))"], "runs/first")
page: Path = kvsim.report(run.path)
names: list[str] = [layer.kind for layer in trace.layers]
reveal_type(trace)
"""
VERSIONS = "import sys; from importlib.metadata import version; print(', '.join(f'{x} {version(x)}' for x in sys.argv[1:]))"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("python", nargs="*", help=f"interpreters (default: those of {', '.join(PYTHONS)} that are there)")
    p.add_argument("--lowest", action="store_true", help="also the lowest versions allowed, in the first of them")
    p.add_argument("--clone", action="store_true", help="also README's two commands in a fresh clone, for each of them")
    asked = p.parse_args(argv)
    pythons = asked.python or [x for x in PYTHONS if works(x)]
    print(
        f"tried: {', '.join(pythons)}; not there: {', '.join(x for x in PYTHONS if not asked.python and x not in pythons) or 'none'}"
    )
    with TemporaryDirectory() as place:
        wheel = build(Path(place))
        for python in pythons:
            use(Path(place) / f"with-{Path(python).name}", python, wheel)
            if asked.clone:
                clone(Path(place) / f"clone-{Path(python).name}", python)
        if asked.lowest:
            lowest(Path(place) / "lowest", pythons[0], wheel)
    return 0


def works(python: str) -> bool:
    """A name may stand for nothing: version managers have a file for every version that they know of."""
    return shutil.which(python) is not None and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def build(place: Path) -> Path:
    """The wheel, made from the sdist, so that both are whole."""
    made, tool = place / "dist", environment(place / "build", sys.executable)
    run([tool / "pip", "install", "-q", "build"], place)
    run([tool / "python", "-m", "build", "-o", made, ROOT], place)
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as z, tarfile.open(sdist) as t:
        names, sources = z.namelist(), t.getnames()
    for needed in ("kvsim/py.typed", "kvsim/report/page.html.j2", "licenses/LICENSE"):
        assert any(name.endswith(needed) for name in names), f"the wheel has no {needed}"
    assert any(name.endswith("tests/naive.py") for name in sources), "the sdist has no tests"
    print(
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files; {sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB"
    )
    return wheel


def use(place: Path, python: str, wheel: Path) -> None:
    bin = environment(place, python)
    before = set(place.rglob("*"))
    run([bin / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, "mypy"], place)
    run([bin / "kvsim", "demo", "-o", "demo.html"], place)
    (place / "consumer.py").write_text(CONSUMER)
    said = run([bin / "mypy", "--strict", "consumer.py"], place, check=False)
    assert 'Revealed type is "kvsim.trace.open.Trace"' in said, said
    assert "error" not in said, said
    size = (place / "demo.html").stat().st_size
    run([bin / "pip", "uninstall", "-q", "-y", "kvsim"], place)
    left = {p for p in place.rglob("*kvsim*") if p not in before and "home" not in p.relative_to(place).parts and not compiled(p)}
    home = {str(p.relative_to(place / "home")) for p in (place / "home").rglob("*") if p.is_file()}
    strange = sorted(
        h for h in home if not h.startswith(KEPT) and not h.startswith((".cache/pip", ".cache/matplotlib", ".rustup"))
    )
    stays = f"left by kvsim: {[str(x) for x in left] or 'nothing'}, in HOME: {strange or 'nothing'}"
    print(f"{python}: demo.html {size / 1e6:.1f} MB, types checked; {stays}", flush=True)


def clone(place: Path, python: str) -> None:
    """What README says to do, as it says it."""
    bin = environment(place, python)
    run(["git", "clone", "-q", ROOT, place / "kvsim"], place)
    run([bin / "pip", "install", "-q", "."], place / "kvsim")
    run([bin / "kvsim", "demo", "-o", "demo.html"], place)
    versions = run([bin / "python", "-c", VERSIONS, "numpy", "numba", "polars", "pyarrow"], place).strip().splitlines()[-1]
    size = (place / "demo.html").stat().st_size
    print(f"{python}, a fresh clone: pip install . and kvsim demo: demo.html {size / 1e6:.1f} MB ({versions})", flush=True)


def compiled(path: Path) -> bool:
    """Nothing but what numba and Python compiled, which they put beside the code: pip does not know of it (docs/footguns.md)."""
    return (
        all(p.is_dir() or p.parent.name == "__pycache__" for p in path.rglob("*"))
        if path.is_dir()
        else path.parent.name == "__pycache__"
    )


def lowest(place: Path, python: str, wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [re.sub(r">=([\d.]+)", r"==\1.*", d) for d in project["dependencies"]]
    bin = environment(place, python)
    tools = [d for d in project["optional-dependencies"]["dev"] if re.match("pytest|hypothesis", d)]
    run([bin / "pip", "install", "-q", *pins, *tools, wheel], place)
    run([bin / "kvsim", "demo", "-o", "demo.html"], place)
    said = run([bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/engine/test_laws.py"], ROOT)
    names = [re.split("[^a-z0-9-]", pin)[0] for pin in pins]
    versions = run([bin / "python", "-c", VERSIONS, *names], place).strip().splitlines()[-1]
    print(f"{python} with the lowest versions ({versions}): the demo ran; {said.strip().splitlines()[-1]}")


def environment(place: Path, python: str) -> Path:
    """The folder of programs of a new environment, and a HOME beside it."""
    (place / "home").mkdir(parents=True)
    subprocess.run([python, "-m", "venv", place / "env"], check=True)
    return place / "env/bin"


def run(command: Sequence[str | Path], place: Path, check: bool = True) -> str:
    """What it prints. HOME is a new one; nothing of this environment is seen."""
    home = next((p / "home" for p in (place, *place.parents) if (p / "home").is_dir()), place)
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONNOUSERSITE": "1"}
    env |= {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_", "XDG_CONFIG"))}
    done = subprocess.run([str(x) for x in command], cwd=place, env=env, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
