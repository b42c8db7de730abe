"""A sandbox as a ``SandboxTemplate`` of agent-sandbox describes it (extensions.agents.x-k8s.io).

Every field is honoured, told as passed over, or refused by name: what this does not know is
refused, so that a promise of a later version is not dropped. Fields of ``v1beta1`` (0.5.6):

| field | here |
|---|---|
| ``podTemplate.spec.containers`` | one; more are refused |
| ``image`` | the name of a host's image, or what the host was told that it stands for |
| ``command``, ``args`` | run in the background from the start; ``args`` alone are refused |
| ``workingDir`` | where commands start |
| ``env`` | of every command, ``$(NAME)`` put in; ``valueFrom`` and ``envFrom`` are refused |
| ``resources`` | limits of processors, memory, disk; a request raises a limit that is not said |
| ``volumes``, ``volumeMounts`` | ``emptyDir`` on disk: an empty folder; others are refused |
| ``securityContext`` | what holds anyway (root of its own users, no new privileges), or refused |
| ``runtimeClassName`` | ``gvisor``, ``runsc``, ``runc``: a host of that; others are refused |
| ``automountServiceAccountToken``, ``host...``, ``hostUsers`` | false, as it is anyway |
| ``networkPolicy.egress`` | addresses and TCP ports that the host's proxy may dial, no pods |
| no ``networkPolicy`` | the public internet, as its controller has it |
| ``networkPolicyManagement`` | ``Unmanaged``: the host's own rules alone |
| ``envVarsInjectionPolicy`` | what a caller's own variables may do; ``Disallowed`` by default |
| ``service``, ``volumeClaimTemplates``, init containers, liveness probes, hooks | refused |
| node selectors, affinity | refused: a host is where it is |
| ``_PASSED_OVER`` | says nothing of a sandbox, or allows what none needs; the caller is told |

Whatever it allows, a host's own ``--egress`` is not exceeded.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from rose_core.sandboxes.networks import PUBLIC, Network

_POD_PASSED_OVER = frozenset(
    {
        *("enableServiceLinks", "imagePullSecrets", "preemptionPolicy", "priority"),
        *("priorityClassName", "readinessGates", "schedulerName", "shareProcessNamespace"),
        *("terminationGracePeriodSeconds", "tolerations", "overhead"),
    }
)
_CONTAINER_PASSED_OVER = frozenset(
    {
        *("imagePullPolicy", "ports", "readinessProbe", "startupProbe"),
        *("terminationMessagePath", "terminationMessagePolicy"),
    }
)
_PASSED_OVER = {
    "podTemplate.metadata": frozenset({"annotations", "labels", "creationTimestamp"}),
    "podTemplate.spec": _POD_PASSED_OVER,
    "podTemplate.spec.containers[0]": _CONTAINER_PASSED_OVER,
}
_RUNTIMES = {"gvisor": "runsc", "runsc": "runsc", "runc": "runc"}
_POWERS: Mapping[str, Decimal] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(10 ** (3 * n)) for n, name in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{name: Decimal(1 << 10 * n) for n, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}
_QUANTITY = re.compile(r"([+]?[0-9.]+(?:[eE][+-]?[0-9]{1,3})?)([a-zA-Z]{0,2})")
_MOST = Decimal(1 << 63)
"""Kubernetes holds a quantity in 63 bits; beyond that no limit can be written down."""
_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
_ANY = (Network("0.0.0.0/0"), Network("::/0"))
_DNS_PORT = 53

Fields = Mapping[str, Any]


class TemplateRefused(Exception):
    """A template asks for what a sandbox is not; the text names every such field."""


@dataclass(frozen=True)
class TemplateLimits:
    """What a template says of resources; None: nothing.

    Attributes:
        cpus: in processors.
        memory_bytes, disk_bytes: in bytes.
    """

    cpus: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True)
class TemplateSandbox:
    """What a template asks for.

    Attributes:
        image: as the template names it.
        runtime: of the host that it asks for; empty: any.
        command: run in the background as the sandbox starts; empty: none.
        folder: where commands start; empty: the usual one.
        environment: of every command.
        limits: at most this.
        requests: at least this, where ``limits`` says nothing.
        networks: that the host may dial for it; None: the host's own rules alone.
        folders: that are there and empty.
        passed_over: fields that say nothing here.
    """

    image: str
    runtime: str = ""
    command: tuple[str, ...] = ()
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: TemplateLimits = TemplateLimits()
    requests: TemplateLimits = TemplateLimits()
    networks: tuple[Network, ...] | None = PUBLIC
    folders: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


class _Reader:
    """Notes what is refused and what is passed over; ``at`` is a field's place."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.passed_over: list[str] = []

    def refuse(self, at: str, why: str) -> None:
        self.refused.append(f"{at}: {why}")

    def fields(
        self, at: str, given: object, known: Mapping[str, Callable[[str, Any], None]]
    ) -> None:
        """Read an object's fields: those known by what reads them, others as ``_PASSED_OVER``."""
        if not isinstance(given, Mapping):
            return self.refuse(at or "spec", f"{given!r:.40} is no object")
        for name, value in given.items():
            place = f"{at}.{name}" if at else str(name)
            if value is None or value == []:
                continue
            if name in known:
                known[name](place, value)
            elif name in _PASSED_OVER.get(at, ()):
                self.passed_over += [place] if value != {} else []
            else:
                self.refuse(place, "a sandbox has none")
        return None

    def one_of(self, found: dict[str, Any], name: str, *allowed: str) -> Callable[[str, Any], None]:
        """A reader that keeps a word: one of a later version may promise what nobody here keeps."""

        def read(at: str, value: object) -> None:
            if value in allowed:
                found[name] = value
            else:
                self.refuse(at, f"{value!r}: expected one of {', '.join(allowed)}")

        return read

    def keep(self, found: dict[str, Any], name: str) -> Callable[[str, Any], None]:
        """A reader that keeps whatever stands there."""
        return lambda _at, value: found.update({name: value})

    def must_be(self, *allowed: object, why: str = "") -> Callable[[str, Any], None]:
        """A reader of a field that may have these values alone, which a sandbox has anyway."""

        def read(at: str, value: object) -> None:
            if value not in allowed:
                self.refuse(at, why or f"it is {allowed[0]!r} here")

        return read


def _nothing(_at: str, _value: object) -> None:
    """Of a field that promises nothing."""


def read_template(spec: Fields, given: Mapping[str, str] | None = None) -> TemplateSandbox:
    """What a template asks for.

    Args:
        spec: of a ``SandboxTemplate``, ``v1beta1``.
        given: variables of the caller, over the template's.

    Raises:
        TemplateRefused: a field asks for what a sandbox is not, or a variable may not be set.
    """
    reader = _Reader()
    found: dict[str, Any] = {}

    def pod(at: str, value: object) -> None:
        inside = {
            "spec": reader.keep(found, "pod"),
            "metadata": lambda at, one: reader.fields(at, one, {}),
        }
        reader.fields(at, value, inside)

    reader.fields(
        "",
        spec,
        {
            "podTemplate": pod,
            "networkPolicy": lambda _at, _value: None,
            "networkPolicyManagement": reader.one_of(found, "management", "Managed", "Unmanaged"),
            "envVarsInjectionPolicy": reader.one_of(
                found, "injection", "Disallowed", "Allowed", "Overrides"
            ),
            "service": reader.must_be(False, why="a sandbox has no Service; take box.connect"),
            "volumeClaimTemplatesPolicy": _nothing,  # of claims, and a sandbox is none
        },
    )
    if spec.get("networkPolicy") is not None:  # also one without a rule, which allows nothing
        found["policy"] = spec["networkPolicy"]
    made = _pod(reader, found.get("pod", {}))
    networks = _networks(reader, found)
    environment = _merged(
        reader, made.environment, given or {}, found.get("injection", "Disallowed")
    )
    if reader.refused:
        raise TemplateRefused("; ".join(reader.refused))
    expand = _expander(environment)
    return replace(
        made,
        networks=networks,
        environment=environment,
        command=tuple(expand(word) for word in made.command),
        passed_over=tuple(reader.passed_over),
    )


def _pod(reader: _Reader, pod: object) -> TemplateSandbox:
    at = "podTemplate.spec"
    found: dict[str, Any] = {"containers": [], "volumes": [], "runtime": ""}

    def runtime(place: str, value: object) -> None:
        if value not in _RUNTIMES:
            return reader.refuse(place, f"{value!r}: hosts run gvisor or runc")
        found["runtime"] = _RUNTIMES[str(value)]
        return None

    no, nowhere = reader.must_be(False), "a host is where it is: nobody chooses its node"
    reader.fields(
        at,
        pod,
        {
            "containers": reader.keep(found, "containers"),
            "volumes": reader.keep(found, "volumes"),
            "runtimeClassName": runtime,
            "automountServiceAccountToken": no,
            "hostNetwork": no,
            "hostPID": no,
            "hostIPC": no,
            "hostUsers": no,
            "serviceAccountName": reader.must_be("default", why="a sandbox has no service account"),
            "restartPolicy": reader.must_be("Never", why="what ends in a sandbox has ended: Never"),
            "os": reader.must_be({"name": "linux"}),
            "dnsPolicy": reader.must_be("ClusterFirst", why="the host's proxy asks for names"),
            "securityContext": lambda place, value: _security(reader, place, value),
            "nodeSelector": reader.must_be({}, why=nowhere),
            "nodeName": reader.must_be({}, why=nowhere),
            "affinity": reader.must_be({}, why=nowhere),
            "topologySpreadConstraints": reader.must_be({}, why=nowhere),
        },
    )
    if len(found["containers"]) != 1:
        reader.refuse(f"{at}.containers", f"{len(found['containers'])}: a sandbox is one")
        return TemplateSandbox("")
    folders = _volumes(reader, f"{at}.volumes", found["volumes"])
    made = _container(reader, f"{at}.containers[0]", found["containers"][0], folders)
    return replace(made, runtime=found["runtime"])


def _container(reader: _Reader, at: str, given: object, folders: frozenset[str]) -> TemplateSandbox:
    found: dict[str, Any] = {"image": "", "command": [], "args": [], "folder": "", "env": []}
    reader.fields(
        at,
        given,
        {
            "name": _nothing,
            "image": reader.keep(found, "image"),
            "command": reader.keep(found, "command"),
            "args": reader.keep(found, "args"),
            "workingDir": reader.keep(found, "folder"),
            "env": reader.keep(found, "env"),
            "resources": lambda place, value: found.update(_resources(reader, place, value)),
            "volumeMounts": lambda place, value: found.update(
                mounts=_mounts(reader, place, value, folders)
            ),
            "securityContext": lambda place, value: _security(reader, place, value),
            "stdin": reader.must_be(False),
            "stdinOnce": reader.must_be(False),
            "tty": reader.must_be(False),
        },
    )
    if not found["image"]:
        reader.refuse(f"{at}.image", "none is named")
    if found["args"] and not found["command"]:
        reader.refuse(f"{at}.args", "they are of the image's own command, which is not known here")
    return TemplateSandbox(
        image=str(found["image"]),
        command=tuple(map(str, (*found["command"], *found["args"]))),
        folder=str(found["folder"]),
        environment=_environment(reader, f"{at}.env", found["env"]),
        limits=found.get("limits", TemplateLimits()),
        requests=found.get("requests", TemplateLimits()),
        folders=found.get("mounts", ()),
    )


def _mounts(
    reader: _Reader, at: str, given: Sequence[Any], folders: frozenset[str]
) -> tuple[str, ...]:
    """Paths at which volumes of the pod are mounted."""
    paths: list[str] = []

    def volume(place: str, name: object) -> None:
        if name not in folders:
            reader.refuse(place, f"{name!r} is no volume here")

    known = {
        "name": volume,
        "mountPath": lambda _, path: paths.append(str(path)),
        "readOnly": reader.must_be(False, why="nothing would ever be in it"),
    }
    for number, one in enumerate(given):
        reader.fields(f"{at}[{number}]", one, known)
    return tuple(paths)


def _resources(reader: _Reader, at: str, given: object) -> dict[str, TemplateLimits]:
    """Those of ``limits`` and ``requests`` that are given."""
    found: dict[str, TemplateLimits] = {}

    def amounts(name: str) -> Callable[[str, Any], None]:
        return lambda place, one: found.update({name: _amounts(reader, place, one)})

    reader.fields(at, given, {"limits": amounts("limits"), "requests": amounts("requests")})
    return found


def _security(reader: _Reader, at: str, given: object) -> None:
    """A sandbox runs as root of users of its own, behind filters, without new privileges."""
    root, no = reader.must_be(0, why="commands run as root, of users of its own: 0"), False
    filtered = reader.must_be({"type": "RuntimeDefault"}, why="filters are the host's own")
    reader.fields(
        at,
        given,
        {
            "runAsUser": root,
            "runAsGroup": root,
            "runAsNonRoot": reader.must_be(no, why="commands run as root, of users of its own"),
            "privileged": reader.must_be(no),
            "allowPrivilegeEscalation": reader.must_be(no),
            "readOnlyRootFilesystem": reader.must_be(no, why="a sandbox's files can be written"),
            "seccompProfile": filtered,
            "appArmorProfile": filtered,
            "capabilities": reader.must_be({}, why="those of root of a sandbox stay"),
        },
    )


def _volumes(reader: _Reader, at: str, given: Sequence[Any]) -> frozenset[str]:
    names: set[str] = set()
    on_disk = reader.must_be("", why="a folder of a sandbox is on its disk")

    def empty(place: str, value: object) -> None:
        reader.fields(place, value, {"medium": on_disk})

    for number, one in enumerate(given):
        known = {"name": lambda _, name: names.add(str(name)), "emptyDir": empty}
        reader.fields(f"{at}[{number}]", one, known)
    return frozenset(names)


def _environment(reader: _Reader, at: str, given: Sequence[Any]) -> dict[str, str]:
    made: dict[str, str] = {}
    fields: dict[str, str] = {}

    def keep(what: str) -> Callable[[str, Any], None]:
        return lambda _at, value: fields.update({what: str(value)})

    known = {
        "name": keep("name"),
        "value": keep("value"),
        "valueFrom": reader.must_be(why="a host reads no Secret, ConfigMap or Pod for it"),
    }
    for number, one in enumerate(given):
        fields.clear()
        reader.fields(f"{at}[{number}]", one, known)
        made[fields.get("name", "")] = _expander(made)(fields.get("value", ""))
    return made


def _merged(
    reader: _Reader, own: Mapping[str, str], given: Mapping[str, str], policy: str
) -> dict[str, str]:
    for name in sorted(given):
        if policy == "Disallowed" or (policy == "Allowed" and name in own):
            reader.refuse("envVarsInjectionPolicy", f"{policy}: {name} may not be set")
    return {**own, **given}


def _expander(known: Mapping[str, str]) -> Callable[[str], str]:
    """Put variables into a text as Kubernetes does; one that is not known stays as it is."""

    def put(found: re.Match[str]) -> str:
        if found.group(1) is None:
            return "$"
        return known.get(found.group(1), found.group(0))

    return lambda text: _REFERENCE.sub(put, text)


def _amounts(reader: _Reader, at: str, given: object) -> TemplateLimits:
    found: dict[str, Decimal] = {}

    def amount(place: str, value: object) -> None:
        quantity = _QUANTITY.fullmatch(str(value))
        try:
            number, unit = quantity.groups() if quantity is not None else ("", "")
            made = Decimal(number) * _POWERS[unit]
        except (InvalidOperation, KeyError):
            made = _MOST
        if made >= _MOST:
            return reader.refuse(place, f"{value!r} is no quantity")
        found[place] = made
        return None

    reader.fields(at, given, dict.fromkeys(("cpu", "memory", "ephemeral-storage"), amount))
    cpus = found.get(f"{at}.cpu")
    memory, disk = found.get(f"{at}.memory"), found.get(f"{at}.ephemeral-storage")
    return TemplateLimits(
        None if cpus is None else float(cpus),
        None if memory is None else int(memory),
        None if disk is None else int(disk),
    )


def _networks(reader: _Reader, found: Fields) -> tuple[Network, ...] | None:
    if found.get("management", "Managed") == "Unmanaged":
        if "policy" in found:
            reader.passed_over.append("networkPolicy")  # so its controller does, too
        return None
    if "policy" not in found:
        return PUBLIC
    policy, made = found["policy"], list[Network]()

    def egress(at: str, rules: Sequence[Any]) -> None:
        for number, one in enumerate(rules):
            made.extend(_rule(reader, f"{at}[{number}]", one))

    def ingress(at: str, _rules: object) -> None:
        reader.passed_over.append(at)  # no port of a sandbox is in any network

    reader.fields("networkPolicy", policy, {"egress": egress, "ingress": ingress})
    return tuple(made)


def _rule(reader: _Reader, at: str, rule: object) -> list[Network]:
    ports: list[tuple[int, int]] = []
    blocks: list[Network] = []
    seen: dict[str, bool] = {}

    def port(place: str, value: Sequence[Any]) -> None:
        for number, one in enumerate(value):
            seen["ports"] = True
            _port(reader, f"{place}[{number}]", one, ports)

    def peers(place: str, value: Sequence[Any]) -> None:
        seen["to"] = True
        why = "the host's proxy knows addresses, and no pods"
        for number, one in enumerate(value):
            reader.fields(
                f"{place}[{number}]",
                one,
                {
                    "ipBlock": lambda where, block: blocks.extend(_block(reader, where, block)),
                    "podSelector": reader.must_be(why=why),
                    "namespaceSelector": reader.must_be(why=why),
                },
            )

    reader.fields(at, rule, {"ports": port, "to": peers})
    if "ports" in seen and not ports:
        return []  # of names alone, which the host asks for
    to = blocks if "to" in seen else list(_ANY)
    return [replace(one, ports=tuple(ports)) for one in to]


def _port(reader: _Reader, at: str, given: object, ports: list[tuple[int, int]]) -> None:
    if not isinstance(given, Mapping):
        return reader.refuse(at, "it is no port")
    first, last = given.get("port"), given.get("endPort")
    protocol = given.get("protocol", "TCP")
    if protocol == "UDP" and first == _DNS_PORT:
        reader.passed_over.append(at)  # names are asked for by the host's proxy
    elif protocol != "TCP":
        reader.refuse(f"{at}.protocol", f"{protocol}: the host's proxy speaks TCP")
    elif first is None:
        ports.append((1, 65535))
    elif not isinstance(first, int):
        reader.refuse(f"{at}.port", f"{first!r}: outside of the cluster no port has a name")
    else:
        ports.append((first, last if isinstance(last, int) else first))
    return None


def _block(reader: _Reader, at: str, given: object) -> list[Network]:
    found: dict[str, Any] = {"cidr": "", "except": []}
    reader.fields(
        at,
        given,
        {
            "cidr": lambda _, value: found.update({"cidr": value}),
            "except": lambda _, value: found.update({"except": value}),
        },
    )
    try:
        for one in (found["cidr"], *found["except"]):
            ipaddress.ip_network(one, strict=False)
    except ValueError as error:
        reader.refuse(at, str(error))
        return []
    return [Network(str(found["cidr"]), tuple(map(str, found["except"])))]
