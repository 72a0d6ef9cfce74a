"""Latent rows, which all heads of a layer share: captured expanded, billed as the cache holds them, from the capture to the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from kvsim.capture.run import capture
from kvsim.cost.launches import Kernels
from kvsim.cost.ledger import work
from kvsim.errors import WrongUse
from kvsim.metrics.run import open_run
from kvsim.replay.result import Run
from kvsim.replay.run import replay
from tests.capture import tiny

PROMPT, STEPS, HEADS = tiny.tokens(40), 9, 6
LATENT = tiny.LATENT["kv_lora_rank"] + tiny.LATENT["qk_rope_head_dim"]  # numbers of a row
MOST, INDEX_ROW = tiny.INDEX["index_topk"], tiny.INDEX["index_head_dim"] + 4  # bytes: fp8, and a scale
SEEN = [len(PROMPT) + 1 + i for i in range(STEPS)]
FAMILIES = ["deepseek_v3", "deepseek_v32"]
SIZES = {torch.bfloat16: 2, torch.float32: 4}


def replayed(
    tmp_path: Path, family: str, policies: str | list[str], dtype: torch.dtype = torch.bfloat16, plans: bool = False
) -> Run:
    capture(tiny.model(family, dtype), PROMPT, tmp_path / "t", steps=STEPS, k_pre=False)
    return replay(tmp_path / "t", policies, tmp_path / "run", strict=True, plans=plans)


def of_layers(run: Any) -> pl.DataFrame:
    """The ledger summed over kv heads."""
    ledger = pl.read_parquet(run.path / "ledger.parquet").with_columns(pl.col("policy").cast(pl.String))
    sums = [name for name in ledger.columns if name.endswith(("_bytes", "_tokens"))]
    return ledger.group_by("policy", "layer", "step").agg(pl.col(sums).sum()).sort("policy", "layer", "step")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", SIZES)
def test_a_row_costs_its_latent_and_its_rotary_key(tmp_path, family, dtype):
    row = LATENT * SIZES[dtype]
    ledger = of_layers(replayed(tmp_path, family, ["full()", "streaming_llm(hold=tokens(8))"], dtype))
    for (policy, _), found in ledger.group_by("policy", "layer"):
        rows = SEEN if str(policy).startswith("full") else [8] * STEPS
        assert found["resident_bytes"].to_list() == [row * n for n in rows]
        assert found["write_bytes"].to_list() == [row] * STEPS
        assert found["read_bytes"].to_list() == [row * n for n in (rows if rows == SEEN else [9] * STEPS)]


def test_what_an_indexer_chose_costs_latents_and_its_keys(tmp_path):
    row = LATENT * 2
    ledger = of_layers(replayed(tmp_path, "deepseek_v32", f"dsa(read=tokens({MOST}))"))
    for _, found in ledger.group_by("layer"):
        assert found["resident_bytes"].to_list() == [row * n for n in SEEN]
        assert found["read_bytes"].to_list() == found["page_bytes"].to_list() == [row * MOST] * STEPS
        assert found["write_bytes"].to_list() == [row + INDEX_ROW] * STEPS
        assert found["index_bytes"].to_list() == found["index_resident_bytes"].to_list() == [INDEX_ROW * n for n in SEEN]


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_read_apart_pay_for_the_union_of_their_rows(tmp_path, family):
    run = replayed(tmp_path, family, "quest(read=tokens(8), page=4)", plans=True)
    pages = pl.read_parquet(run.path / "plans.parquet").explode("pages").unique(["layer", "step", "pages"])
    live = pl.min_horizontal(4, len(PROMPT) + pl.col("step") + 1 - 4 * pl.col("pages"))
    union = pages.group_by("layer", "step").agg(live.sum().alias("rows"), pl.len().alias("pages")).sort("layer", "step")
    found = of_layers(run)
    assert found["read_bytes"].to_list() == (union["rows"] * LATENT * 2).to_list()
    assert found["page_bytes"].to_list() == (union["pages"] * 4 * LATENT * 2).to_list()
    assert (found["read_bytes"] * HEADS > found["read_tokens"] * LATENT * 2).any()  # more than the parts of heads


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_keep_apart_hold_the_union_of_their_rows(tmp_path, family):
    run = replayed(tmp_path, family, "snapkv(hold=tokens(12), window=4)")
    tiers = pl.read_parquet(run.path / "tiers.parquet").filter(pl.col("step") == -1).explode("runs").unnest("runs")
    kept = tiers.filter(pl.col("tier") == 2).with_columns(pos=pl.int_ranges("start", "stop")).explode("pos")
    union = kept.group_by("layer").agg(pl.col("pos").n_unique().alias("rows")).sort("layer")["rows"].to_list()
    for (_, found), rows in zip(of_layers(run).group_by("layer", maintain_order=True), union, strict=True):
        assert rows > 12
        assert found["resident_bytes"].to_list() == [LATENT * 2 * (rows + 1 + i) for i in range(STEPS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_priced_by_the_bytes_of_latents(tmp_path, family):
    policies = ["full()", "snapkv(hold=tokens(12), window=4)", "quest(read=tokens(8), page=4)"]
    run = open_run(replayed(tmp_path, family, policies).path)
    found = work(run.about, run.ledger, run.tables["events"], Kernels())
    ledger = of_layers(open_run(run.path)).group_by("policy", "step").agg(pl.col("read_bytes", "page_bytes").sum())
    steps = found.steps.join(ledger, left_on=["policy", "at"], right_on=["policy", "step"])
    launched = found.launches.join(steps.select("step", "read_bytes", "page_bytes"), on="step")
    beside = 2 * HEADS * (tiny.LATENT["qk_nope_head_dim"] + tiny.LATENT["qk_rope_head_dim"] + tiny.LATENT["v_head_dim"]) * 2
    attends = launched.filter(pl.col("class").is_in(["dense_attn", "gather_attn"]))
    assert attends.height == 3 * STEPS
    rows = pl.when(pl.col("page_bytes") > 0).then("page_bytes").otherwise("read_bytes")
    assert attends["bytes"].to_list() == attends.select(rows + beside).to_series().to_list()
    assert {*attends["kv_bits"]} == {16}
    assert (launched.filter(pl.col("class") == "summary_update")["bytes"] > 0).all()
    assert not launched.filter(pl.col("class") == "summary_update", pl.col("page_bytes") == 0).height
    assert found.notes == [
        "latent rows are priced by their bytes, as kernels of plain K and V read them: no kernel of latents was measured"
    ]


def test_rows_are_the_same_whatever_else_is_replayed(tmp_path):
    policies = ["snapkv(hold=tokens(12), window=4)", "quest(read=tokens(8), page=4)"]
    whole = pl.read_parquet(replayed(tmp_path, "deepseek_v32", policies).path / "ledger.parquet").with_columns(
        pl.col("policy").cast(pl.String)
    )
    for i, policy in enumerate(policies):
        some = replay(tmp_path / "t", policy, tmp_path / f"some{i}", steps=[3, 7], layers=[1]).path / "ledger.parquet"
        mine = pl.read_parquet(some).with_columns(pl.col("policy").cast(pl.String))
        name, keys = mine["policy"][0], ["kv_head", "step"]
        same = whole.filter(pl.col("policy") == name, pl.col("layer") == 1, pl.col("step").is_in([3, 7]))
        assert mine.height == 2 * HEADS
        assert mine.sort(keys).equals(same.sort(keys))


@pytest.mark.parametrize("policy", ["kivi()", "offload(device=share(0.5)) >> quest(read=pages(2))"])
def test_codes_and_moves_of_single_heads_are_refused(tmp_path, policy):
    with pytest.raises(WrongUse, match="codes or moves K and V of one head: this layer keeps latents"):
        replayed(tmp_path, "deepseek_v3", policy)
