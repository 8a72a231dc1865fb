"""What one replica carries in virtual time."""

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import load_profile
from tidegate_operator.capacity import Targets
from tidegate_sim.saturation import Replica, largest_rate, measure, requests_of

PROFILE = load_profile("h100-llama-3.1-8b")
REPLICA = Replica(PROFILE.step, 4000, 16, 8192, BatchSettings(16, 2048, 512))
SHORT = ((1.0, 500, 50),)
REQUESTS = requests_of(SHORT, count=200, seed=3)


def test_the_same_seed_gives_the_same_requests_and_figures() -> None:
    assert REQUESTS == requests_of(SHORT, count=200, seed=3) != requests_of(SHORT, count=200, seed=4)
    assert measure(REPLICA, REQUESTS, rate=5.0) == measure(REPLICA, REQUESTS, rate=5.0)


def test_shares_are_kept() -> None:
    rows = requests_of(((0.2, 10, 1), (0.8, 20, 2)), count=1000, seed=1)
    assert 150 < sum(isl == 10 for _, isl, _ in rows) < 250
    assert {(isl, osl) for _, isl, osl in rows} == {(10, 1), (20, 2)}


def test_an_idle_replica_serves_in_the_time_of_its_steps() -> None:
    seen = measure(REPLICA, REQUESTS, rate=0.01)
    one_step = PROFILE.step.base_seconds
    assert one_step < seen.ttft_p95_seconds < 3 * one_step
    assert seen.queue_p95_seconds == 0 and seen.preemptions == 0 and seen.carried
    assert seen.end_to_end_p95_seconds > 49 * one_step


def test_more_load_takes_longer_and_too_much_is_not_carried() -> None:
    calm, busy, flooded = (measure(REPLICA, requests_of(SHORT, count=400, seed=3), rate=rate) for rate in (2, 15, 200))
    assert calm.ttft_p95_seconds < busy.ttft_p95_seconds < flooded.ttft_p95_seconds
    assert calm.carried and not flooded.carried


def test_the_largest_rate_meets_the_targets_and_a_little_more_does_not() -> None:
    targets = Targets(0.2, 0.03)
    rate = largest_rate(REPLICA, REQUESTS, targets=targets, between=(1.0, 100.0))
    assert measure(REPLICA, REQUESTS, rate=0.97 * rate).meets(targets)
    assert not measure(REPLICA, REQUESTS, rate=1.03 * rate).meets(targets)


def test_a_shared_prefix_is_read_once() -> None:
    long = requests_of(((1.0, 4000, 10),), count=100, seed=3)
    plain = measure(REPLICA, long, rate=1.0)
    shared = measure(REPLICA, long, rate=1.0, shared_tokens=3200)
    assert shared.ttft_p95_seconds < plain.ttft_p95_seconds / 2
