# shellcheck shell=bash
# Installs, starts and stops a private Podman service. To be sourced by engines.sh, which sets folders.
#
#   podman system service    answers on podman.sock; configuration and state of its own
#     └ conmon               one per container; ended with the containers
#
# It has no image of its own: tests that want one pass it on from the Docker engine.
# shellcheck disable=SC2154  # the folders

podman_() {
    CONTAINERS_CONF=$run/podman/containers.conf CONTAINERS_STORAGE_CONF=$run/podman/storage.conf \
        timeout "${podman_seconds:-60}" podman "$@"
}

install_podman() {
    command -v podman >/dev/null && return
    debian_install podman runc
    command -v podman >/dev/null || fail "cannot install podman"
}

podman_answers() {
    [ -S "$run/podman.sock" ] && docker_seconds=10 docker_at podman.sock version >/dev/null 2>&1
}

start_podman() {
    mkdir -p "$run/podman" "$podman_data"
    # Debian's crun refuses the hybrid cgroup layout, and nobody need have systemd.
    cat >"$run/podman/containers.conf" <<TOML
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
TOML
    cat >"$run/podman/storage.conf" <<TOML
[storage]
driver = "overlay"
runroot = "$run/podman/run"
graphroot = "$podman_data"
TOML
    # Its monitors leave a file where they were started, when memory runs out.
    (cd "$run/podman" && CONTAINERS_CONF=$run/podman/containers.conf \
        CONTAINERS_STORAGE_CONF=$run/podman/storage.conf \
        exec setsid podman system service --time=0 "unix://$run/podman.sock" \
        </dev/null >>"$run/podman.log" 2>&1 9>&- 8>&-) &
    echo $! >"$run/podman.pid"
    await podman podman_answers
}

stop_podman() {
    if [ -e "$run/podman/storage.conf" ] && command -v podman >/dev/null; then
        podman_ rm --all --force --time 0 >/dev/null 2>&1
    fi
    end_process "$(pid_of podman)"
    unmount_below "$run/podman" "$podman_data"
    rm -rf "$run"/podman*
}
