"""Which fit prices which launch: its own, that of attention in its place, the bandwidth of whole steps, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsim.cost.classfit import ClassFit
from kvsim.cost.launches import MOVES
from kvsim.cost.model import CostModel
from kvsim.errors import WrongUse

HEADS = ("q_heads", "kv_heads", "head_dim")
STAND_INS = ("gather_attn", "dense_attn")
FROM_MEMORY = {
    "page_scan",
    "topk",
    "gather_attn",
    "summary_update",
    "dequant",
    "scores",
    "routing",
    "prefill_extra",
}  # as attention
OWN, TAKEN, WHOLE, BANDWIDTH, NONE = "its own fit", "taken over from", "step minus rest of", "bandwidth of", "none"


@dataclass(frozen=True)
class Prices:
    """A model and what to take from it. rest: the variant of `step` or `rest` (weight format, engine), None when there is but one;
    kernels: the variant of any other class; weights_bytes: what a step reads of the model itself, where no fit knows its rest."""

    model: CostModel
    heads: tuple[int, int, int]  # query heads, kv heads, head_dim
    rest: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    weights_bytes: int | None = None
    graph: str | None = None

    def fits(self, cls: str) -> list[ClassFit]:
        """Of a class, for these heads, this way to launch and the kernel or weight format that was chosen."""
        chosen = self.rest if cls in ("step", "rest") else self.kernels.get(cls)
        return [
            f
            for f in self.model.fits
            if f.key["class"] == cls
            and all(f.key[k] == n or (cls in MOVES and f.key[k] is None) for k, n in zip(HEADS, self.heads, strict=True))
            and (self.graph is None or f.key["graph"] in (None, self.graph))
            and chosen in (None, f.key["variant"])
        ]

    def one(self, cls: str) -> ClassFit | None:
        """The fit of `step` or `rest`. Raises WrongUse that names the variants, or ways to launch, when there are several."""
        return _one(cls, self.fits(cls), "--variant ")

    def source(self, cls: str, kv_bits: int, page: int | None, alone: bool) -> tuple[str, ClassFit | None]:
        """(how, fit) for launches of a class; alone: they are all that a step does with the cache.

        A step of attention alone is priced as a measured step where attention has no fit of its own. What was fitted for another dtype or page
        size, and attention in place of a class that was never measured, is taken over; so is the bandwidth of steps."""
        there, whole = self.fits(cls), self.one("step")
        if own := [f for f in there if f.key["kv_bits"] in (None, kv_bits) and f.key["page"] in (None, page)]:
            return OWN, _one(cls, own, f"--kernel {cls}=")
        if cls == "dense_attn" and alone and whole and not there and whole.key["kv_bits"] in (None, kv_bits):
            return WHOLE, whole
        others = there or [f for other in STAND_INS for f in self.fits(other) if cls in FROM_MEMORY and not f.lacks]
        if others:
            return TAKEN, max(others, key=lambda f: f.key["kv_bits"] == kv_bits)
        if whole and (cls in FROM_MEMORY or cls == "dense_attn"):
            return BANDWIDTH, whole
        return NONE, None


def _one(cls: str, fits: list[ClassFit], option: str) -> ClassFit | None:
    """The fit with the most particular key of those that only differ in how particular they are."""
    for key, how in (("variant", option), ("graph", "--graph ")):
        names = sorted({f.key[key] for f in fits if f.key[key] is not None})
        if len(names) > 1:
            raise WrongUse(f"the model holds {len(names)} kinds of {cls} ({'; '.join(names)}): choose one with {how}{names[0]!r}")
    return max(fits, key=lambda f: (f.key["page"] is not None, f.key["kv_bits"] or 0), default=None)


def priced_for(model: CostModel, heads: tuple[int, int, int], **given: Any) -> Prices:
    """Prices for these heads. Raises WrongUse when no fit of the model is of them, or a kernel is not in it."""
    prices = Prices(model, heads, **given)
    known = sorted({tuple(f.key[k] for k in HEADS) for f in model.fits if f.key["class"] not in MOVES}, key=str)
    if heads not in known:
        has = "; ".join(map(_told, known[:3])) + ("; …" if len(known) > 3 else "")
        raise WrongUse(f"the model was fitted for {has}, and this is of {_told(heads)}: fit samples of those heads")
    for cls, variant in prices.kernels.items():
        names = sorted({f.key["variant"] for f in model.fits if f.key["class"] == cls})
        if variant not in names:
            raise WrongUse(
                f"--kernel {cls}={variant!r}: not in the model; of {cls} it has {', '.join(map(repr, names)) or 'nothing'}"
            )
    refuse_unknown(model, [prices.rest] if prices.rest else [])
    return prices


def rests(model: CostModel) -> list[str]:
    """The variants of whole steps and of rests of steps that a model has."""
    return sorted({f.key["variant"] for f in model.fits if f.key["class"] in ("step", "rest")})


def refuse_unknown(model: CostModel, variants: Any) -> None:
    """Raises WrongUse for a variant of steps that the model does not have."""
    known = rests(model)
    if unknown := [v for v in variants if v not in known]:
        has = f"it has {', '.join(map(repr, known))}" if known else "it has no whole steps and no rests of steps"
        raise WrongUse(f"--variant {unknown[0]!r}: not in the model; {has}")


def _told(heads: tuple[Any, ...]) -> str:
    return "{} query heads, {} kv heads, head_dim {}".format(*heads)
