"""Finding the program in an answer, its verdict, and pass@k."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest

from evaluation.graders.code import CodeProblem, extract_program, grade_code, pass_at_k
from evaluation.sandbox import Limits, SandboxError, run_program

PROMPT = (
    'from typing import List\n\n\ndef helper(x):\n    return x\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n'
)
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert helper(0) == candidate([]) == 0\n"
PROBLEM = CodeProblem.humaneval(PROMPT, TEST, "total")
BODY = "    result = 0\n    for x in xs:\n        result += x\n    return result\n"
FULL = PROMPT + BODY
ALONE = "def total(xs):\n" + BODY

RIGHT = {
    "full program": f"```python\n{FULL}```",
    "function alone: the prompt's import and helper stay": f"```python\n{ALONE}```",
    "body alone in a fence": f"```python\n{BODY}```",
    "raw body": BODY,
    "raw body, first indent lost": BODY.strip(),
    "raw body, all indents lost": "return sum(xs)",
    "raw body and what a base model adds": BODY + "\n\ndef main():\n    print(total([1\n",
    "prose around a fence": f"Here it is:\n```python\n{ALONE}```\nIt loops over `xs`.",
    "no language": f"```\n{ALONE}\n```",
    "tildes": f"~~~py\n{ALONE}~~~",
    "indented fence": f"1. Code:\n   ```python\n{ALONE}   ```",
    "fence never closed": f"```python\n{ALONE}",
    "an example after it": f"```python\n{ALONE}```\nUse:\n```python\nprint(total([1, 2]))\n```",
    "its tests after it": f"```python\n{ALONE}```\n```python\ndef test_total():\n    assert total([1]) == 1\n```",
    "corrected at the end": f"```python\ndef total(xs): return 0\n```\nNo:\n```python\n{ALONE}```",
    "output block at the end": f"```python\n{ALONE}```\nOutput:\n```\n3\n```",
    "raw program in prose": f"Sure, here is the function.\n\n{ALONE}\nThis adds them up.",
    "main block": f"```python\n{ALONE}\nif __name__ == '__main__':\n    total(None)\n```",
    "future import": f"```python\nfrom __future__ import annotations\n{ALONE}```",
    "lambda": "```python\ntotal = lambda xs: sum(xs)\n```",
    "after thinking": f"<think>```python\ndef total(xs): return 1\n```</think>```python\n{ALONE}```",
    "windows line ends": f"```python\r\n{ALONE}```".replace("\n", "\r\n").replace("\r\r", "\r"),
}
WRONG = {
    "empty": "",
    "prose": "I would loop over the list and add.",
    "wrong": "```python\ndef total(xs): return len(xs)\n```",
    "another name": "```python\ndef add(xs): return sum(xs)\n```",
    "cut in the middle": "```python\ndef total(xs):\n    return sum(",
    "thoughts cut short": f"<think>```python\n{ALONE}```",
    "exits": "```python\ndef total(xs):\n    exit(0)\n```",
    "the checker replaced": "```python\ndef total(xs): return 1\ndef check(f): pass\n```",
    "prints success": "```python\ndef total(xs): print('passed')\n```",
}


@pytest.fixture(autouse=True, scope="module")
def _confinable() -> None:
    try:
        run_program("", "", Limits(seconds=20))
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass_in_whatever_form(name: str) -> None:
    (outcome,) = grade_code([(RIGHT[name], PROBLEM)])
    assert outcome.passed, (outcome, extract_program(RIGHT[name], PROBLEM))


def test_wrong_answers_fail() -> None:
    outcomes = grade_code([(answer, PROBLEM) for answer in WRONG.values()], workers=2)
    assert [name for name, outcome in zip(WRONG, outcomes, strict=True) if outcome.passed] == []


def test_mbpp_finds_the_name_in_its_assertions() -> None:
    problem = CodeProblem.mbpp(["assert set(shared((3, 4), (4, 5))) == {4}"])
    assert problem.entry_point == "shared"
    answer = "```python\ndef shared(a, b): return tuple(set(a) & set(b))\n```\n```python\ndef demo(): pass\n```"
    assert grade_code([(answer, problem)])[0].passed
    with pytest.raises(ValueError, match="calls no function"):
        CodeProblem.mbpp(["assert True"])


@pytest.mark.parametrize(
    ("n", "c", "k"), [(5, 2, 1), (5, 2, 4), (10, 3, 4), (4, 0, 4), (4, 4, 4), (4, 1, 4), (200, 7, 10)]
)
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(n: int, c: int, k: int) -> None:
    expected = 1 - comb(n - c, k) / comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)  # float64 products against whole numbers
    if n <= 10:
        subsets = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_invents_no_number(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@4 needs at least 4|make no sense"):
        pass_at_k(n, c, k)
