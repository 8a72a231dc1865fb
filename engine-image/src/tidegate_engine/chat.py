"""A model's chat template, rendered to the text that the model was trained on.

The template comes with the model file and is untrusted: it runs in Jinja's sandbox. Called by the tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template cannot be used, or refuses these messages; the message says why."""


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, `eos_token`) are variables of it."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _format_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"its chat template cannot be read: {error}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text, special tokens spelt out; with the head of the answer after it."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None if not tools else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (TemplateError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatTemplateError(str(error)) from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike Jinja's own filter it leaves <, > and & alone, as the templates' authors had it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
