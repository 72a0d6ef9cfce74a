"""A device by its name; the modules of devices import what only they need."""

from __future__ import annotations

from kvsim.cost.heads import Geometry
from kvsim.cost.measure.device import Device

DEVICES = ("cuda", "cpu")
MIB = 1 << 20


def usual(device: str) -> Geometry:
    """The heads of Llama-3.1-8B, in the dtype that is usual on the device."""
    return Geometry(
        layers=32, q_heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype="float32" if device == "cpu" else "bfloat16"
    )


def device_named(name: str, g: Geometry, largest_mib: int | None = None) -> Device:
    """largest_mib: of K and V of the largest launch. Raises WrongUse when the device is not there or has no kernels of the dtype."""
    if name == "cpu":
        from kvsim.cost.measure.cpu import LARGEST, Cpu

        return Cpu((largest_mib * MIB) if largest_mib else LARGEST)
    from kvsim.cost.measure.gpu import Gpu

    return Gpu(g.dtype, largest=largest_mib * MIB if largest_mib else None)
