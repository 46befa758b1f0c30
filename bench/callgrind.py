"""Instruction counts of ten fixed calls beside a stored baseline: `python -m bench.callgrind [--update]`.

Valgrind's callgrind counts what happens inside the call, on one thread, at the levels that it can run (it knows no
AVX-512). "core" is what the extension itself executes, "total" with all that it calls. A core count that is more than
3 % above the baseline fails; a change that means it takes `--update` along. Counts of another compiler are only shown:
then, and where nothing can be counted, the exit status is 77.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.cases import Case, placed

BASELINE = Path(__file__).with_suffix(".json")
LEVELS = ("avx2", "scalar")
ALLOWED = 0.03
CALLS = 4  # of each case; the first is not counted


class PlacedCase(Case):
    """A case whose inputs begin at a cache line: a level may copy values that lie across lines."""

    def arrays(self):
        inputs, weights, options = super().arrays()
        return tuple(map(at_line, inputs)), weights, options


def at_line(array):
    copy = placed(array.shape, array.dtype, 0)
    copy[...] = array
    return copy


CASES = [
    PlacedCase("article", 2, 5, 4, 6, 20),
    PlacedCase("prefill-d64", 1, 1, 192, 192, 64),
    PlacedCase("prefill-197-d33", 1, 1, 197, 197, 33),
    PlacedCase("prefill-f64", 1, 1, 96, 96, 64, dtype="float64"),
    PlacedCase("causal-gqa", 1, 2, 128, 128, 64, num_kv_heads=1, is_causal="upper_left"),
    PlacedCase("ragged", 4, 1, 96, 96, 64, ragged=True),
    PlacedCase("bool-mask", 1, 1, 128, 128, 32, mask="bool"),
    PlacedCase("bias", 1, 1, 128, 128, 32, mask="bias"),
    PlacedCase("decode-gqa", 1, 4, 1, 2048, 64, num_kv_heads=1),
    PlacedCase("layer", 1, 2, 64, 64, 32, kind="layer"),
]
# What Python calls for a kind of case: a pattern that does not match the inner function, which would switch counting
# off again. One pattern a run: callgrind mixes up two that have their "*" at the same place.
ENTRIES = {
    "attention": "__pyx_pw_8mha_fast_5_core_*scaled_dot_product_attention",
    "layer": "__pyx_pw_8mha_fast_5_core_*layer_forward",
}
DIVIDER = "mha_compiler"  # only build_info calls it


def make_calls(kind):
    """What runs under valgrind: the cases of a kind."""
    import mha_fast
    from bench.contestants import of_module
    from mha_fast import _config, _core

    mha_fast.set_num_threads(1)
    for level in LEVELS:
        _config.set_level(level)
        for case in filter(lambda case: case.kind == kind, CASES):
            call = of_module(mha_fast, case)
            for _ in range(CALLS):
                call()
                _core.build_info()  # ends a dump


def counts_of(dump):
    """Instructions of the extension, and of everything, in one dump of callgrind."""
    names, current = {}, ""
    core = total = 0
    skip = False  # the line after "calls=" repeats what the callee's own lines say
    for line in dump.read_text().splitlines():
        if line.startswith("ob="):
            number, _, name = line[3:].partition(" ")
            current = names.setdefault(number, name)
        elif line.startswith("calls="):
            skip = True
        elif line[:1] in "+-*0123456789" and line:
            cost = int(line.split()[1])
            if not skip:
                total += cost
                core += cost if "/_core." in current else 0
            skip = False
        elif line.startswith("cob="):
            number, _, name = line[4:].partition(" ")
            names.setdefault(number, name)
    return core, total


def run_valgrind(kind):
    """The counts of the calls of one kind of case, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "dump")
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", f"--toggle-collect={ENTRIES[kind]}"]
        command += [f"--dump-before={DIVIDER}", sys.executable, "-m", "bench.callgrind", "--make-calls", kind]
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"valgrind failed with exit status {ran.returncode}:\n{ran.stderr[-3000:]}")
        dumps = sorted(Path(folder).glob("dump.*"), key=lambda path: int(path.name.partition(".")[2]))
        # Whoever else asks for build_info ends a dump in which nothing was counted.
        return [counts for counts in map(counts_of, dumps) if counts[1]]


def measure():
    """{level: {case: {"core": n, "total": n}}}, means of the counted calls."""
    found = {level: {case.name: None for case in CASES} for level in LEVELS}
    with ThreadPoolExecutor() as pool:
        runs = dict(zip(ENTRIES, pool.map(run_valgrind, ENTRIES), strict=True))
    for kind, counts in runs.items():
        rows = [(level, case.name) for level in LEVELS for case in CASES if case.kind == kind]
        if len(counts) != len(rows) * CALLS:
            raise SystemExit(f"{len(counts)} of {len(rows) * CALLS} calls were counted: are the symbols stripped?")
        for n, (level, name) in enumerate(rows):
            counted = counts[n * CALLS + 1 : (n + 1) * CALLS]
            core, total = (round(sum(column) / len(counted)) for column in zip(*counted, strict=True))
            found[level][name] = {"core": core, "total": total}
    return found


def compiler():
    import mha_fast

    return mha_fast.show_config()["compiler"]


def report(counts, baseline):
    """Prints the table; gives the rows that grew too much."""
    worse = []
    print(f"{'':24}{'core':>13}{'baseline':>13}{'change':>9}{'total':>13}{'change':>9}")
    for level, rows in counts.items():
        for name, now in rows.items():
            before = baseline.get("counts", {}).get(level, {}).get(name)
            changes = {x: now[x] / before[x] - 1 if before else None for x in now}
            texts = {x: f"{change:+.2%}" if change is not None else "new" for x, change in changes.items()}
            was = before["core"] if before else "-"
            label = f"{level} {name}"
            print(f"{label:24}{now['core']:13}{was:>13}{texts['core']:>9}{now['total']:13}{texts['total']:>9}")
            if before is None or changes["core"] > ALLOWED:
                worse.append(label)
    return worse


def missing():
    """Why nothing can be counted here, or None."""
    import mha_fast

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the baseline is of x86-64, and this is {platform.machine()}"
    if not shutil.which("valgrind"):
        return "valgrind is not installed"
    if absent := set(LEVELS) - set(mha_fast.show_config()["levels_usable"]):
        return f"level {', '.join(sorted(absent))} is not usable here"
    return None


def skip(reason):
    """Ends the program as .ci/run knows a check that judged nothing."""
    print(f"SKIPPED: {reason}")
    raise SystemExit(77)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help=f"store the counts in bench/{BASELINE.name}")
    parser.add_argument("--make-calls", choices=ENTRIES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.make_calls:
        return make_calls(args.make_calls)
    if reason := missing():
        skip(reason)
    counts = measure()
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    worse = report(counts, baseline)
    if args.update:
        BASELINE.write_text(json.dumps({"compiler": compiler(), "counts": counts}, indent=1) + "\n")
        print(f"stored in bench/{BASELINE.name}")
    elif baseline.get("compiler") != compiler():
        skip(f"not judged: the baseline is of {baseline.get('compiler')}, this build of {compiler()}")
    elif worse:
        raise SystemExit(
            f"more than {ALLOWED:.0%} above the baseline, or not in it: {', '.join(worse)}. If that is meant, "
            "`python -m bench.callgrind --update` goes with the change."
        )


if __name__ == "__main__":
    main()
