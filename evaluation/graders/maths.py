"""Final answers of word problems (GSM8K) and competition problems (AIME): extraction, and equality by math-verify.

Strict reads the form that the prompt asked for and nothing else; flexible falls back on what a reader would take for
the answer. A benchmark's usual number is the strict one; a wide gap between them is a problem of form, not of maths.

GSM8K, strict:   the number that starts what follows the last `####`. Headings (`#### Step 3`, `#### 2. Sum`) and
                 ranges (`#### 10-20`) are no answers; `$`, `**`, `<>`, "Answer:" before it and units behind it are
                 skipped; of an equation the right side counts.
AIME, strict:    the content of the last closed `\\boxed{...}`.
Either, flexible: the strict answer, else the other task's form, else `<final_answer>`, else the number after the last
                 "answer is" or "answer:", else the last number of the text.

Numbers are equal to six decimals (math-verify): 1/3 is not 0.33. `7/8` in prose is seven eighths, `10-20` ends in 20,
`25%` is read as 25 or .25, whichever the reference is. Only what follows a closing `</think>` counts; thoughts cut
short hold no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from math_verify import parse, verify

from eagle_mars.errors import ConfigError

MathTask = Literal["gsm8k", "aime"]
_SECONDS = 5  # for parsing and for comparing, each

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# The sign counts only where it can't be a minus between two terms or the dash of a range.
_SIGN = r"(?:(?<![)\d])(?<!\d )[-\u2212])?"
_NUMBER = rf"(?<![\w.]){_SIGN}\s?[$€£]?\s?(?:{_DIGITS}\s+\d+/\d+|{_DIGITS}(?:\.\d+)?(?:/\d+)?|\.\d+)\s?%?"
_NUMBERS = re.compile(_NUMBER)
_MARK = re.compile(r"(?<!#)####(?!#)[^\S\n]*([^\n]*)")
_LEAD = re.compile(r"(?:[\s*_`<>(:=]|(?:the\s+)?(?:final[\s_]+)?answer(?:\s+is)?)*", re.IGNORECASE)
_HEADING = re.compile(r"\s*[.)]\s+[A-Z*]")
_RANGE = re.compile(r"\s*(?:[-\u2013\u2014]|to\b)\s*[$€£]?\d")
_TAG = re.compile(r"<final_answer>(.*?)</final_answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)


@dataclass(frozen=True)
class Extracted:
    """What each way of reading took for the answer; None where it found none, which counts as wrong."""

    strict: str | None
    flexible: str | None


@dataclass(frozen=True)
class MathGrade:
    """The verdict of each way of reading, and what it read."""

    strict: bool
    flexible: bool
    extracted: Extracted


def grade_math(text: str, gold: str, task: MathTask) -> MathGrade:
    """Grade one answer against the reference's final answer (`gold_answer`)."""
    found = extract(text, task)
    return MathGrade(
        strict=found.strict is not None and same_value(found.strict, gold),
        flexible=found.flexible is not None and same_value(found.flexible, gold),
        extracted=found,
    )


def extract(text: str, task: MathTask) -> Extracted:
    """The strict and the flexible reading of an answer."""
    text = after_thinking(text)
    first, second = (_marked, _boxed) if task == "gsm8k" else (_boxed, _marked)
    strict = first(text)
    ways: Iterable[Callable[[str], str | None]] = (second, _tagged, _phrased, _last_number)
    flexible = strict if strict is not None else next((found for way in ways if (found := way(text)) is not None), None)
    return Extracted(strict, flexible)


def gold_answer(reference: Iterable[str], task: MathTask) -> str:
    """The final answer in a question's reference: GSM8K's `#### n` line, AIME's only entry.

    Raises ConfigError if a GSM8K reference has no such line.
    """
    whole = "\n".join(reference)
    if task == "aime":
        return whole.strip()
    answer = _marked(whole)
    if answer is None:
        raise ConfigError(
            f"there is no line '#### number' in the reference {whole[-80:]!r}; correct the question file."
        )
    return answer


def same_value(answer: str, gold: str) -> bool:
    """Whether two final answers are equal as mathematics; an answer too monstrous to evaluate is not.

    In the main thread only: math-verify's time-out is an alarm signal.
    """
    expected, given = (parse(rf"$\boxed{{{side.strip()}}}$", parsing_timeout=_SECONDS) for side in (gold, answer))
    return bool(verify(expected, given, timeout_seconds=_SECONDS))


def after_thinking(text: str) -> str:
    """The answer proper of a reasoning model; nothing if its thoughts were cut short."""
    _, closed, rest = text.rpartition("</think>")
    if closed:
        return rest
    return "" if "<think>" in rest else rest


def _clean(number: str) -> str:
    """As math-verify reads it: no currency, no thousands separators; mixed numbers as sums."""
    number = re.sub(r"[$€£,]", "", number).replace("\u2212", "-").replace("%", r"\%").strip()
    mixed = re.fullmatch(r"(-?)\s?(\d+)\s+(\d+/\d+)", number)
    return f"{mixed[1]}({mixed[2]}+{mixed[3]})" if mixed else number


def _marked(text: str) -> str | None:
    """The answer after the last `####` that has one."""
    for match in reversed(list(_MARK.finditer(text))):
        line = match[1].rsplit("=", 1)[-1]
        line = line[_LEAD.match(line).end() :]  # type: ignore[union-attr]  # it matches the empty string at least
        number = _NUMBERS.match(line)
        if number and not _HEADING.match(line, number.end()) and not _RANGE.match(line, number.end()):
            return _clean(number[0])
    return None


def _boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` whose braces close."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth = 1
        for index in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if not depth:
                content = text[match.end() : index].strip()
                return content or None
    return None


def _tagged(text: str) -> str | None:
    tags = _TAG.findall(text)
    return _last_number(tags[-1]) if tags else None


def _phrased(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    number = _NUMBERS.search(text, phrases[-1].end()) if phrases else None
    return _clean(number[0]) if number else None


def _last_number(text: str) -> str | None:
    numbers = _NUMBERS.findall(text)
    return _clean(numbers[-1]) if numbers else None
