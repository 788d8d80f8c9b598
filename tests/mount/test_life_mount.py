# SPDX-License-Identifier: Apache-2.0
"""Administration of a mount: mount(8), fstab, remount, users, systemd, mounts over mounts.

mount(8) looks for its helpers in one folder, and for its table in one place: in a mount namespace of its own these are ours.
"""
import contextlib
import os
import shutil
import subprocess

import pytest

from conftest import BIN, ROOT, SECONDS_MAX, SMALL, needs, run

HELPERS = ROOT / 'mount-helpers'
NOBODY = 65534


class Namespace:
    """Scripts run where /sbin and /etc/fstab are ours. store.image and store.point are $IMAGE and $POINT."""

    def __init__(self, store, folder):
        self.store = store
        self.sbin = folder / 'sbin'
        self.fstab = folder / 'fstab'
        self.conf = folder / 'fuse.conf'
        self.fuse = folder / 'fuse'
        self.sbin.mkdir()
        self.fstab.touch()
        self.conf.touch()
        for program in 'mount.hitrain', 'umount.hitrain', 'hitrain':  # beside each other: mount(8) takes PATH away from its helpers
            shutil.copy(BIN / program, self.sbin)
        for name in 'mount', 'umount':
            (self.sbin / f'{name}.fuse.hitrain').symlink_to(f'{name}.hitrain')

    def run(self, script, ok=True):
        """Each line is a command; with ok=True all must succeed. Unmounts remaining mounts and waits for their daemons."""
        setup = f'''
            mount --make-rprivate /
            mount --bind {self.sbin} "$(readlink -f /sbin)"
            test -e /etc/fstab && mount --bind {self.fstab} /etc/fstab
            test -e /etc/fuse.conf && mount --bind {self.conf} /etc/fuse.conf
            mknod -m 666 {self.fuse} c 10 229 && mount --bind {self.fuse} /dev/fuse
            rm -f {self.fuse}
            trap 'umount -l "$POINT" 2>/dev/null || true' EXIT
            options() {{ findmnt -n -o OPTIONS "$POINT"; }}
            as_nobody() {{ setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups "$@"; }}
            fails() {{ if "$@"; then echo "succeeded: $*" >&2; exit 7; fi; }}
            {'set -e' if ok else ''}
        '''
        env = dict(os.environ, IMAGE=str(self.store.image), POINT=str(self.store.point), SMALL=','.join(SMALL),
                   PATH=f'{BIN}:{os.environ["PATH"]}', LC_ALL='C')
        done = subprocess.run(['unshare', '-m', 'bash', '-c', setup + script], text=True, timeout=5 * SECONDS_MAX, env=env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode and 'unshare' in done.stderr:
            pytest.skip('mount namespaces are not allowed here')
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture
def space(make_store, tmp_path):
    return Namespace(make_store('64M'), tmp_path)


# ------------------------------------------------------------------ unmount

@pytest.mark.parametrize('umount', ['umount -c $POINT', 'umount.hitrain $POINT/', '(cd $POINT/.. && umount $(basename $POINT))'])
def test_umount_returns_when_the_daemon_has_ended(space, umount):
    """The device is free for the next command, which neither waits nor says so. (umount(8) looks at the kernel's type
    of an absolute path only. That type is fuse, unless it runs with an option not to canonicalize, as systemd uses it.)
    """
    out = space.run("""
        for i in 1 2 3 4 5; do
            mount -t hitrain -o $SMALL,commit=3600 $IMAGE $POINT
            head -c 10M /dev/zero >$POINT/f$i
            UMOUNT
            flock -n $IMAGE true
        done
        hitrain-fsck -n --no-wait $IMAGE >/dev/null
        mount -t hitrain -o $SMALL $IMAGE $POINT
        ls $POINT
        exec 5>$POINT/f1
        fails umount.hitrain $POINT
        exec 5>&-
        UMOUNT
        flock -n $IMAGE true
    """.replace('UMOUNT', umount))
    assert out.stdout == 'f1\nf2\nf3\nf4\nf5\n' and 'busy' in out.stderr and 'hitrain:' not in out.stderr


def test_umount_does_not_wait_for_what_stays(space):
    """A second mount of the store, here or in another mount namespace, and a lazy unmount."""
    out = space.run("""
        mount -t hitrain -o $SMALL $IMAGE $POINT
        mkdir $POINT/d
        mount --bind $POINT/d /mnt
        umount.hitrain $POINT
        touch /mnt/still
        unshare --mount --propagation private sleep 1000 &
        keeper=$!
        until test "$(readlink /proc/$keeper/exe)" = "$(readlink -f "$(which sleep)")"; do sleep 0.01; done
        umount.hitrain /mnt
        fails flock -n $IMAGE true
        kill $keeper
        flock -w 60 $IMAGE true
        mount -t hitrain -o $SMALL $IMAGE $POINT
        exec 5>$POINT/open
        umount.hitrain -l $POINT
        fails flock -n $IMAGE true
        exec 5>&-
        flock -w 60 $IMAGE true
    """)
    assert 'is unmounted here, but process ' in out.stderr and '(sleep 1000) has it in its mount namespace' in out.stderr


def test_a_user_unmounts_with_the_helper(space):
    space.fstab.write_text(f'{space.store.image} {space.store.point} hitrain user,noauto,{",".join(SMALL)} 0 0\n')
    space.conf.write_text('user_allow_other\n')
    space.run("""
        chown -R %d $IMAGE $POINT
        as_nobody mount $POINT
        touch $POINT/f || true
        as_nobody umount $POINT
        flock -n $IMAGE true
    """ % NOBODY)


# ------------------------------------------------------------------ mount and fstab

def test_tools_name_the_type_and_the_device(space):
    out = space.run('''
        mount -t hitrain -o $SMALL $IMAGE $POINT
        df --output=source,fstype $POINT | tail -1
        findmnt -n -o SOURCE,FSTYPE $POINT
        stat -f -c %T $POINT
        umount $POINT
        mount -t fuse.hitrain -o $SMALL $IMAGE $POINT
        findmnt -n -o SOURCE,FSTYPE $POINT
        umount $IMAGE
        fails mountpoint -q $POINT
    ''').stdout.split('\n')
    want = [str(space.store.image), 'fuse.hitrain']
    assert [out[0].split(), out[1].split(), out[3].split()] == [want, want, want] and 'fuse' in out[2]


def test_a_line_of_fstab(space):
    space.fstab.write_text(f'{space.store.image} {space.store.point} hitrain noauto,nofail,user,_netdev,comment=x,noatime,'
                           f'x-systemd.automount,x-systemd.mount-timeout=300,{",".join(SMALL)} 0 2\n')
    out = space.run('''
        mount -a                    # noauto
        fails mountpoint -q $POINT
        mount $POINT
        options
        umount $POINT
        LINE=$(sed s/noauto/auto/ /etc/fstab); echo "$LINE" >/etc/fstab
        mount -a
        touch $POINT/f
        mount -a                    # is there already
        grep -c " $POINT " /proc/self/mountinfo
        umount $POINT
        mount $IMAGE                # by the device
        test -e $POINT/f
        umount $POINT
        findmnt --verify --tab-file /etc/fstab >&2 || true
    ''').stdout.split('\n')
    assert {'rw', 'nosuid', 'nodev', 'noexec', 'noatime'} <= set(out[0].split(',')) and out[1] == '1'


def test_mount_all_tells_what_failed(space):
    space.fstab.write_text(f'{space.store.image}.gone {space.store.point} hitrain defaults 0 0\n')
    done = space.run('mount -a', ok=False)
    assert done.returncode != 0 and f'{space.store.image}.gone' in done.stderr
    space.fstab.write_text(f'{space.store.image} {space.store.point} hitrain dram=lots 0 0\n')
    done = space.run('mount $POINT', ok=False)
    assert done.returncode != 0 and 'dram=lots' in done.stderr
    space.fstab.write_text(f'LABEL=nobody-has-this {space.store.point} hitrain defaults 0 0\n')
    done = space.run('mount $POINT', ok=False)
    assert done.returncode != 0 and 'nobody-has-this' in done.stderr, 'libblkid does not know hitrain'


def test_flags_of_a_new_mount(space):
    words = 'relatime', 'strictatime', 'diratime', 'nodiratime', 'noatime', 'nodev', 'exec', 'sync', 'async', 'nosymfollow'
    done = space.run(f'for w in {" ".join(words)}; do hitrain -o $SMALL,$w $IMAGE $POINT; options; umount $POINT; done')
    for word, line in zip(words, done.stdout.split('\n')):
        options = line.split(',')
        if word in ('nodiratime', 'noatime', 'nodev', 'sync', 'nosymfollow'):
            assert word in options, word
        elif word == 'strictatime':
            assert 'relatime' not in options and 'noatime' not in options, word
        else:
            assert f'no{word}' not in options and (word != 'relatime' or word in options), word


# -------------------------------------------------------------------------- remount

@pytest.mark.parametrize('how', ['fstab', 'table of mounts', 'the program'])
def test_remount_changes_flags_and_nothing_else(space, how):
    if how == 'fstab':
        space.fstab.write_text(f'{space.store.image} {space.store.point} hitrain noauto,{",".join(SMALL)},commit=4 0 0\n')
    what = '$IMAGE $POINT' if how == 'the program' else '$POINT'
    program = 'hitrain' if how == 'the program' else 'mount'
    done = space.run(f'''
        mount -t hitrain -o $SMALL,commit=4 $IMAGE $POINT
        echo before >$POINT/f
        {program} -o remount,ro {what}; options
        fails touch $POINT/f 2>/dev/null
        fails sh -c 'echo x >$POINT/g' 2>/dev/null
        cat $POINT/f
        {program} -o remount,rw,noatime {what}; options
        echo after >$POINT/g
        {program} -o remount,nosuid {what}; options
        {program} -o remount,commit=4 {what}
        for word in commit=9 dram=40M staging=25M numa=off optim_threads=1 max_threads=2 tune device=/dev/null bogus=1; do
            fails {program} -o remount,ro,$word {what}
        done
        options
        umount $POINT
    ''')
    ro, content, noatime, nosuid, last = done.stdout.split()
    assert ro.startswith('ro,') and content == 'before' and noatime.startswith('rw,noatime')
    assert 'nosuid' in nosuid.split(',') and 'noatime' in nosuid.split(',') and last == nosuid
    for word in ('commit', 'dram', 'staging', 'numa', 'optim_threads', 'max_threads', 'tune', 'device'):
        assert f"option '{word}' cannot change" in done.stderr, (word, done.stderr)
    assert "unknown option 'bogus=1'" in done.stderr
    space.store.mount()
    assert (space.store.point / 'f').read_text() == 'before\n' and (space.store.point / 'g').read_text() == 'after\n'


def test_remount_that_cannot_be(space):
    done = space.run('''
        hitrain -o $SMALL $IMAGE $POINT
        exec 7>$POINT/f
        fails hitrain -o remount,ro $IMAGE $POINT
        echo x >&7
        exec 7>&-
        fails hitrain -o remount,ro /dev/null $POINT
        fails as_nobody hitrain -o remount,ro $IMAGE $POINT
        options
        umount $POINT
        fails hitrain -o remount,ro $IMAGE $POINT
        hitrain -o $SMALL,ro $IMAGE $POINT
        hitrain -o remount,noatime $IMAGE $POINT
        fails hitrain -o remount,rw $IMAGE $POINT
        options
        umount $POINT
    ''')
    for words in ('files are open for writing', f'is a mount of {space.store.image} and not of /dev/null',
                  'is not a mount of hitrain', 'opened for reading only'):
        assert words in done.stderr, done.stderr
    first, second = done.stdout.split()
    assert first.startswith('rw,') and second.startswith('ro,noatime')


def test_remount_asks_the_mount_and_not_the_process(space):
    """The daemon runs under another name, and the remount has a table of processes without it."""
    done = space.run('''
        elsewhere() {
            unshare --pid --fork sh -c 'mount -t proc proc /proc && exec "$@"' sh "$@" && rc=0 || rc=$?
            umount /proc
            return $rc
        }
        cp "$(command -v hitrain)" $POINT/../tensors
        $POINT/../tensors -o $SMALL,commit=4 $IMAGE $POINT
        getfattr --absolute-names --only-values -n user.hitrain.options $POINT; echo
        elsewhere hitrain -o remount,ro,commit=4 $IMAGE $POINT; options
        fails elsewhere hitrain -o remount,rw,commit=9 $IMAGE $POINT
        options
        umount $POINT
    ''')
    listed, first, second = done.stdout.split()
    assert listed.split(',') == [*SMALL, 'commit=4'] and first.startswith('ro,') and second == first
    assert "option 'commit' cannot change" in done.stderr, done.stderr


def test_remount_takes_any_number_of_options(make_store):
    store = make_store('64M')
    store.mount(*['commit=4'] * 3000)
    run('hitrain', '-o', 'remount,ro', store.image, store.point)
    assert len(os.getxattr(store.point, 'user.hitrain.options')) > 3000 * len('commit=4')


def test_remount_changes_no_other_mount_that_is_at_its_path(space):
    """The table names the youngest mount at a path; an older one that was moved there may lie on top."""
    done = space.run('''
        mkdir $POINT/../old $POINT/../over
        mount -t tmpfs old $POINT/../old
        mkdir $POINT/../over/deep
        hitrain -o $SMALL $IMAGE $POINT/../over/deep
        mount -t tmpfs over $POINT/../over
        mkdir $POINT/../over/deep
        mount --move $POINT/../old $POINT/../over/deep
        fails hitrain -o remount,ro $IMAGE $POINT/../over/deep
        touch $POINT/../over/deep/f
        umount $POINT/../over/deep $POINT/../over
        hitrain -o remount,ro $IMAGE $POINT/../over/deep
        fails touch $POINT/../over/deep/f 2>/dev/null
        umount $POINT/../over/deep
    ''')
    assert 'nothing was changed' in done.stderr or 'is not a mount of hitrain' in done.stderr, done.stderr


def test_what_was_written_is_durable_when_a_mount_became_read_only(make_store):
    store = make_store('64M')
    store.mount('commit=3600')
    (store.point / 'f').write_bytes(b'x' * 300_000)
    run('hitrain', '-o', 'remount,ro', store.image, store.point)
    store.kill()
    store.detach()
    store.mount()
    assert (store.point / 'f').read_bytes() == b'x' * 300_000


# ------------------------------------------------------------------ mounts over mounts

def test_a_mount_over_a_mount_covers_it(make_store, tmp_path):
    """As with other file systems. Ending the lower one by a signal leaves the upper one alone."""
    lower, upper = make_store('64M'), make_store('64M')
    lower.mount()
    (lower.point / 'lower').write_bytes(b'1')
    run('hitrain', '-o', ','.join(SMALL), upper.image, lower.point)
    (lower.point / 'upper').write_bytes(b'2')
    assert os.listdir(lower.point) == ['upper']
    lower.daemon.terminate()
    assert lower.daemon.wait(SECONDS_MAX) == 0, lower.messages()
    lower.daemon = None
    assert 'covered' in lower.messages()
    assert (lower.point / 'upper').read_bytes() == b'2', 'the upper mount is not touched'
    subprocess.run(['umount', lower.point], check=True, timeout=SECONDS_MAX)
    lower.mount()  # over the remains of the lower one
    assert 'detached' in lower.messages() and os.listdir(lower.point) == ['lower']
    upper.mount()
    assert os.listdir(upper.point) == ['upper']


def test_a_detached_mount_is_ended_by_a_signal_and_its_successor_is_not(make_store):
    store, other = make_store('64M'), make_store('64M')
    store.mount()
    with contextlib.suppress(OSError), open(store.point / 'f', 'wb', buffering=0) as f:
        f.write(b'one')
        store.detach()
        run('hitrain', '-o', ','.join(SMALL), other.image, store.point)
        f.write(b'two')
        store.daemon.terminate()
        assert store.daemon.wait(SECONDS_MAX) == 0, store.messages()
        with pytest.raises(OSError):
            f.write(b'three')
    store.daemon = None
    (store.point / 'g').write_bytes(b'x')
    subprocess.run(['umount', store.point], check=True, timeout=SECONDS_MAX)
    store.mount()
    assert (store.point / 'f').read_bytes() == b'onetwo'


def test_a_folder_that_is_not_empty_is_covered(make_store):
    store = make_store('64M')
    (store.point / 'below').write_bytes(b'x')
    store.mount()
    assert os.listdir(store.point) == []
    store.unmount()
    assert os.listdir(store.point) == ['below']


# ------------------------------------------------------------------------------ users

def test_a_user_mounts_what_is_theirs(space, tmp_path):
    """fusermount3 does the steps that need root. Others are kept out; flags that need root are refused or kept off."""
    if not shutil.which('fusermount3') or not os.path.exists('/etc/fuse.conf'):
        pytest.skip('no fusermount3 here')
    os.chmod(tmp_path, 0o755)
    os.chmod(tmp_path.parent, 0o755)
    done = space.run('''
        export D=$(mktemp -d); chown 65534:65534 $D; cd $D
        as_nobody sh -c 'mkfs.hitrain --size=64M s >/dev/null; mkdir m'
        as_nobody hitrain s m -o $SMALL
        findmnt -n -o FSTYPE,OPTIONS $D/m
        as_nobody sh -c 'echo mine >m/f; cat m/f; stat -c %U m/f'
        fails ls m
        fails as_nobody chown 0 m/f
        as_nobody umount m
        as_nobody hitrain-fsck s >&2
        fails as_nobody hitrain s m -o $SMALL,allow_other
        echo user_allow_other >/etc/fuse.conf
        as_nobody hitrain s m -o $SMALL,allow_other
        cat m/f
        as_nobody fusermount3 -u m
        # a dead mount of theirs
        as_nobody hitrain $D/s m -o $SMALL
        pkill -9 -f "^hitrain $D/s m" -u 65534
        as_nobody hitrain $D/s m -o $SMALL
        as_nobody cat m/f
        # ended by a signal while in use, which only root may force
        as_nobody timeout 100 sh -c 'exec 7>m/held; echo kept >&7; pkill -TERM -f "^hitrain $D/s m"; while mountpoint -q m; do sleep 0.1; done'
        as_nobody hitrain-fsck s >&2
        as_nobody hitrain s m -o $SMALL
        as_nobody cat m/held
        as_nobody umount m
        fails as_nobody hitrain $IMAGE m
        fails as_nobody hitrain s $POINT
        fails as_nobody hitrain s m -o strictatime
        fails mountpoint -q m
        cd /; rm -r $D
    ''')
    lines = done.stdout.split('\n')
    assert lines[0].startswith('fuse.hitrain') and 'nosuid,nodev' in lines[0] and 'allow_other' not in lines[0]
    assert lines[1:7] == ['mine', 'nobody', 'mine', 'mine', 'kept', '']
    assert "user_allow_other" in done.stderr and 'detached the mount of a hitrain that is gone' in done.stderr
    assert f'{space.store.image} cannot be opened' in done.stderr and 'only root may' in done.stderr


def test_a_user_mounts_through_fstab(space, tmp_path):
    """mount(8) gives up its privileges before it runs a helper: the device must be the user's to open."""
    if os.path.realpath('/etc/fuse.conf') != '/etc/fuse.conf' or not shutil.which('fusermount3'):
        pytest.skip('no fusermount3 here')
    folder = space.store.folder
    space.fstab.write_text(f'{space.store.image} {space.store.point} hitrain user,noauto,{",".join(SMALL)} 0 0\n')
    for path in (folder, space.store.image, space.store.point):
        os.chown(path, NOBODY, NOBODY)
    for path in (tmp_path, tmp_path.parent):
        os.chmod(path, 0o755)
    out = space.run('''
        as_nobody mount $POINT
        options >&2
        as_nobody sh -c 'echo hello >$POINT/f; cat $POINT/f'
        as_nobody umount $POINT
        fails mountpoint -q $POINT
    ''').stdout
    assert out == 'hello\n'


# ---------------------------------------------------------------------------- systemd

def test_the_systemd_unit_is_valid(tmp_path):
    needs('systemd-analyze')
    (unit,) = (HELPERS / 'systemd').glob('*.mount')

    def complaints(path):
        done = subprocess.run(['systemd-analyze', 'verify', '--man=no', path], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=SECONDS_MAX)
        return [line for line in done.stdout.split('\n') if path.name in line] + [done.returncode] * bool(done.returncode)

    assert complaints(unit) == []
    wrong = tmp_path / unit.name
    wrong.write_text(unit.read_text().replace('Type=', 'Tpye='))
    assert complaints(wrong) != [], 'a mistake is found'


def test_the_systemd_unit_asks_for_what_the_helper_takes(space):
    (unit,) = (HELPERS / 'systemd').glob('*.mount')
    settings = dict(line.split('=', 1) for line in unit.read_text().split('\n') if '=' in line and line[0] != '#')
    where = subprocess.run(['systemd-escape', '--path', '--suffix=mount', settings['Where']], text=True,
                           stdout=subprocess.PIPE) if shutil.which('systemd-escape') else None
    assert where is None or where.stdout.strip() == unit.name
    options = settings['Options'].replace('dram=16G', 'dram=32M')
    space.run(f'mount $IMAGE $POINT -t {settings["Type"]} -o {options}; umount $POINT')  # as systemd calls it
