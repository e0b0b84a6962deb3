"""The page of everything private of torch that hookline uses, made of the file that has it all.

- `page()`: docs/torch-private.md
- `names()`: each name of `hookline/torch_private.py`, with its text
"""

from __future__ import annotations

import ast
import inspect
import re

from hookline import torch_private
from hookline.supported_versions import OLDEST_TORCH
from hookline.torch_probes import GROUPS, PROBES

OLDEST = ".".join(map(str, OLDEST_TORCH))
LAST = re.compile(r"\s*(?P<without>(Required|Without)\b[^.]*(\.(?!\s)[^.]*)*\.)$")
HEAD = f"""\
# What hookline uses of torch

<!-- made by `make tables` of hookline/torch_private.py: change that file, not this one -->

hookline uses some parts of torch that are private or undocumented. All of them are in one file,
`hookline/torch_private.py`; a test allows them nowhere else. A private name can disappear, or stay
and change its meaning. So each of them has a probe: a small function that tries whether it behaves
as described here.

- `hookline doctor` runs all probes, and lists what differs with the features that need it.
- On a tested version of torch no probe runs when hookline is used. On any other version, the probes
  of a group run when a feature first needs it, once per process. If one fails, the feature raises
  `UnsupportedTorch`, which says what differs.
- "Required" means that features are refused without it. For the others, the last column says what
  hookline does instead.
- All of them exist in torch {OLDEST}, the oldest that is tested, unless the text says since when.
"""


def names() -> dict[str, str]:
    """Return the names in the order of the file, each with its text on one line."""
    found: dict[str, str] = {}
    body = ast.parse(inspect.getsource(torch_private)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            value = following.value if isinstance(following, ast.Expr) else None
            found[ast.unparse(target)] = ast.literal_eval(value) if value else ""
    return {n: " ".join(text.split()) for n, text in found.items() if n in torch_private.__all__}


def row(name: str, text: str) -> str:
    """Return the row of a name: what it does, and what happens without it."""
    last = LAST.search(text)
    if last is None:
        raise ValueError(f"The text of {name} does not end with 'Required.' or 'Without …'.")
    does = text[: last.start()]
    head = re.match(r"`(?P<call>(with )?\w+(\([^`]*\))?:?)`:? ", does)
    does = does[head.end() :] if head else does
    without = last["without"].removeprefix("Without it, ")
    cells = (f"`{name}`", does[0].upper() + does[1:], without[0].upper() + without[1:])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """Return the page: a table for each group of probes."""
    texts, parts = names(), [HEAD]
    for group, features in GROUPS.items():
        own = [name for name in texts if PROBES[name].group == group]
        rows = [row(name, texts[name]) for name in own]
        head = ("| name | what it does | without it |", "|---|---|---|")
        title = f"## {group.capitalize()}\n\nNeeded for: {features}.\n"
        parts.append("\n".join([title, *head, *rows, ""]))
    return "\n".join(parts)
