# One file, seven targets: operator, router, agent, weights, sandbox, rewards, engine.
#
#   docker build --target operator -t rose-operator .
#   docker build --target engine --build-arg ENGINE_BASE=lmsysorg/sglang:v0.5.23 -t rose-engine .
#
# BASE is any image with Python >= 3.11, venv and pip; the targets agent and sandbox also need Debian's apt in it. ENGINE_BASE
# is an image of the rollout engine, whose Python and packages stay as they are (docs/engine-image.md).
ARG BASE=python:3.11-slim-bookworm
ARG ENGINE_BASE=lmsysorg/sglang:v0.5.23

FROM ${BASE} AS source
COPY pyproject.toml constraints.txt README.md LICENSE /source/
COPY rose_core /source/rose_core
COPY wire /source/wire
COPY engines /source/engines
COPY weights /source/weights
COPY operator /source/operator
COPY agent /source/agent
COPY router /source/router
COPY trainer /source/trainer
COPY rewards /source/rewards
COPY batches /source/batches
COPY sandbox /source/sandbox
COPY simulate /source/simulate
COPY cli /source/cli

# An environment of its own per target, so that an image holds what its processes need and no more;
# not even pip, which works on it from outside.
FROM source AS operator-environment
RUN python3 -m venv --without-pip /opt/rose \
 && python3 -m pip --python /opt/rose/bin/python install --no-cache-dir -c /source/constraints.txt "/source[operator]" \
 && /opt/rose/bin/python -m rose_cli.sbom > /opt/rose/sbom.json

FROM source AS router-environment
RUN python3 -m venv --without-pip /opt/rose \
 && python3 -m pip --python /opt/rose/bin/python install --no-cache-dir -c /source/constraints.txt "/source[router]" \
 && /opt/rose/bin/python -m rose_cli.sbom > /opt/rose/sbom.json

FROM source AS agent-environment
RUN python3 -m venv --without-pip /opt/rose \
 && python3 -m pip --python /opt/rose/bin/python install --no-cache-dir -c /source/constraints.txt "/source[agent]" \
 && /opt/rose/bin/python -m rose_cli.sbom > /opt/rose/sbom.json

FROM source AS weights-environment
RUN python3 -m venv --without-pip /opt/rose \
 && python3 -m pip --python /opt/rose/bin/python install --no-cache-dir -c /source/constraints.txt "/source[agent,weights]" \
 && /opt/rose/bin/python -m rose_cli.sbom > /opt/rose/sbom.json

FROM source AS rewards-environment
RUN python3 -m venv --without-pip /opt/rose \
 && python3 -m pip --python /opt/rose/bin/python install --no-cache-dir -c /source/constraints.txt "/source[rewards,batches]" \
 && /opt/rose/bin/python -m rose_cli.sbom > /opt/rose/sbom.json

# The program by which the tap counts tokens in the kernel; its compiler stays in this stage.
FROM ${BASE} AS tap-program
RUN apt-get update \
 && apt-get install --no-install-recommends -y clang libbpf-dev libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY agent/rose_agent/tap/tokens.bpf.c /source/
RUN clang -target bpf -mcpu=v3 -O2 -g -Wall -Werror -I "/usr/include/$(uname -m)-linux-gnu" \
      -c /source/tokens.bpf.c -o /source/tokens.o

FROM ${BASE} AS operator
COPY --from=operator-environment /opt/rose /opt/rose
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["rose", "operator"]

FROM ${BASE} AS router
COPY --from=router-environment /opt/rose /opt/rose
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["rose", "router"]

# Guard and tap; the chart gives each container its rights.
FROM ${BASE} AS agent
RUN apt-get update \
 && apt-get install --no-install-recommends -y libbpf1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=agent-environment /opt/rose /opt/rose
COPY --from=tap-program /source/tokens.o /opt/rose/bpf/tokens.o
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
ENTRYPOINT ["rose", "agent"]

# Weight-sync, relay and store: what merges and digests weights needs a compiler of kernels.
FROM ${BASE} AS weights
COPY --from=weights-environment /opt/rose /opt/rose
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba
ENTRYPOINT ["rose", "weights"]

# Host of agents' sandboxes. runc, CRIU and what sandboxes begin as come from a folder of the node
# (docs/sandboxes.md); here is what these run with.
FROM ${BASE} AS sandbox
RUN apt-get update \
 && apt-get install --no-install-recommends -y gzip iproute2 libelf1 libseccomp2 mount tar util-linux \
 && rm -rf /var/lib/apt/lists/*
COPY --from=weights-environment /opt/rose /opt/rose
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba
ENTRYPOINT ["rose", "sandbox-host"]

# Gateway of reward functions, its workers, and batches.
FROM ${BASE} AS rewards
COPY --from=rewards-environment /opt/rose /opt/rose
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["rose", "rewards"]

# Engine host beside an engine. The host has an environment of its own, which sees nothing of the base's;
# the engine runs with the base's Python, which finds a folder of ROSE's packages on its path and nothing
# that they need: SGLang brings that, in the versions that it pins.
FROM ${ENGINE_BASE} AS engine
COPY --from=source /source /source
RUN python3 -m venv --without-pip /opt/rose \
 && python3 -m pip --python /opt/rose/bin/python install --no-cache-dir -c /source/constraints.txt "/source[agent,weights]" \
 && python3 -m pip install --no-cache-dir --no-compile --no-deps --target /opt/rose/packages /source \
 && rm -rf /opt/rose/packages/bin \
 && printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v python3)" > /opt/rose/engine-python \
 && chmod 755 /opt/rose/engine-python \
 && cp -r /source/engines/kernels /opt/rose/kernels \
 && PYTHONPATH=/opt/rose/packages /opt/rose/engine-python -m rose_engines.bake /opt/rose/kernels \
 && chmod -R a+rX,go-w /opt/rose/kernels \
 && seq 64000 64999 | sed 's|.*|rose-engine-&:x:&:&::/nonexistent:/usr/sbin/nologin|' >> /etc/passwd \
 && /opt/rose/bin/python -m rose_cli.sbom > /opt/rose/sbom.json \
 && rm -rf /source
# The base's own entries stay: nvcc, ptxas and ninja are in some of them.
ENV PATH=/opt/rose/bin:${PATH} PYTHONUNBUFFERED=1
ENTRYPOINT ["rose", "engine-host"]
