"""The kernels for a GPU, on torch's CPU: they compute what they say. Left out where torch is not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvsim.cost.heads import Geometry  # noqa: E402  # after the question whether torch is there
from kvsim.cost.measure import gpu as torch_kernels  # noqa: E402
from kvsim.cost.measure.gpu import COPIED, PAGED, Gpu, best, bounds, by_copy  # noqa: E402
from kvsim.cost.measure.rounds import measure  # noqa: E402
from kvsim.cost.measure.shapes import CLASSES, Shape  # noqa: E402
from kvsim.errors import WrongUse  # noqa: E402

ROOT = Path(__file__).parents[2]
G = Geometry(layers=1, q_heads=8, kv_heads=2, head_dim=32, value_dim=16, dtype="float32")
S = Shape(batch=2, context=256, pages=2 * 5)


@pytest.fixture(scope="module")
def gpu():
    torch.set_num_threads(1)
    return Gpu("float32", "cpu", 1 << 20)


def test_every_class_is_measured(gpu):
    found = measure(gpu, G, seconds=0)
    assert set(found["class"]) == set(CLASSES)
    assert PAGED not in set(found["variant"])  # only where Triton has a GPU
    assert (found["t_us"] > 0).all()
    assert all("torch" in x and "/" not in x for x in found["source"])


def test_copied_pages_give_the_attention_of_their_tokens(gpu):
    q, k, v, _ = gpu.cache(G, S)
    table = gpu.table(G, S)
    out = by_copy(q, k, v)(table)
    for b in range(S.batch):
        for h in range(G.kv_heads):
            keys, values = (x[b, h, table[b, h]].flatten(0, 1).double() for x in (k, v))
            w = (q[b, h].double() @ keys.T / G.head_dim**0.5).softmax(1)
            assert torch.allclose(out[b, h].double(), w @ values, atol=1e-6)


def test_dense_attention_reads_every_page(gpu):
    q, k, v, _ = gpu.cache(G, S)
    every = torch.arange(S.all).expand(S.batch, G.kv_heads, -1)
    out = torch_kernels.dense(gpu, G, S)().view(S.batch, G.kv_heads, 4, -1)
    assert torch.allclose(out, by_copy(q, k, v)(every), atol=1e-6)


def test_bounds_hold_and_the_best_pages_have_the_highest(gpu):
    q, k, _, _ = gpu.cache(G, S)
    summary = torch.cat((k.amin(3), k.amax(3)), 3)
    found = bounds(q, summary)
    assert (found >= torch.einsum("bhgd,bhpsd->bhgps", q, k).amax(-1) - 1e-5).all()
    corners = torch.maximum(q[:, :, :, None] * summary[:, :, None, :, :32], q[:, :, :, None] * summary[:, :, None, :, 32:]).sum(
        -1
    )
    assert torch.allclose(found, corners, atol=1e-5)
    chosen = best(found, 3)
    least = found.amax(2).gather(2, chosen).amin(2)
    assert (found.amax(2) >= least[..., None]).sum(2).unique().tolist() == [3]


def test_the_chain_is_its_parts_one_after_the_other(gpu):
    q, k, v, summary = gpu.cache(G, S)
    assert gpu.chain["gather_attn"] == COPIED
    assert torch.allclose(gpu.selective(gpu, G, S)(), by_copy(q, k, v)(best(bounds(q, summary), S.each)))


def test_codes_become_numbers(gpu):
    out = torch_kernels.unpack(gpu, G, S)()
    step, zero = gpu.numbers((len(out), 1), (len(out), 1))
    codes = gpu.codes(len(out) * 16).view(-1, 16)
    assert torch.equal(out, torch.cat((codes % 16, codes // 16), 1) * step + zero)


def test_events_stand_around_the_launch_behind_the_flush(monkeypatch):
    """The order of what a GPU is asked, on a torch that pretends to have one."""
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("record")

        def synchronize(self):
            said.append("wait")

        def elapsed_time(self, other):
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pretended = Gpu("float32", "cpu", 1 << 20)
    pretended.on_gpu = True
    pretended._flush = type("Flush", (), {"zero_": lambda self: said.append("flush")})()
    assert pretended.time(lambda: said.append("launch")) == 250
    assert said == ["flush", "record", "launch", "record", "wait"]


def test_a_dtype_without_kernels_is_refused():
    with pytest.raises(WrongUse, match="no kernels of fp8 to measure through torch: one of float32"):
        Gpu("fp8", "cpu")


INTERPRETED = """
from tests.cost.test_measure_gpu import G, S, Gpu, by_copy, torch
from kvsim.cost.measure.paged import attend

gpu = Gpu("float32", "cpu", 1 << 20)
q, k, v, _ = gpu.cache(G, S)
table = gpu.table(G, S)
for processors in (1, 3, 40):  # one program a head, a few, more than there are steps
    assert torch.allclose(attend(q, k, v, table, processors), by_copy(q, k, v)(table), atol=1e-5), processors
"""


def test_pages_read_in_place_give_the_same():
    """By Triton's interpreter, where Triton is installed (it asks for the variable when it is imported)."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=env, cwd=ROOT, check=True)
