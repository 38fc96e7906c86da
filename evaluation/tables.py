"""What a table of the paper consists of, read from `configs/tables/*.yaml`: which runs, and the published values.

A table has parts, and a part is a grid of models x temperatures x trees x tasks x arms with some metrics each. A cell
that our source doesn't give has no published value but its reason; nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from eagle_mars import VerifyConfig
from eagle_mars.config import Rule
from eagle_mars.errors import ConfigError
from evaluation.metrics import Cell
from evaluation.settings import verify_config
from evaluation.tasks import find_task

CONFIGS = Path(__file__).parents[1] / "configs" / "tables"
MEAN = "mean"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Arm(_Record):
    """One way to decode: a method and its options, as `evaluation.run` takes them."""

    method: Literal["ar", Rule]
    options: dict[str, Any] = {}

    @property
    def verify(self) -> VerifyConfig | None:
        return verify_config(self.method, self.options)


class Row(_Record):
    """One row of a part. task may be `mean`, over the part's tasks; tree is the name of a variant, "" for the model's
    own."""

    model: str
    temperature: float
    tree: str
    task: str
    arm: str


class Published(_Record):
    """Values that a source gives for one task, or the mean over tasks. arms: rows of ours that compare with them."""

    model: str
    task: str
    arms: tuple[str, ...]
    tree: str = ""
    temperature: float | None = None
    values: dict[str, float]

    def belongs_to(self, row: Row) -> bool:
        return (
            (self.model, self.task, self.tree) == (row.model, row.task, row.tree)
            and row.arm in self.arms
            and self.temperature in (None, row.temperature)
        )


class Part(_Record):
    """A grid of runs with the same columns.

    models: names in `configs/models`; a name that only `published` uses stands for a model that the source leaves
    unnamed or that can't be run. trees: changes to a model's own tree, by the name of the variant.
    num_choices: samples per question of a task, for pass@k; 1 if it isn't named. mean: add the mean over the tasks.
    questions: the first so many of a task; all if it isn't named. margin: the loss of score that would matter; with
    one, every arm is paired with the first that is `exact` (`evaluation.divergence`).
    metrics: the columns, under the names of `evaluation.score`; with `nodes` under those of `evaluation.nodes`, and the
    part is filled from a strict run whose verifications are logged. unpublished: why other cells have no published
    value.
    """

    title: str
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    arms: dict[str, Arm]
    trees: dict[str, dict[str, int]] = {"": {}}
    temperatures: tuple[float, ...] = (1.0,)
    num_choices: dict[str, PositiveInt] = {}
    questions: dict[str, PositiveInt] = {}
    margin: PositiveFloat | None = None
    mean: bool = False
    nodes: bool = False
    metrics: tuple[str, ...]
    published: tuple[Published, ...] = ()
    unpublished: str

    @model_validator(mode="after")
    def _published_values_have_a_cell(self) -> Self:
        for name in self.tasks:
            find_task(name)
        for arm in self.arms.values():
            arm.verify  # noqa: B018  # refuses options that the method doesn't read
        if self.nodes and any(arm.method != "exact" for arm in self.arms.values()):
            raise ValueError("nodes are logged in strict runs only; give arms of the method exact")
        for value in self.published:
            rows = [row for row in self.rows() if value.belongs_to(row)]
            if len({row.arm for row in rows}) != len(set(value.arms)) or not set(value.values) <= set(self.metrics):
                raise ValueError(f"the published values {value.model}, {value.task}, {value.values} fit no row")
        return self

    @property
    def shown_models(self) -> tuple[str, ...]:
        """The models with rows, those of published values alone included."""
        return tuple(dict.fromkeys([*self.models, *(value.model for value in self.published)]))

    def rows(self, models: tuple[str, ...] | None = None) -> Iterator[Row]:
        """All rows in their order, of some of the models if they are named; of a model that can't be run, only those
        with a published value."""
        tasks = [*self.tasks, MEAN] if self.mean else self.tasks
        for model in self.shown_models if models is None else models:
            for temperature in self.temperatures:
                for tree in self.trees:
                    for task in tasks:
                        for arm in self.arms:
                            row = Row(model=model, temperature=temperature, tree=tree, task=task, arm=arm)
                            if model in self.models or any(value.belongs_to(row) for value in self.published):
                                yield row

    def published_cell(self, row: Row, metric: str) -> Cell:
        """The published value of one cell, or why there is none."""
        for value in self.published:
            if value.belongs_to(row) and metric in value.values:
                return Cell(value.values[metric])
        return Cell.empty(self.unpublished)


class Table(_Record):
    """name: of its file. source: where the published values come from. notes: what a reader has to know."""

    name: str
    title: str
    source: str
    notes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = Field(min_length=1)


def table_names() -> list[str]:
    """Names of all tables."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def read_table(name: str) -> Table:
    """The table of that name; `1` is short for `table1`. Raises ConfigError if there is none, or it isn't right."""
    path = CONFIGS / f"{name}.yaml"
    if not path.is_file():
        path = CONFIGS / f"table{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no table {name!r}; the tables are {', '.join(table_names())}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read the table {path}: {str(error).splitlines()[0]}") from error
    return check_table(path.stem, values)


def check_table(name: str, values: Any) -> Table:
    """A checked table. Raises ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} is no table; it has to map names to values, such as title and parts.")
    try:
        return Table.model_validate({"name": name, **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"table {name}: {where}: {first['msg'].removeprefix('Value error, ')}.") from error
