"""What a capture computes beside the model: attention mass per prompt key, norms of projected values. Float32, in blocks."""

from __future__ import annotations

import torch

from kvsim.geometry import Layer

BLOCK_BYTES = 16 << 20  # of working memory


def add_mass(mass: torch.Tensor, q: torch.Tensor, k: torch.Tensor, first_q: int, first_k: int, layer: Layer) -> None:
    """Adds to mass f64[Hq, prompt] each key's attention probability summed over the queries.

    q [Hq, S, dk] at positions first_q ..., k [Hkv, T, dk] at positions first_k ..., in any dtype; the query at t sees the keys
    up to t, in a sliding layer the last `window` of them; learned sinks join the denominator only."""
    queries, group = q.shape[1], layer.group
    block = max(1, BLOCK_BYTES // (4 * group * k.shape[1]))
    for h in range(layer.kv_heads):
        heads, keys = slice(h * group, (h + 1) * group), k[h].float()
        for i in range(0, queries, block):
            t = torch.arange(first_q + i, first_q + min(i + block, queries), device=q.device)
            low = max(0, layer.first_visible(first_q + i) - first_k)
            high = int(t[-1]) + 1 - first_k
            pos = torch.arange(first_k + low, first_k + high, device=q.device)
            logit = (q[heads, i : i + block].float() @ keys[low:high].T).mul_(layer.scale)
            if layer.softcap is not None:
                logit = logit.div_(layer.softcap).tanh_().mul_(layer.softcap)
            hidden = pos > t[:, None]
            if layer.window is not None:
                hidden |= pos <= t[:, None] - layer.window
            logit.masked_fill_(hidden, -torch.inf)
            if layer.sinks is not None:
                sink = torch.tensor(layer.sinks[heads], device=q.device)[:, None, None]
                logit = torch.cat([logit, sink.expand(-1, len(t), 1)], dim=-1)
            chance = torch.softmax(logit, dim=-1)[..., : high - low]
            mass[heads, first_k + low : first_k + high] += chance.sum(dim=1)


def queries_of(prompt: int, layer: Layer, device: torch.device) -> torch.Tensor:
    """i32[prompt]: how many prompt queries see each key."""
    later = torch.arange(prompt, 0, -1, dtype=torch.int32, device=device)
    return later if layer.window is None else later.clamp(max=layer.window)


def projected_norm(v: torch.Tensor, projection: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Values [Hkv, n, dv], W_O [Hq, dv, hidden] -> f32[Hq, n], the L1 norm of each value after each head's part of W_O."""
    n, block = v.shape[1], max(1, BLOCK_BYTES // (4 * projection.shape[2]))
    norm = torch.empty(layer.q_heads, n, device=v.device)
    for head in range(layer.q_heads):
        weight, values = projection[head].float(), v[head // layer.group]
        for i in range(0, n, block):
            norm[head, i : i + block] = (values[i : i + block].float() @ weight).abs().sum(dim=-1)
    return norm
