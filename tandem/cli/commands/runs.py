"""``tandem runs``: what the logs of runs say."""

from __future__ import annotations

import datetime
from pathlib import Path

import typer

from tandem.cli import words
from tandem.core.errors import RecordError
from tandem.record.conversation import conversation
from tandem.record.curve import draw_curves
from tandem.record.metrics import fold
from tandem.record.replay import episodes, load_episode, read, verify
from tandem.record.summary import number, summarise_run, table

app = typer.Typer(help="Runs and what they recorded.", no_args_is_help=True, rich_markup_mode=None)
RUN = typer.Argument(help="A run folder, a name in runs/, or last.")


@app.command("list")
def list_runs(folder: Path = typer.Argument(Path("runs"), help="Where run folders are.")) -> None:
    """List the runs of a folder, the newest last."""
    found = words.runs_in(folder)
    if not found:
        raise RecordError(f"no runs in {folder}", hint="tandem train recipes/demo.toml makes one")
    rows = [["run", "started", "state", "steps", "reward", "held-out success"]]
    for path in found:
        try:
            metrics = fold(read(path))
        except RecordError:  # one broken log must not hide the other runs; tandem runs verify says what is wrong
            rows.append([path.name, "-", "broken", "-", "-", "-"])
            continue
        steps = metrics.phase_steps()
        started = metrics.started
        rows.append(
            [
                path.name,
                f"{datetime.datetime.fromtimestamp(started):%Y-%m-%d %H:%M}" if started is not None else "-",
                metrics.finished.reason if metrics.finished else "running or killed",
                str(len(steps)),
                number(steps[-1].reward if steps else None),
                number(metrics.evaluations[-1].success if metrics.evaluations else None),
            ]
        )
    print(table(rows))


@app.command()
def show(
    run: str = RUN,
    episode: str = typer.Option("", metavar="ID", help="Show this episode as a conversation with token spans."),
    list_episodes: bool = typer.Option(False, "--episodes", help="List the finished episodes."),
) -> None:
    """Show what a run came to, or one of its episodes."""
    folder = words.run_folder(run)
    if episode:
        print(conversation(load_episode(folder, episode), _decoder(folder)))
    elif list_episodes:
        rows = [["episode", "for", "reward", "turns", "tokens", "ended"]]
        for event in episodes(folder).values():
            ended = event.failure or event.stop_reason or "-"
            rows.append([event.episode_id, event.purpose, number(event.reward), str(event.num_turns),
                         str(event.num_tokens), ended])  # fmt: skip
        print(table(rows))
    else:
        print(f"run {folder}\n\n{summarise_run(folder)}")


def _decoder(folder: Path):
    """Ids to text with the tokenizer of the run's model."""
    from tandem.app.run import recipe_of
    from tandem.models.builtin import resolve_model
    from tandem.text.tokenizer import load_tokenizer

    exported = folder / "model"
    model = exported if (exported / "tokenizer.json").is_file() else resolve_model(recipe_of(folder)[0].model.path)
    return load_tokenizer(model).decode


@app.command("verify")
def verify_run(run: str = RUN) -> None:
    """Check the hash chain of a run's log and the bytes of its episodes."""
    folder = words.run_folder(run)
    verdict = verify(folder)
    if verdict.problem:
        raise RecordError(f"{folder}: {verdict.problem}", hint=f"the {verdict.num_events} events before it are good")
    end = "" if verdict.ended else "; it does not end: the run goes on, or was killed"
    print(f"{folder}: {verdict.num_events} events, chain and episodes are whole{end}")


@app.command()
def curve(
    runs: list[str] = typer.Argument(help="Runs to draw into one picture."),
    out: Path = typer.Option(Path("curve.png"), help="The picture: .png or .svg."),
) -> None:
    """Draw the reward curves of runs."""
    print(draw_curves([words.run_folder(run) for run in runs], out))
