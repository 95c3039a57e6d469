#!/usr/bin/env bash
# The programs that the tests need beside Python, from Debian's packages, as root on Debian.
# A no-op when all is there; without root the tests that need it say so and are skipped.
set -euo pipefail
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

missing=()
for pair in nft:nftables ip:iproute2 strace:strace setpriv:util-linux; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
# For the tests of the browser tool, which are skipped without it.
command -v chromium-headless-shell >/dev/null || debian_install chromium-headless-shell 2>/dev/null ||
    echo "There is no package chromium-headless-shell to be had: tests of the browser are skipped."
if [ ${#missing[@]} -gt 0 ]; then
    echo "Installing ${missing[*]} ..."
    debian_install "${missing[@]}" 2>/dev/null
fi
# Other Pythons, for tests/interpreters: those that the machine has, and in long runs what Debian has.
if [ -n "${PARACLE_LONG:-}" ]; then
    "$(dirname "$0")/interpreters.sh" fetch || echo "Tests with the Pythons that are missing are skipped."
fi
