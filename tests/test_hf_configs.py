"""Unusual and hostile forms of config.json: read right, or refused by name."""

import numpy as np
import pytest

from kvlib.memory import kv_bytes_per_token, sequence_kv_bytes
from kvlib.models import LayerGroup, ModelShape

PLAIN = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 1024,
}
FULL, WINDOW = "full_attention", "sliding_attention"


def groups_of(config, **options):
    return set(ModelShape.from_hf_config(config, **options).layer_groups)


def test_numpy_integers_do_not_carry_their_width_along():
    narrow = ModelShape(num_layers=np.int8(80), num_kv_heads=np.int8(8), head_dim=np.int16(128))
    assert narrow.layer_groups[0].values_per_token == 163_840  # 80 * 8 * 256
    assert sequence_kv_bytes(narrow, 131_072) == 42_949_672_960
    assert type(sequence_kv_bytes(narrow, 131_072)) is int
    state = ModelShape.from_groups([LayerGroup(80, 8, 128, 128, None, np.int32(2**30))])
    # 80 layers of 1 GiB: in int32 it would have wrapped.
    assert sequence_kv_bytes(state, 0) == 80 * 2**30
    numpy_heads = ModelShape(num_layers=1, num_kv_heads=1, head_dim=1, num_heads=np.int64(4))
    assert "np." not in repr(numpy_heads)


@pytest.mark.parametrize("nothing", [None, {}])
@pytest.mark.parametrize("entry", ["text_config", "linear_attn_config"])
def test_an_empty_nested_entry_is_none_at_all(entry, nothing):
    assert groups_of(PLAIN | {entry: nothing}) == groups_of(PLAIN)


@pytest.mark.parametrize("shared", [12, 13, 20])
def test_some_layer_must_keep_its_own_cache(shared):
    with pytest.raises(ValueError, match=rf"num_kv_shared_layers={shared}; .*12 layers"):
        ModelShape.from_hf_config(PLAIN | {"num_kv_shared_layers": shared})


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window_pattern": 6},
        {"_sliding_window_pattern": 6},
        {"model_type": "gemma3_text"},
        {"use_sliding_window": True, "max_window_layers": 4},
    ],
)
def test_a_named_pattern_without_a_window_is_an_error_too(extra):
    with pytest.raises(ValueError, match=r"config has no sliding_window; "):
        ModelShape.from_hf_config(PLAIN | extra)
    switched_off = PLAIN | extra | {"use_sliding_window": False}
    assert groups_of(switched_off) == groups_of(PLAIN)


@pytest.mark.parametrize("nothing", [{}, {"max_window_layers": None}])
def test_where_windows_begin_is_not_assumed(nothing):
    config = PLAIN | {"sliding_window": 32, "use_sliding_window": True} | nothing
    with pytest.raises(ValueError, match="config has no max_window_layers; "):
        ModelShape.from_hf_config(config)


@pytest.mark.parametrize(
    ("pattern", "error"), [("LLLG", TypeError), (-2, ValueError), (2.0, TypeError)]
)
def test_a_pattern_is_a_count(pattern, error):
    config = PLAIN | {"sliding_window": 32, "sliding_window_pattern": pattern}
    with pytest.raises(error, match=f"sliding_window_pattern={pattern!r}; "):
        ModelShape.from_hf_config(config)


def test_mimo_marks_its_window_layers():
    config = PLAIN | {
        "sliding_window": 32,
        "hybrid_layer_pattern": [0, 1, 1] * 4,
        "swa_num_key_value_heads": 4,
    }
    expected = {LayerGroup(4, 2, 64, 64), LayerGroup(8, 4, 64, 64, 32)}
    assert groups_of(config) == expected
    with pytest.raises(ValueError, match="num_hidden_layers=12"):
        ModelShape.from_hf_config(config | {"hybrid_layer_pattern": [0, 1]})


@pytest.mark.parametrize(("model_type", "num_full"), [("gemma3n_text", 2), ("gemma4_text", 2)])
def test_gemma_families_without_layer_types(model_type, num_full):
    config = PLAIN | {"model_type": model_type, "sliding_window": 32}
    assert LayerGroup(num_full, 2, 64, 64) in groups_of(config)


def test_global_heads_count_without_a_global_width():
    config = PLAIN | {
        "sliding_window": 32,
        "sliding_window_pattern": 6,
        "num_global_key_value_heads": 1,
    }
    assert groups_of(config) == {LayerGroup(2, 1, 64, 64), LayerGroup(10, 2, 64, 64, 32)}


def test_missing_heads_are_named_as_the_config_names_them():
    config = {"num_hidden_layers": 2, "head_dim": 64}
    with pytest.raises(ValueError, match="config has no num_key_value_heads; "):
        ModelShape.from_hf_config(config)


@pytest.mark.parametrize(
    "entry", ["num_hidden_layers", "num_key_value_heads", "head_dim", "num_attention_heads"]
)
def test_zero_is_not_absent(entry):
    with pytest.raises(ValueError, match=f"{entry}=0; it must be at least 1"):
        ModelShape.from_hf_config(PLAIN | {entry: 0})


@pytest.mark.parametrize(
    ("wrong", "error"), [(64.0, TypeError), (True, TypeError), (0, ValueError), (-1, ValueError)]
)
def test_a_passed_head_dim_is_checked_under_its_own_name(wrong, error):
    config = {key: value for key, value in PLAIN.items() if key != "head_dim"}
    with pytest.raises(error, match=f"head_dim={wrong}; "):
        ModelShape.from_hf_config(config, head_dim=wrong)


def test_counted_layers_are_integers():
    with pytest.raises(TypeError, match="full_attention_layers=True; "):
        ModelShape.from_hf_config(PLAIN | {"full_attention_layers": True})


def test_the_longest_array_entry_is_named_as_it_is():
    shape = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)
    with pytest.raises(ValueError, match=rf"num_tokens\.max\(\)={2**50}; "):
        sequence_kv_bytes(shape, np.array([2**50]), block_size=16)
    assert kv_bytes_per_token(shape) == 131_072
