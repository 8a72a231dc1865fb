"""Reads LLMDeployments from what kubectl printed or a person wrote: JSON or YAML, one object or a list of them.

Called by the commands that work on files.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    """The LLMDeployments in `text`, a JSON or YAML document with one object or a list of them."""
    data = _parse(text)
    if not isinstance(data, Mapping):
        raise UnreadableInput("the input holds no Kubernetes object; pipe `kubectl get lld NAME -o json` into it")
    items = data.get("items") if str(data.get("kind", "")).endswith("List") else [data]
    listed = items if isinstance(items, list) else []
    found = [item for item in listed if isinstance(item, Mapping) and item.get("kind") == KIND]
    if not found:
        raise UnreadableInput(f"the input holds no {KIND}, but {data.get('kind') or 'something without a kind'}")
    yield from found


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        pass
    except RecursionError as error:
        raise UnreadableInput("the input is nested too deeply for an object of Kubernetes") from error
    try:
        import yaml  # not needed for JSON, and no dependency of the bare package
    except ImportError as error:
        raise UnreadableInput("the input is no JSON, and PyYAML is not installed; use kubectl's -o json") from error
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise UnreadableInput("the input is nested too deeply for an object of Kubernetes") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter from dates and numbers that are none
        raise UnreadableInput(f"the input is neither JSON nor YAML: {' '.join(str(error).split())}") from error
