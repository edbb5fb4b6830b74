"""Bytes of the cache: by hand, against a slow oracle, and the laws they obey."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib.memory import (
    DTYPES,
    bits_per_value,
    kv_budget_bytes,
    kv_bytes_per_token,
    kv_heads_per_rank,
    marginal_kv_bytes,
    max_cached_tokens,
    max_concurrency,
    max_sequences,
    scale_kv_bytes,
    sequence_kv_bytes,
)
from kvlib.models import LayerGroup, ModelShape, load_models
from kvlib.units import GiB, MiB

MODELS = load_models()
LLAMA_8B = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)
laws = settings(deadline=None, max_examples=80)

# llama.cpp: bytes of a block of 32 values. The others: bits of one value.
BLOCK_BITS = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "int2": 2,
    "q8_0": Fraction(34 * 8, 32),
    "q5_1": Fraction(24 * 8, 32),
    "q5_0": Fraction(22 * 8, 32),
    "q4_1": Fraction(20 * 8, 32),
    "q4_0": Fraction(18 * 8, 32),
    "iq4_nl": Fraction(18 * 8, 32),
}


def one_group(*fields, **more):
    return ModelShape.from_groups([LayerGroup(*fields, **more)])


# --- by hand ---


def test_qwen3_0_6b():
    assert kv_bytes_per_token(MODELS["qwen3-0.6b"]) == 114_688  # 2 * 28 * 8 * 128 * 2


def test_deepseek_v3_stores_one_latent_without_the_factor_two():
    assert kv_bytes_per_token(MODELS["deepseek-v3"]) == 70_272  # 61 * (512 + 64) * 2


def test_opt_13b_of_the_paged_attention_paper():
    assert kv_bytes_per_token(MODELS["opt-13b"]) == 819_200  # 2 * 40 * 40 * 128 * 2 = 800 KiB


def test_gemma_3_27b_at_its_full_context():
    gemma = MODELS["gemma-3-27b"]
    # Per token and layer 16 * (128 + 128) * 2 B = 8,192 B; 62 layers while windows fill.
    assert kv_bytes_per_token(gemma) == 507_904  # 62 * 8,192
    # 10 full layers: 10 * 8,192 * 131,072 = 10,737,418,240
    # 52 window layers: 52 * 8,192 * 1,024 = 436,207,616
    assert sequence_kv_bytes(gemma, 131_072) == 11_173_625_856
    assert marginal_kv_bytes(gemma, 1023) == 507_904
    assert marginal_kv_bytes(gemma, 1024) == 81_920  # 10 * 8,192
    assert sequence_kv_bytes(gemma, 0) == 0


def test_a_window_layer_holds_three_blocks_of_113_tokens():
    # ceil(113/16) = 8 blocks; 113 - 32 = 81 tokens left the window, floor(81/16) = 5 blocks gone.
    layer = one_group(1, 1, 1, 1, window=32)
    block_bytes = 16 * 1 * 2 * 2
    assert sequence_kv_bytes(layer, 113, "bf16", block_size=16) == 3 * block_bytes
    # 112 is a whole number of blocks: 7 - floor(80/16) = 2; 120: 8 - floor(88/16) = 3.
    assert sequence_kv_bytes(layer, 112, "bf16", block_size=16) == 2 * block_bytes
    assert sequence_kv_bytes(layer, 120, "bf16", block_size=16) == 3 * block_bytes
    # 32 tokens fill the window, none left it: 2; one more opens a block: 3 - 0.
    assert sequence_kv_bytes(layer, 32, "bf16", block_size=16) == 2 * block_bytes
    assert sequence_kv_bytes(layer, 33, "bf16", block_size=16) == 3 * block_bytes
    # 48: 3 - floor(16/16) = 2: the block is given back.
    assert marginal_kv_bytes(layer, 47, "bf16", block_size=16) == -block_bytes


def test_a_full_layer_holds_whole_blocks():
    # ceil(113/16) = 8 blocks of 16 * 131,072 B.
    assert sequence_kv_bytes(LLAMA_8B, 113, block_size=16) == 8 * 16 * 131_072
    assert sequence_kv_bytes(LLAMA_8B, 112, block_size=16) == 7 * 16 * 131_072
    assert sequence_kv_bytes(LLAMA_8B, 1, block_size=16) == 16 * 131_072
    assert sequence_kv_bytes(LLAMA_8B, 0, block_size=16) == 0


def test_qwen3_8_27b_keeps_147_mib_of_state():
    qwen = MODELS["qwen3.8-27b"]
    # Convolution: (2*16*128 + 48*128) * 3 * 2 B = 61,440. Recurrent: 48*128*128 * 4 B = 3,145,728.
    state = 48 * (61_440 + 3_145_728)
    assert state == 153_944_064
    assert round(state / MiB) == 147
    assert sequence_kv_bytes(qwen, 0) == state
    assert kv_bytes_per_token(qwen) == 65_536  # only the 16 full layers: 2 * 16 * 4 * 256 * 2
    assert sequence_kv_bytes(qwen, 1000) == 65_536_000 + state
    assert marginal_kv_bytes(qwen, 1000) == 65_536


def test_the_state_does_not_depend_on_the_cache_dtype():
    qwen = MODELS["qwen3.8-27b"]
    assert sequence_kv_bytes(qwen, 0, "fp8") == sequence_kv_bytes(qwen, 0, "q4_0") == 153_944_064


def test_gemma_3_27b_in_20_gib_251_by_quotient_41_true():
    gemma, budget = MODELS["gemma-3-27b"], 20 * GiB
    # (21,474,836,480 - 436,207,616) // 81,920 = 256,819 tokens, 16,051 blocks of 16 = 256,816.
    assert max_cached_tokens(budget, gemma) == 256_816
    assert max_cached_tokens(budget, gemma, block_size=1) == 256_819
    assert round(max_concurrency(256_816, 1024)) == 251  # 250.8
    # A sequence of 1,024 tokens fills every window: 1,024 * 507,904 = 520,093,696 B; 41.3 fit.
    assert max_sequences(budget, gemma, 1024) == 41


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        # Llama-3.1-8B stores 2 * 32 * 8 * 128 = 65,536 values per token.
        ("fp32", 262_144),
        ("fp16", 131_072),
        ("bf16", 131_072),
        ("fp8", 65_536),
        ("int8", 65_536),
        ("int4", 32_768),
        ("int2", 16_384),
        ("q8_0", 69_632),  # 65,536 / 32 * 34 B
        ("q5_1", 49_152),  # 65,536 / 32 * 24 B
        ("q5_0", 45_056),  # 65,536 / 32 * 22 B
        ("q4_1", 40_960),  # 65,536 / 32 * 20 B
        ("q4_0", 36_864),  # 65,536 / 32 * 18 B
        ("iq4_nl", 36_864),
        ("int8/g64", 67_584),  # 65,536 / 64 * (64 + 2) B
        ("int8/g64z", 69_632),  # 65,536 / 64 * (64 + 4) B
        ("int4/g32", 36_864),  # 65,536 / 32 * (16 + 2) B
        ("int4/g32z", 40_960),  # 65,536 / 32 * (16 + 4) B
        ("int2/g32z", 24_576),  # 65,536 / 32 * (8 + 4) B
        ("int4/g1024", 32_896),  # 65,536 / 1,024 * (512 + 2) B: a group of all heads of a layer
        (("bf16", "bf16"), 131_072),
        (("q8_0", "q4_0"), 53_248),  # 34,816 + 18,432
        (("bf16", "int8"), 98_304),  # 65,536 + 32,768
        (("int8", "bf16"), 98_304),
    ],
)
def test_bytes_of_a_token_by_dtype(dtype, expected):
    assert kv_bytes_per_token(LLAMA_8B, dtype) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("fp32", 32),
        ("fp8", 8),
        ("int2", 2),
        ("q8_0", Fraction(17, 2)),
        ("q5_1", 6),
        ("q5_0", Fraction(11, 2)),
        ("q4_1", 5),
        ("q4_0", Fraction(9, 2)),
        ("int8/g64", Fraction(33, 4)),  # 8 + 16/64
        ("int8/g64z", Fraction(17, 2)),  # 8 + 32/64
        ("int2/g16z", 4),  # 2 + 32/16
        (("fp16", "q8_0"), Fraction(49, 4)),  # (16 + 8.5) / 2
        (("q8_0", "q5_1"), Fraction(29, 4)),  # (8.5 + 6) / 2
    ],
)
def test_bits_per_value_counts_the_scales(dtype, expected):
    assert bits_per_value(dtype) == expected


def test_all_named_dtypes_are_counted():
    assert set(DTYPES) == set(BLOCK_BITS)
    for dtype, bits in BLOCK_BITS.items():
        assert bits_per_value(dtype) == bits


def test_unequal_widths_weigh_the_pair():
    mimo = MODELS["mimo-v2.5"]
    # Full: 9 layers of 4 heads, 192 + 128 wide; window: 39 layers of 8 heads, as wide.
    assert kv_bytes_per_token(mimo) == 222_720  # (9*4 + 39*8) * 320 * 2
    assert kv_bytes_per_token(mimo, ("fp8", "bf16")) == 155_904  # 348 * (192*1 + 128*2)
    assert kv_bytes_per_token(mimo, ("bf16", "fp8")) == 178_176  # 348 * (192*2 + 128*1)


def test_the_value_dtype_of_mla_counts_for_nothing():
    assert kv_bytes_per_token(MODELS["deepseek-v3"], ("bf16", "int2")) == 70_272


def test_bits_are_divided_by_eight_once_and_last():
    # 3 values of 4 bits in two layers: 2 * (3 + 3) * 4 / 8 = 6 B.
    assert kv_bytes_per_token(one_group(2, 1, 3, 3), "int4") == 6
    # One value of 4 bits per layer is no byte, but two layers make one, and two tokens make one.
    assert kv_bytes_per_token(one_group(2, 1, 1, 0), "int4") == 1
    assert sequence_kv_bytes(one_group(1, 1, 1, 0), 2, "int4") == 1
    assert sequence_kv_bytes(one_group(1, 1, 1, 0), 3, "int4", block_size=4) == 2


@pytest.mark.parametrize(
    ("num_kv_heads", "tensor_parallel", "expected"),
    [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 8, 1), (6, 3, 2), (6, 12, 1), (71, 71, 1)],
)
def test_heads_are_sharded_then_replicated(num_kv_heads, tensor_parallel, expected):
    assert kv_heads_per_rank(num_kv_heads, tensor_parallel) == expected


def test_sharding_turns_into_replication():
    per_rank = [kv_bytes_per_token(LLAMA_8B, tensor_parallel=n) for n in (1, 2, 4, 8, 16, 32)]
    # 131,072 halves until each rank has one head: 131,072 / 8 = 16,384.
    assert per_rank == [131_072, 65_536, 32_768, 16_384, 16_384, 16_384]


def test_mla_is_replicated_on_every_rank():
    deepseek = MODELS["deepseek-v3"]
    assert {kv_bytes_per_token(deepseek, tensor_parallel=n) for n in (1, 2, 8, 16)} == {70_272}


def test_the_state_is_split_like_heads():
    qwen = MODELS["qwen3.8-27b"]  # 4 KV heads; 16 key heads of the linear layers
    assert sequence_kv_bytes(qwen, 0, tensor_parallel=4) == 153_944_064 // 4
    assert sequence_kv_bytes(qwen, 0, tensor_parallel=16) == 153_944_064 // 16
    assert sequence_kv_bytes(qwen, 0, tensor_parallel=32) == 153_944_064 // 16
    # At 16 ranks the full layers are replicated: one of 4 heads each.
    per_token = 65_536 // 4
    assert sequence_kv_bytes(qwen, 10, tensor_parallel=16) == 10 * per_token + 153_944_064 // 16


def test_groups_of_a_model_are_split_each_by_its_own_heads():
    mimo = MODELS["mimo-v2.5"]
    # 8 ranks: 4 KV heads are replicated (1 each), 8 window heads are shared (1 each).
    assert kv_bytes_per_token(mimo, tensor_parallel=8) == 30_720  # (9 + 39) * 320 * 2


def test_budget_by_hand():
    assert kv_budget_bytes(100, 40, 7, 5, 3) == 45
    assert kv_budget_bytes(100, 40, 7, 5, 3, memory_fraction=0.9) == 35
    assert kv_budget_bytes(101, 40, memory_fraction=0.9) == 50  # floor(90.9) - 40
    assert kv_budget_bytes(80 * GiB, 15 * GiB, GiB, GiB, GiB, 0.9) == 54 * GiB


def test_the_fraction_is_the_decimal_that_was_written():
    # In binary 100 * 0.29 is 28.999999999999996, which would lose a byte.
    assert kv_budget_bytes(100, 0, memory_fraction=0.29) == 29
    assert kv_budget_bytes(100, 0, memory_fraction=np.float32(0.29)) == 29
    assert kv_budget_bytes(100, 0, memory_fraction=Fraction(29, 100)) == 29
    assert kv_budget_bytes(100, 0, memory_fraction=1) == 100


def test_cached_tokens_by_hand():
    block_bytes = 16 * 131_072
    assert max_cached_tokens(4 * GiB, LLAMA_8B) == 32_768  # 2**32 / 2**17
    assert max_cached_tokens(block_bytes, LLAMA_8B) == 16
    assert max_cached_tokens(2 * block_bytes - 1, LLAMA_8B) == 16
    assert max_cached_tokens(2 * block_bytes, LLAMA_8B) == 32
    assert max_cached_tokens(block_bytes, LLAMA_8B, "fp8") == 32
    assert max_cached_tokens(block_bytes, LLAMA_8B, tensor_parallel=8) == 128
    assert max_cached_tokens(block_bytes, LLAMA_8B, block_size=1) == 16


def test_cached_tokens_pay_the_state_first():
    qwen = MODELS["qwen3.8-27b"]
    assert max_cached_tokens(153_944_064 + 65_536 * 16 * 3, qwen) == 48
    assert max_cached_tokens(153_944_064 + 65_536 * 16 * 3 - 1, qwen) == 32


def test_sequences_by_hand():
    assert max_sequences(4 * GiB, LLAMA_8B, 1024) == 32  # 32,768 tokens / 1,024
    assert max_sequences(4 * GiB, LLAMA_8B, 1025) == 31
    assert max_sequences(4 * GiB, LLAMA_8B, 1024, block_size=1000) == 16  # 2,000 slots each
    assert max_sequences(4 * GiB, LLAMA_8B, 1024, "fp8", tensor_parallel=2) == 128
    assert max_sequences(0, LLAMA_8B, 1024) == 0


def test_concurrency_is_a_plain_quotient():
    assert max_concurrency(31_232, 20_000) == 1.5616
    assert max_concurrency(0, 7) == 0.0


def test_long_arrays_of_a_70b_model_do_not_wrap():
    llama = MODELS["llama-3.1-70b"]
    lengths = np.array([131_072], np.int32)
    # 2 * 80 * 8 * 128 * 2 * 131,072 = 42,949,672,960 = 10 * 2**32: zero in int32.
    num_bytes = sequence_kv_bytes(llama, lengths)
    assert num_bytes.dtype == np.int64
    assert num_bytes.tolist() == [42_949_672_960]


# --- a slow oracle: it walks over every layer and every token and keeps what a layer keeps ---

ORACLE_BITS = BLOCK_BITS | {
    "int8/g8": 8 + Fraction(16, 8),
    "int4/g4z": 4 + Fraction(32, 4),
    "int2/g8z": 2 + Fraction(32, 8),
}


def stored_tokens(num_tokens, window, block_size):
    """Walk over all tokens, or all blocks, and keep what a layer keeps."""
    first_needed = 0 if window is None else max(0, num_tokens - window)
    if block_size is None:
        return sum(1 for token in range(num_tokens) if token >= first_needed)
    slots = 0
    for first in range(0, num_tokens, block_size):
        last = first + block_size - 1
        if last >= first_needed:
            slots += block_size
    return slots


def heads_on_rank_zero(num_kv_heads, tensor_parallel):
    """Deal the heads out in order; with more ranks than heads several ranks hold the same one."""
    owners = [
        {head * tensor_parallel // num_kv_heads}
        | {
            rank
            for rank in range(tensor_parallel)
            if rank * num_kv_heads // tensor_parallel == head
        }
        for head in range(num_kv_heads)
    ]
    return sum(1 for ranks in owners if 0 in ranks)


def oracle_bytes(shape, num_tokens, dtype, tensor_parallel, block_size):
    k_dtype, v_dtype = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    total = Fraction(0)
    for group in shape.layer_groups:
        heads = heads_on_rank_zero(group.num_kv_heads, tensor_parallel)
        bits_of_head = group.k_dim * ORACLE_BITS[k_dtype] + group.v_dim * ORACLE_BITS[v_dtype]
        for _layer in range(group.num_layers):
            for _token in range(stored_tokens(num_tokens, group.window, block_size)):
                total += Fraction(heads * bits_of_head, 8)
            total += Fraction(group.state_bytes * heads, group.num_kv_heads)
    return total


layer_groups = st.builds(
    LayerGroup,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    k_dim=st.sampled_from([32, 64, 96]),
    v_dim=st.sampled_from([0, 32, 64]),
    window=st.none() | st.integers(1, 60),
    state_bytes=st.sampled_from([0, 0, 8, 4096]),
)
linear_groups = st.builds(
    LayerGroup,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    k_dim=st.just(0),
    v_dim=st.just(0),
    state_bytes=st.sampled_from([8, 4096]),
)
shapes = st.lists(layer_groups | linear_groups, min_size=1, max_size=3).map(ModelShape.from_groups)
full_group = LayerGroup(3, 2, 64, 32)
growing_shapes = st.lists(layer_groups | linear_groups, max_size=2).map(
    lambda others: ModelShape.from_groups([*others, full_group])
)
uniform_shapes = st.builds(
    ModelShape,
    num_layers=st.integers(1, 130),
    num_kv_heads=st.sampled_from([1, 2, 4, 8, 16, 128]),
    head_dim=st.sampled_from([32, 64, 96, 128, 192, 256, 512]),
)
one_dtype = st.sampled_from(sorted(ORACLE_BITS))
dtypes = one_dtype | st.tuples(one_dtype, one_dtype)
ranks = st.sampled_from([1, 2, 4, 8, 16])
blocks = st.none() | st.integers(1, 40)


@given(shapes, st.integers(0, 150), dtypes, ranks, blocks)
@laws
def test_sequence_equals_the_oracle(shape, num_tokens, dtype, tensor_parallel, block_size):
    expected = oracle_bytes(shape, num_tokens, dtype, tensor_parallel, block_size)
    found = sequence_kv_bytes(shape, num_tokens, dtype, tensor_parallel, block_size)
    assert found == expected
    assert type(found) is int


@given(shapes, dtypes, ranks)
@laws
def test_a_first_token_without_its_state_is_the_cost_of_a_token(shape, dtype, tensor_parallel):
    first = oracle_bytes(shape, 1, dtype, tensor_parallel, None)
    state = oracle_bytes(shape, 0, dtype, tensor_parallel, None)
    assert kv_bytes_per_token(shape, dtype, tensor_parallel) == first - state


# --- laws ---


@given(uniform_shapes, st.integers(0, 10**7), dtypes, st.integers(2, 9))
@laws
def test_n_times_the_tokens_are_n_times_the_bytes_of_a_uniform_model(shape, tokens, dtype, factor):
    once = sequence_kv_bytes(shape, tokens, dtype)
    assert sequence_kv_bytes(shape, factor * tokens, dtype) == factor * once
    assert once == tokens * kv_bytes_per_token(shape, dtype)


@given(shapes, st.integers(0, 10**6), st.integers(1, 10**6), dtypes, ranks)
@laws
def test_more_tokens_never_take_less(shape, tokens, more, dtype, tp):
    shorter, longer = (sequence_kv_bytes(shape, n, dtype, tp) for n in (tokens, tokens + more))
    assert shorter <= longer


@given(shapes, st.integers(0, 10**6), dtypes, ranks, st.integers(1, 512))
@laws
def test_blocks_only_add_and_never_a_block_too_many(shape, tokens, dtype, tp, block_size):
    exact = sequence_kv_bytes(shape, tokens, dtype, tp)
    blocked = sequence_kv_bytes(shape, tokens, dtype, tp, block_size)
    # At most one part-filled block at the end and one part-left block at the start.
    most = 2 * (block_size - 1) * kv_bytes_per_token(shape, dtype, tp)
    assert exact <= blocked <= exact + most


@given(shapes, st.integers(0, 10**9), dtypes, ranks)
@laws
def test_blocks_of_one_token_are_no_blocks(shape, tokens, dtype, tp):
    blocked = sequence_kv_bytes(shape, tokens, dtype, tp, block_size=1)
    assert blocked == sequence_kv_bytes(shape, tokens, dtype, tp)


@given(shapes, st.integers(0, 10**6), dtypes, blocks)
@laws
def test_one_gpu_holds_the_sum_over_the_ranks_while_heads_are_shared(
    shape, tokens, dtype, block_size
):
    alone = sequence_kv_bytes(shape, tokens, dtype, 1, block_size)
    fewest_heads = min(group.num_kv_heads for group in shape.layer_groups)
    for tp in (1, 2, 4, 8):
        if tp <= fewest_heads:
            assert tp * sequence_kv_bytes(shape, tokens, dtype, tp, block_size) == alone


@given(
    shapes,
    st.lists(st.integers(0, 10**6), max_size=6),
    dtypes,
    ranks,
    blocks,
    st.sampled_from([np.int64, np.int32, np.uint32]),
)
@laws
def test_arrays_are_scalars_element_by_element(shape, lengths, dtype, tp, block_size, kind):
    array = np.array(lengths, kind).reshape(-1, 1)
    before = array.copy()
    for function in (sequence_kv_bytes, marginal_kv_bytes):
        found = function(shape, array, dtype, tp, block_size)
        assert found.dtype == np.int64
        assert found.shape == array.shape
        expected = [function(shape, n, dtype, tp, block_size) for n in lengths]
        assert found.ravel().tolist() == expected
    assert np.array_equal(array, before)


@given(shapes, st.integers(0, 120), dtypes, ranks, blocks)
@laws
def test_the_marginal_bytes_sum_to_the_sequence(shape, num_tokens, dtype, tp, block_size):
    steps = marginal_kv_bytes(shape, np.arange(num_tokens), dtype, tp, block_size)
    state = sequence_kv_bytes(shape, 0, dtype, tp, block_size)
    whole = sequence_kv_bytes(shape, num_tokens, dtype, tp, block_size)
    assert state + int(steps.sum()) == whole


@given(growing_shapes, st.integers(0, 10**12), dtypes, ranks, st.integers(1, 300))
@laws
def test_cached_tokens_are_the_most_that_fit(shape, surplus, dtype, tp, block_size):
    def need(num_tokens):
        return sequence_kv_bytes(shape, num_tokens, dtype, tp, block_size)

    budget = need(block_size) + surplus
    tokens = max_cached_tokens(budget, shape, dtype, tp, block_size)
    assert tokens % block_size == 0
    assert need(tokens) <= budget < need(tokens + block_size)
    with pytest.raises(ValueError, match="one block of"):
        max_cached_tokens(need(block_size) - 1, shape, dtype, tp, block_size)


@given(shapes, st.integers(1, 10**5), dtypes, ranks, blocks, st.integers(0, 10**13))
@laws
def test_sequences_are_the_most_that_fit(shape, tokens, dtype, tp, block_size, budget):
    count = max_sequences(budget, shape, tokens, dtype, tp, block_size)
    each = sequence_kv_bytes(shape, tokens, dtype, tp, block_size)
    assert count * each <= budget < (count + 1) * each


@given(uniform_shapes, st.integers(1, 10**5), st.integers(1, 64))
@laws
def test_the_engines_quotient_is_right_for_uniform_models(shape, tokens, block_size):
    blocked = -(-tokens // block_size) * block_size
    budget = 7 * sequence_kv_bytes(shape, tokens, block_size=block_size)
    cached = max_cached_tokens(budget, shape, block_size=block_size)
    assert max_concurrency(cached, blocked) == 7
    assert max_sequences(budget, shape, tokens, block_size=block_size) == 7


@given(
    st.integers(2**40, 2**45),
    st.lists(st.integers(0, 2**31), min_size=4, max_size=4),
    st.integers(1, 100),
)
@laws
def test_a_budget_and_what_is_taken_make_the_usable_memory(gpu_bytes, taken, percent):
    usable = gpu_bytes * percent // 100
    left = kv_budget_bytes(gpu_bytes, *taken, memory_fraction=percent / 100)
    assert left + sum(taken) == usable


@pytest.mark.parametrize("key", MODELS)
def test_every_preset_meets_the_laws(key):
    shape = MODELS[key]
    per_token = kv_bytes_per_token(shape)
    assert per_token == sequence_kv_bytes(shape, 1) - sequence_kv_bytes(shape, 0)
    assert per_token == 2 * kv_bytes_per_token(shape, "int8")
    assert sequence_kv_bytes(shape, 4096) <= sequence_kv_bytes(shape, 0) + 4096 * per_token
    longest = max_cached_tokens(64 * GiB, shape)
    shorter, longer = (sequence_kv_bytes(shape, n, block_size=16) for n in (longest, longest + 16))
    assert shorter <= 64 * GiB < longer


def test_scales_and_minima_of_a_sequence_are_counted_apart():
    # 2 layers, 2 heads of 32, key and value: 8 groups of 32 a token. q8_0: a 2-byte scale each.
    shape = ModelShape(num_layers=2, num_kv_heads=2, head_dim=32)
    assert scale_kv_bytes(shape, 10, "q8_0") == 10 * 8 * 2
    assert scale_kv_bytes(shape, 10, ("int8/g32z", "bf16"), tensor_parallel=2) == 10 * 2 * 4
    assert scale_kv_bytes(shape, 10, "int4") == 0
    lengths = np.array([0, 3])
    assert scale_kv_bytes(shape, lengths, "q4_0").tolist() == [0, 48]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_count_like_python_s(kind):
    llama, block = load_models()["llama-3.1-8b"], kind(16)
    for length in (5000, 2**47):
        mine = sequence_kv_bytes(llama, length, block_size=block)
        assert mine == sequence_kv_bytes(llama, length, block_size=16)
        assert type(mine) is int
    for function, *rest in (
        (max_sequences, 20 * 2**30, llama, 40_000),
        (max_cached_tokens, 10**10, llama),
    ):
        assert function(*rest, block_size=block) == function(*rest, block_size=16)
    three = [np.uint32(3 * 2**30)] * 2
    assert kv_budget_bytes(80 * 2**30, *three) == 74 * 2**30
    with pytest.raises(ValueError, match="bytes more are taken"):
        kv_budget_bytes(2 * 10**9, *[np.int32(2**31 - 1)] * 2)
