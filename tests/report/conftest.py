from __future__ import annotations

from typing import Any

import pytest

from kvsim.metrics.run import open_run
from kvsim.report.contents import sections
from kvsim.report.page import report
from tests.report.runs import AGED, FULL, H2O, QUEST, READ_TAIL, edit, write_run

HOSTILE = "</script><script>window.PWN = 1</script><img src=x onerror='window.PWN = 2'> <!--<script> {{ 7 * 7 }} \u2028 ' \" & datum['x']"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"contexts": 2},
    "roles, no plans": {
        "contexts": 8,
        "roles": (1, 2, 3),
        "without": ("plans", "explain", "evidence", "lags", "by_tier"),
        "floor": 0.02,
    },
    "bare": {
        "policies": (H2O,),
        "layers": (2,),
        "evidence": False,
        "without": ("curves", "plans", "tiers", "events", "lags", "by_tier", "recurrence"),
    },
    "many": {
        "policies": [*(f"full() >> quest(read=tokens({n}), page=4, {READ_TAIL})" for n in range(4, 14)), "own.toml@abc", FULL]
    },
    "nothing said": {"policies": (QUEST,), "layers": (0,)},
    "ranked now and then": {"policies": (AGED, QUEST, FULL), "roles": (1, 3)},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """{case: run directory}"""
    root = tmp_path_factory.mktemp("runs")
    made = {name: write_run(root / f"run{i}", **case) for i, (name, case) in enumerate(CASES.items())}
    (made["nothing said"] / "run.json").write_text('{"schema": "kvsim.run/1"}')
    return made


@pytest.fixture(scope="session")
def composed(runs):
    """{case: the sections of its page}"""
    return {name: sections(open_run(path)) for name, path in runs.items()}


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory):
    """A page of two runs where every name that a trace or a user chooses is hostile."""
    root = tmp_path_factory.mktemp("hostile")
    trace = {"id": HOSTILE, "dtype": HOSTILE, "source": dict.fromkeys(("model", "weight_format", "tokenizer"), HOSTILE)}
    one = edit(write_run(root / "run", policies=(HOSTILE, QUEST, FULL)), trace=trace, kv_dtype=HOSTILE)
    spans = [{"label": HOSTILE, "start": 4, "stop": 8, "kind": "evidence"}]
    other = edit(write_run(root / "other"), requests=[{"request": 0, "prompt_tokens": 24, "mode": HOSTILE, "spans": spans}])
    return report([one, other], root / "page.html")
