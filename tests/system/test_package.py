# SPDX-License-Identifier: Apache-2.0
"""`make deb`: the package is installed, used, upgraded while a store is mounted, and purged, in clean Debian roots. `make wheel`:
an ordinary user follows the first ten minutes of the guide in such a root, to the letter.

The roots are made once by debootstrap in ~/.cache/hitrain, and each test works on a copy.
"""
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / 'tests/mount'))

from test_documents import examples, pattern

BUILD = pathlib.Path(os.environ.get('HITRAIN_BUILD') or TOP / 'build')
CACHE = pathlib.Path.home() / '.cache/hitrain'
SECONDS_MAX = 1200

# In the chroot. $1 and $2 are the package and a newer one.
SCRIPT = r'''
set -eux
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
apt-get -q update
apt-get -q -y install "$1"
command -v setfattr getfattr pgrep python3  # the examples of the guide use them
dpkg -L hitrain >/files
dpkg --verify hitrain
hitrain --version | grep -F 'hitrain 0.'
for program in mkfs.hitrain mount.hitrain umount.hitrain hitrain-fsck fsck.hitrain hitrainctl; do command -v $program; done
hitrainctl doctor --json >/doctor.json || [ $? -ge 3 ]
grep -q '"check": "io_uring"' /doctor.json
for shell in hitrain hitrainctl; do bash -c "source /usr/share/bash-completion/completions/$shell; complete -p $shell"; done
python3 -c 'import importlib.util; assert importlib.util.find_spec("hitrain")'
test -s /usr/share/doc/hitrain/copyright

mkfs.hitrain --size=64M /srv/store.img
mount -t hitrain /srv/store.img /mnt -o dram=16M,staging=24M
echo content >/mnt/file
hitrainctl commit /mnt
if apt-get -q -y remove hitrain; then echo 'removed below a mounted store'; exit 1; fi
dpkg -i "$2"
hitrainctl stats /mnt >/dev/null
grep -qx content /mnt/file
umount /mnt
fsck.hitrain -n /srv/store.img
mount -t hitrain /srv/store.img /mnt -o dram=16M,staging=24M
grep -qx content /mnt/file
dpkg-query -W -f '${Version}\n' hitrain | grep -F '+1'
umount /mnt

apt-get -q -y purge hitrain
while read -r path; do
    if [ ! -d "$path" ] && [ -e "$path" ]; then echo "left: $path"; exit 1; fi
done </files
test ! -e /usr/lib/python3/dist-packages/hitrain
test -s /srv/store.img
'''


def make(*arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ('MAKEFLAGS', 'MAKELEVEL', 'MFLAGS')}
    done = subprocess.run(['make', '--no-print-directory', *arguments], cwd=TOP, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout
    return pathlib.Path(TOP / done.stdout.split()[-1])


@pytest.fixture(scope='module')
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp('packages')
    made = [make('-j2', 'deb'), make('-j2', 'deb', 'VERSION=0.1.0+1')]
    return [shutil.copy(path, folder) for path in made]


def test_the_guide_installs_so():
    assert '```sh\nmake deps deb\napt install ./build/deb/hitrain_*.deb\n```' in (TOP / 'docs/guide.md').read_text()


def mirror():
    """DEBIAN_MIRROR= or the first archive of Debian that apt uses here, as in tests/tools/deps.sh."""
    if os.environ.get('DEBIAN_MIRROR'):
        return os.environ['DEBIAN_MIRROR']
    said = subprocess.run(['apt-get', 'indextargets', '--format', '$(REPO_URI)', 'Created-By: Packages', 'Origin: Debian', 'Label: Debian'],
                          stdout=subprocess.PIPE, text=True, timeout=SECONDS_MAX).stdout
    if not said.split():
        pytest.skip('apt has no lists of an archive of Debian: run apt-get update, or name one in DEBIAN_MIRROR=')
    return min(said.split())


def clean_root(suite):
    root = CACHE / f'debian-{suite}'
    if not root.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = pathlib.Path(tempfile.mkdtemp(dir=CACHE))
        try:
            done = subprocess.run(['debootstrap', '--variant=minbase', suite, fresh, mirror()], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX)
            assert done.returncode == 0, done.stdout[-3000:]
            fresh.rename(root)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return root


NEEDS_DEBOOTSTRAP = pytest.mark.skipif(not shutil.which('debootstrap'), reason='make deps-system installs debootstrap')


@contextlib.contextmanager
def root_of(suite):
    root = pathlib.Path(tempfile.mkdtemp(prefix='hitrain-root-'))
    try:
        subprocess.run(['cp', '-a', '--reflink=auto', f'{clean_root(suite)}/.', root], check=True, timeout=SECONDS_MAX)
        root.chmod(0o755)  # users other than root are in it
        shutil.copy('/etc/resolv.conf', root / 'etc/resolv.conf')
        yield root
    finally:
        shutil.rmtree(root)


def run_in(root, script, *arguments):
    """What it prints. The mounts end with the namespace. A daemon that is left ends with its mount."""
    (root / 'script').write_text(script)
    enter = f'''mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && mount --rbind /sys {root}/sys &&
        exec chroot {root} /bin/bash /script {" ".join(arguments)}'''
    done = subprocess.run(['unshare', '--mount', '--propagation=private', '/bin/sh', '-c', enter], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace',
                          timeout=SECONDS_MAX, env={'PATH': '/usr/sbin:/usr/bin:/sbin:/bin'})
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@NEEDS_DEBOOTSTRAP
@pytest.mark.parametrize('suite', ['bookworm', 'trixie'])
def test_install_use_upgrade_and_purge(packages, suite):
    with root_of(suite) as root:
        for path in packages:
            shutil.copy(path, root)
        run_in(root, SCRIPT, *['/' + os.path.basename(path) for path in packages])


# As root, then as a user of a login, whose part comes from the guide.
FIRST_MINUTES = r'''
set -eux
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
apt-get -q update
{packages}
mknod -m 0666 /fuse c 10 229 && mount --bind /fuse /dev/fuse  # udev and systemd do so on a machine
ln -sf /proc/self/mounts /etc/mtab
useradd --create-home ada
mv /build ~ada/build && chown -R ada: ~ada/build
cat >/steps <<'ENDOFSTEPS'
set -eu
cd
{install}
{commands}
ENDOFSTEPS
exec su --login ada --command 'bash /steps'
'''


@NEEDS_DEBOOTSTRAP
@pytest.mark.parametrize('suite', ['bookworm', 'trixie'])
def test_the_first_ten_minutes_of_the_guide(suite):
    """Its commands print what the page says."""
    packages, install = re.findall(r'^```sh\n(.*?)^```', (TOP / 'docs/guide.md').read_text(), re.M | re.S)[:2]
    commands = examples('guide.md', '## The first ten minutes')
    with root_of(suite) as root:
        (root / 'build/wheel').mkdir(parents=True)
        shutil.copy(make('wheel'), root / 'build/wheel')
        marked = ''.join(f'echo "@@"\n{command}\n' for command, _ in commands)
        said = run_in(root, FIRST_MINUTES.format(packages=packages.replace('apt install', 'apt-get -q -y install'), install=install, commands=marked))
    printed = said.split('@@\n')[1:]
    assert len(printed) == len(commands) >= 3, said[-6000:]
    for (command, lines), got in zip(commands, printed):
        assert pattern(lines).match(got), f'$ {command}\n{got}'
