# syntax=docker/dockerfile:1
# The image of charts/coordinator. From the top of the checkout:
#   docker build -f docker/coordinator.Dockerfile -t fedsched/coordinator:0.1.0 .

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/fedsched/bin:$PATH
RUN python -m venv /opt/fedsched
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY agent agent
COPY common common
COPY coordinator coordinator
# psycopg: for a registry in PostgreSQL, postgresql+psycopg://…
RUN pip install -c constraints.txt '.[coordinator]' 'psycopg[binary]>=3.2,<4'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/fedsched /opt/fedsched
ENV PATH=/opt/fedsched/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 HOME=/tmp
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["fedsched"]
CMD ["coordinator", "--help"]
