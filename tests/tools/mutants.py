#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Mutants: the program without one safeguard (tiering/base/mutant.h). A test that passes on a mutant proves nothing.

Each row names a mutant, the missing safeguard, and the test that has to notice; no other test of that program runs. The
tests are the ordinary ones, built in a folder of their own with MUTANTS=1; the same tests pass on the program itself. The
last line is "N mutants caught, N not".
"""
import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import time

SECONDS_MAX = 900
SMALL, ROT = 'tests/crash/crash_small', 'tests/crash/crash_rot'
SLICES = 'tests/unit/tiering/txn/test_slices'
SCRUB = 'tests/unit/tiering/engine/test_scrub'
SHARED = 'tests/unit/tiering/engine/test_scrub_shared'
DEDUP = 'tests/unit/tiering/engine/test_dedup'
FRAMES = 'tests/unit/tiering/engine/test_dedup_frames'
COMPACT = 'tests/unit/tiering/engine/test_compact'
OWNERS = 'tests/unit/tiering/engine/test_compact_owners'
COMPRESS = 'tests/unit/tiering/engine/test_compress_shared'
FLUSH = 'tests/unit/tiering/data/test_flush'
IO_FLUSH = 'tests/unit/tiering/io/test_flush'
NEWER = 'tests/unit/tiering/store/test_newer'
MEMORY = 'tests/unit/mount-helpers/fsck/test_memory'
STEP = 'tests/unit/optim/step/test_step'
KEPT = 'tests/unit/mount-helpers/fsck/test_kept'
SQUARES = 'tests/unit/optim/state/test_squares'
REDO = 'tests/unit/optim/redo/test_redo'
STATE_FORMS = 'tests/unit/optim/step/test_forms'
REDO_READ = 'tests/unit/optim/redo/test_redo_read'
RECOVER = 'tests/unit/optim/redo/test_recover'
FORMS = 'tests/unit/optim/rules/test_forms'
TAKEN = 'tests/mount/test_one_writer.py::test_a_writer_that_stood_still_stops_when_another_took_over'
FREE = 'tests/mount/test_free_space.py::test_space_is_free_when_the_call_returns'
FULL = 'tests/model/model_full'
HOLD = 'tests/mount/test_life_holds.py::test_a_file_stays_held_while_writes_of_the_dead_go_on'

# mutant, missing safeguard, program, scenario (of crash_small) or test (of the others)
MUTANTS = [
    ('data-flush', 'flush of data before the frame that names it', SMALL, 'create'),
    ('second-flush', 'flush of data on the other device', SMALL, 'two-write'),
    ('frame-flush', 'flush after a frame', SMALL, 'create'),
    ('early-answer', 'fsync waits for the frame', SMALL, 'create'),
    ('super-flush', 'flushes of the superblock', SMALL, 'mount'),
    ('super-order', 'the last good superblock is overwritten last', 'tests/unit/tiering/space/test_super', 'the_last_present_copy_is_never_overwritten_first'),
    ('add-members-first', 'an added device has its superblocks before others name it', 'tests/crash/crash_add', 'an_addition_that_is_cut_short_leaves_the_store_with_or_without_the_device'),
    ('epoch-unnamed', 'the superblock knows an epoch before frames do', SMALL, 'mount'),
    ('start-early', 'checkpoint is durable before its start is named', SMALL, 'checkpoint'),
    ('log-reuse', 'log space is free when the new start is durable', SMALL, 'log-wrap'),
    ('no-refill', 'a stale copy of the log is refilled', SMALL, 'create'),
    ('pending-emitted', 'checkpoint emits published state only', SMALL, 'checkpoint-step'),
    ('torn-commit', 'one commit is one frame', SMALL, 'step'),
    ('reuse-at-once', 'freed space waits for the log', SMALL, 'reuse'),
    ('discard-early', 'discards wait for the log', SMALL, 'discard'),
    ('owner-forgotten', 'shared space waits for its last owner', SMALL, 'reuse-clone'),
    ('kept-owner', 'a kept step owns what it shares', SMALL, 'keep'),
    ('kept-half', 'a kept step is whole', SMALL, 'keep'),
    ('torn-commit', 'a received step is one commit', SMALL, 'receive'),
    ('owner-forgotten', 'a received step owns what it shares', SMALL, 'receive-from'),
    ('kept-unreserved', 'the next rewrite of shared content has its space', KEPT, 'a_step_after_a_kept_one_has_its_space'),
    ('clone-unreserved', 'the next rewrite of a clone has its space', KEPT, 'a_clone_has_space_for_its_next_step_or_is_not_made'),
    ('rollback-half', 'a rollback takes back the state of all parameters', KEPT, 'a_rollback_is_the_step_and_goes_on_as_the_first_time'),
    ('dedup-uncompared', 'content is compared before it is shared', DEDUP, 'content_with_the_same_checksum_is_compared'),
    ('dedup-unowned', 'a pair that has changed since it was read is left alone', DEDUP, 'a_pair_that_has_changed_is_left_alone'),
    ('dedup-uncompared', 'frames are compared before they are shared', FRAMES, 'frames_with_the_same_checksum_are_compared'),
    ('dedup-unowned', 'a frame that has changed since it was read is left alone', FRAMES, 'what_has_changed_since_the_comparison_is_left_alone'),
    ('owner-forgotten', 'a frame of two files waits for its last owner', SMALL, 'dedup-frames'),
    ('owner-left-behind', 'owners of shared bytes move together', COMPACT, 'all_owners_move_together'),
    ('owner-left-behind', 'owners of shared bytes are compressed together', COMPRESS, 'all_owners_get_the_frame'),
    ('owner-unheld', 'one owner that is held keeps all', OWNERS, 'an_owner_that_is_held_keeps_all_where_they_are'),
    ('owner-left-behind', 'owners of bad bytes move together', SHARED, 'all_owners_of_bad_bytes_move_together'),
    ('frame-too-short', 'a repair has what each owner shows', SHARED, 'bad_bytes_stay_with_owners_that_cannot_move'),
    ('frame-too-short', 'a frame has what each owner shows', SMALL, 'compress-shared'),
    ('cold-checksum', 'checksum of content from a vault', 'tests/unit/tiering/store/test_cold', 'wrong_bytes_are_an_error'),
    ('frame-checksum', 'checksum of a frame', SMALL, 'xattr'),
    ('padding-later', 'a frame torn in its padding is no later one', SMALL, 'create'),
    ('writer-unseen', 'a writer looks whether another took over', TAKEN, ''),
    ('super-checksum', 'checksum of a superblock', ROT, 'rot_in_one_superblock_is_survived'),
    ('chunk-checksum', 'checksum of stored content', ROT, 'rot_in_content_is_an_error'),
    ('damage-unseen', 'a log that lost its middle is damaged', ROT, 'rot_in_both_logs_is_survived_or_refused'),
    ('no-chain', 'a frame names the one before it', ROT, 'frames_of_another_past_are_not_continued'),
    ('cut-undone', 'a repaired chunk shows no more than before', SCRUB, 'what_changes_beside_a_repair_stays_changed'),
    ('frame-early', 'older programs are kept away before a writer compresses', SMALL, 'compress-inline'),
    ('owner-forgotten', 'a shared frame waits for its last owner', SMALL, 'compress-shared'),
    ('feature-late', 'older programs are kept away before the first frame', SMALL, 'compress'),
    ('given-up-unseen', 'a publication notices what was given up', FLUSH, 'what_replaced_flushed_content_is_not_missed'),
    ('frame-voided', 'a frame notices a failed flush of another thread', FLUSH, 'a_frame_that_a_flush_of_another_thread_voided_is_written_again'),
    ('flush-beside', 'a flush counts when those beside it have ended', IO_FLUSH, 'a_success_beside_a_failure_is_not_believed'),
    ('publish-unasked', 'a root that may not end publishes nothing', STEP, 'a_refused_end_of_a_root_publishes_nothing'),
    ('change-unseen', 'a commit is the root at one moment', SLICES, 'a_commit_has_all_objects_as_at_one_moment'),
    ('replay-unbounded', 'a log makes no more memory than it may', MEMORY, 'a_log_that_needs_too_much_memory_is_refused'),
    ('types-dropped', 'a writer knows each type of record', NEWER, 'no_type_of_a_later_version_is_dropped'),
    ('round-nearest', 'rounding to 16 bits has no bias', FORMS, 'rounding_by_hash_has_no_bias'),
    ('code-zero', 'a positive second moment never gets code 0', FORMS, 'a_positive_second_moment_never_gets_code_0'),
    ('squares-stay', 'sums of squares go with their gradient', SQUARES, 'any_order_of_pieces_and_closes_gives_the_same_bits'),
    ('edit-in-delta', 'bytes of a program cut the chain of deltas', STEP.replace('test_step', 'test_delta'), 'a_write_during_a_step_cuts_the_chain'),
    ('edit-unseen', 'a parameter that was written is published with its step', REDO, 'a_written_parameter_makes_the_next_step_full'),
    ('factor-unlogged', 'a logged step has its own clipping', REDO, 'incomplete_sums_are_logged'),
    ('feature-late', 'older programs are kept away before the first logged step', REDO + '_sparse', 'sparse_gradients_are_logged_without_zeros'),
    ('sparse-unmarked', 'older programs refuse a store with sparse pieces', REDO + '_sparse', 'sparse_gradients_are_logged_without_zeros'),
    ('sections-unmarked', 'older programs refuse a store with numbers for ranges of elements', 'tests/unit/optim/state/test_sections', 'steps_with_sections_are_logged'),
    ('form-unmarked', 'older programs refuse a store with state in fewer bits', STATE_FORMS, 'the_superblock_says_that_there_are_forms'),
    ('salt-lost', 'roundings of an update depend on the salt of its state', STATE_FORMS, 'a_step_is_that_of_the_coded_state'),
    ('lineage-kept', 'a step after a change that is not logged does not follow', 'tests/unit/optim/redo/test_redo_read', 'a_change_that_is_not_logged_begins_another_lineage'),
    ('logged-stay', 'logged steps go with the full step that follows', REDO, 'steps_are_logged_up_to_a_full_one'),
    ('data-flush', 'flush of logged gradients before their record', SMALL, 'redo'),
    ('logged-early', 'logged steps stay until the full step is durable', SMALL, 'redo'),
    ('torn-commit', 'a logged step and its files are one frame', SMALL, 'redo-write'),
    ('logged-unsorted', 'a step that is logged beside a checkpoint comes after the older ones', REDO, 'a_step_is_logged_beside_a_checkpoint'),
    ('replay-shown', 'readers wait while logged steps are computed again', RECOVER, 'a_mount_does_not_wait_for_logged_steps'),
    ('reset-unreserved', 'a reset gives no space of logged steps back', FULL, 'a_full_store_keeps_acknowledged_steps'),
    ('replay-roomless', 'the room of a replay is nobody else\'s', FULL, 'a_full_store_keeps_acknowledged_steps'),
    ('logged-unreserved', 'a logged step has room for its gradient', 'tests/unit/optim/redo/test_redo_room', 'the_largest_gradient_has_its_room'),
    ('record-unseen', 'a parameter whose record is not published makes a step full', REDO, 'a_count_that_does_not_follow_makes_a_step_full'),
    ('give-up-unasked', 'kept steps stay where giving them up would not help', REDO_READ, 'what_cannot_be_served_makes_nobody_give_up_anything'),
    ('free-late', 'space that a commit makes free is shown at once', FREE, ''),
    ('fcntl', 'flock: a hold that outlives its process', HOLD, ''),
]
PROGRAMS = sorted({test for _, _, test, _ in MUTANTS if '::' not in test})
FOUND = re.compile(r'state (\d+)')


def command(test, build):
    if '::' in test:
        return ['/usr/bin/python3', '-m', 'pytest', '-x', '-q', '-rs', '-p', 'no:cacheprovider', test]
    return [os.path.join(build, test)]


def run(mutant, test, scenario, build, seed):
    """(passed, skipped, output)"""
    env = dict(os.environ, HITRAIN_MUTANT=mutant, HITRAIN_SEED=str(seed), HITRAIN_BUILD=build, HITRAIN_BIN=os.path.join(build, 'bin'),
               HITRAIN_TEST_SECONDS='20')
    env.pop('HITRAIN_LONG', None)
    if scenario:
        env['HITRAIN_SCRIPT' if test == SMALL else 'HITRAIN_TEST'] = scenario
    done = subprocess.run(command(test, build), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=SECONDS_MAX)
    text = done.stdout.decode('utf-8', 'replace')
    skipped = '::' in test and ' skipped' in text and ' failed' not in text
    return done.returncode == 0, skipped, text


def runs(row, build, seeds):
    """(results of run() with each seed, seconds for one)"""
    mutant, _, test, scenario = row
    begin = time.monotonic()
    results = [run(mutant, test, scenario, build, seed + 1) for seed in range(seeds)]
    return results, (time.monotonic() - begin) / seeds


def states_until(text):
    """How many states were looked at before the first bad one."""
    found = FOUND.search(text)
    return found.group(1) if found else '-'


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--build', required=True, help='folder of a build with MUTANTS=1')
    p.add_argument('--seeds', type=int, default=1, help='run each so many times, with other random states')
    p.add_argument('--mutant', default='', help='this one only')
    args = p.parse_args()
    caught = missed = 0
    for test, scenario in (SMALL, 'create'), (ROT, ''):
        passed, _, text = run('', test, scenario, os.path.abspath(args.build), 1)
        if not passed:
            sys.exit(f'{text}\nthe tests fail without any mutant: what they say of mutants means nothing')
    print(f'figures: {"mutant":<16} {"what it lacks":<52} {"caught by":<14} {"state":>6} {"s":>6}')
    chosen = [row for row in MUTANTS if args.mutant in ('', row[0])]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        running = [(row, pool.submit(runs, row, os.path.abspath(args.build), args.seeds)) for row in chosen]
        for (mutant, lacks, test, scenario), done in running:
            results, seconds = done.result()
            by = scenario if test == SMALL else test.split('/')[-1].split('.')[0]
            if any(skipped for _, skipped, _ in results):
                print(f'figures: {mutant:<16} {lacks:<52} {"skipped":<14} {"":>6} {seconds:6.1f}')
                continue
            unseen = sum(passed for passed, _, _ in results)
            missed += unseen > 0
            caught += unseen == 0
            states = ' '.join(sorted({states_until(text) for _, _, text in results}))
            print(f'figures: {mutant:<16} {lacks:<52} {by if not unseen else "NOT CAUGHT":<14} {states:>6} {seconds:6.1f}',
                  flush=True)
            if unseen:
                print(f'{mutant}: unnoticed in {unseen} of {args.seeds} runs')
    print(f'{caught} mutants caught, {missed} not', flush=True)
    return 1 if missed or not caught else 0


if __name__ == '__main__':
    sys.exit(main())
