"""What to measure, by hand: the shapes of each class, and the commands of three profilers with the imports that take them in."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict

from kvsim.cost.hardware import Gpu
from kvsim.cost.heads import Geometry
from kvsim.cost.measure.shapes import BY_PAGE, CLASSES, Shape, shapes, traffic
from kvsim.errors import WrongUse

SHARE = 4  # of the GPU's memory that the largest launch may read
MOST = 2 << 30  # bytes
METRICS = "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum"
COUNTERS = [cls for cls in CLASSES if cls not in ("rest", "host_fetch")]  # those that Nsight Compute sees as kernels


def recipe(gpu: Gpu, g: Geometry, classes: Collection[str] | None = None, between: bool = False) -> str:
    """The same text for the same arguments; `between`: of the shapes to check a fit with.

    Raises WrongUse for a class that it has no shapes for."""
    known = [cls for cls in CLASSES if cls != "rest"]
    for cls in classes or ():
        if cls not in known:
            raise WrongUse(f"no shapes for class {cls!r}: one of {', '.join(known)}")
    wanted = [cls for cls in known if not classes or cls in classes]
    largest = min(int(gpu.memory_gb * 1e9) // SHARE, MOST)
    plan = {cls: shapes(cls, g, largest, between) for cls in wanted}
    parts = [_head(gpu, g)] + [_shapes(cls, g, plan[cls]) for cls in wanted]
    parts += [_compute(gpu, cls, plan[cls]) for cls in wanted if cls in COUNTERS]
    parts += [_systems(gpu)] if "host_fetch" in wanted else []
    return "\n".join([*parts, _torch(gpu), _last(between)])


def _head(gpu: Gpu, g: Geometry) -> str:
    heads = f"{g.q_heads} query heads, {g.kv_heads} kv heads, head_dim {g.head_dim}, {g.dtype}"
    return f"""# {gpu.name}: {heads}
# Where torch sees the GPU, one command measures all of this; the rest is for kernels of your own engine:
#   kvsim cost measure -o samples.csv
# Caches cold: flush L2 before each launch, or let ncu do it. Warm up: ten launches that are not counted. Base units.
# $RUN is your program, which launches the kernel of one shape 20 times and reads $BATCH, $CONTEXT, $PAGES. Names that kvsim
# does not know need import --classes FILE.
echo '{json.dumps(asdict(g))}' > geometry.json
"""


def _shapes(cls: str, g: Geometry, wanted: list[Shape]) -> str:
    lines = [f"# {cls}{'':{16 - len(cls)}} batch  context    pages        bytes"]
    for s in wanted:
        pages = str(s.pages) if cls in BY_PAGE else "-"
        lines.append(f"# {'':16} {s.batch:5} {s.context:8} {pages:>8} {traffic(cls, g, s):12}")
    return "\n".join(lines) + "\n"


def _compute(gpu: Gpu, cls: str, wanted: list[Shape]) -> str:
    triples = " ".join(f"{s.batch},{s.context},{s.pages}" for s in wanted)
    paged = f" --pages $PAGES --page {wanted[0].page}" if cls in BY_PAGE else ""
    return f"""# {cls}, Nsight Compute: time, and the bytes that memory saw
for SHAPE in {triples}; do
  IFS=, read -r BATCH CONTEXT PAGES <<< $SHAPE; export BATCH CONTEXT PAGES; NAME={cls}-$BATCH-$CONTEXT-$PAGES
  ncu --csv --page raw --print-units base --cache-control all --clock-control base --launch-skip 10 --launch-count 10 \\
      --metrics {METRICS} --log-file $NAME.csv $RUN
  kvsim cost import $NAME.csv --gpu {gpu.key} --geometry geometry.json --batch $BATCH --context $CONTEXT{paged} --cache cold \\
      -o $NAME.samples.csv
done
"""


def _systems(gpu: Gpu) -> str:
    return f"""# host_fetch, Nsight Systems: copies between host and GPU with their sizes
nsys profile --trace cuda --output copies $RUN
nsys export --type sqlite --output copies.sqlite copies.nsys-rep
kvsim cost import copies.sqlite --gpu {gpu.key} --geometry geometry.json -o copies.samples.csv
"""


def _torch(gpu: Gpu) -> str:
    return f"""# whole decode steps, PyTorch's profiler in vLLM or SGLang: their annotations hold batch and tokens
#   with torch.profiler.profile(schedule=torch.profiler.schedule(wait=5, warmup=5, active=10)) as p:
#       for _ in range(20): step(); p.step()
#   p.export_chrome_trace("steps.json.gz")
kvsim cost import steps.json.gz --gpu {gpu.key} --geometry geometry.json -o steps.samples.csv
"""


def _last(between: bool) -> str:
    if between:
        return "for FILE in *.samples.csv; do kvsim cost check model.json $FILE; done\n"
    return "# then the shapes of kvsim cost recipe --between, and kvsim cost check\nkvsim cost fit *.samples.csv -o model.json\n"
