"""`tidegate-local demo`: from nothing to a model that answers and a fleet that follows its load, shown as it happens.

Owns the order of things and the exit code. What is applied stands in `demo_objects`, what counts as success in
`verdict`, how it looks in `terminal` and `report`.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import openai
from rich.console import Console

from tidegate_local import access, activity, demo_objects, load, recording, report, setup, verdict
from tidegate_local import cluster as clusters
from tidegate_local.access import Access
from tidegate_local.demo_objects import CHAT, LOAD_POD, NAMESPACE, PHASES, TIDE, Images
from tidegate_local.recording import PhaseMark, Recording, Sample
from tidegate_local.terminal import View
from tidegate_local.watching import LoadLog, Watcher

CLUSTER_NAME = "demo"
CHART = Path(__file__).parents[3] / "charts" / "tidegate"
RELEASE = "tidegate"
CRD = "llmdeployments.tidegate.dev"
GPUS = 4
IMAGES = ("operator", "modelled", "torch")
LOOK_SECONDS = 2.0
CONDITIONS = ("CapacityAvailable", "ModelReady", "Ready", "Stalled", "BatchingApplied")
"""Those that tell the way to Ready."""
READY_TIMEOUT_SECONDS = 240.0
AFTERMATH_SECONDS = 120.0
"""How long after the load the scale-down may still take."""


class DemoFailed(Exception):
    """The demo cannot go on, or did not show what it promises; the message says what."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    keep: bool
    context: str | None
    report_path: Path
    images: Images
    gpus: int
    prometheus_url: str | None
    chart: Path
    values: tuple[Path, ...]


def main(arguments: Sequence[str]) -> int:
    """The command line after `tidegate-local demo`."""
    return run(options_of(build_parser().parse_args(arguments)))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tidegate-local demo", description="Show Tidegate at work, from an empty machine to a report with plots."
    )
    parser.add_argument("--keep", action="store_true", help="leave everything running and say how to use it")
    parser.add_argument("--context", help="run in this context of your kubeconfig instead of a cluster made here")
    parser.add_argument("--report", type=Path, default=Path("tidegate-demo-report.html"), help="where the report goes")
    images = Images()
    parser.add_argument("--operator-image", default=images.operator)
    parser.add_argument("--engine-image", default=images.engine)
    parser.add_argument("--modelled-image", default=images.modelled)
    parser.add_argument("--gpus-per-replica", type=int, help="GPUs of a modelled replica (0 with --context, else 1)")
    parser.add_argument("--prometheus-url", help="with --context: a Prometheus that scrapes the pods")
    parser.add_argument("--chart", type=Path, default=CHART)
    parser.add_argument("--values", type=Path, action="append", default=[], help="values file for helm; repeatable")
    return parser


def options_of(arguments: argparse.Namespace) -> Options:
    gpus = arguments.gpus_per_replica
    return Options(
        keep=arguments.keep,
        context=arguments.context or None,
        report_path=arguments.report,
        images=Images(arguments.operator_image, arguments.engine_image, arguments.modelled_image),
        gpus=gpus if gpus is not None else 0 if arguments.context else 1,
        prometheus_url=arguments.prometheus_url,
        chart=arguments.chart,
        values=tuple(arguments.values),
    )


def run(options: Options) -> int:
    """Exit code 0 when all was seen, 1 when not, 130 when interrupted."""
    console = Console(highlight=False)
    try:
        with _signals_interrupt(), ExitStack() as stack:
            return Demo(options, console, stack).show()
    except KeyboardInterrupt:
        console.print("Interrupted; everything that the demo started has been taken down.", markup=False)
        return 130
    except (DemoFailed, clusters.CommandFailed, clusters.ClusterFailed, access.MissingTool) as error:
        console.print(f"The demo failed: {error}", markup=False)
        return 1


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """A polite kill takes the same way out as Ctrl-C, so that nothing is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Demo:
    """One run. `stack` takes down in reverse order what was brought up."""

    def __init__(self, options: Options, console: Console, stack: ExitStack) -> None:
        self._options = options
        self._console = console
        self._stack = stack
        self._began = time.monotonic()
        self._facts: list[tuple[str, str]] = []

    def show(self) -> int:
        reached = self._bring_up()
        self._install(reached)
        self._serve_and_ask(reached)
        run_recorded = self._load(reached)
        self._options.report_path.write_text(report.html(run_recorded))
        return self._conclude(reached, run_recorded)

    def say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.0f} s  {text}", markup=False, soft_wrap=True)

    # --- the cluster and the operator ---

    def _bring_up(self) -> Access:
        if self._options.context is not None:
            self.say(f"Using the context {self._options.context} of your kubeconfig.")
            return access.of_context(self._options.context)
        with activity.Progress() as progress:
            setup.everything(progress, IMAGES)
        plan = clusters.Plan(name=CLUSTER_NAME, node=True, gpus=GPUS, prometheus=True, detached=self._options.keep)
        cluster = clusters.bring_up(plan, self.say)
        if not self._options.keep:
            self._stack.callback(self._take_down_cluster, cluster)
        self.say(f"Kubernetes is up: a node with {GPUS} (pretended) GPUs, Prometheus scraping its pods.")
        self._prometheus_url = cluster.prometheus_url_in_cluster
        return access.of_cluster(cluster)

    def _take_down_cluster(self, cluster: clusters.Cluster) -> None:
        self.say("Taking the cluster down.")
        cluster.stop()

    def _install(self, reached: Access) -> None:
        url = self._options.prometheus_url if self._options.context else self._prometheus_url
        known = reached.kubectl("get", "crd", CRD, "--ignore-not-found", "--output=name")
        values = {
            "image": self._options.images.operator,
            "engine.image": self._options.images.engine,
            "prometheus.url": url,
            # A CRD that was there before stays as it is; one that comes with the demo goes with it.
            **({"crds.enabled": "false"} if known else {"crds.keep": "false"}),
        }
        sets = [f"--set={name}={value}" for name, value in values.items() if value is not None]
        files = [f"--values={path}" for path in self._options.values]
        where = [f"--namespace={NAMESPACE}", "--create-namespace"]
        if self._options.context and not self._options.keep:
            self._stack.callback(self._uninstall, reached)
        reached.helm("upgrade", "--install", RELEASE, str(self._options.chart), *where, *sets, *files, "--wait")
        self.say(f"Tidegate is installed in the namespace {NAMESPACE}.")

    def _uninstall(self, reached: Access) -> None:
        self.say(f"Removing what the demo made in the namespace {NAMESPACE}.")
        where = f"--namespace={NAMESPACE}"
        with suppress(clusters.CommandFailed):
            reached.kubectl("delete", "lld", CHAT, TIDE, where, "--ignore-not-found", "--wait=false")
            reached.helm("uninstall", RELEASE, where, "--wait")
        reached.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")

    # --- the real model ---

    def _serve_and_ask(self, reached: Access) -> None:
        self._apply(reached, [demo_objects.chat(self._options.images)])
        self.say(f"Applied the LLMDeployment {CHAT}: SmolLM2-135M-Instruct from {demo_objects.MODEL_URI}.")
        self._wait_until_ready(reached, CHAT)
        with reached.reach(NAMESPACE, CHAT, demo_objects.SERVICE_PORT) as url:
            answer = ask(url, CHAT, demo_objects.QUESTION, self._console)
        self.say("That was the first answer.")
        self._facts += [("Question to SmolLM2-135M-Instruct", demo_objects.QUESTION), ("Its answer", answer)]
        self._facts.append(("First answer after", f"{time.monotonic() - self._began:.0f} s"))

    def _apply(self, reached: Access, manifests: list[demo_objects.Manifest]) -> None:
        reached.kubectl("apply", "--server-side", "--filename=-", input=demo_objects.as_list(manifests))

    def _wait_until_ready(self, reached: Access, name: str) -> None:
        """Show every change of a condition until Ready."""
        watcher = Watcher(reached.api(), NAMESPACE, name)
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        before: dict[str, object] = {}
        while True:
            now = watcher.resource()
            for line in recording.condition_news(before, now, CONDITIONS):
                self.say(f"  {name}: {line}")
            if recording.condition_is_true(now, "Ready"):
                return
            if recording.condition_is_true(now, "Stalled"):
                raise DemoFailed(f"{name} is stalled: {recording.conditions_of(now)['Stalled'].get('message')}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"{name} was not Ready after {READY_TIMEOUT_SECONDS:.0f} s")
            before = now
            time.sleep(0.5)

    # --- the load ---

    def _load(self, reached: Access) -> Recording:
        images, gpus = self._options.images, self._options.gpus
        tide = demo_objects.tide(images, gpus=gpus)
        self._apply(reached, [tide])
        self.say(f"Applied the LLMDeployment {TIDE}: the engine with a modelled GPU ({demo_objects.PROFILE}).")
        self._wait_until_ready(reached, TIDE)
        self._apply(reached, demo_objects.load_objects(images))
        where = f"--namespace={NAMESPACE}"
        reached.kubectl("wait", f"pod/{LOAD_POD}", where, "--for=condition=Ready", "--timeout=60s")
        log = LoadLog(reached.follow("logs", "--follow", where, f"pod/{LOAD_POD}"))
        try:
            follower = Follower(Watcher(reached.api(), NAMESPACE, TIDE), log, View(self._console))
            follower.follow()
        finally:
            log.close()
        return follower.recording(self._facts)

    def _conclude(self, reached: Access, seen: Recording) -> int:
        findings = verdict.findings(seen)
        for change in verdict.live_changes(seen):
            self._console.print(change_text(change), markup=False, soft_wrap=True)
        for finding in findings:
            mark = "seen" if finding.seen else "NOT SEEN"
            self._console.print(f"{mark:>8}  {finding.promise}: {finding.detail}", markup=False, soft_wrap=True)
        self.say(f"The report with its plots: {self._options.report_path.absolute()}")
        if self._options.keep:
            self._console.print(keep_text(reached), markup=False, soft_wrap=True)
        missed = [finding.promise for finding in findings if not finding.seen]
        if missed:
            raise DemoFailed("not seen: " + "; ".join(missed))
        return 0


class Follower:
    """Looks at the object while the load runs, shows and keeps what it sees."""

    def __init__(self, watcher: Watcher, log: LoadLog, view: View) -> None:
        self._watcher = watcher
        self._log = log
        self._view = view
        self._samples: list[Sample] = []
        self._events: list[recording.EventFact] = watcher.new_events()
        self._began = time.time()
        self._phases_told = 0

    def follow(self) -> None:
        """Until the load has ended and the fleet is small again, or too long after it."""
        ended_at: float | None = None
        with self._view.shown():
            while True:
                now = time.time()
                self._look(now)
                if ended_at is None and not self._log.running:
                    ended_at = now
                    if not any(record["kind"] == "end" for record in self._log.records()):
                        raise DemoFailed("the load generator ended early: " + " ".join(self._log.other_lines[-3:]))
                if ended_at is not None and (self._small_again() or now - ended_at > AFTERMATH_SECONDS):
                    return
                time.sleep(max(0.0, LOOK_SECONDS - (time.time() - now)))

    def _look(self, now: float) -> None:
        sample = self._watcher.sample(now)
        self._samples.append(sample)
        phases = self._phases()
        elapsed = now - self._began
        for mark in phases[self._phases_told :]:
            self._view.news(f"Load: {mark.name}, {mark.requests_per_second} requests a second", elapsed_seconds=elapsed)
        self._phases_told = len(phases)
        for event in self._watcher.new_events():
            self._events.append(event)
            self._view.news(f"{event.reason}: {event.message}", elapsed_seconds=elapsed)
        phase = phases[-1].name if phases and self._log.running else "load ended" if phases else "starting"
        self._view.sample(sample, phase=phase, elapsed_seconds=elapsed)

    def _small_again(self) -> bool:
        last = self._samples[-1]
        return last.desired_replicas == last.ready_replicas == 1 and len(last.pods) == 1

    def _phases(self) -> list[PhaseMark]:
        return [
            PhaseMark(str(r["name"]), float(str(r["at"])), float(str(r["requests_per_second"])))
            for r in self._log.records()
            if r["kind"] == "phase"
        ]

    def recording(self, facts: Sequence[tuple[str, str]]) -> Recording:
        records = self._log.records()
        ended = next((float(str(record["at"])) for record in records if record["kind"] == "end"), None)
        return Recording(
            title="Tidegate: one model, one changing load",
            targets=recording.Targets(ttft_seconds=demo_objects.TTFT_MILLISECONDS / 1000),
            samples=self._samples,
            events=self._events,
            phases=self._phases(),
            outcomes=[load.outcome_of(record) for record in records if record["kind"] == "request"],
            ended_at=ended,
            facts=[*facts, ("Modelled engine", demo_objects.PROFILE), ("Load", load_text())],
        )


def ask(url: str, model: str, question: str, console: Console) -> str:
    """Ask through the official client, printing the answer as it streams in."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3)
    console.print(f"\n  {question}\n  ", markup=False, end="")
    parts: list[str] = []
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=80, temperature=0, stream=True
    )
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            parts.append(text)
            console.print(text, markup=False, end="", style="bold")
    console.print("\n")
    answer = "".join(parts).strip()
    if not answer:
        raise DemoFailed(f"{model} answered nothing")
    return answer


def change_text(change: verdict.LiveChange) -> str:
    """A live change of settings with its predicted and measured effect."""

    def both(before: float | None, after: float | None) -> str:
        return " → ".join("unknown" if value is None else f"{value:.2f} s" for value in (before, after))

    old, new = change.felt_before, change.felt_after
    return (
        f"  Settings: {change.before} → {change.after}\n"
        f"    why: {change.pattern} leads the mix; {change.message}\n"
        f"    measured by the clients: TTFT p50 {both(old.ttft_p50_seconds, new.ttft_p50_seconds)}, "
        f"p95 {both(old.ttft_p95_seconds, new.ttft_p95_seconds)}, between tokens p95 "
        f"{both(old.itl_p95_seconds, new.itl_p95_seconds)} (of {old.requests} and {new.requests} requests)\n"
        f"    pods that took it without a restart: {', '.join(pod.name for pod in change.pods_kept) or 'none seen'}"
    )


def load_text() -> str:
    return "; ".join(f"{phase.name}: {phase.requests_per_second}/s for {phase.seconds:.0f} s" for phase in PHASES)


def keep_text(reached: Access) -> str:
    folder = Path(sys.argv[0]).parent
    if reached.context:
        use = f"kubectl config use-context {reached.context}"
        end = f"helm uninstall {RELEASE} --namespace={NAMESPACE}"
    else:
        use = f'eval "$({sys.argv[0]} kubeconfig --name {CLUSTER_NAME})"'
        end = f"{sys.argv[0]} down --name {CLUSTER_NAME}"
    kubectl = f"{reached.kubectl_argv[0]} --namespace={NAMESPACE}"
    return (
        f"Kept. Point this shell at it, and look around:\n  {use}\n"
        f"  {kubectl} get lld\n"
        f"  {kubectl} describe lld {TIDE}\n"
        f"  {kubectl} get lld {TIDE} --output=json | {folder / 'tidegate'} explain\n"
        f"  {kubectl} logs deployment/{RELEASE}\n"
        f"  {kubectl} port-forward service/{CHAT} 8000:{demo_objects.SERVICE_PORT} & curl localhost:8000/v1/models\n"
        f"End it with:\n  {end}"
    )
