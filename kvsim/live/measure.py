"""What a decode says of every policy, as rows of answers, steps and layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from kvsim import tables
from kvsim.capture.prompt import FORCED, FREE, Prompt
from kvsim.live.decode import Decoded

Floats = NDArray[np.float64]
Say = Callable[[Sequence[int]], str]  # token ids -> text
FORCED_MODE, FREE_MODE = "forced", "free"


def answer_of(found: Decoded, prompt: Prompt, mode: str) -> NDArray[np.int64]:
    """i64[A, B]: answer tokens of every row. Free: what it was fed of its own; forced: its likeliest after the last token that the prompt feeds,
    and after each that full attention then says."""
    first = len(prompt.fed)
    if mode == FREE_MODE:
        return found.fed[first:]
    before = found.said[first - 1] if first else np.full(len(found.rows), found.first)
    return np.concatenate([before[None], found.said[first:-1]])


def divergence(answer: NDArray[np.int64]) -> list[int | None]:
    """Of every row of i64[A, B], the first answer token that is not row 0's."""
    apart = answer != answer[:, :1]
    return [int(x.argmax()) if x.any() else None for x in apart.T]


def answers_table(found: Decoded, prompt: Prompt, mode: str, sample: int, at: Mapping[str, Any], say: Say | None) -> pa.Table:
    """One row a policy. Forced: a row's text is full attention's up to where they diverge, then its own next token, and ends there; what it
    would have said further on only a free run tells."""
    answer = answer_of(found, prompt, mode)
    apart = divergence(answer)
    texts: list[str | None] = [None] * len(found.rows)
    if say is not None:
        ends = [None if mode == FREE_MODE or x is None else x + 1 for x in apart]
        texts = [say(answer[:end, b].tolist()) for b, end in enumerate(ends)]
    scores = [prompt.score(text) if text is not None and prompt.answers else None for text in texts]
    nll = _answer_nll(found, mode)
    return tables.table(
        "answers",
        dict(at)
        | {
            "policy": [row.id for row in found.rows],
            "mode": mode,
            "sample": sample,
            "answer_tokens": len(answer),
            "score": scores,
            "full_score": [scores[0]] * len(scores),
            "first_divergent": apart,
            "nll": nll,
            "full_nll": np.full(len(nll), nll[0]),
            "text": texts,
        },
        tables.ANSWERS,
    )


def _answer_nll(found: Decoded, mode: str) -> Floats:
    """f64[B]: mean -ln p of the answer's tokens, those that are fed or, in a forced run, full attention's own; NaN in a free run."""
    if mode == FREE_MODE:
        return np.full(len(found.rows), np.nan)
    roles = found.request.roles[found.request.prompt + 1 :]
    of = np.isin(roles, (FORCED, FREE))
    nll = found.nll[:-1][of]
    return nll.mean(0) if len(nll) else np.full(len(found.rows), np.nan)


def steps_table(found: Decoded, mode: str, sample: int, request: int) -> pa.Table:
    """One row a policy and step."""
    n, rows = found.kl.shape
    src = found.request
    each: dict[str, NDArray[Any]] = {
        "step": np.arange(n),
        "pos": np.arange(src.prompt, src.total),
        "role": src.roles[src.prompt :],
    }
    return tables.table(
        "steps",
        {
            "policy": np.repeat([row.id for row in found.rows], n),
            "request": request,
            "mode": mode,
            "sample": sample,
            "token": found.fed.T.ravel(),
            "said": found.said.T.ravel(),
            "kl": found.kl.T.ravel(),
            "top1_agree": (found.said == found.said[:, :1]).T.ravel(),
            "nll": found.nll.T.ravel(),
        }
        | {name: np.tile(x, rows) for name, x in each.items()},
        tables.STEPS,
    )


def layers_table(found: Decoded, request: int, twins: Sequence[Mapping[str, pa.Table]]) -> pa.Table:
    """One row a policy, layer and step; twins: of the policies after row 0 that ran open loop, too, by their order."""
    n, rows, src = len(found.fed), len(found.rows), found.request
    names = [row.id for row in found.rows]
    frame = pl.DataFrame(
        {
            "policy": np.tile(np.repeat(names, n), len(found.layers)),
            "request": np.full(len(found.layers) * n * rows, request, np.int32),
            "layer": np.repeat(np.array(found.layers, np.int16), n * rows),
            "step": np.tile(np.arange(n, dtype=np.int32), rows * len(found.layers)),
            "role": np.tile(src.roles[src.prompt :], rows * len(found.layers)),
        }
        | {
            name: x.swapaxes(1, 2).ravel()
            for name, x in (
                ("held_tokens", found.held),
                ("read_tokens", found.read),
                ("injected_tokens", found.injected),
                ("rel_l2", found.rel_l2),
                ("cosine", found.cosine),
            )
        }
    )
    heads = [_open(x["heads"]) for x in twins if "heads" in x]
    if heads:
        frame = frame.join(pl.concat(heads), on=["policy", "layer", "step"], how="left")
    found_columns = {
        name: frame[name].to_numpy() if frame[name].null_count() == 0 else frame[name].to_list() for name in frame.columns
    }
    return tables.table("layers", found_columns, tables.LAYER_STEPS)


def _open(heads: pa.Table) -> pl.DataFrame:
    """What a replay's heads say of a (policy, layer, step): means over query heads, sums of what evidence was looked at and read."""
    frame = pl.DataFrame(pl.from_arrow(heads)).with_columns(pl.col("policy").cast(pl.String))
    means = {
        "open_read_tokens": "read_tokens",
        "open_mass_recall": "mass_recall",
        "open_rel_l2": "rel_l2",
        "open_cosine": "cosine",
    }
    evidence = {"open_evidence_read": "evidence_read", "open_evidence_dense": "evidence_dense"}
    return frame.group_by("policy", "layer", "step").agg(
        *(pl.col(x).cast(pl.Float64).mean().alias(name) for name, x in means.items()),
        *(pl.when(pl.col(x).count() > 0).then(pl.col(x).cast(pl.Float64).sum()).alias(name) for name, x in evidence.items()),
    )
