"""Generated pages are as the code says; links lead somewhere; commands that pages show exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from tandem.cli.main import run
from tandem.config.fields import options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def generated():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


GENERATED = ["options.md", "recipe.schema.json", "modules.md", "events.md", "errors.md", "algorithms.md", "plugins.md"]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_fresh(name):
    assert (ROOT / "docs" / "reference" / name).read_text() == generated()[name], "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:docs|examples|recipes|benchmarks|tests|tandem)/[\w./-]+\w)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_commands_and_flags_exist(page, capsys):
    text = page.read_text()
    for name in set(re.findall(r"^(?:\.venv/bin/)?tandem ([a-z]+)", text, re.MULTILINE)):
        assert run([name, "--help"]) == 0, name
    for flag in set(re.findall(r"--([a-z]+\.[a-z.-]+[a-z])", text)) - {"table.key"}:
        path = flag.replace("-", "_")
        assert path in options() or path.startswith("environment.options."), flag


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 100
