"""Engine tests run BLAS as a replay does: on one thread."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    with threadpool_limits(1, user_api="blas"):
        yield
