# SPDX-License-Identifier: Apache-2.0
"""How far ahead parameters and saved tensors are loaded: as far as measured times ask for, so that nobody waits and no more is held than
that takes.

One thread loads one block after the other, so the load of a block has to begin before those of all that follow it:

    uses    | 1 computes | 2 computes | 3 computes |
    loads                   | 2 |  | 3           |          3 takes longer than 2 computes, so it begins while 1 computes

A load may take SLACK times as long as it did. So with loads that take much less time than the blocks compute, one block is loaded ahead.
With loads that take longer, all are, as far as there is room: then the device is never idle.
"""
from typing import List, Optional, Sequence

SLACK = 2.0


def places_ahead(computes: Sequence[float], loads: Sequence[float]) -> List[int]:
    """How many of the uses that follow are to be loaded, or being loaded: before the first use, and during each of them.

    computes  seconds from the begin of each use to that of the next one, without waits for loads
    loads     seconds that the load for each use takes; infinite, if it was never measured"""
    count = len(computes)
    dues = [0.0] * (count + 1)
    for i in range(count):
        dues[i + 1] = dues[i] + computes[i]
    latest = [float('inf')] * (count + 1)  # when a load has to begin
    for i in reversed(range(count)):
        latest[i] = min(dues[i], latest[i + 1]) - SLACK * loads[i]
    found, first = [], 0
    for i in range(count + 1):
        first = max(first, i)
        while first < count and (first == i or latest[first] < dues[i]):
            first += 1
        found.append(first - i)
    return found


def bytes_ahead(read_rate: float, use_rate: float, call_bytes: int) -> Optional[int]:
    """Saved tensors that are in memory before backward needs them: what two calls read, so that one is used while the other is read. None:
    as many as there is room for, because reads are not so much faster than backward that this would do.

    rates  bytes a second of reads, and of what backward uses"""
    return 2 * call_bytes if read_rate >= SLACK * use_rate else None
