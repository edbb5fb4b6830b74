"""Measure `import kvlib.memory` against `import numpy`, whole processes, interleaved."""

import statistics
import subprocess
import sys
import time

RUNS = 15


def seconds(statement):
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def main():
    statements = {
        "import numpy": "import numpy",
        "import kvlib": "import kvlib",
        "import kvlib.memory, kvlib.models": "import kvlib.memory, kvlib.models",
    }
    times = {name: [] for name in statements}
    for _ in range(RUNS):
        for name, statement in statements.items():
            times[name].append(seconds(statement))
    base = statistics.median(times["import numpy"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<36} {1e3 * median:6.0f} ms  {median / base:5.2f} x numpy")


if __name__ == "__main__":
    main()
