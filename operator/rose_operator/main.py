"""``rose operator``: flags, logging, the process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time

from rose_operator import own_secrets
from rose_operator.app import Operator
from rose_operator.errors import ApiRefused, ApiUnavailable, ConfigurationError
from rose_operator.kube.api import FIELD_MANAGER, Api
from rose_operator.settings import Settings, parse
from rose_wire.api_server import ANSWER_SECONDS, ApiServer, find_access
from rose_wire.errors import NotConfigured

# So many requests that get no answer fit into the duration of the Lease.
_LOCK_REQUESTS = 5


def main(argv: list[str]) -> int:
    """Run the operator until a signal.

    Returns:
        0 after a signal, 1 when another operator took the lead or the API server does not give the
        keys of its service accounts or lets it fill its own Secrets, 2 when a flag is wrong.
    """
    own = own_secrets.options(argv)
    if own is not None and (code := asyncio.run(_make(own, argv))):
        return code
    try:
        settings = parse(argv)
    except ConfigurationError as error:
        sys.stderr.write(f"rose operator: {error}\n")
        return 2
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # kopf tells every failed attempt of every watch; the leader lock already tells the outage.
    logging.getLogger("kopf").setLevel(logging.CRITICAL)
    _spare_collections()
    return asyncio.run(_run(settings))


async def _make(own: own_secrets.SecretOptions, argv: list[str]) -> int:
    """What the other flags name may be what is made here, so it comes before they are read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--namespace", default="rose-system")
    namespace: str = parser.parse_known_args(argv)[0].namespace
    try:
        server = await _server()
    except NotConfigured as error:
        return _no_cluster(error)
    try:
        await own_secrets.OwnSecrets(Api(server, namespace), own, wall=time.time).make()
    except (ApiRefused, OSError) as error:
        sys.stderr.write(f"rose operator: own secrets: {error}\n")
        return 1
    finally:
        await server.close()
    return 0


async def _server(seconds: float = ANSWER_SECONDS) -> ApiServer:
    return ApiServer(await find_access(), seconds=seconds, field_manager=FIELD_MANAGER)


def _no_cluster(error: NotConfigured) -> int:
    text = f"no cluster: {error}; run it in a pod, or set KUBECONFIG"
    sys.stderr.write(f"rose operator: {text}\n")
    return 2


def _spare_collections() -> None:
    """Let the cycle collector look less often: a pass over a large fleet makes few cycles.

    Reports and passes make tens of thousands of objects that their reference counts free; at the
    usual threshold each few hundred of them have those that stay walked again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


async def _run(settings: Settings) -> int:
    try:
        server = await _server()
        # The lock's requests must fail while there is still time for another try.
        lock_server = await _server(settings.lock_seconds / _LOCK_REQUESTS)
    except NotConfigured as error:
        return _no_cluster(error)
    try:
        operator = Operator(settings, server, lock_server)
        if settings.router_authentication:
            await operator.keys.read()
        return await operator.run()
    except (ApiRefused, ApiUnavailable) as error:
        sys.stderr.write(
            f"rose operator: the keys of this cluster's service accounts, by which routers know "
            f"their callers: {error}. Service accounts may read /openid/v1/jwks by the ClusterRole "
            "system:service-account-issuer-discovery; without it set the chart's value "
            "router.authentication=false\n"
        )
        return 1
    finally:
        await server.close()
