"""Store keys and values as small integers: the schemes, their true bytes and their error.

A group of values shares one scale. Which values form a group decides almost everything: the tokens
of a channel, the channels of a token, a short run of either, or the whole tensor. With `q` the
stored code, q_max = 2**(bits - 1) - 1 and levels = 2**bits - 1:

==================  ====================  ==============================
scheme              scale                 value read back
==================  ====================  ==============================
symmetric           max|x| / q_max        q * scale
``zero="point"``     (max - min) / levels  (q - zero_point) * scale
``zero="minimum"``   (max - min) / levels  q * scale + zero_point
==================  ====================  ==============================

"point" keeps an integer zero point, its codes start at -2**(bits - 1); "minimum" keeps the group's
lowest value, its codes start at 0. Rounding is to nearest, ties to even.

Three things to know before choosing:

- Symmetric codes waste a level. -q_max..q_max are one code fewer than the bits allow, so that 0
  stays 0 and -x mirrors x. Nobody notices at 8 bits; at 4 bits a step is max|x| / 7 instead of
  max|x| / 7.5, and at 2 bits only -1, 0 and 1 are left.
- An integer zero point does not fit the width of its codes. A channel that lives in [10, 11] has
  scale 1/255 and zero point -2678. Cast to int8 it wraps to -118, every code is clipped to 127,
  and the whole channel is read back as 0.96. Here it stays wide.
- A constant group has no range to divide by. Its asymmetric scale is its absolute value, and one
  code gives it back as exactly as the scale's dtype holds it. A symmetric group needs no exception.

`_definition` states the rules for one group. What runs is `_quantize_rows`: the same arithmetic for
many groups at once, in chunks that stay in a CPU core's cache and in buffers that every chunk uses
again. CuPy arrays that are symmetric and float16 or float32 go to the kernels of kernels.cu, by
`_launch_quantize` and `_launch_dequantize`; the rest is one chunk of CuPy's array code. All agree
bit for bit, but that CuPy's array code takes float32 denormals for zeros. The kernels do not.
"""

import functools
import math
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvlib import _data
from kvlib._attention import attention_weights, output_norm
from kvlib._validate import one_of, real, whole
from kvlib.backend import THREADS, array_module, launch

_CHUNK_BYTES = 1024 * 1024  # small enough for the caches, large enough to hide a call's cost
_BUFFERED = np.getbufsize()  # elements: NumPy first copies shorter rows of a broadcast operand
_INT_OF_WIDTH = {t.itemsize: (t, np.iinfo(t).max) for t in map(np.dtype, ("i2", "i4", "i8"))}
_FLOATS = (np.float16, np.float32, np.float64)
_IN_CUDA = {np.dtype(np.float16): "u16", np.dtype(np.float32): "float"}  # names in kernels.cu
_FP8 = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # mantissa, lowest exponent, largest
_UNIT = 8  # channels that a GPU thread moves at once


def _ceil(count, step):
    return -(-count // step)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """Codes, scales and zero points of one tensor, and how they lie.

    Attributes
    ----------
    data : numpy.ndarray or cupy.ndarray
        Stored codes: at 8 bits int8 (uint8 for a minimum) in the tensor's shape; below, uint8 with
        8 // bits codes a byte along `axis`, the first in the low bits, each row padded to a byte.
    scale : numpy.ndarray or cupy.ndarray
        One scale per group, in the tensor's unit. The token axis holds one entry per group along
        tokens, `axis` one per group along channels; per-channel schemes over all other axes hold
        ``(channels,)``.
    zero_point : numpy.ndarray, cupy.ndarray or None
        Shaped like `scale`: integers (int32, or int64 where needed), the stored minimum, or None.
    bits : int
        Width of a code [bits]: 8, 4 or 2.
    shape : tuple of int
        Shape of the tensor.
    dtype : numpy.dtype
        The tensor's dtype before quantization.
    scale_dtype : numpy.dtype
        Dtype of the scales, and of minima.
    granularity : str
        ``'channel'``, ``'token'`` or ``'tensor'``.
    group_size : int or None
        Values in a group, the last may be short [elements]; None: no groups inside a row or column.
    axis : int
        Channel axis, counted from 0.
    token_axis : int or None
        Token axis, counted from 0; None if all axes but the channel's count as tokens.
    zero : str or None
        ``'point'`` or ``'minimum'``; None for a symmetric scheme.

    Raises
    ------
    TypeError, ValueError
        If a field is of the wrong type or out of range; `quantize` says what each may be.

    Notes
    -----
    Codes below 8 bits are stored as code + 2**(bits - 1), except a minimum's, which start at 0.

    Examples
    --------
    >>> qt = quantize(np.array([[-7.0, 0.0, 7.0]]), bits=4, granularity="token")
    >>> qt.codes(), qt.data, qt.nbytes
    (array([[-7,  0,  7]], dtype=int8), array([[129,  15]], dtype=uint8), 6)
    """

    data: np.ndarray | None = None
    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    bits: int
    shape: tuple
    dtype: np.dtype
    scale_dtype: np.dtype
    granularity: str
    group_size: int | None
    axis: int
    token_axis: int | None
    zero: str | None

    def __post_init__(self):
        """Check the scheme, then tile [batch, tokens, channels] with its groups."""
        ndim, bits = len(self.shape), whole("bits", self.bits, low=2, high=8)
        half = 2 ** (bits - 1)
        if bits not in (8, 4, 2):
            raise ValueError(f"bits={bits}; a code takes 8, 4 or 2 bits. Use one of them.")
        tensor = one_of("granularity", self.granularity, ("channel", "token", "tensor")) == "tensor"
        if self.group_size is not None and tensor:
            raise ValueError(f"group_size={self.group_size}; a tensor is one group. Leave it out.")
        axis = whole("axis", self.axis, low=-ndim, high=ndim - 1) % ndim
        token_axis = None if tensor or ndim == 1 else self.token_axis
        if token_axis is not None:
            token_axis = whole("token_axis", token_axis, low=-ndim, high=ndim - 1) % ndim
        if token_axis == axis:
            step = "Name another axis, or None to pool all but the channel's."
            raise ValueError(f"token_axis={self.token_axis}; it is the channel axis. {step}")
        # Tokens with scales of their own need no batch: all axes but the channel's may be merged.
        pooled = token_axis is None or self.granularity == "token"
        last = [axis] if pooled else [token_axis, axis]
        order = [i for i in range(ndim) if i not in last] + last
        vars(self).update(axis=axis, token_axis=token_axis, _order=order, _kept=len(last))
        batch, *flat = self._merged(self.shape)
        run = max(1, *flat) if self.group_size is None else self.group_size
        run = whole("group_size", run, low=1)
        alone = {"channel": 1, "token": 0}.get(self.granularity)  # axis whose entries share nothing
        tile = [1 if i == alone else max(1, min(run, count)) for i, count in enumerate(flat)]
        lowest = {None: 1 - half, "point": -half, "minimum": 0}[self.zero]
        vars(self).update(
            bits=bits,
            group_size=None if self.group_size is None else run,
            _flat=(batch, *flat),
            _tile=tile,
            _grid=(batch, *(_ceil(count, run) for count, run in zip(flat, tile, strict=True))),
            _lowest=lowest,
            _levels=2 * half - 1 if self.zero else half - 1,  # steps of a group's scale
            _highest=2 * half - 1 if self.zero == "minimum" else half - 1,
            _offset=np.uint8(half if lowest and bits < 8 else 0),  # makes packed codes >= 0
            _codes=np.dtype(np.int8 if lowest else np.uint8),
            # With an offset float32 quotients would break the bound that `quantize` states.
            _work=np.dtype(np.float64 if self.zero or self.dtype == np.float64 else np.float32),
        )

    @property
    def nbytes(self):
        """Count what the tensor now takes: packed codes, scales and zero points [bytes].

        Returns
        -------
        int
            The arrays' own bytes; the shape and the names of the scheme are not counted.

        Examples
        --------
        >>> quantize(np.zeros((32, 8), np.float16), scale_dtype="float16").nbytes  # 256 + 8 * 2
        272
        """
        return sum(a.nbytes for a in (self.data, self.scale, self.zero_point) if a is not None)

    def codes(self):
        """Unpack the integers.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            One code per value, in the tensor's shape: int8, or uint8 if the minimum is stored.

        Examples
        --------
        >>> values = np.array([[0.0, 1.0, 3.0]])
        >>> quantize(values, bits=2, symmetric=False, granularity="token").codes()
        array([[-2, -1,  1]], dtype=int8)
        """
        packed = self._flatten(self.data).view(np.uint8)
        flat = _unpack(packed.reshape(math.prod(self._flat[:2]), packed.shape[2]), self)
        return self._restore(flat.reshape(self._flat))

    def _merged(self, shape):
        """Batch, tokens and channels of a shape with this tensor's axes."""
        moved = [shape[i] for i in self._order]
        lead = 0 if self._kept == 1 else len(moved) - 2
        return math.prod(moved[:lead]), math.prod(moved[lead:-1]), moved[-1]

    def _flatten(self, array):
        """View an array as [batch, tokens, channels]; copy only if its axes cannot be merged."""
        return array.transpose(self._order).reshape(self._merged(array.shape))

    def _restore(self, flat):
        """Undo `_flatten`, though the token and channel axes may have become shorter."""
        moved = [self.shape[i] for i in self._order[: -self._kept]]
        return flat.reshape(*moved, *flat.shape[-self._kept :]).transpose(
            np.argsort(self._order).tolist()
        )

    def _runs(self, *arrays):
        """Yield [batch, ., .] arrays as [rows, .]: at once, unless groups end inside an entry."""
        runs = self._flat[0] if self._flat[1] % self._tile[0] else 1
        for i in range(runs if math.prod(self._flat) else 0):
            yield [a if a is None else a.reshape(runs, -1, a.shape[2])[i] for a in arrays]

    def _bands(self, xp, rows):
        """Yield rows that hold whole groups, as their groups and as chunks of the rows."""
        chunk, run = len(rows), self._tile[0]
        if xp is np:
            chunk = max(1, _CHUNK_BYTES // (rows.shape[1] * self._work.itemsize))
        # A chunk of some short groups, or one long group in chunks; a short last group by itself.
        step, whole_groups = max(run, chunk // run * run), len(rows) // run * run
        for a, b in pairwise(sorted({*range(0, len(rows), step), whole_groups, len(rows)})):
            parts = [slice(start, min(start + chunk, b)) for start in range(a, b, chunk)]
            yield slice(a // run, _ceil(b, run)), parts


class _Room:
    """Buffers that a call uses again and again, so that no chunk touches fresh memory."""

    def __init__(self, xp):
        self.xp, self.held, self.views = xp, {}, {}

    def __call__(self, name, shape, dtype):
        key = name, shape, dtype
        if key not in self.views:
            self.views[key] = self._view(*key)
        return self.views[key]

    def _view(self, name, shape, dtype):
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self.held or self.held[name].size < num_bytes:
            raw, start = self.xp.empty(num_bytes + 4096, np.uint8), 0
            if self.xp is np:
                # A CPU takes a read for one of what it just wrote if both lie alike in their pages,
                # and waits, up to fivefold. Large arrays lie at 16: go half a page further.
                start = (2064 - raw.ctypes.data) % 4096
            self.held[name] = raw[start:]
        return self.held[name][:num_bytes].view(dtype).reshape(shape)

    def beside(self, name, numbers, tiles):
        """Copy a number per group, shaped to be broadcast over tiles."""
        times = tiles.shape[2] // numbers.shape[1]
        kept = self(name, (len(numbers), times, numbers.shape[1]), tiles.dtype)
        kept[:] = numbers[:, None]
        return kept.reshape(len(numbers), 1, -1, 1)


@functools.cache
def _limits(dtype):
    """Spacing at 1, smallest subnormal, smallest normal and largest number of a float dtype."""
    info = np.finfo(dtype)
    return tuple(map(float, (info.eps, info.smallest_subnormal, info.smallest_normal, info.max)))


def _fit(xp, low, high, qt):
    """Return scale, divisor and zero point of groups from `low` (symmetric: 0) to `high`."""
    dtype, base, room = qt.scale_dtype, low, qt._levels + 0.25
    eps, tiny, smallest_normal, largest = _limits(dtype)
    if qt.zero == "minimum":
        # Rounded down, never up, so that no value lies below the first code.
        nearest = low.astype(dtype).astype(qt._work)
        half_ulp = 0.51 * xp.maximum(xp.minimum(abs(nearest), largest) * eps, tiny)
        lower = nearest - half_ulp  # rounds to the next one below
        base = xp.where(nearest > low, lower, nearest).astype(dtype)
    exact = (high - base) / qt._levels
    if qt.zero:
        exact = xp.where(low == high, abs(high), exact)
    scale = exact.astype(dtype, copy=False)
    divisor, smallest = scale.astype(qt._work, copy=False), scale.min()
    if smallest == 0:  # a group of zeros
        divisor = xp.where(scale == 0, 1, divisor)
    if qt.zero == "point":
        # The first code may stand half a step off the lowest value, the last off the highest.
        base = xp.rint(low / divisor) * divisor
        room += 0.25 + xp.maximum(abs(low), abs(high)) * 2.0**-25 / divisor
    # A normal quotient that keeps its dtype is within half an ulp: never short.
    if qt.zero or dtype != qt._work or not smallest >= smallest_normal:
        short = high - base > room * divisor
        if short.any():
            # Rounding the scale down left the highest value past the last code: one float up.
            scale = xp.where(short, (exact * (1 + eps) + tiny).astype(dtype), scale)
            divisor = xp.where(short, scale, divisor)
    if not (smallest > 0 and scale.max() < np.inf):
        lost = ~xp.isfinite(scale) | ((scale == 0) & ((low != 0) | (high != 0)))
        if lost.any():
            rule = f"{dtype} must hold all scales and minima ({tiny:.2g} to {largest:.5g})"
            step = "Use scale_dtype='float32', or multiply the tensor by a constant first."
            raise ValueError(f"scale={float(exact[lost][0]):.3g}; {rule}. {step}")
    if qt.zero == "point":
        return scale, divisor, qt._lowest - xp.rint(low / divisor)
    return scale, divisor, base if qt.zero else None


@np.errstate(all="ignore")
def _definition(values, qt):
    """Return codes, scale and zero point of one group, as the formulas are written."""
    values = values.astype(qt._work)
    low, high = (values.min(), values.max()) if qt.zero else (0, abs(values).max())
    scale, divisor, zero = _fit(np, low, high, qt)
    steps = np.rint((values - zero if qt.zero == "minimum" else values) / divisor)
    codes = steps + zero if qt.zero == "point" else steps
    return np.clip(codes, qt._lowest, qt._highest), scale, zero


def _tiles(xp, rows, qt):
    """View [rows, channels] as [groups, tokens, groups, channels]; fill a short last group up.

    Where many tokens share the scales of their channels, n of them lie side by side, as many as
    NumPy needs to broadcast without copying a scale first: [groups, tokens / n, n * groups, 1].
    """
    short = -rows.shape[1] % qt._tile[1]
    if short:  # with its last value: no extreme changes
        rows = xp.pad(rows, ((0, 0), (0, short)), mode="edge")
    num_groups, columns = _ceil(len(rows), qt._tile[0]), qt._grid[2]
    if xp is np and qt._tile[1] == 1 and rows.flags.c_contiguous:
        beside = 1 << ((_BUFFERED - 1) // columns).bit_length()
        columns *= 1 if len(rows) // num_groups % (4 * beside) else beside
    return rows.reshape(num_groups, -1, columns, qt._tile[1])


def _reduce(xp, name, tiles, qt):
    """Return the 'min' or the 'max' of every group."""
    tiles = tiles.reshape(len(tiles), -1, qt._grid[2], tiles.shape[3])
    if xp is np and tiles.shape[1] == 1:  # neighbours: up to twice as fast as a short last axis
        starts = np.arange(0, tiles.size, tiles.shape[3])
        runs = {"min": np.minimum, "max": np.maximum}[name].reduceat(tiles.ravel(), starts)
        return runs.reshape(tiles.shape[::2])
    return getattr(tiles, name)(axis=(1, 3))


def _extremes(xp, room, tiles, qt):
    """Return every group's lowest and highest value (symmetric: 0 and the largest magnitude)."""
    if qt.zero:
        values = _widen(xp, room, tiles, np.result_type(tiles.dtype, np.float32))
        # Back in float16, what was not finite is infinite again.
        return [_reduce(xp, name, values, qt).astype(tiles.dtype) for name in ("min", "max")]
    # The bits of a magnitude order like it, and short runs of integers are reduced faster. NaN is
    # the largest, and float16 needs no conversion.
    integer, magnitude = _INT_OF_WIDTH[tiles.itemsize]
    bits = xp.bitwise_and(tiles.view(integer), magnitude, out=room("work", tiles.shape, integer))
    high = _reduce(xp, "max", bits, qt).view(tiles.dtype)
    return xp.zeros((), high.dtype), high


def _widen(xp, room, values, work):
    """Convert to the work precision."""
    if values.dtype == work:
        return values
    wide = room("work", values.shape, work)
    if xp is np and values.dtype == np.float16:
        # The bits of a float16, moved to where float32 keeps them, are its value times 2**-112,
        # denormals included: five times faster than NumPy's own conversion.
        bits = room("bits", values.shape, np.dtype(np.uint32))
        bits[:] = values.view(np.int16)
        bits <<= 13
        bits &= 0x8FFFE000
        return np.multiply(bits.view(np.float32), 2.0**112, out=wide)
    wide[:] = values
    return wide


@np.errstate(all="ignore")
def _quantize_rows(xp, rows, packed, scale, zero, qt):
    """Fill codes, scales and zero points of [rows, channels], band by band."""
    room = _Room(xp)
    # So large that the sum has no bits left for a fraction: adding it rounds, ties to even, and
    # leaves the code in the lowest byte.
    anchor = qt._work.type(1.5 * 2.0 ** np.finfo(qt._work).nmant + int(qt._offset))
    for groups, parts in qt._bands(xp, rows):
        tiles = [_tiles(xp, rows[part], qt) for part in parts]
        lows, highs = zip(*(_extremes(xp, room, tile, qt) for tile in tiles), strict=True)
        ends = functools.reduce(xp.minimum, lows), functools.reduce(xp.maximum, highs)
        low, high = (end.astype(qt._work, copy=False) for end in ends)
        scale[groups], divisor, offset = _fit(xp, low, high, qt)
        if qt.zero:
            zero[groups] = offset
        for part, tile in zip(parts, tiles, strict=True):
            values = _widen(xp, room, tile, qt._work)
            steps = room("work", values.shape, qt._work)
            if qt.zero == "minimum":
                values = xp.subtract(values, room.beside("zero", offset, values), out=steps)
            xp.divide(values, room.beside("scale", divisor, values), out=steps)
            if qt.zero == "point":
                # Only here can a code need clipping: other quotients end within the last code.
                xp.rint(steps, out=steps)
                steps += room.beside("zero", offset, values)
                xp.minimum(steps, qt._highest, out=steps)
            steps += anchor
            flat = steps.reshape(part.stop - part.start, -1)[:, : rows.shape[1]]
            _pack(room, flat, packed[part], qt)


def _pack(room, steps, packed, qt):
    """Put 8 // bits codes into a byte, the first in the low bits; pad each row to a byte."""
    bits, channels = qt.bits, steps.shape[1]
    steps = steps.view(f"u{steps.itemsize}")
    codes = packed
    if bits < 8:
        codes = room("codes", (len(steps), packed.shape[1] * 8 // bits), packed.dtype)
        codes[:, channels:] = 0
    codes[:, :channels] = steps  # the low bytes
    while bits < 8:
        pairs = codes.view("<u2")  # the first code of a pair below the second
        pairs |= pairs >> (8 - bits)
        bits *= 2
        codes = packed if bits == 8 else room("fewer codes", pairs.shape, codes.dtype)
        codes[:] = pairs  # the low bytes


def _unpack(packed, qt):
    """Return the codes of [rows, bytes]."""
    width = 8
    while width > qt.bits:
        width //= 2
        pairs = packed.astype("<u2", order="C")
        pairs |= pairs << (8 - width)
        pairs &= 0x0101 * (2**width - 1)
        packed = pairs.view(np.uint8)
    codes = packed[:, : qt._flat[2]]
    return (codes - qt._offset if qt._offset else codes).view(qt._codes)


def _dequantize_rows(xp, packed, out, scale, zero, qt):
    """Fill `out` [rows, channels], float32, with the values of the codes, rounded once."""
    room, steepest = _Room(xp), float(scale.max())
    offset = 0.0 if zero is None else float(abs(zero).max())
    # float32 also rounds once where all before its last operation is exact: integers below 2**24,
    # and a code times a float16 scale.
    if qt.zero == "minimum":
        once, reach = scale.dtype == np.float16, 2**qt.bits * steepest + offset
    else:
        once, reach = offset < 2**23, (2**qt.bits + offset) * steepest
    work = np.dtype(np.float32 if once and reach < 2.0**127 else np.float64)
    *_, largest = _limits(out.dtype)
    for groups, parts in qt._bands(xp, out):
        for part in parts:
            target = out[part]
            padded = len(target), qt._grid[2] * qt._tile[1]
            direct = work == np.float32 and target.shape == padded
            values = target if direct else room("work", padded, work)
            values[:, : out.shape[1]] = _unpack(packed[part], qt)
            values[:, out.shape[1] :] = 0
            tiles = _tiles(xp, values, qt)
            if qt.zero == "point":
                tiles -= room.beside("zero", zero[groups], tiles)
            tiles *= room.beside("scale", scale[groups], tiles)
            if qt.zero == "minimum":
                tiles += room.beside("zero", zero[groups], tiles)
            if not direct:
                target[:] = values[:, : out.shape[1]].clip(-largest, largest)


def _width(num_units):
    """Threads along a row of units: a power of two, a warp at most."""
    return min(32, 1 << max(0, num_units - 1).bit_length())


def _is_aligned(unit_bytes, array):
    """Say whether every unit of every row can be moved at once."""
    return not any(n % unit_bytes for n in (array.data.ptr, *array.strides[:-1]))


def _launch_quantize(values, packed, scale, qt):
    """Quantize [batch, tokens, channels] by a kernel, unless there is none or a scale is bad."""
    (_, tokens, channels), (run_t, run_c) = qt._flat, qt._tile
    num_runs, is_split = math.prod(qt._grid), qt._grid[2] > 1
    has_kernel = qt.dtype in _IN_CUDA and qt.zero is None and qt.granularity != "tensor"
    has_kernel = has_kernel and values.size and not isinstance(values, np.ndarray)
    if not has_kernel or (is_split and run_c * qt.bits % 8 and qt.granularity == "token"):
        return False
    xp = array_module(values)
    values, lost = xp.ascontiguousarray(values), xp.zeros(1, np.uint32)
    unit_bytes = min(16, _UNIT * values.itemsize)
    aligned = _is_aligned(unit_bytes, values) and not channels % _UNIT
    aligned = aligned and (qt.granularity == "channel" or not is_split or not run_c % _UNIT)
    kind = f"<{_IN_CUDA[qt.dtype]}, {qt.bits}, {str(bool(aligned)).lower()}"
    half, units = scale.dtype == np.float16, _ceil(channels, _UNIT)
    arguments = values, packed, scale, lost, int(half)
    if qt.granularity == "token":
        width = _width(_ceil(run_c, 2 * _UNIT))
        arguments += num_runs, qt._grid[2], run_c, channels, packed.shape[2]
        launch(f"quantize_token{kind}>", _ceil(num_runs, THREADS // width), arguments, width=width)
    else:
        held = {w: THREADS // w * (8 // values.itemsize) for w in (_width(units), 16, 8)}
        width = next((w for w in held if w <= units and run_t <= held[w]), _width(units))
        parts = _ceil(run_t, held[width])
        largest = xp.zeros(qt._grid, np.uint32) if parts > 1 else None
        slabs, runs = _ceil(units, width), qt._grid[1]
        arguments += largest, tokens, channels, run_t, packed.shape[2], slabs, parts, runs
        num_blocks = qt._grid[0] * runs * parts * slabs
        for step in ("LARGEST", "APPLY") if parts > 1 else ("FUSED",):
            launch(f"quantize_channel{kind}, {step}>", num_blocks, arguments, width=width)
    return not int(lost[0])


def _launch_dequantize(codes, scale, out, qt, table=None):
    """Read codes and scales [blocks, slots, heads, .] back by a kernel, unless there is none."""
    contiguous = codes.strides[3] == 1 and scale.strides[3] == scale.itemsize
    contiguous = contiguous and out.flags.c_contiguous
    has_kernel = contiguous and not qt.zero and out.dtype in _IN_CUDA and qt._flat[2]
    if isinstance(codes, np.ndarray) or not has_kernel:
        return False
    (_, slots, heads, _), channels = codes.shape, qt._flat[2]
    units = _ceil(channels, _UNIT)
    run_c = qt._tile[1] if qt._grid[2] > 1 else units * _UNIT
    if run_c > 1 and run_c % _UNIT:
        return False
    aligned = not channels % _UNIT and _is_aligned(qt.bits, codes) and not out.data.ptr % 16
    rows, width = out.size // (heads * channels), _width(heads * units)
    num_blocks = _ceil(rows, THREADS // width * 4) * _ceil(heads * units, width)
    strides = *codes.strides[:3], *(stride // scale.itemsize for stride in scale.strides[:3])
    arguments = codes, scale, out, table, int(scale.dtype == np.float16), rows, slots, heads
    arguments += channels, qt._tile[0], run_c, *strides
    name = f"dequantize<{_IN_CUDA[out.dtype]}, {qt.bits}, {str(aligned).lower()}>"
    launch(name, num_blocks, arguments, width=width)
    return True


def _float_tensor(name, value):
    """Return an array of a supported float dtype with at least one axis."""
    array = array_module(value).asarray(value)
    if array.dtype not in _FLOATS or not array.ndim:
        given = f"{name}={array.dtype} of shape {array.shape}"
        raise TypeError(f"{given}; it must be float16, 32 or 64. Use .astype(np.float32).")
    return array


def _not_finite(xp, tensor):
    """Return the error that names the first NaN or infinity, or None."""
    for at in xp.argwhere(~xp.isfinite(tensor))[:1].tolist():
        step = "Find out where it comes from, or use np.nan_to_num."
        rule = f"tensor{at}={float(tensor[tuple(at)])}; every value must be finite"
        return ValueError(f"{rule}. {step}")
    return None


def _check_out(out, shape, dtypes):
    """Refuse memory of another shape or dtype before anything is computed."""
    given = getattr(out, "dtype", None), getattr(out, "shape", None)
    if out is not None and (given[0] not in dtypes or given[1] != shape):
        rule = f"it must be {' or '.join(np.dtype(d).name for d in dtypes)} of shape {shape}"
        raise ValueError(f"out={given[0]} of shape {given[1]}; {rule}. Allocate it so.")


def quantize(
    tensor,
    *,
    bits=8,
    symmetric=True,
    granularity="channel",
    group_size=None,
    axis=-1,
    token_axis=-2,
    zero="point",
    scale_dtype="float32",
    out=None,
):
    """Round a tensor to integers, one scale per group.

    Parameters
    ----------
    tensor : array_like
        Keys or values, float16, float32 or float64, for example
        ``(num_kv_heads, num_tokens, head_dim)``; NumPy or CuPy.
    bits : int, optional
        Width of a code [bits]: 8, 4 or 2.
    symmetric : bool, optional
        True: no zero point. False: as `zero` says.
    granularity : {'channel', 'token', 'tensor'}, optional
        Who shares a scale: the tokens of a channel, the channels of a token, or everything. For the
        first two, all axes but the channel's and the token's stay separate.
    group_size : int, optional
        Split a channel into runs of this many tokens, or a token into runs of this many channels;
        the last run may be short [elements].
    axis : int, optional
        Channel axis.
    token_axis : int or None, optional
        Token axis. None pools every axis but `axis`, as does a tensor with one axis.
    zero : {'point', 'minimum'}, optional
        What an asymmetric group keeps beside its scale: an integer, or its lowest value. Ignored if
        `symmetric`.
    scale_dtype : {'float32', 'float16'}, optional
        Stored dtype of scales and minima.
    out : numpy.ndarray or cupy.ndarray, optional
        Memory for the codes, as `QuantizedTensor.data` describes it. Written only after every scale
        is known to be good.

    Returns
    -------
    QuantizedTensor
        Codes, scales and zero points; for an empty tensor, empty ones.

    Raises
    ------
    TypeError
        If the tensor is not of a float dtype named above, or an argument is of the wrong type.
    ValueError
        If a value is NaN or infinite (the first position is named), a scale overflows or vanishes
        in `scale_dtype`, or an argument is out of range.

    Notes
    -----
    With x̂ = `dequantize` of the result in float32, and ulp the spacing of float32,

    .. math:: |x - x̂| \\le scale / 2 + ulp(\\max|x|)

    for every value of a group that float32 holds, with the scale as stored. A scale is the nearest
    number of its dtype, or one of the next two up where nearest would leave the largest value
    beyond the last code. A stored minimum is the next number of its dtype at or below the lowest
    value. Symmetric quotients are float32 (float64 for a float64 tensor): a tie misjudged by the
    division costs half an ulp at most, the product that reads back another half. Quotients with an
    offset are float64, and reading back rounds once. So a float16 scale adds no term of its own; a
    float16 output of `dequantize` adds its own rounding. The scale of a group of zeros is 0.

    References
    ----------
    .. [1] Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024.
    .. [2] llama.cpp, ggml-quants.c, block formats q8_0, q4_0 and q4_1.

    Examples
    --------
    >>> keys = np.array([[1.0, -40.0], [-2.0, 80.0], [0.5, 127.0]], np.float32)
    >>> qt = quantize(keys)
    >>> float(qt.scale[0, 1]), qt.codes()[:, 1]
    (1.0, array([-40,  80, 127], dtype=int8))
    """
    tensor = _float_tensor("tensor", tensor)
    if not isinstance(symmetric, bool | np.bool_):
        raise TypeError(f"symmetric={symmetric!r}; it must be a bool. Write True or False.")
    xp = array_module(tensor, out)
    named = getattr(scale_dtype, "__name__", str(scale_dtype))
    qt = QuantizedTensor(
        bits=bits,
        zero=None if symmetric else one_of("zero", zero, ("point", "minimum")),
        granularity=granularity,
        group_size=group_size,
        axis=axis,
        token_axis=token_axis,
        shape=tensor.shape,
        dtype=tensor.dtype,
        scale_dtype=np.dtype(one_of("scale_dtype", named, ("float32", "float16"))),
    )
    packed = xp.empty((*qt._flat[:2], _ceil(qt._flat[2] * qt.bits, 8)), np.uint8)
    codes = qt._restore(packed.view(qt._codes) if qt.bits == 8 else packed)
    _check_out(out, codes.shape, (codes.dtype,))
    kept = {None: None, "point": np.int64, "minimum": qt.scale_dtype}[qt.zero]
    scale, zero_point = xp.zeros(qt._grid, qt.scale_dtype), kept and xp.zeros(qt._grid, kept)
    values = qt._flatten(tensor)
    try:
        if not _launch_quantize(values, packed, scale, qt):
            for arrays in qt._runs(values, packed, scale, zero_point):
                _quantize_rows(xp, *arrays, qt)
    except ValueError as problem:  # an impossible scale: NaN and infinity are the likelier cause
        raise _not_finite(xp, tensor) or problem from None
    if qt.zero == "point" and not (abs(zero_point) >= 2**31).any():
        zero_point = zero_point.astype(np.int32)
    if out is not None:
        out[...] = codes
    if qt.token_axis is None:  # pooled: one number per channel, unless there are groups
        groups = (a if a is None or group_size else a.ravel() for a in (scale, zero_point))
    else:
        groups = (a if a is None else qt._restore(a) for a in (scale, zero_point))
    scale, zero_point = groups
    return replace(qt, data=codes if out is None else out, scale=scale, zero_point=zero_point)


def quantize_per_channel_symmetric(tensor, axis=-1, bits=8):
    """Quantize each channel without a zero point, all other axes pooled.

    Parameters
    ----------
    tensor : array_like
        Float values, for example ``(num_tokens, num_channels)``; NumPy or CuPy.
    axis : int, optional
        Channel axis.
    bits : int, optional
        Width of a code [bits]: 8, 4 or 2.

    Returns
    -------
    QuantizedTensor
        With `scale` of shape ``(num_channels,)``.

    Raises
    ------
    TypeError, ValueError
        As `quantize`.

    Notes
    -----
    .. math::
        scale_c = \\max|x_c| / q_{max}, \\qquad
        q_c = clip(round(x_c / scale_c), -q_{max}, q_{max}), \\qquad q_{max} = 2^{bits - 1} - 1

    Examples
    --------
    >>> qt = quantize_per_channel_symmetric(np.array([[127.0], [-63.6], [0.4]]))
    >>> qt.scale, qt.data.T
    (array([1.], dtype=float32), array([[127, -64,   0]], dtype=int8))
    """
    return quantize(tensor, bits=bits, axis=axis, token_axis=None)


def quantize_per_channel_asymmetric(tensor, axis=-1, bits=8):
    """Quantize each channel with an integer zero point, all other axes pooled.

    Parameters
    ----------
    tensor : array_like
        Float values, for example ``(num_tokens, num_channels)``; NumPy or CuPy.
    axis : int, optional
        Channel axis.
    bits : int, optional
        Width of a code [bits]: 8, 4 or 2.

    Returns
    -------
    QuantizedTensor
        With `scale` and `zero_point` of shape ``(num_channels,)``.

    Raises
    ------
    TypeError, ValueError
        As `quantize`.

    Notes
    -----
    .. math::
        scale_c &= (\\max x_c - \\min x_c) / (q_{max} - q_{min}), \\qquad
        zero_c = round(q_{min} - \\min x_c / scale_c) \\\\
        q_c &= clip(round(x_c / scale_c) + zero_c, q_{min}, q_{max})

    with q_min = -2**(bits - 1). The zero point is an integer of any width: see the module's text
    for what int8 would make of it.

    Examples
    --------
    >>> qt = quantize_per_channel_asymmetric(np.array([[10.0], [10.5], [11.0]]))
    >>> qt.zero_point, dequantize(qt).round(3).T
    (array([-2678], dtype=int32), array([[10.   , 10.498, 11.   ]], dtype=float32))
    """
    return quantize(tensor, bits=bits, symmetric=False, axis=axis, token_axis=None)


def dequantize(qt, out=None):
    """Read a quantized tensor back.

    Parameters
    ----------
    qt : QuantizedTensor
        What `quantize` returned.
    out : numpy.ndarray or cupy.ndarray, optional
        Where to write, in the tensor's shape: float32, float64 or float16.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        `out`, or a new float32 array.

    Raises
    ------
    TypeError
        If `qt` is not a `QuantizedTensor`, or `out` has another dtype.
    ValueError
        If `out` has another shape.

    Notes
    -----
    Values are (q - zero_point) * scale, or q * scale + minimum, rounded once to float32, then to
    the dtype of `out`. A value past that dtype's largest becomes the largest, never infinity: 127
    steps of a rounded scale can pass 65504.

    Examples
    --------
    >>> dequantize(quantize(np.array([[0.25, -2.0]]), granularity="token")).round(4)
    array([[ 0.252, -2.   ]], dtype=float32)
    """
    if not isinstance(qt, QuantizedTensor):
        raise TypeError(
            f"qt={type(qt).__name__}; it must be a QuantizedTensor. Call quantize first."
        )
    _check_out(out, qt.shape, _FLOATS)
    xp, flat = array_module(qt.data, out), None if out is None else qt._flatten(out)
    usable = (np.float32,) if xp is np else _IN_CUDA
    if flat is None or flat.dtype not in usable or not flat.flags.c_contiguous:
        flat = xp.empty(qt._flat, np.float32)
    codes, groups = qt._flatten(qt.data).view(np.uint8), (qt.scale, qt.zero_point)
    if qt.token_axis is not None:
        groups = (a if a is None else qt._flatten(a) for a in groups)
    scale, zero = (a if a is None else a.reshape(qt._grid) for a in groups)
    # For the kernel every batch is a block, and every token a slot with one head.
    if not _launch_dequantize(codes[:, :, None], scale[:, :, None], flat, qt):
        flat = flat if flat.dtype == np.float32 else xp.empty(qt._flat, np.float32)
        for arrays in qt._runs(codes, flat, scale, zero):
            _dequantize_rows(xp, *arrays, qt)
    value = qt._restore(flat)
    if out is None:
        return value
    if not xp.may_share_memory(value, out):
        largest = 65504.0 if out.dtype == np.float16 else np.inf
        out[...] = value.clip(-largest, largest)
    return out


def round_to_fp8(tensor, kind="e4m3", scale=1.0):
    """Round a tensor to the numbers that an 8-bit float can hold [tensor's unit].

    Parameters
    ----------
    tensor : array_like
        Keys or values, float16, float32 or float64; NumPy or CuPy.
    kind : {'e4m3', 'e5m2'}, optional
        4 bits of exponent and 3 of mantissa, to 448; or 5 and 2, to 57,344.
    scale : float, optional
        One scale for the tensor: what is stored is tensor / scale. Engines that were given none
        take 1.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        What is read back, float32, in the tensor's shape.

    Raises
    ------
    TypeError
        If the tensor is not of a float dtype named above, or the scale no number.
    ValueError
        If a value is NaN or infinite, the kind is unknown, or the scale is not above 0.

    Notes
    -----
    To nearest, ties to even; what lies beyond the largest number becomes it, as engines saturate.
    The steps grow with the value: half a step is at most a sixteenth of it (e4m3) or an eighth, but
    below 2**-6 (e5m2: 2**-14) the steps stay as they are. A byte a value; the scale is not counted.

    References
    ----------
    .. [1] Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.

    Examples
    --------
    >>> round_to_fp8(np.array([1.06, 1.07, 13.4, 500.0]))
    array([  1.   ,   1.125,  13.   , 448.   ], dtype=float32)
    """
    tensor, scale = _float_tensor("tensor", tensor), real("scale", scale, above=0)
    mantissa, lowest, largest = _FP8[one_of("kind", kind, _FP8)]
    xp = array_module(tensor)
    if problem := _not_finite(xp, tensor):
        raise problem
    with np.errstate(over="ignore"):
        stored = tensor.astype(np.result_type(tensor, np.float32)) / scale
    stored = xp.clip(stored, -largest, largest)
    _, exponent = xp.frexp(stored)  # of a number in [0.5, 1)
    step = xp.ldexp(xp.ones_like(stored), xp.maximum(exponent - 1, lowest) - mantissa)
    return (xp.rint(stored / step) * step * scale).astype(np.float32)


def quantization_error(original, qt):
    """Measure what a quantized tensor lost and what it saved [tensor's unit; ratios without unit].

    Parameters
    ----------
    original : array_like
        The tensor that was quantized, in the dtype it is really stored in.
    qt : QuantizedTensor
        Its quantized form.

    Returns
    -------
    dict of str to float
        ``max_abs_error``, ``mean_abs_error``, ``rmse``, ``relative_rmse`` (rmse over the root mean
        square of the original) and ``compression_ratio`` (bytes of the original over `qt.nbytes`).

    Raises
    ------
    TypeError
        If the original is not a float array or `qt` not a `QuantizedTensor`.
    ValueError
        If the shapes differ.

    Notes
    -----
    Errors are computed in float64; they are 0 for an empty tensor. The ratio counts packed codes,
    scales and zero points: 8 bits with one float16 scale per 32 values are 8.5 bits, so 1.88 and
    not 2.

    Examples
    --------
    >>> values = np.linspace(-1, 1, 64, dtype=np.float16).reshape(2, 32)
    >>> qt = quantize(values, granularity="token", group_size=32, scale_dtype="float16")
    >>> round(quantization_error(values, qt)["compression_ratio"], 4)  # q8_0: 8.5 bits of 16
    1.8824
    """
    original, value = _float_tensor("original", original), dequantize(qt)
    if original.shape != qt.shape:
        rule = f"qt was made from shape {qt.shape}"
        raise ValueError(f"original.shape={original.shape}; {rule}. Pass that tensor.")
    exact = original.astype(np.float64).ravel()
    error, count = abs(value.ravel() - exact), max(1, exact.size)
    norm = float(exact @ exact) ** 0.5
    return {
        "max_abs_error": float(error.max(initial=0)),
        "mean_abs_error": float(error.sum()) / count,
        "rmse": (float(error @ error) / count) ** 0.5,
        "relative_rmse": float(error @ error) ** 0.5 / norm if norm else 0.0,
        "compression_ratio": original.nbytes / qt.nbytes if qt.nbytes else 1.0,
    }


def attention_output(q, k, v):
    """Let queries attend causally over keys and values [unit of v].

    Parameters
    ----------
    q : array_like
        The last n queries, ``(num_heads, n, head_dim)``.
    k : array_like
        Keys, ``(num_kv_heads, num_tokens, head_dim)``, or several versions of them at once,
        ``(num_kv_heads, num_versions, num_tokens, head_dim)``.
    v : array_like
        Values, ``(num_kv_heads, num_tokens, width)``; versions may lie side by side in the width.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        ``(num_heads, n, width)`` or ``(num_heads, n, num_versions, width)``, in float32, or float64
        if any array is.

    Raises
    ------
    TypeError
        If an array is not of a float dtype.
    ValueError
        If the shapes do not fit.

    Notes
    -----
    .. math:: o = softmax(q k^T / \\sqrt{head\\_dim}) v

    The last query sits on the last key and sees all of them, the one before it one fewer. Each KV
    head serves num_heads / num_kv_heads query heads.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.

    Examples
    --------
    >>> q, k = np.array([[[9.0, 0.0]]]), np.array([[[9.0, 0.0], [0.0, 9.0]]])
    >>> attention_output(q, k, k).round(3)
    array([[[9., 0.]]])
    """
    named = {"q": q, "k": k, "v": v}
    q, k, v = arrays = [_float_tensor(*pair) for pair in named.items()]
    fits = (q.ndim, v.ndim) == (3, 3) and k.ndim in (3, 4)
    fits = fits and (k.shape[0], k.shape[-2]) == v.shape[:2] and q.shape[2] == k.shape[-1]
    fits = fits and all(array.size for array in arrays)
    if not fits or q.shape[1] > v.shape[1] or q.shape[0] % k.shape[0]:
        shapes = ", ".join(f"{name}.shape={a.shape}" for name, a in zip(named, arrays, strict=True))
        rule = "they must be (heads, n, d), (kv_heads, T, d) and (kv_heads, T, width), none empty"
        raise ValueError(f"{shapes}; {rule}. Reshape them: n <= T, kv_heads divides heads.")
    xp, work = array_module(*arrays), np.result_type(np.float32, *arrays)
    weights = attention_weights(xp, q.astype(work), k.astype(work))
    output = weights.reshape(k.shape[0], -1, v.shape[1]) @ v.astype(work)
    return output.reshape(*q.shape[:2], *k.shape[1:-2], v.shape[2])


def attention_output_error(q, k, v, k_hat, v_hat):
    """Compare attention over quantized keys and values with attention over the originals [ratio].

    Parameters
    ----------
    q, k, v : array_like
        As for `attention_output`.
    k_hat, v_hat : array_like
        What is read back instead, shaped like `k` and `v`.

    Returns
    -------
    float
        ||o' - o|| / ||o|| over all heads and queries; 0 means no difference.

    Raises
    ------
    TypeError
        If an array is not of a float dtype.
    ValueError
        If the shapes do not fit, or the attention output is zero everywhere.

    Notes
    -----
    The error of an attention output is not the quality of an answer: a model has more layers, and
    forgives some errors more than others.

    Examples
    --------
    >>> q, k = np.array([[[1.0, 0.0]]]), np.array([[[9.0, 0.0], [0.0, 9.0]]])
    >>> round(attention_output_error(q, k, k, k, k * 1.25), 9)
    0.25
    """
    if np.shape(k) != np.shape(k_hat) or np.shape(v) != np.shape(v_hat):
        given = f"k_hat.shape={np.shape(k_hat)}, v_hat.shape={np.shape(v_hat)}"
        raise ValueError(f"{given}; they must be k's and v's. Reshape them.")
    exact, read_back = attention_output(q, k, v), attention_output(q, k_hat, v_hat)
    xp = array_module(exact)
    return float(xp.linalg.norm(read_back - exact)) / output_norm(xp, exact)


class LayerSample(NamedTuple):
    """What one layer of a real model computed, in float16.

    Attributes
    ----------
    k : numpy.ndarray
        Keys after RoPE, ``(3, 1024, 64)``: KV heads, tokens, head_dim.
    v : numpy.ndarray
        Values, ``(3, 1024, 64)``.
    q : numpy.ndarray
        Queries of tokens 960 to 1023 after RoPE, ``(9, 64, 64)``: three heads share a KV head.
    acc : numpy.ndarray
        Attention that each token received from the queries before token 960, ``(9, 1024)``.

    Examples
    --------
    >>> load_kv_sample()[4].k.dtype
    dtype('float16')
    """

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    acc: np.ndarray


def load_kv_sample():
    """Load keys, values and queries of a real model.

    Returns
    -------
    dict of int to LayerSample
        Layers 4, 14 and 26 of SmolLM2-135M-Instruct, reading the first 1,024 tokens of Jane
        Austen's *Persuasion*.

    Raises
    ------
    FileNotFoundError
        If the project's data files are not there.
    ValueError
        If the file's checksum is not the one in data/SHA256SUMS.

    References
    ----------
    .. [1] data/README.md: source, licence, and how to record the file again.

    Examples
    --------
    >>> sample = load_kv_sample()
    >>> sorted(sample), sample[26].k.shape
    ([4, 14, 26], (3, 1024, 64))
    """
    content = BytesIO(_data.read_bytes("smollm2_kv.npz"))
    with np.load(content, allow_pickle=False) as arrays:
        return {
            int(layer): LayerSample(*(arrays[f"{name}_{layer}"] for name in LayerSample._fields))
            for layer in arrays["layers"]
        }
