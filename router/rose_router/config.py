"""Settings of a router, from flags; see ``main``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.rollouts.capacity.router_size import MOST_BODY
from rose_core.rollouts.placement.selection import Policy
from rose_core.rollouts.placement.watch import LegPatience
from rose_core.rollouts.terms import LeaseTerms, Policies, policies_of
from rose_core.rollouts.training.quorum import Quorum
from rose_router.callers import NamedCallers
from rose_router.listener import ConnectionLimits
from rose_router.replicas.peers import Link, Resolve
from rose_wire.service_accounts import ServiceAccounts


@dataclass(frozen=True)
class Enrolment:
    """Where a router that the operator runs asks who it is.

    Attributes:
        address: of the operator.
        token_file: of the pod's token, for an audience that names the lease.
        folder: receives its pair and the authorities; a link, turned at each renewal.
        peer_name: what certificates of its other replicas must name.
    """

    address: str
    token_file: Path
    folder: Path
    peer_name: str = ""


@dataclass(frozen=True)
class Settings:
    """Everything that can be set.

    Attributes:
        lease: ``namespace/name``; engines of another lease are refused.
        model: name shown by ``/v1/models``.
        tokenizer: folder or file of a ``tokenizer.json``; without it only token ids are taken.
        attach_token: bearer token of engine owners.
        turn_token, turn_token_file: bearer tokens of callers; without both none is asked.
        accounts: whose service accounts may call, beside those tokens.
        callers: whom the lease names; None = it names none.
        authenticate: nobody is heard without a token, also while there is none.
        http_tls_dir: certificate and key of the lease's URL; without it the port is plain text.
        enrolment: who says what this router's token, certificate and callers' keys are.
        limits: what callers may take.
        tls_dir: certificate of the port for engine owners; None = plain text.
        tls_client_ca: authority of the certificates that they then must have.
        operator_ca: authority of the operator's certificate, which is as good there.
        max_body_bytes: largest request.
        memory_bytes: what the process may have; 0 = what its cgroup says.
        context_tokens: of prompt and answer together, as the lease says; 0 = as engines say.
        interval: tokens per event of engines' streams for callers who do not stream: fewer events
            cost engine and router less; a killed engine takes at most so many unseen tokens along.
        max_losses: engines a turn may lose before it ends with a typed abort.
        forget_seconds: how long an engine whose owner hung up is kept with its gate closed.
        lame_duck_seconds: after SIGTERM it goes on, as not ready, until for so long nobody has
            asked for anything; 0 = nobody is sent here by a load balancer.
        drain_seconds: how long live turns may go on after that.
        replay_seconds: how long a finished turn answers its duplicate id.
        reported_gpus: GPUs that ``/server_info`` names; trainers size their concurrency by it.
        routed_experts: the lease's engines say which experts tokens went through; trainers ask.
        ingest_url, ingest_token: ``rose ingest``, for trainers that push checkpoints.
        batches_url, batches_token: ``rose batches``, for files and batches; empty = there is none.
        traces: where an OTLP receiver listens; empty = no span is made.
        quorum: who must have new weights before such a trainer is told so.
        sandbox_hosts: URLs of hosts of agents' sandboxes, by job; they are told of turns.
        sandbox_token: bearer token that these ask for, or what reads it at each call: a Secret may
            come after its router.
        dedicated: names of the dedicated engines that may attach; empty = any.
        replica: this replica's name, where there are several.
        replicas: finds all of them.
        link: how they prove themselves to each other; without it they speak plain text.
        terms: what the lease says of placement; ``selection`` has the policies made of them.
        tuning: the platform's knobs of placement.
    """

    lease: str
    model: str = "policy"
    tokenizer: Path | None = None
    attach_token: str = ""
    turn_token: str = ""
    turn_token_file: Path | None = None
    accounts: ServiceAccounts | None = None
    callers: NamedCallers | None = None
    authenticate: bool = False
    http_tls_dir: Path | None = None
    enrolment: Enrolment | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls_dir: Path | None = None
    tls_client_ca: Path | None = None
    operator_ca: Path | None = None
    max_body_bytes: int = MOST_BODY
    memory_bytes: int = 0
    context_tokens: int = 0
    interval: int = 4
    max_losses: int = 10
    forget_seconds: float = 60.0
    lame_duck_seconds: float = 0.0
    drain_seconds: float = 20.0
    replay_seconds: float = 120.0
    reported_gpus: int = 1
    routed_experts: bool = False
    ingest_url: str = ""
    ingest_token: str = ""
    batches_url: str = ""
    batches_token: str = ""
    traces: str = ""
    quorum: Quorum = field(default_factory=Quorum)
    sandbox_hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sandbox_token: str | Callable[[], str] = ""
    dedicated: frozenset[str] = frozenset()
    replica: str = ""
    replicas: Resolve | None = None
    link: Link | None = None
    terms: LeaseTerms = field(default_factory=LeaseTerms)
    tuning: Policy = field(default_factory=Policy)
    patience: LegPatience = field(default_factory=LegPatience)
    queue: QueueLimits = field(default_factory=QueueLimits)

    @property
    def policies(self) -> Policies:
        """What this router decides with."""
        return policies_of(self.terms, self.tuning, self.patience)
