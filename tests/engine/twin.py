"""The engine written out: one step, one head, one token at a time, in float64, straight from docs/definitions.md.

Slow on purpose. It takes a chain only for its parameters; no policy, kernel or engine code runs here."""

from __future__ import annotations

import math

import numpy as np

from tests import naive
from tests.engine import twin_keeps
from tests.engine.twin_windows import Windows

LOG2E, NO_SINK = math.log2(math.e), -1e300
FAR_FIRST, FAR_LAST = 4, 64


class Twin(Windows):
    """ledger[i][h] and heads[i][q]: a row each as a dict. held[i][h]: {position: "full" | "coded"} after step i; read[i][q]: positions;
    pages[i][q]: pages. margin: the smallest difference that a decision rested on; below some 1e-12 nobody can say who is right.
    largest: of all logits."""

    def __init__(self, source, chain):
        self.src, self.lay, self.prompt = source, source.layer, source.request.prompt
        self.keep, self.store, self.policy = (chain.part(kind) for kind in ("keep", "store", "read"))
        self.kind = type(self.keep).__name__
        total = np.arange(source.request.total)
        self.heads_kv, self.group = range(self.lay.kv_heads), range(self.lay.group)
        self.k, self.v = ([source.rows(side, h, total) for h in self.heads_kv] for side in "kv")
        self.q = source.q.astype(np.float64)
        self.margin, self.largest = math.inf, 1.0
        self.ledger, self.heads, self.held, self.read, self.pages = [], [], [], [], []
        self.live = [{} for _ in self.heads_kv]  # kv head -> {position: the row's key and value as attention sees them}
        self.acc, self.asked = [{} for _ in self.heads_kv], [{} for _ in self.heads_kv]
        self.coded = [{"k": {}, "v": {}} for _ in self.heads_kv]  # kv head -> side -> {position: what its code costs}
        self.kept = [{} for _ in self.heads_kv]  # kv head -> {position: its window} of full rows whose codes are kept beside
        self.fresh = [{} for _ in self.heads_kv]
        self.salience = {}  # of prompt rows, by (kv head, position)
        self.ranked_at, self.sets = None, [[set() for _ in self.group] for _ in self.heads_kv]
        self._run()

    def _run(self):
        for p in range(self.lay.first_visible(self.prompt - 1), self.prompt):
            self._append(p)
        self._probe()
        self._first_cut()
        self._code()
        last = self.prompt - 1
        for i, t in enumerate(self.src.t.tolist()):
            for p in range(last + 1, t + 1):
                self._append(p)
            last = t
            for h in self.heads_kv:
                for p in [p for p in self.live[h] if p < self.lay.first_visible(t)]:
                    self._drop(h, p)
            self._step(i, t)

    def _append(self, p):
        for h in self.heads_kv:
            self.live[h][p] = self.k[h][p], self.v[h][p]
            self.acc[h][p] = self.asked[h][p] = self.fresh[h][p] = 0.0

    def _drop(self, h, p):
        coded = self.coded[h]["k"], self.coded[h]["v"]
        for book in (self.live[h], self.acc[h], self.asked[h], self.fresh[h], self.kept[h], *coded):
            book.pop(p, None)

    # ------------------------------------------------------------------------------------------------ one step
    def _step(self, i, t):
        picked = [self._pick(i, t, h) for h in self.heads_kv]
        reads = [[sorted(p for p in self.live[h] if p // size in pages) for pages in picked[h][0]] if (size := self.policy.page)
                 else [sorted(self.live[h]) for _ in self.group] for h in self.heads_kv]  # fmt: skip
        weights = [[self._own(i, h, g, reads[h][g]) for g in self.group] for h in self.heads_kv]
        self.heads.append([self._head(i, t, h, g, reads[h][g], picked[h]) for h in self.heads_kv for g in self.group])
        rows = [self._read_row(t, h, reads[h], picked[h]) for h in self.heads_kv]
        before = [set(self.live[h]) for h in self.heads_kv]
        routed = self.route(int(self.src.steps[i]), t, weights) if self.kind == "qevict" else None
        self._cut(i, t, weights)
        again = [self._rebuilt(before[h], set(self.live[h])) for h in self.heads_kv]
        coded = self._code(weights, int(self.src.steps[i])) if routed is None else routed
        self.ledger.append(
            [
                rows[h]
                | self._held_row(t, h)
                | {"write_bytes": self.lay.row_bytes + self._index_bytes() * (1 + again[h]) + coded[h]}
                for h in self.heads_kv
            ]
        )
        self.held.append([{p: "coded" if p in self.coded[h]["k"] else "full" for p in self.live[h]} for h in self.heads_kv])
        self.read.append([reads[h][g] for h in self.heads_kv for g in self.group])
        self.pages.append([sorted(pages) for h in self.heads_kv for pages in (picked[h][0] or [])])

    def _logit(self, i, h, g, key):
        """In powers of 2, soft-capped."""
        x = float(
            naive.bent(self.q[i, h * len(self.group) + g] @ key * self.lay.scale * LOG2E, 1.0, (self.lay.softcap or 0) * LOG2E)
        )
        self.largest = max(self.largest, abs(x))
        return x

    def _sink(self, h, g):
        return NO_SINK if self.lay.sinks is None else self.lay.sinks[h * len(self.group) + g] * LOG2E

    def _own(self, i, h, g, read):
        """{position: attention} over what was read, as stored."""
        x = {p: self._logit(i, h, g, self.live[h][p][0]) for p in read}
        z = naive.log_sum([*x.values()], self._sink(h, g))
        return {p: 2.0 ** (y - z) for p, y in x.items()}

    def _dense(self, i, t, h, g):
        """{position: logit} of all visible tokens, and their log sum with the sink."""
        x = {p: self._logit(i, h, g, self.k[h][p]) for p in range(self.lay.first_visible(t), t + 1)}
        return x, naive.log_sum([*x.values()], self._sink(h, g))

    # ------------------------------------------------------------------------------------------------ read
    def _visible(self, t):
        return t + 1 - self.lay.first_visible(t)

    def _tokens(self, budget, t):
        name = type(budget).__name__
        of = {"visible": self._visible(t), "prompt": self.prompt, "total": self.src.request.total}
        return (
            budget.n
            if name == "tokens"
            else math.floor(budget.x * of[budget.of] + 1e-9)
            if name == "share"
            else int(budget.bytes / self.lay.row_bytes)
        )

    def _pick(self, i, t, h):
        """(pages of every query head, their scores {page: score} or None, pages scanned, rounds) of one kv head."""
        read, size = self.policy, self.policy.page
        if size is None:
            return None, None, 0, 1
        there = sorted({p // size for p in self.live[h]})
        k = read.read.n if type(read.read).__name__ == "pages" else max(1, self._tokens(read.read, t) // size)
        step = int(self.src.steps[i])
        if i and not (step == 0 if read.refresh == "never" else step % read.refresh == 0):
            old = [s | {p for p in there if p * size > self.ranked_at} for s in self.sets[h]]
            return [{p for p in s if p in there} or {there[-1]} for s in old], None, 0, 0
        forced = {p for p in there if self._forced(p, t)}
        score = [{p: self._score(i, h, g, p) for p in there} for g in self.group]
        sets = [{*there}] * len(self.group) if k >= len(there) else self._sets(score, there, forced, k)
        self.sets[h], self.ranked_at = sets, t
        return sets, score, len(there) if k < len(there) and read.index else 0, 1

    def _forced(self, p, t):
        size, read = self.policy.page, self.policy
        positions = range(p * size, (p + 1) * size)
        recent = range(max(0, t + 1 - read.recent), t + 1)
        return (read.tail == "forced" and t in positions) or p * size < read.sinks or bool({*positions} & {*recent})

    def _score(self, i, h, g, p):
        """How high a page ranks."""
        name, size = type(self.policy).__name__, self.policy.page
        rows = [x for x in sorted(self.live[h]) if x // size == p]
        if name == "recency":
            return float(p)
        if name == "oracle":
            x = [self._logit(i, h, g, self.k[h][r]) for r in rows]
            return max(x) if self.policy.by == "logit" else naive.log_sum(x, NO_SINK)
        return float(
            naive.box_bound(self.q[i, h * len(self.group) + g], *naive.box_corners(self.k[h][rows], self.policy.index.n))
        )

    def _sets(self, score, there, forced, k):
        """The pages of every query head when not all can be read."""
        mode, unit = self.policy.heads, self.lay.scale
        if mode in ("each", "share"):
            sets = [self._best(s, there, forced, k) for s in score]
            return sets if mode == "each" else [set().union(*sets)] * len(sets)
        if mode == "split":
            return [self._split(score, there, forced, k)] * len(score)
        if mode == "softmax_mean":
            soft = [{p: math.exp((s[p] - max(s.values())) * unit) for p in there} for s in score]
            score = [{p: s[p] / sum(s.values()) for p in there} for s in soft]
        join = max if mode == "max" else lambda x: sum(x) / len(x)
        return [self._best({p: join([s[p] for s in score]) for p in there}, there, forced, k, mode != "max")] * len(score)

    def _best(self, score, there, forced, k, inexact=False):
        """The forced pages and the best of the others, k in all, ties to the lower page."""
        order = sorted(there, key=lambda p: (p not in forced, -score[p] if p not in forced else 0, p))
        many = max(k, len(forced))
        if len(forced) <= many < len(order) and many > len(forced):
            self._rests_on(score[order[many - 1]] - score[order[many]], inexact or getattr(self.policy, "by", "") == "mass")
        return {*order[:many]}

    def _split(self, score, there, forced, k):
        out = {*forced}
        ranks = [sorted((p for p in there if p not in forced), key=lambda p, s=s: (-s[p], p)) for s in score]
        wishes = [ranks[g][r] for r in range(self.policy.private) for g in self.group if r < len(ranks[g])]
        best = {p: max(s[p] for s in score) for p in there}
        for p in wishes + sorted(there, key=lambda p: (-best[p], p)):
            if len(out) < k:
                out.add(p)
        return out

    def _rests_on(self, gap, inexact):
        """Exact scores may tie; sums of exponentials that tie may as well not."""
        if gap != 0 or inexact:
            self.margin = min(self.margin, abs(gap))

    # ------------------------------------------------------------------------------------------------ keep and store
    def _limit(self, t):
        limit = max(1, self._tokens(self.keep.hold, t))
        if self.kind == "pyramidkv":
            return twin_keeps.pyramid_limit(self.keep, limit, self.prompt, self.lay.id, self.lay.among)
        return limit

    def _first_cut(self):
        t = self.prompt - 1
        if self.kind in twin_keeps.ONCE:
            for h, keep in enumerate(twin_keeps.window_cut(self, t)):
                for p in [p for p in self.live[h] if p not in keep]:
                    self._drop(h, p)
            return
        if self.kind == "pools" or (self.kind == "h2o" and self.keep.prefill == "captured"):
            for h in self.heads_kv:
                for p in self.acc[h]:
                    self.acc[h][p] = sum(float(self.src.mass[h * len(self.group) + g, p]) for g in self.group)
                    self.asked[h][p] = self.prompt - p
        last = self.src.window_q[-1].astype(np.float64)
        self.q, decode = last[None], self.q
        weights = (
            [[self._own(0, h, g, sorted(self.live[h])) for g in self.group] for h in self.heads_kv]
            if self.kind == "tova"
            else None
        )
        self.q = decode
        self.paid = twin_keeps.paid(self) if self.kind == "oracle_keep" else None
        self._cut(-1, t, weights)
        if self.kind == "qevict":
            self.born(t)
            self.cut_windows(t)

    def _cut(self, i, t, weights):
        if self.kind in ("full", "qevict") or self.kind in twin_keeps.ONCE:
            return
        limit = self._limit(t)
        score, safe = (None, None) if self.kind == "streaming_llm" else twin_keeps.scores(self, i, t, weights)
        for h in self.heads_kv:
            if self.kind == "streaming_llm":
                keep = {p for p in self.live[h] if p < self.keep.sinks or p > t - (limit - self.keep.sinks)}
            else:
                keep = self._heaviest(score[h], safe & {*self.live[h]}, limit)
            for p in [p for p in self.live[h] if p not in keep]:
                self._drop(h, p)

    def _heaviest(self, score, safe, limit):
        order = sorted(score, key=lambda p: (p not in safe, -score[p], p))
        if len(safe) < limit < len(order):
            last, next_ = score[order[limit - 1]], score[order[limit]]
            self._rests_on(last - next_, inexact=last != 0)
        return {*order[: max(limit, len(safe))]}

    def _code(self, weights=None, step=-1):
        """The store over the tokens still held -> bytes that encoding wrote, per kv head."""
        written = [0] * len(self.heads_kv)
        if self.store is not None:
            for h in self.heads_kv:
                written[h] = getattr(self, f"_{type(self.store).__name__}")(h, weights, step)
        return written

    def _put(self, h, side, rows, back, bits, own, shared):
        """Rows that were encoded together, decoded numbers [n, d]; bits a row, bytes of metadata of each and of all -> bytes written."""
        for p, x in zip(rows, back, strict=True):
            key, value = self.live[h][p]
            x = np.float64(np.float32(x))
            self.live[h][p] = (x, value) if side == "k" else (key, x)
            self.coded[h][side][p] = rows[0], bits, own, shared
        return len(rows) * (bits + 8 * own) // 8 + shared if rows else 0

    def _kivi(self, h, weights, step):
        s, lay, held = self.store, self.lay, sorted(self.live[h])
        waiting, written = [p for p in held if p not in self.coded[h]["k"]], 0
        waiting = waiting[: len(waiting) // s.residual * s.residual] if s.k_bits < 16 else []
        for a in range(0, len(waiting), s.group):
            rows = waiting[a : a + s.group]
            self._put(h, "k", rows, self._by_channel(self.k[h][rows], s.k_bits), lay.key_dim * s.k_bits, 0, 4 * lay.key_dim)
        written += len(waiting) * lay.key_dim * s.k_bits // 8 + len(waiting) // s.group * 4 * lay.key_dim
        older = [p for p in held[: max(0, len(held) - s.residual)] if p not in self.coded[h]["v"] and s.v_bits < 16]
        scales = 4 * -(-lay.value_dim // s.group)
        for p in older:
            parts = [self.v[h][p, c : c + s.group].tolist() for c in range(0, lay.value_dim, s.group)]
            back = [x for part in parts for x in naive.minmax_roundtrip(part, s.v_bits)]
            self._put(h, "v", [p], [back], lay.value_dim * s.v_bits, 0, scales)
        return written + len(older) * lay.value_dim * s.v_bits // 8 + len(older) * scales

    def _fp8(self, h, weights, step):
        s, held, written = self.store, sorted(self.live[h]), 0
        for side, exact, bits in (("k", self.k[h], s.k_bits), ("v", self.v[h], s.v_bits)):
            for p in [p for p in held[: max(0, len(held) - s.residual)] if p not in self.coded[h][side] and bits < 16]:
                scale = float(np.float32(np.abs(exact[p]).max() / 448)) or 1.0 if s.scale == "token" else 1.0
                back = [naive.nearest_e4m3(x / scale) * scale for x in exact[p]]
                written += self._put(h, side, [p], [back], 8 * len(back), 4 if s.scale == "token" else 0, 0)
        return written

    def _zipcache(self, h, weights, step):
        s, written = self.store, 0
        if step < 0:
            n = self._visible(self.prompt - 1)
            first, probes = self.prompt - n, n if s.probes == "columns" else min(s.window, self.prompt)
            score = {
                p: self.salience[h, p] / (n - (p - first) if s.divisor == "tokens" else min(self.prompt - p, probes))
                for p in self.live[h]
            }
        elif (step + 1) % s.period:
            return 0
        else:
            score = {p: sum(weights[h][g].get(p, 0.0) for g in self.group) for p in self.live[h] if p not in self.coded[h]["k"]}
        order = sorted(score, key=lambda p: (-score[p], p))
        low = math.floor(s.unimportant * len(order) + 1e-9)
        if 0 < low < len(order):
            self._rests_on(score[order[-low - 1]] - score[order[-low]], inexact=score[order[-low]] != 0)
        for rows, bits in ((sorted(order[: len(order) - low]), s.high), (sorted(order[len(order) - low :]), s.low)):
            if not rows:
                continue
            lay, values = self.lay, self.v[h][rows]
            written += self._put(h, "k", rows, self._by_channel(self.k[h][rows], bits), lay.key_dim * bits, 0, 4 * lay.key_dim)
            scale = [float(np.float16(math.sqrt(max(abs(x) for x in column)))) or 1.0 for column in values.T]
            back = [np.array(naive.minmax_roundtrip((row / scale).tolist(), bits)) * scale for row in values]
            written += self._put(h, "v", rows, back, lay.value_dim * bits, 4, 2 * lay.value_dim)
        return written

    def _by_channel(self, x, bits):
        return np.array([naive.minmax_roundtrip(column.tolist(), bits) for column in x.T]).T

    def _probe(self):
        """The attention that prompt rows gave, summed as zipcache asks for it."""
        if getattr(self.store, "probes", None) is None:
            return
        for h in self.heads_kv:
            for g in self.group:
                q_head = h * len(self.group) + g
                for p in self.live[h]:
                    mass = float(self.src.mass[q_head, p]) if self.store.probes == "columns" else 0.0
                    self.salience[h, p] = self.salience.get((h, p), 0.0) + mass
                if self.store.probes == "window":
                    rows = min(self.store.window, self.prompt)
                    decode, self.q = self.q, self.src.window_q[len(self.src.window_q) - rows :].astype(np.float64)
                    for i, u in enumerate(range(self.prompt - rows, self.prompt)):
                        seen = [p for p in sorted(self.live[h]) if self.lay.first_visible(u) <= p <= u]
                        for p, a in self._own(i, h, g, seen).items():
                            self.salience[h, p] += a
                    self.q = decode

    # ------------------------------------------------------------------------------------------------ rows of the ledger
    def _rebuilt(self, before, after):
        """Pages that lost a row and have one left."""
        size = self.policy.page or 1
        return len({p // size for p in before - after} & {p // size for p in after})

    def _index_bytes(self):
        """Of one page's summary."""
        index, itemsize = self.policy.index, {"float32": 4, "float16": 2, "bfloat16": 2}
        return (
            0
            if index is None
            else 2 * index.n * self.lay.key_dim * itemsize[self.lay.dtype if index.dtype == "kv" else index.dtype]
        )

    def _bytes(self, h, positions):
        """(rows and codes, scales and zeros) of some rows of a kv head."""
        lay, key = self.lay, self.lay.row_bytes * self.lay.key_dim // (self.lay.key_dim + self.lay.value_dim)
        rows = meta = 0
        for side, exact in (("k", key), ("v", lay.row_bytes - key)):
            coded = [self.coded[h][side][p] for p in positions if p in self.coded[h][side]]
            rows += (len(positions) - len(coded)) * exact + sum(bits for _, bits, _, _ in coded) // 8
            meta += sum(own for _, _, own, _ in coded) + sum({name: shared for name, _, _, shared in coded}.values())
        return rows, meta

    def _read_row(self, t, h, reads, picked):
        union, size = sorted(set().union(*reads)), self.policy.page
        rows, meta = self._bytes(h, union)
        row = {"pos": t, "visible_tokens": self._visible(t), "read_tokens": len(union), "read_bytes": rows, "meta_bytes": meta,
               "index_bytes": picked[2] * self._index_bytes(),
               "score_bytes": 2 * len(self.group) * len(self.live[h]) * 4 if self._looks(t) else 0}  # fmt: skip
        if size:
            pages = set().union(*picked[0])
            runs = sum(p - 1 not in pages for p in pages)
            row |= {"read_pages": len(pages), "read_runs": runs, "page_bytes": len(pages) * size * self.lay.row_bytes}
        return row

    def _looks(self, t):
        period = getattr(self.store, "period", None)
        return self.kind in ("h2o", "tova", "pools", "qevict") or (period is not None and (t - self.prompt + 1) % period == 0)

    def _held_row(self, t, h):
        held, size = sorted(self.live[h]), self.policy.page
        rows, meta = self._bytes(h, held)
        quant = len(self.coded[h]["k"])
        meta += self.kept_bytes(h)
        row = {"held_tokens": len(held), "quant_tokens": quant, "full_tokens": len(held) - quant, "evicted_tokens": self._visible(t) - len(held),
               "resident_bytes": rows, "meta_resident_bytes": meta}  # fmt: skip
        pages = len({p // size for p in held}) if size else 0
        row["index_resident_bytes"] = pages * self._index_bytes()
        return row | ({"resident_page_bytes": pages * size * self.lay.row_bytes} if size else {})

    # ------------------------------------------------------------------------------------------------ rows of heads
    def _head(self, i, t, h, g, read, picked):
        x, lse = self._dense(i, t, h, g)
        p = {pos: 2.0 ** (y - lse) for pos, y in x.items()}
        mass = lambda positions: sum((p[pos] for pos in positions), 0.0)  # noqa: E731
        visible, live = [*p], [*self.live[h]]
        far, marked = (
            {*visible[FAR_FIRST : max(FAR_FIRST, len(visible) - FAR_LAST)]},
            {*np.flatnonzero(self.src.request.evidence_mask())} & {*visible},
        )
        full = sum(p[pos] * self.v[h][pos] for pos in visible)
        own = [self._logit(i, h, g, self.live[h][pos][0]) for pos in read]
        _, e, out, exact, mixed = naive.attend(
            np.array([x[pos] for pos in read]),
            np.array(own),
            self.v[h][read],
            np.array([self.live[h][pos][1] for pos in read]),
            lse,
            self._sink(h, g),
        )
        row = {
            "role": int(self.src.request.roles[t]), "mass_recall": mass(read), "mass_evicted": mass({*visible} - {*live}),
            "mass_unread": mass({*live} - {*read}), "learned_sink_mass": 2.0 ** (self._sink(h, g) - lse),
            "mass_quant": mass(pos for pos in read if pos in self.coded[h]["k"]), "far_mass": mass(far),
            "far_recall": mass(far & {*read}) / mass(far) if mass(far) >= 1e-3 else math.nan, "rel_l2": _relative(out, full),
            "cosine": _cosine(out, full), "out_bound": 2 * mass({*visible} - {*read}) * max(np.linalg.norm(self.v[h][pos]) for pos in visible),
            "read_tokens": len(read), "rounds": picked[3],
        }  # fmt: skip
        if self.store is not None or self.kind == "qevict":
            row |= {"err_select": _relative(exact, full), "err_k": _relative(mixed, full), "err_v": row["rel_l2"]}
        if self.src.request.evidence:
            weight = dict(zip(read, e, strict=True))
            row |= {
                "evidence_dense": mass(marked),
                "evidence_read": mass(marked & {*read}),
                "evidence_mass": sum((weight.get(pos, 0.0) for pos in marked), 0.0),
            }
        dots = {pos: float(self.q[i, h * len(self.group) + g] @ self.k[h][pos]) for pos in visible}
        strongest = sorted(visible, key=lambda pos: (-dots[pos], pos))
        row |= {f"top{r}_recall": len({*strongest[:r]} & {*read}) / min(r, len(visible)) for r in (1, 10, 64)}
        return row | (self._page_columns(i, h, g, p, x, picked) if self.policy.page else {})

    def _page_columns(self, i, h, g, p, x, picked):
        size, mine = self.policy.page, picked[0][g]
        mass = {}
        for pos in p:
            mass[pos // size] = mass.get(pos // size, 0.0) + p[pos]
        order = sorted(mass, key=lambda page: (-mass[page], page))
        row = {"read_pages": len(mine)}
        for name, k in (("page_recall", len(mine)), ("page_recall10", min(10, len(order)))):
            close = 0 < k < len(order) and mass[order[k - 1]] - mass[order[k]] < 1e-6  # float32 may see another order
            row[name] = None if close else len({*order[:k]} & mine) / k
        if self.policy.index is None:
            return row
        if picked[1] is None:
            return row | {"eps_hat": math.nan, "slack_mean": math.nan, "slack_max": math.nan}
        score, cap = picked[1][g], (self.lay.softcap or 0) * LOG2E
        rows = {page: [pos for pos in self.live[h] if pos // size == page] for page in score}
        best = {page: max(float(self.q[i, h * len(self.group) + g] @ self.k[h][pos]) for pos in rows[page]) for page in score}
        slack = [self.lay.scale * (score[page] - best[page]) for page in score]
        top = max(x.values())
        bound = {
            page: 2.0 ** (float(naive.bent(score[page] * self.lay.scale * LOG2E, 1.0, cap)) - top) * len(rows[page])
            for page in score
        }
        unread, z = (
            sum(bound[page] for page in score if page not in mine),
            sum(2.0 ** (x[pos] - top) for page in mine for pos in rows[page]),
        )
        return row | {"eps_hat": unread / (z + unread), "slack_mean": sum(slack) / len(slack), "slack_max": max(slack)}


LEAST = 0.05  # the sums of a shorter output cancel, or a learned sink outweighs them: its relative error is not compared


def _relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b)) if np.linalg.norm(b) > LEAST else None


def _cosine(a, b):
    size = np.linalg.norm(a), np.linalg.norm(b)
    return float(a @ b / np.prod(size)) if min(size) > LEAST else None
