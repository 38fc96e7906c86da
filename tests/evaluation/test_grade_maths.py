"""Traps of final-answer grading: EAGLE_SPEC 7.3's quirks of the released graders, and some that others fell into."""

from __future__ import annotations

import pytest

from evaluation.graders import maths
from evaluation.graders.maths import extract, gold_answer, grade_math, same_value

# text, reference, strict verdict, flexible verdict
GSM8K = [
    ("She makes 9 * 2 = $18.\n#### 18", "18", True, True),
    ("#### 18 dollars", "18", True, True),
    ("#### **18**", "18", True, True),
    ("#### $18.00", "18", True, True),
    ("#### <18>", "18", True, True),
    ("#### <final_answer>18</final_answer>", "18", True, True),
    ("#### Answer: 18", "18", True, True),
    ("#### The final answer is 18.", "18", True, True),
    ("####18", "18", True, True),
    ("#### 1,234,567", "1234567", True, True),
    ("#### 1234567", "1,234,567", True, True),
    ("#### -5", "-5", True, True),
    ("#### \u22125", "-5", True, True),
    ("#### 16 - 7 = 9", "9", True, True),
    ("#### 25%", "25", True, True),
    ("#### 3 1/2", "3.5", True, True),
    ("#### .5", "0.5", True, True),
    ("#### 17\nNo, I forgot one.\n#### 18", "18", True, True),
    ("#### 18\nNo, I was right before.\n#### 17", "18", False, False),
    ("#### 180", "18", False, False),
    ("#### 18.5", "18", False, False),
    ("#### 1/3", "0.33", False, False),
    ("#### eighteen", "18", False, False),
    ("#### 18", "1.8", False, False),
    ("#### 10-20", "20", False, True),
    ("#### 10-20", "-20", False, False),
    ("#### Step 3: Add them\nThe answer is 18.", "18", False, True),
    ("#### 3. Conclusion\nShe has 18 of 20 eggs; the answer is 18.", "18", False, True),
    ("##### 17\nSo it is 18", "18", False, True),
    ("It is 7/8 of the cake.", "7/8", False, True),
    ("It is 7/8 of the cake.", "8", False, False),
    ("It takes 10-20 minutes.", "20", False, True),
    ("16-7", "7", False, True),
    ("16 - 7", "7", False, True),
    ("It fell to -7", "-7", False, True),
    ("The answer is 18. I am 100% sure!", "18", False, True),
    ("That makes $1,234.50", "1234.5", False, True),
    (r"So \boxed{18} eggs, of 20", "18", False, True),
    (r"\boxed{\frac{36}{2}}", "18", False, True),
    ("<final_answer> 18 eggs </final_answer> out of 20", "18", False, True),
    ("H2O2 and room B12", "2", False, False),
    ("", "18", False, False),
    ("I can't solve this.", "18", False, False),
    ("<think>#### 17</think>\n#### 18", "18", True, True),
    ("<think>It could be #### 18, but", "18", False, False),
    ("#### 18</s>", "18", True, True),
    ("#### 18 eggs, 20 less 2", "18", True, True),
]
AIME = [
    (r"Thus \boxed{70}.", "70", True, True),
    (r"\boxed{336}", r"336^\circ", True, True),
    (r"\boxed{336^\circ}", r"336^\circ", True, True),
    (r"\boxed{336^{\circ}}", r"336^\circ", True, True),
    (r"\boxed{\text{70}}", "70", True, True),
    (r"\boxed{\mathbf{70}}", "70", True, True),
    (r"\boxed{70 \text{ degrees}}", "70", True, True),
    (r"\boxed{070}", "70", True, True),
    (r"\boxed{70.0}", "70", True, True),
    (r"\boxed{\frac{140}{2}}", "70", True, True),
    (r"\boxed{\dfrac{140}{2}}", "70", True, True),
    (r"\boxed{m+n=70}", "70", True, True),
    (r"\boxed {70}", "70", True, True),
    (r"\fbox{70}", "70", True, True),
    (r"$$\boxed{\left(70\right)}$$", "70", True, True),
    (r"First \boxed{71}, but rather \boxed{70}", "70", True, True),
    (r"First \boxed{70}, but rather \boxed{71}", "70", False, False),
    (r"\boxed{70} or, cut off, \boxed{7", "70", True, True),
    (r"\boxed{70, 71}", "70", False, False),
    (r"\boxed{70\text{ or }71}", "70", False, False),
    (r"\boxed{7}", "70", False, False),
    (r"\boxed{-70}", "70", False, False),
    (r"\boxed{}", "70", False, False),
    (r"\boxed{\text{unknown}}", "70", False, False),
    ("ANSWER: 70", "70", False, True),
    ("ANSWER: 70", "7", False, False),
    ("The answer is $70$, as 2 + 68 = 70 and 1 < 2.", "70", False, True),
    ("#### 70", "70", False, True),
    (r"<think>\boxed{70}</think> I give up.", "70", False, False),
    (r"<think>\boxed{70}", "70", False, False),
]


@pytest.mark.parametrize(("text", "gold", "strict", "flexible"), GSM8K)
def test_gsm8k(text: str, gold: str, strict: bool, flexible: bool) -> None:
    grade = grade_math(text, gold, "gsm8k")
    assert (grade.strict, grade.flexible) == (strict, flexible), grade


@pytest.mark.parametrize(("text", "gold", "strict", "flexible"), AIME)
def test_aime(text: str, gold: str, strict: bool, flexible: bool) -> None:
    grade = grade_math(text, gold, "aime")
    assert (grade.strict, grade.flexible) == (strict, flexible), grade


def test_there_are_traps_enough() -> None:
    assert len(GSM8K) + len(AIME) >= 40


def test_the_reference_is_read_like_an_answer_but_must_have_one() -> None:
    lines = ["He has 16 - 3 = <<16-3=13>>13 left.", "#### 1,300"]
    assert gold_answer(lines, "gsm8k") == "1300"
    assert gold_answer([r"336^\circ"], "aime") == r"336^\circ"
    with pytest.raises(ValueError, match="no line '#### number'"):
        gold_answer(["He has 13."], "gsm8k")


def test_a_monstrous_answer_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "_SECONDS", 1)
    assert not same_value("9^{9^{9^{9}}}", "70")


def test_nothing_found_is_told_from_something_wrong() -> None:
    assert extract("no number at all", "gsm8k").flexible is None
    assert extract("17", "gsm8k").flexible == "17"
