# One file, four targets: operator, router, agent, engine.
#
#   docker build --target operator -t rose-operator .
#   docker build --target engine --build-arg ENGINE_BASE=lmsysorg/sglang:v0.5.23 -t rose-engine .
#
# BASE is any image with Python >= 3.11 and pip. ENGINE_BASE is an image of the rollout engine; ROSE
# joins its Python without touching its packages.
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
COPY simulate /source/simulate
COPY cli /source/cli
COPY dev /source/dev

# An environment of its own per target, so that an image holds what its processes need and no more.
FROM source AS operator-environment
RUN python3 -m venv /opt/rose \
 && /opt/rose/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[operator]"

FROM source AS router-environment
RUN python3 -m venv /opt/rose \
 && /opt/rose/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[router]"

FROM source AS agent-environment
RUN python3 -m venv /opt/rose \
 && /opt/rose/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[agent,weights]"

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

# Guard, tap and weight-sync; the chart gives each container its rights.
FROM ${BASE} AS agent
COPY --from=agent-environment /opt/rose /opt/rose
ENV PATH=/opt/rose/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
ENTRYPOINT ["rose", "agent"]

# Engine host beside an engine: ROSE's packages and what they need go into a virtual environment
# that also sees the engine's packages.
FROM ${ENGINE_BASE} AS engine
COPY --from=source /source /source
RUN python3 -m venv --system-site-packages /opt/rose \
 && /opt/rose/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[agent,weights,engine]" \
 && rm -rf /source
ENV PATH=/opt/rose/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1
ENTRYPOINT ["rose", "engine-host"]
