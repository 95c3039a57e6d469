#!/bin/sh
# Makes src/paracle_sandbox/jail/seed.btrfs.gz, the empty file system that every volume starts from.
# Needs btrfs-progs and python3; only whoever changes the seed runs this.
set -eu

target="$(dirname "$0")/../src/paracle_sandbox/jail/seed.btrfs.gz"
image="$(mktemp)"
trap 'rm -f "$image"' EXIT

# 48 MiB is the least that mkfs accepts, and is below 64 MiB, where the second superblock would be.
truncate -s 48M "$image"
mkfs.btrfs -q -f -m single -d single -n 16384 -s 4096 -O no-holes,extref,skinny-metadata \
    -R free-space-tree -L paracle -U 50617261-636c-4e53-8e65-656400000001 "$image"

# Only the blocks that are not zero, each as its offset (8 bytes, big endian) and 4096 bytes:
# unpacking 48 MiB of zeros would cost more than everything else that creating a volume does.
python3 - "$image" "$target" <<'PACK'
import gzip, pathlib, struct, sys

image = pathlib.Path(sys.argv[1]).read_bytes()
blocks = ((start, image[start : start + 4096]) for start in range(0, len(image), 4096))
records = b"".join(struct.pack(">Q", start) + block for start, block in blocks if any(block))
pathlib.Path(sys.argv[2]).write_bytes(gzip.compress(records, 9, mtime=0))
print(f"{sys.argv[2]}: {len(records) // 4104} blocks")
PACK
