#!/usr/bin/env bash
# Builds the environment of the S3 server (LocalStack's own S3, without Docker) that the tests marked `s3` start.
#
#   scripts/setup_s3.sh [VENV]        default: .venv-s3
#   PYTHON=python3.12 scripts/setup_s3.sh
#
# Run it again at any time: what is there already is left alone. Tests look in .venv-s3, or in $CLIP_TRAIN_S3_VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-s3}
ready="$venv/.ready"

if [ ! "$ready" -nt scripts/setup_s3.sh ]; then
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    # The newest releases of the last four do not fit this one.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        "localstack-core[base-runtime]>=4.9,<4.10" "cbor2<5.8" "pyOpenSSL<25" "cryptography<45" "service_identity<25"
    "$venv/bin/python" -c 'import localstack.runtime.main'
    touch "$ready"
fi
echo "ready: $venv/bin/python"
