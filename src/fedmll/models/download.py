"""Fetch a published file: what is there already is not fetched again, and what arrives is what was published."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedmll import files
from fedmll.data.images.cache import alone
from fedmll.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called as `progress(done, total)`, in bytes; None: the server does not say how many."""

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


def fetch(url: str, target: Path, digest: str, progress: Progress) -> bool:
    """The file at `url` becomes `target` once it is whole and its hash begins with `digest`, a hexadecimal sha256, or
    `md5:…` where its publisher says only that; whether it was fetched (False: it was there). A download that was cut
    stays in `.part`, and the next one goes on from there."""
    part = target.with_name(f"{target.name}.part")
    with alone(target, lambda: None):
        if target.is_file():
            _check(target, digest, f"Remove {target} and try again.")
            return False
        try:
            _receive(url, part, progress)
        except (OSError, HTTPException) as error:
            raise DataError(_explained(error, url, target, part)) from None
        try:
            _check(part, digest, f"What {url} gave was removed; try again.")
        except DataError:
            part.unlink()
            raise
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
        files.sync_folder(target.parent)
    return True


def _receive(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedmll"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range") != f"bytes */{have}":  # 416: there is nothing after what we have
            part.unlink()  # it is longer than the file
            _receive(url, part, progress)
        return
    with response:
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        done = have if goes_on else 0  # a server that cannot go on sends all
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab" if goes_on else "wb") as file:
            progress(done, total)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _check(path: Path, digest: str, what_to_do: str) -> None:
    named, _, expected = digest.rpartition(":")
    kind = named or "sha256"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if not found.startswith(expected):
        raise DataError(
            f"{path.name} is not the published file: its {kind} begins with {found[: len(expected)]} and not with "
            f"{expected}. {what_to_do}"
        )


def _explained(error: Exception, url: str, target: Path, part: Path) -> str:
    if isinstance(error, HTTPError):
        reason = f"the server says {error.code} {error.reason}"
    else:
        reason = str(getattr(error, "reason", None) or error or type(error).__name__)
    kept = (
        f" What has arrived ({part.stat().st_size:,} bytes) is kept: try again, and it goes on."
        if part.exists()
        else ""
    )
    return (
        f"{url} cannot be downloaded ({reason}).{kept} Without network: download it on another machine and put it at "
        f"{target}."
    )
