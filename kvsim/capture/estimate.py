"""What a capture will take, before it starts: bytes of its trace by table, and memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.capture.attention import BLOCK_BYTES
from kvsim.capture.recorder import Keep, segment_steps
from kvsim.capture.writer import ROOM
from kvsim.errors import KvsimError
from kvsim.geometry import ITEMSIZE, Layer
from kvsim.trace.write import ROWS

# Parquet beside the rows, measured: a footer with its schema, and the headers and statistics of one column of a row group.
FILE_BYTES, CHUNK_BYTES = 600, 93
TABLES_BYTES = 12_000  # of the tables requests and layers and of an empty manifest
LISTED_BYTES = 400  # of a segment in the journal and in the manifest
SMALL = 4  # bytes of a number of a small column, whatever its type


@dataclass(frozen=True)
class Plan:
    """bytes: on disk, uncompressed, by table. memory: bytes by what needs them, beside the interpreter and its libraries."""

    bytes: dict[str, int]
    memory: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def plan(
    model: Any,
    layers: Sequence[Layer],
    captured: Sequence[Layer],
    prompt: int,
    steps: int,
    keep: Keep,
    backend: str,
    chunk: int | None = None,
) -> Plan:
    """For a prompt of `prompt` tokens and `steps` decode steps; `captured` among `layers` of the model."""
    sizes = {"kv": 0, "q": 0, "prefill": 0, "values": 0}
    files = 0
    for layer in captured:
        for table, rows, width, columns, groups in _segments(layer, prompt, steps, keep, chunk or prompt):
            sizes[table] += FILE_BYTES + rows * width + CHUNK_BYTES * columns * groups
            files += 1
    described = TABLES_BYTES + 5 * (prompt + steps) + 2 * len(str(model.config.to_dict())) + 300 * len(layers)
    return Plan(
        sizes | {"other": described + LISTED_BYTES * files}, _memory(model, layers, captured, prompt, steps, backend, chunk)
    )


def check_room(path: Path, plan: Plan) -> None:
    """Raises KvsimError: the trace will not fit on the disk."""
    folder = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if plan.total_bytes > free:
        raise KvsimError(
            f"{path}: the trace takes {plan.total_bytes:,} bytes and the disk has {free:,} left; capture fewer layers or steps"
        )


def _segments(layer: Layer, prompt: int, steps: int, keep: Keep, chunk: int) -> Iterator[tuple[str, int, int, int, int]]:
    """(table, rows, bytes of a row, columns, row groups) of every file of a layer."""
    size = ITEMSIZE[layer.dtype]
    key, value = layer.key_dim * size, layer.value_dim * size
    rotated = keep.k_pre and layer.rope is not None
    parts = [min(chunk, prompt - a) for a in range(0, prompt, chunk)] + _parts(steps, segment_steps(layer))
    for n in parts:
        for m in _parts(n, ROWS):
            width = 2 * SMALL + key * (2 if rotated else 1) + value
            yield "kv", m * layer.kv_heads, width, 5 if rotated else 4, layer.kv_heads
        if keep.wo_norm:
            yield "values", n * layer.q_heads, 3 * SMALL, 3, 1
    for n in ([min(keep.window_rows, prompt)] if keep.window_rows else []) + _parts(steps, segment_steps(layer)):
        yield "q", n * layer.q_heads, 4 * SMALL + key + value, 6, layer.kv_heads
    if keep.prefill_mass:
        yield "prefill", prompt * layer.q_heads, 4 * SMALL, 4, 1


def _parts(n: int, most: int) -> list[int]:
    return [min(most, n - a) for a in range(0, n, most)]


def _memory(
    model: Any, layers: Sequence[Layer], captured: Sequence[Layer], prompt: int, steps: int, backend: str, chunk: int | None
) -> dict[str, int]:
    total, new = prompt + steps, min(prompt, chunk or prompt)
    size = max(ITEMSIZE[x.dtype] for x in captured)
    cache = sum(x.kv_heads * x.row_bytes * min(total, x.window or total) for x in layers if x.kv_source_layer is None)
    largest = max(x.kv_heads * (2 * x.key_dim + x.value_dim) * size * new for x in captured)
    waiting = sum(segment_steps(x) * (x.q_heads + x.kv_heads) * 2 * (x.key_dim + x.value_dim) * size for x in captured)
    masses = max(x.q_heads for x in captured) * prompt * 8
    scores = max(x.q_heads for x in captured) * new * prompt * (4 + size) if backend == "eager" else 0
    return {
        "model": sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers())),
        "cache": cache,
        "eager attention": scores,
        "capture": (ROOM + 2) * largest + waiting + masses + 4 * BLOCK_BYTES,
    }
