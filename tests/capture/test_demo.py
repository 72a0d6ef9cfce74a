"""A capture made by hand goes into the report as the bundled one does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvsim import cli
from kvsim.capture.run import capture
from kvsim.capture.tasks import document
from tests.capture import tiny
from tests.capture.words import SIZE, tokenizer


def tables(text: str, trace: Path) -> dict[str, Any]:
    """{figure: its numbers} of the page that `kvsim demo` makes of a text captured as `trace`."""
    model = tiny.model("llama", vocab_size=SIZE, max_position_embeddings=1024)
    capture(model, document(tokenizer(), text, "What is it?"), trace, steps=20)
    page = trace.with_suffix(".html")
    assert cli.main(["demo", str(trace), "-o", str(page)]) == 0
    found = re.search(r'<script[^>]*id="kvsim-tables">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_another_prompt_gives_another_report(tmp_path):
    """No figure keeps its numbers."""
    fox = tables("The quick brown fox jumps over the lazy dog. " * 8, tmp_path / "fox")
    dog = tables("Rain falls on the plain, and the plain is in Spain. " * 9, tmp_path / "dog")
    assert len(fox) >= 25
    assert fox.keys() == dog.keys()
    assert [name for name in fox if fox[name] == dog[name]] == []
