# One image for every role: `query`, `ingest`, `epp`, `gateway`, `serve`, `demo` or `simulate` is the container's
# argument. It runs as an unprivileged user, on a read-only root file system, and writes no file.

ARG PYTHON_VERSION=3.13

FROM python:${PYTHON_VERSION}-slim AS build
# The parts in C are compiled if there is a compiler. Versions are not pinned, because Debian removes old ones.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv --without-pip /opt/waymark
WORKDIR /src
COPY . .
# The package is this directory, so it has no version to pin.
# hadolint ignore=DL3013
RUN pip --python /opt/waymark/bin/python install --no-cache-dir '.[demo,epp,mongo]'

FROM python:${PYTHON_VERSION}-slim
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="waymark" \
      org.opencontainers.image.description="A Redis-backed, stateless KV-cache indexer for LLM serving" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --system --gid 10001 waymark \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin waymark
COPY --from=build /opt/waymark /opt/waymark
COPY deploy/healthcheck.py /opt/waymark/healthcheck.py
# An ingest worker answers on the same port as a query replica, so that one health check is enough for both. A trial
# also listens on all addresses of its container; the published ports decide which of them can be reached.
ENV PATH=/opt/waymark/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 WAYMARK_HOST=0.0.0.0 WAYMARK_PROBE_PORT=13333
USER 10001:10001
WORKDIR /
EXPOSE 13333
STOPSIGNAL SIGTERM
# podman drops the health check, unless the image is built with --format docker.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-I", "/opt/waymark/healthcheck.py"]
ENTRYPOINT ["waymark"]
CMD ["serve"]
