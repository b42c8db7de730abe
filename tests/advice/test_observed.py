"""The load that agents export for the advisor: busy and known time of every replica there is."""

from prometheus_client import generate_latest

from rose_agent.guard.metrics import BusyMetrics
from rose_agent.metrics import REGISTRY


def _figures(pool: str) -> dict[str, float]:
    """``metric replica`` -> value, of one pool."""
    lines = generate_latest(REGISTRY).decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("rose_guard_replica_") and f'pool="{pool}"' in line:
            name, value = line.rsplit(" ", 1)
            if "_created" not in name:
                metric, _, labels = name.partition("{")
                replica = labels.rpartition('replica="')[2].rstrip('"}')
                found[f"{metric} {replica}"] = float(value)
    return found


def test_busy_time_is_exported_beside_the_time_of_which_it_is_known() -> None:
    observed = BusyMetrics()
    observed.add("a/pool", "a/one", 0.25, 1.0)
    observed.add("a/pool", "a/one", 2.0, 1.0)  # rounding of two clocks: never more than there was
    assert _figures("a/pool") == {
        "rose_guard_replica_busy_seconds_total a/one": 1.25,
        "rose_guard_replica_known_seconds_total a/one": 2.0,
    }
    observed.keep(set())


def test_a_replica_that_is_gone_is_taken_out() -> None:
    observed = BusyMetrics()
    for name in ("b/one", "b/two"):
        observed.add("b/pool", name, 0.5, 1.0)
    observed.keep({("b/pool", "b/two")})
    assert {key.split()[1] for key in _figures("b/pool")} == {"b/two"}
    observed.keep(set())
    assert not _figures("b/pool")
