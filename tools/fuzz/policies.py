"""Policies: expressions, files per layer and head, calibrations, and what the author's kit does with them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tools.fuzz.mutate import TEXTS, altered, bent, huge, renumbered, reworded
from tools.fuzz.surface import Finding, replayed

POLICIES = (
    "full()", "everything(page=16)", "streaming_llm(hold=tokens(512), sinks=4)", "h2o(hold=share(0.2), recent=share(0.5))",
    "h2o(hold=share(0.5)) >> quest(read=tokens(256), page=16, heads='max', dense_layers=2)", "quest(read=exact(r=1), page=8)",
    "quest(read=mass(eps=0.05), index=boxes(n=2, by='cluster', rotate='hadamard'))", "quest(read=top_p(p=0.9), refresh='never')",
    "quest(read=pages(4), index=sphere(), shards=shards(2, budget='each'))", "full() >> kivi(k_bits=2, v_bits=4, group=32)",
    "qevict(hold=kib(64), window=8, period=4)", "snapkv(hold=share(0.25), window=32)", "oracle(read=share(0.1, of='visible'))",
    "full() >> fp8() >> quest(read=share(1/4))", "tova(hold=tokens(-1))", "random_read(read=mib(1.5), seed=3)",
    "h2o(hold=tokens(99), norm='queries') >> evicted_moments(order=0) >> quest(read=tokens(64))", "dsa(preset='deepseek-v3.2')",
    "sparda_proxy(read=pages(8), index=block_mean(dtype='float16'), heads='softmax_mean')", "r_kv(hold=tokens(128), mix=0.07)",
    "offload(device=pages(64), evict='lru', prefetch=None) >> quest(read=pages(8), index=digest(keys='recon'))",
    "turboquant(preset='k3v4_nc')", "caote(hold=share(0.2), base='tova') >> int4(group=64)",
    "quest(read=gap(min=0.5, floor=pages(2), cap=pages(32)))", "oscar_cov(rotate='none')",
    "pools(hold=tokens(64), pinned='answer')", "defensivekv(hold=share(0.3), scope='model')",
    "expected_attention(hold=kib(8), epsilon=0.02)",
)  # fmt: skip


def expression(rng: Random, _: Any, folder: Path) -> None:
    """What parses has one canonical form."""
    from kvsim.policies.language import canonical, parse

    chain = parse(reworded(rng, rng.choice(POLICIES), POLICIES))
    text = canonical(chain)
    if canonical(parse(text)) != text:
        raise Finding(f"the canonical form {text!r} is not its own")


def per_layer(rng: Random, _: Any, folder: Path) -> None:
    from kvsim.policies.language import parse_policy

    lines = [
        f'default = "{rng.choice(POLICIES)}"',
        "[layers]",
        f'"0" = "{rng.choice(POLICIES)}"',
        f'"3-5" = "{rng.choice(POLICIES)}"',
    ]
    lines += ["[heads.3]", f'"0" = "{rng.choice(POLICIES)}"', f'"1,2" = "{rng.choice(POLICIES)}"']
    text = "\n".join(lines) + "\n"
    (folder / "policy.toml").write_bytes(
        bent(rng, text.encode()) if rng.random() < 0.3 else reworded(rng, text, lines).encode("utf-8", "surrogatepass")
    )
    found = parse_policy(f"@{folder / 'policy.toml'}")
    for layer in (0, 3, 10**9):
        found.at(layer, 4)


# ------------------------------------------------------------------------------------------------ calibrations
CALIBRATED = {
    "kvquant.npz": "kvquant(bits=2, outliers=0.1{})",
    "oscar.npz": "oscar_cov(group=8, sinks=2, recent=4{})",
    "gap.npz": "quest(read=gap({}), page=4)",
}


def calibrations(root: Path) -> dict[str, Any]:
    """Files made from one trace, and another that they are replayed on."""
    from kvsim.replay.calibrate import calibrate
    from kvsim.synth.generate import synthesize

    other = synthesize(root / "other", seed=1, prompt=48, steps=6)
    for name, policy in CALIBRATED.items():
        options = "min=0, floor=pages(2), cap=pages(8)" if name == "gap.npz" else ""
        calibrate(other, policy.format(options), root / name)
    trace = synthesize(root / "trace", prompt=40, steps=4)
    return {"trace": trace.path, "files": {name: (root / name).read_bytes() for name in CALIBRATED}}


def calibration(rng: Random, good: dict[str, Any], folder: Path) -> None:
    """Refused, or replayed to numbers."""
    name = rng.choice(list(CALIBRATED))
    data, file = good["files"][name], folder / name
    file.write_bytes(bent(rng, data, list(good["files"].values())) if rng.random() < 0.3 else _recalibrated(rng, data))
    if name == "gap.npz":
        policy = CALIBRATED[name].format(f'file="{file}", risk={rng.choice((0.01, 0.5, 0.99))}')
    else:
        policy = CALIBRATED[name].format(f', calibration="{file}"')
    run = replayed(good["trace"], policy, folder / "run")
    if not run.heads["rel_l2"].is_finite().all():
        raise Finding("errors that are no numbers")


def _recalibrated(rng: Random, data: bytes) -> bytes:
    """What the file says of itself altered, or an array renamed, cut, reshaped, or filled with what nobody learned."""
    with np.load(io.BytesIO(data)) as file:
        arrays = dict(file)
    name = rng.choice(sorted(arrays))
    x = arrays[name]
    if name == "about" or rng.random() < 0.3:
        name, x = "about", np.array(json.dumps(altered(rng, json.loads(str(arrays["about"])))))
    else:
        match rng.randrange(7):
            case 0:
                del arrays[name]
                name = rng.choice(("0", "x.k", "..", "0.k.level", "9999999999.gap", "²"))
            case 1:
                x = x[rng.randrange(len(x)) :]
            case 2:
                x = x.reshape(rng.choice((x.shape[::-1], (-1,), (1, *x.shape))))
            case 3:
                x = np.full_like(x, rng.choice((0, 1, -1, np.nan, np.inf, 3e38)))
            case 4:
                x = x[..., ::-1]
            case 5:
                x = np.array(rng.choice(("text", 3.0, [1j, 2], [])))
            case 6:
                return huge(arrays, name)
    to = io.BytesIO()
    rng.choice((np.savez, np.savez, np.savez_compressed))(to, **(arrays | {name: x}))
    return to.getvalue()


# ------------------------------------------------------------------------------------------------ the author's kit
SMALL = (
    "streaming_llm(hold=tokens(24), sinks=2)", "h2o(hold=tokens(24), decay=0.9)", "tova(hold=share(0.5))",
    "snapkv(hold=tokens(24), window=8)", "adakv(hold=tokens(24), window=8)", "pyramidkv(hold=tokens(24), window=8, beta=2)",
    "criticalkv(hold=tokens(24), window=8, base='adakv')", "defensivekv(hold=tokens(24), window=8)",
    "caote(hold=tokens(24), base='h2o')", "expected_attention(hold=tokens(24), sinks=2)",
    "r_kv(hold=tokens(24), window=4, period=4)", "pools(hold=tokens(24), sinks=2, recent=8, heavy=4)", "knorm(hold=tokens(24))",
    "qevict(hold=share(0.6), window=4, period=4, sinks=2, recent=4)", "zipcache(period=4, window=8)",
    "kivi(bits=2, group=4, residual=8, pack=32)", "turboquant(k_bits=3, v_bits=4, exact_layers=0)",
    "oscar_ots(bits=2, group=4, residual=4)", "oscar_cov(group=4, sinks=2, recent=4, rotate='hadamard')", "fp8(residual=4)",
    "int4(bits=3, group=4)", "offload(device=pages(4), evict='lru') >> quest(read=pages(2), page=4)",
    "h2o(hold=tokens(24)) >> evicted_moments(order=1) >> quest(read=tokens(8), page=4, index=block_mean())",
    "dsa(read=tokens(8))", "sparda_proxy(read=pages(2), page=4)",
    "quest(read=mass(eps=0.05), page=4, index=boxes(n=2, by='cluster'))", "quest(read=exact(r=2), page=4)",
    "quest(read=top_p(p=0.9), page=4, index=digest())", "quest(read=tokens(8), page=4, tile=2, heads='split', private=1)",
    "oracle(read=tokens(8), page=4)", "quest(read=pages(2), page=4, index=sphere(), shards=shards(2, budget='each'))",
    "recency(read=share(0.3), page=4)", "random_read(read=tokens(8), page=4)",
    "tova(hold=tokens(24)) >> quest(read=gap(min=0.5, floor=pages(1), cap=pages(4)), page=4, refresh=2)",
    "random_keep(hold=tokens(24), seed=1)",
)  # fmt: skip
CRASH = re.compile(r"\w+: [A-Z]\w*: ")  # LAW: TypeError: ...


def kit(rng: Random, _: Any, folder: Path) -> None:
    """What is written stays in its folder and compiles; a policy of kvsim's own keeps every law, whatever its parameters are."""
    from kvsim.cli.author import KINDS, stubs
    from kvsim.conformance import check_policy

    if rng.random() < 0.3:
        name = rng.choice(TEXTS) if rng.random() < 0.3 else reworded(rng, "my_policy", SMALL)
        for file, text in stubs(name, rng.choice(sorted(KINDS)), folder).items():
            if file.parent != folder:
                raise Finding(f"{file} leaves the folder")
            if file.suffix == ".py":
                compile(text, str(file), "exec")
        return
    text = rng.choice(SMALL)
    for line in check_policy(renumbered(rng, text) if rng.random() < 0.8 else reworded(rng, text, SMALL)):
        if CRASH.match(line) or "differs" in line or "writes into" in line:
            raise Finding(line)
