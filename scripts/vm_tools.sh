#!/bin/sh
# Makes the parts of the cgroup v2 test machine: a Debian kernel, a small boot archive and a disk.
#
#   scripts/vm_tools.sh            builds what is missing, prints the folder that holds it
#   . scripts/vm_tools.sh; vm      the same, from another script
#
# The folder is PARACLE_TEST_CACHE (or a cache folder of the user) / vm-KEY, and holds vmlinuz,
# boot.cpio and root.ext4. KEY covers this script, what it packs and the project's dependencies, so
# that a change makes a new folder and an unchanged tree makes no work. Nothing is installed on the
# host but the tools; the kernel is only unpacked. The project's own source is not in the disk:
# tests/vm/machine.py hands it over fresh at each boot.

# shellcheck source=scripts/debian.sh
. "${VM_PROJECT:-$(dirname "$0")/..}/scripts/debian.sh"

VM_HOST_TOOLS="qemu-system-x86 debootstrap cpio e2fsprogs"
VM_GUEST_PACKAGES="python3,kmod,procps,iproute2,nftables,btrfs-progs,e2fsprogs,uidmap"
VM_DISK_SIZE=6G

vm_fail() {
    echo "vm: $*" >&2
    exit 1
}

# What the project and its tests import. The checkers are not run in the guest.
vm_requirements() {
    "${PYTHON:-python3}" - "$1/pyproject.toml" <<'PROGRAM'
import re, sys, tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
print(*sorted({w for w in wanted if not re.match("(mypy|ruff|types-)", w)}), sep="\n")
PROGRAM
}

vm_key() {
    { cat "$1/scripts/vm_tools.sh" "$1/scripts/debian.sh" "$1/tests/vm/boot.sh"; vm_requirements "$1"; } |
        sha256sum | cut -c1-12
}

vm_unpack_package() {
    package=$1 into=$2
    folder=$(mktemp -d "$into.deb.XXXXXX") || vm_fail "no room for $package"
    (cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root "$package" >&2) || vm_fail "cannot download $package"
    dpkg-deb -x "$folder"/*.deb "$into" || vm_fail "cannot unpack $package"
    rm -r "$folder"
}

vm_kernel_package() {
    apt-cache depends linux-image-cloud-amd64 |
        awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ { print $2; exit }'
}

vm_build_tree() {
    tree=$1 release=$2
    mirror=$(debian_mirror "$release")
    [ -n "$mirror" ] || vm_fail "apt knows no mirror of Debian $release: run apt-get update"
    debootstrap --variant=minbase --include="$VM_GUEST_PACKAGES" \
        "$release" "$tree" "$mirror" >"$tree.log" 2>&1 ||
        vm_fail "debootstrap failed: $(tail -n 3 "$tree.log")"
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/usr/share/doc \
        "$tree"/usr/share/locale "$tree"/usr/share/man
    chroot "$tree" useradd --create-home --uid 1000 --shell /bin/bash tester ||
        vm_fail "cannot add the user tester"
    echo paracle-vm >"$tree/etc/hostname"
    echo "127.0.0.1 localhost paracle-vm" >"$tree/etc/hosts"
    : >"$tree/etc/resolv.conf"
}

# The guest's Python may be another than ours: ask for its wheels by name.
vm_add_python_packages() {
    tree=$1 requirements=$2
    version=$(chroot "$tree" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    target=usr/local/lib/python$version/dist-packages
    "${PYTHON:-python3}" -m pip install -q --disable-pip-version-check --root-user-action=ignore \
        --no-compile --only-binary=:all: --implementation cp --python-version "$version" \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
        --target "$tree/$target" -r "$requirements" >"$tree.log" 2>&1 ||
        vm_fail "pip cannot fetch the packages: $(tail -n 3 "$tree.log")"
    chroot "$tree" python3 -m compileall -q "/$target" || vm_fail "cannot compile /$target"
    # pytest compiles its plugins in its own way; under emulation that costs seconds at each boot.
    echo 'def test_nothing(): pass' >"$tree/tmp/test_nothing.py"
    chroot "$tree" python3 -m pytest -q -p no:cacheprovider /tmp/test_nothing.py \
        >"$tree.log" 2>&1 || vm_fail "pytest does not run: $(tail -n 3 "$tree.log")"
    rm -r "$tree"/tmp/*
}

# The first stage needs only what makes the disk visible: ext4 is in the kernel, virtio is not.
vm_pack_boot() {
    work=$1 kernel=$2 boot=$3
    mkdir -p "$work/boot/bin" "$work/boot/modules" "$work/boot/dev" "$work/boot/new"
    cp "$work/unpacked/bin/busybox" "$work/boot/bin/busybox"
    cp "$boot" "$work/boot/init"
    chmod 755 "$work/boot/init"
    for module in virtio_pci virtio_blk; do
        chroot "$work/tree" modprobe --show-depends --set-version "$kernel" "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$work/modules"
    [ -s "$work/modules" ] || vm_fail "kernel $kernel has no virtio modules"
    while read -r module; do
        cp "$work/tree$module" "$work/boot/modules/"
        basename "$module"
    done <"$work/modules" >"$work/boot/modules/order"
    (cd "$work/boot" && find . | cpio --quiet -o -H newc -R 0:0) >"$work/out/boot.cpio" ||
        vm_fail "cannot pack the boot archive"
}

vm_build() {
    project=$1 work=$2
    release=$(debian_release)
    mkdir -p "$work/out"
    vm_build_tree "$work/tree" "$release"
    kernel_package=$(vm_kernel_package)
    [ -n "$kernel_package" ] || vm_fail "apt knows no linux-image-cloud-amd64"
    kernel=${kernel_package#linux-image-}
    vm_unpack_package "$kernel_package" "$work/unpacked"
    vm_unpack_package busybox-static "$work/unpacked"
    cp "$work/unpacked/boot/vmlinuz-$kernel" "$work/out/vmlinuz"
    mkdir -p "$work/tree/usr/lib/modules"
    cp -r "$work/unpacked/lib/modules/$kernel" "$work/tree/usr/lib/modules/"
    chroot "$work/tree" depmod "$kernel" || vm_fail "depmod failed"
    vm_requirements "$project" >"$work/requirements"
    vm_add_python_packages "$work/tree" "$work/requirements"
    vm_pack_boot "$work" "$kernel" "$project/tests/vm/boot.sh"
    mkfs.ext4 -q -F -d "$work/tree" -E lazy_itable_init=1,nodiscard -O ^has_journal \
        "$work/out/root.ext4" "$VM_DISK_SIZE" >"$work/mkfs.log" || vm_fail "mkfs.ext4 failed"
}

vm() (
    project=$(cd "${VM_PROJECT:-$(dirname "$0")/..}" && pwd)
    cache=$(test_cache)
    parts=$cache/vm-$(vm_key "$project")
    if [ -e "$parts/root.ext4" ] && command -v qemu-system-x86_64 >/dev/null; then
        echo "$parts"
        exit 0
    fi
    [ "$(id -u)" = 0 ] || vm_fail "the test machine is not built yet, and building it needs root"
    command -v apt-get >/dev/null || vm_fail "building the test machine needs a Debian host"
    mkdir -p "$cache" || vm_fail "cannot write to $cache"
    exec 9>"$cache/vm.lock"
    flock 9
    # shellcheck disable=SC2086  # a list of words
    debian_install $VM_HOST_TOOLS || vm_fail "cannot install one of: $VM_HOST_TOOLS"
    if [ ! -e "$parts/root.ext4" ]; then
        find "$cache" -maxdepth 1 -name 'vm-*' -mtime +14 -exec rm -rf {} +
        work=$(mktemp -d "$cache/building.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        vm_build "$project" "$work"
        chmod -R a+rX "$work/out"
        mv "$work/out" "$parts"
    fi
    echo "$parts"
)

case $0 in
    *vm_tools.sh) vm ;;
esac
