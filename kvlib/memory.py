"""How many bytes the KV cache holds, and how much of it fits."""

import bisect
import functools
import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from kvlib._validate import one_of, real, whole, whole_or_array
from kvlib.blocks import blocks_needed
from kvlib.models import ModelShape


@dataclass(frozen=True)
class _Layout:
    """How one cache dtype stores values: payload bits each, scale and minimum bits per group."""

    name: str
    payload_bits: int
    group_size: int = 1
    metadata_bits: int = 0


_PLAIN = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}
# llama.cpp: 32 values share a 16-bit scale, the _1 types a 16-bit minimum too.
_SCALED = {"q8_0": 8, "q5_1": 5, "q5_0": 5, "q4_1": 4, "q4_0": 4, "iq4_nl": 4}
_LAYOUTS = {name: _Layout(name, bits) for name, bits in _PLAIN.items()} | {
    name: _Layout(name, bits, 32, 32 if name.endswith("_1") else 16)
    for name, bits in _SCALED.items()
}

DTYPES = tuple(_LAYOUTS)


def bits_per_value(dtype):
    """Count the bits one cached value takes, scales included [bits/value].

    Parameters
    ----------
    dtype : str or tuple of str
        A name in `DTYPES`, or ``'int8/g64'``: 64 values share an fp16 scale, ``'int8/g64z'``: and
        an fp16 minimum. A pair names the key's and the value's dtype; their mean is returned.

    Returns
    -------
    fractions.Fraction
        Exact, for example 17/2 for q8_0.

    Raises
    ------
    ValueError
        If the name is unknown; the message suggests the nearest.

    Notes
    -----
    Bare ``int8``, ``int4`` and ``int2`` count the payload only: what a per-tensor or a per-channel
    scale costs vanishes over a long sequence.

    References
    ----------
    .. [1] llama.cpp, ggml/src/ggml-common.h: the block layouts of q8_0, q5_1, q5_0, q4_1, q4_0.

    Examples
    --------
    >>> float(bits_per_value("q8_0")), float(bits_per_value("int8/g64z"))
    (8.5, 8.5)
    >>> float(bits_per_value(("bf16", "q5_1")))
    11.0
    """
    k_layout, v_layout = _layout_pair(dtype)
    return (_bits(k_layout) + _bits(v_layout)) / 2


def kv_heads_per_rank(num_kv_heads, tensor_parallel):
    """Count the KV heads that each tensor-parallel rank stores [heads/rank].

    Parameters
    ----------
    num_kv_heads : int
        KV heads of a layer [heads]; 1 for MLA.
    tensor_parallel : int
        Ranks that share a layer [ranks].

    Returns
    -------
    int
        ``num_kv_heads / tensor_parallel``, or 1 where there are more ranks than heads: then every
        head is stored ``tensor_parallel / num_kv_heads`` times.

    Raises
    ------
    TypeError
        If a count is not an integer.
    ValueError
        If neither count divides the other.

    Examples
    --------
    >>> kv_heads_per_rank(8, 4), kv_heads_per_rank(4, 8), kv_heads_per_rank(1, 8)
    (2, 1, 1)
    """
    num_kv_heads = whole("num_kv_heads", num_kv_heads, low=1)
    tensor_parallel = whole("tensor_parallel", tensor_parallel, low=1)
    if num_kv_heads % tensor_parallel == 0:
        return num_kv_heads // tensor_parallel
    if tensor_parallel % num_kv_heads == 0:
        return 1
    fitting = [n for n in (1, 2, 3, 4, 6, 8, 16) if not (num_kv_heads % n and n % num_kv_heads)]
    raise ValueError(
        f"tensor_parallel={tensor_parallel}; it must divide num_kv_heads={num_kv_heads} or be a "
        f"multiple of it. Use {', '.join(map(str, fitting))}."
    )


def kv_bytes_per_token(shape, dtype="bf16", tensor_parallel=1):
    r"""Count the bytes one token adds to one rank's cache while windows still fill [bytes/token].

    Parameters
    ----------
    shape : ModelShape
        The model.
    dtype : str or tuple of str
        Cache dtype, see `bits_per_value`.
    tensor_parallel : int
        Ranks that share each layer [ranks].

    Returns
    -------
    int
        Cache growth of one rank [bytes/token].

    Raises
    ------
    TypeError
        If `shape` is not a ModelShape.
    ValueError
        If the dtype is unknown, its groups do not divide a token's values, one token is not a
        whole number of bytes, or the heads cannot be shared among the ranks.

    Notes
    -----
    Equation (1.1) for the uniform model, with :math:`s` the width of a value in bits:

    .. math:: m = 2 \, L \, H_{KV} \, d_{head} \, s / 8

    Other models add up their layer groups. `marginal_kv_bytes` says what the next token adds at a
    given length, when windows are full.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023,
       arXiv:2309.06180, section 3: 800 KB a token for OPT-13B.

    Examples
    --------
    >>> llama = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)
    >>> kv_bytes_per_token(llama), kv_bytes_per_token(llama, "q8_0")
    (131072, 69632)
    """
    return _whole_bytes(sum(rate.bits for rate in _rates(shape, dtype, tensor_parallel)), dtype)


def sequence_kv_bytes(shape, num_tokens, dtype="bf16", tensor_parallel=1, block_size=None):
    r"""Count the bytes one sequence holds in one rank's cache [bytes].

    Parameters
    ----------
    shape : ModelShape
        The model.
    num_tokens : int or numpy.ndarray
        Length of the sequence [tokens], any shape.
    dtype : str or tuple of str
        Cache dtype, see `bits_per_value`.
    tensor_parallel : int
        Ranks that share each layer [ranks].
    block_size : int, optional
        Count whole blocks of this many tokens [tokens]; None counts tokens.

    Returns
    -------
    int or numpy.ndarray
        Bytes, an int64 array of the same shape for an array of lengths [bytes].

    Raises
    ------
    TypeError
        If `shape` is not a ModelShape or a count is not an integer.
    ValueError
        If a count is out of range, or as `kv_bytes_per_token`.

    Notes
    -----
    Equation (1.2), the sum over layer groups g:

    .. math:: M(T) = \sum_g L_g \,(H_g (k_g + v_g)\, s / 8 \cdot \min(T, W_g) + state_g)

    With blocks a full layer holds ceil(T/B) of them and a window layer
    ceil(T/B) - floor(max(0, T - W)/B), since a block is dropped once all of it left the window.

    Examples
    --------
    >>> from kvlib.models import load_models
    >>> gemma = load_models()["gemma-3-27b"]
    >>> sequence_kv_bytes(gemma, 131_072) / 2**30
    10.40625
    """
    num_tokens = whole_or_array("num_tokens", num_tokens, low=0)
    if block_size is not None:
        block_size = whole("block_size", block_size, low=1)
    rates = _rates(shape, dtype, tensor_parallel)
    denominator = math.lcm(*(rate.bits.denominator for rate in rates))
    parts = [int(rate.bits * denominator) for rate in rates]
    if isinstance(num_tokens, np.ndarray) and num_tokens.size:
        longest = int(num_tokens.max())
        if (longest + (block_size or 0)) * max(sum(parts), 1) >= 2**63:
            raise ValueError(
                f"num_tokens.max()={longest}; an int64 array cannot hold the bits. Pass an int."
            )
    total = sum(
        part * _held_tokens(num_tokens, rate.window, block_size)
        for part, rate in zip(parts, rates, strict=True)
    )
    if np.any(total % (8 * denominator)):
        raise ValueError(f"dtype={dtype!r}; the total is not whole bytes. Use a wider dtype.")
    return total // (8 * denominator) + sum(rate.state_bytes for rate in rates)


def scale_kv_bytes(shape, num_tokens, dtype="bf16", tensor_parallel=1):
    """Count those of a sequence's bytes that are scales and minima, not values [bytes].

    Parameters
    ----------
    shape : ModelShape
        The model.
    num_tokens : int or numpy.ndarray
        Length of the sequence [tokens], any shape.
    dtype : str or tuple of str
        Cache dtype, see `bits_per_value`.
    tensor_parallel : int
        Ranks that share each layer [ranks].

    Returns
    -------
    int or numpy.ndarray
        Bytes, an int64 array for an array of lengths [bytes]; 0 for a dtype without groups.

    Raises
    ------
    TypeError
        As `sequence_kv_bytes`.
    ValueError
        As `sequence_kv_bytes`.

    Notes
    -----
    Equation (1.2) minus the same with payload bits only.

    Examples
    --------
    >>> llama = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)
    >>> scale_kv_bytes(llama, 1, "q8_0"), sequence_kv_bytes(llama, 1, "q8_0")
    (4096, 69632)
    """
    payload = tuple(replace(layout, metadata_bits=0) for layout in _layout_pair(dtype))
    whole_bytes, payload_bytes = (
        sequence_kv_bytes(shape, num_tokens, stored, tensor_parallel) for stored in (dtype, payload)
    )
    return whole_bytes - payload_bytes


def marginal_kv_bytes(shape, num_tokens, dtype="bf16", tensor_parallel=1, block_size=None):
    """Count the bytes that the token after `num_tokens` adds to one rank's cache [bytes/token].

    Parameters
    ----------
    shape : ModelShape
        The model.
    num_tokens : int or numpy.ndarray
        Tokens the sequence has already [tokens].
    dtype : str or tuple of str
        Cache dtype, see `bits_per_value`.
    tensor_parallel : int
        Ranks that share each layer [ranks].
    block_size : int, optional
        Count whole blocks of this many tokens [tokens].

    Returns
    -------
    int or numpy.ndarray
        M(T+1) - M(T) [bytes/token]. Layers whose window is full add nothing; with blocks, most
        tokens add nothing and a window layer may even give one back.

    Raises
    ------
    TypeError
        As `sequence_kv_bytes`.
    ValueError
        As `sequence_kv_bytes`.

    Examples
    --------
    >>> from kvlib.models import load_models
    >>> gemma = load_models()["gemma-3-27b"]
    >>> marginal_kv_bytes(gemma, 100), marginal_kv_bytes(gemma, 100_000)
    (507904, 81920)
    """
    num_tokens = whole_or_array("num_tokens", num_tokens, low=0)
    before, after = (
        sequence_kv_bytes(shape, n, dtype, tensor_parallel, block_size)
        for n in (num_tokens, num_tokens + 1)
    )
    return after - before


def kv_budget_bytes(
    gpu_bytes,
    weight_bytes,
    activation_bytes=0,
    workspace_bytes=0,
    safety_bytes=0,
    memory_fraction=1.0,
):
    """Subtract everything that is not cache from one GPU's memory [bytes].

    Parameters
    ----------
    gpu_bytes : int
        Memory that programs see [bytes], see `kvlib.models.load_devices`.
    weight_bytes : int
        Weights on this GPU [bytes].
    activation_bytes : int
        Peak of the activations, which grows with the longest allowed prefill [bytes].
    workspace_bytes : int
        CUDA graphs, communication buffers [bytes].
    safety_bytes : int
        What stays free [bytes].
    memory_fraction : float
        Share of the memory that the engine may use, above 0 and at most 1.

    Returns
    -------
    int
        Bytes left for the cache [bytes].

    Raises
    ------
    TypeError
        If a size is not an integer.
    ValueError
        If a size is negative, the fraction is out of range, or more is taken than there is.

    Examples
    --------
    >>> kv_budget_bytes(80 * 2**30, 15 * 2**30, memory_fraction=0.9) / 2**30
    57.0
    """
    gpu_bytes = whole("gpu_bytes", gpu_bytes, low=1)
    taken = {
        "weight_bytes": weight_bytes,
        "activation_bytes": activation_bytes,
        "workspace_bytes": workspace_bytes,
        "safety_bytes": safety_bytes,
    }
    taken = {name: whole(name, value, low=0) for name, value in taken.items()}
    real("memory_fraction", memory_fraction, above=0, high=1)
    # The decimal the caller wrote: 0.9 of a budget must not lose a byte to binary rounding.
    usable = math.floor(gpu_bytes * Fraction(str(memory_fraction)))
    left = usable - sum(taken.values())
    if left < 0:
        largest = max(taken, key=taken.get)
        raise ValueError(
            f"{largest}={taken[largest]}; {-left} bytes more are taken than the {usable} usable "
            "ones. Use more GPUs, a narrower dtype or a higher memory_fraction."
        )
    return left


def max_cached_tokens(budget_bytes, shape, dtype="bf16", tensor_parallel=1, block_size=16):
    """Find the longest single sequence whose whole blocks fit a budget [tokens].

    Parameters
    ----------
    budget_bytes : int
        Cache budget of one rank [bytes].
    shape : ModelShape
        The model.
    dtype : str or tuple of str
        Cache dtype, see `bits_per_value`.
    tensor_parallel : int
        Ranks that share each layer [ranks].
    block_size : int
        Tokens of a block [tokens]; 1 counts single tokens.

    Returns
    -------
    int
        A multiple of `block_size` [tokens].

    Raises
    ------
    TypeError
        As `sequence_kv_bytes`.
    ValueError
        If not even one block fits, or no layer grows with the sequence.

    Notes
    -----
    For a uniform model this is also the number of tokens that any set of sequences can share,
    which engines log at start-up. For other models it is not: use `max_sequences`.

    Examples
    --------
    >>> llama = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128)
    >>> max_cached_tokens(4 * 2**30, llama)
    32768
    """
    budget_bytes = whole("budget_bytes", budget_bytes, low=0, high=2**62)
    block_size = whole("block_size", block_size, low=1)
    rates = _rates(shape, dtype, tensor_parallel)
    endless_bits = sum(rate.bits for rate in rates if rate.window is None)
    if not endless_bits:
        raise ValueError(
            f"shape={shape.name!r}; none of its layers grows without end, so no length is the "
            "longest. Use max_sequences."
        )

    def _bytes_of(num_blocks):
        tokens = num_blocks * block_size
        return sequence_kv_bytes(shape, tokens, dtype, tensor_parallel, block_size)

    # As if every layer grew without end, and as if only those did that do: often the same number.
    growing_bits = sum(rate.bits for rate in rates)
    free_bytes = max(0, budget_bytes - sum(rate.state_bytes for rate in rates))
    enough = 8 * free_bytes // (growing_bits * block_size)
    too_many = 8 * budget_bytes // (endless_bits * block_size) + 2
    num_blocks = bisect.bisect_right(range(1, too_many), budget_bytes, lo=enough, key=_bytes_of)
    if not num_blocks:
        raise ValueError(
            f"budget_bytes={budget_bytes}; one block of {block_size} tokens needs {_bytes_of(1)}. "
            "Use a smaller block_size, a narrower dtype or a larger budget."
        )
    return num_blocks * block_size


def max_sequences(
    budget_bytes, shape, num_tokens, dtype="bf16", tensor_parallel=1, block_size=None
):
    """Count the sequences of one length that fit a budget [sequences].

    Parameters
    ----------
    budget_bytes : int
        Cache budget of one rank [bytes].
    shape : ModelShape
        The model.
    num_tokens : int
        Length of each sequence [tokens].
    dtype : str or tuple of str
        Cache dtype, see `bits_per_value`.
    tensor_parallel : int
        Ranks that share each layer [ranks].
    block_size : int, optional
        Count whole blocks of this many tokens [tokens].

    Returns
    -------
    int
        ``budget_bytes // sequence_kv_bytes(...)`` [sequences]; 0 if not even one fits.

    Raises
    ------
    TypeError
        As `sequence_kv_bytes`.
    ValueError
        If the budget is negative or the sequence empty.

    Examples
    --------
    >>> from kvlib.models import load_models
    >>> max_sequences(20 * 2**30, load_models()["gemma-3-27b"], 1024)
    41
    """
    budget_bytes = whole("budget_bytes", budget_bytes, low=0)
    num_tokens = whole("num_tokens", num_tokens, low=1)
    return budget_bytes // sequence_kv_bytes(shape, num_tokens, dtype, tensor_parallel, block_size)


def max_concurrency(cached_tokens, tokens_per_sequence):
    """Divide the tokens that fit by the length of a sequence, as engines log it [sequences].

    Parameters
    ----------
    cached_tokens : int
        Tokens that fit the cache [tokens], see `max_cached_tokens`.
    tokens_per_sequence : int
        Length of a sequence [tokens].

    Returns
    -------
    float
        The quotient [sequences]. Right for uniform models only: windows and constant states make
        short sequences dearer and long ones cheaper than it says.

    Raises
    ------
    TypeError
        If a count is not an integer.
    ValueError
        If a count is out of range.

    References
    ----------
    .. [1] vllm-project/vllm issue 10517: 1,952 blocks of 16 tokens, 20,000 each, "1.56x".

    Examples
    --------
    >>> round(max_concurrency(1952 * 16, 20_000), 2)
    1.56
    """
    cached_tokens = whole("cached_tokens", cached_tokens, low=0)
    return cached_tokens / whole("tokens_per_sequence", tokens_per_sequence, low=1)


@dataclass(frozen=True)
class _Rate:
    """What one layer group costs one rank: bits per token held, its window, its states."""

    bits: Fraction
    window: int | None
    state_bytes: int


def _rates(shape, dtype, tensor_parallel):
    if not isinstance(shape, ModelShape):
        raise TypeError(f"shape={shape!r:.40}; it must be a ModelShape. Build one or use a preset.")
    tensor_parallel = whole("tensor_parallel", tensor_parallel, low=1)
    layouts = _layout_pair(dtype)
    return [_rate(group, *layouts, tensor_parallel) for group in shape.layer_groups]


@functools.lru_cache(maxsize=1024)  # a slider asks for the same layers again and again
def _rate(group, k_layout, v_layout, tensor_parallel):
    heads = kv_heads_per_rank(group.num_kv_heads, tensor_parallel)
    bits = Fraction(0)
    for layout, width in ((k_layout, group.k_dim), (v_layout, group.v_dim)):
        values = heads * width
        if values % layout.group_size:
            raise ValueError(
                f"dtype={layout.name!r}; groups of {layout.group_size} must divide the {values} "
                "values that a token stores in a layer of a rank. Use a smaller group."
            )
        bits += values * _bits(layout)
    state_bytes, rest = divmod(group.state_bytes * heads, group.num_kv_heads)
    if rest:
        raise ValueError(
            f"state_bytes={group.state_bytes}; it does not split over {group.num_kv_heads} heads. "
            "Make it a multiple of num_kv_heads."
        )
    return _Rate(group.num_layers * bits, group.window, group.num_layers * state_bytes)


def _held_tokens(num_tokens, window, block_size):
    """Count the tokens, or the slots of whole blocks, that a layer holds."""
    is_array = isinstance(num_tokens, np.ndarray)
    outside = 0
    if window is not None:
        outside = (np.maximum if is_array else max)(0, num_tokens - window)
    if block_size is None:
        return num_tokens - outside
    return (blocks_needed(num_tokens, block_size) - outside // block_size) * block_size


def _layout_pair(dtype):
    if isinstance(dtype, tuple):
        if len(dtype) != 2:
            raise ValueError(f"dtype={dtype!r}; a tuple names two dtypes. Write (k, v).")
        return _layout(dtype[0]), _layout(dtype[1])
    return (_layout(dtype),) * 2


def _layout(dtype):
    if isinstance(dtype, _Layout):
        return dtype
    grouped = re.fullmatch(r"int(8|4|2)/g([1-9]\d*)(z?)", dtype) if isinstance(dtype, str) else None
    if grouped:
        bits, group_size, minimum = grouped.groups()
        return _Layout(dtype, int(bits), int(group_size), 32 if minimum else 16)
    return _LAYOUTS[one_of("dtype", dtype, _LAYOUTS)]


def _bits(layout):
    return layout.payload_bits + Fraction(layout.metadata_bits, layout.group_size)


def _whole_bytes(bits, dtype):
    num_bytes = bits / 8
    if num_bytes.denominator != 1:
        raise ValueError(
            f"dtype={dtype!r}; a token takes {float(bits):g} bits, not whole bytes. "
            "Use a wider dtype."
        )
    return int(num_bytes)
