"""What kvsim reads from strangers, and what must be true of it whatever they wrote.

A surface makes something good once (`prepare`) and tries something odd many times (`attempt`). An attempt may raise KvsimError; any other
exception is a finding, and `Finding` is raised where something wrong was believed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvsim.errors import KvsimError
from tools.fuzz.mutate import altered, bent, reworded

Corpus = dict[str, bytes]
POLICIES = (
    "full()", "everything(page=16)", "streaming_llm(hold=tokens(512), sinks=4)", "h2o(hold=share(0.2), recent=share(0.5))",
    "h2o(hold=share(0.5)) >> quest(read=tokens(256), page=16, heads='max', dense_layers=2)", "quest(read=exact(1), page=8)",
    "quest(read=mass(0.05), index=boxes(n=2, order='kmeans'))", "quest(read=top_p(0.9), refresh='never')",
    "quest(read=pages(4), index=sphere(), shards=shards(2, budget='each'))", "full() >> kivi(k_bits=2, v_bits=4, group=32)",
    "qevict(hold=kib(64), window=8, period=4)", "snapkv(hold=share(0.25), window=32)", "oracle(read=share(0.1, of='visible'))",
    "full() >> fp8() >> quest(read=share(1/4))", "tova(hold=tokens(-1))", "random_read(read=mib(1.5), seed=3)",
)  # fmt: skip


class Finding(Exception):
    """Something wrong was believed, or something left its place."""


@dataclass(frozen=True)
class Surface:
    what: str
    prepare: Callable[[Path], Any]  # an empty folder -> what every attempt begins with
    attempt: Callable[[Random, Any, Path], None]  # in an empty folder


# -------------------------------------------------------------------------------------------------- traces
def _good_traces(root: Path) -> dict[Path, dict[Any, str]]:
    """Traces, and what is in each of their lanes."""
    from kvsim.synth.generate import synthesize

    synthesize(root / "plain", prompt=48, steps=6, layers=2, requests=2)
    synthesize(root / "wide", prompt=70, steps=3, layers=1, q_heads=4, kv_heads=2)
    shutil.copytree(root / "plain", root / "outside")
    return {path: _contents(path) for path in (root / "plain", root / "wide")}


def _contents(path: Path, allow_partial: bool = False) -> dict[Any, str]:
    """sha256 of the arrays of every lane."""
    from kvsim.trace.open import open_trace

    trace, found = open_trace(path, allow_partial), {}
    for request in trace.requests:
        for layer in trace.captured_layers:
            lane, seen = trace.lane(request, layer), hashlib.sha256()
            for x in (lane.k, lane.v, lane.k_pre, lane.q, lane.t, lane.window_q, lane.mass, lane.wo_norm, lane.out, lane.lse):
                seen.update(b"-" if x is None else np.ascontiguousarray(x).tobytes())
            found[request.id, layer.id] = seen.hexdigest()
    return found


def _damaged_trace(rng: Random, good: dict[Path, dict[Any, str]], folder: Path) -> None:
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
    if changed and _tried(lambda: list(check_trace(path))) == []:
        raise Finding(f"check is silent about {victim.relative_to(path)}")
    _tried(lambda: _contents(path))  # may well read it: page checksums see most damage, the check sees all


def _forged_trace(rng: Random, good: dict[Path, dict[Any, str]], folder: Path) -> None:
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
    if _tried(lambda: _contents(path, rng.random() < 0.3)) is not None:
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
    table = pq.read_table(file)
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


def _tried(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except KvsimError:
        return None


def _dumps(root: Path) -> Corpus:
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


def _dump(rng: Random, good: Corpus, folder: Path) -> None:
    """What becomes a trace is one that the check has nothing to say of."""
    from kvsim.trace.check import check_trace
    from kvsim.trace.convert import convert

    name = rng.choice(list(good))
    data = good[name]
    if name == "a.safetensors" and rng.random() < 0.6:
        end = 8 + int.from_bytes(data[:8], "little")
        said = json.dumps(altered(rng, json.loads(data[8:end]))).encode()
        data = len(said).to_bytes(8, "little") + said + data[end:]
    else:
        data = bent(rng, data, list(good.values()))
    (folder / name).write_bytes(data)
    if said_of := list(check_trace(convert([folder / name], folder / "trace"))):
        raise Finding(f"a trace was made of which the check says {said_of[0]}")


# ------------------------------------------------------------------------------------------------ policies
def _policy(rng: Random, _: Any, folder: Path) -> None:
    """What parses has one canonical form."""
    from kvsim.policies.language import canonical, parse

    chain = parse(reworded(rng, rng.choice(POLICIES), POLICIES))
    text = canonical(chain)
    if canonical(parse(text)) != text:
        raise Finding(f"the canonical form {text!r} is not its own")


def _policy_file(rng: Random, _: Any, folder: Path) -> None:
    from kvsim.policies.language import parse_policy

    lines = [
        f'default = "{rng.choice(POLICIES)}"',
        "[layers]",
        f'"0" = "{rng.choice(POLICIES)}"',
        f'"3-5" = "{rng.choice(POLICIES)}"',
    ]
    lines += ["[heads.3]", f'"0" = "{rng.choice(POLICIES)}"', f'"1,2" = "{rng.choice(POLICIES)}"']
    text = "\n".join(lines) + "\n"
    (folder / "policy.toml").write_bytes(
        bent(rng, text.encode()) if rng.random() < 0.3 else reworded(rng, text, lines).encode("utf-8", "surrogatepass")
    )
    found = parse_policy(f"@{folder / 'policy.toml'}")
    for layer in (0, 3, 10**9):
        found.at(layer, 4)


# --------------------------------------------------------------------------------------- profiles, models of cost
def _exports(root: Path) -> Corpus:
    from tests.cost import exports as made

    (root / "a.sqlite").unlink(missing_ok=True)
    return {
        "ncu.csv": made.NCU_2025.encode(), "old.csv": made.NCU_2023.encode(), "raw.csv": made.NCU_RAW.encode(),
        "nsys.csv": made.NSYS_CSV.encode(), "kineto.json": json.dumps(made.DECODE).encode(), "aic.csv": made.AIC.encode(),
        "proton.json": json.dumps(made.PROTON).encode(), "sim.csv": made.LLMSERVINGSIM.encode(),
        "nsys.sqlite": made.nsys_sqlite(root / "a.sqlite").read_bytes(),  # type: ignore[no-untyped-call]
    }  # fmt: skip


def _profile(rng: Random, good: Corpus, folder: Path) -> None:
    from kvsim.cost.load import load
    from tests.cost.exports import SECRETS

    name = rng.choice(list(good))
    data = good[name]
    if name.endswith(".json") and rng.random() < 0.6:
        data = json.dumps(altered(rng, json.loads(data))).encode()
    elif not name.endswith(".sqlite") and rng.random() < 0.5:
        data = reworded(rng, data.decode(), [x.decode() for n, x in good.items() if n.endswith("csv")]).encode(
            "utf-8", "surrogatepass"
        )
    else:
        data = bent(rng, data, list(good.values()))
    (folder / name).write_bytes(data)
    found = load([folder / name])
    for column in found.samples.columns:
        if any(secret in str(x) for x in found.samples[column].to_list() for secret in SECRETS):
            raise Finding(f"column {column} holds what a machine must not leave")


def _cost_files(root: Path) -> Corpus:
    from kvsim.codecs.calibration import save
    from kvsim.cost.model import calibrate, write_model
    from kvsim.cost.samples import write_samples
    from tests.cost.exports import GEOMETRY
    from tests.cost.made import samples

    write_samples(samples(), root / "samples.csv")  # type: ignore[no-untyped-call]
    write_model(calibrate([root / "samples.csv"], draws=4), root / "model.json")
    save(root / "calibration.npz", {"codec": "nuq"}, {"0.k": np.arange(8.0).reshape(2, 4)})
    rules = '[[rule]]\nclass = "dense_attn"\nmatch = "flash.*"\n\n[[rule]]\nclass = "gemm"\nmatch = "gemm"\n'
    (root / "classes.toml").write_text(rules)
    (root / "geometry.json").write_text(GEOMETRY)
    return {p.name: p.read_bytes() for p in root.iterdir()}


def _cost_file(rng: Random, good: Corpus, folder: Path) -> None:
    from kvsim.codecs.calibration import load as calibration
    from kvsim.cost.classes import load_rules
    from kvsim.cost.heads import read_geometry
    from kvsim.cost.model import predict, read_model
    from kvsim.cost.samples import read_samples

    name = rng.choice(list(good))
    data, file = good[name], folder / name
    if name.endswith(".json") and rng.random() < 0.7:
        file.write_text(json.dumps(altered(rng, json.loads(data))))
    else:
        file.write_bytes(bent(rng, data, list(good.values())))
    match name:
        case "samples.csv":
            read_samples(file)
        case "calibration.npz":
            calibration(str(file))
        case "classes.toml":
            load_rules(file)
        case "geometry.json":
            read_geometry(file)
        case "model.json":
            (folder / "samples.csv").write_bytes(good["samples.csv"])
            predict(read_model(file), read_samples(folder / "samples.csv"))


# --------------------------------------------------------------------------------------------- studies and tasks
STUDY = """
traces = ["trace", "t*"]
policies = ['quest(read=pages({n}), page={page})', "h2o(hold=tokens({hold}))", "full()"]
where = ["n * page == hold", "n <= 64", "page != 4"]
layers = [0, 1]
steps = [0, 1, 2]
baselines = true
kv_dtype = "float16"
[grid]
n = [4, 8, 16]
page = [8, 16, 32]
hold = [128, 256]
"""


def _study(rng: Random, _: Any, folder: Path) -> None:
    from kvsim.replay.study import read_study

    text = reworded(rng, STUDY, STUDY.splitlines())
    odd = text.encode("utf-8", "surrogatepass")
    (folder / "study.toml").write_bytes(bent(rng, odd) if rng.random() < 0.2 else odd)
    (folder / "trace").mkdir()
    found = read_study(folder / "study.toml", 10_000)
    if len(set(found.policies)) != len(found.policies):
        raise Finding("a policy is there twice")


ROW = {
    "id": "a", "context": ["The key of Ada is 12.", "Bob has none."], "question": "What is Ada's key?", "answers": ["12"],
    "evidence": ["The key of Ada is 12."], "scoring": "any",
}  # fmt: skip


def _rows(rng: Random, _: Any, folder: Path) -> None:
    from kvsim.capture.tasks.rows import read_rows

    lines = [json.dumps(altered(rng, ROW) if rng.random() < 0.7 else ROW) for _ in range(3)]
    text = "\n".join(lines)
    (folder / "rows.jsonl").write_bytes(bent(rng, text.encode()) if rng.random() < 0.5 else text.encode())
    read_rows(folder / "rows.jsonl")


# ----------------------------------------------------------------------------------------------- runs and pages
def _good_run(root: Path) -> Path:
    from kvsim.replay.run import replay
    from kvsim.synth.generate import synthesize

    trace = synthesize(root / "trace", prompt=48, steps=4, layers=1)
    return Path(replay(trace, ["full()", "quest(read=pages(2), page=8)"], root / "run", workers=1).path)


def _run(rng: Random, good: Path, folder: Path) -> None:
    """Tables that changed are not believed, whatever run.json is made to say."""
    from kvsim.metrics.quality import quality
    from kvsim.metrics.run import open_run

    path = folder / "run"
    shutil.copytree(good, path)
    about = json.loads((path / "run.json").read_text())
    victim = rng.choice(sorted(p for p in path.iterdir() if p.is_file()))
    before = victim.read_bytes()
    if victim.name == "run.json" and rng.random() < 0.7:
        victim.write_text(json.dumps(altered(rng, about)))
    else:
        victim.write_bytes(bent(rng, before))
    run = open_run(path)
    if victim.suffix == ".parquet" and victim.stem in about["tables"] and victim.read_bytes() != before:
        raise Finding(f"{victim.name} was altered and believed")
    quality(run.heads)


def _good_page(root: Path) -> dict[str, Any]:
    from kvsim.metrics.run import open_run
    from kvsim.report.contents import sections
    from kvsim.report.html import render

    run = open_run(_good_run(root))
    return {"run": run, "plain": _elements(render("t", ["lead"], sections(run), [p.id for p in run.policies]))}


class _Tags(HTMLParser):
    """What a browser would take for elements that run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        odd = [name for name, value in attrs if name.startswith("on") or (value or "").strip().lower().startswith("javascript:")]
        if tag in ("script", "iframe", "object", "embed", "base", "meta", "link", "img", "form") or odd:
            self.found.append(tag + "".join(sorted(odd)))


HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "'\"><svg onload=alert(1)>", "{{7*7}}", "${7*7}",
    "javascript:alert(1)", "<!--", "]]>", "\u2028", "=cmd|' /C calc'!A0", "&lt;b&gt;", "\\u003cscript>", "datum.x; alert(1)",
)  # fmt: skip


def _labels(rng: Random, good: dict[str, Any], folder: Path) -> None:
    """Names out of a run are text on the page: it has the elements it always has."""
    from dataclasses import replace

    from kvsim.report.contents import sections
    from kvsim.report.html import render

    run = good["run"]
    policies, tables, about = run.policies, dict(run.tables), json.loads(json.dumps(run.about))
    import polars as pl

    new = {p.id: rng.choice(HOSTILE) + reworded(rng, p.id, HOSTILE) + str(i) for i, p in enumerate(policies)}
    tables = {
        name: frame.with_columns(pl.col("policy").replace(new)) if "policy" in frame.collect_schema() else frame
        for name, frame in tables.items()
    }
    about = _renamed(about, new) | {
        "trace": {**(about.get("trace") or {}), "id": rng.choice(HOSTILE), "model": rng.choice(HOSTILE)}
    }
    odd = replace(run, policies=tuple(replace(p, id=new[p.id], form=new[p.id]) for p in policies), tables=tables, about=about)
    page = render(rng.choice(HOSTILE), [rng.choice(HOSTILE)], sections(odd), list(new.values()))
    if extra := sorted(set(_elements(page)) - set(good["plain"])):
        raise Finding(f"the page has elements of the run's making: {extra[:5]}")
    if len(_elements(page)) > len(good["plain"]) + 40:
        raise Finding("the page has more elements than its figures explain")


def _renamed(value: Any, new: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {new.get(k, k): _renamed(v, new) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(v, new) for v in value]
    return new.get(value, value) if isinstance(value, str) else value


def _elements(page: str) -> list[str]:
    tags = _Tags()
    tags.feed(re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", page, flags=re.DOTALL))
    return tags.found


def _nothing(root: Path) -> None:
    return None


SURFACES = {
    "damaged-trace": Surface("bytes of a trace's tables that changed", _good_traces, _damaged_trace),
    "forged-trace": Surface("a trace made to mislead: manifest, paths, links, tables", _good_traces, _forged_trace),
    "dump": Surface("arrays to be made a trace", _dumps, _dump),
    "policy": Surface("policy expressions", _nothing, _policy),
    "policy-file": Surface("policy files per layer and head", _nothing, _policy_file),
    "profile": Surface("profilers' exports", _exports, _profile),
    "cost-file": Surface("samples, cost models, geometries, classes, calibrations", _cost_files, _cost_file),
    "study": Surface("study files", _nothing, _study),
    "rows": Surface("JSONL tasks", _nothing, _rows),
    "run": Surface("run folders", _good_run, _run),
    "labels": Surface("names on a page", _good_page, _labels),
}
