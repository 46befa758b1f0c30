"""Fork after use: child and parent both go on, in parallel. Each scenario has a process and a time limit of its own."""

import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

import mha_fast

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# Every scenario begins with this: `attend` uses four threads and checks its own result, `finish` ends a child.
BEGIN = """
import multiprocessing, os, sys, threading
import numpy as np
import mha_fast

x = np.random.default_rng(0).standard_normal((2, 4, 100, 32), dtype=np.float32)
want = mha_fast.scaled_dot_product_attention(x, x, x, num_threads=1)

def attend(repeats=3, num_threads=4):
    for _ in range(repeats):
        assert np.array_equal(mha_fast.scaled_dot_product_attention(x, x, x, num_threads=num_threads), want)

def native_threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 4

def parallel():
    attend()
    assert native_threads() >= 4 or not mha_fast.show_config()["openmp"]

def fork(child):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return pid

def join(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def in_thread(function):
    failures = []
    def run():
        try:
            function()
        except BaseException as error:
            failures.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures, failures
"""

SCENARIOS = {
    "before any use": """
        join(fork(parallel))
        parallel()
    """,
    "after use": """
        attend()
        pid = fork(parallel)
        parallel()
        join(pid)
        parallel()
    """,
    "several children at once": """
        attend()
        children = [fork(parallel) for _ in range(4)]
        parallel()
        for pid in children: join(pid)
    """,
    "again and again": """
        for _ in range(6):
            attend()
            join(fork(attend))
    """,
    "a new thread in the child": """
        attend()
        pid = fork(lambda: (in_thread(parallel), parallel()))
        parallel()
        join(pid)
    """,
    "threads in the child and no call in its first": """
        attend()
        join(fork(lambda: [in_thread(attend) for _ in range(3)]))
    """,
    "from a thread": """
        attend()
        in_thread(lambda: (attend(), join(fork(parallel)), parallel()))
        parallel()
    """,
    "from a thread that never called": """
        attend()
        in_thread(lambda: join(fork(parallel)))
        parallel()
    """,
    "nested": """
        attend()
        def child():
            parallel()
            join(fork(lambda: (parallel(), join(fork(parallel)))))
            parallel()
        join(fork(child))
        parallel()
    """,
    "one thread in the child": """
        attend()
        join(fork(lambda: attend(num_threads=1)))
        parallel()
    """,
    "while another thread computes": """
        stop = threading.Event()
        def compute():
            while not stop.is_set(): attend(1)
        other = threading.Thread(target=compute)
        other.start()
        try:
            for _ in range(5):
                attend()
                join(fork(attend))
        finally:
            stop.set()
            other.join()
    """,
    "a pool of processes": """
        attend()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            results = [pool.apply_async(parallel) for _ in range(6)]
            parallel()
            for result in results: result.get(60)
        parallel()
    """,
    "results come back": """
        attend()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for got in pool.map(mha_fast.PositionWiseFFN(4, 8, rng=0), [np.ones((2, 4))] * 4):
                assert np.array_equal(got, mha_fast.PositionWiseFFN(4, 8, rng=0)(np.ones((2, 4))))
    """,
    "the setting is inherited": """
        mha_fast.set_num_threads(3)
        attend(num_threads=None)
        def child():
            assert mha_fast.get_num_threads() == 3
            attend(num_threads=None)
            mha_fast.set_num_threads(2)
        join(fork(child))
        assert mha_fast.get_num_threads() == 3
    """,
    "an error in the child": """
        attend()
        def child():
            try:
                mha_fast.scaled_dot_product_attention(x, x[:, :2], x)
            except ValueError:
                parallel()
        join(fork(child))
        parallel()
    """,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fork(scenario):
    path = os.path.dirname(os.path.dirname(os.path.abspath(mha_fast.__file__)))
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + dedent(SCENARIOS[scenario])],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text = process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the children too
        pytest.fail(f"hangs; so far it said: {process.communicate()[0]}")
    assert process.returncode == 0, text
