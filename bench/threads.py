"""What threads cost: waking them, NumPy's BLAS just before, callers with threads of their own, more threads than cores:
`python -m bench.threads [--threads N] [--write docs/threads.md]`.
"""

import argparse
import os
import statistics
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import mha_fast
from bench.cases import BY_NAME, Case
from bench.contestants import of_module
from bench.fill import fill, markdown_table
from bench.machine import NOT_TAKEN_OVER, environment, one_line

REPEATS = 25
# Work that divides evenly and is large enough to be shared: some 40 us on one thread.
WAKING = Case("waking", 1, 16, 48, 96, 64)
LAYERS = ("layer-minilm-8x128", "layer-minilm-32x64", "layer-bert-8x512")


def microseconds(call):
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def on_threads(call, threads):
    mha_fast.set_num_threads(threads)
    return call()


def after(prepare, call, repeats=REPEATS):
    """Median microseconds of a call that follows a preparation."""
    call()
    times = []
    for _ in range(repeats):
        prepare()
        times.append(microseconds(call))
    return statistics.median(times)


def spin(duration):
    """Waits without giving the core away, so that its clock and this thread's state stay as they are."""
    end = time.perf_counter() + duration
    while time.perf_counter() < end:
        pass


def waking(threads):
    """One call after a pause, on one thread and on all: what is above the shared-out time is the waking."""
    call = of_module(mha_fast, replace(WAKING, num_heads=8 * threads))
    rows = []
    for label, pause in (("none", 0), ("1 ms", 1e-3), ("20 ms", 20e-3), ("200 ms", 0.2)):
        repeats = REPEATS if pause < 0.1 else 9
        one, all_of_them = (
            after(partial(spin, pause), partial(on_threads, call, count), repeats) for count in (1, threads)
        )
        rows.append([label, f"{one:.1f}", f"{all_of_them:.1f}", f"{all_of_them - one / threads:.1f}"])
    return markdown_table(["pause", "1 thread, µs", f"{threads} threads, µs", "cost of threads, µs"], rows)


def after_blas(threads):
    """Calls right after a product in NumPy, whose workers still spin."""
    square = np.ones((768, 768), np.float32)
    mha_fast.set_num_threads(threads)
    rows = []
    for name in ("prefill-128-d64", *LAYERS):
        call = of_module(mha_fast, BY_NAME[name])
        quiet = after(lambda: time.sleep(0.15), lambda call=call: (call(), call()), 7) / 2
        warm = after(call, call, 15)
        spinning = after(lambda: square @ square, call, 15)
        rows.append([name, f"{quiet:.0f}", f"{warm:.0f}", f"{spinning:.0f}", f"{spinning / warm - 1:+.0%}"])
    head = ["call", "two after a pause, µs each", "one after another, µs", "after BLAS, µs", "BLAS before costs"]
    return markdown_table(head, rows)


def throughput(call, callers, duration=0.4):
    """Calls a second of so many Python threads together."""
    counts, stop = [0] * callers, threading.Event()

    def work(n):
        while not stop.is_set():
            call()
            counts[n] += 1

    workers = [threading.Thread(target=work, args=(n,)) for n in range(callers)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(duration)
    stop.set()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - start)


def callers(threads):
    rows = []
    for name in ("prefill-128-d64", "layer-minilm-8x128"):
        call = of_module(mha_fast, BY_NAME[name])
        for count in (1, threads, 4 * threads):
            cells = []
            for inner in (1, threads):
                mha_fast.set_num_threads(inner)
                cells.append(f"{throughput(call, count):.0f}")
            rows.append([name, count, *cells])
    head = ["call", "Python threads", "calls/s, 1 thread each", f"calls/s, {threads} threads each"]
    return markdown_table(head, rows)


def too_many(threads):
    """More threads than cores, and more threads than the process may use."""
    rows = []
    for name in ("prefill-128-d64", "layer-minilm-8x128", "decode-4096"):
        call = of_module(mha_fast, BY_NAME[name])
        cells = [after(call, partial(on_threads, call, n * threads), 9) for n in (1, 2, 4)]
        rows.append(
            [name, f"{cells[0]:.0f}", *(f"{cell / cells[0]:.2f}" for cell in cells[1:]), one_core(call, threads)]
        )
    head = ["call", f"{threads} threads, µs", f"{2 * threads}", f"{4 * threads}", f"{threads} threads on one CPU"]
    return markdown_table(head, rows)


def one_core(call, threads):
    """Time of several threads on one CPU, in units of one thread's there."""
    if not hasattr(os, "sched_setaffinity"):
        return "-"
    # the affinity of a thread reaches the workers that it starts, so this takes a thread of its own
    found = []

    def measure():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        one, several = (after(call, partial(on_threads, call, n), 5) for n in (1, threads))
        found.append(f"{several / one:.2f}")

    worker = threading.Thread(target=measure)
    worker.start()
    worker.join()
    return found[0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=mha_fast.get_num_threads(), metavar="N")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    args = parser.parse_args(arguments)
    if any(name in os.environ for name in NOT_TAKEN_OVER):
        parser.error(f"unset {' and '.join(NOT_TAKEN_OVER)}: they slow NumPy's BLAS")
    about = one_line(environment() | {"threads": args.threads})
    parts = {"waking": waking, "blas": after_blas, "callers": callers, "too-many": too_many}
    tables = {}
    for name, measure in parts.items():
        tables[name] = measure(args.threads)
        print(f"{name}\n{tables[name]}\n", flush=True)
        time.sleep(0.2)
    print(about)
    if args.write:
        fill(args.write, tables | {"environment": about})


if __name__ == "__main__":
    main()
