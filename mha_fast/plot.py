"""Pictures of attention weights. Needs matplotlib: pip install "mha_fast[plot]"."""

import math
from collections.abc import Iterable

import numpy as np

from mha_fast import _validate

try:
    from matplotlib import colormaps
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure, FigureBase
except ImportError as error:
    raise ImportError('mha_fast.plot needs matplotlib: pip install "mha_fast[plot]"') from error

__all__ = ["attention_heatmap"]

_MAX_COLUMNS = 4
# Labels of an axis that stay legible on a panel of this many inches.
_PANEL_INCHES, _MAX_LABELS = 3.0, 24


def attention_heatmap(
    weights, *, query_tokens=None, key_tokens=None, heads=None, title=None, cmap="viridis", figure=None
):
    """Draw attention weights: one panel a head, a row for each query, a column for each key.

    All panels share one scale of colours, from 0 (or the lowest weight below it) to the largest weight shown.

    Parameters
    ----------
    weights : array_like, (num_heads, L, S), (1, num_heads, L, S) or (L, S)
        As `scaled_dot_product_attention` returns them, or as `MultiHeadAttention` keeps them in `attention_weights`;
        of a batch, one entry. Any real dtype. NaN and infinity stay blank.
    query_tokens, key_tokens : sequence of str, L or S of them, optional
        Labels of the rows and the columns, numbers by default. Of many, only every second, third ... is shown.
    heads : sequence of int, optional
        The heads to show, in this order; all by default.
    title : str, optional
    cmap : str or matplotlib.colors.Colormap
    figure : matplotlib.figure.Figure or SubFigure, optional
        Where to draw; by default a new figure, which pyplot knows nothing of.

    Returns
    -------
    matplotlib.figure.Figure or SubFigure
        `figure`, or the new one: ``savefig`` writes it. Its last axes are those of the colour bar.

    Raises
    ------
    TypeError
        An argument of another type or dtype.
    ValueError
        Weights of another shape or without any number, another count of labels, a head that is not there, an unknown
        `cmap`.
    ImportError
        On import: matplotlib is not installed.

    Notes
    -----
    Vaswani et al. 2017, section 3.2.1: weights = softmax(Q K^T / sqrt(d_k)). Each row sums to 1, or to 0 where the
    query sees no key.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.plot import attention_heatmap
    >>> weights = np.tril(np.ones((2, 3, 3))) / np.arange(1, 4)[:, None]
    >>> figure = attention_heatmap(weights, key_tokens=["a", "b", "c"])
    >>> [axes.get_title() for axes in figure.axes]
    ['head 0', 'head 1', '']
    """
    weights = _heads_of_weights(weights)
    chosen = _chosen_heads(heads, weights.shape[0])
    query_tokens = _tokens(query_tokens, "query_tokens", weights.shape[1])
    key_tokens = _tokens(key_tokens, "key_tokens", weights.shape[2])
    cmap = _colormap(cmap)
    if figure is not None and not isinstance(figure, FigureBase):
        raise TypeError(f"figure is {_validate._show(figure)}; expected a matplotlib Figure or SubFigure")

    columns = min(len(chosen), _MAX_COLUMNS)
    rows = math.ceil(len(chosen) / columns)
    if figure is None:
        size = (_PANEL_INCHES * columns + 1, _PANEL_INCHES * rows + 0.5)
        figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    shown = np.where(np.isfinite(weights[chosen]), weights[chosen], np.nan)
    limits = {"vmin": min(0.0, np.nanmin(shown, initial=0.0)), "vmax": np.nanmax(shown, initial=0.0) or 1.0}
    for axes, head, matrix in zip(panels, chosen, shown, strict=False):
        image = axes.imshow(matrix, cmap=cmap, aspect="auto", interpolation="nearest", **limits)
        axes.set_title(f"head {head}" if weights.shape[0] > 1 else "")
        axes.set(xlabel="keys", ylabel="queries")
        _label(axes.xaxis, key_tokens, rotation=90)
        _label(axes.yaxis, query_tokens)
        axes.label_outer()
    for axes in panels[len(chosen) :]:
        axes.remove()
    figure.colorbar(image, ax=list(panels[: len(chosen)]), label="weight")
    if title is not None:
        figure.suptitle(title, parse_math=False)
    return figure


def _heads_of_weights(weights):
    """The weights as a float64 array (heads, L, S)."""
    array = _validate.as_array(weights, "weights")
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise TypeError(f"weights has dtype {array.dtype}; expected real numbers")
    shape = array.shape
    if array.ndim == 4 and shape[0] == 1:
        array = array[0]
    elif array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        hint = ": of a batch, choose one entry, as weights[0]" if array.ndim == 4 else ""
        raise ValueError(f"weights has shape {shape}; expected (num_heads, L, S), (1, num_heads, L, S) or (L, S){hint}")
    if not array.size:
        raise ValueError(f"weights has shape {shape}; expected at least one head, query and key")
    return array.astype(np.float64)


def _chosen_heads(heads, num_heads):
    if heads is None:
        return list(range(num_heads))
    chosen = _validate.as_array(heads, "heads")
    if chosen.ndim != 1 or not chosen.size or chosen.dtype.kind not in "iu":
        raise TypeError(f"heads is {_validate._show(heads)}; expected a sequence of at least one integer")
    if chosen.min() < 0 or chosen.max() >= num_heads:
        raise ValueError(f"heads is {_validate._show(heads)}; expected numbers from 0 to {num_heads - 1}")
    return chosen.tolist()


def _colormap(cmap):
    if not isinstance(cmap, (str, Colormap)):
        raise TypeError(f"cmap is {_validate._show(cmap)}; expected a name or a matplotlib Colormap")
    try:
        return colormaps.get_cmap(cmap)
    except ValueError:
        raise ValueError(f"cmap is {_validate._show(cmap)}; expected the name of a colormap of matplotlib") from None


def _tokens(tokens, name, length):
    if tokens is None:
        return None
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
        raise TypeError(f"{name} is a {type(tokens).__name__}; expected a sequence of labels")
    labels = [str(token) for token in tokens]
    if len(labels) != length:
        raise ValueError(f"{name} has {len(labels)} labels; expected {length}, one for each of its axis")
    return labels


def _label(axis, tokens, **style):
    """Labels where they fit, or whole numbers."""
    if tokens is None:
        axis.get_major_locator().set_params(integer=True)
        return
    step = math.ceil(len(tokens) / _MAX_LABELS)
    # Tokens are no formulas: a "$" among them stays one.
    axis.set_ticks(range(0, len(tokens), step), tokens[::step], parse_math=False, **style)
