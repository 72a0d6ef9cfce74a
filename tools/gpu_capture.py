"""Capture on a device, as tools/gpu_check.sh runs it: a Llama of the size of 1B with random weights (--small: tiny, 512 tokens), greedy
with and without capture, tokens compared, outputs attended again bit for bit, and a profile of decode steps for the cost importer.

Prints tokens a second both ways, time stalled, bytes, memory of the device. Exits 1 when a token or an output differs."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.capture.check import summary, verify
from kvsim.capture.decode import decode
from kvsim.capture.prompt import prompt_of
from kvsim.capture.run import capture, planned
from kvsim.cost.load import lines, load
from kvsim.errors import KvsimError

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
PROFILED = 8  # decode steps in the profile


def model(small: bool, device: str) -> Any:
    """Random weights, bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **(TINY if small else LARGE), vocab_size=32_000, max_position_embeddings=65_536, attn_implementation="sdpa"
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).to(device).eval()


def main() -> int:
    p = argparse.ArgumentParser(description="capture on a device, checked and timed")
    p.add_argument("out", type=Path, help="a folder for the trace and the profile")
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true")
    args = p.parse_args()
    tokens, steps = (512, 24) if args.small else (32_768, 128)
    found, path = model(args.small, args.device), args.out / "trace"
    shutil.rmtree(path, ignore_errors=True)
    prompt = prompt_of(torch.randint(0, 32_000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist())
    print(f"{sum(x.numel() for x in found.parameters()) / 1e6:.0f}M parameters, {tokens:,} tokens, {steps} steps, {args.device}")
    decode(found, prompt_of(list(prompt.tokens[:64])), 2)  # what is loaded and compiled at a first forward
    plain, bare = timed(args.device, lambda: decode(found, prompt, steps))
    plan = planned(found, prompt, steps)
    report, watched = timed(args.device, lambda: capture(found, prompt, path, steps=steps))
    for name, seconds in (("without capture", bare), ("with capture", watched)):
        print(f"{name}: {seconds:.2f} s, {(tokens + steps) / seconds:,.0f} tokens/s in all")
    print(
        f"waited for the disk {report.stalled_seconds:.2f} s; {report.bytes:,} bytes, {report.bytes / plan.total_bytes - 1:+.2%} of the estimate"
    )
    if args.device != "cpu":
        print(f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB of the device's memory")
    same = plain == list(report.tokens)
    print("the same tokens with and without capture" if same else "MISSED: capture changed the tokens")
    again = verify(path, found)
    print(summary(again))
    print(*profiled(found, prompt_of(list(prompt.tokens[:512])), args), sep="\n")
    return 0 if same and all(x.sound for x in again) else 1


def timed(device: str, run: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    out = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return out, time.perf_counter() - start


def profiled(found: Any, prompt: Any, args: argparse.Namespace) -> list[str]:
    """Decode steps under PyTorch's profiler, written for `kvsim cost import`; what that makes of it."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if args.device != "cpu" else [])
    with profile(activities=kinds) as watch:
        decode(found, prompt, PROFILED)
    file = args.out / "decode.json"
    watch.export_chrome_trace(str(file))
    try:
        return lines(load([file]))
    except KvsimError as e:  # a CPU has no kernels to import
        return [f"the profile {file.name}: {e}"]


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
