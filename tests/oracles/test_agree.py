"""Where `make oracles` has built its environment, the same comparison is a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.agree import PAIRS, compare

PYTHON = Path(__file__).parents[2] / ".venv-oracles/bin/python"


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-oracles; make oracles builds it")
def test_our_policies_and_kvpress_agree():
    _, rows = compare(str(PYTHON))
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == len(PAIRS)
