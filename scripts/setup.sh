#!/usr/bin/env bash
# Make the virtual environment and install the package into it: setup.sh VENV [extra]
# A no-op when it is there and neither pyproject.toml nor the place has changed since.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extra=${2:-}
stamp=$venv/.installed${extra:+-$extra}

find_python() {
    for name in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3." >&2
    exit 1
}

make_venv() {
    local python=$1
    "$python" -m venv "$venv" >/dev/null 2>&1 && return
    rm -rf "$venv"
    # Debian keeps the venv module in a package of its own.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        (apt-get update && apt-get install -y python3-venv) >/dev/null 2>&1 || true
        "$python" -m venv "$venv" && return
    fi
    if command -v uv >/dev/null; then
        uv venv --seed --python "$python" "$venv" && return
    fi
    "$python" -m virtualenv "$venv" 2>/dev/null && return
    echo "No virtual environment can be made. Install one way to: apt install python3-venv" >&2
    exit 1
}

# The stamp says where that was: a virtual environment does not survive being moved.
is_installed() {
    [ "$stamp" -nt pyproject.toml ] && [ "$(cat "$stamp")" = "$PWD" ] &&
        [ -x "$venv/bin/python" ] && [ -x "$venv/bin/paracle" ]
}

# One without pip was broken off while it was made.
has_venv() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

if is_installed; then
    exit 0
fi
if ! has_venv; then
    echo "Making $venv ..."
    make_venv "$(find_python)"
fi
echo "Installing paracle-sandbox${extra:+[$extra]} into $venv ..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
echo "$PWD" >"$stamp"
