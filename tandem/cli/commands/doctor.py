"""``tandem doctor``."""

from __future__ import annotations

import typer

FAILED = 1


def add(app: typer.Typer) -> None:
    app.command("doctor", short_help="Show what this machine can do.")(doctor)


def doctor() -> None:
    """Show what this machine can do, and what to do about what it cannot.

    ok: there. --: not there, and not needed. NO: needed.
    """
    from tandem.app.doctor import facts
    from tandem.app.supervise import program

    found = facts()
    missing = [fact.feature for fact in found if fact.ok is False]
    width = max(len(fact.feature) for fact in found)
    for fact in found:
        mark = {True: "ok", None: "--", False: "NO"}[fact.ok]
        print(f"{mark:<3} {fact.feature:<{width}}  {fact.detail}")
        if not fact.ok and fact.remedy:
            print(f"    {'':<{width}}  remedy: {fact.remedy}")
    print(f"not ready: {', '.join(missing)}" if missing else f"ready: {program()} train recipes/demo.toml")
    raise typer.Exit(FAILED if missing else 0)
