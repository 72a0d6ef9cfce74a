"""Profilers' exports, and the files of the cost model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tools.fuzz.mutate import altered, bent, reworded
from tools.fuzz.surface import Corpus, Finding


def exports(root: Path) -> Corpus:
    from tests.cost import exports as made

    (root / "a.sqlite").unlink(missing_ok=True)
    return {
        "ncu.csv": made.NCU_2025.encode(), "old.csv": made.NCU_2023.encode(), "raw.csv": made.NCU_RAW.encode(),
        "nsys.csv": made.NSYS_CSV.encode(), "kineto.json": json.dumps(made.DECODE).encode(), "aic.csv": made.AIC.encode(),
        "proton.json": json.dumps(made.PROTON).encode(), "sim.csv": made.LLMSERVINGSIM.encode(),
        "nsys.sqlite": made.nsys_sqlite(root / "a.sqlite").read_bytes(),  # type: ignore[no-untyped-call]
    }  # fmt: skip


def profile(rng: Random, good: Corpus, folder: Path) -> None:
    from kvsim.cost.load import load
    from tests.cost.exports import SECRETS

    name = rng.choice(list(good))
    data = good[name]
    told = {n: _harmless(x, SECRETS) for n, x in good.items()}  # a name that a mutation took from a path is a name
    if name.endswith(".json") and rng.random() < 0.6:
        data = json.dumps(altered(rng, json.loads(data))).encode()
    elif not name.endswith(".sqlite") and rng.random() < 0.5:
        data = reworded(rng, data.decode(), [x.decode() for n, x in told.items() if n.endswith("csv")]).encode(
            "utf-8", "surrogatepass"
        )
    else:
        data = bent(rng, data, list(told.values()))
    (folder / name).write_bytes(data)
    found = load([folder / name])
    for column in found.samples.columns:
        if any(secret in str(x) for x in found.samples[column].to_list() for secret in SECRETS):
            raise Finding(f"column {column} holds what a machine must not leave")


def _harmless(data: bytes, secrets: Iterable[str]) -> bytes:
    """Without the lines that hold a secret."""
    return b"\n".join(line for line in data.split(b"\n") if not any(s.encode() in line for s in secrets))


def files(root: Path) -> Corpus:
    from kvsim.cost.model import calibrate, write_model
    from kvsim.cost.samples import write_samples
    from tests.cost.exports import GEOMETRY
    from tests.cost.made import samples

    write_samples(samples(), root / "samples.csv")  # type: ignore[no-untyped-call]
    write_model(calibrate([root / "samples.csv"], draws=4), root / "model.json")
    rules = '[[rule]]\nclass = "dense_attn"\nmatch = "flash.*"\n\n[[rule]]\nclass = "gemm"\nmatch = "gemm"\n'
    (root / "classes.toml").write_text(rules)
    (root / "geometry.json").write_text(GEOMETRY)
    return {p.name: p.read_bytes() for p in root.iterdir()}


def file(rng: Random, good: Corpus, folder: Path) -> None:
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
        case "classes.toml":
            load_rules(file)
        case "geometry.json":
            read_geometry(file)
        case "model.json":
            (folder / "samples.csv").write_bytes(good["samples.csv"])
            predict(read_model(file), read_samples(folder / "samples.csv"))
