"""What is known of the engines behind an object: acknowledged settings and their info, asked for rarely, kept briefly.

Sits between `reconcile` and the admin client. Facts belong to an incarnation of a pod (uid and restarts), since a
container that restarted has forgotten what it was told. Nothing is durable: an unknown pod is asked.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from tidegate_engine.settings import BatchSettings
from tidegate_operator.engines import Answer, Applied, Refused
from tidegate_operator.observation import EngineInfo, Replica
from tidegate_operator.observing import can_be_asked
from tidegate_operator.pods import incarnation

FRESH_SECONDS = 60.0
"""A fact older than this is asked for anew: people may have changed the settings by hand."""

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """The admin client."""

    async def batching(self, ip: str, *, token: str) -> Answer: ...

    async def apply(self, ip: str, *, token: str, generation: int, settings: BatchSettings) -> Answer: ...

    async def info(self, ip: str, *, token: str) -> EngineInfo | None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that said no to settings."""

    pod: str
    answer: Refused


class Fleet:
    """Invariant: a remembered answer is what that incarnation said last."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._applied: dict[str, tuple[float, Applied]] = {}
        self._infos: dict[str, tuple[float, EngineInfo]] = {}

    async def look(self, replicas: Iterable[Replica], *, token: str, now: float) -> tuple[Replica, ...]:
        """The replicas with the settings that each ready one runs with, as far as it says."""

        async def seen(replica: Replica) -> Replica:
            if not can_be_asked(replica):
                return replica
            at, applied = self._applied.get(incarnation(replica), (0.0, None))
            if applied is None or now - at > FRESH_SECONDS:
                answer = await self._engines.batching(replica.ip or "", token=token)
                if isinstance(answer, Applied):
                    return self._remember(replica, answer, now)
                logger.debug("%s did not tell its settings: %s", replica.name, answer)
            return replica if applied is None else _with(replica, applied)

        return tuple(await asyncio.gather(*map(seen, replicas)))

    async def send(
        self, replicas: Iterable[Replica], *, token: str, generation: int, settings: BatchSettings, now: float
    ) -> tuple[tuple[Replica, ...], tuple[Refusal, ...]]:
        """Bring the settings to every ready replica that has not acknowledged them; what it then looks like."""
        refusals: list[Refusal] = []

        async def sent(replica: Replica) -> Replica:
            known = (replica.settings_generation, replica.settings)
            if not can_be_asked(replica) or known == (generation, settings):
                return replica
            answer = await self._engines.apply(replica.ip or "", token=token, generation=generation, settings=settings)
            if isinstance(answer, Applied):
                return self._remember(replica, answer, now)
            if isinstance(answer, Refused):
                refusals.append(Refusal(replica.name, answer))
            logger.info("%s did not take the settings of generation %d: %s", replica.name, generation, answer)
            return replica

        changed = tuple(await asyncio.gather(*map(sent, replicas)))
        return changed, tuple(sorted(refusals, key=lambda refusal: refusal.pod))

    async def info(self, replicas: Iterable[Replica], *, token: str, now: float) -> EngineInfo | None:
        """What one ready replica of the newest version says of itself; the last known while none answers."""
        candidates = sorted(filter(can_be_asked, replicas), key=lambda replica: (not replica.updated, replica.name))
        known: EngineInfo | None = None
        for replica in candidates[:2]:
            at, remembered = self._infos.get(incarnation(replica), (0.0, None))
            if remembered is not None and now - at <= FRESH_SECONDS:
                return remembered
            answer = await self._engines.info(replica.ip or "", token=token)
            if answer is not None:
                self._infos[incarnation(replica)] = (now, answer)
                return answer
            known = known or remembered
        return known

    def prune(self, now: float, *, keep_seconds: float) -> None:
        """Forget pods that nobody asked about for a while."""
        for facts in (self._applied, self._infos):
            for name in [name for name, (at, _) in facts.items() if now - at > keep_seconds]:
                del facts[name]

    def _remember(self, replica: Replica, applied: Applied, now: float) -> Replica:
        self._applied[incarnation(replica)] = (now, applied)
        return _with(replica, applied)


def _with(replica: Replica, applied: Applied) -> Replica:
    return replace(replica, settings_generation=applied.generation, settings=applied.settings)
