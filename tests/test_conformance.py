"""check_policy passes every shipped policy and finds what is planted in a bad one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest

from kvsim import cli, conformance, kivi, replay
from kvsim.conformance import check_policy
from kvsim.geometry import KEY_NORM
from kvsim.policies import names
from kvsim.policies.language import canonical, load_file, parse
from kvsim.policies.protocol import ATTENTION, PREFILL_MASS, TRUTH, Keep, Ranking, Read, State, Store
from kvsim.synth.generate import synthesize
from kvsim.units import pages, tokens

SHIPPED = {
    "adakv": "adakv(hold=tokens(20), window=5)",
    "caote": "caote(hold=tokens(18))",
    "criticalkv": "criticalkv(hold=tokens(20), window=5)",
    "defensivekv": "defensivekv(hold=tokens(20), window=5)",
    "dsa": "dsa(read=tokens(4))",
    "everything": "everything()",
    "expected_attention": "expected_attention(hold=tokens(20))",
    "fp8": "fp8(residual=3)",
    "full": "full()",
    "h2o": "h2o(hold=tokens(18), sinks=1, decay=0.9)",
    "int4": "int4(group=4, residual=3)",
    "kivi": "kivi(group=2, residual=8)",
    "knorm": "knorm(hold=tokens(15))",
    "evicted_moments": "h2o(hold=tokens(18)) >> evicted_moments()",
    "oracle_keep": "oracle_keep(hold=tokens(15))",
    "oscar_cov": 'oscar_cov(sinks=2, recent=6, rotate="hadamard")',  # with a file: tests/policies/test_oscar_cov.py
    "oscar_ots": "oscar_ots(group=2, residual=8)",
    "pools": "pools(hold=tokens(18), sinks=1, recent=5)",
    "r_kv": "r_kv(hold=tokens(20), window=4, period=6)",
    "random_keep": "random_keep(hold=tokens(15), seed=3)",
    "offload": "offload(device=pages(3)) >> quest(read=pages(2), page=4)",
    "oracle": "oracle(read=pages(2), page=4)",
    "pyramidkv": "pyramidkv(hold=tokens(24), window=5)",
    "qevict": "qevict(hold=share(0.6), sinks=2, window=4, period=3, recent=tokens(6))",
    "quest": "quest(read=pages(2), page=4)",
    "random_read": "random_read(read=pages(2), page=4)",
    "recency": "recency(read=pages(2), page=4)",
    "snapkv": "snapkv(hold=tokens(20), window=5)",
    "sparda_proxy": "sparda_proxy(read=pages(2), page=4)",
    "streaming_llm": "streaming_llm(sinks=2, hold=tokens(17))",
    "tova": "tova(hold=tokens(15))",
    "turboquant": "turboquant()",
    "zipcache": "zipcache(period=4, window=8)",
}
CHAINS = [
    'h2o(hold=tokens(24), prefill="zeros") >> kivi(group=2, residual=4) >> quest(read=pages(3), page=4)',
    'tova(hold=tokens(20)) >> quest(read=pages(3), page=4, heads="share", refresh=3)',
    'streaming_llm(hold=share(0.5)) >> quest(read=share(0.3), page=4, heads="split", sinks=2, recent=5)',
    'quest(read=pages(3), page=3, heads="softmax_mean", tail="free", index=boxes(n=2, by="cluster"))',
    'oracle(read=share(0.2, of="total"), page=4, by="logit")',
    "adakv(hold=tokens(20), window=5) >> quest(read=exact(r=5), page=4)",
    'criticalkv(hold=tokens(20), window=5, base="adakv")',
    "criticalkv(hold=tokens(20), window=5, compat=True) >> kivi(group=2, residual=4)",
    'criticalkv(hold=tokens(20), window=5, base="adakv", compat=True)',
    "defensivekv(hold=tokens(20), window=5, compat=True)",
    'defensivekv(hold=tokens(20), window=5, scope="model") >> quest(read=pages(3), page=4)',
    'defensivekv(hold=tokens(20), window=5, scope="model", compat=True)',
    'h2o(hold=tokens(18), norm="queries", prefill="zeros", decay=0.9)',
    "random_keep(hold=share(0.5)) >> kivi(group=2, residual=4)",
    'random_keep(hold=share(0.5)) >> oscar_cov(sinks=2, recent=4, rotate="hadamard", scales=16) >> quest(read=pages(2), page=4)',
]


def test_every_shipped_policy_is_here():
    """A new policy joins this list; check_policy is also for its own test."""
    shipped = {name for name, home in names.names("policy").items() if home.startswith("kvsim.")}
    assert set(SHIPPED) >= shipped - {"kvquant"}  # which needs a file: tests/policies/test_kvquant.py


@pytest.mark.parametrize("policy", [*SHIPPED.values(), *CHAINS])
def test_what_is_shipped_keeps_the_laws(policy):
    assert check_policy(policy) == []


def test_parts_are_taken_too():
    part = names.named("policy", "h2o")(hold=tokens(20))
    assert check_policy(part) == []


# ------------------------------------------------------------------------------------------------ planted
def keep(start=None, step=None, needs=(), frozen=True, **more):
    """A keep of the newest tokens, with something else in its place."""

    def newest(self, *given):
        return Ranking(given[-1].pos.astype(float))

    methods = {
        "start": start or (lambda self, prefix, seen: (State(), newest(self, seen))),
        "step": step or newest,
        "needs": property(lambda self: frozenset(needs)),
        "hold": tokens(16),
    }
    return dataclass(frozen=frozen)(type("planted", (Keep,), methods | more))()


def read(score, needs=(), **more):
    methods = {"score": score, "needs": property(lambda self: frozenset(needs))} | more
    return dataclass(frozen=True, kw_only=True)(type("planted", (Read,), methods))(read=pages(3), page=4)


def store(place):
    methods = {"place": place, "codecs": property(lambda self: kivi(group=2, residual=2).codecs)}
    return dataclass(frozen=True)(type("planted", (Store,), methods))()


def by_page(view, score):
    return np.broadcast_to(np.asarray(score, float), (*view.q.shape[:3], view.page.shape[1]))


def says(policy, law, words):
    found = check_policy(policy)
    assert any(line.startswith(law + ": ") and words in line for line in found), found


def test_the_ground_that_bad_ones_are_planted_in_is_good():
    assert check_policy(keep()) == []
    assert check_policy(read(lambda self, view: by_page(view, view.page[:, None]))) == []
    assert check_policy(store(lambda self, seen: kivi(group=2, residual=2).place(seen))) == []


# -- revives a row
def test_writing_into_what_is_shown_is_found():
    def step(self, state, seen):
        seen.valid[:, 0] = True
        return Ranking(seen.pos.astype(float))

    says(keep(step=step), "small", "assignment destination is read-only")


@pytest.mark.parametrize("name", ["valid", "pos", "k"])
def test_forcing_a_write_is_found(name):
    def step(self, state, seen):
        x = getattr(seen, name)
        x.flags.writeable = True
        x[...] = {"valid": True, "pos": 0, "k": 1}[name]
        return Ranking(seen.t - seen.pos.astype(float))

    says(keep(step=step), "writes", f"planted.step writes into seen.{name}")


def test_a_dead_slot_cannot_be_ranked_back():
    """It asks for what the engine does not give: the same sets as without it."""

    def step(self, state, seen):
        return Ranking(np.where(seen.valid, seen.pos, np.inf), protect=~seen.valid)

    assert check_policy(keep(step=step)) == []
    a, b = (conformance._rows(conformance.complete(k), conformance.lane()) for k in (keep(), keep(step=step)))
    assert conformance._differs(a, b) == ""


# -- looks ahead
def test_looking_at_the_next_query_is_found():
    def start(self, prefix, seen):
        return State(other={"source": prefix._source}), Ranking(seen.pos.astype(float))

    def step(self, state, seen):
        source = state.other["source"]
        q = source.q[min(seen.step + 1, len(source.q) - 1)].reshape(len(seen.pos), -1, source.k.shape[-1]).mean(1)
        keys = np.take_along_axis(source.k, np.maximum(seen.pos, 0)[..., None], 1)
        return Ranking(np.einsum("hd,hnd->hn", q, keys).astype(float))

    says(keep(start, step), "past", "it looks ahead: another future changes the past (tiers differs)")


def test_looking_at_the_length_is_found():
    def start(self, prefix, seen):
        return State(other={"total": prefix._source.request.total}), Ranking(seen.pos.astype(float))

    def step(self, state, seen):
        return Ranking(np.abs(seen.pos - state.other["total"] / 2))

    says(keep(start, step), "past", "it looks ahead: a shorter trace")


def test_looking_at_the_queries_beside_is_found():
    def score(self, view):
        return np.einsum("hgd,hp->hgp", view.q.mean(0), view.page.astype(float))[None] + np.zeros((len(view.q), 1, 1, 1))

    says(read(score), "past", "it looks ahead")


# -- shares state
LEFT = {}


class Shared:
    acc: np.ndarray | float = 0.0
    calls = 0


@pytest.fixture(autouse=True)
def clean():
    LEFT.clear()
    Shared.acc, Shared.calls = 0.0, 0


def test_a_module_global_is_found():
    def step(self, state, seen):
        LEFT["n"] = LEFT.get("n", 0) + 1
        return Ranking(seen.pos * np.sin(LEFT["n"]))

    says(keep(step=step), "state", "a request changes the next one")


def test_a_class_attribute_that_every_request_resets_is_found():
    """One request after the other it works; two side by side it does not."""

    def start(self, prefix, seen):
        Shared.acc = prefix.by_kv_head(prefix.mass())
        return State(), Ranking(Shared.acc)

    def step(self, state, seen):
        Shared.acc = np.pad(Shared.acc, ((0, 0), (0, 1)))
        Shared.acc[:, -1] = seen.t % 5
        return Ranking(Shared.acc[:, : seen.pos.shape[1]] if Shared.acc.shape[1] >= seen.pos.shape[1] else seen.pos.astype(float))

    says(keep(start, step, needs=[PREFILL_MASS]), "beside", "another request beside it")


def test_what_only_the_start_shares_is_found():
    def start(self, prefix, seen):
        Shared.acc = float(prefix.mass().sum())
        return State(), Ranking(seen.pos.astype(float))

    def step(self, state, seen):
        return Ranking(np.sin(Shared.acc * seen.pos))

    says(keep(start, step, needs=[PREFILL_MASS]), "beside", "another request beside it")


def test_a_read_that_counts_its_calls_is_found():
    def score(self, view):
        Shared.calls += 1
        return by_page(view, np.sin(view.page[:, None] * Shared.calls))

    says(read(score), "state", "a request changes the next one")


def test_a_store_that_remembers_is_found():
    def place(self, seen):
        Shared.calls = 0 if seen.step == -1 else Shared.calls + 1
        some = seen.valid & (seen.pos < 2 * Shared.calls)
        return some, some

    says(store(place), "beside", "another request beside it")


def test_a_state_that_holds_views_of_what_it_was_shown_is_found():
    def start(self, prefix, seen):
        return State(other={"first": seen}), Ranking(seen.pos.astype(float))

    def step(self, state, seen):
        state.other["last"] = seen
        old = state.other["first"].pos
        return Ranking(np.sin(old[:, :1] + old[:, -1:] + seen.pos))

    found = check_policy(keep(start, step))
    assert not found or found[0].startswith("beside: ")


def test_a_ranking_that_looks_at_its_budget_is_found():
    says(read(lambda self, view: by_page(view, np.sin(view.page[:, None] * self.read.n))), "budget", "under another budget")


# -- depends on the order of the heads
def test_weights_by_head_are_found():
    def step(self, state, seen):
        weight = np.arange(seen.a.shape[1])[None, :, None]
        return Ranking((seen.a * weight).sum(1), protect=seen.pos == seen.t)

    says(keep(step=step, needs=[ATTENTION]), "heads", "it depends on the order of the heads")


def test_a_read_that_asks_which_head_it_is_is_found():
    def score(self, view):
        return by_page(view, np.sin(view.page[:, None] * (1 + view.where[2])))

    says(read(score), "heads", "it depends on the order of the heads")


# -- reports bytes
@dataclass(frozen=True)
class Billed(Ranking):
    bytes: int = 0


def test_a_report_of_bytes_is_found():
    says(
        keep(step=lambda self, state, seen: Billed(seen.pos.astype(float), bytes=9)),
        "small",
        "returned Billed, expected a Ranking or None",
    )
    says(
        keep(step=lambda self, state, seen: (Ranking(seen.pos.astype(float)), 9)),
        "small",
        "returned tuple, expected a Ranking or None",
    )
    says(keep(start=lambda self, prefix, seen: (State(), None, 9)), "small", "too many values to unpack")
    says(read(lambda self, view: (by_page(view, 0), 9)), "small", "score returned tuple, expected an array")
    says(store(lambda self, seen: (seen.pos < 0, seen.pos < 0, 9)), "small", "too many values to unpack")


# -- and what else goes wrong
def test_parameters_that_can_change_are_found():
    says(keep(frozen=False), "frozen", "planted is not a frozen dataclass")


def test_chance_without_a_seed_is_found():
    says(
        read(lambda self, view: by_page(view, np.random.default_rng().random(view.page.shape[1]))),
        "ties",
        "two runs over equal input differ",
    )


def test_what_is_needed_and_not_declared_is_found():
    says(
        keep(start=lambda self, prefix, seen: (State(), Ranking(prefix.by_kv_head(prefix.mass())))),
        "small",
        "does not declare it in needs",
    )
    says(read(lambda self, view: view.truth("mass")), "small", "TypeError")
    assert check_policy(read(lambda self, view: view.truth("mass"), needs=[TRUTH])) == []


def test_every_finding_is_one_line():
    found = check_policy(keep(step=lambda self, state, seen: Ranking(np.full(seen.pos.shape, np.nan)), frozen=False))
    assert len(found) == 2
    assert all(line.partition(": ")[0] in conformance.LAWS and "\n" not in line for line in found)


# ------------------------------------------------------------------------------------------------ one file of one's own
MINE = '''
"""Two policies in one file: fading keeps what was looked at lately, skim reads the pages whose mean key fits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvsim.policies.protocol import ATTENTION, PREFILL_MASS, Hold, Keep, Need, Prefix, Ranking, Read, Seen, State, View


@dataclass(frozen=True, kw_only=True)
class fading(Keep):
    act = "keeps the tokens with most attention of late; what was paid before counts half as much at every step"
    hold: Hold
    half: float = 0.5

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({ATTENTION, PREFILL_MASS})

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        lately = prefix.by_kv_head(prefix.mass())
        return State({"lately": lately}), Ranking(lately)

    def step(self, state: State, seen: Seen) -> Ranking | None:
        state.slots["lately"] = self.half * state.slots["lately"] + seen.a.sum(axis=1)
        return Ranking(state.slots["lately"], protect=seen.pos == seen.t)


@dataclass(frozen=True, kw_only=True)
class mean_key:
    dtype: str = "float32"
    bound = False

    def summarise(self, keys, valid, closed):
        return {"mean": (keys * valid[..., None]).sum(1) / np.maximum(valid.sum(1), 1)[:, None]}

    def score(self, q, summary):
        return np.einsum("nhgd,hpd->nhgp", q, summary["mean"])

    def numbers(self, dim):
        return dim


@dataclass(frozen=True, kw_only=True)
class skim(Read):
    act = "reads the pages whose mean key fits the query best"
    index: mean_key = field(default=mean_key())

    def score(self, view: View) -> np.ndarray:
        return self.index.score(view.q, view.summary)
'''


@pytest.fixture
def dropped(tmp_path, monkeypatch):
    """The file, and nothing of it left behind."""
    monkeypatch.setattr(names, "_loaded", {"policy": {}, "index": {}})
    before = {*sys.modules}
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path / "mine.py"
    for module in {*sys.modules} - before:
        if module.startswith("kvsim_policy_file_"):
            del sys.modules[module]


CHAIN = "fading(hold=tokens(14)) >> skim(read=pages(2), page=4)"


def test_one_file_is_all_that_two_policies_need(dropped, tmp_path):
    assert {*load_file(dropped)} == {"fading", "skim", "mean_key"}
    for policy in ("fading(hold=tokens(14))", "skim(read=pages(2), page=4)", CHAIN):
        assert check_policy(policy) == []
    trace = synthesize(tmp_path / "trace", prompt=30, steps=6)
    run = replay(trace, [CHAIN, "fading(hold=share(0.4)) >> kivi(group=2, residual=4)"], tmp_path / "run")
    ledger = run.ledger
    held = ledger.filter(ledger["policy"] == canonical(parse(CHAIN)))
    assert held["held_tokens"].to_list() == [14] * len(held)
    assert set(held["read_pages"]) <= {2, 3, 4}  # two pages for each head of a group
    assert held["index_bytes"].min() > 0


WRONG = """
from dataclasses import dataclass

from kvsim.policies.protocol import Keep, Ranking, State
from kvsim.units import Hold

@dataclass(frozen=True, kw_only=True)
class wrong(Keep):
    hold: Hold

    def start(self, prefix, seen):
        return State(), None

    def step(self, state, seen):
        return Ranking(-seen.key_norm)
"""


def test_a_need_that_was_forgotten_is_named_with_its_line(dropped, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    load_file(tmp_path / "wrong.py")
    said = "wrong (wrong.py, line 15): TypeError: bad operand type for unary -: 'NoneType'"
    says(
        parse("wrong(hold=tokens(24))"),
        "small",
        f"{said}; seen.key_norm is None because it is not declared: add KEY_NORM to needs",
    )
    says(
        read(lambda self, view: view.truth("mass")), "small", "view.truth is None because it is not declared: add TRUTH to needs"
    )


@pytest.mark.parametrize(
    ("needs", "step", "said"),
    [
        ((), lambda self, state, seen: (seen.key_norm, seen.pos.nothing), "has no attribute 'nothing'"),
        ((KEY_NORM,), lambda self, state, seen: seen.key_norm + None, "'NoneType'"),
        ((), lambda self, state, seen: seen.pos + None, "'NoneType'"),
    ],
    ids=["no_none", "declared", "not_looked_at"],
)
def test_an_error_of_ones_own_gets_no_hint(needs, step, said):
    found = check_policy(keep(step=step, needs=needs))
    assert all("planted (test_conformance.py, line " in line and said in line for line in found), found
    assert found
    assert not any("needs" in line for line in found)


def test_the_command_takes_the_file(dropped, tmp_path, capsys):
    synthesize(tmp_path / "trace", prompt=30, steps=6)
    asked = ["replay", str(tmp_path / "trace"), "-p", CHAIN, "-o", str(tmp_path / "run"), "--policy-file", str(dropped)]
    assert cli.main(asked) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run")
    assert (tmp_path / "run" / "ledger.parquet").exists()
