"""Commands on damaged files: what they may answer, and a limit on their time."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from conftest import Said

CPU_SECONDS = 60  # the slowest command takes 2; the time of other processes does not count


GONE = (("summary.json", "stopped"), ("experiment.toml", "no runs"))  # without these it is not finished, or no run


class NoEnd(BaseException):
    """A command has used all of its time."""


@contextmanager
def limited_time() -> Iterator[None]:
    """End the block with NoEnd after CPU_SECONDS of this process. pytest's timeout ends one that waits for ever."""

    def end(number: int, frame: FrameType | None) -> None:
        raise NoEnd(f"no end after {CPU_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True)
class Answer:
    """What a command printed and the files that it wrote."""

    said: Said
    written: dict[str, bytes] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Everything that was printed, without line breaks."""
        return "".join((self.said.out + self.said.error).split("\n"))

    @property
    def names_state(self) -> str:
        """The state that the command names in place of the finished run."""
        return next((state for _, state in GONE if state in self.text), "")

    @property
    def result(self) -> tuple[str, dict[str, bytes]]:
        """What must not change silently."""
        return re.sub(r"last written [-\d: ]*", "", self.said.out), self.written


def ask(fedmll: Callable[..., Said], words: tuple[str, ...], written: tuple[str, ...] = ()) -> Answer:
    """Run a command. An exception that a user would see as a traceback becomes the exit code -1."""
    try:
        with limited_time():
            said = fedmll(*words)
    except (Exception, NoEnd):
        said = Said(-1, "", traceback.format_exc())
    files = [file for name in written for file in sorted([Path(name), *Path(name).rglob("*")]) if file.is_file()]
    return Answer(said, {str(file): file.read_bytes() for file in files})


def find_fault(answer: Answer, before: Answer | None, damaged: Path) -> str | None:
    """What is wrong with the answer to a damaged file; None if nothing is.

    Right answers are: one sentence with exit code 2; the same result as before the damage; another result together with
    the name of the damaged file. `before` is None where the result may differ, because the file is the user's input.
    """
    code, _, error = answer.said
    if code == -1 or "Traceback" in answer.text:
        return answer.said.error
    if code == 2:
        sentences = [line for line in error.strip().splitlines() if not line.startswith("warning: ")]
        right = len(sentences) == 1 and sentences[0].startswith("error: ") and len(sentences[0]) < 2000
        return None if right else f"not one sentence: {error}"
    if code != 0:
        return f"exit code {code}: {answer.text}"
    if before is None or answer.result == before.result or damaged.name in answer.text:
        return None
    if not damaged.exists() and (damaged.name, answer.names_state) in GONE:
        return None
    changed = [name for name in before.written | answer.written if before.written.get(name) != answer.written.get(name)]
    return f"another result without a word about {damaged.name}; changed files: {changed}\n{answer.text}"
