# Two commands do everything: `make demo` and `make test`. Each sets up what it needs; downloads and
# builds are cached outside the checkout (ROSE_CACHE, default ~/.cache/rose).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export ROSE_CACHE ?= $(HOME)/.cache/rose
# Where it is set, each of the hundreds of processes that tests start compiles all that it imports, and pytest
# rewrites the assertions of every file anew.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3.11
UV := $(ROSE_CACHE)/uv/bin/uv
VENV := .venv
BIN := $(VENV)/bin
# What a killed run of tests or of a benchmark leaves behind is ended; a run over its limit, too.
CONTAINED := $(BIN)/python -m rose_dev.contained
RUN := $(CONTAINED) $(BIN)
ARGS ?=
# Two cores and several lanes: what a lane takes of the cores, and not how long, says what it costs.
TIMED := TIMEFORMAT='[lane] %1lR, of the cores %0U s and %0S s in the kernel'; time
# mypy's own cache serves every checkout, which it knows by their files. Two at once would write into it together.
MYPY := $(if $(shell command -v flock),flock $(ROSE_CACHE)/mypy.lock) $(BIN)/mypy --cache-dir $(ROSE_CACHE)/mypy
# In the order of collection: xdist would run files with many tests first, whatever they share.
LANE := -v -n 1 --dist loadfile --no-loadscope-reorder

.PHONY: atlas help venv engine vllm cluster keda sandbox tap demo test test-engines test-node test-api test-sandboxes test-gpu-node test-cgroup2 test-keda test-long test-vllm unit check format generate docs crds clean \
	bench-guard bench-batches bench-sandboxes bench-deaths bench-faults bench-dormancy bench-engines bench-startup bench-gap bench-tap bench-weights bench-router \
	bench-operator bench-bound bench-simulate bench-rewards bench-rollouts bench-rounds torture fire fuzz attack bench-flood release release-parts gpu-check gpu-pack trl skyrl areal reasoning-gym sandbox-adapters sandbox-harbor sandbox-openenv test-clients

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(UV):
	@echo "[set-up] installing uv into $(ROSE_CACHE)/uv"
	@$(PYTHON) -m venv $(ROSE_CACHE)/uv
	@$(ROSE_CACHE)/uv/bin/pip install -q -c constraints.txt uv

$(VENV)/.stamp: pyproject.toml constraints.txt | $(UV)
	@echo "[set-up] Python environment in $(VENV) (the first time downloads PyTorch)"
	@test -x $(BIN)/python || $(UV) venv -q -p $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

venv: $(VENV)/.stamp  ## the Python environment everything else runs in

engine: venv  ## the environment of the real SGLang engine, and Mooncake's (cached)
	@$(BIN)/python -m rose_dev.engine_environment
	@$(BIN)/python -m rose_dev.mooncake_environment || echo "[set-up] tests of keys between nodes are skipped"

vllm: venv  ## the environment of a real vLLM on CPU (cached; about 6 GB)
	@$(BIN)/python -m rose_dev.vllm_environment

cluster: venv  ## the parts of the one-node Kubernetes (cached; about 14 minutes the first time)
	@$(BIN)/rose dev build

keda: cluster  ## KEDA itself, for make test-keda (cached; 2 GB of Go modules the first time, which took an hour on a busy machine)
	@$(BIN)/python -m rose_dev.keda

sandbox: venv  ## runc, CRIU, gVisor, an image and the inspector's program for real sandboxes (cached; root, Debian)
	@$(BIN)/python -m rose_dev.sandbox_parts

tap: venv  ## the program by which the tap counts tokens in the kernel (cached compiler; Debian)
	@$(BIN)/python -m rose_dev.tap_parts

# Set-up side by side: one compiles while the other downloads.
demo: venv  ## the main job on real parts; ARGS=--help lists the knobs
	@$(MAKE) --no-print-directory -j 3 engine cluster sandbox
	@$(MAKE) --no-print-directory tap  # its compiler is the sandboxes'
	@$(BIN)/rose demo $(ARGS)

# Whoever tests everything tests on a machine of unknown load: what fails is tried once more, and the names of what was stand
# at the end. Generated examples are the same every time, so that a change is judged by what it does. While you work
# (`make unit`) nothing is tried twice, and examples are new each time. Each lane ends with its slowest tests.
LANES := test test-engines test-node test-api test-sandboxes
# As one word with its option: behind a space pytest takes a file that is there for the folder of the tests.
RETRIED := out/retried
$(LANES): AGAIN := --reruns 1 --only-rerun ".*" --rerun-show-tracebacks --write-reruns=$(RETRIED) --hypothesis-profile=ci --durations 15 --durations-min 5
test: venv  ## everything that CI runs
	$(MAKE) --no-print-directory -j 3 engine cluster sandbox
	$(MAKE) --no-print-directory -j 2 tap release-parts
	@rm -f $(RETRIED)
	status=0; $(CONTAINED) --limit 3600 $(MAKE) --no-print-directory -j 3 -k AGAIN='$(AGAIN)' \
		test-node unit check test-api test-sandboxes test-engines || status=$$?; \
	if [ -s $(RETRIED) ]; then echo "[lane] tried twice:"; cat $(RETRIED); else echo "[lane] nothing was tried twice"; fi; exit $$status
	$(MAKE) --no-print-directory fuzz ARGS="--seconds 3"  # last: it installs into the environment that the lanes run in

# A queue of lanes, three at once: whoever is done takes the next, so no core waits for a chain that is longer than the other.
# What waits most of its time (nodes, API servers, sandboxes) comes before the engines, so that what computes is beside it,
# and the last lane has work for all cores. Pods come first on the cores, and so are ready within their limits (decision
# 0868). A lane that fails keeps no other from its end.

# Two workers, whose engines are forked from one process that has imported SGLang: one alone uses about one core.
# Who is done first may wait for the other (watchdog_end).
test-engines:
	$(TIMED) $(BIN)/pytest $(LANE) -n 2 -o watchdog_end=600 -m "engine and not cluster and not vllm and not long" $(AGAIN) $(ARGS)

# Two workers, each with a cluster of its own: a lane that waits for pods in real time takes half as long.
test-node:
	$(TIMED) $(BIN)/pytest $(LANE) -n 2 -o watchdog_end=900 -m "cluster and node and not long" $(AGAIN) $(ARGS)

# Two workers, each with an API server of its own: one alone left two thirds of the cores idle. Who is done first
# may wait for the other (watchdog_end).
test-api:
	$(TIMED) $(BIN)/pytest $(LANE) -n 2 -o watchdog_end=600 -m "cluster and not node and not long" $(AGAIN) $(ARGS)

# Two workers, since sandboxes are waited for most of the time. Who is done first may wait for the other (watchdog_end).
test-sandboxes:
	$(TIMED) $(CONTAINED) --limit 1200 $(BIN)/pytest $(LANE) -n 2 -o watchdog_end=600 -m sandbox tests/sandbox $(AGAIN) $(ARGS)

# Half an hour more than a bare machine has, and what depends on how fast engines are under load.
test-long: engine cluster  ## what make test leaves out: failures and modes of the GPU node, speeds of real engines
	$(CONTAINED) $(BIN)/pytest -v -n 0 -m long $(ARGS)

# Not part of `make test`, for its environment of 6 GB.
test-vllm: engine vllm  ## real vLLM on CPU as a rollout engine, alone and beside SGLang
	$(CONTAINED) --limit 3000 $(BIN)/pytest -v -n 0 -m vllm tests/engines tests/host tests/router tests/tap $(ARGS)

# What nodes of today have and a machine for development may not. Where there is no KVM it takes eight quiet minutes.
test-cgroup2: venv sandbox  ## process groups, their limits and sandboxes on a kernel with cgroup v2 alone, emulated (cached; root, Debian)
	$(CONTAINED) --limit 4800 $(BIN)/python -m rose_dev.emulated --copy $(ROSE_CACHE)/sandbox/images \
		env ROSE_TEST_DEADLINE=600 $(BIN)/pytest -v -n 0 -p no:cacheprovider \
		-o timeout=0 tests/host/test_groups.py tests/host/test_limits.py tests/host/test_cgroup_ids.py tests/sandbox/test_runc.py tests/sandbox/test_inspector.py $(ARGS)

test-keda: keda  ## rewards of the chart, scaled from zero by KEDA itself
	$(CONTAINED) --limit 1200 $(BIN)/pytest -v -s -n 0 tests/rewards/test_keda.py $(ARGS)

test-gpu-node: cluster engine  ## the chart on a node with eight GPUs that are not there (make test runs what is not marked long)
	$(CONTAINED) $(BIN)/pytest -v -n 0 tests/gpu_node $(ARGS)

# One worker more than CI has cores: many tests wait for processes. Two left half of both cores idle, and four tried two tests more again.
unit: venv  ## what needs neither engine nor cluster
	$(TIMED) $(CONTAINED) --limit 2700 $(BIN)/pytest -n 3 --dist loadfile -m "not engine and not cluster and not sandbox and not vllm and not long" $(AGAIN) $(ARGS)

check: venv  ## lint, types, layers, spelling, drift of generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MYPY) .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m rose_dev.generate --check

format: venv  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: venv  ## crds/ and docs/api.md, metrics.md, scenario.md from the code
	$(BIN)/python -m rose_dev.generate

docs: venv  ## the documentation as a site in out/site (ARGS=serve shows it while you write)
	@VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install -q -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict --quiet)

crds: generate  ## the kinds as CustomResourceDefinitions

bench-guard: engine  ## serving beside rollouts: figures of the guard; ARGS="--serving vllm" after `make vllm`
	$(RUN)/python -m bench.guard $(ARGS)

bench-batches: engine  ## serving beside the lines of a batch on a frozen lease, two real SGLang; the lent one is killed
	$(RUN)/python -m bench.batches $(ARGS)

bench-sandboxes: sandbox engine  ## tasks killed after every turn: chat only, files, restart, full, ours (root); ARGS="--tasks 8"
	$(RUN)/python -m bench.sandboxes $(ARGS)
	$(RUN)/python -m bench.sandboxes.waits
	$(RUN)/python -m bench.sandboxes.recall
	$(RUN)/python -m bench.sandboxes.reuse

bench-deaths: engine  ## who stops the rollouts when guard, engine host or both die
	$(RUN)/python -m bench.deaths $(ARGS)

bench-faults: venv  ## every fault of guard, host, tap and rollout engine as a matrix (root)
	$(BIN)/python -m bench.faults $(ARGS)

bench-dormancy: engine  ## what an engine gives back at rung 4, and how fast it is back
	$(RUN)/python -m bench.dormancy $(ARGS)

bench-engines: engine  ## stop, restart and commit inside a real engine; ARGS=--vllm after `make vllm`
	$(RUN)/python -m bench.engines $(ARGS)

bench-startup: engine  ## where an engine's start-up time goes, part by part
	$(RUN)/python -m bench.startup $(ARGS)

bench-gap: engine  ## what a stream loses at a version switch, ours beside SGLang's own ways
	$(RUN)/python -m bench.gap $(ARGS)

bench-tap: tap  ## both readers of the wire tap: what they cost, and their agreement with a client (root)
	$(RUN)/python -m bench.tap $(ARGS)

bench-weights: venv  ## wire bytes and speed of the weight plane, peers side by side
	$(RUN)/python -m bench.weights $(ARGS)

bench-router: venv  ## turns per second and added latency of the router, sglang-router beside it (cached)
	@test -x $(ROSE_CACHE)/sglang-router/bin/python || $(UV) venv -q -p $(PYTHON) $(ROSE_CACHE)/sglang-router
	@VIRTUAL_ENV=$(ROSE_CACHE)/sglang-router $(UV) pip install -q sglang-router==0.3.2
	$(RUN)/python -m bench.router --sglang-router-python $(ROSE_CACHE)/sglang-router/bin/python $(ARGS)

bench-operator: cluster  ## the operator at fleet scale: time to plan, grants, writes, failover
	$(RUN)/python -m bench.operator $(ARGS)

bench-rewards: venv  ## rewards and batches under kill -9, how busy workers are, what rewards add to a step
	$(RUN)/python -m bench.rewards $(ARGS)

bench-rollouts: venv  ## policies of placement on one step of work
	$(RUN)/python -m bench.rollouts $(ARGS)

atlas: engine  ## which architectures of SGLang a commit in place leaves exact: docs/atlas.md (cached)
	$(RUN)/python -m bench.atlas $(ARGS)

bench-rounds: engine  ## the example's reward curve with tail batching beside the one without, on a real SGLang
	$(RUN)/python -m bench.rounds $(ARGS)

bench-bound: venv  ## what lending adds to TTFT under an adversary, against its bound (virtual time)
	$(RUN)/python -m bench.bound $(ARGS)

bench-simulate: venv  ## figures of the simulator: studies, speed, determinism
	$(RUN)/python -m bench.simulate $(ARGS)

gpu-check: venv  ## what a GPU says about the promises; ARGS="--run 1", --only a,b; --rehearse without one
	$(RUN)/python -m bench.gpu $(ARGS)

gpu-pack: venv  ## the check with all its wheels, in pieces, for a GPU machine without a network
	$(BIN)/python -m bench.gpu.pack $(ARGS)

fire: venv  ## 10,000 turns while engines die, pause, leave and change weights; ARGS="--real 2" adds SGLang
	$(RUN)/python -m bench.fire $(ARGS)

trl: venv  ## TRL itself trains through a router and a store, on this CPU; an environment of its own (cached)
	@test -x $(ROSE_CACHE)/trl/bin/python || $(UV) venv -q -p $(PYTHON) $(ROSE_CACHE)/trl
	@VIRTUAL_ENV=$(ROSE_CACHE)/trl $(UV) pip install -q -c constraints.txt -e '.[dev]' 'trl>=1.16,<2' requests
	TRL_EXPERIMENTAL_SILENCE=1 $(ROSE_CACHE)/trl/bin/pytest -v tests/router/test_trl_training.py $(ARGS)

# uv finds a Python on the path or downloads one; pyenv's lie on neither way.
PYTHON_312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) 3.12)
# Half of it is command-line agents from npm; without npm those are skipped by name. So is NeMo Gym without Python 3.12.
CLIENTS := $(ROSE_CACHE)/clients
HARNESSES := $(ROSE_CACHE)/harnesses
HARBOR := $(ROSE_CACHE)/harbor
$(CLIENTS)/.stamp: $(wildcard tests/clients/requirements*.txt) tests/clients/package.json | $(UV)
	@echo "[set-up] agents' SDKs and command-line agents in $(CLIENTS) (2.9 GB)"
	@test -x $(CLIENTS)/bin/python || $(UV) venv -q -p $(PYTHON) $(CLIENTS)
	@VIRTUAL_ENV=$(CLIENTS) $(UV) pip install -q -r tests/clients/requirements.txt
	@test -x $(CLIENTS)/openai2/bin/python || $(UV) venv -q -p $(PYTHON) $(CLIENTS)/openai2
	@VIRTUAL_ENV=$(CLIENTS)/openai2 $(UV) pip install -q -r tests/clients/requirements-openai2.txt
	@test -x $(CLIENTS)/environments/bin/python || $(UV) venv -q --seed -p $(PYTHON) $(CLIENTS)/environments
	@VIRTUAL_ENV=$(CLIENTS)/environments $(UV) pip install -q uv -r tests/clients/requirements-environments.txt
	@# What its harness asks uv for when it runs, where it has no network.
	@$(CLIENTS)/environments/bin/python -m pip download -q -d $(CLIENTS)/environments/wheels \
		openai mcp==2.0.0 httpx httpx2 tenacity certifi
	@test -x $(CLIENTS)/openenv/bin/python || $(UV) venv -q -p $(PYTHON) $(CLIENTS)/openenv
	@VIRTUAL_ENV=$(CLIENTS)/openenv $(UV) pip install -q -r tests/clients/requirements-openenv.txt \
		--overrides tests/clients/requirements-openenv-overrides.txt
	@mkdir -p $(CLIENTS)/npm && cp tests/clients/package.json $(CLIENTS)/npm
	@if test -x $(CLIENTS)/nemo-gym/bin/python || $(UV) venv -q -p $(PYTHON_312) $(CLIENTS)/nemo-gym; \
	then VIRTUAL_ENV=$(CLIENTS)/nemo-gym $(UV) pip install -q -r tests/clients/requirements-nemo-gym.txt; \
	else echo "SKIPPED NeMo Gym: there is no Python 3.12 here; name one: make test-clients PYTHON_312=/path/to/python"; fi
	@if command -v npm >/dev/null; then npm install --prefix $(CLIENTS)/npm --no-audit --no-fund --no-package-lock --loglevel error; \
	else echo "SKIPPED command-line agents: there is no npm here"; fi
	@touch $@

test-clients: venv $(CLIENTS)/.stamp  ## SDKs and command-line agents, unmodified, play tasks while an engine dies; an environment of its own (cached)
	$(RUN)/pytest -v -n 0 tests/clients $(ARGS)

skyrl: venv  ## SkyRL's own client drives a router; the package alone, without what its trainer needs
	@test -d $(ROSE_CACHE)/skyrl || $(UV) pip install -q --no-deps --target $(ROSE_CACHE)/skyrl skyrl==0.3.0
	PYTHONPATH=$(ROSE_CACHE)/skyrl $(BIN)/pytest -v -n 0 tests/router/test_skyrl_client.py $(ARGS)

areal: venv  ## AReaL's own engine, executor and workflows drive a router; an environment of its own (cached)
	@test -x $(ROSE_CACHE)/areal/bin/python || $(UV) venv -q -p $(PYTHON) $(ROSE_CACHE)/areal
	@VIRTUAL_ENV=$(ROSE_CACHE)/areal $(UV) pip install -q -c constraints.txt -e '.[dev]' aiofiles colorlog einops \
		hydra-core==1.4.0.dev1 lark omegaconf==2.4.0.dev2 openai orjson pillow pybase64 ray requests tenacity
	@VIRTUAL_ENV=$(ROSE_CACHE)/areal $(UV) pip install -q --no-deps areal==1.0.4 torchdata
	$(ROSE_CACHE)/areal/bin/pytest -v -n 0 tests/router/test_areal_client.py $(ARGS)

reasoning-gym: venv  ## reasoning-gym's questions over a lease, its verifier as a reward function; a folder of its own (cached)
	@test -d $(ROSE_CACHE)/reasoning-gym || $(UV) pip install -q -p $(BIN)/python --target $(ROSE_CACHE)/reasoning-gym reasoning-gym==0.1.25
	@cp examples/reasoning_gym/checks.py $(ROSE_CACHE)/reasoning-gym/
	$(BIN)/pytest -v -n 0 tests/examples/test_reasoning_gym.py $(ARGS)

# Their own packages come first: a harness may need an older one of what the tests have.
sandbox-adapters: venv sandbox  ## harnesses' own modules (SWE-ReX, verifiers) run on real sandboxes (cached; root, Debian)
	@test -x $(HARNESSES)/bin/python || $(UV) venv -q -p $(PYTHON) $(HARNESSES)
	@VIRTUAL_ENV=$(HARNESSES) $(UV) pip install -q swe-rex==1.4.0 verifiers==0.4.0 pytest
	@$(HARNESSES)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" >$(HARNESSES)/purelib
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
		>$$(cat $(HARNESSES)/purelib)/beside.pth
	$(HARNESSES)/bin/python -m pytest -v -n 0 tests/sandbox/test_adapters.py $(ARGS)

HARBOR_PYTHON ?= $(PYTHON_312)
sandbox-harbor: venv sandbox  ## Harbor's own program and NeMo Gym's own sandbox API on real sandboxes (cached; root, Debian, Python 3.12)
	@test -x $(HARBOR)/bin/python || $(UV) venv -q -p $(HARBOR_PYTHON) $(HARBOR) || { \
		echo "Harbor needs Python 3.12: install it, or name one: make sandbox-harbor HARBOR_PYTHON=/path/to/python"; exit 1; }
	@VIRTUAL_ENV=$(HARBOR) $(UV) pip install -q harbor==0.25.0 -e '.[sandbox]'
	@VIRTUAL_ENV=$(HARBOR) $(UV) pip install -q --no-deps nemo-gym==0.4.0  # its sandbox API needs none of the 100 others
	$(RUN)/pytest -v -n 0 tests/sandbox/test_harbor.py tests/sandbox/test_nemo_gym.py $(ARGS)

sandbox-openenv: venv sandbox  ## OpenEnv's own client and server play an episode while its sandbox's host is killed (cached; root, Debian)
	@$(BIN)/python -m rose_dev.openenv_parts
	$(RUN)/pytest -v -n 0 tests/sandbox/test_openenv.py $(ARGS)

# In an extra of its own: only Linux on x86 has wheels of the fuzzer.
fuzz: venv  ## bytes of hostile serving pods, made by a coverage-guided fuzzer; ARGS="--seconds 600"
	@if VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install -q -c constraints.txt -e '.[fuzz]'; then \
		$(RUN)/python -m tests.fuzz.run $(ARGS); \
	elif [ "$$(uname -sm)" = "Linux x86_64" ] && $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
		echo "fuzz: atheris has wheels for this machine and was not installed; what was fuzzed is nothing"; exit 1; \
	else echo "SKIPPED fuzz: atheris cannot be had here; make unit tries its corpus"; fi

# What each party could try (docs/threat-model.md); `make test` runs all of them too.
ATTACKS := tests/attack tests/faults/test_listeners.py tests/faults/test_threats.py tests/faults/test_retention.py \
	tests/agent/test_gpu_owners.py tests/agent/test_readers.py tests/devices/test_ownership.py \
	tests/lending/test_tenancy.py tests/operator/test_tenancy.py tests/operator/test_enrolment.py \
	tests/operator/test_routers_wanted.py \
	tests/chart/test_rights.py tests/host/test_lease_arguments.py tests/host/test_proxy.py \
	tests/weights/test_tenants.py tests/weights/test_access.py tests/router/test_callers.py \
	tests/router/test_flood.py tests/router/test_memory.py tests/router/test_model_tokenizer.py \
	tests/router/test_templates.py tests/router/test_behind_the_host.py tests/router/test_listener.py tests/router/test_slow_readers.py tests/router/test_slow_senders.py \
	tests/fuzz

attack: cluster  ## what tenants, teams, pods and serving pods could try; ARGS="-m 'not cluster'" without a node
	$(CONTAINED) $(BIN)/pytest -v -n 0 $(ATTACKS) $(ARGS)

bench-flood: venv  ## a router under floods, and what its other callers notice
	$(RUN)/python -m bench.flood $(ARGS)

release-parts: venv  ## crane and cosign, which a release and its test need (cached; minutes the first time)
	@$(BIN)/python -m rose_dev.release --parts

release: venv  ## chart and images into a registry, signed; ARGS="--registry HOST/PATH --key cosign.key --build"
	@$(BIN)/python -m rose_dev.release $(ARGS)

torture: venv  ## kill every process of the weight plane at every step; prints the matrix
	$(RUN)/python -m bench.torture $(ARGS)

clean:  ## what make made in the checkout (caches outside stay)
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
