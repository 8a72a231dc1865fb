"""Who may use the admin API: signed tokens of the operator, checked against public keys in a file.

The file (a JWKS, mounted from the object's ConfigMap) is read again when it changes. A token is an EdDSA JWT for one
audience, the object's uid, and lives a minute. Called by `admin` for every request.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jwt

MAX_LIFETIME_SECONDS = 60
LEEWAY_SECONDS = 5
"""How far the operator's clock may be off."""

logger = logging.getLogger(__name__)


class TokenRefused(Exception):
    """Why a token is not accepted; a sentence without the token's content."""


class AdminKeys:
    """Public keys by key id. A file that cannot be read leaves no key valid."""

    def __init__(self, path: Path, audience: str, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._audience = audience
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._keys: dict[str, jwt.PyJWK] = {}
        self._complaint = ""

    def check(self, token: str) -> str:
        """Return who holds `token` (its subject, or its key) when it is valid now; raises TokenRefused."""
        self._refresh()
        try:
            key_id = str(jwt.get_unverified_header(token).get("kid"))
            key = self._keys.get(key_id)
            if key is None:
                raise TokenRefused("no key with this key id is known here")
            claims = jwt.decode(
                token,
                key,
                algorithms=["EdDSA"],
                audience=self._audience,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise TokenRefused(str(error)) from error
        if claims["exp"] > self._clock() + MAX_LIFETIME_SECONDS + LEEWAY_SECONDS:
            raise TokenRefused(f"the token lives longer than {MAX_LIFETIME_SECONDS} s")
        return str(claims.get("sub") or f"key {key_id}")

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            self._keys = _read_keys(self._path)
            self._stamp, self._complaint = stamp, ""
        except (OSError, ValueError, KeyError, TypeError, jwt.PyJWTError) as error:
            if str(error) != self._complaint:  # once, not for each request of whoever may ask
                logger.warning("admin keys in %s cannot be used, so no token is accepted: %s", self._path, error)
            self._complaint = str(error)
            self._keys = {}
            self._stamp = None


def _read_keys(path: Path) -> dict[str, jwt.PyJWK]:
    data = json.loads(path.read_text(encoding="utf-8"))
    return {str(item["kid"]): jwt.PyJWK.from_dict(item, "EdDSA") for item in data["keys"]}
