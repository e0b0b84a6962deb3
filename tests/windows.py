"""Windows as a Python program meets it, simulated on Linux.

`simulate()` is called in a process of its own, after torch was imported and before hookline is:

- `fcntl`, `resource` and the functions of `os` that Windows lacks are gone, `msvcrt` locks bytes;
- `os.open` opens no folder, and `os.write` writes b"\\r\\n" for b"\\n" without O_BINARY;
- a file that is open or mapped can be neither replaced nor removed, a mapped one not cut;
- text is cp1252 with b"\\r\\n" unless a program says otherwise.
"""

import builtins
import errno
import fcntl
import io
import os
import sys
import types
from contextlib import suppress
from pathlib import Path

MISSING = (
    "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fork", "fstatvfs",
    "killpg", "major", "minor", "mkfifo", "posix_fadvise", "posix_fallocate", "pread",
    "preadv", "pwrite", "pwritev", "sched_getaffinity", "sync",
)  # fmt: skip
BINARY = 1 << 30


class Msvcrt(types.ModuleType):
    """Locks of one byte, which belong to the open file and end with it."""

    LK_UNLCK, LK_LOCK, LK_NBLCK = 0, 1, 2

    def __init__(self):
        super().__init__("msvcrt")
        self.locked = set()

    def locking(self, file, mode, count):
        assert (os.lseek(file, 0, os.SEEK_CUR), count) == (0, 1)
        if mode == self.LK_UNLCK:
            if file not in self.locked:
                raise OSError(errno.EACCES, "this byte is not locked")
            self.locked.discard(file)
            fcntl.flock(file, fcntl.LOCK_UN)
            return
        assert mode == self.LK_NBLCK
        try:
            if file in self.locked:
                raise BlockingIOError
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "another has locked this byte") from None
        self.locked.add(file)


def is_mapped(path):
    """Whether this process maps a file."""
    lines = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
    return any(line.endswith(f" {Path(path).resolve()}") for line in lines)


def is_open(path):
    """Whether a process has a file open, or this one maps it."""
    path = Path(path).resolve()
    for process in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            for number in process.iterdir():
                with suppress(OSError):
                    if number.readlink() == path:
                        return True
    return is_mapped(path)


def simulate():  # noqa: C901
    """Make this process one of Windows, as far as hookline can see; gives what `os` was before."""
    # The simulated functions share what is known of open files.
    assert "hookline" not in sys.modules
    real = types.SimpleNamespace(**vars(os), text=io.open)
    text = set()  # numbers of files that were opened without O_BINARY
    msvcrt = Msvcrt()

    def opened(path, flags, mode=0o777, **more):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "a folder cannot be opened", str(path))
        if flags & os.O_TRUNC and is_mapped(path):
            raise OSError(errno.EINVAL, "the file is mapped", str(path))
        file = real.open(path, (flags & ~BINARY) | real.O_CLOEXEC, mode, **more)
        (text.discard if flags & BINARY else text.add)(file)
        return file

    def write(file, data):
        if file not in text:
            return real.write(file, data)
        data = bytes(data)
        translated = data.replace(b"\n", b"\r\n")
        assert real.write(file, translated) == len(translated)
        return len(data)

    def close(file):
        text.discard(file)
        msvcrt.locked.discard(file)
        real.close(file)

    def fsync(file):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "a file that is read cannot be synced")
        real.fsync(file)

    def ftruncate(file, size):
        if size < os.fstat(file).st_size and is_mapped(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "the file is mapped")
        real.ftruncate(file, size)

    def refuse_open(path):
        if Path(path).is_file() and is_open(path):
            raise PermissionError(errno.EACCES, "another program uses the file", str(path))

    def replace(source, target, **more):
        refuse_open(source)
        refuse_open(target)
        real.replace(source, target, **more)

    def rename(source, target, **more):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        replace(source, target, **more)

    def unlink(path, **more):
        if not more:
            refuse_open(path)
        real.unlink(path, **more)

    def open_text(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            if newline is None and mode[0] in "wax":
                newline = "\r\n"
        return real.text(file, mode, buffering, encoding, errors, newline, **more)

    for name in MISSING:
        delattr(os, name)
    for module in ("fcntl", "resource"):
        sys.modules[module] = None
    sys.modules["msvcrt"] = msvcrt
    os.O_BINARY = BINARY
    os.open, os.write, os.close, os.fsync, os.ftruncate = opened, write, close, fsync, ftruncate
    os.replace, os.rename, os.unlink, os.remove = replace, rename, unlink, unlink
    io.open = builtins.open = open_text
    return real


def main():
    """Run tests on the simulated Windows: `python tests/windows.py tests/test_store.py -k …`.

    Those that look at what only Linux has fail: pipes, forks, space ahead, names of synced files;
    and those that end a writer inside a process, where its files stay open.
    """
    import pytest
    import torch.utils.data  # noqa: F401 - with what it needs of Linux

    simulate()
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--capture=sys", "--tb=short"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
