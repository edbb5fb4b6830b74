"""A tiny language for the life of sequences in a paged cache, and a player that keeps every step.

``A=40`` starts A with 40 tokens, ``A+9`` appends 9, ``A+1*12`` appends 1 twelve times, ``A>C``
forks A as C, ``-A`` releases A.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from kvlib._validate import whole
from kvlib.paged_cache import OutOfBlocks, PagedKVCacheManager

_WORD = re.compile(
    r"([A-H])=(\d{1,9})|([A-H])\+([1-9]\d{0,8})(?:\*([1-9]\d{0,8}))?|([A-H])>([A-H])|-([A-H])"
)
_MAX_STEPS, _MAX_TOKENS = 200, 100_000


class Step(NamedTuple):
    """One call of a scenario.

    Attributes
    ----------
    text : str
        How the step is written.
    method : str
        The method of `kvlib.paged_cache.PagedKVCacheManager`.
    seq_id : str
        The sequence it is about.
    argument : int or str or None
        Tokens, or the name of the fork.
    """

    text: str
    method: str
    seq_id: str
    argument: int | str | None = None


class Frame(NamedTuple):
    """The cache after a step, in plain values. Read it; frames are kept.

    Attributes
    ----------
    step : Step or None
        What was done; None before the first step.
    num_tokens : dict of str to int
        Length of every live sequence [tokens].
    tables : dict of str to tuple of int
        Block ids of every live sequence, in token order.
    filled, ref_counts : tuple of int
        Of every block of the pool, by block id.
    free_list : tuple of int
        Free block ids, the next one first.
    fragmentation : float
        Share of the used blocks' slots that are empty [ratio].
    tail_free_slots : int
        Empty slots of the sequence's last block before the step [tokens].
    walked : int
        Block-table entries that the step went over: those copied by a fork or walked by a release.
    taken, freed : tuple of int
        Blocks that the step took from the free list, and gave back.
    written : tuple of int
        Blocks that the step wrote tokens into.
    copied : tuple of int
        The shared block that was copied and the copy, or nothing.
    refused : str
        Why nothing changed, or nothing.
    """

    step: Step | None
    num_tokens: dict
    tables: dict
    filled: tuple
    ref_counts: tuple
    free_list: tuple
    fragmentation: float
    tail_free_slots: int = 0
    walked: int = 0
    taken: tuple = ()
    freed: tuple = ()
    written: tuple = ()
    copied: tuple = ()
    refused: str = ""


def parse(script):
    """Read a scenario.

    Parameters
    ----------
    script : str
        Steps with blanks between them, such as ``"A=40 A+1*12 A>C -A"``; names are A to H.

    Returns
    -------
    list of Step
        The steps, repetitions written out.

    Raises
    ------
    ValueError
        If a word is no step, or the scenario is empty or too long.

    Examples
    --------
    >>> [step.text for step in parse("A=40 A+1*2 -A")]
    ['A=40', 'A+1', 'A+1', '-A']
    """
    steps = []
    for word in script.split():
        match = _WORD.fullmatch(word)
        if not match:
            rule = "a step is A=40, A+9, A+1*12, A>C or -A, names A to H"
            raise ValueError(f"step={word[:20]!r}; {rule}. Rewrite it.")
        started, first, grown, more, times, parent, child, ended = match.groups()
        if max(int(first or 0), int(more or 0)) > _MAX_TOKENS:
            raise ValueError(f"step={word[:20]!r}; at most {_MAX_TOKENS:,} tokens. Write fewer.")
        if started:
            steps.append(Step(word, "allocate_for_sequence", started, int(first)))
        elif grown:
            step = Step(f"{grown}+{more}", "append_tokens", grown, int(more))
            steps += [step] * min(int(times or 1), _MAX_STEPS + 1)
        elif parent:
            steps.append(Step(word, "fork", parent, child))
        else:
            steps.append(Step(word, "release", ended))
    if not 0 < len(steps) <= _MAX_STEPS:
        rule = f"a scenario has 1 to {_MAX_STEPS} steps"
        raise ValueError(f"script={script[:20]!r}; {rule}, not {len(steps)}. Start with A=40.")
    return steps


@lru_cache(maxsize=64)
def play(script, num_blocks, block_size):
    """Play a scenario from the start.

    Parameters
    ----------
    script : str
        See `parse`.
    num_blocks : int
        Blocks of the pool [blocks].
    block_size : int
        Slots of one block [tokens/block].

    Returns
    -------
    tuple of Frame
        Before the first step, and after each. A step that runs out of blocks changes nothing, nor
        do later steps of a sequence that could not start.

    Raises
    ------
    ValueError
        If a step is malformed, starts a sequence that lives, or needs one that was never started.

    Examples
    --------
    >>> frames = play("A=40 A+9 A>C C+1", num_blocks=8, block_size=16)
    >>> frames[2].taken, frames[4].copied
    ((3,), (3, 4))
    """
    manager = PagedKVCacheManager(whole("num_blocks", num_blocks, low=1), block_size)
    frames, not_started = [snapshot(manager)], set()
    for step in parse(script):
        live, new_id = manager.sequences, _new_id(step)
        if new_id in live:
            raise ValueError(f"step={step.text!r}; {new_id} lives already. Use another letter.")
        if step.method != "allocate_for_sequence" and step.seq_id not in live:
            if step.seq_id not in not_started:
                rule = f"{step.seq_id} is not there at this point"
                raise ValueError(f"step={step.text!r}; {rule}. Start it before, {step.seq_id}=40.")
            not_started |= {new_id} if new_id else set()
            frames.append(snapshot(manager, step, refused=f"{step.seq_id} could not start"))
            continue
        before = frames[-1]
        table = before.tables.get(step.seq_id, ())
        tail = block_size - before.filled[table[-1]] if table else 0
        try:
            arguments = () if step.argument is None else (step.argument,)
            getattr(manager, step.method)(step.seq_id, *arguments)
        except OutOfBlocks as error:
            not_started |= {new_id} if new_id else set()
            refused = f"{error.needed} needed, {error.free} free"
            frames.append(snapshot(manager, step, tail_free_slots=tail, refused=refused))
            continue
        not_started.discard(step.seq_id if new_id is None else new_id)
        frames.append(_compare(before, snapshot(manager, step, tail_free_slots=tail)))
    return tuple(frames)


def snapshot(manager, step=None, **what_happened):
    """Copy the state of a cache into plain values.

    Parameters
    ----------
    manager : PagedKVCacheManager
        The cache.
    step : Step, optional
        What was done last.
    **what_happened : object
        Further fields of `Frame`.

    Returns
    -------
    Frame
        The state.

    Examples
    --------
    >>> manager = PagedKVCacheManager(num_blocks=4, block_size=16)
    >>> _ = manager.allocate_for_sequence("A", 20)
    >>> snapshot(manager).filled
    (16, 4, 0, 0)
    """
    live = manager.sequences.values()
    return Frame(
        step,
        {seq.seq_id: seq.num_tokens for seq in live},
        {seq.seq_id: tuple(block.block_id for block in seq.block_table) for seq in live},
        tuple(block.filled for block in manager.allocator.blocks),
        tuple(block.ref_count for block in manager.allocator.blocks),
        tuple(manager.allocator.free_list()),
        manager.fragmentation(),
        **what_happened,
    )


def _new_id(step):
    """Return the name that a step gives to a new sequence."""
    if step.method == "fork":
        return step.argument
    return step.seq_id if step.method == "allocate_for_sequence" else None


def _compare(before, after):
    """Add to a frame what its step did."""
    seq_id = after.step.seq_id
    old, new = before.tables.get(seq_id, ()), after.tables.get(seq_id, ())
    blocks = range(len(after.filled))
    copied = [pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]]
    return after._replace(
        taken=tuple(block for block in new if block not in old),
        freed=tuple(k for k in blocks if before.ref_counts[k] and not after.ref_counts[k]),
        written=tuple(k for k in blocks if after.filled[k] > before.filled[k]),
        walked=len(old) if after.step.method in ("fork", "release") else 0,
        copied=copied[0] if copied else (),
    )
