#!/usr/bin/env bash
# Builds the environment in which the tests marked `peer` and the comparing benchmarks run OpenCLIP.
#
#   scripts/setup_peers.sh [VENV]        default: .venv-peers
#   PYTHON=python3.12 scripts/setup_peers.sh
#
# Run it again at any time: what is there already is left alone.
# Another OpenCLIP, such as its main branch: PYTHONPATH=CHECKOUT/src before the command of the last line.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-peers}

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip "torch==2.13.0"
# Without dependencies: it would replace a CPU torch by the CUDA one it was built with. Its Python half
# runs beside either (tests/peers/torchvision_shim.py).
pip --no-deps "torchvision==0.28.0" "open_clip_torch==3.3.0" "timm>=1.0.17"
# The last transformers with which OpenCLIP 3.3.0 generates captions is 4.55.
pip ftfy huggingface-hub "transformers<4.56" regex safetensors tqdm pyyaml numpy "pytest>=8"
# Pillow 13 resizes some tall images vertically first: not as models were trained (docs/data.md).
pip "pillow<13"
# OpenCLIP's towers on this project's engines (tests/peers/test_engines.py).
pip "deepspeed==0.19.8"
# Loops of one's own in other libraries (examples/).
pip accelerate lightning "sentence-transformers==5.3.0" datasets
# Adapters of low rank (tests/peers/test_lora.py).
pip --no-deps "peft==0.18.1"
# This project runs from its checkout: only what the compared packages import is added.
pip "pydantic>=2.7" simplejpeg braceexpand fsspec rich
# Its loader (benchmarks/data.py) wants pandas, and a webdataset from before 1.0.
pip pandas "webdataset==0.2.86"
# The judge of retrieval and zero-shot; without dependencies, which are torchvision and everyone's data sets.
pip --no-deps "clip_benchmark==1.6.2"
pip scikit-learn requests

PYTHONPATH=. "$venv/bin/python" - <<'PY'
import tests.peers.torchvision_shim
import open_clip, torch, torchvision
print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, open_clip {open_clip.__version__}")
PY
echo "ready: $venv/bin/python -m pytest -m peer tests/peers"
