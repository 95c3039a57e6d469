#!/usr/bin/env bash
# Other Pythons for the tests (tests/interpreters): where they are, and how they are had.
#
#   scripts/interpreters.sh list           a line for each that is there: VERSION PATH
#   scripts/interpreters.sh fetch [3.N]... get those that are not there from Debian's suites
#   scripts/interpreters.sh cache          the folder that keeps what was fetched
#
# One counts as there if it is in the cache of the tests, on the PATH, or below pyenv. Debian has one
# or two Pythons in each suite, built for that suite's C library: they are unpacked into the cache
# with all that they need, and patched to use it. Nothing of the machine changes.
set -euo pipefail
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"
VERSIONS=(3.8 3.9 3.10 3.11 3.12 3.13 3.14)
SUITES=(bullseye bookworm trixie sid)
folder=$(test_cache)/interpreters

fail() {
    echo "interpreters.sh: $*" >&2
    exit 1
}

# The path of a program that is this version. A shim of pyenv has the name, and may be no such Python;
# that of a virtual environment is a link to the one that is meant.
is_version() {
    local found
    found=$("$2" -I -c 'import os, sys, ssl, sqlite3, ctypes
print("%d.%d" % sys.version_info[:2], os.path.realpath(sys.executable))' 2>/dev/null) || return
    [ "${found%% *}" = "$1" ] && echo "${found#* }"
}

# locate VERSION: its path.
locate() {
    local candidate
    for candidate in "$folder/$1/usr/bin/python$1" "$(type -P "python$1" || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1"; do
        if [ -x "$candidate" ] && is_version "$1" "$candidate"; then return; fi
    done
    return 1
}

list() {
    local version path
    for version in "${VERSIONS[@]}"; do
        if path=$(locate "$version"); then echo "$version $path"; fi
    done
}

# An apt that knows one suite and believes that nothing is installed: apt_of SUITE ARGUMENTS...
apt_of() {
    local lists=$work/$1
    if [ ! -d "$lists" ]; then
        mkdir -p "$lists/lists/partial" "$lists/debs/partial"
        : >"$lists/status"
        local keys=/usr/share/keyrings/debian-archive-keyring.gpg
        echo "deb [signed-by=$keys] $mirror $1 main" >"$lists/sources.list"
        apt_of "$1" update || echo "There is no suite $1 at $mirror." >&2
    fi
    apt-get -qq -o "Dir::Etc::SourceList=$lists/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o "Dir::State::Lists=$lists/lists" -o "Dir::State::status=$lists/status" \
        -o "Dir::Cache::archives=$lists/debs" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
        -o APT::Sandbox::User=root -o APT::Install-Recommends=false -o Debug::NoLocking=true \
        "${@:2}"
}

# fetch VERSION: from the first suite that has it.
fetch() {
    local version=$1 suite tree loader libraries archive
    for suite in "${SUITES[@]}"; do
        apt_of "$suite" --simulate install "python$version-venv" >/dev/null 2>&1 || continue
        echo "Python $version from Debian $suite ..."
        apt_of "$suite" -y --download-only install "python$version" "python$version-venv" >&2
        tree=$work/tree-$version
        for archive in "$work/$suite"/debs/*.deb; do dpkg-deb -x "$archive" "$tree"; done
        rm -f "$work/$suite"/debs/*.deb
        # Older suites keep some libraries beside /usr, and all must be below the interpreter's prefix.
        if [ -d "$tree/lib" ]; then cp -a "$tree/lib/." "$tree/usr/lib/"; fi
        rm -rf "$folder/$version"
        mkdir -p "$folder/$version"
        mv "$tree/usr" "$folder/$version/usr"
        libraries=$(dirname "$(ls -d "$folder/$version"/usr/lib/*-linux-*/libc.so.6)")
        loader=$(ls "$libraries"/ld-linux*.so.* | head -n 1)
        "$(patchelf_program)" --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" \
            "$folder/$version/usr/bin/python$version"
        # So that it finds its own pip, and not that of the machine's Python.
        grep -rlIZ /usr/share/python-wheels "$folder/$version/usr/lib" |
            xargs -0r sed -i "s:/usr/share/python-wheels:$folder/$version/usr/share/python-wheels:g"
        locate "$version" >/dev/null && return
        rm -rf "${folder:?}/$version"
        echo "Python $version of Debian $suite does not run here." >&2
    done
    echo "No suite of Debian at $mirror has a Python $version (asked: ${SUITES[*]})." >&2
    return 1
}

patchelf_program() {
    type -P patchelf && return
    if [ ! -x "$work/patchelf/usr/bin/patchelf" ]; then
        (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download patchelf >&2 && dpkg-deb -x patchelf_*.deb patchelf)
    fi
    echo "$work/patchelf/usr/bin/patchelf"
}

fetch_missing() {
    command -v apt-get dpkg-deb >/dev/null || fail "only on Debian"
    mirror=$(debian_mirror "$(debian_release)")
    [ -n "$mirror" ] || fail "apt knows no mirror of this release: run apt-get update"
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    local version status=0
    for version in "$@"; do
        locate "$version" >/dev/null || fetch "$version" || status=1
    done
    return "$status"
}

case "${1:-}" in
    cache) echo "$folder" ;;
    list) list ;;
    fetch)
        shift
        [ $# != 0 ] || set -- "${VERSIONS[@]}"
        fetch_missing "$@"
        ;;
    *) fail "list, fetch [3.N]... or cache" ;;
esac
