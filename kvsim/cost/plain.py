"""The launches of a decode step under a fixed budget, from lengths alone: no trace.

Bytes are those that the ledger counts for the same policy; tests hold one against the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.cost.heads import Geometry
from kvsim.cost.launches import Kernels, Launch, score_factors
from kvsim.units import Budget, Hold, kib, mib, pages, share, tokens, whole

NUMBER = 4  # bytes of a score or a probability


@dataclass(frozen=True)
class Codes:
    """How a store codes rows: bits of a row's codes (None: never coded), bytes of scales for `key_group` keys and for one value.

    The newest `exact` rows stay as they are; keys are coded in blocks of `block` rows (0: one by one, as values)."""

    key_bits: int | None
    value_bits: int | None
    key_meta: int = 0
    value_meta: int = 0
    key_group: int = 1
    exact: int = 0
    block: int = 0

    def coded(self, rows: int) -> tuple[int, int]:
        """Of `rows` rows, how many keys and values are coded."""
        values = max(0, rows - self.exact)
        keys = rows // self.block * self.block if self.block else values
        return keys if self.key_bits else 0, values if self.value_bits else 0

    def bytes(self, rows: int) -> int:
        """Codes and scales."""
        keys, values = self.coded(rows)
        codes = keys * (self.key_bits or 0) // 8 + values * (self.value_bits or 0) // 8
        return codes + -(-keys // self.key_group) * self.key_meta + values * self.value_meta


@dataclass(frozen=True)
class Fixed:
    """A fixed-budget policy, in one kv head of one layer; full attention with the defaults.

    hold: most tokens held (None: all). read: a budget of whole pages of `page` tokens (None: everything held); rows: what a page takes in
    memory (None: `page`). union: pages that the query heads of a group read together, over those of one. summary_numbers: stored per
    page (0: none) and ranked at the step. looks: the policy needs the
    probabilities of every step. dense_layers: the first layers, read whole."""

    name: str = "full() >> everything()"
    hold: Hold | None = None
    read: Budget | None = None
    page: int = 16
    rows: int | None = None
    union: float = 1.0
    summary_numbers: int = 0
    summary_bits: int = 16
    looks: bool = False
    codes: Codes | None = None
    dense_layers: int = 0

    def held(self, visible: int, row_bytes: int) -> int:
        """Tokens held after a step that sees `visible`."""
        return visible if self.hold is None else min(visible, max(1, _tokens(self.hold, visible, row_bytes)))

    def picked(self, visible: int, held: int, row_bytes: int) -> int:
        """Pages that a kv head reads of `held` tokens."""
        assert self.read is not None
        one = self.read.n if isinstance(self.read, pages) else max(1, _tokens(self.read, visible, row_bytes) // self.page)
        return min(-(-held // self.page), whole(one * self.union))


def _tokens(budget: Budget, visible: int, row_bytes: int) -> int:
    match budget:
        case tokens() | pages():
            return budget.n
        case share():
            return whole(budget.x * visible)
        case kib() | mib():
            return whole(budget.bytes / row_bytes)


def row_bytes(heads: Geometry) -> int:
    """One token of one kv head of one layer, K and V."""
    return (heads.head_dim + heads.value_dim) * heads.kv_bits // 8


def resident_bytes(policy: Fixed, heads: Geometry, lengths: Sequence[int]) -> int:
    """K, V, codes and summaries of all layers and requests, on the device."""
    held = [policy.held(n, row_bytes(heads)) for n in lengths]
    rows = sum(_row_bytes(policy, heads, n) for n in held)
    pages = sum(-(-n // policy.page) for n in held)
    summaries = pages * policy.summary_numbers * policy.summary_bits // 8
    return (rows * heads.layers + summaries * max(0, heads.layers - policy.dense_layers)) * heads.kv_heads


def _row_bytes(policy: Fixed, heads: Geometry, rows: int) -> int:
    """Of one kv head, exact and coded rows as they are stored."""
    keys, values = policy.codes.coded(rows) if policy.codes else (0, 0)
    exact = (rows - keys) * heads.head_dim * heads.kv_bits // 8 + (rows - values) * heads.value_dim * heads.kv_bits // 8
    return exact + (policy.codes.bytes(rows) if policy.codes else 0)


def padding(pages: Sequence[int]) -> int:
    """Places without a page when every request gets as many as the longest has."""
    return sum(max(pages) - n for n in pages)


def step(
    policy: Fixed, heads: Geometry, lengths: Sequence[int], how: Kernels | None = None, padded: bool = False
) -> list[Launch]:
    """A decode step of a batch whose requests see `lengths` tokens each, the new one included; padded: as if all were the longest."""
    seen = [max(lengths)] * len(lengths) if padded else list(lengths)
    work = _Work(policy, heads, seen, how or Kernels())
    dense = heads.layers if policy.read is None else min(policy.dense_layers, heads.layers)
    out = work.coding(heads.layers) if policy.codes else []
    out += work.whole(dense) if dense else []
    if sparse := heads.layers - dense:
        out += work.selective(sparse)
    return out + (work.keeping(heads.layers) if policy.looks else [])


@dataclass(frozen=True)
class _Work:
    policy: Fixed
    heads: Geometry
    seen: list[int]
    how: Kernels

    @property
    def there(self) -> list[int]:
        """Rows that a step attends to: what the last one left, and the new one."""
        size = row_bytes(self.heads)
        return [min(n, self.policy.held(n - 1, size) + 1) if n > 1 else n for n in self.seen]

    def of(
        self, cls: str, bytes: int, layers: int, tokens: Sequence[int], pages: int | None = None, kv_bits: int | None = None
    ) -> Launch:
        batch = len(self.seen)
        page = None if pages is None else self.policy.page
        return Launch(cls, layers * bytes, layers, layers, batch, round(sum(tokens) / batch), pages, page, kv_bits)

    def attention(self, cls: str, layers: int, rows: list[int], pages: int | None = None) -> list[Launch]:
        """The kernel that reads rows, and the one that decodes them for it."""
        heads, codes = self.heads, self.policy.codes
        plain = heads.decode_bytes(len(self.seen), sum(rows))
        coded = [codes.coded(n - 1) for n in self.there] if codes else []
        if codes is None or not any(map(sum, coded)):
            return [self.of(cls, plain, layers, rows, pages)]
        read = [n / t for n, t in zip(rows, self.there, strict=True)]
        stored = round(sum(codes.bytes(t - 1) * part for t, part in zip(self.there, read, strict=True)) * heads.kv_heads)
        decoded = round(
            sum((k * heads.head_dim + v * heads.value_dim) * part for (k, v), part in zip(coded, read, strict=True))
            * heads.kv_heads
            * heads.kv_bits
            / 8
        )
        if self.how.dequant == "separate":
            return [self.of("dequant", stored + decoded, layers, rows), self.of(cls, plain, layers, rows, pages)]
        exact = sum(rows) * heads.kv_heads * row_bytes(heads)
        bits = round(heads.kv_bits * (exact - decoded + stored) / exact)
        return [self.of(cls, plain - decoded + stored, layers, rows, pages, bits)]

    def coding(self, layers: int) -> list[Launch]:
        """What the step codes at its end."""
        codes = self.policy.codes
        new = sum(codes.bytes(t) - codes.bytes(t - 1) for t in self.there) * self.heads.kv_heads if codes else 0
        return [self.of("summary_update", new, layers, self.there)] if new > 0 else []

    def whole(self, layers: int) -> list[Launch]:
        return self.attention("dense_attn", layers, self.there)

    def selective(self, layers: int) -> list[Launch]:
        """Summaries are scanned, pages ranked and read, and the new token's page summarised again."""
        policy, heads, there = self.policy, self.heads, self.there
        exist = sum(-(-n // policy.page) for n in there)
        picked = [policy.picked(n, t, row_bytes(heads)) for n, t in zip(self.seen, there, strict=True)]
        gather = self.attention("gather_attn", layers, [k * (policy.rows or policy.page) for k in picked], sum(picked))
        if not policy.summary_numbers:
            return gather
        summary = policy.summary_numbers * policy.summary_bits // 8 * heads.kv_heads
        return [
            self.of("page_scan", exist * summary, layers, there, exist),
            self.of("topk", exist * heads.q_heads * NUMBER, layers, there, exist),
            *gather,
            self.of("summary_update", len(there) * summary, layers, there),
        ]

    def keeping(self, layers: int) -> list[Launch]:
        """Probabilities for the scores, and the cut by them: what is remembered of each row is read and written."""
        heads, rows = self.heads, sum(self.there)
        keys, values, kept = score_factors(self.how.scores, heads.q_heads // heads.kv_heads)
        key, value = (rows * heads.kv_heads * dim * heads.kv_bits // 8 for dim in (heads.head_dim, heads.value_dim))
        looked = round(keys * key + values * value + kept * 2 * rows * heads.q_heads * NUMBER)
        out = [self.of("scores", looked, layers, self.there)]
        if self.policy.hold is None:
            return out
        return [*out, self.of("routing", 2 * (rows - len(self.there)) * heads.kv_heads * NUMBER, layers, self.there)]
