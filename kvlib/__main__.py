"""In a terminal: a plan of what fits and what eviction costs, or the replay of a trace."""

import argparse
import inspect
import json
import sys
from pathlib import Path

from kvlib import __version__
from kvlib.models import ModelShape, load_devices
from kvlib.plan import plan
from kvlib.replay import POLICIES, load_trace, replay, table

# The options are plan's and replay's own arguments, so that one name serves for both.
_OPTIONS = {
    "model": (str, "a preset, such as llama-3.1-8b, or a path to config.json"),
    "gpu": (str, f"{', '.join(load_devices())}; or its memory, '24 GiB'"),
    "context": (
        str,
        "tokens of a sequence, prompt and answer: 8192; mean and 99th percentile: 1366/4000; "
        "azure-conversations; azure-code; or a .csv file with a column num_tokens",
    ),
    "num_gpus": (int, "GPUs in all"),
    "tensor_parallel": (int, "GPUs that share each layer; default: all"),
    "weights": (str, "'15 GiB' in all, or the dtype to store them in; default: as released"),
    "memory_fraction": (float, "share of the memory that the engine may use"),
    "reserve_bytes": (str, "activations and buffers on each GPU inside that share, '2 GiB'"),
    "dtype": (str, "of the cache: bf16, fp8, q8_0, int4/g64z; or keys,values: q8_0,q4_0"),
    "block_size": (int, "tokens of a block"),
    "prefix_tokens": (str, "tokens that all sequences share, or their share of the mean: 0.5"),
    "concurrency": (int, "sequences wanted at a time"),
    "tenant_weights": (str, "for quotas of blocks: chat=3,batch=1"),
    "prefill_tokens_per_second": (float, "prefill throughput"),
    "turns_per_minute": (float, "how often each sequence comes back"),
    "trace": (str, "JSON lines, one a request: timestamp, input_length, hash_ids, tenant"),
    "capacity_blocks": (int, "blocks that the cache holds"),
    "policy": (str, f"one or several of {','.join(POLICIES)}; by default all"),
    "engine_order": (bool, "count hits when a request arrives, and let its tail leave first"),
    "attention_tokens": (int, "context at which a token costs twice as much as the first"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}. See --help.\n")


def _parser():
    parser = _Parser(prog="python -m kvlib", description=__doc__)
    parser.add_argument("--version", action="version", version=f"kvlib {__version__}")
    commands = parser.add_subparsers(required=True, metavar="{plan,replay}", dest="command")
    planning = _command(
        commands, plan, "what fits, what overflows and what eviction costs, as one table",
        "--model qwen3-32b --gpu 'H100 80GB' --context 8192 --num-gpus 2 --dtype q8_0,q4_0 "
        "--concurrency 200",
    )  # fmt: skip
    words = "width of a head, for a config.json that does not state it"
    planning.add_argument("--head-dim", type=int, help=words)
    replaying = _command(
        commands, replay, "what a cache of fixed capacity finds of a recorded trace, by policy",
        "--trace mine.jsonl --block-size 16 --capacity-blocks 10000 --policy lru,fair",
    )  # fmt: skip
    replaying.add_argument("--block-size", type=int, help="tokens per block; default: 512")
    return parser


def _command(commands, function, words, example):
    name = function.__name__
    command = commands.add_parser(
        name,
        argument_default=argparse.SUPPRESS,  # the function knows its defaults
        help=words,
        description=words,
        epilog=f"example: python -m kvlib {name} {example}",
    )
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "progress":
            continue
        kind, words = _OPTIONS[name]
        flag, default = "--" + name.replace("_", "-"), parameter.default
        if kind is bool:
            command.add_argument(flag, action="store_true", help=words)
            continue
        needed = default is inspect.Parameter.empty
        if not needed and default is not None and name != "policy":
            words += f"; default: {default:g}" if kind is float else f"; default: {default}"
        command.add_argument(flag, type=kind, required=needed, help=words)
    return command


def _run(command, given):
    """Return the text that a command prints."""
    if command == "plan":
        return str(plan(**given))
    sizes = {"block_size": given.pop("block_size")} if "block_size" in given else {}
    trace = load_trace(given.pop("trace"), **sizes)
    policies = given.pop("policy", POLICIES)
    return f"{trace}\n{table(replay(trace, **given, policy=policy) for policy in policies)}"


def _read(name, text, head_dim):
    if name == "model" and text.endswith(".json"):
        config = json.loads(Path(text).read_text("utf-8"))
        return ModelShape.from_hf_config(config, head_dim=head_dim)
    if name == "prefix_tokens":
        return float(text) if "." in text else int(text)
    if name == "policy" or (name == "dtype" and "," in text):
        return tuple(text.split(","))
    if name == "tenant_weights":
        pairs = [tuple(map(str.strip, part.split("="))) for part in text.split(",")]
        if any(len(pair) != 2 for pair in pairs) or len(dict(pairs)) < len(pairs):
            raise ValueError("it must name each tenant once. Write chat=3,batch=1.")
        return {tenant: float(weight) for tenant, weight in pairs}
    return text


def main(arguments=None):
    """Run one command of the terminal.

    Parameters
    ----------
    arguments : list of str, optional
        What stands after ``python -m kvlib``; the process's own by default.

    Returns
    -------
    int
        Exit status: 0, or 2 after one line that says what is wrong.

    Examples
    --------
    >>> main(["plan", "--model", "gpt2", "--gpu", "2 GiB", "--context", "1024"])
    gpt2 on 1 x 2 GiB, bf16 cache, blocks of 16 tokens
    one GPU as programs see it    2.00 GiB
    - weights                   474.70 MiB
    - reserve                   204.80 MiB
    - tails                            0 B
    - scales                           0 B
    - cache                       1.34 GiB
    = unused                    511.80 KiB
    tokens that fit                 38,912
    sequences of 1,024 tokens           38  38 if single tokens were allocated
    0
    """
    given, where = vars(_parser().parse_args(arguments)), ""
    command, head_dim = given.pop("command"), given.pop("head_dim", None)
    try:
        for name, text in given.items():
            where = f"{name}={text!r}; "
            given[name] = _read(name, text, head_dim)
        where = ""
        print(_run(command, given))
    except (ValueError, TypeError, OSError) as problem:
        print(f"python -m kvlib {command}: {where}{problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
