"""The scores of keeps and the cuts after prefill, written out token by token; part of tests.engine.twin."""

from __future__ import annotations

import math

import numpy as np

from tests import naive

ONCE = ("snapkv", "adakv", "pyramidkv", "criticalkv", "defensivekv")  # cut after prefill only
MASK = 2**64 - 1


# ------------------------------------------------------------------------------------------------ at every step
def scores(twin, i, t, weights):
    """[{position: score}] of every kv head, and the positions that are safe; i: the step's place, -1 after prefill."""
    keep, kind, live = twin.keep, twin.kind, twin.live
    recent = lambda n: {p for p in live[0] | live[-1] if p > t - n}  # noqa: E731
    if kind == "tova":
        mean = {p: sum(w.get(p, 0.0) for head in weights for w in head) / twin.lay.q_heads for p in live[0]}
        return [mean] * len(live), set()
    if kind == "knorm":
        return [{p: -math.sqrt(sum(float(x) ** 2 for x in twin.k[h][p])) for p in live[h]} for h in twin.heads_kv], {t}
    if kind == "random_keep":
        return [{p: lot(keep.seed, twin.src.request.id, twin.lay.id, h, p) for p in live[h]} for h in twin.heads_kv], {t}
    if kind == "oracle_keep":
        return [{p: twin.paid[i + 1 :, h, p].sum() for p in live[h]} for h in twin.heads_kv], {t}
    if i >= 0:
        for h in twin.heads_kv:
            for p in live[h]:
                fade = 1.0 if kind == "pools" else keep.decay
                twin.acc[h][p] = fade * twin.acc[h][p] + sum(w.get(p, 0.0) for w in weights[h])
                twin.asked[h][p] = fade * twin.asked[h][p] + 1
    if kind == "pools":
        pins = {p for s in twin.src.request.spans if keep.pinned in (s.label, s.kind) for p in range(s.start, s.stop)}
        return twin.acc, {*range(keep.sinks)} | recent(keep.recent) | pins
    limit = twin._limit(t)
    safe = {*range(keep.sinks)} | recent(max(1, math.floor(keep.recent * limit + 1e-9)))
    if keep.norm == "none":
        return twin.acc, safe
    return [{p: twin.acc[h][p] / max(1, twin.asked[h][p]) for p in live[h]} for h in twin.heads_kv], safe


def lot(*numbers):
    """splitmix64, chained over the numbers; the last one is hashed by itself before."""
    *numbers, position = numbers
    stream = 0
    for x in numbers:
        stream = splitmix(stream ^ x)
    return float(splitmix(stream ^ splitmix(position)) >> 11)


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


# ------------------------------------------------------------------------------------------------ once, after prefill
def window_cut(twin, t):
    """[positions left] of every kv head, by the attention of the last prompt queries."""
    keep, live, w = twin.keep, sorted(twin.live[0]), min(twin.keep.window, twin.prompt)
    past, recent = [p for p in live if p <= t - keep.window], {p for p in live if p > t - keep.window}
    rows = [own_window(twin, t - w + 1 + r, len(twin.src.window_q) - w + r) for r in range(w)]
    cut = {"criticalkv": critical, "defensivekv": defensive}.get(twin.kind, snap)
    return cut(twin, rows, past, recent, twin._limit(t))


def own_window(twin, t, row):
    """[q head]{position: attention} of one prompt query over what is live."""
    out, decode = [], twin.q
    twin.q = twin.src.window_q.astype(np.float64)
    for h in twin.heads_kv:
        for g in twin.group:
            seen = [p for p in twin.live[h] if twin.lay.first_visible(t) <= p <= t]
            out.append(dict.fromkeys(twin.live[h], 0.0) | twin._own(row, h, g, seen))
    twin.q = decode
    return out


def smoothed(values, kernel, pool="avg"):
    half, out = kernel // 2, []
    for i in range(len(values)):
        near = [values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]
        out.append(sum(near) / kernel if pool == "avg" else max(near))
    return out


def snap_scores(twin, rows, past):
    """[{position: score}] per kv head: summed over the window, pooled, the mean of the group."""
    found, group = [], len(twin.group)
    for h in twin.heads_kv:
        per = [
            smoothed([sum(r[h * group + g][p] for r in rows) for p in past], twin.keep.kernel, twin.keep.pool) for g in twin.group
        ]
        found.append({p: sum(x[i] for x in per) / group for i, p in enumerate(past)})
    return found


def snap(twin, rows, past, recent, limit):
    score = snap_scores(twin, rows, past)
    alpha = twin.keep.alpha if twin.kind == "adakv" else 1.0
    if getattr(twin.keep, "ada_mode", "mix") == "safeguard":
        sure = [top(twin, s, max(0, math.floor(limit * alpha + 1e-9) - len(recent))) for s in score]
        score = [{p: x + (99 if p in mine else 0) for p, x in s.items()} for s, mine in zip(score, sure, strict=True)]
        alpha = 0.0
    return [recent | top(twin, s, n) for s, n in zip(score, shared(twin, score, limit - len(recent), alpha), strict=True)]


def shared(twin, score, each, alpha, tied=frozenset()):
    """Rows per kv head: n_h (1 - alpha) + alpha B, whole by largest remainder."""
    total = min(each * len(score), sum(map(len, score)))
    flat = sorted((-x, h, p) for h, s in enumerate(score) for p, x in s.items())
    if alpha < 1 and 0 < total < len(flat) and not {p for *_, p in flat[total - 1 : total + 1]} <= tied:
        twin._rests_on(flat[total][0] - flat[total - 1][0], inexact=True)
    raw = [(1 - alpha) * sum(h == at for _, at, _ in flat[:total]) + alpha * total / len(score) for h in range(len(score))]
    whole = [math.floor(x + 1e-9) for x in raw]
    for h in sorted(range(len(raw)), key=lambda h: (-round(raw[h] - whole[h], 9), h))[: total - sum(whole)]:
        whole[h] += 1
    return whole


def critical(twin, rows, past, recent, limit):
    keep, group = twin.keep, len(twin.group)
    score = [{p: x / len(rows) for p, x in s.items()} for s in snap_scores(twin, rows, past)]
    norm = [
        {p: sum(float(twin.src.wo_norm[h * group + g, p]) for g in twin.group) / group for p in twin.live[h]}
        for h in twin.heads_kv
    ]
    if keep.compat:
        most = max((x for s in score for x in s.values()), default=0.0) + 1
        score = [s | dict.fromkeys(recent, most) for s in score]
    else:
        limit -= len(recent)
    tied = recent if keep.compat else set()  # by design, to the bit
    if keep.compat and keep.base == "adakv":
        sure = [top(twin, s, math.floor(limit * keep.alpha + 1e-9), tied) for s in score]
        lifted = [{p: x + (99 if p in mine else 0) for p, x in s.items()} for s, mine in zip(score, sure, strict=True)]
        budget = shared(twin, lifted, limit, 0.0, tied)
    else:
        sure, lifted = [set() for _ in score], score
        budget = shared(twin, score, limit, keep.alpha if keep.base == "adakv" else 1.0)
    out = []
    for s, mine, n, b in zip(lifted, sure, norm, budget, strict=True):
        first = mine | top(twin, s, math.floor(b * keep.first + 1e-9), tied)
        rest = {p: (x + keep.epsilon) * n[p] for p, x in s.items() if p not in first}
        out.append(first | top(twin, rest, b - len(first)) | (set() if keep.compat else recent))
    return out


def top(twin, score, many, tied=frozenset()):
    order = sorted(score, key=lambda p: (-score[p], p))
    if 0 < many < len(order) and not {*order[many - 1 : many + 1]} <= tied:
        twin._rests_on(score[order[many - 1]] - score[order[many]], inexact=True)
    return {*order[: max(0, many)]}


def defensive(twin, rows, past, recent, limit):
    keep, group, n = twin.keep, len(twin.group), len(past)
    worth, first = [], []
    for h in twin.heads_kv:
        worst = [0.0] * n
        for r in rows:
            for g in twin.group:
                plain = [r[h * group + g][p] for p in past]
                smooth = smoothed(plain, keep.kernel)
                for i, x in enumerate(smooth):
                    worst[i] = max(worst[i], x * sum(plain) / sum(smooth))
        least = sum(worst) / max(1, n)
        part = {p: sum(float(twin.src.wo_norm[h * group + g, p]) for g in twin.group) for p in past}
        of = {p: sum(float(x) for x in twin.src.wo_norm[:, p]) for p in past}
        worth.append({p: max(worst[i], least) * (part[p] / of[p] if of[p] else 0.0) for i, p in enumerate(past)})
        first.append(comes_first(twin, rows, h, past, recent, limit))
    most = max((x for w in worth for x in w.values()), default=0.0)
    if keep.compat:
        score = [
            {p: most if p in f else x for p, x in w.items()} | dict.fromkeys(recent, most)
            for w, f in zip(worth, first, strict=True)
        ]
        sizes = shared_ties(twin, score, limit)
        return [best(s, k) for s, k in zip(score, sizes, strict=True)]
    score = [{p: x + (1 if p in f else 0) for p, x in w.items()} for w, f in zip(worth, first, strict=True)]
    return [recent | best(s, k) for s, k in zip(score, shared_ties(twin, score, limit - len(recent)), strict=True)]


def shared_ties(twin, score, each):
    """Rows per kv head when the best of all of them are kept; equal scores, by design or from a floor, go to the lower head and position."""
    flat = sorted((-x, h, p) for h, s in enumerate(score) for p, x in s.items())
    total = min(max(0, each) * len(score), len(flat))
    if 0 < total < len(flat):
        twin._rests_on(flat[total][0] - flat[total - 1][0], inexact=False)
    return [sum(h == at for _, at, _ in flat[:total]) for h in range(len(score))]


def best(score, many):
    return {*sorted(score, key=lambda p: (-score[p], p))[:many]}


def comes_first(twin, rows, h, past, recent, limit):
    keep, group, n = twin.keep, len(twin.group), len(past)
    beside = past[-keep.window :] if keep.compat else sorted(recent)
    heads = [r[q] for r in rows for q in range(twin.lay.q_heads)]
    target = keep.cover - sum(a[p] for a in heads for p in beside) / len(heads)
    mean = [sum(r[h * group + g][p] for r in rows for g in twin.group) for p in past]
    order = sorted(range(n), key=lambda i: (-mean[i], i))
    many, mass = 0, 0.0
    reached = []
    for i in order:
        mass += mean[i] / sum(mean)
        twin._rests_on(mass - target, inexact=True)
        reached.append(mass >= target)
    if keep.compat:
        many = min(reached.index(True) if any(reached) else 0, int(n * limit / len(twin.live[h]) - keep.window))
    elif target > 0:
        many = min(reached.index(True) + 1 if any(reached) else n, max(0, limit - keep.window))
    chosen = order[:many]
    if 0 < len(chosen) < n:
        twin._rests_on(mean[chosen[-1]] - mean[order[len(chosen)]], inexact=True)
    return {past[i] for i in chosen}


def paid(twin):
    """f64[N, Hkv, T]: the dense attention of every decode step, summed over the group."""
    out = np.zeros((len(twin.src.t), len(twin.heads_kv), twin.src.request.total))
    for i, t in enumerate(twin.src.t.tolist()):
        for h in twin.heads_kv:
            for g in twin.group:
                x, lse = twin._dense(i, t, h, g)
                for p, y in x.items():
                    out[i, h, p] += 2.0 ** (y - lse)
    return out


def pyramid_limit(keep, hold, prompt, layer, among):
    """Card B9, real steps: the layer's tokens, whole by largest remainder over all layers."""
    base, count = hold - keep.window, len(among)
    low, high = base // keep.beta, 2 * base - base // keep.beta
    if high >= prompt - keep.window:
        low, high = 2 * base - (prompt - keep.window), prompt - keep.window
    if prompt < 2 * base or count == 1:
        low = high = base
    raw = [keep.window + high - (high - low) * j / max(1, count - 1) for j in range(count)]
    whole = [math.floor(x) for x in raw]
    for j in sorted(range(count), key=lambda j: (-round(raw[j] - whole[j], 9), j))[: hold * count - sum(whole)]:
        whole[j] += 1
    return whole[among.index(layer)]


__all__ = ["ONCE", "naive", "paid", "pyramid_limit", "scores", "window_cut"]
