"""Checks that every public function shares: name=value; the rule; the next step."""

import difflib
import math
from numbers import Integral, Real

import numpy as np


def whole(name, value, *, low=None, high=None, hint=""):
    """Return `value` as a Python int, or say which rule it breaks."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}={value!r}; it must be an integer. {_as_int(value)} {hint}".rstrip()
        )
    return int(_in_range(name, value, low, high, hint))


def whole_or_array(name, value, *, low=None, hint=""):
    """Like `whole`; an integer array of any shape comes back as int64."""
    if not isinstance(value, np.ndarray):
        return whole(name, value, low=low, hint=hint)
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name}.dtype={value.dtype}; it must be integer. Use .astype(np.int64).")
    if value.size:
        _in_range(f"{name}.min()", int(value.min()), low, None, hint)
        _in_range(f"{name}.max()", int(value.max()), None, np.iinfo(np.int64).max, hint)
    return value.astype(np.int64)


def real(name, value, *, low=None, high=None, above=None, hint=""):
    """Return `value` as a float that is finite and inside the stated range."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}; it must be a number. {hint or 'Write a float.'}")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an int too large for a float
        is_finite = False
    if not is_finite:
        raise ValueError(f"{name}={value}; it must be finite. {hint or 'Write a finite number.'}")
    if above is not None and not value > above:
        raise ValueError(f"{name}={value}; it must be above {above}. {hint or 'Pass more.'}")
    return float(_in_range(name, value, low, high, hint))


def one_of(name, value, allowed):
    """Return `value` if it is among the allowed words, else suggest the nearest one."""
    if isinstance(value, str) and value in allowed:
        return value
    lowered = {word.lower(): word for word in allowed}
    near = difflib.get_close_matches(str(value).lower(), lowered, n=1, cutoff=0.4)
    step = (
        f"Did you mean {lowered[near[0]]!r}?"
        if near
        else f"Use one of {', '.join(list(allowed)[:12])}{', ...' * (len(allowed) > 12)}."
    )
    raise ValueError(f"{name}={value!r}; it is not a known name. {step}")


def _in_range(name, value, low, high, hint):
    if low is not None and value < low:
        raise ValueError(
            f"{name}={value}; it must be at least {low}. {hint or f'Pass {low} or more.'}"
        )
    if high is not None and value > high:
        raise ValueError(
            f"{name}={value}; it must be at most {high}. {hint or f'Pass {high} or less.'}"
        )
    return value


def _as_int(value):
    is_number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    if is_number and math.isfinite(value) and value == int(value):
        return f"Write {int(value)}."
    return "Write a whole number."
