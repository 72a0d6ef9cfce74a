"""Advice in words, and as a policy file that says where it came from."""

from __future__ import annotations

from collections.abc import Iterator

from kvsim.advise.advice import Advice, Trial
from kvsim.metrics.interval import FEWEST
from kvsim.policies.protocol import Chain


def lines(advice: Advice, tried: Trial | None) -> Iterator[str]:
    """What was asked, what it costs where it was made, and how it fares elsewhere."""
    goal = advice.goal
    made = f"the {_contexts(len(advice.made_from))} it was made from"
    yield f"target {goal}: {goal.measure} {advice.value:.4g} on {made}, {_kb(advice.bytes)} a step"
    yield f"  no budgets per layer and kv head need less than {_kb(advice.bound)} there"
    whole = sum(budget is None for budget in advice.pages.values())
    same = "everything" if advice.same is None else f"{advice.same} pages"
    yield f"  {whole} of {len(advice.pages)} kv heads read everything; the best budget that is one for all is {same}"
    if tried is None:
        yield "  not tried on other contexts: there are none; give more traces, or --test"
        return
    reached = f"{goal.measure} {tried.value:.4g}, {_kb(tried.bytes)} a step"
    yield f"on {_contexts(tried.contexts, 'other ')}: {reached}; dense attention {_kb(tried.dense)}"
    yield f"  the best uniform budget of the first contexts: {goal.measure} {tried.same_value:.4g}, {_kb(tried.same_fixed)}"
    yield f"  a uniform budget at equal {goal.measure}: {_kb(tried.same_bytes)}; the advice saves {tried.saving:.1%}{_sure(tried)}"
    if tried.oracle is not None:
        times = tried.bytes / max(tried.oracle, 1)
        yield f"  an oracle that chooses anew at each step: {_kb(tried.oracle)}, the advice reads {times:.2f} times that"


def written(advice: Advice, chain: Chain, name: str, tried: Trial | None) -> str:
    """The policy file, with what it was made from as comments."""
    told = [*lines(advice, tried), "made from " + ", ".join(advice.made_from)]
    return "".join(f"# {line}\n" for line in told) + advice.policy(chain, name).form


def _sure(tried: Trial) -> str:
    if tried.interval is None:
        return f" (no interval: fewer than {FEWEST} contexts)"
    low, high = tried.interval
    return f" (95 % interval over contexts {low:.1%} to {high:.1%})"


def _contexts(n: int, which: str = "") -> str:
    return f"{n} {which}context{'s' * (n != 1)}"


def _kb(x: float) -> str:
    return f"{x / 1024:,.1f} KiB"
