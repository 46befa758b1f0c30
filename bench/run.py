"""Times the named cases and prints one table: `python -m bench.run`.

Contestants take turns, round by round, so that a slow spell of the machine meets all of them. A ratio is a
contestant's median time over mha_fast's: above 1, mha_fast is faster. Outputs are compared before anything is timed.
"""

import argparse
import fnmatch
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import mha_fast
from bench.cases import CASES
from bench.contestants import CONTESTANTS

PAUSE = 0.12  # seconds; the pools of other libraries go on spinning for about a tenth of a second after a call
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def environment(threads):
    """What a reader needs to judge the numbers."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    found = {
        "mha_fast": mha_fast.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "cpu": f"{cpu}, {os.cpu_count()} logical",
        "threads": threads,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name')} {blas.get('version')}",
    }
    try:
        from threadpoolctl import threadpool_info
    except ModuleNotFoundError:
        pass
    else:
        found["pools"] = ", ".join(
            " ".join(str(pool[k]) for k in ("internal_api", "version", "architecture", "num_threads") if pool.get(k))
            for pool in threadpool_info()
        )
    found |= {name: value for name, value in os.environ.items() if name.startswith(("OPENBLAS_", "MHA_FAST_"))}
    return found | {f"config {name}": value for name, value in mha_fast.show_config().items()}


def once(call, number):
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def run_case(case, contestants, threads, rounds):
    """Seconds a call of every contestant in every round; a wrong result is an error."""
    calls = {name: make(case, threads) for name, make in contestants.items()}
    calls = {name: call for name, call in calls.items() if call}
    numbers, expected = {}, None
    for name, call in calls.items():
        result = call()
        expected = result if expected is None else expected
        error = float(np.abs(result - expected).max() / np.abs(expected).max())
        if not error <= TOLERANCE[case.dtype]:
            raise SystemExit(f"{case.name}: {name} differs from mha_fast by {error:.1e} of the largest output")
        numbers[name] = max(1, int(0.02 / max(once(call, 1), 1e-7)))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(PAUSE)
            call()
            times[name] += [once(call, numbers[name]) for _ in range(3)]
    return times


def table_row(case, times, contestants):
    median = {name: statistics.median(t) for name, t in times.items()}
    mine = median["mha_fast"]
    cells = [f"{mine * 1e3:10.3f}{min(times['mha_fast']) * 1e3:10.3f}{case.flops() / mine / 1e9:9.1f}"]
    for name in contestants:
        if name != "mha_fast":
            cells.append(f"{median[name] / mine:12.2f}" if name in median else f"{'n/a':>12}")
    return f"{case.name:20}" + "".join(cells)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--only", help="contestants, separated by commas (mha_fast always takes part)")
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write environment and all times to this file")
    args = parser.parse_args(arguments)
    cases = [c for c in CASES if any(fnmatch.fnmatch(c.name, p) for p in args.cases.split(","))]
    if not cases:
        parser.error(f"no case matches {args.cases!r}; there are {', '.join(c.name for c in CASES)}")
    wanted = args.only.split(",") if args.only else list(CONTESTANTS)
    if unknown := set(wanted) - set(CONTESTANTS):
        parser.error(f"unknown or not installed: {', '.join(sorted(unknown))}; there are {', '.join(CONTESTANTS)}")
    contestants = {n: make for n, make in CONTESTANTS.items() if n == "mha_fast" or n in wanted}

    about = environment(args.threads)
    for name, value in about.items():
        print(f"{name}: {value}")
    others = "".join(f"{name:>12}" for name in contestants if name != "mha_fast")
    print(f"\n{'':20}{'median ms':>10}{'min ms':>10}{'GFLOP/s':>9}{others}   (ratios: their median / ours)")
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        progress, show = cases, print
    else:
        progress, show = tqdm(cases, unit="case", leave=False, disable=not sys.stderr.isatty()), tqdm.write
    rows = []
    for case in progress:
        times = run_case(case, contestants, args.threads, args.rounds)
        show(table_row(case, times, contestants))
        rows.append({"name": case.name, "flops": case.flops(), "seconds": times})
    if args.json:
        args.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
