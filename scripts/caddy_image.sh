#!/usr/bin/env bash
# The proxy of the deployment as an image, for tests on a machine that reaches no registry: Debian's
# program on top of the base image, under the name that deploy/docker-compose.yml asks for.
#
#   DOCKER_HOST=... scripts/caddy_image.sh        a no-op when it is there
set -euo pipefail
base=python:3.12-slim
label=paracle.test.caddy-on-base

base_id=$(docker image inspect -f '{{.Id}}' "$base")
there=$(docker image inspect -f "{{index .Config.Labels \"$label\"}}" caddy:2 2>/dev/null || true)
[ "$there" != "$base_id" ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get -qq -o APT::Sandbox::User=root download caddy)
dpkg-deb -x "$work"/caddy_*.deb "$work/out"
cat >"$work/out/usr/bin/Dockerfile" <<DOCKERFILE
FROM $base
LABEL $label=$base_id
ENV XDG_CONFIG_HOME=/config XDG_DATA_HOME=/data
COPY caddy /usr/bin/caddy
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
DOCKERFILE
DOCKER_BUILDKIT=0 docker build -q -t caddy:2 "$work/out/usr/bin"
