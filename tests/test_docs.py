"""The docs name everything there is, and their links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import altair as alt
import pytest

from kvsim import cli, tables
from kvsim.conformance import check_policy
from kvsim.policies import names
from kvsim.policies.language import load_file, parse
from kvsim.units import tokens
from tests.engine.lanes import lane, placement, run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "traces").glob("*.md"), *(ROOT / "changes").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Policies of files that the docs show are known here, and to no test that comes later."""
    before = {what: dict(found) for what, found in names._loaded.items()}
    yield
    for what, found in names._loaded.items():
        for name in [n for n in found if n not in before[what]]:
            sys.modules.pop(found.pop(name), None)


def anchors(page: Path) -> set[str]:
    """The fragments that headings of a page answer to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(page.read_text()):
        path, _, fragment = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", [str(p.relative_to(ROOT)) for p in PAGES])
def test_links_lead_somewhere(page):
    assert broken(ROOT / page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](gone.md) [d](page.md#here) [e](https://example.org)")
    assert broken(page) == ["#there", "gone.md"]


def test_every_page_of_docs_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    assert not [p for p in DOCS.rglob("*.md") if p.name != "index.md" and f"({p.relative_to(DOCS)})" not in index]


@pytest.mark.parametrize("table", tables.RUN_TABLES)
def test_every_column_of_a_run_is_defined(table):
    sections = re.split(r"^## ", (DOCS / "tables.md").read_text(), flags=re.MULTILINE)
    [section] = [s for s in sections if s.startswith((f"{table}:", f"{table} "))]
    assert not set(tables.RUN_TABLES[table].names) - set(re.findall(r"\w+", section))


KEYS = {
    "policy",
    "request",
    "layer",
    "kv_head",
    "q_head",
    "role",
    "step",
    "pos",
    "span",
    "set",
    "dense",
    "asked_unit",
    "page_size",
    "key_dim",
    "key_age",
}


@pytest.mark.parametrize("table", tables.RUN_TABLES)
def test_every_number_of_a_run_has_a_formula(table):
    text = (DOCS / "definitions.md").read_text()
    short = {
        prefix + s for prefix, many in re.findall(r"`(\w+)_\w+`((?:, `_\w+`)+)", text) for s in re.findall(r"`(_\w+)`", many)
    }
    known = set(re.findall(r"\w+", text)) | short
    assert not sorted(set(tables.RUN_TABLES[table].names) - KEYS - known)


def test_the_modules_that_definitions_name_are_there():
    named = re.findall(r"`(kvsim/[\w/]+(?:\.py|/))`", (DOCS / "definitions.md").read_text())
    assert named
    assert not [n for n in named if not (ROOT / n).exists()]


def test_the_notebook_runs(tmp_path, monkeypatch):
    cells = json.loads((DOCS / "charts.ipynb").read_text())["cells"]
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    drawn = []
    for cell in (c for c in cells if c["cell_type"] == "code"):
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(body, []), "cell", "exec"), known)
        if isinstance(last, ast.Expr):
            drawn.append(eval(compile(ast.Expression(last.value), "cell", "eval"), known))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), known)
    charts = [d for d in drawn if hasattr(d, "to_dict") and hasattr(d, "mark") | hasattr(d, "hconcat") | hasattr(d, "layer")]
    assert len(charts) == 3
    assert all(c.to_dict()["$schema"] for c in charts)
    alt.renderers.enable("default")


def test_every_column_of_a_trace_is_defined():
    text = (DOCS / "trace-format.md").read_text()
    schemas = [
        tables.REQUESTS,
        tables.LAYERS,
        tables.PREFILL,
        tables.VALUES,
        tables.kv_schema(2, 2, True),
        tables.q_schema(2, 2, True, True),
    ]
    assert not sorted({c for schema in schemas for c in schema.names if f"`{c}`" not in text})


def policies() -> dict[str, type]:
    """Every policy and index by name, found as kvsim finds them."""
    kinds = [import_module(f"kvsim.policies.{kind}") for kind in ("keep", "store", "read", "index")]
    return {
        m.name: getattr(import_module(f"{kind.__name__}.{m.name}"), m.name) for kind in kinds for m in iter_modules(kind.__path__)
    }


@pytest.mark.parametrize("name", sorted(policies()))
def test_every_policy_has_an_entry_with_its_parameters(name):
    text = (DOCS / "policies.md").read_text()
    entries = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    shared = re.findall(r"^## Read\n(.*?)^###", text, re.MULTILINE | re.DOTALL)[0]
    told = set(re.findall(r"(\w+)=", entries[name] + shared))
    assert not {f.name for f in fields(policies()[name])} - told


def expressions() -> set[str]:
    """What the docs put in quotes as a policy."""
    quoted = {q for page in PAGES for q in re.findall(r'"([^"\n]+\))"', page.read_text())}
    return {q for q in quoted if q.split("(")[0] in policies()}


@pytest.mark.parametrize("expression", sorted(expressions()))
def test_every_expression_of_the_docs_is_one(expression):
    assert parse(expression).part("read")


def code(page: Path, has: str) -> str:
    """The indented block of a page that holds this text."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", page.read_text(), re.MULTILINE)
    return textwrap.dedent(next(b for b in blocks if has in b))


def fenced(page: Path, has: str) -> str:
    """The fenced block of Python of a page that holds this text."""
    return next(b for b in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) if has in b)


def test_the_policy_of_the_docs_passes_the_conformance_suite(tmp_path):
    (tmp_path / "last_look.py").write_text(fenced(DOCS / "guides" / "policy.md", "class last_look"))
    found = load_file(tmp_path / "last_look.py")
    assert check_policy(found["last_look"](hold=tokens(12))) == []


def test_the_method_that_the_guide_ports_is_the_shipped_one(tmp_path):
    (tmp_path / "my_tova.py").write_text(code := fenced(DOCS / "guides" / "policy.md", "class my_tova"))
    mine = load_file(tmp_path / "my_tova.py")["my_tova"](hold=tokens(12))
    source = lane(prompt=40, steps=12)
    one, other = (placement(source, run(source, policy)["tiers"]) for policy in (mine, "tova(hold=tokens(12))"))
    assert (one == other).all()
    assert (one == 0).any()
    assert len(code.splitlines()) < 60


def test_the_study_of_the_docs_runs(tmp_path, capsys):
    (tmp_path / "study.toml").write_text(code(DOCS / "sweep.md", "[grid]"))
    for trace in ("smollm2-needle", "smollm2-reversal"):
        (tmp_path / trace).symlink_to(ROOT / "traces" / trace)
    assert cli.main(["sweep", str(tmp_path / "study.toml"), "-o", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "11 policies on 6 layers of 2 traces" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.commands())
def test_every_command_has_an_entry_with_its_options(command):
    sections = re.split(r"^## ", (DOCS / "commands.md").read_text(), flags=re.MULTILINE)
    [section] = [s for s in sections if s.split("\n")[0] == f"kvsim {command.split()[0]}"]
    parser = argparse.ArgumentParser(add_help=False)
    cli.COMMANDS[tuple(command.split())][2](parser)
    options = set(re.findall(r"--[a-z-]+", parser.format_help()))
    assert f"kvsim {command}" in section
    assert not options - set(re.findall(r"--[a-z-]+", section)) - {"--out", "--policy"}  # which have a short form
