"""The rules of the tree that a program can see."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from source_code import (
    DOCUMENTED,
    FOUNDATION,
    TORCHS_OWN,
    code_lines,
    complex_functions,
    folder_of,
    is_private,
    private_accesses,
    private_names,
    read_package,
)
from torch import nn

import hookline

ROOT = Path(hookline.__file__).parent
SOURCES = read_package(ROOT)
FOUNDATION_FILES = [name for name in SOURCES if folder_of(name) in FOUNDATION]
PARTS = {name.partition("/")[0].removesuffix(".py") for name in SOURCES}  # folders and files

# What stands above the tools: a part imports only from its own level and the levels below it.
LEVELS = {
    "view": 2,
    "cli": 3, "integrations": 3, "compat": 3, "demo": 3, "__main__": 3, "__init__": 3,
}  # fmt: skip
RESERVED = {"anatomy"}  # a public function will have this name

MODULE_HOOKS = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_backward_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
}
OPTIONAL = (
    "sklearn", "matplotlib", "click", "rich", "tqdm", "ray", "lightning", "transformers",
    "tensorboard", "wandb", "pandas", "PIL", "torchvision", "torchaudio",
)  # fmt: skip


def names_used(source):
    """Every name and attribute that a file uses."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Attribute, ast.Name))
    }


def imports(source):
    """The modules that a file imports, also under TYPE_CHECKING and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
            if node.module.removeprefix("hookline").count(".") < 2:  # a package, perhaps
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def all_own_names():
    outside = [source for name, source in SOURCES.items() if name not in TORCHS_OWN]
    return {name for source in outside for name in private_names(ast.parse(source))}


TORCHS = {
    name
    for owner in (nn.Module(), torch.Tensor, torch.autograd.graph.Node, torch._C._FunctionBase)
    for name in dir(owner)
    if is_private(name)
}


def private_names_of_others(source):
    """The private names that a file takes from another library: attributes, strings, imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            own = base in ("self", "cls") or (node.attr not in TORCHS and base != "torch")
            if node.attr not in all_own_names() or not own:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and ast.unparse(node.args[0]) != "self":
                yield name
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("hookline"):
            yield from (a.name for a in node.names if is_private(a.name))
            yield from (part for part in node.module.split(".") if is_private(part))
        elif isinstance(node, ast.Import):
            yield from (part for a in node.names for part in a.name.split(".") if is_private(part))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", node.value):
                yield node.value


def test_private_names_of_torch_are_in_one_file():
    found = {
        f"{name}: {private}"
        for name, source in SOURCES.items()
        if name not in TORCHS_OWN
        for private in private_names_of_others(source)
        if private not in DOCUMENTED
    }
    assert not found


def test_that_rule_finds_every_way_to_write_a_private_name():
    program = """
from torch.overrides import _push_mode
from torch._higher_order_ops import while_loop
import torch._dynamo
x._lazy_clone()
module._modules
getattr(module, "_parameters")
sys.modules["torch._inductor.config"]
"""
    assert set(private_names_of_others(program)) == {
        "_push_mode", "_higher_order_ops", "_dynamo", "_lazy_clone", "_modules", "_parameters",
        "torch._inductor.config",
    }  # fmt: skip


def test_no_file_uses_a_private_name_of_another_file():
    assert not list(private_accesses(SOURCES))


def test_that_rule_finds_every_way_to_use_a_private_name():
    owner = """
class Owner:
    __slots__ = ("_slot",)

    def __init__(self):
        self._attribute = 1

    def _method(self): ...

def _function(): ...
"""
    user = """
from hookline.owner import _function
from hookline._hidden import name
owner._slot
self.owner._attribute = 2
super()._method()
owner._method().name
getattr(owner, "_method")
hasattr(self, "_method")
tuple._replace(a=1)
tensor._of_torch
owner._mine

class User(Owner):
    _mine = 1

    def method(self, other):
        return self._attribute, other._mine
"""
    found = list(private_accesses({"owner.py": owner, "user.py": user}))
    assert found == [
        ("user.py", 2, "from hookline.owner import _function"),
        ("user.py", 3, "from hookline._hidden import name"),
        ("user.py", 4, "owner._slot"),
        ("user.py", 5, "self.owner._attribute"),
        ("user.py", 7, "owner._method"),
        ("user.py", 8, "getattr(owner, '_method')"),
    ]


def test_a_complex_function_says_why_at_its_top():
    assert not {
        f"{name}: {function}"
        for name, source in SOURCES.items()
        for line, function, _ in complex_functions(source)
        if not begins_with_a_comment(source, line)
    }


def begins_with_a_comment(source, line):
    """Return True if the body of the function in a line begins with a comment."""
    function = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno == line
    )
    first = function.body[1 if ast.get_docstring(function) else 0]
    return source.splitlines()[first.lineno - 2].lstrip().startswith("#")


def test_complexity_is_counted_as_ruff_counts_it():
    program = """
def function(a):
    if a:
        pass
    elif a:
        pass
    else:
        pass
    try: pass
    except ValueError: pass
    except TypeError: pass
    else: pass
    finally: pass
    for a in a:
        while a or a and a: [a if a else a for a in a if a]
    def inner():
        if a: pass
    match a:
        case 1: pass
        case _: pass
"""
    # `ruff check --select C901` says the same of these programs.
    assert list(complex_functions(program)) == [(2, "function", 11)]
    assert list(complex_functions(program.replace("case _", "case 2"))) == [(2, "function", 12)]
    assert not list(complex_functions(program.replace("while a", "with a")))


def test_code_lines_are_counted_without_blank_lines_comments_and_docstrings():
    source = '''"""A module.

With a long docstring.
"""

import os  # a comment

# another one


def function(
    argument,
):
    """A docstring."""
    return """two
lines"""


NAME = 1
"""What it is."""
'''
    assert code_lines(source) == 7


# What some systems lack, or do otherwise. `operating_system.py` has it for all other files.
OF_SOME_SYSTEMS = {
    "os": {
        "fchmod", "fdatasync", "fork", "forkpty", "fstatvfs", "fsync", "getgid", "getuid", "kill",
        "killpg", "major", "minor", "mkfifo", "name", "open", "posix_fadvise", "posix_fallocate",
        "pread", "preadv", "pwrite", "pwritev", "register_at_fork", "rename", "replace",
        "sched_getaffinity", "statvfs", "sync", "uname",
        "O_BINARY", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC",
    },
    "sys": {"getwindowsversion", "platform"},
}  # fmt: skip
MODULES_OF_SOME_SYSTEMS = {
    "ctypes", "fcntl", "grp", "msvcrt", "nt", "posix", "pwd", "resource", "termios", "winreg",
}  # fmt: skip


def uses_of_some_systems(source):
    """What a file uses that only some systems have, or that they do otherwise."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr in OF_SOME_SYSTEMS.get(ast.unparse(node.value), ()):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in MODULES_OF_SOME_SYSTEMS)
        elif isinstance(node, ast.ImportFrom):
            if node.module in MODULES_OF_SOME_SYSTEMS:
                yield node.module
            of_it = OF_SOME_SYSTEMS.get(node.module, ())
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in of_it)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in MODULES_OF_SOME_SYSTEMS or node.value.startswith(("/proc", "/dev/")):
                yield node.value
        elif isinstance(node, ast.Call):
            yield from calls_of_some_systems(node)


def calls_of_some_systems(node):
    """A call that renames a file, or that opens text as each system spells it."""
    name = ast.unparse(node.func).rpartition(".")[2]
    given = {keyword.arg for keyword in node.keywords}
    constants = [one.value for one in node.args if isinstance(one, ast.Constant)]
    if name in ("getattr", "hasattr") and constants:
        if constants[0] in OF_SOME_SYSTEMS.get(ast.unparse(node.args[0]), ()):
            yield f"{ast.unparse(node.args[0])}.{constants[0]}"
    elif name in ("replace", "rename") and len(node.args) == 1 and not given:
        if isinstance(node.func, ast.Attribute):  # of a path: that of a string takes two
            yield f"Path.{name}"
    elif name == "read_text" and not (node.args or "encoding" in given):
        yield "text without encoding="
    elif name == "write_text" and not {"newline", "encoding"} <= given:
        yield "text without encoding= and newline="
    elif name == "open" and any(
        isinstance(c, str) and re.fullmatch("[rwax+t]+", c) for c in constants
    ):
        if "encoding" not in given or (constants[-1][0] != "r" and "newline" not in given):
            yield "text without encoding= and newline="


def test_what_only_some_systems_have_is_in_one_file():
    found = {
        f"{name}: {used}"
        for name, source in SOURCES.items()
        if name != "operating_system.py"
        for used in uses_of_some_systems(source)
    }
    assert not found


def test_that_rule_finds_what_only_some_systems_have():
    program = """
import fcntl, os
from os import pwrite
from resource import getrlimit
os.posix_fadvise(file, 0, 1, 2)
flags = getattr(os, "O_DIRECTORY", 0)
if sys.platform == "win32" or hasattr(os, "fork"):
    import_module("msvcrt")
text.replace("a", "b")
path.replace(other)
path.rename(other)
Path("/proc/self/fd")
path.read_text()
path.write_text("a", encoding="utf-8")
path.open("w", encoding="utf-8")
open(path, "r")
open(path, "rb")
path.read_text("utf-8")
path.write_text("a", encoding="utf-8", newline="\\n")
"""
    assert sorted(uses_of_some_systems(program)) == sorted(
        [
            "fcntl", "os.pwrite", "resource", "os.posix_fadvise", "os.O_DIRECTORY", "sys.platform",
            "os.fork", "msvcrt", "Path.replace", "Path.rename", "/proc/self/fd",
            "text without encoding=", *["text without encoding= and newline="] * 3,
        ]
    )  # fmt: skip


def test_nothing_registers_hooks_on_modules_in_another_way():
    for name, source in SOURCES.items():
        if name == "torch_probes.py":  # which tries what torch makes of them
            continue
        used = names_used(source)
        assert not used & MODULE_HOOKS, name
        assert not any(word.startswith("register_module_") for word in used), name
        assert "always_call" not in source.replace("_always_called", ""), name


def test_no_forward_is_replaced_and_torch_is_not_patched():
    for name, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute):
                    assert target.attr not in ("forward", "__call__", "__class__"), name
                    owner = ast.unparse(target.value)
                    assert owner.split(".")[0] not in ("torch", "nn", "Tensor"), name


@pytest.mark.parametrize("name", FOUNDATION_FILES)
def test_the_foundation_imports_torch_the_standard_library_and_what_is_below(name):
    below = FOUNDATION[: FOUNDATION.index(folder_of(name)) + 1]
    ours = tuple(f"hookline.{n}" for n in ("errors", "torch_private", "torch_checks", *below))
    source = SOURCES[name]
    for_types = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    named = set().union(*(imports(ast.unparse(node)) for node in for_types))
    for module in imports(source):
        assert module.split(".")[0] in {"torch", "hookline", *sys.stdlib_module_names}, module
        if module.startswith("hookline") and module not in named:
            assert module.startswith(ours), module


def test_the_errors_import_nothing_of_ours_but_for_types():
    source = SOURCES["errors.py"]
    ours = {module for module in imports(source) if module.startswith("hookline")}
    assert ours <= {"hookline.captures.record"}
    outside = [
        node
        for node in ast.parse(source).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "hookline" in ast.unparse(node)
    ]
    assert not outside


def test_files_of_the_foundation_import_each_other_in_one_direction():
    names = {"hookline." + n.removesuffix(".py").replace("/", "."): n for n in FOUNDATION_FILES}
    graph = {}
    for name, file in names.items():
        tree = ast.parse(SOURCES[file])
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]  # on loading
        graph[name] = {found for node in top for found in imports(ast.unparse(node))} & set(names)
    while graph:
        free = [name for name, needs in graph.items() if not needs & set(graph)]
        assert free, f"these import each other in a circle: {sorted(graph)}"
        for name in free:
            del graph[name]


def test_imports_point_from_the_foundation_to_the_tools_to_what_people_use():
    found = set()
    for name, source in SOURCES.items():
        own = LEVELS.get(name.partition("/")[0].removesuffix(".py"), 1)
        for part in parts_imported(source):
            if LEVELS.get(part, 1) > own:
                found.add(f"{name}: {part}")
    assert not found


def parts_imported(source):
    """Yield the folders and files of hookline that a file imports from; `__init__` for itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for package, _, rest in (name.partition(".") for name in dotted):
            if package == "hookline" and rest != "__version__":
                part = rest.partition(".")[0]
                yield part if part in PARTS else "__init__"


def test_that_rule_sees_what_is_imported():
    program = """
import hookline.view.server
import hookline as hl
from hookline import recipes
from hookline.cli.models import find
if TYPE_CHECKING:
    from hookline import capture
import torch
"""
    parts = ["view", "__init__", "recipes", "cli", "__init__"]
    assert sorted(parts_imported(program)) == sorted(parts)


@pytest.mark.parametrize("name", [n for n in SOURCES if not n.endswith("__main__.py")])
def test_all_is_sorted_and_complete(name):
    tree = ast.parse(SOURCES[name])
    dotted = "hookline." + name.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(dotted.removesuffix(".__init__"))
    if not any(isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom)) for n in tree.body):
        return
    listed = module.__all__
    # Classes first as ruff sorts them: constants, classes, functions.
    assert len(set(listed)) == len(listed)
    assert listed == sorted(listed, key=_rank) or listed == sorted(listed)
    for public in listed:
        assert hasattr(module, public), public
    used = set().union(*(_imported_from(s, module.__name__) for s in SOURCES.values()))
    missing = {
        word for word in used if not word.startswith("_") and word not in listed
        and not _is_module(module.__name__, word)
    }  # fmt: skip
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    assert not missing & defined, f"others import these, but __all__ of {name} lacks them"


def _rank(word):
    return (0 if word.isupper() else 1 if word[:1].isupper() else 2, word)


@cache
def _imports(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]


def _imported_from(source, module):
    return {
        alias.name for node in _imports(source) if node.module == module for alias in node.names
    }


def _is_module(package, word):
    return f"{package}.{word}".removeprefix("hookline.").replace(".", "/") + ".py" in SOURCES


def test_every_public_name_of_the_package_is_documented():
    for name in hookline.__all__:
        assert (getattr(hookline, name).__doc__ or "").strip(), name
    assert hookline.__all__ == sorted(hookline.__all__)


def test_dir_shows_the_public_names_of_the_package_only():
    shown = dir(hookline)
    assert [name for name in shown if not name.startswith("__")] == hookline.__all__
    assert {"__doc__", "__name__", "__version__"} < set(shown)
    for name in shown:  # those that are loaded when they are first used, too
        getattr(hookline, name)
    assert dir(hookline) == shown
    for name in ("errors", "compat", "integrations", "statistics"):
        assert importlib.import_module(f"hookline.{name}") is getattr(hookline, name)


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_begins_with_a_docstring(name):
    text = ast.get_docstring(ast.parse(SOURCES[name]))
    assert text or not SOURCES[name].strip(), "a module docstring: a sentence, then its names"


def test_no_folder_or_file_is_named_like_a_public_function_or_a_drawer():
    """Importing it would put the module where the function was. Namespaces such as hl.errors may.

    A name that only says that things are kept together says nothing.
    """
    names = {part for name in SOURCES for part in Path(name).with_suffix("").parts}
    assert not names & {*hookline.__all__, *RESERVED}
    assert not names & {"utils", "util", "helpers", "base", "common", "misc"}


def test_no_two_files_have_the_same_name():
    names = [name for name in SOURCES if not name.endswith("__init__.py")]
    stems = Counter(Path(name).stem for name in names)
    assert not {stem for stem, times in stems.items() if times > 1}


def test_the_coverage_of_the_whole_foundation_is_measured():
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["coverage"]
    folders = [f"hookline/{folder}/*" for folder in FOUNDATION]
    assert settings["run"]["include"] == ["hookline/errors.py", *folders]


def test_importing_hookline_loads_nothing_optional():
    program = (
        "import sys, torch, numpy; before = set(sys.modules)\n"
        "import hookline; print('\\n'.join(set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True, text=True, check=True, cwd=ROOT.parent,
    )  # fmt: skip
    loaded = set(result.stdout.split())
    assert "hookline.engine.hooking" in loaded
    for name in loaded:
        assert name.split(".")[0] not in OPTIONAL, name
        assert not name.startswith("torch._dynamo"), name
        last = ("cli", "compat", "demo", "integrations", "view")
        assert not name.startswith(tuple(f"hookline.{end}" for end in last)), name


def test_importing_hookline_changes_nothing_in_torch():
    program = (
        "import torch\n"
        "from torch import nn\n"
        "before = {n: id(v) for c in (nn.Module, torch.Tensor) for n, v in vars(c).items()}\n"
        "import hookline\n"
        "after = {n: id(v) for c in (nn.Module, torch.Tensor) for n, v in vars(c).items()}\n"
        "assert before == after\n"
        "from torch.nn.modules import module\n"
        "assert not module._global_forward_hooks and not module._global_forward_pre_hooks\n"
        "assert torch._C._len_torch_function_stack() == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT.parent)
