"""Which requests make an engine compute: known quiet paths are ignored, everything else counts.

A path that is not listed counts as generating, so a new engine version errs on the safe side.
"""

from __future__ import annotations

_QUIET = frozenset(
    {
        "/",
        "/ready",
        "/ping",
        "/metrics",
        "/v1/loads",
        "/v1/models",
        "/load",
        "/version",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/weight_info",
        "/is_paused",
        "/is_sleeping",
        "/openapi.json",
        "/docs",
        "/favicon.ico",
    }
)
# SGLang's health pages run a one-token generation when idle unless told otherwise; the probe is
# periodic and short, and closing for it would punish every kubelet. It is counted as quiet.
_PROBES = frozenset({"/health", "/health_generate", "/healthz", "/livez", "/readyz"})


def bare(path: str) -> str:
    """The path without its query."""
    return path.split("?", 1)[0]


def generates(method: str, path: str) -> bool:
    """Whether the request may make the engine compute."""
    return method not in {"HEAD", "OPTIONS"} and bare(path) not in _QUIET | _PROBES
