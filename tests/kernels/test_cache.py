"""Kernels compile where neither the package nor the user's cache can be written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

NOWHERE = "import os; os.access = lambda *a, **k: False; import kvsim.kernels; print(os.environ['NUMBA_CACHE_DIR'])"


def cache(tmp_path: Path, **given: str) -> Path:
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"TMPDIR": str(tmp_path)} | given
    done = subprocess.run([sys.executable, "-c", NOWHERE], env=env, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def test_a_private_folder_takes_the_place_of_caches_that_cannot_be_written(tmp_path):
    folder = cache(tmp_path)
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache(tmp_path) == folder


def test_what_the_user_chose_stays(tmp_path):
    assert cache(tmp_path, NUMBA_CACHE_DIR="/elsewhere") == Path("/elsewhere")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX owners")
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path):
    folder = cache(tmp_path)
    folder.chmod(0o777)
    other = cache(tmp_path)
    assert other != folder
    assert stat.S_IMODE(other.stat().st_mode) == 0o700


WATCHED = """
import os, pty, sys
import kvsim.kernels as kernels
from pathlib import Path
kernels.__file__ = sys.argv[1]
os.environ.pop("NUMBA_CACHE_DIR", None)
seen, shown = pty.openpty()
sys.stderr = os.fdopen(shown, "w")
from kvsim.cli.printing import progress_bar
with progress_bar():
    pass
sys.stderr.flush()
print(os.read(seen, 4096).decode())
"""


def test_a_person_is_told_that_the_first_run_compiles(tmp_path):
    """What is left of numba is a file beside the kernels; the folder is given in place of the package's."""
    pytest.importorskip("pty")
    cached = tmp_path / "__pycache__"
    cached.mkdir()
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, str(tmp_path / "__init__.py")], capture_output=True, text=True, check=True
        )
        told.append("compiled first, once" in done.stdout)
        (cached / "dense.product-1.py311.nbi").touch()
    assert told == [True, False]
