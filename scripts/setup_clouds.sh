#!/usr/bin/env bash
# Installs Azurite, Microsoft's emulator of Azure's blobs, from npm: the tests marked `clouds` start it. Needs Node.js.
# (Google Cloud's server is tests/clouds/gcs_server.py; sftp needs OpenSSH's sshd: scripts/setup_hosts.sh install.)
#
#   scripts/setup_clouds.sh [FOLDER]        default: .clouds
#
# Run it again at any time: what is there already is left alone. Tests look in .clouds, or in $CLIP_TRAIN_CLOUDS.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.clouds}
ready="$folder/.ready"

if [ ! "$ready" -nt scripts/setup_clouds.sh ]; then
    command -v npm >/dev/null || { echo "npm was not found: install Node.js 18 or later" >&2 && exit 1; }
    mkdir -p "$folder"
    # Its tables can be in a database, for which it would install two drivers with a hundred packages.
    cat >"$folder/package.json" <<'JSON'
{
  "private": true,
  "dependencies": {"azurite": "3.35.0"},
  "overrides": {"tedious": "npm:empty-npm-package@1.0.0", "mysql2": "npm:empty-npm-package@1.0.0"}
}
JSON
    (cd "$folder" && npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional)
    node "$folder/node_modules/azurite/dist/src/blob/main.js" --version >/dev/null
    touch "$ready"
fi
echo "ready: $folder/node_modules/azurite"
