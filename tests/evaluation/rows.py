"""Answer rows made by hand: provenance letters, counts and times chosen by the test."""

from __future__ import annotations

from evaluation.answers import Answer, Choice, Failure, TurnStats


def turn(
    provenance: str, *, tokens: tuple[int, ...] | None = None, accepted: tuple[int, ...] = (), seconds: float = 1.0,
    finish: str = "stop", regret: float = 0.0, low_margin: int = 0, temperature: float = 0.0, text: str = "text",
) -> tuple[str, TurnStats]:  # fmt: skip
    """A turn's text and statistics; a quarter of the time is prefill."""
    stats = TurnStats(
        prompt_tokens=4,
        token_ids=tuple(range(len(provenance))) if tokens is None else tokens,
        provenance=provenance,
        accepted_lengths=accepted,
        finish_reason=finish,
        prefill_seconds=seconds / 4,
        decode_seconds=seconds * 3 / 4,
        relaxed=provenance.count("r"),
        exact_prefix=provenance.index("r") if "r" in provenance else len(provenance),
        regret=regret,
        low_margin=low_margin,
        rescued=0,
        nonpositive_top=0,
        temperature=temperature,
        seed=0,
    )
    return text, stats


def answer(question_id: int, *choices: tuple[str, TurnStats] | list[tuple[str, TurnStats]], **changes) -> Answer:
    """An answer whose choices are a turn or a list of turns each."""
    made = []
    for index, given in enumerate(choices):
        told = given if isinstance(given, list) else [given]
        made.append(Choice.of(index, [text for text, _ in told], [stats for _, stats in told]))
    values = {
        "question_id": question_id,
        "answer_id": "a",
        "model_id": "tiny",
        "bench_name": "gsm8k",
        "method": "mars",
        "choices": tuple(made),
        "tstamp": 1.0,
    }
    return Answer(**{**values, **changes})


def failed(question_id: int, **changes) -> Answer:
    """An error row."""
    error = Failure(kind="ContextLengthError", message="too long", choice=0, turn=0)
    return answer(question_id, error=error, **changes)
