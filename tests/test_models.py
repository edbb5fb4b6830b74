"""Shapes: what the fields must be, every raw config by hand, all presets by hand."""

import copy
import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib._data import read_json
from kvlib.models import (
    Device,
    LayerGroup,
    ModelShape,
    find_model,
    load_devices,
    load_models,
    released_weight_bytes,
)

RAW = read_json("raw_configs.json")
FIELDS = {key: entry["fields"] for key, entry in read_json("model_configs.json").items()}


def groups_of(config, **options):
    """Read a config; the order of the groups means nothing."""
    return set(ModelShape.from_hf_config(config, **options).layer_groups)


# --- ModelShape and LayerGroup ---


def test_a_uniform_shape_is_one_group_with_key_and_value_alike():
    shape = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128, num_heads=32, name="llama")
    assert shape.layer_groups == (LayerGroup(32, 8, 128, 128),)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)
    assert (shape.num_heads, shape.name, shape.is_uniform) == (32, "llama", True)


def test_a_mixed_shape_has_layers_but_no_single_head_count():
    shape = ModelShape.from_groups([LayerGroup(3, 1, 64, 64), LayerGroup(5, 2, 64, 64, window=16)])
    assert shape.num_layers == 8  # 3 + 5
    assert (shape.num_kv_heads, shape.head_dim, shape.is_uniform) == (None, None, False)


@pytest.mark.parametrize(
    "group",
    [
        LayerGroup(2, 1, 576, 0),  # MLA
        LayerGroup(2, 1, 192, 128),
        LayerGroup(2, 1, 64, 64, window=16),
        LayerGroup(2, 1, 64, 64, state_bytes=8),
    ],
)
def test_one_odd_group_is_not_the_textbook_formula(group):
    assert not ModelShape.from_groups([group]).is_uniform
    assert ModelShape.from_groups([group]).head_dim is None


def test_values_per_token_by_hand():
    assert LayerGroup(28, 8, 128, 128).values_per_token == 57_344  # 28 * 8 * (128 + 128)
    assert LayerGroup(61, 1, 576, 0).values_per_token == 35_136  # 61 * 1 * 576
    assert LayerGroup(9, 4, 192, 128).values_per_token == 11_520  # 9 * 4 * 320
    assert LayerGroup(48, 16, 0, 0, state_bytes=7).values_per_token == 0


def test_equal_shapes_are_equal_hashable_and_print_as_code():
    first, second = (
        ModelShape(num_layers=2, num_kv_heads=4, head_dim=8, num_heads=4) for _ in range(2)
    )
    assert first == second
    assert len({first, second}) == 1
    assert first != ModelShape(num_layers=2, num_kv_heads=2, head_dim=8, num_heads=4)
    for shape in (first, find_model("gemma-3-27b")):
        assert eval(repr(shape)) == shape


def test_shapes_cannot_be_changed():
    shape = ModelShape(num_layers=2, num_kv_heads=4, head_dim=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.layer_groups[0].num_layers = 3


def test_a_shape_is_built_by_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        ModelShape(32, 8, 128)


def test_numpy_integers_make_the_same_shape():
    numpy_made = ModelShape(
        num_layers=np.int64(32), num_kv_heads=np.int64(8), head_dim=np.uint8(128)
    )
    assert numpy_made == ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)


# --- raw Hugging Face configs, one form per family ---

# Linear layers of Qwen: 16 key heads of 128, 32 value heads of 128, kernel 4.
# Convolution (2*16*128 + 32*128) * 3 * 2 B = 49,152; state 32*128*128 * 4 B = 2,097,152.
QWEN_LINEAR_STATE = 49_152 + 2_097_152

RAW_GROUPS = {
    "llama-3.1-8b": {LayerGroup(32, 8, 128, 128)},
    "qwen3-0.6b": {LayerGroup(28, 8, 128, 128)},
    "qwen2.5-7b": {LayerGroup(28, 4, 128, 128)},
    # 62 layers, the 6th, 12th, ... 60th are full: 10.
    "gemma-3-27b": {LayerGroup(10, 16, 128, 128), LayerGroup(52, 16, 128, 128, 1024)},
    "gpt-oss-20b": {LayerGroup(12, 8, 64, 64), LayerGroup(12, 8, 64, 64, 128)},
    "deepseek-v3": {LayerGroup(61, 1, 512 + 64, 0)},
    "qwen3-next-80b-a3b": {
        LayerGroup(12, 2, 256, 256),
        LayerGroup(36, 16, 0, 0, None, QWEN_LINEAR_STATE),
    },
    "mistral-7b-v0.1": {LayerGroup(32, 8, 128, 128, 4096)},
    "gpt2": {LayerGroup(12, 12, 64, 64)},
    "falcon-7b": {LayerGroup(32, 1, 64, 64)},  # multi_query without the new decoder: one head
    "phi-2": {LayerGroup(32, 32, 80, 80)},
    "Gemma4TextConfig": {LayerGroup(5, 4, 256, 256), LayerGroup(25, 4, 256, 256, 512)},
    # 35 layers, the last 15 share: of the first 20 the 5th, 10th, 15th and 20th are full.
    "Gemma3nTextConfig": {LayerGroup(4, 2, 256, 256), LayerGroup(16, 2, 256, 256, 512)},
    "Qwen3_5TextConfig": {
        LayerGroup(8, 4, 256, 256),
        LayerGroup(24, 16, 0, 0, None, QWEN_LINEAR_STATE),
    },
    "Cohere2Config": {LayerGroup(10, 64, 128, 128), LayerGroup(30, 64, 128, 128, 4096)},
}
# Not stated in the config: what the model really has, and what hidden / heads would give.
UNSTATED_HEAD_DIM = {"gpt2": 64, "falcon-7b": 64, "phi-2": 80, "qwen2.5-7b": 128}


def test_every_raw_config_is_listed():
    assert RAW_GROUPS.keys() == RAW.keys()


@pytest.mark.parametrize("key", RAW)
def test_raw_config(key):
    before = copy.deepcopy(RAW[key])
    assert groups_of(RAW[key], head_dim=UNSTATED_HEAD_DIM.get(key)) == RAW_GROUPS[key]
    assert RAW[key] == before


@pytest.mark.parametrize("key", UNSTATED_HEAD_DIM)
def test_head_dim_is_never_derived_silently(key):
    guess = UNSTATED_HEAD_DIM[key]
    with pytest.raises(ValueError, match=rf"would give {guess}, .* pass head_dim={guess}\."):
        ModelShape.from_hf_config(RAW[key])


@pytest.mark.parametrize("key", sorted(RAW.keys() - UNSTATED_HEAD_DIM.keys()))
def test_all_other_raw_configs_need_no_help(key):
    assert groups_of(RAW[key]) == RAW_GROUPS[key]


def test_a_stated_head_dim_wins_over_a_passed_one():
    assert groups_of(RAW["qwen3-0.6b"], head_dim=64) == RAW_GROUPS["qwen3-0.6b"]


def test_a_passed_head_dim_means_nothing_to_mla():
    assert groups_of(RAW["deepseek-v3"], head_dim=128) == RAW_GROUPS["deepseek-v3"]


def test_names_and_query_heads_come_along():
    shape = ModelShape.from_hf_config(RAW["gemma-3-27b"])
    assert (shape.name, shape.num_heads, shape.num_layers) == ("gemma3_text", 32, 62)
    assert ModelShape.from_hf_config(RAW["llama-3.1-8b"], name="mine").name == "mine"
    gpt2 = ModelShape.from_hf_config(RAW["gpt2"], head_dim=64)
    assert (gpt2.name, gpt2.num_heads) == ("gpt2", 12)


# --- more raw forms; PLAIN has two KV heads of 64 in 12 layers ---

PLAIN = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 1024,
}
FULL, WINDOW = "full_attention", "sliding_attention"
LINEAR_FIELDS = {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
# (2*4*32 + 8*16) * 3 * 2 B = 2,304; 8*32*16 * 4 B = 16,384.
LINEAR_STATE = 2_304 + 16_384
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
# 3 * 32*128 * 3 * 2 B = 73,728; 32*128*128 * 4 B = 2,097,152.
KIMI_STATE = 73_728 + 2_097_152


def full(num_layers, num_kv_heads=2, k_dim=64, v_dim=64):
    return LayerGroup(num_layers, num_kv_heads, k_dim, v_dim)


def window(num_layers, tokens, num_kv_heads=2, k_dim=64, v_dim=64):
    return LayerGroup(num_layers, num_kv_heads, k_dim, v_dim, tokens)


def linear(num_layers, num_heads=4, state_bytes=LINEAR_STATE):
    return LayerGroup(num_layers, num_heads, 0, 0, None, state_bytes)


FORMS = {
    "no window": ({}, {full(12)}),
    "null window": ({"sliding_window": None}, {full(12)}),
    "text_config": ({"text_config": PLAIN | {"head_dim": 32}}, {full(12, 2, 32, 32)}),
    "no KV heads: MHA": ({"num_key_value_heads": None}, {full(12, 8)}),
    "multi_query": ({"num_key_value_heads": None, "multi_query": True}, {full(12, 1)}),
    "multi_query, new decoder": (
        {
            "num_key_value_heads": None,
            "num_kv_heads": 4,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        {full(12, 4)},
    ),
    "n_head_kv": ({"num_key_value_heads": None, "n_head_kv": 4}, {full(12, 4)}),
    "v_head_dim": ({"head_dim": 192, "v_head_dim": 128}, {full(12, 2, 192, 128)}),
    "MLA": ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {LayerGroup(12, 1, 576, 0)}),
    # windows
    "every layer": ({"sliding_window": 32}, {window(12, 32)}),
    "sliding_window_size": ({"sliding_window_size": 32}, {window(12, 32)}),
    # The 5th and 10th are full.
    "pattern": ({"sliding_window": 32, "sliding_window_pattern": 5}, {full(2), window(10, 32)}),
    "underscore pattern": (
        {"sliding_window": 32, "_sliding_window_pattern": 4},
        {full(3), window(9, 32)},
    ),
    "gemma2 without layer_types": (
        {"model_type": "gemma2", "sliding_window": 32},
        {full(6), window(6, 32)},
    ),
    "gemma3 without layer_types": (
        {"model_type": "gemma3_text", "sliding_window": 32},
        {full(2), window(10, 32)},
    ),
    "cohere2 without layer_types": (
        {"model_type": "cohere2", "sliding_window": 32},
        {full(3), window(9, 32)},
    ),
    "gpt_oss without layer_types": (
        {"model_type": "gpt_oss", "sliding_window": 32},
        {full(6), window(6, 32)},
    ),
    "layer_types win over the pattern": (
        {
            "sliding_window": 32,
            "sliding_window_pattern": 4,
            "layer_types": [FULL] * 11 + [WINDOW],
        },
        {full(11), window(1, 32)},
    ),
    "window switched off": ({"sliding_window": 32, "use_sliding_window": False}, {full(12)}),
    "window switched off, layer_types": (
        {"sliding_window": 32, "use_sliding_window": False, "layer_types": [WINDOW] * 12},
        {full(12)},
    ),
    "max_window_layers": (
        {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 9},
        {full(9), window(3, 32)},
    ),
    "max_window_layers beyond the model": (
        {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 28},
        {full(12)},
    ),
    # linear attention
    "full_attention_interval": (
        LINEAR_FIELDS | {"full_attention_interval": 4},
        {full(3), linear(9)},
    ),
    "linear layer_types": (
        LINEAR_FIELDS | {"layer_types": ["linear_attention"] * 10 + [FULL] * 2},
        {full(2), linear(10)},
    ),
    # Without value heads of their own: (2*4*32 + 4*32) * 3 * 2 + 4*32*32 * 4.
    "equal key and value heads": (
        LINEAR_FIELDS
        | {
            "linear_num_value_heads": None,
            "linear_value_head_dim": None,
            "full_attention_interval": 6,
        },
        {full(2), linear(10, 4, 2_304 + 16_384)},
    ),
    # shared layers
    "shared layers": ({"num_kv_shared_layers": 5}, {full(7)}),
    # The 4th and 8th of the first 9 are full.
    "shared layers of a pattern": (
        {"num_kv_shared_layers": 3, "sliding_window": 32, "sliding_window_pattern": 4},
        {full(2), window(7, 32)},
    ),
    "a kind that is only among the shared layers": (
        {
            "num_kv_shared_layers": 2,
            "sliding_window": 32,
            "layer_types": [FULL] * 10 + [WINDOW] * 2,
        },
        {full(10)},
    ),
    # other widths and heads by kind
    "global_*": (
        {
            "sliding_window": 32,
            "sliding_window_pattern": 6,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
        },
        {full(2, 1, 512, 512), window(10, 32)},
    ),
    "global_head_dim alone": (
        {"sliding_window": 32, "sliding_window_pattern": 6, "global_head_dim": 512},
        {full(2, 2, 512, 512), window(10, 32)},
    ),
    "swa_*": (
        {
            "sliding_window": 32,
            "sliding_window_pattern": 3,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 96,
            "swa_v_head_dim": 48,
        },
        {full(4, 2, 192, 128), window(8, 32, 4, 96, 48)},
    ),
    "swa heads alone": (
        {"sliding_window": 32, "sliding_window_pattern": 3, "swa_num_key_value_heads": 4},
        {full(4), window(8, 32, 4)},
    ),
    # counted layers, as the presets state them
    "counts": (
        {"full_attention_layers": 3, "sliding_attention_layers": 9, "sliding_window": 32},
        {full(3), window(9, 32)},
    ),
    "sparse layers store all": (
        {"full_attention_layers": 3, "sparse_attention_layers": 9},
        {full(12)},
    ),
    "counted linear layers": (
        LINEAR_FIELDS | {"full_attention_layers": 3, "linear_attention_layers": 9},
        {full(3), linear(9)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form):
    extra, expected = FORMS[form]
    assert groups_of(PLAIN | extra) == expected


def test_kimi_linear():
    expected = {LayerGroup(7, 1, 576, 0), linear(20, 32, KIMI_STATE)}
    assert groups_of(KIMI_LINEAR) == expected


@given(
    st.integers(2, 24).flatmap(
        lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(0, n - 1))
    )
)
@settings(deadline=None)
def test_layer_types_are_counted_one_by_one(layers_and_shared):
    is_full, shared = layers_and_shared
    config = PLAIN | {
        "num_hidden_layers": len(is_full),
        "layer_types": [FULL if one else WINDOW for one in is_full],
        "sliding_window": 32,
        "num_kv_shared_layers": shared,
    }
    own = is_full[: len(is_full) - shared]
    expected = {full(sum(own))} if any(own) else set()
    if not all(own):
        expected.add(window(len(own) - sum(own), 32))
    assert groups_of(config) == expected


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": [WINDOW] * 12},
        {"layer_types": [FULL] * 11 + [WINDOW]},
        {"layer_types": [FULL] * 11 + [WINDOW], "sliding_window": None},
        {"layer_types": [WINDOW] * 12, "use_sliding_window": True},
        {"full_attention_layers": 3, "sliding_attention_layers": 9},
    ],
)
def test_window_layers_without_a_window_are_an_error(extra):
    with pytest.raises(ValueError, match=r"config has no sliding_window; .*Add it"):
        ModelShape.from_hf_config(PLAIN | extra)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "head_dim"])
def test_a_missing_entry_is_named(missing):
    config = {key: value for key, value in PLAIN.items() if key != missing}
    with pytest.raises(ValueError, match=f"config has no {missing}; "):
        ModelShape.from_hf_config(config)


def test_missing_head_dim_without_a_guess():
    config = {"num_hidden_layers": 12, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"config has no head_dim; .*Pass head_dim="):
        ModelShape.from_hf_config(config)


@pytest.mark.parametrize(
    "missing", ["linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim"]
)
def test_linear_layers_name_what_they_miss(missing):
    config = PLAIN | LINEAR_FIELDS | {"full_attention_interval": 4, missing: None}
    with pytest.raises(ValueError, match=f"config has no {missing}; "):
        ModelShape.from_hf_config(config)


def test_mla_names_its_missing_rope_part():
    with pytest.raises(ValueError, match="config has no qk_rope_head_dim; "):
        ModelShape.from_hf_config(PLAIN | {"kv_lora_rank": 512})


def test_unknown_layer_types_are_refused():
    with pytest.raises(ValueError, match=r"layer_type='mamba'; .*Use one of full_attention"):
        ModelShape.from_hf_config(PLAIN | {"layer_types": ["mamba"] * 12})
    with pytest.raises(ValueError, match=r"Did you mean 'linear_attention'\?"):
        ModelShape.from_hf_config(PLAIN | {"layer_types": ["linear_atention"] * 12})


def test_as_many_layer_types_as_layers():
    with pytest.raises(ValueError, match=r"11 layer_types; num_hidden_layers=12 .*Complete"):
        ModelShape.from_hf_config(PLAIN | {"layer_types": [FULL] * 11})


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"num_hidden_layers": 12.0}, TypeError, r"num_hidden_layers=12\.0; .*Write 12\."),
        ({"num_hidden_layers": True}, TypeError, "num_hidden_layers=True; "),
        ({"num_hidden_layers": -12}, ValueError, "num_hidden_layers=-12; "),
        ({"num_key_value_heads": "2"}, TypeError, "num_key_value_heads='2'; "),
        ({"head_dim": 64.0}, TypeError, r"head_dim=64\.0; .*Write 64\."),
        ({"sliding_window": 32.5}, TypeError, r"sliding_window=32\.5; "),
        ({"sliding_window": -32}, ValueError, "sliding_window=-32; "),
    ],
)
def test_entries_must_be_counts(extra, error, words):
    with pytest.raises(error, match=words):
        ModelShape.from_hf_config(PLAIN | extra)


@pytest.mark.parametrize("wrong", [None, "config.json", 7, [("num_hidden_layers", 2)]])
def test_a_config_is_a_mapping(wrong):
    with pytest.raises(TypeError, match=r"config=.*; it must be a mapping\. Use json\.load"):
        ModelShape.from_hf_config(wrong)


# --- presets: values per token in full layers, in window layers, the window, state bytes ---

PRESETS = {
    "cohere-command-a-03-2025": (2 * 16 * 8 * 128, 2 * 48 * 8 * 128, 4096, 0),
    "cohere-command-r-v01": (2 * 40 * 64 * 128, 0, None, 0),
    "cohere-command-r7b-12-2024": (2 * 8 * 8 * 128, 2 * 24 * 8 * 128, 4096, 0),
    "deepseek-v2-lite": (27 * 576, 0, None, 0),
    "deepseek-v3": (61 * 576, 0, None, 0),
    "deepseek-v3.2": (61 * 576, 0, None, 0),
    "falcon-7b": (2 * 32 * 1 * 64, 0, None, 0),
    "gemma-3-270m": (2 * 3 * 1 * 256, 2 * 15 * 1 * 256, 512, 0),
    "gemma-3-27b": (2 * 10 * 16 * 128, 2 * 52 * 16 * 128, 1024, 0),
    "gemma-4-26b-a4b": (2 * 5 * 2 * 512, 2 * 25 * 8 * 256, 1024, 0),
    "gemma-4-31b": (2 * 10 * 4 * 512, 2 * 50 * 16 * 256, 1024, 0),
    "gemma-4-e2b": (2 * 3 * 1 * 512, 2 * 12 * 1 * 256, 512, 0),  # 15 of 35 layers store
    "gemma-4-e4b": (2 * 4 * 2 * 512, 2 * 20 * 2 * 256, 512, 0),  # 24 of 42 layers store
    "glm-5": (78 * 576, 0, None, 0),
    "gpt-oss-120b": (2 * 18 * 8 * 64, 2 * 18 * 8 * 64, 128, 0),
    "gpt-oss-20b": (2 * 12 * 8 * 64, 2 * 12 * 8 * 64, 128, 0),
    "gpt2": (2 * 12 * 12 * 64, 0, None, 0),
    "inkling": (2 * 11 * 8 * 128, 2 * 55 * 16 * 128, 512, 0),
    "kimi-k2.5": (61 * 576, 0, None, 0),
    # 69 layers of 96 heads: convolution 3*96*128 * 3 * 2 B, state 96*128*128 * 4 B.
    "kimi-k3": (24 * 576, 0, None, 69 * (3 * 96 * 128 * 3 * 2 + 96 * 128 * 128 * 4)),
    "llama-2-13b": (2 * 40 * 40 * 128, 0, None, 0),
    "llama-2-70b": (2 * 80 * 8 * 128, 0, None, 0),
    "llama-2-7b": (2 * 32 * 32 * 128, 0, None, 0),
    "llama-3.1-405b": (2 * 126 * 8 * 128, 0, None, 0),
    "llama-3.1-70b": (2 * 80 * 8 * 128, 0, None, 0),
    "llama-3.1-8b": (2 * 32 * 8 * 128, 0, None, 0),
    "mimo-v2.5": (9 * 4 * (192 + 128), 39 * 8 * (192 + 128), 128, 0),
    "mimo-v2.5-pro": (10 * 8 * (192 + 128), 60 * 8 * (192 + 128), 128, 0),
    "minimax-m2": (2 * 62 * 8 * 128, 0, None, 0),
    "minimax-m3": (2 * 60 * 4 * 128, 0, None, 0),  # 3 full and 57 sparse layers store all
    "mistral-7b-v0.3": (2 * 32 * 8 * 128, 0, None, 0),
    "mistral-small-24b": (2 * 40 * 8 * 128, 0, None, 0),
    "mixtral-8x7b": (2 * 32 * 8 * 128, 0, None, 0),
    "olmoe-1b-7b": (2 * 16 * 16 * 128, 0, None, 0),
    "opt-125m": (2 * 12 * 12 * 64, 0, None, 0),
    "opt-13b": (2 * 40 * 40 * 128, 0, None, 0),
    "phi-2": (2 * 32 * 32 * 80, 0, None, 0),
    "qwen2.5-32b": (2 * 64 * 8 * 128, 0, None, 0),  # its window is switched off
    "qwen2.5-72b": (2 * 80 * 8 * 128, 0, None, 0),
    "qwen2.5-7b": (2 * 28 * 4 * 128, 0, None, 0),
    "qwen3-0.6b": (2 * 28 * 8 * 128, 0, None, 0),
    "qwen3-235b-a22b": (2 * 94 * 4 * 128, 0, None, 0),
    "qwen3-30b-a3b": (2 * 48 * 4 * 128, 0, None, 0),
    "qwen3-32b": (2 * 64 * 8 * 128, 0, None, 0),
    "qwen3-8b": (2 * 36 * 8 * 128, 0, None, 0),
    # Linear layers: convolution (2*16 + H_v)*128 * 3 * 2 B, state H_v*128*128 * 4 B.
    "qwen3.5-397b-a17b": (2 * 15 * 2 * 256, 0, None, 45 * (96 * 128 * 6 + 64 * 128 * 128 * 4)),
    "qwen3.5-9b": (2 * 8 * 4 * 256, 0, None, 24 * (64 * 128 * 6 + 32 * 128 * 128 * 4)),
    "qwen3.6-35b-a3b": (2 * 10 * 2 * 256, 0, None, 30 * (64 * 128 * 6 + 32 * 128 * 128 * 4)),
    "qwen3.8-27b": (2 * 16 * 4 * 256, 0, None, 48 * (80 * 128 * 6 + 48 * 128 * 128 * 4)),
    "smollm2-135m": (2 * 30 * 3 * 64, 0, None, 0),
    "yi-1.5-34b": (2 * 60 * 8 * 128, 0, None, 0),
}


def test_every_handed_over_preset_loads_and_is_listed():
    assert len(FIELDS) == 51
    assert FIELDS.keys() <= load_models().keys()
    assert PRESETS.keys() == FIELDS.keys()


@pytest.mark.parametrize("key", FIELDS)
def test_preset_by_hand(key):
    shape = load_models()[key]
    windowed = [group for group in shape.layer_groups if group.window]
    endless = [group for group in shape.layer_groups if not group.window]
    found = (
        sum(group.values_per_token for group in endless),
        sum(group.values_per_token for group in windowed),
        windowed[0].window if windowed else None,
        sum(group.num_layers * group.state_bytes for group in endless),
    )
    assert found == PRESETS[key]
    assert shape.name == key
    assert len(windowed) <= 1


@pytest.mark.parametrize("key", FIELDS)
def test_presets_count_each_layer_once(key):
    fields = FIELDS[key]
    stored = fields.get(
        "stored_layers", fields["num_hidden_layers"] - fields.get("num_kv_shared_layers", 0)
    )
    assert load_models()[key].num_layers == stored
    assert load_models()[key].num_heads == fields.get("num_attention_heads")


@pytest.mark.parametrize("key", sorted(RAW.keys() & FIELDS.keys()))
def test_a_preset_says_what_its_raw_config_says(key):
    raw = groups_of(RAW[key], head_dim=UNSTATED_HEAD_DIM.get(key))
    assert raw == set(load_models()[key].layer_groups)


def test_nine_presets_have_a_raw_config():
    # If keys drift apart, the comparison above must not shrink unseen.
    assert len(RAW.keys() & FIELDS.keys()) == 9


def test_find_model():
    assert find_model("gemma-3-27b") == load_models()["gemma-3-27b"]


def test_a_loaded_dict_belongs_to_the_caller():
    load_models().clear()
    load_devices().clear()
    assert len(load_models()) >= 51
    assert len(load_devices()) == 13


# --- devices ---


def test_devices_show_what_programs_see():
    devices = load_devices()
    h100 = devices["H100 80GB"]
    # 79.11 GiB is not a whole number of bytes; the nearest stands for it.
    assert abs(h100.memory_bytes - 79.11 * 2**30) <= 0.5
    assert h100.bandwidth_bytes_per_second == 3_350_000_000_000
    assert devices["A100 40GB"].memory_bytes == 42_412_802_048  # 39.5 * 2**30
    assert all(device.name == name for name, device in devices.items())
    assert all(type(device.memory_bytes) is int for device in devices.values())


@pytest.mark.parametrize("field", ["memory_bytes", "bandwidth_bytes_per_second"])
@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_a_device_has_whole_positive_numbers(field, wrong, error):
    numbers = {"memory_bytes": 2**30, "bandwidth_bytes_per_second": 10**9}
    with pytest.raises(error, match=f"{field}={wrong}; "):
        Device(name="test", **numbers | {field: wrong})


def test_weights_in_another_width():
    # 596,049,920 parameters, released in 16 bits.
    assert released_weight_bytes("qwen3-0.6b", 8) == 596_049_920
    assert released_weight_bytes("qwen3-0.6b", Fraction(17, 4)) == 316_651_520
    with pytest.raises(ValueError, match="weight_bits=0; it must be above 0"):
        released_weight_bytes("qwen3-0.6b", 0)


@pytest.mark.parametrize(
    "entry",
    [
        {"full_attn_idxs": [2, 5, 8]},
        {"attn_layer_indices": [9, 18]},
        {"block_types": ["recurrent", "attention"], "attention_window_size": 2048},
        {"hybrid_layer_ids": [3]},
        {"block_configs": [{}]},
    ],
)
def test_a_mix_of_layers_that_is_not_read_is_refused(entry):
    with pytest.raises(ValueError, match=f"config has {next(iter(entry))}=.*not read"):
        ModelShape.from_hf_config(PLAIN | entry)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_qwen_s_window_is_off_unless_switched_on(model_type):
    config = PLAIN | {"model_type": model_type, "sliding_window": 32}
    assert groups_of(config) == groups_of(PLAIN)
    used = config | {"use_sliding_window": True, "max_window_layers": 4}
    assert groups_of(used) == {full(4), window(8, 32)}
    assert groups_of(PLAIN | {"sliding_window": 32}) == {window(12, 32)}


@pytest.mark.parametrize("bits", [np.int8(4), np.int32(4), np.int64(4), np.float32(4), 4])
def test_weight_bits_of_any_kind_of_number(bits):
    found = released_weight_bytes("llama-3.1-405b", bits)
    assert found == released_weight_bytes("llama-3.1-405b", Fraction(4))
    assert type(found) is int


def test_a_device_keeps_python_integers():
    device = Device(name="x", memory_bytes=np.int32(7), bandwidth_bytes_per_second=np.int64(9))
    assert type(device.memory_bytes) is type(device.bandwidth_bytes_per_second) is int
