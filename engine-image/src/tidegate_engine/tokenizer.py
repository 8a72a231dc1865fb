"""The model's own tokenizer, built from a GGUF file's metadata. Satisfies `completions.Tokenizer`.

No torch, no transformers. A vocabulary whose pre-tokeniser is unknown is refused: the text would look right and be cut
wrong. The tokenizer of models without weights is `byte_tokenizer`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from tidegate_engine.chat import ChatTemplate, ChatTemplateError
from tidegate_engine.gguf_file import GgufFile, read_header
from tidegate_engine.weights import eos_token_ids, find_model_file

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`"""
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(path: Path | str) -> "ModelTokenizer":
    """The tokenizer in a model file (or in the only one of a folder); raises ModelError."""
    return ModelTokenizer(read_header(find_model_file(path)))


class ModelTokenizer:
    """Byte-level BPE. Special tokens' names in a text are read as these tokens."""

    def __init__(self, file: GgufFile) -> None:
        metadata = file.metadata
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise file.invalid(f"has a tokenizer of the kind {kind}; supported is gpt2 (byte-level BPE)")
        tokens, types = _texts(file, "tokens"), _types(file)
        if len(types) != len(tokens):
            raise file.invalid(f"is damaged: it has {len(tokens)} tokens and {len(types)} token types")
        self._tokenizer = _byte_level_bpe(file, tokens)
        special = [index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
        self._special_ids = frozenset(special)
        self._tokenizer.add_special_tokens([AddedToken(tokens[index], special=True) for index in special])
        self._tokenizer.add_tokens(
            [AddedToken(tokens[index], normalized=False) for index, kind in enumerate(types) if kind == _USER_DEFINED]
        )
        if self._tokenizer.get_vocab_size() != len(tokens):
            raise file.invalid("is damaged: its vocabulary has a token twice")
        self._bytes = [
            _bytes_of(token, is_text=kind == _USER_DEFINED) for token, kind in zip(tokens, types, strict=True)
        ]
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        self._bos_id = bos if isinstance(bos, int) and metadata.get("tokenizer.ggml.add_bos_token", False) else None
        self.vocab_size = len(tokens)
        self.eos_token_ids = eos_token_ids(metadata)
        self._template = _template(file, tokens)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; with a leading BOS when the model wants one and `add_special` is true."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._bos_id, *ids] if add_special and self._bos_id is not None else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for special tokens."""
        return b"" if token_id in self._special_ids else self._bytes[token_id]

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The conversation by the model's template; raises ChatTemplateError, a ValueError."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Ids of a conversation, ending where the answer begins. Templates spell out BOS, so none is added."""
        return self.encode(self.render_chat(messages), add_special=False)


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> Tokenizer:
    merges: list[tuple[str, str]] = []
    for merge in _texts(file, "merges"):
        left, separator, right = merge.partition(" ")
        if not separator:
            raise file.invalid(f"is damaged: the merge {merge!r} has one part")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    except Exception as error:  # the bindings raise nothing narrower
        raise file.invalid(f"is damaged: its merges do not fit its vocabulary ({error})") from error
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    known = _pre_tokenizers()
    if name not in known:
        raise file.invalid(f"has the pre-tokeniser {name}; supported are {', '.join(known)}")
    tokenizer.pre_tokenizer = known[name]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizers() -> dict[str, PreTokenizer]:
    """How a text is cut before merging, by the name that the file gives."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    single_digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    qwen2 = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return {"gpt-2": gpt2, "smollm": single_digits, "qwen2": qwen2}


def _template(file: GgufFile, tokens: list[str]) -> ChatTemplate | None:
    metadata = file.metadata
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    special = {}
    for name in ("bos", "eos"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and index < len(tokens):
            special[f"{name}_token"] = tokens[index]
    try:
        return ChatTemplate(source, special_tokens=special)
    except ChatTemplateError as error:
        raise file.invalid(f"is damaged: {error}") from error


def _texts(file: GgufFile, name: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise file.invalid(f"has no tokenizer: tokenizer.ggml.{name} is missing or no list of texts")
    return value


def _types(file: GgufFile) -> list[int]:
    value = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise file.invalid("has no tokenizer: tokenizer.ggml.token_type is missing or no list of numbers")
    return value


def _bytes_of(token: str, *, is_text: bool) -> bytes:
    """A token's bytes; in byte-level vocabularies every byte is written as one printable character."""
    if is_text:
        return token.encode()
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
