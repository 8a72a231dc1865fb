"""The last seen state of every watched object, in memory: what `reconcile` reads instead of asking the API server.

Fed by the watches, by the answers to our own writes (so that a pass sees what the one before wrote) and corrected by
the resync's lists (a watch may lose a deletion). Rebuilt from lists at start; nothing in it is durable.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tidegate_operator.resources import PODS, Key, Manifest, Resource, key_of, slim, version_of


@dataclass(frozen=True, slots=True)
class Suspect:
    """A difference between a list and the store: `body` None means that the list lacks the object."""

    resource: Resource
    address: Key
    body: Manifest | None
    version: int
    """The version in the list, or in the store for an object that the list lacks."""


class Store:
    """Invariant: an object is never replaced by an older version of itself."""

    def __init__(self) -> None:
        self._objects: dict[Resource, dict[Key, Manifest]] = {}
        self._pods: dict[Key, set[Key]] = {}

    def put(self, resource: Resource, body: Manifest) -> bool:
        """Remember `body`; False when it is no news."""
        objects = self._objects.setdefault(resource, {})
        address = _address(body)
        known = objects.get(address)
        if known is not None and _is_old(body, known):
            return False
        if resource is PODS:
            self._unindex(address, known)
            if key := key_of(resource, body):
                self._pods.setdefault(key, set()).add(address)
        objects[address] = slim(resource, body)
        return True

    def drop(self, resource: Resource, body: Manifest) -> bool:
        """Forget a deleted object, unless a newer one of that name is known."""
        address = _address(body)
        known = self._objects.get(resource, {}).get(address)
        if known is None or version_of(known) > version_of(body) > 0:
            return False
        del self._objects[resource][address]
        if resource is PODS:
            self._unindex(address, known)
        return True

    def get(self, resource: Resource, address: Key) -> Manifest | None:
        return self._objects.get(resource, {}).get(address)

    def addresses(self, resource: Resource) -> tuple[Key, ...]:
        return tuple(self._objects.get(resource, {}))

    def pods_of(self, key: Key) -> list[Manifest]:
        """Pods that carry the object's label, by name."""
        return [self._objects[PODS][address] for address in sorted(self._pods.get(key, ()))]

    def differences(self, resource: Resource, listed: Iterable[Manifest], namespace: str | None) -> list[Suspect]:
        """Where a list of one namespace (None: of all) says otherwise than the store."""
        known = self._objects.get(resource, {})
        found: set[Key] = set()
        suspects = []
        for body in listed:
            address = _address(body)
            found.add(address)
            if address not in known or not _is_old(body, known[address]):
                suspects.append(Suspect(resource, address, body, version_of(body)))
        suspects += [
            Suspect(resource, address, None, version_of(body))
            for address, body in known.items()
            if address not in found and namespace in (None, address[0])
        ]
        return suspects

    def settle(self, suspect: Suspect) -> Key | None:
        """Take over a difference that no watch has explained meanwhile; the key that it concerns, None if explained."""
        known = self.get(suspect.resource, suspect.address)
        if suspect.body is not None:
            return key_of(suspect.resource, suspect.body) if self.put(suspect.resource, suspect.body) else None
        if known is None or version_of(known) != suspect.version:
            return None
        self.drop(suspect.resource, {**known, "metadata": {**known["metadata"], "resourceVersion": ""}})
        return key_of(suspect.resource, known)

    def _unindex(self, address: Key, known: Manifest | None) -> None:
        key = key_of(PODS, known) if known is not None else None
        if key is None:
            return
        self._pods.get(key, set()).discard(address)
        if not self._pods.get(key):
            self._pods.pop(key, None)


def _address(body: Manifest) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _is_old(body: Manifest, known: Manifest) -> bool:
    """Whether `body` is the known version or one before it."""
    new, old = version_of(body), version_of(known)
    return (
        new <= old if new and old else body["metadata"].get("resourceVersion") == known["metadata"]["resourceVersion"]
    )
