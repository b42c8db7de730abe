"""Requests to a Kubernetes API server: the one module that imports its official client.

Objects are dictionaries as the server has them, kinds are ``Resource``s: nothing is asked of the
server to find out how it names them. Whoever asks decides what an error means to him; here it is
either a status that the server gave or that it gave none.

Next step: ``rose_operator.kube.api``, ``rose_cli.ops.cluster`` and
``rose_sandbox.cluster_templates`` ask.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import yaml
from kubernetes.aio import client, dynamic, watch
from kubernetes.aio.client import rest
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from rose_wire.errors import NotConfigured, StatusError, Unavailable

Raw = dict[str, Any]
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KUBECONFIG = "~/.kube/config"
ANSWER_SECONDS = 10.0
_PAGE = 250
# The server ends a watch after this, and a bookmark says from where the next one goes on. With the
# wait for an answer it is a minute: what hangs on a connection that leads nowhere is no older.
WATCH_SECONDS = 50
_UNAUTHORIZED = 401


@dataclass(frozen=True)
class Resource:
    """Where an API server has the objects of a kind.

    Attributes:
        group: empty = the core one.
        plural: the kind's name in paths.
        namespaced: whether objects lie in namespaces.
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Group and version, as manifests name them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Of all objects, of a namespace's, or of one of them."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(frozen=True)
class ClusterAccess:
    """An API server, and by what it knows us.

    Attributes:
        configuration: of the official client.
        namespace: of whoever names none.
        renew: looks for the same anew, since credentials are replaced while a process runs.
    """

    configuration: Any
    namespace: str = "default"
    renew: Callable[[], Awaitable[ClusterAccess]] | None = None

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self.configuration.host)


def access_to(server: str, token: str = "", authority: Path | None = None) -> ClusterAccess:
    """Access to a server whose URL is known.

    Args:
        server: its URL.
        token: what it knows us by; empty = nothing.
        authority: file of the authority that it is known by; None = the system's.
    """
    configuration = client.Configuration()
    configuration.host = server.rstrip("/")
    configuration.ssl_ca_cert = None if authority is None else str(authority)
    if token:
        configuration.api_key["BearerToken"] = f"Bearer {token}"
    return ClusterAccess(configuration)


async def find_access(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    service_account: Path = SERVICE_ACCOUNT,
) -> ClusterAccess:
    """Access as a process finds it: of its pod, else by ``KUBECONFIG``, else in the home directory.

    Args:
        kubeconfig: a file to read instead of all of these.
        context: of the file, instead of its current one.
        service_account: the folder of a pod's.

    Raises:
        NotConfigured: there is none, or the file is no kubeconfig.
    """
    configuration = client.Configuration()
    try:
        if kubeconfig is None and context is None and _is_pod(configuration, service_account):
            namespace = (service_account / "namespace").read_text()
        else:
            namespace = await _read_kubeconfig(configuration, kubeconfig, context)
    except (ConfigException, OSError) as error:
        raise NotConfigured(str(error)) from error

    async def renew() -> ClusterAccess:
        return await find_access(kubeconfig, context, service_account=service_account)

    return ClusterAccess(configuration, namespace, renew)


def _is_pod(configuration: client.Configuration, folder: Path) -> bool:
    loader = InClusterConfigLoader(str(folder / "token"), str(folder / "ca.crt"))
    try:
        loader.load_and_set(configuration)
    except ConfigException:
        return False
    return True


async def _read_kubeconfig(
    configuration: client.Configuration, kubeconfig: Path | None, context: str | None
) -> str:
    """Set what a kubeconfig says.

    Returns:
        The namespace of its context.
    """
    paths = str(kubeconfig or os.environ.get("KUBECONFIG") or _KUBECONFIG)
    config, contexts = _parse(paths)
    chosen = config.safe_get("current-context") if context is None else context
    if not chosen:
        raise NotConfigured("the kubeconfig names no current context")
    if chosen not in contexts:
        known = ", ".join(sorted(contexts))
        raise NotConfigured(f"the kubeconfig has no context {chosen!r}; it has: {known}")
    # No base path: a file that is named relatively lies beside the kubeconfig that names it.
    loader = KubeConfigLoader(config, active_context=chosen, config_base_path=None)
    try:
        await loader.load_and_set(configuration)
        asks_plugin = _asks_plugin(config, contexts[chosen])
    except (TypeError, ValueError, KeyError) as error:
        raise NotConfigured(f"cluster or user of context {chosen!r} is wrong: {error}") from error
    if asks_plugin and not (configuration.api_key or configuration.cert_file):
        # The library logs why, and would ask the server as nobody.
        raise NotConfigured(f"the plugin of context {chosen!r} gave no credentials")
    return contexts[chosen].get("namespace") or "default"


def _asks_plugin(config: Any, context: Mapping[str, str]) -> bool:  # noqa: ANN401  # untyped library
    user = context.get("user")
    found = config["users"].get_with_name(user, safe=True) if user else None
    return found is not None and "exec" in found["user"]


def _parse(paths: str) -> tuple[Any, dict[str, dict[str, str]]]:
    """A kubeconfig, merged of its files as kubectl does, and its contexts by name."""
    if not any(Path(one).expanduser().is_file() for one in paths.split(os.pathsep) if one):
        raise NotConfigured(f"configuration file {paths} not found")
    summary = "clusters, users or contexts are missing"
    try:
        config = KubeConfigMerger(paths).config
        contexts = {one.value["name"]: one.value["context"] for one in config["contexts"].value}
    except yaml.YAMLError as error:
        summary = str(error).splitlines()[0]
        raise NotConfigured(f"{paths} is no kubeconfig ({summary})") from error
    except (AttributeError, TypeError, KeyError, ValueError, ConfigException) as error:
        raise NotConfigured(f"{paths} is no kubeconfig ({summary})") from error
    if not contexts or not config["clusters"].value:
        raise NotConfigured(f"{paths} is no kubeconfig ({summary})")
    return config, contexts


class ApiServer:
    """An API server that is asked on one event loop, the one of the first request.

    Args:
        access: to it.
        seconds: it may be silent for, before a request has failed.
        watch_seconds: whole ones, after which a watch is asked for anew.
        trust_env: whether the environment may name a proxy.
        field_manager: in whose name it is written.

    Raises:
        NotConfigured: its certificates cannot be read.
    """

    def __init__(
        self,
        access: ClusterAccess,
        *,
        seconds: float = ANSWER_SECONDS,
        watch_seconds: int = WATCH_SECONDS,
        trust_env: bool = True,
        field_manager: str = "rose",
    ) -> None:
        self.namespace = access.namespace
        self._access, self._field_manager = access, field_manager
        access.configuration.client_session_kwargs = {"trust_env": trust_env}
        try:
            self._client = client.ApiClient(access.configuration)
        except OSError as error:
            raise NotConfigured(f"certificates for {access.server}: {error}") from error
        self._client.user_agent = "rose"
        self._requests = dynamic.DynamicClient(self._client)
        self._patience = aiohttp.ClientTimeout(connect=seconds, sock_read=seconds)
        # A watch without changes is silent until the server ends it.
        self._watch_patience = aiohttp.ClientTimeout(
            connect=seconds, sock_read=watch_seconds + seconds
        )
        self._watch_seconds = watch_seconds
        self._renewing = asyncio.Lock()
        self._renewals = 0
        self._retired: rest.RESTClientObject | None = None

    async def close(self) -> None:
        """End its connections, on the loop that they are of."""
        await self._client.close()
        if self._retired is not None:
            await self._retired.close()

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        page: int = _PAGE,
    ) -> tuple[list[Raw], int]:
        """Objects of a kind, and the resource version of the listing; None = of all namespaces.

        Raises:
            StatusError, Unavailable: as everywhere in this class.
        """
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}  # a list says it once
        items: list[Raw] = []
        more: str | None = None
        while True:
            found = await self.request(
                "get",
                resource.path(namespace),
                label_selector=labels,
                field_selector=fields,
                limit=page,
                _continue=more,
            )
            items += [kind | item for item in found["items"]]
            more = found["metadata"].get("continue")
            if not more:
                return items, int(found["metadata"]["resourceVersion"])

    async def watch(
        self,
        resource: Resource,
        version: int,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
    ) -> AsyncGenerator[tuple[str, Raw], None]:
        """Changes after a version: what happened, and the object.

        It goes on from the last change or bookmark when the server ends it in time, and when the
        connection has been silent for longer than that: nothing is listed for it, and what it
        brings is at most ``watch_seconds`` and ``seconds`` behind a connection that died unseen.
        It ends when the server closes it before its time.

        Raises:
            StatusError: the version is too old (410), or what it says.
            Unavailable: the connection broke.
        """
        loop = asyncio.get_running_loop()
        while True:
            over = loop.time() + self._watch_seconds
            try:
                async with watch.Watch() as changes:
                    async for change in changes.stream(
                        self._begin_watch,
                        path=resource.path(namespace),
                        label_selector=labels,
                        field_selector=fields,
                        resource_version=version,
                        timeout_seconds=self._watch_seconds,
                    ):
                        version = int(change["raw_object"]["metadata"]["resourceVersion"])
                        if change["type"] != "BOOKMARK":
                            yield change["type"], change["raw_object"]
            except client.ApiException as error:
                raise _status_of(error) from error
            except Exception as error:  # what the client stumbles over in a line that is no event
                if not isinstance(error, TimeoutError) or loop.time() < over:
                    raise Unavailable(f"{type(error).__name__}: {error}") from error
            if loop.time() < over:
                return

    async def _begin_watch(self, *, path: str, **given: object) -> object:
        return await self._authorized(
            lambda: self._requests.request(
                "get",
                path,
                serialize=False,
                query_params=[("allowWatchBookmarks", "true")],
                _request_timeout=self._watch_patience,
                **given,
            )
        )

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, subresource: str = ""
    ) -> Raw:
        """One object."""
        return await self.request("get", self._path(resource, namespace, name, subresource))

    async def create(self, resource: Resource, manifest: Raw, *, dry_run: bool = False) -> Raw:
        """Create an object that must not exist yet, or only see what it would be."""
        return await self._write("post", resource, manifest, "", dry_run="All" if dry_run else None)

    async def replace(self, resource: Resource, manifest: Raw) -> Raw:
        """Replace an object if it still has the manifest's resource version."""
        return await self._write("put", resource, manifest, manifest["metadata"]["name"])

    async def apply(self, resource: Resource, manifest: Raw, subresource: str = "") -> Raw:
        """Create or change what is ours of an object, by force (server-side apply)."""
        return await self._write(
            "patch",
            resource,
            manifest,
            manifest["metadata"]["name"],
            subresource,
            content_type="application/apply-patch+yaml",
            force_conflicts=True,
        )

    async def merge(
        self,
        resource: Resource,
        name: str,
        changes: Raw,
        namespace: str | None = None,
        subresource: str = "",
    ) -> Raw:
        """Merge changes into an object; None removes a field."""
        return await self.request(
            "patch",
            self._path(resource, namespace, name, subresource),
            body=changes,
            content_type="application/merge-patch+json",
            field_manager=self._field_manager,
        )

    async def delete(self, resource: Resource, name: str, namespace: str | None = None) -> None:
        """Begin to delete an object."""
        await self.request("delete", self._path(resource, namespace, name))

    async def request(self, method: str, path: str, **given: object) -> Raw:
        """What the server answers, for what has no method here.

        Args:
            method: of HTTP.
            path: on the server.
            given: of the official dynamic client's ``request``.
        """

        async def ask() -> Any:  # noqa: ANN401  # JSON
            return await self._requests.request(
                method,
                path,
                serializer=lambda _client, data: data,
                _request_timeout=self._patience,
                **given,
            )

        try:
            found: Raw = await self._authorized(ask)
        except client.ApiException as error:
            raise _status_of(error) from error
        # A token's file is read by a request too.
        except (aiohttp.ClientError, TimeoutError, ValueError, ConfigException, OSError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        return found

    async def _authorized(self, ask: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401  # JSON
        """Ask, and once more if the server knows us again by what the credentials are now."""
        known_by = self._renewals
        try:
            return await ask()
        except client.ApiException as error:
            if error.status != _UNAUTHORIZED or not await self._renew(known_by):
                raise
        return await ask()

    async def _renew(self, known_by: int) -> bool:
        """Read the credentials anew: a token is replaced before it ends, a plugin's has ended.

        Args:
            known_by: renewals before the request that was refused; its neighbours are refused with
                it, and one of them renews for all.

        Returns:
            Whether there are any.
        """
        if self._access.renew is None:
            return False
        async with self._renewing:
            if self._renewals != known_by:
                return True
            try:
                new = (await self._access.renew()).configuration
                mine = self._client.configuration
                mine.api_key, mine.refresh_api_key_hook = new.api_key, new.refresh_api_key_hook
                if new.cert_file:
                    mine.cert_file, mine.key_file = new.cert_file, new.key_file
                    await self._reconnect()
            except (NotConfigured, OSError):
                return False
            self._renewals += 1
        return True

    async def _reconnect(self) -> None:
        """Show the certificate that the configuration names now: a connection shows one for good.

        Requests under way keep the connections before, which end at the next time.
        """
        connections = rest.RESTClientObject(self._client.configuration)
        retired, self._retired = self._retired, self._client.rest_client
        self._client.rest_client = connections
        if retired is not None:
            await retired.close()

    async def _write(
        self,
        method: str,
        resource: Resource,
        manifest: Raw,
        name: str,
        subresource: str = "",
        **more: object,
    ) -> Raw:
        namespace = manifest["metadata"].get("namespace")
        return await self.request(
            method,
            self._path(resource, namespace, name, subresource),
            body={"apiVersion": resource.api_version, "kind": resource.kind} | manifest,
            field_manager=self._field_manager,
            **more,
        )

    def _path(
        self, resource: Resource, namespace: str | None, name: str, subresource: str = ""
    ) -> str:
        return resource.path(namespace or self.namespace, name, subresource)


def _status_of(error: client.ApiException) -> StatusError:
    """An overloaded server, and whatever stands before it, answers in plain text."""
    try:
        status = json.loads(error.body or "")
    except ValueError:
        status = None
    if not isinstance(status, dict):
        status = {}
    asked = (error.headers or {}).get("Retry-After", "")
    return StatusError(
        int(error.status or 0),
        status.get("message") or error.reason or "refused",
        status.get("details") or {},
        float(asked) if asked.isdecimal() else 0.0,
    )
