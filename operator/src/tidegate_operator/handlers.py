"""kopf's side: watches that put objects into the store and keys into the queue. Nothing else here knows kopf.

Event handlers only: no timers, daemons, diffs, finalizers or annotations of kopf's, so nothing is left on an object and
a restart needs no state.
"""

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from tidegate_operator.resources import WATCHED, Manifest, Resource
from tidegate_operator.settings import SERVICE_ACCOUNT_DIR, Settings

Seen = Callable[[Resource, Manifest, bool], None]
"""Called with the kind, the object, and whether it is gone."""

CREDENTIALS_LIFETIME = timedelta(minutes=10)
"""A service account's token is replaced on disk within the hour: it is read again well before."""


class NoDiffs(kopf.DiffBaseStorage):  # type: ignore[misc]
    """kopf copies every object deeply, several times an event, to find differences: nobody asks for them here."""

    def build(self, **_: Any) -> dict[str, Any]:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def kopf_settings() -> kopf.OperatorSettings:
    """Crash-only: short timeouts, long patience with an API server that is being upgraded, then exit and restart."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21, *(30,) * 20)
    settings.networking.enforce_retry_after = True
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.reconnect_backoff = 1
    settings.watching.chunk_size = 500
    # We start watching once the kind is served; a CRD that goes away ends the process, and the next one waits for it.
    settings.scanning.disabled = True
    settings.queueing.error_delays = (1, 2, 5, 10, 30, 60)
    settings.queueing.idle_timeout = 1
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = 30
    settings.persistence.diffbase_storage = NoDiffs()
    settings.persistence.finalizer = "tidegate.dev/operator"  # never used, but never kopf's name
    for resource in WATCHED:
        if resource.selector:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = resource.selector
    return settings


def registry(seen: Seen, credentials: Callable[[], Awaitable[kopf.ConnectionInfo]]) -> kopf.OperatorRegistry:
    """A registry of its own with one event handler a kind."""
    handlers = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials()

    kopf.on.login(registry=handlers)(login)
    for resource in WATCHED:
        kopf.on.event(
            resource.group, resource.version, resource.plural, registry=handlers, id=f"see-{resource.plural}"
        )(_handler(resource, seen))
    return handlers


def _handler(resource: Resource, seen: Seen) -> Callable[..., Awaitable[None]]:
    # Async, so that kopf calls it in the loop: store and queue are not for threads.
    async def handle(event: Any, **_: Any) -> None:
        seen(resource, event["object"], event["type"] == "DELETED")

    return handle


def connection(configuration: Any, settings: Settings) -> kopf.ConnectionInfo:
    """kopf's view of the same address and credentials that our client uses."""
    token = None
    if settings.kubeconfig is None:
        with open(f"{SERVICE_ACCOUNT_DIR}/token", encoding="utf-8") as file:
            token = file.read().strip()
    elif key := configuration.api_key.get("BearerToken"):
        token = key.split(" ", 1)[-1]
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        token=token,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        expiration=datetime.now(UTC) + CREDENTIALS_LIFETIME,
    )


def quiet_logs() -> None:
    """kopf tells every watch and handler at INFO; only its warnings concern an operator's user."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
