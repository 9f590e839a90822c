#!/bin/sh
# The figures of a GPU, in 8 minutes, one JSON line each in OUT (default gpu-benchmarks.jsonl):
#   DistilBERT size, bfloat16, Q 1,098, P 3,000: tokens a second, share of the card's measured
#   matrix-product peak on useful tokens, ratio to PyTorch (autocast, SDPA) where torch is
#   installed; the step at L = 1.3 M with peak GPU memory and the share of time the device is idle.
# On a CPU it runs the same cases at toy sizes, to be tried before a GPU is there.
# Titles are real ones where DATA names a folder with LF-WordNetTitles, else random tokens of
# LF-AmazonTitles-1.3M's lengths.
#
#   [DATA=FOLDER] [OUT=FILE] [PYTHON=python] sh experiments/benchmarks/gpu.sh
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
OUT=${OUT:-gpu-benchmarks.jsonl}
# Contenders share the card: each takes memory as it needs it.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

if command -v nvidia-smi >/dev/null && [ "${JAX_PLATFORMS:-}" != cpu ]; then
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    sizes="--gpu --shapes distilbert"
    titles=${DATA:+"--texts=titles --data=$DATA"}
else
    echo "no GPU: toy sizes on the CPU" >&2
    sizes="--quick --shapes tiny"
    titles=""
fi
peer=""
if "$PYTHON" -c "import torch" 2>/dev/null; then
    peer="--peer=torch"
else
    echo "torch is not installed: no ratio to PyTorch (pip install '.[bench]')" >&2
fi

bench() { # seconds that it may take, then the arguments
    limit=$1
    shift
    timeout "$limit" "$PYTHON" -m experiments.benchmarks "$@" --out="$OUT" || {
        echo "failed or took over $limit s: $*" >&2
        failed=1
    }
}

failed=0
# shellcheck disable=SC2086  # several flags in one variable
{
    bench 210 train_step $sizes $peer --repeats=10 ${titles:---texts=amazon} \
        --without "one text a row"
    bench 180 host $sizes --repeats=6 --only="keeps up"
    bench 90 labels_sweep ${sizes%%--shapes*} --repeats=20
}
exit $failed
