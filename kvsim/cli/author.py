"""`kvsim new-policy`, `check-policy`: for who writes a policy."""

from __future__ import annotations

import argparse
import keyword
from pathlib import Path

from kvsim.cli.codes import DONE, FAILED
from kvsim.cli.parsing import Commands, policy_file_option
from kvsim.cli.printing import complain, load_files
from kvsim.errors import WrongUse

KEEP = '''"""{name}: one sentence of the idea.

Where it differs from the paper or from the authors' code, and why."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.policies.protocol import ATTENTION, Hold, Keep, Need, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class {name}(Keep):
    act = "holds ..."  # TODO what it does, for `kvsim policies`
    paper = "..."  # TODO authors, title, arXiv number; delete where there is none

    hold: Hold

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({{ATTENTION}})  # what it looks at beyond positions; a trace without it is refused by name

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        """After the prompt: whoever has the highest score stays."""
        return State(), Ranking(seen.pos.astype(float))

    def step(self, state: State, seen: Seen) -> Ranking | None:
        """After every step; seen.a [Hkv, G, n] is the attention that this policy's own cache had."""
        assert seen.a is not None
        return Ranking(seen.a.sum(axis=1), protect=seen.pos == seen.t)
'''
READ = '''"""{name}: one sentence of the idea.

Where it differs from the paper or from the authors' code, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvsim.policies.index.boxes import boxes
from kvsim.policies.protocol import Floats, Read, View


@dataclass(frozen=True, kw_only=True)
class {name}(Read):
    act = "reads ..."  # TODO what it does, for `kvsim policies`
    paper = "..."  # TODO authors, title, arXiv number; delete where there is none

    index: Any = field(default=boxes())  # what is stored of a page: boxes(), sphere(), block_mean(), or a file of your own
    heads: Literal["each", "share", "max", "mean"] = "each"

    def score(self, view: View) -> Floats:
        """[N, Hkv, G, P]: pages of the highest score are read, as many as the budget has."""
        scores: Floats = self.index.score(view.q, view.summary)
        return scores
'''
ESTIMATE = '''"""{name}: one sentence of the idea.

Where it differs from the paper or from the authors' code, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsim.policies.protocol import Estimate, Floats, Sums


@dataclass(frozen=True, kw_only=True)
class {name}(Estimate):
    act = "stands in the softmax for evicted rows by ..."  # TODO what it does, for `kvsim policies`
    paper = "..."  # TODO authors, title, arXiv number; delete where there is none

    def empty(self, key_dim: int, value_dim: int) -> Sums:
        """What is kept of a kv head: these numbers are billed; `n` says how many rows are gone."""
        return {{"n": np.zeros(()), "k": np.zeros(key_dim), "v": np.zeros(value_dim)}}

    def add(self, sums: Sums, keys: Floats, values: Floats) -> Sums:
        """keys [m, d], values [m, dv] of rows that a cut dropped."""
        more = {{"n": np.array(float(len(keys))), "k": keys.sum(axis=0), "v": values.sum(axis=0)}}
        return {{name: sums[name] + x for name, x in more.items()}}

    def says(self, sums: Sums, q: Floats, scale: float) -> tuple[Floats, Floats]:
        """sums [N, ...], q [N, G, d] -> log of the sum of exp(scale q·k) [N, G], and the output [N, G, dv]."""
        n = sums["n"][:, None]
        mean, value = (sums[x] / np.maximum(n, 1) for x in ("k", "v"))
        with np.errstate(divide="ignore"):
            mass = np.log(n) + scale * (q * mean[:, None]).sum(axis=-1)
        return mass, np.repeat(value[:, None], q.shape[1], axis=1)
'''
INDEX = '''"""{name}(): what is stored of a page, and what it says of a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.kernels.rounding import stored
from kvsim.policies.parameters import Checked
from kvsim.policies.protocol import Floats, Mask


@dataclass(frozen=True, kw_only=True)
class {name}(metaclass=Checked):
    """Why this tells which pages matter."""

    act: ClassVar[str] = "estimates q·k by ..."  # TODO
    paper: ClassVar[str] = "..."  # TODO authors, title, arXiv number; delete where there is none

    dtype: Literal["kv", "float32", "float16", "bfloat16", "fp8"] = "kv"  # of the stored numbers

    bound: ClassVar[bool] = False  # True: score is never below the best q·k of the page, and rules may prove by it

    def summarise(self, keys: Floats, valid: Mask, closed: Mask) -> dict[str, NDArray[Any]]:
        """keys [m, S, d], valid [m, S] -> arrays [m, ...]."""
        mean = np.where(valid[..., None], keys, 0.0).sum(axis=1) / np.maximum(valid.sum(axis=1), 1)[:, None]
        return {{"mean": mean if self.dtype == "kv" else stored(mean, self.dtype, 0)}}

    def score(self, q: Floats, summary: dict[str, NDArray[Any]]) -> Floats:
        """q [N, Hkv, G, d] -> [N, Hkv, G, P], unscaled; sums in one order whatever else is scored beside it."""
        return np.einsum("nhgd,hpd->nhgp", q, summary["mean"], optimize=False)

    def numbers(self, dim: int) -> int:
        """Stored for each page: they are billed."""
        return dim
'''
TEST = '''"""{name}: what must be true of it."""

from __future__ import annotations

{load}from kvsim import check_policy, parse

POLICY = "{use}"


def test_it_keeps_the_laws_of_every_policy():
    assert check_policy(parse(POLICY)) == []


def test_the_papers_example():
    raise NotImplementedError("work the paper's example by hand, and a naive twin where there is arithmetic")
'''
LOAD = """from pathlib import Path

from kvsim.policies.names import load_file

load_file(Path(__file__).with_name("{name}.py"))

"""
ENTRY = """### {name}
`{use}`: one paragraph: the idea, every parameter, the paper, where this differs from the authors' code.
"""
KINDS = {
    "keep": (KEEP, "{name}(hold=tokens(24))"),
    "read": (READ, "{name}(read=tokens(16), page=4)"),
    "estimate": (ESTIMATE, "h2o(hold=tokens(24)) >> {name}()"),
    "index": (INDEX, "quest(read=tokens(16), page=4, index={name}())"),
}


LONGEST = 60  # characters of a name, which is a file's too


def new_policy(args: argparse.Namespace) -> None:
    for file, text in stubs(args.name, args.kind, Path(args.out) if args.out else None).items():
        file.write_text(text, encoding="utf-8")
        print(file)
    use = KINDS[args.kind][1].format(name=args.name)
    where = "" if _in_checkout(args.out) else f" --policy-file {Path(args.out or '') / args.name}.py"
    complain(f'try it: kvsim check-policy "{use}"{where}')


def _in_checkout(out: str | Path | None) -> bool:
    return out is None and Path("kvsim/policies/protocol.py").is_file() and Path("tests/policies").is_dir()


def stubs(name: str, kind: str, out: Path | None) -> dict[Path, str]:
    """The files of a new policy, none of them there yet. Into `out`; else where they belong in the checkout that this folder is; else here.

    Raises WrongUse: no name of a class, one that is taken, a file that is there."""
    from kvsim.policies.names import names

    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        raise WrongUse(f"{name!r} is no name for a policy: expected lower case letters, digits and _, as in my_policy")
    if len(name) > LONGEST:
        raise WrongUse(f"{name[:20]!r}... has {len(name)} characters; a policy's name has at most {LONGEST}")
    if name in names("policy") | names("index"):
        raise WrongUse(f"there is a {name} already: kvsim policies {name}; choose another name")
    checkout = _in_checkout(out)
    home = out or Path()
    policy = Path(f"kvsim/policies/{kind}/{name}.py") if checkout else home / f"{name}.py"
    test = Path(f"tests/policies/test_{name}.py") if checkout else home / f"test_{name}.py"
    code, use = KINDS[kind]
    use = use.format(name=name)
    files = {
        policy: code.format(name=name),
        test: TEST.format(name=name, use=use, load="" if checkout else LOAD.format(name=name)),
    }
    files[home / f"{name}.md"] = ENTRY.format(name=name, use=use)
    if there := [f for f in files if f.exists()]:
        raise WrongUse(f"{there[0]} is there already, and nothing is written over; remove it, or choose another name or -o")
    if not home.is_dir():
        raise WrongUse(f"{home} is no folder; make it first, or choose another -o")
    return files


def check(args: argparse.Namespace) -> int:
    from kvsim.conformance import check_policy

    load_files(args.policy_file)
    found = check_policy(args.policy)
    print("\n".join(found) if found else f"{args.policy}: keeps every law")
    return FAILED if found else DONE


def _new_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", metavar="NAME")
    p.add_argument(
        "--kind",
        choices=list(KINDS),
        default="keep",
        help="what it decides: who stays, what is read, what stands for who is gone, what is stored of a page (default: keep)",
    )
    p.add_argument("-o", "--out", metavar="FOLDER", help="where (default: the places of a checkout of kvsim, else here)")


def _check_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("policy", metavar="POLICY", help="an expression with small budgets: 'mine(hold=tokens(24))'")
    policy_file_option(p)


COMMANDS: Commands = {
    ("new-policy",): ("write the files of a new policy: code, test, entry for the docs", new_policy, _new_options),
    ("check-policy",): ("try a policy on the laws that every policy keeps", check, _check_options),
}
