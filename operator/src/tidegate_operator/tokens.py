"""The operator's admin keys: one Ed25519 pair in one Secret, its rotation, the public JWKS, and one-minute tokens.

The maths is pure (`now` is an argument); `KeyStore` is the shell that reads and patches the Secret. Engines hold the
public keys only, so a token is worth a minute for one object and no Secret lies in users' namespaces.
"""

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

ALGORITHM = "EdDSA"
ISSUER = "tidegate-operator"
LIFETIME_SECONDS = 60
ROTATE_AFTER_SECONDS = 30 * 86400.0
PUBLISH_SECONDS = 300.0
"""A new key signs only after this: kubelets bring a changed ConfigMap into running pods within about a minute."""

CURRENT, PREVIOUS, CREATED_AT = "current", "previous", "createdAt"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The current private key, the one before it, and when the current one was made (Unix seconds)."""

    current: bytes
    previous: bytes | None
    created_at: float

    def signing_key(self, now: float) -> bytes:
        """The key to sign with: the previous one until everybody can know the current one."""
        if self.previous is not None and now - self.created_at < PUBLISH_SECONDS:
            return self.previous
        return self.current

    def jwks(self) -> dict[str, object]:
        """Public keys for the objects' ConfigMaps."""
        keys = (self.current,) if self.previous is None else (self.current, self.previous)
        return {"keys": [_public_jwk(key) for key in keys]}


def new_private_key() -> bytes:
    """32 random bytes of a new Ed25519 key."""
    return Ed25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def rotated(ring: KeyRing | None, *, new_key: bytes, now: float) -> KeyRing:
    """The ring after a rotation, or the first ring."""
    return KeyRing(current=new_key, previous=None if ring is None else ring.current, created_at=now)


def is_due(ring: KeyRing | None, now: float) -> bool:
    """Whether a new key must be made."""
    return ring is None or now - ring.created_at >= ROTATE_AFTER_SECONDS


def read_secret(data: Mapping[str, str]) -> KeyRing | None:
    """The ring in a Secret's `data`; None when there is none yet. Raises ValueError when it is damaged."""
    if not data.get(CURRENT):
        return None
    current = base64.b64decode(data[CURRENT])
    previous = base64.b64decode(data[PREVIOUS]) if data.get(PREVIOUS) else None
    created_at = float(base64.b64decode(data.get(CREATED_AT, "")) or 0.0)
    for key in (current, previous):
        if key is not None and len(key) != 32:
            raise ValueError("the Secret of the admin keys does not hold an Ed25519 key of 32 bytes")
    return KeyRing(current, previous, created_at)


def secret_data(ring: KeyRing) -> dict[str, str | None]:
    """The inverse of `read_secret`, as a merge patch: None removes a key."""

    def encode(value: bytes) -> str:
        return base64.b64encode(value).decode()

    return {
        CURRENT: encode(ring.current),
        PREVIOUS: None if ring.previous is None else encode(ring.previous),
        CREATED_AT: encode(repr(ring.created_at).encode()),
    }


def sign(ring: KeyRing, *, audience: str, now: float) -> str:
    """A token for the engines of the object whose uid is `audience`, good for a minute."""
    key = ring.signing_key(now)
    claims = {"iss": ISSUER, "aud": audience, "iat": int(now), "exp": int(now) + LIFETIME_SECONDS}
    return jwt.encode(
        claims, Ed25519PrivateKey.from_private_bytes(key), algorithm=ALGORITHM, headers={"kid": key_id(_public(key))}
    )


def key_id(public: bytes) -> str:
    """Name of a key, from its public half."""
    return hashlib.sha256(public).hexdigest()[:16]


def _public(private: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def _public_jwk(private: bytes) -> dict[str, str]:
    public = _public(private)
    x = base64.urlsafe_b64encode(public).decode().rstrip("=")
    return {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": key_id(public), "alg": ALGORITHM, "use": "sig"}


class Secrets(Protocol):
    """What `KeyStore` needs of the cluster. `patch_secret` fails with a conflict when `resource_version` is old."""

    async def get_secret(self, namespace: str, name: str) -> Mapping[str, Any]: ...

    async def patch_secret(
        self, namespace: str, name: str, *, data: Mapping[str, str | None], resource_version: str
    ) -> None: ...


class KeyStore:
    """Holds the ring between two readings of its Secret. Invariant: what `ring` returns is what the Secret held."""

    def __init__(self, secrets: Secrets, *, namespace: str, name: str) -> None:
        self._secrets, self._namespace, self._name = secrets, namespace, name
        self._ring: KeyRing | None = None
        self._jwks: dict[str, object] = {}
        self._tokens: dict[str, tuple[float, str]] = {}

    @property
    def ring(self) -> KeyRing:
        """The ring as last read. Raises RuntimeError before the first `refresh`."""
        if self._ring is None:
            raise RuntimeError("the admin keys have not been read yet")
        return self._ring

    @property
    def jwks(self) -> dict[str, object]:
        """Public keys of the ring; empty before the first `refresh`."""
        return self._jwks

    def token(self, audience: str, now: float) -> str:
        """A token that is good for half a minute at least."""
        signed_at, token = self._tokens.get(audience, (-math.inf, ""))
        if not 0 <= now - signed_at < LIFETIME_SECONDS / 2:
            token = sign(self.ring, audience=audience, now=now)
            self._tokens[audience] = (now, token)
        return token

    async def refresh(self, now: float) -> bool:
        """Read the Secret, make or rotate the key when it is due; True when the ring changed.

        A conflict with another writer (two operators for a moment) is raised: the next refresh reads its key.
        """
        secret = await self._secrets.get_secret(self._namespace, self._name)
        ring = read_secret(secret.get("data") or {})
        if ring is None or is_due(ring, now):
            ring = rotated(ring, new_key=new_private_key(), now=now)
            await self._secrets.patch_secret(
                self._namespace,
                self._name,
                data=secret_data(ring),
                resource_version=secret["metadata"]["resourceVersion"],
            )
        changed, self._ring = ring != self._ring, ring
        self._jwks = ring.jwks()
        self._tokens.clear()
        return changed
