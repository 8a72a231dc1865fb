"""The Responses API through the official client: texts, events in their order, calls of functions."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tidegate_engine.responses import ResponseCall
from tidegate_engine.serve import Process

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]
TOOLS: Any = [{"type": "function", "name": "tide", "description": "When it is high", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "tide", "arguments": {"port": "Brest"}}</tool_call>'


def client_of(engine: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key="none", max_retries=0)


async def test_a_text_is_answered_with_usage(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script("High at noon.", ends=True)
    engine = await start_engine(runner=runner)
    async with client_of(engine) as client:
        answer = await client.responses.create(model="fast", input="When?", instructions="Be short.")
    assert answer.output_text == "High at noon."
    assert answer.status == "completed" and answer.error is None
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5 and answer.usage.input_tokens_details.cached_tokens == 0
    assert "Be short." in runner.prompts[0] and "When?" in runner.prompts[0]


async def test_an_answer_that_is_cut_is_incomplete(start_engine: StartEngine) -> None:
    async with client_of(await start_engine()) as client:
        answer = await client.responses.create(model="fast", input="When?", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 3


async def test_a_stream_has_openais_events_in_openais_order(start_engine: StartEngine, make_script: MakeScript) -> None:
    engine = await start_engine(runner=make_script("High at noon.", ends=True))
    async with client_of(engine) as client:
        stream: Any = await client.responses.create(model="fast", input="When?", stream=True)
        events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == "High at noon." == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 5
    assert len({event.item_id for event in deltas}) == 1


async def test_the_clients_own_stream_helper_follows_text_and_calls(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    engine = await start_engine(runner=make_script(f"I look. {CALL}{CALL}", ends=True), tool_call_parser="hermes")
    async with client_of(engine) as client:
        stream: Any = client.responses.stream(model="fast", input="When?", tools=TOOLS)
        async with stream as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert json.loads(final.output[1].arguments) == {"port": "Brest"}
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.index("response.output_text.done") < kinds.index("response.function_call_arguments.delta")


async def test_a_conversation_with_calls_goes_round(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script(CALL, ends=True)
    engine = await start_engine(runner=runner, tool_call_parser="hermes")
    async with client_of(engine) as client:
        asked = await client.responses.create(model="fast", input="When?", tools=TOOLS)
        call: Any = asked.output[0]
        assert (call.type, call.name) == ("function_call", "tide")
        history: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "When?"}]},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "at noon"},
        ]
        await client.responses.create(model="fast", input=history, tools=TOOLS)
    assert "<tool>\nat noon" in runner.prompts[1] and '"port": "Brest"' in runner.prompts[1]


def test_a_call_joins_the_text_that_the_model_said_before_it() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "tide", "arguments": "{}"}
    history: Any = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "I look."},
        call,
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "at noon"},
        {**call, "call_id": "c"},
    ]
    messages = ResponseCall.model_validate({"model": "fast", "input": history}).as_chat().messages
    assert [(message.role, message.text()) for message in messages] == [
        ("user", "When?"), ("assistant", "I look."), ("tool", "at noon"), ("assistant", ""),
    ]  # fmt: skip
    assert [[call.id for call in message.tool_calls or ()] for message in messages] == [[], ["a", "b"], [], ["c"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x" * 9000}, "messages"),
        ({"input": "x", "model": "other"}, "model"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    start_engine: StartEngine, fields: dict[str, Any], param: str
) -> None:
    async with client_of(await start_engine()) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(**{"model": "fast", **fields})
    assert caught.value.status_code in (400, 404) and caught.value.param == param


async def test_truncation_auto_cuts_an_input_that_is_too_long(start_engine: StartEngine) -> None:
    async with client_of(await start_engine()) as client:
        answer: Any = await client.responses.create(
            model="fast", input="word " * 2000, truncation="auto", max_output_tokens=4
        )
    assert answer.usage.truncated_tokens > 1900
    assert answer.usage.input_tokens <= 508


async def test_a_failure_in_a_stream_is_an_event(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script("x")
    engine = await start_engine(runner=runner)
    runner.fail_steps = 1
    async with client_of(engine) as client:
        stream: Any = await client.responses.create(model="fast", input="When?", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed" and "out of memory" in events[-1].response.error.message


async def test_an_answer_may_be_held_to_a_schema(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script('{"port": "Brest"}', ends=True, structured_outputs=True)
    schema = {"type": "object", "properties": {"port": {"type": "string"}}}
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema}}
    async with client_of(await start_engine(runner=runner)) as client:
        answer = await client.responses.create(model="fast", input="Where?", text=form)
    assert json.loads(answer.output_text) == {"port": "Brest"}
    assert '"port"' in runner.grammars[0]
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
