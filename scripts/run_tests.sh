#!/usr/bin/env bash
# Runs the tests in lanes beside each other: those that mostly wait for something else, and all
# others; then, alone, those that read clocks (marked `clock`). What failed is run once more, alone,
# to tell what is broken from what was FLAKY, which is named at the end. With PARACLE_STRICT=1 or
# CI=true that is a failure, too, unless tests/quarantine.txt names it (scripts/flaky.py).
#
#   scripts/run_tests.sh PYTHON
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$1
# More would be in each other's way: deadlines of what runs inside pass while it waits for its turn.
AT_ONCE=3
declare -A lanes=(
    [docker]="tests/docker tests/images tests/containers
              tests/conformance/test_docker.py tests/conformance/test_gvisor.py
              tests/conformance/test_podman.py tests/conformance/test_remote_docker.py"
    # Then what attacks native sandboxes: else the lane of all others would be twice as long.
    [incus]="tests/incus tests/hostile"
    # A machine that is emulated; then, because the lane of Incus is the longest, its contract.
    [vm]="tests/vm tests/conformance/test_incus.py"
    # Every way in, on a machine on which nothing of ours was ever run.
    [fresh]="tests/fresh tests/deploy"
    # Services, which mostly wait for their clients; then commands, which mostly start Python.
    # The library under other Pythons comes last: these are whole runs of tests of their own.
    [service]="tests/service tests/mcp_server tests/agents tests/cli tests/interpreters"
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
    exec env --default-signal=INT,QUIT,HUP PARACLE_TEST_LANE="$1" "$python" -m pytest \
        -o "cache_dir=$place/cache-$1" --basetemp="$place/$1" \
        --durations=20 --durations-min=5 "${left_out[@]}" "${@:2}"
}

lanes[others]=$others
declare -A ended=()

# start NAME: the lane, beside this script, because a signal to it is heard only between two
# commands. That of all others prints as it goes, the rest at their ends.
start() {
    local output=$place/log-$1
    [ "$1" != others ] || output=/dev/stdout
    # shellcheck disable=SC2086
    lane "$1" -m "not clock" ${lanes[$1]} >"$output" 2>&1 &
    running[$1]=$!
}

# finish: wait for one of those that run.
finish() {
    local pid status name
    wait -n -p pid "${running[@]}"
    status=$?
    for name in "${!running[@]}"; do
        [ "${running[$name]}" = "$pid" ] || continue
        unset "running[$name]"
        ended[$name]=$status
        echo "The lane $name ended after $SECONDS s."
        [ "$name" = others ] || cat "$place/log-$name"
    done
}

# The longest first.
for name in others incus docker fresh vm service; do
    [ ${#running[@]} -lt "$AT_ONCE" ] || finish
    start "$name"
done
while [ ${#running[@]} != 0 ]; do finish; done

echo "Alone: what reads clocks."
lane clock -m clock tests &
running[clock]=$!
wait "${running[clock]}"
ended[clock]=$?
unset "running[clock]"

# What a lane noted as failed, a line each.
failed_of() {
    "$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
        "$place/cache-$1/v/cache/lastfailed"
}

lanes[clock]=tests
status=0
flaky=()
for name in "${!ended[@]}"; do
    [ "${ended[$name]}" != 0 ] || continue
    if [ "${ended[$name]}" != 1 ]; then # it broke off: what it did not come to is not known
        echo "The lane $name broke off."
        status=${ended[$name]}
        continue
    fi
    failed=$(failed_of "$name")
    echo "Failed in the lane $name; once more, alone:"
    echo "$failed"
    # shellcheck disable=SC2086
    if (lane "$name" --last-failed --last-failed-no-failures=none ${lanes[$name]}); then
        while read -r test; do flaky+=("$test"); done <<<"$failed"
    else
        status=1
    fi
done
# Which of them are known, and whether the run fails because of the others: tests/quarantine.txt.
printf '%s\n' "${flaky[@]}" | "$python" scripts/flaky.py tests/quarantine.txt || {
    [ "$status" != 0 ] || status=1
}
exit "$status"
