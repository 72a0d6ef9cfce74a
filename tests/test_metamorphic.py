"""What must not change when a trace is told differently: through the commands alone, from a dump to tables."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from kvsim.cli import main

HKV, GROUP, PROMPT, STEPS, DIM = 3, 2, 60, 9, 16
POLICIES = (
    "full()", "h2o(hold=tokens(24))", "tova(hold=tokens(24))", "streaming_llm(hold=tokens(24))", "snapkv(hold=tokens(24), window=4)",
    "oracle(read=tokens(16), page=4)", "quest(read=tokens(16), page=4)", "quest(read=tokens(16), page=4, heads='max')",
)  # fmt: skip
TABLES = ("ledger", "heads")
ROW = ["policy", "request", "layer", "step", "kv_head", "q_head"]


def dump(seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """A request as arrays; the last 4 prompt rows are observed."""
    rng, made = np.random.default_rng(seed), {"prompt_tokens": np.array(PROMPT), "scale": np.array(DIM**-0.5)}
    for i in range(layers):
        for name, heads, rows in (("q", HKV * GROUP, STEPS + 4), ("k", HKV, PROMPT + STEPS), ("v", HKV, PROMPT + STEPS)):
            made[f"layers.{i}.{name}"] = rng.normal(size=(heads, rows, DIM)).astype(np.float32)
        drawn = rng.exponential(size=(HKV * GROUP, PROMPT))
        made[f"layers.{i}.mass"] = (drawn / drawn.sum(1, keepdims=True) * PROMPT).astype(np.float32)
    return made


@pytest.fixture
def replayed(tmp_path):
    """Dumps -> the tables of their replay, by name; everything through the command line."""
    done = []

    def run(*dumps: dict[str, np.ndarray]) -> dict[str, pl.DataFrame]:
        done.append(1)
        files = []
        for i, arrays in enumerate(dumps):
            files.append(str(tmp_path / f"{len(done)}-{i}.npz"))
            np.savez(files[-1], **arrays)  # type: ignore[arg-type]
        trace, out = str(tmp_path / f"trace{len(done)}"), str(tmp_path / f"run{len(done)}")
        assert main(["trace", "convert", *files, "-o", trace]) == 0
        assert main(["replay", trace, "-p", *POLICIES, "-o", out, "--workers", "1"]) == 0
        return {name: pl.read_parquet(f"{out}/{name}.parquet").cast({"policy": pl.String}) for name in TABLES}

    return run


def changed(arrays: dict[str, np.ndarray], **how) -> dict[str, np.ndarray]:
    """The arrays called so in every layer, each through its function."""
    return {name: how.get(name.rpartition(".")[2], lambda x: x)(x) for name, x in arrays.items()}


def same(mine: pl.DataFrame, theirs: pl.DataFrame, rel: float = 0, at_most: float = 0) -> None:
    keys = [c for c in ROW if c in mine.columns]
    assert_frame_equal(mine.sort(keys), theirs.sort(keys), check_exact=not (rel or at_most), rel_tol=rel, abs_tol=at_most)


def test_kv_heads_in_another_order_are_rows_in_another_order(replayed):
    order = np.array([2, 0, 1])
    queries = (order[:, None] * GROUP + np.arange(GROUP)).ravel()
    plain = replayed(dump())["heads"]
    other = replayed(
        changed(dump(), q=lambda x: x[queries], mass=lambda x: x[queries], k=lambda x: x[order], v=lambda x: x[order])
    )["heads"]
    named = {
        c: pl.col(c).replace_strict(dict(enumerate(to.tolist()))).cast(plain[c].dtype)
        for c, to in (("q_head", queries), ("kv_head", order))
        if c in plain
    }
    same(plain, other.with_columns(**named), rel=1e-5, at_most=1e-6)  # a layer's sums over its heads are made in another order


def test_requests_are_told_by_what_is_in_them(replayed):
    a, b = dump(1), dump(2)
    for name, both in replayed(a, b).items():
        swapped, alone = replayed(b, a)[name], [replayed(x)[name] for x in (a, b)]
        same(both, swapped.with_columns(request=1 - pl.col("request")))
        same(both, pl.concat([alone[0], alone[1].with_columns(request=pl.lit(1, alone[1]["request"].dtype))]))


def test_a_prefix_of_a_trace_gives_a_prefix_of_its_tables(replayed):
    short = changed(dump(), q=lambda x: x[:, :-3], k=lambda x: x[:, :-3], v=lambda x: x[:, :-3])
    whole, part = replayed(dump()), replayed(short)
    for name in TABLES:
        same(whole[name].filter(pl.col("step") < STEPS - 3), part[name])


def test_values_twice_as_long_lose_the_same_part(replayed):
    plain, double = replayed(dump())["heads"], replayed(changed(dump(), v=lambda x: x * 2))["heads"]
    lengths = pl.col("out_bound", "out_bound_centred")
    same(plain.with_columns(lengths * 2), double)
    assert (plain.filter(pl.col("policy").str.starts_with("h2o"))["rel_l2"] > 0).all()


def test_turned_keys_and_queries_are_the_same_attention_but_not_the_same_boxes(replayed):
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(DIM, DIM)))[0].astype(np.float32)
    plain, turned = replayed(dump())["heads"], replayed(changed(dump(), q=lambda x: x @ turn, k=lambda x: x @ turn))["heads"]
    by_boxes = pl.col("policy").str.contains("quest")
    same(plain.filter(~by_boxes), turned.filter(~by_boxes), rel=1e-3, at_most=1e-5)
    keys = [c for c in ROW if c in plain.columns]
    gap = plain.sort(keys)["mass_recall"] - turned.sort(keys)["mass_recall"]
    assert gap.filter(plain.sort(keys)["policy"].str.contains("quest")).abs().max() > 0.01
