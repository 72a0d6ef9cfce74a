"""Live runs need torch and transformers; where they are not installed their tests are left out."""

from __future__ import annotations

import importlib.util

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []

if not MISSING:
    import torch

    torch.set_num_threads(1)
