"""Bad input: every message says name=value, the rule and the next step, and nothing changes."""

import ast
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from kvlib._validate import one_of, real, whole, whole_or_array
from kvlib.memory import (
    bits_per_value,
    kv_budget_bytes,
    kv_bytes_per_token,
    kv_heads_per_rank,
    marginal_kv_bytes,
    max_cached_tokens,
    max_concurrency,
    max_sequences,
    sequence_kv_bytes,
)
from kvlib.models import LayerGroup, ModelShape, find_model

SOURCES = Path(__file__).parent.parent / "kvlib"

LLAMA = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)
GOOD = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 64}
ODD = ModelShape.from_groups([LayerGroup(1, 1, 1, 0)], name="odd")
WINDOWS = ModelShape.from_groups([LayerGroup(2, 1, 64, 64, window=8)], name="windows")
# name=value; the rule. The next step.
SENTENCES = re.compile(r"[\w.()]+=.+; .+\. .+[.?]", re.DOTALL)


def refuses(call, error, starts, step):
    """Check the type, the beginning, the shape and the next step of a refusal."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(starts + ";")
    assert SENTENCES.fullmatch(message)
    assert step in message.split(";", 1)[1]


# --- what a reader's slider or typing can get wrong ---

SHAPES = [
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads=0", "MLA and MQA store one head"),
    ({"num_kv_heads": -8}, ValueError, "num_kv_heads=-8", "MLA and MQA store one head"),
    ({"num_layers": 0}, ValueError, "num_layers=0", "Pass 1 or more"),
    ({"head_dim": 0}, ValueError, "head_dim=0", "Pass 1 or more"),
    ({"head_dim": 64.0}, TypeError, "head_dim=64.0", "Write 64."),
    ({"head_dim": 64.5}, TypeError, "head_dim=64.5", "Write a whole number"),
    ({"head_dim": True}, TypeError, "head_dim=True", "Write a whole number"),
    ({"head_dim": float("nan")}, TypeError, "head_dim=nan", "Write a whole number"),
    ({"head_dim": float("inf")}, TypeError, "head_dim=inf", "Write a whole number"),
    ({"head_dim": "64"}, TypeError, "head_dim='64'", "Write a whole number"),
    ({"head_dim": None}, TypeError, "head_dim=None", "Write a whole number"),
    ({"num_layers": np.float64(2)}, TypeError, "num_layers=np.float64(2.0)", "Write 2."),
    ({"num_layers": True}, TypeError, "num_layers=True", "Write a whole number"),
    ({"num_layers": np.bool_(True)}, TypeError, "num_layers=np.True_", "Write a whole number"),
    ({"num_heads": 0}, ValueError, "num_heads=0", "Pass 1 or more"),
    ({"num_heads": 8.0}, TypeError, "num_heads=8.0", "Write 8."),
    ({"num_heads": 6}, ValueError, "num_kv_heads=4", "num_heads=6"),
    ({"num_heads": 2}, ValueError, "num_kv_heads=4", "num_heads=2"),
]


@pytest.mark.parametrize(("fields", "error", "starts", "step"), SHAPES)
def test_shapes(fields, error, starts, step):
    if np.__version__.startswith("1."):  # NumPy 1 prints its scalars bare
        starts = re.sub(r"np\.\w+\((.*)\)", r"\1", starts).replace("np.True_", "True")
    refuses(lambda: ModelShape(**GOOD | fields), error, starts, step)


GROUPS = [
    ((0, 1, 64, 64), ValueError, "num_layers=0", "Pass 1 or more"),
    ((1, 0, 64, 64), ValueError, "num_kv_heads=0", "MLA and MQA"),
    ((1, 1, -1, 64), ValueError, "k_dim=-1", "Pass 0 or more"),
    ((1, 1, 64, -1), ValueError, "v_dim=-1", "Pass 0 or more"),
    ((1, 1, 64, 64, 0), ValueError, "window=0", "Use None"),
    ((1, 1, 64, 64, 16.0), TypeError, "window=16.0", "Use None"),
    ((1, 1, 64, 64, True), TypeError, "window=True", "Use None"),
    ((1, 1, 64, 64, None, -1), ValueError, "state_bytes=-1", "Pass 0 or more"),
    ((1, 1, 64, 64, None, 0.5), TypeError, "state_bytes=0.5", "Write a whole number"),
    ((1, 1, 0, 0), ValueError, "k_dim=0, v_dim=0, state_bytes=0", "Leave out layers"),
]


@pytest.mark.parametrize(("fields", "error", "starts", "step"), GROUPS)
def test_groups(fields, error, starts, step):
    refuses(lambda: LayerGroup(*fields), error, starts, step)


def test_a_model_needs_groups():
    refuses(lambda: ModelShape.from_groups([]), ValueError, "layer_groups=()", "Pass at least one")
    with pytest.raises(TypeError, match=r"layer_groups has \(1, 1, 8, 8\); .*Build one"):
        ModelShape.from_groups([(1, 1, 8, 8)])


# Every function that takes a shape, with good values for all but one of its arguments.
TAKES_SHAPE = {
    "kv_bytes_per_token": lambda **bad: kv_bytes_per_token(**{"shape": LLAMA} | bad),
    "sequence_kv_bytes": lambda **bad: sequence_kv_bytes(
        **{"shape": LLAMA, "num_tokens": 32} | bad
    ),
    "marginal_kv_bytes": lambda **bad: marginal_kv_bytes(
        **{"shape": LLAMA, "num_tokens": 32} | bad
    ),
    "max_cached_tokens": lambda **bad: max_cached_tokens(
        **{"budget_bytes": 2**32, "shape": LLAMA} | bad
    ),
    "max_sequences": lambda **bad: max_sequences(
        **{"budget_bytes": 2**32, "shape": LLAMA, "num_tokens": 32} | bad
    ),
}
every_function = pytest.mark.parametrize("function", TAKES_SHAPE.values(), ids=TAKES_SHAPE)


@every_function
@pytest.mark.parametrize(
    ("bad", "error", "starts", "step"),
    [
        ({"tensor_parallel": 3}, ValueError, "tensor_parallel=3", "Use 1, 2, 4, 8, 16."),
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel=0", "Pass 1 or more"),
        ({"tensor_parallel": 2.0}, TypeError, "tensor_parallel=2.0", "Write 2."),
        ({"tensor_parallel": True}, TypeError, "tensor_parallel=True", "Write a whole"),
        ({"dtype": "bf61"}, ValueError, "dtype='bf61'", "Did you mean 'bf16'?"),
        ({"dtype": "Q8_0"}, ValueError, "dtype='Q8_0'", "Did you mean 'q8_0'?"),
        ({"dtype": "int8/64"}, ValueError, "dtype='int8/64'", "Did you mean 'int8'?"),
        ({"dtype": "int3/g64"}, ValueError, "dtype='int3/g64'", "Did you mean"),
        ({"dtype": "int8/g0"}, ValueError, "dtype='int8/g0'", "Did you mean"),
        ({"dtype": "???"}, ValueError, "dtype='???'", "Use one of fp32, fp16, bf16"),
        ({"dtype": 2}, ValueError, "dtype=2", "Did you mean"),
        ({"dtype": ("bf16",)}, ValueError, "dtype=('bf16',)", "Write (k, v)."),
        ({"dtype": ("bf16", "fp61")}, ValueError, "dtype='fp61'", "Did you mean 'fp16'?"),
        ({"dtype": "int8/g3"}, ValueError, "dtype='int8/g3'", "Use a smaller group."),
        ({"shape": "llama"}, TypeError, "shape='llama'", "Build one or use a preset"),
    ],
)
def test_arguments_that_all_share(function, bad, error, starts, step):
    refuses(lambda: function(**bad), error, starts, step)


@every_function
def test_a_group_is_no_model(function):
    with pytest.raises(TypeError, match=r"shape=LayerGroup.*; it must be a ModelShape\. Build one"):
        function(shape=LLAMA.layer_groups[0])


BLOCKED = [name for name in TAKES_SHAPE if name != "kv_bytes_per_token"]


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-16, ValueError), (16.0, TypeError), (True, TypeError)]
)
def test_block_size(name, wrong, error):
    refuses(
        lambda: TAKES_SHAPE[name](block_size=wrong),
        error,
        f"block_size={wrong}",
        "Pass 1 or more" if error is ValueError else "Write ",
    )


@pytest.mark.parametrize("function", [sequence_kv_bytes, marginal_kv_bytes])
@pytest.mark.parametrize(
    ("wrong", "error", "starts", "step"),
    [
        (-1, ValueError, "num_tokens=-1", "Pass 0 or more"),
        (np.int64(-1), ValueError, "num_tokens=-1", "Pass 0 or more"),
        (1.0, TypeError, "num_tokens=1.0", "Write 1."),
        (True, TypeError, "num_tokens=True", "Write a whole"),
        (None, TypeError, "num_tokens=None", "Write a whole"),
        (np.array([4, -1]), ValueError, "num_tokens.min()=-1", "Pass 0 or more"),
        (np.array([4.0]), TypeError, "num_tokens.dtype=float64", "Use .astype(np.int64)."),
        (np.array([True]), TypeError, "num_tokens.dtype=bool", "Use .astype(np.int64)."),
        (np.array([2**63], np.uint64), ValueError, f"num_tokens.max()={2**63}", "Pass"),
    ],
)
def test_lengths(function, wrong, error, starts, step):
    refuses(lambda: function(LLAMA, wrong), error, starts, step)


def test_an_array_that_would_wrap_is_refused_but_an_int_is_not():
    # 2**50 tokens of 131,072 B are 2**70 bits.
    with pytest.raises(ValueError, match=r"num_tokens\.max\(\)=.*; .*Pass an int\."):
        sequence_kv_bytes(LLAMA, np.array([2**50]))
    assert sequence_kv_bytes(LLAMA, 2**50) == 2**67


@pytest.mark.parametrize(("num_tokens", "error"), [(0, ValueError), (-1, ValueError)])
def test_an_empty_sequence_fits_without_number(num_tokens, error):
    refuses(
        lambda: max_sequences(2**30, LLAMA, num_tokens),
        error,
        f"num_tokens={num_tokens}",
        "Pass 1 or more",
    )


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(-1, ValueError), (1e9, TypeError), (True, TypeError), ("1 GiB", TypeError)],
)
def test_budgets_are_counts(wrong, error):
    for call in (
        lambda: max_cached_tokens(wrong, LLAMA),
        lambda: max_sequences(wrong, LLAMA, 32),
    ):
        refuses(call, error, f"budget_bytes={wrong!r}", "W" if error is TypeError else "Pass 0")


def test_a_budget_below_one_block():
    one_block = 16 * 131_072
    refuses(
        lambda: max_cached_tokens(one_block - 1, LLAMA),
        ValueError,
        f"budget_bytes={one_block - 1}",
        f"one block of 16 tokens needs {one_block}. Use a smaller block_size",
    )
    refuses(lambda: max_cached_tokens(0, LLAMA), ValueError, "budget_bytes=0", "a larger budget")


def test_a_budget_that_the_state_alone_exceeds():
    refuses(
        lambda: max_cached_tokens(153_944_063, find_model("qwen3.8-27b")),
        ValueError,
        "budget_bytes=153944063",
        f"needs {153_944_064 + 16 * 65_536}",
    )


def test_no_longest_sequence_where_nothing_grows():
    refuses(
        lambda: max_cached_tokens(2**30, WINDOWS),
        ValueError,
        "shape='windows'",
        "Use max_sequences.",
    )
    state_only = ModelShape.from_groups([LayerGroup(1, 1, 0, 0, state_bytes=8)], name="state")
    refuses(lambda: max_cached_tokens(2**30, state_only), ValueError, "shape='state'", "Use max_")


def test_parts_of_a_byte():
    refuses(
        lambda: kv_bytes_per_token(ODD, "int4"), ValueError, "dtype='int4'", "Use a wider dtype."
    )
    refuses(
        lambda: sequence_kv_bytes(ODD, 3, "int4"), ValueError, "dtype='int4'", "Use a wider dtype"
    )
    refuses(
        lambda: sequence_kv_bytes(ODD, np.array([2, 3]), "int4"),
        ValueError,
        "dtype='int4'",
        "Use a wider dtype",
    )


def test_groups_of_values_must_divide_what_a_rank_stores():
    # 8 heads of 128 make 1,024 values; on 8 ranks 128 each.
    assert kv_bytes_per_token(LLAMA, "int8/g1024") > 0
    refuses(
        lambda: kv_bytes_per_token(LLAMA, "int8/g1024", 8),
        ValueError,
        "dtype='int8/g1024'",
        "the 128 values",
    )


def test_a_state_must_split():
    shape = ModelShape.from_groups([LayerGroup(1, 4, 8, 8, state_bytes=7)])
    refuses(
        lambda: sequence_kv_bytes(shape, 1, tensor_parallel=2),
        ValueError,
        "state_bytes=7",
        "Make it a multiple",
    )


@pytest.mark.parametrize(
    ("heads", "ranks", "hint"),
    [(8, 3, "1, 2, 4, 8, 16"), (8, 12, "1, 2, 4, 8, 16"), (6, 4, "1, 2, 3, 6"), (71, 2, "1")],
)
def test_ranks_that_cannot_share(heads, ranks, hint):
    refuses(
        lambda: kv_heads_per_rank(heads, ranks),
        ValueError,
        f"tensor_parallel={ranks}",
        f"num_kv_heads={heads} or be a multiple of it. Use {hint}.",
    )


@pytest.mark.parametrize("wrong", [0, -1])
def test_heads_per_rank_counts(wrong):
    refuses(lambda: kv_heads_per_rank(wrong, 1), ValueError, f"num_kv_heads={wrong}", "Pass 1")
    refuses(lambda: kv_heads_per_rank(1, wrong), ValueError, f"tensor_parallel={wrong}", "Pass 1")


def test_unknown_presets_suggest_the_nearest():
    refuses(
        lambda: find_model("Llama-3.1-8"),
        ValueError,
        "name='Llama-3.1-8'",
        "Did you mean 'llama-3.1-8b'?",
    )
    refuses(lambda: find_model("gemma3-27b"), ValueError, "name='gemma3-27b'", "'gemma-3-27b'")
    refuses(lambda: find_model("???"), ValueError, "name='???'", "Use one of")
    refuses(lambda: find_model(None), ValueError, "name=None", "")


def test_a_config_without_head_dim():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    with pytest.raises(ValueError, match=r"config has no head_dim; .*give 64.* pass head_dim=64\."):
        ModelShape.from_hf_config(config)


BUDGETS = [
    ({"gpu_bytes": 0}, ValueError, "gpu_bytes=0", "Pass 1 or more"),
    ({"gpu_bytes": 80e9}, TypeError, "gpu_bytes=80000000000.0", "Write 80000000000."),
    ({"weight_bytes": -1}, ValueError, "weight_bytes=-1", "Pass 0 or more"),
    ({"activation_bytes": -1}, ValueError, "activation_bytes=-1", "Pass 0 or more"),
    ({"workspace_bytes": 0.5}, TypeError, "workspace_bytes=0.5", "Write a whole"),
    ({"safety_bytes": True}, TypeError, "safety_bytes=True", "Write a whole"),
    ({"memory_fraction": 0}, ValueError, "memory_fraction=0", "Pass more"),
    ({"memory_fraction": -0.5}, ValueError, "memory_fraction=-0.5", "Pass more"),
    ({"memory_fraction": 1.01}, ValueError, "memory_fraction=1.01", "Pass 1 or less"),
    ({"memory_fraction": 90}, ValueError, "memory_fraction=90", "Pass 1 or less"),
    ({"memory_fraction": float("nan")}, ValueError, "memory_fraction=nan", "Write a finite"),
    ({"memory_fraction": True}, TypeError, "memory_fraction=True", "Write a float"),
    ({"memory_fraction": "0.9"}, TypeError, "memory_fraction='0.9'", "Write a float"),
    ({"weight_bytes": 1001}, ValueError, "weight_bytes=1001", "Use more GPUs"),
    # The largest part is named, the missing bytes are counted: 300 + 600 + 200 - 1,000 = 100.
    (
        {"weight_bytes": 300, "activation_bytes": 600, "safety_bytes": 200},
        ValueError,
        "activation_bytes=600",
        "100 bytes more are taken than the 1000 usable",
    ),
]


@pytest.mark.parametrize(("bad", "error", "starts", "step"), BUDGETS)
def test_budget(bad, error, starts, step):
    refuses(
        lambda: kv_budget_bytes(**{"gpu_bytes": 1000, "weight_bytes": 10} | bad),
        error,
        starts,
        step,
    )


@pytest.mark.parametrize(
    ("cached", "each", "error", "starts"),
    [
        (-1, 8, ValueError, "cached_tokens=-1"),
        (1.0, 8, TypeError, "cached_tokens=1.0"),
        (8, 0, ValueError, "tokens_per_sequence=0"),
        (8, True, TypeError, "tokens_per_sequence=True"),
    ],
)
def test_concurrency(cached, each, error, starts):
    refuses(lambda: max_concurrency(cached, each), error, starts, "")


@pytest.mark.parametrize("wrong", [None, 8.5, ("q8_0", "q8_0", "q8_0"), ["q8_0", "q8_0"]])
def test_bits_per_value(wrong):
    refuses(lambda: bits_per_value(wrong), ValueError, f"dtype={wrong!r}", "")


# --- the shared checks themselves ---


@pytest.mark.parametrize("kind", [int, np.int8, np.int64, np.uint16, np.intp])
def test_whole_takes_every_integer_and_gives_a_python_int(kind):
    found = whole("n", kind(7), low=7, high=7)
    assert found == 7
    assert type(found) is int


@pytest.mark.parametrize(
    "wrong", [True, False, np.bool_(True), 7.0, np.float32(7), Fraction(7), "7", None, [7], 7j]
)
def test_whole_refuses_the_rest(wrong):
    refuses(lambda: whole("n", wrong), TypeError, f"n={wrong!r}", "Write ")


def test_whole_names_the_bound_and_prefers_the_hint():
    refuses(lambda: whole("n", 6, low=7), ValueError, "n=6", "at least 7. Pass 7 or more.")
    refuses(lambda: whole("n", 8, high=7), ValueError, "n=8", "at most 7. Pass 7 or less.")
    refuses(lambda: whole("n", 6, low=7, hint="Ask."), ValueError, "n=6", "at least 7. Ask.")
    refuses(lambda: whole("n", 6.5, hint="Ask."), TypeError, "n=6.5", "whole number. Ask.")


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint64])
def test_whole_arrays_become_int64_copies(kind):
    array = np.array([[1, 2]], kind)
    found = whole_or_array("n", array, low=1)
    assert found.dtype == np.int64
    assert found.tolist() == [[1, 2]]
    found[:] = 0
    assert array.tolist() == [[1, 2]]
    assert whole_or_array("n", np.zeros(0, kind), low=1).size == 0
    assert type(whole_or_array("n", np.int8(3))) is int


def test_an_int64_array_is_copied_too():
    array = np.array([1, 2])
    whole_or_array("n", array)[:] = 0
    assert array.tolist() == [1, 2]


@pytest.mark.parametrize("number", [1, 0.5, np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_real_takes_every_number_and_gives_a_float(number):
    found = real("x", number, above=0, high=1)
    assert found == float(number)
    assert type(found) is float


@pytest.mark.parametrize("wrong", [True, np.bool_(False), "1", None, 1j, [1.0]])
def test_real_refuses_the_rest(wrong):
    refuses(lambda: real("x", wrong), TypeError, f"x={wrong!r}", "Write a float.")


def test_real_names_the_bound():
    refuses(lambda: real("x", float("-inf")), ValueError, "x=-inf", "Write a finite")
    refuses(lambda: real("x", 0, above=0), ValueError, "x=0", "above 0. Pass more.")
    refuses(lambda: real("x", 0.1, low=0.5), ValueError, "x=0.1", "at least 0.5")
    refuses(lambda: real("x", 2, high=1), ValueError, "x=2", "at most 1")
    assert real("x", 0.5, low=0.5, high=0.5) == 0.5


def test_one_of_gives_the_word_or_the_nearest():
    assert one_of("policy", "lru", ("lru", "lfu")) == "lru"
    refuses(lambda: one_of("policy", "LRU", ("lru",)), ValueError, "policy='LRU'", "'lru'?")
    gpus = ("A100 80GB", "H100 80GB")
    refuses(lambda: one_of("gpu", "h100", gpus), ValueError, "gpu='h100'", "'H100 80GB'?")
    refuses(
        lambda: one_of("policy", "zzz", ("lru", "lfu")),
        ValueError,
        "policy='zzz'",
        "Use one of lru, lfu.",
    )


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.py")), ids=lambda path: path.stem)
def test_a_checked_integer_takes_the_argument_s_place(path):
    """`whole` returns a Python int: whoever drops it goes on with a NumPy integer that may wrap."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    dropped = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "whole"
    ]
    assert not dropped
