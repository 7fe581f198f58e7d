#!/usr/bin/env bash
# A Ceph cluster of one, with its S3 gateway, from what scripts/setup_ceph.sh has unpacked:
#
#   run_ceph.sh serve CEPH ROOT PORT     on 127.0.0.1:PORT, in this process group, until a part of it ends; writes in ROOT
#   run_ceph.sh key CEPH ROOT KEY SECRET     one more key pair of its user
#   run_ceph.sh nokey CEPH ROOT KEY          one less
#   run_ceph.sh version CEPH
#
# PORT, PORT+1 and PORT+2 must be free. No authentication within the cluster; S3 requests are authenticated for real.
set -euo pipefail
verb=$1 ceph=$(cd "$2" && pwd) root=${3:-}
libraries=("$ceph"/usr/lib/*-linux-gnu)
elsewhere=("$ceph"/lib/*-linux-gnu)
export LD_LIBRARY_PATH="${libraries[0]}:${libraries[0]}/ceph:${elsewhere[0]}" PYTHONPATH="$ceph/usr/lib/python3/dist-packages"
export PATH="$ceph/usr/bin:$PATH"

admin() { radosgw-admin -n client.rgw -c "$root/ceph.conf" "$@"; }
# Debian's own Python: its bindings are made for that one.
control() { timeout 10 /usr/bin/python3 "$ceph/usr/bin/ceph" -c "$root/ceph.conf" "$@"; }

store_is_up() { control osd stat | grep -q '1 up'; }

until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "not within its time: $*" >&2; return 1; }
        sleep 0.2
    done
}

configure() { # PORT
    local monitors="[v2:127.0.0.1:$(($1 + 1)),v1:127.0.0.1:$(($1 + 2))]" id
    id=$(cat /proc/sys/kernel/random/uuid)
    mkdir -p "$root"/{mon,osd,rgw,log}
    cat >"$root/ceph.conf" <<CONF
[global]
fsid = $id
mon host = $monitors
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
run dir = $root
admin socket =
pid file =
log file = $root/log/\$name.log
plugin dir = ${libraries[0]}/ceph
erasure code dir = ${libraries[0]}/ceph/erasure-code
osd class dir = ${libraries[0]}/rados-classes
setuser match path =
[mon]
mon data = $root/mon
mon data avail crit = 1
mon data avail warn = 1
[osd]
osd data = $root/osd
osd objectstore = bluestore
bluestore block size = 21474836480
bluestore block create = true
osd memory target = 1073741824
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$1
rgw data = $root/rgw
rgw dns name = 127.0.0.1
rgw enable usage log = false
rgw relaxed s3 bucket names = true
rgw thread pool size = 64
CONF
    monmaptool --create --fsid "$id" --addv a "$monitors" "$root/monmap" >/dev/null
    ceph-mon --mkfs -i a --monmap "$root/monmap" -c "$root/ceph.conf"
}

serve() { # PORT
    local id
    configure "$1"
    ceph-mon -i a -c "$root/ceph.conf" -f &
    until_true 60 control mon stat
    id=$(cat /proc/sys/kernel/random/uuid)
    control osd new "$id" >/dev/null
    ceph-osd -i 0 --mkfs --osd-uuid "$id" -c "$root/ceph.conf"
    ceph-osd -i 0 -c "$root/ceph.conf" -f &
    until_true 60 store_is_up
    admin user create --uid=user --display-name=user >/dev/null
    radosgw -n client.rgw -c "$root/ceph.conf" -f &
    wait -n
}

case $verb in
    serve) serve "$4" ;;
    key) admin key create --uid=user --key-type=s3 --access-key="$4" --secret-key="$5" >/dev/null ;;
    nokey) admin key rm --uid=user --key-type=s3 --access-key="$4" >/dev/null ;;
    version) radosgw --version && /usr/bin/python3 -c "import rados" ;;
    *) echo "serve, key, nokey or version, not $verb" >&2; exit 2 ;;
esac
