#!/usr/bin/env bash
# Unpacks Ceph (monitor, object store, S3 gateway) into a folder, for `make acceptance`. Nothing is installed, and no
# rights are needed: Debian's or Ubuntu's packages are downloaded with lists of our own and only unpacked.
#
#   scripts/setup_ceph.sh [FOLDER]        default: .ceph
#
# Run it again at any time: what is there already is left alone. Tests look in .ceph, or in $CLIP_TRAIN_CEPH.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.ceph}
ready="$folder/.ready"

if [ ! "$ready" -nt scripts/setup_ceph.sh ]; then
    command -v apt-get dpkg >/dev/null || { echo "apt-get and dpkg are needed: Ceph comes as Debian packages" >&2; exit 1; }
    rm -rf "$folder"
    mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial"
    folder=$(cd "$folder" && pwd)
    own=(-qq -o "Dir::State::lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o Debug::NoLocking=1)
    own+=(-o APT::Sandbox::User=)
    apt-get "${own[@]}" update
    apt-get "${own[@]}" install -y --no-install-recommends --download-only ceph-mon ceph-osd radosgw ceph-common >/dev/null
    for package in "$folder"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$folder"
    done
    rm -rf "$folder/apt"
    bash scripts/run_ceph.sh version "$folder"
    touch "$folder/.ready"
fi
echo "ready: CLIP_TRAIN_S3_SERVER=ceph python -m pytest tests/s3"
