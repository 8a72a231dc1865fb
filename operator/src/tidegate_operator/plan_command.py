"""`tidegate plan`: reads the question from flags, prints the answer as a table or as JSON. The maths is `plan`'s.

Called by `cli`, which imports this only when it is asked for. Touches no cluster and no GPU.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tidegate_engine.model_config import decoder_config, read_settings
from tidegate_engine.settings import ISL_EDGES, OSL_EDGES, Envelope, lower_edge
from tidegate_engine.weights import CONFIG_FILE, ModelError
from tidegate_operator.capacity import Targets
from tidegate_operator.gpus import GPUS, PRICES_OF, Gpu, PriceError, find_gpu, nearest_names, parse_prices
from tidegate_operator.mix import Cell, Mix
from tidegate_operator.model_shapes import PRECISIONS, WELL_KNOWN, ModelShape, known_shape
from tidegate_operator.plan import (
    KV_PRECISIONS,
    Answer,
    Load,
    Option,
    Question,
    Refusal,
    plan,
    profile_of,
    with_implied_itl,
)
from tidegate_operator.plan import describe as describe_option
from tidegate_operator.prior import PRIOR_ERROR, Source

DESCRIPTION = f"""\
Say what serving a model would take, before anything runs: for each GPU and precision whether it fits, the GPUs of a
replica, the replicas, the batch settings, the latencies to expect, the largest rate and the cost; then which one to
take and why.

  tidegate plan --model Llama-3.1-8B --ttft 500ms --itl 50ms --mix chat --rate 20
  tidegate plan --model Llama-2-7B --concurrency 500 --tokens-per-second 10000 --ttft 500ms
  tidegate plan --model ./config.json --gpu H100 --gpu L40S --precision fp8,int4 --mix 8000:200 --json

Step times are a roofline's and taken to be {100 * PRIOR_ERROR:.0f} % off; a running engine measures its own, and the
operator goes by those. The GPUs of a replica share each layer (tensor parallelism).
Prices are of {PRICES_OF} and only defaults: give yours with --price "H100 SXM=2.10".
"""

Lengths = tuple[float, float, float]
"""Input tokens, output tokens, share."""
MIXES: Mapping[str, tuple[Lengths, ...]] = {
    "chat": ((250, 100, 0.3), (900, 250, 0.5), (2500, 480, 0.2)),
    "rag": ((4000, 150, 0.3), (8000, 200, 0.5), (14_000, 280, 0.2)),
    "code": ((1200, 20, 0.5), (3500, 30, 0.5)),
    "summary": ((3000, 200, 0.6), (9000, 400, 0.4)),
    "reasoning": ((200, 1500, 0.5), (600, 4000, 0.4), (1200, 9000, 0.1)),
    "batch": ((500, 500, 1.0),),
}
"""Means in and out: chat 1,025/251, rag 8,000/201, code 2,350/25, summary 5,400/280, reasoning 460/3,250."""

MAX_KINDS = 64
MAX_TOKENS = 1 << 30
MAX_SHARES = 1e9
MIN_GOAL_SECONDS, MAX_GOAL_SECONDS = 1e-6, 86_400.0


class UnknownModel(ValueError):
    """No shape of this name, or files that hold none: one sentence that says what to do."""


class BadFlag(ValueError):
    """A flag that cannot be read: one sentence."""


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Ends the process with argparse's own words when a flag is unknown."""
    parser = argparse.ArgumentParser(
        prog="tidegate plan", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a well-known name, a folder with config.json, or a GGUF file")
    parser.add_argument(
        "--gpu", action="append", default=[], metavar="NAME", help="only this GPU, again for more (all that are known)"
    )
    parser.add_argument(
        "--precision",
        default="bf16,fp8,int8",
        metavar="LIST",
        help=f"of the weights: {', '.join(PRECISIONS)} (%(default)s; fp16 too where a GPU has no bf16)",
    )
    parser.add_argument(
        "--kv-precision",
        choices=KV_PRECISIONS,
        default="auto",
        help="of the KV cache (auto: 16 bits, or 32 beside fp32 weights)",
    )
    parser.add_argument("--ttft", metavar="TIME", help="goal for the time to the first token, p95: 500ms, 2s")
    parser.add_argument("--itl", metavar="TIME", help="goal for the time between two tokens, p95: 50ms")
    parser.add_argument(
        "--mix",
        default="chat",
        help=f"{', '.join(MIXES)}, or ISL:OSL:SHARE,... in tokens, or chat:0.7,rag:0.3 (%(default)s)",
    )
    parser.add_argument("--rate", type=float, metavar="N", help="requests a second to carry")
    parser.add_argument("--concurrency", type=float, metavar="N", help="requests in progress at once")
    parser.add_argument("--tokens-per-second", type=float, metavar="N", help="output tokens of all requests together")
    parser.add_argument(
        "--price", action="append", default=[], metavar="GPU=USD", help="dollars an hour of one GPU, again for more"
    )
    parser.add_argument("--headroom", type=float, default=15.0, metavar="PERCENT", help="kept free (%(default)g)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--write-profile",
        type=Path,
        metavar="FILE",
        help="write the choice as a profile for `tidegate simulate` and `tidegate-engine serve --runner modelled`",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0; 1 when no option reaches the goals; 2 with one sentence when the question cannot be read."""
    options = read_flags(arguments)
    try:
        question = read_question(options)
    except (BadFlag, UnknownModel, PriceError) as error:
        print(f"tidegate plan: {error}", file=sys.stderr)
        return 2
    answer = plan(question)
    if options.write_profile is not None and answer.choice is not None:
        try:
            options.write_profile.write_text(json.dumps(asdict(profile_of(question, answer.choice)), indent=2) + "\n")
        except OSError as error:
            print(f"tidegate plan: cannot write {options.write_profile}: {error.strerror}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps(as_dict(question, answer), indent=2))
    else:
        print("\n".join(describe(question, answer)))
    return 0 if answer.choice is not None else 1


# --- reading -------------------------------------------------------------------------------------------------------


def read_question(options: argparse.Namespace) -> Question:
    """Raises BadFlag, UnknownModel or PriceError."""
    shape = read_shape(options.model)
    question = Question(
        shape=shape,
        mix=parse_mix(options.mix),
        targets=Targets(ttft_seconds=_goal("--ttft", options.ttft), itl_seconds=_goal("--itl", options.itl)),
        load=Load(
            requests_per_second=_positive("--rate", options.rate),
            concurrency=_positive("--concurrency", options.concurrency),
            tokens_per_second=_positive("--tokens-per-second", options.tokens_per_second),
        ),
        gpus=_gpus(options.gpu),
        precisions=_precisions(options.precision),
        kv=options.kv_precision,
        prices=parse_prices(options.price),
        headroom_percent=options.headroom,
        envelope=Envelope(),
    )
    if not 0 <= options.headroom <= 90:
        raise BadFlag("--headroom is a percentage from 0 to 90")
    context = shape.config.context_tokens
    if question.longest_tokens > context:
        raise BadFlag(
            f"the longest requests of the mix have {question.longest_tokens:,.0f} tokens, and {shape.name} holds "
            f"{context:,} in context; give shorter ones with --mix ISL:OSL"
        )
    return question


def parse_mix(text: str) -> Mix:
    """`chat`, `1000:250`, `8000:200:0.3,300:100:0.7` or `chat:0.7,rag:0.3`; shares are made to sum to one."""
    found: list[Lengths] = []
    for item in text.split(","):
        name, *figures = item.strip().split(":")
        try:
            if name in MIXES and len(figures) <= 1:
                weight = float(figures[0]) if figures else 1.0
                found += [(isl, osl, share * weight) for isl, osl, share in MIXES[name]]
            else:
                isl, osl, share = (float(value) for value in (name, *figures, "1")[:3])
                found.append((isl, osl, share))
        except ValueError:
            raise BadFlag(f"--mix {item!r} is neither ISL:OSL:SHARE nor one of {', '.join(MIXES)}") from None
    if len(found) > MAX_KINDS:
        raise BadFlag(f"--mix names {len(found)} kinds of requests; {MAX_KINDS} are the most")
    total = sum(share for *_, share in found)
    is_sound = all(1 <= isl <= MAX_TOKENS and 1 <= osl <= MAX_TOKENS and share >= 0 for isl, osl, share in found)
    if not is_sound or not 0 < total <= MAX_SHARES:
        raise BadFlag(
            f"--mix needs lengths of 1 to {MAX_TOKENS:,} tokens, and shares that are not all zero, nor {MAX_SHARES:g}"
        )
    return Mix(
        requests_per_second=1.0,
        cells=tuple(
            Cell(share / total, isl, osl, lower_edge(int(isl), ISL_EDGES), lower_edge(int(osl), OSL_EDGES))
            for isl, osl, share in found
            if share > 0
        ),
    )


def parse_time(text: str) -> float:
    """Seconds of `500ms`, `0.5s` or `2m`; raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m)\s*", text)
    seconds = 0.0 if match is None else float(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[match[2]]
    if not MIN_GOAL_SECONDS <= seconds <= MAX_GOAL_SECONDS:
        raise ValueError(text)
    return seconds


def _goal(flag: str, text: str | None) -> float | None:
    try:
        return None if text is None else parse_time(text)
    except ValueError:
        raise BadFlag(f"{flag} {text!r} is no time of up to a day; write 500ms or 2s") from None


def _positive(flag: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < 1e9:
        raise BadFlag(f"{flag} must be above 0 and below a billion")
    return value


def _gpus(names: Iterable[str]) -> tuple[Gpu, ...]:
    found: dict[str, Gpu] = {}
    for name in names:
        gpu = find_gpu(name)
        if gpu is None:
            raise BadFlag(f"the GPU {name!r} is unknown; known are {', '.join(nearest_names(name))}")
        found[gpu.name] = gpu
    return tuple(found.values()) or GPUS


def _precisions(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown or not names:
        raise BadFlag(f"--precision {text!r}: known are {', '.join(PRECISIONS)}")
    return names


def read_shape(model: str) -> ModelShape:
    """The shape that a path (a folder, a `config.json`, a GGUF file) or a name of the table means.

    A path that exists wins. Raises UnknownModel.
    """
    path = Path(model)
    try:
        is_there = path.exists()
    except OSError:  # no name that a file could have
        is_there = False
    if is_there:
        return _shape_of_files(path)
    shape = known_shape(model)
    if shape is None:
        raise UnknownModel(
            f"{model:.200} is neither a file nor a known model; give a folder with config.json, a GGUF file, or one of "
            f"{', '.join(WELL_KNOWN)}"
        )
    return shape


def _shape_of_files(path: Path) -> ModelShape:
    folder = path.parent if path.name == CONFIG_FILE else path
    try:
        if (folder / CONFIG_FILE).is_file():
            return ModelShape(folder.resolve().name, decoder_config(read_settings(folder), {}))
        files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise UnknownModel(f"{path} holds {len(files)} GGUF files and no {CONFIG_FILE}; name one file")
        try:
            from tidegate_engine.gguf_config import read_config
            from tidegate_engine.gguf_file import read_header
        except ModuleNotFoundError as error:
            message = f"{error.name} is missing, which reads GGUF files: pip install 'tidegate[engine]'"
            raise UnknownModel(message) from error
        header = read_header(files[0])
        return ModelShape(str(header.metadata.get("general.name", files[0].stem)), read_config(header))
    except ModelError as error:
        raise UnknownModel(error.message) from error


# --- printing ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "GPU", "weights in", "GPUs", "weights", "KV", "workspace", "KV tokens", "batch", "req/s", "TTFT", "ITL",
    "replicas", "$/hour", "$/M out",
)  # fmt: skip


def describe(question: Question, answer: Answer) -> list[str]:
    """Lines for people."""
    lines = [*_asked(question), ""]
    rows = [COLUMNS, *(_row(option) for option in answer.options)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        cells = (
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    lines += [
        "",
        "GPUs: of a replica. weights, KV, workspace: GB in each. batch: sequences/tokens a step/prompt chunk.",
        "req/s: the most that a replica carries within the goals. TTFT, ITL: ms at the planned load, 95th percentile.",
    ]
    if answer.refusals:
        lines += [
            "",
            "Not possible:",
            *(f"  {item.gpu.name} {item.precision}: {item.reason}" for item in answer.refusals),
        ]
    return [*lines, "", *_verdict(question, answer)]


def _asked(question: Question) -> Iterable[str]:
    shape, targets, load = question.shape, with_implied_itl(question).targets, question.load
    yield f"{shape.name}: {_describe_shape(shape)}"
    cells = ", ".join(f"{100 * cell.share:.0f} % {cell.isl:.0f} in {cell.osl:.0f} out" for cell in question.mix.cells)
    yield f"requests: {cells} (tokens)"
    goals = [
        f"{name} {1000 * seconds:.0f} ms"
        for name, seconds in (("TTFT", targets.ttft_seconds), ("ITL", targets.itl_seconds))
        if seconds is not None
    ]
    yield f"goals, 95th percentile: {', '.join(goals) or 'none'}; {question.headroom_percent:g} % headroom"
    asked = [
        f"{value:,g} {unit}"
        for value, unit in (
            (load.requests_per_second, "requests/s"),
            (load.concurrency, "requests at once"),
            (load.tokens_per_second, "output tokens/s"),
        )
        if value is not None
    ]
    yield f"load: {', '.join(asked) or 'none given, so one replica at its largest rate'}"


def _describe_shape(shape: ModelShape) -> str:
    kinds = ", ".join(f"{count / 1e9:.2f} {kind}" for kind, count in shape.parameters_by_kind.items() if count >= 5e6)
    mixture = (
        ""
        if shape.active_mlp_share == 1
        else f", of which a token takes {100 * shape.active_mlp_share:.0f} % of the MLPs"
    )
    kv = shape.kv_bytes_per_token("bf16") / 1024
    return f"{shape.parameters / 1e9:.2f} billion parameters ({kinds}){mixture}; {kv:g} KiB of 16-bit KV a token"


def _row(option: Option) -> tuple[str, ...]:
    memory, settings, seen = option.memory, option.settings, option.prediction

    def milliseconds(seconds: float | None, goal: str) -> str:
        text = "-" if seconds is None else f"{seconds * 1000:.0f}"
        return f"{text} !" if goal in option.misses else text

    return (
        option.gpu.name,
        option.kinds.weights
        if option.kinds.kv in ("bf16", "fp16", "fp32")
        else f"{option.kinds.weights}, KV {option.kinds.kv}",
        str(memory.tensor_parallel),
        f"{memory.weight_bytes / 1e9:.1f}",
        f"{memory.kv_bytes / 1e9:.1f}",
        f"{memory.workspace_bytes / 1e9:.1f}",
        f"{memory.kv_tokens:,.0f}",
        f"{settings.max_num_seqs}/{settings.max_num_batched_tokens}/{settings.long_prefill_token_threshold}",
        f"{option.capacity.requests_per_second:.3g}",
        milliseconds(seen.ttft_p95_seconds, "ttft"),
        milliseconds(seen.itl_p95_seconds, "itl"),
        str(option.replicas),
        "-" if option.cost_per_hour is None else f"{option.cost_per_hour:.2f}",
        "-" if option.cost_per_million_tokens is None else f"{option.cost_per_million_tokens:.2f}",
    )


def _verdict(question: Question, answer: Answer) -> Iterable[str]:
    if any(option.misses for option in answer.options):
        yield "!: out of reach on this GPU, even for a single request; sized for what it can reach."
    if answer.choice is None:
        yield f"No choice: {answer.why}."
        return
    yield f"Take {describe_option(answer.choice)}: {answer.why}."
    default = question.prices.is_default(answer.choice.gpu)
    if default and answer.choice.cost_per_hour is not None:
        yield f'Its price is a default of {PRICES_OF}; yours: --price "{answer.choice.gpu.name}=USD".'


def as_dict(question: Question, answer: Answer) -> dict[str, object]:
    """The answer for programs; units stand in the names, null is unknown."""
    shape = question.shape
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "parametersByKind": dict(shape.parameters_by_kind),
        "stepModel": {"source": str(Source.PRIOR), "relativeError": PRIOR_ERROR},
        "pricesOf": PRICES_OF,
        "choice": None if answer.choice is None else _option_dict(question, answer.choice),
        "why": answer.why,
        "options": [_option_dict(question, option) for option in answer.options],
        "refusals": [_refusal_dict(refusal) for refusal in answer.refusals],
    }


def _option_dict(question: Question, option: Option) -> dict[str, object]:
    memory, capacity, seen = option.memory, option.capacity, option.prediction
    return {
        "gpu": option.gpu.name,
        "precision": option.kinds.weights,
        "kvPrecision": option.kinds.kv,
        "gpusPerReplica": memory.tensor_parallel,
        "replicas": option.replicas,
        "gpus": option.gpu_count,
        "memoryPerGpu": {
            "usableBytes": round(memory.usable_bytes),
            "weightBytes": round(memory.weight_bytes),
            "workspaceBytes": round(memory.workspace_bytes),
            "kvBytes": round(memory.kv_bytes),
        },
        "kvTokens": int(memory.kv_tokens),
        "settings": option.settings.as_dict(),
        "stepModel": option.step.as_dict(),
        "maxRequestsPerSecond": capacity.requests_per_second,
        "bottleneck": str(capacity.bottleneck),
        "binding": capacity.binding or None,
        "missedGoals": list(option.misses),
        "requestsPerSecond": option.requests_per_second,
        "outputTokensPerSecond": option.requests_per_second * question.mean_osl,
        "ttftP95Seconds": seen.ttft_p95_seconds,
        "itlP95Seconds": seen.itl_p95_seconds,
        "costPerHour": option.cost_per_hour,
        "costPerMillionOutputTokens": option.cost_per_million_tokens,
        "priceIsDefault": question.prices.is_default(option.gpu),
    }


def _refusal_dict(refusal: Refusal) -> dict[str, object]:
    return {"gpu": refusal.gpu.name, "precision": refusal.precision, "reason": refusal.reason}
