"""Replays by hand, against slow simulators, against each other, and on the recorded trace."""

import gzip
import itertools
import json
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib import _data, eviction, replay
from kvlib.replay import POLICIES, PrefixTrace, concat_tenants, generate_traffic, load_trace

ATTENTION = {"attention_tokens": 30_000}


def served(trace, capacity, policy, *, weights=None, engine_order=False, cost_grows=False):
    """Return the hit flags and the ids of the evicted blocks, in order."""
    if policy == "lru" and not engine_order:
        hit, evicted = replay._serve_lru(trace, capacity, lambda *_: None)
    else:
        quotas = eviction.fair_quotas(weights or {}, capacity, trace.tenant_names)
        cache = replay._cache(trace, capacity, policy, quotas, engine_order, cost_grows)
        hit, evicted = replay._serve(trace, capacity, cache, engine_order, lambda *_: None)
    return hit.tolist(), trace.block_ids[evicted].tolist()


# ---------------------------------------------------------------- a dozen accesses by hand

#         1 2 3 1 4 1 2 5 3 1 2 2
DOZEN = [1, 2, 3, 1, 4, 1, 2, 5, 3, 1, 2, 2]


@pytest.mark.parametrize(
    ("policy", "hits", "evicted"),
    [
        # LRU, oldest first: 123 | 231h | 4: 2 out, 314 | 341h | 2: 3 out, 412 | 5: 4 out, 125 |
        # 3: 1 out, 253 | 1: 2 out, 531 | 2: 5 out, 312 | 2h
        ("lru", "000101000001", [2, 3, 4, 1, 2, 5]),
        # FIFO: 123 | 1h | 4: 1 out, 234 | 1: 2 out, 341 | 2: 3 out, 412 | 5: 4 out, 125 |
        # 3: 1 out, 253 | 1: 2 out, 531 | 2: 5 out, 312 | 2h
        ("fifo", "000100000001", [1, 2, 3, 4, 1, 2, 5]),
        # LFU, uses in brackets: 1(2) 2 3 | 4: 2 out | 1(3) | 2: 3 out | 5: 4 out | 3: 2 out |
        # 1(4) | 2: 5 out | 2(2)h
        ("lfu", "000101000101", [2, 3, 4, 2, 5]),
        # Belady, next uses in brackets: 1 2 3 | 1h | 4: of 1 (5) 2 (6) 3 (8), 3 out | 1h 2h |
        # 5: of 1 (9) 2 (10) 4 (never), 4 out | 3: of 1 2 5 (never), 5 out | 1h 2h 2h
        ("belady", "000101100111", [3, 4, 5]),
    ],
)
def test_a_dozen_accesses_with_every_eviction(policy, hits, evicted):
    one_by_one = PrefixTrace([[block] for block in DOZEN])
    in_one = PrefixTrace([DOZEN])
    for trace in (one_by_one, in_one):
        assert served(trace, 3, policy) == ([flag == "1" for flag in hits], evicted)
        result = replay.replay(trace, 3, policy)
        assert (result.resident_hits, result.evictions) == (hits.count("1"), len(evicted))
        assert result.misses == 12 - hits.count("1")
    # One block per request: every resident hit is a leading one. One request: 1 is cold, so none.
    assert replay.replay(one_by_one, 3, policy).block_hits == hits.count("1")
    assert replay.replay(in_one, 3, policy).block_hits == 0


def test_fair_by_hand():
    # a uses 1 2 3, b uses 8 9; 4 blocks, 2 each.
    # a: 1 2 3 | b: 8 (full: a 3, b 1) | b: 9: a above by 1, its oldest 1 out: a 2, b 2 |
    # a: 1: nobody above, globally oldest 2 out: 3 8 9 1 | a: 1h | a: 2: nobody above, 3 out |
    # b: 8h | a: 3: nobody above: 9 out: a 1 2 3, b 8 | b: 9: a above: 1 out
    chains = [[1], [2], [3], [8], [9], [1], [1], [2], [8], [3], [9]]
    trace = PrefixTrace(chains, tenants=list("aaabbaaabab"))
    hit, evicted = served(trace, 4, "fair")
    assert evicted == [1, 2, 3, 9, 1]
    assert np.flatnonzero(hit).tolist() == [6, 8]
    result = replay.replay(trace, 4, "fair")
    assert result.usage["a"].tolist() == [1, 2, 3, 3, 2, 2, 2, 2, 2, 3, 2]
    assert result.usage["b"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 1, 2]
    # Above quota by 1 of 4 blocks after requests 3, 4 and 10 of 11.
    assert result.unfairness == pytest.approx(3 / 4 / 11)
    assert (result.tenants["a"].resident_hits, result.tenants["b"].resident_hits) == (1, 1)
    # Weight 3 for a: quotas 3 and 1, so b pays as soon as it holds 2 (8 out for 9? no: the ninth
    # arrives at a 3, b 1: nobody above, globally oldest 1 out; a 2, b 2; then 1: b above, 8 out).
    assert served(trace, 4, "fair", weights={"a": 3})[1][:2] == [1, 8]


def test_a_resident_block_behind_a_gap_is_no_engine_hit():
    # FIFO, 3 blocks: 1 2 3 | 4 (1 out) | then the chain 1 2 3: 1 misses (2 out), 2 misses (3 out).
    trace = PrefixTrace([[1, 2, 3], [4], [2, 3]])
    result = replay.replay(trace, 3, "fifo")
    assert (result.resident_hits, result.block_hits) == (2, 2)
    # The chain is 9 2 3: block 9 is new and pushes 2 out (FIFO: 2 3 4), 2 misses and pushes 3 out.
    result = replay.replay(PrefixTrace([[1, 2, 3], [4], [9, 3, 2]]), 4, "fifo")
    assert (result.resident_hits, result.block_hits) == (2, 0)
    assert result.leading_hits.tolist() == [0, 0, 0]


# ---------------------------------------------------------------- engine order by hand


def test_engine_order_evicts_the_tail_first():
    # 4 blocks: 1 2 3 4; then 5 6 need 2: the tails 4 and 3 leave, so 1 2 is found again.
    trace = PrefixTrace([[1, 2, 3, 4], [5, 6], [1, 2, 3, 4]])
    for policy in ("lru", "lfu", "fifo", "fair", "cost"):
        hit, evicted = served(trace, 4, policy, engine_order=True)
        assert hit == [False] * 6 + [True, True, False, False], policy
        # Then 3 4 need 2: 5 6 leave, not the request's own 1 2; the tail 6 before 5.
        assert evicted == [4, 3, 6, 5], policy
    # In file order 1 is the oldest: 1 2 leave for 5 6, then each block just before its use.
    hit, evicted = served(trace, 4, "lru")
    assert (sum(hit), evicted) == (0, [1, 2, 3, 4, 5, 6])


def test_engine_order_counts_hits_on_arrival():
    # 3 blocks hold 2 3 4. The chain 1 2 3 arrives: 2 and 3 are there, though behind a gap.
    trace = PrefixTrace([[2, 3, 4], [1, 2, 3]])
    result = replay.replay(trace, 3, "lru", engine_order=True)
    assert (result.resident_hits, result.block_hits) == (2, 0)
    # In file order 1 pushes 2 out, 2 pushes 3 out, 3 pushes 4 out.
    assert replay.replay(trace, 3, "lru").resident_hits == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_larger_than_the_cache_keeps_its_head(policy):
    trace = PrefixTrace([[9], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [9]])
    result = replay.replay(trace, 3, policy, engine_order=True, **ATTENTION)
    assert result.leading_hits.tolist() == [0, 0, 3, 0]
    # 9 out for the first chain; nothing for the second; one block of it for 9.
    assert (result.evictions, result.usage["default"].tolist()) == (2, [1, 3, 3, 3])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tail_beyond_the_capacity_leaves_for_the_own_head(policy):
    # 3 is resident, but when 1 2 3 arrives at a cache of 2 blocks the head 1 2 stays.
    trace = PrefixTrace([[3], [1, 2, 3], [3]])
    result = replay.replay(trace, 2, policy, engine_order=True, **ATTENTION)
    assert (result.resident_hits, result.evictions) == (1, 2)
    assert result.usage["default"].tolist() == [1, 2, 2]


# ---------------------------------------------------------------- slow simulators


@dataclass
class Resident:
    """A block as the policies of kvlib.eviction see a sequence, and two facts more."""

    last_access_step: int
    tenant: str
    depth: int
    use_count: int = 1
    inserted_step: int = 0

    def num_blocks(self):
        return 1

    def reclaimable_blocks(self):
        return 1


def slow_victim(policy, cache, free, weights, capacity, next_use):
    """Pick a victim by looking at everybody; the readable policies where there is one."""
    protect = set(cache) - set(free)
    if policy == "lru":
        return eviction.LRUPolicy().select_victim(cache, protect=protect)
    if policy == "lfu":
        return eviction.LFUPolicy().select_victim(cache, protect=protect)
    if policy == "fair":
        return eviction.FairPolicy(weights, capacity).select_victim(cache, protect=protect)
    if policy == "fifo":
        return min(free, key=lambda block: cache[block].inserted_step)
    if policy == "cost":
        return min(free, key=lambda block: (cache[block].depth, cache[block].last_access_step))
    return max(free, key=lambda block: (next_use(block), block))


def slow_replay(trace, capacity, policy, weights, engine_order):
    """Simulate with a plain dict of residents and lists; return hit flags and evicted blocks."""
    names = trace.tenant_names
    weights = dict.fromkeys(names, 1) | weights
    chains = [trace.block_ids[a:b].tolist() for a, b in itertools.pairwise(trace.offsets.tolist())]
    flat = [block for chain in chains for block in chain]
    owner, depth = {}, {}
    for request, chain in enumerate(chains):
        for position, block in enumerate(chain):
            owner.setdefault(block, names[trace.tenant[request]])
            depth.setdefault(block, position)
    cache, hits, evicted, clock, done = {}, [], [], itertools.count(), 0

    def next_use(block):
        return flat.index(block, done) if block in flat[done:] else math.inf

    def put(block):
        step = next(clock)
        if block in cache:
            cache[block].last_access_step = step
            cache[block].use_count += 1
        else:
            new = Resident(step, owner[block], depth[block], inserted_step=step)
            cache[block] = new

    def evict(protect=()):
        free = [block for block in cache if block not in protect]
        evicted.append(slow_victim(policy, cache, free, weights, capacity, next_use))
        del cache[evicted[-1]]

    for chain in chains:
        if engine_order:
            done += len(chain)
            hits += [block in cache for block in chain]
            kept = chain[:capacity]
            while len(set(cache) | set(kept)) > capacity:
                evict(kept)
            for block in reversed(kept):
                put(block)
        else:
            for block in chain:
                done += 1
                hits.append(block in cache)
                if block not in cache and len(cache) == capacity:
                    evict()
                put(block)
    return hits, evicted


chain = st.lists(st.integers(0, 9), max_size=5)
requests = st.lists(st.tuples(chain, st.sampled_from("abc")), min_size=1, max_size=25)


def from_requests(rows):
    chains, tenants = zip(*rows, strict=True)
    return PrefixTrace(chains, tenants=tenants)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1, 8), st.dictionaries(st.sampled_from("abd"), st.integers(1, 3)))
def test_file_order_equals_the_slow_simulator(rows, capacity, weights):
    trace = from_requests(rows)
    for policy in POLICIES:
        hits, evicted = slow_replay(trace, capacity, policy, weights, False)
        fast = served(trace, capacity, policy, weights=weights, cost_grows=True)
        assert fast[0] == hits, policy
        if policy == "belady":  # who leaves among blocks that never return does not matter
            assert len(fast[1]) == len(evicted)
        else:
            assert fast[1] == evicted, policy


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1, 8), st.dictionaries(st.sampled_from("abd"), st.integers(1, 3)))
def test_engine_order_equals_the_slow_simulator(rows, capacity, weights):
    trace = from_requests([(list(dict.fromkeys(chain)), tenant) for chain, tenant in rows])
    for policy in POLICIES:
        hits, evicted = slow_replay(trace, capacity, policy, weights, True)
        fast = served(trace, capacity, policy, weights=weights, engine_order=True, cost_grows=True)
        assert fast[0] == hits, policy
        assert len(fast[1]) == len(evicted)
        if policy != "belady":
            assert fast[1] == evicted, policy


def most_hits(trace, capacity, engine_order):
    """Try every choice of victims, by dynamic programming over the sets of residents."""
    states = {frozenset(): 0}
    for start, stop in itertools.pairwise(trace.offsets.tolist()):
        chain = trace.block_ids[start:stop].tolist()
        for part in [chain] if engine_order else [[block] for block in chain]:
            after = {}
            for held, hits in states.items():
                hits = hits + sum(block in held for block in part)
                kept = set(part[:capacity])
                others = held - kept
                room = min(len(others), capacity - len(kept))
                for stay in itertools.combinations(others, room):
                    now = frozenset(kept.union(stay))
                    after[now] = max(hits, after.get(now, 0))
            states = after
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True), min_size=1, max_size=9))
def test_belady_finds_the_most_any_choice_of_victims_can(chains):
    trace = PrefixTrace(chains)
    for capacity, engine_order in itertools.product((1, 2, 3, 5), (False, True)):
        best = replay.replay(trace, capacity, "belady", engine_order=engine_order).resident_hits
        assert best == most_hits(trace, capacity, engine_order)


# ---------------------------------------------------------------- laws


@st.composite
def prefix_traces(draw):
    """Chains that grow from earlier ones, as prompts do: a block stands behind one prefix only."""
    chains, fresh = [[0]], itertools.count(1)
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(chains))
        kept = parent[: draw(st.integers(1, len(parent)))]
        chains.append([*kept, *itertools.islice(fresh, draw(st.integers(0, 4)))])
    tenants = draw(st.lists(st.sampled_from("ab"), min_size=len(chains), max_size=len(chains)))
    return PrefixTrace(chains, tenants=tenants)


@settings(max_examples=25, deadline=None)
@given(prefix_traces(), st.booleans())
def test_laws_of_every_replay(trace, engine_order):
    num_unique = len(set(trace.block_ids.tolist()))
    for capacity in (1, 3, 6, num_unique):
        results = {
            policy: replay.replay(trace, capacity, policy, engine_order=engine_order, **ATTENTION)
            for policy in POLICIES
        }
        for policy, result in results.items():
            assert result.block_hits <= result.resident_hits <= results["belady"].resident_hits
            assert result.block_hits == result.leading_hits.sum()
            assert np.all(result.leading_hits <= result.ideal_leading_hits)
            assert result.recompute_tokens + result.first_prefill_tokens == (
                trace.input_tokens.sum() - 512 * result.block_hits
            )
            held = sum(result.usage.values())
            assert held.max() <= capacity
            assert np.all(np.diff(held) >= 0), "a full cache stays full"
            assert sum(result.quotas.values()) == capacity
            assert 0 <= result.unfairness < 1
            for total in ("num_requests", "num_blocks", "resident_hits", "block_hits", "misses"):
                parts = [getattr(part, total) for part in result.tenants.values()]
                assert sum(parts) == getattr(result, total), (policy, total)
        assert results["lru"].recompute_cost <= 1
        if capacity == num_unique:
            assert len({result.block_hits for result in results.values()}) == 1
            assert results["lru"].recompute_tokens == results["lru"].evictions == 0


@settings(max_examples=60, deadline=None)
@given(prefix_traces())
def test_lru_reuses_all_it_finds_while_every_request_fits(trace):
    longest = int(np.diff(trace.offsets).max())
    for capacity, engine_order in itertools.product((longest, longest + 3), (False, True)):
        result = replay.replay(trace, capacity, engine_order=engine_order)
        assert result.block_hits == result.resident_hits


@settings(max_examples=100, deadline=None)
@given(requests)
def test_lru_curve_is_every_replay_at_once(rows):
    trace = from_requests(rows)
    curve = replay.lru_hit_curve(trace)
    num_unique = len(set(trace.block_ids.tolist()))
    assert curve.dtype == np.int64
    assert len(curve) == num_unique + 1
    assert curve[0] == 0
    assert np.all(np.diff(curve) >= 0)
    assert curve[-1] == len(trace.block_ids) - num_unique
    for capacity in range(1, num_unique + 1):
        assert curve[capacity] == sum(slow_replay(trace, capacity, "lru", {}, False)[0])


@settings(max_examples=40, deadline=None)
@given(prefix_traces())
def test_linear_cost_is_lru(trace):
    for capacity in (1, 3, 6):
        assert served(trace, capacity, "cost") == served(trace, capacity, "lru")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_renaming_tenants_renames_results(seed):
    # Weights 1, 2 and 4 of 71 blocks: quotas are no whole numbers, so no two excesses are equal.
    rng = np.random.default_rng(seed)
    chains = rng.integers(0, 120, (60, 3)).tolist()
    tenants = rng.choice(["a", "b", "c"], 60).tolist()
    weights = {"a": 1, "b": 2, "c": 4}
    renamed = {"a": "z", "b": "y", "c": "x"}
    before = replay.replay(PrefixTrace(chains, tenants=tenants), 71, "fair", weights)
    after = replay.replay(
        PrefixTrace(chains, tenants=[renamed[tenant] for tenant in tenants]),
        71,
        "fair",
        {renamed[tenant]: weight for tenant, weight in weights.items()},
    )
    assert before.leading_hits.tolist() == after.leading_hits.tolist()
    for tenant, other in renamed.items():
        if tenant in before.usage:
            assert before.usage[tenant].tolist() == after.usage[other].tolist()


def test_block_ids_may_be_any_hashes():
    chains = [[0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 2]]
    far = [[2**63 - 1 - block * 2**40 for block in chain] for chain in chains]
    for policy in POLICIES:
        near_result = replay.replay(PrefixTrace(chains), 3, policy)
        far_result = replay.replay(PrefixTrace(far), 3, policy)
        assert near_result.leading_hits.tolist() == far_result.leading_hits.tolist()


# ---------------------------------------------------------------- tokens, seconds, ratios


def test_tokens_and_seconds_by_hand():
    # 100-token blocks, 3 resident at most. Prompts of 250, 250, 40 and 250 tokens.
    trace = PrefixTrace(
        [[1, 2, 3], [1, 2, 3], [9], [1, 2, 3]],
        input_tokens=[250, 250, 40, 250],
        block_size=100,
    )
    result = replay.replay(trace, 3, prefill_tokens_per_second=100.0)
    # LRU: all cold; all 3 found; 9 pushes 1 out; 1 pushes 2 out, 2 pushes 3 out, 3 pushes 9 out.
    assert result.leading_hits.tolist() == [0, 3, 0, 0]
    assert result.ideal_leading_hits.tolist() == [0, 3, 0, 3]
    # The third block holds 50 tokens: a hit reuses 250, not 300.
    assert result.token_hit_ratio == 250 / 790
    assert result.request_hit_ratio == pytest.approx((0 + 1 + 0 + 0) / 4)
    assert result.block_hit_ratio == 3 / 10
    assert result.recompute_tokens == 250
    assert result.first_prefill_tokens == 250 + 40
    assert result.recompute_seconds.tolist() == [0, 0, 0, 2.5]
    assert result.recompute_seconds_mean == 0.625
    assert result.recompute_seconds_p50 == 0
    # p99 of (0, 0, 0, 2.5): 2.97 of the way, 0.97 * 2.5; of the prompts: 250 tokens, 2.5 s.
    assert result.recompute_seconds_p99 == pytest.approx(2.425)
    assert result.recompute_cost == pytest.approx(0.97)


def test_recomputed_tokens_start_behind_what_was_found():
    # The second request finds 1 of its 3 blocks (2 and 3 had left): 200 tokens from position 100.
    trace = PrefixTrace([[1, 2, 3], [7, 8], [1, 2, 3]], block_size=100)
    result = replay.replay(
        trace, 3, engine_order=True, prefill_tokens_per_second=1.0, attention_tokens=100
    )
    assert result.leading_hits.tolist() == [0, 0, 1]
    # 200 * (1 + (2 * 100 + 200) / 200)
    assert result.recompute_seconds.tolist() == [0, 0, 600]


def test_two_tenants_over_time():
    # 4 blocks, 2 each. a brings 1 2 3, then b brings 8 9.
    trace = PrefixTrace([[1, 2, 3], [8, 9]], tenants=["a", "b"])
    result = replay.replay(trace, 4)
    assert result.quotas == {"a": 2, "b": 2}
    # LRU: 1 leaves for 9.
    assert (result.usage["a"].tolist(), result.usage["b"].tolist()) == ([3, 2], [0, 2])
    assert result.unfairness == 1 / 4 / 2
    # Jain: (3, 0): 1/2; (2, 2): 1.
    assert result.jain_index == 0.75
    weighted = replay.replay(trace, 4, tenant_weights={"a": 3, "absent": 4})
    assert weighted.quotas == {"a": Fraction(3, 2), "absent": 2, "b": Fraction(1, 2)}
    # a: 1.5 above, then 0.5; b: 0, then 1.5.
    assert weighted.unfairness == (1.5 + 0.5 + 1.5) / 4 / 2


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("policy", ["lru", "lfu", "belady"])
def test_progress_is_reported_and_can_cancel(policy):
    trace = PrefixTrace([[block % 7] for block in range(1000)])
    seen = []
    replay.replay(trace, 3, policy, progress=lambda done, total: seen.append((done, total)))
    assert (seen[0], seen[-1]) == ((0, 1000), (1000, 1000))
    assert all(a < b for a, b in itertools.pairwise(seen))
    assert policy == "lru" or len(seen) >= 4
    assert replay.replay(trace, 3, policy, progress=lambda done, total: False) is None

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay.replay(trace, 3, policy, progress=stop)


def test_cancelling_half_way():
    trace = PrefixTrace([[block % 7] for block in range(1000)])
    seen = []

    def stop_late(done, total):
        seen.append(done)
        return done < 500

    assert replay.replay(trace, 3, "lfu", progress=stop_late) is None
    assert seen[-1] < 1000


# ---------------------------------------------------------------- reading traces

GOOD = '{"timestamp": 5, "input_length": 900, "output_length": 7, "hash_ids": [4, 9]}'


def changed(**changes):
    return json.dumps(json.loads(GOOD) | changes)


def test_plain_and_gzipped_files_give_the_same_trace(tmp_path):
    text = f"{GOOD}\n{changed(timestamp=6, tenant='b', hash_ids=[4])}"
    (tmp_path / "t.jsonl").write_text(text)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(f"{text}\n".encode()))
    for name in ("t.jsonl", "t.jsonl.gz"):
        trace = load_trace(str(tmp_path / name))
        assert trace.timestamps_ms.tolist() == [5, 6]
        assert trace.input_tokens.tolist() == [900, 900]
        assert trace.output_tokens.tolist() == [7, 7]
        assert trace.block_ids.tolist() == [4, 9, 4]
        assert trace.offsets.tolist() == [0, 2, 3]
        assert [trace.tenant_names[i] for i in trace.tenant] == ["default", "b"]
        assert trace.block_size == 512


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"line 1: Expecting value\. Write one JSON object a line"),
        (f"{GOOD}\n\n{{".encode(), "line 3: "),
        (gzip.compress(f"{GOOD}\n".encode() * 5000, mtime=0)[:-60], "line [0-9]+: "),
        (gzip.compress(GOOD.encode(), mtime=0)[:12], "line 1: "),
        (gzip.compress(GOOD.encode(), mtime=0)[:-8] + bytes(8), "line 1: "),
        (f"{GOOD}\n".encode() + b"\xff\xfe\xff", "line 2: .*utf-8"),
        (f"{GOOD}\n{GOOD}".encode() + b" " * 10_000_000, "line 2: .*longer than 1 MiB"),
        (b"[" * 1_000_000, "line 1: "),
        (b"9" * 5000, "line 1: "),
        (b"[1, 2]", "line 1: it holds a list; .*object"),
        (b"{", "line 1: "),
        (f"{GOOD}\n{GOOD[:-1]}, ".encode() + b'"hash_ids": []}', "line 2: a key stands twice"),
        (b'{"timestamp": 1}', "line 1: hash_ids is missing"),
        (changed(timestamp=-1).encode(), "line 1: timestamp=-1; it must be at least 0"),
        (changed(timestamp="1").encode(), "line 1: timestamp='1'; it must be an integer"),
        (changed(timestamp=10**30).encode(), "line 1: timestamp=10{30}; it must be at most"),
        (changed(timestamp=math.nan).encode(), "line 1: timestamp=nan"),
        (changed(input_length="900").encode(), "line 1: input_length='900'; .*integer"),
        (changed(input_length=0).encode(), "line 1: input_length=0; it must be at least 1"),
        (changed(output_length=True).encode(), "line 1: output_length=True"),
        (changed(output_length=None).encode(), "line 1: output_length=None"),
        (changed(hash_ids="49").encode(), "line 1: hash_ids must be a list"),
        (changed(hash_ids=[4, 9.0]).encode(), r"line 1: hash_ids has 9\.0"),
        (changed(hash_ids=[4, True]).encode(), "line 1: hash_ids has True"),
        (changed(hash_ids=[-4]).encode(), "line 1: hash_ids has -4"),
        (changed(hash_ids=[None]).encode(), "line 1: hash_ids has None"),
        (changed(hash_ids=[1, 2, 3]).encode(), "line 1: num_blocks=3; .*900 tokens fills 2 .*size"),
        (changed(tenant=3).encode(), "line 1: .*tenant a name"),
    ],
)
def test_hostile_files_are_refused_with_the_line(tmp_path, content, message):
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"hostile.jsonl {message}"):
        load_trace(path)


def test_files_that_others_write(tmp_path):
    """Hashes of any kind, float times, a byte-order mark, empty lines, no output_length."""
    path = tmp_path / "own.jsonl"
    rows = [
        {"timestamp": 1000.4, "input_length": 900, "hash_ids": ["a1", 2**64 - 1]},
        {"timestamp": 2000.0, "input_length": 900, "hash_ids": ["a1", 1]},
        {"timestamp": 3000, "input_length": 900, "hash_ids": ["1", "a1"]},
    ]
    lines = "\n\n".join(map(json.dumps, rows))
    path.write_text(f"\ufeff{lines}\n \n", encoding="utf-8")
    trace = load_trace(path)
    assert trace.block_ids.tolist() == [0, 1, 0, 2, 3, 0]  # the text "1" is not the number 1
    assert trace.timestamps_ms.tolist() == [1000, 2000, 3000]
    assert trace.output_tokens.tolist() == [0, 0, 0]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1), st.integers(1, 3))
def test_blocks_of_token_ids_are_equal_where_all_up_to_them_is(prompts, size):
    trace = PrefixTrace.from_token_ids(map(tuple, prompts), block_size=size)
    assert trace.input_tokens.tolist() == list(map(len, prompts))
    heads = [tuple(p[:end]) for p in prompts for end in range(size, len(p) + 1, size)]
    assert len(heads) == len(trace.block_ids)
    pairs = set(zip(heads, trace.block_ids.tolist(), strict=True))
    assert len(pairs) == len(set(heads)) == len(set(trace.block_ids.tolist()))


def test_tenants_of_two_traces_are_not_mixed_up():
    both = PrefixTrace([[1], [1]], tenants=["x", "y"])
    with pytest.raises(ValueError, match="tenant='a/x'; it would stand for two"):
        concat_tenants({"a": both, "a/x": PrefixTrace([[1]])})


def test_a_trace_says_what_it_holds():
    trace = PrefixTrace([[1, 2], [1]], tenants=["x", "y"], block_size=16)
    said = "PrefixTrace(2 requests; 3 blocks of 16 tokens, 2 different; tenants x, y)"
    assert repr(trace) == said


@pytest.mark.parametrize("call", [lambda t: replay.replay(t, 2), replay.lru_hit_curve])
def test_what_is_no_trace_is_named(call):
    with pytest.raises(TypeError, match="trace=list; it must be a PrefixTrace"):
        call([[1, 2]])


def test_a_missing_file_and_another_block_size(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.jsonl")
    (tmp_path / "t.jsonl").write_text(changed(hash_ids=list(range(57))))
    assert load_trace(tmp_path / "t.jsonl", block_size=16).block_size == 16
    with pytest.raises(ValueError, match="block_size=0"):
        load_trace(tmp_path / "t.jsonl", block_size=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chains": []}, ValueError, r"len\(chains\)=0; it must be at least 1. Give one request"),
        ({"chains": [[1.5]]}, TypeError, "block_ids.dtype=float64; it must be integer"),
        ({"chains": [[-1]]}, ValueError, r"block_ids.min\(\)=-1"),
        ({"chains": [[1]], "input_tokens": [0]}, ValueError, r"input_tokens.min\(\)=0; .*least 1"),
        ({"chains": [[1]], "input_tokens": [9, 9]}, ValueError, r"input_tokens.shape=\(2,\)"),
        ({"chains": [[1]], "output_tokens": [1.0]}, TypeError, "output_tokens.dtype=float64"),
        ({"chains": [[1]], "timestamps_ms": [-1]}, ValueError, r"timestamps_ms.min\(\)=-1"),
        ({"chains": [[1]], "tenants": ["a", "b"]}, ValueError, r"tenants.shape=\(2,\)"),
        ({"chains": [[1, 2]], "input_tokens": [512]}, ValueError, "num_blocks=2; .*fills 1 blocks"),
        ({"chains": [[1]], "block_size": 0}, ValueError, "block_size=0"),
    ],
)
def test_a_trace_checks_what_it_is_given(arguments, error, message):
    with pytest.raises(error, match=message):
        PrefixTrace(**arguments)


def test_a_trace_cannot_be_changed_behind_its_back():
    given_lengths = np.array([512, 1024])
    trace = PrefixTrace([[1], [1, 2]], input_tokens=given_lengths)
    given_lengths[:] = 1
    assert trace.input_tokens.tolist() == [512, 1024]
    for name in (
        "timestamps_ms",
        "input_tokens",
        "output_tokens",
        "block_ids",
        "offsets",
        "tenant",
    ):
        with pytest.raises(ValueError, match="read-only"):
            getattr(trace, name)[0] = 7


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity_blocks": 0}, ValueError, "capacity_blocks=0; it must be at least 1"),
        ({"capacity_blocks": 2.0}, TypeError, "capacity_blocks=2.0; .*Write 2"),
        ({"policy": "lur"}, ValueError, "policy='lur'; .*Did you mean 'lru'"),
        ({"policy": None}, ValueError, "policy=None"),
        ({"tenant_weights": {"default": 0}}, ValueError, "all weights are zero"),
        ({"tenant_weights": {"default": -1}}, ValueError, "at least 0"),
        ({"tenant_weights": [1]}, TypeError, "tenant_weights"),
        ({"prefill_tokens_per_second": 0}, ValueError, "prefill_tokens_per_second=0"),
        ({"attention_tokens": 0}, ValueError, "attention_tokens=0"),
        ({"engine_order": True}, ValueError, "engine_order=True; a chain holds each block once"),
    ],
)
def test_replay_refuses_bad_input_before_it_works(arguments, error, message):
    trace = PrefixTrace([[1, 1]])

    def progress(done, total):
        raise AssertionError("it began")

    with pytest.raises(error, match=message):
        replay.replay(trace, **{"capacity_blocks": 2, "progress": progress} | arguments)


# ---------------------------------------------------------------- merging


def test_tenants_are_merged_by_time_and_share_nothing():
    one = PrefixTrace([[3, 4], [3]], timestamps_ms=[0, 10], output_tokens=[1, 2])
    two = PrefixTrace([[3], [3, 4]], timestamps_ms=[0, 5], tenants=["x", "y"])
    merged = concat_tenants({"one": one, "two": two})
    assert merged.timestamps_ms.tolist() == [0, 0, 5, 10]
    names = [merged.tenant_names[i] for i in merged.tenant]
    assert names == ["one", "two/x", "two/y", "one"]
    assert merged.output_tokens.tolist() == [1, 0, 0, 2]
    a, b, c, d, e, f = merged.block_ids.tolist()
    assert (a, c, d) == (f, c, c)
    assert len({a, b, c, e}) == 4
    assert one.block_ids.tolist() == [3, 4, 3]


def test_with_room_for_all_merged_tenants_find_what_they_found_alone():
    parts = {name: generate_traffic(seed, 150) for seed, name in enumerate("ab")}
    merged = replay.replay(concat_tenants(parts), 10**6)
    for name, part in parts.items():
        alone = replay.replay(part, 10**6)
        hits = [figures.block_hits for t, figures in merged.tenants.items() if t[0] == name]
        assert sum(hits) == alone.block_hits


def test_merging_needs_traces_of_one_block_size():
    with pytest.raises(ValueError, match="there is nothing to merge"):
        concat_tenants({})
    with pytest.raises(ValueError, match="all traces must have the same"):
        concat_tenants({"a": PrefixTrace([[1]]), "b": PrefixTrace([[1]], block_size=16)})


# ---------------------------------------------------------------- generated traffic


def recorded():
    return _data.read_json("trace_figures.json")["conversation"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generated_traffic_is_calibrated_to_the_conversation_trace(seed):
    figures, trace = recorded(), generate_traffic(seed)
    assert len(trace.timestamps_ms) == figures["num_requests"]
    for name in ("input_tokens", "output_tokens"):
        assert getattr(trace, name).sum() == pytest.approx(figures[name], rel=0.05)
    assert len(trace.block_ids) == pytest.approx(figures["num_blocks"], rel=0.05)
    unlimited = replay.replay(trace, 10**6)
    ratio = figures["unlimited"]["block_hit_ratio"]
    assert unlimited.block_hit_ratio == pytest.approx(ratio, abs=0.01)
    curve = replay.lru_hit_curve(trace)
    recorded_curve = figures["lru_curve"]
    hits = dict(
        zip(recorded_curve["capacity_blocks"], recorded_curve["resident_hits"], strict=True)
    )
    for capacity in (
        100,
        300,
        1000,
        2000,
        3000,
        5000,
        10_000,
        20_000,
        30_000,
        50_000,
        10**5,
        182_790,
    ):
        generated = curve[min(capacity, len(curve) - 1)] / len(trace.block_ids)
        assert generated == pytest.approx(hits[capacity] / figures["num_blocks"], abs=0.03)


def test_generated_traffic_looks_like_serving():
    trace = generate_traffic(7, 2000)
    assert np.all(np.diff(trace.timestamps_ms) >= 0)
    assert np.array_equal(np.diff(trace.offsets), -(-trace.input_tokens // 512))
    # One shared system prompt, and every other block stands behind one prefix only.
    assert np.all(trace.block_ids[trace.offsets[:-1]] == 0)
    behind = {}
    for start, stop in itertools.pairwise(trace.offsets.tolist()):
        for before, block in itertools.pairwise(trace.block_ids[start:stop].tolist()):
            assert behind.setdefault(block, before) == before
    found = replay.replay(trace, 10**6).tenants
    assert set(found) == {"chat", "agents", "batch"}
    # Batch prompts never return: all they find is the system prompt, one block a request.
    assert found["batch"].block_hits in (
        found["batch"].num_requests,
        found["batch"].num_requests - 1,
    )
    assert found["agents"].block_hit_ratio > found["chat"].block_hit_ratio > 0.3


def test_generated_traffic_depends_on_the_seed_alone():
    one, same, other = (generate_traffic(seed, 300) for seed in (1, 1, 2))
    assert np.array_equal(one.block_ids, same.block_ids)
    assert np.array_equal(one.timestamps_ms, same.timestamps_ms)
    assert not np.array_equal(one.input_tokens, other.input_tokens)
    for num_requests in (1, 2, 29, 31, 1000):
        assert len(generate_traffic(0, num_requests).tenant) == num_requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1,), "seed=-1"), ((1.5,), "seed=1.5"), ((0, 0), "num_requests=0"), ((0, True), "True")],
)
def test_generate_traffic_refuses(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate_traffic(*arguments)


# ---------------------------------------------------------------- the recorded trace itself


def test_the_recorded_conversation_equals_the_cross_check():
    """Two independent simulators counted these; the trace itself may not be shipped."""
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("KVLIB_TRACES", default))
    names = ("mooncake_conversation_trace.jsonl", "mooncake_conversation_trace.jsonl.gz")
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        pytest.skip(f"{folder} has no Mooncake conversation trace (set KVLIB_TRACES)")
    trace, expected = load_trace(paths[0]), _data.read_json("cache_crosscheck.json")
    assert len(trace.timestamps_ms) == expected["requests"]
    assert len(trace.block_ids) == expected["block_accesses"]
    assert trace.input_tokens.sum() == expected["input_tokens"]
    curve = replay.lru_hit_curve(trace)
    assert len(curve) - 1 == expected["unique_blocks"]
    hits = expected["block_hits"]
    assert curve[expected["capacities"]].tolist() == hits["lru"]
    assert curve[-1] == expected["infinite_capacity_block_hits"]
    for capacity, count in zip(expected["capacities"], hits["lru"], strict=True):
        result = replay.replay(trace, capacity)
        assert result.resident_hits == result.block_hits == count
    for policy, by_capacity in (
        ("lfu", hits["lfu (ties: least recent)"]),
        ("belady", hits["belady"]),
    ):
        for capacity, count in by_capacity.items():
            assert replay.replay(trace, int(capacity), policy).resident_hits == count
    unlimited = replay.replay(trace, expected["unique_blocks"])
    assert round(unlimited.block_hit_ratio, 4) == 0.3664
    assert round(unlimited.token_hit_ratio, 4) == 0.3736
    assert round(unlimited.request_hit_ratio, 4) == 0.4094
    # Belady needs 10,000 blocks for what LRU needs 158,282 for.
    assert curve[158_281] < curve[158_282] == curve[-1] == hits["belady"]["10000"]


# ---------------------------------------------------------------- what was recorded


def test_recorded_figures_are_a_fresh_copy():
    figures = replay.load_trace_figures()
    assert figures == _data.read_json("trace_figures.json")
    figures["conversation"]["lru_curve"]["resident_hits"][:] = []
    assert replay.recorded_hits("conversation", 10_000) == 60_921


def test_recorded_hits_are_those_of_the_nearest_capacity_below():
    # The grid has 7,000 and 10,000; LRU and Belady are recorded more finely.
    expected = _data.read_json("cache_crosscheck.json")["block_hits"]
    assert replay.recorded_hits("conversation", 10_000, "lfu") == 38_013
    assert replay.recorded_hits("conversation", 10_001, "lfu") == 38_013
    assert replay.recorded_hits("conversation", 14_999, "lfu") == 38_013
    lower = replay.recorded_hits("conversation", 9_999, "lfu")
    assert replay.recorded_hits("conversation", 7_000, "lfu") == lower < 38_013
    assert replay.recorded_hits("conversation", 10**9) == expected["lru"][-1]
    assert replay.recorded_hits("conversation", 8_000) > replay.recorded_hits("conversation", 7_500)
    for policy in ("lru", "belady"):
        ordered = [
            replay.recorded_hits("merged", 3000, policy, engine_order=order)
            for order in (False, True)
        ]
        recorded_grid = _data.read_json("trace_figures.json")["merged"]
        at = recorded_grid["capacity_blocks"].index(3000)
        assert ordered == [
            recorded_grid[order][policy]["resident_hits"][at]
            for order in ("file_order", "engine_order")
        ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("chat", 100), ValueError, "name='chat'; it is not a known name"),
        (("merged", 100, "best"), ValueError, "policy='best'"),
        (("merged", 99, "lfu"), ValueError, "capacity_blocks=99; .*Recorded from 100 on"),
        (("merged", 1e3), TypeError, "capacity_blocks=1000.0"),
    ],
)
def test_recorded_hits_refuse_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        replay.recorded_hits(*arguments)


@pytest.mark.parametrize(("name", "first_tail"), [("conversation", 368), ("synthetic", None)])
def test_crediting_unfinished_blocks_gives_the_papers_figure(name, first_tail):
    """After n full blocks, credit the unfinished block of the last request that ended there.

    `first_tail` is the estimate for requests of which only block 0 matches, tokens.
    """
    folder = Path(os.environ.get("KVLIB_TRACES", Path(__file__).parents[2] / "shared" / "data"))
    paths = list(folder.glob(f"mooncake_{name}_trace.jsonl*"))
    if not paths:
        pytest.skip(f"{folder} has no public traces (set KVLIB_TRACES)")
    trace = load_trace(paths[0])
    numbers = _data.read_json("published_numbers.json")
    entry = next(e for e in numbers if e["id"] == f"mooncake-fig9-subblock-{name}")
    chains = np.split(trace.block_ids, trace.offsets[1:-1])
    for tokens, drawn in zip(entry["inputs"]["capacity_tokens"], entry["expected"], strict=True):
        credited, tail_after = 0, {}
        leading = replay.replay(trace, tokens // 512).leading_hits.tolist()
        for length, chain, n in zip(trace.input_tokens.tolist(), chains, leading, strict=True):
            tail = 0
            if 0 < n < len(chain):
                tail = first_tail if n == 1 and first_tail else tail_after.get(chain[n - 1], 0)
            credited += min(length, 512 * n + tail)
            if length >= 512:
                tail_after[chain[length // 512 - 1]] = length % 512
        assert credited / trace.input_tokens.sum() == pytest.approx(drawn, abs=0.0095)
