"""A paged KV cache that moves real blocks: allocate, append, fork, copy on write, release."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvlib._validate import one_of, whole
from kvlib.blocks import _ceil_div

_DTYPES = ("float16", "float32", "float64", "int8", "uint8")


class OutOfBlocks(RuntimeError):
    """Say that too few blocks are free; whoever raises it has changed nothing.

    Parameters
    ----------
    needed : int
        Blocks that the call needs [blocks].
    free : int
        Blocks that are free now [blocks].
    reclaimable : int
        Blocks that evicting every sequence the call may evict would add [blocks].

    Examples
    --------
    >>> print(OutOfBlocks(needed=5, free=2, reclaimable=1))
    needed=5 blocks; 2 are free and eviction could free 1 more.
    Call make_room or use a larger pool.
    """

    def __init__(self, needed, free, reclaimable):
        rule = f"{free} are free and eviction could free {reclaimable} more"
        super().__init__(f"needed={needed} blocks; {rule}. Call make_room or use a larger pool.")
        self.needed, self.free, self.reclaimable = needed, free, reclaimable

    def __reduce__(self):  # so that it reaches the caller of another process
        return type(self), (self.needed, self.free, self.reclaimable)


@dataclass(slots=True, eq=False)
class KVBlock:
    """One physical block of slots and how many block tables point at it.

    Attributes
    ----------
    block_id : int
        Index of the block in the pool.
    capacity : int
        Slots of the block [tokens].
    filled : int
        Slots in use, from the front [tokens].
    ref_count : int
        Sequences that hold the block; 0 while it is free.

    Examples
    --------
    >>> KVBlock(block_id=3, capacity=16, filled=4, ref_count=1).free_slots
    12
    """

    block_id: int
    capacity: int
    filled: int = 0
    ref_count: int = 0

    @property
    def free_slots(self):
        """Number of empty slots of the block [tokens].

        Returns
        -------
        int
            Capacity less filled slots.
        """
        return self.capacity - self.filled


class BlockAllocator:
    """Hand out and take back the blocks of a pool, each in constant time.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool [blocks].
    block_size : int
        Slots of one block [tokens/block].

    Attributes
    ----------
    blocks : tuple of KVBlock
        Every block of the pool, by block id.

    Notes
    -----
    Free blocks form a stack: a new pool hands out block 0, 1, 2, ..., and later the block that was
    freed last goes first.

    Examples
    --------
    >>> allocator = BlockAllocator(num_blocks=4, block_size=16)
    >>> [block.block_id for block in allocator.allocate_n(3)], allocator.num_free
    ([0, 1, 2], 1)
    """

    def __init__(self, num_blocks, block_size):
        self.num_blocks = whole("num_blocks", num_blocks, low=1)
        self.block_size = whole("block_size", block_size, low=1)
        self.blocks = tuple(KVBlock(block_id, self.block_size) for block_id in range(num_blocks))
        self._free = list(reversed(self.blocks))

    @property
    def num_free(self):
        """Number of blocks that nobody holds [blocks].

        Returns
        -------
        int
            From 0 to `num_blocks`.
        """
        return len(self._free)

    @property
    def num_used(self):
        """Number of blocks that somebody holds, shared ones counted once [blocks].

        Returns
        -------
        int
            From 0 to `num_blocks`.
        """
        return self.num_blocks - self.num_free

    def allocate(self):
        """Take one free block.

        Returns
        -------
        KVBlock
            An empty block with one reference.

        Raises
        ------
        OutOfBlocks
            If no block is free.

        Examples
        --------
        >>> BlockAllocator(num_blocks=2, block_size=16).allocate().ref_count
        1
        """
        return self.allocate_n(1)[0]

    def allocate_n(self, n, num_spared=0):
        """Take several free blocks, or none at all.

        Parameters
        ----------
        n : int
            Blocks to take [blocks], 0 or more.
        num_spared : int
            Used blocks that eviction would have to spare [blocks]; only the error speaks of them.

        Returns
        -------
        list of KVBlock
            Empty blocks with one reference each.

        Raises
        ------
        OutOfBlocks
            If fewer than `n` blocks are free; none is taken then.

        Examples
        --------
        >>> len(BlockAllocator(num_blocks=2, block_size=16).allocate_n(2))
        2
        """
        if whole("n", n, low=0) > self.num_free:
            raise OutOfBlocks(n, self.num_free, self.num_used - num_spared)
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            block.ref_count = 1
        return taken

    def free(self, block):
        """Give one reference back; the last one frees the block.

        Parameters
        ----------
        block : KVBlock
            A block that somebody holds.

        Returns
        -------
        bool
            Whether the block is free now.

        Raises
        ------
        ValueError
            If `block` is free already, or no block of this allocator.

        Examples
        --------
        >>> allocator = BlockAllocator(num_blocks=2, block_size=16)
        >>> allocator.free(allocator.allocate())
        True
        """
        is_ours = self.blocks[getattr(block, "block_id", 0) % self.num_blocks] is block
        if not (is_ours and block.ref_count):
            raise ValueError(f"block={block!r}; it is not in use here. Free each reference once.")
        return self._give_back([block]) == 1

    def free_list(self):
        """List the free blocks in the order in which they will be taken.

        Returns
        -------
        list of int
            Block ids, the next one first.

        Examples
        --------
        >>> BlockAllocator(num_blocks=3, block_size=16).free_list()
        [0, 1, 2]
        """
        return [block.block_id for block in reversed(self._free)]

    def utilization(self):
        """Compute the share of the pool's blocks that are in use [ratio].

        Returns
        -------
        float
            Used blocks over all blocks, 0 to 1.

        Examples
        --------
        >>> allocator = BlockAllocator(num_blocks=4, block_size=16)
        >>> _ = allocator.allocate()
        >>> allocator.utilization()
        0.25
        """
        return self.num_used / self.num_blocks

    def fragmentation(self):
        """Compute the share of the used blocks' slots that are empty [ratio].

        Returns
        -------
        float
            0 (full, or nothing in use) to 1.

        Notes
        -----
        (sum of free slots) / (sum of capacities) over the physical blocks in use. A shared block
        counts once, so forks make this differ from `kvlib.blocks.fragmentation` of the lengths.

        Examples
        --------
        >>> allocator = BlockAllocator(num_blocks=4, block_size=16)
        >>> allocator.allocate().filled = 4
        >>> allocator.fragmentation()
        0.75
        """
        num_empty = sum(block.free_slots for block in self.blocks if block.ref_count)
        return num_empty / (self.num_used * self.block_size) if self.num_used else 0.0

    def _give_back(self, blocks):
        """Drop a reference of each block; return how many became free. No checks: this is hot."""
        num_free = self.num_free
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                block.filled = 0
                self._free.append(block)
        return self.num_free - num_free


@dataclass(slots=True, eq=False)
class SequenceKVCache:
    """The blocks of one sequence, and what eviction policies want to know about it.

    Attributes
    ----------
    seq_id : str
        Name of the sequence.
    block_table : list of KVBlock
        The physical blocks in token order.
    num_tokens : int
        Length of the sequence [tokens].
    last_access_step : int
        The manager's step at the latest access.
    use_count : int
        Number of accesses, the allocation included.
    tenant : str, optional
        Owner; by default what stands before ``::`` in `seq_id`, else "default".

    Raises
    ------
    TypeError
        If a name is no string.

    Examples
    --------
    >>> SequenceKVCache("alice::chat 1").tenant
    'alice'
    """

    seq_id: str
    block_table: list = field(default_factory=list)
    num_tokens: int = 0
    last_access_step: int = 0
    use_count: int = 0
    tenant: str | None = None

    def __post_init__(self):
        if not (isinstance(self.seq_id, str) and isinstance(self.tenant, str | None)):
            names = f"seq_id={self.seq_id!r}, tenant={self.tenant!r}"
            raise TypeError(f"{names}; both must be strings. Write str(...).")
        if not self.seq_id:
            raise ValueError("seq_id=''; it must not be empty. Name the sequence.")
        if self.tenant is None:
            owner, separator, _ = self.seq_id.partition("::")
            self.tenant = owner if separator else "default"

    def num_blocks(self):
        """Count the blocks of the table, shared or not [blocks].

        Returns
        -------
        int
            Length of the block table.

        Examples
        --------
        >>> SequenceKVCache("a", [KVBlock(0, 16), KVBlock(1, 16)]).num_blocks()
        2
        """
        return len(self.block_table)

    def reclaimable_blocks(self):
        """Count the blocks that would really return if this sequence left now [blocks].

        Returns
        -------
        int
            Blocks that nobody else holds.

        Examples
        --------
        >>> table = [KVBlock(0, 16, 16, ref_count=2), KVBlock(1, 16, 3, ref_count=1)]
        >>> SequenceKVCache("a", table).reclaimable_blocks()
        1
        """
        return sum(block.ref_count == 1 for block in self.block_table)

    def tail_free_slots(self):
        """Count the empty slots of the last block [tokens].

        Returns
        -------
        int
            Empty slots; 0 without any block.

        Examples
        --------
        >>> SequenceKVCache("a", [KVBlock(0, 16, filled=4)]).tail_free_slots()
        12
        """
        return self.block_table[-1].free_slots if self.block_table else 0


class KVPool:
    """Storage for the keys and values of every block.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool [blocks].
    block_size : int
        Slots of one block [tokens/block].
    num_kv_heads : int
        Heads of one layer.
    head_dim : int
        Elements of one head's key or value.
    dtype : str or dtype
        One of float16, float32, float64, int8 and uint8.
    xp : module
        `numpy` or `cupy`.

    Attributes
    ----------
    k, v : ndarray, (num_blocks, block_size, num_kv_heads, head_dim)
        Keys and values of one layer.

    Raises
    ------
    TypeError, ValueError
        If a count is below 1, or `dtype` or `xp` is not one of these.

    Examples
    --------
    >>> KVPool(num_blocks=4, block_size=16, num_kv_heads=2, head_dim=8).k.shape
    (4, 16, 2, 8)
    """

    def __init__(self, num_blocks, block_size, num_kv_heads, head_dim, dtype="float16", xp=np):
        self.num_blocks = whole("num_blocks", num_blocks, low=1)
        self.block_size = whole("block_size", block_size, low=1)
        self.num_kv_heads = whole("num_kv_heads", num_kv_heads, low=1)
        self.head_dim = whole("head_dim", head_dim, low=1)
        one_of("xp", getattr(xp, "__name__", xp), ("numpy", "cupy"))
        self.dtype = np.dtype(one_of("dtype", getattr(dtype, "__name__", str(dtype)), _DTYPES))
        self.xp = xp
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        self.k, self.v = xp.zeros(shape, self.dtype), xp.zeros(shape, self.dtype)

    def _count_tokens(self, k, v):
        """Return how many tokens `k` and `v` hold, or say what they must look like."""
        rule = f"it must be {self.xp.__name__} {self.dtype}, [n, *{self.k.shape[2:]}]"
        for name, array in (("k", k), ("v", v)):
            if not isinstance(array, self.xp.ndarray) or array.dtype != self.dtype:
                found = f"{name}={type(array).__name__} of {getattr(array, 'dtype', None)}"
                raise TypeError(f"{found}; {rule}. Convert it.")
            if array.shape != (*k.shape[:1], *self.k.shape[2:]):
                raise ValueError(f"{name}.shape={array.shape}; {rule}, n as in k. Reshape it.")
        return whole("k.shape[0]", len(k), low=1)

    def _locate(self, table, start, stop):
        """Return the block ids and slots of tokens `start` to `stop` of a block table."""
        positions = self.xp.arange(start, stop)
        ids = self.xp.asarray([block.block_id for block in table], dtype=positions.dtype)
        return ids[positions // self.block_size], positions % self.block_size


class PagedKVCacheManager:
    """Keep the block tables of all sequences, and their keys and values if a pool is given.

    Parameters
    ----------
    num_blocks : int
        Blocks of the cache [blocks].
    block_size : int
        Slots of one block [tokens/block].
    pool : KVPool, optional
        Real storage with as many blocks, of one manager only; without it blocks are only counted.

    Attributes
    ----------
    allocator : BlockAllocator
        Owner of the blocks.
    sequences : dict of str to SequenceKVCache
        The live sequences. Read it; change it through the methods.
    step : int
        The clock: `allocate_for_sequence`, `append_tokens`, `append_kv`, `fork` and `touch` advance
        it by 1 when they succeed.

    Raises
    ------
    TypeError, ValueError
        If a count is below 1, or `pool` has other blocks.

    Notes
    -----
    Wherever a method takes `seq`, it takes a live sequence of this manager or its id. A method that
    raises has changed nothing. Writing needs a copy first where the last block is shared and not
    full; full blocks stay shared.

    References
    ----------
    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", sections 4.2 to 4.5.

    Examples
    --------
    >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
    >>> parent = manager.allocate_for_sequence("parent", 40)
    >>> child = manager.fork(parent, "child")
    >>> manager.append_tokens(child, 1), manager.allocator.num_used  # the shared tail is copied
    (1, 4)
    """

    def __init__(self, num_blocks, block_size, pool=None):
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.block_size = self.allocator.block_size
        if not isinstance(pool, KVPool | None):
            raise TypeError(f"pool={type(pool).__name__}; it must be a KVPool. Build one.")
        if pool and pool.k.shape[:2] != (num_blocks, block_size):
            rule = f"it must start with the manager's ({num_blocks}, {block_size})"
            raise ValueError(f"pool.k.shape={pool.k.shape}; {rule}. Build both alike.")
        self.pool, self.step = pool, 0
        self.sequences, self._candidates, self._policy = {}, {}, None

    def allocate_for_sequence(self, seq_id, num_tokens, tenant=None):
        """Start a sequence and give it the blocks of its first tokens.

        Parameters
        ----------
        seq_id : str
            A name that no live sequence has.
        num_tokens : int
            First tokens [tokens]; 0 starts an empty sequence. In a pool they read as zeros.
        tenant : str, optional
            Owner; by default what stands before ``::`` in `seq_id`, else "default".

        Returns
        -------
        SequenceKVCache
            The new sequence.

        Raises
        ------
        TypeError, ValueError
            If the id is taken or empty, or `num_tokens` is negative.
        OutOfBlocks
            If too few blocks are free.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> manager.allocate_for_sequence("a", 40).num_blocks()
        3
        """
        seq = self._new_sequence(seq_id, tenant)
        self._extend(seq, whole("num_tokens", num_tokens, low=0))
        return seq

    def append_tokens(self, seq, num_new_tokens):
        """Lengthen a sequence: fill its last block, then take new ones.

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence.
        num_new_tokens : int
            Tokens to append [tokens], 1 or more. In a pool they read as zeros.

        Returns
        -------
        int
            Blocks that were taken, a copy of a shared last block included [blocks].

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here, or `num_new_tokens` is below 1.
        OutOfBlocks
            If too few blocks are free.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=80, block_size=16)
        >>> _ = manager.allocate_for_sequence("a", 100)
        >>> manager.append_tokens("a", 12), manager.append_tokens("a", 1)
        (0, 1)
        """
        return self._extend(self._find(seq), whole("num_new_tokens", num_new_tokens, low=1))

    def append_kv(self, seq, k, v):
        """Append tokens and store their keys and values in the pool.

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence.
        k, v : ndarray, (n, num_kv_heads, head_dim)
            Keys and values of n >= 1 new tokens, of the pool's dtype and array module.

        Returns
        -------
        int
            Blocks that were taken, a copy of a shared last block included [blocks].

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here, there is no pool, or an array does not fit it.
        OutOfBlocks
            If too few blocks are free.

        Examples
        --------
        >>> pool = KVPool(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=1)
        >>> manager = PagedKVCacheManager(num_blocks=4, block_size=2, pool=pool)
        >>> k = np.arange(3, dtype="float16").reshape(3, 1, 1)
        >>> manager.append_kv(manager.allocate_for_sequence("a", 0), k, -k)
        2
        """
        return self._extend(self._find(seq), self._require_pool()._count_tokens(k, v), k, v)

    def read_kv(self, seq):
        """Read a sequence's keys and values back in token order.

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence.

        Returns
        -------
        tuple of ndarray, (num_tokens, num_kv_heads, head_dim)
            Copies of k and v. The clock does not move: see `touch`.

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here, or there is no pool.

        Examples
        --------
        >>> pool = KVPool(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=1)
        >>> manager = PagedKVCacheManager(num_blocks=4, block_size=2, pool=pool)
        >>> k, v = manager.read_kv(manager.allocate_for_sequence("a", 3))
        >>> k.shape
        (3, 1, 1)
        """
        seq = self._find(seq)
        where = self._require_pool()._locate(seq.block_table, 0, seq.num_tokens)
        return self.pool.k[where], self.pool.v[where]

    def fork(self, src, new_seq_id, tenant=None):
        """Start a sequence that shares every block of another one.

        Parameters
        ----------
        src : SequenceKVCache or str
            A live sequence.
        new_seq_id : str
            A name that no live sequence has.
        tenant : str, optional
            Owner; by default what stands before ``::`` in `new_seq_id`, else "default".

        Returns
        -------
        SequenceKVCache
            The new sequence. No block was taken: reference counts grew by 1.

        Raises
        ------
        TypeError, ValueError
            If `src` is not live here, or the new id is taken or empty.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.fork(manager.allocate_for_sequence("a", 40), "b")
        >>> manager.allocator.num_used
        3
        """
        src = self._find(src)
        seq = self._new_sequence(new_seq_id, tenant)
        seq.block_table, seq.num_tokens = list(src.block_table), src.num_tokens
        for block in seq.block_table:
            block.ref_count += 1
        return self._record_access(seq)

    def touch(self, seq):
        """Note an access: the clock advances, and the sequence's use count with it.

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence.

        Returns
        -------
        int
            The step of this access.

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.allocate_for_sequence("a", 40)
        >>> manager.touch("a")
        2
        """
        return self._record_access(self._find(seq)).last_access_step

    def release(self, seq):
        """End a sequence: give back its references, walking its own block table only.

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence; afterwards the object is empty and every method refuses it.

        Returns
        -------
        int
            Blocks that became free; shared ones do not [blocks].

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.fork(manager.allocate_for_sequence("a", 40), "b")
        >>> manager.release("a"), manager.release("b")
        (0, 3)
        """
        seq = self._find(seq)
        del self.sequences[seq.seq_id]
        self._candidates.pop(seq.seq_id, None)
        # Tail first, so that the free stack hands the blocks out again in table order.
        num_freed = self.allocator._give_back(reversed(seq.block_table))
        seq.block_table, seq.num_tokens = [], 0
        return num_freed

    def blocks_to_append(self, seq, num_new_tokens):
        """Count the blocks that an append would take [blocks].

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence.
        num_new_tokens : int
            Tokens to append [tokens], 1 or more.

        Returns
        -------
        int
            New blocks, plus 1 if the last block is shared and not full.

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here, or `num_new_tokens` is below 1.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.fork(manager.allocate_for_sequence("a", 40), "b")
        >>> manager.blocks_to_append("a", 9)
        2
        """
        seq = self._find(seq)
        return self._count_to_append(seq, whole("num_new_tokens", num_new_tokens, low=1))

    def overflow_blocks(self, seq, num_new_tokens):
        """Count the blocks that are missing for an append [blocks].

        Parameters
        ----------
        seq : SequenceKVCache or str
            A live sequence.
        num_new_tokens : int
            Tokens to append [tokens], 1 or more.

        Returns
        -------
        int
            0 if the append fits.

        Raises
        ------
        TypeError, ValueError
            If `seq` is not live here, or `num_new_tokens` is below 1.

        Notes
        -----
        max(0, used + taken - budget), where the budget is the whole pool.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=4, block_size=16)
        >>> _ = manager.allocate_for_sequence("a", 40)
        >>> manager.overflow_blocks("a", 100)
        5
        """
        return max(0, self.blocks_to_append(seq, num_new_tokens) - self.allocator.num_free)

    def make_room(self, num_blocks, policy, protect=()):
        """Evict sequences until enough blocks are free, or change nothing.

        Parameters
        ----------
        num_blocks : int
            Blocks that must be free in the end [blocks].
        policy : object
            One of `kvlib.eviction`, or anything with ``select_victim(sequences) -> seq_id or None``
            on a mapping of ids to sequences.
        protect : iterable of SequenceKVCache or str
            Live sequences that must stay.

        Returns
        -------
        list of str
            The evicted ids, in order; empty if enough was free.

        Raises
        ------
        TypeError, ValueError
            If `policy` has no `select_victim` or returns an id it may not, or a protected sequence
            is not live here.
        OutOfBlocks
            If more is asked than the pool minus the protected sequences' blocks, or the policy
            offers nobody.

        Notes
        -----
        What can be attained is the pool minus the distinct blocks the protected hold, not the sum
        of reclaimable counts: two forks of 40 blocks reclaim 0 each and 40 together.

        The policy sees every live sequence but those it chose already, with reference counts as if
        these had left. One that has an ``index(sequences)``, as all of `kvlib.eviction` have, is
        asked ``select_victim(index, num_missing, protect)``, with the blocks still missing and the
        protected ids. Its index is a mutable mapping, filled from the live sequences and kept for
        the latest policy: the manager sets ``index[seq_id] = seq`` at every access and calls
        ``index.pop(seq_id, None)`` when a sequence leaves. Policies are taken to be immutable. A
        policy without an index is asked ``select_victim(sequences)`` on a plain dict, in which the
        protected are left out.

        Examples
        --------
        >>> class Shortest:
        ...     def select_victim(self, sequences):
        ...         return min(sequences, key=lambda seq_id: sequences[seq_id].num_tokens)
        >>> manager = PagedKVCacheManager(num_blocks=4, block_size=16)
        >>> _ = manager.allocate_for_sequence("a", 40), manager.allocate_for_sequence("b", 16)
        >>> manager.make_room(2, Shortest(), protect=["b"])
        ['a']
        """
        spared = [self._find(seq, "protect") for seq in protect]
        held = {block for seq in spared for block in seq.block_table}
        target, num_free = whole("num_blocks", num_blocks, low=0), self.allocator.num_free
        shortage = OutOfBlocks(target, num_free, self.allocator.num_used - len(held))
        if target > num_free + shortage.reclaimable:
            raise shortage
        if not callable(getattr(policy, "select_victim", None)):
            raise TypeError(f"policy={policy!r}; it has no select_victim. Pass LRUPolicy().")
        kept, has_index = {seq.seq_id for seq in spared}, hasattr(policy, "index")
        if has_index and policy is not self._policy:
            self._candidates = policy.index(self.sequences)
        elif not has_index:
            self._candidates = {key: s for key, s in self.sequences.items() if key not in kept}
        self._policy, victims = policy, []
        try:
            while num_free < target:
                wishes = (target - num_free, kept) if has_index else ()
                seq_id = policy.select_victim(self._candidates, *wishes)
                if seq_id is None:
                    raise shortage
                if seq_id in kept:
                    raise ValueError(f"victim={seq_id!r}; it is protected. Heed protect=.")
                victim = self._candidates.pop(one_of("victim", seq_id, self._candidates))
                victims.append(victim)
                num_free += victim.reclaimable_blocks()
                for block in victim.block_table:
                    block.ref_count -= 1
        finally:
            # So far only reference counts moved: a policy that fails half-way leaves no trace.
            for block in (block for victim in victims for block in victim.block_table):
                block.ref_count += 1
            for seq in victims:
                self._candidates[seq.seq_id] = seq
        for victim in victims:
            self.release(victim)
        return [victim.seq_id for victim in victims]

    def fragmentation(self):
        """Compute the share of the used blocks' slots that are empty [ratio].

        Returns
        -------
        float
            The allocator's figure. Without sharing it equals `kvlib.blocks.fragmentation` of the
            lengths.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.allocate_for_sequence("a", 40)
        >>> manager.fragmentation()  # 8 of 48 slots
        0.16666666666666666
        """
        return self.allocator.fragmentation()

    def summary(self):
        """Count what the cache holds now.

        Returns
        -------
        dict
            Keys: step, sequences, used_blocks, free_blocks, shared_blocks, utilization,
            fragmentation.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.fork(manager.allocate_for_sequence("a", 40), "b")
        >>> counts = manager.summary()
        >>> counts["sequences"], counts["used_blocks"], counts["shared_blocks"]
        (2, 3, 3)
        """
        return {
            "step": self.step,
            "sequences": len(self.sequences),
            "used_blocks": self.allocator.num_used,
            "free_blocks": self.allocator.num_free,
            "shared_blocks": sum(block.ref_count > 1 for block in self.allocator.blocks),
            "utilization": self.allocator.utilization(),
            "fragmentation": self.fragmentation(),
        }

    def check_invariants(self):
        """Raise AssertionError unless tables, reference counts and fill levels agree.

        Raises
        ------
        AssertionError
            With a message that names the first sequence or block that is wrong.

        Examples
        --------
        >>> manager = PagedKVCacheManager(num_blocks=8, block_size=16)
        >>> _ = manager.fork(manager.allocate_for_sequence("a", 40), "b")
        >>> manager.check_invariants()  # silent: all is well
        """
        references = Counter(block for seq in self.sequences.values() for block in seq.block_table)
        for seq_id, seq in self.sequences.items():
            starts = range(0, seq.num_tokens, self.block_size)
            expected = [min(self.block_size, seq.num_tokens - start) for start in starts]
            fills = [block.filled for block in seq.block_table]
            assert fills == expected, f"sequence {seq_id!r}: filled {fills}, expected {expected}"
            assert len({*seq.block_table}) == len(fills), f"sequence {seq_id!r}: a block twice"
        for block in self.allocator.blocks:
            num_entries = references.pop(block, 0)
            assert block.ref_count == num_entries, f"{block}: {num_entries} table entries"
            assert block.ref_count or not block.filled, f"{block}: free, but not empty"
        assert not references, f"tables hold foreign blocks {list(references)}"
        unused = [block.block_id for block in self.allocator.blocks if not block.ref_count]
        free_ids = sorted(self.allocator.free_list())
        assert free_ids == unused, f"free list {free_ids}, but unused are {unused}"

    def _new_sequence(self, seq_id, tenant):
        """Make an empty sequence that is not live yet."""
        seq = SequenceKVCache(seq_id, tenant=tenant)
        if seq_id in self.sequences:
            raise ValueError(f"seq_id={seq_id!r}; this sequence is live. Release it or rename.")
        return seq

    def _find(self, seq, name="seq"):
        """Return a live sequence of this manager, given itself or its id."""
        if not isinstance(seq, (str, SequenceKVCache)):
            raise TypeError(f"{name}={seq!r}; it must be a sequence or its id. Pass one of them.")
        seq_id = getattr(seq, "seq_id", seq)
        live = self.sequences.get(seq_id)
        if live is None or seq not in (live, seq_id):
            raise ValueError(f"{name}={seq_id!r}; it is not live here. See the .sequences.")
        return live

    def _require_pool(self):
        if self.pool is None:
            raise ValueError("pool=None; keys and values need storage. Pass pool=KVPool(...).")
        return self.pool

    def _must_copy_tail(self, seq):
        return seq.tail_free_slots() > 0 and seq.block_table[-1].ref_count > 1

    def _count_to_append(self, seq, num_new_tokens):
        # The formula of `blocks.appended_blocks` less its checks: every decode step comes by here.
        num_new_blocks = _ceil_div(num_new_tokens - seq.tail_free_slots(), self.block_size)
        return num_new_blocks + self._must_copy_tail(seq)

    def _extend(self, seq, num_new_tokens, k=0, v=0):
        """Append tokens and return the blocks taken; allocating is the last step that can fail."""
        num_taken = self._count_to_append(seq, num_new_tokens)
        # Most decode steps take no block.
        new_blocks = self.allocator.allocate_n(num_taken, seq.num_blocks()) if num_taken else []
        if self._must_copy_tail(seq):
            self._replace_tail(seq, new_blocks.pop(0))
        seq.block_table += new_blocks
        first_place, first_slot = divmod(seq.num_tokens, self.block_size)
        seq.num_tokens += num_new_tokens
        written = seq.block_table[first_place:]
        for place, block in enumerate(written, first_place):
            block.filled = min(self.block_size, seq.num_tokens - place * self.block_size)
        if self.pool is not None:
            where = self.pool._locate(written, first_slot, first_slot + num_new_tokens)
            self.pool.k[where], self.pool.v[where] = k, v
        self._record_access(seq)
        return num_taken

    def _replace_tail(self, seq, block):
        """Give a sequence its own copy of the last block, which it shares."""
        shared, seq.block_table[-1] = seq.block_table[-1], block
        self.allocator.free(shared)
        if self.pool is not None:
            for array in (self.pool.k, self.pool.v):
                array[block.block_id] = array[shared.block_id]

    def _record_access(self, seq):
        """Advance the clock and file the sequence under the new step."""
        seq.last_access_step = self.step = self.step + 1
        seq.use_count += 1
        self.sequences[seq.seq_id] = self._candidates[seq.seq_id] = seq
        return seq
