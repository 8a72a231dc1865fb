"""Requests made from the served OpenAPI document, good ones and spoilt ones: no failure of ours, no hang, no leak."""

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tidegate_engine.engine import Engine
from tidegate_engine.live_policy import LivePolicy, SchedulingPolicy
from tidegate_engine.serve import Process
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
MakeScript = Callable[..., Any]
PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
REQUESTS = 10_000 if PROVE else 100
AT_ONCE = 16
SPOILT_SHARE = 0.3
GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/api/chat",
        "/api/generate",
        "/tokenize",
        "/detokenize",
    }
)
"""Most requests go here; the other paths are asked, too."""
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**70, 1e308, -0.5, "", "x", "\x00", "é😀", "a" * 3000, [], {}, [[]], [None],
    {"a": {"b": []}},
    [{"role": "user"}], "truncate_left",
)  # fmt: skip
SMALL: Mapping[str, Any] = {
    "max_tokens": 6, "max_completion_tokens": 6, "max_output_tokens": 6, "num_predict": 6, "n": 2, "min_tokens": 3,
    "previous_response_id": "", "background": False, "priority": 0, "think": False, "seed": 600,
}  # fmt: skip
"""Upper bounds (or the only value) of fields whose whole range would be slow or refused; a spoilt request has any. The
scripted runner fails for the seed 666."""
FORMS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
     "format", "text"}
)  # fmt: skip
FORM_SHARE = 0.04
"""How often these are given: at most one of them may be, and few values mean anything."""


@dataclass
class Maker:
    """Makes values of a JSON schema."""

    schemas: Mapping[str, Any]
    random: random.Random

    def value(self, schema: Mapping[str, Any], *, name: str = "", depth: int = 0) -> Any:
        if "$ref" in schema:
            return self.value(self.schemas[schema["$ref"].rpartition("/")[2]], name=name, depth=depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.value(self.random.choice(schema[union]), name=name, depth=depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        make = {
            "object": self._object, "array": self._array, "string": self._string, "integer": self._integer,
            "number": self._number, "boolean": self._boolean, "null": lambda *_: None,
        }  # fmt: skip
        return make[schema["type"]](schema, name, depth) if "type" in schema else self.random.choice(JUNK[:12])

    def _object(self, schema: Mapping[str, Any], _name: str, depth: int) -> Any:
        properties = schema.get("properties")
        if properties is None and schema.get("additionalProperties", {}) not in ({}, True):
            return {"7": self.value(schema["additionalProperties"], depth=depth + 1)}
        if properties is None:
            return {"port": {"type": "string"}} if self.random.random() < 0.5 else {}
        required = schema.get("required", ())
        share = 0.25 if depth == 0 else 0.5
        return {
            key: self.value(field, name=key, depth=depth + 1)
            for key, field in properties.items()
            if key in required or self.random.random() < (FORM_SHARE if key in FORMS else share)
        }

    def _array(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), max(least, 3))
        items = schema.get("items", {})
        return [self.value(items, name=name, depth=depth + 1) for _ in range(self.random.randint(least, most))]

    def _string(self, schema: Mapping[str, Any], name: str, _depth: int) -> Any:
        if name in SMALL:
            return SMALL[name]
        if "pattern" in schema:
            return self.random.choice(("tide", "get_weather"))
        if name == "arguments":
            return '{"port": "Brest"}'
        return self.random.choice(("tide", "When is high tide?", "é😀", "a b c " * 20))

    def _integer(self, schema: Mapping[str, Any], name: str, _depth: int) -> Any:
        if SMALL.get(name) == 0:
            return 0
        least = max(schema.get("minimum", 0), 1)
        most = SMALL.get(name, min(schema.get("maximum", 900), 900))
        return self.random.randint(least, max(least, most))

    def _number(self, schema: Mapping[str, Any], _name: str, _depth: int) -> Any:
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        most = schema.get("maximum", schema.get("exclusiveMaximum", 2))
        return round(self.random.uniform(max(least, 0.01), most), 3)

    def _boolean(self, _schema: Mapping[str, Any], name: str, _depth: int) -> Any:
        return SMALL.get(name, self.random.random() < 0.5)

    def spoil(self, body: Any) -> Any:
        """Break one place of a body."""
        if not isinstance(body, dict | list) or not body or self.random.random() < 0.05:
            return self.random.choice(JUNK)
        key = self.random.choice(list(body) if isinstance(body, dict) else range(len(body)))
        what = self.random.random()
        if what < 0.5 and isinstance(body[key], dict | list) and body[key]:
            body[key] = self.spoil(body[key])
        elif what < 0.65:
            del body[key]
        else:
            body[key] = self.random.choice(JUNK)
        return body


def spoil_bytes(content: bytes, source: random.Random) -> bytes:
    cut = source.randrange(len(content) + 1)
    return content[:cut] + bytes([source.randrange(256)]) * source.randrange(2) + content[cut + source.randrange(2) :]


@pytest.mark.prove
@pytest.mark.timeout(3600 if PROVE else 120)
async def test_requests_made_from_the_openapi_document_never_fail_or_hang(
    start_engine: StartEngine, make_script: MakeScript, fast_profile: Profile, loops: Loops
) -> None:
    # An answer without a limit fills the context, so the context is short.
    quick = replace(fast_profile, max_model_len=192, step=replace(fast_profile.step, base_seconds=0.0001))
    runner = make_script("tide ", structured_outputs=True, profile=quick)
    engine = await start_engine(
        runner=runner, tool_call_parser="hermes", policy=LivePolicy(scheduling_policy=SchedulingPolicy.PRIORITY)
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=60) as http:
        document = (await http.get("/openapi.json")).json()
        bodies = {
            path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in document["paths"].items()
            if "post" in operations
        }
        statuses: dict[int, int] = {}
        failures: list[str] = []

        async def ask(seed: int) -> None:
            source = random.Random(seed)
            maker = Maker(document["components"]["schemas"], source)
            path = source.choice(sorted(GENERATING if source.random() < 0.9 else bodies))
            body = maker.value(bodies[path])
            content = b""
            if source.random() < SPOILT_SHARE:
                body = maker.spoil(body)
                content = json.dumps(body).encode()
                if source.random() < 0.1:
                    content = spoil_bytes(content, source)
            content = content or json.dumps(body).encode()
            try:
                answer = await http.post(path, content=content)
            except httpx.HTTPError as error:
                failures.append(f"{seed} {path} {content[:500]!r}: {error!r}")
                return
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.status_code >= 500 or b"internal_error" in answer.content:
                failures.append(f"{seed} {path} {content[:500]!r}: {answer.status_code} {answer.text[:300]}")
            elif answer.status_code >= 400 and "error" not in answer.json():
                failures.append(f"{seed} {path} {content[:500]!r}: no error in {answer.text[:300]}")

        seeds = iter(range(REQUESTS))

        async def worker() -> None:
            for seed in seeds:
                await ask(seed)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        assert not failures, "\n".join(failures[:5])
        assert sum(statuses.values()) == REQUESTS
        assert statuses[200] >= REQUESTS / 2, statuses
    scheduler = loops[engine].scheduler
    async with asyncio.timeout(20):
        while scheduler.has_work:  # noqa: ASYNC110  # the engine's thread changes it
            await asyncio.sleep(0.01)
    assert scheduler.blocks.used == 0
    scheduler.check_integrity()


async def test_the_document_names_every_route_and_the_served_models(start_engine: StartEngine) -> None:
    engine = await start_engine()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=60) as http:
        document = (await http.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                answer = await http.request(method, path.replace("{name}", "fast"), content=b"{")
                assert answer.status_code == (200 if method == "get" else 400), (method, path)
    schemas = document["components"]["schemas"]
    assert schemas["ChatCall"]["properties"]["model"]["enum"] == ["fast", "also-fast"]
    text = json.dumps(document)
    references = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
