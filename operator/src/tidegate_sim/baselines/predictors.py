"""Forecasts of a series' next value as NVIDIA Dynamo's planner makes them: the last value, or a Kalman filter.

ai-dynamo/dynamo `components/src/dynamo/planner/core/load/predictors.py`: values that are no numbers count as 0, zeros
before the first other value are left out; the Kalman filter has level and trend, q 1.0 and 0.1, r 10, P 1000 at first.
Its ARIMA (the default there) and Prophet need libraries that this project does not have.
"""

import math
from typing import Protocol

Q_LEVEL, Q_TREND, NOISE, FIRST_VARIANCE = 1.0, 0.1, 10.0, 1000.0


class Predictor(Protocol):
    def add(self, value: float) -> None: ...

    def predict(self) -> float: ...


class Constant:
    """The next value is the last one."""

    def __init__(self) -> None:
        self._last = 0.0

    def add(self, value: float) -> None:
        # Zeros before the first other value change nothing here: the answer is 0 without them, too.
        self._last = value if math.isfinite(value) else 0.0

    def predict(self) -> float:
        return self._last


class Kalman:
    """Local linear trend: one step of the filter a value, the level of the next step as the forecast."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0
        self._p = (FIRST_VARIANCE, 0.0, FIRST_VARIANCE)
        """Covariance: of the level, of level and trend, of the trend."""
        self._ahead = False
        """Whether the state is already that of the next step."""

    def add(self, value: float) -> None:
        value = value if math.isfinite(value) else 0.0
        if self._level is None:
            if value != 0:
                self._level = value
            return
        self._step()
        level, cross, trend = self._p
        gain = level / (level + NOISE), cross / (level + NOISE)
        error = value - self._level
        self._level += gain[0] * error
        self._trend += gain[1] * error
        self._p = ((1 - gain[0]) * level, (1 - gain[0]) * cross, trend - gain[1] * cross)
        self._ahead = False

    def predict(self) -> float:
        if self._level is None:
            return 0.0
        self._step()
        return self._level

    def _step(self) -> None:
        if self._ahead or self._level is None:
            return
        level, cross, trend = self._p
        self._level += self._trend
        self._p = (level + 2 * cross + trend + Q_LEVEL, cross + trend, trend + Q_TREND)
        self._ahead = True
