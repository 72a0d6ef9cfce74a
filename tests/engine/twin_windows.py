"""The cut of qevict written out, one window at a time; part of the engine's twin."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tests import naive


class Windows:
    """What tests.engine.twin.Twin does for a keep that ranks windows."""

    def _together(self):
        """Lists of kv heads that share their decisions."""
        return [[h] for h in self.heads_kv] if self.keep.scope == "head" else [[*self.heads_kv]]

    def _window(self, p):
        first = self.keep.sinks + self.keep.offset
        return (p - first) // self.keep.window if p >= first else None

    def _old(self, p, t):
        """Whether all of the window that p is in is older than the recent tokens."""
        w, first = self._window(p), self.keep.sinks + self.keep.offset
        return w is not None and first + (w + 1) * self.keep.window <= t + 1 - self.keep.recent

    def born(self, t):
        """Where the scores of the prompt's windows start."""
        keep, paid = self.keep, self._prompt_paid(t)
        for heads in self._together():
            for p in self.live[heads[0]]:
                w = self._window(p)
                inside = w is not None and keep.sinks + keep.offset + (w + 1) * keep.window <= self.prompt
                mean = sum(paid[h, g][p] for h in heads for g in self.group) / (len(heads) * len(self.group))
                for h in heads:
                    self.acc[h][p] = mean if inside else 0.0

    def _prompt_paid(self, t):
        """{(kv head, query head of its group): {position: what `period` prompt queries paid}}."""
        keep, heads = self.keep, [(h, g) for h in self.heads_kv for g in self.group]
        paid = {at: dict.fromkeys(self.live[at[0]], 0.0) for at in heads}
        if keep.init == "column":
            for h, g in heads:
                mass = self.src.mass[h * len(self.group) + g]
                paid[h, g] = {p: float(mass[p]) / (t + 1 - p) * keep.period for p in self.live[h]}
        rows = {"last": keep.period, "window": max(1, keep.recent)}.get(keep.init, 0)
        rows, decode = min(rows, self.prompt), self.q
        for r in range(rows):
            self.q, end = self.src.window_q[len(self.src.window_q) - rows + r].astype(np.float64)[None], self.prompt - rows + r
            for h, g in heads:
                for p, a in self._own(0, h, g, [p for p in sorted(self.live[h]) if p <= end]).items():
                    paid[h, g][p] += a * (keep.period / rows if keep.init == "window" else 1)
        self.q = decode
        return paid

    def route(self, step, t, weights):
        """After a step -> bytes that encoding wrote, per kv head."""
        keep, due = self.keep, (step + 1) % self.keep.period == 0
        for heads in self._together():
            for p in self.live[heads[0]]:
                old = self._old(p, t)
                paid = sum(weights[h][g].get(p, 0.0) for h in heads for g in self.group) / (len(heads) * len(self.group))
                for h in heads:
                    self.fresh[h][p] += paid if old or keep.score_from == "birth" else 0.0
                    if due and old:
                        self.acc[h][p], self.fresh[h][p] = keep.decay * self.acc[h][p] + self.fresh[h][p], 0.0
        return self.cut_windows(t) if due else [0] * len(self.heads_kv)

    def cut_windows(self, t):
        """The cut: the best windows full, the next coded, the rest gone -> bytes that encoding wrote, per kv head."""
        keep, lay, new = self.keep, self.lay, [0] * len(self.heads_kv)
        code = (lay.key_dim + lay.value_dim) * keep.bits / 8 + 4 * lay.key_dim / keep.window + 4
        for heads in self._together():
            held = sorted(self.live[heads[0]])
            windows = {}
            for p in held:
                if self._old(p, t):
                    windows.setdefault(self._window(p), []).append(p)
            score = {w: sum(self.acc[heads[0]][p] for p in rows) for w, rows in windows.items()}
            left = (self._limit(t) - (len(held) - sum(map(len, windows.values())))) * lay.row_bytes
            longest = max(map(len, windows.values()), default=1)
            many = lambda part, cost: max(0, math.floor(part * left / (cost * longest) + 1e-9))  # noqa: B023, E731
            order = sorted(windows, key=lambda w: (-score[w], w))
            for a, b in pairwise(order):
                self._rests_on(score[a] - score[b], inexact=score[a] != 0)
            may_be_full = [w for w in order if keep.promotion != "never" or windows[w][0] not in self.coded[heads[0]]["k"]]
            full = may_be_full[: many(1 - keep.quant_share, lay.row_bytes)]
            coded = [w for w in order if w not in full][: many(keep.quant_share, code)]
            for w, rows in windows.items():
                for h in heads:
                    new[h] += self._retier(h, rows, "full" if w in full else "coded" if w in coded else "gone")
        codes = [n * lay.key_dim * keep.bits // 8 + n * lay.value_dim * keep.bits // 8 for n in new]
        return [c + n // keep.window * 4 * lay.key_dim + n * 4 for c, n in zip(codes, new, strict=True)]

    def _retier(self, h, rows, tier):
        """Rows of one window -> how many of them had to be encoded."""
        lay, keep, coded = self.lay, self.keep, self.coded[h]
        if tier == "gone":
            for p in rows:
                self._drop(h, p)
        elif tier == "full":
            for p in [p for p in rows if p in coded["k"]]:  # as its codes decode, unless a host copy has the original
                self.kept[h][p] = coded["k"].pop(p)[0]
                del coded["v"][p]
                if keep.promotion == "shadow":
                    self.live[h][p] = self.k[h][p], self.v[h][p]
        elif rows[0] not in coded["k"]:
            known = [self.kept[h].pop(p) for p in rows if p in self.kept[h]]
            pre = self.src.rows("k_pre" if lay.rope else "k", h, np.array(rows))
            dim = lay.key_dim * keep.bits, lay.value_dim * keep.bits
            self._put(h, "k", rows, self._by_channel(pre, keep.bits), dim[0], 0, 4 * lay.key_dim)
            for p in rows:
                self._put(h, "v", [p], [naive.minmax_roundtrip(self.v[h][p].tolist(), keep.bits)], dim[1], 4, 0)
            return 0 if known else len(rows)
        return 0

    def kept_bytes(self, h):
        """Codes and scales beside full rows."""
        kept, lay, bits = self.kept[h], self.lay, getattr(self.keep, "bits", 0)
        codes = len(kept) * lay.key_dim * bits // 8 + len(kept) * lay.value_dim * bits // 8
        return codes + len({*kept.values()}) * 4 * lay.key_dim + len(kept) * 4
