"""The versions of torch and Python that hookline is tested with, and the check of torch's version.

`hookline/__init__.py` calls `check_torch` before anything imports torch: an old torch is refused
by a message, not by an AttributeError somewhere inside. Only metadata of packages is read here.

- `OLDEST_TORCH`, `NEWEST_TORCH`, `PYTHONS`: what the tests run with
- `is_tested_torch()`: whether the installed torch is one of those
- `check_torch()`: raise ImportError if the installed torch is too old
"""

import importlib.metadata
import re

__all__ = ["NEWEST_TORCH", "OLDEST_TORCH", "PYTHONS", "check_torch", "is_tested_torch"]

OLDEST_TORCH = (2, 8)  # pyproject.toml says the same to pip
NEWEST_TORCH = (2, 15)
PYTHONS = ("3.11", "3.12", "3.13")

# 2.13.0, 2.13.0+cpu, 2.8.0a0+git1234567, 2.8.0.dev20250601+cu128
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*(?P<unfinished>\.?(?:a|b|rc|dev)\d*)?")


def is_tested_torch() -> bool:
    """Return True if the installed torch is a release from the oldest to the newest tested one.

    Development builds and a torch without metadata are not releases.
    """
    found = _VERSION.match(_installed_torch())
    if found is None or found["unfinished"]:
        return False
    return OLDEST_TORCH <= (int(found[1]), int(found[2])) <= NEWEST_TORCH


def check_torch() -> None:
    """Raise ImportError if the installed torch is older than `OLDEST_TORCH`.

    A torch whose version is unknown passes: built from source into a path, it has no metadata.
    """
    version = _installed_torch()
    found = _VERSION.match(version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"hookline needs torch {oldest} or newer. torch {version} is installed here. "
            f"Install a newer one: pip install 'torch>={oldest}'",
            name="torch",
        )


def _installed_torch() -> str:
    """Return the version that torch's metadata has, or an empty string."""
    try:
        # Not version(), which warns in Python 3.12 where a damaged installation has none.
        found = importlib.metadata.distribution("torch").metadata.get_all("Version")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    return found[0] if found else ""
