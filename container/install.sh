#!/bin/sh
# Installs clip-train into /opt/clip-train, a virtual environment that also sees the packages of the base image.
# The Dockerfile and the Apptainer definition both run it:   install.sh SOURCE EXTRAS [pip's words for torch]
# Without words for torch, the base image must have one.
set -eu
source=$1 extras=$2
shift 2
# by the base image's pip: Ubuntu's venv has none without a further package
python3 -m venv --without-pip --system-site-packages /opt/clip-train
pip() { python3 -m pip --python /opt/clip-train/bin/python3 "$@"; }
if [ $# -gt 0 ]; then pip install --no-cache-dir "$@"; fi
pip wheel --no-cache-dir --no-deps --wheel-dir /tmp/wheels "$source"
# pip must not replace the torch that is there, nor what NVIDIA's images have built for it
/opt/clip-train/bin/python3 - >/tmp/present.txt <<'PRESENT'
import importlib.metadata
for name in ("torch", "torchvision", "triton", "pytorch-triton", "numpy"):
    try:
        print(f"{name}=={importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        pass
PRESENT
grep -q '^torch==' /tmp/present.txt || { echo "no torch in the base image: say which (TORCH)" >&2; exit 1; }
pip install --no-cache-dir --constraint /tmp/present.txt "$(echo /tmp/wheels/clip_train-*.whl)$extras"
rm -rf /tmp/wheels /tmp/present.txt
/opt/clip-train/bin/clip-train --version
