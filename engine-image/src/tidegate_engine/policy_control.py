"""The live policy of a running engine: versions, conflicts, and both places where it acts. Routed by `admin`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from starlette.responses import Response

from tidegate_engine.batching import Conflict, parse_if_match
from tidegate_engine.completions import Completions
from tidegate_engine.context import NO_SLIDING_WINDOW, ContextPolicy
from tidegate_engine.live_policy import LivePolicy, change_policy, policy_bounds
from tidegate_engine.metrics import Counts
from tidegate_engine.server import JsonResponse
from tidegate_engine.settings import AdmissionPolicy, Violation

logger = logging.getLogger(__name__)


class PolicyControl:
    """One writer at a time. What calls may ask for acts at once, admission between two steps."""

    def __init__(
        self,
        completions: Completions,
        *,
        apply_admission: Callable[[AdmissionPolicy], Awaitable[None]],
        max_num_batched_tokens: int,
        counts: Counts,
    ) -> None:
        self.version = 1
        self._completions = completions
        self._apply_admission = apply_admission
        self._counts = counts
        self._bounds = policy_bounds(
            max_model_len=completions.limits.max_model_len, max_num_batched_tokens=max_num_batched_tokens
        )
        self._lock = asyncio.Lock()

    @property
    def policy(self) -> LivePolicy:
        return self._completions.limits.policy

    def limits(self, acting: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """The policy's numbers by kind, as metrics show them; `acting` is what the engine's loop says of its part."""
        spec = self.policy.limits
        bounds = {name: float(high) for name, (_, high) in self._bounds.items()}
        return {"capacity": bounds, "spec": spec, "effective": {**spec, **acting}}

    def describe(self) -> Response:
        bounds = {name: list(pair) for name, pair in self._bounds.items()}
        body = {"version": self.version, "effective": self.policy.as_dict(), "envelope": bounds}
        return JsonResponse(body, headers={"etag": f'"{self.version}"'})

    async def patch(self, data: object, *, if_match: str | None, dry_run: bool) -> Response:
        """Apply a PATCH body; the answer is the HTTP response. TimeoutError when the step in flight is too long."""
        wanted = parse_if_match(if_match)
        if isinstance(wanted, Violation):
            return self._refuse(wanted)
        async with self._lock:
            if wanted is not None and wanted != self.version:
                return self._refuse(Conflict("version_conflict", f"the version is {self.version}, not {wanted}"))
            policy = change_policy(self.policy, data, bounds=self._bounds)
            if isinstance(policy, Violation):
                return self._refuse(policy)
            if policy.context_policy is ContextPolicy.SLIDING_WINDOW and self._completions.limits.window is None:
                return self._refuse(Violation("context_policy", None, f"context_policy {NO_SLIDING_WINDOW}"))
            version = self.version + (policy != self.policy)
            if not dry_run:
                await self._apply(policy)
                self.version = version
                self._counts.settings_changes["applied"] += 1
        body = {"version": version, "effective": policy.as_dict()}
        return JsonResponse(body, headers={"etag": f'"{version}"'})

    async def _apply(self, policy: LivePolicy) -> None:
        if policy.admission != self.policy.admission:
            await self._apply_admission(policy.admission)
        if policy != self.policy:
            logger.info("the live policy is now %s", policy)
        self._completions.limits = replace(self._completions.limits, policy=policy)

    def _refuse(self, reason: Conflict | Violation) -> Response:
        self._counts.settings_changes["rejected"] += 1
        if isinstance(reason, Conflict):
            error = {"code": reason.code, "message": reason.message, "version": self.version}
            return JsonResponse({"error": error}, 409)
        allowed = reason.allowed and list(reason.allowed)
        return JsonResponse({"error": {"field": reason.field, "allowed": allowed, "reason": reason.reason}}, 422)
