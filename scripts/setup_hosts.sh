#!/usr/bin/env bash
# Hosts h1, h2, ... on this one machine, each with an sshd, for tests of `deepspeed --hostfile` and of names that do not
# resolve; and Open MPI. Needs root and apt.
#
#   scripts/setup_hosts.sh install
#   scripts/setup_hosts.sh up DIR [HOSTS]           DIR/hostfile lists them with SLOTS (2) ranks each
#   scripts/setup_hosts.sh exec DIR HOST COMMAND...
#   scripts/setup_hosts.sh net DIR HOST up|down     the switch port of a host
#   scripts/setup_hosts.sh crash DIR HOST           power loss; `up` again is the repair
#   scripts/setup_hosts.sh ps DIR HOST              the host's processes
#   scripts/setup_hosts.sh down DIR
set -euo pipefail
action=${1:?install, up, exec, net, crash, ps or down}

if [ "$action" = install ]; then
    command -v sshd >/dev/null && command -v pdsh >/dev/null && command -v ip >/dev/null &&
        command -v mpirun >/dev/null && exit 0
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        openssh-server openssh-client pdsh iproute2 openmpi-bin
    exit 0
fi

LAB=${2:?a folder}
mkdir -p "$LAB"
. "$(dirname "$(readlink -f "$0")")/netlab.sh"

up() {
    local n
    mkdir -p "$LAB/ssh" /root/.ssh /run/sshd # mount points: what is in there is each host's own
    chmod 700 "$LAB/ssh"
    [ -f "$LAB/ssh/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -f "$LAB/ssh/id_ed25519"
    [ -f "$LAB/hostkey" ] || ssh-keygen -q -t ed25519 -N '' -f "$LAB/hostkey"
    cp "$LAB/ssh/id_ed25519.pub" "$LAB/ssh/authorized_keys"
    cat >"$LAB/ssh/config" <<CONF
Host h*
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONF
    chmod 600 "$LAB"/ssh/*
    cat >"$LAB/sshd_config" <<CONF
HostKey $LAB/hostkey
AuthorizedKeysFile $LAB/ssh/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile /run/sshd/sshd.pid
MaxStartups 100
CONF
    HOST_INIT="mount --bind $LAB/ssh /root/.ssh; mount -t tmpfs -o mode=755 sshd /run/sshd"
    HOST_INIT+="; /usr/sbin/sshd -f $LAB/sshd_config -E $LAB/sshd.log"
    : >"$LAB/hostfile"
    for n in $(seq 1 "$1"); do
        host_up "h$n" "$n"
        echo "h$n slots=${SLOTS:-2}" >>"$LAB/hostfile"
    done
    for n in $(seq 1 "$1"); do
        for _ in $(seq 1 600); do
            if host_exec h1 ssh -o ConnectTimeout=2 "h$n" true 2>/dev/null; then continue 2; fi
            sleep 0.1
        done
        echo "h$n does not answer:" >&2
        cat "$LAB/sshd.log" >&2
        return 1
    done
}

case $action in
up) up "${3:-2}" ;;
down) lab_down ;;
exec) shift 2 && host_exec "$@" ;;
net) host_net "${3:?a host}" "${4:?up or down}" ;;
crash) host_net "${3:?a host}" down && host_crash "$3" ;;
ps) host_exec "${3:?a host}" ps -ww -eo pid,args ;;
*) echo "$action: install, up, exec, net, crash, ps or down" >&2 && exit 2 ;;
esac
