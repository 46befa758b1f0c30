"""From results.json to a table in Markdown and pictures: `python -m bench.report results.json FOLDER`."""

import argparse
import json
import math
import statistics
from pathlib import Path

from bench.machine import one_line

COLOURS = {
    "mha_fast": "#0b6e4f",
    "plain": "#8d99ae",
    "reference": "#c9ada7",
    "torch": "#e4572e",
    "onnxruntime": "#3a86ff",
}
LABELS = {"plain": "NumPy formula", "reference": "mha_fast.reference"}


def medians(row):
    return {name: statistics.median(times) for name, times in row["seconds"].items() if times}


def rate(row, seconds):
    """What a call reaches, in the unit of its limit."""
    if row["limit"] == "call":
        return f"{seconds * 1e6:.2f} us"
    if row["limit"] == "read":
        return f"{row['kv_bytes'] / seconds / 1e9:.1f} GB/s"
    return f"{row['flops'] / seconds / 1e9:.0f} GFLOP/s"


def share(row, seconds):
    """The part of the limit that a call reaches, or None."""
    return row["limit_seconds"] / seconds if row["limit"] != "call" and "limit_seconds" in row else None


def fastest_other(row):
    others = {name: t for name, t in medians(row).items() if name != "mha_fast"}
    return min(others, key=others.get, default=None)


def head(contestants):
    others = [name for name in contestants if name != "mha_fast"]
    return ["case", "mha_fast ms", "reaches", "of limit", *others]


def cells(row, contestants):
    median = medians(row)
    if "mha_fast" not in median:
        return [row["name"], "-", "-", "-", *["-"] * (len(contestants) - 1)]
    mine = median["mha_fast"]
    part = share(row, mine)
    ratios = [f"{median[x] / mine:.2f}" if x in median else "n/a" for x in contestants if x != "mha_fast"]
    return [row["name"], f"{mine * 1e3:.4g}", rate(row, mine), f"{part:.1%}" if part else "-", *ratios]


WIDTHS = [28, 13, 16, 10]


def table_line(texts):
    widths = WIDTHS + [13] * (len(texts) - len(WIDTHS))
    return texts[0].ljust(widths[0]) + "".join(t.rjust(w) for t, w in zip(texts[1:], widths[1:], strict=True))


def table_head(contestants):
    return table_line(head(contestants)) + "   (their time over mha_fast's)"


def table_row(row, contestants):
    missing = row["absent"].get("mha_fast")
    return table_line(cells(row, contestants)) + (f"   ({missing})" if missing else "")


def summary(rows):
    """How mha_fast stands to the fastest of the others, row by row."""
    ratios = {}
    for row in rows:
        if (other := fastest_other(row)) and "mha_fast" in row["seconds"]:
            ratios[row["name"]] = medians(row)[other] / medians(row)["mha_fast"]
    if not ratios:
        return "no other contestant took part"
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    lost = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio < 1]
    return (
        f"The fastest other contestant of each of {len(ratios)} rows takes {mean:.2f} times as long (geometric mean); "
        f"rows where another is faster: {', '.join(lost) or 'none'}."
    )


def markdown(results):
    lines = [head(results["contestants"])]
    lines += [["---"] + ["---:"] * (len(lines[0]) - 1)]
    lines += [cells(row, results["contestants"]) for row in results["rows"]]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\nThe others' columns: their median time over mha_fast's.\n\n{summary(results['rows'])}\n\n" + (
        f"Environment: {one_line(results['environment'])}.\n"
    )


# ---- pictures


def figure(results, title, width=8.0, height=4.2, columns=1):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "mha_fast", "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False, "figure.facecolor": "white",
    }  # fmt: skip
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=(width, height), squeeze=False, sharey=True)
    drawn.suptitle(title)
    about = results["environment"]
    note = f"{about['cpu']}; {about['threads']} threads; mha_fast {about['mha_fast']}; numpy {about['numpy']}"
    drawn.text(0.01, 0.01, note, fontsize=6.5, color="#555555")
    return drawn, axes[0]


def save(drawn, folder, name):
    from matplotlib import pyplot

    drawn.tight_layout(rect=(0, 0.035, 1, 1))
    path = folder / f"{name}.svg"
    drawn.savefig(path, metadata={"Date": None})
    pyplot.close(drawn)
    return path


def label(name):
    return LABELS.get(name, name)


def lengths_picture(results, folder):
    """Fraction of the FMA peak by sequence length."""
    depths = {}
    for row in results["rows"]:
        what, length, *depth = row["name"].split("-")
        if what == "prefill" and depth in (["d64"], ["d128"]) and "limit_seconds" in row:
            depths.setdefault(depth[0], []).append((int(length), row))
    depths = {depth: sorted(rows, key=lambda x: x[0]) for depth, rows in depths.items() if len(rows) > 1}
    if not depths:
        return None
    drawn, axes = figure(results, "Attention, float32: fraction of the FMA peak", columns=len(depths))
    for ax, (depth, rows) in zip(axes, depths.items(), strict=True):
        for name in results["contestants"]:
            points = [(n, share(row, medians(row)[name])) for n, row in rows if name in row["seconds"]]
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", color=COLOURS[name], label=label(name))
        ax.set_xscale("log", base=2)
        ax.set_xticks([n for n, _ in rows], [str(n) for n, _ in rows])
        ax.minorticks_off()
        ax.set_ylim(0, 1)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        ax.grid(axis="y", color="#dddddd")
        ax.set_xlabel(f"queries = keys, head_dim {depth[1:]}")
    axes[0].legend(loc="center right", fontsize=8)
    return save(drawn, folder, "fraction_of_peak")


def bars_picture(results, rows, title, axis, value):
    """Groups of bars: a group a case, a bar a contestant."""
    rows = [row for row in rows if "mha_fast" in row["seconds"]]
    if not rows:
        return None
    drawn, (ax,) = figure(results, title, width=max(8.0, 1.5 + 1.1 * len(rows)))
    names, width = results["contestants"], 0.8 / len(results["contestants"])
    for n, who in enumerate(names):
        heights = [value(row, who) if who in row["seconds"] else 0 for row in rows]
        places = [i + (n - (len(names) - 1) / 2) * width for i in range(len(rows))]
        drawn_bars = ax.bar(places, heights, width, color=COLOURS[who], label=label(who))
        texts = [f"{h:.1f}" if h else "n/a" for h in heights]
        ax.bar_label(drawn_bars, texts, fontsize=7)
    texts = [row["name"].replace("layer-", "").replace("decode-", "").replace("-", "\n") for row in rows]
    ax.set_xticks(range(len(rows)), texts)
    ax.set_ylabel(axis)
    return drawn, ax


def decode_picture(results, folder):
    rows = [row for row in results["rows"] if row["name"].startswith(("decode", "cache"))]
    made = bars_picture(
        results, rows, "Decoding, float32 where no dtype is named: K and V read", "GB/s",
        lambda row, who: row["kv_bytes"] / medians(row)[who] / 1e9,
    )  # fmt: skip
    if not made:
        return None
    drawn, ax = made
    limits = [max(x["read"] for x in row["limits"]) for row in rows if "limit_seconds" in row]
    if limits:
        ax.axhline(max(limits), color="black", linestyle="--", linewidth=1, label="read bandwidth, measured")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return save(drawn, folder, "decode_bandwidth")


def layer_picture(results, folder):
    rows = [row for row in results["rows"] if row["name"].startswith("layer") and "plain" in row["seconds"]]
    made = bars_picture(
        results, rows, "Attention layers: speed-up over the NumPy formula", "times as fast",
        lambda row, who: medians(row)["plain"] / medians(row)[who],
    )  # fmt: skip
    if not made:
        return None
    drawn, ax = made
    ax.axhline(1, color="#555555", linewidth=0.8)
    ax.tick_params(axis="x", labelsize=8)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return save(drawn, folder, "layer_speedup")


def every_row_picture(results, folder):
    """mha_fast beside the fastest other contestant, every row, those that it loses too."""
    rows = [row for row in results["rows"] if "mha_fast" in row["seconds"] and fastest_other(row)][::-1]
    if not rows:
        return None
    drawn, (ax,) = figure(
        results, "Every case: time of the fastest other over time of mha_fast", height=1.6 + 0.19 * len(rows)
    )
    others = [fastest_other(row) for row in rows]
    ratios = [medians(row)[other] / medians(row)["mha_fast"] for row, other in zip(rows, others, strict=True)]
    ax.set_xscale("log")
    lengths = [ratio - 1 for ratio in ratios]
    bars = ax.barh(range(len(rows)), lengths, left=1, color=[COLOURS[other] for other in others], height=0.75)
    ax.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=7, padding=2)
    ax.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.axvline(1, color="black", linewidth=1)
    ax.set_xticks([x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if min(ratios) / 2 < x < max(ratios) * 2])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel("right of 1: mha_fast is faster")
    for other in dict.fromkeys(others):
        ax.barh(0, 0, left=1, color=COLOURS[other], label=f"fastest other: {label(other)}")
    ax.legend(loc="best", fontsize=8)
    return save(drawn, folder, "every_case")


def write_report(results, folder):
    """results.md and the pictures that the rows suffice for; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.md"]
    paths[0].write_text(markdown(results))
    print(summary(results["rows"]))
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("no pictures: matplotlib is not installed")
        return paths
    pictures = (lengths_picture, decode_picture, layer_picture, every_row_picture)
    return paths + [path for draw in pictures if (path := draw(results, folder))]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    for path in write_report(json.loads(args.results.read_text()), args.folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
