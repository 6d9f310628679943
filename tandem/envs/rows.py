"""Rows of data files, whatever their format: JSON lines, JSON, CSV, Parquet, Arrow, folders of them, and the splits
of a data set.

Owns: formats, and which files belong to which split. Refuses: meaning (``dataset``), the network (``core.hub``).
Invariants: a file that cannot be read is an error that names it, and in JSON lines the line; nothing is skipped; rows
of two splits, or of two data sets in one folder, are never mixed.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.core.errors import ConfigError, boundary

Row = Mapping[str, object]
FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
SPLITS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip


def read_rows(path: str | Path, *, split: str = "") -> Iterator[Row]:
    """Every row of a file, or of the data files of one split under a folder (``data_files``), in order of their names.

    Raises:
        ConfigError: there is nothing to read, the format is unknown, or the content is broken.
    """
    for file in data_files(path, split=split):
        yield from _read_file(file)


def data_files(path: str | Path, *, split: str = "") -> list[Path]:
    """The files of one split. A folder of one ``DatasetDict`` has a folder for each; elsewhere the words ``train``,
    ``test`` or ``validation`` (and their usual short forms) in the names of files or of their folders tell. Without a
    ``split`` a folder of several gives ``train``.

    Raises:
        ConfigError: there is nothing to read; no such split, or several without one called ``train``; files of a split
            lie in several folders, which are several data sets.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if split:
            raise ConfigError(f"{place} is one file: it has no split {split!r}", hint="give a folder, or no split")
        return [place]
    if not place.is_dir():
        raise ConfigError(
            f"data not found: {place}", hint="give a file, a folder, or the owner/name of a data set on the hub"
        )
    found = sorted(file for file in place.rglob("*") if file.suffix in FORMATS and not _is_description(file))
    if not found:
        raise ConfigError(f"no data files in {place}", hint=f"known: {', '.join(FORMATS)}")
    splits: dict[str, list[Path]] = defaultdict(list)
    for file in found:
        splits[_split_of(file.relative_to(place))].append(file)
    known = ", ".join(sorted(name or "(files of none)" for name in splits))
    wanted = split or ("" if len(splits) == 1 else "train")
    files = found if len(splits) == 1 and not split else splits.get(wanted)
    if not files:
        raise ConfigError(f"{place} has no split {wanted!r}", hint=f"it has {known}; data.split chooses one")
    folders = sorted({str(_set_of(file.relative_to(place))) for file in files})
    if any(splits.keys()) and len(folders) > 1:
        raise ConfigError(
            f"{place} holds several data sets: {', '.join(folders)}", hint="data.subset chooses one of these folders"
        )
    return files


def _split_of(file: Path) -> str:
    """The split that a file's own name, else its nearest folder's, tells; empty: none."""
    for part in (file.stem, *(folder.name for folder in file.parents)):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def _set_of(file: Path) -> Path:
    """The folder of the data set that a file belongs to: the nearest one not named after a split."""
    return next(folder for folder in file.parents if not folder.name or not _split_of(Path(folder.name)))


def _is_description(file: Path) -> bool:
    """What stands beside the data in a saved data set, or in its cache."""
    names = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
    return file.name in names or file.name.startswith("cache-")


def _read_file(file: Path) -> Iterator[Row]:
    match file.suffix:
        case ".jsonl":
            yield from _json_lines(file)
        case ".json":
            with boundary(ConfigError, f"{file} is broken"):
                rows = json.loads(file.read_text())
            if not isinstance(rows, list):
                raise ConfigError(f"{file} does not hold a list of rows", hint="one object a line is a .jsonl file")
            yield from (_object(row, f"{file}, row {number}") for number, row in enumerate(rows, start=1))
        case ".csv":
            with file.open(newline="", encoding="utf-8") as handle:
                yield from csv.DictReader(handle)
        case ".parquet" | ".arrow":
            yield from _columnar(file)
        case _:
            raise ConfigError(f"{file}: unknown format", hint=f"known: {', '.join(FORMATS)}")


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                with boundary(ConfigError, f"{file}, line {number} is broken"):
                    row = json.loads(line)
                yield _object(row, f"{file}, line {number}")


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no object, but {type(row).__name__}")
    return row


def _columnar(file: Path) -> Iterator[Row]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{file} needs the package pyarrow", hint="pip install pyarrow") from error
    with boundary(ConfigError, f"{file} is broken"):
        if file.suffix == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches()
        else:
            source = arrow.memory_map(str(file))
            try:
                opened = arrow.ipc.open_file(source)
                batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
            except arrow.ArrowInvalid:  # saved data sets are streams
                source.seek(0)
                batches = arrow.ipc.open_stream(source)
        for batch in batches:
            yield from batch.to_pylist()
