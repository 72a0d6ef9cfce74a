"""Studies, tasks, run folders and the names on a page."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

from tools.fuzz.mutate import altered, bent, reworded
from tools.fuzz.surface import Finding

STUDY = """
traces = ["trace", "t*"]
policies = ['quest(read=pages({n}), page={page})', "h2o(hold=tokens({hold}))", "full()"]
where = ["n * page == hold", "n <= 64", "page != 4"]
layers = [0, 1]
steps = [0, 1, 2]
baselines = true
kv_dtype = "float16"
[grid]
n = [4, 8, 16]
page = [8, 16, 32]
hold = [128, 256]
"""


def study(rng: Random, _: Any, folder: Path) -> None:
    from kvsim.replay.study import read_study

    text = reworded(rng, STUDY, STUDY.splitlines())
    odd = text.encode("utf-8", "surrogatepass")
    (folder / "study.toml").write_bytes(bent(rng, odd) if rng.random() < 0.2 else odd)
    (folder / "trace").mkdir()
    found = read_study(folder / "study.toml", 10_000)
    if len(set(found.policies)) != len(found.policies):
        raise Finding("a policy is there twice")


ROW = {
    "id": "a", "context": ["The key of Ada is 12.", "Bob has none."], "question": "What is Ada's key?", "answers": ["12"],
    "evidence": ["The key of Ada is 12."], "scoring": "any",
}  # fmt: skip


def rows(rng: Random, _: Any, folder: Path) -> None:
    from kvsim.capture.tasks.rows import read_rows

    lines = [json.dumps(altered(rng, ROW) if rng.random() < 0.7 else ROW) for _ in range(3)]
    text = "\n".join(lines)
    (folder / "rows.jsonl").write_bytes(bent(rng, text.encode()) if rng.random() < 0.5 else text.encode())
    read_rows(folder / "rows.jsonl")


DIFFER = ("quest(read=pages(2), page=8)", "quest(read=pages(3), page=8)")
VERBS = (
    ("show", "RUN"), ("show", "RUN", "--by", "layer"), ("show", "RUN", "-t", "mass=0.9"), ("show", "RUN", "--evidence"),
    ("compare", "RUN", "GOOD"), ("diff", "RUN", "--policies", *DIFFER), ("advise", "RUN", "-t", "mass=0.9", "-o", "advice.toml"),
)  # fmt: skip


def good(root: Path, plans: bool = True) -> Path:
    from kvsim.replay.run import replay
    from kvsim.synth.generate import synthesize

    trace = synthesize(root / "trace", prompt=48, steps=4, layers=1)
    return Path(replay(trace, ["full()", *DIFFER], root / "run", workers=1, plans=plans).path)


def run(rng: Random, good: Path, folder: Path) -> None:
    """Tables that changed are not believed, whatever run.json is made to say."""
    from kvsim.cli import main
    from kvsim.metrics.quality import quality
    from kvsim.metrics.run import open_run

    path = folder / "run"
    shutil.copytree(good, path)
    about = json.loads((path / "run.json").read_text())
    victim = rng.choice(sorted(p for p in path.iterdir() if p.is_file()))
    before = victim.read_bytes()
    if victim.name == "run.json" and rng.random() < 0.7:
        victim.write_text(json.dumps(altered(rng, about)))
    else:
        victim.write_bytes(bent(rng, before))
    run = open_run(path)
    if victim.suffix == ".parquet" and victim.stem in about["tables"] and victim.read_bytes() != before:
        raise Finding(f"{victim.name} was altered and believed")
    quality(run.heads)
    places = {"RUN": str(path), "GOOD": str(good), "advice.toml": str(folder / "advice.toml")}
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        main([places.get(word, word) for word in rng.choice(VERBS)])


def page(root: Path) -> dict[str, Any]:
    from kvsim.metrics.run import open_run
    from kvsim.report.contents import sections
    from kvsim.report.html import render

    run = open_run(good(root, plans=False))  # without its explorer: more pages in the time
    return {"run": run, "plain": _elements(render("t", ["lead"], sections(run), [p.id for p in run.policies]))}


LEADING = (
    "href",
    "xlink:href",
    "src",
    "srcdoc",
    "action",
    "formaction",
    "data",
    "poster",
    "background",
)  # elsewhere a value is a text


class _Tags(HTMLParser):
    """What a browser would take for elements that run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        leads = [name for name, value in attrs if name in LEADING and (value or "").strip().lower().startswith("javascript:")]
        odd = leads + [name for name, _ in attrs if name.startswith("on")]
        if tag in ("script", "iframe", "object", "embed", "base", "meta", "link", "img", "form") or odd:
            self.found.append(tag + "".join(sorted(odd)))


HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "'\"><svg onload=alert(1)>", "{{7*7}}", "${7*7}",
    "javascript:alert(1)", "<!--", "]]>", "\u2028", "=cmd|' /C calc'!A0", "&lt;b&gt;", "\\u003cscript>", "datum.x; alert(1)",
)  # fmt: skip


def labels(rng: Random, good: dict[str, Any], folder: Path) -> None:
    """Names out of a run are text on the page: it has the elements it always has."""
    from dataclasses import replace

    from kvsim.report.contents import sections
    from kvsim.report.html import render

    run = good["run"]
    policies, tables, about = run.policies, dict(run.tables), json.loads(json.dumps(run.about))
    import polars as pl

    new = {p.id: rng.choice(HOSTILE) + reworded(rng, p.id, HOSTILE) + str(i) for i, p in enumerate(policies)}
    tables = {
        name: frame.with_columns(pl.col("policy").replace(new)) if "policy" in frame.collect_schema() else frame
        for name, frame in tables.items()
    }
    about = _renamed(about, new) | {
        "trace": {**(about.get("trace") or {}), "id": rng.choice(HOSTILE), "model": rng.choice(HOSTILE)}
    }
    odd = replace(run, policies=tuple(replace(p, id=new[p.id], form=new[p.id]) for p in policies), tables=tables, about=about)
    page = render(rng.choice(HOSTILE), [rng.choice(HOSTILE)], sections(odd), list(new.values()))
    if extra := sorted(set(_elements(page)) - set(good["plain"])):
        raise Finding(f"the page has elements of the run's making: {extra[:5]}")
    if len(_elements(page)) > len(good["plain"]) + 40:
        raise Finding("the page has more elements than its figures explain")


def _renamed(value: Any, new: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {new.get(k, k): _renamed(v, new) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(v, new) for v in value]
    return new.get(value, value) if isinstance(value, str) else value


def _elements(page: str) -> list[str]:
    tags = _Tags()
    tags.feed(re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", page, flags=re.DOTALL))
    return tags.found
