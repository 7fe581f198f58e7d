#!/usr/bin/env bash
# The wheels that a borrowed GPU machine lacks (Python 3.12 and a torch for its GPU are there), for benchmarks/gpu.py.
#
#   scripts/gpu_wheels.sh [--dry-run] [FOLDER]      default: .venv-wheels; --dry-run: what would be fetched, no network
#
# There:  python3 -m pip install --no-index --no-deps --target /tmp/site FOLDER/*.whl && export PYTHONPATH=/tmp/site
# Together at most 64 MiB. PYTHON and DeepSpeed (which has no wheel, and is built here without its operators) as in CI.
set -euo pipefail
cd "$(dirname "$0")/.."

limit=$((64 * 1024 * 1024))
wheels=(hjson pydantic pydantic-core annotated-types typing-inspection webdataset braceexpand simplejpeg ftfy wcwidth
    obstore botocore jmespath open_clip_torch pytest pluggy iniconfig)
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
dry=
if [ "${1:-}" = --dry-run ]; then
    dry=1
    shift
fi
folder=${1:-.venv-wheels}
python=${PYTHON:-python3}

# The same versions as here, where a package is installed here.
version() { "$python" -c "from importlib.metadata import version as v; print('==' + v('$1'))" 2>/dev/null || true; }

wanted=()
for name in "${wheels[@]}"; do wanted+=("$name$(version "$name")"); done
if [ -n "$dry" ]; then
    printf '%s\n' "deepspeed$(version deepspeed) (built here)" "${wanted[@]}"
    exit
fi
mkdir -p "$folder"
rm -f "$folder"/*.whl
args=(--quiet --disable-pip-version-check --no-deps)
for platform in "${platforms[@]}"; do target+=(--platform "$platform"); done
# shellcheck disable=SC2154  # target is filled above
"$python" -m pip download "${args[@]}" --only-binary=:all: --python-version 3.12 --implementation cp "${target[@]}" \
    -d "$folder" "${wanted[@]}"
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel "${args[@]}" --no-build-isolation -w "$folder" \
    "deepspeed$(version deepspeed)"
total=0
for wheel in "$folder"/*.whl; do
    size=$(stat -c %s "$wheel")
    total=$((total + size))
    printf '%9d KiB  %s\n' $((size / 1024)) "$(basename "$wheel")"
done
printf '%9d KiB  together\n' $((total / 1024))
[ "$total" -le "$limit" ] || {
    echo "more than $((limit / 1024 / 1024)) MiB"
    exit 1
}
