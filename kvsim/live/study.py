"""A closed-loop study: prompts through a model under policies, prompt by prompt, into a directory that a rerun takes up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvsim import __version__, tables
from kvsim.capture import refuse
from kvsim.capture.decode import end_of_text
from kvsim.capture.layers import Anatomy, probe
from kvsim.capture.prompt import Prompt, prompt_of
from kvsim.capture.source import machine, source_of
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from kvsim.live import measure
from kvsim.live.decode import Row, decode, following_full, following_own, request_of, rows_of, sampling
from kvsim.live.needs import attended, check, needs_of
from kvsim.live.prefill import prefill, recorded
from kvsim.live.twins import twins
from kvsim.policies.language import Policy, parse_policy

ANSWER = 12  # tokens of an answer, where nothing says how many


@dataclass(frozen=True)
class How:
    """How a study runs. answer: tokens after the last that is fed; free: also let every row go its own way; samples: seeds of sampled free
    runs at `temperature` (none: the likeliest token); open_loop: replay the policies beside; inject: layers whose reads take the evidence, too;
    chunk: prompt tokens of a forward."""

    answer: int = ANSWER
    free: bool = False
    samples: tuple[int, ...] = ()
    temperature: float = 1.0
    open_loop: bool = True
    inject: tuple[int, ...] = ()
    kv_dtype: str | None = None
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class Bench:
    """A model with the policies that are tried in it."""

    model: Any
    tokenizer: Any
    anatomy: Anatomy
    layers: list[Layer]
    policies: list[Policy]
    how: How

    @property
    def rows(self) -> list[Row]:
        return rows_of(self.policies, self.how.inject)

    def say(self, ids: Sequence[int]) -> str:
        """Tokens as text, up to the first that ends it."""
        ends = end_of_text(self.model)
        cut = next((i for i, x in enumerate(ids) if x in ends), len(ids))
        return str(self.tokenizer.decode(list(ids[:cut]), skip_special_tokens=True))


def bench(model: Any, policies: Iterable[Any], tokenizer: Any = None, how: How | None = None) -> Bench:
    """Raises WrongUse: a model whose attention cannot be reached, a policy that it cannot supply."""
    how = how or How()
    parsed = list({p.id: p for p in map(parse_policy, policies)}.values())
    parsed = [p for p in parsed if p.id != parse_policy("full()").id]  # row 0 is it
    if not parsed:
        raise WrongUse("no policy to run beside full attention; give at least one, for example quest(read=share(0.25))")
    refuse.model(model)
    anatomy = probe(model)
    layers = attended(anatomy, how.kv_dtype)
    if not layers:
        raise WrongUse(f"{type(model).__name__}: no layer attends")
    if unknown := sorted(set(how.inject) - {x.id for x in layers}):
        raise WrongUse(f"inject in layers {unknown}: not among the attention layers of this model, {[x.id for x in layers]}")
    check(parsed, layers, anatomy)
    return Bench(model, tokenizer, anatomy, layers, parsed, how)


def run_prompt(bench: Bench, prompt: Prompt, request: int, task: str = "") -> dict[str, pa.Table]:
    """The three tables of one prompt. Raises WrongUse."""
    model, how = bench.model, bench.how
    answer = how.answer if prompt.answers or not prompt.fed else 0
    steps = len(prompt.fed) + answer
    refuse.length(model, prompt.prefill + steps)
    refuse.tokens(model, [i for i in prompt.tokens if i >= 0])
    if how.inject and not request_of(prompt, prompt.prefill + steps).evidence:
        raise WrongUse("inject: the prompt marks no evidence")
    check(bench.policies, bench.layers, bench.anatomy, request_of(prompt, prompt.prefill + steps))
    needs = recorded(needs_of(bench.policies, bench.layers), prompt.prefill)
    prefilled = prefill(model, bench.anatomy, bench.layers, prompt, needs, how.chunk)
    say = bench.say if bench.tokenizer is not None and answer else None
    at = {"request": request, "task": task, "context": request_of(prompt, prompt.prefill + 1).digest}
    forced = decode(model, bench.anatomy, prefilled, bench.rows, steps, following_full)
    open_loop = twins(forced.sources(0), bench.policies, heads_only=True) if how.open_loop else []
    answers = [measure.answers_table(forced, prompt, measure.FORCED_MODE, 0, at, say)]
    stepped = [measure.steps_table(forced, measure.FORCED_MODE, 0, request)]
    layers = measure.layers_table(forced, request, open_loop)
    del forced, open_loop  # their caches are large
    follows = [sampling(seed, how.temperature) for seed in how.samples] or [following_own]
    for sample, follow in enumerate(follows if answer and (how.free or how.samples) else []):
        found = decode(model, bench.anatomy, prefilled, bench.rows, steps, follow)
        answers.append(measure.answers_table(found, prompt, measure.FREE_MODE, sample, at, say))
        stepped.append(measure.steps_table(found, measure.FREE_MODE, sample, request))
    return {"answers": pa.concat_tables(answers), "steps": pa.concat_tables(stepped), "layers": layers}


def run(bench: Bench, prompts: Iterable[tuple[str, Any]], out: str | Path, source: dict[str, Any] | None = None) -> Path:
    """Every (task, prompt) into the new directory `out`: live.json, answers, steps and layers. A study that was interrupted goes on where it
    stopped when it is repeated. Raises WrongUse."""
    for _ in running(bench, prompts, out, source):
        pass
    return Path(out)


def running(
    bench: Bench, prompts: Iterable[tuple[str, Any]], out: str | Path, source: dict[str, Any] | None = None
) -> Iterator[tuple[int, dict[str, pa.Table]]]:
    """As `run`, and every prompt's number and tables as they come."""
    out, given = Path(out), [(task, prompt_of(p)) for task, p in prompts]
    if out.exists() or not out.name:
        raise WrongUse(f"{out}: exists already, and a study is never overwritten; choose another -o, or remove it")
    draft = out.with_name(out.name + ".partial")
    _begin(draft, about(bench, given, source))
    for n, (task, prompt) in enumerate(given):
        if not (draft / f"layers-{n}.parquet").exists():  # written last
            found = run_prompt(bench, prompt, n, task)
            for name in tables.LIVE_TABLES:
                part = draft / f"{name}-{n}.parquet"
                tables.write(part.with_suffix(".new"), [found[name]])
                part.with_suffix(".new").rename(part)
            yield n, found
    whole = draft / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    for name in tables.LIVE_TABLES:
        tables.write(whole / f"{name}.parquet", [pq.read_table(draft / f"{name}-{n}.parquet") for n in range(len(given))])
    shutil.copy(draft / "live.json", whole / "live.json")
    whole.rename(out)
    shutil.rmtree(draft)


def about(bench: Bench, prompts: Sequence[tuple[str, Prompt]], source: dict[str, Any] | None) -> dict[str, Any]:
    """live.json: all that a reader must know to trust the tables; nothing of the machine or the user."""
    told = {k: v for k, v in (source or source_of(bench.model)).items() if k != "config"}
    return {
        "schema": tables.LIVE_SCHEMA,
        "kvsim": __version__,
        "open_loop": False,
        "source": told,
        "run": machine(bench.model) | {"attention_backend": bench.anatomy.backend},
        "policies": [{"id": row.id, "form": row.policy.form, "inject": list(row.inject)} for row in bench.rows],
        "layers": [x.id for x in bench.layers],
        "kv_dtype": bench.layers[0].dtype,
        "options": json.loads(json.dumps(asdict(bench.how))),
        "prompts": [
            {"task": task, "tokens": p.prefill, "fed": len(p.fed), "mode": p.mode, "seed": p.meta.get("seed")}
            for task, p in prompts
        ],
    }


def _begin(draft: Path, told: dict[str, Any]) -> None:
    """Raises WrongUse: the directory belongs to another study."""
    file = draft / "live.json"
    if file.is_file():
        if json.loads(file.read_text("utf-8")) != told:
            raise WrongUse(
                f"{draft}: begun with another model, policies, prompts or options; repeat that study, choose another -o, or remove it"
            )
    elif draft.exists() and any(draft.iterdir()):
        raise WrongUse(f"{draft}: not a study that can go on; choose another -o, or remove it")
    draft.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
