# One image for every role: `query`, `ingest`, `serve` or `demo` is the container's argument.

FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/waymark
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY lua lua
RUN /opt/waymark/bin/pip install --no-cache-dir .

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home waymark
COPY --from=build /opt/waymark /opt/waymark
ENV PATH=/opt/waymark/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
EXPOSE 13333
STOPSIGNAL SIGTERM
ENTRYPOINT ["waymark"]
CMD ["serve"]
