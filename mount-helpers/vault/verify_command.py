# SPDX-License-Identifier: Apache-2.0
"""hitrainctl verify ROOT STEP: reads a kept step, and prints its digest."""
import json

from archive import digest_of
from kept import Kept
from objects import Failure
from store import printable
import words


def run(given):
    (root, step), o = words.parse(given, 2, 2, 'a model root and a kept step', digest=words.digest, json=None)
    kept = Kept(root, step)
    end = digest_of(kept, 'verified')
    stored, expected = kept.digest(), o['digest']
    same = all(d in (None, end.digest) for d in (stored, expected))
    if o['json']:
        about = {'path': root, 'name': step, 'digest': end.digest.hex()}
        about.update({'stored': stored.hex()} if stored else {})
        about.update(entries=end.entries, bytes=end.bytes, **({'same': same} if stored or expected else {}))
        print(json.dumps(about))
    else:
        as_known = ', as expected' if expected else ', as stored' if stored else ''
        print(f'{printable(root)}: step {step}: {end.digest.hex()}{as_known if same else ""}', flush=True)
    if expected not in (None, end.digest):
        raise Failure(f'{root}: step {step} has another digest than {expected.hex()}')
    if stored not in (None, end.digest):
        raise Failure(f'{root}: step {step} has changed: the store computed the digest {stored.hex()}')
