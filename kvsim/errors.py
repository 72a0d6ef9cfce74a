"""What kvsim raises: one line each that says what, where, what was expected and how to mend it."""


class KvsimError(Exception):
    """Anything kvsim refuses by name."""


class WrongUse(KvsimError, ValueError):
    """The request cannot be carried out as asked (exit code 2): a policy, a parameter, a flag, a missing need."""


class BadTrace(KvsimError, ValueError):
    """A trace or a run on disk is not what its format says (exit code 1)."""


class BrokenLaw(KvsimError, AssertionError):
    """`--strict`: a table breaks a law that must hold for every policy (exit code 1)."""


class BadProfile(KvsimError, ValueError):
    """A profiler's export, a table of samples or a cost model is not what its format says (exit code 1)."""


class Uncalibrated(BadProfile):
    """`--strict`: a time that no measurement encloses (exit code 3)."""
