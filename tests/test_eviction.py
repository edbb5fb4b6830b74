"""Victims, quotas and costs: by hand, against the seeds' formulas, and index against scan."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib import eviction
from kvlib.eviction import CostPolicy, FairPolicy, LFUPolicy, LRUPolicy


@dataclass
class Sequence:
    """The five things a policy reads, and a count of how often it read them."""

    last_access_step: int
    use_count: int = 1
    tenant: str = "default"
    blocks: int = 1
    shared: int = 0
    reads: int = 0

    def num_blocks(self):
        self.reads += 1
        return self.blocks

    def reclaimable_blocks(self):
        return self.blocks - self.shared


# ---------------------------------------------------------------- overflow, scores, quotas


@pytest.mark.parametrize(
    ("used", "delta", "budget", "overflow"),
    [(900, 150, 1000, 50), (900, 100, 1000, 0), (0, 0, 0, 0), (3, 4, 0, 7)],
)
def test_overflow_by_hand(used, delta, budget, overflow):
    assert eviction.overflow_blocks(used, delta, budget) == overflow


def test_lru_score_is_the_age():
    assert eviction.lru_score(now=10, last_access=4) == 6
    assert eviction.lru_score(10, 10) == 0


def test_quotas_are_exact_where_floats_are_not():
    # In floats 0.1 / (0.1 + 0.2) * 30 = 9.999999999999998.
    assert eviction.fair_quotas({"a": 0.1, "b": 0.2}, 30) == {"a": 10, "b": 20}
    assert eviction.fair_quotas({"a": 0.1, "b": 0.3}, 100) == {"a": 25, "b": 75}


def test_quotas_count_listed_and_present_tenants():
    # a weighs 2, b and c are present but not listed: 2/4, 1/4, 1/4 of 80.
    assert eviction.fair_quotas({"a": 2}, 80, ["b", "c", "b"]) == {"a": 40, "b": 20, "c": 20}
    assert eviction.fair_quotas({"a": 0, "b": np.float64(0.5)}, 8) == {"a": 0, "b": 8}
    assert eviction.fair_quotas({}, 8) == {}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e6), min_size=1).filter(
        lambda weights: sum(weights.values()) > 0
    ),
    st.integers(1, 10**9),
    st.sets(st.sampled_from("abcdefgh")),
)
def test_quotas_sum_to_the_total_and_keep_proportions(weights, total, present):
    quotas = eviction.fair_quotas(weights, total, present)
    assert sum(quotas.values()) == total
    assert quotas.keys() == weights.keys() | present
    a, b = next(iter(weights)), max(weights)
    assert quotas[a] * Fraction(str(weights[b])) == quotas[b] * Fraction(str(weights[a]))


# ---------------------------------------------------------------- victims by hand


def test_lru_ties_by_name():
    sequences = {"b": Sequence(3), "a": Sequence(3), "c": Sequence(4)}
    assert LRUPolicy().select_victim(sequences) == "a"


def test_lfu_ties_by_age_then_name():
    sequences = {
        "often": Sequence(1, use_count=9),
        "young": Sequence(8, use_count=2),
        "z": Sequence(5, use_count=2),
        "y": Sequence(5, use_count=2),
    }
    assert LFUPolicy().select_victim(sequences) == "y"


def fair_state(usage_a, usage_b):
    """The oldest sequence belongs to a; b has two."""
    return {
        "a1": Sequence(1, tenant="a", blocks=usage_a),
        "b1": Sequence(3, tenant="b", blocks=usage_b - 1),
        "b2": Sequence(2, tenant="b", blocks=1),
    }


def test_fair_takes_the_oldest_of_the_tenant_furthest_above():
    policy = FairPolicy({"a": 1, "b": 1}, total_blocks=100)
    # a: 30 - 50 = -20, b: 60 - 50 = +10: b pays, b2 is its oldest.
    assert policy.select_victim(fair_state(30, 60)) == "b2"
    # a: 70 - 50 = +20, b: 60 - 50 = +10: both above, a further.
    assert policy.select_victim(fair_state(70, 60)) == "a1"


def test_fair_tie_goes_to_the_larger_name():
    policy = FairPolicy({"a": 1, "b": 1}, total_blocks=100)
    assert policy.select_victim(fair_state(60, 60)) == "b2"


def test_fair_at_quota_is_not_above_it():
    # Quotas 10 and 20, exactly used, so the globally oldest leaves, whoever owns it. A float quota
    # of 9.999999999999998 would make a pay, and "at least" instead of "above" would make b pay.
    policy = FairPolicy({"a": 0.1, "b": 0.2}, 30)
    for a_step, b_step, victim in ((1, 2, "a1"), (2, 1, "b1")):
        sequences = {
            "a1": Sequence(a_step, tenant="a", blocks=10),
            "b1": Sequence(b_step, tenant="b", blocks=20),
        }
        assert policy.select_victim(sequences) == policy.index(sequences).victim() == victim


def test_the_two_wordings_of_the_fair_rule_differ():
    # Nobody is above 50. Globally oldest: a1. Largest usage - quota: b (-10 against -40).
    state = fair_state(10, 40)
    assert FairPolicy({"a": 1, "b": 1}, 100).select_victim(state) == "a1"
    assert FairPolicy({"a": 1, "b": 1}, 100, only_over_quota=False).select_victim(state) == "b2"


def test_fair_dragging_a_weight_moves_the_victim():
    # 100 blocks; equal weights: a 50 < 55 pays. Weight 3 to 2 gives a 60 and b 40 < 45: b pays.
    state = fair_state(55, 45)
    assert FairPolicy({"a": 1, "b": 1}, 100).select_victim(state) == "a1"
    assert FairPolicy({"a": 3, "b": 2}, 100).select_victim(state) == "b2"


def test_protected_blocks_count_as_usage_but_do_not_leave():
    policy = FairPolicy({"a": 1, "b": 1}, total_blocks=100)
    state = fair_state(30, 60)
    # b holds 60 even if b1 (59 blocks) must stay, so b still pays.
    assert policy.select_victim(state, protect={"b1"}) == "b2"
    assert policy.select_victim(state, protect={"b1", "b2"}) == "a1"
    assert policy.select_victim(state, protect=state) is None


def test_cost_counts_the_overshoot():
    # 200 blocks are missing. old: 2,000 blocks of work for 200 useful ones, 10 each; young: 1 each.
    sequences = {"old": Sequence(1, blocks=2000)}
    sequences |= {f"young{i}": Sequence(2 + i, blocks=40) for i in range(5)}
    policy = CostPolicy(block_size=16, prefill_tokens_per_second=8000)
    assert policy.select_victim(sequences, num_blocks=200) == "young0"
    assert policy.seconds_per_useful_block(sequences["young0"], 200) == 0.002
    assert policy.seconds_per_useful_block(sequences["old"], 200) == 0.02
    # 2,000 missing: nothing is wasted, all cost the same, the oldest leaves.
    assert policy.select_victim(sequences, num_blocks=2000) == "old"


def test_equal_costs_are_exact_ties():
    # At 7,000 tokens/s one block costs the same alone and among three, but not in floats.
    assert 1 * 16 / 7000 / 1 > 3 * 16 / 7000 / 3
    sequences = {"new": Sequence(9, blocks=3), "old": Sequence(1, blocks=1)}
    assert CostPolicy(16, 7000).select_victim(sequences, num_blocks=50) == "old"


def test_shared_blocks_make_a_victim_dear():
    # forked: 50 blocks of work free 10, 5 per block; alone: 1 per block; twin: frees nothing.
    sequences = {
        "forked": Sequence(1, blocks=50, shared=40),
        "alone": Sequence(3, blocks=10),
        "twin": Sequence(2, blocks=40, shared=40),
    }
    policy = CostPolicy()
    assert policy.select_victim(sequences, 10) == "alone"
    assert policy.select_victim(sequences, 10, protect={"alone"}) == "forked"
    assert policy.select_victim(sequences, 10, protect={"alone", "forked"}) == "twin"
    assert policy.seconds_per_useful_block(sequences["twin"]) == math.inf


def test_attention_makes_long_contexts_dearer():
    sequences = {"long": Sequence(1, blocks=100), "short": Sequence(2, blocks=10)}
    assert CostPolicy().select_victim(sequences, 1000) == "long"
    policy = CostPolicy(attention_tokens=4000)
    assert policy.select_victim(sequences, 1000) == "short"
    # 100 * 16 = 1,600 tokens: 1,600 * (1 + 1,600 / 8,000) / 8,000 s / 100 blocks.
    assert policy.seconds_per_useful_block(sequences["long"], 1000) == pytest.approx(0.0024)


@pytest.mark.parametrize(
    "policy", [LRUPolicy(), LFUPolicy(), FairPolicy({}, 10), CostPolicy()], ids=lambda p: type(p)
)
def test_nobody_to_evict_is_none(policy):
    assert policy.select_victim({}) is None
    assert policy.index().victim() is None
    one = {"a": Sequence(1)}
    assert policy.select_victim(one) == policy.index(one).victim() == "a"
    assert policy.select_victim(one, protect={"a"}) is None
    assert policy.index(one).victim(protect={"a"}) is None


# ---------------------------------------------------------------- victims by the seeds' formulas

POLICIES = {
    "lru": LRUPolicy(),
    "lfu": LFUPolicy(),
    "fair": FairPolicy({"a": 0.1, "b": 0.2, "d": 0.3}, 30),
    "argmax": FairPolicy({"a": 2, "b": 1}, 40, only_over_quota=False),
    "cost": CostPolicy(),
    "attention": CostPolicy(block_size=3, attention_tokens=7),
}
sequence = st.builds(
    Sequence,
    last_access_step=st.integers(0, 5),
    use_count=st.integers(1, 3),
    tenant=st.sampled_from("abc"),
    blocks=st.integers(4, 9),
    shared=st.sampled_from([0, 0, 1, 4]),
)
residents = st.dictionaries(st.sampled_from("pqrstuvw"), sequence, min_size=1)


def victim_by_formula(name, sequences, num_blocks, protect):
    """Sort everybody by the formula, written down a second time."""
    free = [s for s in sequences if s not in protect]
    age = {s: (q.last_access_step, s) for s, q in sequences.items()}
    if name == "lfu":
        age = {s: (sequences[s].use_count, *age[s]) for s in sequences}
    if name in ("fair", "argmax"):
        weights = {"fair": {"a": 1, "b": 2, "d": 3}, "argmax": {"a": 2, "b": 1}}[name]
        usage = {}
        for q in sequences.values():
            usage[q.tenant] = usage.get(q.tenant, 0) + q.blocks
        weights = {t: 10 * w if name == "fair" else w for t, w in weights.items()}
        weights |= {t: 100 if name == "fair" else 1 for t in usage if t not in weights}
        total = POLICIES[name].total_blocks
        # usage - w / W * total, times W: whole numbers
        excess = {t: usage[t] * sum(weights.values()) - weights[t] * total for t in usage}
        tenants = {sequences[s].tenant for s in free}
        if name == "fair":
            tenants = {t for t in tenants if excess[t] > 0}
        if tenants:
            payer = sorted((excess[t], t) for t in tenants)[-1][1]
            free = [s for s in free if sequences[s].tenant == payer]
    if name in ("cost", "attention"):
        for s in sequences:
            tokens = sequences[s].blocks * POLICIES[name].block_size
            seconds = sum(1 + Fraction(2 * p + 1, 14) for p in range(tokens))
            seconds = tokens if name == "cost" else seconds
            useful = min(sequences[s].blocks - sequences[s].shared, num_blocks)
            age[s] = (Fraction(seconds) / useful if useful else math.inf, age[s])
    return sorted(free, key=age.get)[0] if free else None


@settings(max_examples=300, deadline=None)
@given(residents, st.integers(1, 12), st.sets(st.sampled_from("pqrstuvw"), max_size=3))
def test_scan_and_index_equal_the_formula(sequences, num_blocks, protect):
    for name, policy in POLICIES.items():
        expected = victim_by_formula(name, sequences, num_blocks, protect)
        assert policy.select_victim(sequences, num_blocks, protect) == expected, name
        assert policy.index(sequences).victim(num_blocks, protect) == expected, name


@settings(deadline=None)
@given(residents)
def test_a_tenant_within_quota_is_safe_while_another_is_above(sequences):
    policy = POLICIES["fair"]
    usage = {}
    for q in sequences.values():
        usage[q.tenant] = usage.get(q.tenant, 0) + q.blocks
    quota = eviction.fair_quotas(policy.tenant_weights, policy.total_blocks, usage)
    above = {t for t in usage if usage[t] > quota[t]}
    if above:
        assert sequences[policy.select_victim(sequences)].tenant in above


# ---------------------------------------------------------------- the index over time

name = st.sampled_from("pqrs")
change = st.one_of(
    st.tuples(st.just("add"), name, sequence),
    st.tuples(st.just("change"), name, sequence),
    st.tuples(st.just("remove"), name, st.none()),
    st.tuples(st.just("evict"), st.integers(1, 12), st.sets(name, max_size=2)),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.lists(change, min_size=10, max_size=40))
def test_index_equals_scan_after_every_change(policy_name, changes):
    policy, sequences = POLICIES[policy_name], {}
    index = policy.index()
    for kind, which, new in changes:
        if kind == "add" and which not in sequences:
            sequences[which] = new
            index[which] = new
        elif kind == "change" and which in sequences:
            vars(sequences[which]).update(vars(new))
            index[which] = sequences[which]
        elif kind == "remove" and which in sequences:
            assert index.pop(which) is sequences.pop(which)
        elif kind == "evict":
            victim = index.victim(which, new)
            assert victim == policy.select_victim(sequences, which, new)
            if victim is not None:
                del index[victim], sequences[victim]
        assert dict(index) == sequences
        assert policy.select_victim(index) == policy.select_victim(sequences)


class Forkable:
    """A sequence of reference-counted blocks, as the cache manager keeps them."""

    def __init__(self, step, blocks, counts):
        self.last_access_step, self.use_count, self.tenant = step, 1, "default"
        self.blocks, self.counts = blocks, counts
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1

    def num_blocks(self):
        return len(self.blocks)

    def reclaimable_blocks(self):
        return sum(self.counts[block] == 1 for block in self.blocks)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("new"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("fork"), st.integers(0, 9), st.integers(0, 3)),
            st.tuples(st.just("release"), st.integers(0, 9), st.just(0)),
        ),
        min_size=6,
        max_size=30,
    ),
    st.integers(1, 5),
)
def test_cost_index_sees_what_forks_and_releases_of_others_change(changes, num_blocks):
    policy, sequences, counts = CostPolicy(), {}, {}
    index = policy.index()
    for step, (kind, which, more) in enumerate(changes):
        fresh = [(step, i) for i in range(more if kind == "fork" else which)]
        if kind == "new" or not sequences:
            blocks = fresh
        else:
            seq_id = sorted(sequences)[which % len(sequences)]
            blocks = sequences[seq_id].blocks + fresh
        if kind == "release" and sequences:
            del index[seq_id]
            for block in sequences.pop(seq_id).blocks:
                counts[block] -= 1
        else:
            # Only the new sequence is announced, not those it now shares blocks with.
            index[step] = sequences[step] = Forkable(step, blocks, counts)
        victim = policy.select_victim(sequences, num_blocks)
        assert index.victim(num_blocks) == victim


def test_a_pick_reads_at_most_its_victim_and_the_heap_stays_small():
    sequences = {i: Sequence(i, blocks=1 + i % 7, tenant="ab"[i % 2]) for i in range(1000)}
    for policy in POLICIES.values():
        index = policy.index(sequences)
        reads = sum(q.reads for q in sequences.values())
        assert all(index.victim(n) is not None for n in range(1, 50))
        assert sum(q.reads for q in sequences.values()) <= reads + 49
        for step in range(5000):
            sequences[step % 10].last_access_step = 1000 + step
            index[step % 10] = sequences[step % 10]
        entries = sum(len(heap) for heap in index._heaps.values())
        assert entries <= 2 * 1000 + 65 * len(index._heaps)


# ---------------------------------------------------------------- what an eviction costs


def test_recompute_by_hand():
    assert eviction.recompute_tokens(Sequence(1, blocks=2000), block_size=16) == 32_000
    assert eviction.recompute_seconds(32_000, 8000) == 4.0
    # Token p costs 1 + p / 100; 10 tokens from 50: 10 + (50 + ... + 59 + 10 / 2) / 100 = 15.5.
    assert eviction.recompute_seconds(10, 1.0, attention_tokens=100, first_token=50) == 15.5
    several = eviction.recompute_seconds(np.array([0, 10]), 1.0, first_token=np.array([3, 3]))
    assert several.tolist() == [0.0, 10.0]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_recomputing_in_two_parts_costs_the_same(first, second, attention_tokens):
    def seconds(tokens, first_token):
        return eviction.recompute_seconds(
            tokens, 8000, attention_tokens=attention_tokens, first_token=first_token
        )

    whole = seconds(first + second, 0)
    assert whole == pytest.approx(seconds(first, 0) + seconds(second, first))


def test_refill_and_break_even():
    assert eviction.refill_seconds(0, 1e9) == 0.0
    assert eviction.refill_seconds(131_072 * 1000, 25e9) == pytest.approx(0.00524288)
    # 8,000 tokens/s make 1.05 GB/s of KV cache: a 25 GB/s link always wins.
    assert eviction.break_even_tokens(131_072, 25e9, 8000, 30_000) == 0.0


@given(st.integers(1, 10**6), st.floats(1e6, 1e12), st.floats(1, 1e6), st.integers(1, 10**6))
def test_at_break_even_both_ways_cost_the_same(bytes_per_token, link, rate, attention_tokens):
    tokens = eviction.break_even_tokens(bytes_per_token, link, rate, attention_tokens)
    if tokens:
        prefill = tokens * (1 + tokens / (2 * attention_tokens)) / rate
        assert prefill == pytest.approx(tokens * bytes_per_token / link)
    else:
        assert 1 / rate >= bytes_per_token / link * (1 - 1e-9)


def test_unfairness_divides_by_all_blocks_and_ignores_the_unused():
    quotas = eviction.fair_quotas({"a": 1, "b": 3}, 100)
    # a: 45 - 25 = 20 above; b: 30 of 75. 20 / 100, though only 75 blocks are used.
    assert eviction.unfairness({"a": 45, "b": 30}, quotas, 100) == 0.2
    assert eviction.unfairness({"a": 25, "b": 75}, quotas, 100) == 0.0
    # Over two moments: 0.2 and 0 on average.
    usage = {"a": np.array([45, 25]), "b": np.array([30, 75])}
    assert eviction.unfairness(usage, quotas, 100) == 0.1


def test_jain_by_hand():
    # x = 10 and 30: 40^2 / (2 * (100 + 900)) = 0.8.
    assert eviction.jain_index({"a": 10, "b": 30}, {}) == 0.8
    assert eviction.jain_index({"a": 10, "b": 30}, {"a": 1, "b": 3}) == 1.0
    assert eviction.jain_index({"a": 10, "b": 0}, {}) == 0.5
    assert eviction.jain_index({"a": 7}, {"a": 1, "absent": 1}) == 0.5
    assert eviction.jain_index({"a": 7, "free": 5}, {"free": 0}) == 1.0
    assert eviction.jain_index({"a": 0, "b": 0}, {}) == 1.0
    assert eviction.jain_index({"a": np.array([0, 10]), "b": np.array([0, 30])}, {}) == 0.9


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
def test_jain_lies_between_one_nth_and_one(usage):
    index = eviction.jain_index(dict(enumerate(usage)), {})
    assert 1 / len(usage) - 1e-12 <= index <= 1 + 1e-12


def test_objective_weighs_proportions():
    # (2 * 0.8 + 1 * 0.4 + 1 * 0.2) / 4 = 0.55.
    assert eviction.eviction_objective(0.8, 0.4, 0.2, 2, 1, 1) == pytest.approx(0.55)
    assert eviction.eviction_objective(0.8, 0.4, 0.2, 20, 10, 10) == pytest.approx(0.55)
    assert eviction.eviction_objective(0.8, 0.4, 0.2, 0, 0, 3) == pytest.approx(0.2)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: eviction.overflow_blocks(-1, 0, 0), ValueError, "used_blocks=-1; .* at least 0"),
        (lambda: eviction.overflow_blocks(1.0, 0, 0), TypeError, "used_blocks=1.0; .*Write 1"),
        (lambda: eviction.overflow_blocks(1, True, 0), TypeError, "delta_blocks=True"),
        (lambda: eviction.lru_score(3, 4), ValueError, "last_access=4; it must be at most 3"),
        (lambda: eviction.fair_quotas({"a": 0}, 9), ValueError, "all weights are zero. Give one"),
        (lambda: FairPolicy({"a": 0, "b": 0}, 9), ValueError, "all weights are zero"),
        (lambda: FairPolicy({"a": -1}, 9), ValueError, r"tenant_weights\['a'\]=-1; .* at least 0"),
        (lambda: FairPolicy({"a": math.nan}, 9), ValueError, r"\['a'\]=nan; it must be finite"),
        (lambda: FairPolicy({"a": "1"}, 9), TypeError, r"\['a'\]='1'; it must be a number"),
        (lambda: FairPolicy([1, 2], 9), TypeError, r"tenant_weights=\[1, 2\]; .*Use a dict"),
        (lambda: FairPolicy({}, 0), ValueError, "total_blocks=0; it must be at least 1"),
        (lambda: CostPolicy(block_size=0), ValueError, "block_size=0"),
        (lambda: CostPolicy(prefill_tokens_per_second=0), ValueError, "prefill_tokens_per_second="),
        (lambda: CostPolicy(attention_tokens=1.5), TypeError, "attention_tokens=1.5"),
        (lambda: LRUPolicy().select_victim({}, 0), ValueError, "num_blocks=0"),
        (lambda: LRUPolicy().index().victim(-1), ValueError, "num_blocks=-1"),
        (lambda: eviction.recompute_tokens(Sequence(1), 0), ValueError, "block_size=0"),
        (lambda: eviction.recompute_seconds(-1, 8000), ValueError, "tokens=-1"),
        (lambda: eviction.recompute_seconds(1, math.nan), ValueError, "must be finite"),
        (lambda: eviction.refill_seconds(1, 0), ValueError, "bytes_per_second=0; .* above 0"),
        (lambda: eviction.unfairness({"a": 1}, {}, 9), ValueError, "lacks 'a'. Use fair_quotas"),
        (lambda: eviction.unfairness({"a": -1}, {"a": 1}, 9), ValueError, r"usage\['a'\]=-1"),
        (lambda: eviction.jain_index({"a": 1}, {"a": -1}), ValueError, "at least 0"),
        (
            lambda: eviction.eviction_objective(2, 0, 0, 1, 1, 1),
            ValueError,
            "miss_rate=2; .*most 1",
        ),
        (lambda: eviction.eviction_objective(0, 0, 0, 0, 0, 0), ValueError, "Use alpha=1"),
        (lambda: eviction.eviction_objective(0, 0, 0, 1, -1, 0), ValueError, "beta=-1"),
        (
            lambda: eviction.eviction_objective(0, math.nan, 0, 1, 1, 1),
            ValueError,
            "recompute_cost",
        ),
    ],
)
def test_bad_input_says_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_weights_are_copied():
    weights = {"a": 1, "b": 1}
    policy = FairPolicy(weights, 100)
    weights["a"] = 100
    assert policy.select_victim(fair_state(55, 45)) == "a1"


def test_weights_of_any_size_give_the_same_objective():
    for weight in (1e308, 5e-324, 1):
        assert eviction.eviction_objective(0.5, 0.5, 0.5, weight, weight, weight) == 0.5
    assert eviction.eviction_objective(0.5, 0.1, 0.1, 5e-324, 0, 0) == 0.5


@pytest.mark.parametrize("quota", [-3, float("nan")])
def test_a_quota_is_a_number_of_blocks(quota):
    with pytest.raises(ValueError, match=r"quotas\['a'\]"):
        eviction.unfairness({"a": 5}, {"a": quota}, 10)
