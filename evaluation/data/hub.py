"""Questions from a dataset of the hub, or from a local copy of it, through `datasets`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_mars.errors import ConfigError
from evaluation.data.questions import Question, require_distinct_ids
from evaluation.tasks import HubSource, Task


def read_hub(task: Task, path: str | None = None, revision: str | None = None) -> list[Question]:
    """All questions of the task's dataset, in its order.

    path: another hub id, or a local copy of the dataset's repository; the task's own by default.
    revision: commit, tag or branch; the pinned commit by default, needless for a local copy.
    Raises ConfigError if `datasets` is missing, no revision is known, or the dataset isn't there or has other columns.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError("datasets of the hub need a package: pip install 'eagle-mars[eval]'.") from None
    source = task.hub
    local = path is not None and Path(path).is_dir()
    if path is not None and not local and path.startswith((".", "/", "~")):
        raise ConfigError(f"there is no local copy of a dataset at {path}; correct the path or give a hub id.")
    if path is not None and path != source.path:
        source = replace(source, path=path, revision=None)  # the pinned commit is of another repository
    if revision is not None:
        source = replace(source, revision=revision)
    if source.revision is None and not local:
        raise ConfigError(
            f"no revision of {source.path} is pinned here; name the commit that you mean with --dataset-revision, "
            "or a local copy with --dataset-path."
        )
    try:
        rows = datasets.load_dataset(source.path, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # datasets, pyarrow, fsspec and the hub's client each raise types of their own
        raise ConfigError(f"can't load the dataset {source.path}: {_first_line(error)}") from error
    questions = [_question(source, index, dict(row)) for index, row in enumerate(rows)]
    if not questions:
        raise ConfigError(f"the dataset {source.path} holds no question in its split {source.split!r}.")
    require_distinct_ids(questions, source.path)
    return questions


def _question(source: HubSource, index: int, row: dict[str, Any]) -> Question:
    try:
        return source.question(index, row)
    except KeyError as error:
        columns = ", ".join(row)
        raise ConfigError(
            f"row {index} of {source.path} has no column {error}, only {columns}; this isn't the task's dataset."
        ) from error
    except (TypeError, AttributeError, IndexError, ValueError) as error:  # null, empty, or of another type
        raise ConfigError(
            f"row {index} of {source.path} has a column without a usable value ({_first_line(error)}); mend or drop it."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
