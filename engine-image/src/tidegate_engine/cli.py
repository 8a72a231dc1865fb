"""The command `tidegate-engine`: flags and environment to options, failures to one sentence and an exit code.

Exit codes: 0 after a drain, 1 when the engine failed while serving, 2 for flags and settings, 3 for a model that cannot
be loaded. The sentence also goes to the container's termination message, where the operator reads it.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tidegate_engine.bench_command import DESCRIPTION as BENCH_DESCRIPTION
from tidegate_engine.bench_command import EPILOG as BENCH_EPILOG
from tidegate_engine.bench_command import BenchError, EngineHere, add_bench_flags, refuse_with_url, run_bench
from tidegate_engine.context import DEFAULT_WINDOW, ContextPolicy
from tidegate_engine.foreign_flags import add_foreign_flags
from tidegate_engine.ngrams import NgramSpeculation, parse_speculative_config
from tidegate_engine.pooled_batcher import DEFAULT_MAX_TOKENS, DEFAULT_MAX_WAIT_SECONDS, PooledLimits
from tidegate_engine.precision import (
    CHECKPOINT_METHODS,
    DTYPES,
    KV_DTYPES,
    ONLINE_METHODS,
    STORED,
    Precision,
    PrecisionError,
    as_stored,
    parse_precision,
)
from tidegate_engine.reasoning import FORMATS as REASONING_FORMATS
from tidegate_engine.request import Window
from tidegate_engine.settings import (
    DEFAULT_PATTERNS,
    DEFAULT_SETTINGS,
    DEFAULT_WATERMARK,
    SETTING_NAMES,
    AdmissionPolicy,
    Envelope,
    SettingsFile,
    Violation,
    find_violation,
    parse_settings_file,
)
from tidegate_engine.steptime import Profile, load_profile, profile_names
from tidegate_engine.tool_calls import FORMATS
from tidegate_engine.weights import ModelError

if TYPE_CHECKING:
    from tidegate_engine.live_policy import LivePolicy
    from tidegate_engine.pooling import Pooling
    from tidegate_engine.ranks import RankEnd, Team
    from tidegate_engine.runner import Runner
    from tidegate_engine.serve import Model
    from tidegate_engine.tokenizer import ModelTokenizer
    from tidegate_engine.torch_runner import TorchOptions

TERMINATION_LOG = Path("/dev/termination-log")
QUEUED_PER_SEQUENCE = 8
"""Requests that may wait for each place of the largest batch, unless the flag says how many."""
EXIT_CONFIG = 2
EXIT_MODEL = 3
EXIT_INTERRUPTED = 130

logger = logging.getLogger(__name__)


class ConfigError(Exception):
    """Flags or settings that cannot be served: `Reason: sentence`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag as any other failure: one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("FlagsInvalid", f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        args = _parser().parse_args(argv)
        if args.command == "profiles":
            return _list_profiles()
        if args.command == "inspect":
            return _inspect(args)
        if args.command == "pack":
            return _pack(args)
        if args.command == "chat":
            return _chat(args)
        if args.command == "bench":
            return _bench(args)
        return _serve(args)
    except (ConfigError, BenchError) as error:
        return _fail(str(error), EXIT_CONFIG)
    except ModelError as error:
        return _fail(str(error), EXIT_MODEL)


def _serve(args: argparse.Namespace) -> int:
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        logger.info("--enable-auto-tool-choice: the format of tool calls is recognised from the chat template")
    try:
        from tidegate_engine.serve import ServeError, ServeOptions, run
    except ImportError as error:
        raise ConfigError("DependencyMissing", f"{error}; install tidegate[server] or tidegate[engine]") from error

    settings = _read_settings(args)
    args.most_sequences = settings.envelope.max_num_seqs[1]
    name, model = _read_model(args)
    names = args.served_model_name or [name]
    options = ServeOptions(
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        served_names=tuple(names),
        settings=settings,
        shutdown_timeout_seconds=args.shutdown_timeout,
        endpoint_removal_seconds=args.endpoint_removal_seconds,
        stall_seconds=args.liveness_stall_seconds,
        runner=args.runner,
        profile=args.profile if args.runner == "modelled" else None,
        admin_keys=_admin_keys_path(args),
        object_uid=os.environ.get("TIDEGATE_OBJECT_UID"),
        api_keys=tuple(args.api_key or ()),
        policy=_read_policy(args, settings),
        context_window=Window(args.context_window, args.context_sinks),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        template_variables=_read_template_variables(args),
        speculation=_read_speculation(args),
        lora_root=_lora_root(args),
        lora_modules=tuple(args.lora_modules or ()),
        pooled=PooledLimits(args.pooled_max_tokens, args.pooled_max_wait_ms / 1000),
    )
    try:
        return run(options, model)
    except ServeError as error:
        return _fail(str(error), error.exit_code)


def _read_model(args: argparse.Namespace) -> tuple[str, "Model"]:
    """The model's own name, and how to load it."""
    args = _loading_args(args)
    if args.runner == "modelled":
        if args.tensor_parallel_size > 1:
            raise ConfigError("FlagsInvalid", "--tensor-parallel-size needs --runner torch: a profile has its own GPUs")
        profile = _read_profile(args)
        return profile.name, _modelled(args, profile)
    if args.model is None:
        raise ConfigError("FlagsInvalid", "--model is needed with --runner torch")
    if args.tensor_parallel_size > 1 and (args.enable_lora or _host_bytes(args)):
        what = "--enable-lora" if args.enable_lora else "--kv-offload-bytes"
        raise ConfigError("FlagsInvalid", f"{what} needs --tensor-parallel-size 1")
    return Path(args.model).stem, _computed(args, _read_precision(args))


def _modelled(args: argparse.Namespace, profile: Profile) -> "Model":
    from tidegate_engine.byte_tokenizer import ByteTokenizer
    from tidegate_engine.modelled_runner import ModelledRunner, model_info
    from tidegate_engine.serve import Model

    block_tokens = args.block_size or profile.block_tokens
    info = model_info(
        profile,
        block_tokens=block_tokens,
        kv_blocks=args.num_gpu_blocks_override or max(2, profile.kv_blocks * profile.block_tokens // block_tokens),
        max_model_len=args.max_model_len or profile.max_model_len,
        host_bytes=_host_bytes(args),
    )

    def load_runner() -> tuple[ModelledRunner, Callable[[], None]]:
        time.sleep(sum(profile.start_seconds.values()))
        runner = ModelledRunner(profile, info)
        return runner, runner.rest

    return Model(load_runner, ByteTokenizer)


def _computed(args: argparse.Namespace, precision: Precision) -> "Model":
    from tidegate_engine.serve import Model

    pooling = _read_pooling(args)

    def load_runner(team: "Team | None" = None) -> tuple["Runner", None]:
        return _load_torch(args, precision, pooling, team), None

    def follow_rank(end: "RankEnd") -> None:
        from tidegate_engine.torch_runner import follow_rank
        from tidegate_engine.weights import find_model_file

        follow_rank(find_model_file(args.model), end, options=_torch_options(args, precision, pooling))

    ranks = args.tensor_parallel_size
    return Model(load_runner, lambda: _load_chat_tokenizer(args), ranks, follow_rank)


def _load_tokenizer(args: argparse.Namespace) -> "ModelTokenizer":
    from tidegate_engine.weights import find_model_file

    path = find_model_file(args.model)
    try:
        from tidegate_engine.tokenizer import load_tokenizer
    except ImportError as error:
        raise _cannot_compute(error) from error
    return load_tokenizer(path)


def _load_chat_tokenizer(args: argparse.Namespace) -> "ModelTokenizer":
    from tidegate_engine.chat import ChatTemplateError

    tokenizer = _load_tokenizer(args)
    if args.chat_template is not None:
        try:
            tokenizer.use_template(_read_text(args.chat_template))
        except ChatTemplateError as error:
            raise ConfigError("FlagsInvalid", f"--chat-template {args.chat_template}: {error}") from error
    return tokenizer


def _load_torch(
    args: argparse.Namespace, precision: Precision, pooling: "Pooling | None", team: "Team | None"
) -> "Runner":
    from tidegate_engine.cgroup import Machine
    from tidegate_engine.weights import find_model_file

    path = find_model_file(args.model)
    try:
        from tidegate_engine.grammars import Grammars
        from tidegate_engine.torch_runner import TorchRunner
    except ImportError as error:
        raise _cannot_compute(error) from error
    masks = Grammars.of(_load_tokenizer(args), threads=Machine().cpus())
    return TorchRunner(path, options=_torch_options(args, precision, pooling), masks=masks, team=team)


def _torch_options(args: argparse.Namespace, precision: Precision, pooling: "Pooling | None") -> "TorchOptions":
    from tidegate_engine.decode_graphs import sizes_up_to
    from tidegate_engine.lora import LoraLimits
    from tidegate_engine.torch_runner import TorchOptions

    most = args.most_sequences or DEFAULT_SETTINGS.max_num_seqs
    return TorchOptions(
        precision=precision,
        quantisation=CHECKPOINT_METHODS.get(args.quantization),
        block_tokens=args.block_size or 16,
        kv_blocks=args.num_gpu_blocks_override,
        max_model_len=args.max_model_len,
        host_bytes=_host_bytes(args),
        lora=LoraLimits(args.max_loras, args.max_lora_rank) if args.enable_lora else None,
        pooling=pooling,
        device=args.device,
        kernels=args.kernels,
        graph_sizes=() if args.enforce_eager or args.device == "cpu" else sizes_up_to(most),
    )


def _cannot_compute(error: ImportError) -> ModelError:
    return ModelError(
        "ModelUnsupported", f"this image cannot compute a model ({error}); use one with torch, or --runner modelled"
    )


def _read_precision(args: argparse.Namespace) -> Precision:
    """The policy of --precision, --quantization, --dtype and --kv-cache-dtype together."""
    text: str = args.precision
    if args.quantization is not None:
        if args.quantization not in (*ONLINE_METHODS, *CHECKPOINT_METHODS):
            known = ", ".join((*ONLINE_METHODS, *CHECKPOINT_METHODS))
            raise ConfigError("FlagsInvalid", f"--quantization {args.quantization} is not supported; known are {known}")
        if text != "auto":
            raise ConfigError("FlagsInvalid", "--quantization and --precision are two ways to say the same; give one")
        text = ONLINE_METHODS.get(args.quantization, STORED)
    try:
        return parse_precision(text, dtype=args.dtype, kv=args.kv_cache_dtype)
    except PrecisionError as error:
        raise ConfigError("FlagsInvalid", str(error)) from error


def _read_profile(args: argparse.Namespace) -> Profile:
    if args.profile is None:
        raise ConfigError("FlagsInvalid", f"--profile is needed with --runner modelled: {', '.join(profile_names())}")
    try:
        profile = load_profile(args.profile)
    except ValueError as error:
        raise ConfigError("ProfileInvalid", str(error)) from error
    if args.max_model_len is not None and args.max_model_len > profile.max_model_len:
        raise ConfigError(
            "FlagsInvalid",
            f"--max-model-len is {args.max_model_len}; the profile {profile.name} has {profile.max_model_len}",
        )
    return profile


def _read_settings(args: argparse.Namespace) -> SettingsFile:
    """The object's settings file, or for standalone use the flags."""
    flags = {name: getattr(args, name) for name in SETTING_NAMES if getattr(args, name) is not None}
    if args.config_dir is not None:
        path = args.config_dir / "settings.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("SettingsInvalid", f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError("SettingsInvalid", f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError("SettingsInvalid", f"{path} must hold a JSON object")
        try:
            file = parse_settings_file(data)
        except ValueError as error:
            raise ConfigError("SettingsInvalid", str(error)) from error
        if flags:
            logger.warning("%s sets the batch settings; ignored: %s", path, ", ".join(sorted(flags)))
        return file
    settings = replace(DEFAULT_SETTINGS, **flags)
    default = Envelope()
    bounds = {name: default.bounds(name) for name in SETTING_NAMES}
    widened = {
        name: (min(low, flags.get(name, low)), max(high, flags.get(name, high))) for name, (low, high) in bounds.items()
    }
    envelope = Envelope(**widened)
    if violation := find_violation(settings, envelope):
        raise ConfigError("SettingsInvalid", violation.reason)
    return SettingsFile(0, settings, envelope, DEFAULT_PATTERNS)


def _read_speculation(args: argparse.Namespace) -> NgramSpeculation | None:
    if args.speculative_config is None:
        return None
    if args.runner == "modelled":
        raise ConfigError("FlagsInvalid", "--speculative-config needs --runner torch: made-up text cannot be guessed")
    try:
        return parse_speculative_config(json.loads(args.speculative_config))
    except ValueError as error:
        raise ConfigError("FlagsInvalid", f"--speculative-config: {error}") from error


def _read_policy(args: argparse.Namespace, settings: SettingsFile) -> "LivePolicy":
    from tidegate_engine.live_policy import LivePolicy, change_policy, policy_bounds

    names = {
        "context_policy", "scheduling_policy", "max_num_queued_tokens", "queue_timeout_s", "default_max_tokens",
        "max_num_partial_prefills", "max_prefill_tokens_per_step", "kv_admission_limit", "watermark", "reserve_ratio",
        "enable_prefix_caching", "stream_interval",
    }  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    given["max_num_queued_reqs"] = args.max_num_queued_reqs or QUEUED_PER_SEQUENCE * settings.envelope.max_num_seqs[1]
    bounds = policy_bounds(
        max_model_len=sys.maxsize, max_num_batched_tokens=settings.envelope.max_num_batched_tokens[1]
    )
    policy = change_policy(LivePolicy(), given, bounds=bounds)
    if isinstance(policy, Violation):
        raise ConfigError("FlagsInvalid", f"--{policy.field.replace('_', '-')}: {policy.reason}")
    return policy


def _read_template_variables(args: argparse.Namespace) -> dict[str, object]:
    text = args.default_chat_template_kwargs
    try:
        data = {} if text is None else json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("must be a JSON object")
    except ValueError as error:
        raise ConfigError("FlagsInvalid", f"--default-chat-template-kwargs: {error}") from error
    return data


def _read_pooling(args: argparse.Namespace) -> "Pooling | None":
    from tidegate_engine.pooling import parse_pooler_config

    try:
        return None if args.pooler_config is None else parse_pooler_config(args.pooler_config)
    except ValueError as error:
        raise ConfigError("FlagsInvalid", f"--pooler-config: {error}") from error


def _host_bytes(args: argparse.Namespace) -> int:
    """Host memory for evicted KV blocks."""
    if args.kv_offload_bytes is not None:
        return int(args.kv_offload_bytes)
    return int(args.swap_space * 2**30)


def _lora_root(args: argparse.Namespace) -> Path | None:
    if not args.enable_lora:
        if args.lora_modules:
            raise ConfigError("FlagsInvalid", "--lora-modules needs --enable-lora")
        return None
    if args.runner == "modelled":
        raise ConfigError("FlagsInvalid", "--enable-lora needs --runner torch: made-up text follows no adapter")
    if len(args.lora_modules or ()) > args.max_loras:
        raise ConfigError(
            "FlagsInvalid",
            f"--lora-modules names {len(args.lora_modules)} adapters, and --max-loras is {args.max_loras}",
        )
    model = Path(args.model)
    return Path(args.lora_dir or (model if model.is_dir() else model.parent))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("FlagsInvalid", f"{path} cannot be read: {error}") from error


def _admin_keys_path(args: argparse.Namespace) -> Path | None:
    if args.admin_keys is not None:
        return Path(args.admin_keys)
    return None if args.config_dir is None else Path(args.config_dir / "admin-keys.json")


def _list_profiles() -> int:
    for name in profile_names():
        profile = load_profile(name)
        print(f"{name:24} {profile.gpus} x {profile.gpu}, {profile.model}, {profile.weight_dtype} weights")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    try:
        from tidegate_engine.inspect_model import describe, inspect_model
    except ImportError as error:
        raise ConfigError("DependencyMissing", f"{error}; install tidegate[engine]") from error
    found = inspect_model(args.model)
    print(json.dumps(asdict(found), indent=2) if args.json else describe(found))
    return 0


def _pack(args: argparse.Namespace) -> int:
    """Every matrix as it is stored, unless a precision is given."""
    precision, pooling = _read_precision(_loading_args(args)), _read_pooling(args)
    try:
        from tidegate_engine.checkpoint import open_checkpoint
        from tidegate_engine.packed import copy_tokenizer, write_packed
        from tidegate_engine.torch_runner import DTYPES as TORCH_DTYPES
    except ImportError as error:
        raise ConfigError("DependencyMissing", f"{error}; install tidegate[engine]") from error
    checkpoint = open_checkpoint(args.model)
    if checkpoint.packed:
        raise ConfigError(
            "FlagsInvalid", f"--model {args.model} is packed already; name the model that it was made from"
        )
    if args.output.exists() and any(args.output.iterdir()):
        raise ConfigError("FlagsInvalid", f"--output {args.output} is not empty; name a new folder")
    parameters = checkpoint.load(TORCH_DTYPES[precision.dtype], as_stored(precision))
    try:
        size = write_packed(
            args.output,
            parameters,
            checkpoint.config,
            name=checkpoint.name,
            eos_token_ids=checkpoint.eos_token_ids,
            pooling=checkpoint.pooling_or(pooling),
        )
        copy_tokenizer(checkpoint.path, args.output)
    except OSError as error:
        raise ConfigError("OutputFailed", f"{args.output} cannot be written: {error.strerror}") from error
    print(f"{args.output}: {size / 2**20:,.1f} MiB; serve it with --model {args.output}")
    return 0


def _chat(args: argparse.Namespace) -> int:
    from tidegate_engine.terminal_chat import Backend, ChatError, LocalBackend, UrlBackend, run_chat

    logging.getLogger().setLevel(logging.WARNING)
    if (args.model is None) == (args.url is None):
        raise ConfigError("FlagsInvalid", "name a model's file or folder, or --url of a server; one of them")
    fields = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "max_completion_tokens": args.max_tokens,
        "context_policy": args.context_policy or (ContextPolicy.TRUNCATE_LEFT.value if args.url is None else None),
        "chat_template_kwargs": _read_template_variables(args) or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    backend: Backend
    try:
        if args.url is not None:
            key = args.api_key or os.environ.get("OPENAI_API_KEY")
            backend = UrlBackend(args.url, api_key=key, model=args.served_model_name, fields=given)
        else:
            loading = _loading_args(args)
            model = _computed(loading, _read_precision(loading))
            print(f"loading {args.model} ...", file=sys.stderr, flush=True)
            window = Window(args.context_window, args.context_sinks)
            backend = LocalBackend(model, reasoning_parser=args.reasoning_parser, fields=given, window=window)
        try:
            if args.message is None and sys.stdin.isatty():
                # What starts programs in the background has them ignore it.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                print("/help tells the commands", file=sys.stderr, flush=True)
            return run_chat(backend, system=args.system, message=args.message)
        finally:
            backend.close()
    except ChatError as error:
        raise ConfigError("ChatFailed", str(error)) from error
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the answers has left; Python would complain once more when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED


def _bench(args: argparse.Namespace) -> int:
    refuse_with_url(args, args.engine_flags)
    del args.engine_flags

    def load() -> EngineHere:
        from tidegate_engine.engine import build_engine

        _, model = _read_model(args)
        runner, on_idle = model.load_runner()
        engine = build_engine(
            runner,
            _read_settings(args),
            admission=AdmissionPolicy(enable_prefix_caching=args.enable_prefix_caching),
            speculation=_read_speculation(args),
            on_idle=on_idle,
        )
        return EngineHere(engine, model.load_tokenizer().encode)

    try:
        return run_bench(args, load)
    except ImportError as error:
        raise ConfigError("DependencyMissing", f"{error}; install tidegate[server] or tidegate[engine]") from error


def _fail(sentence: str, exit_code: int) -> int:
    one_line = " ".join(sentence.split())
    print(one_line, file=sys.stderr, flush=True)
    # The kubelet makes the file; elsewhere there is none.
    if TERMINATION_LOG.exists():
        with suppress(OSError):
            TERMINATION_LOG.write_text(one_line, encoding="utf-8")
    return exit_code


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _size(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more bytes, not {value}")
    return value


def _gibibytes(text: str) -> float:
    value = float(text)
    if not 0 <= value < 2**20:
        raise argparse.ArgumentTypeError(f"must be 0 or more GiB, not {text}")
    return value


def _named_path(text: str) -> tuple[str, Path]:
    name, is_there, path = text.partition("=")
    if not (name and is_there and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, not {text}")
    return name, Path(path)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 86_400:
        raise argparse.ArgumentTypeError(f"must be 0 to 86400 seconds, not {text}")
    return value


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"must be 0 to 10000 milliseconds, not {text}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65_536:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, not {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tidegate-engine",
        description="Serves a language model over the OpenAI API, with batch settings that change live.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("profiles", help="list the GPUs and models that the modelled runner knows", allow_abbrev=False)
    inspect = commands.add_parser(
        "inspect", help="what a model holds, and what memory it needs in each precision", allow_abbrev=False
    )
    inspect.add_argument("model", metavar="PATH", help="GGUF file or folder of a model")
    inspect.add_argument("--json", action="store_true", help="for programs")
    pack = commands.add_parser(
        "pack", help="write a model in the form that loads fastest", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    pack.add_argument("--model", required=True, metavar="PATH", help="GGUF file or folder of a model")
    pack.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder")
    _add_precision_flags(pack)
    _add_pooler_flag(pack)
    _add_chat(commands)
    bench = commands.add_parser(
        "bench", help="measure a server or a model: latencies, throughput, goodput", allow_abbrev=False,
        usage="%(prog)s (--url URL | --model FILE) [options]",
        description=BENCH_DESCRIPTION, epilog=BENCH_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_bench_flags(bench)
    here = bench.add_argument_group("an engine in this process, without --url; as for serve")
    _add_runner_flags(here)
    _add_memory_flags(here)
    _add_settings_flags(here)
    bench.set_defaults(engine_flags=[each for each in here._group_actions if each.dest != "max_model_len"])
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model until SIGTERM, which drains: not ready at once, running requests end, exit 0.",
        epilog="Where a flag is given twice, the last one counts.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model_flags(serve.add_argument_group("model"))
    _add_memory_flags(serve.add_argument_group("context and KV cache"))
    _add_lora_flags(serve.add_argument_group("LoRA adapters"))
    _add_settings_flags(serve.add_argument_group("batch settings"))
    _add_listener_flags(serve.add_argument_group("listeners and access"))
    _add_life_flags(serve.add_argument_group("probes and leaving"))
    _add_queue_flags(serve.add_argument_group("queue"))
    _add_answer_flags(serve.add_argument_group("prompts and answers"))
    _add_pooled_flags(serve.add_argument_group("embeddings"))
    add_foreign_flags(serve)
    return parser


def _add_chat(commands: "argparse._SubParsersAction[_Parser]") -> None:
    chat = commands.add_parser(
        "chat",
        help="chat with a model in the terminal",
        description="Chat in the terminal, with a model that is loaded here or with a server.\n"
        "Answers come as they are made; Ctrl-C stops one, Ctrl-D or /quit ends, /reset forgets\n"
        "the conversation, /system TEXT sets the system message. In a pipe each line is a\n"
        "message, answers go to standard output and everything else to standard error.",
        epilog="examples:\n"
        "  tidegate-engine chat model.gguf\n"
        "  tidegate-engine chat --url http://localhost:8000 --system 'Answer in one sentence.'\n"
        "  tidegate-engine chat model.gguf --temperature 0 --message 'What is the capital of France?'\n"
        "  cat questions.txt | tidegate-engine chat model.gguf > answers.txt",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chat.add_argument("model", nargs="?", metavar="PATH", help="GGUF file or folder of a model")
    chat.add_argument("--url", metavar="URL", help="a running server's instead, as http://localhost:8000")
    talk = chat.add_argument_group("conversation")
    talk.add_argument("--system", metavar="TEXT", help="system message; default: none")
    talk.add_argument("--message", metavar="TEXT", help="answer this and end")
    talk.add_argument("--temperature", type=float, metavar="T", help="0 = always the likeliest token; default 1")
    talk.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens of this share")
    talk.add_argument("--seed", type=int, metavar="N", help="the same answers again")
    talk.add_argument("--max-tokens", type=_positive, metavar="N", help="of an answer; default: what the context holds")
    talk.add_argument(
        "--context-policy", choices=[policy.value for policy in ContextPolicy],
        help="what happens to a conversation that is too long; default: its oldest turns are left out (truncate_left), "
        "with --url what the server does",
    )  # fmt: skip
    talk.add_argument(
        "--default-chat-template-kwargs", "--chat-template-kwargs", metavar="JSON",
        help='variables of the chat template, e.g. {"enable_thinking": false}',
    )  # fmt: skip
    remote = chat.add_argument_group("server")
    remote.add_argument("--served-model-name", metavar="NAME", help="the model's name there; default: its first")
    remote.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY")
    local = chat.add_argument_group("model that is loaded here")
    _add_template_flag(local)
    local.add_argument(
        "--reasoning-parser", choices=sorted(REASONING_FORMATS), metavar="NAME",
        help=f"how the model marks its thoughts: {', '.join(sorted(REASONING_FORMATS))}",
    )  # fmt: skip
    _add_window_flags(local)
    _add_precision_flags(local)
    _add_memory_flags(local)


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="PATH", help="GGUF file, or a folder with one or with safetensors files")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that clients use; default: the file's"
    )
    _add_runner_flags(group)
    _add_split_flag(group)


def _add_runner_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--runner", choices=("torch", "modelled"), default="torch",
        help="torch computes the model; modelled takes as long as the GPU of --profile would and makes up the text",
    )  # fmt: skip
    group.add_argument("--profile", metavar="NAME|FILE.json", help="GPU and model of the modelled runner")
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="where the torch runner computes; cuda has not been run on a GPU yet, it is proven without one only",
    )  # fmt: skip
    group.add_argument(
        "--kernels", choices=("auto", "torch", "triton"), default="auto",
        help="what it computes with: torch on the CPU and triton on a GPU, which auto is; with TRITON_INTERPRET=1 "
        "triton's are interpreted on the CPU",
    )  # fmt: skip
    group.add_argument(
        "--enforce-eager", action="store_true", help="record no CUDA graphs of decode steps; on a CPU there are none"
    )
    group.set_defaults(most_sequences=None)
    _add_precision_flags(group)
    group.add_argument(
        "--speculative-config", metavar="JSON",
        help='guess tokens from what stood there before, e.g. {"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_min": 2, "prompt_lookup_max": 4}; the text stays the same; default: off',
    )  # fmt: skip


def _add_split_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=_positive, default=1, metavar="N",
        help="processes that share the torch runner's model, each on a GPU of its own, or on the CPU",
    )  # fmt: skip


def _add_precision_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--dtype", choices=tuple(DTYPES), default="auto", metavar="TYPE",
        help="type of activations, and of weights whose precision is not given: float32 (auto; on a GPU that "
        "is bfloat16), bfloat16, float16",
    )  # fmt: skip
    group.add_argument(
        "--precision", default="auto", metavar="POLICY",
        help="precision of the weights: a name (float32, bfloat16, float16, fp8, fp8-block128, int8, int4, int4-g64, "
        "stored), or one for each kind of layer: '{attn: bf16, mlp: int8, lm_head: bf16, kv: fp8, layers: {0: bf16}}'; "
        "auto is as stored where memory is short, and --dtype elsewhere",
    )  # fmt: skip
    group.add_argument(
        "--quantization", metavar="METHOD",
        help="for vLLM's users: fp8 and int8 quantise while loading; gguf, awq, gptq, mlx, compressed-tensors keep "
        "what the checkpoint has",
    )  # fmt: skip


def _add_memory_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--max-model-len", type=_positive, metavar="TOKENS", help="context; default: the model's")
    group.add_argument(
        "--kv-cache-dtype", choices=KV_DTYPES, default="auto", metavar="TYPE",
        help="what the KV cache is held in: auto (as activations), bfloat16, float16, float32, fp8, int8",
    )  # fmt: skip
    group.add_argument("--block-size", type=_positive, metavar="TOKENS", help="tokens of a KV block; default 16")
    group.add_argument("--num-gpu-blocks-override", type=_positive, metavar="N", help="KV blocks; default: what fits")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="reuse the KV cache of equal beginnings",
    )  # fmt: skip
    group.add_argument(
        "--kv-offload-bytes", type=_size, metavar="BYTES",
        help="host memory for blocks evicted from the KV cache, which come back when their prefix does; default: none",
    )  # fmt: skip
    group.add_argument(
        "--swap-space", type=_gibibytes, default=0.0, metavar="GIB", help="the same in GiB, for vLLM's users"
    )
    group.add_argument(
        "--enable-chunked-prefill", action="store_true", default=True, help="always on; for vLLM's users"
    )


def _add_lora_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--enable-lora", action=argparse.BooleanOptionalAction, default=False,
        help="serve adapters in PEFT's format beside the model, each under its own name",
    )  # fmt: skip
    group.add_argument(
        "--lora-modules", nargs="+", type=_named_path, metavar="NAME=PATH", help="adapters to load at the start"
    )
    group.add_argument(
        "--max-loras", type=_positive, default=8, metavar="N",
        help="adapters in memory at once, any of which a batch may mix; the memory for them is set aside",
    )  # fmt: skip
    group.add_argument(
        "--max-lora-rank", type=_positive, default=16, metavar="R", help="adapters of a larger rank are refused"
    )
    group.add_argument(
        "--lora-dir", metavar="DIR",
        help="folder that adapters loaded through the admin API must lie in; default: --model, or what holds that file",
    )  # fmt: skip


def _add_settings_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config-dir", type=Path, metavar="DIR",
        help="folder with settings.json and admin-keys.json, as the operator mounts it; it wins over the flags below",
    )  # fmt: skip
    group.add_argument(
        "--max-num-seqs", "--max-num-active-seqs", type=_positive, metavar="N",
        help=f"requests in a batch; default {DEFAULT_SETTINGS.max_num_seqs}",
    )  # fmt: skip
    group.add_argument(
        "--max-num-batched-tokens", type=_positive, metavar="N",
        help=f"tokens in a step; default {DEFAULT_SETTINGS.max_num_batched_tokens}",
    )  # fmt: skip
    group.add_argument(
        "--long-prefill-token-threshold", type=_positive, metavar="N",
        help=f"tokens of one prompt in a step; default {DEFAULT_SETTINGS.long_prefill_token_threshold}",
    )  # fmt: skip
    group.add_argument(
        "--max-num-queued-reqs", type=_positive, metavar="N",
        help=f"more waiting requests get 429; default {QUEUED_PER_SEQUENCE} times the most that the settings' envelope "
        "allows in a batch",
    )  # fmt: skip


def _add_listener_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="0.0.0.0", help="address of both listeners")
    group.add_argument("--port", type=_port, default=8000, help="OpenAI API")
    group.add_argument("--admin-port", type=_port, default=8001, help="probes, metrics, admin API")
    group.add_argument("--api-key", nargs="+", metavar="KEY", help="keys of which clients must send one; default: none")
    group.add_argument(
        "--admin-keys", metavar="FILE",
        help="JWKS that checks admin tokens (audience: TIDEGATE_OBJECT_UID); default: admin-keys.json of --config-dir",
    )  # fmt: skip


def _add_life_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--shutdown-timeout", type=_seconds, default=30.0, metavar="SECONDS",
        help="how long running requests may take after SIGTERM",
    )  # fmt: skip
    group.add_argument(
        "--endpoint-removal-seconds", type=_seconds, default=5.0, metavar="SECONDS",
        help="how long new requests are still served after SIGTERM, since clients may not know yet",
    )  # fmt: skip
    group.add_argument(
        "--liveness-stall-seconds", type=_seconds, default=120.0, metavar="SECONDS",
        help="work without progress for so long means hung",
    )  # fmt: skip


def _add_queue_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), default="fcfs",
        help="priority lets a request name its own (`priority`, lower is sooner); fcfs refuses one that does",
    )  # fmt: skip
    group.add_argument(
        "--max-num-queued-tokens", type=_positive, metavar="N",
        help="while prompts of so many tokens wait, new requests get 429; default: no limit",
    )  # fmt: skip
    group.add_argument(
        "--queue-timeout-s", type=float, metavar="SECONDS",
        help="a request that has not begun after so long ends with 503; default: it waits",
    )  # fmt: skip
    group.add_argument(
        "--max-num-partial-prefills", type=_positive, metavar="N",
        help="prompts that may be computed in parts at a time; default: as the batch settings allow",
    )  # fmt: skip
    group.add_argument(
        "--max-prefill-tokens-per-step", "--max-prefill-tokens", type=_positive, metavar="N",
        help="tokens of all prompts together in a step; default: what --max-num-batched-tokens leaves",
    )  # fmt: skip
    group.add_argument(
        "--watermark", type=float, metavar="SHARE",
        help=f"share of the KV cache that new requests leave free, beside running ones; default {DEFAULT_WATERMARK}",
    )  # fmt: skip
    group.add_argument(
        "--reserve-ratio", type=float, metavar="SHARE",
        help="share of the output that is likely to come for which new requests leave room; default: it adapts itself",
    )  # fmt: skip
    group.add_argument(
        "--kv-admission-limit", type=float, metavar="SHARE",
        help="share of the KV cache that new requests may fill, the rest is for running ones to grow; default 1.0",
    )  # fmt: skip


def _add_window_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--context-window", type=_positive, default=DEFAULT_WINDOW.tokens, metavar="TOKENS",
        help="how many tokens, itself included, a token sees under sliding_window; default %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--context-sinks", type=_positive, default=DEFAULT_WINDOW.sinks, metavar="TOKENS",
        help="how many of the first tokens it sees beside them; default %(default)s",
    )  # fmt: skip


def _add_answer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--context-policy", choices=[policy.value for policy in ContextPolicy], default=ContextPolicy.REJECT.value,
        help="what happens to a prompt that is too long, where the request does not say; usage has truncated_tokens; "
        "sliding_window keeps it whole, and each token sees a part of it only",
    )  # fmt: skip
    _add_window_flags(group)
    group.add_argument(
        "--default-max-tokens", type=_positive, metavar="N",
        help="tokens of a chat's answer whose request does not say; default: what the context holds",
    )  # fmt: skip
    group.add_argument(
        "--stream-interval", type=_positive, metavar="N", help="tokens of a chunk in a stream; default 1"
    )
    _add_template_flag(group)
    group.add_argument(
        "--tool-call-parser", choices=sorted(FORMATS), metavar="NAME",
        help=f"how the model writes calls of tools ({', '.join(sorted(FORMATS))}); default: as its chat template says",
    )  # fmt: skip
    group.add_argument(
        "--default-chat-template-kwargs", metavar="JSON",
        help="variables of the chat template where a request does not give them, e.g. "
        '{"enable_thinking": false}',
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", choices=sorted(REASONING_FORMATS), metavar="NAME",
        help=f"how the model marks its thoughts ({', '.join(sorted(REASONING_FORMATS))}), which then come as "
        "`reasoning` and not in the text; default: they stay in the text",
    )  # fmt: skip
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true",
        help="for vLLM's users: tools may be offered wherever the format of calls is known",
    )  # fmt: skip


def _add_pooled_flags(group: argparse._ArgumentGroup) -> None:
    _add_pooler_flag(group)
    group.add_argument(
        "--pooled-max-tokens", type=_positive, default=DEFAULT_MAX_TOKENS, metavar="N",
        help="inputs of so many tokens are computed at once; fewer wait for more",
    )  # fmt: skip
    group.add_argument(
        "--pooled-max-wait-ms", type=_milliseconds, default=1000 * DEFAULT_MAX_WAIT_SECONDS, metavar="MS",
        help="at most so long",
    )  # fmt: skip


def _add_template_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template of conversations; default: the model's own"
    )


def _add_pooler_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--pooler-config", metavar="JSON",
        help='how states become an embedding, e.g. {"pooling_type": "mean", "normalize": true}; pooling_type is last, '
        "mean or cls; default: as the checkpoint says, else last and normalised",
    )  # fmt: skip


LOADING_FLAGS: tuple[Callable[[argparse._ActionsContainer], None], ...] = (
    _add_runner_flags, _add_split_flag, _add_memory_flags, _add_lora_flags, _add_template_flag, _add_pooler_flag,
)  # fmt: skip
"""All that loading a model reads. Commands that load one offer some of them, and have the defaults of the others."""


def _loading_args(args: argparse.Namespace) -> argparse.Namespace:
    """`args` of any command, and the defaults of those flags of loading that it does not offer."""
    parser = _Parser(add_help=False)
    for add_flags in LOADING_FLAGS:
        add_flags(parser)
    return parser.parse_args([], argparse.Namespace(**vars(args)))


if __name__ == "__main__":
    sys.exit(main())
