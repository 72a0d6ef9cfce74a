"""The directory of a `kvsim live`, whole, still being written, or condensed: what it says by policy and context.

The unit of evidence is a context. Several prompts from one context share its text and its prefill, so they count as one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from kvsim.errors import BadTrace, WrongUse
from kvsim.places import from_json
from kvsim.tables import LIVE_SCHEMA

FULL = "full() >> everything()"
ANSWER_ROLES = (2, 3)
GROUPS = 6  # of layers, neighbours together
CONDENSED = ("answers", "apart", "predicted", "growth", "hits")
HIT, WHOLE = 0.5, 0.99  # of the dense mass on the evidence of a layer: from here on it was found, and all of it was read
PREDICTORS = {  # of the open loop -> in words; a larger value should mean a better policy
    "open_mass_recall": "mass recall, open loop",
    "open_evidence": "evidence mass read, open loop",
    "open_rel_l2": "output error, open loop",
    "rel_l2": "output error, closed loop",
}
SIDES = {  # of a ratio whose sums over layers, steps and prompts are taken first
    "open_mass_recall": (pl.col("open_mass_recall"), pl.col("open_mass_recall").is_not_null()),
    "open_evidence": (pl.col("open_evidence_read"), pl.col("open_evidence_dense")),
    "open_rel_l2": (pl.col("open_rel_l2"), pl.col("open_rel_l2").is_not_null()),
    "rel_l2": (pl.col("rel_l2"), pl.col("rel_l2").is_not_null()),
}


@dataclass(frozen=True, eq=False)
class Study:
    """about: live.json. Its frames are those that everything else is computed from, and all that a condensed study keeps."""

    path: Path
    about: dict[str, Any]

    def table(self, name: str) -> pl.LazyFrame:
        """answers, steps or layers as they were written; steps and layers with `answering`: what follows the step's token is the answer, or
        text that is fed. Raises BadTrace: a condensed study has them no more."""
        if self._condensed and name != "answers":
            raise BadTrace(f"{self.path}: a condensed study, which has no table {name}; expected one as kvsim live wrote it")
        frame = pl.scan_parquet(self._parts(name)).with_columns(pl.col("policy").cast(pl.String))
        if name == "answers":
            return frame
        of = ["policy", "request", *(("mode", "sample") if name == "steps" else ("layer",))]
        following = pl.col("role").shift(-1).over(of, order_by="step").fill_null(pl.col("role"))
        return frame.with_columns(answering=following.is_in(ANSWER_ROLES))

    @property
    def contexts(self) -> pl.LazyFrame:
        """request, context, task."""
        return self.table("answers").select("request", "context", "task").unique()

    @cached_property
    def answers(self) -> pl.DataFrame:
        return self.table("answers").drop("text", strict=False).collect()

    @cached_property
    def apart(self) -> pl.DataFrame:
        """policy, task, context, kl, kl_question, top1_agree of the forced run: of the steps that say the answer, and of those before."""
        if self._condensed:
            return self._read("apart")
        answering = pl.col("answering")
        return (
            self.table("steps")
            .filter(pl.col("mode") == "forced")
            .join(self.contexts, on="request")
            .group_by("policy", "task", "context")
            .agg(
                kl=pl.col("kl").filter(answering).cast(pl.Float64).mean(),
                kl_question=pl.col("kl").filter(~answering).cast(pl.Float64).mean(),
                top1_agree=pl.col("top1_agree").filter(answering).mean(),
            )
            .sort("policy", "task", "context")
            .collect()
        )

    @cached_property
    def predicted(self) -> pl.DataFrame:
        """policy, task, context, first_layer, last_layer (of a group), NAME_0, NAME_1: of the answering steps, sums whose ratio NAME_0 / NAME_1
        is each of PREDICTORS, and the share of tokens that were `read`; layers that every policy reads whole count, too."""
        if self._condensed:
            return self._read("predicted")
        sums = [x.cast(pl.Float64).sum().alias(f"{name}_{i}") for name, pair in SIDES.items() for i, x in enumerate(pair)]
        by = ("policy", "task", "context", "first_layer")
        read = pl.col("read_tokens").cast(pl.Float64).sum().alias("read_0")
        frame = (
            self.table("layers")
            .filter(pl.col("answering"))
            .join(self.contexts, on="request")
            .join(self._groups.lazy(), on="layer")
        )
        found = frame.group_by(*by, "last_layer").agg(read, *sums).collect()
        whole = found.filter(pl.col("policy") == FULL).select(*by[1:], read_1="read_0")
        return found.filter(pl.col("policy") != FULL).join(whole, on=by[1:]).sort(*by)

    @cached_property
    def growth(self) -> pl.DataFrame:
        """policy, task, step, closed, open: output error of the forced run, means over layers and prompts: how what one step loses is carried
        on."""
        if self._condensed:
            return self._read("growth")
        by = ("policy", "task", "step")
        means = {"closed": pl.col("rel_l2").cast(pl.Float64).mean(), "open": pl.col("open_rel_l2").cast(pl.Float64).mean()}
        frame = self.table("layers").filter(pl.col("policy") != FULL).join(self.contexts, on="request")
        return frame.group_by(*by).agg(**means).sort(*by).collect()

    @cached_property
    def hits(self) -> pl.DataFrame:
        """policy, task, context, first_hit, hits, all_read: of the open loop at the answering steps, the first layer whose reads hold half of
        the dense mass on the evidence (as many as there are layers: none), in how many layers they do, and in how many they hold all of it.
        No rows without evidence or open loop."""
        if self._condensed:
            return self._read("hits")
        frame = self.table("layers").filter(pl.col("answering"), pl.col("policy") != FULL).join(self.contexts, on="request")
        read, dense = (pl.col(f"open_evidence_{x}").cast(pl.Float64).sum() for x in ("read", "dense"))
        by = ("policy", "task", "context")
        each = frame.group_by(*by, "layer").agg(read=read, dense=dense).filter(pl.col("dense") > 0)
        hit, none = pl.col("read") >= HIT * pl.col("dense"), len(self.about["layers"])
        return (
            each.with_columns(
                place=pl.col("layer").replace_strict({x: i for i, x in enumerate(self.about["layers"])}, return_dtype=pl.Int32)
            )
            .group_by(*by)
            .agg(
                first_hit=pl.col("place").filter(hit).min().fill_null(none),
                hits=hit.sum(),
                all_read=(pl.col("read") >= WHOLE * pl.col("dense")).sum(),
            )
            .sort(*by)
            .collect()
        )

    @property
    def _groups(self) -> pl.DataFrame:
        """layer, first_layer, last_layer."""
        layers = self.about["layers"]
        size = -(-len(layers) // GROUPS)
        rows = [(x, group[0], group[-1]) for i in range(0, len(layers), size) for group in [layers[i : i + size]] for x in group]
        names = ("layer", "first_layer", "last_layer")
        return pl.DataFrame(rows, dict.fromkeys(names, pl.Int16), orient="row")

    @property
    def _condensed(self) -> bool:
        return (self.path / "predicted.parquet").exists()

    def _read(self, name: str) -> pl.DataFrame:
        return pl.read_parquet(self.path / f"{name}.parquet")

    def _parts(self, name: str) -> list[Path]:
        """A study that is still being written has a file for every prompt, that of layers last."""
        whole = self.path / f"{name}.parquet"
        if whole.exists():
            return [whole]
        done = sorted(self.path.glob("layers-*.parquet"), key=lambda x: int(x.stem.split("-")[1]))
        if not done:
            raise BadTrace(f"{self.path}: no prompt of this study is finished")
        return [x.with_name(x.name.replace("layers", name)) for x in done]


def is_study(path: str | Path) -> bool:
    return (Path(path) / "live.json").is_file()


def open_study(path: str | Path) -> Study:
    """A study, also one that is still being written (its FOLDER.partial), or a condensed one. Raises BadTrace: none of them."""
    file = Path(path) / "live.json"
    try:
        about = from_json(file.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise BadTrace(f"{path}: not the directory of a kvsim live ({e})") from None
    schema = about.get("schema") if isinstance(about, dict) else None
    if schema != LIVE_SCHEMA:
        raise BadTrace(f"{file}: schema {schema!r}, expected {LIVE_SCHEMA!r}")
    return Study(Path(path), about)


def condense(study: Study, out: str | Path) -> Path:
    """What a study says by policy and context, a thousandth of its size; everything but the layers one by one and single steps can be computed
    from it as from the study. Raises WrongUse: `out` is there."""
    out = Path(out)
    if out.exists():
        raise WrongUse(f"{out}: exists already, and a study is never overwritten; choose another folder, or remove it")
    frames: dict[str, pl.DataFrame] = {name: getattr(study, name) for name in CONDENSED}
    out.mkdir(parents=True)
    for name, frame in frames.items():
        shorter = [pl.col(c).cast(pl.Float32).round_sig_figs(5) for c, t in frame.schema.items() if t.is_float()]
        frame.with_columns(shorter).rechunk().write_parquet(
            out / f"{name}.parquet", compression="zstd", compression_level=19, statistics=False
        )
    (out / "live.json").write_text(json.dumps(study.about, indent=1) + "\n", "utf-8")
    return out
