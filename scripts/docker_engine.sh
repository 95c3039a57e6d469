# shellcheck shell=bash
# Starts and stops a private Docker engine. To be sourced by engines.sh, which sets the folders.
#
#   containerd    started here, so that an engine of the machine's own is never shared
#     └ shims     one per container; they outlive both daemons, and are ended by `stop_docker`
#   dockerd       socket, pid file, state and bridge of its own; images are kept in the cache
#
# Everything carries the folder `run` in its command line, every container is below one cgroup, and
# the engine's own database names its bridges: that is how what is left is found, also when the
# daemons were killed.
# shellcheck disable=SC2154  # the folders

# Each engine of the machine has a number, and names and addresses that go with it.
use_number() {
    bridge=pcltest$1
    subnet=10.213.$1
    pool=10.$((224 + $1 % 16)).0.0/16 # for further networks
    cgroup=paracle-sandbox-tests-$1
}

take_number() {
    local number=0
    # Chains of an engine that was here before us are not ours to remove.
    iptables -n -L DOCKER-USER >/dev/null 2>&1 && touch "$run/had-chains"
    while ip link show "pcltest$number" >/dev/null 2>&1; do number=$((number + 1)); done
    echo "$number" >"$run/number"
    use_number "$number"
}

docker_() {
    docker_at docker.sock "$@"
}

docker_at() {
    timeout "${docker_seconds:-300}" docker -H "unix://$run/$1" "${@:2}"
}

# The pid in a file, if it still is that program of ours and not a recycled number.
pid_of() {
    local pid
    pid=$(cat "$run/$1.pid" 2>/dev/null) && [ -n "$pid" ] &&
        tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF "$run/" && echo "$pid"
}

docker_answers() {
    [ -S "$run/docker.sock" ] && docker_seconds=10 docker_ version >/dev/null 2>&1
}

start_docker() {
    mkdir -p "$run" "$data"
    take_number
    write_containerd_config
    setsid containerd --config "$run/containerd.toml" \
        </dev/null >>"$run/containerd.log" 2>&1 9>&- 8>&- &
    echo $! >"$run/containerd.pid"
    await containerd test -S "$run/containerd.sock"
    make_bridge
    # A runtime need not exist before it is used: gVisor may be fetched later. Its own network stack
    # takes every namespace of a new kernel for the root one and refuses it; "host" here means the
    # sockets of the container's network namespace, so none, bridge and host all work as named.
    cat >"$run/daemon.json" <<JSON
{"runtimes": {"runsc": {"path": "$cache/runsc",
                        "runtimeArgs": ["--platform=systrap", "--network=host"]}}}
JSON
    setsid dockerd --config-file "$run/daemon.json" --host "unix://$run/docker.sock" \
        --containerd "$run/containerd.sock" --data-root "$data" --exec-root "$run/exec" \
        --pidfile "$run/dockerd.pid" --bridge "$bridge" --cgroup-parent "/$cgroup" \
        --default-address-pool "base=$pool,size=24" --shutdown-timeout 5 \
        </dev/null >>"$run/dockerd.log" 2>&1 9>&- 8>&- &
    await dockerd docker_answers
    # An engine that was killed left the descriptions of its containers and networks.
    empty_docker >/dev/null 2>&1
}

write_containerd_config() {
    cat >"$run/containerd.toml" <<TOML
version = 2
root = "$run/containerd/root"
state = "$run/containerd/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
address = "$run/containerd.sock"
TOML
}

# Runs a check until it succeeds. Fails at once when the program is gone, else after half a minute.
await() {
    local program=$1 child=$! tries
    shift
    for ((tries = 0; tries < 150; tries++)); do
        "$@" && return
        kill -0 "$child" 2>/dev/null || break
        sleep 0.2
    done
    fail "$program does not start:" \
        "$(grep -v level=info "$run/$program.log" | tail -n 2 | cut -c1-300)"
}

# A bridge of our own, so that docker0 is left to whoever has it. Forwarding is switched on first:
# an engine that finds it off also closes the machine's FORWARD chain for everyone.
make_bridge() {
    echo 1 >/proc/sys/net/ipv4/ip_forward
    ip link add "$bridge" type bridge
    ip address add "$subnet.1/24" dev "$bridge"
    ip link set "$bridge" up
}

# Ends whatever of the engine is there, in whatever state it is.
stop_docker() {
    ! docker_answers || empty_docker >/dev/null 2>&1
    end_process "$(pid_of dockerd)"
    end_process "$(pid_of containerd)"
    end_leftovers
    unmount_below "$run" "$data"
    if [ -e "$run/number" ]; then
        use_number "$(cat "$run/number")"
        end_containers
        remove_networks
    fi
    # What is another engine's stays.
    find "$run" -mindepth 1 ! -path "$run/incus*" ! -path "$run/podman*" -delete
}

empty_docker() {
    local docker_seconds=60 containers
    containers=$(docker_ ps -aq)
    # shellcheck disable=SC2086  # a list of words
    [ -z "$containers" ] || docker_ rm -fv $containers
    docker_ network prune -f
    # What no test has used for two weeks is not kept.
    docker_ image prune -af --filter until=336h
}

end_process() {
    local pid=$1 tries
    [ -n "$pid" ] || return 0
    kill "$pid" 2>/dev/null
    for ((tries = 0; tries < 100; tries++)); do
        # Nobody may reap it: a zombie has no command line.
        tr -d '\0' <"/proc/$pid/cmdline" 2>/dev/null | grep -q . || return 0
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null
}

# Shims and runtimes that a daemon did not end itself, and the sockets of the shims, which are in a
# folder that all of the machine share.
end_leftovers() {
    local entry name
    for entry in /proc/[0-9]*; do
        name=$(readlink "$entry/exe") || continue
        case ${name##*/} in
            containerd-shim* | runsc* | runc | dockerd | containerd)
                tr '\0' ' ' <"$entry/cmdline" | grep -qF "$run/" && kill -9 "${entry#/proc/}" ;;
        esac
    done 2>/dev/null
    sed -s 's,^unix://,,' "$run"/containerd/state/*/*/*/address 2>/dev/null | xargs -r rm -f
}

end_containers() {
    find /sys/fs/cgroup -path "*/$cgroup/*" -name cgroup.procs -exec cat {} + 2>/dev/null |
        sort -u | xargs -r kill -9 2>/dev/null
    local tries
    # A process that was killed may need a moment to leave its cgroup.
    for ((tries = 0; tries < 50; tries++)); do
        find /sys/fs/cgroup -depth -type d \( -path "*/$cgroup" -o -path "*/$cgroup/*" \) \
            -exec rmdir {} + 2>/dev/null && return
        sleep 0.1
    done
}

unmount_below() {
    local folder
    for folder in "$@"; do
        awk -v folder="$folder/" 'index($5 "/", folder) == 1 { print $5 }' /proc/self/mountinfo |
            sort -r | xargs -r -n 1 umount -l 2>/dev/null
    done
}

# Bridges and rules: the engine leaves its chains behind, and if it was killed everything. Chains
# that were there before it are somebody else's.
remove_networks() {
    local name address patterns=(-e " $bridge ")
    [ -e "$run/had-chains" ] || patterns+=(-e DOCKER)
    for name in "$bridge" $(bridges_of_engine); do
        address=$(ip -o -4 address show dev "$name" 2>/dev/null | awk '{ print $4; exit }')
        [ -n "$address" ] || continue
        patterns+=(-e " $name " -e " ${address%.*}\\.")
        ip link delete "$name"
    done
    iptables-save -c | grep -v "${patterns[@]}" | iptables-restore -c
}

bridges_of_engine() {
    grep -aoE 'br-[0-9a-f]{12}' "$data/network/files/local-kv.db" 2>/dev/null | sort -u
}
