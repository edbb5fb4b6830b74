"""Drop tokens inside one sequence: which keys a rule keeps, and what their absence costs.

Each rule keeps, for a query, `num_kept` of the keys it may see. All keep the newest; they differ in
how they rank the older ones:

==========  =================================================  ==============
rule        keeps the newest and, of the older keys,           known as
==========  =================================================  ==============
recent      none                                               sliding window
sinks       the first few of the sequence                      StreamingLLM
heavy       those that all queries so far attended to most     H2O
observed    those that the last queries of the prompt look at  SnapKV
==========  =================================================  ==============

The query heads that share a KV head share its kept set, since one cache serves them all.
"""

import numpy as np

from kvlib import _data
from kvlib._attention import attention_weights, output_norm
from kvlib._validate import one_of, whole
from kvlib.backend import array_module

RULES = ("recent", "sinks", "heavy", "observed")
NUM_OBSERVED = 32  # queries of the sample that vote; those after them are judged


def _tensors(**named):
    """Return q, k, v, k_hat, v_hat, or the first few of them, as floats whose shapes fit."""
    xp = array_module(*named.values())
    arrays = [xp.asarray(value) for value in named.values()]
    (q, *rest), keys = [array.shape for array in arrays], arrays[1].shape
    fits = len(q) == len(keys) == 3 and q[2] == keys[2] and q[1] <= keys[1]
    fits = fits and all(len(shape) == 3 and shape[:2] == keys[:2] for shape in rest)
    fits = fits and all(array.size for array in arrays)
    if not fits or q[0] % keys[0] or rest[2:] not in ([], rest[:2]):
        said = ", ".join(f"{name}.shape={a.shape}" for name, a in zip(named, arrays, strict=True))
        rule = "none empty, (heads, n, d), (kv_heads, T, d), (kv_heads, T, d_v), then as k and as v"
        raise ValueError(
            f"{said}; they must be {rule}. Reshape them: n <= T, kv_heads divides heads."
        )
    return [array.astype(np.result_type(np.float32, *arrays)) for array in arrays]


def accumulated_attention(q, k):
    """Add up the attention that each key received [queries].

    Parameters
    ----------
    q : array_like
        The last n queries, ``(num_heads, n, head_dim)``.
    k : array_like
        Keys, ``(num_kv_heads, num_tokens, head_dim)``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        ``(num_kv_heads, num_tokens)``, summed over the queries and over the query heads that share
        a KV head. Every query hands out 1 in each head.

    Raises
    ------
    ValueError
        If the shapes do not fit.

    References
    ----------
    .. [1] Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
       Language Models", 2023, arXiv:2306.14048, section 4.

    Examples
    --------
    >>> q = k = np.zeros((1, 2, 4))  # the first query sees one key, the second halves its attention
    >>> accumulated_attention(q, k)
    array([[1.5, 0.5]])
    """
    q, k = _tensors(q=q, k=k)
    return attention_weights(array_module(q), q, k).sum(axis=(1, 2))


def observation_votes(q, k, kernel_size=5):
    """Let the last queries vote for the keys before them, and neighbours share votes [queries].

    Parameters
    ----------
    q : array_like
        The observation window: the last n queries, ``(num_heads, n, head_dim)``.
    k : array_like
        Keys up to the last of these queries, ``(num_kv_heads, num_tokens, head_dim)``.
    kernel_size : int, optional
        A key's vote is the mean over this many neighbours, itself in the middle [tokens]; odd.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        ``(num_kv_heads, num_tokens - n)``. The window's own keys get no vote: they are kept as
        recent ones.

    Raises
    ------
    TypeError
        If the kernel is not an integer.
    ValueError
        If the shapes do not fit, no key stands before the window, or the kernel is even.

    Notes
    -----
    Beyond both ends of the keys votes count as 0, as in the authors' code.

    References
    ----------
    .. [1] Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024,
       arXiv:2404.14469, section 4.

    Examples
    --------
    >>> q, k = np.zeros((1, 1, 4)), np.zeros((1, 5, 4))  # a fifth each; the fifth key is q's own
    >>> observation_votes(q, k, kernel_size=3).round(3)
    array([[0.133, 0.2  , 0.2  , 0.133]])
    """
    if whole("kernel_size", kernel_size, low=1) % 2 == 0:
        raise ValueError(f"kernel_size={kernel_size}; it must be odd. Pass {kernel_size + 1}.")
    received = accumulated_attention(q, k)
    before = received.shape[1] - len(q[0])
    if not before:
        raise ValueError(f"n={len(q[0])}; no key stands before the window. Pass fewer queries.")
    xp, side = array_module(received), kernel_size // 2
    padded = xp.pad(received[:, :before], ((0, 0), (side, side)))
    return sum(padded[:, i : i + before] for i in range(kernel_size)) / kernel_size


def keep_recent(num_tokens, num_queries, num_kept, num_sinks=0):
    """Keep the newest keys, and the first few of the sequence in place of as many [mask].

    Parameters
    ----------
    num_tokens : int
        Keys of the sequence [tokens].
    num_queries : int
        Queries; the last one sits on the last key.
    num_kept : int
        Keys that each query keeps [tokens].
    num_sinks : int, optional
        How many of them are the first of the sequence [tokens].

    Returns
    -------
    numpy.ndarray
        Booleans, ``(1, num_queries, num_tokens)``, the same for every head.

    Raises
    ------
    TypeError, ValueError
        If a number is not an integer or out of range.

    References
    ----------
    .. [1] Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023,
       arXiv:2309.17453, section 3.2.

    Examples
    --------
    >>> keep_recent(num_tokens=6, num_queries=2, num_kept=3, num_sinks=1).astype(int)
    array([[[1, 0, 0, 1, 1, 0],
            [1, 0, 0, 0, 1, 1]]])
    """
    first_first = -np.arange(whole("num_tokens", num_tokens, low=1))[None]
    num_kept = whole("num_kept", num_kept, low=1)
    num_recent = num_kept - whole("num_sinks", num_sinks, low=0, high=num_kept)
    return keep_highest(first_first, num_queries, num_kept, num_recent)


def keep_highest(scores, num_queries, num_kept, num_recent, num_tokens=None):
    """Keep the newest keys and those of the older ones that score highest [mask].

    Parameters
    ----------
    scores : array_like
        One score a key, ``(num_kv_heads, keys)``; equal scores: the older key first. Keys of later
        tokens have no score yet and rank last.
    num_queries : int
        Queries; the last one sits on the last key.
    num_kept : int
        Keys that each query keeps; all, where it sees fewer [tokens].
    num_recent : int
        How many of them are its newest, its own included [tokens].
    num_tokens : int, optional
        Keys of the sequence, by default as many as there are scores [tokens].

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Booleans, ``(num_kv_heads, num_queries, num_tokens)``.

    Raises
    ------
    TypeError, ValueError
        If a number is not an integer or out of range, or a score is NaN.

    Examples
    --------
    >>> keep_highest([[5, 1, 9, 0, 0]], num_queries=2, num_kept=3, num_recent=2).astype(int)
    array([[[1, 0, 1, 1, 0],
            [0, 0, 1, 1, 1]]])
    """
    xp = array_module(scores)
    scores = xp.asarray(scores, dtype=float)
    if scores.ndim != 2 or not scores.size or xp.isnan(scores).any():
        rule = "it must be (num_kv_heads, keys) of numbers"
        raise ValueError(f"scores.shape={scores.shape}; {rule}, none of them NaN. Reshape it.")
    num_tokens = whole(
        "num_tokens", scores.shape[1] if num_tokens is None else num_tokens, low=scores.shape[1]
    )
    num_queries = whole("num_queries", num_queries, low=1, high=num_tokens)
    num_kept = whole("num_kept", num_kept, low=1)
    num_recent = whole("num_recent", num_recent, low=0, high=num_kept)
    last_place = xp.pad(
        -scores, ((0, 0), (0, num_tokens - scores.shape[1])), constant_values=np.inf
    )
    order = xp.argsort(last_place, axis=1, kind="stable")
    position = xp.arange(num_tokens)
    age = position[num_tokens - num_queries :, None] - position
    old = age >= num_recent
    # Down the ranking of each head, a query takes old keys until it has its number.
    taken = xp.cumsum(old.T[order], axis=1, dtype=np.int32)  # [heads, rank, queries]
    depth = (taken <= num_kept - num_recent).sum(axis=1)
    rank = xp.argsort(order, axis=1)
    return (old & (rank[:, None] < depth[..., None])) | ((age >= 0) & ~old)


def evict_for_good(q, k, num_kept, num_recent):
    """Play heavy hitters as a cache must: what is dropped never returns, nor attracts [mask].

    Parameters
    ----------
    q : array_like
        All queries, ``(num_heads, num_tokens, head_dim)``.
    k : array_like
        Keys, ``(num_kv_heads, num_tokens, head_dim)``.
    num_kept : int
        Keys in the cache once it is full [tokens].
    num_recent : int
        The newest of them, which are safe [tokens].

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Booleans, ``(num_kv_heads, num_tokens, num_tokens)``: what is there when each query looks.

    Raises
    ------
    TypeError, ValueError
        If the shapes do not fit, or a number is not an integer or out of range.

    Notes
    -----
    A score adds up attention over the keys that are still there, as in reference [1]_: a rule that
    evicts cannot know what a dropped key would have received. Of equal scores the oldest leaves.

    References
    ----------
    .. [1] Zhang et al., 2023, arXiv:2306.14048, section 4, algorithm 1.

    Examples
    --------
    >>> q = k = np.zeros((1, 3, 2))
    >>> evict_for_good(q, k, num_kept=2, num_recent=1)[0].astype(int)  # 1.5 beats 0.5
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 0, 1]])
    """
    q, k = _tensors(q=q, k=k)
    num_kept = whole("num_kept", num_kept, low=1)
    num_recent = whole("num_recent", num_recent, low=1, high=num_kept)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"n={q.shape[1]}; every token must have its query. Pass {k.shape[1]}.")
    xp, heads = array_module(q), range(len(k))
    weights = attention_weights(xp, q.astype(float), k)
    present, scores = xp.zeros(k.shape[:2], bool), xp.zeros(k.shape[:2])
    kept = xp.zeros((*k.shape[:2], k.shape[1]), bool)
    for now in range(k.shape[1]):
        present[:, now] = True
        if now >= num_kept:
            safe = ~present | (xp.arange(k.shape[1]) > now - num_recent)
            present[heads, xp.where(safe, np.inf, scores).argmin(axis=1)] = False
        kept[:, now] = present
        seen = weights[:, :, now] * present[:, None]
        scores += (seen / seen.sum(axis=-1, keepdims=True)).sum(axis=1)
    return kept


class KeptAttention:
    """Attention over a part of the keys, held against attention over all of them.

    Parameters
    ----------
    q : array_like
        The last n queries, ``(num_heads, n, head_dim)``.
    k, v : array_like
        Keys and values, ``(num_kv_heads, num_tokens, head_dim)``; v may have a width of its own.
    k_hat, v_hat : array_like, optional
        What is read back in their place, for instance from a quantized cache.

    Raises
    ------
    ValueError
        If the shapes do not fit, or the attention output is zero everywhere.

    Examples
    --------
    >>> q, k = np.zeros((1, 1, 2)), np.zeros((1, 2, 2))
    >>> v = np.array([[[1.0], [3.0]]])  # the mean is 2; the newest alone says 3
    >>> KeptAttention(q, k, v).error(keep_recent(2, 1, num_kept=1))
    0.5
    """

    def __init__(self, q, k, v, k_hat=None, v_hat=None):
        has_own_keys = k_hat is not None
        hats = {"k_hat": k_hat if has_own_keys else k, "v_hat": v if v_hat is None else v_hat}
        q, k, v, k_hat, v_hat = _tensors(q=q, k=k, v=v, **hats)
        self._xp = array_module(q)
        self._weights = attention_weights(self._xp, q, k)
        self._exact = (self._weights @ v[:, None]).reshape(len(k), -1, v.shape[2])
        self._norm = output_norm(self._xp, self._exact)
        if has_own_keys:
            self._weights = attention_weights(self._xp, q, k_hat)
        ones = self._xp.ones_like(v_hat[..., :1])  # one product gives the sum of weights too
        self._values = self._xp.concatenate([v_hat, ones], axis=-1)

    def error(self, kept):
        """Compare the outputs [ratio].

        Parameters
        ----------
        kept : array_like
            Booleans, ``(num_kv_heads or 1, n, num_tokens)``: the keys each query keeps.

        Returns
        -------
        float
            ||o' - o|| / ||o|| over all heads and queries, the softmax of o' taken over kept keys.

        Raises
        ------
        ValueError
            If the mask does not fit, or a query keeps no key that draws attention: weights below
            e**-80 of the largest count as 0.
        TypeError
            If the mask is not of booleans.

        Notes
        -----
        .. math:: o' = \\sum_{j \\in kept} w_j v_j / \\sum_{j \\in kept} w_j

        with the weights w of the full softmax: dividing by their sum renormalises it.
        """
        heads, _, n, num_tokens = self._weights.shape
        kept = self._xp.asarray(kept)
        if kept.dtype != bool:
            raise TypeError(f"kept={kept.dtype}; it must be booleans. Use .astype(bool).")
        if kept.ndim != 3 or kept.shape[0] not in (1, heads) or kept.shape[1:] != (n, num_tokens):
            rule = f"it must be ({heads} or 1, {n}, {num_tokens})"
            raise ValueError(f"kept.shape={kept.shape}; {rule}. Build it for these queries.")
        part = self._weights * kept[:, None].astype(self._weights.dtype)
        # Short products, summed: too small for a BLAS to start threads, which cost more than this.
        run = 32 if num_tokens % 32 == 0 else num_tokens
        runs = part.reshape(heads, -1, num_tokens // run, run).swapaxes(1, 2)
        mixed = (runs @ self._values.reshape(heads, num_tokens // run, run, -1)).sum(axis=1)
        if not mixed[..., -1].all():
            query = int(self._xp.argwhere(mixed[..., -1] == 0)[0, 1]) % n
            raise ValueError(f"kept[:, {query}]; it draws no attention. Keep a key it may see.")
        output = mixed[..., :-1] / mixed[..., -1:]
        return float(self._xp.linalg.norm(output - self._exact)) / self._norm


def freed_blocks(kept, block_size):
    """Count the blocks in which nothing is kept: only those return to the pool [blocks].

    Parameters
    ----------
    kept : array_like
        Booleans, ``(..., num_tokens)``: the tokens that stay, in their places.
    block_size : int
        Tokens of a block [tokens]; the last may be short.

    Returns
    -------
    numpy.ndarray
        Integers, ``(...)``.

    Raises
    ------
    TypeError, ValueError
        If the block size is not an integer of at least 1.

    Examples
    --------
    >>> kept = np.array([[1, 0, 0, 0, 0, 1], [1, 1, 1, 0, 0, 0]], bool)
    >>> freed_blocks(kept, block_size=2)  # the same number of tokens
    array([1, 1])
    >>> int(freed_blocks(kept.any(axis=0), block_size=2))  # one table for both heads
    0
    """
    kept, block_size = np.asarray(kept, bool), whole("block_size", block_size, low=1)
    short = -kept.shape[-1] % block_size
    padded = np.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(0, short)])
    return (~padded.reshape(*kept.shape[:-1], -1, block_size).any(axis=-1)).sum(axis=-1)


def rule_scores(sample, rule):
    """Rank a recorded layer's keys as a named rule does when its newest queries arrive [score].

    Parameters
    ----------
    sample : kvlib.quantization.LayerSample
        A recorded layer.
    rule : {'recent', 'sinks', 'heavy', 'observed'}
        The rule; the first two rank the first token first.

    Returns
    -------
    numpy.ndarray
        ``(num_kv_heads or 1, keys)``, for `keep_highest`.

    Raises
    ------
    ValueError
        If the rule is unknown.

    Examples
    --------
    >>> from kvlib.quantization import load_kv_sample
    >>> rule_scores(load_kv_sample()[26], "heavy").argmax(axis=1)  # the first token of the novel
    array([0, 0, 0])
    """
    num_kv_heads, num_tokens, _ = sample.k.shape
    if one_of("rule", rule, RULES) == "heavy":
        return sample.acc.astype(float).reshape(num_kv_heads, -1, num_tokens).sum(axis=1)
    if rule == "observed":
        judged = sample.q.shape[1] - NUM_OBSERVED
        return observation_votes(sample.q[:, :NUM_OBSERVED], sample.k[:, :-judged])
    return -np.arange(num_tokens)[None]


def rule_error(sample, rule, num_kept, num_recent):
    """Judge a rule on a recorded layer by the queries after the observed ones [ratio].

    Parameters
    ----------
    sample : kvlib.quantization.LayerSample
        A recorded layer.
    rule : {'recent', 'sinks', 'heavy', 'observed'}
        The rule.
    num_kept : int
        Keys that each query keeps [tokens].
    num_recent : int
        The newest of them; `num_kept` makes every rule ``'recent'`` [tokens].

    Returns
    -------
    float
        ||o' - o|| / ||o|| of the attention output.

    Raises
    ------
    TypeError, ValueError
        If the rule is unknown, or a number is not an integer or out of range.

    Examples
    --------
    >>> from kvlib.quantization import load_kv_sample
    >>> layer, newest = load_kv_sample()[26], (205, 201, 102, 102)
    >>> [round(rule_error(layer, rule, 205, n), 2) for rule, n in zip(RULES, newest, strict=True)]
    [1.21, 0.12, 0.09, 0.09]
    """
    scores, q = rule_scores(sample, rule), sample.q[:, NUM_OBSERVED:]
    kept = keep_highest(scores, q.shape[1], num_kept, num_recent, sample.k.shape[1])
    return KeptAttention(q, sample.k, sample.v).error(kept)


def load_token_figures():
    """Load what the recorded model's 1,024 tokens say, and what rules cost in all 30 layers.

    Returns
    -------
    dict
        ``tokens``: their texts; ``kept``: 205 keys; ``errors``: for each of the rules ``recent``,
        ``sinks``, ``heavy`` and ``evicted`` (heavy hitters, evicted for good), one ratio a layer.
        Shared: do not change it.

    Raises
    ------
    FileNotFoundError, ValueError
        If the project's data file is not there or not intact.

    References
    ----------
    .. [1] data/make_token_figures.py makes the file.

    Examples
    --------
    >>> load_token_figures()["tokens"][:3]
    ['Sir', ' Walter', ' Ell']
    """
    return _data.read_json("token_figures.json")
