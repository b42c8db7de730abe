"""Makes a store of what ``--root`` says: a folder, or ``s3://bucket/prefix``.

A bucket's credentials, region and endpoint come from the environment (``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, or the role that the platform gives
the pod), never from the URL, which ends up in logs. ``ROSE_STORES`` is the platform's list of what
may be opened, as shell patterns: set, everything else is refused.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from rose_weights.errors import Forbidden, StoreFailed
from rose_weights.store.store import Store

ALLOWED = "ROSE_STORES"
"""Environment variable: shell patterns of URLs and folders, separated by commas."""

ANSWER_SECONDS = 20.0
"""A request to a bucket, all its retries together, takes at most this long."""


def open_store(root: str, environment: Mapping[str, str] = os.environ) -> Store:
    """Open a store.

    Args:
        root: a folder, or ``s3://bucket/prefix``.
        environment: where the list of allowed stores is.

    Raises:
        Forbidden: the platform's list does not have it.
        ValueError: no such kind of store, or a URL with more than bucket and prefix.
        StoreFailed: the library for buckets is not installed.
    """
    check_allowed(root, environment.get(ALLOWED, ""))
    if "://" not in root:
        return Store(Path(root))
    return _bucket(root)


def check_allowed(root: str, patterns: str) -> None:
    """Refuse what the platform's list does not have; an empty list allows everything.

    Raises:
        Forbidden: it is not on the list.
    """
    listed = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if listed and not any(fnmatch.fnmatchcase(root, pattern) for pattern in listed):
        message = f"{root} is not among the stores that {ALLOWED} allows ({', '.join(listed)})"
        raise Forbidden(message)


def _bucket(url: str) -> Store:
    parts = urlsplit(url)
    if parts.scheme != "s3":
        message = f"{parts.scheme}:// is no store ROSE knows; use a folder or s3://bucket/prefix"
        raise ValueError(message)
    if "@" in parts.netloc or parts.query or parts.fragment or not parts.netloc:
        message = "a bucket is s3://bucket/prefix; all else comes from the environment"
        raise ValueError(message)
    try:
        from obstore.store import S3Store  # noqa: PLC0415  # only who has a bucket needs it
    except ModuleNotFoundError as error:
        message = f"{url} needs obstore; install rose-gpu[weights]"
        raise StoreFailed(message) from error

    from rose_weights.store.bucket import Bucket, Objects  # noqa: PLC0415

    found = S3Store.from_url(
        url, retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=ANSWER_SECONDS)}
    )
    return Store(Bucket(Objects(found, url.rstrip("/"))))
