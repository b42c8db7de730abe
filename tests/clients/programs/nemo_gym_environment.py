"""NeMo Gym plays its workplace assistant: its servers, agent, tools and verifier, its own commands.

Each of its servers wants an environment of its own, which it makes by uv from the network; here
each finds this one in that place. Its model server asks for token ids, as for training.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nemo_gym

ROOT = Path(nemo_gym.__file__).parents[1]
SERVERS = (
    "resources_servers/workplace_assistant",
    "responses_api_agents/simple_agent",
    "responses_api_models/vllm_model",
)
MODEL = """
policy_base_url: {url}/v1
policy_api_key: {key}
policy_model_name: policy
ray_head_node_address: 127.0.0.1:{port}
"""
RAY_PORT = 6379
SECONDS = 200.0

for server in SERVERS:
    beside = Path("environments", server)
    beside.mkdir(parents=True)
    (beside / ".venv").symlink_to(sys.prefix)
at, key = os.environ["ROSE_URL"], os.environ["ROSE_KEY"]
Path("env.yaml").write_text(MODEL.format(url=at, key=key, port=RAY_PORT))
configs = [
    ROOT / SERVERS[0] / "configs/workplace_assistant.yaml",
    ROOT / SERVERS[2] / "configs/vllm_model_for_training.yaml",
]
common = [
    f"+config_paths=[{','.join(str(one) for one in configs)}]",
    "+skip_venv_if_present=true",
    f"+uv_venv_dir={Path('environments').resolve()}",
]
ray = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
environment = os.environ | {
    "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
}
# Ray as it starts by itself has a dozen processes of its dashboard besides, on any address.
head = ["ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={RAY_PORT}"]
few = ["--include-dashboard=false", "--num-cpus=2", f"--temp-dir={ray}"]
subprocess.run([*head, *few], env=environment, check=True)
with Path("servers.log").open("wb") as log:
    servers = subprocess.Popen(
        ["ng_run", *common], env=environment, stdout=log, stderr=log, start_new_session=True
    )
try:
    end = time.monotonic() + SECONDS
    while "servers ready!" not in Path("servers.log").read_text(errors="replace"):
        if time.monotonic() > end or servers.poll() is not None:
            sys.exit(f"servers did not start:\n{Path('servers.log').read_text()[-4000:]}")
        time.sleep(0.2)
    rows = Path("tasks.jsonl")
    tasks = (ROOT / SERVERS[0] / "data/example.jsonl").read_text().splitlines()[:2]
    rows.write_text("\n".join(tasks) + "\n")
    subprocess.run(
        [
            "ng_collect_rollouts",
            "+agent_name=workplace_assistant_simple_agent",
            f"+input_jsonl_fpath={rows}",
            "+output_jsonl_fpath=rollouts.jsonl",
        ],
        env=environment,
        check=True,
    )
finally:
    servers.send_signal(signal.SIGINT)
    try:
        servers.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(servers.pid, signal.SIGKILL)
    shutil.rmtree(ray, ignore_errors=True)
found = [json.loads(line) for line in Path("rollouts.jsonl").read_text().splitlines()]
print("rewards", *sorted(one["reward"] for one in found))
