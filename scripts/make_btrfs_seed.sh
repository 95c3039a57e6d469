#!/bin/sh
# Makes jail/limits/seed.btrfs, the empty file system that every volume starts from.
# Needs btrfs-progs and python3; only whoever changes the seed runs this.
set -eu

target="$(dirname "$0")/../src/paracle_sandbox/jail/limits/seed.btrfs"
image="$(mktemp)"
trap 'rm -f "$image"' EXIT

# 48 MiB is the least that mkfs accepts, and is below 64 MiB, where the second superblock would be.
truncate -s 48M "$image"
mkfs.btrfs -q -f -m single -d single -n 16384 -s 4096 -O no-holes,extref,skinny-metadata \
    -R free-space-tree -L paracle -U 50617261-636c-4e53-8e65-656400000001 "$image"

# Only what is not zero, piece by piece, each after its offset and its length (4 and 2 bytes, big
# endian). So little is left of it that it need not be packed: a library that unpacks it would be
# mapped in every sandbox.
python3 - "$image" "$target" <<'PACK'
import pathlib, re, struct, sys

image = pathlib.Path(sys.argv[1]).read_bytes()
pieces = list(re.finditer(rb"[^\0](?:\0{0,16}[^\0])*", image))
content = b"".join(struct.pack(">IH", piece.start(), len(piece[0])) + piece[0] for piece in pieces)
pathlib.Path(sys.argv[2]).write_bytes(content)
print(f"{sys.argv[2]}: {len(pieces)} pieces, {len(content)} bytes")
PACK
