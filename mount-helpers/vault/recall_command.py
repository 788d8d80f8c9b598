# SPDX-License-Identifier: Apache-2.0
"""hitrainctl recall PATH: cold content of a model, or of one of its files, comes to the devices of the store, which reads it in the
background. This waits for it. What a signal ends is the wait alone.
"""
import json
import os
import time

from control import open_ctl, tell
from kept import open_folder
from objects import Failure
from say import Progress
from store import printable, size_text
from stores import drop_pins, mount_of, word
import stop
import words

LOOK_S = 0.2


def run(given):
    (path,), o = words.parse(given, 1, 1, 'a model root or a file in one', json=None)
    root, below = root_of(path)
    if word(root, 'cold') is None:
        raise Failure(f'{root}: nothing in it is cold')
    total = wait(path, root, below)
    gone = drop_pins(mount_of(path)) if word(root, 'cold') is None else []
    if o['json']:
        print(json.dumps({'path': path, 'bytes': total, 'cold': word(root, 'cold'), 'unpinned': gone}))
    else:
        print(printable(f'{path}: {size_text(total)} came back'
                        + ('' if word(root, 'cold') is None else f'; other content of {root} is cold')))


def root_of(path):
    """(the model root that a path lies in, the path below it)."""
    at, below = os.path.realpath(path), ''
    if not os.path.lexists(at):
        raise Failure(f'{path}: No such file or directory')
    while word(at, 'optimizer') is None:
        above, name = os.path.split(at)
        if above == at:
            raise Failure(f'{path} lies in no model root')
        at, below = above, os.path.join(name, below) if below else name
    return at, below


def left_of(path):
    text = word(path, 'cold_bytes')
    if text is None or not text.isdigit():
        raise Failure(f'{path}: it does not say how much is cold')
    return int(text)


def wait(path, root, below):
    """Bytes that came. Failure: the store gave up."""
    stop.catch()
    first = left_of(path)
    try:
        tell(open_ctl(open_folder(root)), b'recall ' + os.fsencode(below) if below else b'recall')
    except OSError as e:
        raise Failure(f'{path}: {e.strerror}') from None
    progress, left = Progress('recalled', first), first
    while True:
        now = left_of(path)
        progress.add(max(left - now, 0))
        left = now
        if word(root, 'recall') != 'running':
            break
        stop.check()
        time.sleep(LOOK_S)
    left = left_of(path)
    progress.end()
    if left:
        raise Failure(f'{path}: {size_text(left)} are still cold: {word(root, "error") or "another program ended the recall"}')
    return first
