"""A process for each library, so that their thread pools do not disturb each other, and the conversation with it."""

import multiprocessing
import os
import time

import numpy as np

from bench.machine import NOT_TAKEN_OVER

# Seconds in which a library's pool still spins after a call, with a margin.
SPINNING = {"plain": 0.12, "reference": 0.12, "onnxruntime": 0.12, "torch": 0.02, "mha_fast": 0.02}
SAMPLE = 4096  # outputs that are compared
CONTEXT = multiprocessing.get_context("spawn")  # nothing of the parent, least of all its threads


def seconds(call, number):
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def sample(output):
    flat = np.ravel(output)
    return flat[:: max(1, flat.size // SAMPLE)].astype(np.float64)


def serve(name, threads, pipe):
    """Answers ("open", case) with ("ok", sample, seconds of a call) or ("n/a", why), ("time", target) with seconds."""
    from threadpoolctl import threadpool_info, threadpool_limits

    from bench.contestants import CONTESTANTS

    call = limits = None
    number = 1
    while True:
        what, argument = pipe.recv()
        try:
            if what == "pools":
                pools = [
                    " ".join(
                        str(pool[k]) for k in ("internal_api", "version", "architecture", "num_threads") if pool.get(k)
                    )
                    for pool in threadpool_info()
                ]
                pipe.send(", ".join(pools))
            elif what == "open":
                call = None  # the memory of the case before goes first
                if limits:
                    limits.restore_original_limits()
                count = argument.threads or threads
                limits = threadpool_limits(count, user_api="blas")
                call = CONTESTANTS[name](argument, count)
                if call is None:
                    pipe.send(("n/a", "not offered"))
                    continue
                start = time.perf_counter()
                first = sample(call())
                once = time.perf_counter() - start
                if once < 0.3:  # else what the first call does besides does not matter
                    once = seconds(call, 1)
                number = max(1, int(0.02 / max(once, 1e-7)))
                pipe.send(("ok", first, once))
            else:
                pipe.send(timed(call, number, argument))
        except Exception as error:  # a library that cannot do a case says so; the run goes on
            call = None
            pipe.send(("n/a", f"{type(error).__name__}: {error}"[:200]))


def timed(call, number, target):
    """Seconds a call, in runs of number calls until about target seconds are over; a call before, where it is short."""
    end = time.perf_counter() + target
    if number > 1:
        call()
    times = [seconds(call, number)]
    while time.perf_counter() + times[-1] * number < end:
        times.append(seconds(call, number))
    return times


class Worker:
    """One library's process. One that dies says so and is started again for the next case."""

    def __init__(self, name, threads):
        self.name, self.threads = name, threads
        self.start()

    def start(self):
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", *NOT_TAKEN_OVER)
        before = {x: os.environ.pop(x, None) for x in names}
        os.environ |= dict.fromkeys(names[:3], str(self.threads))
        self.pipe, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(self.name, self.threads, there), daemon=True)
        self.process.start()
        there.close()
        for x, value in before.items():
            os.environ.pop(x, None)
            if value is not None:
                os.environ[x] = value

    def ask(self, what, argument=None):
        try:
            self.pipe.send((what, argument))
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            answer = ("n/a", f"its process died, exit status {self.process.exitcode}")
            self.start()
        time.sleep(SPINNING[self.name] if what != "pools" else 0)
        return answer

    def close(self):
        self.process.terminate()
        self.process.join()
