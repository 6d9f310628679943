"""Rows of data files, whatever their format: JSON lines, JSON, CSV, Parquet, Arrow, and folders of them.

Owns: formats. Refuses: meaning (``dataset``), the network. Invariant: a file that cannot be read is an error that
names it, and in JSON lines the line; nothing is skipped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.core.errors import ConfigError, boundary

Row = Mapping[str, object]
FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


def read_rows(path: str | Path) -> Iterator[Row]:
    """Every row of a file, or of all data files under a folder in order of their names.

    Raises:
        ConfigError: there is nothing to read, the format is unknown, or the content is broken.
    """
    place = Path(path).expanduser()
    if place.is_file():
        yield from _read_file(place)
        return
    if not place.is_dir():
        raise ConfigError(f"data not found: {place}", hint="data.path is a file or a folder on this machine")
    files = sorted(file for file in place.rglob("*") if file.suffix in FORMATS and not _is_description(file))
    if not files:
        raise ConfigError(f"no data files in {place}", hint=f"known: {', '.join(FORMATS)}")
    for file in files:
        yield from _read_file(file)


def _is_description(file: Path) -> bool:
    """What stands beside the data in a saved data set, or in its cache."""
    return file.name in ("state.json", "dataset_info.json", "dataset_dict.json") or file.name.startswith("cache-")


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
