#!/usr/bin/env bash
# What the tests need beside Python, from Debian's packages, when this is root on Debian.
# A no-op when all is there; without root the tests that need it say so and are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0

missing=()
for pair in nft:nftables ip:iproute2 strace:strace setpriv:util-linux; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "Installing ${missing[*]} ..."
    apt-get update >/dev/null
    apt-get install -y "${missing[@]}" >/dev/null
fi
