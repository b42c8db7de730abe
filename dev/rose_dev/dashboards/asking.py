"""Asks a Prometheus the panels' queries, with Grafana's variables filled in."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rose_dev.dashboards.render import Ask, Series
from rose_dev.errors import DevelopmentError

# What Grafana fills in.
FILLED = {"$__rate_interval": "30s", "$__range": "5m", "$job": ".+", "$instance": ".+"}
_POINTS = 200.0


def filled(query: str) -> str:
    """The query with every variable at "all"."""
    for name, value in FILLED.items():
        query = query.replace(name, value)
    return query


def ask(url: str, path: str, **parameters: str) -> list[dict[str, Any]]:
    """The result of a query of Prometheus' HTTP API.

    Raises:
        DevelopmentError: nobody answers there, or the query is refused.
    """
    where = f"{url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(where, timeout=30) as answer:  # noqa: S310
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        message = f"Prometheus at {url} refuses the query: {error.read().decode()[:300]}"
        raise DevelopmentError(message) from error
    except (OSError, ValueError) as error:
        message = f"no Prometheus at {url}: {error}; give its address with --prometheus"
        raise DevelopmentError(message) from error
    return found


def last(url: str, seconds: float) -> Ask:
    """Asks what a query was in the time up to now."""
    now = time.time()
    step = max(seconds / _POINTS, 1.0)
    span = {"start": f"{now - seconds:.3f}", "end": f"{now:.3f}", "step": f"{step:.3f}"}

    def history(query: str) -> list[Series]:
        return [_series(item) for item in ask(url, "query_range", query=filled(query), **span)]

    return history


def _series(item: dict[str, Any]) -> Series:
    values = ((float(at), float(value)) for at, value in item["values"])
    labels = {name: value for name, value in item["metric"].items() if name != "__name__"}
    return Series(labels, tuple(point for point in values if math.isfinite(point[1])))
