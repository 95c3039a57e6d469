#!/usr/bin/env bash
# Runs the tests in two lanes beside each other: those on engines, which mostly wait for them, and
# all others. Whatever fails is run once more, alone: only what fails then, or breaks off, counts.
#
#   scripts/run_tests.sh PYTHON
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$1
on_engines=(
    tests/docker tests/incus tests/images
    tests/conformance/test_docker.py tests/conformance/test_gvisor.py
    tests/conformance/test_incus.py
)
others=(tests "${on_engines[@]/#/--ignore=}")
place=$(mktemp -d)
engines_lane=

leave() {
    [ -z "$engines_lane" ] || kill "$engines_lane" 2>/dev/null
    rm -rf "$place"
}
trap leave EXIT
trap 'exit 130' INT TERM HUP

lane() {
    local name=$1
    shift
    "$python" -m pytest -o "cache_dir=$place/cache-$name" --basetemp="$place/$name" "$@"
}

lane engines "${on_engines[@]}" >"$place/log" 2>&1 &
engines_lane=$!
lane others "${others[@]}"
first=$?
wait "$engines_lane"
second=$?
engines_lane=
cat "$place/log"

# 1 is "some failed"; anything else is not for a second look.
status=0
if [ "$first" = 1 ]; then
    echo "Once more, alone: what failed beside the engines."
    lane others --last-failed --last-failed-no-failures=none "${others[@]}" || status=$?
elif [ "$first" != 0 ]; then
    status=$first
fi
if [ "$second" = 1 ]; then
    echo "Once more, alone: what failed on the engines."
    lane engines --last-failed --last-failed-no-failures=none "${on_engines[@]}" || status=$?
elif [ "$second" != 0 ]; then
    status=$second
fi
exit "$status"
