"""The policy language: one expression, the same on the command line and in Python, and back to its canonical form.

    h2o(hold=share(0.2)) >> quest(read=tokens(1024), page=16)

An expression is parsed, never run: policies with parameters by name, joined by >>, whose values are literals, units and indexes.
A policy file gives expressions per layer and kv head."""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsim.errors import WrongUse
from kvsim.policies.keep.full import full
from kvsim.policies.names import absent, known, load_file, named, names
from kvsim.policies.parameters import parameters, unknown, written
from kvsim.policies.protocol import Chain, Part
from kvsim.policies.read.everything import everything
from kvsim.policies.rules import RULES
from kvsim.units import WORDS

__all__ = ["Policy", "canonical", "complete", "known", "load_file", "parse", "parse_policy", "per_layer"]

LONGEST = 4000  # characters of an expression
DEEPEST = 20  # nodes inside one another; keep >> store >> read(index=boxes(n=-1)) has 9
MOST = 10_000  # layers or heads
UNITS: dict[str, type] = {unit.__name__: unit for unit in WORDS}
EXAMPLE = "for example h2o(hold=share(0.2)) >> quest(read=tokens(1024))"


# ---------------------------------------------------------------------------------------------- expressions
def parse(text: str) -> Chain:
    """An expression -> the chain, complete. Raises WrongUse: one line that says what is wrong and how to mend it."""
    chain = Chain(())
    for node in _links(_tree(text)):
        name, args, given = _call(node, "policy", names("policy"))
        chain = chain >> named("policy", name)(*args, **given)
    return complete(chain)


def complete(policy: Part | Chain) -> Chain:
    """A policy as a chain that says what it keeps and what it reads: a missing keep is full(), a missing read everything()."""
    chain = policy if isinstance(policy, Chain) else Chain((policy,))
    if chain.part("keep") is None:
        chain = full() >> chain
    return chain if chain.part("read") else chain >> everything()


def canonical(policy: Part | Chain) -> str:
    """The one way to write a policy: every parameter with its value. parse() gives an equal chain back."""
    return " >> ".join(map(written, policy.parts)) if isinstance(policy, Chain) else written(policy)


def _tree(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise WrongUse(f"policy {_short(text)}: {len(text)} characters; expected at most {LONGEST}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "1if x" is no expression either way
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise WrongUse(f"policy {_short(text)}: {getattr(e, 'msg', 'not an expression')}; write {EXAMPLE}") from None
    layer: list[ast.AST] = [tree]
    for _ in range(DEEPEST):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
    if layer:
        raise WrongUse(f"policy {_short(text)}: nested too deep; write {EXAMPLE}")
    return tree


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _links(tree: ast.expr) -> Iterator[ast.expr]:
    """a >> b >> c, however bracketed, from left to right."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift):
            waiting += [node.right, node.left]
        else:
            yield node


def _call(node: ast.expr, what: str, among: Mapping[str, Any]) -> tuple[str, list[Any], dict[str, Any]]:
    """NAME(...) -> the name, its arguments, its parameters."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise WrongUse(f"{_short(ast.unparse(node))}: expected a {what}, written NAME(...), {EXAMPLE}")
    name, given = node.func.id, {}
    if name not in among:
        absent(what, name, among)
    for keyword in node.keywords:
        if keyword.arg is None:
            raise WrongUse(f"{name}(**...): parameters are given one by one, as parameter=value")
        if keyword.arg in given:
            raise WrongUse(f"{name}: {keyword.arg}= is given twice")
        given[keyword.arg] = _value(keyword.value)
    return name, [_value(a) for a in node.args], given


def _value(node: ast.expr) -> Any:
    """A literal, a unit or an index."""
    if isinstance(node, ast.Call):
        name, args, given = _call(node, "unit, rule or index", UNITS | RULES | names("index"))
        if name in UNITS:
            return _unit(name, args, given)
        return (RULES.get(name) or named("index", name))(*args, **given)
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if not isinstance(number, bool):
            return -number
        case ast.Constant(value=None | str() | bool() | int() | float() as literal):
            return literal
    raise WrongUse(f"{_short(ast.unparse(node))}: expected a number, a text in quotes, True, False, None or a call: tokens(512)")


def _unit(name: str, args: list[Any], given: dict[str, Any]) -> Any:
    takes = parameters(UNITS[name])
    for parameter in given:
        if parameter not in takes:
            unknown(f"parameter of {name}", parameter, takes)
    try:
        return UNITS[name](*args, **given)
    except TypeError:
        raise WrongUse(f"{name}({', '.join(map(written, args))}): expected one number, for example tokens(512)") from None


# ---------------------------------------------------------------------------------------------- per layer and kv head
@dataclass(frozen=True)
class Policy:
    """What is replayed under one id: one chain, or (with a name) chains per layer and kv head."""

    default: Chain
    name: str | None = None
    layers: tuple[tuple[int, Chain], ...] = ()
    heads: tuple[tuple[int, int, Chain], ...] = ()  # layer, kv head, chain

    @property
    def id(self) -> str:
        """The canonical expression, or NAME@ and the sha256 of the canonical form."""
        return self.form if self.name is None else f"{self.name}@{hashlib.sha256(self.form.encode()).hexdigest()[:12]}"

    @property
    def form(self) -> str:
        """All of the policy as text: an expression, or a policy file with one line per layer and head that differs."""
        if self.name is None:
            return canonical(self.default)
        lines = [f"default = {_quoted(self.default)}", "", "[layers]"] + [f'"{n}" = {_quoted(chain)}' for n, chain in self.layers]
        for layer in dict.fromkeys(n for n, _, _ in self.heads):
            lines += ["", f"[heads.{layer}]"] + [f'"{h}" = {_quoted(chain)}' for n, h, chain in self.heads if n == layer]
        return "\n".join(lines) + "\n"

    def at(self, layer: int, kv_heads: int | None = None) -> tuple[tuple[Chain, tuple[int, ...] | None], ...]:
        """-> (chain, the kv heads it is for), ..., the last for None: all heads not named before it.

        With `kv_heads`, raises WrongUse for a head that the layer does not have."""
        own: dict[Chain, list[int]] = {}
        for n, head, chain in self.heads:
            if n == layer:
                own.setdefault(chain, []).append(head)
                if kv_heads is not None and head >= kv_heads:
                    raise WrongUse(f'policy {self.name}, [heads.{layer}] "{head}": the layer has kv heads 0 to {kv_heads - 1}')
        return *((chain, tuple(heads)) for chain, heads in own.items()), (dict(self.layers).get(layer, self.default), None)


def parse_policy(policy: str | Part | Chain | Policy, base: str | Path | None = None) -> Policy:
    """An expression, or @FILE.toml (relative to `base`), or what Python made of it -> the policy to replay."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, (Part, Chain)):
        return Policy(complete(policy))
    if not isinstance(policy, str):
        raise WrongUse(f"{_short(str(policy))}: expected a policy, {EXAMPLE}")
    if policy.endswith(".toml") and not policy.startswith("@"):
        raise WrongUse(f"{_short(policy)}: a policy file is written with an @ before it, @{policy}")
    return _read_file(Path(base or ".") / policy[1:]) if policy.startswith("@") else Policy(parse(policy))


def per_layer(chains: Mapping[Any, str | Part | Chain], *, default: str | Part | Chain, name: str = "per_layer") -> Policy:
    """{0: ..., "1,2": ..., "17-18": ..., (20, 3): ...}: chains for layers, and for (layer, kv head); `default` for all others."""
    heads: dict[Any, dict[Any, Any]] = {}
    for key, chain in chains.items():
        if isinstance(key, tuple) and len(key) == 2:
            heads.setdefault(key[0], {})[key[1]] = chain
    return _assembled(name, name, default, {k: c for k, c in chains.items() if not isinstance(k, tuple)}, heads)


def _read_file(path: Path) -> Policy:
    where = f"policy file {path}"
    try:
        book = tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise WrongUse(f"{where}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:  # not TOML, or not UTF-8
        raise WrongUse(f"{where}: not a TOML file: {e}") from None
    for key in book:
        if key not in ("default", "layers", "heads"):
            unknown(f"key of {where}", key, ("default", "layers", "heads"))
    if "default" not in book:
        raise WrongUse(f'{where}: default is missing; write default = "EXPRESSION"')
    return _assembled(path.stem, where, book["default"], book.get("layers", {}), book.get("heads", {}))


def _assembled(name: str, where: str, default: Any, layers: Any, heads: Any) -> Policy:
    """Expressions by layer, and by layer and head -> the policy; what says the same as without it is left out."""
    chain = _chain(f"{where}, default", default)
    of_layer = {n: c for n, c in _spread(f"{where}, [layers]", layers).items() if c != chain}
    of_head: dict[int, dict[int, Chain]] = {}
    for key, table in _table(f"{where}, [heads]", heads).items():
        here = f"{where}, [heads.{key}]"
        own = _spread(here, table)
        for layer in _numbers(f"{where}, [heads]", key):
            if layer in of_head:
                raise WrongUse(f"{here}: layer {layer} is named twice")
            rest = of_layer.get(layer, chain)
            for keep in (c.part("keep") for c in (rest, *own.values())):
                if keep.joint:
                    raise WrongUse(
                        f"{here}: the kv heads of {type(keep).__name__} decide together; give the layer one policy in [layers]"
                    )
            of_head[layer] = {head: c for head, c in own.items() if c != rest}
    by_head = ((layer, head, c) for layer, own in sorted(of_head.items()) for head, c in sorted(own.items()))
    return Policy(chain, name, tuple(sorted(of_layer.items())), tuple(by_head))


def _spread(where: str, table: Any) -> dict[int, Chain]:
    """{"0,1": ..., "17-18": ...} -> {number: chain}."""
    spread: dict[int, Chain] = {}
    for key, expression in _table(where, table).items():
        chain = _chain(f'{where} "{key}"', expression)
        for number in _numbers(where, key):
            if number in spread:
                raise WrongUse(f'{where} "{key}": {number} is named twice')
            spread[number] = chain
    return spread


def _table(where: str, table: Any) -> Mapping[Any, Any]:
    if not isinstance(table, Mapping):
        raise WrongUse(f'{where}: expected a table, with lines such as "0,1" = "EXPRESSION"')
    return table


def _numbers(where: str, key: Any) -> list[int]:
    """0, "0", "0,1" or "17-18" (its end included) -> the numbers."""
    numbers: list[int] = []
    for part in str(key).split(","):
        first, _, last = (x.strip() for x in part.partition("-"))
        last = last or first
        if not all(x.isascii() and x.isdigit() and len(x) < 6 for x in (first, last)) or not int(first) <= int(last) < MOST:
            raise WrongUse(f'{where} "{key}": expected numbers such as "3", "0,1" or "17-18"')
        numbers += range(int(first), int(last) + 1)
    return numbers


def _chain(where: str, expression: Any) -> Chain:
    if isinstance(expression, (Part, Chain)):
        return complete(expression)
    if not isinstance(expression, str):
        raise WrongUse(f"{where}: expected an expression in quotes, {EXAMPLE}")
    try:
        return parse(expression)
    except WrongUse as e:
        raise WrongUse(f"{where}: {e}") from None


def _quoted(chain: Chain) -> str:
    return json.dumps(canonical(chain))
