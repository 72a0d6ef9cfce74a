"""Budgets per layer and kv head: policy files, their Python twin, their ids, and what is refused, by file, table and key."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

import kvsim
from kvsim.errors import WrongUse
from kvsim.policies.language import canonical, parse, parse_policy, per_layer
from kvsim.policies.protocol import Chain, Part

QUEST = "full() >> quest(read=pages(4), page=8)"
H2O = "h2o(hold=tokens(40), sinks=2) >> quest(read=pages(2), page=8)"
BOOK = f"""
default = "{QUEST}"

[layers]
"0" = "everything()"
"2-3, 7" = "{H2O}"

[heads.2]
"1" = "{QUEST}"
"0,3" = "streaming_llm(hold=tokens(32))"

[heads.9]
"2" = "full()"
"""


def saved(tmp_path, text):
    (tmp_path / "book.toml").write_text(text)
    return parse_policy("@book.toml", tmp_path)


def test_each_layer_gets_its_chain(tmp_path):
    policy = saved(tmp_path, BOOK)
    assert policy.at(0) == ((parse("everything()"), None),)
    assert policy.at(1) == policy.at(99) == ((parse(QUEST), None),)
    assert policy.at(3) == policy.at(7) == ((parse(H2O), None),)


def test_each_kv_head_gets_its_chain_and_the_last_is_for_the_rest(tmp_path):
    policy = saved(tmp_path, BOOK)
    assert policy.at(2) == ((parse("streaming_llm(hold=tokens(32))"), (0, 3)), (parse(QUEST), (1,)), (parse(H2O), None))
    assert policy.at(9, 4) == ((parse("full()"), (2,)), (parse(QUEST), None))
    with pytest.raises(WrongUse, match=r'policy book, \[heads.9\] "2": the layer has kv heads 0 to 1'):
        policy.at(9, 2)


def test_the_id_is_the_name_and_a_hash_of_what_it_means(tmp_path):
    policy = saved(tmp_path, BOOK)
    assert re.fullmatch("book@[0-9a-f]{12}", policy.id)
    spelled = BOOK.replace('"2-3, 7"', '"2"').replace("[layers]", f'[layers]\n"3,7" = "{H2O}"\n"5" = "{QUEST}"')
    spelled = spelled.replace("[heads.2]", f'[heads.2]\n"2" = "{H2O}"')
    assert saved(tmp_path, spelled) == policy
    assert saved(tmp_path, BOOK.replace("tokens(40)", "tokens(41)")).id != policy.id
    assert saved(tmp_path, BOOK.replace("[heads.2]", "[heads.4]")).id != policy.id


def test_its_form_is_a_policy_file_of_the_same_policy(tmp_path):
    policy = saved(tmp_path, BOOK)
    assert saved(tmp_path, policy.form) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(saved(tmp_path, policy.form))


def test_python_says_the_same(tmp_path):
    heads: dict[object, str | Part | Chain] = {(2, 1): QUEST, (2, 0): "streaming_llm(hold=tokens(32))", (9, 2): kvsim.full()}
    heads |= {(2, 3): kvsim.streaming_llm(hold=kvsim.tokens(32))}
    python = per_layer({0: kvsim.everything(), "2-3": parse(H2O), "7": H2O, **heads}, default=QUEST, name="book")
    assert python == parse_policy(python) == saved(tmp_path, BOOK)
    assert kvsim.per_layer({1: "full()"}, default=H2O).id.startswith("per_layer@")


def test_one_chain_is_its_own_id():
    assert parse_policy(QUEST).id == parse_policy(QUEST).form == canonical(parse(QUEST))
    assert parse_policy(QUEST).at(5) == ((parse(QUEST), None),)


REFUSED = {
    "x = 1": "unknown key of policy file {path} 'x': one of default, heads, layers",
    'defualt = "full()"': "unknown key of policy file {path} 'defualt', did you mean 'default'?",
    '[layers]\n0 = "full()"': 'policy file {path}: default is missing; write default = "EXPRESSION"',
    "default = 3": "policy file {path}, default: expected an expression in quotes, for example "
    "h2o(hold=share(0.2)) >> quest(read=tokens(1024))",
    'default = "qest(read=tokens(3))"': "policy file {path}, default: unknown policy 'qest', did you mean 'quest'?",
    'default = "full()"\nlayers = 3': 'policy file {path}, [layers]: expected a table, with lines such as "0,1" = "EXPRESSION"',
    'default = "full()"\n[layers]\n"0,x" = "full()"': 'policy file {path}, [layers] "0,x": expected numbers such as "3", "0,1" or "17-18"',
    'default = "full()"\n[layers]\n"4-3" = "full()"': 'policy file {path}, [layers] "4-3": expected numbers such as "3", "0,1" or "17-18"',
    'default = "full()"\n[layers]\n"-1" = "full()"': 'policy file {path}, [layers] "-1": expected numbers such as "3", "0,1" or "17-18"',
    'default = "full()"\n[layers]\n"0-99999" = "full()"': 'policy file {path}, [layers] "0-99999": expected numbers such as "3", "0,1" '
    'or "17-18"',
    'default = "full()"\n[layers]\n"0" = "tova()"\n"0-1" = "full()"': 'policy file {path}, [layers] "0": tova: hold= is missing; '
    "a hold budget is one of tokens(), share(), kib(), mib(), for example tokens(512)",
    'default = "full()"\n[layers]\n"0" = "full()"\n"0-1" = "full()"': 'policy file {path}, [layers] "0-1": 0 is named twice',
    'default = "full()"\n[heads]\n"3" = "full()"': 'policy file {path}, [heads.3]: expected a table, with lines such as "0,1" = "EXPRESSION"',
    'default = "full()"\n[heads.1-3]\n0 = "kivi()"\n[heads.2]\n1 = "kivi()"': "policy file {path}, [heads.2]: layer 2 is named twice",
    'default = "full()"\n[heads.17]\n"3" = "tova(hold=tokens(9))"': "policy file {path}, [heads.17]: the kv heads of tova decide together; "
    "give the layer one policy in [layers]",
    'default = "tova(hold=tokens(9))"\n[heads.17]\n"3" = "full()"': "policy file {path}, [heads.17]: the kv heads of tova decide together; "
    "give the layer one policy in [layers]",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_by_file_table_and_key(tmp_path, text):
    with pytest.raises(WrongUse) as refused:
        saved(tmp_path, text)
    assert str(refused.value) == REFUSED[text].format(path=tmp_path / "book.toml")


def test_files_that_are_none(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b'default = "\xff"')
    for name, why in (("gone.toml", "No such file"), ("latin.toml", "not a TOML file"), ("", "directory")):
        with pytest.raises(WrongUse, match=f"policy file .*{name}: .*{why}"):
            parse_policy(f"@{name}", tmp_path)
    for text in ("default = ", "default = " + "[" * 9000):
        with pytest.raises(WrongUse, match="not a TOML file"):
            saved(tmp_path, text)


def test_what_is_no_policy_is_refused():
    others: list[Any] = [3, None, kvsim.full]
    for other in others:
        with pytest.raises(WrongUse, match="expected a policy, for example"):
            parse_policy(other)


def test_python_keys_are_checked_too():
    for key in (-1, "x", (3, "y"), True):
        with pytest.raises(WrongUse, match="expected numbers"):
            per_layer({key: "full()"}, default="full()")
