from __future__ import annotations

import pytest

from kvsim.metrics.run import open_run
from kvsim.report.page import report
from tests.report.runs import FULL, H2O, POLICIES, QUEST, READ_TAIL, write_run

HOSTILE = "</script><script>window.PWN = 1</script><img src=x onerror='window.PWN = 2'> <!--<script> {{ 7 * 7 }} \u2028 ' \" & datum['x']"
CASES = {
    "plain": {"contexts": 2},
    "roles": {"contexts": 8, "roles": (1, 2, 3)},
    "bare": {"policies": (H2O,), "layers": (2,), "evidence": False, "without": ("curves", "plans", "tiers", "events")},
    "many": {"policies": [*(f"full() >> quest(read=tokens({n}), page=4, {READ_TAIL})" for n in range(4, 22)), "own.toml@abc", FULL]},
    "no plans": {"policies": POLICIES, "without": ("plans",)},
    "nothing said": {"policies": (QUEST,), "policies_": None},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """{case: run directory}"""
    root = tmp_path_factory.mktemp("runs")
    made = {name: write_run(root / name.replace(" ", "_"), **{k: v for k, v in case.items() if k != "policies_"}) for name, case in CASES.items()}
    (made["nothing said"] / "run.json").write_text('{"schema": "kvsim.run/1"}')
    return made


@pytest.fixture(scope="session")
def opened(runs):
    return {name: open_run(path) for name, path in runs.items()}


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory):
    """A page where every name that a trace or a user chooses is hostile."""
    root = tmp_path_factory.mktemp("hostile")
    source = dict.fromkeys(("model", "weight_format", "tokenizer"), HOSTILE)
    path = write_run(root / "run", policies=(HOSTILE, QUEST, FULL), trace={"id": HOSTILE, "source": source, "dtype": HOSTILE}, kv_dtype=HOSTILE)
    spans = [{"label": HOSTILE, "start": 4, "stop": 8, "kind": "evidence"}]
    write_run(root / "other", requests=[{"request": 0, "prompt_tokens": 24, "mode": HOSTILE, "spans": spans}], contexts=1)
    return report([path, root / "other"], root / "page.html")
