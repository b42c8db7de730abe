"""Who may use which verb of which listener: one table, and nothing that is not in it.

A *verb* is a route (``POST /generate``), a gRPC method (``/rose.v1.Router/Attach``), or a way to
touch a kind at the API server (``write rolloutleases``). Who listens enforces it: the router opens
its routes by this table, the others by the credential that they ask for. Tests show every
credential to every verb (``tests/faults/test_listeners.py``; ``tests/attack`` on a node), and fail
for a verb that a process serves and that stands not here. ``docs/rights.md`` is generated from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class CallerParty(StrEnum):
    """Whom a caller proves to be."""

    ANYBODY = "anybody"
    EDITOR = "tenant"
    TRAINER = "trainer"
    HARNESS = "harness"
    ROUTER = "router"
    NODE = "node"
    SANDBOX = "sandbox host"
    RELAY = "relay"
    ENGINE = "engine"
    STORE = "store"
    OPERATOR = "operator"
    PLATFORM = "platform"


MEANING = {
    CallerParty.ANYBODY: "whoever reaches the port, with no credential or one that is none",
    CallerParty.EDITOR: "serving owner or RL team: a person with `edit` in one namespace",
    CallerParty.TRAINER: "an RL team's own: a token for its lease, its tenant's credential at a "
    "store",
    CallerParty.HARNESS: "an RL team's agents: a token of its lease for turns only",
    CallerParty.ROUTER: "a lease's router: a token of its pod for that lease, its lease's own "
    "token, the token of each slot that it was told, its ingest's token",
    CallerParty.NODE: "guard, engine host and weight-sync: their node's certificate and the "
    "installation's token; at a store the serving cluster's credential",
    CallerParty.SANDBOX: "a run's sandbox hosts: what `rose tenant grant --record` granted, "
    "at a store",
    CallerParty.RELAY: "the serving cluster's relay, with its upstream credential",
    CallerParty.ENGINE: "a rollout engine's processes, which hold the key of their own admin "
    "routes and no credential: they call nobody, and are in no rule",
    CallerParty.STORE: "a store, which has its own certificate: it dials nobody, and is in no rule",
    CallerParty.OPERATOR: "the operator",
    CallerParty.PLATFORM: "who administrates the cluster, or is root on a node",
}


class Listener(StrEnum):
    """A process, by all its ports."""

    API = "API server"
    ROUTER = "router"
    OPERATOR = "operator"
    AGENT = "agent"
    TAP = "tap"
    HOST = "engine host"
    SYNC = "weight-sync"
    STORE = "store"
    RELAY = "relay"
    INGEST = "ingest"
    FORWARD = "forward"
    REWARDS = "rewards"
    SCALER = "rewards, for KEDA"
    BATCHES = "batches"
    SANDBOX = "sandbox host"


@dataclass(frozen=True)
class AccessRule:
    """Verbs of one listener, and who may use them.

    Attributes:
        of: what of it; how far the right goes.
        local: on a Unix socket that the node's root alone can open.
    """

    listener: Listener
    verbs: tuple[str, ...]
    parties: tuple[CallerParty, ...]
    of: str = ""
    local: bool = False


_PAGES = ("GET /metrics", "GET /healthz")
_PROBES = ("GET /health", "GET /health_generate", "GET /ready", "GET /ping", "GET /liveness")
_TURNS = (
    *("POST /generate", "POST /v1/completions", "POST /v1/chat/completions"),
    *("POST /inference/v1/generate", "POST /tokenize", "POST /v1/tokenize", "POST /detokenize"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses"),
    "POST /finish_session",
)
# Start-up checks: what a harness reads before its first turn, about the lease and not about turns.
_FACADE = (
    *(
        "GET /v1/models",
        "GET /v1/models/{id}",
        "GET /get_weight_version",
        "GET /model_info",
        "GET /get_model_info",
    ),
    *("GET /server_info", "GET /get_server_info", "GET /workers", "POST /workers"),
    *("GET /list_workers", "GET /v1/loads", "GET /is_paused", "GET /get_world_size"),
)
_BATCHES = (
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/{id}", "DELETE /v1/files/{id}"),
    *("GET /v1/files/{id}/content", "POST /v1/batches", "GET /v1/batches"),
    *("GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel"),
)
_PUSHES = (
    *("POST /pause_generation", "POST /pause", "POST /continue_generation", "POST /resume"),
    *("POST /update_weights_from_disk", "POST /update_weights", "POST /pull_weights"),
    *("POST /labels", "POST /init_weight_transfer_engine", "GET /flush_cache"),
    *("POST /flush_cache", "POST /reset_prefix_cache", "POST /start_weight_update"),
    *("POST /finish_weight_update", "POST /shutdown_weight_transfer_engine"),
)
_NOT_HERE = (
    *("POST /update_weights_from_tensor", "POST /update_weights_from_distributed"),
    *("POST /update_weights_from_ipc", "POST /init_weights_update_group"),
    *("POST /load_lora_adapter", "POST /release_memory_occupation"),
    "POST /resume_memory_occupation",
)
_READING = tuple(
    f"/rose.v1.Weights/{name}" for name in ("Describe", "Watch", "Plan", "Fetch", "Attested")
)
_PUBLISHING = tuple(
    f"/rose.v1.Weights/{name}" for name in ("Open", "Missing", "Put", "Commit", "Part")
)
_RECORDS = tuple(
    f"/rose.v1.Records/{name}"
    for name in ("Own", "Look", "Read", "Block", "Put", "Commit", "Forget")
)
_TEAMS = (CallerParty.TRAINER,)
_P, _L = CallerParty, Listener
_BELOW = "also below `/s/NAME`, as of that session"

RULES: tuple[AccessRule, ...] = (
    AccessRule(
        _L.API, ("read servingpools", "write servingpools"), (_P.EDITOR, _P.PLATFORM), "its own"
    ),
    AccessRule(
        _L.API, ("read rolloutleases", "write rolloutleases"), (_P.EDITOR, _P.PLATFORM), "its own"
    ),
    AccessRule(_L.API, ("write rolloutleases/scale",), (_P.EDITOR, _P.PLATFORM), "its own"),
    AccessRule(
        _L.API, ("read rolloutslots",), (_P.EDITOR, _P.PLATFORM), "in its namespaces: none is there"
    ),
    AccessRule(_L.API, ("write rolloutslots",), (_P.OPERATOR,)),
    AccessRule(_L.API, ("read tenantpolicies",), (_P.OPERATOR, _P.PLATFORM)),
    AccessRule(_L.API, ("write tenantpolicies",), (_P.PLATFORM,)),
    AccessRule(
        _L.API,
        ("write servingpools/status", "write rolloutleases/status", "write rolloutslots/status"),
        (_P.OPERATOR,),
    ),
    AccessRule(_L.ROUTER, (*_PAGES, *_PROBES, "GET /readiness"), (_P.ANYBODY,)),
    AccessRule(_L.ROUTER, _TURNS, (*_TEAMS, _P.HARNESS), _BELOW),
    AccessRule(
        _L.ROUTER,
        ("POST /abort_request",),
        (*_TEAMS, _P.HARNESS),
        f"a turn by its id; all of the lease: the trainer alone; {_BELOW}",
    ),
    AccessRule(_L.ROUTER, _FACADE, (*_TEAMS, _P.HARNESS), _BELOW),
    AccessRule(_L.ROUTER, _PUSHES, _TEAMS),
    AccessRule(
        _L.ROUTER, ("GET /trajectories", "POST /trajectories", "GET /turns", "GET /engines"), _TEAMS
    ),
    AccessRule(_L.ROUTER, _BATCHES, _TEAMS, "of the caller that the token names"),
    AccessRule(
        _L.ROUTER,
        tuple(f"POST /sessions/{{key}}/{step}" for step in ("fork", "restore", "turns")),
        _TEAMS,
        "of the job that the token names",
    ),
    AccessRule(
        _L.ROUTER,
        ("GET /sessions", "GET /sessions/{key}/rows"),
        _TEAMS,
        "of the job that the token names",
    ),
    AccessRule(_L.ROUTER, _NOT_HERE, _TEAMS, "answered with what to use instead"),
    AccessRule(
        _L.ROUTER, ("/rose.v1.Router/Attach",), (_P.NODE, _P.ROUTER), "engines of this lease"
    ),
    AccessRule(_L.ROUTER, ("/rose.v1.Router/Demand",), (_P.OPERATOR,)),
    AccessRule(_L.OPERATOR, (*_PAGES, "GET /readyz"), (_P.ANYBODY,)),
    AccessRule(
        _L.OPERATOR, ("/rose.v1.Operator/Sync", "/rose.v1.Operator/Notices"), (_P.NODE,), "itself"
    ),
    AccessRule(
        _L.OPERATOR, ("/rose.v1.Identity/Enrol",), (_P.NODE,), "itself, by its account's token"
    ),
    AccessRule(
        _L.OPERATOR,
        ("/rose.v1.Identity/EnrolRouter",),
        (_P.ROUTER,),
        "its lease, by its pod's token",
    ),
    AccessRule(_L.AGENT, _PAGES, (_P.ANYBODY,)),
    AccessRule(_L.AGENT, ("GET /report", "GET /trace"), (_P.NODE, _P.PLATFORM)),
    AccessRule(
        _L.AGENT,
        ("/rose.v1.Guard/Follow",),
        (_P.NODE,),
        "of a node that has a pod of the same replica, by that node's certificate",
    ),
    AccessRule(_L.TAP, _PAGES, (_P.ANYBODY,)),
    AccessRule(_L.HOST, (*_PAGES, "GET /readyz", "GET /vacated"), (_P.ANYBODY,)),
    AccessRule(
        _L.HOST,
        (
            *(
                f"POST /slots/{{uid}}/{route}"
                for route in ("generate", "v1/completions", "abort_request")
            ),
            "POST /slots/{uid}/drafts",
            "GET /slots/{uid}/tokenizer",
        ),
        (_P.ROUTER,),
        "slots of its lease",
    ),
    AccessRule(
        _L.HOST,
        tuple(
            f"/rose.v1.EngineHost/{name}"
            for name in ("Ensure", "Stop", "Hold", "Dormant", "Limit", "Status")
        ),
        (_P.NODE,),
        "its guard",
        local=True,
    ),
    AccessRule(_L.SYNC, _PAGES, (_P.ANYBODY,)),
    AccessRule(_L.STORE, _PAGES, (_P.ANYBODY,)),
    AccessRule(
        _L.STORE,
        (*_READING, "/rose.v1.Weights/Await"),
        (*_TEAMS, _P.NODE, _P.RELAY),
        "runs that it may read",
    ),
    AccessRule(_L.STORE, _PUBLISHING, _TEAMS, "runs that it may publish"),
    AccessRule(_L.STORE, _RECORDS, (_P.SANDBOX,), "sessions of runs whose records it may keep"),
    AccessRule(_L.RELAY, _PAGES, (_P.ANYBODY,)),
    AccessRule(_L.RELAY, _READING, (_P.NODE,), "runs of its cluster"),
    AccessRule(_L.INGEST, ("GET /health",), (_P.ANYBODY,)),
    AccessRule(_L.INGEST, ("POST /ingest",), (_P.ROUTER,), "of its lease"),
    AccessRule(
        _L.FORWARD,
        ("* /{path}",),
        (_P.TRAINER,),
        "its machine's loopback: who reaches it calls the router as the trainer",
    ),
    AccessRule(_L.REWARDS, _PAGES, (_P.ANYBODY,)),
    AccessRule(
        _L.REWARDS,
        ("POST /v1/rewards", "GET /v1/queue"),
        _TEAMS,
        "functions of its team and those of nobody; by its team's token, or on the loopback",
    ),
    AccessRule(
        _L.REWARDS,
        ("GET /v1/work",),
        (_P.PLATFORM,),
        "a pod's worker: serves functions of one team, by the token of that team's workers",
    ),
    AccessRule(
        _L.SCALER,
        tuple(
            f"/externalscaler.ExternalScaler/{name}"
            for name in ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
        ),
        (_P.ANYBODY,),
        "how many workers are wished for; KEDA shows no token, a NetworkPolicy says who reaches it",
    ),
    AccessRule(_L.BATCHES, _PAGES, (_P.ANYBODY,)),
    AccessRule(
        _L.BATCHES,
        _BATCHES,
        (_P.ROUTER,),
        "its lease, for the caller that it names; by the token of rose batches, or on the loopback",
    ),
    AccessRule(_L.SANDBOX, _PAGES, (_P.ANYBODY,)),
    AccessRule(
        _L.SANDBOX,
        (
            *("GET /sessions", "POST /sessions", "DELETE /sessions/{key}"),
            *("POST /sessions/{key}/exec", "GET /sessions/{key}/files"),
            *("PUT /sessions/{key}/files", "* /sessions/{key}/port/{port}/{path}"),
            "GET /sessions/{key}/tunnel/{port}",
            *(f"POST /sessions/{{key}}/{step}" for step in ("checkpoint", "suspend", "resume")),
        ),
        _TEAMS,
        "of the run that the host serves, by the host's token; rewards has it where a function's "
        "programs run there",
    ),
    AccessRule(
        _L.SANDBOX,
        (
            *("GET /sessions/{key}", "GET /sessions/{key}/fence"),
            *(
                f"POST /sessions/{{key}}/{step}"
                for step in ("turn", "ready", "ended", "restore", "fork")
            ),
        ),
        (*_TEAMS, _P.ROUTER),
        "of the run that the host serves, by the host's token",
    ),
    AccessRule(
        _L.SANDBOX, ("POST /traffic",), (_P.NODE, _P.TRAINER), "its node, by the host's token"
    ),
)


def verbs(listener: Listener) -> frozenset[str]:
    """All that the table knows of a listener."""
    return frozenset(verb for rule in RULES if rule.listener is listener for verb in rule.verbs)


def allowed(listener: Listener, party: CallerParty, *, local: bool = False) -> frozenset[str]:
    """What a party may do there; what everybody may, included.

    Args:
        listener: where.
        party: who.
        local: also what stands on sockets of the node's root.
    """
    return frozenset(
        verb
        for rule in RULES
        if rule.listener is listener and (local or not rule.local)
        if party in rule.parties or CallerParty.ANYBODY in rule.parties
        for verb in rule.verbs
    )


def paths(found: frozenset[str]) -> frozenset[str]:
    """Paths of those that are routes."""
    return frozenset(verb.partition(" ")[2] for verb in found if " /" in verb)


def page(note: str) -> str:
    """The table for people: a section per listener, a row per verb; ``note`` says who wrote it."""
    return "\n".join(_lines(note)) + "\n"


def _lines(note: str) -> Iterator[str]:
    yield from ("# Who may do what", "", f"<!-- {note} -->", "")
    yield "Nobody may do what does not stand here. [Tenancy](tenancy.md) says how each party proves"
    yield "who it is; tests show every credential to every verb ([threat model](threat-model.md))."
    yield from ("", "| party | is |", "|---|---|")
    yield from (f"| {party.value} | {meaning} |" for party, meaning in MEANING.items())
    for listener in Listener:
        yield from ("", f"## {listener.value[0].upper()}{listener.value[1:]}", "")
        yield from ("| verb | who | of what |", "|---|---|---|")
        for rule in RULES:
            if rule.listener is not listener:
                continue
            who = ", ".join(party.value for party in rule.parties)
            where = "on a socket of the node's root" if rule.local else ""
            notes = "; ".join(filter(None, (rule.of, where)))
            yield from (f"| `{verb}` | {who} | {notes} |" for verb in rule.verbs)
