"""Runs in an environment of its own, without kvsim: what kvpress scores and keeps of tensors given in a file.

    python press.py IN.npz OUT.npz

IN: q [Hq, T, d], k, v [Hkv, T, d], wo [Hq, d, hidden] in float32; kept: how many tokens a kv head keeps. OUT: score.NAME [Hkv, T] and
kept.NAME bool[Hkv, T] for every press. The attention module is a stub whose rotation turns by nothing, so q and k are used as they are;
only the queries that expected attention expects are turned, by RoPE of base 10000."""

from __future__ import annotations

import sys
from importlib.metadata import version
from types import SimpleNamespace

import kvpress
import numpy as np
import torch
from torch import nn

THETA = 10000.0


class Stub(nn.Module):
    """The parts of a Llama attention layer that presses look at."""

    def __init__(self, q_heads: int, kv_heads: int, dim: int, wo: torch.Tensor):
        super().__init__()
        self.config = SimpleNamespace(
            num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=dim, hidden_size=wo.shape[-1],
            num_hidden_layers=4, _attn_implementation="sdpa",
        )  # fmt: skip
        self.head_dim, self.num_key_value_groups, self.layer_idx = dim, q_heads // kv_heads, 0
        self.q_proj, self.o_proj = nn.Identity(), nn.Linear(q_heads * dim, wo.shape[-1], bias=False)
        self.q_proj.weight = nn.Parameter(torch.eye(q_heads * dim))  # which expected attention multiplies by itself
        self.o_proj.weight.data = wo.reshape(q_heads * dim, -1).T.contiguous()

    def rotary_emb(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [1, n, dim]: how expected attention turns the queries of later positions."""
        frequency = THETA ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angle = (positions[0, :, None] * frequency).repeat(1, 2)[None]
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def main(source: str, target: str) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    given = {name: torch.from_numpy(x) for name, x in np.load(source).items()}
    q, k, v, wo, kept = (given[name] for name in ("q", "k", "v", "wo", "kept"))
    heads, total, dim = q.shape
    stub = Stub(heads, len(k), dim, wo)
    still = torch.ones(1, total, dim), torch.zeros(1, total, dim)
    rows, many = q.transpose(0, 1).reshape(1, total, heads * dim), int(kept)
    ratio = 1 - many / total
    causal = torch.full((total, total), float("-inf")).triu(1)
    attentions = torch.softmax(q @ k.repeat_interleave(heads // len(k), 0).transpose(1, 2) / dim**0.5 + causal, -1)[None]
    snap = {"window_size": 32, "kernel_size": 5}
    presses = {
        "snapkv": kvpress.SnapKVPress(ratio, **snap),
        "tova": kvpress.TOVAPress(ratio),
        "streaming_llm": kvpress.StreamingLLMPress(ratio, n_sink=4),
        "knorm": kvpress.KnormPress(ratio),
        "observed": kvpress.ObservedAttentionPress(ratio),
        "expected_attention": kvpress.ExpectedAttentionPress(ratio),
        "criticalkv": kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio, **snap)),
        "adakv": kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, **snap)),
        "criticaladakv": kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(ratio, **snap)),
    }
    found = {"version": np.array(version("kvpress"))}
    for name, press in presses.items():
        given = (stub, rows, k[None], v[None], attentions if name == "observed" else None, {"position_embeddings": still})
        mask = torch.zeros(len(k), total, dtype=torch.bool)
        if hasattr(press, "score"):
            score = press.score(*given)[0]
            found[f"score.{name}"] = score.numpy().copy()
            mask.scatter_(1, score.topk(kvpress.utils.compute_n_kept(total, press.compression_ratio), dim=-1).indices, True)
        else:
            press.compress(*given)
            _, head, at = stub.masked_key_indices
            mask[:] = True
            mask[head, at] = False
        found[f"kept.{name}"] = mask.numpy()
    np.savez(target, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
