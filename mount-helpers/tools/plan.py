# SPDX-License-Identifier: Apache-2.0
"""hitrainctl plan: the lines of .hitrain/plan, as a table, as they are, or drawn.

The drawing has the time of one step from left to right: above, the content that the plan has in memory; below, what
devices read because something had no room. Both are sums over the lines, in as many columns as the drawing has.
"""
import json

from store import Failure, hidden_lines, printable, size_text

COLUMNS, SCALE, PANEL, GAP, MARGIN = 480, 2, 160, 60, 50
LINES_MAX = 1 << 20     # a daemon has fewer


class Plan:
    def __init__(self, head):
        self.step_ns, self.now_ns, self.active = head.number('step_ns'), head.number('now_ns'), head.get('active') is True
        if 'active' not in head or self.active and self.now_ns >= self.step_ns:
            raise ValueError('no plan')
        self.in_memory, self.read = [0.0] * COLUMNS, [0.0] * COLUMNS    # bytes

    def add(self, line):
        used, upto, fetch = line.number('used_ns'), line.number('next_ns'), line.number('fetch_ns')
        if used >= self.step_ns or not used <= upto <= used + self.step_ns or fetch > 2 * self.step_ns:
            raise ValueError('times that are not in a step')
        size = line.number('bytes')
        if line.get('leaves') is not True:
            self.add_over(self.in_memory, used, upto, size)
            return
        self.add_over(self.in_memory, used, used, size)
        if fetch < upto:
            self.add_over(self.in_memory, fetch, upto, size)
            self.add_over(self.read, fetch, upto, size / max((upto - fetch) * COLUMNS // self.step_ns, 1))

    def add_over(self, column, begin_ns, end_ns, size):
        """Adds bytes in the columns of a part of the step, which repeats."""
        first, end = begin_ns * COLUMNS // self.step_ns, end_ns * COLUMNS // self.step_ns
        for i in range(first, min(max(end, first + 1), first + COLUMNS)):
            column[i % COLUMNS] += size


def read(point, each=lambda plan, line: None):
    """The plan of the store at point. each() is called with the first line and all others."""
    plan = None
    try:
        for line in hidden_lines(point, 'plan', LINES_MAX):
            if plan:
                plan.add(line)
            else:
                plan = Plan(line)
            each(plan, line)
    except ValueError:
        plan = None
    if plan:
        return plan
    raise Failure(f'{point}: .hitrain/plan has no plan: its daemon is of another version')


# ---- the table ----

def put_json(_, line):
    print(json.dumps(line))


class Table:
    """One row for each file: its lines are neighbours, and so are the uses of a part."""

    def __init__(self):
        self.id = None
        self.begun = False

    def put(self, plan, line):
        if self.begun:
            self.add(plan, line)
        else:
            self.put_head(plan, line)
        self.begun = True

    @staticmethod
    def put_head(plan, head):
        print(f'plans made: {head.number("made")}, dropped: {head.number("dropped")}')
        if not plan.active:
            print('no plan is followed')
            return
        size = {key: size_text(head.number(f'{key}_bytes')) for key in ('stay', 'read')}
        print(f'a step takes {plan.step_ns / 1e9:.3f} s and uses {size_text(head.number("bytes"))}; '
              f'{size["stay"]} have room in the whole step, {size["read"]} are read in each')
        print(f'{head.number("matched_steps")} of {head.number("steps")} steps matched, with {head.number("hits")} '
              f'accesses as planned and {head.number("strangers")} others\n')
        print('next use, s       size     leaves  uses  path')

    def add(self, plan, line):
        if line.number('id') != self.id:
            self.put_file()
            self.id, self.path, self.offset = line.number('id'), line.text('path'), None
            self.size = self.leaving = self.uses = 0
            self.next_ns = plan.step_ns
        self.uses += 1
        self.size += line.number('bytes') if line.number('offset') != self.offset else 0
        self.offset = line.number('offset')
        self.leaving += line.number('bytes') if line.get('leaves') is True else 0
        self.next_ns = min(self.next_ns, (line.number('used_ns') - plan.now_ns) % plan.step_ns)

    def put_file(self):
        if self.id is not None:
            print(f'{self.next_ns / 1e9:11.3f} {size_text(self.size):>10} {size_text(self.leaving):>10} {self.uses:5}  '
                  f'{printable(self.path) or f"({self.id})"}')


# ---- the drawing ----

def panel(top, what, colour, column):
    """Bars, the largest value and what they are."""
    most = max(1, *column)
    steps = ''.join(f'V{top + PANEL - PANEL * value / most:.1f}h{SCALE}' for value in column)
    return (f'<text x="{MARGIN}" y="{top - 8}">{what}: at most {size_text(most)}</text>\n'
            f'<path fill="{colour}" d="M{MARGIN} {top + PANEL}{steps}V{top + PANEL}Z"/>\n'
            f'<path stroke="#333" fill="none" d="M{MARGIN} {top}v{PANEL}h{COLUMNS * SCALE}"/>\n')


def drawing(plan):
    wide, bottom = COLUMNS * SCALE, 2 * (PANEL + GAP)
    now = MARGIN + plan.now_ns * wide // plan.step_ns
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 2 * MARGIN} {bottom + GAP}" '
            'font-family="sans-serif" font-size="14">\n<rect width="100%" height="100%" fill="white"/>\n'
            + panel(GAP, 'content in memory', '#7a9cc6', plan.in_memory)
            + panel(2 * GAP + PANEL, f'read in 1/{COLUMNS} of a step, because it had no room', '#c67a7a', plan.read)
            + f'<path stroke="#888" stroke-dasharray="4" d="M{now} {GAP}V{bottom}"/>\n'
            f'<text x="{MARGIN}" y="{bottom + 20}">0</text>'
            f'<text x="{MARGIN + wide}" y="{bottom + 20}" text-anchor="end">{plan.step_ns / 1e9:.3f} s</text>\n</svg>\n')


def run(point, form, svg):
    """form: table or json. svg: a file, or ''."""
    table = Table()
    try:
        plan = read(point, put_json if form == 'json' else table.put)
    except PermissionError:
        raise Failure(f"{point}: only root and the owner of the mount's root may read .hitrain/plan") from None
    table.put_file()
    if svg and not plan.active:
        raise Failure(f'{point}: no plan is followed, so there is nothing to draw')
    if svg:
        try:
            with open(svg, 'w', encoding='ascii') as f:
                f.write(drawing(plan))
        except OSError as e:
            raise Failure(f'{svg}: {e.strerror}') from None
