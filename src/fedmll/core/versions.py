"""Installed versions of fedmll and of other packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "0+source"  # fedmll's version in a source tree that is not installed


def package_version(package: str) -> str | None:
    """The installed version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fedmll_version() -> str:
    return package_version("fedmll") or UNINSTALLED
