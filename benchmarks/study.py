"""How many policies a second a study replays, on one core: 24 policies in one sweep, against 24 sweeps of one policy, of the same layers."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.race import Entry, note, race, ratio, show
from kvsim.replay.sweep import sweep
from kvsim.synth.generate import synthesize

TOKENS, STEPS, LAYERS = 4096, 128, 2
POLICIES = (
    *(f"quest(read=pages({n}), page=16)" for n in (8, 16, 24, 32, 48, 64, 96, 128)),
    *(f"h2o(hold=tokens({n}))" for n in (256, 512, 768, 1024, 1536, 2048, 2560, 3072)),
    *(f"tova(hold=tokens({n}))" for n in (512, 1024, 1536, 2048)),
    *(f"snapkv(hold=tokens({n}), window=16)" for n in (512, 1024, 1536, 2048)),
)
ONE, EACH = "one study", "a study for each policy"


def main(rounds: int = 5) -> bool:
    with TemporaryDirectory() as place:
        home, names = Path(place), count()
        synthesize(home / "trace", prompt=TOKENS, steps=STEPS, layers=LAYERS, q_heads=4, kv_heads=1, head_dim=128)

        def run(policies: tuple[str, ...]) -> None:
            file = home / "study.toml"
            file.write_text(f'traces = ["trace"]\npolicies = {list(policies)}\n')
            sweep(file, home / f"run{next(names)}", workers=1)

        def one_by_one() -> None:
            for policy in POLICIES:
                run((policy,))

        entries = [Entry(ONE, lambda: run(POLICIES)), Entry(EACH, one_by_one)]
        times = race(entries, min(rounds, 3))
    print(
        f"{len(POLICIES)} policies on {LAYERS} layers of {TOKENS} + {STEPS} tokens, 4 query heads; ratios are to the first line"
    )
    show(times, ONE)
    best = sorted(times[ONE])[len(times[ONE]) // 2]
    note("policies times layers a CPU second", len(POLICIES) * LAYERS / best)
    note("times one study for each policy", ratio(times, EACH, ONE)[0])
    return True


if __name__ == "__main__":
    raise SystemExit(not main())
