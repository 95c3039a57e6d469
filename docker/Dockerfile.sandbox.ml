# paracle/sandbox:ml: paracle/sandbox:latest and the usual packages for data and learning.
#
#   paracle image build ml
#   docker build -t paracle/sandbox:ml -f docker/Dockerfile.sandbox.ml .
#
# Dockerfile.sandbox says why files are looked for in two places, and what the first stage is for.
ARG BASE_IMAGE=paracle/sandbox:latest

FROM ${BASE_IMAGE} AS packages
ARG BUILD_ID=by-hand
LABEL paracle.image.stage=${BUILD_ID}
USER root
WORKDIR /build
COPY docker*/packages/ml.txt packages*/ml.txt docker*/pip.conf pip.conf* docker*/ca.pem ca.pem* ./
RUN PIP_CONFIG_FILE=/build/pip.conf python3 -m pip install --no-cache-dir --progress-bar off \
    --disable-pip-version-check --root-user-action ignore --no-warn-script-location \
    --root /installed -r ml.txt

FROM ${BASE_IMAGE}
ARG VERSION=1.0.1
LABEL org.opencontainers.image.title="paracle/sandbox:ml" \
      org.opencontainers.image.description="Python for untrusted code, with data science packages" \
      org.opencontainers.image.version="${VERSION}" \
      paracle.image.variant="ml"
USER root
COPY --from=packages /installed/ /
RUN python3 /usr/share/paracle/list_packages.py paracle/sandbox:ml
USER paracle
