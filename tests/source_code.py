"""What a program can see in the source of hookline.

- `read_package(root)`: the source of each file, by its path in the package
- `code_lines(source)`: the number of lines that hold code
- `complex_functions(source)`: the functions above the limit of cyclomatic complexity
- `private_accesses(sources)`: where a file uses what is private to another file
- `private_names(tree)`: the private names that a file defines

The rules in `test_layout.py` and the measurements in `benchmarks/reading.py` use the same code.
"""

import ast
import io
import tokenize
from pathlib import Path

# The folders that everything else stands on: each imports only those before it.
FOUNDATION = ("values", "places", "engine", "captures", "edits")
FOUNDATION_FILES = ("errors.py",)
MOST_COMPLEX = 10  # as [tool.ruff.lint.mccabe] in pyproject.toml

# The files that may use private names of torch: they define none that others may not use.
TORCHS_OWN = ("torch_private.py", "torch_probes.py")
# Names that look private, but that the documentation of Python or of a library describes.
DOCUMENTED = {"_getframe", "_asdict", "_fields", "_make", "_replace", "_collections_abc"}

LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
ACCESSORS = ("getattr", "hasattr", "setattr", "delattr")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_package(root):
    """Return the source of each file, by its path in the package."""
    paths = sorted(Path(root).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def folder_of(name):
    """Return the first folder on the way to a file; "" for a file of the package itself."""
    return name.rpartition("/")[0].partition("/")[0]


def is_foundation(name):
    return folder_of(name) in FOUNDATION or name in FOUNDATION_FILES


def code_lines(source):
    """Count the lines that hold code: no blank lines, no comments, no docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):  # also that of an attribute
                lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def complex_functions(source):
    """Yield line, name and complexity of each function above the limit, as ruff's C901 does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS):
            complexity = 1 + sum(map(branches, node.body))
            if complexity > MOST_COMPLEX:
                yield node.lineno, node.name, complexity


def branches(node):
    """Count the branches in a statement: ruff looks at statements only, not into expressions."""
    own = 0
    if isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, *FUNCTIONS)):
        own = 1
    elif isinstance(node, (ast.Try, ast.TryStar)):
        own = bool(node.orelse)
    elif isinstance(node, ast.Match):
        own = len(node.cases) - any(is_wildcard(case) for case in node.cases[-1:])
    inside = (ast.stmt, ast.ExceptHandler, ast.match_case)
    children = ast.iter_child_nodes(node)
    return own + sum(branches(child) for child in children if isinstance(child, inside))


def is_wildcard(case):
    """Return True if a case matches everything, as an `else` does."""
    pattern = case.pattern
    return case.guard is None and isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_"


def private_names(tree):
    """Yield the private names that a file defines: functions, classes, variables, attributes."""
    return filter(is_private, _names(tree))


def _names(tree):
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            strings = (
                part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)
            )
            yield from strings


def private_accesses(sources):
    """Yield file, line and text of each use of a name that is private to another file.

    A use is an attribute `x._name`, also as a string in `getattr(x, "_name")`, unless x is self,
    cls or super() or the same file defines `_name`, and an import of `_name` from hookline. Names
    that no file of hookline defines belong to other libraries; test_layout.py has a rule for them.
    """
    trees = {name: ast.parse(source) for name, source in sources.items()}
    own = {name: set(private_names(tree)) for name, tree in trees.items()}
    ours = set().union(*(names for file, names in own.items() if file not in TORCHS_OWN))
    for file, tree in trees.items():
        of_others = ours - own[file] - DOCUMENTED if file not in TORCHS_OWN else set()
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if any(name in of_others for name in attributes_used(node)) or imports_private(node):
                yield file, node.lineno, ast.unparse(node)


def imports_private(node):
    """Return True if a node imports a private name of hookline."""
    if not isinstance(node, ast.ImportFrom) or not node.module.startswith("hookline"):
        return False
    names = [*node.module.split("."), *(alias.name for alias in node.names)]
    return any(map(is_private, names))


def attributes_used(node):
    """Yield the attribute that a node takes of something that is not the object itself."""
    if isinstance(node, ast.Attribute):
        owner, name = node.value, node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESSORS and len(node.args) > 1:
        owner, name = node.args[0], getattr(node.args[1], "value", "")
    else:
        return
    if ast.unparse(owner) not in ("self", "cls", "super()"):
        yield name
