"""kvlib.paged_cache against hand-worked tables and a slow oracle that keeps every token."""

import contextlib
import copy
import itertools
import pickle
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlib import backend
from kvlib.blocks import appended_blocks, fragmentation
from kvlib.eviction import CostPolicy, FairPolicy, LFUPolicy, LRUPolicy
from kvlib.paged_cache import (
    BlockAllocator,
    KVBlock,
    KVPool,
    OutOfBlocks,
    PagedKVCacheManager,
    SequenceKVCache,
)
from tests.kernels.conftest import missing

HEADS, HEAD_DIM = 2, 3
SEQUENCE_FIELDS = ("seq_id", "num_tokens", "last_access_step", "use_count", "tenant")


class OldestFirst:
    """A small LRU; the scan is the definition."""

    def select_victim(self, sequences):
        if not sequences:
            return None
        return min(sequences, key=lambda seq_id: (sequences[seq_id].last_access_step, seq_id))


def make_manager(num_blocks=8, block_size=4, dtype="float32"):
    pool = KVPool(num_blocks, block_size, HEADS, HEAD_DIM, dtype=dtype)
    return PagedKVCacheManager(num_blocks, block_size, pool=pool)


def kv_of(tokens, dtype="float32"):
    """Keys that name their token, and values that are their negatives."""
    shape = (len(tokens), HEADS, HEAD_DIM)
    tokens = np.array(tokens, dtype=dtype).reshape(-1, 1, 1)
    offsets = np.arange(HEADS * HEAD_DIM, dtype=dtype).reshape(1, HEADS, HEAD_DIM) / 8
    k = np.broadcast_to(tokens + offsets * (tokens != 0), shape).copy()
    return k, -k


def table_of(seq):
    return [block.block_id for block in seq.block_table]


def state_of(manager):
    """Everything a failed call must leave alone, in plain values."""
    pool = manager.pool
    return copy.deepcopy(
        (
            manager.step,
            [
                (key, table_of(seq), [getattr(seq, name) for name in SEQUENCE_FIELDS])
                for key, seq in manager.sequences.items()
            ],
            [(block.block_id, block.filled, block.ref_count) for block in manager.allocator.blocks],
            manager.allocator.free_list(),
            None if pool is None else (pool.k.tobytes(), pool.v.tobytes()),
        )
    )


def assert_holds(manager, seq, tokens):
    k, v = manager.read_kv(seq)
    expected_k, expected_v = kv_of(tokens)
    np.testing.assert_array_equal(k, expected_k)
    np.testing.assert_array_equal(v, expected_v)


# ---- the allocator -------------------------------------------------------------------------------


def test_allocator_hands_out_in_a_fixed_order():
    allocator = BlockAllocator(num_blocks=4, block_size=16)
    first = allocator.allocate()
    rest = allocator.allocate_n(2)
    assert [first.block_id, *(block.block_id for block in rest)] == [0, 1, 2]
    assert (allocator.num_used, allocator.num_free, allocator.utilization()) == (3, 1, 0.75)
    assert allocator.free(rest[0])
    assert allocator.free(first)
    assert allocator.free_list() == [0, 1, 3]  # the block freed last goes first
    assert allocator.allocate_n(0) == []


def test_allocator_is_all_or_nothing():
    allocator = BlockAllocator(num_blocks=3, block_size=16)
    allocator.allocate()
    with pytest.raises(OutOfBlocks, match="needed=3 blocks; 2 are free and eviction") as error:
        allocator.allocate_n(3)
    assert (error.value.needed, error.value.free, error.value.reclaimable) == (3, 2, 1)
    assert isinstance(error.value, RuntimeError)
    assert allocator.free_list() == [1, 2]
    allocator.allocate_n(2)
    with pytest.raises(OutOfBlocks, match="needed=1 blocks; 0 are free"):
        allocator.allocate()


def test_allocator_fragmentation_counts_used_blocks_only():
    allocator = BlockAllocator(num_blocks=100, block_size=16)
    assert allocator.fragmentation() == 0.0
    full, part = allocator.allocate_n(2)
    full.filled, part.filled = 16, 4
    assert (part.capacity, part.free_slots) == (16, 12)
    assert allocator.fragmentation() == 12 / 32


def test_double_and_foreign_frees_change_nothing():
    allocator, other = BlockAllocator(4, 16), BlockAllocator(4, 16)
    block, foreign = allocator.allocate(), other.allocate()
    allocator.free(block)
    for bad in (block, foreign, KVBlock(0, 16, ref_count=1), KVBlock(99, 16, ref_count=1), 0, None):
        with pytest.raises(ValueError, match=r"block=.*; it is not in use here. Free each ref"):
            allocator.free(bad)
    assert allocator.free_list() == [0, 1, 2, 3]
    assert foreign.ref_count == 1


# ---- lifecycle, worked by hand -------------------------------------------------------------------


def test_allocate_fills_blocks_in_order():
    manager = PagedKVCacheManager(num_blocks=8, block_size=16)
    seq = manager.allocate_for_sequence("alice::1", 40)  # 40 = 16 + 16 + 8
    assert table_of(seq) == [0, 1, 2]
    assert [block.filled for block in seq.block_table] == [16, 16, 8]
    assert (seq.num_blocks(), seq.num_tokens, seq.tail_free_slots()) == (3, 40, 8)
    assert (seq.last_access_step, seq.use_count, seq.tenant) == (1, 1, "alice")
    assert manager.sequences == {"alice::1": seq}
    assert manager.fragmentation() == 8 / 48
    manager.check_invariants()


def test_appends_fill_the_tail_then_take_blocks():
    # The seed's example: 100 tokens, 1,000 decode steps at block size 16. 7 blocks hold 112 slots,
    # so 12 steps are free; 988 more need ceil(988 / 16) = 62 blocks. Every 16th step pays one.
    manager = PagedKVCacheManager(num_blocks=69, block_size=16)
    seq = manager.allocate_for_sequence("a", 100)
    taken = [manager.append_tokens(seq, 1) for _ in range(1_000)]
    assert sum(taken) == 62
    assert [step for step, blocks in enumerate(taken, 1) if blocks][:3] == [13, 29, 45]
    assert manager.allocator.num_free == 0
    assert (manager.step, seq.use_count, seq.last_access_step) == (1_001, 1_001, 1_001)


def test_release_walks_one_table_and_moves_nobody():
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    first = manager.allocate_for_sequence("first", 9)
    second = manager.allocate_for_sequence("second", 5)
    assert manager.release(first) == 3
    assert table_of(second) == [3, 4]
    assert manager.step == 2
    assert (first.num_blocks(), first.num_tokens) == (0, 0)
    # The released blocks come back in the order of their table.
    assert manager.allocator.free_list() == [0, 1, 2, 5, 6, 7]
    assert table_of(manager.allocate_for_sequence("third", 9)) == [0, 1, 2]


def test_empty_sequence_is_legal():
    manager = make_manager()
    seq = manager.allocate_for_sequence("a", 0)
    twin = manager.fork(seq, "b")
    assert (seq.num_blocks(), seq.tail_free_slots(), manager.allocator.num_used) == (0, 0, 0)
    assert manager.read_kv(seq)[0].shape == (0, HEADS, HEAD_DIM)
    assert manager.append_tokens(twin, 5) == 2
    assert (manager.release(seq), manager.release(twin)) == (0, 2)


def test_fork_adds_references_only():
    manager = PagedKVCacheManager(num_blocks=4, block_size=16)
    parent = manager.allocate_for_sequence("t::parent", 40)
    child = manager.fork(parent, "t::child")
    assert table_of(child) == table_of(parent) == [0, 1, 2]
    assert child.block_table is not parent.block_table
    assert [block.ref_count for block in parent.block_table] == [2, 2, 2]
    assert (child.num_tokens, child.use_count, child.tenant) == (40, 1, "t")
    assert (parent.last_access_step, child.last_access_step, manager.step) == (1, 2, 2)
    assert (parent.reclaimable_blocks(), child.reclaimable_blocks()) == (0, 0)
    assert manager.release(parent) == 0
    assert child.reclaimable_blocks() == 3
    assert manager.release(child) == 3


def test_tenant_rule():
    manager = PagedKVCacheManager(num_blocks=4, block_size=16)
    assert manager.allocate_for_sequence("alice::chat::2", 1).tenant == "alice"
    assert manager.allocate_for_sequence("chat", 1).tenant == "default"
    assert manager.allocate_for_sequence("bob::x", 1, tenant="carol").tenant == "carol"
    assert manager.fork("bob::x", "dave::x").tenant == "dave"
    assert manager.fork("bob::x", "y", tenant="bob").tenant == "bob"
    assert SequenceKVCache("::x").tenant == ""


def test_touch_advances_the_clock():
    manager = PagedKVCacheManager(num_blocks=4, block_size=16)
    seq = manager.allocate_for_sequence("a", 1)
    manager.allocate_for_sequence("b", 1)
    assert manager.touch("a") == 3
    assert manager.touch(seq) == 4
    assert (seq.last_access_step, seq.use_count, manager.step) == (4, 3, 4)


def test_summary():
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    manager.fork(manager.allocate_for_sequence("a", 6), "b")
    manager.append_tokens("b", 1)
    assert manager.summary() == {
        "step": 3,
        "sequences": 2,
        "used_blocks": 3,
        "free_blocks": 5,
        "shared_blocks": 1,
        "utilization": 3 / 8,
        "fragmentation": 3 / 12,  # 4 + 2 + 3 of 12 slots are filled
    }


def test_ids_and_objects_are_interchangeable():
    manager = make_manager()
    seq = manager.allocate_for_sequence("a", 2)
    assert manager.append_tokens("a", 1) == manager.append_tokens(seq, 1) == 0
    assert manager.blocks_to_append("a", 1) == manager.blocks_to_append(seq, 1) == 1
    assert manager.overflow_blocks("a", 33) == manager.overflow_blocks(seq, 33) == 2
    manager.append_kv("a", *kv_of([1]))
    assert manager.read_kv("a")[0].shape == manager.read_kv(seq)[0].shape == (5, HEADS, HEAD_DIM)
    manager.fork("a", "b")
    assert manager.make_room(0, OldestFirst(), protect=["a", manager.sequences["b"]]) == []
    assert manager.release("b") == 0


# ---- sharing and copy-on-write in real arrays ----------------------------------------------------


@pytest.mark.parametrize("writer", ["parent", "child"])
def test_a_write_copies_the_shared_tail_and_spares_the_sibling(writer):
    manager = make_manager(num_blocks=8, block_size=4)
    parent = manager.allocate_for_sequence("parent", 0)
    manager.append_kv(parent, *kv_of([1, 2, 3, 4, 5, 6]))
    child = manager.fork(parent, "child")
    one = manager.sequences[writer]
    other = child if one is parent else parent
    assert manager.blocks_to_append(one, 1) == 1  # a copy, although the tail has room
    assert manager.append_kv(one, *kv_of([7])) == 1
    assert table_of(one) == [0, 2]  # the full block stays shared
    assert table_of(other) == [0, 1]
    assert_holds(manager, one, [1, 2, 3, 4, 5, 6, 7])
    assert_holds(manager, other, [1, 2, 3, 4, 5, 6])
    assert manager.append_kv(other, *kv_of([8])) == 0  # alone with its tail: no copy
    assert table_of(other) == [0, 1]
    assert_holds(manager, other, [1, 2, 3, 4, 5, 6, 8])
    assert_holds(manager, one, [1, 2, 3, 4, 5, 6, 7])
    manager.check_invariants()


def test_a_full_shared_tail_is_never_copied():
    manager = make_manager(num_blocks=8, block_size=4)
    parent = manager.allocate_for_sequence("parent", 0)
    manager.append_kv(parent, *kv_of([1, 2, 3, 4]))
    child = manager.fork(parent, "child")
    assert manager.append_kv(child, *kv_of([5])) == 1
    assert table_of(parent) == [0]
    assert table_of(child) == [0, 1]
    assert manager.allocator.blocks[0].ref_count == 2


def test_a_copy_and_new_blocks_in_one_append():
    manager = make_manager(num_blocks=8, block_size=4)
    parent = manager.allocate_for_sequence("parent", 0)
    manager.append_kv(parent, *kv_of([1]))
    child = manager.fork(parent, "child")
    # 3 slots in the copy, then ceil((9 - 3) / 4) = 2 new blocks.
    assert manager.append_kv(child, *kv_of(list(range(2, 11)))) == 1 + 2
    assert_holds(manager, child, list(range(1, 11)))
    assert_holds(manager, parent, [1])


def test_tokens_without_keys_and_values_read_as_zeros():
    manager = make_manager(num_blocks=2, block_size=4)
    manager.append_kv(manager.allocate_for_sequence("old", 0), *kv_of([1, 2, 3, 4, 5, 6, 7, 8]))
    manager.release("old")
    seq = manager.allocate_for_sequence("new", 3)
    manager.append_kv(seq, *kv_of([9]))
    manager.append_tokens(seq, 2)
    assert_holds(manager, seq, [0, 0, 0, 9, 0, 0])


def test_reads_are_copies_and_inputs_stay():
    manager = make_manager()
    k, v = kv_of([1, 2])
    manager.append_kv(manager.allocate_for_sequence("a", 0), k, v)
    read_k, read_v = manager.read_kv("a")
    read_k[:], read_v[:] = 99, 99
    k[:] = 77
    assert_holds(manager, "a", [1, 2])
    assert manager.step == 2  # reading is no access


def test_pool_layout():
    pool = KVPool(num_blocks=5, block_size=4, num_kv_heads=2, head_dim=3)
    assert pool.k.shape == pool.v.shape == (5, 4, 2, 3)
    assert pool.k.dtype == pool.v.dtype == np.float16
    manager = PagedKVCacheManager(5, 4, pool=pool)
    k = np.arange(30, dtype="float16").reshape(5, 2, 3)
    manager.append_kv(manager.allocate_for_sequence("a", 0), k, -k)
    np.testing.assert_array_equal(pool.k[1, 0], k[4])  # token 4: block 1, slot 0
    np.testing.assert_array_equal(pool.v[0, 3], -k[3])


@pytest.mark.gpu
def test_a_pool_on_a_gpu_equals_one_on_the_cpu():
    usable, reason = backend.gpu_status()
    if not usable:
        missing(reason, "KVLIB_REQUIRE_GPU")
    import cupy

    pool = KVPool(8, 4, HEADS, HEAD_DIM, dtype="float32", xp=cupy)
    manager = PagedKVCacheManager(8, 4, pool=pool)
    manager.append_kv(manager.allocate_for_sequence("a", 1), *map(cupy.asarray, kv_of([1, 2, 3])))
    manager.append_kv(manager.fork("a", "b"), *map(cupy.asarray, kv_of([4, 5])))
    for seq_id, tokens in (("a", [0, 1, 2, 3]), ("b", [0, 1, 2, 3, 4, 5])):
        read = manager.read_kv(seq_id)
        for array, expected in zip(read, kv_of(tokens), strict=True):
            assert isinstance(array, cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(array), expected)
    with pytest.raises(TypeError, match="k=ndarray of float32; it must be cupy float32"):
        manager.append_kv("a", *kv_of([6]))


# ---- out of memory -------------------------------------------------------------------------------


def test_a_failed_append_changes_nothing():
    manager = make_manager(num_blocks=3, block_size=4)
    seq = manager.allocate_for_sequence("a", 0)
    manager.append_kv(seq, *kv_of([1, 2, 3, 4, 5]))
    manager.allocate_for_sequence("b", 1)
    before = state_of(manager)
    assert manager.overflow_blocks(seq, 8) == 2
    with pytest.raises(
        OutOfBlocks, match="needed=2 blocks; 0 are free and eviction could"
    ) as error:
        manager.append_kv(seq, *kv_of(list(range(8))))
    # Only "b" may go: its own two blocks do not help the sequence that grows.
    assert (error.value.needed, error.value.free, error.value.reclaimable) == (2, 0, 1)
    assert "eviction could free 1 more. Call make_room or use a larger pool" in str(error.value)
    with pytest.raises(OutOfBlocks):
        manager.append_tokens(seq, 4)
    with pytest.raises(OutOfBlocks, match="needed=1 blocks; 0 are free and eviction could free 3"):
        manager.allocate_for_sequence("c", 1)
    assert state_of(manager) == before
    manager.append_tokens(seq, 3)  # the tail's free slots are still there


def test_a_copy_needs_a_block_of_its_own():
    manager = make_manager(num_blocks=2, block_size=4)
    manager.append_kv(manager.allocate_for_sequence("a", 0), *kv_of([1, 2, 3, 4, 5]))
    manager.fork("a", "b")
    before = state_of(manager)
    assert manager.overflow_blocks("b", 1) == 1
    with pytest.raises(OutOfBlocks, match="needed=1 blocks; 0 are free and eviction could free 0"):
        manager.append_kv("b", *kv_of([6]))
    assert state_of(manager) == before
    manager.release("a")
    assert manager.append_kv("b", *kv_of([6])) == 0
    assert_holds(manager, "b", [1, 2, 3, 4, 5, 6])


# Blocks of 4; (call, blocks it takes).
SCENARIO = [
    (("allocate_for_sequence", "a", 6), 2),
    (("fork", "a", "b"), 0),
    (("append_kv", "b", 1), 1),  # the copy of the shared tail
    (("append_kv", "a", 9), 2),  # alone now: 2 slots, 7 tokens left
    (("fork", "b", "c"), 0),
    (("append_tokens", "c", 4), 2),  # a copy with 1 slot, 3 tokens left
    (("allocate_for_sequence", "d", 11), 3),
    (("append_kv", "d", 2), 1),
    (("append_tokens", "b", 7), 2),  # 1 slot, 6 tokens left
]


def play(manager, call):
    name, seq, argument = call
    arguments = kv_of(list(range(1, argument + 1))) if name == "append_kv" else (argument,)
    return getattr(manager, name)(seq, *arguments)


def test_failure_at_every_allocation_point_changes_nothing():
    # Leave n blocks for each n below what the scenario takes, 13: each n makes another block the
    # first that is missing, and the call that wants it must fail whole.
    calls_by_block = [call for call, num_taken in SCENARIO for _ in range(num_taken)]
    for num_left, missing_at in enumerate(calls_by_block):
        manager = make_manager(num_blocks=20, block_size=4)
        manager.allocator.allocate_n(20 - num_left)
        for call, num_taken in SCENARIO:
            before, num_free = state_of(manager), manager.allocator.num_free
            if call == missing_at:
                with pytest.raises(OutOfBlocks) as error:
                    play(manager, call)
                assert (error.value.needed, error.value.free) == (num_taken, num_free)
                assert state_of(manager) == before
                break
            play(manager, call)


# ---- make_room -----------------------------------------------------------------------------------


def test_make_room_evicts_until_enough_is_free():
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    for seq_id in "abcd":
        manager.allocate_for_sequence(seq_id, 8)
    manager.touch("a")
    step = manager.step
    assert manager.make_room(3, OldestFirst()) == ["b", "c"]
    assert manager.allocator.num_free == 4
    assert sorted(manager.sequences) == ["a", "d"]
    assert manager.step == step
    assert manager.make_room(4, OldestFirst()) == []
    assert manager.make_room(8, OldestFirst(), protect=[]) == ["d", "a"]
    manager.check_invariants()


def test_make_room_counts_shared_blocks_together():
    # Two forks share 40 blocks: each alone gives back 0, both give back 40.
    manager = PagedKVCacheManager(num_blocks=50, block_size=4)
    manager.fork(manager.allocate_for_sequence("a", 160), "b")
    assert sum(seq.reclaimable_blocks() for seq in manager.sequences.values()) == 0
    assert manager.make_room(50, OldestFirst()) == ["a", "b"]
    assert manager.allocator.num_free == 50


def test_make_room_cannot_reach_the_blocks_of_the_protected():
    manager = make_manager(num_blocks=10, block_size=4)
    manager.append_kv(manager.allocate_for_sequence("a", 0), *kv_of(list(range(1, 17))))
    manager.fork("a", "b")
    manager.append_kv("b", *kv_of([1, 2]))  # b: the 4 blocks of a, and 1 of its own
    manager.allocate_for_sequence("c", 9)  # 3 blocks; 2 are free
    before = state_of(manager)
    # a leaves nothing (b holds its blocks), c leaves 3: 10 - 5 = 5 can be free, not 6.
    with pytest.raises(OutOfBlocks, match="needed=6 blocks; 2 are free and ev") as error:
        manager.make_room(6, OldestFirst(), protect=["b"])
    assert (error.value.needed, error.value.free, error.value.reclaimable) == (6, 2, 3)
    with pytest.raises(OutOfBlocks):
        manager.make_room(3, OldestFirst(), protect=["b", manager.sequences["c"], "a", "a"])
    with pytest.raises(OutOfBlocks, match="needed=11 blocks"):
        manager.make_room(11, OldestFirst())
    assert state_of(manager) == before
    assert manager.make_room(5, OldestFirst(), protect=["b"]) == ["a", "c"]
    assert_holds(manager, "b", [*range(1, 17), 1, 2])


def test_blocks_that_the_protected_share_count_once():
    manager = PagedKVCacheManager(num_blocks=6, block_size=4)
    manager.fork(manager.allocate_for_sequence("a", 12), "b")
    manager.allocate_for_sequence("c", 12)
    # a and b hold the same 3 blocks, so 6 - 3 can be free.
    assert manager.make_room(3, OldestFirst(), protect=["a", "b"]) == ["c"]


class Stubborn:
    """Offers some victims, then answers something else."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []

    def select_victim(self, sequences):
        counts = {seq_id: seq.reclaimable_blocks() for seq_id, seq in sequences.items()}
        self.seen.append(counts)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("last_answer", "error", "message"),
    [
        (None, OutOfBlocks, "needed=8 blocks; 0 are free and eviction could free 8 more"),
        ("a", ValueError, "victim='a'; it is not a known name"),  # chosen already
        ("zebra", ValueError, "victim='zebra'; it is not a known name"),
        (KeyError("broken"), KeyError, "broken"),
    ],
)
def test_a_policy_that_fails_half_way_leaves_no_trace(last_answer, error, message):
    manager = make_manager(num_blocks=8, block_size=4)
    manager.fork(manager.allocate_for_sequence("a", 16), "b")
    manager.allocate_for_sequence("c", 16)
    before = state_of(manager)
    with pytest.raises(error, match=message):
        manager.make_room(8, Stubborn("a", last_answer))
    assert state_of(manager) == before
    manager.check_invariants()


def test_a_policy_sees_candidates_as_if_earlier_victims_had_left():
    manager = make_manager(num_blocks=8, block_size=4)
    manager.fork(manager.allocate_for_sequence("a", 16), "b")
    manager.allocate_for_sequence("c", 8)
    manager.allocate_for_sequence("kept", 8)
    policy = Stubborn("a", "b")
    assert manager.make_room(4, policy, protect=["kept"]) == ["a", "b"]
    assert policy.seen == [{"a": 0, "b": 0, "c": 2}, {"b": 4, "c": 2}]


def test_make_room_refuses_what_is_no_policy_and_no_live_sequence():
    manager = make_manager(num_blocks=2, block_size=4)
    manager.allocate_for_sequence("a", 8)
    before = state_of(manager)
    with pytest.raises(TypeError, match=r"policy='lru'; it has no select_victim. Pass LRUPolicy"):
        manager.make_room(1, "lru")
    with pytest.raises(ValueError, match="protect='b'; it is not live here"):
        manager.make_room(1, OldestFirst(), protect=["b"])
    with pytest.raises(ValueError, match="num_blocks=-1; it must be at least 0"):
        manager.make_room(-1, OldestFirst())
    with pytest.raises(TypeError, match=r"num_blocks=1.0; it must be an integer. Write 1."):
        manager.make_room(1.0, OldestFirst())
    assert state_of(manager) == before


class Indexed(OldestFirst):
    """Keeps its own order: the mapping's first entry is the oldest. Never scans."""

    num_built = 0

    def index(self, sequences):
        self.num_built += 1
        by_age = sorted(sequences.values(), key=lambda seq: seq.last_access_step)
        return MostRecentLast((seq.seq_id, seq) for seq in by_age)

    def select_victim(self, sequences, num_blocks=1, protect=()):
        if isinstance(sequences, MostRecentLast):
            return next((seq_id for seq_id in sequences if seq_id not in protect), None)
        return super().select_victim(sequences)


class MostRecentLast(dict):
    def __setitem__(self, seq_id, seq):
        # Only spared victims come back out of turn; their age, not their return, decides.
        self.pop(seq_id, None)
        younger = [
            other for other in self.values() if other.last_access_step > seq.last_access_step
        ]
        super().__setitem__(seq_id, seq)
        for other in younger:
            super().__setitem__(other.seq_id, self.pop(other.seq_id))


def random_call(rng, manager, number):
    """Draw a call that is valid now, as (method name, arguments)."""
    live = list(manager.sequences)
    if not live or rng.random() < 0.4:
        return "allocate_for_sequence", (str(number), rng.randrange(20))
    return rng.choice(
        [
            ("fork", (rng.choice(live), str(number))),
            ("touch", (rng.choice(live),)),
            ("release", (rng.choice(live),)),
            ("append_tokens", (rng.choice(live), rng.randrange(1, 20))),
        ]
    )


@pytest.mark.parametrize("seed", range(12))
def test_an_index_is_kept_up_to_date(seed):
    rng, policy, num_evicted = random.Random(seed), Indexed(), 0
    one, two = (PagedKVCacheManager(num_blocks=24, block_size=4) for _ in range(2))
    for number in range(150):
        name, arguments = random_call(rng, one, number)
        for manager in (one, two):
            with contextlib.suppress(OutOfBlocks):
                getattr(manager, name)(*arguments)
        num_blocks, protect = (
            rng.randrange(26),
            rng.sample(list(one.sequences), k=min(number % 2, len(one.sequences))),
        )
        outcomes = []
        for manager, chosen in ((one, policy), (two, OldestFirst())):
            try:
                outcomes.append(manager.make_room(num_blocks, chosen, protect))
            except OutOfBlocks as error:
                outcomes.append(error.args)
        assert outcomes[0] == outcomes[1]
        assert state_of(one) == state_of(two)
        num_evicted += len(outcomes[0]) if isinstance(outcomes[0], list) else 0
    assert policy.num_built == 1
    assert num_evicted > 20


class IndexedButShy(Indexed):
    """Gives up once after the first victim."""

    num_asked = 0

    def select_victim(self, sequences, num_blocks=1, protect=()):
        self.num_asked += 1
        if self.num_asked == 2:
            return None
        return super().select_victim(sequences, num_blocks, protect)


def test_an_index_survives_a_failed_attempt():
    manager, policy = PagedKVCacheManager(num_blocks=4, block_size=4), IndexedButShy()
    for seq_id in "abcd":
        manager.allocate_for_sequence(seq_id, 4)
    with pytest.raises(OutOfBlocks):
        manager.make_room(2, policy, protect=["b"])
    assert manager.make_room(3, policy) == ["a", "b", "c"]
    assert policy.num_built == 1


class Deaf(Indexed):
    """Does not heed what is protected."""

    def select_victim(self, sequences, num_blocks=1, protect=()):
        return super().select_victim(sequences)


def test_a_policy_that_offers_the_protected_is_refused():
    manager = make_manager(num_blocks=4, block_size=4)
    for seq_id in "abcd":
        manager.allocate_for_sequence(seq_id, 4)
    before = state_of(manager)
    with pytest.raises(ValueError, match=r"victim='a'; it is protected\. Heed protect="):
        manager.make_room(2, Deaf(), protect=["a"])
    assert state_of(manager) == before


# ---- make_room with the real policies, against the rules written out -----------------------------

WEIGHTS = {"chat": 1, "batch": 3}
REAL_POLICIES = {
    "lru": LRUPolicy(),
    "lfu": LFUPolicy(),
    "fair": FairPolicy(WEIGHTS, total_blocks=24),
    "fairest": FairPolicy(WEIGHTS, total_blocks=24, only_over_quota=False),
    "cost": CostPolicy(block_size=4),
    "quadratic": CostPolicy(block_size=4, attention_tokens=7),
}


def expected_victims(manager, rule, num_blocks, protect):
    """Choose by scanning tables of block ids; None if the protected hold too much."""
    left = {seq_id: set(table_of(seq)) for seq_id, seq in manager.sequences.items()}
    if num_blocks > 24 - len(set().union(*(left[seq_id] for seq_id in protect))):
        return None
    victims = []
    while (missing := num_blocks - 24 + len(set().union(*left.values()))) > 0:
        may_go = [manager.sequences[seq_id] for seq_id in left if seq_id not in protect]
        victim = min(may_go, key=lambda seq: rank(seq, rule, manager.sequences, left, missing))
        victims.append(victim.seq_id)
        del left[victim.seq_id]
    return victims


def rank(seq, rule, sequences, left, missing):
    age = seq.last_access_step, seq.seq_id
    if rule == "lru":
        return age
    if rule == "lfu":
        return seq.use_count, *age
    if rule in ("fair", "fairest"):
        total = sum(WEIGHTS.get(name, 1) for name in tenants_of(sequences, left))
        usage = sum(len(left[k]) for k in left if sequences[k].tenant == seq.tenant)
        excess = usage - Fraction(24 * WEIGHTS.get(seq.tenant, 1), total)
        if excess <= 0 and rule == "fair":
            return 1, 0, *age  # behind everybody above quota, and then by age alone
        return 0, -excess, [-ord(letter) for letter in seq.tenant], *age
    elsewhere = set().union(*(left[k] for k in left if k != seq.seq_id))
    useful = min(missing, len(left[seq.seq_id] - elsewhere))
    tokens = 4 * len(left[seq.seq_id])
    seconds = tokens * (1 + Fraction(tokens, 2 * 7)) if rule == "quadratic" else Fraction(tokens)
    return (0, seconds / useful, *age) if useful else (1, 0, *age)


def tenants_of(sequences, left):
    return {*WEIGHTS, *(sequences[seq_id].tenant for seq_id in left)}


@pytest.mark.parametrize("rule", REAL_POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_make_room_evicts_whom_the_real_policy_names(rule, seed):
    rng, manager, num_evicted = random.Random(seed), PagedKVCacheManager(24, 4), 0
    for number in range(150):
        name, arguments = random_call(rng, manager, number)
        with contextlib.suppress(OutOfBlocks):
            tenant = {"tenant": rng.choice(["chat", "batch", "other"])}
            getattr(manager, name)(*arguments, **tenant if name[:2] in ("al", "fo") else {})
        live = list(manager.sequences)
        protect = rng.sample(live, k=min(rng.randrange(3), len(live)))
        num_blocks = rng.randrange(25)
        expected = expected_victims(manager, rule, num_blocks, protect)
        if expected is None:
            with pytest.raises(OutOfBlocks):
                manager.make_room(num_blocks, REAL_POLICIES[rule], protect)
            continue
        assert manager.make_room(num_blocks, REAL_POLICIES[rule], protect) == expected
        num_evicted += len(expected)
        manager.check_invariants()
    assert num_evicted > 20


def test_make_room_tells_the_policy_what_is_missing_and_protected():
    # 10 blocks are missing. The old sequence of 20 would waste half; the young one of 10 nothing.
    manager = PagedKVCacheManager(num_blocks=30, block_size=4)
    manager.allocate_for_sequence("old", 80)
    manager.allocate_for_sequence("young", 40)
    assert manager.make_room(10, CostPolicy(block_size=4)) == ["young"]
    # batch holds 20 of its 15 blocks, 16 of them protected: it pays, though chat is older.
    manager = PagedKVCacheManager(num_blocks=30, block_size=4)
    for seq_id, num_tokens in {"chat::1": 40, "batch::1": 64, "batch::2": 16}.items():
        manager.allocate_for_sequence(seq_id, num_tokens)
    fair = FairPolicy({"chat": 1, "batch": 1}, total_blocks=30)
    assert manager.make_room(4, fair, protect=["batch::1"]) == ["batch::2"]


# ---- laws ----------------------------------------------------------------------------------------


@given(st.integers(0, 20), st.lists(st.integers(1, 9), max_size=6), st.integers(1, 6))
def test_appending_in_one_go_equals_one_by_one(first, pieces, block_size):
    total = sum(pieces)
    counts = []
    for steps in ([total] if total else [], pieces, [1] * total):
        manager = PagedKVCacheManager(num_blocks=80, block_size=block_size)
        seq = manager.allocate_for_sequence("a", first)
        num_taken = sum(manager.append_tokens(seq, step) for step in steps)
        filled = [(block.block_id, block.filled) for block in seq.block_table]
        counts.append((num_taken, filled, seq.num_tokens, manager.fragmentation()))
    assert counts[0] == counts[1] == counts[2]


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 6), st.booleans())
def test_appends_take_what_the_formula_says(first, num_new_tokens, block_size, shared):
    manager = PagedKVCacheManager(num_blocks=80, block_size=block_size)
    seq = manager.allocate_for_sequence("a", first)
    if shared:
        manager.fork(seq, "b")
    tail_free_slots = -first % block_size
    num_copies = int(shared and tail_free_slots > 0)
    expected = appended_blocks(num_new_tokens, tail_free_slots, block_size) + num_copies
    assert manager.blocks_to_append(seq, num_new_tokens) == expected
    num_used = manager.allocator.num_used
    assert manager.append_tokens(seq, num_new_tokens) == expected
    assert manager.allocator.num_used == num_used + expected


@given(st.integers(0, 30))
def test_fork_then_release_is_nothing(num_tokens):
    manager = make_manager(num_blocks=8, block_size=4)
    manager.append_kv(manager.allocate_for_sequence("a", num_tokens), *kv_of([5]))
    _, *before = state_of(manager)
    manager.fork("a", "b")
    assert manager.release("b") == 0
    assert list(state_of(manager)[1:]) == before


def test_the_order_of_releases_does_not_matter():
    for order in itertools.permutations("abcd"):
        manager = PagedKVCacheManager(num_blocks=20, block_size=4)
        manager.allocate_for_sequence("a", 10)
        manager.fork("a", "b")
        manager.append_tokens("b", 3)
        manager.fork("b", "c")
        manager.allocate_for_sequence("d", 5)
        num_used = manager.allocator.num_used
        assert sum(manager.release(seq_id) for seq_id in order) == num_used == 3 + 2 + 2
        assert manager.allocator.num_free == 20
        manager.check_invariants()


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 9))
def test_fragmentation_equals_the_formula_on_unshared_sequences(num_tokens, block_size):
    manager = PagedKVCacheManager(num_blocks=500, block_size=block_size)
    for seq_id, length in enumerate(num_tokens):
        manager.allocate_for_sequence(str(seq_id), length)
    assert manager.fragmentation() == fragmentation(num_tokens, block_size)


def test_fragmentation_counts_a_shared_block_once():
    # 17 tokens in 2 blocks of 16: 15 of 32 slots empty, however many sequences share them; but
    # the formula for 33 and 17 tokens that share nothing says (15 + 15) / 80, the cache 15 / 48.
    manager = PagedKVCacheManager(num_blocks=9, block_size=16)
    manager.allocate_for_sequence("a", 17)
    manager.fork("a", "b")
    assert manager.fragmentation() == 15 / 32 == fragmentation([17, 17], 16)
    manager = PagedKVCacheManager(num_blocks=9, block_size=16)
    manager.allocate_for_sequence("a", 32)
    manager.append_tokens(manager.fork("a", "b"), 1)
    assert manager.fragmentation() == 15 / 48
    assert fragmentation([32, 33], 16) == 15 / 80


def test_many_random_operations_leak_nothing():
    manager = PagedKVCacheManager(num_blocks=2_000, block_size=16)
    rng, live = random.Random(3), []
    for number in range(30_000):
        choice = rng.random()
        try:
            if choice < 0.2 or not live:
                live.append(manager.allocate_for_sequence(str(number), rng.randrange(200)))
            elif choice < 0.3:
                live.append(manager.fork(rng.choice(live), str(number)))
            elif choice < 0.5:
                manager.release(live.pop(rng.randrange(len(live))))
            else:
                manager.append_tokens(rng.choice(live), rng.randrange(1, 40))
        except OutOfBlocks:
            manager.make_room(1_000, OldestFirst())
            live = list(manager.sequences.values())
        if number % 3_000 == 0:
            manager.check_invariants()
    assert manager.allocator.num_used > 0
    for seq in live:
        manager.release(seq)
    assert manager.allocator.num_free == 2_000
    manager.check_invariants()


# ---- check_invariants must be able to fail -------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: setattr(m.allocator.blocks[0], "ref_count", 1), "block_id=0.*: 2 table entries"),
        (lambda m: setattr(m.allocator.blocks[2], "filled", 1), r"'b': filled \[4, 1\], expected"),
        (lambda m: setattr(m.allocator.blocks[7], "filled", 1), "block_id=7.*free, but not empty"),
        (lambda m: setattr(m.sequences["a"], "num_tokens", 9), "'a': filled .* expected"),
        (lambda m: m.sequences["a"].block_table.pop(), "'a': filled"),
        (lambda m: m.sequences.pop("b"), "table entries"),
        (lambda m: m.allocator._free.pop(), "free list"),
        (lambda m: m.allocator._free.append(m.allocator._free[0]), "free list"),
        (
            lambda m: (
                m.sequences["c"].block_table.append(m.sequences["c"].block_table[0])
                or setattr(m.sequences["c"], "num_tokens", 8)
            ),
            "'c': a block twice",
        ),
        (
            lambda m: (
                m.sequences["c"].block_table.append(KVBlock(4, 4, 4, 1))
                or setattr(m.sequences["c"], "num_tokens", 8)
            ),
            "foreign blocks",
        ),
    ],
)
def test_invariants_name_what_is_wrong(spoil, message):
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    manager.allocate_for_sequence("a", 7)
    manager.fork("a", "b")
    manager.append_tokens("b", 1)
    manager.allocate_for_sequence("c", 4)
    manager.check_invariants()  # a holds blocks 0 and 1, b 0 and 2, c 3
    spoil(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check_invariants()


# ---- bad input -----------------------------------------------------------------------------------


def _tokens(num_tokens=1, heads=HEADS, head_dim=HEAD_DIM, dtype="float32"):
    return np.zeros((num_tokens, heads, head_dim), dtype)


K = _tokens()
BAD_CALLS = [
    (
        lambda m: m.allocate_for_sequence("a", 1),
        ValueError,
        "seq_id='a'; this sequence is live. Rel",
    ),
    (
        lambda m: m.allocate_for_sequence("x", -1),
        ValueError,
        "num_tokens=-1; it must be at least 0",
    ),
    (lambda m: m.allocate_for_sequence("x", 1.5), TypeError, "num_tokens=1.5; it must be an int"),
    (lambda m: m.allocate_for_sequence(7, 1), TypeError, "seq_id=7, tenant=None; both must be str"),
    (
        lambda m: m.allocate_for_sequence("x", 1, tenant=7),
        TypeError,
        "tenant=7; both must be strin",
    ),
    (
        lambda m: m.append_tokens("a", 0),
        ValueError,
        "num_new_tokens=0; it must be at least 1. Pass",
    ),
    (lambda m: m.append_tokens("a", -1), ValueError, "num_new_tokens=-1; it must be at least 1"),
    (lambda m: m.append_tokens("a", True), TypeError, "num_new_tokens=True; it must be an integer"),
    (lambda m: m.append_tokens("gone", 1), ValueError, "seq='gone'; it is not live here. See the"),
    (lambda m: m.append_tokens(m.released, 1), ValueError, "seq='gone'; it is not live here"),
    (lambda m: m.append_tokens(m.foreign, 1), ValueError, "seq='a'; it is not live here"),
    (lambda m: m.append_tokens(3, 1), TypeError, "seq=3; it must be a sequence or its id. Pass"),
    (lambda m: m.append_tokens(["a"], 1), TypeError, r"seq=\['a'\]; it must be a sequence or its"),
    (lambda m: m.fork("gone", "x"), ValueError, "seq='gone'; it is not live here"),
    (lambda m: m.fork("a", "b"), ValueError, "seq_id='b'; this sequence is live"),
    (lambda m: m.fork("a", "a"), ValueError, "seq_id='a'; this sequence is live"),
    (lambda m: m.fork("a", None), TypeError, "seq_id=None, tenant=None; both must be strings"),
    (lambda m: m.release("gone"), ValueError, "seq='gone'; it is not live here"),
    (lambda m: m.release(m.released), ValueError, "seq='gone'; it is not live here"),
    (lambda m: m.touch("gone"), ValueError, "seq='gone'; it is not live here"),
    (lambda m: m.read_kv(m.foreign), ValueError, "seq='a'; it is not live here"),
    (lambda m: m.overflow_blocks("a", 0), ValueError, "num_new_tokens=0; it must be at least 1"),
    (lambda m: m.blocks_to_append(m.released, 1), ValueError, "seq='gone'; it is not live here"),
    (lambda m: m.append_kv("gone", K, K), ValueError, "seq='gone'; it is not live here"),
    (
        lambda m: m.append_kv("a", K.tolist(), K),
        TypeError,
        "k=list of None; it must be numpy float",
    ),
    (lambda m: m.append_kv("a", K, None), TypeError, "v=NoneType of None; it must be numpy"),
    (
        lambda m: m.append_kv("a", K, K.astype("float64")),
        TypeError,
        r"v=ndarray of float64; it must be numpy float32, \[n, \*\(2, 3\)\]. Convert it",
    ),
    (
        lambda m: m.append_kv("a", K, _tokens(2)),
        ValueError,
        r"v.shape=\(2, 2, 3\); it must be numpy",
    ),
    (
        lambda m: m.append_kv("a", _tokens(1, 3), K),
        ValueError,
        r"k.shape=\(1, 3, 3\); it must be nu",
    ),
    (
        lambda m: m.append_kv("a", K, _tokens(1, 2, 4)),
        ValueError,
        r"v.shape=\(1, 2, 4\); it must be",
    ),
    (
        lambda m: m.append_kv("a", K[0], K[0]),
        ValueError,
        r"k.shape=\(2, 3\); it must be .* Reshape",
    ),
    (
        lambda m: m.append_kv("a", K[..., 0, 0, None], K),
        ValueError,
        r"k.shape=\(1, 1\); it must be",
    ),
    (lambda m: m.append_kv("a", K.sum(), K), TypeError, "k=float32 of float32; it must be numpy"),
    (
        lambda m: m.append_kv("a", K[:0], K[:0]),
        ValueError,
        r"k.shape\[0\]=0; it must be at least 1",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_calls_change_nothing(call, error, message):
    manager, other = make_manager(), make_manager()
    manager.foreign = other.allocate_for_sequence("a", 3)
    manager.append_kv(manager.allocate_for_sequence("a", 0), *kv_of([1, 2, 3, 4, 5]))
    manager.fork("a", "b")
    manager.released = manager.allocate_for_sequence("gone", 3)
    manager.release("gone")
    before, others = state_of(manager), state_of(other)
    with pytest.raises(error, match=message):
        call(manager)
    assert state_of(manager) == before
    assert state_of(other) == others


def test_an_id_that_came_back_is_not_the_old_sequence():
    manager = make_manager()
    old = manager.allocate_for_sequence("a", 3)
    manager.release(old)
    new = manager.allocate_for_sequence("a", 3)
    with pytest.raises(ValueError, match="seq='a'; it is not live here"):
        manager.append_tokens(old, 1)
    assert manager.append_tokens(new, 1) == 0


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: BlockAllocator(0, 16), ValueError, "num_blocks=0; it must be at least 1"),
        (lambda: BlockAllocator(4, -1), ValueError, "block_size=-1; it must be at least 1"),
        (lambda: BlockAllocator(4, 16).allocate_n(-1), ValueError, "n=-1; it must be at least 0"),
        (lambda: PagedKVCacheManager(4.0, 16), TypeError, "num_blocks=4.0; it must be an integer"),
        (lambda: PagedKVCacheManager(4, 0), ValueError, "block_size=0; it must be at least 1"),
        (
            lambda: PagedKVCacheManager(4, 4, pool=K),
            TypeError,
            "pool=ndarray; it must be a KVPool. Build",
        ),
        (
            lambda: PagedKVCacheManager(4, 16, pool=KVPool(4, 8, 1, 1)),
            ValueError,
            r"pool.k.shape=\(4, 8, 1, 1\); it must start with the manager's \(4, 16\). Build both",
        ),
        (
            lambda: PagedKVCacheManager(5, 8, pool=KVPool(4, 8, 1, 1)),
            ValueError,
            r"it must start with the manager's \(5, 8\)",
        ),
        (lambda: KVPool(0, 16, 1, 1), ValueError, "num_blocks=0; it must be at least 1"),
        (lambda: KVPool(4, 0, 1, 1), ValueError, "block_size=0; it must be at least 1"),
        (lambda: KVPool(4, 16, 0, 1), ValueError, "num_kv_heads=0; it must be at least 1"),
        (lambda: KVPool(4, 16, 1, True), TypeError, "head_dim=True; it must be an integer"),
        (lambda: KVPool(4, 16, 1, 1, "fp16"), ValueError, "dtype='fp16'; .* mean 'float16'"),
        (lambda: KVPool(4, 16, 1, 1, object), ValueError, "dtype='object'; it is not a known name"),
        (lambda: KVPool(4, 16, 1, 1, xp=random), ValueError, "xp='random'; it is not a known name"),
    ],
)
def test_bad_construction(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_keys_and_values_need_a_pool():
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    manager.allocate_for_sequence("a", 3)
    before = state_of(manager)
    with pytest.raises(ValueError, match=r"pool=None; keys and values need storage. Pass pool="):
        manager.append_kv("a", K, K)
    with pytest.raises(ValueError, match="pool=None"):
        manager.read_kv("a")
    assert state_of(manager) == before


# ---- the manager against a slow oracle -----------------------------------------------------------


class SlowCache:
    """A sequence is a list of blocks, a block a list of tokens, a shared block the same list."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.sequences = {}

    def tokens(self, seq_id):
        return [token for block in self.sequences[seq_id] for token in block]

    def num_used(self):
        return len({id(block) for blocks in self.sequences.values() for block in blocks})

    def num_owners(self, block):
        return sum(block is other for blocks in self.sequences.values() for other in blocks)

    def grow(self, seq_id, tokens):
        """Append the tokens and return True, or return False and stay as it was."""
        undo = copy.deepcopy(self.sequences)  # keeps which lists are one object
        blocks = self.sequences.setdefault(seq_id, [])
        for token in tokens:
            if not blocks or len(blocks[-1]) == self.block_size:
                blocks.append([])
            elif self.num_owners(blocks[-1]) > 1:
                blocks[-1] = list(blocks[-1])
            blocks[-1].append(token)
        if self.num_used() <= self.num_blocks:
            return True
        self.sequences = undo
        return False


class ManagerAgainstOracle(RuleBasedStateMachine):
    NUM_BLOCKS, BLOCK_SIZE = 12, 4

    def __init__(self):
        super().__init__()
        self.manager = make_manager(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.oracle = SlowCache(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.accesses = {}  # seq_id -> (step of the last access, number of accesses)
        self.step = 0
        self.serial = 0

    def new_tokens(self, count):
        self.serial += count
        return list(range(self.serial - count + 1, self.serial + 1))

    def pick(self, number):
        live = sorted(self.oracle.sequences)
        return live[number % len(live)]

    def note_access(self, seq_id):
        self.step += 1
        self.accesses[seq_id] = (self.step, self.accesses.get(seq_id, (0, 0))[1] + 1)

    def attempt(self, seq_id, tokens, call):
        """Both must serve the tokens, or neither, and then nothing may have moved."""
        before, num_used = state_of(self.manager), self.oracle.num_used()
        if self.oracle.grow(seq_id, tokens):
            call()
            self.note_access(seq_id)
            return self.oracle.num_used() - num_used
        with pytest.raises(OutOfBlocks) as error:
            call()
        assert error.value.free == self.NUM_BLOCKS - num_used < error.value.needed
        assert state_of(self.manager) == before
        return None

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        self.serial += 1
        seq_id = f"tenant{self.serial % 3}::{self.serial}"
        self.attempt(
            seq_id,
            [0] * count,
            lambda: self.manager.allocate_for_sequence(seq_id, count),
        )

    @precondition(lambda self: self.oracle.sequences)
    @rule(number=st.integers(0, 50), count=st.integers(1, 14), by_object=st.booleans())
    def append_kv(self, number, count, by_object):
        seq_id, tokens, taken = self.pick(number), self.new_tokens(count), []
        seq = self.manager.sequences[seq_id] if by_object else seq_id
        expected = self.manager.blocks_to_append(seq, count)
        overflow = self.manager.overflow_blocks(seq, count)
        num_new = self.attempt(
            seq_id, tokens, lambda: taken.append(self.manager.append_kv(seq, *kv_of(tokens)))
        )
        assert (num_new is None) == (overflow > 0)
        assert num_new is None or [num_new] == taken == [expected]

    @precondition(lambda self: self.oracle.sequences)
    @rule(number=st.integers(0, 50), count=st.integers(1, 6))
    def append_tokens(self, number, count):
        seq_id = self.pick(number)
        self.attempt(seq_id, [0] * count, lambda: self.manager.append_tokens(seq_id, count))

    @precondition(lambda self: self.oracle.sequences)
    @rule(number=st.integers(0, 50))
    def fork(self, number):
        src = self.pick(number)
        self.serial += 1
        self.manager.fork(src, f"{src} {self.serial}")
        self.oracle.sequences[f"{src} {self.serial}"] = list(self.oracle.sequences[src])
        self.note_access(f"{src} {self.serial}")

    @precondition(lambda self: self.oracle.sequences)
    @rule(number=st.integers(0, 50))
    def touch(self, number):
        seq_id = self.pick(number)
        self.manager.touch(seq_id)
        self.note_access(seq_id)

    @precondition(lambda self: self.oracle.sequences)
    @rule(number=st.integers(0, 50))
    def release(self, number):
        self.leave(self.pick(number), self.manager.release)

    def leave(self, seq_id, release):
        num_used = self.oracle.num_used()
        del self.oracle.sequences[seq_id], self.accesses[seq_id]
        assert release(seq_id) == num_used - self.oracle.num_used()

    @rule(num_blocks=st.integers(0, 13), numbers=st.sets(st.integers(0, 9), max_size=3))
    def make_room(self, num_blocks, numbers):
        live = self.oracle.sequences
        protect = {self.pick(number) for number in numbers} if live else set()
        kept = {id(block) for seq_id in protect for block in live[seq_id]}
        before = state_of(self.manager)
        if num_blocks > self.NUM_BLOCKS - len(kept):
            with pytest.raises(OutOfBlocks):
                self.manager.make_room(num_blocks, OldestFirst(), protect)
            assert state_of(self.manager) == before
            return
        expected = []
        for seq_id in sorted(set(live) - protect, key=lambda seq_id: self.accesses[seq_id][0]):
            if self.NUM_BLOCKS - self.oracle.num_used() < num_blocks:
                expected.append(seq_id)
                del self.oracle.sequences[seq_id], self.accesses[seq_id]
        assert self.manager.make_room(num_blocks, OldestFirst(), protect) == expected

    @invariant()
    def same_contents(self):
        manager = self.manager
        manager.check_invariants()
        assert set(manager.sequences) == set(self.oracle.sequences)
        for seq_id, blocks in self.oracle.sequences.items():
            assert_holds(manager, seq_id, self.oracle.tokens(seq_id))
            seq = manager.sequences[seq_id]
            assert [block.filled for block in seq.block_table] == [len(block) for block in blocks]
            owners = [self.oracle.num_owners(block) for block in blocks]
            assert [block.ref_count for block in seq.block_table] == owners
            assert seq.reclaimable_blocks() == owners.count(1)
            assert (seq.last_access_step, seq.use_count) == self.accesses[seq_id]
            assert seq.tenant == seq_id.partition("::")[0]

    @invariant()
    def same_counts(self):
        distinct = {
            id(block): block for blocks in self.oracle.sequences.values() for block in blocks
        }
        num_slots = self.BLOCK_SIZE * len(distinct)
        num_empty = num_slots - sum(len(block) for block in distinct.values())
        assert self.manager.allocator.num_used == len(distinct)
        assert self.manager.fragmentation() == (num_empty / num_slots if num_slots else 0.0)
        assert self.manager.step == self.step


TestManagerAgainstOracle = ManagerAgainstOracle.TestCase
TestManagerAgainstOracle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_out_of_blocks_reaches_another_process():
    problem = pickle.loads(pickle.dumps(OutOfBlocks(needed=5, free=2, reclaimable=1)))
    assert (problem.needed, problem.free, problem.reclaimable) == (5, 2, 1)
    assert "needed=5 blocks" in str(problem)


def test_a_name_is_not_empty():
    manager = PagedKVCacheManager(4, 16)
    with pytest.raises(ValueError, match="seq_id=''; it must not be empty"):
        manager.allocate_for_sequence("", 1)
    with pytest.raises(ValueError, match="seq_id=''; it must not be empty"):
        manager.fork(manager.allocate_for_sequence("a", 1), "")
    assert manager.allocator.num_free == 3
