# shellcheck shell=bash
# What the container engines of the tests are made of: packages, the gVisor runtime, a base image.
# To be sourced by engines.sh, which sets the folders. What is there already is not made again.
# shellcheck disable=SC2154  # the folders

# The base images that Dockerfiles start from. No registry is asked: all are one Debian tree, so
# tests must not expect the minor version that the tag names.
BASE_IMAGES=(python:3.12-slim python:3.10-slim)
BASE_PACKAGES=python3,python3-pip,python3-venv,ca-certificates

have_docker() {
    local program
    for program in dockerd containerd docker iptables ip; do
        command -v "$program" >/dev/null || return
    done
}

install_docker() {
    have_docker && return
    # The package would start an engine of its own; ours is all that is wanted.
    local policy=/usr/sbin/policy-rc.d ours=
    if [ ! -e "$policy" ]; then
        ours=$policy
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    fi
    debian_install docker.io iptables iproute2
    [ -z "$ours" ] || rm -f "$ours"
    have_docker || fail "cannot install docker.io"
}

# Either generation of it will do.
install_compose() {
    docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null && return
    debian_install docker-compose || fail "cannot install docker-compose"
}

# From the backports of this release: the runsc of Debian 12 itself is too old. It is one static
# program, so it is unpacked into the cache, and the machine's own apt sources stay as they are.
fetch_runsc() {
    [ -x "$cache/runsc" ] && return
    local release mirror work
    release=$(debian_release)
    mirror=$(debian_mirror "$release")
    [ -n "$mirror" ] || fail "apt knows no mirror of Debian $release: run apt-get update"
    work=$(mktemp -d "$cache/runsc.XXXXXX")
    mkdir -p "$work/lists/partial"
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$keys] $mirror $release-backports main" >"$work/backports.list"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/backports.list"
        -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
    if "${apt[@]}" update >&2 && (cd "$work" && "${apt[@]}" download runsc >&2) &&
        dpkg-deb -x "$work"/runsc_*.deb "$work/out"; then
        mv "$work/out/usr/bin/runsc" "$cache/runsc"
    fi
    rm -rf "$work"
    [ -x "$cache/runsc" ] || fail "cannot get runsc from $release-backports"
}

base_key() {
    { declare -f make_base_tree finish_base_tree; echo "$BASE_PACKAGES"; debian_release; } |
        sha256sum | cut -c1-12
}

# A tar file of a small Debian that looks like the official Python images where it matters: python,
# python3 and pip on the PATH, and pip may install into the system.
make_base_tree() {
    local target=$1 release mirror work
    release=$(debian_release)
    mirror=$(debian_mirror "$release")
    [ -n "$mirror" ] || fail "apt knows no mirror of Debian $release: run apt-get update"
    debian_install debootstrap || fail "cannot install debootstrap"
    find "$cache" -maxdepth 1 -name 'base-*.tar' -mtime +14 -delete
    work=$(mktemp -d "$cache/base.XXXXXX")
    if debootstrap --variant=minbase --include="$BASE_PACKAGES" "$release" "$work/tree" \
        "$mirror" >"$work/log" 2>&1; then
        finish_base_tree "$work/tree"
        tar -C "$work/tree" --numeric-owner -cf "$work/base.tar" . && mv "$work/base.tar" "$target"
    else
        tail -n 3 "$work/log" >&2
    fi
    rm -rf "$work"
    [ -e "$target" ] || fail "debootstrap cannot make the base image"
}

finish_base_tree() {
    local tree=$1
    rm -rf "$tree"/var/cache/apt/{*.bin,archives/*} "$tree"/var/lib/apt/lists/* \
        "$tree"/usr/share/{doc,locale,man}/* "$tree"/var/log/*.log \
        "$tree"/usr/lib/python3*/EXTERNALLY-MANAGED
    : >"$tree/etc/resolv.conf"
    echo localhost >"$tree/etc/hostname"
    ln -s ../../bin/python3 "$tree/usr/local/bin/python3"
    ln -s python3 "$tree/usr/local/bin/python"
}

# Needs a running engine.
import_base_images() {
    local key tar image missing=() of='{{index .Config.Labels "paracle.test.base"}}'
    key=$(base_key)
    tar=$cache/base-$key.tar
    for image in "${BASE_IMAGES[@]}"; do
        [ "$(docker_ image inspect -f "$of" "$image" 2>/dev/null)" = "$key" ] || missing+=("$image")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    [ -e "$tar" ] || make_base_tree "$tar"
    docker_ import --change 'CMD ["python3"]' --change "LABEL paracle.test.base=$key" \
        --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' \
        "$tar" "${missing[0]}" >/dev/null || fail "docker cannot import the base image"
    for image in "${missing[@]:1}"; do
        docker_ tag "${missing[0]}" "$image"
    done
}
