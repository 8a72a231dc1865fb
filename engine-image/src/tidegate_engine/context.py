"""What happens to a prompt that is longer than its room: refused, cut at its beginning, or cut in its middle.

Or it is kept, and what its tokens see is not: then there is nothing to do here, and the scheduler frees the blocks.

Conversations are cut as messages and rendered again, so that the model never sees half a template; plain prompts are
cut as tokens. Positions stay dense, so what is kept shares prefixes with any prompt. Pure; called by `completions`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidegate_engine.request import Window

NO_SLIDING_WINDOW = (
    "sliding_window is impossible here: the model's layers have windows of their own, which it was trained with; "
    "reject, truncate_left and truncate_middle are possible"
)
CUT_GRID_PARTS = 16
"""A cut lies on a grid of this part of the room: a conversation that grows keeps its cut, and so its cached prefix."""
MAX_TRIES = 16
DEFAULT_WINDOW = Window(4096, sinks=4)
"""Models give the first tokens the weight that no other deserves; without these they fall apart."""
WORD_SEARCH_CHARACTERS = 48
"""A cut moves so far to reach the end of a word."""

Message = Mapping[str, object]
Render = Callable[[Sequence[Message]], list[int]]
KEPT_ROLE = "system"


class ContextPolicy(StrEnum):
    REJECT = "reject"
    TRUNCATE_LEFT = "truncate_left"
    """Keep the system message and the newest."""
    TRUNCATE_MIDDLE = "truncate_middle"
    """Keep the beginning and the newest."""
    SLIDING_WINDOW = "sliding_window"
    """Keep all, and let each token see the newest before it and the first ones only."""

    @property
    def cuts(self) -> bool:
        return self in (ContextPolicy.TRUNCATE_LEFT, ContextPolicy.TRUNCATE_MIDDLE)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt within its room. `full_tokens` is its length before the cut."""

    ids: list[int]
    full_tokens: int

    @property
    def truncated_tokens(self) -> int:
        return max(0, self.full_tokens - len(self.ids))


def fit_ids(ids: list[int], *, room: int, policy: ContextPolicy, has_bos: bool = False) -> Fitted:
    """A plain prompt within `room` tokens. With `has_bos` the first token stays; without a cut it comes back whole."""
    if not policy.cuts or len(ids) <= room or room < 1:
        return Fitted(ids, len(ids))
    head = ids[:1] if has_bos and room > 1 else []
    body = ids[len(head) :]
    room_left = room - len(head)
    if policy is ContextPolicy.TRUNCATE_MIDDLE:
        first = room_left // 2
        kept = body[:first] + body[len(body) - (room_left - first) :]
    else:
        kept = body[_on_grid(len(body) - room_left, room, most=len(body) - 1) :]
    return Fitted(head + kept, len(ids))


def fit_messages(
    messages: Sequence[Message],
    render: Render,
    *,
    room: int,
    policy: ContextPolicy,
    token_lengths: Callable[[str], list[int]],
) -> Fitted:
    """A conversation within `room` tokens, if its policy and its system message allow; else as short as it can be.

    `token_lengths` gives the bytes of each token of a text.
    """
    full = render(messages)
    if not policy.cuts or len(full) <= room or room < 1:
        return Fitted(full, len(full))
    head = next((index for index, message in enumerate(messages) if message["role"] != KEPT_ROLE), len(messages))
    middle = policy is ContextPolicy.TRUNCATE_MIDDLE
    kept, ids = _drop_turns(
        messages, render, full=full, room=room, start=_first_turn_end(messages, head) if middle else head
    )
    tries = 0
    while len(ids) > room and tries < MAX_TRIES:
        tries += 1
        longest = _longest_text(kept)
        if longest is None:
            break
        shorter = _shorten(
            str(kept[longest]["content"]), len(ids) - room, room=room, middle=middle, token_lengths=token_lengths
        )
        kept = [*kept[:longest], {**kept[longest], "content": shorter}, *kept[longest + 1 :]]
        ids = render(kept)
    return Fitted(ids, len(full))


def _drop_turns(
    messages: Sequence[Message], render: Render, *, full: list[int], room: int, start: int
) -> tuple[list[Message], list[int]]:
    """Drop turns from `start` on, oldest first; the last one stays. A turn begins with the user's message."""
    turns = [index for index, message in enumerate(messages) if index > start and message["role"] == "user"]
    wanted = len(full) - _on_grid(len(full) - room, room, most=len(full) - 1)
    low, high = 0, len(turns)  # the fewest turns to drop lies in (low, high]; all of them if even that is too few
    best: tuple[list[Message], list[int]] = (list(messages), full)
    while low < high:
        count = (low + high) // 2
        kept = [*messages[:start], *messages[turns[count] :]]
        ids = render(kept)
        if len(ids) <= wanted:
            best, high = (kept, ids), count
        else:
            low = count + 1
    if not turns or len(best[1]) <= room:
        return best
    kept = [*messages[:start], *messages[turns[-1] :]]
    return kept, render(kept)


def _first_turn_end(messages: Sequence[Message], head: int) -> int:
    """Index of the second turn: the first one is the beginning that is kept."""
    return next((index for index, message in enumerate(messages) if index > head and message["role"] == "user"), head)


def _longest_text(messages: Sequence[Message]) -> int | None:
    """The message to shorten; the system's never is."""
    lengths = [
        (len(str(message["content"])), index)
        for index, message in enumerate(messages)
        if message["role"] != KEPT_ROLE and message["content"]
    ]
    return max(lengths)[1] if lengths else None


def _shorten(text: str, excess: int, *, room: int, middle: bool, token_lengths: Callable[[str], list[int]]) -> str:
    """`text` without at least `excess` tokens: of its beginning, or of its middle."""
    lengths = token_lengths(text)
    if middle:
        # The first part has the same length however long the text is, so that its prefix is found again.
        first = min(room // 3, max(0, len(lengths) - excess) // 2)
        cut = min(len(lengths), first + excess)
        before, after = _characters(text, lengths[:first]), _characters(text, lengths[:cut])
        return text[:before] + text[_word_start(text, after) :]
    cut = _on_grid(excess, room, most=len(lengths))
    return text[_word_start(text, _characters(text, lengths[:cut])) :]


def _characters(text: str, lengths: Sequence[int]) -> int:
    """Characters in the first tokens' bytes; a character that lies across the cut counts."""
    data = text.encode(errors="replace")[: sum(lengths)]
    whole = data.decode(errors="ignore")
    return len(whole) + (len(whole.encode()) < len(data))


def _word_start(text: str, place: int) -> int:
    """`place`, or the next word's start when it is near."""
    for index in range(place, min(len(text), place + WORD_SEARCH_CHARACTERS)):
        if text[index].isspace():
            return index + 1
    return place


def _on_grid(tokens: int, room: int, *, most: int) -> int:
    """`tokens` to drop, rounded up to the grid; never all of them."""
    step = max(1, room // CUT_GRID_PARTS)
    return min(most, -(-tokens // step) * step)
