"""python tools/builds.py [--numpy VERSION ...] [--kernels NAME ...] [--cpus NAME ...]: does another build say the same?

The same replays (a bundled trace and a synthetic one, a policy of every kind, --explain) under this environment's numpy and BLAS, under
other versions of numpy from the package index, each with the OpenBLAS of its wheel, under other kernels of OpenBLAS, which are those of
other CPUs, and (--cpus) with kvsim's own kernels compiled for another CPU, which takes minutes. What must hold is decision 0002: the same
tables; compiled for a CPU that may be without fused multiply-adds, counts, sets and whatever follows from them equal, floats within 2e-5, but
for page_recall and page_recall10, where a near tie of float32 masses may move a page. Exit 1 where it does not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

ROOT = Path(__file__).resolve().parent.parent
NUMPYS = ("2.1.3", "2.3.5")
KERNELS = ("Haswell", "Nehalem")  # AVX2, SSE; an AVX-512 machine has its own
NEAR = 2e-5  # of the number, of 1 where it is smaller
BY_PAGE_MASS = ("page_recall", "page_recall10")  # a near tie of two pages' float32 masses may move one
FILES = {"kvquant": "kvquant(bits=3)", "oscar_cov": "oscar_cov()", "gap": "quest(read=gap(min=0, floor=pages(2), cap=pages(32)))"}
POLICIES = (
    "full()", "streaming_llm(hold=share(0.2))", "h2o(hold=share(0.2))", 'h2o(hold=tokens(300), norm="queries", decay=0.9)',
    "tova(hold=share(0.2))", 'snapkv(hold=share(0.2, of="prompt"))', "adakv(hold=share(0.2))", "pyramidkv(hold=share(0.2))",
    "criticalkv(hold=share(0.2))", 'defensivekv(hold=share(0.2))', 'caote(hold=share(0.2), base="h2o")',
    "r_kv(hold=tokens(300), period=16)", "knorm(hold=share(0.2))", "random_keep(hold=share(0.2))", "oracle_keep(hold=share(0.2))",
    "pools(hold=share(0.2), heavy=64)", "qevict(hold=share(0.2))",
    'qevict(hold=share(0.3), scope="head", score="defensive", requantise="each")', "quest(read=share(0.1))",
    'quest(read=share(0.1), heads="max")', 'quest(read=pages(12), heads="softmax_mean", refresh=4)', "quest(read=exact(r=4))",
    "quest(read=mass(eps=0.1))", "quest(read=top_p(p=0.9))", 'quest(read=pages(12), index=boxes(n=2, by="cluster"))',
    'quest(read=pages(12), index=sphere(dtype="fp8"))', "quest(read=pages(12), index=block_mean())",
    "quest(read=pages(12), index=digest())", 'quest(read=pages(12), shards=shards(2, budget="each"))', "oracle(read=pages(12))",
    "recency(read=pages(12))", "kivi(bits=2, group=32, residual=32)", "fp8()", "int4()",
    "turboquant()", "oscar_ots()", "zipcache()", "h2o(hold=share(0.5)) >> quest(read=share(0.1))",
    "tova(hold=share(0.2)) >> evicted_moments()", 'h2o(hold=share(0.4)) >> kivi(bits=2) >> quest(read=mass(eps=0.2), index=boxes(keys="recon"))',
    "offload(device=pages(16)) >> quest(read=pages(12))", 'kvquant(bits=3, calibration="{kvquant}")',
    'oscar_cov(calibration="{oscar_cov}")', 'quest(read=gap(file="{gap}"))',
)  # fmt: skip
MADE = (
    "expected_attention(hold=share(0.2))", "dsa(read=tokens(32))", "sparda_proxy(read=pages(6), page=8)",
    'defensivekv(hold=share(0.3), scope="model", window=8)', "h2o(hold=share(0.2)) >> quest(read=mass(eps=0.1), page=8)",
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """A column that differs: in how many rows, by how much at most (floats: of the number, of 1 where it is smaller), and whether decision 0002
    lets it. Where it differs by more than NEAR anywhere, both are of those rows."""

    column: str
    rows: int
    most: float | None
    allowed: bool


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--numpy", nargs="*", default=NUMPYS, metavar="VERSION", help=f"(default: {' '.join(NUMPYS)})")
    p.add_argument("--kernels", nargs="*", default=KERNELS, metavar="NAME", help=f"of OpenBLAS (default: {' '.join(KERNELS)})")
    p.add_argument(
        "--cpus", nargs="*", default=(), metavar="NAME", help="that numba compiles for, for example generic (default: none)"
    )
    p.add_argument("--child", nargs=2, metavar=("GIVEN", "OUT"), help=argparse.SUPPRESS)
    asked = p.parse_args(argv)
    if asked.child:
        replayed(Path(asked.child[0]), Path(asked.child[1]))
        return 0
    with TemporaryDirectory(prefix="kvsim-builds-") as place:
        home = Path(place)
        given(home / "given")
        here = run(home, "here", {})
        print(f"{len(POLICIES)} policies on smollm2-needle, {len(MADE)} on a synthetic trace; beside {here}", flush=True)
        good = True
        for name, more in ways(home, asked.numpy, asked.kernels, asked.cpus):
            build = run(home, name, more)
            found = [(s, g) for s in ("bundled", "made") for g in gaps(home / "here" / s, home / name / s)]
            good &= told(f"{name} ({build})", found, same="NUMBA_CPU_NAME" not in more)
    return 0 if good else 1


def ways(
    home: Path, numpys: Sequence[str], kernels: Sequence[str], cpus: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A name and what the environment says, for each other build."""
    for version in numpys:
        target = home / f"numpy-{version}-alone"
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), f"numpy=={version}"]
        subprocess.run([*install, "--disable-pip-version-check"], check=True)
        yield f"numpy {version}", {"PYTHONPATH": str(target)}
    for kernel in kernels:
        yield f"kernels {kernel}", {"OPENBLAS_CORETYPE": kernel}
    for cpu in cpus:
        yield f"compiled for {cpu}", {"NUMBA_CPU_NAME": cpu, "NUMBA_CACHE_DIR": str(home / "compiled")}


# ------------------------------------------------------------------------------------------------ the replays
def given(folder: Path) -> None:
    """What every build starts from: a synthetic trace and calibration files, made once."""
    from kvsim.replay.calibrate import calibrate
    from kvsim.synth.generate import synthesize

    synthesize(folder / "made", prompt=480, steps=24, layers=2, head_dim=32, q_stats=True, index_heads=4)
    for name, policy in FILES.items():
        calibrate("smollm2-reversal", policy, folder / f"{name}.npz")


def replayed(source: Path, out: Path) -> None:
    from threadpoolctl import threadpool_info

    from kvsim.replay.run import replay

    files = {name: str(source / f"{name}.npz") for name in FILES}
    policies = [p.format(**files) if "{" in p else p for p in POLICIES]
    options: dict[str, Any] = {"plans": True, "explain": True, "baselines": True, "workers": 1}
    replay("smollm2-needle", policies, out / "bundled", **options)
    replay(source / "made", MADE, out / "made", **options)
    blas = sorted({f"OpenBLAS {x['version']} {x['architecture']}" for x in threadpool_info() if x["internal_api"] == "openblas"})
    (out / "build.json").write_text(json.dumps(", ".join([f"numpy {np.__version__}", *(blas or ["another BLAS"])])))


def run(home: Path, name: str, more: Mapping[str, str]) -> str:
    """Replays in a process of its own -> numpy and BLAS as that process found them."""
    out = home / name
    out.mkdir()
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(home / "given"), str(out)]
    path = os.pathsep.join(x for x in (more.get("PYTHONPATH"), str(ROOT)) if x)
    subprocess.run(command, env=os.environ | dict(more) | {"PYTHONPATH": path}, cwd=home, check=True)
    return str(json.loads((out / "build.json").read_text()))


# ------------------------------------------------------------------------------------------------ what differs
def gaps(one: Path, other: Path) -> Iterator[Gap]:
    """Every column of two runs that is not the same."""
    tables = [sorted(p.name for p in run.glob("*.parquet")) for run in (one, other)]
    if tables[0] != tables[1]:
        yield Gap(f"tables {tables[0]} and {tables[1]}", 0, None, False)
        return
    for name in tables[0]:
        a, b = pl.read_parquet(one / name), pl.read_parquet(other / name)
        if a.height != b.height:
            yield Gap(f"{Path(name).stem}: {a.height} and {b.height} rows", 0, None, False)
            continue
        for column in a.columns:
            gap = _gap(f"{Path(name).stem}.{column}", a[column], b[column], a.get_column("read_pages", default=None))
            if gap is not None:
                yield gap


def _gap(name: str, a: pl.Series, b: pl.Series, read_pages: pl.Series | None) -> Gap | None:
    inner = a.dtype.inner if isinstance(a.dtype, pl.List) else a.dtype
    if not inner.is_float():
        rows = int(a.ne_missing(b).sum())
        return Gap(name, rows, None, False) if rows else None
    if isinstance(a.dtype, pl.List):
        if (lengths := int(a.list.len().ne_missing(b.list.len()).sum())) > 0:
            return Gap(name, lengths, None, False)
        a, b = a.explode(), b.explode()
    if (missing := int((a.is_null() != b.is_null()).sum())) > 0:
        return Gap(f"{name} (null)", missing, None, False)
    x, y = (s.fill_null(0).to_numpy().astype(np.float64) for s in (a, b))
    if np.array_equal(x, y, equal_nan=True):
        return None
    with np.errstate(invalid="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y) / np.maximum(1, np.abs(x)))
    far = ~(apart <= NEAR)  # what is infinite in one of them is far
    if not far.any():
        return Gap(name, int((apart > 0).sum()), float(apart.max()), True)
    allowed = False
    if name.partition(".")[2] in BY_PAGE_MASS and read_pages is not None:
        pages = read_pages.fill_null(1).to_numpy()
        pages = np.minimum(pages, 10) if name.endswith("10") else pages
        allowed = bool((apart * np.maximum(pages, 1) <= 1 + NEAR)[far].all())
    return Gap(name, int(far.sum()), float(apart[far].max()), allowed)


def told(build: str, found: Sequence[tuple[str, Gap]], same: bool) -> bool:
    """Prints what differs, and whether that is all that may; same: nothing may."""
    wrong = [(study, g) for study, g in found if same or not g.allowed]
    moved = sum(g.rows for _, g in found if g.allowed and (g.most or 0) > NEAR)
    most = max((g.most for _, g in found if g.most is not None and g.most <= NEAR), default=0.0)
    print(
        f"{build}: floats of {len(found)} columns differ, by {most:.1e} at most; {moved} page recalls moved by a page", flush=True
    )
    for study, g in wrong:
        print(
            f"  BEYOND WHAT MAY: {study}, {g.column}: {g.rows} rows{'' if g.most is None else f', {g.most:.1e} at most'}",
            flush=True,
        )
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
