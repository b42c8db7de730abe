"""Small worlds for tests: seconds of virtual time, a few replicas."""

from rose_simulate.model.jobs.workload import PlannedTurn, ServingArrival
from rose_simulate.model.scenarios.scenario import Load, Regime, RolloutJob, Scenario, Service
from rose_simulate.model.simulation import SimulationInputs

EPISODES = (
    (PlannedTurn(2000, 120, 0.0), PlannedTurn(300, 200, 0.5), PlannedTurn(100, 80, 0.2)),
    (PlannedTurn(1500, 60, 0.0), PlannedTurn(700, 400, 1.0)),
    (PlannedTurn(1000, 300, 0.0),),
)
TRACE = tuple(ServingArrival(0.7 * n, 400 + 37 * (n % 9), 20 + 11 * (n % 7)) for n in range(80))
MATERIAL = SimulationInputs(EPISODES, {"trace": TRACE})


def scenario(**changes: object) -> Scenario:
    service = Service(
        name="chat",
        model="Qwen2.5-7B",
        device="H100",
        replicas=3,
        ttft_ms=500,
        tpot_ms=150,
        load=Load(trace="trace", requests_per_s=1.5),
    )
    job = RolloutJob(
        name="grpo",
        model="Qwen3-8B",
        dedicated=1,
        borrowed=2,
        borrows_from="chat",
        group=4,
        batch_groups=4,
        train_s=3,
        dedicated_cap=4,
    )
    plain = {
        "name": "small",
        "seconds": 90,
        "seeds": (1,),
        "regimes": tuple(Regime),
        "episodes": "episodes",
        "services": (service,),
        "jobs": (job,),
        "delays": {"start_s": 5.0},
    }
    return Scenario.model_validate(plain | changes)
