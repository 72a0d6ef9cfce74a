"""Labels tell policies apart, are short, and never fail on what is not an expression."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsim.report.names import LONGEST, budget, family, forced, labels, parts
from tests.report.runs import FULL, H2O, KIVI, QUEST


def test_parts():
    assert [p.name for p in parts(QUEST)] == ["full", "quest"]
    assert parts(QUEST)[1].parameters["read"] == "tokens(8)"
    assert parts("table.toml@abc") == parts("1 >> 2") == parts("a.b(c=1)") == parts("") == parts("(" * 500) == ()


def test_family():
    assert [family(p) for p in (QUEST, H2O, KIVI, FULL)] == ["quest", "h2o", "kivi", "full"]
    assert family("h2o(hold=share(0.5, of='visible')) >> quest(read=tokens(8))") == "h2o >> quest"
    assert family("table.toml@abc") == "table.toml@abc"


def test_budgets():
    told = {
        "tokens(256)": "256",
        "share(0.2, of='visible')": "20%",
        "share(0.2, of='prompt')": "20% of prompt",
        "pages(4)": "4 pages",
        "mib(1.5)": "1.5 MiB",
        "exact(r=10)": "exact(r=10)",
    }
    assert {text: budget(text) for text in told} == told


def test_labels_show_budgets_and_what_differs():
    ids = [
        QUEST,
        QUEST.replace("tokens(8)", "tokens(16)"),
        QUEST.replace("page=4", "page=8"),
        FULL,
        KIVI,
        KIVI.replace("k_bits=2", "k_bits=4"),
    ]
    assert list(labels(ids).values()) == [
        "quest 8, page=4",
        "quest 16",
        "quest 8, page=8",
        "full",
        "kivi, k_bits=2",
        "kivi, k_bits=4",
    ]


@given(st.lists(st.one_of(st.text(max_size=80), st.sampled_from([QUEST, FULL, "x" * 60 + "a", "x" * 60 + "b"])), unique=True))
def test_labels_are_different_and_short(ids):
    found = labels(ids)
    assert list(found) == ids
    assert len(set(found.values())) == len(ids)
    assert all(len(label) <= LONGEST + 5 for label in found.values())


def test_ids_alike_where_a_label_ends_are_numbered():
    assert [x[-3:] for x in labels(["x" * 60 + end for end in "abc"]).values()] == ["xx…", " #2", " #3"]


def test_forced():
    read = "full() >> quest(read=tokens(8), sinks={}, recent={}, tail={!r})"
    assert forced(read.format(0, 0, "free")) == "none"
    assert forced(read.format(4, 32, "forced")) == "first 4, newest 32, newest page"
    assert forced("streaming_llm(hold=tokens(8), sinks=4) >> everything()") == "none"
    assert forced("table.toml@abc") == "not recorded"
