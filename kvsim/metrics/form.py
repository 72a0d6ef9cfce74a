"""What run.json says, by name and type: the parts that somebody reads. What is missing or null is unknown, and what nobody knows is ignored."""

from __future__ import annotations

from typing import Any

WHOLE, NUMBER, TEXT, FLAG, ANY = "a whole number", "a number", "a text", "true or false", "an object"
SPAN = {"label": TEXT, "start!": WHOLE, "stop!": WHOLE, "kind": TEXT}
FORM: dict[str, Any] = {
    "kvsim": TEXT,
    "created": TEXT,
    "trace": {"id": TEXT, "sha256": TEXT, "dtype": TEXT, "source": {"model": TEXT, "weight_format": TEXT}, "capture": ANY},
    "kv_dtype": TEXT,
    "policies": [{"id!": TEXT} | dict.fromkeys(("form", "name", "version", "role", "beside"), TEXT) | {"ragged": FLAG}],
    "layers": [
        {"layer!": WHOLE, "kind": TEXT, "softcap": NUMBER}
        | dict.fromkeys(("q_heads", "kv_heads", "key_dim", "value_dim", "row_bytes", "window", "kv_source_layer"), WHOLE)
        | dict.fromkeys(("captured", "learned_sinks"), FLAG)
    ],
    "requests": [
        {"request!": WHOLE, "prompt_tokens": WHOLE, "total_tokens": WHOLE, "mode": TEXT, "spans": [SPAN], "steps": WHOLE}
    ],
    "options": ANY,
    "noise_floor": [{"request": WHOLE, "layer": WHOLE, "median": NUMBER, "p95": NUMBER}],
    "tables": ANY,
}
MOST = 2**31  # of a whole number: tokens, bytes of a row, ids


def wrong(value: Any, form: Any = FORM, where: str = "") -> str | None:
    """The first part that is not as it should be, in words; None when there is none."""
    if isinstance(form, str):
        return None if _fits(value, form) else f"{where} is {value!r:.80}, expected {form}"
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where} is {value!r:.80}, expected a list"
        return next((w for i, x in enumerate(value) if (w := wrong(x, form[0], f"{where}[{i}]"))), None)
    if not isinstance(value, dict):
        return f"{where} is {value!r:.80}, expected {ANY}"
    for name, inner in form.items():
        key = name.rstrip("!")
        here, x = f"{where}.{key}".lstrip("."), value.get(key)
        if x is None and name != key:
            return f"{here} is missing"
        if x is not None and (found := wrong(x, inner, here)):
            return found
    return None


def _fits(x: Any, form: str) -> bool:
    number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return {
        WHOLE: number and isinstance(x, int) and 0 <= x < MOST,
        NUMBER: number,
        TEXT: isinstance(x, str),
        FLAG: isinstance(x, bool),
        ANY: isinstance(x, dict),
    }[form]
