# SPDX-License-Identifier: Apache-2.0
"""Where the daemon spends its time: perf samples it during a short training load.

The load is a model of 64 MiB whose gradients are written and whose parameters are read, step by step, and a file that is
written and synced beside it. Results go to build/profile: report.txt, stacks.txt (one line for each stack, with its
samples) and flames.svg, a flame graph of these.
"""
import html
import os
import shutil
import subprocess
import time

from common import BUILD, PROGRAMS, begin, give_up, is_mounted, run, wait_for

SECONDS = 20
PARAMS, BYTES = 16, 4 << 20
OUT = BUILD / 'profile'
ROW, WIDTH, MIN_WIDTH = 16, 1200, 1.0   # of the picture, in pixels


def write(path, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for at in range(0, len(data), 1 << 20):
            os.write(fd, data[at:at + (1 << 20)])
    finally:
        os.close(fd)


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load(point, seconds):
    """Returns the number of steps."""
    model = point / 'model'
    model.mkdir()
    os.setxattr(model, 'user.hitrain.dtype', b'f32')
    os.setxattr(model, 'user.hitrain.optimizer', b'adamw lr=1e-3')
    data = os.urandom(1 << 16) * (BYTES >> 16)
    for i in range(PARAMS):
        write(model / f'w{i}', bytes(BYTES))
    steps, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for i in range(PARAMS):
            write(model / '.hitrain' / 'grad' / f'w{i}', data)
        write(point / 'log', data[:1 << 18])
        sync(point / 'log')
        sync(model)
        for i in range(PARAMS):
            (model / f'w{i}').read_bytes()
        steps += 1
    return steps


def folded(script):
    """Samples by stack, outermost first: the text of perf script has a header line, then frames, innermost first."""
    stacks = {}
    for block in script.split('\n\n'):
        lines = block.strip().splitlines()
        if len(lines) < 2:
            continue
        frames = [line.split(None, 1)[1].rsplit(' (', 1)[0].split('+0x')[0] for line in lines[1:] if len(line.split(None, 1)) > 1]
        stack = (lines[0].split()[0], *reversed(frames))
        stacks[stack] = stacks.get(stack, 0) + 1
    return stacks


def tree_of(stacks):
    root = [0, {}]
    for stack, count in stacks.items():
        node = root
        node[0] += count
        for frame in stack:
            node = node[1].setdefault(frame, [0, {}])
            node[0] += count
    return root


def boxes(name, node, x, depth, scale):
    """(name, samples, x, width, depth) of a node and all above it that are wide enough to be seen."""
    yield name, node[0], x, node[0] * scale, depth
    for child, below in sorted(node[1].items()):
        if below[0] * scale >= MIN_WIDTH:
            yield from boxes(child, below, x, depth + 1, scale)
        x += below[0] * scale


def picture(stacks):
    root = tree_of(stacks)
    drawn = list(boxes('all', root, 0, 0, WIDTH / max(root[0], 1)))
    height = (max(depth for *_, depth in drawn) + 1) * ROW
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="monospace" font-size="11">']
    for name, samples, x, width, depth in drawn:
        y, text = height - (depth + 1) * ROW, html.escape(name)
        shown = html.escape(name[:int(width / 7)]) if width > 20 else ''
        hue = 20 + sum(map(ord, name)) % 40
        parts.append(f'<g><title>{text}: {samples} samples, {100 * samples / root[0]:.1f} %</title>'
                     f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 1}" fill="hsl({hue},80%,65%)"/>'
                     f'<text x="{x + 2:.1f}" y="{y + ROW - 5}">{shown}</text></g>')
    return '\n'.join(parts + ['</svg>', ''])


def perf(*args, **kw):
    return subprocess.run(['perf', *map(str, args)], stdin=subprocess.DEVNULL, text=True, capture_output=True, **kw)


def report(data):
    script = perf('script', '-i', data, '-F', 'comm,ip,sym').stdout
    stacks = folded(script)
    if not stacks:
        give_up('perf took no samples')
    text = perf('report', '-i', data, '--stdio', '--no-children', '-g', 'caller,0.5,callee', '--percent-limit', '1').stdout
    (OUT / 'report.txt').write_text(text)
    (OUT / 'stacks.txt').write_text(''.join(f'{";".join(s)} {n}\n' for s, n in sorted(stacks.items())))
    (OUT / 'flames.svg').write_text(picture(stacks))
    return sum(stacks.values())


def main():
    if not shutil.which('perf'):
        give_up('perf is missing: install linux-perf')
    (BUILD / 'bench').mkdir(parents=True, exist_ok=True)
    OUT.mkdir(exist_ok=True)
    folder = begin('profile')
    image, point, data = folder / 'image', folder / 'mnt', OUT / 'perf.data'
    point.mkdir()
    run(PROGRAMS / 'mkfs.hitrain', '--size=1G', image)
    daemon = subprocess.Popen([PROGRAMS / 'hitrain', '-f', image, point, '-o', 'dram=128M'], stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_mounted(point), 'mount')
        sampler = subprocess.Popen(['perf', 'record', '-q', '-F', '499', '-g', '--call-graph', 'dwarf,16384', '-o', data, '-p', str(daemon.pid)],
                                   stdin=subprocess.DEVNULL)
        steps = load(point, SECONDS)
        sampler.send_signal(2)
        sampler.wait(60)
    finally:
        subprocess.run(['umount', point], check=False)
        daemon.wait(60)
    samples = report(data)
    print(f'{steps} steps in {SECONDS} s, {samples} samples: {OUT}/report.txt, {OUT}/flames.svg')


if __name__ == '__main__':
    main()
