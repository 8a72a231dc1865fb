"""What is the same for every weight format: how a model that cannot be served is reported, and which file is meant.

No torch here: the command line and the tokenizer use it too. One file per format lies beside it (`weights_gguf`).
"""

from collections.abc import Mapping
from pathlib import Path


class ModelError(Exception):
    """The model cannot be served. `reason` is CamelCase, the message one sentence; as text: `Reason: message`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


def find_model_file(path: Path | str) -> Path:
    """The GGUF file that `path` names: itself, or the only one in the folder. Raises ModelError."""
    path = Path(path)
    if not path.exists():
        raise ModelError("ModelNotFound", f"{path} does not exist")
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError("ModelNotFound", f"the folder {path} holds no .gguf file")
    names = ", ".join(file.name for file in found)
    raise ModelError("ModelInvalid", f"the folder {path} holds several .gguf files ({names}); name one of them")


def eos_token_ids(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Tokens that end an answer, by a GGUF file's metadata: end of text, of turn, of message."""
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(value for value in found if isinstance(value, int)))
