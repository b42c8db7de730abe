"""What the benchmark of promises on real engines counts, and what it leaves out."""

from __future__ import annotations

import pytest

from bench.guard.bound import Certificate, Counter, Counts, figures_of


def certificate(level: float, requests: int, exceeded: int = 0) -> Certificate:
    return Certificate(level, 0.2, "", requests, exceeded, 0.01 * requests)


def test_only_what_passed_between_two_certificates_of_the_percentile_counts() -> None:
    counter = Counter(Counts(promised=100, runs=1))
    assert not counter.take(None, [0.3])
    assert not counter.take(certificate(0.9, 5, 2), [0.3])
    assert not counter.take(certificate(0.99, 20, 3), [0.3]), "the 0.9 promised some of these"
    assert counter.take(certificate(0.99, 50, 4), [0.1, 0.3])
    assert not counter.take(certificate(0.9, 60, 9), [0.3]), "it had to learn anew"
    seen = counter.counts
    assert (seen.promised, seen.exceeded, seen.shut, seen.shut_exceeded) == (130, 1, 2, 1)
    assert seen.allowed == pytest.approx(0.3)


def test_one_request_beyond_misses_the_aim_and_so_do_too_few() -> None:
    by_name = {one.name: one for one in figures_of(Counts(promised=2000, exceeded=1, shut=5))}
    assert by_name["of them beyond their ceiling"].met is False
    assert by_name["promised requests, all runs"].met is False
    share = by_name["share beyond, at most (95 %, at every look)"].value
    assert 1 / 2000 < share < 0.01
