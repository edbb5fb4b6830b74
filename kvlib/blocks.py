"""How many fixed blocks of slots hold a sequence, and how many of those slots stay empty."""

import numpy as np

from kvlib._validate import whole, whole_or_array


def blocks_needed(num_tokens, block_size):
    """Count the blocks that hold a sequence of this length [blocks].

    Parameters
    ----------
    num_tokens : int or ndarray of int
        Length of the sequence [tokens]; zero and below need no block.
    block_size : int or ndarray of int
        Slots of one block [tokens/block].

    Returns
    -------
    int or ndarray of int64
        Number of blocks, the last of which may be partly empty.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If `block_size` is below 1.

    Notes
    -----
    ceil(T / B), in integers: a float quotient is wrong above 2**53.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.1.

    Examples
    --------
    >>> blocks_needed(100, 16)
    7
    """
    num_tokens = whole_or_array("num_tokens", num_tokens)
    block_size = whole_or_array("block_size", block_size, low=1)
    return _ceil_div(num_tokens, block_size)


def tail_waste(num_tokens, block_size):
    """Count the empty slots in the last block of a sequence [tokens].

    Parameters
    ----------
    num_tokens : int or ndarray of int
        Length of the sequence [tokens], 0 or more.
    block_size : int or ndarray of int
        Slots of one block [tokens/block].

    Returns
    -------
    int or ndarray of int64
        Empty slots, 0 to ``block_size - 1``.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If `num_tokens` is negative or `block_size` is below 1.

    Notes
    -----
    (B - T mod B) mod B, which is -T mod B. Over random lengths its mean is (B - 1) / 2.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.1.

    Examples
    --------
    >>> tail_waste(100, 16)
    12
    """
    num_tokens = whole_or_array("num_tokens", num_tokens, low=0)
    block_size = whole_or_array("block_size", block_size, low=1)
    return -num_tokens % block_size


def appended_blocks(num_new_tokens, tail_free_slots, block_size):
    """Count the blocks that a growing sequence has to allocate [blocks].

    Parameters
    ----------
    num_new_tokens : int or ndarray of int
        Tokens to append [tokens], 0 or more.
    tail_free_slots : int or ndarray of int
        Empty slots in the sequence's last block [tokens], 0 if it has no block.
    block_size : int or ndarray of int
        Slots of one block [tokens/block].

    Returns
    -------
    int or ndarray of int64
        Blocks to allocate once the last block is full. A copy of a shared last block is extra.

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If a count is negative, `block_size` is below 1, or the tail has more slots than a block.

    Notes
    -----
    ceil(max(0, dT - f_last) / B): the new tokens fill the tail first.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 4.3.

    Examples
    --------
    >>> appended_blocks(1_000, tail_free_slots=12, block_size=16)
    62
    """
    num_new_tokens = whole_or_array("num_new_tokens", num_new_tokens, low=0)
    tail_free_slots = whole_or_array("tail_free_slots", tail_free_slots, low=0)
    block_size = whole_or_array("block_size", block_size, low=1)
    if np.any(tail_free_slots > block_size):
        raise ValueError(
            f"tail_free_slots={tail_free_slots}; it must be at most block_size={block_size}. "
            "Pass the empty slots of the last block alone."
        )
    return _ceil_div(num_new_tokens - tail_free_slots, block_size)


def fragmentation(num_tokens_array, block_size):
    """Compute the share of allocated slots that hold no token, when no block is shared [ratio].

    Parameters
    ----------
    num_tokens_array : array_like of int, (n_sequences,)
        Length of each sequence [tokens].
    block_size : int
        Slots of one block [tokens/block].

    Returns
    -------
    float
        0 (no slot empty, or no block at all) to below 1.

    Raises
    ------
    TypeError
        If a length or `block_size` is not an integer.
    ValueError
        If a length is negative or `block_size` is below 1.

    Notes
    -----
    (sum of free slots) / (sum of capacities) of the allocated blocks; blocks that nobody holds
    do not count.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", section 3.1 (internal fragmentation).

    Examples
    --------
    >>> fragmentation([100, 32], 16)  # 12 of 144 slots
    0.08333333333333333
    """
    block_size = whole("block_size", block_size, low=1)
    lengths = np.ravel(num_tokens_array)
    if lengths.size == 0:
        return 0.0
    lengths = whole_or_array("num_tokens_array", lengths, low=0)
    # Python sums: an int64 total of long sequences could wrap without a word.
    num_slots = block_size * sum(_ceil_div(lengths, block_size).tolist())
    return (num_slots - sum(lengths.tolist())) / num_slots if num_slots else 0.0


def _ceil_div(num_tokens, block_size):
    """Round a quotient up, and to 0 from below, for arguments that are checked already."""
    # Floor division of the negated length rounds up, and adds nothing that int64 could overflow.
    return -(-num_tokens // block_size) * (num_tokens > 0)
