"""What trainers' own clients do, call by call, against whatever answers at a URL.

Each replay has the trainer's order, bodies and checks. ``test_trainers`` runs them on fake engines,
whose every token can be checked, ``test_real_trainers`` on SGLang, a store and ``rose ingest``.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.router.pushing import json_of, ok

# What the calls were read from; look there again when these are old.
READ_FROM = {
    "slime": "THUDM/slime 624b824a8, 2026-08-21",
    "AReaL": "inclusionAI/AReaL 4aef98d8d, 2026-05-21",
    "prime-rl": "PrimeIntellect-ai/prime-rl 559b44772, 2026-08-21",
}


@dataclass
class Client:
    """A trainer's HTTP client.

    Attributes:
        sampling: parameters that the trainer's configuration asks for beside its defaults.
    """

    http: aiohttp.ClientSession
    url: str
    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)

    def post(self, path: str, body: object, **kwargs: Any) -> Any:  # noqa: ANN401  # aiohttp's
        return self.http.post(self.url + path, json=body, **kwargs)

    def get(self, path: str) -> Any:  # noqa: ANN401  # aiohttp's
        return self.http.get(self.url + path)


class AReaL(Client):
    """AREAL_LLM_SERVER_ADDRS is the router; weight update mode ``disk``."""

    async def generates(self, most: int, paused: asyncio.Event) -> tuple[list[int], list[str]]:
        """areal/engine/sglang_remote.py: loops until a real stop, keeping partial tokens.

        Args:
            most: output tokens.
            paused: not set while the client holds its requests back.

        Returns:
            Tokens, and the version of each.
        """
        sample: dict[str, Any] = {
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": most,
            "temperature": 1.0,
            "stop_token_ids": [],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "frequency_penalty": 0.0,
        } | self.sampling
        body: dict[str, Any] = {
            "input_ids": list(self.prompt),
            "image_data": None,
            "sampling_params": sample,
            "return_logprob": True,
            "stream": False,
        }
        out: list[int] = []
        versions: list[str] = []
        stop = None
        while stop not in {"stop", "tool_calls", "length"} and len(out) < most:
            await paused.wait()
            result = await json_of(self.post("/generate", body))
            meta = result["meta_info"]
            stop = meta["finish_reason"]["type"]
            new = [x[1] for x in meta["output_token_logprobs"]]
            out += new
            for span in meta["weight_versions"]:
                versions += [span["version"]] * (span["end"] - span["start"])
            body["input_ids"] += new
            sample["max_new_tokens"] -= len(new)
        return out, versions

    async def updates(self, folder: Path, paused: asyncio.Event) -> None:
        """Pause, load the checkpoint that lies in the folder, continue; the folder is gone."""
        paused.clear()
        await ok(self.post("/pause_generation", {}))
        body = {"model_path": str(folder), "abort_all_requests": True}
        await json_of(self.post("/update_weights_from_disk", body))
        await asyncio.to_thread(shutil.rmtree, folder)
        await ok(self.post("/continue_generation", {}))
        paused.set()


class PrimeRl(Client):
    """base_url = admin_base_url = the router; filesystem broadcast."""

    async def starts(self, model: str) -> None:
        """src/prime_rl/utils/client.py: waits for the server and looks for its model."""
        await ok(self.get("/health"))
        models = (await json_of(self.get("/v1/models")))["data"]
        assert any(one["id"] == model for one in models)

    async def generates(self, model: str, most: int) -> Any:  # noqa: ANN401  # JSON
        """One turn of a trajectory."""
        sampling = {"max_tokens": most, "temperature": 1.0, "logprobs": 0}
        body = {
            "model": model,
            "token_ids": self.prompt,
            "cache_salt": "0",
            "sampling_params": sampling | self.sampling,
        }
        headers = {"X-Session-ID": "trajectory-1"}
        return await json_of(self.post("/inference/v1/generate", body, headers=headers))

    async def pauses(self) -> None:
        """In flight: what runs goes on."""
        keep = {"mode": "keep", "clear_cache": "false"}
        await ok(self.http.post(self.url + "/pause", params=keep))

    async def updates(self, folder: Path) -> None:
        """The folder holds a checkpoint that is whole."""
        await asyncio.to_thread((folder / "NCCL_READY").touch)  # whatever the transport
        await json_of(self.post("/update_weights", {"weight_dir": str(folder)}))

    async def resumes(self) -> None:
        """The update is over."""
        await ok(self.http.post(self.url + "/resume"))
