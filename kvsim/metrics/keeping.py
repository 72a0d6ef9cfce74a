"""Diagnostics of keep policies (cards D7-D11): what was evicted and needed again, and when; what returns; what each tier is worth."""

from __future__ import annotations

import polars as pl

UNIT = ("policy", "request", "layer", "role")
CLASSES = ("sinks", "recent", "full", "coded", "host")
SETS = {"deployed": "", "oracle": "_oracle", "oracle_interval": "_interval"}  # of recurrence -> the end of a metric's name


def lag_metrics(lags: pl.LazyFrame) -> pl.LazyFrame:
    """-> policy, request, layer, role, metric, value. fmm_lag_H: dense mass on tokens evicted at least H steps before, H = 1, 2, 4 ..., over the
    steps that can have one (step >= H - 1). Of the 10 tokens of highest logit of a step: needed_again_pair, the share that is gone;
    needed_again_step, the share of (step, query head) in which one is; hit_rate = 1 - that; needed_again_token, of all evicted tokens of a
    kv head those that were needed later."""
    bucket = pl.col("bucket")
    by_lag = lags.select(*UNIT, "mass").with_columns(bucket=pl.int_ranges(pl.col("mass").list.len())).explode("bucket")
    later = by_lag.select(*UNIT, (2**bucket).alias("lag"), pl.col("mass").list.slice(bucket).list.sum().cast(pl.Float64))
    fmm = (
        later.group_by(*UNIT, "lag")
        .agg(value=pl.col("mass").mean())
        .select(*UNIT, pl.concat_str(pl.lit("fmm_lag_"), pl.col("lag").cast(pl.Int64).cast(pl.String)).alias("metric"), "value")
    )
    hits = pl.col("again").list.len()
    rates = lags.group_by(UNIT).agg(
        needed_again_pair=hits.sum() / pl.col("needed").sum(), needed_again_step=(hits > 0).mean(), hit_rate=(hits == 0).mean()
    )
    found = lags.select(*UNIT, "kv_head", "again").explode("again").drop_nulls().group_by(UNIT)
    distinct = found.agg(again=pl.struct("kv_head", "again").n_unique())
    gone = lags.group_by(*UNIT, "kv_head").agg(pl.col("evicted_tokens").max()).group_by(UNIT).agg(pl.col("evicted_tokens").sum())
    tokens = (
        gone.filter(pl.col("evicted_tokens") > 0)
        .join(distinct, on=UNIT, how="left")
        .select(*UNIT, needed_again_token=pl.col("again").fill_null(0) / pl.col("evicted_tokens"))
    )
    return pl.concat([fmm, _tall(rates), _tall(tokens)])


def lag_histogram(lags: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, lag (1, 2, 4 ...: from there to below the next), mass (mean over steps and heads, as the share of dense attention that goes
    to tokens evicted so long ago), again (tokens needed again, per step and head); sorted."""
    rows = lags.group_by("policy").len("rows")
    bucket = pl.int_ranges(pl.col("mass").list.len())
    mass = (
        lags.select("policy", "mass", bucket.alias("bucket"))
        .explode("mass", "bucket")
        .group_by("policy", "bucket")
        .agg(pl.col("mass").cast(pl.Float64).sum())
    )
    again = (
        lags.select("policy", lag="again_lag")
        .explode("lag")
        .drop_nulls()
        .with_columns(bucket=pl.col("lag").cast(pl.Float64).log(2).add(1e-9).floor().cast(pl.Int64))
        .group_by("policy", "bucket")
        .agg(again=pl.len())
    )
    return (
        mass.join(again, on=("policy", "bucket"), how="left")
        .join(rows, on="policy")
        .select(
            "policy",
            lag=(2 ** pl.col("bucket")).cast(pl.Int64),
            mass=pl.col("mass") / pl.col("rows"),
            again=pl.col("again").fill_null(0) / pl.col("rows"),
        )
        .sort("policy", "lag")
        .collect()
    )


def recurrence_metrics(recurrence: pl.LazyFrame) -> pl.LazyFrame:
    """-> policy, request, layer, role, metric, value. lir_event = re-entries / (unit, event) pairs that were dormant; lir_spell = re-entries /
    spells; with _alive without those of evicted units; with _4, _16 only what was dormant for so many events; with _oracle and _interval of the
    oracles. churn_held: between cuts, of all tokens held; churn_oracle, churn_interval: of the full tokens of the oracles. score_cosine: of what
    units received between cuts, keys as decoded against captured."""
    sums = recurrence.group_by(*UNIT, "set", "dormancy").agg(
        pl.col("returns", "pairs", "spells", "pairs_alive", "spells_alive").sum(),
        pl.col("churn_full", "churn_held", "score_cosine").mean(),
    )
    end = pl.col("set").replace_strict(SETS, return_dtype=pl.String)
    dormant = (
        pl.when(pl.col("dormancy") > 1).then(pl.concat_str(pl.lit("_"), pl.col("dormancy").cast(pl.String))).otherwise(pl.lit(""))
    )
    found = []
    for name, below in (("event", "pairs"), ("spell", "spells"), ("event_alive", "pairs_alive"), ("spell_alive", "spells_alive")):
        metric = pl.concat_str(pl.lit(f"lir_{name}"), dormant, end).alias("metric")
        mine = sums.filter(pl.col(below) > 0, (pl.col("set") == "deployed") | ("alive" not in name))
        found.append(mine.select(*UNIT, metric, (pl.col("returns") / pl.col(below)).alias("value")))
    once = sums.filter(pl.col("dormancy") == 1)
    for kind, column, name in (
        ("deployed", "churn_held", "churn_held"),
        ("deployed", "score_cosine", "score_cosine"),
        ("oracle", "churn_full", "churn_oracle"),
        ("oracle_interval", "churn_full", "churn_interval"),
    ):
        found.append(once.filter(pl.col("set") == kind).select(*UNIT, metric=pl.lit(name), value=pl.col(column)))
    return pl.concat(found).drop_nulls("value")


def tier_metrics(by_tier: pl.LazyFrame, heads: pl.LazyFrame) -> pl.LazyFrame:
    """-> policy, request, layer, role, metric, value. held_CLASS, own_CLASS, without_CLASS: means of the columns; fmm_tier_disabled:
    dense mass on tokens that are evicted, coded or on the host, read or not, as if all but the full tier were lost."""
    columns = [f"{part}_{c}" for part in ("held", "own", "without") for c in CLASSES]
    means = by_tier.group_by(UNIT).agg(pl.col(columns).cast(pl.Float64).mean())
    evicted = heads.group_by(UNIT).agg(pl.col("mass_evicted").cast(pl.Float64).mean())
    lost = means.join(evicted, on=UNIT).select(
        *UNIT, fmm_tier_disabled=pl.col("mass_evicted") + pl.col("held_coded") + pl.col("held_host")
    )
    return pl.concat([_tall(means), _tall(lost)])


def error_metrics(heads: pl.LazyFrame) -> pl.LazyFrame:
    """-> policy, request, layer, role, metric, value. error_budget, error_evict, error_code, error_index: how much output error each level
    adds to the one before (card D11): an oracle over all tokens, over held ones, over these as they are stored, the policy. They sum to the
    mean rel_l2, and any but the first may be negative. error_estimate: what an estimate of evicted rows adds, where the chain has one."""
    best, held, own = (pl.col(n).cast(pl.Float64) for n in ("oracle_rel_l2", "oracle_held_rel_l2", "rel_l2"))
    estimate = pl.lit(None, pl.Float64)
    if "rel_l2_without" in heads.collect_schema():
        without = pl.col("rel_l2_without").cast(pl.Float64)
        estimate, own = own - without, pl.coalesce(without, own)
    coded = pl.coalesce(pl.col("oracle_coded_rel_l2").cast(pl.Float64), held)
    parts = {"error_budget": best, "error_evict": held - best, "error_code": coded - held, "error_index": own - coded}
    parts["error_estimate"] = estimate
    known = heads.filter(best.is_not_null())
    return _tall(known.group_by(UNIT).agg(x.mean().alias(n) for n, x in parts.items()))


PARTS = {  # of by_tier, and what is gone -> in words, in the order they stand on an area
    "sinks": "sinks",
    "recent": "recent window",
    "full": "history, full precision",
    "coded": "coded",
    "host": "on the host",
    "evicted": "gone for good",
}


def tiers_over_steps(by_tier: pl.LazyFrame, heads: pl.LazyFrame, together: int) -> pl.DataFrame:
    """-> policy, step, part (a value of PARTS), order, mass, error: dense attention by where its token is, and the output error, over contexts,
    layers and heads, `together` steps at a time; what a learned sink takes is in no part; sorted."""
    step = (pl.col("step") // together * together).alias("step")
    held = by_tier.group_by("policy", step).agg(pl.col(f"held_{c}").cast(pl.Float64).mean().alias(c) for c in CLASSES)
    mine = heads.join(by_tier.select("policy").unique(), on="policy", how="semi")
    gone = mine.group_by("policy", step).agg(
        evicted=pl.col("mass_evicted").cast(pl.Float64).mean(), error=pl.col("rel_l2").cast(pl.Float64).mean()
    )
    wide = held.join(gone, on=("policy", "step"))
    tall = wide.unpivot(on=list(PARTS), index=("policy", "step", "error"), variable_name="part", value_name="mass")
    return _worded(tall, PARTS).sort("policy", "step", "order").collect()


def without_tier(by_tier: pl.LazyFrame, heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, part (a value of PARTS, or "nothing left out"), order, error: the mean output error when one class is left out of what is read,
    over the steps and heads that read some of it; sorted."""
    left = by_tier.group_by("policy").agg(pl.col(f"without_{c}").cast(pl.Float64).mean().alias(c) for c in CLASSES)
    mine = heads.join(by_tier.select("policy").unique(), on="policy", how="semi")
    own = mine.group_by("policy").agg(pl.col("rel_l2").cast(pl.Float64).mean().alias("none"))
    tall = left.join(own, on="policy").unpivot(index="policy", variable_name="part", value_name="error").drop_nulls("error")
    return _worded(tall, {"none": "nothing left out"} | PARTS).sort("policy", "order").collect()


LEVELS = {  # of heads -> in words, in the order errors add up
    "oracle_rel_l2": "best read of all tokens",
    "oracle_held_rel_l2": "best read of what is held",
    "oracle_coded_rel_l2": "the same, as it is stored",
    "rel_l2": "the policy",
}


def error_levels(heads: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, part (a value of LEVELS), order, error: the mean output error at each level of card D11; no rows without --explain; sorted."""
    known = heads.filter(pl.col("oracle_rel_l2").is_not_null())
    means = known.group_by("policy").agg(pl.col(list(LEVELS)).cast(pl.Float64).mean())
    tall = means.unpivot(index="policy", variable_name="part", value_name="error").drop_nulls("error")
    return _worded(tall, LEVELS).sort("policy", "order").collect()


WHOSE = {
    "deployed": "the policy",
    "oracle": "oracle by attention so far",
    "oracle_interval": "oracle by attention since the last cut",
}


def returns(recurrence: pl.LazyFrame) -> pl.DataFrame:
    """-> policy, part (a value of WHOSE), order, dormancy, spells, share: of the spells outside the full tier that lasted, those that ended by
    a return; sums over contexts, layers and kv heads; sorted."""
    sums = recurrence.group_by("policy", "dormancy", part="set").agg(pl.col("returns", "spells").sum())
    found = sums.filter(pl.col("spells") > 0).with_columns(share=pl.col("returns") / pl.col("spells")).drop("returns")
    return _worded(found, WHOSE).sort("policy", "dormancy", "order").collect()


def _worded(frame: pl.LazyFrame, words: dict[str, str]) -> pl.LazyFrame:
    order = {name: i for i, name in enumerate(words)}
    return frame.with_columns(
        order=pl.col("part").replace_strict(order, return_dtype=pl.Int8),
        part=pl.col("part").replace_strict(words, return_dtype=pl.String),
    )


def _tall(wide: pl.LazyFrame) -> pl.LazyFrame:
    return wide.unpivot(index=UNIT, variable_name="metric", value_name="value").drop_nulls("value")
