"""Answers held to a schema, regex, choice or grammar: whatever the model wants to say, what it says fits."""

import asyncio
import json
import re
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine import grammars as grammars_module
from tidegate_engine.blocks import BlockPool
from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.grammars import Grammars
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.request import FinishReason, Request, SampledToken, SamplingParams, Step, StepItem
from tidegate_engine.sampling import Sampler
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.serve import Process
from tidegate_engine.settings import BatchSettings
from tidegate_engine.structured import Structure, StructureError, StructureFields, compile_grammar
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by their bytes; None is a special token. The last special one ends a text."""

    tokens: Sequence[bytes | None]

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (max(index for index, token in enumerate(self.tokens) if token is None),)

    def encode(self, text: str) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] or b""

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()


BYTES: list[bytes | None] = [bytes([byte]) for byte in range(256)]
MERGED: list[bytes | None] = [
    b'{"',
    b'":',
    b'",',
    b"name",
    b"age",
    b"ta",
    b"gs",
    b" \n",
    b'"]',
    b"\xc3\xa9",
    b"12",
    b"a",
]
VOCABULARIES = {
    "byte-level": Vocabulary([None, *BYTES, *MERGED, None]),
    "words with a space before": Vocabulary([None, None, *BYTES, b" name", b" the", b' "', b"  ", *MERGED]),
    # As SentencePiece has it: bytes for the rare, which other tokens say too.
    "byte fallback": Vocabulary([None, *BYTES, *[bytes([byte]) for byte in b'{}[]":,0123456789abnmetgs '], *MERGED]),
}


def grammar_of(kind: Any, value: object) -> str:
    return compile_grammar(Structure(kind, value if isinstance(value, str) else json.dumps(value), "test"))


class RandomModel:
    """Logits that are pure chance, the same for the same sequence; steps through sampler and grammars."""

    def __init__(self, vocabulary: Vocabulary, *, width: int | None = None) -> None:
        self.width = width or vocabulary.vocab_size
        grammars = Grammars.of(vocabulary, threads=1)
        self.sampler = Sampler(eos_ids=vocabulary.eos_token_ids, entropy=b"0" * 16, masks=grammars)

    def run(self, step: Step) -> dict[str, SampledToken]:
        self.sampler.prepare([item.request for item in step.items])
        items = [item for item in step.items if item.samples]
        rows = [self._logits(item, count) for item in items for count in range(len(item.drafts) + 1)]
        if not rows:
            return {}
        drafts = {place: item.drafts for place, item in enumerate(items) if item.drafts}
        tokens = self.sampler.sample(torch.stack(rows), [item.request for item in items], drafts)
        return {item.request.id: token for item, token in zip(items, tokens, strict=True)}

    def _logits(self, item: StepItem, count: int) -> torch.Tensor:
        known = [*item.request.output_ids, *item.drafts[:count]]
        # Not `hash`: that of a text is another one in every process.
        seed = zlib.crc32(repr((item.request.id, known[-2:])).encode())
        return torch.randn(self.width, generator=torch.Generator().manual_seed(seed)) * 3


def serve(
    model: RandomModel,
    requests: Sequence[Request],
    *,
    blocks: int = 400,
    speculation: NgramSpeculation | None = None,
) -> Scheduler:
    pool = BlockPool(blocks, 4)
    scheduler = Scheduler(BatchSettings(16, 256, 64), pool, max_model_len=2000, speculation=speculation)
    for request in requests:
        scheduler.add(request)
        scheduler._reserve_ratio = 0.0
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, model.run(step), 0.0)
    return scheduler


def ask(name: str, grammar: str | None, *, max_tokens: int = 600, **params: Any) -> Request:
    return Request(name, 3, max_tokens, 0.0, prompt_ids=[1, 2, 3], params=SamplingParams(grammar=grammar, **params))


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert len(person["name"]) <= 6 and 0 <= person["age"] <= 150 and len(person["tags"]) <= 2


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 1}, {"temperature": 2.0, "top_p": 0.9, "seed": 2}], ids=str
)
def test_every_answer_to_a_schema_parses(kind: str, params: dict[str, Any]) -> None:
    vocabulary = VOCABULARIES[kind]
    grammar = grammar_of("json", PERSON)
    requests = [ask(f"r{index}", grammar, **params) for index in range(3)]
    serve(RandomModel(vocabulary, width=vocabulary.vocab_size + 5), requests)  # logits of no token beyond
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        check_person(vocabulary.text(request.output_ids))


def test_regex_choice_and_grammars_of_both_notations_are_followed() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    cases: list[tuple[str, object, str]] = [
        ("regex", r"[0-9]{3}-[a-c]+x", r"[0-9]{3}-[a-c]+x"),
        ("choice", ["yes", "no", 'may"be'], r'yes|no|may"be'),
        ("grammar", 'root ::= "a" ("b" | "é") [0-9]', r"a[bé][0-9]"),
        ("grammar", 'start: "x" WORD\nWORD: /[a-z]{2}/', r"x[a-z]{2}"),
    ]
    requests = [ask(f"r{index}", grammar_of(kind, value)) for index, (kind, value, _) in enumerate(cases)]
    serve(RandomModel(vocabulary), requests)
    for request, (_, _, pattern) in zip(requests, cases, strict=True):
        assert request.finish_reason is FinishReason.STOP
        assert re.fullmatch(pattern, vocabulary.text(request.output_ids))


def test_whitespace_between_parts_is_bounded() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    space = vocabulary.encode(" ")[0]
    request = ask("a", grammar_of("json", PERSON), temperature=0, logit_bias=((space, 100.0),))
    serve(RandomModel(vocabulary), [request])
    text = vocabulary.text(request.output_ids)
    assert "          " in text
    check_person(text)


def test_preempted_requests_end_as_undisturbed_ones_also_with_guesses() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    grammar = grammar_of("json", PERSON)

    def requests() -> list[Request]:
        return [ask(f"r{index}", grammar if index % 3 else None, max_tokens=60, seed=index) for index in range(5)]

    alone = []
    for request in requests():
        serve(RandomModel(vocabulary), [request])
        alone.append((request.output_ids, request.finish_reason))
    together = requests()
    assert serve(RandomModel(vocabulary), together, blocks=30).preemptions["kv"] > 0
    assert [(request.output_ids, request.finish_reason) for request in together] == alone
    guessed = requests()
    scheduler = serve(RandomModel(vocabulary), guessed, blocks=60, speculation=NgramSpeculation(4, 1, 3))
    assert [(request.output_ids, request.finish_reason) for request in guessed] == alone
    assert scheduler.accepted_tokens > 0


def test_a_grammars_end_goes_before_the_minimum_length_and_before_ignoring_ends() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    request = ask("a", grammar_of("regex", "abc"), min_tokens=20, ignore_eos=True)
    longer = ask("b", grammar_of("regex", "a{2,30}"), min_tokens=20)
    serve(RandomModel(vocabulary), [request, longer])
    assert request.finish_reason is longer.finish_reason is FinishReason.STOP
    assert vocabulary.text(request.output_ids) == "abc"
    assert longer.output_tokens >= 20


def test_a_grammar_that_fails_ends_its_own_request() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    broken, good = ask("broken", "no grammar at all"), ask("good", grammar_of("choice", ["yes"]))
    huge = ask("huge", grammar_of("regex", "(((a|b){1000}c){1000}d){1000}"), max_tokens=40)
    serve(RandomModel(vocabulary), [broken, good, huge])
    assert broken.finish_reason is FinishReason.ERROR
    assert huge.finish_reason in (FinishReason.ERROR, FinishReason.LENGTH)
    assert good.finish_reason is FinishReason.STOP


def test_a_grammar_that_takes_long_to_compile_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = VOCABULARIES["byte-level"]
    model = RandomModel(vocabulary)
    is_done = threading.Event()
    compile_now = Grammars._new_matcher

    def compile_late(grammars: Grammars, grammar: str) -> object:
        is_done.wait()
        return compile_now(grammars, grammar)

    def wait(*_: object) -> None:
        raise AssertionError("the other's token is held up")

    monkeypatch.setattr(Grammars, "_new_matcher", compile_late)
    monkeypatch.setattr(grammars_module, "wait", wait)
    slow, other = ask("slow", grammar_of("choice", ["yes"])), ask("other", None, max_tokens=5, ignore_eos=True)
    scheduler = Scheduler(BatchSettings(4, 64, 64), BlockPool(40, 4), max_model_len=200)
    scheduler.add(slow)
    scheduler.add(other)
    try:
        while other.finish_reason is None:
            step = scheduler.plan(0.0)
            scheduler.commit(step, model.run(step), 0.0)
            scheduler.check_integrity()
        assert (slow.finish_reason, slow.output_ids, slow.num_computed) == (None, [], 2)
    finally:
        is_done.set()
    monkeypatch.undo()
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, model.run(step), 0.0)
    assert vocabulary.text(slow.output_ids) == "yes"


def test_a_step_of_nothing_but_new_grammars_waits_a_little_for_one() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    model = RandomModel(vocabulary)
    waiting = ask("a", grammar_of("choice", ["yes"]))
    waits: list[int] = []

    def wait(futures: list[Any], *_: object) -> None:
        waits.append(len(futures))
        [future.result() for future in futures]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars_module, "wait", wait)
        serve(model, [waiting])
    assert (waits, vocabulary.text(waiting.output_ids)) == ([1], "yes")


def test_more_new_grammars_than_are_kept_are_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = VOCABULARIES["byte-level"]
    model = RandomModel(vocabulary)
    may_compile = threading.Event()
    compile_now = Grammars._new_matcher
    compiled = []

    def compile_late(grammars: Grammars, grammar: str) -> object:
        may_compile.wait()
        compiled.append(grammar)
        return compile_now(grammars, grammar)

    monkeypatch.setattr(Grammars, "_new_matcher", compile_late)
    monkeypatch.setattr(grammars_module, "MAX_COMPILED", 2)
    requests = [ask(str(number), grammar_of("choice", [f"n{number}"])) for number in range(6)]
    again = ask("again", requests[0].params.grammar)
    masks = model.sampler._masks
    assert isinstance(masks, Grammars)
    for _ in range(2):
        masks.prepare([*requests, again])
    may_compile.set()
    serve(model, [*requests, again])
    assert [vocabulary.text(request.output_ids) for request in requests] == [f"n{number}" for number in range(6)]
    assert vocabulary.text(again.output_ids) == "n0"
    assert compiled == [request.params.grammar for request in requests]
    masks.prepare([ask("new", grammar_of("choice", ["x"]))])
    assert len(masks._compiled) <= 3, "what is compiled is forgotten, what is not is kept"


@pytest.mark.parametrize("speculation", [None, NgramSpeculation(4, 1, 3)])
def test_a_grammar_that_gives_up_in_the_middle_is_no_end_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, speculation: NgramSpeculation | None
) -> None:
    vocabulary = VOCABULARIES["byte-level"]
    model = RandomModel(vocabulary)

    def with_little_fuel(grammars: Grammars, grammar: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(step_lexer_fuel=300)
        assert grammars._tokenizer is not None
        return llguidance.LLMatcher(grammars._tokenizer, grammar, log_level=0, limits=limits)

    serve(model, [ask("first", grammar_of("choice", ["yes"]))])
    monkeypatch.setattr(Grammars, "_new_matcher", with_little_fuel)
    request = ask("a", grammar_of("regex", "(ab){1,3}[ab]*a[ab]{60}"), temperature=0)
    other = ask("b", None, max_tokens=30, ignore_eos=True)
    serve(model, [request, other], speculation=speculation)
    assert request.finish_reason is FinishReason.ERROR and request.output_tokens > 0
    assert other.finish_reason is FinishReason.LENGTH


def test_matchers_go_with_their_requests() -> None:
    vocabulary = VOCABULARIES["byte-level"]
    model = RandomModel(vocabulary)
    grammars = model.sampler._masks
    assert isinstance(grammars, Grammars)
    requests = [ask("a", grammar_of("choice", ["yes"]))]
    serve(model, requests)
    assert len(grammars._held) == 1
    requests.clear()
    assert len(grammars._held) == 0


def test_vocabularies_without_an_end_or_made_up_of_arithmetic_have_no_grammars() -> None:
    assert Grammars.of(ByteTokenizer(), threads=1) is None


def test_the_real_model_answers_in_the_form_of_a_schema(real_model: Path) -> None:
    tokenizer = load_tokenizer(real_model)
    runner = TorchRunner(
        real_model, options=TorchOptions(kv_blocks=20, threads=1), masks=Grammars.of(tokenizer, threads=1)
    )
    assert runner.info.structured_outputs
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "river": {"enum": ["Seine", "Thames"]}},
        "required": ["city", "river"],
        "additionalProperties": False,
    }
    ids = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    params = SamplingParams(temperature=0, grammar=grammar_of("json", schema))
    request = Request("a", len(ids), 100, 0.0, prompt_ids=ids, params=params)
    scheduler = Scheduler(BatchSettings(1, 256, 256), BlockPool(20, 16), max_model_len=320)
    scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
    assert request.finish_reason is FinishReason.STOP
    answer = json.loads(tokenizer.decode(request.output_ids))
    assert set(answer) == {"city", "river"} and len(answer["city"]) <= 12 and answer["river"] in ("Seine", "Thames")


async def test_over_http_answers_have_their_form_and_a_bad_schema_is_its_callers_error(
    start_engine: Callable[..., Awaitable[Process]], tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    runner = TorchRunner(
        tiny_model,
        options=TorchOptions(kv_blocks=100, threads=1),
        masks=Grammars.of(tokenizer, threads=1),
    )
    engine = await start_engine(runner=runner, tokenizer=tokenizer, speculation=NgramSpeculation(3, 1, 2))
    schema = {
        "type": "object",
        "properties": {"tide": {"enum": ["in", "out"]}},
        "required": ["tide"],
        "additionalProperties": False,
    }
    form_of: Any = {"type": "json_schema", "json_schema": {"name": "tide", "schema": schema}}
    question: Any = [{"role": "user", "content": "tide?"}]
    base_url = f"http://127.0.0.1:{engine.api_port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        good = client.chat.completions.create(
            model="fast", messages=question, n=2, response_format=form_of, logprobs=True, top_logprobs=2
        )
        bad = client.chat.completions.create(
            model="fast",
            messages=question,
            stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}},
        )
        plain = client.completions.create(
            model="fast", prompt="x", max_tokens=20, extra_body={"guided_choice": ["high", "low"]}
        )
        answers: Any = await asyncio.gather(good, bad, plain, return_exceptions=True)
    answer, refusal, chosen = answers
    assert isinstance(refusal, openai.BadRequestError)
    assert refusal.param == "response_format" and "wat" in refusal.message
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "")["tide"] in ("in", "out")
    assert chosen.choices[0].text in ("high", "low") and chosen.choices[0].finish_reason == "stop"


# --- what a call says


def form(**fields: Any) -> Structure | None:
    return StructureFields.model_validate(fields).structure()


def test_openais_and_vllms_names_say_the_same() -> None:
    schema = {"type": "integer"}
    texts = {
        found.text
        for found in (
            form(
                response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
            ),
            form(structured_outputs={"json": schema}),
            form(structured_outputs={"json": json.dumps(schema)}),
            form(guided_json=schema),
        )
        if found is not None
    }
    assert texts == {json.dumps(schema)}
    found = form(response_format={"type": "json_object"})
    assert found is not None and json.loads(found.text) == {"type": "object"}
    assert form(response_format={"type": "text"}) is None
    assert form() is None
    kinds = [form(guided_regex="a"), form(structured_outputs={"choice": ["a"]}), form(guided_grammar="root ::= 'a'")]
    assert [found and found.kind for found in kinds] == ["regex", "choice", "grammar"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ],
)
def test_half_a_form_and_two_forms_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(StructureError) as caught:
        form(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("json", '{"type": "wat"}', "wat"),
        ("json", '{"type": ', "cannot be"),
        ("json", "[" * 5000, "cannot be"),
        ("json", json.dumps({"$ref": "https://example.com/x"}), "cannot be compiled"),
        ("regex", "([", "regex"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "garbage", "cannot be"),
        ("json", "x" * 300_000, "at most"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(kind: Any, text: str, complaint: str) -> None:
    with pytest.raises(StructureError, match=complaint):
        compile_grammar(Structure(kind, text, "guided"))


JSON_SCHEMAS = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 1, None]}, {"type": "null"}]),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.dictionaries(st.sampled_from(["x", "y z", 'q"']), inner, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=15, deadline=None)
@given(JSON_SCHEMAS, st.integers(0, 100))
def test_any_schema_gets_an_answer_of_its_form(schema: dict[str, Any], seed: int) -> None:
    vocabulary = VOCABULARIES["byte-level"]
    request = ask(f"r{seed}", grammar_of("json", schema), seed=seed, max_tokens=1500)
    serve(RANDOM_MODEL, [request])
    if request.finish_reason is FinishReason.LENGTH:
        return  # an integer may be long
    check_fits(json.loads(vocabulary.text(request.output_ids)), schema)


RANDOM_MODEL = RandomModel(VOCABULARIES["byte-level"])


def check_fits(value: object, schema: dict[str, Any]) -> None:
    match schema:
        case {"enum": allowed}:
            assert value in allowed
        case {"type": "array", "items": items, "maxItems": most}:
            assert isinstance(value, list) and len(value) <= most
            for item in value:
                check_fits(item, items)
        case {"type": "object", "properties": properties}:
            assert isinstance(value, dict) and set(value) == set(properties)
            for name, item in value.items():
                check_fits(item, properties[name])
        case {"type": name}:
            assert type(value) is {"integer": int, "boolean": bool, "null": type(None)}[name]
