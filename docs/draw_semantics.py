"""Draw the pictures of docs/semantics.md into docs/img, from what `mha_fast.reference` does.

pip install "mha_fast[plot]"
python docs/draw_semantics.py

No rule of visibility stands here: a cell is filled where the reference gives the key a weight above 0. Each file holds
what it shows as text too (`descriptions`), so that a test can tell whether the pictures are those of the present code.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mha_fast import reference

FOLDER = Path(__file__).resolve().parent / "img"

SEEN, WRITTEN, HIDDEN, NOTHING = "#2f6db3", "#1f9e89", "#e3e8ef", "#c2410c"
TEXT, MUTED = "#1f2933", "#6b7785"
HEAD_COLOURS = ("#2f6db3", "#168a77", "#b8700f", "#9c3f86")
SANS, MONO = "sans-serif", "monospace"

# Inches of one cell; everything on a sheet of matrices is placed in units of cells.
CELL = 0.19
# Inches of one character: of code, and of the legend on average.
CODE_WIDTH, LEGEND_WIDTH = 0.0636, 0.049


class Panel(NamedTuple):
    """Who sees whom in one call. Positions are what the note says, for the eye; the matrix is the reference's."""

    code: str  # what the caller wrote
    note: str
    seen: np.ndarray  # (L, S) bool
    positions: np.ndarray | None = None  # (L,): where each query stands among the keys
    written: np.ndarray | None = None  # (S,) bool: tokens that the call wrote into a cache


# ---------------------------------------------------------------- what the reference does


def seen(q_len, kv_len, *, batch=1, **options):
    """(batch, L, S) bool: keys that get a weight where all scores are alike."""
    query, key = np.zeros((batch, 1, q_len, 1)), np.zeros((batch, 1, kv_len, 1))
    _, weights = reference.scaled_dot_product_attention(query, key, key, return_weights=True, **options)
    return weights[:, 0] > 0


def causal():
    def panel(code, note, q_len, kv_len, offset, **options):
        return Panel(code, note, seen(q_len, kv_len, **options)[0], np.arange(q_len) + offset)

    upper, lower = {"is_causal": "upper_left"}, {"is_causal": "lower_right"}
    given = {"is_causal": True, "q_offset": 1}
    return [
        panel('is_causal="upper_left"', "4 queries, 7 keys: offset 0", 4, 7, 0, **upper),
        panel('is_causal="lower_right"', "4 queries, 7 keys: offset 7 - 4 = 3", 4, 7, 3, **lower),
        panel("is_causal=True, q_offset=1", "4 queries, 7 keys", 4, 7, 1, **given),
        panel('is_causal="upper_left"', "7 queries, 4 keys: offset 0", 7, 4, 0, **upper),
        panel('is_causal="lower_right"', "7 queries, 4 keys: offset 4 - 7 = -3", 7, 4, -3, **lower),
        panel("is_causal=True, q_offset=1", "7 queries, 4 keys", 7, 4, 1, **given),
    ]


def windows():
    def panel(code, note, q_len, kv_len, offset, **options):
        return Panel(code, note, seen(q_len, kv_len, **options)[0], np.arange(q_len) + offset)

    given, lower = {"is_causal": True, "q_offset": 3}, {"is_causal": "lower_right"}
    return [
        panel("window_size=(2, 1)", "2 back, itself, 1 ahead", 7, 7, 0, window_size=(2, 1)),
        panel("window_size=(2, -1)", "2 back, all ahead", 7, 7, 0, window_size=(2, -1)),
        panel("window_size=(0, 0)", "itself alone", 7, 7, 0, window_size=(0, 0)),
        panel("window_size=(2, 1), q_offset=3", "counted from i + 3", 4, 9, 3, window_size=(2, 1), q_offset=3),
        panel("window_size=(2, 1),\nis_causal=True, q_offset=3", "nothing ahead", 4, 9, 3, window_size=(2, 1), **given),
        panel(
            'window_size=(2, -1),\nis_causal="lower_right"', "offset 9 - 4 = 5", 4, 9, 5, window_size=(2, -1), **lower
        ),
    ]


def lengths():
    entries = seen(4, 7, batch=2, valid_lens=[5, 2])
    aligned = seen(4, 7, batch=2, valid_lens=[5, 2], is_causal="lower_right")
    return [
        Panel("valid_lens=[5, 2]", "entry 0 of the batch", entries[0]),
        Panel("valid_lens=[5, 2]", "entry 1", entries[1]),
        Panel("valid_lens=[[1, 2.5, 0, 9]]", "each query its own", seen(4, 7, valid_lens=[[1, 2.5, 0, 9]])[0]),
        Panel('valid_lens=[5, 2],\nis_causal="lower_right"', "entry 0: offset 5 - 4 = 1", aligned[0], np.arange(4) + 1),
        Panel(
            'valid_lens=[5, 2],\nis_causal="lower_right"', "entry 1: offset 2 - 4 = -2", aligned[1], np.arange(4) - 2
        ),
        Panel("valid_lens=[[1, 2, 3, 4]]", "causal by lengths", seen(4, 7, valid_lens=[[1, 2, 3, 4]])[0]),
    ]


def combined():
    mask = np.ones((4, 7), bool)
    mask[:, 2] = False
    each = (
        ('is_causal="lower_right"', "offset 7 - 4 = 3", {"is_causal": "lower_right"}),
        ("window_size=(3, -1)", "3 back from i + 3", {"window_size": (3, -1), "q_offset": 3}),
        ("valid_lens=[6]", "key 6 is padding", {"valid_lens": [6]}),
        ("attn_mask=mask", "key 2 is out", {"attn_mask": mask}),
    )
    panels = [Panel(code, note, seen(4, 7, **options)[0]) for code, note, options in each]
    together = {"is_causal": True, "q_offset": 3, "window_size": (3, -1), "valid_lens": [6], "attn_mask": mask}
    return [*panels, Panel("all of them", "with q_offset=3", seen(4, 7, **together)[0], np.arange(4) + 3)]


def sequences():
    def packed(q_starts, k_starts, **options):
        tokens_q, tokens_k = q_starts[-1], k_starts[-1]
        query, key = np.zeros((tokens_q, 1, 1)), np.zeros((tokens_k, 1, 1))
        # Each token's value is a column of its own, so that the result is the weights.
        value = np.eye(tokens_k)[:, None]
        return reference.varlen_attention(query, key, value, q_starts, k_starts, **options)[:, 0] > 0

    def cached(cache_seqlens, new, max_len, **options):
        batch = len(cache_seqlens)
        k_cache = np.zeros((batch, 1, max_len, 1))
        v_cache = np.zeros((batch, 1, max_len, max_len))
        v = np.zeros((batch, 1, new, max_len))
        for b, length in enumerate(cache_seqlens):
            v_cache[b, 0, :length] = np.eye(max_len)[:length]
            v[b, 0] = np.eye(max_len)[length : length + new]
        before = v_cache.copy()
        query = np.zeros((batch, 1, new, 1))
        out = reference.attention_with_kvcache(
            query, k_cache, v_cache, query, v, cache_seqlens=cache_seqlens, **options
        )
        return out[:, 0] > 0, (v_cache != before).any(axis=-1)[:, 0]

    (first, second), (first_written, second_written) = cached([5, 2], 3, 9)
    (narrow,), (narrow_written,) = cached([5], 3, 9, window_size=(2, 0))
    starts = [0, 3, 4, 7]
    return [
        Panel(
            "varlen_attention(q, k, v,\n[0, 3, 4, 7])",
            "three sequences, no padding",
            packed(starts, starts),
        ),
        Panel(
            "varlen_attention(q, k, v,\n[0, 3, 4, 7], is_causal=True)",
            "lower-right in each",
            packed(starts, starts, is_causal=True),
        ),
        Panel(
            "varlen_attention(q, k, v,\n[0, 2, 5], [0, 4, 9], is_causal=True)",
            "2 and 3 queries, 4 and 5 keys",
            packed([0, 2, 5], [0, 4, 9], is_causal=True),
        ),
        Panel(
            "attention_with_kvcache(q, ..., k, v,\ncache_seqlens=[5, 2])",
            "entry 0: tokens 5 to 7 are new",
            first,
            np.arange(3) + 5,
            first_written,
        ),
        Panel(
            "attention_with_kvcache(q, ..., k, v,\ncache_seqlens=[5, 2])",
            "entry 1: tokens 2 to 4 are new",
            second,
            np.arange(3) + 2,
            second_written,
        ),
        Panel(
            "attention_with_kvcache(q, ..., k, v,\ncache_seqlens=5, window_size=(2, 0))",
            "one entry",
            narrow,
            np.arange(3) + 5,
            narrow_written,
        ),
    ]


def head_of(num_heads, num_kv_heads):
    """(num_heads,): the key/value head that each query head reads."""
    query, key = np.zeros((num_heads, 1, 1)), np.zeros((num_kv_heads, 1, 1))
    value = np.arange(num_kv_heads, dtype=float)[:, None, None]
    return reference.scaled_dot_product_attention(query, key, value, enable_gqa=True)[:, 0, 0].astype(int)


def one_score(scores, **options):
    """What becomes of each score: with one key, the log-sum-exp is the score itself."""
    query, one = np.asarray(scores, float)[None, :, None], np.ones((1, 1, 1))
    return reference.scaled_dot_product_attention(query, one, one, scale=1, return_lse=True, **options)[1][0]


def bias_by_distance(distances, num_heads):
    """(heads, distances): what the slopes of this many heads add to the score of a key so far back."""
    count = len(distances)
    query, one = np.zeros((num_heads, count, 1)), np.zeros((num_heads, 1, 1))
    slopes = reference.alibi_slopes(num_heads)
    options = {"alibi_slopes": slopes, "q_offset": int(distances[0]), "return_lse": True}
    return reference.scaled_dot_product_attention(query, one, one, **options)[1]


def share_of_keys(sinks, num_keys):
    """The sum of the weights of keys with score 0, for each sink."""
    heads = len(sinks)
    query, key = np.zeros((heads, 1, 1)), np.zeros((heads, num_keys, 1))
    _, weights = reference.scaled_dot_product_attention(query, key, key, sinks=sinks, return_weights=True)
    return weights.sum(axis=-1)[:, 0]


# Name of the file: its panels, how many stand in a row, and what stands before each.
SHEETS = {
    "causal": (causal, 3, ""),
    "windows": (windows, 3, ""),
    "lengths": (lengths, 3, ""),
    "combined": (combined, 5, " ∩∩∩="),
    "sequences": (sequences, 3, ""),
}
# Numbers of key/value heads that "heads" shows, for eight query heads.
KV_HEADS = (4, 2, 1)


def descriptions():
    """What each picture shows, as text: of matrices the rows, "#" for a key that is seen, "+" for one just written."""

    def rows(panel):
        written = np.zeros(panel.seen.shape[1], bool) if panel.written is None else panel.written
        return ["".join(row) for row in np.where(panel.seen, np.where(written, "+", "#"), ".")]

    shown = {
        name: [[panel.code, panel.note, rows(panel)] for panel in panels()] for name, (panels, _, _) in SHEETS.items()
    }
    shown["heads"] = {str(count): head_of(8, count).tolist() for count in KV_HEADS}
    shown["scores"] = {
        "softcap=30": one_score([-60, -30, 0, 30, 60], softcap=30.0).round(6).tolist(),
        "alibi_slopes(4)": bias_by_distance(np.arange(-16, 33), 4)[:, ::16].round(6).tolist(),
        "sinks, 8 keys": share_of_keys(np.array([-6.0, 0.0, 6.0]), 8).round(6).tolist(),
    }
    return {name: json.dumps(entry) for name, entry in shown.items()}


# ---------------------------------------------------------------- drawing


def sheet(panels, columns, signs):
    """A figure of matrices, `columns` of them in a row."""
    from matplotlib.figure import Figure

    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    # A column has room for the widest matrix with its numbers, and for the longest line of text above one.
    lines = [line for panel in panels for line in panel.code.split("\n")]
    columns_of_cells = max(panel.seen.shape[1] for panel in panels)
    wide = max(columns_of_cells + 3.2, max(map(len, lines)) * CODE_WIDTH / CELL + 1.8)
    heads = [1.4 + 0.85 * max(panel.code.count("\n") + 1 for panel in row) + 1.0 for row in rows]
    tall = [head + max(panel.seen.shape[0] for panel in row) + 0.9 for head, row in zip(heads, rows, strict=True)]
    width, height = 0.6 + wide * columns, sum(tall) + 1.5
    figure = Figure(figsize=(width * CELL, height * CELL), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()

    top = 0.2
    for row, head, size in zip(rows, heads, tall, strict=True):
        for column, panel in enumerate(row):
            left = 1.5 + wide * column
            _matrix(axes, left, top + head, panel)
            sign = signs[column : column + 1].strip()
            if sign:
                middle = top + head + panel.seen.shape[0] / 2
                axes.text(left - 2.0, middle, sign, ha="center", va="center", fontsize=15, color=MUTED)
        top += size
    _legend(axes, height - 0.85, panels)
    return figure


def _matrix(axes, left, top, panel):
    """One matrix with its corner at (left, top), its title above."""
    q_len, kv_len = panel.seen.shape
    small = {"fontsize": 6, "color": MUTED, "family": SANS}
    style = {"va": "baseline", "fontsize": 7.6, "color": TEXT, "family": MONO, "linespacing": 1.25}
    axes.text(left, top - 2.4, panel.code, **style)
    axes.text(left, top - 1.4, panel.note, va="baseline", ha="left", fontsize=7.2, color=MUTED, family=SANS)
    for j in range(kv_len):
        axes.text(left + j + 0.5, top - 0.25, str(j), va="bottom", ha="center", **small)
    for i in range(q_len):
        axes.text(left - 0.35, top + i + 0.5, str(i), va="center_baseline", ha="right", **small)

    written = np.zeros(kv_len, bool) if panel.written is None else panel.written
    _cells(axes, left, top, np.ones_like(panel.seen), HIDDEN)
    _cells(axes, left, top, panel.seen & ~written, SEEN)
    _cells(axes, left, top, panel.seen & written, WRITTEN)
    _lattice(axes, left, top, panel.seen.shape)
    if panel.positions is not None:
        for shown, colour in ((True, "white"), (False, MUTED)):
            i = [i for i, j in enumerate(panel.positions) if 0 <= j < kv_len and panel.seen[i, j] == shown]
            _dots(axes, left + panel.positions[i] + 0.5, top + np.array(i) + 0.5, colour)
    for i in np.flatnonzero(~panel.seen.any(axis=1)):
        axes.text(
            left + kv_len + 0.3,
            top + i + 0.5,
            "0",
            va="center",
            fontsize=7.2,
            color=NOTHING,
            family=SANS,
        )


def _cells(axes, left, top, where, colour):
    """The cells that are True, neighbours in a row as one rectangle, all as one path."""
    edges = np.diff(np.pad(where.astype(int), ((0, 0), (1, 1))))
    (i, first), (_, end) = np.argwhere(edges == 1).T, np.argwhere(edges == -1).T
    x, y = left + np.stack([first, end, end, first], axis=1), top + np.stack([i, i, i + 1, i + 1], axis=1)
    _path(axes, x, y, facecolor=colour, edgecolor="none")


def _lattice(axes, left, top, shape):
    """White lines between the cells of a matrix, and around it."""
    rows, columns = np.arange(shape[0] + 1), np.arange(shape[1] + 1)
    x = [(column, column) for column in columns] + [(0, shape[1]) for _ in rows]
    y = [(0, shape[0]) for _ in columns] + [(row, row) for row in rows]
    _path(axes, left + np.array(x), top + np.array(y), facecolor="none", edgecolor="white", linewidth=1.3)


def _path(axes, x, y, **style):
    """Polygons with corners x and y, (polygons, corners), as one path of the file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if x.size:
        codes = np.tile([Outline.MOVETO, *[Outline.LINETO] * (x.shape[1] - 1)], x.shape[0])
        axes.add_patch(PathPatch(Outline(np.stack([x.ravel(), y.ravel()], axis=1), codes), **style))


def _dots(axes, x, y, colour):
    axes.plot(x, y, linestyle="none", marker="o", markersize=3.2, color=colour, markeredgecolor="none")


def _legend(axes, y, panels):
    """One line under all matrices: what the signs mean, those that occur."""
    x = 1.5

    def entry(text, gap=1.4):
        nonlocal x
        axes.text(x, y, text, va="center", ha="left", fontsize=7, color=MUTED, family=SANS)
        x += gap + len(text) * LEGEND_WIDTH / CELL

    entry("row: query i, column: key j", 1.8)
    signs = [(SEEN, "is seen"), (HIDDEN, "is not")]
    if any(panel.written is not None for panel in panels):
        signs.insert(1, (WRITTEN, "is seen, written by this call"))
    for colour, text in signs:
        _cells(axes, x, y - 0.5, np.ones((1, 1), bool), colour)
        x += 1.3
        entry(text)
    if any(panel.positions is not None for panel in panels):
        _cells(axes, x, y - 0.5, np.ones((1, 1), bool), SEEN)
        _dots(axes, [x + 0.5], [y], "white")
        x += 1.3
        entry("position i + offset")
    if any((~panel.seen.any(axis=1)).any() for panel in panels):
        axes.text(x, y, "0", va="center", fontsize=7.2, color=NOTHING, family=SANS)
        x += 0.8
        entry("sees no key")


def heads():
    """A figure: which key/value head each query head reads."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(7.4, 1.75), facecolor="white")
    style = {"boxstyle": "round,pad=0,rounding_size=0.12", "edgecolor": "none"}
    for panel, count in enumerate(KV_HEADS):
        axes = figure.add_axes((0.085 + panel * 0.308, 0.03, 0.29, 0.78))
        axes.set(xlim=(0, 8), ylim=(0, 3.1))
        axes.set_axis_off()
        axes.set_title(f"num_kv_heads={count}", fontsize=7.6, color=TEXT, family=MONO, loc="left", pad=4)
        used = head_of(8, count)
        for head in range(count):
            members, colour = np.flatnonzero(used == head), HEAD_COLOURS[head]
            middle = members.mean() + 0.5
            axes.add_patch(FancyBboxPatch((middle - 0.45, 0.25), 0.9, 0.75, facecolor=colour, **style))
            axes.text(middle, 0.61, str(head), ha="center", va="center", color="white", fontsize=8, family=SANS)
            for member in members:
                axes.plot([member + 0.5, middle], [2.1, 1.0], color=colour, linewidth=1.1, solid_capstyle="round")
                axes.add_patch(FancyBboxPatch((member + 0.1, 2.1), 0.8, 0.75, facecolor=colour, **style))
                axes.text(
                    member + 0.5, 2.46, str(member), ha="center", va="center", color="white", fontsize=8, family=SANS
                )
    figure.text(0.012, 0.65, "query\nheads", fontsize=7, color=MUTED, va="center", family=SANS)
    figure.text(0.012, 0.185, "key/value\nheads", fontsize=7, color=MUTED, va="center", family=SANS)
    return figure


def curves():
    """A figure: the cap, the slopes, the sink."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 2.35), facecolor="white", layout="constrained")
    cap, slope, sink = figure.subplots(1, 3)
    for axes in (cap, slope, sink):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(labelsize=6.5, labelcolor=MUTED, color=MUTED, length=2.5)
        axes.grid(color=HIDDEN, linewidth=0.6)
    label = {"fontsize": 7, "color": MUTED}
    title = {"fontsize": 7.6, "color": TEXT, "family": MONO, "loc": "left"}

    scores = np.linspace(-60, 60, 33)
    cap.plot(scores, scores, color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)))
    for softcap, colour in ((30.0, HEAD_COLOURS[0]), (10.0, HEAD_COLOURS[1])):
        cap.plot(scores, one_score(scores, softcap=softcap), color=colour, linewidth=1.6)
        cap.text(58, softcap - 4, f"{softcap:g}", ha="right", va="top", fontsize=7, color=colour)
    cap.text(38, 46, "0: none", ha="right", va="center", fontsize=7, color=MUTED)
    cap.set_title("softcap=10, 30", **title)
    cap.set_xlabel("scaled score", **label)
    cap.set_ylabel("capped score", **label)
    cap.set(xticks=[-60, -30, 0, 30, 60], yticks=[-60, -30, 0, 30, 60])

    distances = np.arange(-16, 33)
    for head, bias in enumerate(bias_by_distance(distances, 4)):
        slope.plot(distances[::16], bias[::16], color=HEAD_COLOURS[head], linewidth=1.6)
        apart = (0, 0, -0.12, 0.12)[head]
        slope.text(33, bias[-1] + apart, f"head {head}", fontsize=7, va="center", color=HEAD_COLOURS[head])
    slope.set_title("alibi_slopes=alibi_slopes(4)", **title)
    slope.set_xlabel("distance  i + offset - j", **label)
    slope.set_ylabel("added to the score", **label)
    slope.set_xlim(-16, 44)
    slope.set_xticks([-16, 0, 16, 32])

    sinks = np.linspace(-6, 7, 34)
    for num_keys, colour in ((1, HEAD_COLOURS[0]), (8, HEAD_COLOURS[1]), (64, HEAD_COLOURS[2])):
        sink.plot(sinks, share_of_keys(sinks, num_keys), color=colour, linewidth=1.6)
        sink.text(np.log(num_keys) + 0.3, 0.52, str(num_keys), fontsize=7, color=colour)
    sink.set_title("sinks=[s], 1, 8, 64 keys", **title)
    sink.set_xlabel("s, all scores 0", **label)
    sink.set_ylabel("sum of the weights", **label)
    sink.set(ylim=(0, 1.04), xticks=[-6, -3, 0, 3, 6])
    return figure


def draw(folder=FOLDER, suffix=".svg"):
    """Write all pictures; the same bytes for the same versions of matplotlib and of the code."""
    import matplotlib

    settings = {
        "svg.hashsalt": "mha_fast",
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans"],
        "font.monospace": ["DejaVu Sans Mono"],
        "axes.unicode_minus": False,
    }
    folder.mkdir(exist_ok=True)
    described = descriptions()
    with matplotlib.rc_context(settings):
        figures = {name: sheet(panels(), columns, signs) for name, (panels, columns, signs) in SHEETS.items()}
        for name, figure in (figures | {"heads": heads(), "scores": curves()}).items():
            metadata = {"Date": None, "Creator": None, "Description": described[name]} if suffix == ".svg" else None
            figure.savefig(folder / (name + suffix), metadata=metadata, dpi=200)


if __name__ == "__main__":
    draw()
