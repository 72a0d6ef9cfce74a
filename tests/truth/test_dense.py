"""The truth of a lane against softmax in float64, and against what the engine judges policies by."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from kvsim.engine.attend import Dense, steps_per_block
from kvsim.kernels.dense import LOG2E, PAGE
from kvsim.kernels.memory import leave, room
from kvsim.kernels.numbers import to_float32
from kvsim.trace.open import Lane
from kvsim.truth.dense import dense
from tests import naive
from tests.engine.lanes import lane, stored

OPTIONS = {
    "one token": {"prompt": 1, "steps": 1, "kv_heads": 1, "group": 1, "key_dim": 1},
    "plain": {"prompt": 500, "steps": 30, "group": 9},
    "a whole tile": {"prompt": 480, "steps": 32, "dtype": "float16", "value_dim": 6},
    "all at once": {
        "prompt": 90,
        "steps": 12,
        "value_dim": 3,
        "dtype": "bfloat16",
        "softcap": 4.0,
        "sinks": True,
        "size": 3.0,
        "group": 3,
    },
    "sliding": {"prompt": 90, "steps": 12, "window": 20, "sinks": True},
    "strided": {"prompt": 40, "steps": 12, "stride": 5},
    "ties": {"prompt": 90, "steps": 12, "whole": True, "group": 4},
    "huge": {"prompt": 90, "steps": 12, "size": 60.0},
}


@pytest.fixture(params=OPTIONS, ids=lambda name: name.replace(" ", "_"))
def pair(request):
    """The same arrays as the engine's source and as a lane of a trace."""
    source = lane(**OPTIONS[request.param])
    dtype = source.layer.dtype
    q = stored(source.q, dtype)
    source.q = to_float32(q.reshape(-1, q.shape[-1])).reshape(q.shape)
    none = np.zeros(0, np.int64)
    return source, Lane(
        source.request,
        source.layer,
        dtype,
        source.k,
        source.v,
        None,
        source.steps,
        source.t,
        q,
        none,
        q[:0],
        None,
        None,
        None,
        None,
        None,
        None,
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with threadpool_limits(1, user_api="blas"):
        yield


def test_the_truth_is_softmax_in_float64(pair):
    source, of = pair
    lay, truth, every = source.layer, dense(of), np.arange(source.request.total)
    assert (truth.steps is of.steps, truth.t is of.t) == (True, True)
    error = 2e-6 + 4e-7 * float(np.abs(truth.peak[np.isfinite(truth.peak)]).max())
    for j, i in np.ndindex(lay.q_heads, len(source.t)):
        h, t = j // lay.group, source.t[i]
        keys, values = source.rows("k", h, every), source.rows("v", h, every)
        dots = keys @ source.q[i, j].astype(float)
        x = naive.bent(dots * lay.scale, 1.0, lay.softcap or 0)
        x = np.where((every <= t) & (every >= lay.first_visible(t)), x, -np.inf)
        sink = lay.sinks[j] if lay.sinks else -np.inf
        top = max(x.max(), sink)
        lse = top + np.log(np.exp(x - top).sum() + np.exp(sink - top))
        p = np.exp(x - lse)
        starts = np.arange(0, len(x), PAGE)
        assert truth.lse[j, i] == pytest.approx(lse, abs=error)
        assert np.allclose(truth.mass[j, i], np.add.reduceat(p, starts), atol=error)
        assert np.allclose(truth.peak[j, i], np.maximum.reduceat(x, starts), atol=error)
        assert np.allclose(truth.out[j, i], p @ values, atol=10 * error)
        want = naive.best_tokens(dots, np.isfinite(x), 64)
        assert truth.top[j, i].tolist() == want + [-1] * (64 - len(want))


def test_the_engine_judges_by_the_same_numbers(pair):
    source, of = pair
    lay, truth = source.layer, dense(of)
    per = steps_per_block(lay.group)
    for h in range(lay.kv_heads):
        for a in range(0, len(source.t), per):
            index = np.arange(a, min(a + per, len(source.t)))
            block, mine = Dense(source, h, index), np.s_[h * lay.group : (h + 1) * lay.group, a : a + per]
            heads = lambda x, index=index: x.reshape(len(index), lay.group, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
            pages = truth.mass.shape[2]
            assert np.array_equal(heads(block.lse[: block.rows] / LOG2E), truth.lse[mine])
            assert np.array_equal(heads(block.page_mass(PAGE))[..., :pages].astype(np.float32), truth.mass[mine])
            assert np.array_equal(heads(block.out).astype(np.float32), truth.out[mine])
            best, count = block.top
            assert np.array_equal(heads(np.where(np.arange(64) < count[:, None], best, -1)), truth.top[mine])


@pytest.mark.parametrize("steps", [slice(None), slice(-1, None)])
def test_products_that_were_not_kept_are_made_again(pair, steps):
    source = pair[0]
    index = np.arange(min(len(source.t), steps_per_block(source.layer.group)))[steps]
    for h in range(source.layer.kv_heads):
        kept, light = Dense(source, h, index), Dense(source, h, index, keep=False)
        assert "dots" not in vars(light)
        for size in (PAGE, 8):
            assert np.array_equal(light.page_mass(size), kept.page_mass(size))
        assert np.array_equal(light.dots[:, : light.rows], kept.dots[:, : kept.rows])
        assert np.array_equal(light.out, kept.out)


def test_output_and_top_are_left_out_when_not_asked_for(pair):
    whole, bare, few = dense(pair[1]), dense(pair[1], output=False, top=0), dense(pair[1], top=3)
    assert (bare.out, bare.top) == (None, None)
    for name in ("mass", "peak", "lse"):
        assert np.array_equal(getattr(bare, name), getattr(whole, name))
    assert np.array_equal(few.top, whole.top[..., :3])


def test_the_bits_of_a_step_do_not_depend_on_the_steps_beside_it(pair):
    source, of = pair
    keep = np.arange(0, len(source.t), 3)
    parts = {"steps": of.steps[keep], "t": of.t[keep], "q": of.q[keep]}
    some, whole = dense(Lane(**({f: getattr(of, f) for f in of.__dataclass_fields__} | parts))), dense(of)
    for name in ("mass", "peak", "lse", "out", "top"):
        assert np.array_equal(getattr(some, name), getattr(whole, name)[:, keep])


def test_nothing_that_was_left_in_memory_gets_into_a_truth(pair):
    want, spare = dense(pair[1]), room(1)
    spare[:] = np.nan
    leave(spare)
    found = dense(pair[1])
    for name in ("mass", "peak", "lse", "out", "top"):
        assert np.array_equal(getattr(found, name), getattr(want, name))
    again = room(1)
    assert again is spare  # it was there
    leave(again)
