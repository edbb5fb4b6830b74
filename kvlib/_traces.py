"""Prefix traces: requests with the chain of blocks of their prompts, read, merged or generated.

Two equal block ids mean the same tokens after the same prefix, so a request can reuse exactly the
leading run of its blocks that a cache holds. `kvlib.replay` exports what is public here.
"""

import functools
import gzip
import itertools
import json
import zlib
from pathlib import Path

import numpy as np

from kvlib._validate import real, whole, whole_or_array

_LONGEST_LINE = 1 << 20


class PrefixTrace:
    """Requests in the order in which they arrived, each with the chain of blocks of its prompt.

    Parameters
    ----------
    chains : sequence of sequence of int
        The block ids of each request.
    timestamps_ms : sequence of int, optional
        Arrival times; by default 0, 1, 2, ... [ms].
    input_tokens : sequence of int, optional
        Prompt lengths; by default whole blocks [tokens].
    output_tokens : sequence of int, optional
        Answer lengths; by default 0 [tokens].
    tenants : sequence of str, optional
        Who sent each request; by default "default".
    block_size : int, optional
        Tokens per block; the last block of a request may be partial [tokens].

    Attributes
    ----------
    timestamps_ms, input_tokens, output_tokens : ndarray of int64
        As given `(num_requests,)` [ms, tokens, tokens].
    block_ids : ndarray of int64
        The chains, one after the other `(num_accesses,)`.
    offsets : ndarray of int64
        Request r owns block_ids[offsets[r]:offsets[r + 1]] `(num_requests + 1,)`.
    tenant : ndarray of int64
        Position of each request's tenant in `tenant_names` `(num_requests,)`.
    tenant_names : tuple of str
        The tenants, in order of appearance.
    block_size : int
        Tokens per block [tokens].

    Raises
    ------
    TypeError, ValueError
        If there is no request, a number is negative or not whole, an argument has not one entry
        per request, or a request has more blocks than its tokens fill.

    Examples
    --------
    >>> trace = PrefixTrace([[1, 2], [1, 2, 3]])
    >>> trace.offsets.tolist(), trace.input_tokens.tolist()
    ([0, 2, 5], [1024, 1536])
    """

    def __init__(
        self,
        chains,
        *,
        timestamps_ms=None,
        input_tokens=None,
        output_tokens=None,
        tenants=None,
        block_size=512,
    ):
        self.block_size, chains = whole("block_size", block_size, low=1), list(chains)
        num_blocks = np.array([len(chain) for chain in chains], np.int64)
        num_requests = whole("len(chains)", len(num_blocks), low=1, hint="Give one request.")

        def column(name, given, default, low):
            values = whole_or_array(name, np.array(default if given is None else given), low=low)
            if values.shape != (num_requests,):
                raise ValueError(
                    f"{name}.shape={values.shape}; it must be ({num_requests},). "
                    "Give one entry per request."
                )
            values.setflags(write=False)
            return values

        tenants = ["default"] * num_requests if tenants is None else list(tenants)
        self.tenant_names = tuple(dict.fromkeys(tenants))
        position = {name: i for i, name in enumerate(self.tenant_names)}
        self.tenant = column("tenants", [position[name] for name in tenants], None, 0)
        self.timestamps_ms = column("timestamps_ms", timestamps_ms, np.arange(num_requests), 0)
        whole_blocks = np.maximum(1, num_blocks * self.block_size)
        self.input_tokens = column("input_tokens", input_tokens, whole_blocks, 1)
        self.output_tokens = column("output_tokens", output_tokens, 0 * num_blocks, 0)
        self.offsets = np.append(0, np.cumsum(num_blocks))
        block_ids = list(itertools.chain.from_iterable(chains))
        self.block_ids = whole_or_array("block_ids", np.array(block_ids or num_blocks[:0]), low=0)
        for array in (self.offsets, self.block_ids):
            array.setflags(write=False)
        for request in np.flatnonzero(num_blocks > -(-self.input_tokens // self.block_size)):
            _check_length(num_blocks[request], self.input_tokens[request], self.block_size)

    @classmethod
    def from_token_ids(cls, prompts, *, block_size=16, **columns):
        """Cut prompts into the blocks that a prefix cache would know them by.

        Parameters
        ----------
        prompts : iterable of sequence of int
            The token ids of each request's prompt, 1 or more.
        block_size : int, optional
            Tokens per block [tokens].
        **columns
            `timestamps_ms`, `output_tokens` and `tenants`, as for the class.

        Returns
        -------
        PrefixTrace
            Blocks numbered in order of appearance.

        Raises
        ------
        TypeError, ValueError
            If a prompt is empty, or as the class.

        Notes
        -----
        A block is known by its tokens and by all blocks before it, and only if it is full: equal
        tokens behind different beginnings have different keys and values.

        References
        ----------
        .. [1] vLLM, docs/design/prefix_caching.md.

        Examples
        --------
        >>> chats = [[5, 6, 7, 8, 9], [5, 6, 7, 9], [7, 8]]
        >>> trace = PrefixTrace.from_token_ids(chats, block_size=2)
        >>> trace.block_ids.tolist(), trace.input_tokens.tolist()
        ([0, 1, 0, 2, 3], [5, 4, 2])
        """
        size, numbers, chains, input_tokens = whole("block_size", block_size, low=1), {}, [], []
        for prompt in map(list, prompts):
            chain, before = [], None
            for end in range(size, len(prompt) + 1, size):
                key = before, *prompt[end - size : end]
                before = numbers.setdefault(key, len(numbers))
                chain.append(before)
            chains.append(chain)
            input_tokens.append(len(prompt))
        return cls(chains, input_tokens=input_tokens, block_size=size, **columns)

    def __repr__(self):
        num_blocks, distinct = len(self.block_ids), np.count_nonzero(self._uses[0] < 0)
        blocks = f"{num_blocks:,} blocks of {self.block_size:,} tokens, {distinct:,} different"
        who = ", ".join(map(str, self.tenant_names[:4])) + ", ..." * (len(self.tenant_names) > 4)
        return f"PrefixTrace({len(self.tenant):,} requests; {blocks}; tenants {who})"

    @functools.cached_property
    def _uses(self):
        """Return for each access the access that used its block before (-1: none), and first."""
        order = np.argsort(self.block_ids, kind="stable")
        again = np.append(False, np.diff(self.block_ids[order]) == 0)[: len(order)]
        previous, first = np.full(len(order), -1), np.empty_like(order)
        previous[order[again]] = order[np.flatnonzero(again) - 1]
        first[order] = order[~again][np.cumsum(~again) - 1]
        return previous, first

    @functools.cached_property
    def _depth(self):
        """Return the position of each access in its chain."""
        return np.arange(len(self.block_ids)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    @functools.cached_property
    def _owner(self):
        """Return for each access the tenant that used its block first."""
        return np.repeat(self.tenant, np.diff(self.offsets))[self._uses[1]]

    @functools.cached_property
    def _distances(self):
        """Return for each access the distinct blocks since its block's previous use (-1: none).

        These blocks are the accesses j < i whose own previous use lies before that of i, so
        distance(i) = #{j < i: previous(j) < previous(i)} - previous(i) - 1. Chains repeat whole:
        accesses in a row have previous uses in a row and share one distance. Count per run.
        """
        previous, _ = self._uses
        is_cold = previous < 0
        goes_on = np.where(is_cold[:-1], is_cold[1:], np.diff(previous) == 1)
        starts = np.flatnonzero(np.append(True, ~goes_on)[: len(previous)])
        lengths = np.diff(starts, append=len(previous))
        start_previous = previous[starts]
        distance = _weight_of_smaller_before(start_previous, lengths) - start_previous - 1
        return np.repeat(np.where(start_previous < 0, -1, distance), lengths)


def _weight_of_smaller_before(key, weight):
    """Sum for each i the weights of all j < i with key[j] < key[i], by divide and conquer."""
    total = np.zeros(len(key), np.int64)
    # `at` lists positions by key, inside blocks of positions that halve until they hold one each.
    at = np.argsort(key, kind="stable")
    for bit in range(len(key).bit_length() - 1, -1, -1):
        is_right = (at >> bit) & 1 == 1
        left_weight = np.where(is_right, 0, weight[at])
        before = np.cumsum(left_weight) - left_weight
        block_start = (at[is_right] >> (bit + 1)) << (bit + 1)
        total[at[is_right]] += before[is_right] - before[block_start]
        at = at[np.argsort(at >> bit, kind="stable")]
    return total


def load_trace(path, *, block_size=512):
    """Read a trace in the JSON-lines format of the Mooncake traces.

    Parameters
    ----------
    path : str or Path
        The file, plain or gzipped. Each line is a JSON object with timestamp [ms], input_length
        [tokens], the list hash_ids (one integer or string a block: equal ones are one block) and
        perhaps output_length [tokens] and tenant, a name.
    block_size : int, optional
        Tokens per block [tokens].

    Returns
    -------
    PrefixTrace
        The requests, in the order of the file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a line is not such an object; the message gives its number.

    References
    ----------
    Qin et al.: Mooncake: trading more storage for less computation, FAST 2025, and the traces at
    https://github.com/kvcache-ai/Mooncake.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "trace.jsonl")
    ...     _ = path.write_text(
    ...         '{"timestamp": 0, "input_length": 900, "output_length": 7, "hash_ids": [4, 9]}')
    ...     load_trace(path).block_ids.tolist()
    [4, 9]
    """
    block_size = whole("block_size", block_size, low=1)
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    rows = []
    with gzip.open(path) if is_gzip else open(path, "rb") as file:
        for number in itertools.count(1):
            try:
                line = file.readline(_LONGEST_LINE + 1)
                if not line and rows:
                    break
                if line.strip() or not line:  # an empty line between or after requests is none
                    rows.append(_parse(line, block_size))
            except (ValueError, TypeError, RecursionError, EOFError, OSError, zlib.error) as error:
                step = ". Write one JSON object a line, or fetch the file again."
                step = "" if type(error) in (ValueError, TypeError) else step
                reason = getattr(error, "msg", error)
                raise ValueError(f"{Path(path).name} line {number}: {reason}{step}") from error
    return _from_rows(_numbered(rows), block_size)


def _numbered(rows):
    """Number the blocks anew, in order of appearance, if their hashes are not all int64."""
    chains, *others = zip(*rows, strict=True)
    if all(type(block) is int and block < 1 << 63 for chain in chains for block in chain):
        return rows
    numbers = {}
    chains = [[numbers.setdefault(block, len(numbers)) for block in chain] for chain in chains]
    return list(zip(chains, *others, strict=True))


def _parse(line, block_size):
    if len(line) > _LONGEST_LINE:
        raise ValueError("it is longer than 1 MiB; a request takes one line. Split the file.")
    row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
    if not isinstance(row, dict):
        raise TypeError(f"it holds a {type(row).__name__}; it must hold one object. Write {{...}}.")
    lacking = {"timestamp", "input_length", "hash_ids"} - row.keys()
    if lacking:
        raise ValueError(f"{min(lacking)} is missing; a request needs it. Add it to the line.")
    chain, tenant = row["hash_ids"], row.get("tenant", "default")
    if not isinstance(chain, list) or not isinstance(tenant, str):
        raise TypeError("hash_ids must be a list and tenant a name. Write [...] and quotes.")
    for block in chain:
        if type(block) is not str and (type(block) is not int or block < 0):
            rule = "they must be integers, 0 or more, or strings"
            raise ValueError(f"hash_ids has {block!r}; {rule}. Use the hashes of the blocks.")
    input_tokens = whole("input_length", row["input_length"], low=1, high=1 << 40)
    _check_length(len(chain), input_tokens, block_size)
    timestamp = row["timestamp"]
    if type(timestamp) is float:
        timestamp = round(real("timestamp", timestamp))
    timestamp_ms = whole("timestamp", timestamp, low=0, high=1 << 60)
    output_tokens = whole("output_length", row.get("output_length", 0), low=0, high=1 << 40)
    return chain, timestamp_ms, input_tokens, output_tokens, tenant


def _unique(pairs):
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands twice; each must be unique. Rename one.")
    return row


def _check_length(num_blocks, input_tokens, block_size):
    most = -(-input_tokens // block_size)
    if num_blocks > most:
        raise ValueError(
            f"num_blocks={num_blocks}; a prompt of {input_tokens} tokens fills {most} blocks of "
            f"block_size={block_size}. Pass the block_size of the trace."
        )


def concat_tenants(traces):
    """Merge traces by time as the tenants of one server; no two share a block.

    Parameters
    ----------
    traces : mapping of str to PrefixTrace
        The trace of each tenant.

    Returns
    -------
    PrefixTrace
        All requests by arrival time, at equal times in the order of the mapping. Blocks are
        numbered anew; a part that has tenants of its own gives them as "name/own name".

    Raises
    ------
    ValueError
        If there is no trace, their block sizes differ, or two tenants would have one name.

    Examples
    --------
    >>> chat = PrefixTrace([[7], [7]], timestamps_ms=[0, 9])
    >>> merged = concat_tenants({"chat": chat, "batch": PrefixTrace([[7]], timestamps_ms=[5])})
    >>> merged.block_ids.tolist(), merged.tenant.tolist()
    ([0, 2, 0], [0, 1, 0])
    """
    if not traces:
        raise ValueError("traces={}; there is nothing to merge. Give one trace.")
    block_sizes = {trace.block_size for trace in traces.values()}
    if len(block_sizes) != 1:
        raise ValueError(f"block_size={block_sizes}; all traces must have the same one. Give one.")
    rows, base, taken = [], 0, set()
    for name, trace in traces.items():
        blocks = (trace._uses[1] + base).tolist()
        base += len(blocks)
        own = trace.tenant_names
        labels = [name] if len(own) == 1 else [f"{name}/{tenant}" for tenant in own]
        if not taken.isdisjoint(labels):
            both = min(taken.intersection(labels))
            raise ValueError(f"tenant={both!r}; it would stand for two. Rename a trace.")
        taken.update(labels)
        chains = [blocks[a:b] for a, b in itertools.pairwise(trace.offsets.tolist())]
        per_request = trace.timestamps_ms, trace.input_tokens, trace.output_tokens, trace.tenant
        columns = (column.tolist() for column in per_request)
        rows += [(c, t, i, o, labels[n]) for c, t, i, o, n in zip(chains, *columns, strict=True)]
    return _from_rows(sorted(rows, key=lambda row: row[1]), block_sizes.pop())


def _from_rows(rows, block_size):
    names = "chains", "timestamps_ms", "input_tokens", "output_tokens", "tenants"
    columns = zip(*rows, strict=True)
    return PrefixTrace(**dict(zip(names, columns, strict=True)), block_size=block_size)


# Shapes of the Mooncake conversation trace, as quantiles at these shares of the requests. The
# longest tails are cut, so that every seed comes close to the same averages.
_SHARES = (0.0, 0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0)
_ONE_SHOT_TOKENS = (891, 894, 900, 930, 1684, 4720, 7922, 14800, 25000, 44000, 85000, 126000)
_FIRST_TURN_TOKENS = (892, 1061, 1300, 2018, 4800, 8000, 12800, 20000, 27500, 35000, 43000, 52000)
_NEW_TOKENS = (0, 0, 64, 194, 357, 471, 609, 1346, 4300, 8500, 12000, 15000)
_ANSWER_TOKENS = (1, 3, 24, 100, 256, 350, 423, 504, 597, 738, 1119, 2000)
_PAUSE_SECONDS = (5, 16, 40, 62, 90, 133, 204, 340, 510, 680, 1480, 2600)
_SHARE_KEPT = (0.015, 0.035, 0.067, 0.097, 0.139, 0.192, 0.286, 0.42, 0.564, 0.775, 0.919, 0.961)
_EDITED_TURNS = 0.14
_SESSIONS_PER_SECOND = 2.12


def _ranks(rng, count):
    """Draw `count` numbers from 0 to 1 that cover the range evenly, in random order."""
    return (rng.permutation(count) + rng.random(count)) / count


def generate_traffic(seed, num_requests=12_031):
    """Generate the traffic of one server with three tenants, calibrated to a real trace.

    Parameters
    ----------
    seed : int
        Equal seeds give equal traces.
    num_requests : int, optional
        Requests, by default as many as the Mooncake conversation trace has in its hour.

    Returns
    -------
    PrefixTrace
        Requests of the tenants "chat" (conversations that grow turn by turn), "agents" (loops of
        many turns) and "batch" (prompts that never return), with 512-token blocks.

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer, or is too small.

    Notes
    -----
    All requests share one system prompt, block 0. A turn repeats the full blocks of the turn before
    and adds to them, or, if the user edits an earlier message, keeps only a share of them. With the
    default length the share of blocks that an unlimited cache finds, the LRU curve and the mean
    lengths are those of the Mooncake conversation trace: within 1 point, 3 points and 5 %.

    Examples
    --------
    >>> trace = generate_traffic(seed=0, num_requests=1000)
    >>> len(trace.timestamps_ms), sorted(trace.tenant_names)
    (1000, ['agents', 'batch', 'chat'])
    """
    rng = np.random.default_rng(whole("seed", seed, low=0))
    num_requests = whole("num_requests", num_requests, low=1)
    num_sessions = min(num_requests, int(0.66 * num_requests) + 10)
    ranks = functools.partial(_ranks, rng)
    kind = ranks(num_sessions)
    is_agent, is_batch = kind < 0.04, kind > 0.34
    chat_turns = np.minimum(12, 2 + (np.log1p(-ranks(num_sessions)) / np.log(0.4)).astype(int))
    agent_turns = 4 + (5 * ranks(num_sessions)).astype(int)
    turns = np.select([is_batch, is_agent], [1, agent_turns], chat_turns)
    # Steps of the golden ratio spread the lengths evenly over the sessions of each number of turns.
    length_rank = np.empty(num_sessions)
    golden_steps = rng.random() + np.arange(num_sessions) * (5**0.5 - 1) / 2
    length_rank[np.lexsort((turns, is_agent))] = golden_steps % 1
    one_shot, conversation = (
        np.interp(length_rank, _SHARES, table) for table in (_ONE_SHOT_TOKENS, _FIRST_TURN_TOKENS)
    )
    loop = 4000 + 14000 * length_rank
    first_tokens = np.select([is_batch, is_agent], [one_shot, loop], conversation)

    num_turns, first_turn = int(turns.sum()), np.cumsum(turns) - turns
    tables = _PAUSE_SECONDS, _NEW_TOKENS, _ANSWER_TOKENS, _SHARE_KEPT
    pauses, news, answers, kept = (np.interp(ranks(num_turns), _SHARES, t) for t in tables)
    news = np.where(np.repeat(is_agent, turns), 400 + 1600 * ranks(num_turns), news)
    is_edited = ranks(num_turns) < _EDITED_TURNS
    pauses[first_turn] = 0
    elapsed = np.cumsum(pauses)
    starts = (np.arange(num_sessions) + rng.random(num_sessions)) / _SESSIONS_PER_SECOND
    seconds = elapsed + np.repeat(starts - elapsed[first_turn], turns)

    session = np.repeat(np.arange(num_sessions), turns)
    tenants = np.select([is_batch, is_agent], ["batch", "agents"], "chat")[session].tolist()
    rows, latest, next_block = [], {}, 1
    for turn in np.argsort(seconds, kind="stable")[:num_requests].tolist():
        tokens, chain = latest.get(session[turn], (0, [0]))
        if not tokens:
            num_shared, tokens = 1, int(first_tokens[session[turn]])
        elif is_edited[turn]:
            num_shared = max(1, int(kept[turn] * (tokens // 512)))
        else:
            num_shared, tokens = tokens // 512, tokens + int(news[turn])
        num_new = -(-tokens // 512) - num_shared
        chain = [*chain[:num_shared], *range(next_block, next_block + num_new)]
        next_block += num_new
        latest[session[turn]] = tokens, chain
        rows.append((chain, int(1000 * seconds[turn]), tokens, int(answers[turn]), tenants[turn]))
    return _from_rows(rows, 512)
