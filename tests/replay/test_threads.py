from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvsim.replay.threads import THREADS

PINNED = """
from kvsim.replay.threads import pin

pin()
import numba

assert numba.get_num_threads() == 1
assert numba.njit(lambda x: x + 1)(1) == 2  # which numba has to compile
"""


@pytest.mark.parametrize("before", ["", "import numba\n"], ids=["numba is loaded later", "numba was loaded before"])
def test_a_process_with_one_thread_can_still_compile(before):
    """A worker of a cluster has loaded numba with all the cores of its machine before it is told."""
    env = {name: value for name, value in os.environ.items() if name not in THREADS}
    done = subprocess.run([sys.executable, "-c", before + PINNED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
