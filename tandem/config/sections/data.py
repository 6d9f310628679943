"""[data]: demonstrations or preferences to learn from, for methods without rollouts."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class DataSection(Section):
    path: str = ""
    """A file (`.jsonl`, `.json`, `.csv`, `.parquet`, `.arrow`), a folder of such (a saved Hugging Face data set is
    one), or the `owner/name` of a data set on the hub (`owner/name@revision`). Rows hold `messages`, or `prompt` and
    `completion`, or `text`; of preferences `chosen` and `rejected`, and `prompt` where those do not begin with it."""
    subset: str = ""
    """The folder in `path` to read, where it holds several data sets."""
    split: str = ""
    """Which split of `path`; empty: `train` where there are several."""
    columns: dict[str, object] = {}
    """Our column name to the data's, where they differ: `columns.prompt = "question"`."""
    loader: str = ""
    """A function from a row to a row (`module:attribute` or `file.py:attribute`), called before the columns are read;
    None drops the row. It is tried on the first row before a model is loaded."""
    eval_path: str = ""
    """Held-out demonstrations, as `path`; their loss is measured as often as `trainer.eval_every` says, and at the
    end."""
    eval_split: str = ""
    """Which split of `eval_path` (of `path`, where that is empty) is held out."""
    batch_size: int = Field(default=16, ge=1)
    """Rows of one step: demonstrations, or pairs."""
    shuffle: bool = True
    """Draw a new order from the seed for every pass over the data; otherwise it is read as it is."""
