"""Compute data/trace_figures.json from the four public trace files, which are not shipped.

    python data/fetch_traces.py
    python data/make_trace_figures.py data/traces

What it holds: the length histograms of the Azure requests; for the Mooncake conversation trace, the
synthetic one, and both merged as two tenants, what an unlimited cache finds, the LRU hit curve,
every policy's figures on a grid of capacities and Belady's bound on a finer one, in file order and
in engine order; and LRU at the capacities of a published figure. Takes half an hour.
"""

import argparse
import collections
import functools
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from fetch_traces import TRACES, read_checked

from kvlib import eviction, replay

HERE = Path(__file__).parent
PREFILL_TOKENS_PER_SECOND = 8000.0
# Llama-3.1-8B: 2 * 8.03e9 operations per token in its weights, 4 * 32 layers * 4,096 per token of
# context in attention; they are equal at 30,600 tokens.
ATTENTION_TOKENS = 30_000
CAPACITIES = (100, 300, 900, 1000, 2000, 3000, 5000, 7000, 10_000, 15_000, 20_000, 30_000)
CAPACITIES += (50_000, 70_000, 100_000, 150_000)
SECONDS = ("recompute_seconds_mean", "recompute_seconds_p50", "recompute_seconds_p99")
SECONDS += ("recompute_cost",)
USAGE_CAPACITIES, NUM_MOMENTS = (3000, 10_000, 30_000, 100_000), 60
# An independent public analysis printed LRU's ratios at these shares of the distinct blocks.
PUBLISHED_PERCENTS = (1, 5, 10, 25, 50)
FIGURE_9 = ("mooncake-fig9-conversation", "mooncake-fig9-synthetic")


def azure_histogram(content):
    """Count the requests of each length, prompt and answer together.

    Parameters
    ----------
    content : bytes
        A CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Returns
    -------
    dict
        The lists `num_tokens` and `num_requests`, and the means of prompt and answer [tokens].
    """
    lines = content.decode().replace("\r", "").strip().split("\n")[1:]
    prompt, answer = np.array([line.split(",")[1:] for line in lines], np.int64).T
    num_tokens, num_requests = np.unique(prompt + answer, return_counts=True)
    return {
        "num_tokens": num_tokens.tolist(),
        "num_requests": num_requests.tolist(),
        "mean_prompt_tokens": float(prompt.mean()),
        "mean_answer_tokens": float(answer.mean()),
    }


def sampled_curve(trace):
    """Compute the LRU hit curve at every capacity up to 64 and about 400 evenly spaced larger ones.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.

    Returns
    -------
    dict
        The lists `capacity_blocks` and `resident_hits`, exact at each entry [blocks].
    """
    curve = replay.lru_hit_curve(trace)
    enough = int(np.argmax(curve == curve[-1]))
    spaced = np.geomspace(64, enough, 400).round().astype(np.int64)
    shares = [percent * (len(curve) - 1) // 100 for percent in PUBLISHED_PERCENTS]
    capacities = np.unique([*range(65), *CAPACITIES, *spaced, *shares, len(curve) - 1])
    capacities = capacities[capacities < len(curve)]
    return {"capacity_blocks": capacities.tolist(), "resident_hits": curve[capacities].tolist()}


def replayed_curve(trace, policy, engine_order, known, show):
    """Replay a trace at about 40 capacities, until only first uses miss.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    policy : str
        One of `kvlib.replay.POLICIES`.
    engine_order : bool
        See `kvlib.replay.replay`.
    known : dict of int to int
        Resident hits at capacities that are replayed already, the largest one included [blocks].
    show : callable
        Told what is being worked on.

    Returns
    -------
    dict
        The lists `capacity_blocks` and `resident_hits` [blocks].
    """
    spaced = np.geomspace(min(known), max(known), 25).round().astype(int).tolist()
    most, curve = known[max(known)], {}
    for capacity in sorted({*spaced, *known}):
        show(f"{policy} {capacity}")
        if most not in curve.values():
            replayed = capacity not in known and replay.replay(
                trace, capacity, policy, engine_order=engine_order
            )
            curve[capacity] = replayed.resident_hits if replayed else known[capacity]
    return {"capacity_blocks": [*curve], "resident_hits": [*curve.values()]}


def token_ratios(trace, capacity_tokens):
    """Replay LRU at the capacities of a published figure.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    capacity_tokens : list of int
        Where the figure has points [tokens].

    Returns
    -------
    dict
        The lists `capacity_tokens` [tokens] and `token_hit_ratio` [ratio].
    """
    num_unique = len(np.unique(trace.block_ids))
    blocks = [min(num_unique, tokens // trace.block_size) for tokens in capacity_tokens]
    ratios = [round(replay.replay(trace, count).token_hit_ratio, 6) for count in blocks]
    return {"capacity_tokens": capacity_tokens, "token_hit_ratio": ratios}


def replay_columns(trace, capacities, policy, engine_order, show):
    """Replay a trace at several capacities.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    capacities : list of int
        Cache sizes [blocks].
    policy : str
        One of `kvlib.replay.POLICIES`.
    engine_order : bool
        See `kvlib.replay.replay`.
    show : callable
        Told what is being worked on.

    Returns
    -------
    dict
        One list per figure, one entry per capacity; per tenant under "tenants", and usage over time
        at `USAGE_CAPACITIES` under "usage".
    """
    linear = functools.partial(
        eviction.recompute_seconds, prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND
    )
    columns, usage = collections.defaultdict(list), {}
    tenants = {name: collections.defaultdict(list) for name in trace.tenant_names}
    for capacity in capacities:
        show(f"{policy} {capacity}")
        # The attention term decides the order of "cost" and nothing else; seconds come both ways.
        result = replay.replay(
            trace,
            capacity,
            policy,
            engine_order=engine_order,
            prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND,
            attention_tokens=ATTENTION_TOKENS,
        )
        counts = result.leading_hits, result.leading_hits, result.ideal_leading_hits
        plain = replay.HitFigures(trace, slice(None), *counts, linear)
        for name in ("resident_hits", "block_hits", "evictions", "recompute_tokens"):
            columns[name].append(getattr(result, name))
        for name in ("token_hit_ratio", "request_hit_ratio", "unfairness", "jain_index"):
            columns[name].append(round(getattr(result, name), 6))
        for name in SECONDS:
            columns[name].append(round(getattr(plain, name), 6))
            columns[f"attention_{name}"].append(round(getattr(result, name), 6))
        for i, (name, figures) in enumerate(result.tenants.items()):
            own = replay.HitFigures(trace, trace.tenant == i, *counts, linear)
            tenants[name]["resident_hits"].append(figures.resident_hits)
            tenants[name]["block_hits"].append(figures.block_hits)
            tenants[name]["recompute_seconds_p99"].append(round(own.recompute_seconds_p99, 6))
            tenants[name]["mean_usage_blocks"].append(round(float(result.usage[name].mean()), 1))
        if capacity in USAGE_CAPACITIES:
            usage[str(capacity)] = {
                name: held[moments(trace)].tolist() for name, held in result.usage.items()
            }
    if len(tenants) > 1:
        columns |= {"tenants": tenants, "usage": usage}
    return columns


def moments(trace):
    """Choose the requests after which usage is recorded.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.

    Returns
    -------
    ndarray of int64
        Positions, evenly spaced `(NUM_MOMENTS,)`.
    """
    return np.linspace(0, len(trace.tenant) - 1, NUM_MOMENTS).round().astype(np.int64)


def trace_figures(trace, show):
    """Compute everything recorded about one prefix trace.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    show : callable
        Told what is being worked on.

    Returns
    -------
    dict
        Totals, what an unlimited cache finds, the LRU curve, and the replays.
    """
    num_unique = len(np.unique(trace.block_ids))
    unlimited = replay.replay(
        trace, num_unique, prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND
    )
    capacities = [c for c in CAPACITIES if c < num_unique] + [num_unique]
    figures = {
        "num_requests": len(trace.tenant),
        "num_blocks": len(trace.block_ids),
        "num_unique_blocks": num_unique,
        "most_blocks_of_a_request": int(np.diff(trace.offsets).max()),
        "input_tokens": int(trace.input_tokens.sum()),
        "output_tokens": int(trace.output_tokens.sum()),
        "duration_ms": int(trace.timestamps_ms[-1]),
        "unlimited": {
            name: getattr(unlimited, name)
            for name in (
                "block_hits",
                "block_hit_ratio",
                "token_hit_ratio",
                "request_hit_ratio",
                "first_prefill_tokens",
            )
        },
        "lru_curve": sampled_curve(trace),
        "capacity_blocks": capacities,
    }
    if len(trace.tenant_names) > 1:
        figures["usage_timestamps_ms"] = trace.timestamps_ms[moments(trace)].tolist()
    for order in ("file", "engine"):
        figures[f"{order}_order"] = {
            policy: replay_columns(trace, capacities, policy, order == "engine", show)
            for policy in replay.POLICIES
        }
    return figures | other_curves(trace, figures, show)


def other_curves(trace, figures, show):
    """Compute the curves beside `lru_curve`, from which a bar at any capacity is drawn.

    Parameters
    ----------
    trace : PrefixTrace
        The requests.
    figures : dict
        What is recorded of it already.
    show : callable
        Told what is being worked on.

    Returns
    -------
    dict
        Belady's bound in both orders, and LRU in engine order.
    """
    curves = {}
    for name, order, policy in (
        ("belady_curve", "file", "belady"),
        ("engine_lru_curve", "engine", "lru"),
        ("engine_belady_curve", "engine", "belady"),
    ):
        hits = figures[f"{order}_order"][policy]["resident_hits"]
        known = dict(zip(figures["capacity_blocks"], hits, strict=True))
        curves[name] = replayed_curve(trace, policy, order == "engine", known, show)
    return curves


def main(arguments=None):
    """Write the figures and print the line that belongs into SHA256SUMS.

    Parameters
    ----------
    arguments : list of str, optional
        Instead of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the trace files are, plain or .gz")
    parser.add_argument("--output", type=Path, default=HERE / "trace_figures.json")
    options = parser.parse_args(arguments)

    def show(what):
        print(f"\r{what:40}", end="", file=sys.stderr, flush=True)

    figures = {
        "sources": {name: sha256 for name, (_, _, sha256) in TRACES.items()},
        "prefill_tokens_per_second": PREFILL_TOKENS_PER_SECOND,
        "attention_tokens": ATTENTION_TOKENS,
    }
    for name in ("code", "conv"):
        content = read_checked(f"azure_llm_inference_2023_{name}.csv", options.folder)
        figures[f"azure_{name}"] = azure_histogram(content)
    traces = {}
    for name in ("conversation", "synthetic"):
        content = read_checked(f"mooncake_{name}_trace.jsonl", options.folder)
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(content)
            traces[name] = replay.load_trace(file.name)
    traces["merged"] = replay.concat_tenants(traces)
    for name, trace in traces.items():
        figures[name] = trace_figures(trace, lambda what, name=name: show(f"{name}: {what}"))
    for entry in json.loads((HERE / "published_numbers.json").read_text()):
        if entry["id"] in FIGURE_9:
            trace = traces[entry["inputs"]["trace"]]
            figures[entry["id"]] = token_ratios(trace, entry["inputs"]["capacity_tokens"])
    text = json.dumps(figures, separators=(",", ":")) + "\n"
    options.output.write_text(text)
    show("")
    print(f"{hashlib.sha256(text.encode()).hexdigest()}  {options.output.name}")


if __name__ == "__main__":
    main()
