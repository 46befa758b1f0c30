"""Times the named cases, this package beside NumPy and other libraries, and the machine's limits in the same rounds.

    python -m bench                          all cases in under three minutes: table, results.json, pictures
    python -m bench --quick                  fewer rounds, for a first look
    python -m bench --rows "decode*,tiny*" --only plain,torch --threads 1

Every library runs in a process of its own; the processes take turns, round by round, so that a slow spell of the
machine meets all of them, and the machine's limits are measured in every round too. Outputs are compared before
anything is timed. How to read the table: bench/README.md.
"""

import argparse
import fnmatch
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import mha_fast
from bench.cases import BY_NAME, CASES, TOLERANCE
from bench.contestants import CONTESTANTS
from bench.machine import Probe, environment
from bench.report import table_head, table_row, write_report
from bench.workers import Worker

DEFAULT = [name for name in CONTESTANTS if name != "reference"]
SECONDS = 2.5  # of a case on average, its arrays included; what long calls take beyond it, the others give


def check(case, samples):
    """A wrong output ends the run."""
    mine = samples["mha_fast"]
    for name, other in samples.items():
        error = float(np.abs(other - mine).max() / np.abs(mine).max()) if other.shape == mine.shape else np.inf
        if not error <= TOLERANCE[case.dtype]:
            raise SystemExit(f"{case.name}: {name} differs from mha_fast by {error:.1e} of the largest output")


def limits_of(case, probe, threads, level):
    """The limit's parts, as measured now."""
    parts = [case.peak(level), "read"] if case.limit == "read" else [case.peak(level)]
    return {what: probe.measure(what, threads, level) for what in parts}


def run_case(case, workers, probe, threads, level, budget, rounds):
    """One row of the results."""
    end = time.perf_counter() + budget
    threads, level = case.threads or threads, case.level or level
    opened = {name: worker.ask("open", case) for name, worker in workers.items()}
    row = {
        "name": case.name, "kind": case.kind, "limit": case.limit, "flops": case.flops(), "kv_bytes": case.kv_bytes(),
        "limits": [], "seconds": {name: [] for name, answer in opened.items() if answer[0] == "ok"},
        "absent": {name: answer[1] for name, answer in opened.items() if answer[0] != "ok"},
    }  # fmt: skip
    if "mha_fast" not in row["seconds"]:
        return row
    check(case, {name: opened[name][1] for name in row["seconds"]})
    slow = {name for name in row["seconds"] if opened[name][2] > budget / 8}  # take part once
    started = time.perf_counter()
    for n in range(rounds):
        before, started = started, time.perf_counter()
        if n > 0 and 2 * started - before > end:  # no time for one more like the last
            break
        row["limits"].append(limits_of(case, probe, threads, level))
        for name in [x for x in row["seconds"] if n == 0 or x not in slow]:
            times = workers[name].ask("time", 0.06)
            if isinstance(times, tuple):
                row["absent"][name] = times[1]
                del row["seconds"][name]
                if name == "mha_fast":
                    return row
            else:
                row["seconds"][name] += times
    return row


def set_limits(rows, threads, level):
    """Give each row the shortest time that the machine allows, by the best that its limits reached in any row.

    A row's own rounds may all fall into a slow spell of a shared machine.
    """
    best = {}
    for row in rows:
        case = BY_NAME[row["name"]]
        row_best = best.setdefault((case.threads or threads, case.level or level), {})
        for what, reached in (item for limits in row["limits"] for item in limits.items() if item[1]):
            row_best[what] = max(row_best.get(what, 0.0), reached)
    for row in rows:
        case = BY_NAME[row["name"]]
        limits = best[case.threads or threads, case.level or level]
        peak = case.peak(case.level or level)
        if row["limits"] and all(what in limits for what in row["limits"][0]):
            row["limit_seconds"] = case.limit_seconds(limits[peak], limits.get("read", 1))


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="*", metavar="GLOB", help="names or patterns of cases, separated by commas")
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join(CONTESTANTS)}; mha_fast always takes part")
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads(), metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="at most, as far as the time allows")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    args = parser.parse_args(arguments)
    args.cases = [c for c in CASES if any(fnmatch.fnmatch(c.name, p) for p in args.rows.split(","))]
    if not args.cases:
        parser.error(f"no case matches {args.rows!r}; there are {', '.join(c.name for c in CASES)}")
    if args.threads < 1 or args.rounds < 1:
        parser.error("--threads and --rounds are at least 1")
    wanted = args.only.split(",") if args.only else DEFAULT
    if unknown := set(wanted) - set(CONTESTANTS):
        parser.error(f"unknown or not installed: {', '.join(sorted(unknown))}; there are {', '.join(CONTESTANTS)}")
    args.contestants = [name for name in CONTESTANTS if name == "mha_fast" or name in wanted]
    args.rounds = min(args.rounds, 2) if args.quick else args.rounds
    return args


def main(arguments=None):
    args = parse(arguments)
    from tqdm import tqdm

    probe = Probe()
    workers = {name: Worker(name, args.threads) for name in args.contestants}
    about = environment() | {"threads": args.threads}
    about["pools"] = {name: worker.ask("pools") for name, worker in workers.items()}
    about["limits"] = f"not measured: {probe.missing}" if probe.missing else "measured in every round"
    for name, value in about.items():
        print(f"{name}: {value}")
    print("\n" + table_head(args.contestants))
    level, rows = mha_fast.show_config()["level"], []
    end = time.perf_counter() + len(args.cases) * SECONDS
    try:
        for n, case in enumerate(tqdm(args.cases, unit="case", leave=False, disable=not sys.stderr.isatty())):
            budget = max(0.0, end - time.perf_counter()) / (len(args.cases) - n)
            rows.append(run_case(case, workers, probe, args.threads, level, budget, args.rounds))
            set_limits(rows, args.threads, level)
            tqdm.write(table_row(rows[-1], args.contestants))
    finally:
        for worker in workers.values():
            worker.close()
        probe.close()
    results = {"environment": about, "contestants": args.contestants, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    for path in write_report(results, args.out):
        print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
