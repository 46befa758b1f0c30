"""Two results.json of `python -m bench` side by side, every row: `python -m bench.compare before.json after.json`."""

import argparse
import json
import math
from pathlib import Path

from bench.report import medians, share


def load(path):
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def cell(number, form):
    return f"{number:{form}}" if number is not None else "-"


def compared(before, after, who):
    """Times, their ratio, the shares of the limit, and the ratio of the plain formula's times."""
    rows = [row for row in (before, after) if row]
    times = [medians(row).get(who) if row else None for row in (before, after)]
    shares = [share(row, t) if row and t else None for row, t in zip((before, after), times, strict=True)]
    drift = [medians(row).get("plain") for row in rows] if len(rows) == 2 else [None]
    return (
        [cell(t and t * 1e3, ".4g") for t in times],
        times[0] / times[1] if all(times) else None,
        [cell(s, ".1%") for s in shares],
        drift[0] / drift[1] if all(drift) else None,
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--of", default="mha_fast", metavar="NAME", help="the contestant to compare")
    args = parser.parse_args(arguments)
    before, after = load(args.before), load(args.after)
    head = ["before ms", "after ms", "before/after", "limit before", "after", "plain b/a"]
    print(f"{args.of:28}" + "".join(f"{x:>13}" for x in head))
    ratios = []
    for name in dict.fromkeys([*before, *after]):
        times, ratio, shares, drift = compared(before.get(name), after.get(name), args.of)
        texts = [*times, cell(ratio, ".3f"), *shares, cell(drift, ".3f")]
        print(f"{name:28}" + "".join(f"{x:>13}" for x in texts))
        ratios += [ratio] if ratio else []
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\nbefore/after: geometric mean {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rows")
    # The plain formula did not change between the two runs: its ratio is the machine's own drift.
    print("plain b/a: the NumPy formula's time before over after, the drift of the machine itself")


if __name__ == "__main__":
    main()
