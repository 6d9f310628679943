"""The shape of the tree: names, mirrors, empty packages, environment variables, budgets."""

import ast
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tandem"
SOURCES = sorted(PACKAGE.rglob("*.py"))
BESIDE = ("architecture", "docs", "golden", "numerics", "seams")  # tests of more than one module
MODULE_LINES, FUNCTION_LINES = 400, 60
# Launcher facts, and secrets by the name that an option gives; settings are options of the recipe.
VARIABLES = {"XDG_CACHE_HOME", "remote.key_variable"}


def test_no_drawer_for_anything():
    names = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "base.py"}
    assert [path for path in SOURCES if path.name in names] == []


def test_packages_hold_a_docstring_only():
    for path in PACKAGE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert body and ast.get_docstring(ast.parse(path.read_text())), path
        assert len(body) == 1 or path.parent == PACKAGE, path


def test_every_module_says_what_it_is():
    assert [path for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_tests_mirror_the_tree():
    lost = []
    for test in (ROOT / "tests").rglob("test_*.py"):
        place = test.relative_to(ROOT / "tests")
        module = PACKAGE / place.parent / test.name.removeprefix("test_")
        if place.parts[0] not in BESIDE and not module.is_file():
            lost.append(str(place))
    assert lost == []


def test_environment_variables_are_known():
    """An option in an environment variable is an option that no recipe and no log shows."""
    read: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
            if text.startswith(("os.environ.get(", "os.environ[", "os.getenv(", "environ.get(")):
                argument = node.args[0] if isinstance(node, ast.Call) else node.slice
                read.add(str(argument.value) if isinstance(argument, ast.Constant) else ast.unparse(argument))
    assert read == VARIABLES


def test_budgets_are_a_report():
    """Over budget means: look whether there is a second noun in it. It is shown, it fails nothing."""
    for path in SOURCES:
        text = path.read_text()
        if (lines := text.count("\n")) > MODULE_LINES:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines", stacklevel=1)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    warnings.warn(f"{path.relative_to(ROOT)}: {node.name} has {length} lines", stacklevel=1)
