"""What many cores would make of a call: `python -m bench.scaling [--write docs/scaling.md]`.

The tasks of src/mha.c, as it plans them, and of src/layer.c in their order, their sizes measured here on one thread,
are given to 4 to 128 threads as the dynamic schedule gives them. The simulation knows waiting (phases that end in a
barrier, a last task that still runs) and the counter that hands out tasks one at a time. It does not know shared memory
bandwidth; the second table says how much of that a row needs.
"""

import argparse
import fnmatch
import heapq
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import mha_fast
from bench.cases import CASES, placed
from bench.contestants import of_module
from bench.fill import fill, markdown_table
from bench.machine import environment, one_line
from bench.workers import seconds
from mha_fast import _core

THREADS = (4, 8, 16, 32, 64, 128)
ENOUGH = 8  # tasks a thread
DISPATCH = 50e-9  # seconds between two tasks that are handed out: a contended atomic addition
MERGE_RATE = 10e9  # bytes a second of another core's states
SAMPLES = 9  # task sizes that are measured; those between are interpolated
SOURCE = Path(__file__).resolve().parents[1] / "src"


def constants():
    """Sizes of a layer's other tasks, from its source."""
    layer = (SOURCE / "layer.c").read_text()
    names = ("ROWS", "COLUMN_TILES", "PACK_ROWS")
    return {name: int(re.search(rf"\b{name} = (\d+)", layer)[1]) for name in names}


CONSTANTS = constants()


def divide_up(a, b):
    return -(-a // b)


# ---- the plan: of attention the driver's own, of a layer's other tasks as in make_layer_plan


def layer_heads(case):
    """Heads as a layer's projection leaves them: at a cache line, rows an odd number of lines apart."""
    line = 64 // np.dtype(case.dtype).itemsize
    row = (divide_up(case.num_hiddens, line) | 1) * line
    joined = placed((case.batch, case.q_len, row), case.dtype, 0)[..., : case.num_hiddens]
    return joined.reshape(case.batch, case.q_len, case.num_heads, case.head_dim)


def planned_call(case):
    """Arrays and options of the case's attention, as far as its plan depends on them: on no number, but on addresses.

    NumPy's large arrays begin 16 bytes behind a cache line.
    """
    if case.kind == "layer":
        return [layer_heads(case)] * 3, {"layout": "blhd"}
    sizes = [(case.num_heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)]
    sizes = [size if case.layout == "bhld" else size[::-1] for size in sizes]
    inputs = [placed((case.batch, *size, case.head_dim), case.dtype, 16) for size in sizes]
    causal = {"is_causal": case.is_causal} if case.is_causal else {}
    return inputs, causal | {"layout": case.layout, "enable_gqa": True}


class Plan:
    """The tasks of one case on so many threads."""

    def __init__(self, case, config, threads):
        self.case, self.config = case, config
        self.col_tile = config["tiles"][case.dtype]["col_tile"]
        self.item = np.dtype(case.dtype).itemsize
        self.group = case.num_heads // case.kv_heads
        self.rows = case.q_len * self.group
        inputs, options = planned_call(case)
        plan = _core.plan_of(*inputs, **options, num_threads=threads)
        self.rows_per_task, self.row_tasks, self.splits = plan["rows_per_task"], plan["row_tasks"], plan["splits"]
        self.tail, self.split = plan["tail_heads"], plan["split_tasks"]
        self.threads = threads if case.kind == "layer" else plan["threads"]  # a layer has more than these tasks

    def row_groups(self):
        """(batch entry, first row, rows, keys that its last row sees) of each whole task, in the driver's order."""
        lengths = self.case.lengths()
        entries = np.argsort(-lengths, kind="stable") if self.case.ragged else range(self.case.batch)
        heads = [entry for entry in entries for _ in range(self.case.kv_heads)]
        groups, body = range(self.row_tasks - 1, -1, -1), len(heads) - self.tail
        order = [(entry, n) for entry in heads[:body] for n in groups]
        for entry, n in order + [(entry, n) for n in groups for entry in heads[body:]]:
            first = n * self.rows_per_task
            count = min(self.rows - first, self.rows_per_task)
            yield entry, first, count, self.seen(int(lengths[entry]), (first + count - 1) // self.group)

    def seen(self, length, query):
        if not self.case.is_causal:
            return length
        offset = self.case.kv_len - self.case.q_len if self.case.is_causal == "lower_right" else 0
        return max(0, min(length, query + offset + 1))

    def attention(self, cost):
        """Phases of task costs; cost takes the rows and keys of a task."""
        if not self.split:
            return [[cost(count, keys) for _, _, count, keys in self.row_groups()]]
        unit, attend, merge = self.config["key_split"], [], []
        for _, _, count, keys in self.row_groups():
            parts = [max(0, min(unit, keys - n * unit)) for n in range(self.splits)]
            attend += [cost(count, part) if part else 0.0 for part in parts]
            state = count * self.item * (self.case.head_dim + 2)
            merge.append(sum(state for part in parts if part) / MERGE_RATE)
        return [attend, merge]

    def projections(self):
        """Numbers of multiplications: those of the tasks that project queries, keys and values, and of the output's."""
        case, n = self.case, self.case.num_hiddens
        rows = np.arange(case.batch * case.q_len)
        read = rows % case.q_len < np.repeat(case.lengths(), case.q_len)
        blocks = [slice(first, first + CONSTANTS["ROWS"]) for first in range(0, len(rows), CONSTANTS["ROWS"])]
        width = CONSTANTS["COLUMN_TILES"] * self.col_tile
        widths = [min(width, n - first) for first in range(0, n, width)]
        whole = [len(rows[b]) * n * w for b in blocks for w in widths]
        seen = [int(read[b].sum()) * n * w for b in blocks for w in widths]
        return whole + seen + seen, whole

    def packs(self):
        """Numbers that each packing task copies."""
        if self.case.batch * self.case.q_len < CONSTANTS["PACK_ROWS"]:
            return []
        n = self.case.num_hiddens
        return [n * min(self.col_tile, n - first) for _ in range(4) for first in range(0, n, self.col_tile)]


# ---- sizes of tasks, measured


def typical(call):
    """Median seconds of a call in about 5 ms of repeats."""
    once = min(seconds(call, 1) for _ in range(2))
    number = max(1, int(1e-3 / max(once, 1e-7)))
    return statistics.median(seconds(call, number) for _ in range(1 if once > 0.05 else 5))


class TaskCost:
    """Seconds of one task on one thread: a call that is just this task, without what every call costs."""

    def __init__(self, case, group):
        self.case, self.group, self.curves = case, group, {}
        self.overhead = typical(of_module(mha_fast, replace(case, **self.shape(1, 1), head_dim=1)))

    def shape(self, rows, keys):
        return {
            "kind": "attention", "layout": "bhld", "batch": 1, "ragged": False, "num_heads": self.group,
            "num_kv_heads": 1, "q_len": max(1, rows // self.group), "kv_len": keys,
            "is_causal": "lower_right" if self.case.is_causal else "",
        }  # fmt: skip

    def measured(self, rows, keys):
        call = of_module(mha_fast, replace(self.case, **self.shape(rows, keys)))
        return max(typical(call) - self.overhead, 1e-8)

    def prepare(self, sizes):
        """Measure the sizes (rows, keys) that occur, or some of them to interpolate between."""
        for rows in {rows for rows, _ in sizes}:
            keys = sorted({keys for r, keys in sizes if r == rows and keys})
            picked = sorted({keys[i] for i in np.linspace(0, len(keys) - 1, SAMPLES).astype(int)}) if keys else []
            self.curves[rows] = (picked, [self.measured(rows, n) for n in picked])

    def __call__(self, rows, keys):
        return float(np.interp(keys, *self.curves[rows])) if keys else 0.0


class CostModel:
    """Costs of a case's tasks, scaled so that their sum is the measured call on one thread."""

    def __init__(self, case, config):
        self.case, self.config = case, config
        plans = [Plan(case, config, threads) for threads in (1, *THREADS)]
        sizes = set()
        for plan in plans:
            plan.attention(lambda rows, keys: sizes.add((rows, keys)) or 0.0)
        self.attention = TaskCost(case, plans[0].group)
        self.attention.prepare(sizes)
        self.whole = typical(of_module(mha_fast, case))
        attention = sum(plans[0].attention(self.attention)[0])
        self.sum_of_parts = attention / self.whole
        self.scale = 1.0 if case.kind == "layer" else self.whole / attention
        if case.kind == "layer":
            weight = np.ones((case.num_hiddens, case.num_hiddens), case.dtype)
            copying = typical(lambda: [weight[:, n : n + 64].copy() for n in range(0, case.num_hiddens, 64)])
            self.copy_cost = copying / weight.size
            packing = sum(plans[0].packs()) * self.copy_cost
            self.product_cost = (self.whole - attention - packing) / sum(map(sum, plans[0].projections()))

    def phases(self, threads):
        plan = Plan(self.case, self.config, threads)
        attention = [[x * self.scale for x in phase] for phase in plan.attention(self.attention)]
        if self.case.kind != "layer":
            return plan.threads, attention
        first, last = ([x * self.product_cost for x in phase] for phase in plan.projections())
        packing = [x * self.copy_cost for x in plan.packs()]
        return plan.threads, [phase for phase in (packing, first, *attention, last) if phase]


# ---- the schedule


def makespan(phases, threads):
    """Seconds until the last phase is over: whoever is free takes the next task."""
    now = 0.0
    for phase in phases:
        free, handed_out = [now] * threads, now
        for cost in phase:
            start = max(heapq.heappop(free), handed_out)
            handed_out = start + DISPATCH
            heapq.heappush(free, start + cost)
        now = max(free)
    return now


def all_sorted(phase, threads):
    return sorted(phase, reverse=True)


def end_sorted(phase, threads):
    return phase[: -4 * threads] + sorted(phase[-4 * threads :], reverse=True)


def tasks_a_thread(phases, threads):
    """Of the phase that has fewest, among those with a twentieth of the work."""
    work = sum(map(sum, phases))
    return min(len([x for x in phase if x]) / threads for phase in phases if sum(phase) >= work / 20)


def traffic(case, plan):
    """Bytes that a call has to move between memory and caches, and bytes of K and V that its tasks read from caches."""
    item = np.dtype(case.dtype).itemsize
    width = case.head_dim * item
    kv = sum(keys for *_, keys in plan.row_groups()) * 2 * width
    if case.kind == "layer":
        tokens, n = case.batch * case.q_len, case.num_hiddens
        blocks = divide_up(tokens, CONSTANTS["ROWS"])
        # input and output, Q, K, V and joined heads written and read; weights read, packed, and read by each block
        return item * (tokens * n * 10 + 3 * 4 * n * n), kv + item * blocks * 4 * n * n
    queries = 2 * case.batch * case.num_heads * case.q_len * width
    mask = {"": 0, "bool": case.q_len * case.kv_len, "bias": case.num_heads * case.q_len * case.kv_len * item}
    return case.kv_bytes() + queries + mask[case.mask], kv


def row_of(case, config):
    """The case's line of each table, and the ratios that miss 1.1 with the order that would mend them."""
    model = CostModel(case, config)
    ratios, misses = [], []
    for threads in THREADS:
        used, phases = model.phases(threads)
        ideal = sum(map(sum, phases)) / threads
        ratio = makespan(phases, used) / ideal
        enough = tasks_a_thread(phases, threads) >= ENOUGH
        ratios.append(f"{ratio:.2f}" if enough else f"({ratio:.2f})")
        if enough and ratio > 1.1:
            first, last = (
                makespan([order(p, used) for p in phases], used) / ideal for order in (all_sorted, end_sorted)
            )
            misses.append(
                f"{case.name} at {threads} threads: {ratio:.2f}; all tasks longest first {first:.2f}, only the last "
                f"four a thread longest first {last:.2f}"
            )
    _, phases = model.phases(THREADS[0])
    longest = max(max(phase) for phase in phases)
    tasks = " + ".join(str(len(phase)) for phase in phases)
    balance = [case.name, tasks, f"{longest * 1e6:.1f}", f"{model.sum_of_parts:.2f}", *ratios]
    memory, cache = traffic(case, Plan(case, config, THREADS[0]))
    one, at_64 = model.whole * 1e9, model.whole / 64 * 1e9
    rates = [f"{memory / one:.2f}", f"{memory / at_64:.0f}", f"{cache / one:.2f}", f"{cache / at_64:.0f}"]
    return balance, [case.name, f"{memory / 1e6:.1f}", f"{cache / 1e6:.1f}", *rates], misses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", metavar="GLOB")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    args = parser.parse_args(arguments)
    from tqdm import tqdm

    about = one_line(environment())
    mha_fast.set_num_threads(1)
    config = mha_fast.show_config()
    if not config["openmp"]:
        parser.error("this build has no OpenMP, so the core plans for one thread only")
    chosen = [c for c in CASES if any(fnmatch.fnmatch(c.name, p) for p in args.rows.split(","))]
    # Those of one thread, of another level and of a few microseconds have no tasks to hand out here.
    chosen = [c for c in chosen if not c.threads and not c.level and c.limit != "call"]
    # The simulation knows neither half types nor windows, packed sequences nor caches.
    known = {"kind": ("attention", "layer"), "dtype": ("float32", "float64"), "window": (0,)}
    chosen = [c for c in chosen if all(getattr(c, name) in values for name, values in known.items())]
    found = [row_of(case, config) for case in tqdm(chosen, unit="case", leave=False, disable=not sys.stderr.isatty())]
    balance_head = ["case", "tasks at 4 threads", "longest, µs", "sum/call", *map(str, THREADS)]
    memory_head = [
        "case",
        "memory, MB",
        "from caches, MB",
        "memory GB/s, 1 thread",
        "64 threads",
        "caches GB/s, 1 thread",
    ]
    balance = markdown_table(balance_head, [row for row, _, _ in found])
    memory = markdown_table([*memory_head, "64 threads"], [row for _, row, _ in found])
    missed = [f"- {text}" for *_, misses in found for text in misses]
    missed = "\n".join(missed) or "Every row that has at least 8 tasks a thread is within 1.10.\n"
    print(f"{balance}\n\n{memory}\n\n{missed}\n\n{about}")
    if args.write:
        fill(args.write, {"balance": balance, "traffic": memory, "missed": missed + "\n", "environment": about})


if __name__ == "__main__":
    main()
