"""Tells KEDA how many workers are wished for: its external scaler, by push.

KEDA dials ``externalscaler.ExternalScaler`` and names a team in the trigger's metadata. It is told
at once when the first reward waits, so that the Deployment comes up from zero; between one and n
it asks for the wish when its autoscaler looks. The messages are KEDA's ``externalscaler.proto``,
described here for protobuf's own library instead of compiled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "externalscaler.ExternalScaler"
METHODS = ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
METRIC = "rose-rewards"
_LOOK_SECONDS = 0.2
_STRING, _BOOL, _DOUBLE, _INT64, _MESSAGE = 9, 8, 1, 3, 11
_ONE, _MANY = 1, 3
_FIELDS: dict[str, list[tuple[str, int, int, str]]] = {
    "ScaledObjectRef.ScalerMetadataEntry": [
        ("key", _STRING, _ONE, ""),
        ("value", _STRING, _ONE, ""),
    ],
    "ScaledObjectRef": [
        ("name", _STRING, _ONE, ""),
        ("namespace", _STRING, _ONE, ""),
        ("scalerMetadata", _MESSAGE, _MANY, "ScaledObjectRef.ScalerMetadataEntry"),
    ],
    "IsActiveResponse": [("result", _BOOL, _ONE, "")],
    "MetricSpec": [
        ("metricName", _STRING, _ONE, ""),
        ("targetSize", _INT64, _ONE, ""),
        ("targetSizeFloat", _DOUBLE, _ONE, ""),
    ],
    "GetMetricSpecResponse": [("metricSpecs", _MESSAGE, _MANY, "MetricSpec")],
    "GetMetricsRequest": [
        ("scaledObjectRef", _MESSAGE, _ONE, "ScaledObjectRef"),
        ("metricName", _STRING, _ONE, ""),
    ],
    "MetricValue": [
        ("metricName", _STRING, _ONE, ""),
        ("metricValue", _INT64, _ONE, ""),
        ("metricValueFloat", _DOUBLE, _ONE, ""),
    ],
    "GetMetricsResponse": [("metricValues", _MESSAGE, _MANY, "MetricValue")],
}


def _messages() -> dict[str, Any]:
    """Classes of the messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="rose/externalscaler.proto", package="externalscaler", syntax="proto3"
    )
    for name, fields in _FIELDS.items():
        outer, _, inner = name.partition(".")
        if inner:
            place = next((one for one in file.message_type if one.name == outer), None)
            made = (place or file.message_type.add(name=outer)).nested_type.add(name=inner)
            made.options.map_entry = True
        else:
            made = next((one for one in file.message_type if one.name == name), None) or (
                file.message_type.add(name=name)
            )
        for number, (field_name, kind, label, of) in enumerate(fields, start=1):
            field = made.field.add(name=field_name, number=number, type=kind, label=label)
            if of:
                field.type_name = f".externalscaler.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix("externalscaler."): one for name, one in found.items()}


MESSAGES = _messages()


def places_of(reference: Any) -> int:  # noqa: ANN401  # a message that is described at run time
    """Verifications at a time of one worker, as the trigger says; 1 where it says none."""
    places = reference.scalerMetadata.get("places", "1")
    return int(places) if places.isascii() and places.isdigit() and int(places) else 1


class ExternalScaler:
    """The scaler over a wish.

    Args:
        wish: verifications at a time that a team should have.
        teams: that may be asked about, as the triggers name them; nobody shows a token here.
    """

    def __init__(self, wish: Callable[[str], int], teams: Collection[str]) -> None:
        self._wish = wish
        self._teams = teams

    def handler(self) -> grpc.GenericRpcHandler:
        """Handler of the external scaler's methods, for a server of gRPC."""
        one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        wires: dict[str, tuple[Any, Any, str]] = {
            "IsActive": (one, self._is_active, "ScaledObjectRef"),
            "StreamIsActive": (many, self._stream, "ScaledObjectRef"),
            "GetMetricSpec": (one, self._spec, "ScaledObjectRef"),
            "GetMetrics": (one, self._metrics, "GetMetricsRequest"),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: made(
                    answer,
                    request_deserializer=MESSAGES[takes].FromString,
                    response_serializer=lambda message: message.SerializeToString(),
                )
                for name, (made, answer, takes) in wires.items()
            },
        )

    async def _wanted(self, reference: Any, context: Any) -> int:  # noqa: ANN401  # as above
        team = reference.scalerMetadata.get("team", "")
        if team not in self._teams:
            message = (
                f"team {team!r} has no function in --functions; the trigger's metadata names one "
                f"of {', '.join(sorted(self._teams)) or 'none'}"
            )
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return self._wish(team)

    async def _is_active(self, reference: Any, context: Any) -> Any:  # noqa: ANN401
        wanted = await self._wanted(reference, context)
        return MESSAGES["IsActiveResponse"](result=wanted > 0)

    async def _stream(self, reference: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        last = None
        while True:
            answered = await self._is_active(reference, context)
            if last is None or answered.result != last:
                last = answered.result
                yield answered
            await asyncio.sleep(_LOOK_SECONDS)

    async def _spec(self, reference: Any, _context: object) -> Any:  # noqa: ANN401
        places = places_of(reference)
        spec = MESSAGES["MetricSpec"](
            metricName=METRIC, targetSize=places, targetSizeFloat=float(places)
        )
        return MESSAGES["GetMetricSpecResponse"](metricSpecs=[spec])

    async def _metrics(self, request: Any, context: Any) -> Any:  # noqa: ANN401
        wanted = await self._wanted(request.scaledObjectRef, context)
        value = MESSAGES["MetricValue"](
            metricName=METRIC, metricValue=wanted, metricValueFloat=float(wanted)
        )
        return MESSAGES["GetMetricsResponse"](metricValues=[value])


@contextlib.asynccontextmanager
async def serving(scaler: ExternalScaler, address: str) -> AsyncIterator[int]:
    """Serve it until the block ends; gives the port.

    Raises:
        OSError: the address cannot be bound.
    """
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((scaler.handler(),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"--scaler-address {address}: {error}"
        raise OSError(message) from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
