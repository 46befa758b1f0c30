"""Threads: many Python threads at once, how many of its own a call takes, the GIL, the floating-point state."""

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import CONFIG, draw, peak, qkv

import mha_fast
from mha_fast import _config, _core

PARALLEL = pytest.mark.skipif(not CONFIG["openmp"], reason="this build has no OpenMP")
TASKS = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc/self/task")


def python(code, *arguments, flags=(), **environment):
    """Run code in a fresh interpreter with these flags; its last line of output as JSON, or the error's last line."""
    names = ("MHA_FAST_NUM_THREADS", "OMP_NUM_THREADS", "MHA_FAST_ISA")
    inherited = {k: v for k, v in os.environ.items() if k not in names}
    path = os.path.dirname(os.path.dirname(os.path.abspath(mha_fast.__file__)))
    inherited["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- tasks


def unread(*shape):
    """An array of any size that takes no memory."""
    return np.broadcast_to(np.float32(0), shape)


@pytest.mark.parametrize("num_threads", [1, 4, 128])
@pytest.mark.parametrize("is_causal", [False, "lower_right"])
@pytest.mark.parametrize("q_len, kv_len", [(1, 4096), (7, 300), (197, 197), (512, 512), (2048, 8192)])
def test_a_plan_covers_the_rows_of_every_head(q_len, kv_len, is_causal, num_threads):
    query, key = unread(2, 6, q_len, 64), unread(2, 3, kv_len, 64)
    plan = _core.plan_of(query, key, key, enable_gqa=True, is_causal=is_causal, num_threads=num_threads)
    heads, rows = 2 * 3, q_len * 2
    assert (plan["row_tasks"] - 1) * plan["rows_per_task"] < rows <= plan["row_tasks"] * plan["rows_per_task"]
    assert plan["splits"] == -(-kv_len // CONFIG["key_split"])
    assert plan["tasks"] == heads * plan["row_tasks"] * (plan["splits"] if plan["split_tasks"] else 1)
    assert 1 <= plan["threads"] <= min(num_threads, plan["tasks"])
    assert plan["tail_heads"] <= (heads if is_causal else 0)
    if num_threads == 1:
        assert not plan["split_tasks"]


@PARALLEL
def test_splits_of_a_long_cache_are_tasks_where_heads_are_few():
    query, key = unread(1, 1, 64), unread(1, 8 * CONFIG["key_split"], 64)
    for num_threads, tasks, threads in ((1, 1, 1), (4, 8, 4), (64, 8, 8)):
        plan = _core.plan_of(query, key, key, num_threads=num_threads)
        assert (plan["tasks"], plan["threads"], plan["splits"]) == (tasks, threads, 8)
        assert plan["split_tasks"] == (num_threads > 1)


def test_a_short_call_stays_on_its_thread():
    assert _core.plan_of(unread(4, 2, 8), unread(4, 3, 8), unread(4, 3, 8), num_threads=8)["threads"] == 1


# ---------------------------------------------------------------- many callers


@pytest.mark.parametrize("num_threads", [1, 2])
def test_python_threads_with_calls_of_other_shapes(attend, rng, num_threads):
    """Scratch belongs to a call: every result has the bits of the same call alone."""
    calls = []
    for n in range(8):
        arrays = qkv(rng, 1 + n % 2, 2, 1 + 13 * n, 1 + 190 * n, 8 + n, dtype=("float32", "float64")[n % 2])
        options = {"is_causal": "lower_right", "return_lse": n % 3 == 0, "num_threads": num_threads}
        calls.append((arrays, options))
    want = [attend(*arrays, **options) for arrays, options in calls]
    start = threading.Barrier(len(calls))

    def run(n):
        start.wait(60)
        return [attend(*calls[n][0], **calls[n][1]) for _ in range(8)]

    with ThreadPoolExecutor(len(calls)) as pool:
        for n, results in enumerate(pool.map(run, range(len(calls)), timeout=120)):
            for got in results:
                for g, w in pairs(got, want[n]):
                    assert np.array_equal(g, w), f"call {n}"


def pairs(got, want):
    return zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True)


def test_one_layer_serves_many_threads(rng):
    layer = mha_fast.MultiHeadAttention(32, 4, rng=0)
    inputs = [draw(rng, 2, 5 + 7 * n, 32) for n in range(6)]
    want = [layer(x, x, x) for x in inputs]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for got, w in zip(pool.map(lambda x: layer(x, x, x), inputs, timeout=60), want, strict=True):
                np.testing.assert_allclose(got, w, rtol=1e-12)


def test_errors_belong_to_their_thread(attend, rng):
    """Half of the threads fail again and again, the others never notice."""
    good, bad = qkv(rng, queries=40, keys=300), qkv(rng, keys=300)
    bad = (*bad[:2], bad[2][:, :, 1:])
    want = attend(*good)

    def run(n):
        for _ in range(30):
            if n % 2:
                with pytest.raises(ValueError, match="key has length 300 but value has 299"):
                    attend(*bad)
            else:
                assert np.array_equal(attend(*good, num_threads=2), want)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, range(6), timeout=120)) == [None] * 6


# ---------------------------------------------------------------- how many


@PARALLEL
def test_the_setting_is_the_process_own():
    default = mha_fast.get_num_threads()
    try:
        mha_fast.set_num_threads(5)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(mha_fast.get_num_threads).result(60) == 5
            pool.submit(mha_fast.set_num_threads, 6).result(60)
        assert mha_fast.get_num_threads() == mha_fast.show_config()["num_threads"] == 6
    finally:
        mha_fast.set_num_threads(None)
    assert mha_fast.get_num_threads() == default


@pytest.mark.parametrize("threads", [1, 2, 5, 64, 1024])
def test_more_threads_than_work_or_cores(attend, rng, threads):
    arrays = qkv(rng, 1, 2, 50, 300, dtype="float32")
    assert np.array_equal(attend(*arrays, num_threads=threads), attend(*arrays, num_threads=1))


@pytest.mark.parametrize("missing", [pytest.param("num_threads", marks=PARALLEL), "level"])
def test_a_setting_that_is_not_there_is_an_error(missing):
    """Read as Python reads it, with a reference of its own; a pointer that is not there would end the process."""
    code = f"""
import numpy as np, mha_fast
settings = {{"num_threads": 1, "level": 0}}
del settings[{missing!r}]
mha_fast._core.bind_config(settings)
x = np.ones((1, 3, 4))
mha_fast.scaled_dot_product_attention(x, x, x)
"""
    assert python(code) == f"KeyError: {missing!r}"


REPORT = "import json, mha_fast; print(json.dumps(mha_fast.get_num_threads()))"


@PARALLEL
@pytest.mark.parametrize(
    "environment, count",
    [
        ({"MHA_FAST_NUM_THREADS": "3"}, 3),
        ({"MHA_FAST_NUM_THREADS": " 4 "}, 4),
        ({"MHA_FAST_NUM_THREADS": "1024"}, 1024),
        ({"MHA_FAST_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "5,2,1"}, 5),
        ({"OMP_NUM_THREADS": "100000"}, 1024),
    ],
    ids=str,
)
def test_the_environment_sets_the_default(environment, count):
    assert python(REPORT, **environment) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "2.0", "two", "1025", "9" * 30])
def test_a_bad_count_of_ours_is_an_error_at_import(text):
    got = python(REPORT, MHA_FAST_NUM_THREADS=text)
    assert got == f"ValueError: MHA_FAST_NUM_THREADS is {text!r}; expected an integer from 1 to 1024"


def test_a_bad_count_of_ours_is_quoted_in_one_line():
    got = python(REPORT, MHA_FAST_NUM_THREADS="9" * 5000)
    assert got == f"ValueError: MHA_FAST_NUM_THREADS is '{'9' * 56}...; expected an integer from 1 to 1024"


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5", "9" * 5000], ids=lambda text: text[:9])
def test_a_bad_count_of_openmp_is_ignored(text):
    assert python(REPORT, OMP_NUM_THREADS=text) == python(REPORT)


def test_without_openmp_there_is_one_thread(monkeypatch):
    """Whatever is asked for, and however it is asked for: what is wrong elsewhere is wrong here too."""
    monkeypatch.setattr(_config, "num_threads", _config.num_threads)
    monkeypatch.setattr(_config, "_OPENMP", False)
    monkeypatch.setenv("MHA_FAST_NUM_THREADS", "8")
    assert _config._threads_at_import() == 1
    monkeypatch.setenv("MHA_FAST_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="MHA_FAST_NUM_THREADS is 'many'; expected an integer from 1 to 1024"):
        _config._threads_at_import()
    for count in (8, None):
        mha_fast.set_num_threads(count)
        assert mha_fast.get_num_threads() == mha_fast.show_config()["num_threads"] == 1
    with pytest.raises(ValueError, match="n is 1025; expected at most 1024"):
        mha_fast.set_num_threads(1025)


@pytest.mark.skipif(CONFIG["openmp"], reason="this build has OpenMP")
def test_without_openmp_a_call_takes_the_memory_of_one_thread(attend, rng):
    arrays = qkv(rng, 1, 4, 300, 2000, 64, dtype="float32")
    layer, x = mha_fast.MultiHeadAttention(64, 4, rng=0), draw(rng, 1, 500, 64)
    one = [peak(lambda: attend(*arrays, num_threads=1)), peak(lambda: layer(x, x, x))]
    mha_fast.set_num_threads(8)
    assert [peak(lambda: attend(*arrays, num_threads=8)), peak(lambda: layer(x, x, x))] == one


@PARALLEL
def test_none_returns_to_the_environment():
    code = "import json, mha_fast as m; m.set_num_threads(7); m.set_num_threads(None); print(m.get_num_threads())"
    assert python(code, MHA_FAST_NUM_THREADS="3") == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity calls")
def test_affinity_at_import_is_the_default():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + REPORT
    assert python(code) == 1


@PARALLEL
@pytest.mark.parametrize("setting", [{"OMP_PROC_BIND": "close"}, {"OMP_PROC_BIND": "spread"}, {"OMP_PLACES": "cores"}])
def test_binding_threads_leaves_the_default_as_it_is(setting):
    """OpenMP then binds the thread that loads it to one place."""
    assert python(REPORT, **setting) == python(REPORT)


# ---- control groups, from made-up trees: (memberships, files, CPUs)
GROUPS = {
    "no quota anywhere": ("0::/\n", {}, None),
    "v2": ("0::/app\n", {"app/cpu.max": "150000 100000\n"}, 1.5),
    "v2 max": ("0::/app\n", {"app/cpu.max": "max 100000\n"}, None),
    "v2 an ancestor is less": ("0::/a/b/c\n", {"a/b/c/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
    "v2 an ancestor is more": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 0.5),
    "v2 in a namespace": ("0::/\n", {"cpu.max": "300000 100000"}, 3.0),
    "v2 a path of the host": ("0::/host/only\n", {"cpu.max": "100000 50000"}, 2.0),
    "v1": ("4:cpu,cpuacct:/d\n", {"cpu,cpuacct/d/cpu.cfs_quota_us": "5", "cpu,cpuacct/d/cpu.cfs_period_us": "2"}, 2.5),
    "v1 alone": ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "250000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 2.5),
    "v1 without": ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, None),
    "v1 at the root": ("3:cpu:/d/e\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1.0),
    "v1 another controller": (
        "5:cpuset:/d\n",
        {"cpuset/d/cpu.cfs_quota_us": "1", "cpuset/d/cpu.cfs_period_us": "9"},
        None,
    ),
    "both": (
        "3:cpu,cpuacct:/d\n0::/u\n",
        {
            "cpu,cpuacct/d/cpu.cfs_quota_us": "300000",
            "cpu,cpuacct/d/cpu.cfs_period_us": "100000",
            "u/cpu.max": "400000 100000",
        },
        3.0,
    ),
    "nonsense": ("0::/app\n", {"app/cpu.max": "many few\n"}, None),
    "nothing": ("0::/app\n", {"app/cpu.max": ""}, None),
    "a period of 0": ("0::/app\n", {"app/cpu.max": "100000 0\n"}, None),
    "a colon in the path": ("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2.0),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_quota_of_control_groups(tmp_path, case):
    membership, files, cpus = GROUPS[case]
    root = tmp_path / "cgroup"
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "self").write_text(membership)
    assert _config._cgroup_quota(root, tmp_path / "self") == (float("inf") if cpus is None else cpus)


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert _config._cgroup_quota(tmp_path, tmp_path / "missing") == float("inf")


@pytest.mark.parametrize("quota, cpus", [(0.25, 1), (1.0, 1), (1.5, 2), (2.0, 2), (1e9, None), (float("inf"), None)])
def test_a_quota_counts_as_whole_cpus(monkeypatch, quota, cpus):
    monkeypatch.setattr(_config, "_cgroup_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert _config._usable_cpus() == (cpus or 8)


# ---- what a call really starts: native threads before and after it
COUNT = """
import json, os, sys
import numpy as np
import mha_fast
from threadpoolctl import threadpool_limits
x = np.ones((4, 4, 128, 64), np.float32)
def started(arrays=x, **options):
    before = len(os.listdir("/proc/self/task"))
    mha_fast.scaled_dot_product_attention(arrays, arrays, arrays, **options)
    return len(os.listdir("/proc/self/task")) - before
"""


def counted(statements, **environment):
    return python(COUNT + statements, **({"OMP_NUM_THREADS": "4"} | environment))


@TASKS
@PARALLEL
@pytest.mark.parametrize(
    "statements, threads",
    [
        ("n = started()", 4),
        ("n = started(num_threads=3)", 3),
        ("n = started(num_threads=1)", 1),
        ("mha_fast.set_num_threads(2); n = started()", 2),
        ("mha_fast.set_num_threads(2); n = started(num_threads=5)", 5),
        ("mha_fast.set_num_threads(6); n = started()", 6),
        ("n = started(x[:1, :1, :4], num_threads=8)", 1),  # little work
        ("threadpool_limits(1); n = started()", 1),
        ("threadpool_limits(2, user_api='openmp'); n = started()", 2),
        ("threadpool_limits(1); n = started(num_threads=3)", 3),
        ("threadpool_limits(1, user_api='blas'); n = started()", 4),
        ("with threadpool_limits(1): started()\nn = started()", 4),
        ("with threadpool_limits(limits=8): n = started()", 4),
    ],
)
def test_threads_that_a_call_starts(statements, threads):
    assert counted(statements + "\nprint(json.dumps(n + 1))") == threads


@TASKS
@PARALLEL
def test_our_variable_counts_more_than_openmps():
    assert counted("print(started() + 1)", MHA_FAST_NUM_THREADS="2") == 2


# ---------------------------------------------------------------- the GIL


@contextmanager
def counting_thread():
    """A thread that counts whenever it gets the GIL, which nobody is made to give up."""
    interval, ticks, stop = sys.getswitchinterval(), [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=count)
    try:
        thread.start()
        sys.setswitchinterval(1000)
        yield ticks
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(60)


GIL = pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this Python has no GIL")


@GIL
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_large_call_lets_other_threads_run(attend, rng, num_threads):
    arrays = qkv(rng, 1, 2, 300, 2000, 64, dtype="float32")
    with counting_thread() as ticks:
        before = ticks[0]
        for _ in range(1000):
            attend(*arrays, num_threads=num_threads)
            if ticks[0] > before:
                return
    pytest.fail("another thread never ran")


@GIL
def test_a_tiny_call_keeps_the_gil(attend, rng):
    """Giving it up would mean waiting for whoever takes it."""
    arrays = qkv(rng, 1, 1, 2, 5, 8, dtype="float32")
    with counting_thread() as ticks:
        before = ticks[0]
        for _ in range(50_000):
            attend(*arrays)
        assert ticks[0] == before


# ---------------------------------------------------------------- the floating-point state

X86 = platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"
STATE = pytest.mark.skipif(not X86, reason="sets the control register through glibc's fenv_t of x86-64")
FLUSH, ROUND_DOWN, ROUND_UP = 0x8040, 0x2000, 0x4000  # FTZ and DAZ, rounding
EXCEPTIONS = 0x1D  # invalid, division by zero, overflow, underflow; not inexact


@contextmanager
def control_register(bits):
    """MXCSR with these bits set and no exception flags; yields a function that reads it."""
    libm, memory = ctypes.CDLL("libm.so.6"), [ctypes.create_string_buffer(32) for _ in range(3)]

    def read():
        libm.fegetenv(memory[2])
        return int.from_bytes(memory[2].raw[28:32], "little")

    libm.fegetenv(memory[0])
    changed = (int.from_bytes(memory[0].raw[28:32], "little") & ~0x3F) | bits
    memory[1].raw = memory[0].raw[:28] + changed.to_bytes(4, "little")
    libm.fesetenv(memory[1])
    try:
        yield read
    finally:
        libm.fesetenv(memory[0])


@STATE
@pytest.mark.parametrize("bits", [FLUSH, ROUND_DOWN, ROUND_UP, FLUSH | ROUND_UP])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_callers_state_stays_and_does_not_reach_the_result(isa, attend, rng, bits, num_threads):
    query, key, value = qkv(rng, 1, 2, 40, 300, 20, dtype="float32")
    value *= np.float32(1e-39)
    want = attend(query, key, value, num_threads=num_threads)
    assert want.any()
    out = np.empty_like(want)
    with control_register(bits) as read:
        before = read()
        attend(query, key, value, scale=20**-0.5, out=out, num_threads=num_threads)
        after = read()
    assert before & FLUSH == bits & FLUSH
    assert after & 0xFFC0 == before & 0xFFC0
    assert np.array_equal(out, attend(query, key, value, scale=20**-0.5))


@STATE
def test_a_call_raises_no_exception_flags(isa, attend, rng):
    """Lanes without a row, hidden keys and -inf minus -inf are nobody's business."""
    query, key, value = qkv(rng, 1, 2, 21, 300, 20, dtype="float32")
    mask = np.where(rng.random((21, 300)) < 0.5, 0, -np.inf).astype(np.float32)
    mask[3] = -np.inf
    query[0, 0, 5] = 1e30
    value[0, 0, 7] = np.nan
    with control_register(0) as read:
        attend(query, key, value, mask)
        assert not read() & EXCEPTIONS


@pytest.mark.parametrize("fill", [1.0, 1e30, 1e-45, np.nan, np.inf])
def test_numpy_is_told_of_no_floating_point_error(isa, attend, rng, fill):
    query, key, value = qkv(rng, 1, 2, 21, 300, 20, dtype="float32")
    query[:, :, ::3], key[:, :, ::5], value[:, :, ::7] = fill, fill, fill
    masks = [None, np.full((21, 300), -np.inf, np.float16), np.full(300, -1e300), np.zeros((21, 300), np.float32)]
    layer = mha_fast.MultiHeadAttention(20, 2, rng=0, dtype="float32")
    with np.errstate(all="raise"):
        for mask in masks:
            attend(query, key, value, mask, return_lse=True, return_weights=True)
            attend(query.astype(">f4"), key, value, mask, valid_lens=[np.inf], is_causal="lower_right")
        layer(query[0], key[0], value[0], valid_lens=[1e300, -1e300], need_weights=True)


def test_the_state_of_other_threads_stays(attend, rng):
    """Workers are borrowed from the OpenMP runtime; subnormals work in Python's threads before and after."""
    arrays = qkv(rng, 1, 4, 100, 300, 20)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            attend(*arrays, num_threads=3)
            halves = pool.map(lambda x: x / 2, [sys.float_info.min] * 6)
            assert all(0 < half < sys.float_info.min for half in halves)
