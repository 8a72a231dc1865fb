"""A tokenizer without a model: up to four UTF-8 bytes are one token, so that text has about the usual tokens per word.

Owns nothing but the arithmetic between bytes and ids; no file, no third-party import. Used with the modelled runner.
"""

import json
from collections.abc import Mapping, Sequence
from time import perf_counter

from tidegate_engine.text_meter import TextMeter

BYTES_PER_TOKEN = 4


class ByteTokenizer:
    """Token id = the chunk's bytes after a leading 1 byte, so every id of a chunk is unique; id 0 ends a text.

    Ids that no chunk has (a client may send any below `vocab_size`) stand for one `?`.
    """

    vocab_size = 2 ** (8 * BYTES_PER_TOKEN + 1)
    eos_token_ids: tuple[int, ...] = (0,)

    chat_template: str | None = None

    def __init__(self) -> None:
        self.meter = TextMeter()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        started = perf_counter()
        data = text.encode()
        ids = [
            int.from_bytes(b"\x01" + data[start : start + BYTES_PER_TOKEN], "big")
            for start in range(0, len(data), BYTES_PER_TOKEN)
        ]
        self.meter.add(characters=len(text), tokens=len(ids), seconds=perf_counter() - started)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text."""
        if token_id in self.eos_token_ids:
            return b""
        data = token_id.to_bytes(BYTES_PER_TOKEN + 1, "big").lstrip(b"\x00")
        return data[1:] if len(data) > 1 and data[0] == 1 else b"?"

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a conversation, ending where the answer begins. There is no template to use `variables`."""
        head = f"<tools>\n{json.dumps(tools)}\n" if tools else ""
        turns = "".join(map(_turn, messages))
        return self.encode(head + turns + ("<assistant>\n" if add_generation_prompt else ""))


def _turn(message: Mapping[str, object]) -> str:
    calls = f"{json.dumps(message['tool_calls'])}\n" if message.get("tool_calls") else ""
    return f"<{message['role']}>\n{message['content']}\n{calls}"
