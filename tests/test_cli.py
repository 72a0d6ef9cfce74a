"""The command line: exit codes, one line for what is wrong, results on stdout, nothing heavy before it is needed."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvsim
from kvsim import cli
from kvsim.replay.demo import POLICIES, suppliable
from kvsim.synth.generate import synthesize
from kvsim.trace.bundled import NAMES, bundled

ROOT = Path(__file__).parents[1]
QUEST = "quest(read=pages(2), page=8)"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("traces") / "small", layers=2, prompt=60, steps=10)


@pytest.fixture
def kvsim_(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = cli.main([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def fresh(*words):
    """A new interpreter -> the finished process."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------------ start
def test_help_loads_nothing_heavy():
    code = "import sys, kvsim.cli\ntry: kvsim.cli.main(['--help'])\nfinally: print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(fresh("-c", code).stdout.split())
    assert {"kvsim", "argparse"} <= loaded
    assert not loaded & {"altair", "numba", "numpy", "polars", "pyarrow", "rich", "scipy"}


def test_the_module_is_the_command():
    done = fresh("-m", "kvsim", "--version")
    assert (done.returncode, done.stdout) == (0, f"kvsim {kvsim.__version__}\n")
    done = fresh("-m", "kvsim", "polices")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvsim: unknown command 'polices', did you mean 'policies'?; see kvsim --help\n"


@pytest.mark.parametrize("command", cli.commands())
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([*command.split(), "--help"])
    assert done.value.code == 0
    assert f"usage: kvsim {command} " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ replay, report
def test_replay_writes_a_run_and_prints_its_path(kvsim_, trace):
    code, out, err = kvsim_(
        "replay", trace.path, "-p", QUEST, "tova(hold=tokens(20))", "-p", "full()", "-o", "runs/first", "--plans"
    )
    assert (code, out, err) == (0, "runs/first\n", "")
    assert [p["name"] for p in kvsim.Run("runs/first").info["policies"]] == [
        "full >> quest",
        "tova >> everything",
        "full >> everything",
    ]
    code, out, err = kvsim_("replay", trace.path, "-p", QUEST, "-o", "runs/first")
    assert (code, out) == (2, "")
    assert err == "kvsim: runs/first: exists already, and a run is never overwritten; choose another -o, or remove it\n"


def test_lists_have_ranges_with_their_ends(kvsim_, trace):
    options = ("--steps", "0,3-5,9", "--layers", "1", "--requests", "0", "--kv-dtype", "float32", "--baselines", "--strict")
    assert kvsim_("replay", trace.path, "-p", QUEST, "-o", "run", *options)[0] == 0
    run = kvsim.Run("run")
    assert run.info["options"]["steps"] == [0, 3, 4, 5, 9]
    assert run.info["options"]["layers"] == [1]
    assert run.info["kv_dtype"] == "float32"
    assert len(run.info["policies"]) == 5


def test_a_policy_file_brings_its_policies(kvsim_, trace):
    file = ROOT / "tests" / "replay" / "last_few.py"
    assert kvsim_("replay", trace.path, "-p", "last_few(hold=tokens(9))", "--policy-file", file, "-o", "run")[0] == 0
    assert kvsim_("policies", "last_few", "--policy-file", file)[1].startswith("name             last_few\n")


def test_report_is_called_with_what_was_asked(kvsim_, monkeypatch):
    asked = []
    monkeypatch.setattr("kvsim.report.page.report", lambda *runs, **images: asked.append((runs, images)) or "page.html")
    assert kvsim_("report", "one", "two", "-o", "page.html", "--png", "charts") == (0, "page.html\n", "")
    assert asked == [((["one", "two"], "page.html"), {"png": "charts", "svg": None, "costs": None})]


def test_what_is_no_run_is_not_reported(kvsim_):
    code, out, err = kvsim_("report", "nowhere")
    assert (code, out) == (1, "")
    assert err.startswith("kvsim: nowhere: no run.json")


def test_a_folder_of_runs_names_them(kvsim_, trace):
    for name in ("b", "a"):
        kvsim_("replay", trace.path, "-p", "full()", "-o", f"sweep/{name}")
    for command in (("show", "sweep"), ("report", "sweep"), ("compare", "sweep", "sweep")):
        code, out, err = kvsim_(*command)
        assert (code, out) == (1, "")
        assert err == "kvsim: sweep: a folder of runs; name one of them: sweep/a, sweep/b\n"


# ------------------------------------------------------------------------------------------------ demo
def test_demo_writes_a_page_and_nothing_else(kvsim_, trace):
    code, out, said = kvsim_("demo", trace.path)
    assert (code, out) == (0, "demo.html\n")
    assert [line.split()[:5] for line in said.splitlines()] == [
        ["kvsim:", "left", "out:", "snapkv", "needs"]
    ]  # a window of 16 rows
    assert [p.name for p in Path.cwd().iterdir()] == ["demo.html"]
    page = Path("demo.html").read_text()
    assert not [
        name for name in ("quest", "h2o", "tova", "streaming_llm", "kivi", "oracle", "random_read", "recency") if name not in page
    ]


def test_demo_says_which_policies_a_trace_cannot_have(tmp_path):
    bare = synthesize(tmp_path / "bare", prompt=40, window_rows=0, without=("prefill_mass",))
    can, cannot = suppliable(bare)
    assert len(can) + len(cannot) == len(POLICIES)
    assert sorted(line.split()[0] for line in cannot) == ["h2o", "h2o", "qevict", "snapkv", "tova"]


def test_the_bundled_trace_has_all_that_the_demo_needs(monkeypatch, tmp_path):
    assert suppliable(kvsim.open_trace(bundled()))[1] == []
    monkeypatch.setattr("kvsim.trace.bundled.kvsim.__file__", str(tmp_path / "kvsim" / "__init__.py"))
    with pytest.raises(kvsim.errors.BadTrace, match="kvsim demo TRACE"):
        bundled()


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_trace_goes_by_its_name_where_nothing_else_has_it(name, kvsim_, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert kvsim.open_trace(name).path == bundled(name)
    assert kvsim_("trace", "check", name)[0] == 0
    (tmp_path / name).mkdir()
    with pytest.raises(kvsim.errors.BadTrace, match="neither manifest"):
        kvsim.open_trace(name)


# ------------------------------------------------------------------------------------------------ trace
def test_trace_info_for_people_and_for_programs(kvsim_, trace):
    code, out, _ = kvsim_("trace", "info", trace.path)
    assert code == 0
    assert "layers (2 of 2 captured)" in out
    assert "prefill_mass     yes" in out
    found = json.loads(kvsim_("trace", "info", trace.path, "--json")[1])
    assert (found["trace"], found["dtype"], len(found["layers"])) == ("small", "float16", 2)


def test_trace_synth_and_check(kvsim_):
    code, out, _ = kvsim_(
        "trace", "synth", "t", "--prompt", "20", "--steps", "3", "--layers", "2", "--dtype", "float32", "--seed", "7"
    )
    assert (code, out) == (0, "t\n")
    made = kvsim.open_trace("t")
    assert (made.dtype, made.requests[0].prompt, made.requests[0].total, len(made.layers)) == ("float32", 20, 23, 2)
    assert kvsim_("trace", "check", "t") == (0, "t: sound\n", "")
    (Path("t") / "extra.parquet").write_bytes(b"")
    code, out, _ = kvsim_("trace", "check", "t")
    assert code == 1
    assert "extra.parquet" in out
    assert "sound" not in out


# ------------------------------------------------------------------------------------------------ policies
def test_policies_lists_all_by_what_they_decide(kvsim_):
    out = kvsim_("policies")[1]
    kinds = {line: i for i, line in enumerate(out.splitlines()) if not line.startswith(" ")}
    assert list(kinds) == ["keep", "store", "estimate", "read"]
    assert (
        out.index("keep\n")
        < out.index("  h2o ")
        < out.index("store\n")
        < out.index("  kivi ")
        < out.index("read\n")
        < out.index("  quest ")
    )
    columns = [
        [at for at, (a, b) in enumerate(itertools.pairwise(line)) if a == " " != b][1] for line in out.splitlines() if " " in line
    ]
    assert len({*columns}) == 1  # where the descriptions begin


def test_one_policy_in_full(kvsim_):
    h2o = json.loads(kvsim_("policies", "h2o", "--json")[1])[0]
    assert h2o["needs"] == {"attention": "--steps N (every decode step)", "prefill_mass": "--prefill-mass"}
    assert h2o["parameters"]["hold"] == "required"
    assert h2o["parameters"]["recent"] == "0.5"
    assert "2306.14048" in h2o["paper"]
    text = kvsim_("policies", "h2o")[1]
    assert "hold             required" in text
    assert "prefill_mass     --prefill-mass" in text


def test_presets_are_expressions_with_their_sources(kvsim_):
    out = kvsim_("policies", "--presets")[1]
    assert 'kivi(preset="examples")  bits=2, group=32, residual=32\n  jy-yuan/KIVI' in out
    assert "defaults of SnapKVCluster\n  kvsim's own: window=32\n" in out  # the other values are the same


def test_an_index_is_described_too(kvsim_):
    assert "rounding" in kvsim_("policies", "boxes")[1]


# ------------------------------------------------------------------------------------------------ refused
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "the following arguments are required: command"),
        ("replay", "TRACE, -p/--policy, -o/--out"),
        ("replay T -p full() -o run --layer 3", "unknown option '--layer', did you mean '--layers'?"),
        ("replay T --strictly -p full() -o run", "unknown option '--strictly', did you mean '--strict'?"),
        ("replay T -p full() -o run --layers 3-1", "'3-1': expected numbers such as 3, 0,1 or 4-9"),
        ("replay T -p full() -o run --steps a", "'a': expected numbers such as 3"),
        ("replay T -p full() -o run --workers two", "invalid int value: 'two'"),
        ("replay T -p full() -o run --allocator heads", "unknown allocator 'heads', did you mean 'head'?"),
        ("replay T -p qest(read=pages(2)) -o run", "unknown policy 'qest', did you mean 'quest'?"),
        ("replay T -p quest(read=512) -o run", "read=512"),
        ("replay T -p @none.toml -o run", "none.toml"),
        ("replay T -p full() -o run --policy-file none.py", "none.py"),
        ("policies qest", "did you mean 'quest'?"),
        ("trace inf T", "unknown command 'inf', did you mean 'info'?"),
        ("trace info T --jsn", "unknown option '--jsn', did you mean '--json'?"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(kvsim_, trace, words, told):
    code, out, err = kvsim_(*(trace.path if w == "T" else w for w in words.split()))
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("kvsim: ")
    assert err.count("\n") == 1
    assert not list(Path.cwd().iterdir())


def test_a_bad_trace_is_one_line_and_exit_1(kvsim_, trace, tmp_path):
    broken = shutil.copytree(trace.path, tmp_path / "broken")
    (broken / "manifest.json").unlink()
    code, out, err = kvsim_("replay", broken, "-p", QUEST, "-o", "run")
    assert (code, out) == (1, "")
    assert "partial" in err
    assert err.count("\n") == 1
    assert not Path("run").exists()


def test_a_folder_that_cannot_be_written_is_one_line(kvsim_, trace):
    Path("file").write_text("")
    code, out, err = kvsim_("replay", trace.path, "-p", QUEST, "-o", "file/run")
    assert (code, out) == (1, "")
    assert err.startswith("kvsim: file")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("tasks", "told"), [(1, "run.partial keeps what is finished, and the same command goes on"), (0, "nothing was finished")]
)
def test_an_interrupt_says_what_is_kept(kvsim_, trace, monkeypatch, request, tasks, told):
    from kvsim.replay.work import Work

    do, done = Work.do, []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted(self, task):
        if len(done) == tasks:
            signal.raise_signal(signal.SIGINT)
        done.append(task)
        do(self, task)

    monkeypatch.setattr(Work, "do", interrupted)
    code, out, err = kvsim_("replay", trace.path, "-p", QUEST, "-o", "run")
    assert (code, out) == (130, "")
    assert told in err
    assert err.count("\n") == 1
    monkeypatch.setattr(Work, "do", do)
    assert kvsim_("replay", trace.path, "-p", QUEST, "-o", "run")[0] == 0
