"""Every budget of a fixed ranking from one sort: the curves of a read policy over everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.account import LEAST_MASS, relative
from kvsim.engine.attend import Dense, Held
from kvsim.engine.reads import Picked
from kvsim.kernels.buckets import bucket_values
from kvsim.kernels.order import accumulate, add_rows, places, top_growth, union_growth
from kvsim.kernels.product import times

TOP_R = (1, 10, 64)  # how many of the largest logits; only 10 has a percentile, which costs as much as all the means
KEPT = ("mass", "top10", "error")  # of every step, for percentiles; of the rest a sum is enough
COLUMNS = 128  # sorted at a time
GRID = 24  # budgets on which the output error is computed
FAINT = 2.0**-80  # below this part of the dense mass, float32 weights have lost some of what was read


def grid(pages: int) -> NDArray[np.int64]:
    """About GRID budgets from 1 to `pages`, evenly spaced in the logarithm; all of them when there are fewer."""
    if pages <= GRID:
        return np.arange(1, pages + 1)
    return np.unique(np.round(np.geomspace(1, pages, GRID)).astype(np.int64))


class Curves:
    """Collects the steps of one kv head; `rows` gives the table. Steps must come in order."""

    def __init__(self, page: int, budgets: int, row_bytes: int, heads: str = "each"):
        """heads: who of the group picks and who reads what (quest's parameter)."""
        self.page, self.budgets, self.row_bytes, self.heads = page, budgets, row_bytes, heads
        self.grid = grid(budgets)
        self.roles: list[NDArray[np.int8]] = []
        self.parts: dict[str, list[NDArray[np.float32]]] = {}  # what has percentiles
        self.sums: dict[tuple[int, str], NDArray[np.float64]] = {}  # of the rest, by role (-1: all steps)

    def add(self, block: Dense, held: Held, picked: Picked, wanted: NDArray[np.bool_], ranking: tuple[Any, ...]) -> None:
        """wanted bool[N]: the steps that are written. Policies of one ranking have one curve, whatever their budgets."""
        key = ("curve", self.budgets, *ranking)
        if key not in block.rankings:
            block.rankings[key] = self._measure(block, held, picked)
        src = block.source
        several, role = set(src.request.roles[src.t].tolist()), src.request.roles[block.t][wanted]
        self.roles.append(role)
        for name, x in block.rankings[key].items():
            x = x if wanted.all() else x[wanted]
            if name in KEPT:
                self.parts.setdefault(name, []).append(x)
            for one in (-1, *several) if len(several) > 1 else (-1,):
                total = self.sums.setdefault((one, name), np.zeros(x.shape[1:]))
                rows = x if one < 0 else x[role == one]
                add_rows(rows.reshape(len(rows), total.size), total.reshape(-1))

    def _measure(self, block: Dense, held: Held, picked: Picked) -> dict[str, NDArray[Any]]:
        """Every quantity at every budget: [N, G, K], of the union [N, K], of the step [N, ...]."""
        place = self._places(picked, block.group)
        n, group, p = place.shape
        by_row = place.reshape(n * group, p)
        found: dict[str, NDArray[Any]] = {}
        order, upto = self._joined(picked, place)
        for name, part in self._page_parts(block, p):
            out = np.empty((n * group, self.budgets), np.float32)
            accumulate(order, upto, part, out)
            found[name] = out.reshape(n, group, -1)
        top = np.empty((len(TOP_R), n * group, self.budgets), np.float32)
        top_growth(by_row, *block.top, picked.pages.of_slots(), np.array(TOP_R), top)
        found |= {f"top{r}": x.reshape(n, group, -1) for r, x in zip(TOP_R, top, strict=True)}
        found["error"] = self._errors(block, held, picked, by_row).reshape(n, group, -1)
        union, one = np.empty((2, 2, n, self.budgets), np.int32)
        union_growth(place, picked.rows, *union)
        union_growth(place[:, :1], picked.rows, *one)  # every head reads as many pages
        found |= {"read": one[0], "union": union[0], "tokens": union[1]}
        found["far_all"] = block.far_mass.reshape(n, group)
        if block.source.request.evidence:
            found["evidence_all"] = block.evidence_mass.reshape(n, group)
        return found

    def _places(self, picked: Picked, group: int) -> NDArray[np.int32]:
        """i32[N, G, P]: a head reads the pages at a place below its budget."""
        assert picked.order is not None
        place = np.empty(picked.order.shape, np.int32)
        places(picked.order, picked.forced.sum(1), place)
        if self.heads == "share":  # all heads read what any of them picked
            place = place.min(1, keepdims=True)
        return np.ascontiguousarray(np.broadcast_to(place, (len(place), group, picked.order.shape[-1])))

    def _joined(self, picked: Picked, place: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(i32[N, H, P], i64[N, K]): pages in the order in which they are read, and how many of them at each budget."""
        assert picked.order is not None
        if self.heads != "share":
            return picked.order, picked.joined(self.budgets)
        order = np.argsort(place[:, :1], axis=-1, kind="stable").astype(np.int32)
        at = np.take_along_axis(place[:, 0], order[:, 0].astype(np.int64), -1)
        return order, np.stack([np.searchsorted(x, np.arange(self.budgets), side="right") for x in at])

    def _page_parts(self, block: Dense, pages: int) -> Iterator[tuple[str, NDArray[Any]]]:
        """[R, P] of each quantity whose sum over read pages is a curve, one at a time: they are large."""
        size = self.page
        mass = block.page_mass32(size)[:, :pages]
        yield "mass", mass
        yield "far", _far_parts(block, mass, size)
        if block.source.request.evidence:
            yield "evidence", marked_parts(block, block.source.request.evidence_mask(), size, pages)

    def _errors(self, block: Dense, held: Held, picked: Picked, place: NDArray[np.int32]) -> NDArray[np.float32]:
        """f32[R, grid]: relative error of the output when the pages at a place i32[R, P] below each budget are read."""
        src, rows, pages = block.source, block.rows, place.shape[1]
        bucket = np.searchsorted(self.grid - 1, np.arange(pages)).astype(np.int32)[place]  # the first budget that reads the page
        dim = src.layer.value_dim
        sums, weight = np.zeros((rows, len(self.grid) + 1, dim)), np.zeros((rows, len(self.grid) + 1))
        bucket_values(
            held.dots, src.whole("v", block.head), block.first, block.t, picked.pages.start, bucket.reshape(len(block.t), block.group, pages),
            np.float32(src.unit), np.float32(src.cap), block.lse, sums, weight,
        )  # fmt: skip
        for i in range(len(self.grid)):
            sums[:, i + 1] += sums[:, i]
        z = weight.cumsum(1) + block.sink_mass[:, None]
        total, dense = sums, sums[:, -1] / z[:, -1, None]  # of all pages
        out = np.empty((rows, len(self.grid)), np.float32)
        for i in range(len(self.grid)):
            for r in np.flatnonzero(z[:, i] < FAINT).tolist():
                total[r, i], z[r, i] = _output(block, r, (bucket[r] <= i)[picked.pages.of_slots()]), 1.0
            out[:, i] = relative(total[:, i] / z[:, i, None], dense)
        return out

    def rows(self, q_head: int) -> list[dict[str, Any]]:
        """Columns per role (-1: all steps) of the query heads of this kv head; the first of them is q_head."""
        roles = np.concatenate(self.roles)
        found = sorted(set(roles.tolist()))
        every = self._summarise(-1, [np.ones(len(x), bool) for x in self.roles], q_head)
        if len(found) == 1:
            return [every, every | {"role": found[0]}]
        return [every, *(self._summarise(one, [x == one for x in self.roles], q_head) for one in found)]

    def _summarise(self, role: int, steps: list[NDArray[np.bool_]], q_head: int) -> dict[str, Any]:
        """steps: which of every block."""
        sums, many = {name: y for (of, name), y in self.sums.items() if of == role}, sum(int(x.sum()) for x in steps)
        group, k = len(sums["mass"]), np.arange(1, self.budgets + 1)

        def at(name: str, *which: float) -> NDArray[np.float64]:
            return percentiles([x if s.all() else x[s] for x, s in zip(self.parts[name], steps, strict=True)], which)

        def flat(y: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(y, (group, self.budgets)).ravel()

        def ratio(name: str) -> NDArray[np.float64]:
            part, below = sums[name], sums[f"{name}_all"][:, None]
            return np.divide(part, below, out=np.full(part.shape, np.nan), where=below >= LEAST_MASS)

        least, low, mid = at("mass", 0, 5, 50)
        error = np.full((2, group, self.budgets), np.nan)
        error[0][:, self.grid - 1] = sums["error"] / many
        error[1][:, self.grid - 1] = at("error", 95)[0]
        return {
            "q_head": np.repeat(np.arange(q_head, q_head + group), self.budgets),
            "role": role,
            "pages": flat(k),
            "tokens": flat(k * self.page),
            "read_pages_mean": flat(sums["read"] / many),
            "union_pages_mean": flat(sums["union"] / many),
            "read_bytes_mean": flat(sums["tokens"] / many * self.row_bytes),
            "mass_recall_mean": flat(sums["mass"] / many),
            "mass_recall_p5": flat(low),
            "mass_recall_p50": flat(mid),
            "mass_recall_min": flat(least),
            **{f"top{r}_recall_mean": flat(sums[f"top{r}"] / many) for r in TOP_R},
            "top10_recall_p5": flat(at("top10", 5)[0]),
            "far_recall": flat(ratio("far")),
            "evidence_recall": flat(ratio("evidence")) if "evidence_all" in sums else None,
            "rel_l2_mean": flat(error[0]),
            "rel_l2_p95": flat(error[1]),
        }


def percentiles(parts: list[NDArray[np.float32]], which: tuple[float, ...]) -> NDArray[np.float64]:
    """Parts [n, ...] of one array, cut along its first axis -> [len(which), ...]: percentiles over that axis, between two numbers on a line.

    Whole columns are sorted, a few at a time, which is seven times as fast as np.percentile."""
    flat = [x.reshape(len(x), -1) for x in parts if len(x)]
    n, width = sum(map(len, flat)), flat[0].shape[1]
    at = np.array(which) / 100 * (n - 1)
    low = at.astype(np.int64)
    high, part = np.minimum(low + 1, n - 1), at - low
    out, column = np.empty((len(which), width)), np.empty((COLUMNS, n), np.float32)
    for a in range(0, width, COLUMNS):
        some, first = column[: min(COLUMNS, width - a)], 0
        for x in flat:
            some[:, first : first + len(x)] = x[:, a : a + COLUMNS].T
            first += len(x)
        some.sort(axis=1)
        out[:, a : a + COLUMNS] = (some[:, low] * (1 - part) + some[:, high] * part).T
    return out.reshape(len(which), *parts[0].shape[1:])


def _output(block: Dense, row: int, read: NDArray[np.bool_]) -> NDArray[np.float64]:
    """f64[dv]: attention of one row over the positions it read, whatever their part of the dense mass."""
    i, src = row // block.group, block.source
    pos = np.flatnonzero(read[: block.t[i] + 1])
    pos = pos[pos >= block.first[i]]
    logit = src.bend(block.dots[pos, row].astype(np.float64))
    top = max(logit.max(), block.sink[row])
    weight = np.exp2(logit - top)
    values = src.whole("v", block.head)[pos].astype(np.float64)
    return times(weight[None], values)[0] / (weight.sum() + np.exp2(block.sink[row] - top))


def _far_parts(block: Dense, mass: NDArray[np.float32], size: int) -> NDArray[np.float64]:
    """f64[R, P]: of each page's dense mass what lies on far positions; only the pages at the two edges are counted by token."""
    low, high = block.far_range
    first, pages = np.arange(mass.shape[1]) * size, mass.shape[1]
    inside = (first >= low[:, None]) & (first + size <= high[:, None])
    edge = (first < high[:, None]) & (first + size > low[:, None]) & ~inside
    out = np.where(inside[:, None], mass.reshape(len(low), block.group, pages), np.float64(0))
    for p in np.flatnonzero(edge.any(0)):
        part = block.mass_between(np.maximum(low, p * size), np.minimum(high, (p + 1) * size)).reshape(len(low), -1)
        out[:, :, p] = np.where(edge[:, p, None], part, out[:, :, p])
    return out.reshape(mass.shape)


def marked_parts(block: Dense, mask: NDArray[np.bool_], size: int, pages: int) -> NDArray[np.float64]:
    """f64[R, P]: dense mass of each page's marked positions."""
    out = np.zeros((block.rows, pages))
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    for a, b in edges:
        for p in range(a // size, min(-(-b // size), pages)):
            low, high = max(a, p * size), min(b, (p + 1) * size)
            out[:, p] += block.mass_between(np.full(len(block.t), low), np.full(len(block.t), high))
    return out
