"""Reading an object's spec: defaults, the ways in which they bend, classes on the metrics' edges, clear refusals."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.settings import (
    DEFAULT_PATTERNS,
    DEFAULT_SETTINGS,
    ISL_EDGES,
    OSL_EDGES,
    Envelope,
    Pattern,
    find_violation,
)
from tidegate_operator import api


def read(**fields: Any) -> api.Spec:
    return api.parse_spec({"model": {"uri": "file:///models/m.gguf"}, **fields})


def test_an_object_with_only_a_model_has_every_default() -> None:
    spec = read()
    assert spec.envelope() == Envelope()
    assert spec.initial_settings() == DEFAULT_SETTINGS
    assert spec.patterns() == DEFAULT_PATTERNS
    assert spec.autoscaling.mode is api.ScalingMode.OFF
    assert spec.fixed_replicas() == 1
    assert spec.resources.gpu.count == 1


def test_autoscaling_that_says_no_mode_is_auto() -> None:
    spec = read(autoscaling={"minReplicas": 2, "maxReplicas": 5})
    assert spec.autoscaling.mode is api.ScalingMode.AUTO
    assert spec.replica_bounds() == (2, 5)


def test_the_served_name_is_the_objects_unless_some_are_given() -> None:
    assert read().served_names("chat") == ("chat",)
    assert api.parse_spec({"model": {"uri": "file:///m", "servedNames": ["a", "b"]}}).served_names("x") == ("a", "b")


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    spec = read(engine={"kvOffload": {"hostMemory": "8Gi"}}, newGroup={"x": 1})
    assert spec.engine.kv_block_tokens == 16


def test_a_spec_that_cannot_be_read_names_its_fields() -> None:
    with pytest.raises(api.InvalidSpec) as caught:
        api.parse_spec({"model": {}, "autoscaling": {"mode": "Turbo"}})
    assert "spec.model.uri: Field required" in str(caught.value)
    assert "spec.autoscaling.mode" in str(caught.value)


ends = st.one_of(st.none(), st.integers(1, 20_000))


@given(seqs=st.tuples(ends, ends), tokens=st.tuples(ends, ends), chunk=st.tuples(ends, ends))
@settings(max_examples=200)
def test_whatever_the_crd_lets_through_gives_settings_that_an_engine_takes(
    seqs: tuple[int | None, int | None], tokens: tuple[int | None, int | None], chunk: tuple[int | None, int | None]
) -> None:
    def part(pair: tuple[int | None, int | None]) -> dict[str, int]:
        return {name: value for name, value in zip(("max", "initial"), pair, strict=True) if value is not None}

    top = tokens[0] if tokens[0] is not None else 16384
    if any(pair[0] is not None and pair[0] > top for pair in (seqs, chunk)):
        return  # refused by the CRD
    if any(pair[1] is not None and pair[0] is not None and pair[1] > pair[0] for pair in (seqs, tokens, chunk)):
        return  # refused by the CRD
    batching = {"maxSequences": part(seqs), "maxBatchedTokens": part(tokens), "prefillChunkTokens": part(chunk)}
    spec = read(batching=batching)
    assert find_violation(spec.initial_settings(), spec.envelope()) is None


def test_a_small_maximum_of_tokens_bends_the_defaults_of_the_others() -> None:
    assert read(batching={"maxBatchedTokens": {"max": 128}}).envelope() == Envelope((1, 128), (128, 128), (128, 128))


def classes(**fields: Any) -> tuple[Pattern, ...]:
    return read(trafficClasses=[{"name": "Mine", **fields}]).patterns()


@pytest.mark.parametrize(
    ("given_range", "edges"),
    [
        ({}, (0, None)),
        ({"min": 1000}, (1024, None)),
        ({"min": 20, "max": 300}, (64, 256)),
        ({"min": 7, "max": 300}, (0, 256)),
        ({"min": 1024, "max": 1100}, (1024, 4096)),
        ({"max": 100_000}, (0, None)),
        ({"min": 60_000, "max": 65_536}, (65_536, None)),
    ],
)
def test_a_class_snaps_to_the_edges_and_is_never_empty(
    given_range: dict[str, int], edges: tuple[int, int | None]
) -> None:
    mine, rest = classes(inputTokens=given_range)
    assert (mine.isl_min, mine.isl_max) == edges
    assert rest == Pattern("Other")


@given(low=st.integers(0, 100_000), width=st.one_of(st.none(), st.integers(1, 100_000)))
@settings(max_examples=200)
def test_every_class_consists_of_whole_cells(low: int, width: int | None) -> None:
    tokens = {"min": low} if width is None else {"min": low, "max": low + width}
    mine, _ = classes(inputTokens=tokens, outputTokens=tokens)
    for start, end, edges in ((mine.isl_min, mine.isl_max, ISL_EDGES), (mine.osl_min, mine.osl_max, OSL_EDGES)):
        assert start in edges
        assert end is None or (end in edges and end > start)


def test_scaling_behavior_has_the_defaults_of_a_large_model() -> None:
    behavior = read(autoscaling={"maxReplicas": 3}).autoscaling.behavior
    assert [(p.type, p.value, p.period_seconds) for p in behavior.scale_up.policies] == [
        ("Percent", 100, None),
        ("Pods", 2, None),
    ]
    assert [(p.type, p.value, p.period_seconds) for p in behavior.scale_down.policies] == [
        ("Percent", 50, 60),
        ("Pods", 1, 60),
    ]
    assert behavior.scale_down.stabilization_window_seconds == 300
