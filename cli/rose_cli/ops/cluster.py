"""A cluster as the verbs for people see it: typed objects, errors a person can act on."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import httpx
import yaml
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError, LoadResourceError
from lightkube.generic_resource import (
    GenericNamespacedResource,
    create_api_info,
    create_global_resource,
    create_namespaced_resource,
)
from lightkube.types import PatchType

from rose_cli.ops.errors import (
    CommandError,
    NoAnswer,
    NoCluster,
    NotAllowed,
    NotFound,
    NotInstalled,
)
from rose_core.api import GROUP, VERSION, RolloutLease, RolloutSlot, ServingPool, TenantPolicy
from rose_wire.flags import VerbParser

KindT = TypeVar("KindT", bound=ServingPool | RolloutLease | RolloutSlot)
_POLL_SECONDS = 0.3
_NOT_ONE = "clusters, users or contexts are missing"
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_POLICIES = create_global_resource(GROUP, VERSION, "TenantPolicy", "tenantpolicies")
_PLURALS: dict[type, str] = {
    ServingPool: "servingpools",
    RolloutLease: "rolloutleases",
    RolloutSlot: "rolloutslots",
}


class _Pod(GenericNamespacedResource):
    _api_info = create_api_info("", "v1", "Pod", "pods")


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
        try:
            config = _config(given.kubeconfig, given.context)
            self._client = Client(config=config, trust_env=False)
        except (ConfigError, OSError) as error:
            message = f"no cluster: {error}; set KUBECONFIG, or give --kubeconfig and --context"
            raise NoCluster(message) from error
        self._server = config.cluster.server
        everywhere = getattr(given, "all_namespaces", False)
        chosen = getattr(given, "namespace", None) or self._client.namespace
        self.namespace: str | None = None if everywhere else chosen

    @property
    def where(self) -> str:
        """Where it looks, for people who find nothing."""
        if self.namespace is None:
            return "in any namespace"
        return f"in namespace {self.namespace} (-A: in all)"

    def close(self) -> None:
        """Close the connections."""
        self._client._client._client.close()  # noqa: SLF001  # lightkube's Client has no close

    def objects(self, kind: type[KindT], *, everywhere: bool = False) -> list[KindT]:
        """Objects of a kind, by key; those that cannot be read are left out and named.

        Raises:
            CommandError: as everywhere in this class.
        """
        namespace = "*" if everywhere else self.namespace or "*"
        with self._reporting():
            found = [dict(one) for one in self._client.list(_resource(kind), namespace=namespace)]
        good = [parsed for raw in found if (parsed := _parse(kind, raw)) is not None]
        return sorted(good, key=lambda one: one.metadata.key)

    def policies(self) -> list[TenantPolicy]:
        """The platform's policies, by name; they belong to no namespace.

        Raises:
            NotAllowed: the person may not read them.
        """
        with self._reporting():
            found = [dict(one) for one in self._client.list(_POLICIES)]
        return [TenantPolicy.model_validate(raw) for raw in found]

    def get(self, kind: type[KindT], name: str) -> KindT:
        """One object of the namespace."""
        if "/" in name:
            namespace, _, own = name.partition("/")
            raise CommandError(f"{name!r} is no name; give --namespace {namespace} and {own}")
        with self._placed():
            raw = dict(self._client.get(_resource(kind), name, namespace=self._required()))
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
        with self._reporting():
            self._client.patch(
                _resource(kind),
                name,
                changes,
                namespace=self._required(),
                patch_type=PatchType.MERGE,
            )

    def pods_of(self, node: str) -> list[dict[str, Any]]:
        """Pods of a node, of all namespaces."""
        with self._reporting():
            listed = self._client.list(_Pod, namespace="*", fields={"spec.nodeName": node})
            return [dict(pod) for pod in listed]

    def annotate_pod(self, namespace: str, name: str, annotations: dict[str, str | None]) -> None:
        """Set annotations of a pod; None removes one."""
        with self._reporting():
            self._client.patch(
                _Pod,
                name,
                {"metadata": {"annotations": annotations}},
                namespace=namespace,
                patch_type=PatchType.MERGE,
            )

    def _required(self) -> str:
        if self.namespace is None:
            raise CommandError("-A does not go with a name; give --namespace")
        return self.namespace

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Say where a name was looked for: a forgotten namespace is the usual mistake."""
        try:
            with self._reporting():
                yield
        except NotFound as error:
            raise NotFound(f"{error} in namespace {self.namespace}; give --namespace") from error

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            raise _translate(error) from error
        except (httpx.HTTPError, LoadResourceError) as error:
            message = (
                f"the API server {self._server} cannot be reached: {error}; look at the network, "
                "or give another --context"
            )
            raise NoCluster(message) from error


def _config(path: str | None, context: str | None) -> SingleConfig:
    try:
        loaded = KubeConfig.from_file(path) if path else KubeConfig.from_env()
    except (yaml.YAMLError, AttributeError, TypeError, KeyError, ValueError) as error:
        where = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
        summary = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError) else _NOT_ONE
        message = f"{where} is no kubeconfig ({summary})"
        raise ConfigError(message) from error
    if context is not None and context not in loaded.contexts:
        known = ", ".join(sorted(loaded.contexts)) or "none"
        raise ConfigError(f"the kubeconfig has no context {context!r}; it has: {known}")
    config = loaded.get(context)
    if config is None:
        raise ConfigError("the kubeconfig names no current context")
    return config


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


def _resource(kind: type) -> Any:  # noqa: ANN401  # lightkube's own dynamic classes
    return create_namespaced_resource(GROUP, VERSION, kind.__name__, _PLURALS[kind])


def _parse(kind: type[KindT], raw: dict[str, Any]) -> KindT | None:
    try:
        return cast("KindT", kind.model_validate(raw))
    except ValueError as error:
        metadata = raw["metadata"]
        name = f"{metadata.get('namespace', '')}/{metadata['name']}"
        sys.stderr.write(f"{kind.__name__} {name} cannot be read: {error}\n")
        return None


def _remedy(error: ApiError) -> str:
    """Which role gives the right that is missing."""
    if error.status.details is not None and error.status.details.kind == "pods":
        return "the ClusterRole edit gives this right in the namespace of the pods"
    return "the ClusterRoles rose-KIND-viewer and rose-KIND-editor give these rights"


def _translate(error: ApiError) -> CommandError:
    code, text = error.status.code, error.status.message or "refused"
    if code == _UNAUTHORIZED:
        return NotAllowed(f"{text}; log in again, or give --kubeconfig and --context")
    if code == _FORBIDDEN:
        return NotAllowed(f"{text}; {_remedy(error)}")
    if code == _NOT_FOUND and error.status.details is not None and error.status.details.name:
        return NotFound(text)
    if code == _NOT_FOUND:
        return NotInstalled(
            "this cluster does not know ROSE's kinds; install the chart helm/rose first"
        )
    return CommandError(f"{code}: {text}")
