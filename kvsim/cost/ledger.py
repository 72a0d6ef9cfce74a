"""A run's ledger -> the launches of every step: bytes as the engine counted them, replayed layers standing for the model's.

A launch group is all layers alike of one (policy, request, step). Where the engine of a server has a choice, `Kernels` says what it does."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import polars as pl

from kvsim.cost.launches import TABLE, Kernels, score_factors
from kvsim.cost.plain import NUMBER
from kvsim.errors import BadTrace, WrongUse

STEP = ("policy", "request", "at")  # `at` is the decode step; `step` numbers these
KIND = ("kind", "window")
LATENT = pl.col("kind") == "mla_expanded"  # its rows are of all kv heads, as wide as no key
SUMS = (
    "read_bytes", "meta_bytes", "index_bytes", "page_bytes", "score_bytes", "write_bytes", "rebuild_bytes", "host_read_bytes",
    "ssd_read_bytes", "moved_in_bytes", "moved_out_bytes", "collective_bytes", "coded_bytes", "coded_numbers", "quant_tokens",
    "read_tokens", "held_tokens", "evicted_tokens", "missed_runs", "resident_bytes", "index_resident_bytes", "meta_resident_bytes",
    "host_resident_bytes", "ssd_resident_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """launches: rows of launches.TABLE; steps: step, policy, request, at, resident_bytes (device), away_bytes (host and SSD); first: what
    each policy held of each request after its first step, all layers together, for what prefill adds (cost.prefill)."""

    launches: pl.DataFrame
    steps: pl.DataFrame
    first: pl.DataFrame
    heads: tuple[int, int, int]
    notes: list[str]


def work(
    about: dict[str, Any], ledger: pl.LazyFrame, events: pl.LazyFrame, how: Kernels, batch: int = 1, graph: str | None = None
) -> Work:
    """run.json, ledger and events of a run -> its launches. batch: so many requests at once, all like the one replayed.

    Raises BadTrace for a run that does not say its layers, WrongUse for one whose layers have different heads."""
    layers = _layers(about)
    replayed = sorted(ledger.select("layer").unique().collect()["layer"].to_list())
    rows = _by_layer(ledger, events, layers)
    forms = {p["id"]: p.get("form") or p["id"] for p in about.get("policies") or []}
    weights, notes = _weights({p: forms.get(p, p) for p in rows["policy"].unique()}, layers, replayed)
    rows = _as_whole(rows.join(weights, on=["policy", "layer"]))
    ids = rows.select(STEP).unique().sort(STEP).with_row_index("step").with_columns(pl.col("step").cast(pl.Int64))
    rows = rows.join(ids, on=STEP)
    sums = rows.group_by("step").agg(
        resident_bytes=(
            pl.sum_horizontal("resident_bytes", "index_resident_bytes", "meta_resident_bytes") * pl.col("stands")
        ).sum()
        * batch,
        away_bytes=(pl.sum_horizontal("host_resident_bytes", "ssd_resident_bytes") * pl.col("stands")).sum() * batch,
    )
    launches = pl.concat([_launches(rows, cls, how) for cls in CLASSES]).with_columns(
        *(pl.col(c) * batch for c in ("bytes", "pages")), batch=pl.lit(batch, pl.Int64), graph=pl.lit(graph, pl.String)
    )
    one = layers.row(0, named=True)
    return Work(
        _table(launches, layers),
        ids.join(sums, on="step").sort("step"),
        _first(rows),
        (one["q_heads"], one["kv_heads"], one["key_dim"]),
        notes,
    )


def _first(rows: pl.DataFrame) -> pl.DataFrame:
    """id, policy, request, visible (of the prompt), layers, the resident bytes of all layers, and the heads of one."""
    stands = pl.col("stands")
    unit = ["policy", "request"]
    held = ("resident_bytes", "index_resident_bytes", "meta_resident_bytes")
    out = (
        rows.filter(pl.col("at") == pl.col("at").min().over(unit))
        .group_by(unit)
        .agg(
            *((pl.col(c) * stands).sum() for c in held),
            *(pl.col(c).first() for c in ("q_heads", "kv_heads", "key_dim", "value_dim", "row_bytes")),
            visible=pl.col("visible").max() - 1,
            layers=stands.sum().round().cast(pl.Int64),
        )
    )
    return out.sort(unit).with_row_index("id")


def _layers(about: dict[str, Any]) -> pl.DataFrame:
    """One row per attention layer of the model. All alike in their heads."""
    needed = ("layer", "kind", "q_heads", "kv_heads", "key_dim", "value_dim", "row_bytes")
    rows = about.get("layers") or []
    if not rows or any(k not in r for r in rows for k in needed):
        raise BadTrace("run.json: no layers with their heads; replay again with this version of kvsim")
    given = [{k: r.get(k) for k in (*needed, "window", "shared_row_bytes")} for r in rows]
    layers = pl.DataFrame(given, schema_overrides={"window": pl.Int64, "shared_row_bytes": pl.Int64}).with_columns(
        appended=pl.coalesce("shared_row_bytes", pl.col("kv_heads") * pl.col("row_bytes"))
    )
    shapes = layers.select("q_heads", "kv_heads", "key_dim", "value_dim").unique()
    if shapes.height > 1:
        raise WrongUse(
            f"the run's layers have {shapes.height} shapes of heads; a step is priced for one: replay --layers of one shape"
        )
    return layers


def _by_layer(ledger: pl.LazyFrame, events: pl.LazyFrame, layers: pl.DataFrame) -> pl.DataFrame:
    """The ledger summed over kv heads: one row a policy, request, step and layer, with what the layer is and whether the step cut."""
    unit = ["policy", "request", "layer", "step"]
    whole = pl.col("read_pages").is_null().all()
    rows = ledger.group_by(unit).agg(
        *(pl.col(c).cast(pl.Int64).sum() for c in SUMS),
        pages=pl.col("read_pages").mean(),
        visible=pl.col("visible_tokens").max(),
        whole=whole,
        page_rows=(pl.col("page_bytes") / pl.col("read_pages")).max(),
        indexed=(pl.col("index_resident_bytes") > 0).sum(),
    )
    cuts = events.group_by(unit).agg(
        cut=pl.sum_horizontal("promoted", "demoted", "evicted").sum() > 0, state_bytes=pl.col("state_bytes").sum()
    )
    shape = layers.lazy().select(
        pl.col("layer").cast(pl.Int16), *KIND, "q_heads", "kv_heads", "key_dim", "value_dim", "row_bytes", "appended"
    )
    out = rows.join(cuts, on=unit, how="left").join(shape, on="layer")
    there = pl.col("visible") * pl.col("kv_heads") - pl.col("evicted_tokens")  # of all kv heads, wherever it is
    full = out.with_columns(pl.col("cut").fill_null(False), there=there).rename({"step": "at"})
    return full.sort("policy", "request", "at", "layer").collect()


# ------------------------------------------------------------------------------------------------ which layers stand for which
def _weights(forms: dict[str, str], layers: pl.DataFrame, replayed: list[int]) -> tuple[pl.DataFrame, list[str]]:
    """policy, layer, reads_all, page, learned, by_rule, stands: how many of the model's layers a replayed one stands for.

    forms: policies as text {id: form}, which says the page size, which layers are read whole, and whether the model's own indexer ranks.
    by_rule: it stands for layers that dense_layers=n reads whole, none of which was replayed; what they hold is what it holds."""
    kinds = {r["layer"]: tuple(r[k] for k in KIND) for r in layers.iter_rows(named=True)}
    found: list[dict[str, Any]] = []
    for policy, form in sorted(forms.items()):
        dense = max(map(int, re.findall(r"dense_layers=(\d+)", form)), default=0)
        sizes = set(map(int, re.findall(r"\bpage=(\d+)", form)))
        same = {"policy": policy, "page": sizes.pop() if len(sizes) == 1 else None, "learned": bool(re.search(r"\bdsa\(", form))}
        of = {layer: (kind, layer < dense) for layer, kind in kinds.items()}
        model, here = Counter(of.values()), Counter(of[n] for n in replayed)
        found += [
            same
            | {
                "layer": n,
                "by_rule": False,
                "reads_all": n < dense or "everything(" in form,
                "stands": model[of[n]] / here[of[n]],
            }
            for n in replayed
        ]
        for (kind, whole), n in model.items():
            if whole and not here[kind, whole] and (near := [m for m in replayed if kinds[m] == kind]):
                found.append(same | {"layer": near[0], "by_rule": True, "reads_all": True, "stands": float(n)})
    schema = {
        "policy": pl.String,
        "layer": pl.Int16,
        "page": pl.Int64,
        "learned": pl.Boolean,
        "by_rule": pl.Boolean,
        "reads_all": pl.Boolean,
        "stands": pl.Float64,
    }
    return pl.DataFrame(found, schema=schema), _notes(kinds, replayed)


def _notes(kinds: dict[int, tuple[Any, ...]], replayed: list[int]) -> list[str]:
    """What the reader of a step must know about latent layers, and about those that were not replayed."""
    latent = any(kind == "mla_expanded" for kind, *_ in kinds.values())
    latents = [
        "latent rows are priced by their bytes, as kernels of plain K and V read them: no kernel of latents was measured"
    ] * latent
    if len(replayed) == len(kinds):
        return latents
    said = [*latents, f"{len(replayed)} of {len(kinds)} layers were replayed; each stands for the others of its kind"]
    for kind, n in sorted(Counter(kinds.values()).items(), key=str):
        if kind not in {kinds[r] for r in replayed}:
            said.append(f"{n} layers of kind {kind[0]} were not replayed and are not in the step")
    return said


def _as_whole(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that stand for layers read whole by rule: everything they hold is read, nothing is ranked."""
    rule = pl.col("by_rule")
    coded = pl.col("quant_tokens") > 0
    whole = pl.col("there") * pl.col("appended") / pl.col("kv_heads")
    stored = pl.when(coded).then(pl.col("resident_bytes")).otherwise(whole.round().cast(pl.Int64))
    all_of = {"read_bytes": stored, "meta_bytes": pl.col("meta_resident_bytes"), "read_tokens": pl.col("there")}
    none = ("page_bytes", "index_bytes", "index_resident_bytes", "rebuild_bytes")
    return rows.with_columns(
        pl.col("whole") | pl.col("reads_all"),
        *(pl.when(rule).then(has).otherwise(pl.col(name)).alias(name) for name, has in all_of.items()),
        *(pl.when(rule).then(0).otherwise(pl.col(name)).alias(name) for name in none),
        pl.when(rule).then("appended").otherwise("write_bytes").alias("write_bytes"),
    )


# ------------------------------------------------------------------------------------------------ classes
def _q_and_out() -> pl.Expr:
    """16-bit queries and outputs, as in every sample of attention."""
    return pl.col("q_heads") * (pl.col("key_dim") + pl.col("value_dim")) * 2


def _attention_bytes(how: Kernels) -> pl.Expr:
    """Rows that attention reads: whole pages where there are pages; coded rows as codes, or 16-bit where a kernel decoded them before."""
    away = pl.col("host_read_bytes") + pl.col("ssd_read_bytes")
    coded, decoded = pl.col("quant_tokens") > 0, pl.col("read_tokens") * pl.col("row_bytes")
    once = pl.min_horizontal(pl.col("read_bytes") + away, decoded)  # what an offload fetches is in both
    rows = pl.when(LATENT).then(pl.col("read_bytes")).otherwise(once)  # a row of all heads is read when any of them reads it
    exact = pl.when(pl.col("whole")).then(rows).otherwise(pl.max_horizontal(pl.col("page_bytes"), rows))
    return _q_and_out() + pl.when(~coded).then(exact).otherwise(
        decoded if how.dequant == "separate" else pl.col("read_bytes") + pl.col("meta_bytes") + away
    )


def _decoded_bytes() -> pl.Expr:
    """Codes and scales read, 16-bit rows written, for the part of the held rows that the step read."""
    part = pl.col("read_tokens") / pl.col("held_tokens").clip(1)
    return ((pl.col("coded_bytes") + 2 * pl.col("coded_numbers")) * part.clip(0, 1)).cast(pl.Int64)


def _score_bytes(how: Kernels) -> pl.Expr:
    """What probabilities cost that a fused kernel does not give (launches.Kernels)."""
    group = pl.col("q_heads").first() / pl.col("kv_heads").first()
    rows = pl.col("read_tokens") * pl.col("row_bytes")
    key = rows * pl.col("key_dim") / (pl.col("key_dim") + pl.col("value_dim"))
    one, many = score_factors(how.scores, 1), score_factors(how.scores, 2)
    factors = [pl.when(group > 1).then(b if b == a else b / 2 * group).otherwise(a) for a, b in zip(one, many, strict=True)]
    return (factors[0] * key + factors[1] * (rows - key) + factors[2] * pl.col("score_bytes")).cast(pl.Int64)


def _score_lists() -> pl.Expr:
    """Lists of scores that are ranked in a layer: one a query head, also where a group has one set, which is of the best, or the mean, of its
    heads' lists; a single one for an index of the whole layer, which is billed on its first kv head. Of one kv head only the text tells."""
    for_layer = (pl.col("indexed") == 1) & ((pl.col("kv_heads") > 1) | pl.col("learned"))
    return pl.when(for_layer).then(1).otherwise(pl.col("q_heads"))


CLASSES = (
    "dense_attn", "gather_attn", "page_scan", "topk", "summary_update", "dequant", "scores", "routing", "tier_move", "host_fetch",
    "ssd_fetch", "collective",
)  # fmt: skip


def _launches(rows: pl.DataFrame, cls: str, how: Kernels) -> pl.DataFrame:
    """Rows of one class: step, class, bytes, n, layers, context, pages, page, kv_bits."""
    page = pl.coalesce("page", (pl.col("page_rows") / pl.col("row_bytes")).round().cast(pl.Int64))
    exist = (pl.col("there") / pl.col("kv_heads") / page).ceil()
    ranked = pl.col("index_bytes") > 0
    bits = pl.when(LATENT).then(16).otherwise(pl.col("row_bytes") * 8 / (pl.col("key_dim") + pl.col("value_dim")))
    at_score = pl.col("cut") if how.scores_at == "events" else pl.lit(True)
    summarised = pl.col("write_bytes") - pl.col("appended") + pl.col("rebuild_bytes").fill_null(0)
    when: dict[str, tuple[pl.Expr, pl.Expr, pl.Expr | None]] = {
        "dense_attn": (pl.col("whole"), _attention_bytes(how), None),
        "gather_attn": (~pl.col("whole"), _attention_bytes(how), pl.col("pages")),
        "page_scan": (ranked, pl.col("index_bytes"), exist),
        "topk": (ranked, (exist * _score_lists() * NUMBER).cast(pl.Int64), exist),
        "summary_update": (summarised > 0, summarised, None),
        "dequant": ((pl.col("quant_tokens") > 0) & (how.dequant == "separate"), _decoded_bytes(), None),
        "scores": ((pl.col("score_bytes") > 0) & at_score, _score_bytes(how), None),
        "routing": (pl.col("cut") & (pl.col("state_bytes") > 0), 2 * pl.col("state_bytes"), None),
        "tier_move": (
            pl.col("moved_in_bytes") + pl.col("moved_out_bytes") > 0,
            pl.col("moved_in_bytes") + pl.col("moved_out_bytes"),
            None,
        ),
        "host_fetch": (pl.col("host_read_bytes") > 0, pl.col("host_read_bytes"), None),
        "ssd_fetch": (pl.col("ssd_read_bytes") > 0, pl.col("ssd_read_bytes"), None),
        "collective": (pl.col("collective_bytes") > 0, pl.col("collective_bytes"), None),
    }
    there, bytes_, pages = when[cls]
    fetched = cls in ("host_fetch", "ssd_fetch")
    runs = pl.when(pl.col("missed_runs") > 0).then(pl.col("missed_runs")).otherwise(1) if fetched else pl.lit(1)
    codes = cls in ("dense_attn", "gather_attn") and how.dequant == "fused"
    read_bits = (
        8
        * pl.sum_horizontal("read_bytes", "meta_bytes")
        / pl.col("read_tokens").clip(1)
        / (pl.col("key_dim") + pl.col("value_dim"))
    ).round()
    tokens = dict.fromkeys(CLASSES, pl.col("there"))
    tokens |= {"dense_attn": pl.col("read_tokens"), "gather_attn": pl.col("page_bytes") / pl.col("row_bytes")}
    out = rows.filter(there).with_columns(
        bytes=bytes_,
        runs=runs,
        pages=(pl.lit(None) if pages is None else pages).cast(pl.Float64),
        page=(pl.lit(None, pl.Int64) if pages is None else page),
        kv_bits=(pl.when(pl.col("quant_tokens") > 0).then(read_bits).otherwise(bits) if codes else bits).cast(pl.Int64),
        tokens=tokens[cls] / pl.col("kv_heads"),
    )
    stands = pl.col("stands")
    return out.group_by("step", "page", "kv_bits", maintain_order=True).agg(
        pl.lit(cls).alias("class"),
        bytes=(pl.col("bytes") * stands).sum().round().cast(pl.Int64),
        n=(pl.col("runs") * stands).sum().round().cast(pl.Int64),
        layers=stands.sum().round().cast(pl.Int64),
        context=((pl.col("tokens") * stands).sum() / stands.sum()).round().cast(pl.Int64),
        pages=((pl.col("pages") * stands).sum() / stands.sum()).round().cast(pl.Int64) if pages is not None else pl.lit(None, pl.Int64),
    ).select("step", "class", "bytes", "n", "layers", "context", "pages", "page", "kv_bits")  # fmt: skip


def _table(launches: pl.DataFrame, layers: pl.DataFrame) -> pl.DataFrame:
    one = layers.row(0, named=True)
    given = {
        "q_heads": one["q_heads"],
        "kv_heads": one["kv_heads"],
        "head_dim": one["key_dim"],
        "variant": "",
        "cache": "cold",
        "status": "ok",
    }
    full = launches.with_columns(pl.lit(given.get(k)).alias(k) for k in TABLE if k not in launches.columns)
    return full.select(pl.col(k).cast(t) for k, t in TABLE.items()).sort("step", maintain_order=True)
