"""everything(): every live row at every step; `read` is None, so the engine ranks nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsim.policies.protocol import LARGEST_PAGE, PAGE_SIZES, Forced, Part, expect


@dataclass(frozen=True, kw_only=True)
class everything(Part):
    act = "reads every token held"
    kind = "read"

    # The page size to report in, and the rows that memory holds at once, where dense_layers= put it in a read's place.
    page: int | None = field(default=None, repr=False)
    tile: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        expect(self, "page", self.page is None or 1 <= self.page <= LARGEST_PAGE, PAGE_SIZES)

    read = None
    index = None
    heads = "each"
    refresh = 1
    shards = None
    forced = Forced()
