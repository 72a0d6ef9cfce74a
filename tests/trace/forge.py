"""Traces that are wrong on purpose: edit a file of a trace and, if wanted, let the manifest agree with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

KV, Q = "kv/request=0/layer=0/seg-00000.parquet", "q/request=0/layer=0/seg-00000.parquet"
PREFILL, VALUES = "prefill/request=0/layer=0/seg-00000.parquet", "values/request=0/layer=0/seg-00000.parquet"
REQUESTS, LAYERS = "requests/part-0.parquet", "layers/part-0.parquet"


def manifest(root: Path, **changes: Any) -> None:
    """Change entries of the manifest; None removes one."""
    file = root / "manifest.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def relist(root: Path, *names: str) -> None:
    """The manifest says of these files what they are now; of those that are gone, nothing."""
    files = json.loads((root / "manifest.json").read_text())["files"]
    for name in names:
        files.pop(name, None)
        if (root / name).exists():
            data = (root / name).read_bytes()
            rows = pq.read_metadata(root / name).num_rows
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "rows": rows}
    manifest(root, files=files)


def rewrite(root: Path, name: str, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    """Replace a table by what `change` makes of it, row groups as before where the rows are as many, manifest in agreement."""
    file = pq.ParquetFile(root / name)
    table = change(file.read())
    group = file.metadata.row_group(0).num_rows
    (root / name).unlink()  # a lane read before may still be a view of it
    pq.write_table(table, root / name, **({"row_group_size": group, "use_dictionary": False, "compression": "none"} | options))
    relist(root, name)


def put(table: pa.Table, column: str, values: Any, kind: pa.DataType | None = None) -> pa.Table:
    """The table with a column replaced."""
    i = table.schema.get_field_index(column)
    kind = kind or table.schema.field(column).type
    return table.set_column(i, pa.field(column, kind, nullable=table.schema.field(column).nullable), pa.array(values, kind))


def cell(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    """The table with one cell replaced."""
    values = table[column].to_pylist()
    values[row] = value
    return put(table, column, values)


def remove(root: Path, prefix: str) -> None:
    """Every listed file under a prefix goes, from the folder and from the manifest."""
    names = [n for n in json.loads((root / "manifest.json").read_text())["files"] if n.startswith(prefix)]
    for name in names:
        (root / name).unlink()
    relist(root, *names)
