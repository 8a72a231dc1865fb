"""LangChain's ChatOpenAI runs a session against the engine: texts, streams, tools, structured answers, responses."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tidegate_engine.serve import Process

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]
CALL = '{"name": "Tide", "arguments": {"port": "Brest"}}'


class Tide(BaseModel):
    """When it is high."""

    port: str = Field(description="where")


def model_of(engine: Process, **options: Any) -> ChatOpenAI:
    base_url = f"http://127.0.0.1:{engine.api_port}/v1"
    return ChatOpenAI(model="fast", base_url=base_url, api_key=SecretStr("none"), max_retries=0, **options)


async def summed(chunks: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    total: AIMessageChunk | None = None
    async for chunk in chunks:
        total = chunk if total is None else total + chunk
    assert total is not None
    return total


async def test_texts_come_whole_streamed_and_in_batches(start_engine: StartEngine, make_script: MakeScript) -> None:
    engine = await start_engine(runner=make_script("High at noon.", ends=True))
    model = model_of(engine, stream_usage=True)
    whole = await model.ainvoke([SystemMessage("Be short."), HumanMessage("When?")])
    assert whole.content == "High at noon." and whole.usage_metadata is not None
    streamed = await summed(model.astream("When?"))
    assert streamed.content == "High at noon." and streamed.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == streamed.usage_metadata["output_tokens"] == 5
    assert [answer.content for answer in await model.abatch(["a", "b"])] == ["High at noon."] * 2
    content: Any = (await model_of(engine, use_responses_api=True).ainvoke("When?")).content
    assert [part["text"] for part in content] == ["High at noon."]


async def test_tools_are_called_and_answered(start_engine: StartEngine, make_script: MakeScript) -> None:
    runner = make_script(f"I look.\n<tool_call>{CALL}</tool_call>", ends=True)
    model = model_of(await start_engine(runner=runner, tool_call_parser="hermes")).bind_tools([Tide])
    asked: Any = await model.ainvoke("When?")
    streamed: Any = await summed(model.astream("When?"))  # type: ignore[arg-type]
    for message in (asked, streamed):
        assert message.content == "I look."
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("Tide", {"port": "Brest"})]
    answer = ToolMessage("at noon", tool_call_id=asked.tool_calls[0]["id"])
    await model.ainvoke([HumanMessage("When?"), asked, answer])
    assert "at noon" in runner.prompts[-1] and "When it is high." in runner.prompts[-1]


@pytest.mark.parametrize(
    ("method", "text"),
    [("function_calling", CALL), ("json_schema", '{"port": "Brest"}'), ("json_mode", '{"port": "Brest"}')],
)
async def test_answers_take_the_asked_form(
    start_engine: StartEngine,
    make_script: MakeScript,
    method: Literal["function_calling", "json_schema", "json_mode"],
    text: str,
) -> None:
    engine = await start_engine(runner=make_script(text, ends=True, structured_outputs=True))
    assert await model_of(engine).with_structured_output(Tide, method=method).ainvoke("When? As JSON.") == Tide(
        port="Brest"
    )
