# shellcheck shell=bash
# Installs, starts and stops a private Incus server. To be sourced by engines.sh, which sets folders.
#
#   incusd           INCUS_DIR below the cache; a link to it is in the folder `run`
#     └ monitors     one per container; they and their containers outlive the server, and are
#                    found by the folder in their command line and by the names of the instances
#
# One storage pool of plain folders, a profile with a root disk, and no network: nothing of the
# machine's own is changed. The image is the Debian tree that the Docker images of the tests have.
# shellcheck disable=SC2154  # the folders

INCUSD=/usr/libexec/incus/incusd
INCUS_BASE=paracle-test-base
# The server unpacks an image anew for each instance: half of the files of the tree that no program
# of the tests has a use for.
INCUS_NOT_NEEDED=(usr/lib/python3/dist-packages 'usr/lib/*/gconv' 'usr/lib/*/perl-base'
    usr/share/perl5 usr/share/python-wheels usr/share/zoneinfo var/lib/dpkg/info)

incus_() {
    INCUS_DIR=$incus_data INCUS_CONF=$run/incus-client timeout "${incus_seconds:-60}" incus "$@"
}

have_incus() {
    local program
    for program in "$INCUSD" incus dnsmasq mkfs.btrfs nft; do
        command -v "$program" >/dev/null || return
    done
}

# From the backports of this release: Debian 12 itself has none. The machine's own sources stay as
# they are, and so does its QEMU: without the metapackage, only what containers need comes along.
install_incus() {
    have_incus && return
    local release mirror work policy=/usr/sbin/policy-rc.d ours=
    release=$(debian_release)
    mirror=$(debian_mirror "$release")
    [ -n "$mirror" ] || fail "apt knows no mirror of Debian $release: run apt-get update"
    work=$(mktemp -d "$cache/incus.XXXXXX")
    mkdir -p "$work/lists/partial"
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg suite
    for suite in "$release" "$release-backports"; do
        echo "deb [signed-by=$keys] $mirror $suite main" >>"$work/debian.list"
    done
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/debian.list"
        -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
    # The package would start a server of its own; ours is all that is wanted.
    if [ ! -e "$policy" ]; then
        ours=$policy
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    fi
    "${apt[@]}" update >&2 && DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y \
        --no-install-recommends -t "$release-backports" incus-base incus-client dnsmasq-base \
        btrfs-progs nftables >&2
    [ -z "$ours" ] || rm -f "$ours"
    rm -rf "$work"
    have_incus || fail "cannot install incus-base from $release-backports"
}

incus_answers() {
    [ -S "$incus_data/unix.socket" ] && incus_seconds=10 incus_ query /1.0 >/dev/null 2>&1
}

# What it is to be like. It looks for nft once, when it starts; with another firewall than that it
# cannot filter a card on every kernel.
incus_is_as_wanted() {
    incus_seconds=10 incus_ query /1.0 2>/dev/null | grep -q '"firewall": *"nftables"'
}

start_incus() {
    mkdir -p "$run/incus-client" "$incus_data"
    ln -sfn "$incus_data" "$run/incus"
    INCUS_DIR=$incus_data setsid "$INCUSD" --group root --logfile "$run/incusd-own.log" \
        </dev/null >>"$run/incusd.log" 2>&1 9>&- 8>&- &
    echo $! >"$run/incusd.pid"
    await incusd incus_answers
    incus_is_as_wanted || fail "incus has not taken nftables for its firewall"
    incus_ admin init --preseed >&2 <<YAML || fail "incus does not take its first configuration"
storage_pools: [{name: default, driver: dir}]
profiles: [{name: default, devices: {root: {type: disk, path: /, pool: default}}}]
YAML
}

# Ends whatever of the server is there, in whatever state it is.
stop_incus() {
    [ -d "$incus_data" ] || return 0
    ! incus_answers || empty_incus >/dev/null 2>&1
    end_process "$(pid_of incusd)"
    end_instances
    unmount_below "$incus_data"
    rm -rf --one-file-system "$incus_data" "$run"/incus*
}

empty_incus() {
    local names name
    names=$(incus_ list -c n -f csv)
    # shellcheck disable=SC2086  # a list of words
    [ -z "$names" ] || incus_ delete -f $names
    for name in $(incus_ network list -c nm -f csv | awk -F, '$2 == "YES" { print $1 }'); do
        incus_ network delete "$name"
    done
}

# Of a server that was killed: monitors by their command line, the rest by its cgroup.
end_instances() {
    local entry folder name groups
    for entry in /proc/[0-9]*; do
        tr '\0' ' ' <"$entry/cmdline" | grep -qF "$incus_data/" && kill -9 "${entry#/proc/}"
    done 2>/dev/null
    for folder in "$incus_data"/containers/*; do
        name=${folder##*/}
        groups=(-path "*/lxc.payload.$name" -o -path "*/lxc.payload.$name/*"
            -o -path "*/lxc.monitor.$name" -o -path "*/lxc.monitor.$name/*")
        find /sys/fs/cgroup \( "${groups[@]}" \) -type d 2>/dev/null | while read -r entry; do
            cat "$entry/cgroup.procs" 2>/dev/null
        done | sort -u | xargs -r kill -9 2>/dev/null
        find /sys/fs/cgroup -depth -type d \( "${groups[@]}" \) -exec rmdir {} + 2>/dev/null
    done
    # Empty groups that the library leaves, unless another server may be about to use them.
    pidof -q incusd || rmdir /sys/fs/cgroup/*/lxc.pivot 2>/dev/null
    return 0
}

# Needs a running server.
import_incus_image() {
    local key tar work
    key=$(base_key)
    [ "$(incus_ image get-property "$INCUS_BASE" key 2>/dev/null)" = "$key" ] && return
    tar=$cache/base-$key.tar
    [ -e "$tar" ] || make_base_tree "$tar"
    work=$(mktemp -d "$cache/image.XXXXXX")
    mkdir "$work/rootfs"
    tar -C "$work/rootfs" "${INCUS_NOT_NEEDED[@]/#/--exclude=./}" -xf "$tar"
    # All that is asked of an init here is to be there, and to bury what has no other parent.
    cat >"$work/rootfs/sbin/init" <<'SH'
#!/bin/sh
trap 'exit 0' TERM INT PWR
while :; do sleep 86400 & wait $!; done
SH
    chmod 755 "$work/rootfs/sbin/init"
    printf 'architecture: %s\ncreation_date: %s\nproperties: {os: debian, key: "%s"}\n' \
        "$(uname -m)" "$(date +%s)" "$key" >"$work/metadata.yaml"
    tar -C "$work" --numeric-owner -cf "$work.tar" metadata.yaml rootfs &&
        incus_ image import "$work.tar" --alias "$INCUS_BASE" >/dev/null
    local status=$?
    rm -rf "$work" "$work.tar"
    [ "$status" = 0 ] || fail "incus cannot import the base image"
}
