#!/usr/bin/env bash
# A Chromium for the tests marked `browser`, by apt (Debian, as root). Where one is there already nothing is done;
# one that is not on the path is named by $CLIP_TRAIN_CHROMIUM.
set -euo pipefail

for name in "${CLIP_TRAIN_CHROMIUM:-}" chromium chromium-browser google-chrome chrome; do
    if [ -n "$name" ] && command -v "$name"; then exit 0; fi
done
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
command -v chromium
