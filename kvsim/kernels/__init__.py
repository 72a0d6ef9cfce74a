"""Arrays in, arrays out, in numba. Compiled code is cached beside these files, or where numba can write; see `_cache`."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path


def _cache() -> None:
    """Where neither this folder nor the user's cache can be written, numba would refuse to import: give it a private folder.

    The folder is checked to be the user's own, because cached code is loaded from it."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if "NUMBA_CACHE_DIR" in os.environ or any(_writable(p) for p in (Path(__file__).parent / "__pycache__", user)):
        return
    folder = Path(tempfile.gettempdir()) / f"kvsim-numba-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(mode=0o700, exist_ok=True)
    is_ours = not folder.is_symlink() and _owned(folder)
    os.environ["NUMBA_CACHE_DIR"] = str(folder) if is_ours else tempfile.mkdtemp(prefix="kvsim-numba-")
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


def compiled() -> bool:
    """Whether an earlier run left compiled code where this one will look for it; yes, too, where it cannot be told."""
    here = Path(__file__).parent / "__pycache__"
    return "NUMBA_CACHE_DIR" in os.environ or not _writable(here) or any(here.glob("*.nbi"))


def _owned(folder: Path) -> bool:
    found = folder.stat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077 == 0)


def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself where it does not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


_cache()
