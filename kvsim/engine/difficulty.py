"""How likely a query is covered too little, learned from its page scores; engine.stop has the features and applies what is learned.

For every level (a number of pages) one logistic regression gives P(dense mass on those pages < target | features); the rule reads the
first level at which that is small enough. The features are those of card A10: nothing that a device would have to attend for first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from kvsim.engine.attend import Dense, Past, blocks, steps_per_block, truth_of
from kvsim.engine.reads import Reader
from kvsim.engine.source import Source
from kvsim.engine.stop import features as features_of

Floats = NDArray[np.float64]

RIDGE = 1.0  # on standardised slopes: a prior that keeps separable data finite; on the intercept a thousandth of it


def coverage(source: Source, read: Any, head: int, levels: Sequence[int]) -> tuple[Floats, Floats]:
    """Of one kv head: features f64[N * G, L, F] and the dense mass f64[N * G, L] on the first `levels` pages of each query's order.

    read: a paged read over everything; pages at levels beyond those that exist are all of them."""
    reader, past = Reader(read, source, head, steps_per_block(source.layer.group)), Past(source, None, head)
    parts = list(_blocks(source, reader, past, head, np.array(levels)))
    features, covered = (np.concatenate(x) for x in zip(*parts, strict=True))
    return features, covered


def _blocks(source: Source, reader: Reader, past: Past, head: int, levels: NDArray[np.int64]) -> Iterator[tuple[Floats, Floats]]:
    for index in blocks(source, np.arange(len(source.steps))):
        block = Dense(source, head, index, keep=False)
        held = past.held(block)
        truth = truth_of(block, held, None, reader.read.index)
        told = reader.ordered(block.t, held.pos, held.flags, block.queries, truth)
        x, k = features_of(told, levels, block.t - source.request.prompt)
        n, group, pages = told.order.shape
        mass = block.page_mass(reader.read.page)[:, told.pages.id].reshape(n, group, pages)
        grown = np.cumsum(np.take_along_axis(mass, told.order.astype(np.int64), -1), -1)
        yield x.reshape(n * group, len(levels), -1), np.take_along_axis(grown, k - 1, -1).reshape(n * group, -1)


def fit(features: Floats, missed: NDArray[np.bool_]) -> Floats:
    """features f64[n, F], missed bool[n] -> weights f64[F + 1], the intercept last: maximum likelihood with a ridge on standardised slopes."""
    mean, size = features.mean(0), features.std(0)
    size = np.where(size > 0, size, 1.0)
    x = np.column_stack([(features - mean) / size, np.ones(len(features))])
    ridge = RIDGE * np.append(np.ones(x.shape[1] - 1), 1e-3)

    def loss(w: Floats) -> tuple[float, Floats]:
        z = x @ w
        p = 1 / (1 + np.exp(-z))
        return float(np.logaddexp(0, z).sum() - z[missed].sum() + (ridge * w * w).sum() / 2), x.T @ (p - missed) + ridge * w

    w = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
    return np.append(w[:-1] / size, w[-1] - (w[:-1] * mean / size).sum())
