"""Bytes stay `int` everywhere; only these functions turn them into text and back."""

import re
from fractions import Fraction

from kvlib._validate import whole

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_BINARY = {"KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_NUMBER = r"(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?"
_FACTOR = {"B": 1} | _BINARY | _DECIMAL


def format_bytes(num_bytes):
    """Write a byte count with the largest binary prefix that keeps it at least 1 [text].

    Parameters
    ----------
    num_bytes : int
        Bytes to show [bytes]; negative counts are shown with their sign.

    Returns
    -------
    str
        For example ``'3.50 GiB'``; below 1 KiB the exact number of bytes.

    Raises
    ------
    TypeError
        If `num_bytes` is not an integer.

    Notes
    -----
    Two decimals are for reading only: compute with the integer, never with this text.

    Examples
    --------
    >>> format_bytes(131_072), format_bytes(79 * 2**30 + 2**29), format_bytes(512)
    ('128.00 KiB', '79.50 GiB', '512 B')
    """
    num_bytes = whole("num_bytes", num_bytes)
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if abs(num_bytes) >= _BINARY[name]:
            return f"{num_bytes / _BINARY[name]:,.2f} {name}"
    return f"{num_bytes} B"


def parse_bytes(text, *, name="text"):
    """Read a size or a bandwidth as people write it [bytes, or bytes/s].

    Parameters
    ----------
    text : str
        A number, a unit and, for a bandwidth, ``/s``: ``'24 GiB'`` (binary), ``'1 TB'`` or
        ``'3.35 TB/s'`` (decimal).
    name : str, optional
        What an error calls it.

    Returns
    -------
    int
        Bytes, or bytes per second.

    Raises
    ------
    TypeError
        If `text` is not a string.
    ValueError
        If the unit is missing or ambiguous ("80G", "16 KB"), the number is malformed or negative,
        or the result is not a whole number of bytes.

    Notes
    -----
    kB, MB, GB, TB and PB are powers of 1,000, KiB to TiB powers of 1,024, as the standards say.
    A GPU's memory is not parsed: its marketing name is neither (see data/gpus.json).

    References
    ----------
    .. [1] IEC 80000-13:2008, "Quantities and units: information science and technology".

    Examples
    --------
    >>> parse_bytes("1 TB"), parse_bytes("3.35 TB/s"), parse_bytes("16 KiB")
    (1000000000000, 3350000000000, 16384)
    """
    if not isinstance(text, str):
        raise TypeError(
            f"{name}={text!r}; it must be a string. Write a number and a unit, '24 GiB'."
        )
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]+)(?:/s)?\s*", text)
    if not match:
        raise ValueError(
            f"{name}={text!r}; it must be a number and a unit. Write '24 GiB' or '1 TB'."
        )
    number, unit = match.groups()
    if unit not in _FACTOR:
        raise ValueError(
            f"{name}={text!r}; {unit!r} could mean powers of 1,000 or of 1,024. "
            f"Write one of {', '.join(_FACTOR)}."
        )
    num_bytes = Fraction(number.replace(",", "")) * _FACTOR[unit]
    if num_bytes.denominator != 1:
        raise ValueError(
            f"{name}={text!r}; it must be a whole number of bytes. Use a smaller unit."
        )
    return int(num_bytes)
