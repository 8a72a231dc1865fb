"""How a model's hidden states become an embedding: what its files say, or a flag.

Reads sentence-transformers' `modules.json` and GGUF's `pooling_type`; a decoder that says nothing takes the last
token's state, of the length one. No torch here: `pooler` computes. Called by `checkpoint` and `cli`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_engine.request import PoolingKind
from tidegate_engine.weights import ModelError, read_json_object

MODULES_FILE = "modules.json"
_GGUF_KINDS: Mapping[object, PoolingKind] = {1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST}
"""`pooling_type`; 0 is none, 4 a ranker's."""
_FOLDER_KINDS = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_MODULE_KINDS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    kind: PoolingKind = PoolingKind.LAST
    is_normalised: bool = True
    """Whether an embedding has the length one."""


def parse_pooler_config(text: str) -> Pooling:
    """vLLM's `--pooler-config`, as `{"pooling_type": "MEAN", "normalize": true}`; raises ValueError."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("must be a JSON object")
    known = {"pooling_type", "seq_pooling_type", "normalize", "use_activation"}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{unknown[0]} is not supported; known are {', '.join(sorted(known))}")
    name = data.get("pooling_type", data.get("seq_pooling_type", PoolingKind.LAST.value))
    kinds = [kind.value for kind in PoolingKind]
    if not isinstance(name, str) or name.lower() not in kinds:
        raise ValueError(f"pooling_type is {name!r}; supported are {', '.join(kinds)}")
    normalised = data.get("normalize", data.get("use_activation", True))
    if not isinstance(normalised, bool):
        raise ValueError(f"normalize is {normalised!r}; it must be true or false")
    return Pooling(PoolingKind(name.lower()), normalised)


def pooling_of_metadata(metadata: Mapping[str, object], *, path: Path) -> Pooling | ModelError:
    """What a GGUF file says; an error for a kind that is not computed."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if kind == 0:
        return Pooling()
    if kind not in _GGUF_KINDS:
        return _unsupported(path, f"the pooling_type {kind}")
    return Pooling(_GGUF_KINDS[kind])


def pooling_of_folder(folder: Path) -> Pooling | ModelError:
    """What a folder's sentence-transformers files say; an error for modules that are not computed."""
    try:
        return _read_modules(folder)
    except ModelError as error:
        return error


def _read_modules(folder: Path) -> Pooling:
    path = folder / MODULES_FILE
    if not path.exists():
        return Pooling()
    try:
        rows = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError("ModelInvalid", f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ModelError("ModelInvalid", f"{path} is damaged: it is no list of modules")
    places = {str(row.get("type")).rpartition(".")[2]: str(row.get("path", "")) for row in rows}
    if other := [name for name in places if name not in _MODULE_KINDS]:
        raise _unsupported(path, f"the module {other[0]}")
    kind = PoolingKind.LAST
    if "Pooling" in places:
        kind = _kind_of(folder, places["Pooling"])
    return Pooling(kind, "Normalize" in places)


def _kind_of(folder: Path, place: str) -> PoolingKind:
    path = folder / place / "config.json"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ModelError("ModelInvalid", f"{folder / MODULES_FILE} names {place!r}, which is not inside the folder")
    config = read_json_object(path)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _FOLDER_KINDS:
        raise _unsupported(path, " with ".join(modes) or "no pooling mode")
    return _FOLDER_KINDS[modes[0]]


def _unsupported(path: Path, what: str) -> ModelError:
    kinds = ", ".join(kind.value for kind in PoolingKind)
    return ModelError(
        "ModelUnsupported", f"{path} asks for {what}; supported are {kinds}, and --pooler-config names one instead"
    )
