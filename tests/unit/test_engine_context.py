"""Prompts that are longer than their room, under each policy: what is kept, what is cut, what the client is told."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.context import ContextPolicy, Message, fit_ids, fit_messages
from tidegate_engine.engine import Engine
from tidegate_engine.live_policy import LivePolicy
from tidegate_engine.request import Window
from tidegate_engine.serve import Process
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
MakeScript = Callable[..., Any]
LEFT, MIDDLE, REJECT = ContextPolicy.TRUNCATE_LEFT, ContextPolicy.TRUNCATE_MIDDLE, ContextPolicy.REJECT
TOKENIZER = ByteTokenizer()
SYSTEM: Message = {"role": "system", "content": "You are a pilot."}
FIRST, CENTRE, LAST = "the FIRST fact", "the CENTRE fact", "the LAST fact"


def document(words: int = 10_000) -> str:
    """A text with a fact at its beginning, in its middle and at its end."""
    half = " ".join(f"w{index}" for index in range(words // 2))
    return f"{FIRST} {half} {CENTRE} {half} {LAST}"


def fit(messages: Sequence[Message], *, room: int, policy: ContextPolicy) -> tuple[str, int, int]:
    """(rendered prompt, its tokens, truncated tokens)"""
    fitted = fit_messages(
        messages,
        TOKENIZER.chat,
        room=room,
        policy=policy,
        token_lengths=lambda text: [len(TOKENIZER.token_bytes(token_id)) for token_id in TOKENIZER.encode(text)],
    )
    return TOKENIZER.decode(fitted.ids), len(fitted.ids), fitted.truncated_tokens


@pytest.mark.parametrize(
    ("policy", "kept", "cut"), [(LEFT, [LAST], [FIRST, CENTRE]), (MIDDLE, [FIRST, LAST], [CENTRE])]
)
def test_a_long_document_keeps_what_its_policy_keeps(policy: ContextPolicy, kept: list[str], cut: list[str]) -> None:
    messages: list[Message] = [SYSTEM, {"role": "user", "content": document()}]
    prompt, tokens, truncated = fit(messages, room=2000, policy=policy)
    assert tokens <= 2000
    assert tokens > 1700
    assert truncated == len(TOKENIZER.chat(messages)) - tokens
    assert all(fact in prompt for fact in [*kept, "You are a pilot."])
    assert not any(fact in prompt for fact in cut)
    assert prompt.endswith("<assistant>\n")


def shared_length(first: str, second: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def conversation(turns: int, words: int = 30) -> list[Message]:
    messages: list[Message] = [SYSTEM]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} " + "why " * words})
        messages.append({"role": "assistant", "content": f"answer {turn} " + "so " * words})
    return [*messages, {"role": "user", "content": "and now?"}]


def test_old_turns_are_dropped_whole_and_the_system_message_stays() -> None:
    prompt, tokens, _ = fit(conversation(20), room=600, policy=LEFT)
    assert tokens <= 600
    assert prompt.startswith("<system>\nYou are a pilot.\n<user>\nquestion ")
    assert "question 0 " not in prompt and "question 19 " in prompt and prompt.endswith("and now?\n<assistant>\n")
    assert prompt.count("<user>") == prompt.count("<assistant>")


def test_the_first_turn_stays_when_the_middle_is_cut() -> None:
    prompt, tokens, _ = fit(conversation(20), room=600, policy=MIDDLE)
    assert tokens <= 600
    assert "question 0 " in prompt and "answer 0 " in prompt
    assert "question 5 " not in prompt and "and now?" in prompt


@pytest.mark.parametrize("policy", [LEFT, MIDDLE])
def test_a_growing_conversation_keeps_its_prefix_for_several_turns(policy: ContextPolicy) -> None:
    prompts = [fit(conversation(turns, words=8), room=1600, policy=policy)[0] for turns in range(80, 92)]
    shared = [shared_length(*pair) for pair in pairwise(prompts)]
    # A cut that moved with every turn would share next to nothing but the system message and the first turn.
    assert sum(characters > 4000 for characters in shared) >= 6


def test_two_questions_over_one_long_document_share_the_documents_prefix() -> None:
    def ask(question: str) -> str:
        return fit([SYSTEM, {"role": "user", "content": f"{document()}\n{question}"}], room=2000, policy=LEFT)[0]

    first, second = ask("Which is last?"), ask("And which one is the first of them all?")
    assert shared_length(first, second) > 6000


TEXT = st.text(st.sampled_from("ab é😀\n"), max_size=200)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT}),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(MESSAGES, st.integers(1, 120), st.sampled_from([LEFT, MIDDLE]))
def test_a_cut_conversation_fits_or_nothing_more_can_be_cut(
    messages: list[Message], room: int, policy: ContextPolicy
) -> None:
    prompt, tokens, truncated = fit(messages, room=room, policy=policy)
    full = len(TOKENIZER.chat(messages))
    assert truncated == max(0, full - tokens)
    if full <= room:
        assert truncated == 0
    if tokens > room:
        kept = prompt.split("<")
        assert not any(part.startswith("user>") and part.removeprefix("user>").strip() for part in kept)
    for message in messages[:1]:
        if message["role"] == "system":
            assert prompt.startswith(f"<system>\n{message['content']}\n")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), max_size=300), st.integers(1, 200), st.booleans())
def test_plain_prompts_are_cut_as_tokens(ids: list[int], room: int, has_bos: bool) -> None:
    left = fit_ids(ids, room=room, policy=LEFT, has_bos=has_bos)
    middle = fit_ids(ids, room=room, policy=MIDDLE, has_bos=has_bos)
    for fitted in (left, middle):
        assert len(fitted.ids) == min(len(fitted.ids), room)
        assert fitted.truncated_tokens == len(ids) - len(fitted.ids)
        assert fitted.ids[-1:] == ids[-1:]
    assert len(middle.ids) == min(len(ids), room)
    assert middle.ids[: room // 2] == ids[: room // 2]
    if has_bos and room > 1:
        assert left.ids[:1] == ids[:1]
    assert fit_ids(ids, room=room, policy=REJECT).ids == ids


def client_of(engine: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("policy", "kept", "cut"), [(LEFT, [LAST], [FIRST, CENTRE]), (MIDDLE, [FIRST, LAST], [CENTRE])]
)
async def test_the_client_chooses_the_policy_and_is_told_what_was_cut(
    start_engine: StartEngine,
    make_script: MakeScript,
    fast_profile: Profile,
    policy: ContextPolicy,
    kept: list[str],
    cut: list[str],
) -> None:
    profile = replace(fast_profile, max_model_len=4096, kv_blocks=400)
    runner = make_script("noon", profile=profile)
    engine = await start_engine(runner=runner)
    messages: Any = [{"role": "user", "content": document()}]
    full = len(TOKENIZER.chat(messages))
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="fast", messages=messages, max_tokens=8)
        assert "4096" in str(refused.value) and str(full + 8) in str(refused.value)
        answers: list[Any] = [
            await client.chat.completions.create(
                model="fast", messages=messages, max_tokens=8, extra_body={"context_policy": policy.value}
            )
            for _ in range(2)
        ]
        answer, again = answers
        short: Any = await client.chat.completions.create(
            model="fast", messages=[{"role": "user", "content": "x"}], max_tokens=8
        )
    assert answer.usage.prompt_tokens + 8 <= 4096
    assert answer.usage.truncated_tokens == full - answer.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens > 3000
    assert short.usage.truncated_tokens == 0
    assert all(fact in runner.prompts[0] for fact in kept)
    assert not any(fact in runner.prompts[0] for fact in cut)


@pytest.mark.parametrize(("policy", "words"), [("reject", 600), ("truncate_left", 4000), ("truncate_middle", 4000)])
async def test_a_second_question_over_a_document_hits_its_prefix_also_when_it_was_in_host_memory(
    start_engine: StartEngine, make_script: MakeScript, fast_profile: Profile, policy: str, words: int
) -> None:
    profile = replace(fast_profile, max_model_len=2048, kv_blocks=200)
    runner = make_script("noon", profile=profile)
    runner._info = replace(runner.info, host_blocks=1000)
    engine = await start_engine(runner=runner)

    async def ask(text: str, question: str) -> Any:
        answer: Any = await client.chat.completions.create(
            model="fast",
            messages=[{"role": "user", "content": f"{text}\n{question}"}],
            max_tokens=8,
            extra_body={"context_policy": policy},
        )
        return answer.usage

    async def count_of_host() -> float:
        async with httpx.AsyncClient() as plain:
            text = (await plain.get(f"http://127.0.0.1:{engine.api_port}/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith("tidegate_engine_host_cached_tokens_total")]
        return float(line.split()[1])

    async with client_of(engine) as client:
        first = await ask(document(words), "Which is last?")
        second = await ask(document(words), "And which one is the first?")
        # In the middle's case only what stands before the cut is where it was.
        shared = first.prompt_tokens * (0.3 if policy == "truncate_middle" else 0.8)
        assert first.prompt_tokens_details.cached_tokens == 0
        assert second.prompt_tokens_details.cached_tokens > shared
        assert (second.truncated_tokens > 0) == (policy != "reject")
        assert await count_of_host() == 0
        for number in range(4):  # more than the cache holds
            await ask(f"{number} " + document(words), "What else?")
        third = await ask(document(words), "What comes in the middle?")
        assert third.prompt_tokens_details.cached_tokens > shared
        assert await count_of_host() > shared / 2


async def test_a_sliding_window_keeps_the_prompt_and_lets_go_of_the_blocks_between(
    start_engine: StartEngine, make_script: MakeScript, fast_profile: Profile, loops: dict[Process, Engine]
) -> None:
    profile = replace(fast_profile, max_model_len=4096, kv_blocks=60)  # 944 tokens
    engine = await start_engine(runner=make_script("noon", profile=profile), context_window=Window(256, 4))
    sliding = {"context_policy": "sliding_window"}
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="the KV cache holds 944"):
            await client.completions.create(model="fast", prompt=[7] * 3000, max_tokens=12)
        answer: Any = await client.completions.create(
            model="fast", prompt=[7] * 3000, max_tokens=12, extra_body=sliding
        )
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3000, 12)
        assert answer.usage.truncated_tokens == 0
        with pytest.raises(openai.BadRequestError, match="4096"):  # positions stay those of the model's context
            await client.completions.create(model="fast", prompt=[7] * 5000, max_tokens=12, extra_body=sliding)
        # Short enough to be seen whole: the same blocks as without a window.
        short = [9] * 100
        await client.completions.create(model="fast", prompt=short, max_tokens=4)
        again: Any = await client.completions.create(model="fast", prompt=short, max_tokens=4, extra_body=sliding)
        assert again.usage.prompt_tokens_details.cached_tokens == 96
    pool = loops[engine].scheduler.blocks
    assert pool.used == 0
    assert pool.touched < 60


async def test_a_sliding_window_over_layers_with_windows_is_refused_by_name(
    start_engine: StartEngine, make_script: MakeScript, fast_profile: Profile
) -> None:
    runner = make_script("noon")
    runner._info = replace(runner.info, kv_windows=(64,))
    engine = await start_engine(runner=runner)
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="sliding_window is impossible here") as refused:
            await client.completions.create(
                model="fast", prompt=[7] * 90, max_tokens=12, extra_body={"context_policy": "sliding_window"}
            )
        assert refused.value.param == "context_policy"


async def test_the_servers_policy_holds_where_the_request_says_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine(policy=LivePolicy(context_policy=LEFT))
    async with client_of(engine) as client:
        answer: Any = await client.completions.create(model="fast", prompt=[7] * 900, max_tokens=12)
        assert answer.usage.prompt_tokens <= 500
        assert answer.usage.truncated_tokens == 900 - answer.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="512"):
            await client.completions.create(
                model="fast", prompt=[7] * 900, max_tokens=12, extra_body={"context_policy": "reject"}
            )
        with pytest.raises(openai.BadRequestError, match="512"):
            await client.completions.create(model="fast", prompt=[7] * 900, max_tokens=512)
