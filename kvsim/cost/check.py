"""A cost model against measurements it has not seen: how wrong it is inside its box, and how wrong bytes over the peak would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from kvsim.cost.classfit import summary
from kvsim.cost.fit import half
from kvsim.cost.model import GRADES, CostModel, predict
from kvsim.cost.probe import PROBE, is_device
from kvsim.errors import Uncalibrated, WrongUse

HEADS = ("class", "q_heads", "kv_heads", "head_dim")
LARGE = 2  # L2 sizes above which a cache plays no part


def check(model: CostModel, samples: pl.DataFrame, strict: bool = False) -> dict[str, Any]:
    """{"rows": one a class and variant, "whole": one a class, "left_out": rows by status}.

    Each row: n, mape, p90, bias of the calibrated predictions, as fractions; large: the same above twice L2; plain, plain_large:
    bytes/peak on the same rows; grades: how many rows have which. A model of half the shapes is checked on the
    other half. Raises WrongUse when it is of another GPU or has none of the samples' heads;
    if strict, Uncalibrated when a row is not calibrated."""
    rest = _unseen(model, samples)
    told = foretold(model, samples)
    if strict:
        refuse_uncalibrated(told)
    rows = [
        dict(zip(("class", "variant"), k, strict=True)) | _row(model, g)
        for k, g in sorted(told.group_by("class", "variant"), key=lambda x: str(x[0]))
    ]
    whole = [{"class": k[0]} | _row(model, g) for k, g in sorted(told.group_by("class"), key=lambda x: str(x[0]))]
    left = {"fitted half": samples.height - rest.height, "impossible, conflicting, hot or plain reads": rest.height - told.height}
    return {"rows": rows, "whole": whole, "left_out": left}


def foretold(model: CostModel, samples: pl.DataFrame) -> pl.DataFrame:
    """The samples that a model is checked on, with what model.predict says of them. Raises WrongUse as check does."""
    good = _unseen(model, samples).filter(pl.col("status").is_in(["ok", "l2_hot"]) & (pl.col("cache") != "hot") & ~PROBE)
    _refuse_another_gpu(model, good)
    _refuse_other_heads(model, good)
    return predict(model, good)


def _unseen(model: CostModel, samples: pl.DataFrame) -> pl.DataFrame:
    """Of a model of half the shapes, the other half."""
    return samples.filter(~half(samples)) if model.about["options"]["half"] else samples


def refuse_uncalibrated(told: pl.DataFrame) -> None:
    """--strict. Raises Uncalibrated that names the first shape outside of what was measured."""
    rest = told.filter(pl.col("grade") != "calibrated")
    if rest.height:
        first = rest.row(0, named=True)
        raise Uncalibrated(
            f"--strict: {rest.height} of {told.height} rows are not calibrated, the first {_heads(tuple(first[k] for k in HEADS))}, "
            f"batch {first['batch']}, context {first['context']} ({first['grade']}): measure shapes that enclose it"
        )


def _refuse_another_gpu(model: CostModel, samples: pl.DataFrame) -> None:
    for name in sorted(samples["gpu"].drop_nulls().unique()):
        if model.gpu and not is_device(name, model.gpu):
            raise WrongUse(
                f"the samples are of {name}, the model of {model.gpu.name}: a time does not carry over to another GPU; fit samples of it"
            )


def _refuse_other_heads(model: CostModel, samples: pl.DataFrame) -> None:
    known = {tuple(f.key[k] for k in HEADS) for f in model.fits}
    asked = sorted(set(samples.select(HEADS).unique().iter_rows()), key=str)
    if asked and not known & set(asked):
        one = min(known, key=str)
        raise WrongUse(
            f"the samples are of {_heads(asked[0])}, the model of {_heads(one)}{' and others' * (len(known) > 1)}: fit samples of those heads"
        )


def _heads(key: tuple[Any, ...]) -> str:
    return f"{key[0]} with {key[1]} query heads, {key[2]} kv heads, head_dim {key[3]}"


def _row(model: CostModel, told: pl.DataFrame) -> dict[str, Any]:
    inside = told.filter(pl.col("grade") == "calibrated")
    measured, sizes = inside["t_us"].to_numpy(), (inside["bytes"] / inside["layers"]).to_numpy()
    errors = np.log(inside["predicted_us"].to_numpy() / measured)
    large = sizes > LARGE * model.gpu.l2_bytes if model.gpu else np.zeros(len(sizes), bool)
    counts = dict(told["grade"].value_counts().iter_rows())
    return summary(errors) | {
        "large": summary(errors[large]),
        "plain": _plain(model, inside),
        "plain_large": _plain(model, inside.filter(pl.Series(large, dtype=pl.Boolean))),
        "grades": {g: counts[g] for g in GRADES if g in counts},
    }


def _plain(model: CostModel, rows: pl.DataFrame) -> dict[str, float]:
    """The error of bytes over the link alone."""
    link = model.gpu.link_gbps(str(rows["class"][0])) if model.gpu and rows.height else None
    if not link:
        return {"n": 0}
    return summary(np.log((rows["bytes"] / (link * 1e3) / rows["t_us"]).to_numpy()))


def lines(found: dict[str, Any]) -> list[str]:
    """What `kvsim cost check` says: a table, one line a class and variant and one for the whole class."""
    said = [f"{'':48} {'calibrated':^28} {'above 2x L2':^21} {'bytes/peak':^13}"]
    said += [f"{'':48} {'n':>6}" + "".join(f"{name:>7}" for name in ("MAPE", "P90", "bias", "n", "MAPE", "P90", "MAPE", "large"))]
    for row in found["rows"] + [w | {"variant": "(all)"} for w in found["whole"]]:
        large = row["large"]
        numbers = [_share(row, name) for name in ("mape", "p90", "bias")] + [
            f"{large['n']:7}",
            _share(large, "mape"),
            _share(large, "p90"),
        ]
        numbers += [_share(row["plain"], "mape"), _share(row["plain_large"], "mape")]
        said.append(f"{row['class'] + ' ' + row['variant']:48.48} {row['n']:6}" + "".join(numbers))
    grades = {g: sum(w["grades"].get(g, 0) for w in found["whole"]) for g in GRADES}
    said.append("grades: " + ", ".join(f"{n} {g}" for g, n in grades.items() if n) + "; errors are of the calibrated rows")
    return said + [f"left out: {n} {why}" for why, n in found["left_out"].items() if n]


def _share(row: dict[str, Any], name: str) -> str:
    return f"{100 * row[name]:6.1f}%" if name in row else f"{'-':>7}"
