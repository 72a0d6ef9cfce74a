"""Does a sweep on a cluster end in the bytes of one process, whoever is killed, and what does the cluster cost?

    python benchmarks/sweep.py --tasks 2000 --kill-every 20

In one go: the same tasks in one process, whose run the others must equal; in two processes that know nothing of each other; on two
workers of a Dask cluster; and there again while one worker after the other is killed with signal 9. Then a layer that kills its worker
among 400, on the cluster and on the local pool: exactly one failure. --calm: only what the cluster costs. Needs kvsim[cluster]."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from kvsim.synth.generate import synthesize

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 10
LEAST = 0.85  # of the speed of two independent processes
STUDY = """
traces = ["trace"]
policies = ['quest(read=pages({pages}), page=16)', "h2o(hold=tokens(256))", "tova(hold=tokens(256))"]
[grid]
pages = [4, 8, 16, 32]
"""
POISON = '''"""Ends its process, where it is asked to be."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvsim.policies.protocol import Hold, Keep, Prefix, Ranking, Seen, State


@dataclass(frozen=True, kw_only=True)
class poison(Keep):
    act = "kills its worker"

    hold: Hold

    def start(self, prefix: Prefix, seen: Seen) -> tuple[State, Ranking | None]:
        os.kill(os.getpid(), 9)
        return State(), None
'''
DASK = [str(Path(sys.executable).with_name("dask"))]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tasks", type=int, default=60, help="layers of requests (default: 60)")
    p.add_argument("--poisoned", type=int, default=40, help="layers beside the one that kills (default: 40; at full size 400)")
    p.add_argument("--prompt", type=int, default=1024, help="tokens; more make longer tasks (default: 1024)")
    p.add_argument("--steps", type=int, default=128, help="decode steps (default: 128)")
    p.add_argument("--kill-every", type=float, default=20, metavar="S", help="seconds (default: 20)")
    p.add_argument("--calm", action="store_true", help="only two processes against two workers of a cluster, nobody killed")
    p.add_argument("--folder", type=Path, help="for the trace, which is used again when it is there (default: a temporary one)")
    args = p.parse_args(argv)
    requests = max(2, args.tasks // LAYERS // 2 * 2)
    with TemporaryDirectory(prefix="kvsim-sweep-") as folder:
        home = Path(folder)
        made = (args.folder or home) / "trace"
        if not (made / "manifest.json").exists():
            synthesize(made, requests=requests, layers=LAYERS, prompt=args.prompt, steps=args.steps, head_dim=64)
        if args.folder:
            (home / "trace").symlink_to(made.absolute())
        (home / "study.toml").write_text(STUDY)
        print(
            f"{requests * LAYERS} tasks: {requests} requests x {LAYERS} layers of {args.prompt} + {args.steps} tokens, 6 policies"
        )
        if args.calm:
            sweep(home, "warm", "--workers", "1", only=[0])
            return 0 if cost_of_cluster(home, requests, None) else 1
        good = compared(home, requests, args.kill_every)
        good &= poisoned(home, args.poisoned)
    return 0 if good else 1


def compared(home: Path, requests: int, every: float) -> bool:
    sweep(home, "warm", "--workers", "1", only=[0])  # compiles
    one = timed(lambda: sweep(home, "one", "--workers", "1"))
    print(f"  one process                {one:8.1f} s   {one / requests / LAYERS:.2f} s a task")
    good = cost_of_cluster(home, requests, every)
    good &= told("without kills: the bytes of one process", same(home, "one", "calm"))
    return good & told("with kills: the bytes of one process", same(home, "one", "killed"))


def cost_of_cluster(home: Path, requests: int, every: float | None) -> bool:
    """Whether two workers are as fast as asked; then, with `every`, the same while they are killed."""
    half = timed(lambda: side_by_side(home, requests))
    print(f"  two independent processes  {half:8.1f} s", flush=True)
    with cluster(home) as scheduler:
        on_it = ("--engine", "dask", "--scheduler", scheduler)
        sweep(home, "warm-cluster", *on_it, only=[0, 1])
        calm = timed(lambda: sweep(home, "calm", *on_it))
        print(f"  two workers of a cluster   {calm:8.1f} s   {half / calm:.0%} of them (asked: {LEAST:.0%})", flush=True)
        if every is not None:
            with killing(scheduler, every) as killed:
                took = timed(lambda: sweep(home, "killed", *on_it))
            print(f"  the same, {len(killed):3d} kills        {took:8.1f} s", flush=True)
    return half / calm >= LEAST


def poisoned(home: Path, layers: int) -> bool:
    """One layer of many kills whoever replays it: exactly one failure, on each engine, and then, without it, nothing is done twice."""
    synthesize(home / "poisoned", layers=layers, prompt=64, steps=8)
    (home / "poison.py").write_text(POISON)
    (home / "one-layer.toml").write_text('default = "full()"\n[layers]\n"7" = "poison(hold=tokens(8))"\n')
    lines = ('traces = ["poisoned"]', 'policies = ["@one-layer.toml"]', 'policy_files = ["poison.py"]')
    (home / "poison.toml").write_text("\n".join(lines) + "\n")
    good = True
    with cluster(home) as scheduler:
        for name, options in (("cluster", ("--engine", "dask", "--scheduler", scheduler)), ("local", ("--workers", "2"))):
            out = home / f"poison-{name}"
            done = kvsim("sweep", home / "poison.toml", "-o", out, *options, check=False)
            failed = [line for line in done.stderr.splitlines() if line.startswith("kvsim: failed: poisoned, request ")]
            parts = len(list((out / "poisoned.partial" / "parts").glob("*/part.json")))
            right = done.returncode == 1 and len(failed) == 2 and "layer 7" in failed[0] and "(1 of" in failed[1]
            good &= told(f"one poison among {layers} on the {name} engine: one failure, by name", right and parts == layers - 1)
            if not right:
                print(done.stderr[-2000:])
    return good


# ------------------------------------------------------------------------------------------------ runs
def kvsim(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsim", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done


def sweep(home: Path, out: str, *options: str, only: Sequence[int] | None = None) -> None:
    study = home / f"{out}.toml"  # of its own, for the requests
    study.write_text((f"requests = {list(only)}\n" if only is not None else "") + STUDY)
    kvsim("sweep", study, "-o", home / out, *options)


def side_by_side(home: Path, requests: int) -> None:
    halves = [list(range(i, requests, 2)) for i in (0, 1)]
    threads = [
        Thread(target=sweep, args=(home, f"half{i}", "--workers", "1"), kwargs={"only": mine}) for i, mine in enumerate(halves)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def same(home: Path, one: str, other: str) -> bool:
    """The tables are the same bytes, and no part is left."""
    a, b = home / one / "trace", home / other / "trace"
    tables = sorted(p.name for p in a.glob("*.parquet"))
    equal = tables == sorted(p.name for p in b.glob("*.parquet"))
    return (
        equal
        and all((a / t).read_bytes() == (b / t).read_bytes() for t in tables)
        and not (home / other / "trace.partial").exists()
    )


@contextmanager
def cluster(home: Path) -> Iterator[str]:
    """A scheduler and two workers, as a user starts them."""
    file = home / f"scheduler-{time.monotonic_ns()}.json"
    options = ["--scheduler-file", str(file), "--no-dashboard"]
    started = [_quiet(*DASK, "scheduler", *options, "--port", "0")]
    here = ["--nworkers", "2", "--nthreads", "1", "--local-directory", str(home)]
    started.append(_quiet(*DASK, "worker", *options, *here))
    while not file.exists():
        time.sleep(0.1)
    try:
        yield str(file)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(60)


def _quiet(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def killing(scheduler: str, every: float) -> Iterator[list[int]]:
    """Kills a worker every so many seconds; its nanny starts another one."""
    from distributed import Client

    done, killed = Event(), list[int]()
    chance = random.Random(0)

    def kill() -> None:
        with Client(scheduler_file=scheduler, set_as_default=False) as client:
            while not done.wait(every):
                pids = sorted(pid for pid in client.run(os.getpid, on_error="ignore").values() if isinstance(pid, int))
                if pids:
                    os.kill(chosen := chance.choice(pids), signal.SIGKILL)
                    killed.append(chosen)

    thread = Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def told(what: str, good: bool) -> bool:
    print(f"  {'ok  ' if good else 'MISS'} {what}")
    return good


if __name__ == "__main__":
    raise SystemExit(main())
