"""Replay and victim choice beside their peers, in one run: the ratios count.

    python tests/bench/bench_replay.py [trace.jsonl[.gz]]

Without a trace it uses generated traffic. cachetools and libcachesim are compared if installed.
"""

import importlib.util
import random
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

from kvlib import eviction, replay

CAPACITY, ROUNDS = 10_000, 10


def best_seconds(runs):
    """Take turns, so that all meet the same disturbances, and keep each one's best CPU time."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def ordered_dict_lru(block_ids, capacity):
    """Count LRU hits the way everybody writes it first."""
    cache, hits = OrderedDict(), 0
    for block in block_ids:
        if block in cache:
            cache.move_to_end(block)
            hits += 1
        else:
            if len(cache) >= capacity:
                cache.popitem(last=False)
            cache[block] = True
    return hits


def cachetools_lfu(block_ids, capacity):
    """Count LFU hits with cachetools."""
    import cachetools

    cache, hits = cachetools.LFUCache(capacity), 0
    for block in block_ids:
        try:
            cache[block]
            hits += 1
        except KeyError:
            cache[block] = True
    return hits


def libcachesim_runs(block_ids, folder):
    """Return one run per policy of the C library, reading a prepared file."""
    import libcachesim

    path = Path(folder, "accesses.txt")
    path.write_text("\n".join(str(block + 1) for block in block_ids))
    plain = libcachesim.TraceType.PLAIN_TXT_TRACE

    def run(kind):
        cache = kind(cache_size=CAPACITY, hashpower=18)
        cache.process_trace(libcachesim.TraceReader(str(path), plain))

    return {
        f"libcachesim {kind.__name__}": lambda kind=kind: run(kind)
        for kind in (libcachesim.LRU, libcachesim.LFU)
    }


def bench_replay(path):
    """Print every replay as a multiple of one OrderedDict LRU simulation."""
    trace = replay.load_trace(path) if path else replay.generate_traffic(0)
    print(f"{path or 'generated traffic'}: {len(trace.tenant):,} requests, ", end="")
    print(f"{len(trace.block_ids):,} block accesses; capacity {CAPACITY:,} blocks")
    block_ids = trace.block_ids.tolist()

    def fresh(run):
        # What a trace remembers (previous uses, stack distances) is part of the work.
        for name in ("_uses", "_depth", "_owner", "_distances"):
            vars(trace).pop(name, None)
        return run()

    runs = {
        "OrderedDict LRU loop": lambda: ordered_dict_lru(block_ids, CAPACITY),
        "lru_hit_curve, all capacities": lambda: fresh(lambda: replay.lru_hit_curve(trace)),
        "replay lru, first": lambda: fresh(lambda: replay.replay(trace, CAPACITY)),
        "replay lru, again": lambda: replay.replay(trace, CAPACITY),
    }
    for policy in replay.POLICIES[1:]:
        runs[f"replay {policy}"] = lambda policy=policy: replay.replay(trace, CAPACITY, policy)
    runs["replay lru, engine order"] = lambda: replay.replay(trace, CAPACITY, engine_order=True)
    if importlib.util.find_spec("cachetools"):
        runs["cachetools LFU"] = lambda: cachetools_lfu(block_ids, CAPACITY)
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("libcachesim"):
            runs |= libcachesim_runs(block_ids, folder)
        best = best_seconds(runs)
    loop = best["OrderedDict LRU loop"]
    for name, seconds in best.items():
        print(f"  {name:32} {1000 * seconds:8.1f} ms {seconds / loop:7.2f} x the loop")
    if "cachetools LFU" in best:
        ratio = best["cachetools LFU"] / best["replay lfu"]
        print(f"  replay lfu is {ratio:.1f} x as fast as cachetools (goal 5)")
    print(
        f"  replay lru runs at {loop / best['replay lru, first']:.2f} x the loop's rate (goal 0.9)"
    )
    print(f"  the whole curve costs {best['lru_hit_curve, all capacities'] / loop:.2f} (goal 0.5)")


def bench_victims():
    """Print what one eviction and one newcomer cost among ever more residents."""
    rng = random.Random(0)
    policies = {
        "lru": eviction.LRUPolicy(),
        "lfu": eviction.LFUPolicy(),
        "fair": eviction.FairPolicy({"a": 1, "b": 2, "c": 3}, 100_000),
        "cost": eviction.CostPolicy(),
    }
    populations = (100, 1000, 10_000, 100_000)
    print("one eviction from the index, and one scan, among this many residents [us]")
    print(f"  {'':6}" + "".join(f"{count:>20,}" for count in populations))

    def resident(step):
        num_blocks = rng.randint(1, 50)
        return SimpleNamespace(
            last_access_step=step,
            use_count=rng.randint(1, 9),
            tenant=rng.choice("abc"),
            num_blocks=lambda: num_blocks,
            reclaimable_blocks=lambda: num_blocks,
        )

    for name, policy in policies.items():
        cells = []
        for count in populations:
            sequences = {i: resident(i) for i in range(count)}
            index = policy.index(sequences)
            newcomers = [resident(count + i) for i in range(2000)]
            start = time.process_time()
            for i, newcomer in enumerate(newcomers):
                del index[index.victim(8)]
                index[count + i] = newcomer
            pick = (time.process_time() - start) / len(newcomers)
            start = time.process_time()
            policy.select_victim(sequences, 8)
            scan = time.process_time() - start
            cells.append(f"{1e6 * pick:9.1f} {1e6 * scan:10.0f}")
        print(f"  {name:6}" + "".join(cells))


if __name__ == "__main__":
    bench_replay(sys.argv[1] if len(sys.argv) > 1 else None)
    bench_victims()
