"""Where a step's time comes from: for each class the fit, its terms in microseconds, and the files its samples came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.cost.form import UNITS, features
from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Kernels, table
from kvsim.cost.numbers import seconds
from kvsim.cost.plain import Fixed, step
from kvsim.cost.price import grouped, named, parts
from kvsim.cost.prices import BANDWIDTH, NONE, WHOLE, Prices


def explain(
    prices: Prices, policy: Fixed, heads: Geometry, lengths: Sequence[int], how: Kernels | None = None
) -> list[dict[str, Any]]:
    """The parts of one step, each with `how` it is priced, the `fit` (its key), `terms` {name: µs} and what the fit still `lacks`."""
    launches = table([step(policy, heads, lengths, how)], heads, prices.graph)
    found = {(r["class"], r["bytes"]): r for r in parts(prices, launches).drop("step").to_dicts()}
    out = []
    for (cls, bits, page, alone), rows in grouped(launches):
        source, fit = prices.source(cls, bits, page, alone)
        told = found[cls, rows["bytes"][0]] | {"how": source if source != NONE else named(source, None)}
        if fit is not None:
            terms = ("bytes",) if source in (WHOLE, BANDWIDTH) else tuple(fit.coefficients)
            spent = features(rows, terms, fit.l2_bytes)[0] * [fit.coefficients[t] for t in terms]
            told |= {"fit": fit.key, "terms": dict(zip(terms, map(float, spent), strict=True)), "lacks": fit.lacks}
        out.append(told)
    return out + [r for (cls, _), r in found.items() if cls == "rest"]


def lines(found: list[dict[str, Any]], inputs: Sequence[dict[str, Any]]) -> list[str]:
    """What `kvsim cost explain` says: a line a class, its terms below, then the files."""
    total = sum(r["us"] or 0.0 for r in found)
    binds = max(found, key=lambda r: r["us"] or 0.0)["class"]
    said = [f"{seconds(total)}, of which {binds} takes most"]
    for r in found:
        span = "no upper end" if r["high_us"] is None else f"{seconds(r['low_us'])} - {seconds(r['high_us'])}"
        size = f", {r['bytes'] / 1e6:.1f} MB in {r['n']} launches" if r["bytes"] else ""
        said.append(f"  {r['class']}: {seconds(r['us'])} [{span}] {r['grade']}, by {r['by']}{size}")
        if "terms" in r:
            said += [f"      {t}: {seconds(us)} ({UNITS[t]})" for t, us in r["terms"].items()]
            key = ", ".join(f"{k} {v}" for k, v in r["fit"].items() if v not in (None, "") and k not in ("class", "variant"))
            said += [f"      fit of {key}"] + ([f"      {r['lacks']}"] if r["lacks"] else [])
    files = [f"  {i['file']} sha256 {i['sha256'][:8]}: " + ", ".join(f"{n} {s}" for s, n in i["rows"].items()) for i in inputs]
    return said + ["samples:"] + files
