"""What a model thinks comes apart from its answer, however the text was cut, with tools and stop strings beside it."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import ollama
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.chat import ChatTemplate
from tidegate_engine.openai import ChatMessage
from tidegate_engine.reasoning import FORMATS, ReasoningParser
from tidegate_engine.responses import ResponseCall
from tidegate_engine.serve import Process

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]
USER: Any = [{"role": "user", "content": "When is high tide?"}]
TOOL: Any = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "tide", "arguments": {}}</tool_call>'
THOUGHT = "<think>\nThe moon is full.\n</think>\n\nAt noon."


def parse(name: str, text: str, cuts: Sequence[int] = (), *, prompt_end: str = "") -> tuple[str, str]:
    """(thoughts, answer) of a text that comes in pieces."""
    parser = ReasoningParser(FORMATS[name], prompt_end=prompt_end)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [parser.push(text[start:end]) for start, end in pairwise(edges)]
    parts.append(parser.finish())
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "expected"),
    [
        ("qwen3", "", THOUGHT, ("The moon is full.", "At noon.")),
        ("qwen3", "", "At noon.", ("", "At noon.")),
        ("qwen3", "", "\n  At noon.\n", ("", "\n  At noon.\n")),
        ("qwen3", "", "<thin ice>", ("", "<thin ice>")),
        ("qwen3", "", "a <think>b</think>", ("", "a <think>b</think>")),
        ("qwen3", "", "<think>cut of", ("cut of", "")),
        ("qwen3", "", "<think>a </thi", ("a </thi", "")),
        ("qwen3", "", "<think></think>x", ("", "x")),
        ("qwen3", "", "<think>a</think>b</think>", ("a", "b</think>")),
        ("qwen3", "<assistant>\n<think>\n", "I see.\n</think>\nYes", ("I see.", "Yes")),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>is a word", ("", "<think>is a word")),
        ("deepseek_r1", "", "no mark </think> yes", ("no mark", "yes")),
        ("deepseek_r1", "", "<think>a</think>b", ("a", "b")),
        ("deepseek_r1", "", "never ends", ("never ends", "")),
        ("mistral", "", "[THINK]a[/THINK]b", ("a", "b")),
    ],
)
def test_thoughts_and_answer_come_apart(name: str, prompt_end: str, text: str, expected: tuple[str, str]) -> None:
    assert parse(name, text, prompt_end=prompt_end) == expected
    assert parse(name, text, range(len(text)), prompt_end=prompt_end) == expected


PIECES = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", " ", "\n", "a", "moon", "日", "<", ">"])


@given(
    st.lists(PIECES, max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
    st.sampled_from(["qwen3", "deepseek_r1"]),
    st.sampled_from(["", "<think>\n", "</think>\n\n"]),
)
def test_what_comes_does_not_depend_on_the_cuts(text: str, cuts: list[int], name: str, prompt_end: str) -> None:
    whole = parse(name, text, prompt_end=prompt_end)
    assert parse(name, text, cuts, prompt_end=prompt_end) == whole
    said = "".join(whole)
    assert len(said) <= len(text) and not set(said) - set(text)


def client_of(engine: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key="none", max_retries=0)


async def test_a_chat_has_its_thoughts_beside_the_answer(start_engine: StartEngine, make_script: MakeScript) -> None:
    engine = await start_engine(runner=make_script(THOUGHT, ends=True), reasoning_parser="qwen3")
    async with client_of(engine) as client:
        answer: Any = await client.chat.completions.create(model="fast", messages=USER)
        message = answer.choices[0].message
        assert (message.content, message.reasoning) == ("At noon.", "The moon is full.")
        assert message.reasoning_content == message.reasoning
        assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
        stream: Any = await client.chat.completions.create(model="fast", messages=USER, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "At noon."
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "The moon is full."
        hidden: Any = await client.chat.completions.create(
            model="fast", messages=USER, extra_body={"include_reasoning": False}
        )
        assert hidden.choices[0].message.content == "At noon."
        assert not hasattr(hidden.choices[0].message, "reasoning")


async def test_without_a_parser_thoughts_stay_in_the_text(start_engine: StartEngine, make_script: MakeScript) -> None:
    engine = await start_engine(runner=make_script(THOUGHT, ends=True))
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="fast", messages=USER)
    assert answer.choices[0].message.content == THOUGHT
    assert answer.usage is not None and answer.usage.completion_tokens_details is None


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called_behind_thoughts_and_not_in_them(
    start_engine: StartEngine, make_script: MakeScript, stream: bool
) -> None:
    text = f"<think>I could {CALL}</think>\n{CALL}"
    engine = await start_engine(
        runner=make_script(text, ends=True), reasoning_parser="qwen3", tool_call_parser="hermes"
    )
    async with client_of(engine) as client:
        answer: Any = await client.chat.completions.create(model="fast", messages=USER, tools=[TOOL], stream=stream)
        if stream:
            chunks = [chunk.choices[0] async for chunk in answer if chunk.choices]
            thoughts = "".join(getattr(chunk.delta, "reasoning", None) or "" for chunk in chunks)
            calls = [call for chunk in chunks for call in chunk.delta.tool_calls or [] if call.id]
            finish = chunks[-1].finish_reason
        else:
            choice = answer.choices[0]
            thoughts, calls, finish = choice.message.reasoning, choice.message.tool_calls, choice.finish_reason
            assert choice.message.content is None
    assert thoughts == f"I could {CALL}"
    assert [call.function.name for call in calls] == ["tide"] and finish == "tool_calls"


async def test_a_stop_string_ends_the_answer_where_it_stands(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    engine = await start_engine(runner=make_script(THOUGHT + " Or later.", ends=True), reasoning_parser="qwen3")
    async with client_of(engine) as client:
        behind: Any = await client.chat.completions.create(model="fast", messages=USER, stop=["Or"])
        within: Any = await client.chat.completions.create(model="fast", messages=USER, stop=["is full"])
    first, second = behind.choices[0].message, within.choices[0].message
    assert (first.content, first.reasoning) == ("At noon. ", "The moon is full.")
    assert (second.content, second.reasoning) == (None, "The moon")


async def test_an_answer_that_a_grammar_holds_is_no_thought(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script('{"a": 1}', ends=True, structured_outputs=True)
    engine = await start_engine(runner=runner, reasoning_parser="deepseek_r1")
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(
            model="fast", messages=USER, response_format={"type": "json_object"}
        )
    assert answer.choices[0].message.content == '{"a": 1}'


class TemplateTokenizer(ByteTokenizer):
    """Bytes, and a template that knows of thoughts."""

    def __init__(self) -> None:
        super().__init__()
        source = (
            "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
            "|{% endfor %}{{ reasoning_effort }}{% if enable_thinking is false %}<think>\n\n</think>\n\n"
            "{% elif enable_thinking %}<think>\n{% endif %}"
        )
        self._template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})

    def chat(self, messages: Any, **options: Any) -> list[int]:
        return self.encode(self._template.render(messages, **options))


async def test_variables_reach_the_template_and_what_it_opens_is_known(
    start_engine: StartEngine, make_script: MakeScript
) -> None:
    runner = make_script("Full moon.</think>At noon.", ends=True)
    engine = await start_engine(
        runner=runner,
        tokenizer=TemplateTokenizer(),
        reasoning_parser="qwen3",
        template_variables={"enable_thinking": False},
    )
    history: Any = [{"role": "assistant", "content": "Hi", "reasoning": "polite"}, *USER]

    async def ask(**extra: Any) -> Any:
        async with client_of(engine) as client:
            answer = await client.chat.completions.create(model="fast", messages=history, **extra)
        return answer.choices[0].message

    opened = await ask(extra_body={"chat_template_kwargs": {"enable_thinking": True, "messages": []}})
    assert (opened.reasoning, opened.content) == ("Full moon.", "At noon.")
    closed = await ask()
    assert closed.content == "Full moon.</think>At noon." and not hasattr(closed, "reasoning")
    await ask(reasoning_effort="high", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    await ask(reasoning_effort="none")
    said = "Hi(polite)|When is high tide?|"
    off = "<think>\n\n</think>\n\n"
    assert runner.prompts == [f"{said}<think>\n", f"{said}{off}", f"{said}high<think>\n", f"{said}none{off}"]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}") as http:
        counted = await http.post(
            "/tokenize", json={"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}
        )
        assert counted.json()["tokens"] == ByteTokenizer().encode("When is high tide?|<think>\n")
        many = {"chat_template_kwargs": {str(number): 1 for number in range(65)}}
        assert (await http.post("/tokenize", json={"messages": USER, **many})).status_code == 400


def test_both_names_of_earlier_thoughts_are_read() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = ChatMessage.model_validate({"role": "assistant", "content": "x", name: "t"}).as_template_message()
        assert message["reasoning"] == message["reasoning_content"] == "t"


@pytest.mark.parametrize("stream", [False, True])
async def test_ollamas_client_gets_them_as_thinking(
    start_engine: StartEngine, make_script: MakeScript, stream: bool
) -> None:
    engine = await start_engine(runner=make_script(THOUGHT, ends=True), reasoning_parser="qwen3")
    client = ollama.AsyncClient(host=f"http://127.0.0.1:{engine.api_port}")
    if stream:
        parts: Any = await client.chat(model="fast", messages=USER, think=True, stream=True)
        messages = [part.message async for part in parts]
        thoughts = "".join(message.thinking or "" for message in messages)
        text = "".join(message.content or "" for message in messages)
    else:
        answer = await client.chat(model="fast", messages=USER, think="high")
        thoughts, text = answer.message.thinking or "", answer.message.content or ""
    assert (thoughts, text) == ("The moon is full.", "At noon.")
    assert "thinking" in ((await client.show("fast")).capabilities or [])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_responses_api_has_an_item_of_its_own_for_them(
    start_engine: StartEngine, make_script: MakeScript, stream: bool
) -> None:
    engine = await start_engine(runner=make_script(THOUGHT, ends=True), reasoning_parser="qwen3")
    async with client_of(engine) as client:
        answer: Any = await client.responses.create(model="fast", input="When?", stream=stream)
        if stream:
            events = [event async for event in answer]
            thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
            assert thought == "The moon is full."
            assert [event.sequence_number for event in events] == list(range(len(events)))
            added = [event.item.type for event in events if event.type == "response.output_item.added"]
            assert added == ["reasoning", "message"]
            answer = events[-1].response
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "The moon is full." and answer.output_text == "At noon."
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        again: Any = [*(item.model_dump(exclude_none=True) for item in answer.output), *USER]
        await client.responses.create(model="fast", input=again)
    messages = ResponseCall.model_validate({"model": "fast", "input": again}).as_chat().messages
    assert (messages[0].content, messages[0].reasoning) == ("At noon.", "The moon is full.")
