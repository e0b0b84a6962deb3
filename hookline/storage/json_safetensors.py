"""Folders with a JSON file and a safetensors file of the tensors that it names.

- `write(folder, kind, content, tensors)`: write both files as a whole, or neither
- `read(folder, kind, error)`: read them, or raise an error that says what is wrong
- `is_plain(tensor)`: return True if a tensor can be written as it is; `name_kind(tensor)` says
  what it is if not
- `NumberedTensors`: the tensors that the JSON refers to by number
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.operating_system import replace
from hookline.storage.locks import held
from hookline.storage.small_files import DEEPEST, is_deep, strict_json
from hookline.values.quantisation import is_quantised

__all__ = ["NumberedTensors", "is_plain", "name_kind", "read", "write"]

_VERSION = 1
_MOST = 256 * 2**20  # bytes of JSON
_DIGEST = "[0-9a-f]" * 64
_Refuse = Callable[..., NoReturn]  # raises an error: what was found, what to do
_WRITERS = {  # all other kinds have `.save(folder)`
    "guard": "hookline.guard", "record": "hookline.save_record", "recipe": "hookline.Recipe.save",
}  # fmt: skip


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor can be written: it is dense and has data of its own.

    >>> is_plain(torch.zeros(2)), is_plain(torch.zeros(2, device="meta"))
    (True, False)
    """
    strange = tensor.is_nested or is_quantised(tensor) or tensor.is_meta
    return tensor.layout is torch.strided and not strange


def name_kind(tensor: Tensor) -> str:
    """Return the layout, dtype and device of a tensor in words."""
    layout = "nested" if tensor.is_nested else tensor.layout
    return f"{layout} tensor of {tensor.dtype} on {tensor.device}"


class NumberedTensors:
    """The tensors that JSON refers to by number, detached; complex ones as pairs of real numbers.

    >>> numbered, tensor = NumberedTensors(), torch.zeros(2)
    >>> numbered.number_of(tensor), numbered.number_of(torch.ones(2)), numbered.number_of(tensor)
    ('0', '1', '0')
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[int, tuple[Tensor, str]] = {}  # by id, which lasts as the tensor is kept

    def number_of(self, tensor: Tensor) -> str:
        """Return the number of a tensor; the same tensor has one number each time."""
        if id(tensor) not in self._known:
            number, plain = str(len(self.tensors)), tensor.detach()
            real = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            self.tensors[number] = real
            self._known[id(tensor)] = (tensor, number)
        return self._known[id(tensor)][1]


def write(
    folder: str | Path, kind: str, content: dict[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write `kind.json` and `kind.safetensors` into a folder, which is made if need be.

    The JSON holds a digest of the tensors' file, so that `read` notices files that do not belong
    together. Whenever the process ends, either the earlier save or this one can be read: the file
    of tensors is named by its digest until the JSON that names it has replaced the earlier one.
    Processes that save into one folder wait for each other, and the last one counts. On a file
    system without locks they cannot wait. Then they share no file: the file of tensors stays named
    by its digest, and nothing that another process wrote is removed.
    """
    folder = Path(folder)
    asked = f"A {kind} was to be written to {str(folder)!r}."
    if is_deep(content):  # `read` would refuse it
        raise HooklineError(
            asked,
            f"It is nested more than {DEEPEST} levels deep.",
            "Leave out what is nested so deeply.",
        )
    _to_json(content)  # raises if it is not JSON, before anything is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"That cannot be made a folder: {error.strerror}."
        raise HooklineError(asked, found, "Name a folder, or a new one.") from error
    with held(folder, alone=True) as free:
        if free is False:
            raise HooklineError(
                asked,
                "Others have been saving into it for a minute.",
                "Wait for them, or name another folder.",
            )
        _write(folder, kind, content, tensors, asked, shared=free is None)
    return folder


def _write(
    folder: Path,
    kind: str,
    content: dict[str, Any],
    tensors: Mapping[str, Tensor],
    asked: str,
    *,
    shared: bool,
) -> None:
    path = folder / f"{kind}.safetensors"
    own = f"{kind}.{secrets.token_hex(8)}" if shared else kind
    part = folder / f"{own}.part"
    left = [part]  # files to delete after an error: the disk may be full
    try:
        digest = _save(tensors, part) if tensors else None
        if digest is not None:
            waiting = _waiting(path, digest)
            if not (shared or waiting.exists()):  # else what another saved may need it
                left.append(waiting)
            if waiting.is_file() and _digest(waiting) == digest:  # which somebody may be reading
                part.unlink()
            else:
                replace(part, waiting)
        head = {"format": f"hookline {kind}", "version": _VERSION, "tensors": digest}
        left.append(folder / f"{own}.json.part")
        left[-1].write_text(_to_json(head | content), encoding="utf-8", newline="\n")
        replace(left[-1], folder / f"{kind}.json")
    except OSError as error:
        for one in left:
            with suppress(OSError):
                one.unlink(missing_ok=True)
        raise HooklineError(
            asked,
            f"The system says: {error.strerror or error}.",
            "What was saved there before is still there. See to the disk, its space and "
            "permissions, or name another folder.",
        ) from error
    if shared:
        return
    with suppress(OSError):  # all is there now: `read` finds tensors that wait, too
        if digest is None:
            path.unlink(missing_ok=True)
        else:
            replace(_waiting(path, digest), path)
        for old in folder.glob(_waiting(path, _DIGEST).name):  # left by a process that was killed
            old.unlink(missing_ok=True)


def _save(tensors: Mapping[str, Tensor], to: Path) -> str:
    """Write tensors to a file; return its digest."""
    from safetensors import SafetensorError

    # Their annotations say PathLike, without of what.
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] - untyped

    # One tensor a storage: safetensors refuses tensors that share memory.
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    try:
        save_file(plain, to)
    except SafetensorError as error:  # raised for a full disk, too
        raise OSError(str(error)) from error
    return _digest(to)


def _waiting(path: Path, digest: str) -> Path:
    """Return the name of tensors until their JSON is there."""
    return path.with_suffix(f".{digest}.safetensors")


def _to_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read(
    folder: str | Path, kind: str, error: type[HooklineError]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what `write` wrote, without checking the content. Never unpickles."""
    with held(Path(folder), alone=False):  # else the JSON of one save, and the tensors of another
        try:
            return _read(folder, kind, error)
        except OSError as problem:
            asked = f"A {kind} was to be read from {str(folder)!r}."
            found = f"The system says: {problem.strerror or problem}."
            raise error(asked, found, "See to the disk, and its permissions.") from problem


def _read(
    folder: str | Path, kind: str, error: type[HooklineError]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    written = f"Give a folder that was written by {_WRITERS.get(kind, '.save(folder)')}."

    def refuse(found: str, remedy: str = written) -> NoReturn:
        raise error(f"A {kind} was to be read from {str(folder)!r}.", found, remedy) from None

    path = Path(folder) / f"{kind}.json"
    content = _content_of(path, kind, refuse)
    digest = content["tensors"]
    return content, {} if digest is None else _tensors_of(path, digest, refuse)


def _content_of(path: Path, kind: str, refuse: _Refuse) -> dict[str, Any]:
    """Return what the JSON file holds."""
    if not path.is_file():
        refuse(f"There is no file {path.name} in it.")
    if path.stat().st_size > _MOST:
        refuse(f"{path.name} has {path.stat().st_size} bytes, more than any {kind} needs.")
    try:
        content: Any = strict_json(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        refuse(f"{path.name} cannot be read as JSON: {problem}.")
    if not isinstance(content, dict) or content.get("format") != f"hookline {kind}":
        refuse(f"{path.name} does not say that it is a hookline {kind}.")
    content = cast("dict[str, Any]", content)
    if content.get("version") != _VERSION:
        version = f"It has the version {content.get('version')!r}; this hookline reads {_VERSION}."
        refuse(version, "Use the hookline that wrote it.")
    if "tensors" not in content:
        refuse(f"{path.name} does not say whether it has tensors.")
    return content


def _tensors_of(json_path: Path, digest: Any, refuse: _Refuse) -> dict[str, Tensor]:
    """Return the tensors that the JSON file names by their digest."""
    from safetensors import SafetensorError

    # Their annotations say PathLike, without of what.
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - untyped

    path = json_path.with_suffix(".safetensors")
    if re.fullmatch(_DIGEST, str(digest)) and _waiting(path, digest).is_file():
        path = _waiting(path, digest)
    if not path.is_file():
        refuse(f"Its tensors are missing: there is no file {path.name}.")
    if _digest(path) != digest:
        found = f"{path.name} is not the file that was written with {json_path.name}."
        refuse(found, "Save it again.")
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as problem:
        refuse(f"{path.name} is no safetensors file: {problem}.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
