"""What users write about precisions, and what it means for each parameter and for memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.precision import (
    KV_DTYPES,
    Precision,
    PrecisionError,
    matrix_bytes,
    parse_precision,
    settled,
    weight_bytes,
)

POLICY = "{attn: bf16, mlp: int8, lm_head: bf16, kv: fp8}"


@pytest.mark.parametrize(
    "text",
    [
        POLICY,
        "attn: bf16, mlp: int8, lm_head: bf16, kv: fp8",
        "attn=bf16,mlp=int8,lm_head=bf16,kv=fp8",
        '{"attn": "bf16", "mlp": "int8", "lm_head": "bf16", "kv": "fp8"}',
        "{ 'attn' : 'bf16' , mlp:int8, lm_head: bfloat16, kv: fp8_e4m3 }",
    ],
)
def test_a_policy_names_kinds_of_layers_in_yaml_json_or_short(text: str) -> None:
    precision = parse_precision(text)
    assert [precision.of(f"layers.1.{name}") for name in ("q", "v", "attention_output")] == ["bfloat16"] * 3
    assert [precision.of(f"layers.1.{name}") for name in ("gate", "up", "down")] == ["int8"] * 3
    assert precision.of("layers.0.experts.3.down") == "int8"
    assert (precision.of("head"), precision.of("embedding")) == ("bfloat16", "float32")
    assert precision.of("embedding", tied_head=True) == "bfloat16"
    assert precision.kv_dtype == "fp8"


@pytest.mark.parametrize("name", ["norm", "layers.0.attention_norm", "layers.0.q_bias", "layers.0.router"])
def test_norms_biases_and_routers_have_no_precision_of_their_own(name: str) -> None:
    assert parse_precision("int4").of(name) is None


def test_a_quantised_name_alone_leaves_embedding_and_head_as_they_are() -> None:
    precision = parse_precision("int4", dtype="bfloat16")
    assert [precision.of(f"layers.0.{name}") for name in ("k", "down")] == ["int4", "int4"]
    assert (precision.of("head"), precision.of("embedding")) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("name", ["stored", "bf16"])
def test_another_name_alone_is_that_of_every_matrix(name: str) -> None:
    precision = parse_precision(name)
    wanted = {"bf16": "bfloat16"}.get(name, name)
    assert {precision.of(each) for each in ("head", "embedding", "layers.0.q", "layers.0.up")} == {wanted}


def test_what_is_named_more_exactly_wins_and_a_layer_of_its_own_over_all() -> None:
    precision = parse_precision("{attn_o: bf16, attn: int8, layers: {0: fp16, '5': fp8}}")
    assert (precision.of("layers.1.q"), precision.of("layers.1.attention_output")) == ("int8", "bfloat16")
    assert (precision.of("layers.0.q"), precision.of("layers.5.gate")) == ("float16", "fp8")
    assert precision.of("layers.1.gate") == "float32"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("int9", "the precision 'int9' is unknown"),
        ("int4-g20", "the precision 'int4-g20' is unknown"),
        ("{attn: fp4}", "the precision 'fp4' is unknown"),
        ("{attention: fp8}", "the kind of layer 'attention' is unknown; known are attn, attn_qkv, attn_o, mlp"),
        ("{attn: fp8, attn: int8}", "attn is given twice"),
        ("{attn: fp8", "closing brace is missing"),
        ("{attn: fp8}}", "goes on after its mapping ends"),
        ("{attn: {mlp: fp8}}", "attn is a mapping; a precision is needed"),
        ("{layers: fp8}", "layers is a mapping of numbers"),
        ("{layers: {first: fp8}}", "'first' is not a layer's number"),
        ("{attn fp8}", "a mapping is written"),
        ("{kv: fp4}", "the KV cache cannot be held in 'fp4'"),
        ("{attn: 'fp8}", "a quotation mark without its pair"),
    ],
)
def test_a_policy_that_cannot_be_followed_says_why(text: str, sentence: str) -> None:
    with pytest.raises(PrecisionError) as caught:
        parse_precision(text)
    assert sentence in str(caught.value)


@given(st.text(alphabet="{}:=,'\" atnmlpf8k", max_size=30))
def test_any_text_is_a_policy_or_refused_in_one_sentence(text: str) -> None:
    try:
        parse_precision(text)
    except PrecisionError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either is right


def test_the_cache_is_in_the_type_of_activations_unless_told_otherwise() -> None:
    assert parse_precision("auto", dtype="half").kv_dtype == "float16"
    assert parse_precision("int8", kv="int8").kv_dtype == "int8"
    assert {parse_precision("auto", kv=name).kv_dtype for name in KV_DTYPES} == {
        "float32", "bfloat16", "float16", "fp8", "int8",
    }  # fmt: skip
    with pytest.raises(PrecisionError, match="given twice"):
        parse_precision("{kv: fp8}", kv="int8")


SHAPES = {"embedding": (100, 64), "norm": (64,), "layers.0.q": (64, 64), "layers.0.gate": (96, 64)}
STORED_BYTES = {"embedding": 6800, "norm": 256, "layers.0.q": 2304, "layers.0.gate": 3456}


def test_what_is_left_open_is_as_stored_where_memory_is_short_and_dense_elsewhere() -> None:
    dense = 2 * 25_600 + 256 + 16_384 + 24_576
    for available, kinds in ((dense * 4, {}), (dense * 4 - 1, {"attn_qkv": "stored"})):
        found = settled(Precision(), SHAPES, STORED_BYTES, tied_head=True, available_bytes=available)
        assert kinds.items() <= (found.kinds or {}).items()
        assert bool(found.kinds) == bool(kinds)
    whole = {name: 4 * STORED_BYTES[name] for name in STORED_BYTES} | {"norm": 256, "embedding": 51_200}
    unquantised = settled(Precision(), SHAPES, whole | {"layers.0.q": 10**6}, tied_head=True, available_bytes=1)
    assert unquantised.kinds == {}
    said = parse_precision("int8")
    assert settled(said, SHAPES, STORED_BYTES, tied_head=True, available_bytes=1) is said


def test_bytes_of_a_policy_are_those_of_its_parts() -> None:
    policy = parse_precision("{attn: int8, mlp: int4, lm_head: stored}")
    expected = 6800 + 256 + (64 * 64 + 64 * 4) + (96 * 64 // 2 + 96 * 4)
    assert weight_bytes(policy, SHAPES, STORED_BYTES, tied_head=True) == expected
    in_fp32 = STORED_BYTES | {"embedding": 25_600}
    assert weight_bytes(policy, SHAPES, in_fp32, tied_head=True) == expected - 6800 + 2 * 25_600
    assert weight_bytes(parse_precision("stored"), SHAPES, in_fp32, tied_head=False) == sum(in_fp32.values())
    assert matrix_bytes("fp8-block128", (130, 256)) == 130 * 256 + 2 * 2 * 4
    assert matrix_bytes("int3-g32", (8, 64)) == 8 * 64 * 3 // 8 + 8 * 2 * 4
