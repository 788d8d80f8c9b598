# SPDX-License-Identifier: Apache-2.0
"""The least time of a step that memory and devices allow, whatever the policy: "ideal" may be out of reach.

Of the tensors that a part of the step reads or changes, all but what memory holds at its beginning have to be read in
it, and all but what memory holds at its end have to be written. So a part takes at least the larger one of its
computing and of these bytes over the rate, and a step at least the sum over parts. An update may come late, so it
belongs only to parts that last until the step ends. Copies of what the caller reads and writes count as computing: it
waits for them with unlimited memory, too.
"""
PARTS = 48                      # a step is divided at so many places


def last_step(trace, copy_us=0):
    """Entries (microseconds, key, bytes read, bytes changed, is an update) of the last step. trace: lines.

    copy_us: for each byte that the caller reads or writes.
    """
    size, state, step, steps = {}, {}, [], []
    for words in map(str.split, trace):
        if not words or words[0] in ('hitrain', '#'):
            continue
        op, name = words[0], words[1] if len(words) > 1 else ''
        n = int(words[3]) if len(words) > 3 else size.get(name, 0)
        if op in ('tensor', 'parameter'):
            size[name], state[name] = int(words[2]), sum(map(int, words[3:]))
        elif op == 'compute':
            step.append((int(name), '', 0, 0, False))
        elif op in ('read', 'write'):
            step.append((n * copy_us, name, n * (op == 'read'), n * (op == 'write'), False))
        elif op == 'gradient':
            step.append((size[name] * copy_us, name, size[name], size[name], True))
            step.append((0, (name, 'state'), state[name], state[name], True))
        elif op in ('step', 'commit') and step:
            steps, step = [*steps, step], []
    return steps[-1] if steps else step


def from_here(step, begin, ends, memory, rate):
    """Seconds that each part takes at least that begins there, by its end."""
    computes, read, changed, late, least = 0, {}, {}, {}, {}

    def moved():
        return max(sum(read.values()) - memory, sum(changed.values()) - memory, 0) / rate

    for at in range(begin, len(step)):
        us, key, n_read, n_changed, is_update = step[at]
        computes += us / 1e6
        if is_update:
            late[key] = n_changed
        elif n_read and key not in changed:
            read[key] = max(n_read, read.get(key, 0))   # parts of a tensor may overlap: the largest one is sure
        elif n_changed:
            changed[key] = max(n_changed, changed.get(key, 0))
        if at + 1 == len(step):
            read.update((k, n) for k, n in late.items() if k not in changed)
            changed.update(late)
        if at + 1 in ends:
            least[at + 1] = max(computes, moved())
    return least


def least_seconds(trace, memory, rate, copy_rate=0):
    """copy_rate: bytes per second between the caller and memory; 0: copies take no time."""
    step = last_step(trace, 1e6 / copy_rate if copy_rate else 0)
    ends = sorted({len(step) * k // PARTS for k in range(PARTS + 1)})
    best = {0: 0.0}
    for begin in ends[:-1]:
        for end, seconds in from_here(step, begin, set(ends), memory, rate).items():
            best[end] = max(best.get(end, 0), best[begin] + seconds)
    return best[len(step)]


def logged_over_plain(moved, gradient, resident, durable_every, backward):
    """The least time of a step that logs its gradients, over that of one that does not; all per parameter.

    Memory keeps this part of `moved`, which is written every so many steps; the rest is read and written in each step. Gradients
    are written once. backward: so many bytes can be written while gradients are computed.
    """
    plain = moved * (1 - resident) + moved * resident / durable_every
    return max(plain + gradient, backward) / max(plain, backward)


def replayed_at_most(moved, gradient, steps, step_seconds, rate):
    """Steps computed again over as many ordinary ones, whose rate is 1; gradient and moved: bytes of all parameters.

    All gradients are read, and once what an ordinary step finds in memory.
    """
    return min(1, steps * step_seconds * rate / (steps * gradient + moved))


def clipped_over_plain(memory_bytes, moved, gradient):
    """The least time of a step that clips, over the device's time for `moved` bytes each way; all per parameter.

    No update begins before the last gradient. What memory cannot hold of the gradients is written until then, while
    nothing can be read for the updates, and it is read with them.
    """
    spilled = max(0, gradient - memory_bytes)
    resident = max(0, min(moved, memory_bytes - gradient))
    return (spilled + max(moved - resident + spilled, moved)) / moved
