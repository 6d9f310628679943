"""A folder as one file and back, with all that a layer may hold: owners, extended attributes, whiteouts, hard links.

Owns: the format, a POSIX tar with ``SCHILY.xattr`` records (as GNU tar and star write them). The same folder always
gives the same bytes. Refuses: sockets (nothing to keep). Both functions block.
"""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path

XATTR = "SCHILY.xattr."


def pack(folder: Path, archive: Path) -> None:
    """Write the archive and sync it. Raises OSError; the archive is removed then."""
    try:
        with archive.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, folder, ".")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        archive.unlink(missing_ok=True)
        raise


def unpack(archive: Path, folder: Path) -> None:
    """The folder as it was. The archive is trusted: its digest was checked. Raises OSError."""
    with tarfile.open(archive, "r:") as tar:
        members = tar.getmembers()
        tar.extractall(folder, members, filter="fully_trusted")
        for member in members:
            if member.issym():  # tarfile leaves their time alone
                os.utime(folder / member.name, (member.mtime, member.mtime), follow_symlinks=False)
            for key, value in member.pax_headers.items():
                if key.startswith(XATTR):
                    data = value.encode("utf-8", "surrogateescape")
                    os.setxattr(folder / member.name, key.removeprefix(XATTR), data, follow_symlinks=False)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.lstat()
    if stat.S_ISSOCK(status.st_mode):
        return
    member = tar.gettarinfo(path, arcname=name)
    member.uname = member.gname = ""
    member.pax_headers = {
        XATTR + key: os.getxattr(path, key, follow_symlinks=False).decode("utf-8", "surrogateescape")
        for key in sorted(os.listxattr(path, follow_symlinks=False))
    }
    if member.isreg():
        with path.open("rb") as file:
            tar.addfile(member, file)
    else:
        tar.addfile(member)
    if member.isdir():
        for each in sorted(os.listdir(path)):
            _add(tar, path / each, f"{name}/{each}")
