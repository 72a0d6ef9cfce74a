"""Stores that need a calibration file: which one it was, that it was made for this policy, and that it is not of what is replayed."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvsim.codecs.calibration import MAKE, Calibration, Sample, load
from kvsim.errors import WrongUse
from kvsim.policies.parameters import written
from kvsim.policies.protocol import Store


class Calibrated(Store):
    """A store with the fields `calibration` (FILE, shown as FILE@ and the first digits of its sha256) and `in_sample` (whether a file made
    from what is replayed is taken nevertheless: what it then shows is how well it knows its own data)."""

    computed: ClassVar[str] = ""  # what the arrays of a file are, in words
    calibration: str | None
    in_sample: bool

    @property
    def calibration_options(self) -> dict[str, Any]:
        """What the numbers of a calibration depend on."""
        raise NotImplementedError

    def calibrate(self, sample: Sample) -> dict[str, NDArray[np.float64]]:
        """The numbers of one layer from rows of it."""
        raise NotImplementedError

    def pinned(self) -> None:
        """Of __post_init__: the file in the policy's name is the one that is there now."""
        if self.calibration is not None:
            file = self.loaded()
            object.__setattr__(self, "calibration", f"{file.path}@{file.digest}")

    def loaded(self) -> Calibration:
        """Raises WrongUse when there is no file, or one made for something else."""
        name = type(self).__name__
        if self.calibration is None:
            raise WrongUse(f"{name}(calibration=None): expected a calibration file of another trace; {MAKE}")
        file = load(self.calibration)
        kind, options = file.about.get("kind"), file.about.get("options")
        if kind != name or options != self.calibration_options:
            mine = ", ".join(f"{n}={written(x)}" for n, x in self.calibration_options.items())
            raise WrongUse(f"calibration {file.path} was made for {kind} with {options}, and this is {name}({mine}); {MAKE}")
        return file

    def foreign_to(self, trace: str, sha256: str, context: str) -> str | None:
        """Why it may not be replayed on a request of a trace: it would know what it is tried on. None: it may."""
        if self.calibration is None or self.in_sample:
            return None
        about, name = self.loaded().about, type(self).__name__
        way = "calibrate on another one, or say in_sample=True"
        if about["trace"].get("sha256") == sha256:
            return f"{name}: its calibration was made from the trace that is replayed, {trace}; {way}"
        if context and context in about.get("contexts", []):
            return f"{name}: its calibration was made from the same context that is replayed, of trace {about['trace'].get('id')}; {way}"
        return None
