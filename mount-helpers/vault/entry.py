# SPDX-License-Identifier: Apache-2.0
"""What an entry of a step may be: pure functions, the same for writers and readers. Paths, names and attributes are
bytes. A function that checks raises Damage with the rest of a sentence about the entry.
"""
import collections
import re
import struct

from objects import Damage

DIRECTORY, FILE, SYMLINK, LINK = range(1, 5)
PATH_BYTES_MAX = 4095
DEPTH_MAX = 256                 # directories below the root
NAME_BYTES_MAX = 255
FILE_BYTES_MAX = 1 << 44
STATE_BYTES_MAX = 4 * FILE_BYTES_MAX
ATTRIBUTE_BYTES_MAX = 65536
ATTRIBUTES_BYTES_MAX = (1 << 20) * 3 // 2
HIDDEN = b'.hitrain'

PREFIX = b'user.hitrain.'
ACCESS_LISTS = b'system.posix_acl_access', b'system.posix_acl_default'
# Marks of programs, which are part of no step.
FOLLOW, STAGING = b'user.hitrain-follow', b'user.hitrain-receive'
# Of a model whose content lies in a vault: JOB@STEP. The store sets it.
COLD = PREFIX + b'cold'
# Where content lies, and how it is stored: no part of a digest.
NOT_IN_DIGEST = {PREFIX + b'tier', PREFIX + b'pin', PREFIX + b'compress'}

_ENTRY = struct.Struct('<HHIIHHqQ')
_ATTRIBUTE = struct.Struct('<HI')
_STATE_NAME = re.compile(b'[a-z0-9_]{1,64}')


# path: below the root; b'' is the root. target: of a symlink its text, of a hard link the path of an earlier file. attributes: (name, value)
# in the order of names.
Entry = collections.namedtuple('Entry', 'kind path mode uid gid mtime_ns size target attributes', defaults=(0, 0, 0, 0, 0, b'', ()))


def is_carried(name):
    """Is the attribute part of a step?"""
    return name not in (FOLLOW, STAGING, COLD) and (name.startswith(b'user.') and len(name) > 5 or name in ACCESS_LISTS)


def is_in_digest(name):
    return name.startswith(b'user.') and name not in NOT_IN_DIGEST


# ---- rules ----

def check_path(path):
    if len(path) > PATH_BYTES_MAX or b'\0' in path:
        raise Damage('its path is too long, or is no text')
    names = path.split(b'/')
    if any(not 0 < len(n) <= NAME_BYTES_MAX or n in (b'.', b'..', HIDDEN) for n in names):
        raise Damage('its path leaves the model, or names what no program may make')
    if len(names) > DEPTH_MAX + 1:
        raise Damage('it lies in too many directories')


def order(path):
    """Paths in the order of a walk that looks at the names of each directory by their bytes."""
    return path.split(b'/') if path else []


def check_order(last, path):
    """path comes after the entry last. Each directory of path is one of the step, and no path comes twice."""
    folder = order(path)[:-1]
    above = order(last.path)
    if folder == above:
        if last.kind != DIRECTORY:
            raise Damage('it lies in what is no directory')
    elif above[:len(folder)] != folder:
        raise Damage('it does not follow its directory')
    elif above >= order(path):
        raise Damage('it is not in order, or comes twice')


def check_target(e):
    if (e.kind in (SYMLINK, LINK)) != (e.target != b''):
        raise Damage('it is a link to nothing, or no link and has a target')
    if len(e.target) > PATH_BYTES_MAX or b'\0' in e.target:
        raise Damage('its target is too long, or is no text')
    if e.kind == LINK:
        check_path(e.target)
        if order(e.target) >= order(e.path):
            raise Damage('its target does not stand before it')


def check_attributes(attributes):
    last = b''
    if sum(_ATTRIBUTE.size + len(n) + len(v) for n, v in attributes) > ATTRIBUTES_BYTES_MAX:
        raise Damage('its attributes are too large')
    for name, value in attributes:
        if not 0 < len(name) <= NAME_BYTES_MAX or b'\0' in name:
            raise Damage('an attribute has no proper name')
        if len(value) > ATTRIBUTE_BYTES_MAX:
            raise Damage('an attribute is too large')
        if not is_carried(name):
            raise Damage('an attribute is neither user.* nor an access list')
        if name <= last:
            raise Damage('its attributes are not in order')
        last = name


def check_entry(e):
    plain = e.kind in (DIRECTORY, FILE)
    if not plain and e.kind not in (SYMLINK, LINK):
        raise Damage('its kind is unknown')
    if e.path:
        check_path(e.path)
    elif e.kind != DIRECTORY:
        raise Damage('the root is no directory')
    check_target(e)
    if not 0 <= e.size <= (FILE_BYTES_MAX if e.kind == FILE else 0):
        raise Damage('its size is impossible')
    if e.mode & ~0o7777 or (not plain and e.mode):
        raise Damage('its mode is impossible')
    if not plain and e.attributes:
        raise Damage('it is a link and has attributes')
    if e.kind == LINK and (e.uid or e.gid or e.mtime_ns):
        raise Damage('it is a link and has an owner or a time')
    check_attributes(e.attributes)


def check_state(name, size):
    if not _STATE_NAME.fullmatch(name):
        raise Damage('a state has no proper name')
    if not 0 < size <= STATE_BYTES_MAX:
        raise Damage('the size of a state is impossible')


# ---- bytes ----

def pack_entry(e):
    parts = [_ENTRY.pack(e.kind, e.mode, e.uid, e.gid, len(e.path), len(e.target), e.mtime_ns, e.size), e.path, e.target]
    for name, value in e.attributes:
        parts += _ATTRIBUTE.pack(len(name), len(value)), name, value
    return b''.join(parts)


def parse_attributes(data):
    found, at = [], 0
    while at < len(data):
        if len(data) - at < _ATTRIBUTE.size:
            raise Damage('its attributes are cut')
        name_bytes, value_bytes = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        if len(data) - at < name_bytes + value_bytes:
            raise Damage('its attributes are cut')
        found.append((data[at:at + name_bytes], data[at + name_bytes:at + name_bytes + value_bytes]))
        at += name_bytes + value_bytes
    return tuple(found)


def parse_entry(data):
    """An entry that obeys all rules but the order."""
    data = bytes(data)
    if len(data) < _ENTRY.size:
        raise Damage('an entry is cut')
    kind, mode, uid, gid, path_bytes, target_bytes, mtime_ns, size = _ENTRY.unpack_from(data)
    at = _ENTRY.size
    if len(data) - at < path_bytes + target_bytes:
        raise Damage('an entry has no proper path')
    path, target = data[at:at + path_bytes], data[at + path_bytes:at + path_bytes + target_bytes]
    e = Entry(kind, path, mode, uid, gid, mtime_ns, size, target)
    try:
        e = e._replace(attributes=parse_attributes(data[at + path_bytes + target_bytes:]))
        check_entry(e)
    except Damage as why:
        raise Damage(f'the entry {os_text(path)} is refused: {why}') from None
    return e


def os_text(path):
    """For messages, which are made printable before they are printed."""
    return path[:120].decode(errors='surrogateescape') or 'of the model'


def attribute(e, word):
    """The value of user.hitrain.WORD, or None."""
    return dict(e.attributes).get(PREFIX + word)
