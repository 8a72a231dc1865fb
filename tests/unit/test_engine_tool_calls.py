"""Calls of tools: the parsers over every way to cut a text, and whole sessions through the official client."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.openai import ChatCall
from tidegate_engine.serve import Process
from tidegate_engine.structured import StructureError
from tidegate_engine.tool_calls import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, ToolCall, ToolCallParser, recognise_format

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]
NAMES = ("tide", "get_weather")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What the sea does",
            "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
        },
    }
    for name in NAMES
]
USER: Any = [{"role": "user", "content": "When is high tide?"}]
TIDE = '{"name": "tide", "arguments": {"port": "Brest"}}'
WEATHER = '{"name": "get_weather", "arguments": {}}'

Seen = list[str | tuple[str, str]]


def parse(name: str, chunks: list[str]) -> Seen:
    """What a parser gives in all: texts joined, calls as (name, arguments)."""
    parser = ToolCallParser(FORMATS[name], NAMES)
    parts = [part for chunk in chunks for part in parser.push(chunk)]
    seen: Seen = []
    for part in [*parts, *parser.finish()]:
        if isinstance(part, ToolCall):
            seen.append((part.name, part.arguments))
        elif seen and isinstance(seen[-1], str):
            seen[-1] += part
        else:
            seen.append(part)
    return seen


CALL = ("tide", '{"port": "Brest"}')
CALLS: list[tuple[str, str, Seen]] = [
    ("hermes", f"<tool_call>\n{TIDE}\n</tool_call>", [CALL]),
    ("qwen", f"Let me see. \n<tool_call>{TIDE}</tool_call>\n", ["Let me see.", CALL]),
    ("hermes", f"<tool_call>{TIDE}</tool_call>\n<tool_call>{WEATHER}</tool_call>", [CALL, ("get_weather", "{}")]),
    ("hermes", f"<tool_call>{TIDE}", [CALL]),
    ("hermes", f"<tool_call>{TIDE}</tool_call> and then", [CALL, "and then"]),
    ("hermes", '<tool_call>{"name": "tide", "arguments": {"port": "</tool_call>}"}}</tool_call>',
     [("tide", '{"port": "</tool_call>}"}')]),
    ("hermes", '<tool_call>{"name": "tide", "arguments": "{\\"port\\": 1}"}</tool_call>', [("tide", '{"port": 1}')]),
    ("llama3_json", '{"name": "tide", "parameters": {"port": "Brest"}}', [CALL]),
    ("llama3_json", f'<|python_tag|>{TIDE}; {WEATHER}', [CALL, ("get_weather", "{}")]),
    ("llama3_json", f' \n{TIDE};{WEATHER}', [CALL, ("get_weather", "{}")]),
    ("mistral", f"[TOOL_CALLS][{TIDE}, {WEATHER}]", [CALL, ("get_weather", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{TIDE}]", [CALL]),
    ("mistral", 'Well [TOOL_CALLS]tide[ARGS]{"port": "Brest"}[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{}',
     ["Well", CALL, ("get_weather", "{}")]),
    ("mistral", '[TOOL_CALLS]tide{"port": "Brest"}', [CALL]),
]  # fmt: skip
TEXTS = [
    ("hermes", "no call at all < here <tool"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'tide', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "tide", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "tide", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "tide", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "tide", "arguments": "{\"x\": 1e999}"}</tool_call>'),
    ("hermes", r'<tool_call>{"name": "tide", "arguments": "{\"x\": \"\\ud800\"}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "tide", "arguments": {"x": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "tide", "arguments": {"x": 1}</tool_call>'),
    ("hermes", "<tool_call>tide(port='Brest')</tool_call>"),
    ("hermes", '<tool_call>{"name": "tide", "arguments": {"port": "Bre'),
    ("hermes", "<tool_call>" + '{"a":' * 100),
    ("hermes", "only space \n "),
    ("llama3_json", '{"answer": 42} is JSON but no call'),
    ("llama3_json", f"see: {TIDE}"),
    ("llama3_json", "{ not json"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]nothing{}"),
    ("mistral", f"[TOOL_CALLS][{TIDE}, 5]"),
    ("mistral", "[TOOL_CALLS]" + "a" * 300),
    ("mistral", "[TOOL_CALLS]"),
]


@pytest.mark.parametrize(("name", "text", "expected"), CALLS)
def test_calls_are_taken_out_of_the_text_wherever_it_is_cut(name: str, text: str, expected: Seen) -> None:
    assert parse(name, [text]) == expected
    assert parse(name, list(text)) == expected
    for cut in range(1, len(text)):
        assert parse(name, [text[:cut], text[cut:]]) == expected, cut


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_whole_call_stays_text_to_the_letter(name: str, text: str) -> None:
    assert parse(name, [text]) == [text]
    for cut in range(1, len(text)):
        assert parse(name, [text[:cut], text[cut:]]) == [text], cut


def test_a_good_call_behind_a_malformed_one_is_still_a_call() -> None:
    bad = '<tool_call>{"name": "tide", "arguments": {</tool_call>'
    assert parse("hermes", [f"{bad}<tool_call>{TIDE}</tool_call>"]) == [bad, CALL]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "tide", ";", " ", "\n", "{", "}",
     "[", "]", '"', "\\", "<", "<tool", "[TOOL", TIDE, WEATHER, f"[{TIDE}]", '{"port": 1}', "{}", "é😀", "a", ","]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(PIECES, max_size=12).map("".join), st.data())
def test_the_outcome_never_depends_on_the_cuts(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    chunks = [text[start:end] for start, end in pairwise(cuts)]
    whole = parse(name, [text])
    assert parse(name, chunks) == whole
    assert parse(name, list(text)) == whole
    if not any(isinstance(part, tuple) for part in whole):
        assert "".join(map(str, whole)) == text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3_JSON),
        ('{% if tools %}{"name": x, "parameters": y} ipython{% endif %}', LLAMA3_JSON),
        ("{% if tools %}something of its own{% endif %}", None),
    ],
)
def test_the_format_is_recognised_from_the_chat_template(template: str | None, expected: object) -> None:
    assert recognise_format(template) is expected


def client_of(engine: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key="none", max_retries=0)


async def test_a_session_with_tools_calls_answers_and_ends(start_engine: StartEngine, make_script: MakeScript) -> None:
    script = f"I look.\n<tool_call>\n{TIDE}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>"
    runner = make_script(script, ends=True)
    engine = await start_engine(runner=runner, tool_call_parser="hermes")
    async with client_of(engine) as client:
        asked = await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, max_tokens=200)
        message = asked.choices[0].message
        assert asked.choices[0].finish_reason == "tool_calls"
        assert message.content == "I look." and message.tool_calls is not None
        calls: Any = message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("tide", {"port": "Brest"}), ("get_weather", {}),
        ]  # fmt: skip
        assert len({call.id for call in calls}) == 2
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "at noon"} for call in calls]
        history: Any = [*USER, message.model_dump(exclude_none=True), *results]
        again = await client.chat.completions.create(
            model="fast", messages=history, tools=TOOLS, tool_choice="none", max_tokens=200
        )
    assert again.choices[0].message.content == script
    assert again.choices[0].finish_reason == "stop" and not again.choices[0].message.tool_calls
    assert '"arguments": {"port": "Brest"}' in runner.prompts[1]
    assert "What the sea does" in runner.prompts[0] and "What the sea does" not in runner.prompts[1]


async def test_a_stream_of_calls_adds_up_as_the_client_expects(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    script = f"I look.\n<tool_call>\n{TIDE}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>"
    engine = await start_engine(runner=make_script(script, ends=True), tool_call_parser="qwen")
    async with client_of(engine) as client:
        stream: Any = client.chat.completions.stream(model="fast", messages=USER, tools=TOOLS, max_tokens=200)
        async with stream as events:
            deltas = [event.chunk async for event in events if event.type == "chunk"]
            final = await events.get_final_completion()
    message = final.choices[0].message
    assert message.content == "I look."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        CALL,
        ("get_weather", "{}"),
    ]
    rows = [row for chunk in deltas if chunk.choices for row in chunk.choices[0].delta.tool_calls or []]
    assert [row.index for row in rows] == [0, 0, 1, 1]
    assert [bool(row.id) for row in rows] == [True, False, True, False]
    assert [chunk.choices[0].finish_reason for chunk in deltas if chunk.choices][-1] == "tool_calls"


async def test_one_call_is_enough_when_parallel_calls_are_not_wanted(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    runner = make_script(f"<tool_call>{TIDE}</tool_call><tool_call>{WEATHER}</tool_call>")
    engine = await start_engine(runner=runner, tool_call_parser="hermes")
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(
            model="fast", messages=USER, tools=TOOLS, parallel_tool_calls=False, max_tokens=200
        )
    assert len(answer.choices[0].message.tool_calls or []) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None and answer.usage.completion_tokens < 40


class SpecialMarks(ByteTokenizer):
    """Its marks of calls are special tokens, which add nothing to a text."""

    IDS: Mapping[str, int] = {"[TOOL_CALLS]": 1, "[ARGS]": 2}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids = []
        for part in re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text):
            ids += [self.IDS[part]] if part in self.IDS else super().encode(part)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.IDS.values() else super().token_bytes(token_id)


async def test_marks_that_are_special_tokens_are_seen(start_engine: StartEngine, make_script: MakeScript) -> None:
    tokenizer = SpecialMarks()
    runner = make_script('[TOOL_CALLS]tide[ARGS]{"port": "Brest"}', ends=True, tokenizer=tokenizer)
    engine = await start_engine(runner=runner, tokenizer=tokenizer, tool_call_parser="mistral")
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, max_tokens=50)
    calls: Any = answer.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [CALL]
    assert len(calls[0].id) == 9 and calls[0].id.isalnum()


async def test_a_malformed_call_reaches_the_client_as_text(start_engine: StartEngine, make_script: MakeScript) -> None:
    script = '<tool_call>{"name": "tide", "arguments": {"port": }}</tool_call>'
    engine = await start_engine(runner=make_script(script, ends=True), tool_call_parser="hermes")
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, max_tokens=200)
    assert answer.choices[0].message.content == script
    assert answer.choices[0].finish_reason == "stop"


async def test_a_choice_that_cannot_be_kept_is_refused(start_engine: StartEngine) -> None:
    engine = await start_engine(tool_call_parser="hermes")
    other: Any = {"type": "function", "function": {"name": "other"}}
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="not in tools"):
            await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, tool_choice=other)
        with pytest.raises(openai.BadRequestError, match="follows no grammar"):
            await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tide"}}])
async def test_a_call_that_must_be_made_is_held_to_the_tools_schemas(
    start_engine: StartEngine, make_script: MakeScript, choice: Any
) -> None:
    runner = make_script(TIDE, ends=True, structured_outputs=True)
    engine = await start_engine(runner=runner)
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, tool_choice=choice)
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            await client.chat.completions.create(
                model="fast", messages=USER, tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"}
            )
    calls: Any = answer.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [CALL]
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert '"port"' in runner.grammars[0] and '"tide"' in runner.grammars[0]
    assert ('"get_weather"' in runner.grammars[0]) == (choice == "required")


async def test_a_call_that_must_be_made_has_the_ids_that_the_models_template_wants(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    engine = await start_engine(
        runner=make_script(TIDE, ends=True, structured_outputs=True), tool_call_parser="mistral"
    )
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fast", messages=USER, tools=TOOLS, tool_choice="required")
    calls: Any = answer.choices[0].message.tool_calls
    assert [len(call.id) for call in calls] == [9]


def test_definitions_of_tools_move_to_the_root_of_the_grammar() -> None:
    parameters = {"properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "tide", "parameters": parameters}}
    other: Any = {
        "type": "function",
        "function": {"name": "dive", "parameters": {**parameters, "$defs": {"Place": {}}}},
    }
    fields: Any = {"model": "m", "messages": USER, "tool_choice": "required"}
    structure = ChatCall(**fields, tools=[tool]).structure()
    assert structure is not None
    schema = json.loads(structure.text)
    assert schema["$defs"] == parameters["$defs"] and "$defs" not in schema["properties"]["arguments"]
    with pytest.raises(StructureError, match="'Place' differently"):
        ChatCall(**fields, tools=[tool, other]).structure()
