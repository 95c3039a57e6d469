# shellcheck shell=sh
# What the scripts that make test engines share: the cache folder, and the machine's own Debian mirror.
# To be sourced. No address is written down here: whatever apt is configured with is used.

test_cache() {
    if [ -n "${PARACLE_TEST_CACHE:-}" ]; then
        echo "$PARACLE_TEST_CACHE"
    elif [ "$(id -u)" = 0 ]; then
        echo /var/cache/paracle-sandbox-tests
    else
        echo "${XDG_CACHE_HOME:-$HOME/.cache}/paracle-sandbox-tests"
    fi
}

debian_release() {
    # shellcheck disable=SC1091  # a file of every Linux system
    (. /etc/os-release && echo "${VERSION_CODENAME:-}")
}

# The mirror that apt uses for a release.
debian_mirror() {
    # shellcheck disable=SC2016  # apt's own placeholders
    apt-get indextargets --format '$(CREATED_BY) $(CODENAME) $(COMPONENT) $(SITE)' |
        awk -v release="$1" \
            '$1 == "Packages" && $2 == release && $3 == "main" { print $4; exit }'
}

# Installs those of the packages that are missing: debian_install PACKAGE...
debian_install() (
    missing=
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing="$missing $package"
    done
    [ -z "$missing" ] && exit
    apt-get update >/dev/null 2>&1 || true # the lists that are there may do
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >&2
)
