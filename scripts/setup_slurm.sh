#!/usr/bin/env bash
# A real Slurm on this one machine, for tests: a controller, and nodes n1, n2, ... with a slurmd each, every node in
# network, process, hostname and mount namespaces of its own. Needs root, apt (once) and iproute2; no systemd, no munge.
#
#   scripts/setup_slurm.sh install                 the Debian packages, if they are missing
#   scripts/setup_slurm.sh up DIR [NODES]          then: export SLURM_CONF=DIR/slurm.conf; srun -N2 hostname
#   scripts/setup_slurm.sh exec DIR NODE COMMAND...
#   scripts/setup_slurm.sh crash DIR NODE          power loss; `up` again is the repair
#   scripts/setup_slurm.sh gateway DIR             the address at which the nodes find a server on this machine
#   scripts/setup_slurm.sh down DIR                everything away, also what jobs have left
#
# Partitions: main (never preempted), low (preempted by high: requeued after GRACE seconds), high.
# DIR/disk is each node's own: gone after a power loss. A job finds an empty DIR/disk/JOBID there, also after a requeue.
# proctrack/cgroup, as real clusters have: linuxproc signals every process of a step, not the tasks alone, and so
# lets through what fails on a cluster.
set -euo pipefail
action=${1:?install, up, exec, crash, gateway or down}

if [ "$action" = install ]; then
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && exit 0
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client iproute2
    exit 0
fi

LAB=${2:?a folder}
mkdir -p "$LAB"
. "$(dirname "$(readlink -f "$0")")/netlab.sh"
export SLURM_CONF=$LAB/slurm.conf
PORT=$((17800 + LAB_ID))

write_config() {
    local nodes=$1 memory me n
    me=$(id -un)
    memory=$(($(awk '/MemTotal/{print $2}' /proc/meminfo) / 1024 - 500))
    {
        cat <<CONF
ClusterName=lab$LAB_ID
# cgroups are named by node and job: two labs must not have the same jobs
FirstJobId=$((LAB_ID * 1000 + 1))
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=$PORT
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/none
CredType=cred/none
# a requeued job waits for its old credential to expire: 120 s by default, 5 at least
AuthInfo=cred_expire=5
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool.%n
SlurmctldPidFile=$LAB/ctld.pid
SlurmdPidFile=$LAB/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/ctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
Prolog=$LAB/prolog
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=1
# below what ranks need to notice that a node is dead: Slurm is to be first
SlurmdTimeout=10
SlurmctldTimeout=60
# above what a busy machine may hold up ranks that save
KillWait=60
# minutes: a job whose ranks are still saving at its limit is not killed for it
OverTimeLimit=2
MinJobAge=900
CompleteWait=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CONF
        for n in $(seq 1 "$nodes"); do
            echo "NodeName=n$n NodeHostname=n$n NodeAddr=$(host_address "$n") Port=$((PORT + 400)) CPUs=8 RealMemory=$memory State=UNKNOWN"
        done
        cat <<CONF
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=${GRACE:-20}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
    } >"$SLURM_CONF.new"
    mv "$SLURM_CONF.new" "$SLURM_CONF" # at once: jobs that run may be reading it
    if [ ! -x "$LAB/prolog" ]; then
        # not an epilog: of a node that comes back it would run after the next attempt has begun
        # shellcheck disable=SC2016  # for the prolog to expand
        printf '#!/bin/sh\ncd "%s/disk" && rm -rf "$SLURM_JOB_ID" && mkdir -p "$SLURM_JOB_ID"\n' "$LAB" >"$LAB/prolog"
        chmod +x "$LAB/prolog"
    fi
    echo 'CgroupMountpoint=/sys/fs/cgroup' >"$LAB/cgroup.conf"
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        printf 'CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n' >>"$LAB/cgroup.conf"
    else
        echo 'CgroupPlugin=cgroup/v1' >>"$LAB/cgroup.conf"
    fi
}

# Slurm daemons of this lab: their command line or environment names our slurm.conf. A zombie is none.
ours() {
    local folder pid
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/}
        case $(cat "$folder/comm" 2>/dev/null) in
        slurmctld | slurmscriptd | slurmd | slurmstepd)
            grep -qs '^State:.[^Z]' "$folder/status" &&
                { tr '\0' '\n' <"$folder/cmdline" && tr '\0' '\n' <"$folder/environ"; } 2>/dev/null |
                grep -xE "(SLURM_CONF=)?$SLURM_CONF" >/dev/null && echo "$pid"
            ;;
        esac
    done
    return 0
}

running() { [ -s "$1" ] && grep -qs '^slurm' "/proc/$(cat "$1")/comm" && grep -qs '^State:.[^Z]' "/proc/$(cat "$1")/status"; }

up() {
    local nodes=$1 n ready
    mkdir -p "$LAB"/{state,log,disk}
    HOST_INIT="mount -t tmpfs -o size=2g disk $LAB/disk"
    for n in $(seq 1 "$nodes"); do host_up "n$n" "$n"; done
    write_config "$nodes"
    running "$LAB/ctld.pid" || (cd / && slurmctld -c -f "$SLURM_CONF")
    for n in $(seq 1 "$nodes"); do
        mkdir -p "$LAB/spool.n$n"
        # the number in the pid file is the one inside the node
        host_exec "n$n" bash -c "cd /; grep -qs '^slurmd' /proc/\$(cat $LAB/slurmd.n$n.pid 2>/dev/null)/comm ||
            SLURM_CONF=$SLURM_CONF exec slurmd -f $SLURM_CONF -N n$n"
    done
    for n in $(seq 1 1200); do
        ready=$(sinfo -h -N -p main -o '%T' 2>/dev/null | grep -cE '^(idle|mixed|allocated|completing)$' || true)
        [ "$ready" = "$nodes" ] && return
        [ $((n % 50)) != 0 ] || scontrol update nodename="n[1-$nodes]" state=resume 2>/dev/null || true
        sleep 0.1
    done
    echo "the cluster did not come up:" >&2
    { sinfo -N -l || true; tail -n 5 "$LAB"/log/*.log; } >&2
    return 1
}

down() {
    local pid folder
    [ ! -f "$SLURM_CONF" ] || timeout 5 scancel --user="$(id -un)" 2>/dev/null || true
    for folder in "$LAB"/hosts.d/*/; do [ -d "$folder" ] && host_crash "$(basename "$folder")"; done
    for pid in $(ours); do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 1 30); do if [ -z "$(ours)" ]; then break; fi; sleep 0.1; done
    for pid in $(ours); do kill -9 "$pid" 2>/dev/null || true; done
    lab_down
    for folder in /sys/fs/cgroup/*/slurm_n[0-9]*; do
        # another lab's node of the same name may be starting a job there: what is empty now is not in a moment
        [ ! -d "$folder" ] || pgrep -x slurmd >/dev/null || find "$folder" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    done
    rm -f "$SLURM_CONF"
}

case $action in
up) up "${3:-2}" ;;
down) down ;;
exec) shift 2 && host_exec "$@" ;;
crash) # nobody hears that it is gone; its disk goes too, where slurmd keeps what it knew of its jobs: with that the
    # prolog would not run again for a job that comes back under its old number
    host_net "${3:?a node}" down && host_crash "$3" && rm -rf "$LAB/spool.$3" ;;
gateway) echo "$NET.1" ;;
*) echo "$action: install, up, exec, crash, gateway or down" >&2 && exit 2 ;;
esac
