# syntax=docker/dockerfile:1
# The image of charts/agent: serve, learn and lift-gates. From the top of the checkout:
#   docker build -f docker/agent.Dockerfile -t fedsched/agent:0.1.0 .

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/fedsched/bin:$PATH
RUN python -m venv /opt/fedsched
WORKDIR /src
COPY constraints.txt ./
# Of PyTorch's own index, where torch for processors alone is: 0.2 GB in place of 3. Nothing else is
# taken from there; what torch needs comes with the rest.
RUN pip install --no-deps -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY agent agent
COPY common common
COPY coordinator coordinator
RUN pip install -c constraints.txt '.[learn]'

# Compiled kernels, for any processor of this architecture: a pod finds them ready and need not spend
# its first minutes on them. KERNEL_CPU=x86-64-v3 makes them quicker, and the image fit for fewer.
FROM build AS kernels
ARG KERNEL_CPU=generic
ENV NUMBA_CPU_NAME=$KERNEL_CPU NUMBA_CPU_FEATURES="" FEDSCHED_CACHE=/opt/kernels
COPY examples/traces /src/traces
WORKDIR /
RUN FEDSCHED_TRACES=/src/traces python -m agent.warm

FROM python:3.11-slim-bookworm
ARG KERNEL_CPU=generic
COPY --from=build /opt/fedsched /opt/fedsched
COPY --from=kernels /opt/kernels /opt/kernels
# The cache must be a place that can be written to, or numba refuses it: the chart makes one and
# copies the kernels there.
ENV PATH=/opt/fedsched/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CPU_NAME=$KERNEL_CPU NUMBA_CPU_FEATURES="" FEDSCHED_CACHE=/var/cache/fedsched \
    OMP_NUM_THREADS=1 HOME=/tmp
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["fedsched"]
CMD ["agent", "--help"]
