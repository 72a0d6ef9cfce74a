"""Questions that need no trace: their READMEs say what is worked out today, verdicts follow from numbers, and the arithmetic is right by hand."""

from __future__ import annotations

import math

import pytest

from analyses.__main__ import main, questions
from analyses.figures import HOLDS, NOT, OPEN, UNTOLD
from analyses.published import notes_on_qevict, notes_on_quest
from analyses.published.question import sums
from analyses.reckoning import AT_LEAST, AT_MOST, EQUAL, MORE, OPEN_ENDED, Reckoning, Sum

EVERY = {q.name: q for q in questions([]) if isinstance(q, Reckoning)}


@pytest.fixture(params=sorted(EVERY))
def reckoning(request):
    return EVERY[request.param]


def test_the_readme_says_what_is_worked_out(reckoning):
    assert reckoning.block() in (reckoning.folder / "README.md").read_text("utf-8")


def test_the_page_has_every_number_and_every_chart(reckoning, tmp_path):
    reckoning.page(tmp_path / "page.html")
    told = (tmp_path / "page.html").read_text("utf-8")
    for figure in reckoning.charts(reckoning.sums()):
        assert figure.title in told
        assert "ull attention" in figure.how  # drawn, or named as absent
        assert figure.data.height > 0
    assert reckoning.command in told


def test_a_number_that_moved_is_an_exit_of_1(tmp_path, monkeypatch):
    q = EVERY["published"]
    monkeypatch.setattr(Reckoning, "block", lambda self: "another text")
    assert main([q.name, "-o", str(tmp_path / "page.html")]) == 1


@pytest.mark.parametrize(
    ("kind", "published", "found", "verdict"),
    [
        (EQUAL, 100.0, 100.9, HOLDS),
        (EQUAL, 100.0, 102.0, NOT),
        (AT_MOST, 5.0, 5.0, HOLDS),
        (AT_MOST, 5.0, 5.1, NOT),
        (AT_LEAST, 5.0, 5.0, HOLDS),
        (AT_LEAST, 5.0, 4.9, NOT),
        (MORE, 5.0, 5.0, NOT),
        (MORE, 5.0, 5.1, HOLDS),
        (OPEN_ENDED, None, 1.0, OPEN),
    ],
)
def test_verdicts(kind, published, found, verdict):
    assert Sum("", "", published, found, "", kind=kind).verdict == verdict


def test_verdicts_of_intervals():
    def verdict(kind, low, high):
        return Sum("", "", 2.0, (low + high) / 2, "", kind=kind, low=low, high=high).verdict

    assert (verdict(EQUAL, 1.9, 2.5), verdict(EQUAL, 2.1, 2.5)) == (HOLDS, NOT)
    assert (verdict(AT_LEAST, 2.0, 3.0), verdict(AT_LEAST, 1.0, 3.0), verdict(AT_LEAST, 1.0, 1.5)) == (HOLDS, UNTOLD, NOT)
    assert (verdict(AT_MOST, 1.0, 2.0), verdict(AT_MOST, 1.0, 3.0), verdict(AT_MOST, 2.5, 3.0)) == (HOLDS, UNTOLD, NOT)


# ---------------------------------------------------------------------------------------------- the audit, by hand
def test_a_window_by_hand():
    """8 tokens, 128 channels: 4096 bytes full; 512 of codes; 128 pairs of 4 bytes for keys and 8 for values."""
    assert notes_on_qevict.window_bytes() == {"full": 4096, "codes": 512, "scales": 512 + 32, "coded": 1056}
    assert notes_on_qevict.windows(100 * 2**20, 1056 / 4096) == (30, 271)


def test_a_sum_in_bfloat16_stops_at_8():
    assert notes_on_qevict.stalled() == 8


def test_bounds_by_hand():
    page = notes_on_quest.box([(3, -2), (1, 1), (0, 0)])
    assert notes_on_quest.bound(page, (2, -1)) == 8
    assert notes_on_quest.bound(page, (0, 1)) == 1


def test_what_is_left_unread_by_hand():
    read, unread = math.exp(8) + math.exp(7.25), 2 * (math.exp(3) + 1)
    assert notes_on_quest.eps_hat() == pytest.approx(unread / (read + unread))
    assert notes_on_quest.output_error() == pytest.approx(math.hypot(0.6 - 0.07 - 0.6 / 0.9, 0.3 - 0.06 - 0.3 / 0.9))


def test_impossible_claims_are_told():
    found = {s.said: s.verdict for s in sums()}
    assert found["an RTX 4090 was seen to read 16 GB of cache in 11 ms"] == NOT
    assert found["self-attention 2.23 times and with it the step 7.03 times"] == NOT
    assert found["a step with AWQ weights 2.23 times"] == HOLDS
