"""Weights of the layers from elsewhere and back: as arrays, as a state, in files, from torch.

A state is a dict of arrays from which a layer can be built anew; the layer's numbers are arrays without dimensions, so
both kinds of file keep everything in one way. Reading a file runs no code: `.npz` is read without pickle, and
safetensors has nothing like it.
"""

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mha_fast import _validate

_SUFFIXES = (".npz", ".safetensors")
# What numpy and zipfile raise for a file that is damaged or something else.
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)


class Stored:
    """What every layer has that can be built by `from_arrays`, whose keywords are `_STATE`."""

    _STATE: tuple[str, ...]

    def state_dict(self):
        """All that the layer is made of, as a dict of arrays.

        Returns
        -------
        dict of str to ndarray
            Copies of the weights and biases, by the names of the attributes, and the layer's numbers (those that the
            constructor takes and the shapes do not tell) as arrays without dimensions.

        Raises
        ------
        TypeError, ValueError
            A weight or a bias was assigned whose dtype or shape does not fit.

        See Also
        --------
        from_state_dict : the way back.

        Examples
        --------
        >>> from mha_fast import PositionWiseFFN
        >>> state = PositionWiseFFN(2, 3).state_dict()
        >>> {name: array.shape for name, array in state.items()}
        {'W_1': (2, 3), 'W_2': (3, 2), 'b_1': (3,), 'b_2': (2,)}
        """
        snapshot = self.from_arrays(**{name: getattr(self, name) for name in self._STATE})
        return {name: np.asarray(getattr(snapshot, name)) for name in self._STATE}

    @classmethod
    def from_state_dict(cls, state):
        """A layer from the dict that `state_dict` gives.

        Parameters
        ----------
        state : dict of str to array_like
            Every name that `state_dict` gives and no other. The arrays are copied.

        Returns
        -------
        A layer of this class

        Raises
        ------
        TypeError, ValueError
            A name that is missing or unknown, an array of another shape or dtype.

        Examples
        --------
        >>> from mha_fast import PositionWiseFFN
        >>> ffn = PositionWiseFFN(2, 3)
        >>> same = PositionWiseFFN.from_state_dict(ffn.state_dict())
        >>> bool((same.W_1 == ffn.W_1).all())
        True
        """
        return cls.from_arrays(**_validate.state_entries(state, cls._STATE, "state"))

    def save(self, path):
        """Write the state to a file.

        Parameters
        ----------
        path : str or os.PathLike
            The suffix says how: ``.npz`` (NumPy's, not compressed) or ``.safetensors``, which needs the package of
            this name: ``pip install "mha_fast[safetensors]"``. A file that is there already is replaced.

        Raises
        ------
        ValueError
            Another suffix.
        TypeError, ValueError
            As `state_dict` does. Nothing is written then.
        ImportError
            The package safetensors is not installed.
        OSError
            The file cannot be written.

        Examples
        --------
        >>> import os, tempfile
        >>> from mha_fast import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     layer.save(os.path.join(folder, "layer.npz"))
        ...     same = MultiHeadAttention.load(os.path.join(folder, "layer.npz"))
        >>> bool((same.W_q == layer.W_q).all())
        True
        """
        path = _file_path(path)
        if path.suffix == ".npz":
            np.savez(path, **self.state_dict())
        else:
            # Opened here: safetensors' own errors of files are no OSError.
            path.write_bytes(_safetensors().save(self.state_dict()))

    @classmethod
    def load(cls, path):
        """A layer from a file that `save` wrote.

        Parameters
        ----------
        path : str or os.PathLike
            Its suffix is ``.npz`` or ``.safetensors``. No code in the file is run.

        Returns
        -------
        A layer of this class

        Raises
        ------
        ValueError
            Another suffix; a file that is damaged, or is no state of a layer of this class.
        TypeError
            An array of another dtype.
        ImportError
            The package safetensors is not installed.
        OSError
            The file cannot be read.

        Examples
        --------
        See `save`.
        """
        path = _file_path(path)
        state = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
        return cls.from_arrays(**_validate.state_entries(state, cls._STATE, str(path)))


class AttentionWeights(Stored):
    """The weights of a multi-head attention layer."""

    _STATE = ("num_heads", "num_kv_heads", "dropout", "W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")

    @classmethod
    def from_arrays(
        cls,
        num_heads,
        *,
        W_q,
        W_k,
        W_v,
        W_o,
        b_q=None,
        b_k=None,
        b_v=None,
        b_o=None,
        num_kv_heads=None,
        dropout=0.0,
    ):
        """A layer with these weights, applied as ``X @ W``.

        Parameters
        ----------
        num_heads : int
        W_q : array_like, (width of queries, num_hiddens)
            Its columns give the width of the layer.
        W_k, W_v : array_like, (width of keys or values, num_kv_heads * depth)
        W_o : array_like, (num_hiddens, num_hiddens)
        b_q, b_k, b_v, b_o : array_like, (columns of the W of the same letter,), optional
            Zeros by default.
        num_kv_heads : int, optional
            A divisor of `num_heads`, which is the default.
        dropout : float
            At least 0 and below 1. Stored and never used.

        Returns
        -------
        MultiHeadAttention
            It has C-contiguous copies of the arrays: float32 and float64 are kept, float16 and bfloat16 become float32,
            bool and integers float64. Tensors of torch are taken as well.

        Raises
        ------
        TypeError, ValueError
            A number, a dtype or a shape that does not fit.

        Notes
        -----
        Vaswani et al. 2017, section 3.2.2. No random number is drawn.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast import MultiHeadAttention
        >>> eye = np.eye(4)
        >>> layer = MultiHeadAttention.from_arrays(2, W_q=eye, W_k=eye, W_v=eye, W_o=eye)
        >>> layer([[[1, 2, 3, 4]]], [[[0, 0, 0, 0]]], [[[5, 6, 7, 8]]]).ravel().tolist()
        [5.0, 6.0, 7.0, 8.0]
        """
        layer = cls.__new__(cls)
        layer.dropout = _validate.dropout_rate(dropout)
        weights = {"W_q": W_q, "W_k": W_k, "W_v": W_v, "W_o": W_o}
        for name, weight in weights.items():
            setattr(layer, name, _owned(weight, name))
        layer.num_hiddens, layer.num_heads, layer.num_kv_heads = _validate.layer_weights(layer, num_heads, num_kv_heads)
        for name, bias in {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}.items():
            _set_bias(layer, name, bias, getattr(layer, f"W_{name[-1]}"))
        layer.attention_weights = None
        return layer

    @classmethod
    def from_torch(cls, source, num_heads=None):
        """A layer with the weights of a `torch.nn.MultiheadAttention`.

        Parameters
        ----------
        source : torch.nn.MultiheadAttention or its state_dict
            Of any `kdim` and `vdim`, with or without biases. The dict may hold tensors or arrays; the names are those
            of the module itself, without a prefix.
        num_heads : int, optional
            Needed with a dict, which does not hold it.

        Returns
        -------
        MultiHeadAttention
            The inputs have the batch first, whatever `batch_first` the module has. The weights are C-contiguous copies,
            transposed, for torch keeps them as (outputs, inputs). float32 and float64 are kept, other floating dtypes
            become float32. The module's `dropout` is stored, a dict's layer has 0.

        Raises
        ------
        TypeError
            A `source` that is neither, or a tensor of another dtype.
        ValueError
            A module with `add_bias_kv` or `add_zero_attn`, which add keys that this layer does not have (a dict does
            not tell `add_zero_attn`). A name that is missing or unknown, another shape. `num_heads` missing beside a
            dict, or another number than the module's.

        Notes
        -----
        torch is not imported. Masks differ: where a boolean mask of torch's module is True, the query may *not* attend;
        here it may.

        Examples
        --------
        >>> import numpy as np
        >>> from mha_fast import MultiHeadAttention
        >>> state = {"in_proj_weight": np.ones((12, 4)), "out_proj.weight": np.ones((4, 4))}
        >>> MultiHeadAttention.from_torch(state, num_heads=2).W_q.shape
        (4, 4)
        """
        dropout = 0.0
        if not isinstance(source, Mapping):
            num_heads, dropout = _torch_numbers(source, num_heads)
            source = source.state_dict()
        elif num_heads is None:
            raise ValueError("num_heads is None; expected a number, since a state_dict does not hold it")
        return cls.from_arrays(num_heads, dropout=dropout, **_from_torch_names(source))


class FFNWeights(Stored):
    """The weights of a position-wise feed-forward network."""

    _STATE = ("W_1", "W_2", "b_1", "b_2")

    @classmethod
    def from_arrays(cls, *, W_1, W_2, b_1=None, b_2=None):
        """A network with these weights, ``max(0, X W_1 + b_1) W_2 + b_2``.

        Parameters
        ----------
        W_1 : array_like, (num_hiddens, ffn_num_hiddens)
        W_2 : array_like, (ffn_num_hiddens, width of the result)
        b_1, b_2 : array_like, (columns of the W of the same number,), optional
            Zeros by default.

        Returns
        -------
        PositionWiseFFN
            It has C-contiguous copies of the arrays: float32 and float64 are kept, float16 and bfloat16 become float32,
            bool and integers float64. Tensors of torch are taken as well.

        Raises
        ------
        TypeError, ValueError
            A dtype or a shape that does not fit.

        Notes
        -----
        Vaswani et al. 2017, section 3.3. No random number is drawn.

        Examples
        --------
        >>> from mha_fast import PositionWiseFFN
        >>> ffn = PositionWiseFFN.from_arrays(W_1=[[1.0, -1.0]], W_2=[[10.0], [100.0]], b_2=[0.5])
        >>> ffn([[3.0], [-2.0]]).ravel().tolist()
        [30.5, 200.5]
        """
        layer = cls.__new__(cls)
        layer.W_1, layer.W_2 = _owned(W_1, "W_1"), _owned(W_2, "W_2")
        layer.num_hiddens, layer.ffn_num_hiddens = _validate.ffn_weights(layer)
        _set_bias(layer, "b_1", b_1, layer.W_1)
        _set_bias(layer, "b_2", b_2, layer.W_2)
        return layer


# ---------------------------------------------------------------- arrays


def _owned(value, name):
    """A copy of an array or a tensor as a layer keeps it."""
    return _validate.owned_weight(_without_torch(value, name), name)


def _without_torch(value, name):
    """A tensor's numbers as an array; everything else as it came."""
    if not hasattr(value, "detach"):
        return value
    try:
        tensor = value.detach().cpu()
        # NumPy knows no bfloat16 and no dtype of 8 bits of torch's; float32 holds all of them exactly.
        return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()
    except Exception as error:  # one without numbers (on the device "meta"), quantised, sparse
        raise TypeError(f"{name} cannot be converted to an array: {error}") from error


def _set_bias(layer, name, bias, weight):
    """The layer's vector beside this weight; zeros for None."""
    setattr(layer, name, np.zeros(weight.shape[1], weight.dtype) if bias is None else _owned(bias, name))
    _validate.layer_bias(layer, name, weight.shape[1])


# ---------------------------------------------------------------- torch


def _torch_numbers(module, num_heads):
    """num_heads and dropout of a torch module, and the refusal of what a layer here has not."""
    if not all(hasattr(module, name) for name in ("state_dict", "num_heads", "dropout", "add_zero_attn")):
        raise TypeError(
            f"source is a {type(module).__name__}; expected a torch.nn.MultiheadAttention or its state_dict"
        )
    if module.add_zero_attn:
        raise ValueError("source has add_zero_attn=True; expected a module without it: a layer here adds no keys")
    if num_heads is not None and _validate.positive_integer(num_heads, "num_heads") != module.num_heads:
        raise ValueError(
            f"num_heads is {_validate._show(num_heads)} but source has {module.num_heads}; expected the same, or None"
        )
    return module.num_heads, module.dropout


def _from_torch_names(state):
    """The keywords of `from_arrays` from torch's names, whose weights are (outputs, inputs), packed or separate."""
    if "bias_k" in state or "bias_v" in state:
        raise ValueError("source has bias_k or bias_v, so add_bias_kv=True; expected none: a layer here adds no keys")
    separate = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    packed = not any(name in state for name in separate)
    biases = [name for name in ("in_proj_bias", "out_proj.bias") if name in state]
    names = [*(["in_proj_weight"] if packed else separate), "out_proj.weight", *biases]
    entries = {name: _owned(x, name) for name, x in _validate.state_entries(state, names, "source").items()}

    _validate.exact_shape(entries["out_proj.weight"], "out_proj.weight", (None, None))
    width = entries["out_proj.weight"].shape[0]
    shapes = {
        "in_proj_weight": (3 * width, width),
        "q_proj_weight": (width, width),
        "k_proj_weight": (width, None),  # kdim
        "v_proj_weight": (width, None),  # vdim
        "out_proj.weight": (width, width),
        "in_proj_bias": (3 * width,),
        "out_proj.bias": (width,),
    }
    for name, array in entries.items():
        _validate.exact_shape(array, name, shapes[name])

    weights = np.split(entries["in_proj_weight"], 3) if packed else [entries[name] for name in separate]
    weights.append(entries["out_proj.weight"])
    arrays = {f"W_{letter}": weight.T for letter, weight in zip("qkvo", weights, strict=True)}
    if "in_proj_bias" in entries:
        arrays |= zip(("b_q", "b_k", "b_v"), np.split(entries["in_proj_bias"], 3), strict=True)
    if "out_proj.bias" in entries:
        arrays["b_o"] = entries["out_proj.bias"]
    return arrays


# ---------------------------------------------------------------- files


def _file_path(path):
    """The path of a file whose suffix says its kind."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path is a {type(path).__name__}; expected a str or an os.PathLike")
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"path is {path}; expected the suffix {' or '.join(_SUFFIXES)}")
    return path


def _safetensors():
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            'Files with the suffix .safetensors need the package safetensors: pip install "mha_fast[safetensors]"'
        ) from error
    return safetensors.numpy


def _read_npz(path):
    # Opened here: a file that cannot be opened is another error than one that cannot be understood.
    with open(path, "rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {name: archive[name] for name in archive.files}
        except _UNREADABLE as error:
            raise ValueError(f"{path} is no readable .npz file of arrays: {error}") from error


def _read_safetensors(path):
    load_file = _safetensors().load_file
    from safetensors import SafetensorError

    try:
        return load_file(path)
    except (SafetensorError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no readable .safetensors file of arrays: {error}") from error
