"""Who leaves when the block budget is full: scores, victims, quotas, and what an eviction costs.

A policy reads five things of a sequence: `last_access_step`, `use_count`, `tenant`,
`num_blocks()` and `reclaimable_blocks()`. Its `select_victim` is the definition, a scan;
its `index` picks the same victim in near-constant time.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, MutableMapping
from fractions import Fraction

import numpy as np

from kvlib._validate import real, whole, whole_or_array


def overflow_blocks(used_blocks, delta_blocks, budget_blocks):
    """Compute how many blocks must be evicted before `delta_blocks` more fit [blocks].

    Parameters
    ----------
    used_blocks : int
        Blocks in use now [blocks].
    delta_blocks : int
        Blocks about to be added [blocks].
    budget_blocks : int
        Blocks that exist [blocks].

    Returns
    -------
    int
        The overflow; 0 while everything fits [blocks].

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer or is negative.

    Notes
    -----
    overflow = max(0, used + delta - budget).

    Examples
    --------
    >>> overflow_blocks(used_blocks=900, delta_blocks=150, budget_blocks=1000)
    50
    """
    used_blocks = whole("used_blocks", used_blocks, low=0)
    delta_blocks = whole("delta_blocks", delta_blocks, low=0)
    budget_blocks = whole("budget_blocks", budget_blocks, low=0)
    return max(0, used_blocks + delta_blocks - budget_blocks)


def lru_score(now, last_access):
    """Compute the age of a sequence, its LRU score: the largest leaves first [steps].

    Parameters
    ----------
    now : int
        The clock [steps].
    last_access : int
        When the sequence was last touched [steps].

    Returns
    -------
    int
        Steps since the last access [steps].

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer, is negative, or the access lies in the future.

    Notes
    -----
    score = t_now - t_last_access.

    Examples
    --------
    >>> lru_score(now=12, last_access=9)
    3
    """
    now = whole("now", now, low=0)
    return now - whole("last_access", last_access, low=0, high=now)


def fair_quotas(tenant_weights, total_blocks, tenants=()):
    """Divide the blocks among tenants by weight, exactly [blocks].

    Parameters
    ----------
    tenant_weights : mapping of str to number
        Weight of each listed tenant, 0 or more.
    total_blocks : int
        Blocks to divide [blocks].
    tenants : iterable of str, optional
        Tenants that are present; those not listed weigh 1.

    Returns
    -------
    dict of str to Fraction
        Quota of every tenant, listed or present; they sum to `total_blocks` [blocks].

    Raises
    ------
    TypeError, ValueError
        If a weight is not a finite number of at least 0, if all weights are zero, or if
        `total_blocks` is not a positive integer.

    Notes
    -----
    quota_t = w_t / (sum of all w) * total_blocks. A weight is read as it is written, so 0.1 is one
    tenth and not the nearest binary fraction.

    Examples
    --------
    >>> {t: int(q) for t, q in fair_quotas({"chat": 0.1, "batch": 0.3}, 100).items()}
    {'chat': 25, 'batch': 75}
    """
    total_blocks = whole("total_blocks", total_blocks, low=1)
    weights = _exact_weights(tenant_weights)
    for tenant in tenants:
        weights.setdefault(tenant, Fraction(1))
    total_weight = sum(weights.values())
    if weights and not total_weight:
        raise ValueError(f"tenant_weights={tenant_weights}; all weights are zero. Give one 1.")
    return {tenant: weight / total_weight * total_blocks for tenant, weight in weights.items()}


def _exact_weights(tenant_weights):
    if not isinstance(tenant_weights, Mapping):
        raise TypeError(f"tenant_weights={tenant_weights!r}; it must be a mapping. Use a dict.")
    for tenant, weight in tenant_weights.items():
        real(f"tenant_weights[{tenant!r}]", weight, low=0)
    return {tenant: Fraction(str(weight)) for tenant, weight in tenant_weights.items()}


class EvictionPolicy:
    """The frame of every policy: the candidate with the smallest rank leaves.

    Notes
    -----
    A policy states its rule in `_rank` and `_candidates`. For the index it says which sequences
    share a `_group`, such that inside a group only the age decides, and how to `_choose` between
    the oldest of each group.
    """

    def select_victim(self, sequences, num_blocks=1, protect=()):
        """Pick the next sequence to evict by looking at all of them.

        Parameters
        ----------
        sequences : mapping of seq_id to sequence
            The residents; if it is this policy's `index`, nobody needs to be looked at.
        num_blocks : int, optional
            Blocks still missing; only `CostPolicy` looks at it [blocks].
        protect : container of seq_id, optional
            Sequences that must stay.

        Returns
        -------
        seq_id or None
            The victim; None if nobody may leave.
        """
        if isinstance(sequences, VictimIndex) and sequences.policy is self:
            return sequences.victim(num_blocks, protect)
        num_blocks = whole("num_blocks", num_blocks, low=1)
        candidates = self._candidates(sequences, [s for s in sequences if s not in protect])
        return min(candidates, key=lambda s: self._rank(s, sequences[s], num_blocks), default=None)

    def index(self, sequences=None):
        """Build an index that picks this policy's victims in near-constant time.

        Parameters
        ----------
        sequences : mapping of seq_id to sequence, optional
            The residents to begin with.

        Returns
        -------
        VictimIndex
            The index, a mapping to be kept up to date.
        """
        return VictimIndex(self, sequences)

    def _candidates(self, sequences, candidates):
        return candidates

    def _rank(self, seq_id, sequence, num_blocks):
        return self._age(seq_id, sequence)

    def _age(self, seq_id, sequence):
        return sequence.last_access_step, seq_id

    def _group(self, sequence):
        return None

    def _choose(self, heads, usage, num_blocks):
        return min(heads.values())


class LRUPolicy(EvictionPolicy):
    """Evict the sequence that was used longest ago.

    Notes
    -----
    victim = argmin of (last_access_step, seq_id).

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> LRUPolicy().select_victim({"a": SimpleNamespace(last_access_step=5),
    ...                            "b": SimpleNamespace(last_access_step=3)})
    'b'
    """


class LFUPolicy(EvictionPolicy):
    """Evict the sequence that was used least often.

    Notes
    -----
    victim = argmin of (use_count, last_access_step, seq_id).

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> LFUPolicy().select_victim({"a": SimpleNamespace(use_count=1, last_access_step=5),
    ...                            "b": SimpleNamespace(use_count=2, last_access_step=3)})
    'a'
    """

    def _age(self, seq_id, sequence):
        return sequence.use_count, sequence.last_access_step, seq_id


class FairPolicy(EvictionPolicy):
    """Evict from the tenant that is furthest above its quota; inside it, the oldest.

    Parameters
    ----------
    tenant_weights : mapping of str to number
        Weight of each tenant; unlisted tenants weigh 1.
    total_blocks : int
        Blocks the quotas divide [blocks].
    only_over_quota : bool, optional
        True: if nobody exceeds its quota, the globally oldest sequence leaves. False: the tenant
        with the largest usage - quota pays even then (the rule's other wording).

    Raises
    ------
    TypeError, ValueError
        As `fair_quotas`.

    Notes
    -----
    t* = argmax over tenants of (usage_t - quota_t, t), where usage_t sums num_blocks() over all its
    sequences, the protected ones included; victim = argmin of (last_access_step, seq_id) inside t*.
    A tenant all of whose sequences are protected is passed over.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> sequence = lambda tenant, step, blocks: SimpleNamespace(
    ...     tenant=tenant, last_access_step=step, num_blocks=lambda: blocks)
    >>> FairPolicy({"chat": 1, "batch": 1}, total_blocks=100).select_victim(
    ...     {"old": sequence("chat", 1, 30), "long": sequence("batch", 2, 60)})
    'long'
    """

    def __init__(self, tenant_weights, total_blocks, *, only_over_quota=True):
        fair_quotas(tenant_weights, total_blocks)
        self.tenant_weights, self.total_blocks = dict(tenant_weights), int(total_blocks)
        self.only_over_quota = only_over_quota

    def _candidates(self, sequences, candidates):
        usage = Counter()
        for sequence in sequences.values():
            usage[sequence.tenant] += sequence.num_blocks()
        quota = fair_quotas(self.tenant_weights, self.total_blocks, usage)
        payers = {sequences[seq_id].tenant for seq_id in candidates}
        if self.only_over_quota:
            payers = {tenant for tenant in payers if usage[tenant] > quota[tenant]}
        if not payers:
            return candidates
        payer = max(payers, key=lambda tenant: (usage[tenant] - quota[tenant], tenant))
        return [seq_id for seq_id in candidates if sequences[seq_id].tenant == payer]

    def _group(self, sequence):
        return sequence.tenant

    def _choose(self, heads, usage, num_blocks):
        quota = fair_quotas(self.tenant_weights, self.total_blocks, usage)
        excess, payer = max((usage[tenant] - quota[tenant], tenant) for tenant in heads)
        return heads[payer] if excess > 0 or not self.only_over_quota else min(heads.values())


class CostPolicy(EvictionPolicy):
    """Evict the sequence whose recomputation costs least per block that helps.

    Parameters
    ----------
    block_size : int, optional
        Tokens per block [tokens].
    prefill_tokens_per_second : float, optional
        Prefill throughput; it scales all costs alike [tokens/s].
    attention_tokens : int, optional
        Context at which a token costs twice as much as the first; None: all cost alike [tokens].

    Raises
    ------
    TypeError, ValueError
        If an argument is not a positive number of its kind.

    Notes
    -----
    victim = argmin of (recompute_seconds / useful, last_access_step, seq_id), with
    useful = min(reclaimable_blocks(), blocks still missing). Without `attention_tokens` every block
    costs the same, and what counts is the overshoot: blocks thrown away that nobody needed. A
    sequence that frees nothing costs infinitely much and leaves last.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> sequence = lambda step, blocks: SimpleNamespace(
    ...     last_access_step=step, num_blocks=lambda: blocks, reclaimable_blocks=lambda: blocks)
    >>> residents = {"old": sequence(1, 2000), "young": sequence(2, 40)}
    >>> CostPolicy().select_victim(residents, num_blocks=200)
    'young'
    """

    def __init__(self, block_size=16, prefill_tokens_per_second=8000.0, *, attention_tokens=None):
        self.block_size = whole("block_size", block_size, low=1)
        rate = real("prefill_tokens_per_second", prefill_tokens_per_second, above=0)
        self.prefill_tokens_per_second = rate
        self.attention_tokens = _attention_tokens(attention_tokens)

    def index(self, sequences=None):
        """Build an index that also notices what forks and releases of others change.

        Parameters
        ----------
        sequences : mapping of seq_id to sequence, optional
            The residents to begin with.

        Returns
        -------
        VictimIndex
            The index; a pick also reads each resident that shares blocks.
        """
        return _SharingIndex(self, sequences)

    def seconds_per_useful_block(self, sequence, num_blocks=1):
        """Compute what evicting a sequence costs per block that helps [s/block].

        Parameters
        ----------
        sequence : sequence
            The resident.
        num_blocks : int, optional
            Blocks still missing [blocks].

        Returns
        -------
        float
            Recompute seconds divided by useful blocks; infinite if none is useful [s/block].
        """
        useful = min(sequence.reclaimable_blocks(), whole("num_blocks", num_blocks, low=1))
        tokens = recompute_tokens(sequence, self.block_size)
        rate, attention = self.prefill_tokens_per_second, self.attention_tokens
        seconds = recompute_seconds(tokens, rate, attention_tokens=attention)
        return seconds / useful if useful else math.inf

    def _work(self, group, num_blocks):
        # One division of whole numbers: equal costs come out as equal floats, so ties stay ties.
        tokens, useful = group[0] * self.block_size, min(group[1], num_blocks)
        work = tokens * (2 * self.attention_tokens + tokens if self.attention_tokens else 1)
        return work / useful if useful else math.inf

    def _rank(self, seq_id, sequence, num_blocks):
        return self._work(self._group(sequence), num_blocks), self._age(seq_id, sequence)

    def _group(self, sequence):
        return sequence.num_blocks(), sequence.reclaimable_blocks()

    def _choose(self, heads, usage, num_blocks):
        return min((self._work(group, num_blocks), age) for group, age in heads.items())[1]


class VictimIndex(MutableMapping):
    """Residents by seq_id, kept such that their policy's victim is found in near-constant time.

    Parameters
    ----------
    policy : EvictionPolicy
        Whose victims to pick.
    sequences : mapping of seq_id to sequence, optional
        The residents to begin with.

    Notes
    -----
    ``index[seq_id] = sequence`` takes in a resident, or reads one again of which a policy's input
    has changed; ``del index[seq_id]`` forgets it. Each group of the policy (a tenant, a length, or
    everybody) is a heap by age, in which outdated ages are skipped when they surface: an update
    costs O(log n), a pick O(number of groups).

    A cache manager makes room with it like this::

        while num_free < num_blocks:
            victim = index.victim(num_blocks - num_free, protect)
            num_free += release(index.pop(victim))

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> chat = SimpleNamespace(last_access_step=1, num_blocks=lambda: 4)
    >>> index = LRUPolicy().index({"chat": chat})
    >>> index["batch"] = SimpleNamespace(last_access_step=2, num_blocks=lambda: 9)
    >>> chat.last_access_step = 3
    >>> index["chat"] = chat
    >>> index.victim()
    'batch'
    """

    def __init__(self, policy, sequences=None):
        self.policy, self._places, self._heaps = policy, {}, {}
        self._members, self._usage = Counter(), Counter()
        self.update(sequences or {})

    def __getitem__(self, seq_id):
        return self._places[seq_id][-1]

    def __iter__(self):
        return iter(self._places)

    def __len__(self):
        return len(self._places)

    def __setitem__(self, seq_id, sequence):
        group, age = self.policy._group(sequence), self.policy._age(seq_id, sequence)
        num_blocks = sequence.num_blocks()
        if seq_id in self._places:
            del self[seq_id]
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, age)
        self._places[seq_id] = group, age, num_blocks, sequence
        self._members[group] += 1
        self._usage[group] += num_blocks
        if len(heap) > 2 * self._members[group] + 64:
            heap[:] = {age for age in heap if self._is_current(group, age)}
            heapq.heapify(heap)

    def __delitem__(self, seq_id):
        group, _, num_blocks, _ = self._places.pop(seq_id)
        self._members[group] -= 1
        self._usage[group] -= num_blocks
        if not self._members[group]:
            del self._members[group], self._usage[group], self._heaps[group]

    def victim(self, num_blocks=1, protect=()):
        """Pick what `select_victim` would pick; the victim stays in the index until deleted.

        Parameters
        ----------
        num_blocks : int, optional
            Blocks still missing; only `CostPolicy` looks at it [blocks].
        protect : container of seq_id, optional
            Sequences that must stay.

        Returns
        -------
        seq_id or None
            The victim; None if nobody may leave.
        """
        num_blocks = whole("num_blocks", num_blocks, low=1)
        heads = {group: age for group in self._heaps if (age := self._oldest(group, protect))}
        return self.policy._choose(heads, self._usage, num_blocks)[-1] if heads else None

    def _is_current(self, group, age):
        return self._places.get(age[-1], ())[:2] == (group, age)

    def _oldest(self, group, protect):
        heap, protected = self._heaps[group], []
        while heap:
            if not self._is_current(group, heap[0]):
                heapq.heappop(heap)
            elif heap[0][-1] in protect:
                protected.append(heapq.heappop(heap))
            else:
                break
        oldest = heap[0] if heap else None
        for age in protected:
            heapq.heappush(heap, age)
        return oldest


class _SharingIndex(VictimIndex):
    """An index for a policy that asks what a victim frees: forks and releases of others change it.

    Sharing more frees less, so a resident taken for unshared looks too cheap and is found out when
    it surfaces; residents known to share may have become cheaper and are all read again.
    """

    def victim(self, num_blocks=1, protect=()):
        for group in [group for group in self._heaps if group[0] != group[1]]:
            for *_, seq_id in [age for age in self._heaps[group] if self._is_current(group, age)]:
                self[seq_id] = self[seq_id]
        while (seq_id := super().victim(num_blocks, protect)) is not None:
            if self.policy._group(self[seq_id]) == self._places[seq_id][0]:
                break
            self[seq_id] = self[seq_id]
        return seq_id


def recompute_tokens(seq, block_size):
    """Estimate the tokens to prefill again if a sequence is evicted and comes back [tokens].

    Parameters
    ----------
    seq : sequence
        The victim; its `num_blocks()` is read.
    block_size : int
        Tokens per block [tokens].

    Returns
    -------
    int
        Tokens to recompute, the tail block counted as full [tokens].

    Raises
    ------
    TypeError, ValueError
        If `block_size` is not a positive integer.

    Notes
    -----
    recompute_tokens = num_blocks * block_size.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> recompute_tokens(SimpleNamespace(num_blocks=lambda: 40), block_size=16)
    640
    """
    return seq.num_blocks() * whole("block_size", block_size, low=1)


def recompute_seconds(tokens, prefill_tokens_per_second, *, attention_tokens=None, first_token=0):
    """Compute the time to prefill tokens again [s].

    Parameters
    ----------
    tokens : int or ndarray of int
        Tokens to recompute [tokens].
    prefill_tokens_per_second : float
        Throughput at the start of a context [tokens/s].
    attention_tokens : int, optional
        Context at which a token costs twice as much as the first; None: all cost alike [tokens].
    first_token : int or ndarray of int, optional
        Position of the first recomputed token; the ones before it are cached [tokens].

    Returns
    -------
    float or ndarray of float
        Prefill time [s].

    Raises
    ------
    TypeError, ValueError
        If a count is negative or not whole, or a rate is not positive.

    Notes
    -----
    seconds = tokens / throughput, the linear approximation. Attention reads all earlier tokens, so
    with `attention_tokens` = A the token at position p costs 1 + p/A of the first one:
    seconds = n * (1 + (2 * first + n) / (2 * A)) / throughput.

    Examples
    --------
    >>> recompute_seconds(16_000, prefill_tokens_per_second=8000)
    2.0
    >>> recompute_seconds(16_000, prefill_tokens_per_second=8000, attention_tokens=16_000)
    3.0
    """
    tokens = whole_or_array("tokens", tokens, low=0)
    first_token = whole_or_array("first_token", first_token, low=0)
    rate = real("prefill_tokens_per_second", prefill_tokens_per_second, above=0)
    attention_tokens = _attention_tokens(attention_tokens) or math.inf
    return tokens * (1 + (2.0 * first_token + tokens) / (2 * attention_tokens)) / rate


def _attention_tokens(value):
    return None if value is None else whole("attention_tokens", value, low=1)


def refill_seconds(num_bytes, bytes_per_second):
    """Compute the time to copy evicted bytes back from host memory instead of recomputing them [s].

    Parameters
    ----------
    num_bytes : int
        Bytes to bring back [bytes].
    bytes_per_second : float
        Bandwidth of the link [bytes/s].

    Returns
    -------
    float
        Copy time [s].

    Raises
    ------
    TypeError, ValueError
        If the bytes are negative or not whole, or the bandwidth is not positive.

    Notes
    -----
    seconds = num_bytes / bytes_per_second.

    Examples
    --------
    >>> refill_seconds(50_000_000_000, bytes_per_second=25e9)
    2.0
    """
    num_bytes = whole("num_bytes", num_bytes, low=0)
    return num_bytes / real("bytes_per_second", bytes_per_second, above=0)


def break_even_tokens(
    bytes_per_token, bytes_per_second, prefill_tokens_per_second, attention_tokens
):
    """Compute the length from which copying a context back beats recomputing it [tokens].

    Parameters
    ----------
    bytes_per_token : int
        KV cache of one token [bytes/token].
    bytes_per_second : float
        Bandwidth of the link [bytes/s].
    prefill_tokens_per_second : float
        Throughput at the start of a context [tokens/s].
    attention_tokens : int
        Context at which a token costs twice as much as the first [tokens].

    Returns
    -------
    float
        Break-even length; 0 if copying always wins [tokens].

    Raises
    ------
    TypeError, ValueError
        If an argument is not a positive number of its kind.

    Notes
    -----
    Solves recompute_seconds = refill_seconds for the length:
    2 * attention_tokens * (throughput * bytes_per_token / bandwidth - 1).

    Examples
    --------
    >>> break_even_tokens(131_072, bytes_per_second=524.288e6, prefill_tokens_per_second=8000,
    ...                   attention_tokens=20_000)
    40000.0
    """
    bytes_per_token = whole("bytes_per_token", bytes_per_token, low=1)
    copy_seconds = refill_seconds(bytes_per_token, bytes_per_second)
    rate = real("prefill_tokens_per_second", prefill_tokens_per_second, above=0)
    attention_tokens = whole("attention_tokens", attention_tokens, low=1)
    return max(0.0, 2 * attention_tokens * (rate * copy_seconds - 1))


def unfairness(usage, quotas, total_blocks):
    """Compute the share of the blocks that tenants hold above their quotas [ratio].

    Parameters
    ----------
    usage : mapping of str to int or ndarray of int
        Blocks held by each tenant, at one moment or over time `(num_moments,)` [blocks].
    quotas : mapping of str to number
        Quota of each of those tenants, see `fair_quotas` [blocks].
    total_blocks : int
        Blocks that exist [blocks].

    Returns
    -------
    float
        0 when nobody exceeds its quota; the mean over the moments [ratio].

    Raises
    ------
    TypeError, ValueError
        If a tenant has no quota, a quota or a count is negative, a count not whole, or
        `total_blocks` is not positive.

    Notes
    -----
    unfairness = mean over moments of sum over tenants of max(0, usage_t - quota_t) / total_blocks.

    Examples
    --------
    >>> unfairness({"chat": 20, "batch": 60}, {"chat": 50, "batch": 50}, total_blocks=100)
    0.1
    """
    total_blocks = whole("total_blocks", total_blocks, low=1)
    missing = [tenant for tenant in usage if tenant not in quotas]
    if missing:
        raise ValueError(f"quotas={quotas!r}; it lacks {missing[0]!r}. Use fair_quotas().")
    above = [_held(usage, t) - real(f"quotas[{t!r}]", quotas[t], low=0) for t in usage]
    excess = sum(np.maximum(0, part) for part in above)
    return float(np.mean(excess)) / total_blocks


def jain_index(usage, tenant_weights):
    """Compute Jain's fairness index of the blocks per weight [ratio]; 1 is even, 1/n all for one.

    Parameters
    ----------
    usage : mapping of str to int or ndarray of int
        Blocks held by each tenant, at one moment or over time `(num_moments,)` [blocks].
    tenant_weights : mapping of str to number
        Weight of each tenant; unlisted tenants weigh 1, tenants of weight 0 do not count.

    Returns
    -------
    float
        The index, 1 if nobody holds anything; the mean over the moments [ratio].

    Raises
    ------
    TypeError, ValueError
        If a weight is negative or not finite, or a count is negative or not whole.

    Notes
    -----
    With x_t = usage_t / w_t: J = (sum of x)^2 / (n * sum of x^2).

    References
    ----------
    Jain, Chiu, Hawe: A quantitative measure of fairness and discrimination for resource allocation
    in shared computer systems, DEC-TR-301, 1984.

    Examples
    --------
    >>> jain_index({"chat": 25, "batch": 75}, {"chat": 1, "batch": 3})
    1.0
    """
    weights = dict.fromkeys(usage, 1) | _exact_weights(tenant_weights)
    shares = [_held(usage, t) / float(weight) for t, weight in weights.items() if weight]
    total, squares = np.asarray(sum(shares)), np.asarray(sum(share**2 for share in shares))
    index = np.ones(squares.shape)
    np.divide(total**2, len(shares) * squares, out=index, where=squares > 0)
    return float(np.mean(index))


def _held(usage, tenant):
    return whole_or_array(f"usage[{tenant!r}]", usage.get(tenant, 0), low=0)


def eviction_objective(miss_rate, recompute_cost, unfairness, alpha, beta, gamma):
    """Weigh the three costs of an eviction policy against each other; smaller is better [ratio].

    Parameters
    ----------
    miss_rate : float
        Share of the blocks not found [ratio].
    recompute_cost : float
        The p99 of recompute seconds per request / p99 of prefill seconds without a cache [ratio].
    unfairness : float
        Share of the blocks held above quota [ratio].
    alpha, beta, gamma : float
        Weights of the three, 0 or more; only their proportions matter.

    Returns
    -------
    float
        The objective [ratio].

    Raises
    ------
    TypeError, ValueError
        If an argument is negative or not finite, or all weights are zero.

    Notes
    -----
    J = (alpha * miss_rate + beta * recompute_cost + gamma * unfairness) / (alpha + beta + gamma).

    Examples
    --------
    >>> eviction_objective(0.75, 0.5, 0.25, alpha=2, beta=1, gamma=1)
    0.5625
    """
    terms = [
        (real("alpha", alpha, low=0), real("miss_rate", miss_rate, low=0, high=1)),
        (real("beta", beta, low=0), real("recompute_cost", recompute_cost, low=0)),
        (real("gamma", gamma, low=0), real("unfairness", unfairness, low=0, high=1)),
    ]
    largest = max(weight for weight, _ in terms)
    if not largest:
        raise ValueError("alpha=beta=gamma=0; one weight must be above 0. Use alpha=1.")
    terms = [(weight / largest, term) for weight, term in terms]  # their sum cannot overflow
    return sum(weight * term for weight, term in terms) / sum(weight for weight, _ in terms)
