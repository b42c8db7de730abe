"""The file of ``rose engine-host --dedicated``: the one engine that the host orders by itself.

Next step: ``dedicated`` orders it and attaches it to the lease's router.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Annotated

import pydantic
import pydantic.alias_generators
import yaml

from rose_agent.errors import BadInput
from rose_core.api.arguments import ROUTED_EXPERTS
from rose_core.identity import FROZEN_RUN, GpuUuid, SlotKey, SlotUid, run_name
from rose_core.wire.host import EnsureEngine
from rose_core.wire.sync import EngineSpec, WeightSource
from rose_wire import flags, problems

_HOW = "docs/engine-host.md shows one that works"


def _target(text: str) -> str:
    """An address to dial.

    Raises:
        ValueError: it is none.
    """
    try:
        return flags.target(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error


class DedicatedFile(pydantic.BaseModel):
    """The file of ``--dedicated``.

    Attributes:
        name: unique name of the engine at the router.
        cap: most turns in flight; ``maxRunning`` when 0.
        drafts: the router's drafts are verified, as with ``drafts: Router`` of a lease.
        weight_endpoint: ``host:port`` of the weight store or relay; left out together with ``run``
            for an engine that keeps its checkpoint, at the router of a lease of frozen weights.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid", alias_generator=pydantic.alias_generators.to_camel, populate_by_name=True
    )

    name: str = pydantic.Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    engine_class: str
    model: str
    run: Annotated[str, pydantic.AfterValidator(run_name)] = FROZEN_RUN
    weight_endpoint: Annotated[str, pydantic.AfterValidator(_target)] = ""
    arguments: dict[str, str] = {}
    context_tokens: int = pydantic.Field(default=4096, gt=0)
    kv_tokens: int = pydantic.Field(default=16384, gt=0)
    max_running: int = pydantic.Field(default=8, gt=0)
    max_staleness: int = pydantic.Field(default=1, ge=0)
    cap: int = pydantic.Field(default=0, ge=0)
    gpu_uuids: tuple[GpuUuid, ...] = ()
    drafts: bool = False

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> DedicatedFile:
        if {"run", "weight_endpoint"} & self.model_fields_set in ({"run"}, {"weight_endpoint"}):
            message = "run and weightEndpoint go together; leave both out for frozen weights"
            raise ValueError(message)
        return self

    @pydantic.model_validator(mode="after")
    def _check_drafts(self) -> DedicatedFile:
        if self.drafts and ROUTED_EXPERTS in self.arguments:
            message = (
                f"drafts cannot be combined with the engine argument {ROUTED_EXPERTS}; leave one "
                "of the two out"
            )
            raise ValueError(message)
        return self

    @classmethod
    def load(cls, path: Path) -> DedicatedFile:
        """Read the file.

        Raises:
            BadInput: it is missing or wrong; says where.
        """
        try:
            return cls.model_validate(yaml.safe_load(path.read_text()))
        except problems.FILE_ERRORS as error:
            raise BadInput(f"--dedicated {path}: {problems.of_file(error)}; {_HOW}") from error

    def order(self) -> EnsureEngine:
        """The order to the host, with a fresh token for the data route."""
        return EnsureEngine(
            slot=SlotKey(SlotUid(self.name), 1),
            slot_name=self.name,
            engine=EngineSpec(
                engine_class=self.engine_class,
                model=self.model,
                arguments=self.arguments,
                context_tokens=self.context_tokens,
                kv_tokens=self.kv_tokens,
                max_running=self.max_running,
                drafts=self.drafts,
            ),
            weights=WeightSource(self.weight_endpoint, self.run, self.max_staleness),
            gpu_uuids=self.gpu_uuids,
            token=secrets.token_urlsafe(24),
        )
