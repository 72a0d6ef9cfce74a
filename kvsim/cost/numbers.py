"""Numbers and units as profilers print them -> plain floats in microseconds and bytes; and microseconds as kvsim prints them."""

from __future__ import annotations

import math
import re

from kvsim.errors import BadProfile

PLAIN = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")  # 12,904 and 9,096.60
MISSING = {"", "n/a", "nan", "(!) n/a", "-"}
PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}  # Nsight's K, M and G are decimal
TIMES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6, "sec": 1e6}


def number(text: str | None, where: str) -> float | None:
    """A cell -> its value, or None where the profiler had none; `where` names file, row and column.

    Raises BadProfile for anything else: `1.234,5` is a localised decimal, and read as thousands it would be wrong by a factor."""
    cell = (text or "").strip()
    if cell.lower() in MISSING:
        return None
    plain = cell.replace(",", "") if GROUPED.fullmatch(cell) else cell
    if PLAIN.fullmatch(plain) and math.isfinite(found := float(plain)):
        return found
    hint = "; export again with LC_ALL=C" if re.fullmatch(r"[\d.,\s'’]+", cell) else ""
    raise BadProfile(f"{where}: {cell!r} is not a number such as 1234.5 or 1,234.5{hint}")


def microseconds(value: float, unit: str, where: str) -> float:
    """Raises BadProfile for a unit that is no time."""
    if unit.strip().lower() not in TIMES:
        raise BadProfile(f"{where}: unit {unit!r} is no time; expected one of {', '.join(TIMES)}")
    return value * TIMES[unit.strip().lower()]


def scaled(value: float, unit: str, base: str, where: str) -> float:
    """`2.33 Mbyte` -> 2.33e6 of the base. Raises BadProfile for another unit."""
    found = re.fullmatch(rf"([kmgt]?){re.escape(base)}", unit.strip().lower())
    if not found:
        raise BadProfile(f"{where}: unit {unit!r} where {base}, K{base}, M{base} or G{base} is expected")
    return value * PREFIX[found[1]]


def seconds(us: float | None) -> str:
    """Microseconds as people read them, three digits: 12345.6 -> "12.3 ms"."""
    if us is None:
        return "?"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


def four(x: float) -> str:
    """Four digits, or all of a larger whole: 1.1794 -> "1.179", 16523.4 -> "16523"."""
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:.0f}"
