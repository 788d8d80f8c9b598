# SPDX-License-Identifier: Apache-2.0
"""The results of bench/path.py, as tables, rows of JSON and a plot."""
import statistics

import plot

MIB, GIB = 1 << 20, 1 << 30
SOUND = 0.95  # of its ceiling, or a baseline counts for nothing
HOT_MIN, CLIENTS_MIN, SMALL_MAX, TENSORS_MIN, PASSTHROUGH_MIN = 0.7, 0.9, 10, 0.9, 0.9
SWAPPING_MIN = {'durable': 1.5, 'class=scratch': 2.0}


def rate(record):
    return record['bytes'] / record['seconds']


def cpu_per_gib(record):
    return (record['client_cpu_s'] + record['daemon_cpu_s']) * GIB / record['bytes']


class Results:
    def __init__(self, rows):
        self.rows = rows

    def of(self, part, cell, side):
        return [r for r in self.rows if (r['part'], r['cell'], r['side']) == (part, cell, side)]

    def cells(self, part):
        return list(dict.fromkeys(r['cell'] for r in self.rows if r['part'] == part))

    def median(self, part, cell, side, value=rate):
        found = self.of(part, cell, side)
        return statistics.median(map(value, found)) if found else None

    def ratio(self, part, cell, ours, theirs, value=rate):
        """Over the lowest of theirs in the same run."""
        lowest = map(min, zip(*([value(r) for r in self.of(part, cell, t)] for t in theirs)))
        return statistics.median(value(a) / b for a, b in zip(self.of(part, cell, ours), lowest))


def shown(value, width, digits=0):
    return f'{"-" if value is None else format(value, f",.{digits}f"):>{width}}'


def judged(ratio, least):
    return 'ok' if ratio >= least else 'LOW'


def cold_min(cell):
    return 0.8 if cell.endswith(' 1 MiB') else 0 if cell.endswith('64 KiB') else 0.95


def report_cold(results, limit):
    rows = []
    print(f'\nCold, MiB/s. "ratio": hitrain over the lower of device and minimal daemon. "of fio": the device over its limit; '
          f'below {SOUND} all of the line is void (!).\n')
    print(f'  {"":26}{"device":>8}{"of fio":>8}{"xfs":>8}{"minimal":>9}{"hitrain":>9}{"ratio":>8}{"least":>7}{"":>6}{"CPU s/GiB":>11}{"minimal":>9}')
    for cell in results.cells('cold'):
        device, xfs, minimal, ours = (results.median('cold', cell, s)
                                      for s in ('device', 'xfs', 'minimal daemon on xfs', 'hitrain'))
        theirs = ['device'] + (['minimal daemon on xfs'] if minimal else [])
        ratio, least = results.ratio('cold', cell, 'hitrain', theirs), cold_min(cell)
        void = device / limit < SOUND and least > 0
        cpu = [results.median('cold', cell, s, cpu_per_gib) for s in ('hitrain', 'minimal daemon on xfs')]
        rows.append({'part': 'cold', 'cell': cell, 'ratio': ratio, 'least': least, 'void': void, 'device': device, 'xfs': xfs,
                     'minimal': minimal, 'hitrain': ours, 'cpu_s_per_gib': cpu[0], 'minimal_cpu_s_per_gib': cpu[1]})
        mib = [v / MIB if v else None for v in (device, xfs, minimal, ours)]
        print(f'  {cell:26}{shown(mib[0], 8)}{shown(device / limit, 8, 2)}{shown(mib[1], 8)}{shown(mib[2], 9)}{shown(mib[3], 9)}'
              f'{ratio:8.2f}{shown(least or None, 7, 2)}{"!" if void else judged(ratio, least):>6}'
              f'{shown(cpu[0], 11, 2)}{shown(cpu[1], 9, 2)}')
    return rows


def report_hot(results):
    rows, copy = [], results.median('hot', 'memcpy', 'memory')
    print(f'\nHot (in DRAM), MiB/s; memcpy in the cache gives {copy / MIB:,.0f}. "ratio": hitrain over the minimal daemon.\n')
    print(f'  {"":26}{"tmpfs":>9}{"minimal":>9}{"hitrain":>9}{"ratio":>8}{"least":>7}{"":>6}{"CPU s/GiB":>11}{"minimal":>9}')
    for cell in results.cells('hot'):
        if cell == 'memcpy':
            continue
        sides = 'tmpfs', 'minimal daemon on tmpfs', 'hitrain'
        mib = [results.median('hot', cell, s) / MIB for s in sides]
        cpu = [results.median('hot', cell, s, cpu_per_gib) for s in sides[:0:-1]]
        ratio = results.ratio('hot', cell, 'hitrain', ['minimal daemon on tmpfs'])
        rows.append({'part': 'hot', 'cell': cell, 'ratio': ratio, 'least': HOT_MIN, 'tmpfs': mib[0] * MIB, 'minimal': mib[1] * MIB,
                     'hitrain': mib[2] * MIB, 'cpu_s_per_gib': cpu[0], 'minimal_cpu_s_per_gib': cpu[1]})
        print(f'  {cell:26}{mib[0]:9,.0f}{mib[1]:9,.0f}{mib[2]:9,.0f}{ratio:8.2f}{HOT_MIN:7.2f}{judged(ratio, HOT_MIN):>6}'
              f'{cpu[0]:11.2f}{cpu[1]:9.2f}')
    return rows


def report_swapping(results):
    rows = []
    print("\nReading and writing back each tensor of 8 MiB, one after the other, as DeepSpeed's swapping does; two thirds\n"
          'of them fit in DRAM. "read", "written": by the device, of each byte that is swapped in.\n')
    print(f'  {"":26}{"MiB/s":>9}{"CPU s/GiB":>11}{"read":>7}{"written":>9}{"over xfs":>10}{"least":>7}')
    for cell in results.cells('swapping'):
        for side in 'xfs', 'hitrain':
            moved = [results.median('swapping', cell, side, lambda r, k=k: r[k] / (r['bytes'] / 2))
                     for k in ('device_read', 'device_written')]
            print(f'  {side + ", " + cell:26}{results.median("swapping", cell, side) / MIB:9,.0f}'
                  f'{results.median("swapping", cell, side, cpu_per_gib):11.2f}{moved[0]:7.2f}{moved[1]:9.2f}',
                  end='\n' if side == 'xfs' else '')
        ratio = results.ratio('swapping', cell, 'hitrain', ['xfs'])
        least = SWAPPING_MIN[cell]
        rows.append({'part': 'swapping', 'cell': cell, 'ratio': ratio, 'least': least})
        print(f'{ratio:10.2f}{least:7.2f}{judged(ratio, least):>6}')
    return rows


def report_clients(results):
    rows = []
    print(f'\nClients at once, MiB/s of all together, and the lowest of 4 and 16 over a single one (at least {CLIENTS_MIN})\n')
    print(f'  {"":26}{1:>9}{4:>9}{16:>9}{"ratio":>8}{"":>6}{"CPU s/GiB":>11}{4:>7}{16:>7}')
    for cell in results.cells('clients'):
        one, four, many = ([rate(r) for r in results.of('clients', cell, n)] for n in ('1', '4', '16'))
        ratio = min(statistics.median(b / a for a, b in zip(one, more)) for more in (four, many))
        rows.append({'part': 'clients', 'cell': cell, 'ratio': ratio, 'least': CLIENTS_MIN,
                     'totals': [statistics.median(x) for x in (one, four, many)]})
        print(f'  {cell:26}' + ''.join(f'{statistics.median(x) / MIB:9,.0f}' for x in (one, four, many)) +
              f'{ratio:8.2f}{judged(ratio, CLIENTS_MIN):>6}' +
              ''.join(f'{results.median("clients", cell, n, cpu_per_gib):{w}.2f}' for n, w in (('1', 11), ('4', 7), ('16', 7))))
    return rows


def report_small(results):
    idle, busy = ([r['p99_us'] for r in results.of('small', '4 KiB', s)] for s in ('idle', 'busy'))
    ratio = statistics.median(b / a for a, b in zip(idle, busy))
    print(f'\nCold reads of 4 KiB, 99th percentile: {statistics.median(idle) / 1000:.2f} ms alone, '
          f'{statistics.median(busy) / 1000:.2f} ms beside a stream that takes half of the device: {ratio:.1f} times '
          f'(at most {SMALL_MAX}) {judged(SMALL_MAX, ratio)}')
    return [{'part': 'small', 'cell': '4 KiB', 'ratio': ratio, 'most': SMALL_MAX}]


def report_idle(results):
    row = next(r for r in results.rows if r['part'] == 'idle')
    print(f'\nProcessor time of the idle daemon in {row["cell"]}: {row["cpu_s"]:.2f} s')
    return []


def report_calls(results):
    print('\nSystem calls of the daemon for each GiB, by strace\n')
    for row in (r for r in results.rows if r['part'] == 'calls'):
        most = sorted(row['names'].items(), key=lambda n: -n[1])[:4]
        print(f'  {row["cell"]:26}{row["side"]:24}{row["per_gib"]:8,.0f}   ' + ', '.join(f'{n} {c}' for n, c in most))
    return []


def report_passthrough(results):
    rows = []
    print(f'\nPassthrough files, in DRAM, MiB/s, beside the same of tmpfs (at least {PASSTHROUGH_MIN} when they stay open). "open": opened\n'
          'and closed for each tensor.\n')
    print(f'  {"":26}{"tmpfs":>9}{"hitrain":>9}{"ratio":>8}{"least":>7}{"":>6}{"CPU s/GiB":>11}{"tmpfs":>9}')
    for cell in results.cells('passthrough'):
        mib = [results.median('passthrough', cell, s) / MIB for s in ('tmpfs', 'hitrain')]
        cpu = [results.median('passthrough', cell, s, cpu_per_gib) for s in ('hitrain', 'tmpfs')]
        ratio, least = results.ratio('passthrough', cell, 'hitrain', ['tmpfs']), 0 if cell.startswith('open') else PASSTHROUGH_MIN
        rows.append({'part': 'passthrough', 'cell': cell, 'ratio': ratio, 'least': least, 'tmpfs': mib[0] * MIB, 'hitrain': mib[1] * MIB,
                     'cpu_s_per_gib': cpu[0], 'tmpfs_cpu_s_per_gib': cpu[1]})
        print(f'  {cell:26}{mib[0]:9,.0f}{mib[1]:9,.0f}{ratio:8.2f}{shown(least or None, 7, 2)}{judged(ratio, least) if least else "":>6}'
              f'{cpu[0]:11.2f}{cpu[1]:9.2f}')
    return rows


def report_prefetch(results, limit):
    rows = []
    print('\nPrefetching passthrough tensors, one after the other, MiB/s, over the device\n')
    print(f'  {"":26}{"device":>9}{"of fio":>8}{"hitrain":>9}{"ratio":>8}{"least":>7}{"":>6}{"CPU s/GiB":>11}')
    for cell in results.cells('prefetch'):
        device, ours = (results.median('prefetch', cell, s) for s in ('device', 'hitrain'))
        ratio, least = results.ratio('prefetch', cell, 'hitrain', ['device']), cold_min(f' {cell}')
        void, cpu = device / limit < SOUND, results.median('prefetch', cell, 'hitrain', cpu_per_gib)
        rows.append({'part': 'prefetch', 'cell': cell, 'ratio': ratio, 'least': least, 'void': void, 'device': device, 'hitrain': ours,
                     'cpu_s_per_gib': cpu})
        print(f'  {cell:26}{device / MIB:9,.0f}{device / limit:8.2f}{ours / MIB:9,.0f}{ratio:8.2f}{least:7.2f}'
              f'{"!" if void else judged(ratio, least):>6}{cpu:11.2f}')
    return rows


def report_step(results):
    row = next(r for r in results.rows if r['part'] == 'step')
    moved = sum(n for name, n in row['calls'].items() if 'read' in name or 'write' in name)
    calls = ', '.join(f'{name} {n:g}' for name, n in row['calls'].items())
    print(f'\nA trainer whose gradient and parameter of {row["cell"]} are mapped: {row["steps"] / row["seconds"]:.1f} durable steps per '
          f'second.\nIts system calls in a step: {calls}; of them reading or writing: {moved:g} (at most 0) {judged(0, moved)}\n'
          f'Bytes of tensors across the mount: {row["crossed"]:,} (at most 0) {judged(0, row["crossed"])}')
    return [{'part': 'step', 'cell': 'calls', 'ratio': moved, 'most': 0}, {'part': 'step', 'cell': 'bytes', 'ratio': row['crossed'], 'most': 0}]


def report_targets(rows):
    def fails(r):
        return r['ratio'] > r['most'] if 'most' in r else r['ratio'] < r['least']
    counted = [r for r in rows if ('most' in r or r['least']) and not r.get('void')]
    missed = [f'{r["part"]} {r["cell"]} {r["ratio"]:.2f}' for r in counted if fails(r)]
    void = sum(bool(r.get('void')) for r in rows)
    print(f'\nTargets: {len(counted) - len(missed)} met, {len(missed)} missed, {void} void (the device was slower than it should be)'
          + ''.join(f'\n  missed: {m}' for m in missed))


def report_tensors(results):
    rows = []
    print(f'\nWith few tensors in the store and with 100,000 more, MiB/s (at least {TENSORS_MIN})\n')
    for cell in results.cells('tensors'):
        few, many = (results.median('tensors', cell, s) for s in ('few', 'many'))
        rows.append({'part': 'tensors', 'cell': cell, 'ratio': many / few, 'least': TENSORS_MIN})
        print(f'  {cell:26}{few / MIB:9,.0f}{many / MIB:9,.0f}{many / few:8.2f}{judged(many / few, TENSORS_MIN):>6}')
    return rows


def tell(rows, limit):
    results, out = Results(rows), []
    parts = {'cold': lambda r: report_cold(r, limit), 'hot': report_hot, 'swapping': report_swapping, 'clients': report_clients,
             'small': report_small, 'passthrough': report_passthrough, 'prefetch': lambda r: report_prefetch(r, limit), 'step': report_step,
             'idle': report_idle, 'calls': report_calls, 'tensors': report_tensors}
    for part, say in parts.items():
        if results.cells(part):
            out += say(results)
    report_targets(out)
    return [{'summary': True, **row} for row in out]


def draw(rows, sizes, path):
    results = Results(rows)

    def line(label, color, part, side, what='read O_DIRECT'):
        points = [(size / MIB, results.median(part, f'{what} {name}', side)) for name, size in sizes.items()]
        return plot.Curve(label, color, [(x, y / MIB) for x, y in points if y])
    lines = [line('raw device', '#888', 'cold', 'device'), line('XFS', '#e08020', 'cold', 'xfs'),
             line('hitrain, cold', '#2060c0', 'cold', 'hitrain'), line('hitrain, hot', '#c02040', 'hot', 'hitrain'),
             line('hitrain, passthrough', '#208040', 'passthrough', 'hitrain', 'read'),
             line('tmpfs', '#b0a040', 'passthrough', 'tmpfs', 'read')]
    if any(x.points for x in lines):
        path.write_text(plot.log_log('Reading whole tensors: O_DIRECT, but passthrough files', 'size of a tensor, MiB', 'MiB/s', lines))
