"""What a capture will take, before it starts: bytes of its trace by table, and memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.capture.attention import BLOCK_BYTES
from kvsim.capture.indexer import Form
from kvsim.capture.layers import Anatomy
from kvsim.capture.recorder import Keep, segment_steps
from kvsim.capture.writer import ROOM
from kvsim.errors import KvsimError, WrongUse
from kvsim.geometry import ITEMSIZE, Layer
from kvsim.trace.moments import SKIPPED
from kvsim.trace.write import ROWS

# Bytes of Parquet beside the rows, measured: of a file, of a column in its schema, of a row group's part of a column.
FILE, COLUMN, SMALL_CHUNK, VECTOR_CHUNK = 237, 83, 122, 60
TABLES = 11_500  # the tables requests and layers, an empty manifest
LAYER = 300  # of a layer in its table
LISTED = 335  # of a segment in the journal and in the manifest
INDEX = ("index_k", "index_q")
SMALL = 4  # of a number of a small column, whatever its type


@dataclass(frozen=True)
class Plan:
    """bytes: on disk, uncompressed, by table. memory: about how many bytes each part needs, beside the interpreter, its libraries
    and what their allocators hold on to."""

    bytes: dict[str, int]
    memory: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


def plan(
    model: Any, anatomy: Anatomy, captured: Sequence[Layer], prompt: int, steps: int, keep: Keep, chunk: int | None = None
) -> Plan:
    """For a prompt of `prompt` tokens and `steps` decode steps; `captured` among the layers of the model."""
    sizes = trace_bytes(captured, prompt, steps, keep, chunk, anatomy.indexers)
    sizes["other"] += 2 * len(str(model.config.to_dict())) + LAYER * len(anatomy.layers)
    return Plan(sizes, _memory(model, anatomy.layers, captured, prompt, steps, anatomy.backend, chunk))


def trace_bytes(
    captured: Sequence[Layer],
    prompt: int,
    steps: int,
    keep: Keep,
    chunk: int | None = None,
    indexers: Mapping[int, Form] | None = None,
) -> dict[str, int]:
    """Bytes on disk, uncompressed, by table, without what is told of the model."""
    forms = indexers or {}
    sizes = dict.fromkeys(("kv", "q", "prefill", "values", "q_stats", *(INDEX if forms else ())), 0)
    files = [f for layer in captured for f in _files(layer, prompt, steps, keep, chunk or prompt, forms.get(layer.id))]
    for f in files:
        sizes[f.table] += FILE + COLUMN * (f.small + len(f.vectors)) + f.rows * (SMALL * f.small + sum(f.vectors))
        sizes[f.table] += f.groups * (SMALL_CHUNK * f.small + VECTOR_CHUNK * len(f.vectors))
    return sizes | {"other": TABLES + 5 * (prompt + steps) + LISTED * len(files)}


def together(plans: Sequence[Plan]) -> Plan:
    """Of requests captured one after the other: bytes of all, memory of the one that needs most."""
    sizes = {table: sum(p.bytes[table] for p in plans) for table in plans[0].bytes}
    return Plan(sizes, max((p.memory for p in plans), key=lambda m: sum(m.values())))


def check_room(path: Path, plan: Plan) -> None:
    """Raises KvsimError: the trace will not fit on the disk."""
    folder = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if plan.total_bytes > free:
        raise KvsimError(
            f"{path}: the trace takes {plan.total_bytes:,} bytes and the disk has {free:,} left; capture fewer layers or steps"
        )


def check_memory(plan: Plan, device: Any, chunk: int | None = None) -> None:
    """Raises WrongUse: the capture will not fit beside the model, which is there already."""
    free = free_memory(device)
    needs = {name: n for name, n in plan.memory.items() if name != "model"}
    if free is None or sum(needs.values()) <= free:
        return
    most = max(needs, key=lambda name: needs[name])
    how = {
        "eager attention": f"its scores grow with the tokens of one forward: take {'a smaller' if chunk else 'a'} chunk (--chunk N), "
        "or attn_implementation='sdpa' (--attention sdpa) where the model has it",
        "forward": f"take {'a smaller' if chunk else 'a'} chunk (--chunk N)",
        "capture": "capture fewer layers (--layers)",
        "cache": "take a shorter prompt",
    }[most]
    raise WrongUse(
        f"the capture takes about {sum(needs.values()):,} bytes beside the model and {device} has {free:,} left; most of it is "
        f"{most}, {needs[most]:,} bytes: {how}"
    )


def free_memory(device: Any) -> int | None:
    """Bytes that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)


class _File(NamedTuple):
    """One segment: rows of `small` small columns and of vectors of so many bytes."""

    table: str
    rows: int
    small: int
    vectors: tuple[int, ...] = ()
    groups: int = 1


def _files(layer: Layer, prompt: int, steps: int, keep: Keep, chunk: int, form: Form | None) -> Iterator[_File]:
    """Every segment of a layer."""
    key, value = (dim * ITEMSIZE[layer.dtype] for dim in (layer.key_dim, layer.value_dim))
    vectors = (key, value, key) if keep.k_pre and layer.rope is not None else (key, value)
    chunks, decode = _parts(prompt, chunk), _parts(steps, segment_steps(layer))
    for n in (*chunks, *decode):
        yield from (_File("kv", m * layer.kv_heads, 2, vectors, layer.kv_heads) for m in _parts(n, ROWS))
        if keep.wo_norm:
            yield _File("values", n * layer.q_heads, 3)
    before = prompt - keep.window_rows  # queries of the prompt that are not kept
    ends = accumulate(chunks)
    kept = [min(n, end - before) for n, end in zip(chunks, ends, strict=True) if end > before and keep.window_rows]
    for n in (*kept, *(-(-n // keep.every) for n in decode)):
        yield _File("q", n * layer.q_heads, 4, (key, value), layer.kv_heads)
    if form is not None:
        size = form.dim * ITEMSIZE[layer.dtype]
        yield from (_File("index_k", m, 1, (size,)) for n in (*chunks, *decode) for m in _parts(n, ROWS))
        told = SMALL + len(form.score_fn)  # in every row, with its length
        yield from (_File("index_q", -(-n // keep.every) * form.heads, 4, (size, told)) for n in decode)
    if keep.prefill_mass:
        yield _File("prefill", prompt * layer.q_heads, 4)
    if keep.q_stats and prompt > SKIPPED:
        yield _File("q_stats", layer.q_heads, 3, (4 * layer.key_dim, 4 * layer.key_dim**2))


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
    config = model.config.get_text_config(decoder=True)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = 6 * config.hidden_size + 4 * (inner if isinstance(inner, int) else max(inner))  # some have one for each layer
    return {
        "model": sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers())),
        "cache": cache,
        "forward": 8 * new * widths,
        "eager attention": scores,
        "capture": (ROOM + 2) * largest + waiting + masses + 8 * BLOCK_BYTES,
    }
