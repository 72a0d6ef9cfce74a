#!/usr/bin/env bash
# What only a GPU can tell, in eight minutes: tools/gpu_check.sh [--small] [FOLDER]
#
# Each section below is a function of its own that ends in 0 (met) or 1 (missed); another one is a function and a word in SECTIONS.
# --small runs the same on one thread of a CPU, in about a minute. FOLDER (default: build/gpu_check) keeps what was measured.
set -u
cd "$(dirname "$0")/.."

DEVICE=cuda SIZE="" SMALL="" SECONDS_EACH=40
if [ "${1:-}" = --small ]; then
  DEVICE=cpu SIZE="--largest 64" SMALL=--small SECONDS_EACH=10
  shift
fi
OUT=${1:-build/gpu_check}
PYTHON=${PYTHON:-.venv/bin/python}
KVSIM="$PYTHON -m kvsim"
export OMP_NUM_THREADS=1

SECTIONS=(cost crossover capture)

# Half of the shapes fit a model; the other half, inside the box of the first and measured apart from it, says how wrong it is.
cost() {
  $KVSIM cost measure --device $DEVICE $SIZE --seconds $SECONDS_EACH -o "$OUT/samples.csv" &&
    $KVSIM cost measure --device $DEVICE $SIZE --seconds $SECONDS_EACH --between -o "$OUT/others.csv" &&
    $KVSIM cost fit "$OUT/samples.csv" -o "$OUT/model.json" &&
    $PYTHON tools/cost.py held "$OUT/model.json" "$OUT/others.csv"
}

# The context from which reading pages by bounds is cheaper than reading everything, measured and predicted.
crossover() {
  $PYTHON tools/crossover.py "$OUT/model.json" --device $DEVICE $SIZE --seconds $SECONDS_EACH
}

# A model captured over 32K tokens: its tokens unchanged, its outputs attended again bit for bit, what it costs, a profile of decode steps.
capture() {
  $PYTHON -m tools.gpu_capture "$OUT" --device $DEVICE $SMALL
}

mkdir -p "$OUT"
missed=0 summary=()
for section in "${SECTIONS[@]}"; do
  echo "== $section"
  if $section; then summary+=("met     $section"); else summary+=("MISSED  $section"); missed=1; fi
done
echo "== summary ($DEVICE)"
printf '%s\n' "${summary[@]}"
exit $missed
