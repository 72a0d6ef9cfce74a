"""What kvsim raises: one line each that says what, where, what was expected and how to mend it."""

LONGEST = 1000  # characters of a line of a message: what it quotes may be longer than anybody reads


class KvsimError(Exception):
    """Anything kvsim refuses by name. What a message quotes of a file cannot move the cursor or hide what follows it."""

    def __init__(self, text: object = "") -> None:
        super().__init__("\n".join(_shown(line) for line in str(text).split("\n")))


def in_a_line(error: BaseException) -> str:
    """What an error of others says, without its line breaks."""
    return " ".join(str(error).split())


def _shown(line: str) -> str:
    plain = line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST * 2 // 3]} ... {plain[-LONGEST // 4 :]}"


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
