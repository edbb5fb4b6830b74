"""The planner: worked integers, a real allocator as oracle, laws, engines' logs, the terminal."""

import doctest
import json
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib import __main__ as terminal
from kvlib import __version__, memory, sharing
from kvlib._data import read_json
from kvlib.eviction import overflow_blocks
from kvlib.models import (
    LayerGroup,
    ModelShape,
    find_model,
    load_devices,
    load_models,
    released_weight_bytes,
)
from kvlib.paged_cache import OutOfBlocks, PagedKVCacheManager
from kvlib.plan import lengths_of, plan
from kvlib.replay import load_trace, replay, table
from kvlib.units import GiB, format_bytes

# 2 * 2 layers * 2 heads * 4 elements * 2 bytes = 64 bytes a token, 1,024 a block of 16.
SMALL = ModelShape(num_layers=2, num_kv_heads=2, head_dim=4)
# 9,000 of 10,000 bytes are usable, 2,000 are weights, 600 buffers: 6,400 are left, 6 blocks.
ON_SMALL = {"gpu": 10_000, "weights": 2000, "reserve_bytes": 600}


def small(context=20, **changes):
    return plan(SMALL, context=context, **(ON_SMALL | changes))


# --- worked by hand ---


def test_twenty_tokens_on_six_blocks():
    # 20 tokens take 2 blocks, 2,048 bytes: 3 fit and leave 6,400 - 6,144 = 256; as tokens they
    # take 1,280: 5 fit. The 3 tails lack 12 tokens each: 3 * 12 * 64 = 2,304.
    found = small(concurrency=5, prefill_tokens_per_second=10, tenant_weights={"a": 3, "b": 1})
    assert found.parts == {
        "weights": 2000,
        "reserve": 1600,
        "tails": 2304,
        "scales": 0,
        "cache": 3840,
        "unused": 256,
    }
    assert (found.num_sequences, found.num_sequences_by_token) == (3, 5)
    assert found.num_cached_tokens == 96
    # 5 sequences want 10 blocks of 6; the 2 that do not fit prefill 20 tokens each at 10 a second.
    assert (found.overflow_sequences, found.overflow_blocks) == (2, 4)
    assert found.recompute_seconds_per_minute == 4.0
    assert found.quotas == {"a": Fraction(9, 2), "b": Fraction(3, 2)}


def test_a_shared_block_is_held_once():
    # 16 of the 20 tokens are shared: 1 block for all, 1 for each. 6 blocks: 5 sequences. As tokens,
    # (6,400 - 1,024) / (1,280 - 1,024) = 21. A returning sequence prefills its own 4 tokens.
    found = small(prefix_tokens=16, concurrency=7, prefill_tokens_per_second=1)
    assert (found.num_sequences, found.num_sequences_by_token) == (5, 21)
    assert found.overflow_blocks == 2
    assert found.recompute_seconds_per_minute == 2 * 4
    # A share of the mean length: 0.8 * 20 = 16.
    assert small(prefix_tokens=0.8).parts == small(prefix_tokens=16).parts
    # 15 tokens fill no block.
    assert small(prefix_tokens=15).num_sequences == small().num_sequences


def test_two_gpus_as_one_group_and_as_two():
    # One group: 9,000 - 1,000 - 600 = 7,400 a GPU; half the heads, 1,024 a sequence: 7.
    assert small(num_gpus=2).num_sequences == 7
    # Two groups hold the weights twice: 3 each. 9 asked for: 5 on the fuller, 10 blocks of 6.
    found = small(num_gpus=2, tensor_parallel=1, concurrency=9)
    assert found.num_sequences == 2 * 3
    assert (found.overflow_sequences, found.overflow_blocks) == (3, 4)
    assert found.num_cached_tokens == 2 * 96


def test_scales_are_a_part_of_their_own():
    # 1 layer, 1 head of 32: 64 values a token, 64 bytes and two 16-bit scales: 68. 10 tokens: 680.
    shape = ModelShape(num_layers=1, num_kv_heads=1, head_dim=32)
    found = plan(shape, 7000, 10, weights=0, memory_fraction=1, dtype="q8_0", block_size=1)
    assert found.num_sequences == 10
    assert (found.parts["scales"], found.parts["cache"]) == (400, 6400)
    assert found.parts["unused"] == 200


def test_windows_and_states():
    # Length 113, blocks of 16, window 32: 8 blocks in the full layer, 8 - floor(81 / 16) = 3 in
    # the window layer, 64 bytes each token and layer; 100 bytes of state: 11 * 1,024 + 100.
    groups = [LayerGroup(1, 2, 8, 8), LayerGroup(1, 2, 8, 8, 32), LayerGroup(1, 1, 0, 0, None, 100)]
    shape = ModelShape.from_groups(groups)
    one = 11 * 1024 + 100
    for num_bytes, fitting in ((3 * one, 3), (3 * one - 1, 2)):
        assert plan(shape, num_bytes, 113, weights=0, memory_fraction=1).num_sequences == fitting
    # Only the full layer shares a prefix: 7 blocks once, 4 blocks and the state for each.
    shared = 7 * 1024 + 3 * (4 * 1024 + 100)
    for num_bytes, fitting in ((shared, 3), (shared - 1, 2)):
        found = plan(shape, num_bytes, 113, weights=0, memory_fraction=1, prefix_tokens=112)
        assert found.num_sequences == fitting


def test_without_an_endless_layer_no_number_of_tokens_is_the_largest():
    shape = ModelShape.from_groups([LayerGroup(1, 2, 8, 8, 32)])
    found = plan(shape, 4 * 3072, 200, weights=0, memory_fraction=1)
    assert (found.num_sequences, found.num_cached_tokens) == (4, 0)


def test_lengths_that_differ_count_with_their_mean():
    # 16, 16 and 64 tokens take 1, 1 and 4 blocks, 2 on average: 3 fit 6 blocks.
    found = small(np.array([16, 64, 16]), concurrency=4, prefill_tokens_per_second=32)
    assert (found.num_sequences, found.mean_tokens) == (3, 32.0)
    assert found.recompute_seconds_per_minute == 1.0
    assert "sequences of 32 tokens" in repr(found)


# --- oracles ---


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 80), st.sampled_from([1, 4, 16]), st.integers(1, 40))
def test_a_real_allocator_holds_as_many(num_tokens, prefix_tokens, block_size, num_blocks):
    block_bytes = 64 * block_size
    found = plan(
        SMALL,
        num_blocks * block_bytes + block_bytes // 2,
        num_tokens,
        weights=0,
        memory_fraction=1,
        block_size=block_size,
        prefix_tokens=prefix_tokens,
    )
    manager = PagedKVCacheManager(num_blocks, block_size)
    prefix = min(prefix_tokens, num_tokens - 1) // block_size * block_size
    held = 0
    try:
        parent = manager.allocate_for_sequence("prefix", prefix)
        while True:
            child = manager.fork(parent, str(held))
            manager.append_tokens(child, num_tokens - prefix)
            held += 1
    except OutOfBlocks:
        assert found.num_sequences == held


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(load_models())),
    st.integers(1, 200_000),
    st.floats(0, 1),
    st.sampled_from([8, 16, 64]),
    st.sampled_from(["bf16", "q8_0", ("q8_0", "q4_0"), "int4"]),
    st.sampled_from([1, 2, 8]),
)
def test_one_more_would_not_fit(name, num_tokens, share, block_size, dtype, num_gpus):
    shape, prefix_tokens = find_model(name), int(share * num_tokens)
    how = {"dtype": dtype, "block_size": block_size, "tensor_parallel": num_gpus}
    given_plan = how | {"num_gpus": num_gpus, "prefix_tokens": prefix_tokens, "concurrency": 40}
    try:
        one = memory.sequence_kv_bytes(shape, num_tokens, **how)
    except ValueError:
        with pytest.raises(ValueError, match=r"tensor_parallel=|groups of 32"):
            plan(name, "B200 192GB", num_tokens, **given_plan)
        return
    found = plan(name, "B200 192GB", num_tokens, **given_plan)
    parts = found.parts
    assert sum(parts.values()) == found.gpu_bytes + found.missing_bytes
    assert min(parts.values()) >= 0
    budget = sum(parts[part] for part in ("tails", "scales", "cache", "unused"))
    weights = -(-released_weight_bytes(name) // num_gpus)
    if found.missing_bytes:
        assert (budget, found.num_sequences) == (0, 0)
    else:
        assert budget == memory.kv_budget_bytes(found.gpu_bytes, weights, memory_fraction=0.9)
    shared_tokens = sharing.shareable_tokens(prefix_tokens, num_tokens, block_size)
    endless = [g for g in shape.layer_groups if g.window is None and g.k_dim]
    per_token = memory.kv_bytes_per_token(
        ModelShape.from_groups([LayerGroup(g.num_layers, g.num_kv_heads, g.k_dim, g.v_dim)
                                for g in endless]), dtype, num_gpus)  # fmt: skip

    def held(many):
        return many * one - sharing.prefix_saving_bytes(max(1, many), shared_tokens, per_token)

    many = found.num_sequences
    assert held(many) == budget - parts["unused"] or many == 0
    assert held(many + 1) > budget
    assert bool(found.overflow_sequences) == bool(found.overflow_blocks) == (held(40) > budget)


@given(st.integers(1, 100), st.integers(1, 300), st.integers(1, 50))
def test_overflow_is_eviction_s_formula(concurrency, num_tokens, num_blocks):
    found = plan(
        SMALL, num_blocks * 1024 + 9, num_tokens, weights=0, memory_fraction=1,
        concurrency=concurrency,
    )  # fmt: skip
    needed = concurrency * -(-num_tokens // 16)
    assert found.overflow_blocks == overflow_blocks(0, needed, num_blocks)


# --- laws ---

BASE = {"model": "qwen3-32b", "gpu": "H100 80GB", "context": 8192}


def sequences(**changes):
    return plan(**(BASE | changes)).num_sequences


@pytest.mark.parametrize(
    "steps",
    [
        [{"dtype": dtype} for dtype in ("fp32", "bf16", "q8_0", "int8", "q4_0", "int4", "int2")],
        [{"weights": dtype} for dtype in ("bf16", "fp8", "q4_0", "int2")],
        [{"memory_fraction": fraction} for fraction in (0.5, 0.8, 0.9, 0.95, 1)],
        [{"prefix_tokens": prefix} for prefix in (0, 100, 1000, 8000, 9000)],
        [{"block_size": block, "context": 8193} for block in (4096, 1024, 64, 16, 1)],
        [{"num_gpus": gpus} for gpus in (1, 2, 4, 8, 16)],
        [{"reserve_bytes": reserve * GiB} for reserve in (9, 4, 1, 0)],
        [{"context": context} for context in (100_000, 9000, 100, 1)],
    ],
    ids=lambda steps: next(iter(steps[0])),
)
def test_each_lever_only_ever_gains(steps):
    found = [sequences(**step) for step in steps]
    assert found == sorted(found)
    assert found[-1] > found[0]


def test_groups_multiply_and_cost_is_linear():
    one, four = plan(**BASE), plan(**BASE, num_gpus=4, tensor_parallel=1)
    assert four.num_sequences == 4 * one.num_sequences
    assert four.parts == one.parts
    costs = [plan(**BASE, concurrency=5 + n).recompute_seconds_per_minute for n in range(5)]
    assert np.diff(costs) == pytest.approx([8192 / 8000] * 4)
    often = plan(**BASE, concurrency=6, turns_per_minute=3, prefill_tokens_per_second=4000)
    assert often.recompute_seconds_per_minute == pytest.approx(6 * 8192 / 8000)


def test_real_cases():
    kimi = plan("kimi-k3", "B200 192GB", 8192, num_gpus=8)
    assert released_weight_bytes("kimi-k3") > 8 * kimi.gpu_bytes
    assert (kimi.num_sequences, kimi.num_cached_tokens, kimi.parts["unused"]) == (0, 0, 0)
    shape = ModelShape(num_layers=48, num_kv_heads=8, head_dim=128)
    found = plan(shape, "L4 24GB", 4096, weights=14 * 10**9 * 2)
    assert found.parts["weights"] > found.gpu_bytes
    assert f"missing {format_bytes(found.missing_bytes)} use more" in " ".join(repr(found).split())


# --- engines' logs: available GiB -> tokens -> max concurrency ---

ENTRY = {entry["id"]: entry for entry in read_json("published_numbers.json")}


def logged(key, **changes):
    """Plan on what the engine says is left for the cache."""
    inputs = ENTRY[key]["inputs"]
    shape = ModelShape(
        num_layers=inputs["L"], num_kv_heads=inputs["H_kv"], head_dim=inputs["d_head"]
    )
    left = inputs.get("avail_gib", inputs.get("swap_gib"))
    given_plan = {"weights": 0, "memory_fraction": 1.0, "block_size": inputs.get("block", 16)}
    given_plan |= {"gpu": round(left * GiB), "num_gpus": inputs.get("tp", 1), "context": 1}
    return plan(shape, **(given_plan | changes)), ENTRY[key]["expected"]


@pytest.mark.parametrize("key", [key for key in ENTRY if key.startswith("vllm-cpu-blocks")])
def test_blocks_that_an_engine_logged(key):
    found, blocks = logged(key)
    assert found.num_cached_tokens == 16 * blocks


@pytest.mark.parametrize("length", ["20k", "29k"])
def test_from_gib_to_tokens_to_concurrency(length):
    gib, concurrency = ENTRY[f"vllm-10517-{length}-gib"], ENTRY[f"vllm-10517-{length}-conc"]
    pool = gib["inputs"]["gpu_blocks"] * 16 * memory.kv_bytes_per_token(find_model("llama-3.1-8b"))
    assert round(pool / GiB, 2) == gib["expected"]
    max_len = concurrency["inputs"]["max_len"]
    found = plan("llama-3.1-8b", pool, max_len, weights=0, memory_fraction=1)
    assert found.num_cached_tokens == gib["inputs"]["gpu_blocks"] * 16
    quotient = memory.max_concurrency(found.num_cached_tokens, max_len)
    assert round(quotient, 2) == concurrency["expected"]
    assert found.num_sequences == int(quotient)


def test_a_fraction_of_the_free_memory():
    # TensorRT-LLM rounds up where a last block only partly fits.
    found, blocks = logged("trtllm-2268", memory_fraction=0.9, block_size=64)
    assert found.num_cached_tokens // 64 == blocks - 1


@pytest.mark.parametrize("key", ["vllm-qwen3-235b-tokens", "vllm-13061-min-rank"])
def test_the_minimum_over_ranks_is_not_in_one_rank_s_line(key):
    found, tokens = logged(key)
    assert found.num_cached_tokens > 1.01 * tokens


# --- lengths ---


def mean_of(context):
    num_tokens, counts = lengths_of(context)
    return float((num_tokens * counts).sum() / counts.sum())


def test_one_length_in_many_forms():
    for context in (8192, "8192", "8,192", np.array([8192, 8192]), (8192, 8192), "8192/8192"):
        assert plan(**(BASE | {"context": context})).parts == plan(**BASE).parts


@given(st.integers(10, 5000), st.floats(1, 8))
def test_mean_and_p99_are_met(mean, ratio):
    num_tokens, counts = lengths_of((mean, mean * ratio))
    assert counts.sum() == 1000
    assert mean_of((mean, mean * ratio)) == pytest.approx(mean, rel=0.01, abs=0.5)
    above = counts[num_tokens > mean * ratio * 1.001 + 1].sum()
    assert above <= 10
    assert counts[num_tokens >= mean * ratio * 0.97 - 1].sum() >= 10


@pytest.mark.parametrize(
    ("name", "key"), [("azure-conversations", "azure_conv"), ("azure-code", "azure_code")]
)
def test_the_azure_requests(name, key):
    figures = read_json("trace_figures.json")[key]
    mean = figures["mean_prompt_tokens"] + figures["mean_answer_tokens"]
    assert mean_of(name) == pytest.approx(mean)
    assert lengths_of(name)[1].sum() == {"azure-conversations": 19_366, "azure-code": 8819}[name]


def test_lengths_from_a_file(tmp_path):
    azure, own = tmp_path / "azure.csv", tmp_path / "own.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,30,2\n2023-11-17,64,0\n")
    own.write_text("\ufeffid,num_tokens\r\n9,64\r\n8,32\r\n", encoding="utf-8")
    both = tmp_path / "both.CSV"
    both.write_text("ContextTokens,GeneratedTokens,num_tokens\n30,2,32\n64,0,64\n")
    assert [part.tolist() for part in lengths_of(both)] == [[32, 64], [1, 1]]
    for path in (azure, own):
        assert [part.tolist() for part in lengths_of(str(path))] == [[32, 64], [1, 1]]


def test_a_bad_file_is_refused_with_the_place(tmp_path):
    path = tmp_path / "own.csv"
    for content, said in (
        ("num_tokens\n5\n6.5\n", "'6.5' after 1 lengths"),
        ("tokens\n5\n", r"no lengths among the columns \['tokens'\] after 0 lengths. Name the"),
        ("ContextTokens,output\n5,6\n", "no lengths among the columns"),
        ("num_tokens\n99999999999999999999\n", "after 0 lengths. Name the column"),
        ("num_tokens\n", "there is no length"),
        ("a,num_tokens\n1\n", "after 0 lengths. Name the column"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            lengths_of(str(path))
    with pytest.raises(ValueError, match=r"No such file.*Name the column num_tokens"):
        lengths_of("nowhere.csv")


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "qwen3-32"}, "'qwen3-32'; it is not a known name. Did you mean 'qwen3-32b'"),
        ({"gpu": "h100"}, "gpu='h100'; .*Did you mean 'H100 80GB'"),
        ({"gpu": "80G"}, "could mean powers of 1,000"),
        ({"gpu": 0}, "gpu=0; it must be at least 1"),
        ({"num_gpus": 0}, "num_gpus=0"),
        ({"num_gpus": 6}, "tensor_parallel=6; it must divide num_kv_heads=8"),
        ({"num_gpus": 4, "tensor_parallel": 3}, "tensor_parallel=3; it must divide num_gpus=4"),
        ({"model": SMALL}, "weights=None; 'custom' is no preset.*Pass their bytes"),
        ({"model": SMALL, "weights": "bf16"}, "weights='bf16'; 'custom' is no preset"),
        ({"weights": "bf61"}, "dtype='bf61'.*Did you mean 'bf16'"),
        ({"weights": -1}, "weights=-1"),
        ({"memory_fraction": 0}, "memory_fraction=0"),
        ({"reserve_bytes": -1}, "reserve_bytes=-1"),
        ({"dtype": "q9"}, "dtype='q9'"),
        ({"block_size": 0}, "block_size=0"),
        ({"prefix_tokens": -1}, "prefix_tokens=-1"),
        ({"prefix_tokens": 1.5}, "prefix_tokens=1.5; it must be at most 1. Write tokens as int"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"tenant_weights": {"a": -1}}, r"tenant_weights\['a'\]=-1"),
        ({"prefill_tokens_per_second": 0}, "prefill_tokens_per_second=0"),
        ({"turns_per_minute": -1}, "turns_per_minute=-1"),
        ({"context": 0}, "context=0; it must be at least 1"),
        ({"context": "many"}, "context='many'; it is no length. Write 8192"),
        ({"context": (1000, 900)}, "p99=900; it must be at least 1000"),
        ({"context": "1000/15000"}, "p99=15000; it must be at most 149.*Pass the lengths"),
        ({"context": np.array([], int)}, "there is no length"),
        (
            {"model": ModelShape.from_groups([LayerGroup(1, 1, 0, 0, None, 8)]), "weights": 0},
            "no layer keeps tokens",
        ),
    ],
)
def test_bad_input_is_named(changes, said):
    with pytest.raises(ValueError, match=said):
        plan(**(BASE | changes))


@pytest.mark.parametrize(
    "changes",
    [{"context": 8192.0}, {"context": [8192]}, {"num_gpus": True}, {"weights": 1.5}, {"gpu": None}],
)
def test_wrong_kinds_are_named(changes):
    with pytest.raises(TypeError, match="it must be"):
        plan(**(BASE | changes))


# --- the table and the terminal ---


def test_the_table_has_every_number_and_no_row_for_what_was_not_asked():
    full = repr(plan(**BASE, concurrency=64, tenant_weights={"chat": 1}))
    for words in ("79.11 GiB", "61.02 GiB", "59 do not fit: 30,", "60.4 s", "quota of chat"):
        assert words in full
    assert "recompute" not in repr(plan(**BASE))
    html = plan(ModelShape(num_layers=1, num_kv_heads=1, head_dim=8, name="<b>"), **ON_SMALL,
                context=1)._repr_html_()  # fmt: skip
    assert "&lt;b&gt;" in html
    assert html.count("<tr>") == html.count("</tr>") == 9


def run(capsys, *words, needed=("--model", "qwen3-32b", "--gpu", "H100 80GB", "--context", "8192")):
    status = terminal.main(["plan", *needed, *words])
    return status, capsys.readouterr()


def test_every_option_reaches_the_plan(capsys):
    words = "--num-gpus 4 --tensor-parallel 2 --weights fp8 --memory-fraction 0.8 --block-size 32"
    words += " --reserve-bytes 1GiB --dtype q8_0,q4_0 --prefix-tokens 512 --concurrency 999"
    words += " --tenant-weights chat=3,batch=1 --prefill-tokens-per-second 9e3"
    status, out = run(capsys, *words.split(), "--turns-per-minute", "0.5")
    wanted = plan(
        **BASE, num_gpus=4, tensor_parallel=2, weights="fp8", memory_fraction=0.8, block_size=32,
        reserve_bytes=GiB, dtype=("q8_0", "q4_0"), prefix_tokens=512, concurrency=999,
        tenant_weights={"chat": 3, "batch": 1}, prefill_tokens_per_second=9000,
        turns_per_minute=0.5,
    )  # fmt: skip
    assert (status, out.out) == (0, f"{wanted!r}\n")


def test_a_config_file_without_head_dim(capsys, tmp_path):
    path = tmp_path / "config.json"
    fields = {"num_hidden_layers": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    path.write_text(json.dumps(fields | {"num_attention_heads": 28, "model_type": "qwen2"}))
    needed = ("--model", str(path), "--gpu", "24 GiB", "--context", "4096", "--weights", "8 GiB")
    status, out = run(capsys, needed=needed)
    assert status == 2
    assert "pass head_dim=128" in out.err
    status, out = run(capsys, "--head-dim", "128", "--reserve-bytes", "0", needed=needed)
    shape = ModelShape(num_layers=28, num_kv_heads=4, head_dim=128, num_heads=28, name="qwen2")
    assert (status, out.out) == (0, f"{plan(shape, '24 GiB', 4096, weights='8 GiB')!r}\n")


def test_a_share_of_the_prefix_is_the_decimal_that_was_written():
    # 0.29 * 1,600 is 464 tokens, 29 blocks of 16; in binary it is a little less.
    exact, shared = (plan(**(BASE | {"context": 1600}), prefix_tokens=p, concurrency=999)
                     for p in (464, 0.29))  # fmt: skip
    assert shared.overflow_blocks == exact.overflow_blocks
    with pytest.raises(ValueError, match=r"prefix_tokens=1\.5; it must be at most 1"):
        plan(**BASE, prefix_tokens=1.5)


def test_a_device_and_sizes_in_words():
    device = load_devices()[BASE["gpu"]]
    wanted = plan(**BASE, reserve_bytes=2 * GiB, weights=9 * GiB)
    given = plan(**(BASE | {"gpu": device}), reserve_bytes="2 GiB", weights="9 GiB")
    assert repr(given) == repr(wanted)


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({"model": "llama-3.1-70b", "num_gpus": 8}, []),
        ({"model": "llama-3.1-70b", "num_gpus": 16}, ["8 KV heads on 16 GPUs of a group: .* 2 "]),
        ({"model": "deepseek-v3", "num_gpus": 8}, ["1 KV head on 8 GPUs of a group: .* 8 times"]),
        ({"dtype": ("int4", "q4_0")}, ["int4 counts no scales; int4/g64 does"]),
    ],
)
def test_what_costs_memory_unasked_is_noted(changes, notes):
    found = plan(**(BASE | changes))
    assert len(found.hints) == len(notes)
    for hint, note in zip(found.hints, notes, strict=True):
        assert re.search(note, hint)
        assert hint in repr(found)


def test_a_config_file_and_a_share(capsys, tmp_path):
    path = tmp_path / "config.json"
    fields = {"num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 128}
    path.write_text(json.dumps(fields | {"num_attention_heads": 40, "model_type": "qwen2"}))
    needed = ("--model", str(path), "--gpu", "24 GiB", "--context", "4096", "--weights", "8 GiB")
    status, out = run(capsys, "--prefix-tokens", "0.5", needed=needed)
    shape = ModelShape(num_layers=48, num_kv_heads=8, head_dim=128, num_heads=40, name="qwen2")
    wanted = plan(shape, "24 GiB", 4096, weights=8 * GiB, prefix_tokens=2048)
    assert (status, out.out) == (0, f"{wanted!r}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "qwen3-32"], "Did you mean 'qwen3-32b'?"),
        (["--gpu", "H100"], "Did you mean 'H100 80GB'?"),
        (["--context", "nowhere.csv"], "No such file"),
        (["--model", "nowhere.json"], "No such file"),
        (["--weights", "15G"], "weights='15G'"),
        (["--tenant-weights", "chat"], "tenant_weights='chat'"),
        (["--tenant-weights", "a:3,b:1"], "Write chat=3,batch=1"),
        (["--tenant-weights", "chat=1, chat=5"], "must name each tenant once"),
        (["--gpu", "2 GiB/s"], "gpu='2 GiB/s'; it is a bandwidth"),
        (["--num-gpus", "3"], "tensor_parallel=3"),
    ],
)
def test_an_error_is_one_line_and_status_2(capsys, words, said):
    status, out = run(capsys, *words)
    assert (status, out.out) == (2, "")
    assert out.err.startswith("python -m kvlib plan: ")
    assert out.err.count("\n") == 1
    assert said in out.err


@pytest.mark.parametrize("words", [["--num-gpus", "x"], ["--nope"], ["--model"]])
def test_an_option_that_is_not_understood(capsys, words):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, *words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, "--help")
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("--prefill-tokens-per-second", "H100 80GB", "default: 0.9", "example:"):
        assert word in said


def test_a_trace_is_replayed_in_the_terminal(capsys, tmp_path):
    path, rows = tmp_path / "mine.jsonl", []
    for k, (tenant, hashes) in enumerate((("a", "xy"), ("b", "z"), ("a", "xy"), ("b", "zw"))):
        rows.append({"timestamp": k, "input_length": 16 * len(hashes), "hash_ids": list(hashes),
                     "tenant": tenant})  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ["--trace", str(path), "--block-size", "16", "--capacity-blocks", "3"]
    assert terminal.main(["replay", *words, "--policy", "lru,fair", "--engine-order"]) == 0
    said = capsys.readouterr().out.splitlines()
    trace = load_trace(path, block_size=16)
    results = [replay(trace, 3, policy, engine_order=True) for policy in ("lru", "fair")]
    assert said == [repr(trace), *table(results).splitlines()]
    assert "a finds" in said[1]
    assert said[2].split()[:2] == ["lru", "3"]
    assert terminal.main(["replay", *words]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 6
    assert terminal.main(["replay", *words, "--policy", "mru"]) == 2
    assert "python -m kvlib replay: policy='mru'; it is not a known name" in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as stopped:
        terminal.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"kvlib {__version__}\n"


def test_the_documented_call_of_the_terminal():
    assert doctest.testmod(terminal).attempted == 1
    assert doctest.testmod(terminal).failed == 0


def test_python_m_kvlib(tmp_path):
    words = ["plan", "--model", "gpt2", "--gpu", "2 GiB", "--context", "1024"]
    done = subprocess.run(
        [sys.executable, "-m", "kvlib", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{plan('gpt2', '2 GiB', 1024)!r}\n"
