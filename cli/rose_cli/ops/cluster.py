"""A cluster as the verbs for people see it: typed objects, errors a person can act on."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from rose_cli.ops.errors import (
    CommandError,
    NoAnswer,
    NoCluster,
    NotAllowed,
    NotFound,
    NotInstalled,
)
from rose_core.api import GROUP, VERSION, RolloutLease, RolloutSlot, ServingPool, TenantPolicy
from rose_wire.api_server import ApiServer, Resource, find_access
from rose_wire.errors import NotConfigured, StatusError, Unavailable
from rose_wire.flags import VerbParser

KindT = TypeVar("KindT", bound=ServingPool | RolloutLease | RolloutSlot)
_AnswerT = TypeVar("_AnswerT")
_POLL_SECONDS = 0.3
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_POLICIES = Resource(GROUP, VERSION, "TenantPolicy", "tenantpolicies", namespaced=False)
_PODS = Resource("", "v1", "Pod", "pods")
_RESOURCES: dict[type, Resource] = {
    ServingPool: Resource(GROUP, VERSION, "ServingPool", "servingpools"),
    RolloutLease: Resource(GROUP, VERSION, "RolloutLease", "rolloutleases"),
    RolloutSlot: Resource(GROUP, VERSION, "RolloutSlot", "rolloutslots"),
}


def connection_flags(*, namespaced: bool = True) -> VerbParser:
    """Flags that every verb has, spelled as kubectl's."""
    parent = VerbParser(add_help=False)
    group = parent.add_argument_group("cluster")
    group.add_argument("--kubeconfig", help="file to use instead of KUBECONFIG")
    group.add_argument("--context", help="context of the kubeconfig")
    if namespaced:
        group.add_argument("-n", "--namespace", help="default: the context's")
        group.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    return parent


def run(name: str, given: argparse.Namespace, body: Callable[[Cluster], int]) -> int:
    """Run a verb's body on the cluster; its errors become a line and exit code 1."""
    try:
        with contextlib.closing(Cluster(given)) as cluster:
            return body(cluster)
    except CommandError as error:
        sys.stderr.write(f"rose {name}: {error}\n")
        return 1


class Cluster:
    """Requests of a person.

    Args:
        given: parsed ``connection_flags``.

    Raises:
        NoCluster: there is no kubeconfig, or the context is not in it.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._runner = asyncio.Runner()
        path = Path(given.kubeconfig) if given.kubeconfig else None
        try:
            access = self._runner.run(find_access(path, given.context))
            self._api = ApiServer(access, trust_env=False)
        except NotConfigured as error:
            self._runner.close()
            message = f"no cluster: {error}; set KUBECONFIG, or give --kubeconfig and --context"
            raise NoCluster(message) from error
        self._server = access.server
        everywhere = getattr(given, "all_namespaces", False)
        chosen = getattr(given, "namespace", None) or access.namespace
        self.namespace: str | None = None if everywhere else chosen

    @property
    def where(self) -> str:
        """Where it looks, for people who find nothing."""
        if self.namespace is None:
            return "in any namespace"
        return f"in namespace {self.namespace} (-A: in all)"

    def close(self) -> None:
        """Close the connections."""
        with self._runner:
            self._runner.run(self._api.close())

    def objects(self, kind: type[KindT], *, everywhere: bool = False) -> list[KindT]:
        """Objects of a kind, by key; those that cannot be read are left out and named.

        Raises:
            CommandError: as everywhere in this class.
        """
        namespace = None if everywhere else self.namespace
        found = self._ask(self._api.list(_RESOURCES[kind], namespace))[0]
        good = [parsed for raw in found if (parsed := _parse(kind, raw)) is not None]
        return sorted(good, key=lambda one: one.metadata.key)

    def policies(self) -> list[TenantPolicy]:
        """The platform's policies, by name; they belong to no namespace.

        Raises:
            NotAllowed: the person may not read them.
        """
        found = self._ask(self._api.list(_POLICIES))[0]
        return [TenantPolicy.model_validate(raw) for raw in found]

    def get(self, kind: type[KindT], name: str) -> KindT:
        """One object of the namespace."""
        if "/" in name:
            namespace, _, own = name.partition("/")
            raise CommandError(f"{name!r} is no name; give --namespace {namespace} and {own}")
        with self._placed():
            raw = self._ask(self._api.get(_RESOURCES[kind], name, self._required()))
        found = _parse(kind, raw)
        if found is None:
            message = (
                f"{name} cannot be used as it is (see above); correct it with kubectl edit, or use "
                "a rose of the chart's version"
            )
            raise CommandError(message)
        return found

    def patch(self, kind: type[KindT], name: str, changes: dict[str, Any]) -> None:
        """Merge changes into an object of the namespace."""
        self._ask(self._api.merge(_RESOURCES[kind], name, changes, self._required()))

    def pods_of(self, node: str) -> list[dict[str, Any]]:
        """Pods of a node, of all namespaces."""
        return self._ask(self._api.list(_PODS, fields=f"spec.nodeName={node}"))[0]

    def annotate_pod(self, namespace: str, name: str, annotations: dict[str, str | None]) -> None:
        """Set annotations of a pod; None removes one."""
        changes = {"metadata": {"annotations": annotations}}
        self._ask(self._api.merge(_PODS, name, changes, namespace))

    def _required(self) -> str:
        if self.namespace is None:
            raise CommandError("-A does not go with a name; give --namespace")
        return self.namespace

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Say where a name was looked for: a forgotten namespace is the usual mistake."""
        try:
            yield
        except NotFound as error:
            raise NotFound(f"{error} in namespace {self.namespace}; give --namespace") from error

    def _ask(self, request: Coroutine[Any, Any, _AnswerT]) -> _AnswerT:
        try:
            return self._runner.run(request)
        except StatusError as error:
            raise _translate(error) from error
        except Unavailable as error:
            message = (
                f"the API server {self._server} cannot be reached: {error}; look at the network, "
                "or give another --context"
            )
            raise NoCluster(message) from error


def until(look: Callable[[], bool], seconds: float, message: str) -> None:
    """Wait for something to be so.

    Raises:
        NoAnswer: it was not, in time; the message says what to look at.
    """
    end = time.monotonic() + seconds
    while not look():
        if time.monotonic() > end:
            raise NoAnswer(message)
        time.sleep(_POLL_SECONDS)


def _parse(kind: type[KindT], raw: dict[str, Any]) -> KindT | None:
    try:
        return cast("KindT", kind.model_validate(raw))
    except ValueError as error:
        metadata = raw["metadata"]
        name = f"{metadata.get('namespace', '')}/{metadata['name']}"
        sys.stderr.write(f"{kind.__name__} {name} cannot be read: {error}\n")
        return None


def _remedy(error: StatusError) -> str:
    """Which role gives the right that is missing."""
    if error.details.get("kind") == "pods":
        return "the ClusterRole edit gives this right in the namespace of the pods"
    return "the ClusterRoles rose-KIND-viewer and rose-KIND-editor give these rights"


def _translate(error: StatusError) -> CommandError:
    code, text = error.code, error.message
    if code == _UNAUTHORIZED:
        return NotAllowed(f"{text}; log in again, or give --kubeconfig and --context")
    if code == _FORBIDDEN:
        return NotAllowed(f"{text}; {_remedy(error)}")
    if code == _NOT_FOUND and error.details.get("name"):
        return NotFound(text)
    if code == _NOT_FOUND:
        return NotInstalled(
            "this cluster does not know ROSE's kinds; install the chart helm/rose first"
        )
    return CommandError(f"{code}: {text}")
