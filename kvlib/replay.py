"""Replay prefix traces through a block cache: what a policy finds, evicts and recomputes."""

import bisect
import functools
import heapq
import itertools
import json
import math
from array import array
from collections import defaultdict, deque

import numpy as np

from kvlib._data import read_bytes, read_json
from kvlib._traces import PrefixTrace, concat_tenants, generate_traffic, load_trace
from kvlib._validate import one_of, whole
from kvlib.eviction import fair_quotas, jain_index, recompute_seconds, unfairness

__all__ = [
    "POLICIES",
    "REQUEST_LENGTHS",
    "HitFigures",
    "PrefixTrace",
    "ReplayResult",
    "concat_tenants",
    "generate_traffic",
    "load_request_lengths",
    "load_trace",
    "load_trace_figures",
    "lru_hit_curve",
    "recorded_hits",
    "replay",
]

POLICIES = ("lru", "lfu", "fifo", "fair", "cost", "belady")
# Services whose request lengths are shipped, and what data/trace_figures.json calls them.
REQUEST_LENGTHS = {"azure-conversations": "azure_conv", "azure-code": "azure_code"}
_REQUESTS_PER_REPORT = 256
# Of these every order and policy is recorded on more capacities than the grid has.
_FINE_CURVES = {
    ("lru", False): "lru_curve",
    ("lru", True): "engine_lru_curve",
    ("belady", False): "belady_curve",
    ("belady", True): "engine_belady_curve",
}


def load_trace_figures():
    """Load what was recorded of the public traces, which are not shipped themselves.

    Returns
    -------
    dict
        A fresh copy. Under "conversation", "synthetic" and "merged" (both as two tenants of one
        server): totals, "unlimited" (what an unlimited cache finds), "lru_curve" and other curves,
        "capacity_blocks" (the grid), and under "file_order" and "engine_order" the columns of each
        policy on the grid, named as in `HitFigures` and `ReplayResult`. Under "azure_code" and
        "azure_conv": the lengths of requests.

    Notes
    -----
    Recorded at `prefill_tokens_per_second` tokens/s, equal tenant weights, and, for "cost" and the
    columns "attention_...", at `attention_tokens`. data/make_trace_figures.py computes them.

    References
    ----------
    Qin et al.: Mooncake: trading more storage for less computation, FAST 2025. Patel et al.:
    Splitwise: efficient generative LLM inference using phase splitting, ISCA 2024.

    Examples
    --------
    >>> load_trace_figures()["conversation"]["unlimited"]["block_hits"]
    105710
    """
    return json.loads(read_bytes("trace_figures.json"))


def recorded_hits(name, capacity_blocks, policy="lru", *, engine_order=False):
    """Look up the resident hits that a public trace was recorded with [blocks].

    Parameters
    ----------
    name : {"conversation", "synthetic", "merged"}
        The trace.
    capacity_blocks : int
        Blocks the cache holds [blocks].
    policy : {"lru", "lfu", "fifo", "fair", "cost", "belady"}, optional
        Who leaves.
    engine_order : bool, optional
        See `replay`.

    Returns
    -------
    int
        Hits at the largest recorded capacity that is not above `capacity_blocks` [blocks].

    Raises
    ------
    TypeError, ValueError
        If the trace or the policy is unknown, or the capacity lies below all recorded ones.

    Notes
    -----
    LRU in file order is recorded in steps of 2 %, LRU in engine order and Belady in steps of about
    a quarter, the other policies at the capacities of the grid.

    Examples
    --------
    >>> [recorded_hits("conversation", 10_000, policy) for policy in ("lru", "belady")]
    [60921, 105710]
    """
    one_of("name", name, ("conversation", "synthetic", "merged"))
    one_of("policy", policy, POLICIES)
    recorded = read_json("trace_figures.json")[name]
    order = "engine_order" if engine_order else "file_order"
    grid = {"capacity_blocks": recorded["capacity_blocks"]} | recorded[order][policy]
    curve = recorded.get(_FINE_CURVES.get((policy, bool(engine_order))), grid)
    first = curve["capacity_blocks"][0]
    hint = f"Recorded from {first} on."
    capacity_blocks = whole("capacity_blocks", capacity_blocks, low=first, hint=hint)
    at = bisect.bisect_right(curve["capacity_blocks"], capacity_blocks) - 1
    return curve["resident_hits"][at]


def load_request_lengths(name):
    """Load how long the requests of a real service were, prompt and answer together [tokens].

    Parameters
    ----------
    name : {"azure-conversations", "azure-code"}
        A key of `REQUEST_LENGTHS`.

    Returns
    -------
    ndarray of int64
        One length per request, ascending `(num_requests,)`.

    Raises
    ------
    ValueError
        If there is no such service.

    References
    ----------
    Patel et al. 2024, "Splitwise", section 3 (the Azure traces of November 2023);
    data/README.md says how the shipped histograms were made.

    Examples
    --------
    >>> lengths = load_request_lengths("azure-conversations")
    >>> len(lengths), int(lengths.max())
    (19366, 14089)
    """
    key = REQUEST_LENGTHS[one_of("name", name, REQUEST_LENGTHS)]
    histogram = read_json("trace_figures.json")[key]
    return np.repeat(np.array(histogram["num_tokens"], np.int64), histogram["num_requests"])


def lru_hit_curve(trace):
    """Compute the exact LRU hits at every capacity in one pass [blocks].

    Parameters
    ----------
    trace : PrefixTrace
        The requests.

    Returns
    -------
    ndarray of int64
        Entry c is `resident_hits` of `replay(trace, c)`, up to the capacity that holds every block
        of the trace `(num_unique_blocks + 1,)` [blocks].

    Notes
    -----
    An access hits at capacity c exactly when fewer than c distinct blocks were used since its
    block's previous use; the curve is the running sum of the histogram of these distances.

    References
    ----------
    Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage hierarchies, IBM Systems
    Journal 9 (2), 1970.

    Examples
    --------
    >>> lru_hit_curve(PrefixTrace([[1, 2, 3], [1, 2, 4], [1, 2, 3]])).tolist()
    [0, 0, 0, 4, 5]
    """
    _require_trace(trace)
    distances = trace._distances
    num_unique = int(np.count_nonzero(distances < 0))
    return np.append(0, np.cumsum(np.bincount(distances[distances >= 0], minlength=num_unique)))


class _Residents:
    """The blocks in the cache; a policy adds `join`, `touch`, `evict` and `protect`.

    Blocks are named by their first access, so plain lists can hold what is known about them:
    `block_at` the block served at each step, `entry` the step at which a resident block took its
    present place (None: not resident).
    """

    def __init__(self, num_free, block_at):
        self.num_free, self.block_at = num_free, block_at
        self.entry = [None] * len(block_at)

    def serve(self, steps, hit, evicted):
        for step, block in enumerate(self.block_at[steps.start : steps.stop], steps.start):
            if self.entry[block] is not None:
                hit[step] = True
                self.touch(block, step)
            else:
                self.make_room(1, evicted)
                self.num_free -= 1
                self.join(block, step)

    def make_room(self, num_blocks, evicted):
        while self.num_free < num_blocks:
            evicted.append(self.evict())
            self.num_free += 1


class _Queues(_Residents):
    """Blocks in numbered queues, oldest first; the oldest of the lowest queue leaves.

    A queue holds the steps at which its blocks joined. A step that a later use has outdated is
    skipped when it surfaces.
    """

    def __init__(self, num_free, block_at, queue_of):
        super().__init__(num_free, block_at)
        self.queue_of, self.lowest = queue_of, 0
        self.queues = defaultdict(deque)
        self.victims = self._victims()

    def join(self, block, step):
        number = self.queue_of[block]
        self.queues[number].append(step)
        self.entry[block] = step
        if number < self.lowest:
            self.lowest = number

    touch = join

    def evict(self):
        return next(self.victims)

    def _victims(self):
        block_at, entry, queues = self.block_at, self.entry, self.queues
        while True:
            queue = queues[self.lowest]
            if not queue:
                self.lowest += 1
                continue
            step = queue.popleft()
            block = block_at[step]
            if entry[block] == step:
                entry[block] = None
                yield block

    def protect(self, blocks):
        for block in blocks:
            self.entry[block] = -1


class _LfuQueues(_Queues):
    """One queue per use count."""

    def touch(self, block, step):
        self.queue_of[block] += 1
        self.join(block, step)

    def serve(self, steps, hit, evicted):
        # The inherited loop with its calls written out, nearly twice as fast: a block is taken in
        # and soon evicted again far more often than it is used.
        entry, block_at, newcomers = self.entry, self.block_at, self.queues[0]
        for step, block in enumerate(block_at[steps.start : steps.stop], steps.start):
            if entry[block] is not None:
                hit[step] = True
                self.touch(block, step)
                continue
            if self.num_free:
                self.num_free -= 1
            else:
                while newcomers:
                    oldest = newcomers.popleft()
                    victim = block_at[oldest]
                    if entry[victim] == oldest:
                        entry[victim] = None
                        break
                else:
                    victim = self.evict()
                evicted.append(victim)
            entry[block] = step
            newcomers.append(step)
            self.queue_of[block] = 0
        self.lowest = 0


class _FifoQueues(_Queues):
    """One queue that uses do not change; protected blocks keep their place and are passed over."""

    protected = frozenset()

    def touch(self, block, step):
        pass

    def protect(self, blocks):
        self.protected = set(blocks)

    def evict(self):
        queue, passed = self.queues[0], []
        while self.block_at[queue[0]] in self.protected:
            passed.append(queue.popleft())
        block = super().evict()
        queue.extendleft(reversed(passed))
        return block


class _FairQueues(_Queues):
    """One queue per tenant, numbered in the order of their names."""

    def __init__(self, num_free, block_at, queue_of, quotas):
        super().__init__(num_free, block_at, queue_of)
        # In units that make every quota whole: exact, and faster than fractions.
        self.unit = math.lcm(*(quota.denominator for quota in quotas))
        self.excess = [-int(quota * self.unit) for quota in quotas]
        self.numbers = range(len(quotas))[::-1]  # ties go to the larger name

    def join(self, block, step):
        _Queues.join(self, block, step)
        self.excess[self.queue_of[block]] += self.unit

    def evict(self):
        payer = max(self.numbers, key=self.excess.__getitem__)
        if self.excess[payer] <= 0 or self.oldest(payer) == math.inf:
            over = [n for n in self.numbers if self.excess[n] > 0 and self.oldest(n) < math.inf]
            if over:
                payer = max(over, key=self.excess.__getitem__)
            else:
                payer = min(self.numbers, key=self.oldest)
        self.lowest = payer
        self.excess[payer] -= self.unit
        return next(self.victims)

    def oldest(self, number):
        queue, entry, block_at = self.queues[number], self.entry, self.block_at
        while queue and entry[block_at[queue[0]]] != queue[0]:
            queue.popleft()
        return queue[0] if queue else math.inf


class _Belady(_Residents):
    """Blocks by their next use; the one needed last leaves.

    Uses that have passed sink to the bottom of the heap, and protected blocks are in use right
    now, so neither surfaces while anybody else is resident.
    """

    def __init__(self, num_free, block_at, next_use, block_of_use):
        super().__init__(num_free, block_at)
        self.next_use, self.block_of_use, self.heap = next_use, block_of_use, []

    def touch(self, block, step):
        self.entry[block] = step
        heapq.heappush(self.heap, -self.next_use[step])

    join = touch

    def evict(self):
        block = self.block_of_use[-heapq.heappop(self.heap)]
        self.entry[block] = None
        return block

    def protect(self, blocks):
        pass


class HitFigures:
    """What a set of requests found in the cache and had to recompute.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    rows : slice or ndarray of bool
        Which of them.
    resident, leading, reusable : ndarray of int64
        Blocks each request found resident, found in its leading run, and would have found there in
        an unlimited cache `(num_requests,)` [blocks].
    seconds : callable
        `recompute_seconds` with its rates filled in.

    Attributes
    ----------
    num_requests, num_blocks : int
        Requests, and blocks they asked for [requests, blocks].
    leading_hits, ideal_leading_hits : ndarray of int64
        Blocks each request found in an unbroken run from its first, in this cache and in an
        unlimited one `(num_requests,)` [blocks].
    resident_hits : int
        Blocks found resident when accessed, what cache simulators count [blocks].
    block_hits : int
        The sum of `leading_hits`, what an engine can reuse [blocks].
    misses : int
        Blocks not found resident [blocks].
    block_hit_ratio : float
        block_hits / num_blocks [ratio].
    token_hit_ratio : float
        Reused prompt tokens / all prompt tokens [ratio].
    request_hit_ratio : float
        Mean over the requests of reused / all prompt tokens [ratio].
    first_prefill_tokens : int
        Tokens that no cache could have held, however large [tokens].
    recompute_tokens : int
        Tokens prefilled again because their blocks had been evicted [tokens].
    recompute_seconds : ndarray of float
        Time each request spends on them `(num_requests,)` [s].
    recompute_seconds_mean, recompute_seconds_p50, recompute_seconds_p99 : float
        Its mean and percentiles over the requests [s].
    recompute_cost : float
        The p99 of `recompute_seconds` / the p99 of prefill seconds without any cache [ratio].
    """

    def __init__(self, trace, rows, resident, leading, reusable, seconds):
        input_tokens = trace.input_tokens[rows]
        self.leading_hits, self.ideal_leading_hits = leading[rows], reusable[rows]
        reused = np.minimum(self.leading_hits * trace.block_size, input_tokens)
        ideal = np.minimum(self.ideal_leading_hits * trace.block_size, input_tokens)
        self.num_requests = len(input_tokens)
        self.num_blocks = int(np.diff(trace.offsets)[rows].sum())
        self.resident_hits = int(resident[rows].sum())
        self.block_hits = int(self.leading_hits.sum())
        self.misses = self.num_blocks - self.resident_hits
        self.block_hit_ratio = self.block_hits / max(1, self.num_blocks)
        self.token_hit_ratio = int(reused.sum()) / int(input_tokens.sum())
        self.request_hit_ratio = float(np.mean(reused / input_tokens))
        self.first_prefill_tokens = int((input_tokens - ideal).sum())
        self.recompute_tokens = int((ideal - reused).sum())
        self.recompute_seconds = seconds(ideal - reused, first_token=reused)
        self.recompute_seconds_mean = float(self.recompute_seconds.mean())
        p50, p99 = np.percentile(self.recompute_seconds, (50, 99)).tolist()
        self.recompute_seconds_p50, self.recompute_seconds_p99 = p50, p99
        self.recompute_cost = p99 / float(np.percentile(seconds(input_tokens), 99))


class ReplayResult(HitFigures):
    """The outcome of one replay; what it inherits is over all requests.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    counts : sequence of ndarray of int64
        `resident`, `leading` and `reusable` of `HitFigures` [blocks].
    seconds : callable
        `recompute_seconds` with its rates filled in.
    **outcome : object
        The attributes below except `tenants`.

    Attributes
    ----------
    policy : str
        The eviction policy.
    capacity_blocks : int
        Blocks the cache holds [blocks].
    engine_order : bool
        Whether requests were served as an engine serves them.
    evictions : int
        Blocks evicted [blocks].
    quotas : dict of str to Fraction
        Quota of each tenant [blocks].
    usage : dict of str to ndarray of int64
        Blocks each tenant holds after each request `(num_requests,)` [blocks].
    unfairness : float
        Mean over the requests of the share of the blocks held above quota [ratio].
    jain_index : float
        Mean over the requests of Jain's index of usage / weight [ratio].
    tenants : dict of str to HitFigures
        The figures of each tenant's requests.
    """

    def __init__(self, trace, counts, seconds, **outcome):
        super().__init__(trace, slice(None), *counts, seconds)
        vars(self).update(outcome)
        self.tenants = {
            name: HitFigures(trace, trace.tenant == i, *counts, seconds)
            for i, name in enumerate(trace.tenant_names)
        }

    def __repr__(self):
        return table([self])


def _percent(share):
    return f"{100 * share:.1f} %"


def table(results):
    """Put replays beside each other, one line each [text].

    Parameters
    ----------
    results : iterable of ReplayResult
        What `replay` returned.

    Returns
    -------
    str
        Policy, capacity, the shares of blocks and tokens found, the 99th percentile of recompute
        seconds per request and the share of the blocks held above quotas; then, where there are
        several tenants, the share of its blocks that each finds.

    Examples
    --------
    >>> trace = PrefixTrace([[1, 2], [1, 3], [1, 2]])
    >>> print(table(replay(trace, 2, policy) for policy in ("lru", "fifo")))
    policy  capacity [blocks]  blocks found  tokens found  recompute p99 [s]  above quota
    lru                     2        33.3 %        33.3 %              0.063        0.0 %
    fifo                    2        16.7 %        16.7 %              0.125        0.0 %
    """
    results = list(results)
    tenants = dict.fromkeys(name for result in results for name in result.tenants)
    tenants = tenants if len(tenants) > 1 else {}
    head = ["policy", "capacity [blocks]", "blocks found", "tokens found", "recompute p99 [s]"]
    rows = [[*head, "above quota", *(f"{name} finds" for name in tenants)]]
    for result in results:
        row = [
            result.policy,
            f"{result.capacity_blocks:,}",
            _percent(result.block_hit_ratio),
            _percent(result.token_hit_ratio),
            f"{result.recompute_seconds_p99:.3f}",
            _percent(result.unfairness),
        ]
        rows.append(row + [_percent(result.tenants[name].block_hit_ratio) for name in tenants])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def replay(
    trace,
    capacity_blocks,
    policy="lru",
    tenant_weights=None,
    *,
    engine_order=False,
    prefill_tokens_per_second=8000.0,
    attention_tokens=None,
    progress=None,
):
    """Serve a trace from a cache of fixed capacity and count what it finds.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    capacity_blocks : int
        Blocks the cache holds [blocks].
    policy : {"lru", "lfu", "fifo", "fair", "cost", "belady"}, optional
        Who leaves. "belady" knows the future: a bound, not a policy one can buy.
    tenant_weights : mapping of str to number, optional
        Weights behind the quotas; a tenant not listed weighs 1.
    engine_order : bool, optional
        False: every access in file order is a lookup, a miss inserts the block and evicts one if
        the cache is full. True: hits are counted when the request arrives, it never evicts its own
        blocks (if it alone exceeds the capacity, its head stays), and its tail leaves first.
    prefill_tokens_per_second : float, optional
        Throughput that turns tokens into seconds [tokens/s].
    attention_tokens : int, optional
        Context at which a token costs twice as much as the first; None: all cost alike [tokens].
    progress : callable, optional
        Called now and then with (requests done, requests in all); returning False cancels.

    Returns
    -------
    ReplayResult or None
        The figures; None if cancelled.

    Raises
    ------
    TypeError, ValueError
        If the capacity is not a positive integer, the policy is unknown, a weight or rate is not
        as it must be, or a request repeats a block in engine order.

    Notes
    -----
    With h leading hits, and h_inf of an unlimited cache, a request recomputes
    min(block_size * h_inf, input) - min(block_size * h, input) tokens. A block belongs to the
    tenant that used it first. "cost" evicts the block that is cheapest to recompute: without
    `attention_tokens` all blocks cost the same and it equals "lru", with it the shallowest
    position goes first.

    References
    ----------
    Belady: A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
    5 (2), 1966.

    Examples
    --------
    >>> trace = PrefixTrace([[1, 2], [1, 3], [1, 2]])
    >>> [replay(trace, 2, policy).resident_hits for policy in ("lru", "fifo", "belady")]
    [2, 1, 2]
    """
    _require_trace(trace)
    capacity_blocks = whole("capacity_blocks", capacity_blocks, low=1, high=2**62)
    one_of("policy", policy, POLICIES)
    weights = {} if tenant_weights is None else tenant_weights
    quotas = fair_quotas(weights, capacity_blocks, trace.tenant_names)
    rates = {"prefill_tokens_per_second": prefill_tokens_per_second}
    seconds = functools.partial(recompute_seconds, **rates, attention_tokens=attention_tokens)
    seconds(0)  # a bad rate is refused before the work, not after it
    previous, _ = trace._uses
    if engine_order and np.any(previous >= np.arange(len(previous)) - trace._depth):
        raise ValueError(
            "engine_order=True; a chain holds each block once. Use engine_order=False."
        )
    report = progress or (lambda done, total: None)
    if policy == "lru" and not engine_order:
        served = _serve_lru(trace, capacity_blocks, report)
    else:
        cost_grows = attention_tokens is not None
        cache = _cache(trace, capacity_blocks, policy, quotas, engine_order, cost_grows)
        served = _serve(trace, capacity_blocks, cache, engine_order, report)
    if served is None:
        return None
    report(len(trace.tenant), len(trace.tenant))
    hit, evicted = served
    stays = trace._depth < capacity_blocks if engine_order else True
    usage = _usage(trace, capacity_blocks, ~hit & stays, evicted)
    resident = np.diff(_running_sum(hit)[trace.offsets])
    counts = resident, _leading(trace, hit), _leading(trace, previous >= 0)
    return ReplayResult(
        trace,
        counts,
        seconds,
        policy=policy,
        capacity_blocks=capacity_blocks,
        engine_order=engine_order,
        evictions=len(evicted),
        quotas=quotas,
        usage=usage,
        unfairness=unfairness(usage, quotas, capacity_blocks),
        jain_index=jain_index(usage, weights),
    )


def _require_trace(trace):
    if not isinstance(trace, PrefixTrace):
        kind = type(trace).__name__
        raise TypeError(f"trace={kind}; it must be a PrefixTrace. Use load_trace, or build one.")


def _serve_lru(trace, capacity, report):
    """Return what `_serve` returns, read off the stack distances."""
    if report(0, len(trace.tenant)) is False:
        return None
    previous, _ = trace._uses
    hit = (trace._distances >= 0) & (trace._distances < capacity)
    misses = np.flatnonzero(~hit)
    # Each miss beyond the first `capacity` evicts one block. Blocks leave in the order of their
    # last use, and a use was the last one unless the next access to the block is a hit.
    is_last_use = np.ones(len(hit), bool)
    is_last_use[previous[hit]] = False
    evicted = np.flatnonzero(is_last_use)[: max(0, len(misses) - capacity)]
    return hit, evicted


def _serve(trace, capacity, cache, engine_order, report):
    """Return the hit flag of each access and the blocks evicted."""
    offsets, block_at, entry = trace.offsets.tolist(), cache.block_at, cache.entry
    hit, evicted = bytearray(len(block_at)), array("q")
    for first in range(0, len(trace.tenant), _REQUESTS_PER_REPORT):
        if report(first, len(trace.tenant)) is False:
            return None
        bounds = offsets[first : first + _REQUESTS_PER_REPORT + 1]
        if not engine_order:
            cache.serve(range(bounds[0], bounds[-1]), hit, evicted)
            continue
        for start, stop in itertools.pairwise(bounds):
            hit_on_arrival = [entry[block] is not None for block in block_at[start:stop]]
            first_kept = max(start, stop - capacity)
            found = [block for block in block_at[first_kept:stop] if entry[block] is not None]
            cache.protect(found)
            cache.make_room(stop - first_kept - len(found), evicted)
            cache.serve(range(first_kept, stop), hit, evicted)
            hit[start:stop] = reversed(hit_on_arrival)
    return np.frombuffer(hit, bool), np.frombuffer(evicted, np.int64)


def _cache(trace, capacity, policy, quotas, engine_order, cost_grows):
    """Return the empty cache; in engine order each chain is served from its tail to its head."""
    previous, first = trace._uses
    position = np.arange(len(first))
    if engine_order:
        lengths = np.diff(trace.offsets)
        position = np.repeat(trace.offsets[:-1] + trace.offsets[1:] - 1, lengths) - position
    block_at = first[position].tolist()
    if policy == "belady":
        next_use = len(first) + first  # never again, in any order
        next_use[previous[previous >= 0]] = np.flatnonzero(previous >= 0)
        block_of_use = [*first.tolist(), *range(len(first))]
        return _Belady(capacity, block_at, next_use[position].tolist(), block_of_use)
    if policy == "fair":
        names = sorted(trace.tenant_names)
        rank = np.array([names.index(name) for name in trace.tenant_names])
        quotas = [quotas[name] for name in names]
        return _FairQueues(capacity, block_at, rank[trace._owner].tolist(), quotas)
    kind = {"lfu": _LfuQueues, "fifo": _FifoQueues}.get(policy, _Queues)
    by_depth = policy == "cost" and cost_grows
    return kind(capacity, block_at, trace._depth.tolist() if by_depth else [0] * len(first))


def _leading(trace, flags):
    """Count for each request the flags that are set before the first one that is not."""
    stops = np.append(np.flatnonzero(~flags), len(flags))
    first_stop = stops[np.searchsorted(stops, trace.offsets[:-1])]
    return np.minimum(first_stop, trace.offsets[1:]) - trace.offsets[:-1]


def _usage(trace, capacity, inserted, evicted):
    """Return the blocks each tenant holds after each request."""
    ends, usage = trace.offsets[1:], {}
    num_evicted = np.maximum(0, _running_sum(inserted)[ends] - capacity)  # once full, always full
    for i, name in enumerate(trace.tenant_names):
        came = _running_sum(inserted & (trace._owner == i))[ends]
        usage[name] = came - _running_sum(trace._owner[evicted] == i)[num_evicted]
    return usage


def _running_sum(flags):
    return np.append(0, np.cumsum(flags))
