"""Renders the configuration templates beside this module; every name in a template must be given."""

from collections.abc import Mapping
from pathlib import Path
from string import Template

FOLDER = Path(__file__).parent / "templates"


def render(name: str, values: Mapping[str, str]) -> str:
    """Text of a template with its names filled in. Raises KeyError for a name without a value."""
    return Template((FOLDER / name).read_text()).substitute(values)
