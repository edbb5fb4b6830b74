"""Read and write a paged pool: blocks that lie anywhere become tokens in order, and back.

A pool is an array ``[num_blocks, block_size, ...]``, for keys or values ``[num_blocks, block_size,
num_kv_heads, head_dim]``. Token t of a sequence stands in slot ``t % block_size`` of block
``block_table[t // block_size]``.

A quantized pool is a `kvlib.quantization.QuantizedTensor` of such an array with ``token_axis=1``:
every block has scales of its own, so blocks can be read, copied and shared one by one. With
``granularity="token"`` (scales ``[num_blocks, block_size, num_kv_heads, groups]``) tokens can be
written one by one too, as serving engines do; ``granularity="channel"`` keeps one scale for the
tokens of a channel in a block (or in `group_size` of them), and is written once a block is full.
"""

import math
from dataclasses import replace

import numpy as np

from kvlib._validate import one_of, real, whole
from kvlib.backend import THREADS, array_module, launch
from kvlib.quantization import (
    _FLOATS,
    QuantizedTensor,
    _check_out,
    _launch_dequantize,
    dequantize,
    quantize,
)

_CHUNK_BYTES = 1024 * 1024  # of values read back at a time: they stay in a CPU core's cache

_WORDS = {16: "uint4", 8: "u64", 4: "unsigned", 2: "u16", 1: "u8"}  # names in kernels.cu


def gather_kv(pool_array, block_table, num_tokens, out=None):
    """Copy the tokens of one sequence out of a pool, in order.

    Parameters
    ----------
    pool_array : numpy.ndarray or cupy.ndarray, (num_blocks, block_size, ...)
        Keys or values of every block, of any dtype.
    block_table : array_like of int, (n,)
        Block ids in token order. Entries beyond the last token's block are ignored.
    num_tokens : int
        Tokens to read [tokens], 0 to n * block_size.
    out : numpy.ndarray or cupy.ndarray, (num_tokens, ...), optional
        Where to write: of the pool's dtype, and no part of the pool.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, (num_tokens, ...)
        `out`, or a new array.

    Raises
    ------
    TypeError, ValueError
        If an entry names no block, the table is too short, `out` does not fit, or NumPy and CuPy
        arrays are mixed; nothing was read or written then.

    Notes
    -----
    .. math:: out_t = pool[table[\\lfloor t / B \\rfloor], t \\bmod B]

    Examples
    --------
    >>> pool = np.arange(8).reshape(4, 2)  # 4 blocks of 2 tokens
    >>> gather_kv(pool, [3, 0], 3)
    array([6, 7, 0])
    """
    pool = _check_pool("pool_array", pool_array)
    xp = array_module(pool, block_table, out)
    table, num_tokens = _used(xp, block_table, num_tokens, pool.shape)
    shape = (num_tokens, *pool.shape[2:])
    _check_out(out, shape, (pool.dtype,))
    out = xp.empty(shape, pool.dtype) if out is None else out
    _check_places(pool, out)
    if _launch_move(pool, pool, out, table, None, 0, num_tokens):
        return out
    num_full, rest = divmod(num_tokens, pool.shape[1])
    full = out[: num_tokens - rest].reshape(num_full, *pool.shape[1:])
    if xp is np and pool.flags.c_contiguous:
        # Checked above, so "clip" never clips; the default mode would copy through a buffer.
        np.take(pool, table[:num_full], axis=0, out=full, mode="clip")
    else:
        full[...] = pool[table[:num_full]]
    if rest:
        out[num_tokens - rest :] = pool[table[num_full], :rest]
    return out


def gather_dequantize(pool, block_table, num_tokens, out=None):
    """Read the tokens of one sequence back from a quantized pool, in order.

    Parameters
    ----------
    pool : QuantizedTensor, (num_blocks, block_size, ...)
        Keys or values of every block, quantized with ``token_axis=1``.
    block_table : array_like of int, (n,)
        Block ids in token order. Entries beyond the last token's block are ignored.
    num_tokens : int
        Tokens to read [tokens], 0 to n * block_size.
    out : numpy.ndarray or cupy.ndarray, (num_tokens, ...), optional
        Where to write: float16, float32 or float64.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, (num_tokens, ...)
        `out`, or a new float32 array: bit for bit what `dequantize` gives for the same tokens.

    Raises
    ------
    TypeError, ValueError
        As `gather_kv`, and if `pool` is not quantized or its blocks share scales.

    Examples
    --------
    >>> values = np.array([[[127.0, 1.0]], [[-254.0, 2.0]]], np.float32)  # 2 blocks of 1 token
    >>> pool = quantize(values, granularity="token", token_axis=1)
    >>> gather_dequantize(pool, [1, 0], 2)
    array([[-254.,    2.],
           [ 127.,    1.]], dtype=float32)
    """
    _check_pool("pool", pool, True)
    xp = array_module(pool.data, block_table, out)
    table, num_tokens = _used(xp, block_table, num_tokens, pool.shape)
    shape = (num_tokens, *pool.shape[2:])
    _check_out(out, shape, _FLOATS)
    out = xp.empty(shape, np.float32) if out is None else out
    _check_places(pool.data, out)
    is_usual = len(pool.shape) == 4 and pool.axis == 3
    if is_usual and _launch_dequantize(pool.data.view(np.uint8), pool.scale, out, pool, table):
        return out
    num_full, rest = divmod(num_tokens, pool.shape[1])
    full = out[: num_tokens - rest].reshape(num_full, *pool.shape[1:])
    step = (
        max(1, _CHUNK_BYTES // (4 * max(1, math.prod(pool.shape[1:]))))
        if xp is np
        else max(1, num_full)
    )
    for start in range(0, num_full, step):
        part = slice(start, start + step)
        dequantize(_select(pool, table[:num_full][part]), out=full[part])
    if rest:
        last = xp.empty((1, *pool.shape[1:]), out.dtype)
        out[num_tokens - rest :] = dequantize(_select(pool, table[num_full:]), out=last)[0, :rest]
    return out


def write_tokens(pool, block_table, first_token, values):
    """Store consecutive tokens of one sequence in a pool, in place.

    Parameters
    ----------
    pool : numpy.ndarray, cupy.ndarray or QuantizedTensor, (num_blocks, block_size, ...)
        Keys or values of every block; quantized, then with ``granularity="token"``.
    block_table : array_like of int, (n,)
        Block ids in token order. Only the blocks that are written are looked at.
    first_token : int
        Position of the first of the tokens in the sequence [tokens].
    values : numpy.ndarray or cupy.ndarray, (num_tokens, ...)
        What to store, of the pool's dtype (quantized: of the dtype before quantization).

    Raises
    ------
    TypeError, ValueError
        If an entry names no block or one twice, the table is too short, `values` do not fit, or
        NumPy and CuPy arrays are mixed; nothing was written then. Quantized: as `quantize`.

    Examples
    --------
    >>> pool = np.zeros((4, 2), np.int64)
    >>> write_tokens(pool, [3, 0], 1, np.array([7, 8]))
    >>> pool.tolist()
    [[8, 0], [0, 0], [0, 0], [0, 7]]
    """
    is_quantized = isinstance(pool, QuantizedTensor)
    _check_pool("pool", pool, is_quantized)
    if is_quantized and pool.granularity != "token":
        rule = "tokens must not share scales. Use granularity='token', or write whole blocks."
        raise ValueError(f"pool.granularity={pool.granularity!r}; {rule}")
    xp = array_module(*_arrays(pool), block_table, values)
    if not isinstance(values, xp.ndarray) or values.dtype != pool.dtype:
        given = f"values={type(values).__name__} of {getattr(values, 'dtype', None)}"
        raise TypeError(f"{given}; it must be {xp.__name__} {pool.dtype}. Convert it.")
    if not values.ndim or values.shape[1:] != pool.shape[2:]:
        rule = f"it must be (num_tokens, {', '.join(map(str, pool.shape[2:]))})"
        raise ValueError(f"values.shape={values.shape}; {rule}. Reshape it.")
    first, block_size = whole("first_token", first_token, low=0), pool.shape[1]
    table, _ = _used(xp, block_table, first + len(values), pool.shape, first // block_size)
    _distinct(xp, "block_table", table, pool.shape[0])
    _check_places(_arrays(pool)[0], values)
    if is_quantized:
        kept = {name: getattr(pool, name) for name in ("bits", "group_size", "granularity")}
        kept |= {"symmetric": not pool.zero, "zero": pool.zero or "point", "token_axis": 0}
        kept |= {"axis": pool.axis - 1, "scale_dtype": pool.scale_dtype.name}
        values = quantize(values, **kept)
        if pool.zero and values.zero_point.dtype != pool.zero_point.dtype:
            widest, rule = (
                int(abs(values.zero_point).max()),
                f"the pool's are {pool.zero_point.dtype}",
            )
            raise ValueError(f"zero_point={widest}; {rule}. Use zero='minimum'.")
    low = first % block_size
    slots = xp.arange(low, low + values.shape[0])
    where = table[slots // block_size], slots % block_size
    for stored, new in zip(_arrays(pool), _arrays(values), strict=True):
        if not _launch_move(stored, new, stored, None, table, low, low + len(new)):
            stored[where] = new


def copy_blocks(pool, sources, targets):
    """Copy whole blocks inside a pool, in place: what copy-on-write does.

    Parameters
    ----------
    pool : numpy.ndarray, cupy.ndarray or QuantizedTensor, (num_blocks, block_size, ...)
        Keys or values of every block.
    sources, targets : array_like of int, (n,)
        Block ids. No block is a target twice, or both source and target: then the order in which
        blocks are copied would matter.

    Raises
    ------
    TypeError, ValueError
        If an id names no block or the ids break the rule above; nothing was copied then.

    Examples
    --------
    >>> pool = np.arange(8).reshape(4, 2)
    >>> copy_blocks(pool, [0, 0], [2, 3])
    >>> pool.tolist()
    [[0, 1], [2, 3], [0, 1], [0, 1]]
    """
    _check_pool("pool", pool, isinstance(pool, QuantizedTensor))
    xp = array_module(*_arrays(pool), sources, targets)
    sources = _ids(xp, "sources", sources, pool.shape[0])
    targets = _ids(xp, "targets", targets, pool.shape[0])
    if len(sources) != len(targets):
        rule = f"{len(sources)} sources need as many"
        raise ValueError(f"len(targets)={len(targets)}; {rule}. Pass pairs.")
    is_target = _distinct(xp, "targets", targets, pool.shape[0])
    if is_target[sources].any():
        both = int(sources[is_target[sources]][0])
        raise ValueError(f"sources={both}; this block is a target too. Copy in two calls.")
    for array in _arrays(pool):
        num_slots = len(sources) * array.shape[1]
        if not _launch_move(array, array, array, sources, targets, 0, num_slots):
            array[targets] = array[sources]


def _launch_move(pool, source, target, source_ids, target_ids, low, high):
    """Move tokens `low` to `high` of a row of blocks by a kernel, unless there is none."""
    row = source if target_ids is not None else target
    contiguous = pool[0].flags.c_contiguous and (row is pool or row.flags.c_contiguous)
    if isinstance(pool, np.ndarray) or not contiguous:
        return False
    token_bytes, stride = pool[0, :1].nbytes, pool.strides[0]
    word = math.gcd(16, token_bytes, stride, source.data.ptr, target.data.ptr)
    low, high, block = (n * token_bytes // word for n in (low, high, pool.shape[1]))
    arguments = source, target, source_ids, target_ids, stride // word, stride // word, block
    num_blocks = -(-(high - low) // (4 * THREADS))
    launch(f"move_blocks<{_WORDS[word]}>", num_blocks, (*arguments, low, high))
    return True


# How often the stored bytes move, and the plain ones, before attention reads.
_MOVES = {
    "gather": (2, 0),
    "gather, then dequantize": (3, 1),
    "gather and dequantize fused": (1, 1),
    "inside attention": (0, 0),
}


def gather_bytes(path, stored_bytes, plain_bytes):
    """Count what a way of reading a paged cache moves before attention can start [bytes].

    Parameters
    ----------
    path : str
        ``'gather'``: copy as stored. ``'gather, then dequantize'``: copy, read the copy, write
        plain values. ``'gather and dequantize fused'``: read once, write plain values.
        ``'inside attention'``: nothing, the attention kernel follows the block table itself.
    stored_bytes : int
        What the pool holds of these tokens, scales included [bytes].
    plain_bytes : int
        The same values at the width attention computes with [bytes].

    Returns
    -------
    int
        Bytes read and written. Attention's own read of what is left to read comes on top.

    Raises
    ------
    TypeError
        If a number is not an integer.
    ValueError
        If the path is unknown or a number is negative.

    Notes
    -----
    .. math:: b = r \\, b_{stored} + w \\, b_{plain}

    Examples
    --------
    >>> gather_bytes("gather, then dequantize", 1, 2)
    5
    >>> gather_bytes("gather and dequantize fused", 1, 2)
    3
    """
    times_stored, times_plain = _MOVES[one_of("path", path, _MOVES)]
    stored = whole("stored_bytes", stored_bytes, low=0)
    return times_stored * stored + times_plain * whole("plain_bytes", plain_bytes, low=0)


def decode_seconds_per_token(weight_bytes, cache_bytes, bytes_per_second):
    """Bound the time of one decode step from below by what it must read [s].

    Parameters
    ----------
    weight_bytes : int
        Weights read once for the whole batch [bytes].
    cache_bytes : int
        Caches of all sequences of the batch [bytes].
    bytes_per_second : int or float
        Memory bandwidth [bytes/s], decimal.

    Returns
    -------
    float
        Seconds of a step, which gives every sequence of the batch one token.

    Raises
    ------
    TypeError
        If a number of bytes is not an integer.
    ValueError
        If a number of bytes is negative or the bandwidth is not above 0.

    Notes
    -----
    .. math:: t = (W + \\sum_i M(T_i)) / \\beta

    Examples
    --------
    >>> decode_seconds_per_token(15 * 10**9, 5 * 10**9, 4 * 10**12)
    0.005
    """
    total = whole("weight_bytes", weight_bytes, low=0) + whole("cache_bytes", cache_bytes, low=0)
    return total / real("bytes_per_second", bytes_per_second, above=0)


def _arrays(pool):
    """Return what a pool stores."""
    if isinstance(pool, QuantizedTensor):
        return [a for a in (pool.data, pool.scale, pool.zero_point) if a is not None]
    return [pool]


def _select(pool, ids):
    """Return some blocks of a quantized pool, as a quantized tensor of their own."""
    shape, zero = (len(ids), *pool.shape[1:]), pool.zero_point
    zero = zero if zero is None else zero[ids]
    return replace(pool, shape=shape, data=pool.data[ids], scale=pool.scale[ids], zero_point=zero)


def _check_pool(name, pool, quantized=False):
    """Return a pool that is an array, or quantized block by block."""
    if not isinstance(pool, QuantizedTensor if quantized else array_module(pool).ndarray):
        rule = "a QuantizedTensor. Or use gather_kv" if quantized else "an array. Use np.asarray"
        other = "" if quantized else ", or gather_dequantize for a quantized pool"
        raise TypeError(f"{name}={type(pool).__name__}; it must be {rule}{other}.")
    if len(pool.shape) < 2 or 0 in pool.shape[:2]:
        rule = "it must be (num_blocks, block_size, ...) with 1 or more of both"
        raise ValueError(f"{name}.shape={pool.shape}; {rule}. Reshape it.")
    if quantized and (pool.token_axis != 1 or pool.axis < 2):
        given = f"{name}.token_axis={pool.token_axis}, .axis={pool.axis}"
        raise ValueError(f"{given}; each block needs its own scales. Quantize with token_axis=1.")
    return pool


def _ids(xp, name, ids, num_blocks):
    """Return block ids as an array, all of them blocks of the pool."""
    array = xp.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        given = f"{name}={array.dtype} of shape {array.shape}"
        raise TypeError(f"{given}; it must be integers (n,). Use .astype(np.int64).")
    array = array.astype(np.int64, copy=False)
    worst = int(array.view(np.uint64).max()) if array.size else 0  # a negative id is a huge one
    if worst >= num_blocks:
        wrong = worst if worst < 2**63 else worst - 2**64
        raise ValueError(f"{name}={wrong}; blocks are 0 to {num_blocks - 1}. Fix the ids.")
    return array


def _used(xp, block_table, num_tokens, pool_shape, first_place=0):
    """Return the entries of a block table that the tokens need, and the tokens."""
    num_blocks, block_size = pool_shape[:2]
    num_tokens, length = whole("num_tokens", num_tokens, low=0), len(block_table)
    if num_tokens > length * block_size:
        rule = f"{length} blocks of {block_size} hold {length * block_size} tokens"
        raise ValueError(f"num_tokens={num_tokens}; {rule}. Pass the whole table.")
    used = block_table[first_place : -(-num_tokens // block_size)]
    return _ids(xp, "block_table", used, num_blocks), num_tokens


def _distinct(xp, name, ids, num_blocks):
    """Return a mask of the blocks that were named, each once."""
    count = xp.bincount(ids, minlength=num_blocks)
    if count.max() > 1:
        raise ValueError(f"{name}={int(count.argmax())}; this block is there twice. Name it once.")
    return count.astype(bool)


def _check_places(pool_array, other):
    """Refuse arrays on different devices, or in each other's memory."""
    places = [getattr(a, "device", "cpu") for a in (pool_array, other)]
    if places[0] != places[1]:
        raise ValueError(f"device={places[1]}; the pool is on {places[0]}. Use one device.")
    if array_module(other).may_share_memory(pool_array, other):
        raise ValueError("out=memory of the pool; both would change at once. Use other memory.")
