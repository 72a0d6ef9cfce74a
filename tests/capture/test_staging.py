"""Rows on their way from a device to the writer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsim.capture.bits import raw
from kvsim.capture.staging import Block, Copies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_is_what_was_there_when_it_was_taken(device, dtype):
    x = torch.randn(7, 5, 3, device=device).to(dtype)
    want, copies = raw(x), Copies()
    there = [copies.take(x), copies.take(x.transpose(0, 1)), copies.take(x[:, 2:])]
    x.zero_()
    for later, part in zip(there, (want, want.transpose(1, 0, 2), want[:, 2:]), strict=True):
        assert np.array_equal(later(), part)
        assert np.array_equal(later(), part)  # asked for again, the same


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_is_the_stack_of_its_steps_and_keeps_nothing_of_where_they_came_from(device):
    block, steps = Block(4), [(torch.randn(3, 9, device=device), torch.randn(2, 5, device=device)) for _ in range(3)]
    for a, b in steps:
        block.add(a[:, 1:7], b)
    want = [torch.stack(x, 1) for x in zip(*((a[:, 1:7].clone(), b.clone()) for a, b in steps), strict=True)]
    for a, b in steps:
        a.zero_(), b.zero_()
    assert not block.full
    got = block.taken()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert block.n == 0
    for _ in range(4):
        block.add(torch.ones(1, 2))
    assert block.full
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))  # what was taken is not written over
