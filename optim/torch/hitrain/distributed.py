# SPDX-License-Identifier: Apache-2.0
"""Processes that train one model together: they meet, and all learn at once of a failure on one rank.

Each meeting is an exchange: every rank sends its wishes and its failures, and gets those of all ranks. So no rank goes
on while another one failed, and none waits for one that is gone.

All ranks are on the machine that mounts the store. Rank 0 listens on a local socket, whose name follows from the path
of the root; the others connect to it. The end of a process ends its connection, so the others learn that at once. If
ranks cannot reach that socket (containers with networks of their own), Shard's `exchange` takes its place.
"""
import hashlib
import json
import os
import selectors
import socket
import struct
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

__all__ = ['RankFailed', 'Ranks', 'Shard']


class Shard(NamedTuple):
    """This process's part of a model's gradients, when several processes train it together.

    rank      of this process; that of rank 0 makes the root, sets hyper-parameters and ends steps
    world     how many there are; each writes one of so many equal parts of every gradient
    barrier   not needed: the ranks meet by themselves. It may be given, and is not called
    exchange  takes a text, returns the texts of all ranks in their order, e.g. by torch.distributed.all_gather_object;
              default: a local socket
    timeout   seconds until a rank that does not come to a meeting counts as failed. Rank 0 waits as long for each
              meeting and then informs the others, so these wait up to twice as long for rank 0 itself
    """
    rank: int
    world: int
    barrier: Optional[Callable[[], Any]] = None
    exchange: Optional[Callable[[str], Sequence[str]]] = None
    timeout: float = 1800.0

    def part(self, elements: int) -> slice:
        return part_of(elements, self.rank, self.world)


def part_of(elements: int, index: int, count: int) -> slice:
    return slice(elements * index // count, elements * (index + 1) // count)


class RankFailed(RuntimeError):
    """Another rank failed, or is gone. rank: which one; cause: its message."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f'rank {rank} {cause}')
        self.rank, self.cause = rank, cause

    def __reduce__(self) -> Any:
        return RankFailed, (self.rank, self.cause)


class Ranks:
    """The processes of a shard; without one, this process alone. Used by one thread.

    After a meeting that could not be held (a rank is gone) there is no other: each call raises RankFailed.
    """

    def __init__(self, shard: Optional[Shard], root: str) -> None:
        self.rank, self.world = (shard.rank, shard.world) if shard else (0, 1)
        self._over: Optional[RankFailed] = None
        if shard is None or self.world == 1:
            self._gather: Callable[[str], Sequence[str]] = lambda text: [text]
        elif shard.exchange:
            self._gather = shard.exchange
        else:
            self._gather = (_Leader if shard.rank == 0 else _Follower)(shard, root)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def over(self) -> bool:
        return self._over is not None

    def together(self, point: str, work: Callable[[], Optional[Dict[str, Any]]] = dict) -> List[Dict[str, Any]]:
        """Does this rank's work and meets the others. Returns the results of all ranks' work. If it failed on one rank,
        or one rank is at another point, all raise: its own error, or RankFailed."""
        facts: Dict[str, Any] = {}
        failed: Optional[BaseException] = None
        try:
            facts = work() or {}
        except BaseException as e:
            failed = e
        if self.world == 1:
            if failed:
                raise failed
            return [facts]
        said = self._meet({'point': point, 'failed': failed and f'failed: {_in_words(failed)}', 'facts': facts}, failed)
        if failed:
            raise failed
        for rank, s in enumerate(said):
            if s['failed']:
                raise RankFailed(rank, s['failed'])
        for rank, s in enumerate(said):
            if s['point'] != point:
                raise RankFailed(rank, f'is at {s["point"]}, this one (rank {self.rank}) at {point}')
        return [s['facts'] for s in said]

    def gather_at(self, point: str, facts: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Until all ranks are at this point; those that come to another one learn there that they have to come here."""
        while self.world > 1:
            said = self._meet({'point': point, 'failed': None, 'facts': facts}, None)
            if all(s['point'] == point for s in said):
                return [s['facts'] for s in said]
        return [facts]

    def close(self, why: str = 'has closed its optimizer') -> None:
        if self._over is None:
            self._over = RankFailed(self.rank, why)
            if isinstance(self._gather, _Meeting):
                self._gather.close(why)

    def forsake(self) -> None:
        """In a forked child: these connections are its parent's."""
        if isinstance(self._gather, _Meeting):
            for sock in self._gather.sockets():
                sock.close()

    def _meet(self, mine: Dict[str, Any], failed: Optional[BaseException]) -> List[Dict[str, Any]]:
        if self._over:
            raise failed or RankFailed(self._over.rank, self._over.cause)
        try:
            return [json.loads(text) for text in self._gather(json.dumps(mine))]
        except BaseException as e:
            over = e if isinstance(e, RankFailed) else RankFailed(self.rank, f'failed: {_in_words(e)}')
            self.close(over.cause if over.rank == self.rank else f'lost rank {over.rank}, which {over.cause}')
            self._over = over
            raise failed or e


def _in_words(error: BaseException) -> str:
    text = str(error)
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


# ------------------------------------------------------------------ sockets

class _Line:
    """A connection on which lines go both ways. None from receive: not a whole line yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._rest = sock, b''

    def send(self, text: str, deadline: float) -> None:
        self.sock.settimeout(max(0.01, deadline - time.monotonic()))
        self.sock.sendall(text.encode() + b'\n')

    def receive(self) -> Optional[str]:
        """After the socket became readable. EOFError at its end."""
        if b'\n' not in self._rest:
            got = self.sock.recv(1 << 16)
            if not got:
                raise EOFError
            self._rest += got
        line, newline, rest = self._rest.partition(b'\n')
        if not newline:
            return None
        self._rest = rest
        return line.decode()

    def has_line(self) -> bool:
        return b'\n' in self._rest


class _Meeting:
    """By calling it: texts of all ranks for that of one."""

    def __call__(self, mine: str) -> Sequence[str]:
        raise NotImplementedError

    def sockets(self) -> List[socket.socket]:
        raise NotImplementedError

    def close(self, why: str) -> None:
        raise NotImplementedError


def _address(root: str) -> str:
    """In the abstract name space: the name vanishes when the processes end."""
    return f'\0hitrain-{os.getuid()}-{hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:32]}'


def _check_owner(sock: socket.socket) -> None:
    """Any user could have taken that name."""
    _, uid, _ = struct.unpack('3i', sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize('3i')))
    if uid != os.getuid():
        raise PermissionError(f'the other end of the meeting of ranks belongs to user {uid}')


def _farewell(why: str) -> str:
    return json.dumps({'gone': why})


class _Leader(_Meeting):
    """Rank 0: takes the line of each rank and sends all lines to each."""

    def __init__(self, shard: Shard, root: str) -> None:
        self._shard = shard
        self._lines: Dict[int, _Line] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_address(root))
        except OSError as e:
            self._listener.close()
            raise OSError(e.errno, 'another process is rank 0 of this model already, or another user has taken the name of its socket; '
                          'Shard(exchange=...) needs none', root) from e
        self._listener.listen(shard.world)

    def __call__(self, mine: str) -> Sequence[str]:
        deadline = time.monotonic() + self._shard.timeout
        said = {0: mine}
        try:
            while len(self._lines) < self._shard.world - 1:
                self._accept(deadline)
            self._listener.close()  # one that comes now comes to the next meeting of this name
            self._hear(said, deadline)
        except RankFailed as e:
            self._tell(json.dumps({'lost': e.rank, 'cause': e.cause}), deadline)
            raise
        all_said = [said[r] for r in range(self._shard.world)]
        self._tell(json.dumps(all_said), deadline)
        return all_said

    def close(self, why: str) -> None:
        self._tell(json.dumps({'lost': 0, 'cause': why}), time.monotonic() + 1)
        for sock in self.sockets():
            sock.close()
        self._lines = {}

    def sockets(self) -> List[socket.socket]:
        return [self._listener, *(line.sock for line in self._lines.values())]

    def _accept(self, deadline: float) -> None:
        self._listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            sock, _ = self._listener.accept()
        except socket.timeout:
            missing = next(r for r in range(1, self._shard.world) if r not in self._lines)
            raise RankFailed(missing, f'did not come within {self._shard.timeout:g} s') from None
        line = _Line(sock)
        try:
            _check_owner(sock)
            hello = json.loads(_receive(line, deadline, 'a rank'))
        except (OSError, EOFError, ValueError):
            sock.close()
            return
        rank, world = hello['rank'], hello['world']
        if world == self._shard.world and 0 < rank < world and rank not in self._lines:
            self._lines[rank] = line
            return
        wrong = RankFailed(rank, 'came twice: two jobs train this model' if rank in self._lines else
                           f'came as one of {world} to a meeting of {self._shard.world}')
        line.send(json.dumps({'lost': rank, 'cause': wrong.cause}), deadline)
        sock.close()
        raise wrong

    def _hear(self, said: Dict[int, str], deadline: float) -> None:
        """If a rank is gone, this waits for the others all the same: they may still write gradients, and what comes after rank 0
        has taken the step back would begin another one."""
        failed: Optional[RankFailed] = None
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line.sock, selectors.EVENT_READ, rank)
            early = [key for key in selector.get_map().values() if self._lines[key.data].has_line()]
            while selector.get_map():
                ready = early or [key for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                early = []
                if not ready:
                    missing = next(key.data for key in selector.get_map().values())
                    raise failed or RankFailed(missing, f'did not come within {self._shard.timeout:g} s')
                for key in ready:
                    try:
                        word = self._word_of(key.data)
                    except RankFailed as e:
                        failed = failed or e
                        selector.unregister(key.fileobj)
                        continue
                    if word is not None:
                        said[key.data] = word
                        selector.unregister(key.fileobj)
        if failed:
            raise failed

    def _word_of(self, rank: int) -> Any:
        try:
            word = self._lines[rank].receive()
        except (OSError, EOFError):
            raise RankFailed(rank, 'is gone: its process has ended') from None
        if word is not None and 'gone' in json.loads(word):
            raise RankFailed(rank, json.loads(word)['gone'])
        return word

    def _tell(self, text: str, deadline: float) -> None:
        for line in self._lines.values():
            try:
                line.send(text, max(deadline, time.monotonic() + 1))
            except OSError:
                pass  # it is gone, as the next meeting finds


class _Follower(_Meeting):
    """Every other rank."""

    def __init__(self, shard: Shard, root: str) -> None:
        self._shard, self._root = shard, root
        self._line: Optional[_Line] = None

    def __call__(self, mine: str) -> Sequence[str]:
        # Rank 0 waits as long for the last one, and then says so.
        deadline = time.monotonic() + 2 * self._shard.timeout
        if self._line is None:
            self._line = self._connect(time.monotonic() + self._shard.timeout)
        try:
            self._line.send(mine, deadline)
        except OSError:
            pass  # rank 0's last line is the reason
        try:
            said = json.loads(_receive(self._line, deadline, 'rank 0'))
        except (OSError, EOFError):
            raise RankFailed(0, 'is gone: its process has ended') from None
        if isinstance(said, dict):
            raise RankFailed(said['lost'], said['cause'])
        return said

    def close(self, why: str) -> None:
        if self._line is None:
            return
        try:
            self._line.send(_farewell(why), time.monotonic() + 1)
        except OSError:
            pass
        self._line.sock.close()

    def sockets(self) -> List[socket.socket]:
        return [self._line.sock] if self._line else []

    def _connect(self, deadline: float) -> _Line:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(_address(self._root))
                _check_owner(sock)
                line = _Line(sock)
                line.send(json.dumps({'rank': self._shard.rank, 'world': self._shard.world}), deadline)
                return line
            except PermissionError:
                sock.close()
                raise
            except OSError:
                sock.close()
                if time.monotonic() > deadline:
                    raise RankFailed(0, f'did not come within {self._shard.timeout:g} s; ranks in containers with networks of their '
                                     'own need Shard(exchange=...)') from None
                time.sleep(0.02)


def _receive(line: _Line, deadline: float, who: str) -> str:
    while True:
        line.sock.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            text = line.receive()
        except socket.timeout:
            raise RankFailed(0, f'did not answer in time: waited for {who}') from None
        if text is not None:
            return text
