#!/usr/bin/env bash
# The wheels that a borrowed GPU machine lacks (Python 3.12 and a torch for its GPU are there), for benchmarks/gpu.py.
#
#   scripts/gpu_wheels.sh [--dry-run] [FOLDER]      default: .venv-wheels; --dry-run: what would be fetched, no network
#   scripts/gpu_wheels.sh --torch [FOLDER]          the torch and Triton of this project for sm_90, where the machine's are older
#
# There:  python3 -m pip install --no-index --no-deps --target /tmp/site FOLDER/*.whl && export PYTHONPATH=/tmp/site
# and for --torch:  cat FOLDER/torch.* | xz -dc | tar x -C /tmp/site; ln -s SITE-PACKAGES/nvidia /tmp/site/nvidia;
#   export LD_PRELOAD=/tmp/site/torch/lib/libncclstub.so   (functions that an older NCCL lacks; one GPU does not call them)
# Together at most 64 MiB, and each part of torch at most 57 MiB. PYTHON and DeepSpeed (which has no wheel, and is built
# here without its operators) as in CI.
set -euo pipefail
cd "$(dirname "$0")/.."

limit=$((64 * 1024 * 1024))
wheels=(hjson pydantic pydantic-core annotated-types typing-inspection webdataset braceexpand simplejpeg ftfy wcwidth
    obstore botocore jmespath open_clip_torch pytest pluggy iniconfig pytest-xdist execnet)
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
dry=
if [ "${1:-}" = --dry-run ]; then
    dry=1
    shift
fi
with_torch=
if [ "${1:-}" = --torch ]; then
    with_torch=1
    shift
fi
folder=${1:-.venv-wheels}
python=${PYTHON:-python3}
case "$python" in [!/]*/*) python=$PWD/$python ;; esac

# The same versions as here, where a package is installed here.
version() { "$python" -c "from importlib.metadata import version as v; print('==' + v('$1'))" 2>/dev/null || true; }

wanted=()
for name in "${wheels[@]}"; do wanted+=("$name$(version "$name")"); done
if [ -n "$dry" ]; then
    printf '%s\n' "deepspeed$(version deepspeed) (built here)" "${wanted[@]}"
    exit
fi
mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder"/torch.*
args=(--quiet --disable-pip-version-check --no-deps)
for platform in "${platforms[@]}"; do target+=(--platform "$platform"); done
# shellcheck disable=SC2154  # target is filled above
"$python" -m pip download "${args[@]}" --only-binary=:all: --python-version 3.12 --implementation cp "${target[@]}" \
    -d "$folder" "${wanted[@]}"
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel "${args[@]}" --no-build-isolation -w "$folder" \
    "deepspeed$(version deepspeed)"
if [ -n "$with_torch" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip download "${args[@]}" --only-binary=:all: --python-version 3.12 --implementation cp "${target[@]}" \
        -d "$site/wheels" torch==2.13.0 triton==3.7.1 torchvision==0.28.0
    for wheel in "$site"/wheels/*.whl; do unzip -q "$wheel" -d "$site/site"; done
    (
        cd "$site/site"
        rm -rf torch/include torch/test triton/backends/nvidia/lib/cupti triton/_C/libproton.so
        rm -f torch/bin/protoc* triton/backends/nvidia/bin/{ptxas-blackwell,cuobjdump,nvdisasm}
        find triton/backends/amd triton/instrumentation triton/plugins -size +1M -delete
        # The machine code of other GPUs becomes zeros, which take no place once compressed.
        "$python" - torch/lib/libtorch_cuda.so torch/lib/libtorch_cuda_linalg.so torchvision/_C.so <<'END'
import mmap
import struct
import sys

for name in sys.argv[1:]:
    with open(name, "r+b") as file:
        data = mmap.mmap(file.fileno(), 0)
        table, = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<HHH", data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
        for section in sections:
            label = sections[names][4] + section[0]
            if data[label : data.find(b"\0", label)] != b".nv_fatbin":
                continue
            at, end = section[4], section[4] + section[5]
            while at < end:
                magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
                if magic != 0xBA55ED50:
                    at += 8
                    continue
                part, at = at + header, at + header + length
                while part < at:
                    kind, _, header, length = struct.unpack_from("<HHIQ", data, part)
                    gpu, = struct.unpack_from("<I", data, part + 28)
                    if kind == 2 and gpu != 90:
                        data[part + header : part + header + length] = bytes(length)
                    part += header + length
END
        echo 'int ncclCommMemStats, ncclCommResume, ncclCommSuspend, ncclGetLsaMultimemDevicePointer,
            ncclGetPeerDevicePointer, ncclPutSignal, ncclSignal, ncclWaitSignal;' |
            gcc -shared -fPIC -x c - -o torch/lib/libncclstub.so
        tar c . | xz -T0 -6
    ) | split -b 57M -d -a 1 - "$folder/torch."
    ls -l "$folder"/torch.*
fi
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
