"""Everything that the text of an answer depends on, in one frozen model: what a resumed run has to repeat."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_mars import SamplingConfig, VerifyConfig
from eagle_mars.config import Rule
from eagle_mars.errors import ConfigError
from evaluation.controls import Control, ControlKind
from evaluation.data.questions import Question
from evaluation.models import ModelConfig

EvaluationMethod = Literal["ar", Rule, ControlKind]

# FastChat's temperatures by MT-Bench category.
CATEGORY_TEMPERATURES = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}

_GUARDS = {"branch", "max_regret", "max_relaxed_per_cycle"}
_MARGIN = {"theta", "margin", "gap"}
# The options that each method reads.
READS: dict[EvaluationMethod, set[str]] = {
    "ar": set(),
    "exact": set(),
    "mars": _MARGIN | _GUARDS,
    "mars-paper": _MARGIN | _GUARDS,
    "mars-released": {"theta", "released_ratio", "released_q"},
    "typical": {"epsilon", "alpha"} | _GUARDS,
    "topk-delta": {"rank", "delta"} | _GUARDS,
    "prob-ratio": {"rank", "rho"} | _GUARDS,
    "random-swap": set(),
    "matched": set(),
}
UNDRAFTED: tuple[EvaluationMethod, ...] = ("ar", *get_args(ControlKind))  # the target alone


class RunSettings(BaseModel):
    """One arm of an evaluation.

    model_id: FastChat's name of the arm. bench_name, task_version: the task. method: `ar` is the target alone.
    verify: how drafts are accepted; None where nothing is drafted. control: how a control disturbs the target.
    temperature, top_p, sample_top_k: how tokens are drawn. category_temperatures: FastChat's temperature of the
    question's category instead of `temperature`. seed: the root of every turn's seed. max_new_tokens: per turn.
    num_choices: samples per question. stop: strings that end a turn.
    batch_size: questions decoded together. A turn's seconds are then its latency and overlap with others': compare
    speed only between arms of one batch size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_id: str
    bench_name: str
    task_version: int
    model: ModelConfig
    method: EvaluationMethod
    verify: VerifyConfig | None
    control: Control | None = None
    temperature: float = Field(ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    sample_top_k: int = Field(0, ge=0)
    category_temperatures: bool = False
    seed: int = Field(0, ge=0)
    max_new_tokens: int = Field(ge=1)
    num_choices: int = Field(1, ge=1)
    stop: tuple[str, ...] = ()
    batch_size: int = Field(1, ge=1)

    def sampling(self, question: Question, choice: int, turn: int) -> SamplingConfig:
        """How one turn is drawn; the same whatever else runs, in whatever order, in whichever process."""
        temperature = self.temperature
        if self.category_temperatures:
            temperature = CATEGORY_TEMPERATURES[question.category]
        return SamplingConfig(
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.sample_top_k,
            seed=turn_seed(self.seed, question.question_id, choice, turn),
        )

    def require_usable_for(self, questions: list[Question]) -> None:
        """Raises ConfigError if these options can't be honoured on these questions."""
        if self.batch_size > 1 and self.control:
            raise ConfigError(f"--method {self.method} decodes one question at a time; leave out --batch-size.")
        foreign = {q.category for q in questions} - set(CATEGORY_TEMPERATURES)
        if self.category_temperatures and foreign:
            raise ConfigError(
                f"--category-temperatures knows no temperature for the category {sorted(foreign)[0]!r}; it is made for "
                "mt_bench, give --temperature instead."
            )
        if self.num_choices > 1 and self.temperature == 0 and not self.category_temperatures:
            raise ConfigError(
                f"--num-choices {self.num_choices} at temperature 0 would give {self.num_choices} times the same "
                "answer; raise --temperature or ask for one choice."
            )


def check_settings(**values: Any) -> RunSettings:
    """Checked settings. Raises ConfigError for a value that isn't usable."""
    try:
        return RunSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}={first['input']!r} is not usable: {first['msg']}.") from error


def turn_seed(seed: int, question_id: int | str, choice: int, turn: int) -> int:
    """The seed of one turn, below 2**63. Methods share it, so that paired arms toss the same coins."""
    digest = hashlib.sha256(f"{seed}/{question_id}/{choice}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def verify_config(method: EvaluationMethod, given: dict[str, Any]) -> VerifyConfig | None:
    """The acceptance rule of a method with the options that were given; None where nothing is drafted.

    Raises ConfigError if the method doesn't read one of them, or they are not usable together.
    """
    for name in given:
        if name not in READS[method]:
            readers = " or ".join(other for other, reads in READS.items() if name in reads)
            raise ConfigError(f"--method {method} doesn't read {flag(name)}; leave it out, or use --method {readers}.")
    return None if method in UNDRAFTED else VerifyConfig(rule=method, **given)


def arm_name(model: str, method: EvaluationMethod, verify: VerifyConfig | None, temperature: str) -> str:
    """The default model id: model, method with the options that were set, temperature."""
    options = verify.model_dump(exclude_unset=True, exclude={"rule"}) if verify else {}
    if verify and not options and method in ("mars", "mars-paper", "mars-released", *get_args(ControlKind)):
        options = {"theta": verify.theta}
    parts = [f"{name.replace('_', '-')}{value}" for name, value in options.items()]
    return "-".join([model, method, *parts, "temperature", temperature])


def flag(name: str) -> str:
    """An option's name as the command line spells it."""
    return "--" + name.replace("_", "-")
