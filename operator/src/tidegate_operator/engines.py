"""Client of the engines' admin port: batch settings with their generation, and what an engine says of itself.

Owns no decision. Called by `reconcile`; every call ends within a few seconds and answers with a fact, never an
exception: a pod that cannot be reached is an ordinary finding.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tidegate_engine.settings import SETTING_NAMES, BatchSettings
from tidegate_engine.steptime import StepModel
from tidegate_operator.metrics import Metrics
from tidegate_operator.observation import EngineInfo

TIMEOUT = aiohttp.ClientTimeout(total=5, connect=2)
CONCURRENCY = 32
MAX_ANSWER_BYTES = 1 << 20
"""An engine's image is the user's choice: what it answers is not trusted with our memory."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The engine runs with these settings."""

    generation: int
    settings: BatchSettings


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine answered and said no: 409 (an older generation than its own), 422 (outside its envelope), 401."""

    status: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No answer, or none that can be read."""

    reason: str


Answer = Applied | Refused | Unreachable


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body; raises ValueError when it is longer than `limit` bytes."""
    parts, length = [], 0
    async for part in response.content.iter_any():
        length += len(part)
        if length > limit:
            raise ValueError(f"the answer is longer than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def admin_url(ip: str, port: int) -> str:
    """Base address of a pod's admin port; IPv6 in brackets."""
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


class EngineClient:
    """One HTTP session to all engines, at most `CONCURRENCY` calls at a time."""

    def __init__(self, session: aiohttp.ClientSession, metrics: Metrics, *, port: int) -> None:
        self._session, self._metrics, self._port = session, metrics, port
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def batching(self, ip: str, *, token: str) -> Answer:
        """The settings that the engine runs with."""
        return _answer(*await self._call("GET", ip, "/admin/v1/batching", token=token))

    async def apply(self, ip: str, *, token: str, generation: int, settings: BatchSettings) -> Answer:
        """Set the settings; the same generation with the same values again is no change."""
        body = {"generation": generation, **settings.as_dict()}
        return _answer(*await self._call("PATCH", ip, "/admin/v1/batching", token=token, body=body))

    async def info(self, ip: str, *, token: str) -> EngineInfo | None:
        """What `capacity` needs to know of the engine; None when it does not say."""
        status, data = await self._call("GET", ip, "/admin/v1/info", token=token)
        return parse_info(data) if status == 200 else None

    async def _call(
        self, verb: str, ip: str, path: str, *, token: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON; status 0 and a sentence when there was no readable answer."""
        code = "error"
        try:
            async with (
                self._slots,
                self._session.request(
                    verb,
                    admin_url(ip, self._port) + path,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=TIMEOUT,
                    allow_redirects=False,
                ) as response,
            ):
                code = str(response.status)
                return response.status, json.loads(await read_bounded(response, MAX_ANSWER_BYTES))
        except TimeoutError:
            return 0, "no answer in time"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return 0, str(error) or type(error).__name__
        finally:
            self._metrics.admin_requests.labels(verb, code).inc()


def _answer(status: int, data: Any) -> Answer:
    if status == 0:
        return Unreachable(str(data))
    if status == 200:
        try:
            settings = BatchSettings(**{name: int(data["effective"][name]) for name in SETTING_NAMES})
            return Applied(int(data["generation"]), settings)
        except (KeyError, TypeError, ValueError) as error:
            return Unreachable(f"the answer cannot be read: {error!r}")
    told = data.get("error") if isinstance(data, Mapping) else None
    if not isinstance(told, Mapping):
        return Refused(status, "unknown", f"HTTP {status}")
    reason = str(told.get("reason") or told.get("message") or told.get("code") or f"HTTP {status}")
    return Refused(status, str(told.get("code") or told.get("field") or "unknown"), reason)


def parse_info(data: Any) -> EngineInfo | None:
    """Read `/admin/v1/info`; None when a field that capacity needs is missing."""
    try:
        return EngineInfo(
            kv_blocks=int(data["kv_blocks"]),
            block_tokens=int(data["block_tokens"]),
            max_model_len=int(data["max_model_len"]),
            kv_token_bytes=int(data["kv_token_bytes"]),
            weight_bytes=int(data["weight_bytes"]),
            gpu_product=data.get("gpu_product"),
            gpu_count=int(data.get("gpu_count") or 0),
            version=str(data.get("version", "")),
            step_model=None if data.get("step_model") is None else StepModel(**data["step_model"]),
            step_model_residual_ratio=None,
            step_model_samples=None,
            layers=None if data.get("layers") is None else int(data["layers"]),
            weight_dtype=None if data.get("weight_dtype") is None else str(data["weight_dtype"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
