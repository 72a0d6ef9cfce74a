"""Traces and dumps: damaged by accident, forged with intent, and replayed as they are."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tools.fuzz.mutate import altered, bent, huge
from tools.fuzz.surface import Corpus, Finding, replayed, tried


def good(root: Path) -> dict[Path, dict[Any, str]]:
    """Traces, and what is in each of their lanes."""
    from kvsim.synth.generate import synthesize

    synthesize(root / "plain", prompt=48, steps=6, layers=2, requests=2, q_stats=True, index_heads=2)
    synthesize(root / "wide", prompt=70, steps=3, layers=1, q_heads=4, kv_heads=2, dtype="float32")
    shutil.copytree(root / "plain", root / "outside")
    return {path: _contents(path) for path in (root / "plain", root / "wide")}


def _contents(path: Path, allow_partial: bool = False) -> dict[Any, str]:
    """sha256 of the arrays of every lane."""
    from kvsim.trace.open import open_trace

    trace, found = open_trace(path, allow_partial), {}
    for request in trace.requests:
        for layer in trace.captured_layers:
            lane, seen = trace.lane(request, layer), hashlib.sha256()
            for x in _arrays(lane):
                seen.update(b"-" if x is None else np.ascontiguousarray(x).tobytes())
            found[request.id, layer.id] = seen.hexdigest()
    return found


def _arrays(lane: Any) -> Iterable[Any]:
    yield from (lane.k, lane.v, lane.k_pre, lane.q, lane.t, lane.window_q, lane.mass, lane.wo_norm, lane.out, lane.lse)
    stats, indexer = lane.q_stats, lane.indexer
    yield from (None, None) if stats is None else (stats.mean, stats.covariance)
    yield from (None, None, None) if indexer is None else (indexer.q, indexer.w, indexer.k)


def damaged(rng: Random, good: dict[Path, dict[Any, str]], folder: Path) -> None:
    """Accidents: bytes of Parquet files that change, or files that change places. Nothing of it may be read as data."""
    from kvsim.trace.check import check_trace

    base = rng.choice(list(good))
    path = folder / "trace"
    shutil.copytree(base, path)
    files = sorted(p for p in path.rglob("*.parquet"))
    victim, before = rng.choice(files), {p: p.read_bytes() for p in files}
    data = bent(rng, before[victim], [before[p] for p in rng.sample(files, 2)])
    victim.write_bytes(before[rng.choice(files)] if rng.random() < 0.1 else data)
    changed = victim.read_bytes() != before[victim]
    if changed and tried(lambda: list(check_trace(path))) == []:
        raise Finding(f"check is silent about {victim.relative_to(path)}")
    tried(lambda: _contents(path))  # may well read it: page checksums see most damage, the check sees all


def forged(rng: Random, good: dict[Path, dict[Any, str]], folder: Path) -> None:
    """Intent: a manifest that agrees with what was altered, odd paths, links, tables that say other things."""
    path = folder / "trace"
    shutil.copytree(rng.choice(list(good)), path)
    outside, file = next(iter(good)).parent / "outside", path / "manifest.json"
    manifest = json.loads(file.read_text())
    for name in rng.sample(sorted(manifest["files"]), rng.choice((1, 1, 2))):
        _forge(rng, path, outside, name, manifest)
    if rng.random() < 0.4:
        manifest = altered(rng, manifest)
    _agree(path, manifest)
    if rng.random() < 0.1:
        file.unlink()
    else:
        file.write_text(json.dumps(manifest))
    if tried(lambda: _contents(path, rng.random() < 0.3)) is not None:
        left = [name for name in _listed(path) if ".." in name or (path / name).is_symlink()]
        if left:
            raise Finding(f"{left[0]} leaves the trace and was followed")


def _forge(rng: Random, path: Path, outside: Path, name: str, manifest: Any) -> None:
    match rng.randrange(5):
        case 0:
            _rewritten(rng, path / name)
        case 1:
            (path / name).unlink()
            (path / name).symlink_to(outside / name)
        case 2:
            manifest["files"][f"../outside/{name}"] = manifest["files"].pop(name)
        case 3:
            (path / name).write_bytes(bent(rng, (path / name).read_bytes()))
        case 4:
            (path / "journal.jsonl").write_bytes(bent(rng, (path / "journal.jsonl").read_bytes()))


def _agree(path: Path, manifest: Any) -> None:
    """The manifest says of every file what it is now."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    for name, entry in files.items() if isinstance(files, dict) else ():
        there = isinstance(entry, dict) and "\0" not in name and len(name) < 200 and (path / name).is_file()
        if there:
            content = (path / name).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _listed(path: Path) -> Iterable[str]:
    file = path / "manifest.json"
    return json.loads(file.read_text())["files"] if file.exists() else ()


def _rewritten(rng: Random, file: Path) -> None:
    """A table with a column swapped, renamed, cut, null, or blown up so that it is small on disk alone."""
    table = pq.ParquetFile(file).read()
    names = list(table.schema.names)
    match rng.randrange(6):
        case 0:
            table = table.rename_columns(rng.sample(names, len(names)))
        case 1:
            table = table.drop_columns([rng.choice(names)])
        case 2:
            table = table.take(pa.array(rng.sample(range(len(table)), len(table))))
        case 3:
            table = pa.concat_tables([table] * rng.choice((2, 40)))
        case 4:
            i = rng.randrange(len(names))
            table = table.set_column(i, names[i], pa.nulls(len(table), table.schema.field(i).type))
        case 5:  # zstd makes megabytes of this out of gigabytes
            table = pa.concat_tables([table.slice(0, 1)] * rng.choice((10, 200_000)))
    file.unlink()
    pq.write_table(table, file, compression=rng.choice(("none", "zstd")), use_dictionary=rng.random() < 0.5)


def dumps(root: Path) -> Corpus:
    """What `kvsim trace convert` reads, in both formats."""
    rng = np.random.default_rng(0)
    arrays = {f"layers.0.{name}": rng.normal(size=(2, 12, 4)).astype(np.float32) for name in "kv"}
    arrays |= {"layers.0.q": rng.normal(size=(4, 3, 4)).astype(np.float32), "prompt_tokens": np.array(10), "scale": np.array(0.5)}
    np.savez(root / "a.npz", **arrays)  # type: ignore[arg-type]
    header: dict[str, Any] = {"__metadata__": {"mode": "greedy"}}
    data = b""
    for name, x in arrays.items():
        kind = {"float32": "F32", "int64": "I64", "float64": "F64"}[x.dtype.name]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    said = json.dumps(header).encode()
    return {"a.npz": (root / "a.npz").read_bytes(), "a.safetensors": len(said).to_bytes(8, "little") + said + data}


def dump(rng: Random, good: Corpus, folder: Path) -> None:
    """What becomes a trace is one that the check has nothing to say of."""
    from kvsim.trace.check import check_trace
    from kvsim.trace.convert import convert

    name = rng.choice(list(good))
    data = good[name]
    if name == "a.npz" and rng.random() < 0.05:
        with np.load(io.BytesIO(data)) as file:
            data = huge(dict(file), rng.choice(file.files))
    elif name == "a.safetensors" and rng.random() < 0.6:
        end = 8 + int.from_bytes(data[:8], "little")
        said = json.dumps(altered(rng, json.loads(data[8:end]))).encode()
        data = len(said).to_bytes(8, "little") + said + data[end:]
    else:
        data = bent(rng, data, list(good.values()))
    (folder / name).write_bytes(data)
    if said_of := list(check_trace(convert([folder / name], folder / "trace"))):
        raise Finding(f"a trace was made of which the check says {said_of[0]}")


# -------------------------------------------------------------------------------------------------- replayed
NEEDY = (
    "h2o(hold=tokens(20))", "expected_attention(hold=tokens(20))", "criticalkv(hold=tokens(20), window=4)", "dsa(read=tokens(8))",
    'caote(hold=tokens(20), base="tova")', "full() >> kivi(bits=2, group=8, residual=8) >> quest(read=mass(eps=0.05), page=8)",
    "sparda_proxy(read=pages(2), page=8)", "tova(hold=tokens(24)) >> evicted_moments() >> quest(read=tokens(8), page=4)",
    "qevict(hold=share(0.5), window=4, period=2, sinks=2, recent=4)", "quest(read=top_p(p=0.9), page=8, index=sphere())",
)  # fmt: skip
FLOATS = {"float16": np.float16, "float32": np.float32}


def numbers(rng: Random, good: dict[Path, dict[Any, str]], folder: Path) -> None:
    """The tables are whole, and what stands in them nobody computed: refused, or rows that keep the laws of every policy."""
    path = folder / "trace"
    shutil.copytree(rng.choice(list(good)), path)
    manifest = json.loads((path / "manifest.json").read_text())
    tables = sorted(name for name in manifest["files"] if not name.startswith(("requests", "layers")))
    for name in rng.sample(tables, rng.choice((1, 1, 3))):
        _refilled(rng, path / name, FLOATS[manifest["dtype"]])
    _agree(path, manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    run = replayed(path, rng.sample(NEEDY, 2), folder / "run", strict=rng.random() < 0.5)
    masses = run.heads.select("mass_recall", "mass_evicted", "mass_unread", "learned_sink_mass").to_numpy()
    if not np.abs(masses.sum(axis=1) - 1).max() < 0.01:
        raise Finding("masses that do not sum to 1")


def _refilled(rng: Random, file: Path, dtype: Any) -> None:
    """Some numbers of one column are others; rows and types stay what they are."""
    read = pq.ParquetFile(file)
    table, group = read.read(), read.metadata.row_group(0).num_rows
    i = rng.randrange(table.num_columns)
    kind, some = table.schema.field(i).type, np.random.default_rng(rng.randrange(2**32))
    rows = some.random(len(table)) < rng.choice((0.02, 0.5, 1.1))
    if pa.types.is_fixed_size_binary(kind):
        held = np.float32 if "q_stats" in file.parts else dtype
        x = np.frombuffer(b"".join(table.column(i).to_pylist()), held).reshape(len(table), -1).copy()
        x[rows] = _odd(rng, some, x[rows].shape, held)
        new = pa.array([row.tobytes() for row in x], kind)
    elif pa.types.is_string(kind):
        new = pa.array([rng.choice(("dot", "relu_weighted", "")) for _ in range(len(table))], kind)
    else:
        y = table.column(i).to_numpy().copy()
        y[rows] = _odd(rng, some, y[rows].shape, y.dtype)
        new = pa.array(y, kind)
    file.unlink()
    pq.write_table(table.set_column(i, table.schema.field(i), new), file, group, compression="none", use_dictionary=False)


def _odd(rng: Random, some: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    kind = np.dtype(dtype)
    if rng.random() < 0.2:
        return np.frombuffer(some.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)
    limits: Any = np.iinfo(kind) if kind.kind in "iu" else np.finfo(kind)
    few = [0, 1, 2, limits.max, limits.min, *([] if kind.kind in "iu" else [-0.0, limits.tiny, 1e4, -1e4])]
    return some.choice(np.array(rng.sample(few, rng.choice((1, 2)))).astype(kind), shape)
