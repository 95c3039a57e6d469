#!/usr/bin/env bash
# Container engines for the tests: Docker, gVisor as a runtime of it, Podman, and Incus.
#
#   scripts/engines.sh start [ENGINE ...]         docker, gvisor, podman, incus; a no-op when all is
#                                                 there
#   scripts/engines.sh status [ENGINE ...]        0 if they can be used; without a name, all
#   scripts/engines.sh stop [ENGINE ...]          ends what start began, of all without a name
#   scripts/engines.sh run COMMAND ...            start, the command, and stop after the last `run`
#
# They listen on docker.sock, podman.sock and incus/unix.socket below PARACLE_TEST_RUN (which is
# /run/paracle-sandbox-tests) and share nothing with an engine of the machine's own. What is costly is kept below PARACLE_TEST_CACHE.
# It needs root on Debian; what it lacks, it installs. `run` runs the command in any case: it gets
# the reason in PARACLE_ENGINES_REASON, and its tests decide what that means (tests/engines.py).
set -uo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)

# shellcheck source=scripts/debian.sh
. "$project/scripts/debian.sh"
# shellcheck source=scripts/engine_parts.sh
. "$project/scripts/engine_parts.sh"
# shellcheck source=scripts/docker_engine.sh
. "$project/scripts/docker_engine.sh"
# shellcheck source=scripts/podman_engine.sh
. "$project/scripts/podman_engine.sh"
# shellcheck source=scripts/incus_engine.sh
. "$project/scripts/incus_engine.sh"

cache=$(test_cache)
run=${PARACLE_TEST_RUN:-/run/paracle-sandbox-tests}
data=$cache/docker
podman_data=$cache/podman
incus_data=$cache/incus
all_engines=(docker gvisor podman incus)

fail() {
    echo "engines: $*" >&2
    exit 1
}

usable() {
    local engine
    for engine in "$@"; do
        case $engine in
            docker) docker_answers ;;
            gvisor) docker_answers && [ -x "$cache/runsc" ] ;;
            podman) podman_answers ;;
            incus) incus_answers ;;
        esac || return
    done
}

# Usable, and as `start` would have it. One that was started before it had all that it needs is not.
as_wanted() {
    usable "$@" || return
    [[ " $* " != *" incus "* ]] || incus_is_as_wanted
}

# One caller at a time; the lock is not inherited by what is started.
start() {
    [ "$(id -u)" = 0 ] || fail "starting an engine needs root"
    command -v apt-get >/dev/null || fail "installing an engine needs Debian"
    mkdir -p "$cache" "$run" || fail "cannot write to $cache and $run"
    exec 9>"$cache/engines.lock"
    flock 9
    case " $* " in *" docker "* | *" gvisor "*) have_docker_run ;; esac
    [[ " $* " != *" gvisor "* ]] || fetch_runsc
    [[ " $* " != *" podman "* ]] || have_podman_run
    [[ " $* " != *" incus "* ]] || have_incus_run
    exec 9>&-
}

# Half an engine, of a start that was killed, would be in the way. They start in a folder that stays,
# which that of whoever calls may not.
have_docker_run() {
    install_docker
    install_compose
    if ! docker_answers; then
        stop_docker
        (cd "$run" && start_docker) || { stop_docker; exit 1; }
    fi
    (import_base_images) || exit 1
}

have_podman_run() {
    install_podman
    if ! podman_answers; then
        stop_podman
        (start_podman) || { stop_podman; exit 1; }
    fi
}

have_incus_run() {
    install_incus
    if ! incus_answers || ! incus_is_as_wanted; then
        stop_incus
        (cd "$run" && start_incus) || { stop_incus; exit 1; }
    fi
    (import_incus_image) || exit 1
}

stop() {
    [ -d "$run" ] || return 0
    [ "$(id -u)" = 0 ] || fail "stopping an engine needs root"
    exec 9>"$cache/engines.lock"
    flock 9
    [[ " $* " != *" incus "* ]] || stop_incus
    [[ " $* " != *" podman "* ]] || stop_podman
    case " $* " in *" docker "* | *" gvisor "*) stop_docker ;; esac
    exec 9>&-
}

# Every `run` holds a shared lock, so that the last one knows that it is: an engine that a `run`
# began ends with it, and one that was there before stays.
run_with_engines() {
    local status=0 users=$cache/engines.users
    if mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ]; then
        exec 8>"$users"
        flock -s 8
    fi
    if ! as_wanted "${all_engines[@]}"; then
        PARACLE_ENGINES_REASON=$(
            (start "${all_engines[@]}" 2>&1 && touch "$run/started-by-run") | tail -n 3
        )
        export PARACLE_ENGINES_REASON
        [ -z "$PARACLE_ENGINES_REASON" ] || echo "$PARACLE_ENGINES_REASON" >&2
    fi
    # The command hears the same signals; what follows it must not be left out.
    trap : INT TERM HUP
    "$@" 8>&- || status=$?
    if [ -e "$run/started-by-run" ] && flock -n -x 8; then
        (stop "${all_engines[@]}")
    fi
    exit "$status"
}

verb=${1:-}
[ $# -eq 0 ] || shift
case $verb in
    start | status | stop)
        [ $# -gt 0 ] || set -- "${all_engines[@]}"
        for engine in "$@"; do
            [[ " ${all_engines[*]} " == *" $engine "* ]] || fail "there is no engine $engine"
        done
        ;;
esac
case $verb in
    start) start "$@" ;;
    stop) stop "$@" ;;
    status) usable "$@" || fail "not running: $* (scripts/engines.sh start)" ;;
    run) run_with_engines "$@" ;;
    *) sed -n '2,9s/^# \?//p' "$0" >&2 && exit 2 ;;
esac
