"""The model's own tokenizer, from a GGUF file's metadata or a folder's files. Satisfies `completions.Tokenizer`.

No torch, no transformers. A vocabulary whose pre-tokeniser is unknown is refused: the text would look right and be cut
wrong. The tokenizer of models without weights is `byte_tokenizer`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from tidegate_engine.chat import ChatTemplate, ChatTemplateError
from tidegate_engine.gguf_file import GgufFile, read_header
from tidegate_engine.text_meter import TextMeter
from tidegate_engine.weights import (
    CONFIG_FILE,
    TOKENIZER_GGUF,
    ModelError,
    eos_token_ids,
    find_model_file,
    folder_eos_token_ids,
    read_json_object,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""`tokenizer.ggml.token_type`"""
MAX_PIECE_CHARACTERS = 1024
MAX_TOKENS = 1 << 22
"""Far more than any vocabulary has; a file may claim any number."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CUT = r"{endings}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CUT.format(endings=_ENDINGS, digits=r"\p{N}")
_LLAMA3 = _CUT.format(endings=_ENDINGS, digits=r"\p{N}{1,3}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_RULES = {
    "qwen2": _QWEN2,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _LLAMA3),
    "gpt-4o": _GPT4O,
}
"""How a text is cut before merging, by the name that the file gives."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""With these a cut that is a token itself is not merged from smaller ones; BOS is wanted unless the file says no."""


def load_tokenizer(path: Path | str) -> "ModelTokenizer":
    """The tokenizer of the model that `path` names (see `find_model_file`); raises ModelError."""
    found = find_model_file(path)
    if (found / TOKENIZER_GGUF).exists():
        found = found / TOKENIZER_GGUF
    return ModelTokenizer(_parts_of_folder(found) if found.is_dir() else _parts_of_gguf(read_header(found)))


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a model's files say about its tokenizer."""

    tokenizer: Tokenizer
    pieces: Sequence[bytes]
    """The bytes that each token adds to a text."""
    special_ids: frozenset[int]
    bos_id: int | None
    """What goes before a text, where the tokenizer itself does not put it there."""
    eos_token_ids: tuple[int, ...]
    template: ChatTemplate | None
    eos_id: int | None = None
    """What goes behind a text, likewise; embedding models want it."""


class ModelTokenizer:
    """A model's vocabulary and its chat template. Special tokens' names in a text are read as these tokens."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._tokenizer = parts.tokenizer
        self._pieces = parts.pieces
        self._special_ids = parts.special_ids
        self._before = [] if parts.bos_id is None else [parts.bos_id]
        self._behind = [] if parts.eos_id is None else [parts.eos_id]
        self._template = parts.template
        self.vocab_size = len(parts.pieces)
        self.eos_token_ids = parts.eos_token_ids
        self.meter = TextMeter()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; with the tokens that the model wants before and behind it when `add_special` is true."""
        started = perf_counter()
        # Only the batch's call releases the interpreter: a long text in a thread would else stop the event loop.
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=add_special)[0].ids
        self.meter.add(characters=len(text), tokens=len(ids), seconds=perf_counter() - started)
        return [*self._before, *ids, *self._behind] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; none for special tokens, nor for numbers beyond the vocabulary.

        Models may have more rows than their tokenizer has tokens.
        """
        if token_id in self._special_ids or token_id >= self.vocab_size:
            return b""
        return self._pieces[token_id]

    def use_template(self, source: str) -> None:
        """Take another chat template than the model's own; raises ChatTemplateError."""
        special_tokens = {} if self._template is None else self._template.special_tokens
        self._template = ChatTemplate(source, special_tokens=special_tokens)

    @property
    def chat_template(self) -> str | None:
        """The template's source; None when the model has none."""
        return None if self._template is None else self._template.source

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation by the model's template; raises ChatTemplateError, a ValueError."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a conversation, ending where the answer begins. Templates spell out BOS, so none is added."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special=False)


def _parts_of_gguf(file: GgufFile) -> TokenizerParts:
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise file.invalid(
            f"has a tokenizer of the kind {kind}; supported are gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    tokens, types = _texts(file, "tokens"), _whole_numbers(file, "token_type")
    if len(types) != len(tokens):
        raise file.invalid(f"is damaged: it has {len(tokens)} tokens and {len(types)} token types")
    tokenizer = _byte_level_bpe(file, tokens) if kind == "gpt2" else _sentence_pieces(file, tokens, types)
    special = [index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special])
    tokenizer.add_tokens(
        [AddedToken(tokens[index], normalized=False) for index, kind in enumerate(types) if kind == _USER_DEFINED]
    )
    if tokenizer.get_vocab_size() != len(tokens):
        raise file.invalid("is damaged: its vocabulary has a token twice")
    return TokenizerParts(
        tokenizer=tokenizer,
        pieces=[
            token.encode() if own == _USER_DEFINED else _bytes_of(token) if kind == "gpt2" else _piece_bytes(token)
            for token, own in zip(tokens, types, strict=True)
        ],
        special_ids=frozenset(special),
        bos_id=_bos_id(file, tokens),
        eos_token_ids=eos_token_ids(metadata),
        template=_template(file, tokens),
        eos_id=_eos_id(file, tokens),
    )


def _eos_id(file: GgufFile, tokens: Sequence[str]) -> int | None:
    """The token that goes behind a text; None = none does."""
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    if not isinstance(eos, int) or not file.metadata.get("tokenizer.ggml.add_eos_token"):
        return None
    if not 0 <= eos < len(tokens):
        raise file.invalid(f"names the token {eos} as the end, and its vocabulary has {len(tokens)} tokens")
    return eos


def _bos_id(file: GgufFile, tokens: Sequence[str]) -> int | None:
    """The token that goes before a text; None = none does."""
    kind, name, bos = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "bos_token_id"))
    by_kind = kind == "llama" or name in _WHOLE_WORDS
    if not isinstance(bos, int) or not file.metadata.get("tokenizer.ggml.add_bos_token", by_kind):
        return None
    if not 0 <= bos < len(tokens):
        raise file.invalid(f"names the token {bos} as the beginning, and its vocabulary has {len(tokens)} tokens")
    return bos


def _parts_of_folder(folder: Path) -> TokenizerParts:
    """From `tokenizer.json`, which says all of how texts are cut; the template lies beside it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError("ModelInvalid", f"the folder {folder} holds no tokenizer.json; other tokenizers are not read")
    description = read_json_object(path)
    config = read_json_object(folder / CONFIG_FILE)
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size", config.get("vocab_size"))
    found = description.get("added_tokens")
    added = [token for token in found if isinstance(token, dict)] if isinstance(found, list) else []
    if isinstance(rows, int):
        # A text must not become a token that the model has no row for.
        added = [token for token in added if _token_id(token) < rows]
        description["added_tokens"] = added
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # the bindings raise nothing narrower
        raise ModelError("ModelInvalid", f"{path} is damaged: {error}".replace("\n", " ")) from error
    to_bytes = _byte_rule(description, path=path)
    texts = {_token_id(token): bool(token.get("special")) for token in added}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    last = max(vocabulary.values(), default=-1)
    most = min(rows, MAX_TOKENS) if isinstance(rows, int) else MAX_TOKENS
    if last >= most:
        raise ModelError("ModelInvalid", f"{path} has a token with the number {last}; possible are those below {most}")
    pieces = [b""] * (last + 1)
    for token, index in vocabulary.items():
        pieces[index] = token.encode() if index in texts else to_bytes(token)
    return TokenizerParts(
        tokenizer=tokenizer,
        pieces=pieces,
        special_ids=frozenset(index for index, is_special in texts.items() if is_special),
        bos_id=None,
        eos_token_ids=folder_eos_token_ids(folder),
        template=_template_of_folder(folder),
    )


def _token_id(token: Mapping[str, object]) -> int:
    value = token.get("id")
    return value if isinstance(value, int) else 0


def _byte_rule(description: Mapping[str, object], *, path: Path) -> Callable[[str], bytes]:
    """How a token of the vocabulary is read as bytes, by the decoder that its file names."""
    decoder = description.get("decoder")
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [step.get("type") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if "ByteLevel" in kinds:
        return _bytes_of
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _piece_bytes
    named = ", ".join(map(str, kinds)) or "none"
    raise ModelError(
        "ModelInvalid", f"{path} has the decoder {named}; supported are ByteLevel, ByteFallback and Metaspace"
    )


def _piece_bytes(token: str) -> bytes:
    """A token's bytes where spaces are written as U+2581 and single bytes as `<0x0A>`."""
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode()


def _template_of_folder(folder: Path) -> ChatTemplate | None:
    path = folder / "tokenizer_config.json"
    settings = read_json_object(path) if path.exists() else {}
    own_file = folder / "chat_template.jinja"
    source = settings.get("chat_template")
    if own_file.exists():
        path = own_file
        try:
            source = own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError("ModelInvalid", f"{own_file} cannot be read: {error}") from error
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special: dict[str, str] = {}
    for name, token in settings.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    try:
        return ChatTemplate(source, special_tokens=special)
    except ChatTemplateError as error:
        raise ModelError("ModelInvalid", f"{path} is damaged: {error}") from error


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> Tokenizer:
    merges: list[tuple[str, str]] = []
    for merge in _texts(file, "merges"):
        left, separator, right = merge.partition(" ")
        if not separator:
            raise file.invalid(f"is damaged: the merge {merge!r} has one part")
        merges.append((left, right))
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    known = _pre_tokenizers()
    if name not in known:
        raise file.invalid(f"has the pre-tokeniser {name}; supported are {', '.join(known)}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=name in _WHOLE_WORDS)
        )
    except Exception as error:  # the bindings raise nothing narrower
        raise file.invalid(f"is damaged: its merges do not fit its vocabulary ({error})") from error
    tokenizer.pre_tokenizer = known[name]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: neighbours are joined while their joint piece is known, that of the highest score first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(map(_is_number, scores)):
        raise file.invalid("has no tokenizer: tokenizer.ggml.scores is missing or no score for each token")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    joined: list[tuple[float, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if len(token) > MAX_PIECE_CHARACTERS:
            raise file.invalid(f"is damaged: it has a piece of {len(token)} characters")
        if kind == _NORMAL:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    joined.append((-score, left, right))
    joined.sort(key=lambda merge: merge[0])
    merges = [(left, right) for _, left, right in joined]
    try:
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
    except Exception as error:  # the bindings raise nothing narrower
        raise file.invalid(f"is damaged: its pieces are no vocabulary ({error})") from error
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value


def _pre_tokenizers() -> dict[str, PreTokenizer]:
    """How a text is cut before merging, by the name that the file gives."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    single_digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    known: dict[str, PreTokenizer] = {"gpt-2": gpt2, "smollm": single_digits}
    for name, rule in _RULES.items():
        cut = pre_tokenizers.Split(Regex(rule), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        known[name] = pre_tokenizers.Sequence([cut, to_bytes])
    return known


def _template(file: GgufFile, tokens: list[str]) -> ChatTemplate | None:
    metadata = file.metadata
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    special = {}
    for name in ("bos", "eos"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
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


def _whole_numbers(file: GgufFile, name: str) -> list[int]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise file.invalid(f"has no tokenizer: tokenizer.ggml.{name} is missing or no list of numbers")
    return value


def _bytes_of(token: str) -> bytes:
    """A token's bytes in a byte-level vocabulary, where every byte is written as one printable character."""
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
