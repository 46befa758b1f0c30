from collections.abc import Iterable, Sequence
from typing import TypeVar, overload

from matplotlib.colors import Colormap
from matplotlib.figure import Figure, FigureBase
from numpy.typing import ArrayLike

__all__ = ["attention_heatmap"]

_F = TypeVar("_F", bound=FigureBase)

@overload
def attention_heatmap(
    weights: ArrayLike,
    *,
    query_tokens: Iterable[object] | None = None,
    key_tokens: Iterable[object] | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
    cmap: str | Colormap = "viridis",
    figure: None = None,
) -> Figure: ...
@overload
def attention_heatmap(
    weights: ArrayLike,
    *,
    query_tokens: Iterable[object] | None = None,
    key_tokens: Iterable[object] | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
    cmap: str | Colormap = "viridis",
    figure: _F,
) -> _F: ...
