"""What a publisher knows of those who follow its run: barriers, ages, the fixed prompt.

Both publishers (``publisher``, ``sharded``) keep one. It counts versions as they are taken, and it
asks and tells the store (``barrier``) about engines that serve them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rose_core.identity import WeightVersion
from rose_trainer import barrier, metrics
from rose_trainer.errors import NotPublished
from rose_trainer.lineage import Published
from rose_trainer.staleness import Consumed, Order


class Audience:
    """Versions of one publisher, and who serves them.

    Args:
        address: ``host:port`` of the store.
        token: the store's bearer token.
        known: versions published before this publisher, oldest first.
    """

    def __init__(self, address: str, token: str, known: Iterable[WeightVersion]) -> None:
        self._address = address
        self._token = token
        self._order = Order(known)
        self._steps: dict[int, WeightVersion] = {}

    def note_taken(self, version: WeightVersion, step: int) -> None:
        """Note the version that was taken at the trainer's step."""
        self._steps[step] = version
        self._order.add(version)

    def version_of(self, version: WeightVersion | int) -> WeightVersion:
        """A version as it is, or the one that a step was given.

        Raises:
            NotPublished: no such step.
        """
        if not isinstance(version, int):
            return version
        found = self._steps.get(version)
        if found is None:
            message = f"step {version} was not published by this publisher"
            raise NotPublished(message)
        return found

    def wait_reached(self, version: WeightVersion, quorum: float, seconds: float | None) -> None:
        """Wait until enough engines serve a version or a later one.

        Raises:
            NotReached: they did not within ``seconds`` (None = for ever); says who is behind.
            ValueError: no such quorum.
        """
        barrier.reached(self._address, self._token, version, quorum, seconds)

    def refer(self, published: Published, logprobs: Sequence[float]) -> None:
        """Say what the trainer computes for the fixed prompt with a durable version.

        Raises:
            NotPublished: it is no longer kept.
            PublishFailed: the store cannot be told.
        """
        answer = tuple(map(float, logprobs))
        version, digest = published.version, published.digest
        if not barrier.refer(self._address, self._token, version, digest, answer):
            message = f"{version} is no longer kept"
            raise NotPublished(message)

    def consume(self, version: WeightVersion | str, *, most: int | None) -> Consumed:
        """Count the age of a trajectory that is used now.

        Raises:
            ValueError: the text is no version.
        """
        parsed = WeightVersion.parse(version) if isinstance(version, str) else version
        found = self._order.consume(parsed, most)
        if found.age is not None:
            metrics.CONSUMED_AGE.observe(found.age)
        if not found.fresh:
            metrics.STALE.inc()
        return found
