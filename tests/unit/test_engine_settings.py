"""Batch settings: what may be applied, which cell and pattern a length belongs to, the file that a pod starts with."""

import json
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest

from tidegate_engine.settings import (
    DEFAULT_PATTERNS,
    ISL_EDGES,
    ITL_BUCKETS_SECONDS,
    OSL_EDGES,
    SETTING_NAMES,
    TTFT_BUCKETS_SECONDS,
    BatchSettings,
    Envelope,
    Pattern,
    SettingsFile,
    find_violation,
    lower_edge,
    parse_settings_file,
    pattern_of,
    settings_file_dict,
)


@pytest.mark.parametrize(
    "settings",
    [
        BatchSettings(1, 512, 256),
        BatchSettings(64, 4096, 1024),
        BatchSettings(256, 16384, 8192),
    ],
)
def test_settings_inside_the_envelope_may_be_applied(settings: BatchSettings) -> None:
    assert find_violation(settings, Envelope()) is None


@pytest.mark.parametrize(
    ("settings", "field", "allowed"),
    [
        (BatchSettings(0, 4096, 1024), "max_num_seqs", (1, 256)),
        (BatchSettings(257, 4096, 1024), "max_num_seqs", (1, 256)),
        (BatchSettings(64, 511, 1024), "max_num_batched_tokens", (512, 16384)),
        (BatchSettings(64, 16385, 1024), "max_num_batched_tokens", (512, 16384)),
        (BatchSettings(64, 4096, 255), "long_prefill_token_threshold", (256, 8192)),
        (BatchSettings(64, 4096, 8193), "long_prefill_token_threshold", (256, 8192)),
        (BatchSettings(-1, -1, -1), "max_num_seqs", (1, 256)),
    ],
)
def test_settings_outside_are_refused_with_what_is_allowed(
    settings: BatchSettings, field: str, allowed: tuple[int, int]
) -> None:
    violation = find_violation(settings, Envelope())
    assert violation is not None
    assert (violation.field, violation.allowed) == (field, allowed)
    assert str(getattr(settings, field)) in violation.reason
    assert str(allowed[0]) in violation.reason and str(allowed[1]) in violation.reason


def test_the_budget_must_hold_a_token_for_each_sequence() -> None:
    envelope = Envelope(max_num_batched_tokens=(64, 16384))
    assert find_violation(BatchSettings(100, 100, 256), envelope) is None
    violation = find_violation(BatchSettings(100, 99, 256), envelope)
    assert violation is not None
    assert (violation.field, violation.allowed) == ("max_num_batched_tokens", (100, 16384))


@pytest.mark.parametrize(
    ("tokens", "isl", "osl"),
    [
        (0, 0, 0),
        (15, 0, 0),
        (16, 0, 16),
        (63, 0, 16),
        (64, 64, 64),
        (1023, 256, 256),
        (1024, 1024, 1024),
        (65535, 16384, 16384),
        (65536, 65536, 16384),
        (10**7, 65536, 16384),
    ],
)
def test_a_length_belongs_to_the_largest_edge_not_above_it(tokens: int, isl: int, osl: int) -> None:
    assert (lower_edge(tokens, ISL_EDGES), lower_edge(tokens, OSL_EDGES)) == (isl, osl)


@pytest.mark.parametrize(
    ("isl", "osl", "name"),
    [
        (1024, 255, "LongInShortOut"),
        (8000, 1, "LongInShortOut"),
        (1024, 256, "LongInLongOut"),
        (1023, 256, "ShortInLongOut"),
        (1023, 255, "ShortInShortOut"),
        (1, 1, "ShortInShortOut"),
    ],
)
def test_lengths_have_one_pattern(isl: int, osl: int, name: str) -> None:
    assert pattern_of(isl, osl) == name
    assert [pattern.name for pattern in DEFAULT_PATTERNS if pattern.holds(isl, osl)] == [name]


def test_what_no_pattern_holds_is_other() -> None:
    assert pattern_of(10, 10, [Pattern("Rag", isl_min=4096)]) == "Other"
    assert pattern_of(4096, 10, [Pattern("Rag", isl_min=4096), Pattern("Any")]) == "Rag"


def test_pattern_edges_are_cell_edges_so_that_counts_are_exact() -> None:
    for pattern in DEFAULT_PATTERNS:
        assert {pattern.isl_min, pattern.isl_max} - {None} <= set(ISL_EDGES)
        assert {pattern.osl_min, pattern.osl_max} - {None} <= set(OSL_EDGES)


@pytest.mark.parametrize("edges", [ISL_EDGES, OSL_EDGES, TTFT_BUCKETS_SECONDS, ITL_BUCKETS_SECONDS])
def test_edges_rise(edges: tuple[float, ...]) -> None:
    assert list(edges) == sorted(set(edges))


def test_time_buckets_span_what_goals_ask_for() -> None:
    assert (TTFT_BUCKETS_SECONDS[0], TTFT_BUCKETS_SECONDS[-1]) == (0.001, 160.0)
    assert {0.5, 1.0, 2.0} <= set(TTFT_BUCKETS_SECONDS)
    assert (ITL_BUCKETS_SECONDS[0], ITL_BUCKETS_SECONDS[-1]) == (0.002, 2.0)
    for buckets in (TTFT_BUCKETS_SECONDS, ITL_BUCKETS_SECONDS):
        assert all(above / below < 1.7 for below, above in pairwise(buckets))


FILE = SettingsFile(7, BatchSettings(64, 4096, 1024), Envelope(), (*DEFAULT_PATTERNS, Pattern("Other")))


def test_the_settings_file_survives_the_wire() -> None:
    assert parse_settings_file(json.loads(json.dumps(settings_file_dict(FILE)))) == FILE


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("generation",), None, "generation is missing"),
        (("generation",), "7", "generation must be a whole number"),
        (("generation",), -1, "generation must be a whole number of 0 or more, not -1"),
        (("settings",), [], "an object with max_num_seqs was expected"),
        (("settings", "max_num_seqs"), None, "max_num_seqs is missing"),
        (("settings", "max_num_seqs"), 64.5, "settings.max_num_seqs must be a whole number"),
        (("settings", "max_num_seqs"), True, "settings.max_num_seqs must be a whole number"),
        (("settings", "max_num_seqs"), 300, "max_num_seqs is 300; allowed are 1 to 256"),
        (("envelope", "max_num_batched_tokens"), None, "max_num_batched_tokens is missing"),
        (("envelope", "max_num_batched_tokens"), [512], "must be a list of two"),
        (("envelope", "max_num_batched_tokens"), "12", "must be a list of two"),
        (("envelope", "max_num_batched_tokens"), [512, None], "must be a whole number"),
        (("envelope", "max_num_batched_tokens"), [600, 512], "600 is above 512"),
        (("patterns",), {"name": "x"}, "patterns must be a list"),
        (("patterns",), ["x"], "an object with name was expected"),
        (("patterns",), [{"name": "", "isl": [0, None], "osl": [0, None]}], "patterns\\[0\\].name"),
        (("patterns",), [{"name": "x", "isl": [5, 5], "osl": [0, None]}], "patterns\\[0\\].isl"),
        (("patterns",), [{"name": "x", "isl": [0, None]}], "osl is missing"),
    ],
)
def test_a_bad_settings_file_is_named(path: tuple[str, ...], value: object, complaint: str) -> None:
    data: dict[str, Any] = deepcopy(settings_file_dict(FILE))
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=f"settings.json: .*{complaint}"):
        parse_settings_file(data)


def test_the_names_are_those_of_the_wire() -> None:
    assert SETTING_NAMES == ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
