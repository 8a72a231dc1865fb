"""The `tidegate` command: what users type. `explain` puts the status of an LLMDeployment into words; `plan`,
`replay` and `simulate` are their own modules'.

`explain` reads an object that kubectl printed; no command talks to a cluster itself, so none needs rights.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tidegate_operator import formula
from tidegate_operator.goals import in_short
from tidegate_operator.objects import UnreadableInput, read_objects, read_text

DESCRIPTION = """\
Tools for people who run language models with Tidegate."""

EXPLAIN = """\
Say in words what the operator saw of an LLMDeployment, what it decided and why: the mix of requests, the formula with
its figures (worked out again, so that you can check the number of replicas), every bound in its order, and what a
change of the batch settings was predicted and measured to do. docs/decisions-of-the-operator.md explains the figures.

Reads the object, or a list of them, as JSON or YAML:

  kubectl get lld my-model -o json | tidegate explain
  kubectl get lld -A -o yaml > all.yaml; tidegate explain -f all.yaml
"""

Fields = Mapping[str, Any]


EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 2 with one sentence on stderr when the input cannot be read, 130 after Ctrl-C."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("tidegate: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who read the output has enough of it; what is buffered must not be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="tidegate", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="say why an LLMDeployment has the replicas and batch settings that it has",
        description=EXPLAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument(
        "-f", "--filename", default="-", metavar="FILE", help="file with the object; - (the default) is standard input"
    )
    # Its flags are its own module's, which is imported only when it is meant.
    commands.add_parser("plan", add_help=False, help="say which GPUs, how many and in which precision a model needs")
    commands.add_parser("replay", add_help=False, help="make recorded decisions again and say which would be others")
    commands.add_parser("simulate", add_help=False, help="serve a trace with an LLMDeployment in virtual time")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "plan":
        from tidegate_operator import plan_command

        return plan_command.main(rest)
    if options.command == "replay":
        from tidegate_operator import replay

        return replay.main(rest)
    if options.command == "simulate":
        from tidegate_sim import command

        return command.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        objects = list(read_objects(read_text(options.filename)))
    except UnreadableInput as error:
        print(f"tidegate explain: {error}", file=sys.stderr)
        return 2
    print("\n\n".join("\n".join(explain_object(item)) for item in objects))
    return 0


def run_operator() -> int:
    """The command `tidegate-operator`, whose libraries the bare package does not bring."""
    try:
        from tidegate_operator.__main__ import main as run
    except ModuleNotFoundError as error:
        print(f"tidegate-operator: {error.name} is missing: pip install 'tidegate[operator]'", file=sys.stderr)
        return 2
    return run()


def explain_object(item: Fields) -> list[str]:
    """Lines about one object."""
    metadata, status = _part(item, "metadata"), _part(item, "status")
    name = f"{metadata.get('namespace', 'default')}/{metadata.get('name', '?')}"
    if not status:
        return [f"{name}: no status yet; the operator has not seen it"]
    return [
        *_headline(name, status),
        *_traffic(status),
        *_objectives(_part(item, "spec"), status),
        *_cost(_part(status, "cost")),
        *_last_decision(_part(status, "autoscaling")),
        *_effect(_part(status, "autoscaling")),
        *_history(_part(status, "autoscaling")),
        *_troubles(status),
    ]


def _headline(name: str, status: Fields) -> Iterable[str]:
    scaling, batching = _part(status, "autoscaling"), _part(status, "batching")
    wanted = scaling.get("wantedReplicas")
    yield (
        f"{name}: {status.get('readyReplicas', 0)} of {scaling.get('desiredReplicas', '?')} replicas ready"
        f"{'' if wanted is None else f', the load asks for {wanted}'} (autoscaling {scaling.get('mode', '?')})"
    )
    desired = _part(batching, "desired")
    if desired:
        limits = f"{desired.get('maxSequences')} sequences, {desired.get('maxBatchedTokens')} tokens a step"
        applied = f"generation {batching.get('generation')}, applied by {batching.get('appliedReplicas', 0)}"
        yield f"  batch settings: {limits}, prompts in chunks of {desired.get('prefillChunkTokens')} ({applied})"
        if batching.get("lastMessage"):
            yield f"    {batching.get('lastReason')} at {batching.get('lastChangeTime')}: {batching['lastMessage']}"


def _traffic(status: Fields) -> Iterable[str]:
    traffic = _part(status, "traffic")
    if traffic.get("arrivalRate") is None:
        return
    yield f"  seen: {traffic['arrivalRate']:g} requests/s over {traffic.get('windowSeconds', '?')} s"
    for item in _list(traffic, "classes"):
        if item.get("sharePercent"):
            lengths = ""
            if item.get("inputTokensMean") is not None:
                lengths = f", {item['inputTokensMean']} tokens in and {item.get('outputTokensMean')} out on average"
            yield f"    {item['sharePercent']:>3} % {item.get('name')}{lengths}"


def _objectives(spec: Fields, status: Fields) -> Iterable[str]:
    goals, seen = _part(spec, "objectives"), _part(status, "objectives")
    asked, kept = goals.get("attainmentPercent", 95), seen.get("attainmentPercent")
    if kept is not None:
        yield f"  within the goals: {kept} % where {asked} % are asked for"
    for label, goal, field in (
        ("TTFT", "ttft", "ttftP95Milliseconds"),
        ("inter-token latency", "interTokenLatency", "itlP95Milliseconds"),
        ("queue time", "queueTime", "queueP95Milliseconds"),
    ):
        target, value = _part(goals, goal).get("milliseconds"), seen.get(field)
        if target is None and value is None:
            continue
        measured = "not measured" if value is None else f"{value} ms"
        verdict = "" if target is None or value is None or asked != 95 else " - met" if value <= target else " - MISSED"
        yield f"  {label} p95: {measured}{'' if target is None else f', goal {target} ms'}{verdict}"


def _cost(cost: Fields) -> Iterable[str]:
    if cost.get("dollarsPerHour") is None:
        return
    tokens = cost.get("dollarsPerMillionOutputTokens")
    million = "" if tokens is None else f", ${tokens:g} a million output tokens"
    whose = "a default price" if cost.get("price") == "Default" else "the installation's price"
    yield f"  cost: ${cost['dollarsPerHour']:g} an hour for {cost.get('gpus')} x {cost.get('gpu')}{million} ({whose})"


def _last_decision(scaling: Fields) -> Iterable[str]:
    decision = _part(scaling, "lastDecision")
    if not decision:
        yield "  no decision yet"
        return
    yield f"  last decision ({decision.get('time')}): {decision.get('action')}, {decision.get('reason')}"
    yield f"    {decision.get('message')}"
    bottleneck = decision.get("bottleneck", "None")
    if bottleneck != "None":
        goal = f", and by the goal for {in_short(decision['binding'])}" if decision.get("binding") else ""
        yield f"    a replica is bound by: {bottleneck}{goal}"
    inputs = {name: value for name, value in _part(decision, "inputs").items() if isinstance(value, int | float)}
    yield from the_sum(inputs)
    if bounded := decision.get("boundedBy"):
        yield f"    then bounded by: {', '.join(bounded)}; decided: {decision.get('replicas')}"
    yield from the_bounds(inputs, decision.get("replicas"))


def the_sum(inputs: formula.Inputs) -> Iterable[str]:
    """The number that the load asks for, worked out again from the figures of the decision."""
    names = ("arrivalsPerSecond", "backlogPerSecond", "capacityPerReplica", "correction", "headroomPercent")
    if all(name in inputs for name in names):
        arrivals, backlog, capacity, correction, headroom = (inputs[name] for name in names)
        foreseen = f", foreseen {inputs['forecastPerSecond']:g}," if "forecastPerSecond" in inputs else ""
        foreseen += f", at least {inputs['floorPerSecond']:g}," if "floorPerSecond" in inputs else ""
        yield (
            f"    needed = (arrivals {arrivals:g}{foreseen} + backlog {backlog:g}) req/s / (capacity {capacity:g} x"
            f" correction {correction:g} x (1 - headroom {headroom:g} %)) = {formula.needed(inputs):.2f} replicas"
            + (f" as capacity rises to {inputs[formula.POOLED]:g} in a pool" if formula.POOLED in inputs else "")
        )
    try:
        needs = formula.needs(inputs)
    except KeyError:
        return  # by an operator of another version
    if needs is not None:
        current = int(inputs["currentReplicas"])
        pods = f"{current} present, {inputs.get('lostReplicas', 0):g} of them lost, {inputs['unseenReplicas']:g} unseen"
        yield f"    wanted {needs.wanted(current)}: {needs.up} if that adds, {needs.down} if that takes away ({pods})"


BOUNDS = {
    "heldReplicas": "nothing was measured, {:g} stay",
    "stabilizationFloor": "at least {:g}, the most wanted within the window of scaling down",
    "stabilizationCeiling": "at most {:g}, the least wanted within the window of scaling up",
    "verifyingSettings": "none fewer while changed batch settings are watched",
    "scaleUpLimit": "at most {:g} by the policies of scaling up",
    "scaleDownLimit": "at least {:g} by the policies of scaling down",
    "placeableReplicas": "at most {:g}, since pods find no node",
    "minReplicas": "at least {:g}",
    "maxReplicas": "at most {:g}",
    "specReplicas": "{:g} as the object says",
}
"""Words for the figures that bounds went by, in the order in which they hold."""


def the_bounds(inputs: formula.Inputs, decided: object) -> Iterable[str]:
    """Every bound that was looked at, and the number that they leave."""
    told = [words.format(inputs[name]) for name, words in BOUNDS.items() if name in inputs]
    try:
        needs = formula.needs(inputs)
        current = int(inputs["currentReplicas"])
        replicas = formula.bounded(inputs, None if needs is None else needs.wanted(current))
    except KeyError:
        return  # by an operator of another version
    verdict = "" if replicas == decided else f", though {decided} was decided: by an operator of another version"
    yield f"    {'; '.join(told) or 'no bound'}: {replicas}{verdict}"


def _effect(scaling: Fields) -> Iterable[str]:
    inputs = _part(_part(scaling, "lastDecision"), "inputs")
    lines = []
    for figure, label in (("ttft_seconds", "TTFT p95"), ("itl_seconds", "inter-token latency p95")):
        predicted = _milliseconds(
            inputs.get(f"effect_predicted_{figure}_before"), inputs.get(f"effect_predicted_{figure}")
        )
        measured = _milliseconds(inputs.get(f"effect_before_{figure}"), inputs.get(f"effect_measured_{figure}"))
        if predicted and measured:
            lines.append(f"    {label}: predicted {predicted}, measured {measured}")
    if lines:
        generation = inputs.get("effect_generation")
        yield (
            f"  effect of batch settings generation {generation:g}:"
            if generation
            else "  effect of the batch settings:"
        )
        yield from lines


def _milliseconds(before: float | None, after: float | None) -> str | None:
    if after is None:
        return None
    old = "unbounded" if before is None else f"{before * 1000:.0f}"
    return f"{old} → {after * 1000:.0f} ms"


def _history(scaling: Fields) -> Iterable[str]:
    decisions = _list(scaling, "decisions")
    if not decisions:
        return
    yield "  changes, newest first:"
    for item in reversed(decisions):
        to = "" if item.get("action") == "Retune" else f" to {item.get('replicas')}"
        yield f"    {item.get('time')} {item.get('action')}{to}, {item.get('reason')}: {item.get('message')}"


def _troubles(status: Fields) -> Iterable[str]:
    bad_when_true = ("Reconciling", "Stalled", "Degraded")
    for item in _list(status, "conditions"):
        if item.get("status") == ("True" if item.get("type") in bad_when_true else "False"):
            yield f"  {item.get('type')}={item.get('status')} ({item.get('reason')}): {item.get('message')}"


def _part(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(fields: Fields, name: str) -> Sequence[Fields]:
    value = fields.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


if __name__ == "__main__":
    raise SystemExit(main())
