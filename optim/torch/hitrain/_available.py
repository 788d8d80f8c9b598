# SPDX-License-Identifier: Apache-2.0
"""How much memory a process may still take."""
import contextlib
import os
from typing import Iterator, Tuple


def available_bytes() -> int:
    """How much memory this process may still take, by what the kernel and the process's cgroups say."""
    with open('/proc/meminfo') as f:
        found = next(int(line.split()[1]) << 10 for line in f if line.startswith('MemAvailable'))
    return max(0, min([found, *(limit - used for limit, used in _cgroups())]))


def _cgroups() -> Iterator[Tuple[int, int]]:
    """Limit and use of each memory cgroup that this process is in. Files in the page cache are no use."""
    with open('/proc/self/cgroup') as f:
        groups = [line.rstrip('\n').split(':', 2)[1:] for line in f]
    for controllers, path in groups:
        if controllers and 'memory' not in controllers.split(','):
            continue
        top, limit, used, prefix = ('/sys/fs/cgroup/memory', 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_') if controllers else \
            ('/sys/fs/cgroup', 'memory.max', 'memory.current', '')
        place = top + path
        while place.startswith(top):
            with contextlib.suppress(OSError, ValueError):  # the root has none, and one may have no limit
                yield int(_read(place, limit)), int(_read(place, used)) - _cached(_read(place, 'memory.stat'), prefix)
            place = os.path.dirname(place)


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as f:
        return f.read()


def _cached(stat: str, prefix: str) -> int:
    figures = dict(line.split() for line in stat.splitlines())
    return sum(int(figures[f'{prefix}{state}_file']) for state in ('active', 'inactive'))
