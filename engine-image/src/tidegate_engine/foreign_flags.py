"""Flags of other engines that users type out of habit: what each means here, so that none is ignored in silence.

A flag that has nothing to say here is accepted with one warning; one that would change the answer, or has another name
here, is refused with what to use. Called by `cli`.
"""

import argparse
import logging
from typing import Any, NoReturn

IGNORED: dict[str, tuple[str, str]] = {
    "--seed": ("1", "each request names its own seed"),
    "--gpu-memory-utilization": ("1", "the KV cache is sized by --num-gpu-blocks-override, or by what fits"),
    "--cudagraph-capture-sizes": ("+", "graphs are captured for the sizes that the settings allow"),
    "--calculate-kv-scales": ("0", "scales of the KV cache are always computed, one for each token and head"),
    "--enable-prompt-tokens-details": ("0", "usage always has cached_tokens"),
    "--lora-dtype": ("1", "adapters are held in the type of activations"),
    "--enable-reasoning": ("0", "--reasoning-parser is enough"),
    "--task": ("1", "generation and embeddings are both served"),
    "--convert": ("1", "generation and embeddings are both served"),
    "--trust-remote-code": ("0", "no code of a checkpoint is ever run"),
    "--swap-space": ("1", "preempted requests are computed again"),
    "--disable-log-requests": ("0", "requests are never logged"),
    "--disable-log-stats": ("0", "numbers are in /metrics only"),
    "--load-format": ("1", "the format is recognised from the files"),
    "--schedule-conservativeness": ("1", "the reservation for outputs adapts itself, or is --reserve-ratio"),
    "--waiting-served-ratio": ("1", "prompts and answers share each step"),
    "--max-waiting-tokens": ("1", "prompts and answers share each step"),
}
"""Flag to (number of values, why it has no meaning here)."""
REFUSED: dict[str, str] = {
    "--model-path": "use --model",
    "--model-id": "use --model",
    "--override-pooler-config": "use --pooler-config",
    "--tokenizer": "the tokenizer is the checkpoint's own",
    "--max-cpu-loras": "use --max-loras: adapters lie in one memory",
    "--kv-cache-dtype-skip-layers": "the KV cache has one format for all layers, that of --kv-cache-dtype",
    "--mem-fraction-static": "use --num-gpu-blocks-override",
    "--chunked-prefill-size": "use --long-prefill-token-threshold",
    "--max-running-requests": "use --max-num-seqs",
    "--schedule-policy": "use --scheduling-policy",
    "--cuda-graph-max-bs": "use --max-num-seqs",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--context-length": "use --max-model-len",
    "--max-total-tokens": "use --max-model-len",
    "--max-input-length": "use --max-model-len",
    "--max-batch-prefill-tokens": "use --max-num-batched-tokens",
    "--max-batch-total-tokens": "use --num-gpu-blocks-override",
    "--max-concurrent-requests": "use --max-num-queued-reqs",
    "--ctx-size": "use --max-model-len",
    "--parallel": "use --max-num-seqs",
    "--batch-size": "use --max-num-batched-tokens",
    "--ubatch-size": "use --long-prefill-token-threshold",
    "--cache-reuse": "use --enable-prefix-caching",
    "-c": "use --max-model-len",
    "-np": "use --max-num-seqs",
    "-b": "use --max-num-batched-tokens",
    "-ub": "use --long-prefill-token-threshold",
}
ONE_ONLY = ("--pipeline-parallel-size", "--data-parallel-size")
"""A replica is one model, whole or split by --tensor-parallel-size."""

logger = logging.getLogger(__name__)


class _Ignored(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        logger.warning("%s is ignored: %s", option_string, self.const)


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is a flag of another engine: {self.const}")


class _OneOnly(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values != "1":
            parser.error(
                f"{option_string} can be 1 only: a model is split by --tensor-parallel-size; ask for more replicas"
            )


class _Fixed(argparse.Action):
    """A choice of which one is built in, with all its values in `choices`; another value is refused."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values != self.const:
            parser.error(f"{option_string} can be {self.const} only, not {values}")


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `parser` does not have yet; they are not in its help."""
    known = parser._option_string_actions
    for flag, (count, why) in IGNORED.items():
        if flag not in known:
            _add(parser, flag, _Ignored, count=count, const=why)
    for flag, instead in REFUSED.items():
        if flag not in known:
            _add(parser, flag, _Refused, count="*", const=instead)
    for flag in ONE_ONLY:
        if flag not in known:
            _add(parser, flag, _OneOnly, count="1", const="")
    if "--prefix-caching-hash-algo" not in known:
        _add(parser, "--prefix-caching-hash-algo", _Fixed, count="1", const="sha256")


def _add(parser: argparse.ArgumentParser, flag: str, action: type[argparse.Action], *, count: str, const: str) -> None:
    nargs: Any = {"0": 0, "1": None}.get(count, count)
    parser.add_argument(flag, action=action, nargs=nargs, const=const, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
