"""What the leases of a namespace may ask for: the policies that select it, together.

| policies that select the namespace | it may |
|---|---|
| none | nothing |
| one | what it says |
| several | whatever any of them allows; of caps the widest |

Caps of a namespace count its leases from the oldest on, so that a new lease never ends an old one:
what is over the cap is refused, and is accepted by itself once there is room. A lease that is
refused for another reason holds nothing but, for a while, its router (``routers``); that counts,
or else leases whose pool comes and goes would leave routers behind. Pure. Next step: the operator's
``admission`` asks for each lease.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rose_core.api.reasons import Reason
from rose_core.api.rolloutlease import PreemptionPolicy, RolloutLease
from rose_core.api.tenantpolicy import PolicySpec, TenantPolicy

Answer = tuple[Reason, str]
"""Why a lease is refused, and what to do about it."""


class Tenancy:
    """The policies of a cluster.

    Args:
        policies: all of them.
        labels: namespace -> its labels; without them policies select by name alone.
    """

    def __init__(
        self, policies: Iterable[TenantPolicy], labels: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._policies = sorted(policies, key=lambda policy: policy.metadata.name)
        self._labels = labels

    def of(self, namespace: str) -> Sequence[TenantPolicy]:
        """The policies that select a namespace, by name."""
        labels = self._labels.get(namespace, {})
        return [one for one in self._policies if _selects(one.spec, namespace, labels)]

    def labels_of(self, namespace: str) -> Mapping[str, str]:
        """The namespace's labels; none of one that is not known."""
        return self._labels.get(namespace, {})

    def judge(
        self, leases: Iterable[RolloutLease], refused: Iterable[RolloutLease] = ()
    ) -> dict[str, Answer]:
        """Why leases are refused, by key; those that are not there may have what they ask for.

        Args:
            leases: that nothing else speaks against.
            refused: the others. Those that have a router are judged by what it costs; of the rest
                nothing is said.
        """
        answers: dict[str, Answer] = {}
        by_namespace: dict[str, list[tuple[RolloutLease, bool]]] = {}
        keep_routers = (one for one in refused if one.status.router_url)
        for lease, holds in (*((one, True) for one in leases), *((o, False) for o in keep_routers)):
            by_namespace.setdefault(lease.metadata.namespace, []).append((lease, holds))
        for namespace, theirs in by_namespace.items():
            policies = self.of(namespace)
            theirs.sort(key=lambda one: (one[0].metadata.creation_timestamp, one[0].metadata.name))
            answers |= _judge(namespace, theirs, policies)
        return answers

    def may_follow(self, namespace: str, store: str, run: str) -> bool:
        """Whether leases of this namespace may follow a run."""
        return _follows([policy.spec for policy in self.of(namespace)], store, run)

    def may_preempt(self, namespace: str) -> bool:
        """Whether the platform lets leases of this namespace take slots of weaker ones."""
        return any(policy.spec.may_preempt for policy in self.of(namespace))


def _selects(spec: PolicySpec, namespace: str, labels: Mapping[str, str]) -> bool:
    wanted = spec.namespaces.match_labels
    by_labels = bool(wanted) and wanted.items() <= labels.items()
    return by_labels or _any(spec.namespaces.names, namespace)


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class _Used:
    """What the older leases of a namespace hold."""

    leases: int = 0
    slots: int = 0
    routers: int = 0

    def add(self, lease: RolloutLease, *, holds: bool) -> None:
        self.leases += holds
        self.slots += lease.spec.slots.max * holds
        self.routers += lease.spec.router.replicas


def _judge(
    namespace: str,
    leases: Sequence[tuple[RolloutLease, bool]],
    policies: Sequence[TenantPolicy],
) -> dict[str, Answer]:
    """The answers, oldest first; beside each lease whether it holds more than a router."""
    answers: dict[str, Answer] = {}
    specs = [policy.spec for policy in policies]
    used = _Used()
    for lease, holds in leases:
        found = (
            _unselected(namespace)
            if not specs
            else _alone(lease, specs, policies) or _together(lease, specs, used, holds=holds)
        )
        if found is not None:
            answers[lease.metadata.key] = found
            continue
        used.add(lease, holds=holds)
    return answers


def _unselected(namespace: str) -> Answer:
    text = (
        f"no TenantPolicy selects namespace {namespace}; the platform writes one "
        "(docs/tenancy.md), and until then its leases get nothing"
    )
    return Reason.NO_TENANT_POLICY, text


def _alone(
    lease: RolloutLease, specs: Sequence[PolicySpec], policies: Sequence[TenantPolicy]
) -> Answer | None:
    """What one lease asks for that no policy allows."""
    spec, names = lease.spec, ", ".join(policy.metadata.name for policy in policies)
    store, run = spec.weights.store_name, spec.weights.run
    if not (spec.weights.frozen or _follows(specs, store, run)):
        return Reason.RUN_NOT_ALLOWED, _text("run", f"{run!r} of store {store!r}", names)
    for pool in spec.pools:
        if not any(_any(each.pools, pool.key) for each in specs):
            return _over("pool", repr(pool.key), names)
    if not any(_any(each.models, spec.model.name) for each in specs):
        return _over("model.name", repr(spec.model.name), names)
    if not any(each.min_priority <= spec.priority <= each.max_priority for each in specs):
        ranges = ", ".join(f"{each.min_priority} to {each.max_priority}" for each in specs)
        return _over("priority", f"{spec.priority} (allowed: {ranges})", names)
    for field, asked, most in (
        ("weight", spec.weight, max(each.max_weight for each in specs)),
        ("router.replicas", spec.router.replicas, max(e.max_router_replicas for e in specs)),
    ):
        if asked > most:
            return _over(field, f"{asked} (most: {most})", names)
    return None


def _together(
    lease: RolloutLease, specs: Sequence[PolicySpec], used: _Used, *, holds: bool
) -> Answer | None:
    """What the namespace's older leases leave no room for."""
    most_leases = max(each.max_leases for each in specs)
    if holds and used.leases >= most_leases:
        text = f"its namespace has {used.leases} older leases, and its policies allow {most_leases}"
        return Reason.TENANT_CAP_REACHED, f"{text}; delete one, or ask the platform"
    spec = lease.spec
    most_slots = max(each.max_slots for each in specs)
    most_routers = max(each.max_total_router_replicas for each in specs)
    for field, asked, held, most in (
        ("slots.max", spec.slots.max * holds, used.slots, most_slots),
        ("router.replicas", spec.router.replicas, used.routers, most_routers),
    ):
        if asked and held + asked > most:
            text = (
                f"{field} {asked} and the {held} of its namespace's older leases are above the "
                f"{most} that its policies allow; ask for less, or ask the platform"
            )
            return Reason.TENANT_CAP_REACHED, text
    return None


def _follows(specs: Sequence[PolicySpec], store: str, run: str) -> bool:
    return any(
        one.store_name == store and _any(one.names, run) for each in specs for one in each.runs
    )


def _over(field: str, asked: str, names: str) -> Answer:
    return Reason.TENANT_POLICY_FORBIDS, _text(field, asked, names)


def _text(field: str, asked: str, names: str) -> str:
    return f"{field} {asked} is not allowed by TenantPolicy {names}; the platform says who may"


def preempts(lease: RolloutLease, tenancy: Tenancy | None) -> bool:
    """Whether the lease's minimum may take slots of weaker leases: it asks, and it may."""
    asks = lease.spec.preemption_policy is PreemptionPolicy.PREEMPT_LOWER_PRIORITY
    return asks and (tenancy is None or tenancy.may_preempt(lease.metadata.namespace))
