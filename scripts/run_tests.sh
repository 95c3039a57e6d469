#!/usr/bin/env bash
# Runs the tests in lanes beside each other: those that mostly wait for something else, and all
# others. Whatever fails is run once more, alone: only what fails then, or breaks off, counts.
#
#   scripts/run_tests.sh PYTHON
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$1
declare -A lanes=(
    [docker]="tests/docker tests/images tests/deploy
              tests/conformance/test_docker.py tests/conformance/test_gvisor.py
              tests/conformance/test_podman.py tests/conformance/test_remote_docker.py"
    # Then what attacks native sandboxes: else the lane of all others would be twice as long.
    [incus]="tests/incus tests/hostile"
    # A machine that is emulated; then, because the lane of Incus is the longest, its contract.
    [vm]="tests/vm tests/conformance/test_incus.py"
    # Services, which mostly wait for their clients; then commands, which mostly start Python.
    [service]="tests/service tests/mcp_server tests/agents tests/cli"
)
# More than half of the time of their lanes: what other tests show on native, on more engines, and
# a second time in the machine that is emulated.
long=(tests/docker/test_hostile_docker.py tests/docker/test_hostile_gvisor.py
    tests/incus/test_hostile_incus.py tests/conformance/test_podman.py
    tests/conformance/test_remote_docker.py tests/conformance/test_incus.py
    "tests/vm/test_cgroup_v2.py::test_native_backend_on_cgroup_v2[tester]")
left_out=()
if [ -z "${PARACLE_LONG:-}" ]; then
    left_out=("${long[@]/#/--deselect=}") # not --ignore: that is not for what a lane names
    echo "Without ${long[*]}: PARACLE_LONG=1 has them too, as in .ci/run."
fi
others=tests
for tests in ${lanes[*]}; do
    others+=" --ignore=$tests"
done
place=$(mktemp -d)
export PARACLE_TEST_LANES=$place # what the other lanes do there is none of a lane's business
declare -A running=()

# What still runs is to end as on Ctrl-C, which removes what it has made. (Ctrl-C itself tells all.)
leave() {
    local status=$?
    if [ ${#running[@]} != 0 ]; then
        [ "$status" != 130 ] || sleep 5
        # More than once: a test may take it for its own.
        while kill -INT "${running[@]}" 2>/dev/null; do sleep 5; done
    fi
    rm -rf "$place"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# lane NAME ARGUMENTS ... in the place of this shell
lane() {
    # What runs beside the script has Ctrl-C ignored, and so would all that the tests start.
    exec env --default-signal=INT,QUIT,HUP "$python" -m pytest -o "cache_dir=$place/cache-$1" --basetemp="$place/$1" \
        --durations=20 --durations-min=5 "${left_out[@]}" "${@:2}"
}

for name in "${!lanes[@]}"; do
    # shellcheck disable=SC2086
    lane "$name" ${lanes[$name]} >"$place/log-$name" 2>&1 &
    running[$name]=$!
done
declare -A ended=()
# Beside the script, too: a signal to it is heard only between two commands.
# shellcheck disable=SC2086
lane others $others &
running[others]=$!
wait "${running[others]}"
ended[others]=$?
unset "running[others]"
for name in "${!lanes[@]}"; do
    wait "${running[$name]}"
    ended[$name]=$?
    unset "running[$name]"
    echo "On $name:"
    cat "$place/log-$name"
done

lanes[others]=$others
status=0
for name in "${!ended[@]}"; do
    if [ "${ended[$name]}" = 1 ]; then # some failed; any other number is not for a second look
        echo "Once more, alone: what failed beside the other lanes ($name)."
        # shellcheck disable=SC2086
        (lane "$name" --last-failed --last-failed-no-failures=none ${lanes[$name]}) || status=$?
    elif [ "${ended[$name]}" != 0 ]; then
        status=${ended[$name]}
    fi
done
exit "$status"
