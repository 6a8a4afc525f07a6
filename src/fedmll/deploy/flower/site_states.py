"""Client states on the sites' own disks, as the server knows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedmll.engines.client_state import StateVersions


@dataclass
class SiteStates:
    """The server knows from which round each client's newest state is, and which ones must be kept."""

    latest: dict[int, int] = field(default_factory=dict)
    kept: StateVersions | None = field(default_factory=set)  # None: all

    def sync(self) -> None:
        """Nothing to do: a site writes its state to disk before it replies."""

    def keep_only(self, versions: StateVersions | None) -> None:
        self.kept = versions

    def checkpointed(self, kept: Callable[[], StateVersions | None]) -> None:
        self.kept = kept()

    def info_for(self, client: int) -> dict[str, Any]:
        """For a client's message: the round of the state to continue from, and the rounds of the states to keep."""
        keep = None if self.kept is None else sorted(round for index, round in self.kept if index == client)
        return {"state_round": self.latest.get(client), "keep_rounds": keep}
