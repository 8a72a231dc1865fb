"""A decoder's steps of few rows in one call of compiled code, where it knows everything that the model does.

Owns the description of a `transformer.Decoder` and its caches for native.c, and the buffers between its operations.
`transformer.forward` computes the same, and tests hold this to it; `torch_runner` asks `takes` which of them to call.
"""

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, byref, c_float, c_int32, c_int64, c_void_p, cast

import torch
from torch import Tensor

from tidegate_engine.collectives import ALONE
from tidegate_engine.transformer import Decoder, Layer, Mlp
from tidegate_kernels import native
from tidegate_kernels.native import KINDS, Projection
from tidegate_kernels.reference import Cache, Ragged
from tidegate_kernels.weight import Weight

MAX_ROWS = 64
"""With more rows torch's attention and activations are as fast, call by call."""


class _Layer(Structure):
    _fields_ = (
        *((name, Projection) for name in ("qkv", "output", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in ("attention_norm", "qk_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")
        ),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("heads", "kv_heads", "inner", "window", "rope", "group")),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class _Decoder(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("layer_count", c_int64),
        ("embedding", Projection),
        ("head", Projection),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("hidden", "head_size", "rotated", "block_tokens")),
        *((name, c_float) for name in ("eps", "embedding_scale", "logit_soft_cap")),
        ("kv_kind", c_int32),
        ("is_gelu", c_int32),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "table_width", "logit_rows")),
        *((name, c_void_p) for name in ("tokens", "positions", "owners", "wanted")),
        *((name, POINTER(c_void_p)) for name in ("slots", "tables", "cosines", "sines")),
        *((name, c_void_p) for name in ("residual", "x", "heads", "attended", "inner", "logits")),
    )


class NativeDecoder:
    """A decoder with its caches, as native.c takes them; made by `native_decoder`."""

    def __init__(
        self, decoder: Decoder, caches: Sequence[Cache], described: _Decoder, kept: Sequence[Tensor | object]
    ) -> None:
        config = decoder.config
        self._decoder, self._described, self._kept = decoder, described, (caches, *kept)
        heads = max(layer.heads + 2 * layer.kv_heads for layer in config.layers) * config.head_size
        inner = 2 * max(layer.inner for layer in config.layers)
        self._columns = max(config.hidden, heads, inner // 2)
        self._share = max(layer.heads // layer.kv_heads for layer in config.layers)
        self._buffers = [torch.empty(MAX_ROWS, size) for size in (config.hidden, config.hidden, heads, heads, inner)]

    def takes(self, batch: Ragged) -> bool:
        """Whether a step is one for this, and not for `forward`."""
        rows = len(batch.positions)
        return batch.views is None and rows <= MAX_ROWS and rows * self._columns <= native.FEW_VALUES

    def forward(self, token_ids: Tensor, batch: Ragged, *, logits_rows: Tensor) -> Tensor:
        """What `transformer.forward` does, for a batch that this takes."""
        config = self._decoder.config
        longest = max(batch.counts[1])
        tables = [turns.at(batch.positions, end=longest) for turns in self._decoder.turns]
        owners = torch.repeat_interleave(batch.query_starts.diff().long(), output_size=len(token_ids))
        logits = torch.empty(len(logits_rows), config.vocab_size)
        groups = (batch, *batch.others)
        block_tables = [group.block_tables.contiguous() for group in groups]
        step = _Step(
            len(token_ids),
            block_tables[0].shape[1],
            len(logits_rows),
            token_ids.data_ptr(),
            batch.positions.data_ptr(),
            owners.data_ptr(),
            logits_rows.data_ptr(),
            _pointers([group.slots for group in groups]),
            _pointers(block_tables),
            _pointers([cosines for cosines, _ in tables]),
            _pointers([sines for _, sines in tables]),
            *(buffer.data_ptr() for buffer in (*self._buffers, logits)),
        )
        loaded = native.library()
        assert loaded is not None
        attention = batch.block_tokens * config.head_size + self._share * (longest + 2 * native.STEP)
        threads, _room = loaded.threads(max(attention, native.scratch_floats(self._columns)))
        loaded.code.tidegate_decode(byref(self._described), byref(step), byref(threads))
        return logits


def native_decoder(decoder: Decoder, caches: Sequence[Cache]) -> NativeDecoder | None:
    """None where there is no library for this CPU, or something in the model that it does not know."""
    config = decoder.config
    if native.library() is None or decoder.dtype != torch.float32 or decoder.collectives is not ALONE:
        return None
    kept: list[object] = []

    def projection(weight: Weight, bias: Tensor | None = None) -> Projection:
        found = native.projection_of(weight, bias)
        if found is None:
            raise _Unknown
        kept.append(found[1])
        return found[0]

    def layer(each: Layer, cache: Cache) -> _Layer:
        if not isinstance(each.mlp, Mlp):
            raise _Unknown
        return _Layer(
            projection(each.qkv, each.qkv_bias),
            projection(each.attention_output, each.attention_output_bias),
            projection(each.mlp.gate_up, each.mlp.gate_up_bias),
            projection(each.mlp.down, each.mlp.down_bias),
            *(
                _pointer(vector)
                for vector in (
                    each.attention_norm, each.qk_norm, each.post_attention_norm, each.mlp_norm, each.post_mlp_norm,
                    cache.keys, cache.values, cache.key_scales, cache.value_scales,
                )
            ),
            each.config.heads,
            each.config.kv_heads,
            each.config.inner,
            each.rule.window or 0,
            -1 if each.config.rope is None else each.config.rope,
            cache.group,
            each.rule.scale,
            each.rule.soft_cap or 0,
        )  # fmt: skip

    try:
        layers = (_Layer * len(decoder.layers))(*map(layer, decoder.layers, caches))
        described = _Decoder(
            cast(layers, POINTER(_Layer)),
            len(layers),
            projection(decoder.embedding),
            projection(decoder.head),
            decoder.norm.data_ptr(),
            config.hidden,
            config.head_size,
            config.rotated or config.head_size,
            caches[0].keys.shape[2],
            config.norm_eps,
            decoder.embedding_scale or 0,
            config.logit_soft_cap or 0,
            KINDS[caches[0].keys.dtype],
            config.activation == "gelu_tanh",
        )
    except _Unknown:
        return None
    return NativeDecoder(decoder, caches, described, (layers, kept))


class _Unknown(Exception):
    """A part of the model that native.c does not know."""


def _pointers(tensors: Sequence[Tensor]) -> Array[c_void_p]:
    return (c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise _Unknown
    return tensor.data_ptr()
