"""`tidegate replay`: what this version decides where the one that recorded decided, and in what the two differ.

Reads journals, prints. The facts of each decision are as they were recorded; the memory is this version's own, carried
from decision to decision as an object's status carries it.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tidegate_operator.api import InvalidSpec, Spec, parse_spec
from tidegate_operator.journal import Entry, UnreadableJournal, read
from tidegate_operator.observation import Decision
from tidegate_operator.observing import observe
from tidegate_operator.policy import decide

EXIT_DIFFERENT, EXIT_UNREADABLE = 1, 2
SHOWN = 20
DESCRIPTION = """\
Make recorded decisions again: what would this version have done with what the operator saw? For every decision in which
replicas or batch settings differ, both are shown with their reasons.

The operator records while the chart's journal.enabled is true. Its image has `cat`, so:

  kubectl exec -n tidegate deploy/tidegate -- cat /tmp/decisions.jsonl.gz > decisions.jsonl.gz
  tidegate replay decisions.jsonl.gz

What was seen stays as recorded: the pods do not follow decisions that are different now, so that after the first such
decision each answers what this version would have done in that place. Exit code 0 when all are the same, 1 when
replicas or settings differ somewhere, 2 when a file cannot be read."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision on record, and the one that is made of the same facts now."""

    name: str
    at: float
    recorded: Decision
    now: Decision

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of what differs, the memory left out: in another version it may be written in another way."""
        names = (field.name for field in fields(Decision) if field.name != "memory")
        return tuple(name for name in names if getattr(self.recorded, name) != getattr(self.now, name))

    @property
    def acts_differently(self) -> bool:
        return bool({"replicas", "settings"} & set(self.differences))


@dataclass(slots=True)
class _Life:
    """One object so far."""

    raw: Mapping[str, Any]
    spec: Spec
    left: Mapping[str, object]
    """The memory that the last recorded decision left."""
    memory: Mapping[str, object]
    """What this version has in its place."""


def replay(entries: Iterable[Entry]) -> Iterator[Replayed]:
    """Make each decision again. Raises InvalidSpec for an object that this version does not understand."""
    lives: dict[str, _Life] = {}
    for entry in entries:
        life = lives.get(entry.name)
        if life is None:
            life = lives[entry.name] = _Life(entry.spec, parse_spec(entry.spec), entry.memory, entry.memory)
        if life.raw != entry.spec:
            life.raw, life.spec = entry.spec, parse_spec(entry.spec)
        if life.left != entry.memory:
            # The chain is broken: a decision was void, or lines are missing.
            life.memory = entry.memory
        decision = decide(life.spec, observe(life.spec, entry.facts), life.memory)
        life.left, life.memory = entry.decision.memory, decision.memory
        yield Replayed(entry.name, entry.facts.now, entry.decision, decision)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, 1 where decisions differ, 2 with one sentence on stderr when something cannot be read."""
    parser = argparse.ArgumentParser(
        prog="tidegate replay", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="journals, in order of time")
    parser.add_argument("--object", metavar="NAMESPACE/NAME", help="only this one")
    parser.add_argument("--all", action="store_true", help=f"show all that differ, not only the first {SHOWN}")
    options = parser.parse_args(arguments)
    try:
        entries = (entry for entry in read(options.files) if options.object in (None, entry.name))
        found: dict[str, list[Replayed]] = {}
        for replayed in replay(entries):
            found.setdefault(replayed.name, []).append(replayed)
    except (UnreadableJournal, InvalidSpec) as error:
        print(f"tidegate replay: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    if not found:
        print("tidegate replay: no decision is on record there", file=sys.stderr)
        return EXIT_UNREADABLE
    for name, decisions in found.items():
        print("\n".join(_told(name, decisions, most=None if options.all else SHOWN)))
    return EXIT_DIFFERENT if any(each.acts_differently for made in found.values() for each in made) else 0


def _told(name: str, made: Sequence[Replayed], *, most: int | None) -> Iterator[str]:
    acting = [each for each in made if each.acts_differently]
    others = sum(bool(each.differences) for each in made) - len(acting)
    span = f"{_time(made[0])} to {_time(made[-1])}"
    yield f"{name}: {len(made)} decisions, {span} UTC: {len(made) - others - len(acting)} are the same"
    if others:
        yield f"  {others} differ in figures or reasons, not in what is done"
    if acting:
        yield f"  {len(acting)} would be others:"
    for each in islice(acting, most):
        yield f"    {_time(each)} recorded: {_in_short(each.recorded)}"
        yield f"    {'':{len(_time(each))}} now:      {_in_short(each.now)}"
    if most is not None and len(acting) > most:
        yield f"    and {len(acting) - most} more (--all)"


def _in_short(decision: Decision) -> str:
    settings = decision.settings
    batch = f"{settings.max_num_seqs}/{settings.max_num_batched_tokens}/{settings.long_prefill_token_threshold}"
    return f"{decision.replicas} replicas, batch {batch}; {decision.reason}: {decision.message}"


def _time(replayed: Replayed) -> str:
    return f"{datetime.fromtimestamp(replayed.at, UTC):%Y-%m-%d %H:%M:%S}"
