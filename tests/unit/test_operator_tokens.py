"""Admin keys and tokens: signed for one object, for a minute, by a key that pods can already know."""

import base64
import time
from collections.abc import Mapping
from typing import Any

import jwt
import pytest
from jwt.algorithms import OKPAlgorithm

from tidegate_operator.tokens import (
    LIFETIME_SECONDS,
    PUBLISH_SECONDS,
    ROTATE_AFTER_SECONDS,
    KeyRing,
    KeyStore,
    is_due,
    new_private_key,
    read_secret,
    rotated,
    secret_data,
    sign,
)


def verify(token: str, ring: KeyRing, audience: str) -> dict[str, Any]:
    """As an engine does: by the key id in the public set."""
    kid = jwt.get_unverified_header(token)["kid"]
    keys = ring.jwks()["keys"]
    assert isinstance(keys, list)
    public: Any = OKPAlgorithm.from_jwk(next(jwk for jwk in keys if jwk["kid"] == kid))
    claims: dict[str, Any] = jwt.decode(token, public, algorithms=["EdDSA"], audience=audience)
    return claims


def test_a_token_is_for_one_object_and_a_minute() -> None:
    ring, now = rotated(None, new_key=new_private_key(), now=time.time()), time.time()
    token = sign(ring, audience="uid-1", now=now)
    claims = verify(token, ring, "uid-1")
    assert claims["exp"] - claims["iat"] == LIFETIME_SECONDS
    with pytest.raises(jwt.InvalidAudienceError):
        verify(token, ring, "uid-2")
    with pytest.raises(jwt.ExpiredSignatureError):
        verify(sign(ring, audience="uid-1", now=now - 120), ring, "uid-1")


def test_the_public_set_holds_no_private_half() -> None:
    ring = rotated(None, new_key=new_private_key(), now=0.0)
    keys = ring.jwks()["keys"]
    assert isinstance(keys, list)
    assert len(keys) == 1
    assert "d" not in keys[0]


def test_after_a_rotation_the_old_key_signs_until_pods_can_know_the_new_one() -> None:
    first = rotated(None, new_key=new_private_key(), now=0.0)
    second = rotated(first, new_key=new_private_key(), now=1000.0)
    assert second.signing_key(1000.0) == first.current
    assert second.signing_key(1000.0 + PUBLISH_SECONDS) == second.current
    for now in (1000.0, 1000.0 + PUBLISH_SECONDS):
        kid = jwt.get_unverified_header(sign(second, audience="u", now=now))["kid"]
        assert kid in [key["kid"] for key in second.jwks()["keys"]]  # type: ignore[attr-defined]


def test_the_ring_survives_its_secret() -> None:
    first = rotated(None, new_key=new_private_key(), now=5.25)
    for ring in (first, rotated(first, new_key=new_private_key(), now=9.0)):
        data = {name: value for name, value in secret_data(ring).items() if value is not None}
        assert read_secret(data) == ring


def test_a_secret_without_data_has_no_ring_and_a_damaged_one_is_an_error() -> None:
    assert read_secret({}) is None
    with pytest.raises(ValueError, match="Ed25519"):
        read_secret({"current": base64.b64encode(b"short").decode()})


def test_a_key_is_due_at_first_and_after_a_month() -> None:
    ring = rotated(None, new_key=new_private_key(), now=0.0)
    assert is_due(None, 0.0)
    assert not is_due(ring, ROTATE_AFTER_SECONDS - 1)
    assert is_due(ring, ROTATE_AFTER_SECONDS)


class Secret:
    """A Secret that refuses a patch of an older version, as the API server does."""

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.version = 1

    async def get_secret(self, namespace: str, name: str) -> Mapping[str, Any]:
        return {"metadata": {"resourceVersion": str(self.version)}, "data": dict(self.data)}

    async def patch_secret(
        self, namespace: str, name: str, *, data: Mapping[str, str | None], resource_version: str
    ) -> None:
        assert resource_version == str(self.version), "conflict"
        self.version += 1
        for key, value in data.items():
            if value is None:
                self.data.pop(key, None)
            else:
                self.data[key] = value


async def test_two_operators_use_the_same_key() -> None:
    secret = Secret()
    one, two = (KeyStore(secret, namespace="n", name="s") for _ in range(2))
    assert await one.refresh(0.0)
    assert await two.refresh(1.0)
    assert one.ring == two.ring
    assert not await one.refresh(2.0)


async def test_a_due_key_is_rotated_and_the_old_one_kept_as_previous() -> None:
    store = KeyStore(Secret(), namespace="n", name="s")
    await store.refresh(0.0)
    before = store.ring
    assert await store.refresh(ROTATE_AFTER_SECONDS)
    assert store.ring.previous == before.current
    assert store.ring.current != before.current


def test_a_ring_that_was_never_read_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not been read"):
        _ = KeyStore(Secret(), namespace="n", name="s").ring


async def test_a_token_is_used_again_for_half_its_life_but_never_across_a_rotation() -> None:
    store = KeyStore(Secret(), namespace="n", name="s")
    await store.refresh(1000.0)
    first = store.token("u", 1000.0)
    assert store.token("u", 1000.0 + LIFETIME_SECONDS / 2 - 1) == first
    assert store.token("u", 1000.0 + LIFETIME_SECONDS / 2) != first
    assert store.token("other", 1000.0) != first
    assert store.jwks == store.ring.jwks()
    later = 1000.0 + ROTATE_AFTER_SECONDS
    await store.refresh(later)
    kids = [key["kid"] for key in store.jwks["keys"]]  # type: ignore[attr-defined]
    assert jwt.get_unverified_header(store.token("u", later))["kid"] in kids
    assert len(kids) == 2
