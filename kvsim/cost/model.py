"""A cost model: the fits of one GPU with where they come from, as a file; and what it says of a shape, never without a grade."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from kvsim.cost.classfit import KEY, ClassFit
from kvsim.cost.fit import DRAWS, Fitted, fit, half
from kvsim.cost.form import UNITS, place
from kvsim.cost.gate import OVER
from kvsim.cost.hardware import Gpu, named_gpu
from kvsim.cost.numbers import four
from kvsim.cost.probe import device_of
from kvsim.cost.residual import Grid
from kvsim.cost.samples import read_samples, write_whole
from kvsim.errors import BadProfile, WrongUse

SCHEMA = "kvsim.costmodel/1"
GRADES = ("calibrated", "extrapolated", "transferred", "spec")
FURTHER = 2.0  # sizes beyond the largest measured one that are still extrapolated
UNTESTED = 2.0  # the factor of an interval where nothing could be left out to test it
TRANSFER = 0.4  # the half-width, relative, of a time taken over from other heads, dtype or kernel
DIGITS = 7
PUBLISHED = Path(__file__).parent / "published"  # the models that come with kvsim


@dataclass(frozen=True)
class CostModel:
    """`about` is the file without its fits: gpu, inputs with hashes, options, what was left out."""

    gpu: Gpu | None
    fits: list[ClassFit]
    about: dict[str, Any]


def calibrate(
    paths: Iterable[str | Path], gpu: str | None = None, *, halved: bool = False, draws: int = DRAWS, seed: int = 0
) -> CostModel:
    """Samples CSVs -> a cost model; `halved` fits half of the shapes and leaves the others to `check`.

    Raises WrongUse when the samples are of several GPUs or none of them can be fitted."""
    files = [Path(p) for p in paths]
    parts = [read_samples(p) for p in files]
    samples = pl.concat(parts)
    card = _card(samples, gpu)
    chosen = samples.filter(half(samples)) if halved else samples
    fitted = fit(chosen, card, draws, seed)
    if not fitted.fits:
        why = fitted.refused[0]["why"] if fitted.refused else "no usable rows"
        raise WrongUse(f"{files[0].name}: nothing to fit: {why}")
    inputs = [_input(path, part) for path, part in zip(files, parts, strict=True)]
    return CostModel(card, fitted.fits, _about(card, chosen, inputs, fitted, halved, draws, seed))


def _card(samples: pl.DataFrame, gpu: str | None) -> Gpu | None:
    names = sorted(samples["gpu"].drop_nulls().unique())
    if gpu:
        return named_gpu(gpu)
    if len({device_of(n, samples).key for n in names}) > 1:
        raise WrongUse(f"samples of {len(names)} GPUs ({', '.join(names)}): fit one at a time, or say which with --gpu")
    return device_of(names[0], samples) if names else None


def _input(path: Path, samples: pl.DataFrame) -> dict[str, Any]:
    counts = {s: n for s, n in sorted(samples["status"].value_counts().iter_rows())}
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": counts}


def _seen(samples: pl.DataFrame) -> dict[str, Any]:
    """Per class, how many times the modelled bytes a profiler saw at the memory: {"ratio": median, "n": samples}."""
    both = samples.filter((pl.col("bytes") > 0) & pl.col("bytes_measured").is_not_null())
    told = both.group_by("class").agg(ratio=(pl.col("bytes_measured") / pl.col("bytes")).median(), n=pl.len()).sort("class")
    return {r["class"]: {"ratio": _short(r["ratio"]), "n": r["n"]} for r in told.to_dicts()}


def _about(
    card: Gpu | None, samples: pl.DataFrame, inputs: list[dict[str, Any]], fitted: Fitted, halved: bool, draws: int, seed: int
) -> dict[str, Any]:
    import importlib.metadata as installed

    return {
        "schema": SCHEMA,
        "software": {name: installed.version(name) for name in ("kvsim", "numpy", "scipy")},
        "gpu": asdict(card) if card else None,
        "inputs": inputs,
        "bytes_measured": _seen(samples),
        "options": {"half": halved, "draws": draws, "seed": seed},
        "left_out": {k: n for k, n in sorted(fitted.left_out.items()) if n},
        "refused": fitted.refused,
        "units": UNITS,
    }


def lines(model: CostModel) -> list[str]:
    """What `kvsim cost fit` says: a line a fit, then the rows without one."""
    said = [f"{model.gpu.name if model.gpu else 'GPU unknown: no peak to bound bandwidths by'}: {len(model.fits)} fits"]
    for f in model.fits:
        key = " ".join(f"{k} {v}" for k, v in f.key.items() if v not in (None, "") and k not in ("class", "variant"))
        terms = ", ".join(
            f"{t} {four(c)} [{four(f.ci95[t][0])}, {four(f.ci95[t][1])}] {UNITS[t]}" for t, c in f.coefficients.items()
        )
        held = f"{f.held['mape']:.1%} on {f.held['n']} left-out shapes" if f.held["n"] else "nothing left out to test it"
        said.append(f"  {f.key['class']} {f.key['variant']} {key}: {terms}; {held}")
        said += [f"    {f.lacks}"] if f.lacks else []
    return said + [f"  left out: {n} {why}" for why, n in model.about["left_out"].items()]


# ------------------------------------------------------------------------------------------------ the file
def write_model(model: CostModel, path: str | Path) -> None:
    """JSON with sorted keys and no date: the same samples give the same bytes."""
    text = json.dumps(
        model.about | {"fits": [_plain(f) for f in model.fits]}, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False
    )
    write_whole(path, text + "\n")


def _plain(f: ClassFit) -> dict[str, Any]:
    cells = np.column_stack([2**f.grid.places, f.grid.residuals])
    batch, size = (2**f.grid.places).T
    return {
        "key": f.key,
        "coefficients": {k: _short(v) for k, v in f.coefficients.items()},
        "ci95": {k: [_short(x) for x in v] for k, v in f.ci95.items()},
        "bandwidth_gbps": _short(f.bandwidth_gbps()),
        "l2_bytes": f.l2_bytes,
        "box": {"batch": [_short(batch.min()), _short(batch.max())], "size": [_short(size.min()), _short(size.max())]},
        "residuals": [[_short(x) for x in cell] for cell in cells.tolist()],
        "spread": _short(f.spread),
        "beyond": _short(f.beyond),
        "held_out": {k: _short(v) for k, v in f.held.items()},
        "rows": f.rows,
        "lacks": f.lacks,
        "draws": {k: " ".join(f"{x:.5g}" for x in f.draws[:, i]) for i, k in enumerate(f.coefficients) if len(f.draws)},
    }


def _short(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else float(f"{x:.{DIGITS}g}")


TEXTS = ("class", "variant", "graph")  # of a key; the rest are whole numbers


def read_model(path: str | Path) -> CostModel:
    """A file, or the name of a model that comes with kvsim. Raises BadProfile when it is no cost model."""
    known = {file.stem: file for file in sorted(PUBLISHED.glob("*.json"))}
    if not Path(path).exists():
        path = known.get(str(path), path)
    name = Path(path).name
    if not Path(path).exists():
        along = ", ".join(known)
        raise BadProfile(
            f"{path}: no such file; make a cost model with kvsim cost fit, or take one that comes with kvsim: {along}"
        )
    try:
        about = json.loads(Path(path).read_text(encoding="utf-8"))
        if about["schema"] != SCHEMA:
            raise BadProfile(f"{name}: schema {about['schema']!r} where {SCHEMA} is expected; fit again with this kvsim")
        fits = [_read_fit(f) for f in about.pop("fits")]
        card = Gpu(**about["gpu"]) if about["gpu"] else None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as e:
        if isinstance(e, BadProfile):
            raise
        raise BadProfile(f"{name}: not a cost model ({type(e).__name__}: {e}); make one with kvsim cost fit") from None
    _refuse_faster_than_link(name, card, fits)
    return CostModel(card, fits, about)


def _refuse_faster_than_link(name: str, gpu: Gpu | None, fits: list[ClassFit]) -> None:
    """A fit never finds such a bandwidth; a file that was edited may hold one."""
    for f in fits:
        link, found = gpu.link_gbps(f.key["class"]) if gpu else None, f.bandwidth_gbps()
        if link and found and found > 1.001 * OVER * link:
            raise BadProfile(
                f"{name}: {f.key['class']} {f.key['variant']} at {found:.0f} GB/s, faster than the {link:g} GB/s of {gpu.name}'s link;"  # type: ignore[union-attr]
                " the file was altered or names another GPU: fit again"
            )


def _read_fit(f: dict[str, Any]) -> ClassFit:
    """Every value becomes what it should be, or raises ValueError, TypeError or KeyError."""
    cells, key, l2 = np.array(f["residuals"], dtype=float).reshape(-1, 3), f["key"], f["l2_bytes"]
    if not len(cells) or not (cells[:, :2] > 0).all() or set(key) != set(KEY):
        raise ValueError("a fit without shapes, or with another key than " + ", ".join(KEY))
    coefficients = {t: float(f["coefficients"][t]) for t in UNITS if t in f["coefficients"]}
    return ClassFit(
        key={k: None if v is None else str(v) if k in TEXTS else int(v) for k, v in key.items()},
        coefficients=coefficients, ci95={t: (float(f["ci95"][t][0]), float(f["ci95"][t][1])) for t in coefficients},
        grid=Grid(np.log2(cells[:, :2]), cells[:, 2]), l2_bytes=None if l2 is None else int(l2), spread=_number(f["spread"]),
        beyond=_number(f["beyond"]), held={str(k): _number(v) for k, v in f["held_out"].items()},
        rows={str(k): int(v) for k, v in f["rows"].items()}, lacks=str(f.get("lacks", "")), draws=_read_draws(f),
    )  # fmt: skip


def _read_draws(f: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Models of before have none."""
    told = f.get("draws") or {}
    return np.array([[float(x) for x in told[t].split()] for t in UNITS if t in told]).T if told else np.zeros((0, 0))


def _number(x: float | None) -> float:
    return float("nan") if x is None else float(x)


# ------------------------------------------------------------------------------------------------ what it says
def predict(model: CostModel, shapes: pl.DataFrame) -> pl.DataFrame:
    """Rows with the columns of samples (times and statuses are not looked at) -> them with predicted_us, low_us, high_us, grade.

    calibrated: inside the measured shapes of its own kernel and heads. extrapolated: at most twice past the largest size, interval of that very
    test. transferred: the nearest fit of the class for other heads, dtype, kernel, ±40 %. spec: bytes over the link, a floor with no
    upper end (high_us null); null throughout where not even that is known."""
    parts = []
    for values, rows in shapes.with_row_index("order").group_by(*KEY, maintain_order=True):
        key = dict(zip(KEY, values, strict=True))
        own = next((f for f in model.fits if f.key == key), None)
        other = None if own else _nearest(model, key)
        answers = measured(own, rows) if own else transferred(other, rows) if other else unknown(rows)
        parts.append(rows.with_columns(floored(answers, rows, model.gpu)))
    out = pl.concat(parts) if parts else shapes.with_row_index("order")
    return out.sort("order").drop("order")


def measured(f: ClassFit, rows: pl.DataFrame) -> list[pl.Series]:
    """predicted_us, low_us, high_us, grade of rows of the fit's own kernel and heads."""
    t, inside = f.times(rows)
    where, measured = place(rows), f.grid.places
    further = (where[:, 1] > measured[:, 1].max()) & (where[:, 1] <= measured[:, 1].max() + math.log2(FURTHER))
    further &= (where[:, 0] >= measured[:, 0].min()) & (where[:, 0] <= measured[:, 0].max()) & ~inside
    spread = f.spread if math.isfinite(f.spread) else math.log(UNTESTED)
    beyond = max(f.beyond, spread) if math.isfinite(f.beyond) else math.log(UNTESTED)
    cold = f.displaced(rows)
    grade = np.where(cold, "transferred", np.where(inside, "calibrated", np.where(further, "extrapolated", "spec")))
    width = np.exp(np.where(inside, spread, beyond))
    return _answers(t, np.where(cold, t * (1 - TRANSFER), t / width), np.where(cold, t * (1 + TRANSFER), t * width), grade)


def transferred(f: ClassFit, rows: pl.DataFrame) -> list[pl.Series]:
    """The same of rows of another kernel, dtype or heads: the form of the fit without its residuals, ±40 %."""
    terms = tuple(f.coefficients)
    needs = [
        c for term, c in (("sequence", "batch"), ("longest", "kv_heads"), ("page", "pages"), ("bytes", "bytes")) if term in terms
    ]
    if any(rows[c].null_count() for c in needs):
        return unknown(rows)
    t = f.formed(rows)
    return _answers(t, t * (1 - TRANSFER), t * (1 + TRANSFER), np.full(len(t), "transferred"))


def unknown(rows: pl.DataFrame) -> list[pl.Series]:
    none = np.full(rows.height, np.nan)
    return _answers(none, none, none, np.full(rows.height, "spec"))


def _answers(t: Any, low: Any, high: Any, grade: Any) -> list[pl.Series]:
    numbers = [
        pl.Series(n, x, dtype=pl.Float64).fill_nan(None) for n, x in (("predicted_us", t), ("low_us", low), ("high_us", high))
    ]
    return [*numbers, pl.Series("grade", grade.tolist(), dtype=pl.String)]


def floored(answers: list[pl.Series], rows: pl.DataFrame, gpu: Gpu | None) -> list[pl.Series]:
    """`spec` rows get bytes over the link, as a floor."""
    link = gpu.link_gbps(str(rows["class"][0])) if gpu else None
    floor = rows["bytes"] / (link * 1e3) if link else pl.Series([None] * rows.height, dtype=pl.Float64)
    table = pl.DataFrame(answers).with_columns(floor.alias("floor"))
    spec = pl.col("grade") == "spec"
    table = table.with_columns(
        pl.when(spec).then("floor").otherwise("predicted_us").alias("predicted_us"),
        pl.when(spec).then("floor").otherwise("low_us").alias("low_us"),
        pl.when(spec).then(None).otherwise("high_us").alias("high_us"),
    )
    return table.drop("floor").get_columns()


def _nearest(model: CostModel, key: dict[str, Any]) -> ClassFit | None:
    """The fit of the class that shares most of the key; the first of several."""
    same = [f for f in model.fits if f.key["class"] == key["class"]]
    return max(same, key=lambda f: sum(f.key[k] == key[k] for k in KEY), default=None)
