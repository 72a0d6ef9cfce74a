"""`kvsim policies`, `bits`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvsim.cli.parsing import Commands, policy_file_option
from kvsim.cli.printing import load_files, print_json, print_plain
from kvsim.errors import WrongUse

NEEDS = "needs of a trace, and the option of kvsim capture that records it"


def policies(args: argparse.Namespace) -> None:
    from kvsim.policies.names import names

    load_files(args.policy_file)
    what = "index" if args.name in names("index") else "policy"
    found = [_described(what, name) for name in ([args.name] if args.name else sorted(names(what)))]
    if args.json:
        print_json(found)
    elif args.presets:
        _print_presets(found)
    elif args.name:
        print_plain({NEEDS if k == "needs" else k: x for k, x in found[0].items()})
    else:
        wide = max(len(p["name"]) for p in found)
        for kind in ("keep", "store", "estimate", "read"):
            print(kind)
            for p in found:
                if p["kind"] == kind:
                    print(f"  {p['name']:{wide}}  {p['act']}")


def _policies_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", nargs="?", metavar="NAME")
    p.add_argument("--presets", action="store_true", help="official defaults with their sources")
    p.add_argument("--json", action="store_true", help="for programs")
    policy_file_option(p)


def _described(what: str, name: str) -> dict[str, Any]:
    """A policy or index as plain data: what it does, its paper, its parameters as they are written, what it needs, its presets."""
    import inspect

    from kvsim.policies.names import named
    from kvsim.policies.parameters import TOLD, parameters, written

    cls = named(what, name)
    defaults = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # read from a class, never called
    takes = {n: "required" if required else written(defaults[n].default) for n, (_, required) in parameters(cls).items()}
    told = {
        "name": name,
        "kind": getattr(cls, "kind", what) or what,
        "act": getattr(cls, "act", ""),
        "paper": getattr(cls, "paper", "") or None,
    }
    presets = {
        preset: {n: x if n in TOLD else written(x) for n, x in given.items()}
        for preset, given in getattr(cls, "presets", {}).items()
    }
    return told | {"needs": _needs(name, takes), "parameters": takes, "presets": presets}


def _needs(name: str, takes: dict[str, str]) -> dict[str, str]:
    """{need: the capture option that records it} of a policy with its defaults; a budget does not change them."""
    from kvsim.geometry import INDEX
    from kvsim.policies.language import parse

    required = ", ".join(f"{n}=share(0.5)" for n, default in takes.items() if default == "required")
    try:
        parts = [part for part in parse(f"{name}({required})").parts if type(part).__name__ == name]
    except WrongUse:  # an index, or a parameter that is no budget
        return {}
    told = {INDEX: "a trace with the tables index_k and index_q"}
    return {str(need): need.option or told.get(need, "any trace") for part in parts for need in sorted(part.needs, key=str)}


def _print_presets(found: Sequence[dict[str, Any]]) -> None:
    from kvsim.policies.parameters import TOLD

    for p in found:
        for preset, given in p["presets"].items():
            values = ", ".join(f"{n}={x}" for n, x in given.items() if n not in TOLD)
            claim = f"; published: {given['claim']}" if "claim" in given else ""
            print(f'{p["name"]}(preset="{preset}")  {values}\n  {given["source"]}{claim}')
            others = {n: d for n, d in p["parameters"].items() if n in given and d not in ("required", given[n])}
            if others:
                print(f"  kvsim's own: {', '.join(f'{n}={d}' for n, d in others.items())}")


def bits(args: argparse.Namespace) -> None:
    from kvsim.policies.bits import EXACT_BITS, bits_of
    from kvsim.policies.language import parse

    load_files(args.policy_file)
    found = {policy: bits_of(parse(policy), args.tokens, args.head_dim, args.layers) for policy in args.policies}
    wide = max(len(policy) for policy in found)
    columns = ("keys", "values", "coded", "held", "model", "coded x", "model x")
    print(" " * (wide + 5) + "bits a number; x: 16 over that")
    print(" " * wide + "".join(f"{column:>9}" for column in columns) + "  published")
    for policy, x in found.items():
        numbers = (x.keys, x.values, x.coded, x.held, x.model, EXACT_BITS / x.coded, EXACT_BITS / x.model)
        print(f"{policy:{wide}}" + "".join("        —" if n is None else f"{n:9.3f}" for n in numbers) + f"  {x.claim or '—'}")


def _bits_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("policies", nargs="+", metavar="POLICY", help='stores, for example "kivi(bits=2)"')
    p.add_argument("--tokens", type=int, default=131072, metavar="N", help="in the cache (default: 131072)")
    p.add_argument("--head-dim", type=int, default=128, metavar="N", help="numbers of a key, and of a value (default: 128)")
    p.add_argument("--layers", type=int, default=32, metavar="N", help="attention layers of the model (default: 32)")
    policy_file_option(p)


COMMANDS: Commands = {
    ("bits",): ("what stores take per number, by their layout", bits, _bits_options),
    ("policies",): ("what exists: paper, needs, parameters, presets", policies, _policies_options),
}
