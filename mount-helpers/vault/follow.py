# SPDX-License-Identifier: Apache-2.0
"""`archive --follow` and `restore --follow`: through a vault, or a pipe."""
import archiver
import follow_pipe
import standby
import words


def run_archive(root, url, o):
    if url != '-':
        if o['from'] or o['digest'] or o['since'] or o['once']:
            raise words.Usage('--from, --digest, --since and --once are for a pipe: a vault knows what it has')
        return archiver.run(root, url, o)
    if o['every'] or o['log'] or o['rank']:
        raise words.Usage('--every, --log and --rank are for a vault: a pipe has all logged steps')
    if o['from'] and o['since']:
        raise words.Usage('--from is for the first time, and --since for later: not both')
    if o['digest'] and not o['from']:
        raise words.Usage('--digest is that of the step of --from')
    return follow_pipe.send(root, o)


def run_restore(url, path, o):
    if o['base']:
        raise words.Usage('--base is for a new model; --follow goes on with the one that is there')
    if o['rank'] and url == '-':
        raise words.Usage('--rank is for a vault: a pipe has the steps of one model')
    return follow_pipe.receive(path, o) if url == '-' else standby.run(url, path, o)
