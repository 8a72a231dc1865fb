"""The number of replicas from the figures of a decision: the same for the rules that decide and for people who check.

Pure. Every figure is in `status.autoscaling.lastDecision.inputs`, rounded before it is used, so that the rounded ones
give the same number. `policy` decides with it, `tidegate explain` works it out again; docs/decisions-of-the-operator.md
tells it to people.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Inputs = Mapping[str, float]

DIGITS = 4
ALONE, POOLED = "capacityPerReplica", "capacityInPool"
ALMOST = 1e-9
"""A quotient this little above a whole number is that number: floating point, not load."""
REACTIVE_DOWN_PRESSURE = 0.5
LARGEST_REACTION = 2.0


def figure(value: float) -> float:
    """A figure as status shows it."""
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Needs:
    """Replicas needed, as the two directions see it: more than there are only counts if `up`, fewer only if `down`."""

    up: int
    down: int

    def wanted(self, current: int) -> int:
        return self.up if self.up > current else min(self.down, current)


def needs(inputs: Inputs) -> Needs | None:
    """By the model where a capacity is known, by the observed signals where not; None where nothing was measured."""
    if "capacityPerReplica" in inputs:
        return _by_model(inputs)
    if "pressure_waiting" in inputs:
        return _by_reaction(inputs)
    return _when_idle(inputs) if "replicasToFit" in inputs else None


def load(inputs: Inputs) -> float:
    """Requests per second to be carried: what arrives, is foreseen to or was asked for; and the backlog's drain."""
    arriving = max(inputs["arrivalsPerSecond"], inputs.get("forecastPerSecond", 0.0), inputs.get("floorPerSecond", 0.0))
    return arriving + inputs["backlogPerSecond"]


def usable(inputs: Inputs, *names: str) -> float:
    """Requests per second of one replica, the most of these figures, as far as they may be planned with."""
    most = max(inputs.get(name, 0.0) for name in names)
    return max(1e-6, most * inputs["correction"] * (1 - inputs["headroomPercent"] / 100))


def carried(alone: float, pooled: float, replicas: float) -> float:
    """Requests per second that so many replicas carry together, from what one carries alone and one of very many.

    What is kept free for chance is shared: of N replicas each needs it for one over the root of N as much.
    """
    return replicas * (pooled - (pooled - alone) / math.sqrt(replicas)) if replicas > 1 else replicas * alone


def replicas_for(rate: float, alone: float, pooled: float) -> float:
    """How many carry `rate`: the inverse of `carried`."""
    if rate <= alone:
        return rate / alone
    spare = pooled - alone
    return float(((spare + math.sqrt(spare**2 + 4 * pooled * rate)) / (2 * pooled)) ** 2)


def needed(inputs: Inputs) -> float:
    """Replicas for the load, before anything is rounded up."""
    return replicas_for(load(inputs), usable(inputs, ALONE), usable(inputs, ALONE, POOLED))


def needed_ahead(inputs: Inputs) -> float:
    """The same with the settings that are being approached, where they carry more."""
    return replicas_for(load(inputs), *_ahead(inputs))


def _ahead(inputs: Inputs) -> tuple[float, float]:
    alone = usable(inputs, ALONE, "plannedCapacityPerReplica")
    return alone, max(alone, usable(inputs, POOLED, "plannedCapacityInPool"))


def carried_by(inputs: Inputs, replicas: float) -> float:
    """Requests per second that so many replicas carry, as far as they may be planned with."""
    return carried(usable(inputs, ALONE), usable(inputs, ALONE, POOLED), replicas)


def carried_ahead(inputs: Inputs, replicas: float) -> float:
    """The same with the settings that are being approached, where they carry more."""
    return carried(*_ahead(inputs), replicas)


def _by_model(inputs: Inputs) -> Needs:
    current, lost = inputs["currentReplicas"], inputs.get("lostReplicas", 0.0)
    asked = needed_ahead(inputs)
    serving = max(1.0, current - lost)
    is_short = asked / serving > 1 + _tolerance(inputs, "scaleUp")
    # A pod that cannot start is no supply; more than one in its place would be a storm.
    instead = min(1, int(lost)) if is_short else 0
    up = math.ceil(asked - ALMOST) + instead if is_short else 1
    kept = needed(inputs) + inputs["unseenReplicas"] + instead
    is_surplus = kept < current * (1 - _tolerance(inputs, "scaleDown"))
    # What is needed on the way up is wanted in the window on the way down as well.
    down = math.ceil(kept - ALMOST) if is_surplus else max(int(current), up)
    return Needs(max(1, up), max(1, down, int(inputs["replicasToFit"])))


def _by_reaction(inputs: Inputs) -> Needs:
    current = int(inputs["currentReplicas"])
    worst = max(value for name, value in inputs.items() if name.startswith("pressure_"))
    up, down = 1, current
    if worst > 1 + _tolerance(inputs, "scaleUp") and not inputs["startingReplicas"]:
        up = max(current + 1, math.ceil(current * min(LARGEST_REACTION, worst) - ALMOST))
    if current > 1 and not inputs["unseenReplicas"] and worst * current / (current - 1) < REACTIVE_DOWN_PRESSURE:
        down = max(current - 1, int(inputs["replicasToFit"]))
    return Needs(up, down)


def _when_idle(inputs: Inputs) -> Needs:
    return Needs(1, max(1, int(inputs["replicasToFit"] + inputs["unseenReplicas"])))


def _tolerance(inputs: Inputs, direction: str) -> float:
    return inputs[f"{direction}TolerancePercent"] / 100


def bounded(inputs: Inputs, wanted: int | None) -> int:
    """What became of the wanted number: the bounds in the order in which they hold. None: `heldReplicas` instead."""
    current = int(inputs["currentReplicas"])
    replicas = int(inputs["heldReplicas"]) if wanted is None else wanted
    if "stabilizationFloor" in inputs:
        replicas = max(replicas, int(inputs["stabilizationFloor"]))
    if "stabilizationCeiling" in inputs:
        replicas = max(current, min(replicas, int(inputs["stabilizationCeiling"])))
    if "verifyingSettings" in inputs:
        replicas = max(current, replicas)
    if "scaleUpLimit" in inputs:
        replicas = min(replicas, int(inputs["scaleUpLimit"]))
    if "scaleDownLimit" in inputs:
        replicas = max(replicas, int(inputs["scaleDownLimit"]))
    if "placeableReplicas" in inputs:
        replicas = min(replicas, int(inputs["placeableReplicas"]))
    if "maxReplicas" in inputs:
        replicas = max(int(inputs["minReplicas"]), min(replicas, int(inputs["maxReplicas"])))
    return int(inputs.get("specReplicas", replicas))
