#!/usr/bin/env bash
# Container engines for the tests: Docker, and gVisor as a runtime of it.
#
#   scripts/engines.sh start [docker] [gvisor]    both, if none is named; a no-op when all is there
#   scripts/engines.sh status [docker] [gvisor]   0 if they can be used
#   scripts/engines.sh stop                       ends everything that start began
#   scripts/engines.sh run COMMAND ...            start, the command, and stop after the last `run`
#
# The engine listens on docker.sock below PARACLE_TEST_RUN (/run/paracle-sandbox-tests) and shares
# nothing with an engine of the machine's own. Images and packages are kept below PARACLE_TEST_CACHE.
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

cache=$(test_cache)
run=${PARACLE_TEST_RUN:-/run/paracle-sandbox-tests}
data=$cache/docker
number=$(($(printf %s "$run" | cksum | cut -d' ' -f1) % 250))
bridge=pcltest$number
subnet=10.213.$number
pool=10.$((224 + number % 16)) # for further networks
cgroup=paracle-sandbox-tests-$number

fail() {
    echo "engines: $*" >&2
    exit 1
}

usable() {
    local engine
    for engine in "$@"; do
        docker_answers || return
        [ "$engine" != gvisor ] || [ -x "$cache/runsc" ] || return
    done
}

# One caller at a time; the lock is not inherited by what is started.
start() {
    [ "$(id -u)" = 0 ] || fail "starting an engine needs root"
    command -v apt-get >/dev/null || fail "installing an engine needs Debian"
    mkdir -p "$cache" "$run" || fail "cannot write to $cache and $run"
    exec 9>"$cache/engines.lock"
    flock 9
    install_docker
    if ! docker_answers; then
        # Half an engine, of a start that was killed, would be in the way.
        stop_docker
        (start_docker) || { stop_docker; exit 1; }
    fi
    [[ " $* " != *" gvisor "* ]] || fetch_runsc
    (import_base_images) || exit 1
    exec 9>&-
}

stop() {
    [ -d "$run" ] || return 0
    [ "$(id -u)" = 0 ] || fail "stopping an engine needs root"
    exec 9>"$cache/engines.lock"
    flock 9
    stop_docker
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
    if ! usable docker gvisor; then
        PARACLE_ENGINES_REASON=$( (start docker gvisor 2>&1 && touch "$run/started-by-run") | tail -n 3)
        export PARACLE_ENGINES_REASON
        [ -z "$PARACLE_ENGINES_REASON" ] || echo "$PARACLE_ENGINES_REASON" >&2
    fi
    # The command hears the same signals; what follows it must not be left out.
    trap : INT TERM HUP
    "$@" 8>&- || status=$?
    if [ -e "$run/started-by-run" ] && flock -n -x 8; then
        (stop)
    fi
    exit "$status"
}

verb=${1:-}
[ $# -eq 0 ] || shift
case $verb in
    start | status)
        [ $# -gt 0 ] || set -- docker gvisor
        for engine in "$@"; do
            [[ $engine == docker || $engine == gvisor ]] || fail "there is no engine $engine"
        done
        ;;
esac
case $verb in
    start) start "$@" ;;
    stop) stop ;;
    status) usable "$@" || fail "not running: $* (scripts/engines.sh start)" ;;
    run) run_with_engines "$@" ;;
    *) sed -n '2,8s/^# \?//p' "$0" >&2 && exit 2 ;;
esac
