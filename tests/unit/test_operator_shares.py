"""One object's share of a budget of GPUs, from what everybody claims."""

from dataclasses import replace
from typing import Any

from tidegate_operator.api import parse_spec
from tidegate_operator.memory import Memory, Want, dump_memory
from tidegate_operator.shares import Claim, asked, granted_gpus

NOW = 1_700_000_000.0


def claim(name: str, *, held: int, wanted: int | None, gpus: int = 1, **autoscaling: Any) -> Claim:
    scaling = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 20, **autoscaling}
    spec = {"model": {"uri": "file:///m"}, "autoscaling": scaling, "resources": {"gpu": {"count": gpus}}}
    return Claim(name, parse_spec(spec), held, wanted)


def shares(*claims: Claim, gpus: int) -> list[int]:
    return list(granted_gpus(claims, gpus=gpus, now=NOW).values())


def test_what_was_asked_for_within_the_window_on_the_way_down_is_still_claimed() -> None:
    spec = claim("a", held=3, wanted=2, behavior={"scaleDown": {"stabilizationWindowSeconds": 300}}).spec
    history = (Want(NOW - 400, 5, 5), Want(NOW - 350, 3, 3), Want(NOW - 60, 2, 2))
    memory = dump_memory(Memory(history=history, since=NOW - 400))
    assert asked(spec, 2, memory, now=NOW) == 3, "three were wanted until a minute ago"
    assert asked(spec, 2, memory, now=NOW + 250) == 2
    assert asked(spec, 7, memory, now=NOW) == 7
    assert asked(spec, None, memory, now=NOW) is None
    assert asked(spec, 2, {}, now=NOW) == 2


def test_spare_gpus_are_open_to_all() -> None:
    assert shares(claim("a", held=2, wanted=2), claim("b", held=3, wanted=3), gpus=10) == [7, 8]


def test_where_all_want_more_than_there_is_the_shares_add_up_to_what_there_is() -> None:
    found = shares(claim("a", held=4, wanted=12), claim("b", held=4, wanted=9), gpus=8)
    assert found == [4, 4]
    heavier = shares(claim("a", held=4, wanted=12, importance=100), claim("b", held=4, wanted=9), gpus=9)
    assert heavier == [6, 3]


def test_wants_count_within_the_bounds_of_the_object_and_minima_first() -> None:
    assert shares(claim("a", held=1, wanted=15, maxReplicas=3), claim("b", held=1, wanted=15), gpus=8) == [3, 5]
    assert shares(claim("a", held=1, wanted=1, minReplicas=5), claim("b", held=1, wanted=15), gpus=8) == [5, 3]


def test_a_replica_of_several_gpus_is_counted_with_all_of_them() -> None:
    claims = claim("a", held=1, wanted=2, gpus=4), claim("b", held=2, wanted=6)
    assert shares(*claims, gpus=10) == [4, 6], "four GPUs restore more where each is a replica"
    assert shares(*claims, gpus=14) == [8, 6]


def test_an_object_that_is_not_measured_keeps_what_it_has() -> None:
    assert shares(claim("a", held=5, wanted=None), claim("b", held=1, wanted=9), gpus=8)[1] == 3


def test_what_others_scale_or_what_is_paused_does_not_give_way() -> None:
    paused = claim("a", held=6, wanted=2, paused=True)
    assert shares(paused, claim("b", held=1, wanted=9, importance=100), gpus=8)[1] == 2
    external = replace(
        paused,
        spec=parse_spec({"model": {"uri": "file:///m"}, "replicas": 6, "autoscaling": {"mode": "External"}}),
    )
    assert shares(external, claim("b", held=1, wanted=9), gpus=8)[1] == 2
