"""One policy on a model as it is used: whatever is generated inside decodes under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from threadpoolctl import threadpool_limits

from kvsim.capture import refuse
from kvsim.capture.hooks import Call, Given, replacing
from kvsim.capture.layers import Anatomy, probe
from kvsim.capture.prompt import CONTEXT, Prompt
from kvsim.capture.recorder import Recorder
from kvsim.errors import WrongUse
from kvsim.geometry import Layer
from kvsim.live.decode import Decoding, Row, request_of
from kvsim.live.needs import attended, check, needs_of
from kvsim.live.prefill import Gathered, recorded
from kvsim.policies.language import Policy, parse_policy

STEPS = 1024


@contextmanager
def live(model: Any, policy: Any, *, steps: int = STEPS, kv_dtype: str | None = None) -> Iterator[Attached]:
    """While inside, `model` decodes under a policy: its attention reads what the policy left it, and what is evicted is gone for good.

    Batch 1, one token a step after the prompt, a DynamicCache (it still holds every row: kvsim says what a policy does, and saves nothing).
    steps: the most that follow a prompt. A new prompt in an empty cache begins anew. Raises WrongUse: a model whose attention cannot be reached,
    a need that it cannot supply, and at the forward that shows it a batch, speculative decoding or a cache of another kind."""
    refuse.model(model)
    anatomy, parsed = probe(model), parse_policy(policy)
    layers = attended(anatomy, kv_dtype)
    check([parsed], layers, anatomy)
    found = Attached(model, anatomy, layers, parsed, steps)
    with threadpool_limits(1, user_api="blas"), replacing(model, found.attend, found.before):
        yield found


@dataclass(eq=False)
class Attached:
    """held, read: of every decode step so far, the tokens that were held and read, means over layers and heads."""

    model: Any
    anatomy: Anatomy
    layers: list[Layer]
    policy: Policy
    steps: int
    prompt: int = 0
    seen: int = 0
    gathered: Gathered = field(default_factory=Gathered, repr=False)
    recorder: Recorder | None = field(default=None, repr=False)
    now: Decoding | None = field(default=None, repr=False)

    @property
    def held(self) -> list[float]:
        return [] if self.now is None else self.now.held[:, : self.seen - self.prompt, 0].mean(0).tolist()

    @property
    def read(self) -> list[float]:
        return [] if self.now is None else self.now.read[:, : self.seen - self.prompt, 0].mean(0).tolist()

    def before(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """At each forward of the model. Raises WrongUse."""
        given = dict(zip(refuse.FORWARD, args, strict=False)) | options
        ids = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
        if ids is None:
            return
        new = int(ids.shape[1])
        if cache is None:
            raise WrongUse("a forward without a cache: a policy needs one; generate with use_cache=True")
        if cache.get_seq_length() == 0:
            self._begin(new)
        refuse.forward(args, options, self.seen, self.prompt)
        if cache.get_seq_length() != self.seen:
            raise WrongUse(
                f"a cache of {cache.get_seq_length()} tokens after {self.seen} that went through; expected one that was filled in here"
            )
        if self.seen >= self.prompt:
            self._decodes()
        self.seen += new

    def attend(self, given: Given, own: Callable[[], Any]) -> Any:
        """Answers one attention call of the model."""
        if self.now is not None:
            return self.now.attend(given, own)
        result = own()
        if self.recorder is not None:
            self.recorder.see(Call(**vars(given), out=result[0]))
        return result

    def _begin(self, prompt: int) -> None:
        refuse.length(self.model, prompt)
        self.prompt, self.seen, self.now, self.gathered = prompt, 0, None, Gathered()
        keep = recorded(needs_of([self.policy], self.layers), prompt)
        self.recorder = Recorder(self.layers, self.anatomy.projections, self.anatomy.backend, prompt, keep, self.gathered.put)

    def _decodes(self) -> None:
        """The next token is one of decode."""
        if self.seen - self.prompt >= self.steps:
            raise WrongUse(f"more than {self.steps} decode steps; say how many may come: kvsim.live(model, policy, steps=N)")
        if self.now is None:
            prompt = Prompt((0,) * self.prompt, (CONTEXT,) * self.prompt, self.prompt)
            prefixes = {x.id: self.gathered.prefix(x) for x in self.layers}
            self.now = Decoding(self.anatomy, prefixes, request_of(prompt, self.prompt + self.steps), [Row(self.policy)])
        self.now.at = self.seen - self.prompt
