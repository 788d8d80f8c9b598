#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""No loop over chunks, objects, names, parents or deferred frees holds a lock for as long as there are such.

Such a loop calls ht_slice_next or ht_ns_slice_next, or a comment before it, on the line above or on its own, says why
it is bounded:

    /* bounded: SLICE_CHUNKS chunks */

Replays and checks are exempt, for no other thread works then; a checkpoint in the same file is not. Each run begins
with examples of its own, so a lint that finds nothing any more fails.
"""
import re
import sys

from ctext import blank, c_files

FOLDERS = ('tiering/', 'fs/', 'optim/')
EXEMPT = ('replay.c', 'check.c')
CHECKPOINT = '- checkpoint */\n'  # the head of that section
LOOP = re.compile(r'\b(for|while|ht_chunk_for_each\w*|ht_list_for_each\w*)\s*\(')
WALKS = {
    'chunks': re.compile(r'\bht_chunk_for_each\w*\s*\('),
    'objects of the store': re.compile(r'->touched\b|objects\.table\.(?:buckets\.)?count|\bht_touched_walk_next\s*\('),
    'deferred frees': re.compile(r'\bht_deferred_frees_(?:next|first)\s*\('),
    'names': re.compile(r'->name_next\b'),
    'parents': re.compile(r'->self->dir\b(?!->)'),
}
SLICES = re.compile(r'\bht_(?:ns_)?slice_next\s*\(')
BOUNDED = re.compile(r'/\* bounded: \w[^*]*\*/')


def closing(code, at):
    """The place after the bracket that closes the one at `at`."""
    pairs, depth = {'(': ')', '{': '}'}, 0
    opens = code[at]
    for i in range(at, len(code)):
        depth += (code[i] == opens) - (code[i] == pairs[opens])
        if not depth:
            return i + 1
    return len(code)


def statement_end(code, at):
    """The place after the statement that begins at or after `at`."""
    at += len(code[at:]) - len(code[at:].lstrip())
    if code[at:at + 1] == '{':
        return closing(code, at)
    m = re.compile(r'(?:if|for|while|switch|ht_\w*for_each\w*)\s*\(').match(code, at)
    if m:
        return statement_end(code, closing(code, m.end() - 1))
    end = code.find(';', at)
    return len(code) if end < 0 else end + 1


def walk_of(head, loop):
    """What a loop goes over: by its head, and for steps to a next name or parent by its body, too."""
    for name, pattern in WALKS.items():
        if pattern.search(head) or (name in ('names', 'parents') and pattern.search(loop)):
            return name
    return None


def unbounded(text):
    """[(line, what it goes over)] of loops that neither end a slice nor say why they are bounded."""
    code, found = blank(text), []
    for m in LOOP.finditer(code):
        line_begin = code.rfind('\n', 0, m.start()) + 1
        if code[line_begin:m.start()].lstrip().startswith('#'):
            continue
        head_end = closing(code, m.end() - 1)
        end = statement_end(code, head_end)
        over = walk_of(code[m.start():head_end], own_part(code, head_end, end))
        before = text.rfind('\n', 0, max(line_begin - 1, 0)) + 1
        said = text[before:text.find('\n', head_end)]
        if over and not SLICES.search(code[m.start():end]) and not BOUNDED.search(said):
            found.append((text.count('\n', 0, m.start()) + 1, over))
    return found


def own_part(code, at, end):
    """The body without loops inside it, which have their own heads and bodies."""
    out = ''
    for m in LOOP.finditer(code, at, end):
        if m.start() < at:
            continue
        out += code[at:m.start()]
        at = statement_end(code, closing(code, m.end() - 1))
    return out + code[at:end]


def examples():
    bad = [
        'void f(void)\n{\n    ht_chunk_for_each_from(c, o, i)\n    {\n        g(c);\n    }\n}\n',
        'void f(void)\n{\n    ht_chunk_for_each_busy(c, o, i) if (c->slot) g(c);\n    ht_slice_next(s, &slice);\n}\n',
        'void f(void)\n{\n    for (e = i->names; e; e = e->name_next)\n        g(e);\n}\n',
        'void f(void)\n{\n    for (b = 0; b < s->objects.table.buckets.count; b++)\n        g(b);\n}\n',
        'void f(void)\n{\n    while (i->up)\n        i = i->u.dir->self->dir;\n}\n',
        'void f(void)\n{\n    /* it is bounded */\n    while ((r = ht_deferred_frees_next(&at)))\n        g(r);\n}\n',
    ]
    good = [
        'void f(void)\n{\n    ht_chunk_for_each_from(c, o, i)\n    {\n        g(c);\n        ht_slice_next(s, &slice);\n    }\n}\n',
        'void f(void)\n{\n    /* bounded: few names */\n    for (e = i->names; e; e = e->name_next)\n        g(e);\n}\n',
        'void f(void)\n{\n    for (i = 0; i < n; i++, ht_slice_next(s, &slice))\n        ht_chunk_find(o, i);\n}\n',
        '#define ht_chunk_for_each_from(c, o, index) for (; (c = ht_chunk_next(o, &(index))); (index)++)\n',
    ]
    for text in bad:
        assert len(unbounded(text)) == 1, text
    for text in good:
        assert not unbounded(text), text


def main():
    examples()
    failed = False
    for path, text in c_files():
        if not str(path).startswith(FOLDERS):
            continue
        replay, _, checkpoint = text.partition(CHECKPOINT)
        exempt = str(path).endswith(EXEMPT) and (replay.count('\n') if checkpoint else len(text))
        for line, over in unbounded(text):
            if line <= exempt:
                continue
            if over == 'objects of the store' and not str(path).startswith('tiering/'):
                continue  # another list of that name
            failed = True
            print(f'{path}:{line}: a loop over {over} ends no slice (ht_slice_next, ht_ns_slice_next), '
                  'and no comment "bounded: ..." says why it may')
    return failed


sys.exit(main())
