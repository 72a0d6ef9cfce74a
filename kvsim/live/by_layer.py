"""Which layers bear sparsity: a policy in one layer, or in a few neighbours, and full attention in all others."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.errors import WrongUse
from kvsim.policies.language import Policy, per_layer


def one_at_a_time(policy: Policy, layers: Sequence[int], size: int = 1) -> list[Policy]:
    """The policy in each run of `size` layers alone. Raises WrongUse: a policy that has layers or heads of its own."""
    if size < 1:
        raise WrongUse(f"groups of {size} layers: expected 1 or more")
    if policy.name is not None:
        raise WrongUse(f"policy {policy.name} says itself what is done where; to try layers one by one, give an expression")
    groups = [list(layers[i : i + size]) for i in range(0, len(layers), size)]
    return [per_layer(dict.fromkeys(x, policy.default), default="full()", name=f"layers_{x[0]}_{x[-1]}") for x in groups]
