"""Levels, show_config and the import: in fresh interpreters, since all of it is decided once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import CONFIG, LEVELS, in_force, qkv
from test_threads import python

import mha_fast
from mha_fast import _config

USABLE = CONFIG["levels_usable"]
PACKAGE = Path(mha_fast.__file__).resolve().parent


# ---------------------------------------------------------------- levels


@pytest.mark.parametrize("level", LEVELS)
def test_the_environment_forces_a_level(level):
    code = """
import json, numpy as np, mha_fast
from mha_fast import reference
x = np.random.default_rng(0).standard_normal((2, 9, 20))
got, want = (m.scaled_dot_product_attention(x, x, x) for m in (mha_fast, reference))
assert np.abs(got - want).max() < 1e-14
print(json.dumps(mha_fast.show_config()))
"""
    got = python(code, MHA_FAST_ISA=level)
    if level in USABLE:
        assert got["level"] == level
        assert got["levels_built"] == LEVELS
    else:
        assert got.startswith("ValueError: MHA_FAST_ISA is") and "not usable on this machine" in got


@pytest.mark.parametrize("name", ["", "AVX2", "avx3", "auto", "avx512 ", "avx2,scalar", "0"])
def test_a_wrong_level_lists_the_valid_ones(name):
    got = python("import mha_fast", MHA_FAST_ISA=name)
    valid = ", ".join(USABLE)
    assert got == f"ValueError: MHA_FAST_ISA is {name!r}, not a level of this build; expected one of {valid}"


def test_an_unusable_level_lists_the_valid_ones(monkeypatch):
    monkeypatch.setattr(_config, "_LEVELS", {"scalar": (0, True), "avx2": (2, True), "avx512": (3, False)})
    text = "MHA_FAST_ISA is 'avx512', not usable on this machine; expected one of scalar, avx2"
    monkeypatch.setenv("MHA_FAST_ISA", "avx512")
    with pytest.raises(ValueError, match=text):
        _config._default_level()
    monkeypatch.delenv("MHA_FAST_ISA")
    assert _config._default_level() == 2


def test_without_a_wish_the_best_level_is_taken():
    assert python("import json, mha_fast; print(json.dumps(mha_fast.show_config()['level']))") == USABLE[-1]


def test_a_level_set_wrongly_stays_as_it_was():
    before = mha_fast.show_config()["level"]
    with pytest.raises(ValueError, match="expected one of scalar"):
        _config.set_level("sse9")
    assert mha_fast.show_config()["level"] == before


@pytest.mark.parametrize("level", USABLE)
def test_a_level_in_force_ends_with_its_body_even_where_that_fails(level):
    before = mha_fast.show_config()
    with pytest.raises(ZeroDivisionError), in_force(level):
        raise ZeroDivisionError
    assert mha_fast.show_config() == before


# What each level needs, as /proc/cpuinfo names it; the kernel lists a feature only if it saves the registers.
NEEDS = {
    "scalar": set(),
    "avx2": {"avx", "avx2", "fma", "f16c"},
    "avx512": {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
    "neon": {"asimd"},
}


def test_detection_agrees_with_the_kernel():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        pytest.skip("no /proc/cpuinfo to compare with")
    flags = next((set(x.partition(":")[2].split()) for x in lines if x.startswith(("flags", "Features"))), set())
    assert {name for name in LEVELS if NEEDS[name] <= flags} == set(USABLE)


def test_levels_differ_in_rounding_alone(attend, rng):
    """Each is exact to a few units; that they are not one and the same code shows in the last bits."""
    arrays, results, before = qkv(rng, 1, 2, 40, 300, 64, dtype="float32"), {}, mha_fast.show_config()["level"]
    try:
        for level in USABLE:
            _config.set_level(level)
            results[level] = attend(*arrays)
    finally:
        _config.set_level(before)
    for level in USABLE:
        np.testing.assert_allclose(results[level], results["scalar"], rtol=0, atol=2e-6)
    assert len({r.tobytes() for r in results.values()}) > 1 or len(USABLE) == 1


# ---------------------------------------------------------------- show_config


def test_show_config(isa):
    config = mha_fast.show_config()
    kinds = {
        "version": str,
        "level": str,
        "levels_built": list,
        "levels_usable": list,
        "num_threads": int,
        "compiler": str,
        "openmp": int,
        "few_rows": int,
        "key_block": int,
        "key_split": int,
        "tiles": dict,
    }
    assert {name: type(value) for name, value in config.items()} == kinds
    assert config["level"] == isa
    assert config["version"] == mha_fast.__version__
    assert set(config["levels_usable"]) <= set(config["levels_built"])
    assert "scalar" in config["levels_usable"]
    assert config["key_split"] % config["key_block"] == 0
    assert set(config["tiles"]) == {"float32", "float64"}
    for tiles in config["tiles"].values():
        assert set(tiles) == {"lanes", "panel", "key_tile", "row_tile", "col_tile"}
        assert all(type(n) is int and n > 0 for n in tiles.values())
        assert tiles["panel"] % tiles["lanes"] == 0


def test_show_config_is_a_copy():
    for changed in (mha_fast.show_config(), mha_fast.show_config()["levels_built"]):
        changed.clear()
    mha_fast.show_config()["tiles"]["float32"].clear()
    assert mha_fast.show_config() == CONFIG


# ---------------------------------------------------------------- the import


def test_a_source_tree_that_was_never_built_says_so(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "mha_fast", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    # -S: an editable install's import hook would lend its own extension
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import mha_fast"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: mha_fast was imported from {tmp_path / 'mha_fast'}, a source tree whose C ext"
    )
    assert 'Run "pip install -e ."' in last
    assert "Traceback" in done.stderr and "ModuleNotFoundError" not in done.stderr


def test_an_error_inside_the_extension_is_not_taken_for_that(tmp_path):
    """A package that the extension itself misses keeps its own message."""
    shutil.copytree(PACKAGE, tmp_path / "mha_fast", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    (tmp_path / "mha_fast" / "_core.py").write_text("import something_missing\n")
    got = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mha_fast")
    assert got == "ModuleNotFoundError: No module named 'something_missing'"


def test_the_import_is_quiet_and_brings_numpy_alone():
    code = """
import json, sys
import numpy
before = set(sys.modules)
import mha_fast
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps(sorted(name for name in new if not name.startswith(("_cython", "cython")))))
"""
    assert python(code) == ["mha_fast"]


def test_the_import_leaves_the_floating_point_state_alone():
    """Subnormals stay, in this thread and in new ones; nothing was linked with -ffast-math."""
    code = """
import json, sys, threading
import mha_fast
halves = [sys.float_info.min / 2]
thread = threading.Thread(target=lambda: halves.append(sys.float_info.min / 2))
thread.start()
thread.join()
print(json.dumps([0 < half < sys.float_info.min for half in halves]))
"""
    assert python(code) == [True, True]


def test_the_import_order_does_not_matter():
    for code in ("import mha_fast.reference", "from mha_fast import _config", "import mha_fast._validate"):
        assert python(code + "; import mha_fast; print(mha_fast.get_num_threads())") >= 1


# What a user imports, each with one call.
PUBLIC = {
    "mha_fast": "module.scaled_dot_product_attention(x, x, x)",
    "mha_fast.reference": "module.scaled_dot_product_attention(x, x, x)",
    "mha_fast.attention": "module.MultiHeadAttention(4, 2)(x, x, x)",
    "mha_fast.sequences": "module.KVCache(1, 1, 9, 4).attend(x[None], x[None], x[None])",
    "mha_fast.plot": "module.attention_heatmap(x)",
    "mha_fast.onnx": "ReferenceEvaluator(model, new_ops=[module.Attention]).run(None, dict.fromkeys('QKV', x[None]))",
    "mha_fast.__main__": "module.worked_example()",
}
ONNX_MODEL = """
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"])
infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 3, 4]) for name in "QKVY"}
graph = helper.make_graph([node], "attention", [infos[name] for name in "QKV"], [infos["Y"]])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
"""


@pytest.mark.parametrize("flag", ["-O", "-OO"])
@pytest.mark.parametrize("name", PUBLIC)
def test_without_docstrings_and_assertions(name, flag):
    pytest.importorskip(name, exc_type=ImportError)  # some need a package that is optional
    code = f"""
import importlib, numpy as np
module = importlib.import_module({name!r})
x = np.ones((1, 3, 4), np.float32)
{ONNX_MODEL if name == "mha_fast.onnx" else ""}
{PUBLIC[name]}
print(__debug__ + 0)
"""
    assert python(code, flags=[flag]) == 0


@pytest.mark.parametrize("program", ["-m mha_fast", "examples/decode.py", "examples/attention_heatmap.py"])
def test_help_without_docstrings(program):
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-OO", *program.split(), "--help"],
        cwd=root, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("usage: "), done.stderr


def test_a_second_interpreter_process_by_spawn():
    code = """
import json, multiprocessing
import numpy as np
import mha_fast
if __name__ == "__main__":
    x = np.ones((1, 3, 4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got = pool.apply(mha_fast.scaled_dot_product_attention, (x, x, x))
    print(json.dumps(bool((got == 1).all())))
"""
    assert python(code) is True
