"""Two results of `python -m bench.run --json` side by side: `python -m bench.compare before.json after.json`."""

import argparse
import json
import statistics
from pathlib import Path


def medians(path):
    rows = json.loads(path.read_text())["rows"]
    return {row["name"]: {who: statistics.median(t) for who, t in row["seconds"].items()} for row in rows}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--of", default="mha_fast", help="the contestant to compare")
    args = parser.parse_args(arguments)
    before, after = medians(args.before), medians(args.after)
    print(f"{args.of:20}{'before ms':>12}{'after ms':>12}{'before/after':>14}{'... of plain':>14}")
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, {}), after.get(name, {})
        cells = [f"{row[args.of] * 1e3:12.3f}" if args.of in row else f"{'-':>12}" for row in (old, new)]
        # The plain formula did not change between the two runs: its ratio is the machine's own drift.
        cells += [f"{old[x] / new[x]:14.2f}" if x in old and x in new else f"{'-':>14}" for x in (args.of, "plain")]
        print(f"{name:20}" + "".join(cells))


if __name__ == "__main__":
    main()
