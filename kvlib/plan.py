"""From a GPU's bytes to sequences, to what overflows and to what eviction costs: one plan."""

import csv
import functools
import html
import math
import operator
import os
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from statistics import NormalDist

import numpy as np

from kvlib import memory
from kvlib._validate import one_of, real, whole, whole_or_array
from kvlib.blocks import blocks_needed
from kvlib.eviction import fair_quotas, overflow_blocks, recompute_seconds
from kvlib.models import (
    Device,
    ModelShape,
    find_model,
    load_devices,
    load_models,
    released_weight_bytes,
)
from kvlib.replay import REQUEST_LENGTHS, load_request_lengths
from kvlib.sharing import shareable_tokens
from kvlib.units import format_bytes, parse_bytes

_LENGTH_COLUMNS = (("num_tokens",), ("ContextTokens", "GeneratedTokens"))


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What fits a set of GPUs, and what does not; its repr is the table.

    Attributes
    ----------
    title : str
        Model, GPUs, cache dtype and block size, in words.
    gpu_bytes : int
        Memory of one GPU as programs see it [bytes].
    parts : dict of str to int
        Where one GPU's bytes go: ``weights``, ``reserve``, ``tails`` (empty slots of last blocks),
        ``scales``, ``cache`` (keys, values and states) and ``unused`` (less than one more sequence
        takes). They sum to `gpu_bytes`, plus `missing_bytes` [bytes].
    missing_bytes : int
        What weights and reserve take beyond one GPU's memory [bytes].
    mean_tokens : float
        Mean length of the planned sequences [tokens].
    num_cached_tokens : int
        Tokens that all GPUs hold, as engines log at start-up: the whole blocks of one sequence
        without end [tokens]. 0 if no block fits or no layer keeps every token.
    num_sequences : int
        Sequences that fit all GPUs together, in whole blocks [sequences].
    num_sequences_by_token : int
        The same if single tokens were allocated [sequences].
    concurrency : int or None
        Sequences that were asked for, if any [sequences].
    overflow_sequences : int
        Those of them that do not fit [sequences].
    overflow_blocks : int
        Blocks that the fullest group of GPUs lacks; where layers differ, their worth in bytes
        [blocks].
    recompute_seconds_per_minute : float
        Prefill that evictions cause each minute, all groups of GPUs together [s].
    quotas : dict of str to Fraction
        Blocks of each tenant; they sum to the blocks of all groups of GPUs [blocks].
    hints : tuple of str
        What in the arguments costs memory, or hides some, without being asked for.

    Examples
    --------
    >>> plan("llama-3.1-8b", "L4 24GB", 8192, concurrency=8)
    llama-3.1-8b on 1 x L4 24GB, bf16 cache, blocks of 16 tokens
    one GPU as programs see it    22.03 GiB
    - weights                     14.96 GiB
    - reserve                      2.20 GiB
    - tails                             0 B
    - scales                            0 B
    - cache                        4.00 GiB
    = unused                     890.34 MiB
    tokens that fit                  39,888
    sequences of 8,192 tokens             4  4 if single tokens were allocated
    asked for                             8  4 do not fit: 1,603 blocks
    recompute each minute             4.1 s  prefill of what was evicted
    """

    title: str
    gpu_bytes: int
    parts: dict[str, int] = field(hash=False)
    missing_bytes: int
    mean_tokens: float
    num_cached_tokens: int
    num_sequences: int
    num_sequences_by_token: int
    concurrency: int | None
    overflow_sequences: int
    overflow_blocks: int
    recompute_seconds_per_minute: float
    quotas: dict[str, Fraction] = field(hash=False)
    hints: tuple[str, ...] = ()

    def _rows(self):
        yield "one GPU as programs see it", format_bytes(self.gpu_bytes), ""
        for name, num_bytes in self.parts.items():
            yield f"{'=' if name == 'unused' else '-'} {name}", format_bytes(num_bytes), ""
        if self.missing_bytes:
            remark = "use more GPUs, a larger one, or narrower weights"
            yield "missing", format_bytes(self.missing_bytes), remark
        yield "tokens that fit", f"{self.num_cached_tokens:,}", ""
        remark = f"{self.num_sequences_by_token:,} if single tokens were allocated"
        yield f"sequences of {self.mean_tokens:,.0f} tokens", f"{self.num_sequences:,}", remark
        if self.concurrency is not None:
            lack = f"{self.overflow_sequences:,} do not fit: {self.overflow_blocks:,} blocks"
            yield "asked for", f"{self.concurrency:,}", lack if self.overflow_blocks else "all fit"
            seconds = f"{self.recompute_seconds_per_minute:,.1f} s"
            yield "recompute each minute", seconds, "prefill of what was evicted"
        for tenant, quota in self.quotas.items():
            yield f"quota of {tenant}", f"{int(quota):,}", "blocks"
        for hint in self.hints:
            yield "note", "", hint

    def __repr__(self):
        rows = list(self._rows())
        wide, right = (max(len(row[k]) for row in rows) for k in (0, 1))
        lines = (f"{label:<{wide}}  {number:>{right}}  {note}" for label, number, note in rows)
        return "\n".join([self.title, *map(str.rstrip, lines)])

    def _repr_html_(self):
        rows = ("</td><td>".join(map(html.escape, row)) for row in self._rows())
        cells = "</td></tr><tr><td>".join(rows)
        return f"<b>{html.escape(self.title)}</b><table><tr><td>{cells}</td></tr></table>"


def plan(
    model,
    gpu,
    context,
    *,
    num_gpus=1,
    tensor_parallel=None,
    weights=None,
    memory_fraction=0.9,
    reserve_bytes=0,
    dtype="bf16",
    block_size=16,
    prefix_tokens=0,
    concurrency=None,
    tenant_weights=None,
    prefill_tokens_per_second=8000,
    turns_per_minute=1,
):
    r"""Plan a deployment: what fits, what overflows, what eviction costs.

    Parameters
    ----------
    model : str or ModelShape
        A preset's name, or a model of your own.
    gpu : str, Device or int
        A GPU of `kvlib.models.load_devices`, or its memory: ``'24 GiB'``, or bytes [bytes].
    context : int, str, tuple or ndarray of int
        Lengths of the sequences, prompt and answer together, see `lengths_of` [tokens].
    num_gpus : int
        GPUs in all [GPUs].
    tensor_parallel : int, optional
        GPUs that share each layer; it divides `num_gpus`, and the groups work side by side. By
        default all GPUs are one group [GPUs].
    weights : int or str, optional
        All weights, ``'15 GiB'`` or bytes [bytes], or the dtype to store a preset's in, see
        `kvlib.memory.bits_per_value`. By default a preset's weights as released.
    memory_fraction : float
        Share of the memory that the engine may use, above 0 and at most 1.
    reserve_bytes : int or str
        Activations, graphs and buffers on each GPU inside that share, bytes or ``'2 GiB'`` [bytes].
    dtype : str or tuple of str
        Cache dtype, or a (key, value) pair of them.
    block_size : int
        Slots of a block [tokens/block].
    prefix_tokens : int or float
        Tokens that all sequences share at their start [tokens]; a float is their share of the mean
        length. A shorter sequence shares all it has.
    concurrency : int, optional
        Sequences wanted at a time [sequences].
    tenant_weights : mapping of str to number, optional
        Weight of each tenant, see `kvlib.eviction.fair_quotas`.
    prefill_tokens_per_second : float
        Prefill throughput of one group of GPUs [tokens/s].
    turns_per_minute : float
        How often each sequence comes back [1/min].

    Returns
    -------
    Plan
        The plan; print it for a table. Weights that do not fit give no sequences, not an error.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If a name is unknown, a number out of range, GPUs or heads cannot be shared out, or a model
        of your own comes without the bytes of its weights.

    Notes
    -----
    Equation (9.1), on each GPU, with the mean :math:`\bar M` of a sequence's whole blocks and
    :math:`M_P`, the full blocks of the shared prefix in layers without a window:

    .. math:: n_{fit} = \lfloor (f M_{GPU} - M_w - M_r - M_P) / (\bar M - M_P) \rfloor

    With several lengths this is what fits on average. Sequences that do not fit are evicted, and
    each of their turns prefills their own tokens again, equation (9.2): overflow * turns per
    minute * mean own tokens / throughput. So much pays a policy that always keeps the same ones;
    LRU over sequences that take turns in a fixed order loses all of them, not the overflow alone.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with
       PagedAttention", 2023, arXiv:2309.06180, section 4.5.

    Examples
    --------
    >>> [plan("qwen3-32b", "H100 80GB", 8192, num_gpus=n).num_sequences for n in (1, 2)]
    [5, 40]
    """
    shape = model if isinstance(model, ModelShape) else find_model(model)
    num_gpus = whole("num_gpus", num_gpus, low=1)
    ranks = (
        num_gpus if tensor_parallel is None else whole("tensor_parallel", tensor_parallel, low=1)
    )
    num_groups, rest = divmod(num_gpus, ranks)
    if rest:
        raise ValueError(f"tensor_parallel={ranks}; it must divide num_gpus={num_gpus}. Use 1.")
    gpu_bytes, weight_bytes = _gpu_bytes(gpu), _ceil_div(_weight_bytes(shape, weights), ranks)
    usable = memory.kv_budget_bytes(gpu_bytes, 0, memory_fraction=memory_fraction)
    reserve = gpu_bytes - usable + _size("reserve_bytes", reserve_bytes)
    free = gpu_bytes - weight_bytes - reserve
    budget = max(0, free)

    block_size = whole("block_size", block_size, low=1)
    need = _Need(shape, context, (dtype, ranks), block_size, prefix_tokens)
    fitting = need.fitting(budget, need.in_blocks)
    asked = 0 if concurrency is None else whole("concurrency", concurrency, low=1)
    overflow = max(0, asked - num_groups * fitting)
    lacking = overflow_blocks(0, need.held(_ceil_div(asked, num_groups)), budget)
    seconds = recompute_seconds(need.own_tokens, prefill_tokens_per_second) / need.count
    seconds *= overflow * real("turns_per_minute", turns_per_minute, low=0)
    num_blocks = num_groups * (budget // need.block_bytes)
    cached_tokens = 0
    if need.endless_bytes and budget >= memory.sequence_kv_bytes(
        shape, 1, dtype, ranks, block_size
    ):
        cached_tokens = memory.max_cached_tokens(budget, shape, dtype, ranks, block_size)
    gpu_name = getattr(gpu, "name", gpu)
    gpus = f"{num_gpus} x {gpu_name if isinstance(gpu_name, str) else format_bytes(gpu_name)}"
    cache = "{} keys, {} values".format(*dtype) if isinstance(dtype, tuple) else f"{dtype} cache"
    return Plan(
        title=f"{shape.name} on {gpus}, {cache}, blocks of {block_size} tokens",
        gpu_bytes=gpu_bytes,
        parts={"weights": weight_bytes, "reserve": reserve} | need.parts(fitting, budget),
        missing_bytes=max(0, -free),
        mean_tokens=need.tokens / need.count,
        num_cached_tokens=num_groups * cached_tokens,
        num_sequences=num_groups * fitting,
        num_sequences_by_token=num_groups * need.fitting(budget, need.by_token),
        concurrency=concurrency,
        overflow_sequences=overflow,
        overflow_blocks=blocks_needed(lacking, need.block_bytes),
        recompute_seconds_per_minute=seconds,
        quotas={t: q * num_blocks for t, q in fair_quotas(tenant_weights or {}, 1).items()},
        hints=tuple(_hints(shape, ranks, dtype)),
    )


def _hints(shape, ranks, dtype):
    copies, num_kv_heads = max(
        (ranks * memory.kv_heads_per_rank(group.num_kv_heads, ranks) // group.num_kv_heads,
         group.num_kv_heads)
        for group in shape.layer_groups
    )  # fmt: skip
    if copies > 1:
        heads = f"{num_kv_heads} KV head{'s' if num_kv_heads > 1 else ''}"
        yield f"{heads} on {ranks} GPUs of a group: stored {copies} times; see tensor_parallel"
    for name in dict.fromkeys(dtype if isinstance(dtype, tuple) else (dtype,)):
        if name in ("int8", "int4", "int2"):
            yield f"{name} counts no scales; {name}/g64 does"


class _Need:
    """What sequences hold on one GPU: sums over `count` of them."""

    def __init__(self, shape, context, how, block_size, prefix_tokens):
        num_tokens, counts = lengths_of(context)

        def total(per_length):
            if int(per_length.max()) * int(counts.sum()) < 2**63:
                return int(per_length @ counts)
            return sum(map(operator.mul, per_length.tolist(), counts.tolist()))

        self.count, self.tokens = int(counts.sum()), total(num_tokens)
        self.in_blocks = total(memory.sequence_kv_bytes(shape, num_tokens, *how, block_size))
        self.by_token = total(memory.sequence_kv_bytes(shape, num_tokens, *how))
        self.scales = total(memory.scale_kv_bytes(shape, num_tokens, *how))
        self.block_bytes = block_size * memory.kv_bytes_per_token(shape, *how)
        if not self.block_bytes:
            raise ValueError(f"shape={shape.name!r}; no layer keeps tokens. Nothing needs a plan.")
        if isinstance(prefix_tokens, Real) and not isinstance(prefix_tokens, Integral):
            real("prefix_tokens", prefix_tokens, low=0, high=1, hint="Write tokens as int.")
            prefix_tokens = int(Fraction(str(prefix_tokens)) * self.tokens / self.count)
        prefix_tokens = whole("prefix_tokens", prefix_tokens, low=0)
        shared = shareable_tokens(np.minimum(prefix_tokens, num_tokens), num_tokens, block_size)
        # What the next token adds once every window is full: windows let go of a prefix.
        widest = max(group.window or 0 for group in shape.layer_groups)
        self.endless_bytes = memory.marginal_kv_bytes(shape, widest, *how)
        self.prefix_bytes = int(shared.max()) * self.endless_bytes
        self.own_tokens = self.tokens - total(shared)
        self.shared_bytes = total(shared) * self.endless_bytes

    def fitting(self, budget, total):
        """Count the sequences that fit, equation (9.1)."""
        return max(0, (budget - self.prefix_bytes) * self.count // (total - self.shared_bytes))

    def held(self, num_sequences):
        """Count what so many sequences hold: the prefix once, their own each time."""
        own = _ceil_div(num_sequences * (self.in_blocks - self.shared_bytes), self.count)
        return own + self.prefix_bytes * bool(num_sequences)

    def parts(self, num_sequences, budget):
        """Split the cache of one GPU."""
        taken = self.held(num_sequences)
        tails = num_sequences * (self.in_blocks - self.by_token) // self.count
        scales = (taken - tails) * self.scales // self.by_token
        cache = taken - tails - scales
        return {"tails": tails, "scales": scales, "cache": cache, "unused": budget - taken}


def lengths_of(context):
    """Return the sequence lengths that a plan counts with, and how often each occurs [tokens].

    Parameters
    ----------
    context : int, str, path, tuple or ndarray of int
        One length; an array, one length a sequence; a pair (mean, 99th percentile), which stands
        for 1,000 equally likely quantiles of the log-normal distribution with these two; or text:
        ``'8192'``, ``'1366/4000'`` (such a pair), ``'azure-conversations'`` or
        ``'azure-code'`` (the requests of the Azure 2023 traces), or the path of a CSV file whose
        column ``num_tokens`` holds the lengths, or, where it has none, ``ContextTokens`` and
        ``GeneratedTokens`` their two parts.

    Returns
    -------
    num_tokens : ndarray of int64, (n_lengths,)
        The lengths, ascending, 1 or more [tokens].
    counts : ndarray of int64, (n_lengths,)
        How often each occurs.

    Raises
    ------
    TypeError
        If a length is not an integer.
    ValueError
        If a length is below 1, there is none, the text or a line of the file is not understood, or
        no log-normal distribution has the pair.

    Notes
    -----
    With z = 2.326, the normal distribution's 99th percentile, ln(p99 / mean) = z s - s**2 / 2
    gives the spread s, as long as p99 is at most 14.97 times the mean. The 1,000 lengths lack the
    far tail: at p99 = 8 mean their mean is 0.5 % low, at 14 mean 4 %.

    References
    ----------
    .. [1] Patel et al., "Splitwise", ISCA 2024: the Azure 2023 requests.

    Examples
    --------
    >>> num_tokens, counts = lengths_of("1000/4000")
    >>> round(float((num_tokens * counts).sum() / counts.sum()))
    999
    """
    if isinstance(context, str | os.PathLike):
        context = os.fspath(context)
        if context in REQUEST_LENGTHS:
            context = load_request_lengths(context)
        else:
            is_file = context.lower().endswith(".csv")
            context = _read_csv(context) if is_file else _read_numbers(context)
    if isinstance(context, tuple):
        if len(context) != 2:
            rule = "a tuple is mean and 99th percentile"
            raise ValueError(f"context={context}; {rule}. Pass np.array([...]) for lengths.")
        context = _log_normal(*context)
    lengths = np.atleast_1d(whole_or_array("context", context, low=1))
    if not lengths.size:
        raise ValueError("context=[]; there is no length. Pass at least one.")
    return np.unique(lengths, return_counts=True)


def _read_numbers(text):
    try:
        numbers = tuple(int(part.replace(",", "")) for part in text.split("/"))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2):
        raise ValueError(
            f"context={text[:40]!r}; it is no length. Write 8192, 1366/4000 (mean and 99th "
            f"percentile), {', '.join(REQUEST_LENGTHS)} or the path of a .csv file."
        )
    return numbers if len(numbers) == 2 else numbers[0]


def _read_csv(path):
    lengths = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            given = rows.fieldnames or []
            columns = next((names for names in _LENGTH_COLUMNS if set(names) <= set(given)), None)
            if columns is None:
                raise ValueError(f"no lengths among the columns {given}")
            for row in rows:
                lengths.append(np.int64(sum(int(row[name]) for name in columns)))
    except (OSError, ValueError, TypeError, OverflowError, csv.Error) as problem:
        raise ValueError(
            f"context={path!r}; {problem} after {len(lengths)} lengths. Name the column "
            "num_tokens, or ContextTokens and GeneratedTokens, and fill it with whole numbers."
        ) from problem
    return np.array(lengths, np.int64)


@functools.cache
def _log_normal(mean, p99):
    mean, z = real("mean", mean, low=1), NormalDist().inv_cdf(0.99)
    hint = "Pass the lengths themselves, as a CSV file."
    p99 = real("p99", p99, low=mean, high=mean * math.exp(z * z / 2), hint=hint)
    spread = z - math.sqrt(z * z - 2 * math.log(p99 / mean))
    steps = np.array([NormalDist().inv_cdf((k + 0.5) / 1000) for k in range(1000)])
    lengths = np.rint(mean * np.exp(spread * steps - spread**2 / 2))
    return np.maximum(1, lengths).astype(np.int64)


def _size(name, value, low=0):
    """Read bytes, or a size as people write it."""
    if isinstance(value, str):
        if value.rstrip().endswith("/s"):
            raise ValueError(f"{name}={value!r}; it is a bandwidth. Write a size, '24 GiB'.")
        value = 0 if value.strip() == "0" else parse_bytes(value, name=name)
    return whole(name, value, low=low)


def _gpu_bytes(gpu):
    if isinstance(gpu, Device):
        return gpu.memory_bytes
    if isinstance(gpu, str) and not gpu[:1].isdigit():
        return load_devices()[one_of("gpu", gpu, load_devices())].memory_bytes
    return _size("gpu", gpu, low=1)


def _weight_bytes(shape, weights):
    if weights is not None and (not isinstance(weights, str) or weights[:1].isdigit()):
        return _size("weights", weights)
    if shape != load_models().get(shape.name):
        raise ValueError(
            f"weights={weights!r}; {shape.name!r} is no preset, so it is not known how many "
            "parameters it has. Pass their bytes, in bf16 twice the number of parameters."
        )
    bits = None if weights is None else memory.bits_per_value(weights)
    return released_weight_bytes(shape.name, bits)


def _ceil_div(value, divisor):
    return -(-value // divisor)
