"""What a GPU can do at best, a file each in hardware/, every value with its source."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from kvsim.errors import WrongUse


@dataclass(frozen=True)
class Gpu:
    """Peak figures, 0 where not known; `sources` says where each comes from. pcie_gbps is of one direction."""

    key: str
    name: str
    match: tuple[str, ...]
    bandwidth_gbps: float
    memory_gb: float
    l2_bytes: int
    pcie_gbps: float
    processors: int
    sources: dict[str, str]

    def link_gbps(self, cls: str) -> float | None:
        """The fastest that bytes of a kernel class can move, or None where no single link bounds them."""
        if cls in ("host_fetch", "tier_move"):
            return self.pcie_gbps or None
        return None if cls in ("ssd_fetch", "collective", "rest", "routing") else self.bandwidth_gbps


def gpus() -> dict[str, Gpu]:
    """Every GPU known, by key."""
    found = sorted(
        (f for f in files("kvsim.cost").joinpath("hardware").iterdir() if f.name.endswith(".toml")), key=lambda f: f.name
    )
    return {f.name.removesuffix(".toml"): _parsed(f.name.removesuffix(".toml"), f.read_text(encoding="utf-8")) for f in found}


def named_gpu(name: str) -> Gpu:
    """A GPU by its key, or by the name that a driver gives it. Raises WrongUse with the keys."""
    known = gpus()
    if name in known:
        return known[name]
    if found := [g for g in known.values() if any(part.lower() in name.lower() for part in (g.name, *g.match))]:
        return found[0]
    raise WrongUse(f"unknown GPU {name!r}: one of {', '.join(known)}")


def _parsed(key: str, text: str) -> Gpu:
    given = tomllib.loads(text)
    value = {k: v["value"] for k, v in given.items() if isinstance(v, dict)}
    return Gpu(
        key=key,
        name=given["name"],
        match=tuple(given["match"]),
        bandwidth_gbps=float(value["bandwidth_gbps"]),
        memory_gb=float(value["memory_gb"]),
        l2_bytes=int(value["l2_bytes"]),
        pcie_gbps=float(value["pcie_gbps"]),
        processors=int(value["processors"]),
        sources={k: given[k]["source"] for k in value},
    )
