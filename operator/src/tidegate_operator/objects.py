"""Reads LLMDeployments from what kubectl printed or a person wrote: JSON or YAML, one object or a list of them.

Called by the commands that work on files.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tidegate_operator.api import KIND

Fields = Mapping[str, Any]


class UnreadableInput(Exception):
    """The input is not an LLMDeployment; the message says why."""


def read_text(filename: str) -> str:
    """What is in a file, or in standard input for `-`. Raises UnreadableInput."""
    try:
        return sys.stdin.read() if filename == "-" else Path(filename).read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableInput(f"{filename} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableInput(f"{filename} cannot be read: it is no UTF-8 text") from error


def read_objects(text: str) -> Iterator[Fields]:
    """The LLMDeployments in `text`: JSON or YAML documents, each an object or a list of them."""
    documents = [document for document in _parse(text) if isinstance(document, Mapping)]
    if not documents:
        raise UnreadableInput("the input holds no Kubernetes object; pipe `kubectl get lld NAME -o json` into it")
    listed = chain.from_iterable(map(_items, documents))
    found = [item for item in listed if isinstance(item, Mapping) and item.get("kind") == KIND]
    if not found:
        kinds = ", ".join(str(each.get("kind") or "something without a kind") for each in documents[:5])
        raise UnreadableInput(f"the input holds no {KIND}, but {kinds}")
    yield from found


def _items(document: Fields) -> list[object]:
    if not str(document.get("kind", "")).endswith("List"):
        return [document]
    items = document.get("items")
    return items if isinstance(items, list) else []


def unknown_fields(part: BaseModel, given: object, *, path: str = "spec") -> Iterator[str]:
    """Where `given`, of which `part` was read, has fields that its kind has not, and the one that may be meant."""
    if not isinstance(given, Mapping):
        return
    names = {field.alias or name: name for name, field in type(part).model_fields.items()}
    for key, value in given.items():
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            yield f"{path}.{key}" + (f" (is {near[0]} meant?)" if near else "")
            continue
        own = getattr(part, names[key])
        if isinstance(own, BaseModel):
            yield from unknown_fields(own, value, path=f"{path}.{key}")
        elif isinstance(own, tuple) and isinstance(value, list):
            for number, (each, entry) in enumerate(zip(own, value, strict=False)):
                if isinstance(each, BaseModel):
                    yield from unknown_fields(each, entry, path=f"{path}.{key}[{number}]")


def _parse(text: str) -> list[object]:
    try:
        return [json.loads(text)]
    except ValueError:
        pass
    except RecursionError as error:
        raise UnreadableInput("the input is nested too deeply for an object of Kubernetes") from error
    try:
        import yaml  # not needed for JSON, and no dependency of the bare package
    except ImportError as error:
        raise UnreadableInput("the input is no JSON, and PyYAML is not installed; use kubectl's -o json") from error
    try:
        return list(yaml.safe_load_all(text))
    except RecursionError as error:
        raise UnreadableInput("the input is nested too deeply for an object of Kubernetes") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter from dates and numbers that are none
        raise UnreadableInput(f"the input is neither JSON nor YAML: {' '.join(str(error).split())}") from error
