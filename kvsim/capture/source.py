"""Where a trace comes from, as its manifest tells it: no path, no host, no user."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch
import transformers

import kvsim


def source_of(
    model: Any, name: str | None = None, weight_format: str | None = None, tokenizer: str | None = None
) -> dict[str, Any]:
    """The manifest's `source`: the model's id, its configuration and that one's hash, its tokenizer, the format of its weights."""
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    config.pop("_name_or_path", None)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    quantised = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    return {
        "model": name or model_name(model),
        "config": config,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokenizer": tokenizer,
        "weight_format": weight_format or (str(quantised) if quantised else str(model.dtype).removeprefix("torch.")),
    }


def model_name(model: Any) -> str:
    """A hub id stays as it is; of a folder, its name."""
    name = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".")) or name.count("/") > 1 else name


def machine(model: Any) -> dict[str, Any]:
    """What ran the capture: versions and device."""
    device = model.device
    return {
        "tool": "kvsim.capture",
        "versions": {
            "kvsim": kvsim.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": device.type,
        "gpu_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
