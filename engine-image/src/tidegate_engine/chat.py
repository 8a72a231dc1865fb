"""A model's chat template, rendered to the text that the model was trained on.

The template comes with the model file and is untrusted: it runs in Jinja's sandbox. Called by the tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PRODUCT = 1 << 20
"""Characters, items or bits that `*` and `**` may make in a template."""
_FAULTS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip
"""What a template may end in, however it is written."""


class ChatTemplateError(ValueError):
    """The template cannot be used, or refuses these messages; the message says why."""


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, `eos_token`) are variables of it."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _format_now
        try:
            self._template = environment.from_string(source)
        except (*_FAULTS, SyntaxError) as error:
            raise ChatTemplateError(f"its chat template cannot be read: {error}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as text, special tokens spelt out; with the head of the answer after it.

        `variables` are more of the template's; they replace none of the others.
        """
        own = {"messages", "tools", "add_generation_prompt", *self.special_tokens}
        try:
            return self._template.render(
                {name: value for name, value in (variables or {}).items() if name not in own},
                messages=[dict(message) for message in messages],
                tools=None if not tools else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except _FAULTS as error:
            raise ChatTemplateError(str(error)) from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Does not multiply without bounds, neither while it renders nor while it compiles, when constants are folded."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _product_size(operator, left, right) > MAX_PRODUCT:
            raise SecurityError(f"the template multiplies beyond {MAX_PRODUCT} characters, items or bits")
        return super().call_binop(context, operator, left, right)


def _product_size(operator: str, left: object, right: object) -> int:
    """Characters, items or bits that the operation makes; 0 where its operands bound it."""
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    sizes = [len(value) for value in (left, right) if isinstance(value, Sequence)]
    counts = [value for value in (left, right) if isinstance(value, int)]
    if sizes and counts:
        return sizes[0] * counts[0]
    return sum(count.bit_length() for count in counts)


class _Generation(Extension):
    """`{% generation %}` to `{% endgeneration %}` marks what the model said, for training; it is text as any other."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it leaves <, > and & alone, as the templates' authors had it.

    Its arguments are transformers', whose order templates go by.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
