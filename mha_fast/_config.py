"""What is process-wide: the default thread count and the instruction-set level, and where they come from.

`num_threads` and `level` are the only two values; every call reads them and passes them down. They are set at import
from the environment and the machine, `num_threads` also by `set_num_threads`.
"""

import math
import os
from pathlib import Path

from mha_fast import _core, _validate

_LEVELS = _core.levels()  # {name: (number, usable)}
_OPENMP = bool(_core.build_info()["openmp"])


def _positive(text):
    """The number of at least 1 that a text of decimal digits stands for, or None."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        return None
    try:
        return int(digits) or None
    except ValueError:  # more digits than Python converts
        return None


def _environment_threads():
    """The count that MHA_FAST_NUM_THREADS or OMP_NUM_THREADS asks for, or None."""
    text = os.environ.get("MHA_FAST_NUM_THREADS")
    if text is not None:
        count = _positive(text)
        if count is None or count > _validate.MAX_THREADS:
            shown = _validate._show(text)
            raise ValueError(f"MHA_FAST_NUM_THREADS is {shown}; expected an integer from 1 to {_validate.MAX_THREADS}")
        return count
    # OMP_NUM_THREADS may be a list, one count a nesting level; a bad value is for the OpenMP runtime to report.
    count = _positive(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
    return count and min(count, _validate.MAX_THREADS)


def _quota(folder):
    """CPUs that a control group's quota amounts to, or infinity."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf


def _cgroup_quota(root=Path("/sys/fs/cgroup"), membership=Path("/proc/self/cgroup")):
    """CPUs that the control groups of this process allow (version 1 and 2, every ancestor), or infinity."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    least = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            least = min(least, _quota(mount / folder))
    return least


def _usable_cpus():
    """CPUs that this process may really use: affinity and control-group quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpus = max(affinity, _core.openmp_cpus())  # OMP_PROC_BIND and OMP_PLACES leave this thread one CPU of several
    quota = _cgroup_quota()
    return max(1, min(cpus, math.ceil(quota) if quota < math.inf else cpus, _validate.MAX_THREADS))


def _threads_at_import():
    """The default number of threads: what the environment asks for, else the usable CPUs; without OpenMP 1."""
    asked = _environment_threads()  # a bad value is an error in every build
    return (asked or _usable_cpus()) if _OPENMP else 1


def _level_number(name, origin):
    usable = [level for level, (_, ok) in _LEVELS.items() if ok]
    if name not in usable:
        kind = "not usable on this machine" if name in _LEVELS else "not a level of this build"
        raise ValueError(f"{origin} is {name!r}, {kind}; expected one of {', '.join(usable)}")
    return _LEVELS[name][0]


def _default_level():
    name = os.environ.get("MHA_FAST_ISA")
    if name is not None:
        return _level_number(name, "MHA_FAST_ISA")
    return max(number for number, usable in _LEVELS.values() if usable)


_DEFAULT_THREADS = _threads_at_import()
num_threads = _DEFAULT_THREADS
level = _default_level()

_core.bind_config(globals())
if hasattr(os, "register_at_fork"):
    # A parallel region of the GNU runtime hangs in a forked child unless the pool was ended before.
    os.register_at_fork(before=_core.pause_threads)


def get_num_threads():
    """The number of threads that a call without `num_threads` uses at most.

    Returns
    -------
    int
        The value of `set_num_threads`, else of MHA_FAST_NUM_THREADS, else of OMP_NUM_THREADS, else the CPUs that the
        process might use when mha_fast was imported (affinity and control-group quota). Always 1 in a build without
        OpenMP.

    Examples
    --------
    >>> import mha_fast
    >>> mha_fast.get_num_threads() >= 1
    True
    """
    return num_threads


def set_num_threads(n):
    """Set the number of threads that calls without `num_threads` use at most, for the whole process.

    Parameters
    ----------
    n : int or None
        From 1 to 1024; None returns to the value at import. A build without OpenMP stays on one thread.

    Raises
    ------
    TypeError, ValueError
        If `n` is no integer, or out of range.

    Examples
    --------
    >>> import mha_fast
    >>> mha_fast.set_num_threads(1)
    >>> mha_fast.get_num_threads()
    1
    >>> mha_fast.set_num_threads(None)
    """
    global num_threads
    count = _validate.thread_count(n, "n") or _DEFAULT_THREADS
    num_threads = count if _OPENMP else 1


def set_level(name):
    """Use another instruction-set level, for tests; the name as in MHA_FAST_ISA."""
    global level
    level = _level_number(name, "name")


def show_config():
    """What was built, what this machine can use, and what is used.

    Returns
    -------
    dict
        ``version``; ``level`` in use, ``levels_built`` and ``levels_usable``; ``openmp`` (the version's date as an int,
        0 for a build on one thread); ``num_threads``; ``compiler``; ``few_rows``, ``key_block`` and ``key_split``, the
        sizes that the same-bits promise rests on; ``tiles`` of the level in use for each compute dtype.

    Examples
    --------
    >>> import mha_fast
    >>> config = mha_fast.show_config()
    >>> config["level"] in config["levels_usable"]
    True
    """
    from mha_fast import __version__

    return {
        "version": __version__,
        "level": next(name for name, (number, _) in _LEVELS.items() if number == level),
        "levels_built": list(_LEVELS),
        "levels_usable": [name for name, (_, usable) in _LEVELS.items() if usable],
        "num_threads": num_threads,
        **_core.build_info(),
        "tiles": _core.tiles(level),
    }
