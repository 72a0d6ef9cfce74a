"""Files of numpy.savez that others wrote: what reading one may raise."""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib

# Of what is no .npz, or a damaged or encrypted one, or one that is longer than memory by its own account.
DAMAGED = (
    ValueError, KeyError, OSError, TypeError, AttributeError, SyntaxError, RuntimeError, EOFError, MemoryError, struct.error,
    tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
