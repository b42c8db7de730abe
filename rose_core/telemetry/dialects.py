"""Figures that SGLang and vLLM publish, read into one shape; what is absent stays unknown.

Traps that decide the reading (measured, ``docs/tap.md``): SGLang's ``http_requests_active`` leaks,
so it is never read; queue and running gauges of ``/metrics`` refresh with the log, so they may
close the gate but never open it; a load snapshot says running 0 after the first prefill, so a
change of its token counters means busy; it leaves out what is zero; vLLM's ``/load`` is zero for
ever unless the server was told to count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from rose_core.telemetry.paths import generates

_SNAPSHOT_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Figures:
    """What one engine says about itself; None is unknown.

    Attributes:
        running, waiting: requests.
        kv_permille: KV pool in use, thousandths.
        requests: requests counted by the engine since its start, by path.
        at_arrival: ``requests`` moves when a request arrives; otherwise when it ends.
        activity: any figure that moves when the engine works; compare for change only.
        level_only: nothing tells a true zero from a gauge that is switched off.
        input_tokens, output_tokens: of prompts and answers since the engine's start.
    """

    running: int | None = None
    waiting: int | None = None
    kv_permille: int | None = None
    requests: dict[str, int] | None = None
    at_arrival: bool = True
    activity: tuple[int, ...] = ()
    level_only: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None


Sample = tuple[str, dict[str, str], float]


def samples(text: str) -> Iterator[Sample]:
    """Lines of a Prometheus page; lines that are none are passed over."""
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        name, labels, rest = _split(line)
        try:
            yield name, labels, float(rest.split()[0])
        except (ValueError, IndexError):
            continue


def _split(line: str) -> tuple[str, dict[str, str], str]:
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, rest = line.partition(" ")
        return name, {}, rest
    inner, _, rest = rest.rpartition("}")
    labels = {}
    for pair in inner.split('",'):
        key, _, value = pair.partition('="')
        labels[key.strip(", ")] = value.rstrip('"')
    return name, labels, rest


def _declared(text: str, family: str) -> dict[str, int] | None:
    """No requests, where the counter is there but has counted none yet; else unknown."""
    return {} if f"# TYPE {family} counter" in text else None


_GARBAGE = (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What reading a page raises that is none: missing, of another type, endless, nested too deep."""


def _whole(value: float) -> int | None:
    return int(value) if 0 <= value < 2**53 else None


def sglang_metrics(text: str) -> Figures:
    """SGLang's ``/metrics``."""
    found = _counted(text, "sglang:http_requests_total", "endpoint", "sglang:")
    if found is None:
        return Figures()
    requests, gauges = found
    figures = _figures(gauges, requests, "num_running_reqs", "num_queue_reqs", "token_usage")
    ended = _whole(gauges.get("num_requests_total", -1))
    if requests is None and ended is not None:
        # Without HTTP counters (older servers): this one moves when a request ends.
        return replace(figures, requests={"/generate": ended}, at_arrival=False)
    return figures


def vllm_metrics(text: str) -> Figures:
    """VLLM's ``/metrics``; its requests are counted when they end."""
    found = _counted(text, "http_requests_total", "handler", "vllm:")
    if found is None:
        return Figures()
    requests, gauges = found
    older = "kv_cache_usage_perc" not in gauges
    usage = "gpu_cache_usage_perc" if older else "kv_cache_usage_perc"
    figures = _figures(gauges, requests, "num_requests_running", "num_requests_waiting", usage)
    return replace(figures, at_arrival=False)


def _counted(
    text: str, counter: str, path_label: str, prefix: str
) -> tuple[dict[str, int] | None, dict[str, float]] | None:
    """Requests by path (None = unknown), and what else the engine says, without its prefix.

    Returns:
        None when a count is negative, endless or no number: the page is not to be believed.
    """
    requests = _declared(text, counter)
    gauges: dict[str, float] = {}
    for name, labels, value in samples(text):
        if name == counter:
            requests = {} if requests is None else requests
            path, count = labels.get(path_label, ""), _whole(value)
            if count is None:
                return None
            if generates(labels.get("method", "POST"), path):
                requests[path] = requests.get(path, 0) + count
        # SGLang says some gauges once more for each priority.
        elif labels.get("priority", "") == "" and name.startswith(prefix):
            gauges[name[len(prefix) :]] = gauges.get(name[len(prefix) :], 0.0) + value
    return requests, gauges


def _figures(
    gauges: dict[str, float],
    requests: dict[str, int] | None,
    running: str,
    waiting: str,
    usage: str,
) -> Figures:
    def whole(name: str) -> int | None:
        return _whole(gauges[name]) if name in gauges else None

    share = gauges.get(usage)
    activity = tuple(
        count
        for name in ("generation_tokens_total", "prompt_tokens_total", "realtime_tokens_total")
        if (count := whole(name)) is not None
    )
    return Figures(
        running=whole(running),
        waiting=whole(waiting),
        kv_permille=round(share * 1000) if share is not None and 0 <= share <= 1 else None,
        requests=requests,
        activity=activity,
        input_tokens=whole("prompt_tokens_total"),
        output_tokens=whole("generation_tokens_total"),
    )


METRICS = {"SGLang": sglang_metrics, "VLLM": vllm_metrics}
"""Reader of ``/metrics`` by the pool's engine kind."""


def sglang_loads(body: bytes) -> Figures:
    """SGLang's ``/v1/loads``; garbage gives unknown figures."""
    try:
        loads = msgspec.json.decode(body)["loads"]
        return _add([_load(entry, complete=True) for entry in loads])
    except _GARBAGE:
        return Figures()


def sglang_snapshot(memory: bytes) -> Figures:
    """SGLang's load snapshot in shared memory: length at byte 12, MessagePack from byte 16.

    The writer takes no lock, so a torn read is expected now and then and gives unknown figures.
    """
    try:
        (length,) = _SNAPSHOT_LENGTH.unpack_from(memory, 12)
        entry = msgspec.msgpack.decode(memory[16 : 16 + length])
        return _load(entry, complete="max_total_num_tokens" not in entry)
    except (struct.error, *_GARBAGE):
        return Figures()


class _Stat(msgspec.Struct, array_like=True, tag="LoadStat"):
    """SGLang's load feed, by position; later versions append fields."""

    running: int
    waiting: int
    used: int
    capacity: int
    rank: int | None = None
    waiting_tokens: int = 0
    total_tokens: int = 0
    most_running: int = 0
    prefilled: int = 0
    busy_us: int = 0


_stat = msgspec.msgpack.Decoder(_Stat)


def sglang_feed(message: bytes) -> Figures:
    """One message of SGLang's load feed; garbage gives unknown figures."""
    try:
        stat = _stat.decode(message)
    except _GARBAGE:
        return Figures()
    if min(stat.running, stat.waiting, stat.used, stat.prefilled) < 0:
        return Figures()
    share = round(stat.used * 1000 / stat.capacity) if stat.capacity > 0 else None
    return Figures(
        running=stat.running,
        waiting=stat.waiting,
        kv_permille=share,
        activity=(stat.prefilled, stat.used),
    )


def vllm_load(body: bytes) -> Figures:
    """VLLM's ``/load``: HTTP requests under way, if the server was told to count them."""
    try:
        under_way = msgspec.json.decode(body)["server_load"]
    except _GARBAGE:
        return Figures()
    if type(under_way) is not int or under_way < 0:
        return Figures()
    return Figures(running=under_way, waiting=0, level_only=True)


LOADS = {"SGLang": ("/v1/loads", sglang_loads), "VLLM": ("/load", vllm_load)}
"""Path and reader of the load page by the pool's engine kind."""


def _load(entry: object, *, complete: bool) -> Figures:
    """One rank's load; an incomplete one (``complete`` False) leaves out what is zero.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: it is no load.
    """
    if not isinstance(entry, dict):
        raise TypeError(type(entry))
    if complete:
        running, waiting = entry["num_running_reqs"], entry["num_waiting_reqs"]
    else:
        running, waiting = entry.get("num_running_reqs", 0), entry.get("num_waiting_reqs", 0)
    if not isinstance(running, int) or not isinstance(waiting, int) or min(running, waiting) < 0:
        return Figures()
    absent = None if complete else 0
    usage = entry.get("token_usage", absent)
    prefill = entry.get("total_prefill_uncached_tokens", absent)
    used = entry.get("num_used_tokens", absent)
    return Figures(
        running=running,
        waiting=waiting,
        kv_permille=round(usage * 1000) if isinstance(usage, int | float) else None,
        activity=tuple(v for v in (prefill, used) if isinstance(v, int)),
    )


def _add(parts: list[Figures]) -> Figures:
    if not parts or any(p.running is None or p.waiting is None for p in parts):
        return Figures()
    kv = [p.kv_permille for p in parts if p.kv_permille is not None]
    return Figures(
        running=sum(p.running or 0 for p in parts),
        waiting=sum(p.waiting or 0 for p in parts),
        kv_permille=max(kv) if kv else None,
        activity=tuple(value for p in parts for value in p.activity),
    )
