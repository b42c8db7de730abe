"""Flags of ``rose router`` and the settings they make."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose_core.rollouts.capacity.admission import QueueLimits
from rose_core.rollouts.placement.selection import Policy, PolicyName
from rose_core.rollouts.placement.views import BIASED
from rose_core.rollouts.placement.watch import LegPatience
from rose_core.rollouts.terms import LeaseTerms
from rose_core.rollouts.training.quorum import Quorum
from rose_core.wire.enrolment import named_for
from rose_router.config import Enrolment, Settings
from rose_router.listener import ConnectionLimits
from rose_router.replicas.peers import Link, by_dns
from rose_wire import tls
from rose_wire.flags import (
    VerbParser,
    add_log_level,
    amount,
    count,
    listener,
    share,
    target,
    token,
    web,
)
from rose_wire.service_accounts import ServiceAccounts
from rose_wire.token_file import TokenFile

LOG = logging.getLogger(__name__)

ACCOUNT_KEYS = "ROSE_ACCOUNT_KEYS"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_POLICIES = [name.value for name in PolicyName if name not in BIASED]
Add = Callable[..., object]
"""``add_argument`` of a group."""


def parser() -> argparse.ArgumentParser:
    """The flags, by what they are about."""
    defaults = Settings(lease="")
    flags = VerbParser(prog="rose router", description=__doc__)
    _about_the_lease(flags.add_argument_group("the lease and its model").add_argument, defaults)
    _about_callers(flags.add_argument_group("callers").add_argument, defaults)
    _about_owners(flags.add_argument_group("owners of engines").add_argument)
    _about_placement(flags.add_argument_group("which engine gets a turn").add_argument, defaults)
    _about_turns(flags.add_argument_group("patience and queue").add_argument, defaults)
    _about_pushes(flags.add_argument_group("weights pushed by a trainer").add_argument, defaults)
    _about_sandboxes(flags.add_argument_group("agents' sandboxes").add_argument)
    _about_traces(flags.add_argument_group("traces").add_argument)
    _about_replicas(flags.add_argument_group("several replicas").add_argument)
    tls.add_flag(flags)
    tls.add_clients_flag(flags)
    flags.add_argument(
        "--operator-ca",
        type=Path,
        help="authority of the operator's certificate, good beside that of --tls-client-ca",
    )
    add_log_level(flags)
    return flags


def _about_the_lease(add: Add, defaults: Settings) -> None:
    add("--lease", required=True, type=_lease,
        help="namespace/name; engines of another lease are refused")  # fmt: skip
    add("--model", default=defaults.model, help="name shown by /v1/models")
    add("--context-tokens", type=count, default=defaults.context_tokens,
        help="tokens of prompt and answer together; longer prompts are refused. 0 = as engines "
        "report")  # fmt: skip
    add("--tokenizer", type=Path, help="tokenizer.json or its folder; without: token ids only")
    add("--tokenizers", type=Path,
        help="folder with such a folder for each model; that of --model is taken")  # fmt: skip
    add("--routed-experts", action="store_true",
        help="the lease's engines run with enable-return-routed-experts: trainers ask /server_info "
        "before they use routing replay")  # fmt: skip
    add("--reported-gpus", type=count,
        help="GPUs that /server_info names: the dedicated size of the job; without it one for each "
        "engine of --dedicated, at least one")  # fmt: skip


def _about_callers(add: Add, defaults: Settings) -> None:
    limits = defaults.limits
    add("--http-address", type=listener, default="0.0.0.0:8000",
        help="the lease's URL: turns, /metrics, /healthz")  # fmt: skip
    add("--http-tls-dir", type=Path,
        help="folder with tls.crt and tls.key of the URL; without it plain text")  # fmt: skip
    add("--turn-token-file", type=Path,
        help="callers' bearer tokens, one per line; else $ROSE_TURN_TOKEN")  # fmt: skip
    add("--account-keys", type=Path, action="append", default=[],
        help="JSON Web Key Set of a cluster, whose service accounts of the lease's namespace may "
        "call with a token for the audience rose-lease/NAMESPACE/NAME (all) or rose-turns/... "
        "(turns); repeat; else $ROSE_ACCOUNT_KEYS holds one")  # fmt: skip
    add("--authenticate", action="store_true",
        help="ask every caller for a token, also while none is known; without it, where neither "
        "tokens nor keys are given, anybody may call")  # fmt: skip
    add("--max-body-bytes", type=count, default=defaults.max_body_bytes, help="largest request")
    add("--memory-bytes", type=count, default=defaults.memory_bytes,
        help="memory that the process may have; 0 = the limit of its cgroup. Requests beyond a "
        "half of it are refused")  # fmt: skip
    add("--batches", default="",
        help="URL of rose batches, for /v1/files and /v1/batches; {namespace} and {lease} in it "
        "stand for the names in --lease")  # fmt: skip
    add("--batches-token-file", type=Path,
        help="token that rose batches asks for; else the one that the operator gives with --enrol, "
        "as rose router token --for batches prints it")  # fmt: skip
    add("--max-connections", type=count, default=limits.connections, help="of callers, at a time")
    add("--head-seconds", type=amount, default=limits.head_seconds,
        help="a connection that sent no whole request head by then is closed")  # fmt: skip
    add("--body-seconds", type=amount, default=limits.body_seconds,
        help="a body that is not whole by then is answered with 408")  # fmt: skip
    add("--write-seconds", type=amount, default=limits.write_seconds,
        help="a caller that does not read its answer is taken for gone by then; a second more for "
        "every 64 KiB that it has not read by then")  # fmt: skip


def _about_owners(add: Add) -> None:
    add("--enrol", type=target,
        help="address of the operator, which gives this router the token of its lease, a "
        "certificate, and the keys of callers")  # fmt: skip
    add("--enrol-token-file", type=Path,
        help="the pod's token for the audience rose-router/NAMESPACE/NAME, the proof for "
        "--enrol")  # fmt: skip
    add("--identity-dir", type=Path, help="what --enrol gave is kept there")
    add("--attach-address", type=listener, default="0.0.0.0:7444",
        help="gRPC of engine owners, dialled from nodes")  # fmt: skip
    add("--token-file", type=Path, help="bearer token that engine owners must bring")
    add("--dedicated", action="append", default=[],
        help="a dedicated engine that may attach; repeat; without it any may")  # fmt: skip


def _about_placement(add: Add, defaults: Settings) -> None:
    add("--policy", choices=_POLICIES, default=PolicyName.JOINT.value,
        help="how an engine is chosen for a turn")  # fmt: skip
    add("--max-staleness", type=count, default=1, help="publishes an engine may lag behind")
    add("--max-age", type=count,
        help="publishes after which a trajectory is too old to train on; "
        "without it as many as --max-staleness")  # fmt: skip
    add("--borrow-quota", type=share, default=defaults.tuning.quota,
        help="how far the borrowed share of a stratum may be from that of all")  # fmt: skip
    add("--tail-reserve", type=share, default=defaults.tuning.reserve,
        help="share of dedicated places kept for the longest trajectories")  # fmt: skip
    add("--lent-weight", type=amount, default=defaults.tuning.lent_weight,
        help="seconds of cost per second for which a lent GPU computes more, times what its guard "
        "has measured of serving's slowdown, less 1; 0 = its time has no price")  # fmt: skip
    add("--explore", type=share, default=defaults.tuning.explore,
        help="share of trajectories that begin on an engine drawn at random")  # fmt: skip
    add("--control-share", type=share, default=defaults.tuning.control,
        help="share of groups that run on dedicated engines alone, for the bias meter")  # fmt: skip


def _about_turns(add: Add, defaults: Settings) -> None:
    add("--pause-seconds", type=amount, default=defaults.patience.pause_seconds,
        help="a turn on a closed gate moves elsewhere after this")  # fmt: skip
    add("--stall-seconds", type=amount, default=defaults.patience.stall_seconds,
        help="a turn on an open gate that says nothing moves after this")  # fmt: skip
    add("--max-losses", type=count, default=defaults.max_losses,
        help="engines a turn may lose before it ends with a typed abort")  # fmt: skip
    add("--queue-limit", type=count, default=defaults.queue.most, help="turns that may wait")
    add("--queue-seconds", type=amount, default=defaults.queue.seconds, help="longest wait")
    add("--interval", type=count, default=defaults.interval,
        help="tokens per event of an engine's stream when the caller does not stream")  # fmt: skip
    add("--lame-duck-seconds", type=amount, default=defaults.lame_duck_seconds,
        help="after SIGTERM go on, as not ready, until for so long nobody has asked for anything, "
        "10 seconds at most: load balancers hear late of an end")  # fmt: skip
    add("--drain-seconds", type=amount, default=defaults.drain_seconds,
        help="how long live turns may go on after that")  # fmt: skip


def _about_pushes(add: Add, defaults: Settings) -> None:
    add("--ingest-url", default="",
        help="of rose ingest, for trainers that push checkpoints; {namespace} and {lease} in it "
        "stand for the names in --lease")  # fmt: skip
    add("--ingest-token-file", type=Path,
        help="bearer token of rose ingest; else the one that the operator gives with --enrol, as "
        "rose router token --for ingest prints it")  # fmt: skip
    add("--quorum", default="all",
        help="dedicated engines that must run pushed weights: all, or a number")  # fmt: skip
    add("--quorum-seconds", type=amount, default=defaults.quorum.seconds,
        help="longest wait for them; below the trainer's time-out")  # fmt: skip
    add("--hold-seconds", type=amount, default=defaults.quorum.hold_seconds,
        help="a trainer's pause that nobody ends is over after this")  # fmt: skip


def _about_sandboxes(add: Add) -> None:
    add("--sandbox-host", action="append", default=[], metavar="[JOB=]URL",
        help="host of agents' sandboxes (rose sandbox-host), of turns without a job or of that "
        "job's; a name with several addresses is a host at each; {namespace} and {lease} in it "
        "stand for the names in --lease, {digest} for one of both; repeat")  # fmt: skip
    add("--sandbox-token-file", type=Path,
        help="bearer token that these hosts ask for, read at each call; while there is no such "
        "file they are called without, which is logged once")  # fmt: skip


def _about_traces(add: Add) -> None:
    add("--traces", default=os.environ.get(TRACES, ""),
        type=lambda text: text and web(text),
        help="OTLP receiver (http://host:4317) that gets a trace of every trajectory; else "
        f"${TRACES}; without either no span is made")  # fmt: skip


def _about_replicas(add: Add) -> None:
    add("--replicas-dns", default="",
        help="name that resolves to every replica of this router (a headless Service), "
        "or several with commas")  # fmt: skip
    add("--replica", default="", help="this replica's address among them; else $POD_IP")
    add("--peer-ca", type=Path,
        help="authority of this installation: replicas then prove themselves to each other by "
        "--tls-dir's certificate")  # fmt: skip
    add("--peer-address", type=listener, default="0.0.0.0:7445",
        help="where other replicas pass requests on with --peer-ca")  # fmt: skip
    add("--peer-name", default="",
        help="what replicas' certificates must name; else the first of --replicas-dns")  # fmt: skip


def _lease(text: str) -> str:
    if not all(text.split("/")) or text.count("/") != 1:
        message = f"{text!r} is no lease; expected NAMESPACE/NAME"
        raise argparse.ArgumentTypeError(message)
    return text


def settings(flags: argparse.Namespace) -> Settings:
    """Flags as settings.

    Raises:
        OSError: a token file cannot be read.
        ValueError: a flag makes no sense.
    """
    return Settings(
        lease=flags.lease,
        model=flags.model,
        tokenizer=flags.tokenizer or _tokenizer(flags.tokenizers, flags.model),
        attach_token=token(flags.token_file),
        tls_dir=flags.tls_dir,
        tls_client_ca=flags.tls_client_ca,
        operator_ca=flags.operator_ca,
        turn_token_file=flags.turn_token_file,
        accounts=_accounts(flags.account_keys),
        authenticate=flags.authenticate,
        enrolment=_enrolment(flags),
        http_tls_dir=flags.http_tls_dir,
        limits=ConnectionLimits(
            flags.max_connections, flags.head_seconds, flags.body_seconds, flags.write_seconds
        ),
        max_body_bytes=flags.max_body_bytes,
        memory_bytes=flags.memory_bytes,
        context_tokens=flags.context_tokens,
        interval=max(1, flags.interval),
        max_losses=flags.max_losses,
        lame_duck_seconds=flags.lame_duck_seconds,
        drain_seconds=flags.drain_seconds,
        reported_gpus=flags.reported_gpus or max(1, len(flags.dedicated)),
        routed_experts=flags.routed_experts,
        dedicated=frozenset(flags.dedicated),
        **_replicas(flags),
        batches_url=_of_lease("--batches", flags.batches, flags.lease),
        batches_token=token(flags.batches_token_file),
        ingest_url=_of_lease("--ingest-url", flags.ingest_url, flags.lease),
        sandbox_hosts=_sandbox_hosts(flags.sandbox_host, flags.lease),
        sandbox_token=TokenFile(flags.sandbox_token_file),
        ingest_token=token(flags.ingest_token_file),
        traces=flags.traces,
        quorum=Quorum(_count(flags.quorum), flags.quorum_seconds, flags.hold_seconds),
        terms=LeaseTerms(flags.max_staleness, flags.max_age, PolicyName(flags.policy)),
        tuning=Policy(
            quota=flags.borrow_quota,
            reserve=flags.tail_reserve,
            lent_weight=flags.lent_weight,
            explore=flags.explore,
            control=flags.control_share,
        ),
        patience=LegPatience(flags.pause_seconds, flags.stall_seconds),
        queue=QueueLimits(flags.queue_limit, flags.queue_seconds),
    )


def _accounts(files: list[Path]) -> ServiceAccounts | None:
    """Whose service accounts may call; ``None`` where no keys are given: nobody is asked for it.

    Raises:
        OSError: a file cannot be read.
        ValueError: one holds no keys.
    """
    given = os.environ.get(ACCOUNT_KEYS, "")
    sets = [file.read_bytes() for file in files] + ([given.encode()] if given else [])
    return ServiceAccounts(sets) if sets else None


def _enrolment(flags: argparse.Namespace) -> Enrolment | None:
    """Where to ask who this router is; ``None``: its flags say all.

    Raises:
        ValueError: half of it is missing.
    """
    given = (flags.enrol, flags.enrol_token_file, flags.identity_dir)
    if not any(given):
        return None
    if not all(given):
        raise ValueError("--enrol needs --enrol-token-file and --identity-dir, and they need it")
    name = flags.peer_name or flags.replicas_dns.split(",")[0]
    return Enrolment(flags.enrol, flags.enrol_token_file, flags.identity_dir, name)


def _of_lease(flag: str, url: str, lease: str) -> str:
    """The URL with the lease's names in it, so that one flag serves the routers of all leases.

    Raises:
        ValueError: something else stands between its braces, or it is no web address.
    """
    namespace, _, name = lease.partition("/")
    made = named_for(url.rstrip("/"), namespace, name)
    if "{" in made or "}" in made:
        message = (
            f"{flag}: {url!r} may hold {{namespace}}, {{lease}} and {{digest}} between braces only"
        )
        raise ValueError(message)
    try:
        return made and web(made)
    except argparse.ArgumentTypeError as error:
        message = f"{flag}: {error}"
        raise ValueError(message) from error


def _sandbox_hosts(values: list[str], lease: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for value in values:
        before, mark, after = value.partition("=")
        of_job = bool(mark) and "://" not in before
        job, url = (before, after) if of_job else ("", value)
        made = _of_lease("--sandbox-host", url, lease)
        if not made or (of_job and not job):
            raise ValueError(f"--sandbox-host {value!r}: expected [JOB=]http://HOST:PORT")
        found[job] = (*found.get(job, ()), made)
    return found


def _tokenizer(folder: Path | None, model: str) -> Path | None:
    """The model's among those of all models; ``None`` where there is none: token ids only."""
    if folder is None:
        return None
    found = (folder / model).resolve()
    if found.is_relative_to(folder.resolve()) and (found / "tokenizer.json").is_file():
        return found
    LOG.warning("%s has no %s/tokenizer.json: this router takes token ids only", folder, model)
    return None


def _replicas(flags: argparse.Namespace) -> dict[str, Any]:
    if not flags.replicas_dns:
        return {}
    me = flags.replica or os.environ.get("POD_IP", "")
    if not me:
        raise ValueError("--replicas-dns needs --replica (or $POD_IP)")
    link = _link(flags)
    secure = link is not None or (flags.enrol or "").startswith(tls.SCHEME)
    if flags.http_tls_dir and not secure:
        raise ValueError("--replicas-dns with --http-tls-dir needs --peer-ca and --tls-dir")
    ports = [
        int(address.rsplit(":", 1)[1])
        for address in (flags.peer_address if secure else flags.http_address, flags.attach_address)
    ]
    found = by_dns(flags.replicas_dns, *ports, secure=secure)
    return {"replica": me, "replicas": found, "link": link}


def _link(flags: argparse.Namespace) -> Link | None:
    if flags.peer_ca is None:
        return None
    if flags.tls_dir is None:
        raise ValueError("--peer-ca needs --tls-dir: a replica shows that certificate")
    name = flags.peer_name or flags.replicas_dns.split(",")[0]
    return Link(flags.tls_dir, flags.peer_ca, name)


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        message = f"--quorum: expected all or a number, got {text!r}"
        raise ValueError(message)
    return int(text)
