"""What branches save when they keep one copy of their common prefix."""

import numpy as np

from kvlib._validate import whole_or_array
from kvlib.blocks import blocks_needed


def no_share_bytes(num_branches, prefix_tokens, bytes_per_token):
    """Compute the bytes of a common prefix when every branch keeps its own copy [bytes].

    Parameters
    ----------
    num_branches : int or ndarray of int
        Sequences that start with the prefix, 1 or more.
    prefix_tokens : int or ndarray of int
        Length of the prefix [tokens].
    bytes_per_token : int or ndarray of int
        KV cache of one token [bytes/token].

    Returns
    -------
    int or ndarray of int64
        Bytes of num_branches copies.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If `num_branches` is below 1 or another argument is negative.

    Notes
    -----
    M_no_share = k M(T_prefix), with M(T) = T times the bytes of one token.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.4.

    Examples
    --------
    >>> no_share_bytes(4, 1_000, 131_072)
    524288000
    """
    num_branches = whole_or_array("num_branches", num_branches, low=1)
    shared = shared_bytes(num_branches, prefix_tokens, bytes_per_token)
    return _product("num_branches * shared_bytes", num_branches, shared)


def shared_bytes(num_branches, prefix_tokens, bytes_per_token):
    """Compute the bytes of a common prefix that is kept once [bytes].

    Parameters
    ----------
    num_branches : int or ndarray of int
        Sequences that start with the prefix, 1 or more; the result is the same for all.
    prefix_tokens : int or ndarray of int
        Length of the prefix [tokens].
    bytes_per_token : int or ndarray of int
        KV cache of one token [bytes/token].

    Returns
    -------
    int or ndarray of int64
        Bytes of one copy.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If `num_branches` is below 1 or another argument is negative.

    Notes
    -----
    M_share = M(T_prefix).

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.4.

    Examples
    --------
    >>> shared_bytes(4, 1_000, 131_072)
    131072000
    """
    whole_or_array("num_branches", num_branches, low=1)
    prefix_tokens = whole_or_array("prefix_tokens", prefix_tokens, low=0)
    bytes_per_token = whole_or_array("bytes_per_token", bytes_per_token, low=0)
    return _product("prefix_tokens * bytes_per_token", prefix_tokens, bytes_per_token)


def prefix_saving_bytes(num_branches, prefix_tokens, bytes_per_token):
    """Compute the bytes that sharing a common prefix saves [bytes].

    Parameters
    ----------
    num_branches : int or ndarray of int
        Sequences that start with the prefix, 1 or more.
    prefix_tokens : int or ndarray of int
        Length of the prefix [tokens].
    bytes_per_token : int or ndarray of int
        KV cache of one token [bytes/token].

    Returns
    -------
    int or ndarray of int64
        (k - 1) M(T_prefix).

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If `num_branches` is below 1 or another argument is negative.

    Notes
    -----
    M_no_share - M_share = (k - 1) M(T_prefix). Blocks are whole, so what a paged cache saves is
    a little more before the branches write and a little less after: `prefix_saving_blocks`.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.4.

    Examples
    --------
    >>> prefix_saving_bytes(4, 1_000, 131_072)
    393216000
    """
    arguments = num_branches, prefix_tokens, bytes_per_token
    return no_share_bytes(*arguments) - shared_bytes(*arguments)


def prefix_saving_blocks(num_branches, prefix_tokens, block_size, num_written=0):
    """Count the blocks that sharing a prefix saves once some branches have written [blocks].

    Parameters
    ----------
    num_branches : int or ndarray of int
        Sequences that start with the prefix, 1 or more.
    prefix_tokens : int or ndarray of int
        Length of the prefix [tokens].
    block_size : int or ndarray of int
        Slots of one block [tokens/block].
    num_written : int or ndarray of int
        Branches that have appended at least one token, 0 to `num_branches`.

    Returns
    -------
    int or ndarray of int64
        Blocks saved of the prefix, against one copy for each branch.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If `num_branches` or `block_size` is below 1, or `num_written` is not in 0 to k.

    Notes
    -----
    (k - 1) floor(T / B) + [T mod B > 0] (k - min(m + 1, k)) after m branches have written.
    Full blocks stay shared for ever. A partial last block is copied by every writer but the last,
    who finds itself alone with it.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.4 (copy-on-write).

    Examples
    --------
    >>> [prefix_saving_blocks(4, 1_000, 16, written) for written in range(5)]
    [189, 188, 187, 186, 186]
    """
    num_branches = whole_or_array("num_branches", num_branches, low=1)
    prefix_tokens = whole_or_array("prefix_tokens", prefix_tokens, low=0)
    num_written = whole_or_array("num_written", num_written, low=0)
    if np.any(num_written > num_branches):
        raise ValueError(
            f"num_written={num_written}; it must be at most num_branches={num_branches}. "
            "Count each branch that has written once."
        )
    num_blocks = blocks_needed(prefix_tokens, block_size)
    num_full_blocks = prefix_tokens // block_size
    # The last of the branches to write changes nothing, hence the comparison.
    tail_savings = (num_branches - 1 - num_written) * (num_written < num_branches)
    full_savings = _product("num_branches * blocks", num_branches - 1, num_full_blocks)
    return full_savings + (num_blocks - num_full_blocks) * tail_savings


def shareable_tokens(prefix_tokens, prompt_tokens, block_size):
    """Count the tokens of a prompt that a prefix cache can reuse [tokens].

    Parameters
    ----------
    prefix_tokens : int or ndarray of int
        Tokens that the prompt shares with a cached sequence, counted from its start [tokens].
    prompt_tokens : int or ndarray of int
        Length of the whole prompt [tokens], 1 or more.
    block_size : int or ndarray of int
        Slots of one block [tokens/block].

    Returns
    -------
    int or ndarray of int64
        A whole number of blocks, below `prompt_tokens`.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If a count is out of range, or the prefix is longer than the prompt.

    Notes
    -----
    floor(min(T_prefix, T_prompt - 1) / B) B: prefix caches look up full blocks only, and the
    engine must compute the last prompt token itself, since its output gives the first new token.

    References
    ----------
    vLLM, docs/design/prefix_caching.md.

    Examples
    --------
    >>> shareable_tokens(prefix_tokens=10, prompt_tokens=14, block_size=4)
    8
    """
    prefix_tokens = whole_or_array("prefix_tokens", prefix_tokens, low=0)
    prompt_tokens = whole_or_array("prompt_tokens", prompt_tokens, low=1)
    block_size = whole_or_array("block_size", block_size, low=1)
    if np.any(prefix_tokens > prompt_tokens):
        raise ValueError(
            f"prefix_tokens={prefix_tokens}; it must be at most prompt_tokens={prompt_tokens}. "
            "Count the shared tokens as part of the prompt."
        )
    # A prefix as long as the prompt loses its last token, and so perhaps its last block.
    reusable = prefix_tokens - (prefix_tokens == prompt_tokens)
    return reusable // block_size * block_size


def _product(name, one, other):
    """Multiply ints or int64 arrays of no negative numbers; int64 must hold an array's products."""
    largest = int(np.max(one, initial=0)) * int(np.max(other, initial=0))
    if largest >= 2**63 and (isinstance(one, np.ndarray) or isinstance(other, np.ndarray)):
        raise ValueError(f"{name}={largest}; an int64 array cannot hold it. Pass ints.")
    return one * other
