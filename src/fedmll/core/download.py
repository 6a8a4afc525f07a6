"""Download a published file: an existing file is kept, an interrupted download continues, and the hash is checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedmll.core import files
from fedmll.core.errors import DataError

DownloadProgress = Callable[[int, int | None], None]
"""Called as `progress(done, total)`, in bytes; the total is None if the server does not send it."""

CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # without a single byte


def download_file(url: str, target: Path, digest: str, progress: DownloadProgress) -> bool:
    """Download `url` to `target`, which exists only once it is complete and its hash was checked.

    Args:
        url: where the file is published.
        target: where to put it. An interrupted download stays next to it as `….part`, and the next call continues it.
        digest: how the file's hexadecimal SHA-256 begins; `md5:…` if the publisher gives only an MD5.
        progress: called with the number of bytes.

    Returns:
        True if the file was downloaded, False if it existed.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_suffix(".lock")
        lock.touch()
    except OSError as error:
        raise DataError(f"The folder '{target.parent}' cannot be written to ({error.strerror}).") from None
    with files.file_lock(lock):
        if target.is_file():
            _check_hash(target, digest, f"Remove {target} and try again.")
            return False
        try:
            _receive(url, part, progress)
        except (OSError, HTTPException) as error:
            raise DataError(_explain(error, url, target, part)) from None
        try:
            _check_hash(part, digest, f"The download from {url} was removed; try again.")
        except DataError:
            part.unlink()
            raise
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
        files.sync_folder(target.parent)
    return True


def _receive(url: str, part: Path, progress: DownloadProgress) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedmll"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range") != f"bytes */{have}":  # 416: the file has no bytes after these
            part.unlink()  # the partial file is longer than the published one
            _receive(url, part, progress)
        return
    with response:
        continues = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        done = have if continues else 0  # the server may send the whole file instead
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab" if continues else "wb") as file:
            progress(done, total)
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _check_hash(path: Path, digest: str, what_to_do: str) -> None:
    algorithm, _, expected = digest.rpartition(":")
    algorithm = algorithm or "sha256"
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, algorithm).hexdigest()
    if not actual.startswith(expected):
        raise DataError(
            f"{path.name} is not the published file: its {algorithm} begins with {actual[: len(expected)]} and not "
            f"with {expected}. {what_to_do}"
        )


def _explain(error: Exception, url: str, target: Path, part: Path) -> str:
    if isinstance(error, HTTPError):
        reason = f"the server says {error.code} {error.reason}"
    else:
        reason = str(getattr(error, "reason", None) or error or type(error).__name__)
    kept = f" The first {part.stat().st_size:,} bytes are kept: try again to continue." if part.exists() else ""
    return (
        f"{url} cannot be downloaded ({reason}).{kept} Without a network: download the file on another machine and put "
        f"it at {target}."
    )
