# Hosts on one machine, for tests: each has its own network, processes, hostname and mounts. Root is needed. Source it.
#
#   LAB=DIR; . scripts/netlab.sh
#   host_up NAME NUMBER      host_exec NAME COMMAND...      host_crash NAME (power loss)
#   host_net NAME up|down (its switch port)                 host_down NAME            lab_down (all of them)
#
# A host's "init" is process 1 of a PID namespace: killing it kills all that runs there, and a `pkill` in there
# (DeepSpeed's launcher runs one on each host when it ends) cannot reach outside.
LAB=$(readlink -f "$LAB")
LAB_ID=$(($(printf %s "$LAB" | cksum | cut -d' ' -f1) % 240 + 5)) # several labs can be up at once
BRIDGE=clip$LAB_ID
NET=10.77.$LAB_ID
mkdir -p "$LAB/hosts.d"

host_address() { echo "$NET.$((10 + $1))"; }
host_pid() { cat "$LAB/hosts.d/$1/pid" 2>/dev/null; }
host_netns() { echo "$BRIDGE-$1"; }

# Its init is there, is no zombie, and is still the process that was started.
host_alive() {
    local pid
    pid=$(host_pid "$1") && [ -n "$pid" ] && grep -qs '^State:.[^Z]' "/proc/$pid/status" &&
        [ "$(readlink "/proc/$pid/ns/net" 2>/dev/null)" = "$(cat "$LAB/hosts.d/$1/netns" 2>/dev/null)" ]
}

lab_bridge() {
    ip link show "$BRIDGE" >/dev/null 2>&1 && return
    ip link add "$BRIDGE" type bridge
    ip addr add "$NET.1/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    printf '127.0.0.1 localhost\n%s.1 %s\n' "$NET" "$(hostname -s)" >"$LAB/hosts"
}

host_up() {
    local name=$1 folder=$LAB/hosts.d/$1 netns parent pid
    netns=$(host_netns "$name")
    host_alive "$name" && return
    lab_bridge
    mkdir -p "$folder"
    if ! ip netns list | grep -qw "$netns"; then
        ip netns add "$netns"
        ip link add "$netns" type veth peer name eth0 netns "$netns"
        ip link set "$netns" master "$BRIDGE"
        ip -n "$netns" addr add "$(host_address "$2")/24" dev eth0
        ip -n "$netns" link set eth0 up
        ip -n "$netns" link set lo up
    fi
    ip link set "$netns" up
    grep -q " $name\$" "$LAB/hosts" || echo "$(host_address "$2") $name" >>"$LAB/hosts"
    rm -f "$folder/ready"
    # nsenter and not `ip netns exec`, which mounts /sys anew and so hides the cgroups
    setsid nsenter --net="/run/netns/$netns" \
        unshare --uts --mount --pid --fork --kill-child=KILL --mount-proc --propagation private bash -c "
            cd /; hostname $name; mount --bind $LAB/hosts /etc/hosts; mount -t tmpfs -o size=1g shm /dev/shm
            ${HOST_INIT:-}
            touch $folder/ready; while :; do sleep 86400 & wait \$!; done" >"$folder/init.log" 2>&1 </dev/null &
    parent=$!
    for _ in $(seq 1 6000); do if [ -e "$folder/ready" ] || ! kill -0 "$parent" 2>/dev/null; then break; fi; sleep 0.02; done
    pid=$(pgrep -P "$parent" | head -1)
    [ -e "$folder/ready" ] && [ -n "$pid" ] || {
        echo "host $name did not start:" >&2
        cat "$folder/init.log" >&2
        return 1
    }
    echo "$pid" >"$folder/pid"
    readlink "/proc/$pid/ns/net" >"$folder/netns"
}

host_exec() {
    local name=$1
    shift
    nsenter -t "$(host_pid "$name")" --net --uts --mount --pid -- "$@"
}

host_crash() { if host_alive "$1"; then kill -9 "$(host_pid "$1")"; fi; }
host_net() { ip link set "$(host_netns "$1")" "$2"; }

host_down() {
    host_crash "$1"
    ip netns del "$(host_netns "$1")" 2>/dev/null
    rm -rf "$LAB/hosts.d/$1"
}

lab_down() {
    local folder
    for folder in "$LAB"/hosts.d/*/; do [ -d "$folder" ] && host_down "$(basename "$folder")"; done
    ip link del "$BRIDGE" 2>/dev/null || true
}
