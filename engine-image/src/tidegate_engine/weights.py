"""What is the same for every weight format: how a model that cannot be served is reported, and which file is meant.

No torch here: the command line and the tokenizer use it too. One file per format lies beside it (`weights_gguf`,
`weights_safetensors`).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIG_FILE = "config.json"
"""What describes the model in a folder of safetensors files."""
PACKED_FILE = "model.tidegate"
"""The weights in a folder that `tidegate-engine pack` made."""
TOKENIZER_GGUF = "tokenizer.gguf"
"""A GGUF file's metadata beside them, where the model came from one."""
MAX_EXPERTS = 1 << 16
"""In all layers together, twice as many as the largest model known; a damaged configuration may claim any number."""


class ModelError(Exception):
    """The model cannot be served. `reason` is CamelCase, the message one sentence; as text: `Reason: message`."""

    def __init__(self, reason: str, message: str) -> None:
        # A damaged file's names may hold anything.
        message = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in message)
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is stored: rows of a tensor, of which the ones before are other parameters'."""

    tensor: str
    first_row: int
    rows: int


def and_others(names: Sequence[str]) -> str:
    """What follows the first of `names` in a sentence."""
    return f" and {len(names) - 1} others" if len(names) > 1 else ""


def parse_json_object(content: bytes, *, path: Path) -> dict[str, object]:
    """A JSON object in which no key stands twice; raises ModelError."""

    def unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ModelError("ModelInvalid", f"{path} is damaged: it names {twice!r:.200} twice")
        return found

    try:
        parsed = json.loads(content.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise ModelError("ModelInvalid", f"{path} is damaged: its JSON is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ModelError("ModelInvalid", f"{path} is damaged: its JSON cannot be read ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError("ModelInvalid", f"{path} is damaged: its JSON is no object")
    return parsed


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; raises ModelError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError("ModelNotFound", f"{path} cannot be read: {error.strerror}") from error
    return parse_json_object(content, path=path)


def find_model_file(path: Path | str) -> Path:
    """What `path` names: a GGUF file (itself, or the only one in the folder), or a folder: packed, or of safetensors.

    A folder's own configuration may be named too, so that one that holds both can be meant. Raises ModelError.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError("ModelNotFound", f"{path} does not exist")
    if path.name in (CONFIG_FILE, PACKED_FILE):
        return path.parent
    if not path.is_dir() or (path / PACKED_FILE).exists():
        return path
    found = sorted(path.glob("*.gguf"))
    has_safetensors = (path / CONFIG_FILE).exists() and any(path.glob("*.safetensors"))
    if has_safetensors and found:
        raise ModelError(
            "ModelInvalid",
            f"the folder {path} holds {found[0].name} and safetensors files; name the one file, or {CONFIG_FILE}",
        )
    if has_safetensors:
        return path
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(
            "ModelNotFound", f"the folder {path} holds no .gguf file, nor {CONFIG_FILE} with .safetensors files"
        )
    names = ", ".join(file.name for file in found)
    raise ModelError("ModelInvalid", f"the folder {path} holds several .gguf files ({names}); name one of them")


def eos_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Tokens that end an answer, by a GGUF file's metadata: end of text, of turn, of message."""
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(value for value in found if isinstance(value, int)))


def folder_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end an answer, by the folder's `generation_config.json` and `config.json`; raises ModelError."""
    found: list[int] = []
    for name in ("generation_config.json", CONFIG_FILE):
        path = folder / name
        value = read_json_object(path).get("eos_token_id") if path.exists() else None
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int:
                raise ModelError("ModelInvalid", f"{path} has {value!r:.80} as eos_token_id; token ids are needed")
            found.append(token)
    return tuple(dict.fromkeys(found))


def check_eos_token_ids(ids: Sequence[int], *, vocab_size: int, path: Path) -> tuple[int, ...]:
    """`ids` themselves; raises ModelError where one is no token: such an answer would never end."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ModelError(
                "ModelInvalid", f"{path} names the token {token} as the end, and its vocabulary has {vocab_size} tokens"
            )
    return tuple(ids)
