"""One arm's answers to a task, graded: a score per question, scores of the whole corpus, and why a score is missing.

Every question that was asked counts. One without an answer, or with an error row, scores 0: leaving it out would reward
failing. With several choices a question's score is their mean; pass@k uses all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from evaluation.answers import Answer, QuestionId
from evaluation.data.questions import Question
from evaluation.graders.code import CodeProblem, grade_code, pass_at_k
from evaluation.graders.maths import MathTask, gold_answer, grade_math
from evaluation.graders.texts import CorpusScore, bleu, chrf, rouge_l, sentence_chrf
from evaluation.sandbox import Limits
from evaluation.tasks import Task

Scores = dict[QuestionId, float]


@dataclass(frozen=True)
class Graded:
    """questions: metric → question → score, 0..1 (chrF: 0..100). corpus: metric → score that only the whole has.
    reasons: metric → why there is no number. solved: the metric whose 1 means solved, if there is one."""

    questions: Mapping[str, Scores] = field(default_factory=dict)
    corpus: Mapping[str, CorpusScore] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    solved: str | None = None


def grade(
    task: Task,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    *,
    ks: Sequence[int] = (1,),
    limits: Limits | None = None,
    workers: int = 1,
) -> Graded:
    """Grade the answers to `questions`, all of which were asked.

    ks: the k of pass@k. limits, workers: of the sandbox that model-written programs run in. Raises SandboxError.
    """
    given = {answer.question_id: answer for answer in answers}
    texts = {q.question_id: _texts(given.get(q.question_id)) for q in questions}
    if task.grader in ("number", "boxed"):
        return _maths(questions, texts, "gsm8k" if task.grader == "number" else "aime")
    if task.grader == "code":
        return _code(questions, texts, ks, limits, workers)
    if task.grader == "rouge":
        return _rouge(questions, texts)
    if task.grader == "bleu":
        return _translation(questions, texts)
    if task.grader == "judge":
        return Graded(reasons={"judge": "a judge gives marks: python -m evaluation.judge, then --judgments"})
    return Graded(reasons={"score": f"{task.name} is decoded for its speed and not graded"})


def _texts(answer: Answer | None) -> list[str]:
    """The last turn of each choice."""
    return [choice.turns[-1] for choice in answer.choices] if answer else []


def _maths(questions: Sequence[Question], texts: Mapping[QuestionId, list[str]], task: MathTask) -> Graded:
    strict: Scores = {}
    flexible: Scores = {}
    for question in questions:
        if not question.reference:
            return _without_reference(question, "strict", "flexible")
        gold = gold_answer(question.reference, task)
        grades = [grade_math(text, gold, task) for text in texts[question.question_id]]
        strict[question.question_id] = _share([g.strict for g in grades])
        flexible[question.question_id] = _share([g.flexible for g in grades])
    return Graded({"strict": strict, "flexible": flexible}, solved="strict")


def _code(
    questions: Sequence[Question],
    texts: Mapping[QuestionId, list[str]],
    ks: Sequence[int],
    limits: Limits | None,
    workers: int,
) -> Graded:
    problems = {q.question_id: _problem(q) for q in questions}
    if None in problems.values():
        reason = "the questions hold no tests; give a file that does, such as HumanEval's own, with --problems"
        return Graded(reasons={f"pass@{k}": reason for k in ks})
    samples = [(q, text, p) for q, p in problems.items() if p for text in texts[q]]
    outcomes = grade_code([(text, problem) for _, text, problem in samples], limits, workers)
    passed: dict[QuestionId, int] = dict.fromkeys(problems, 0)
    for (question, _, _), outcome in zip(samples, outcomes, strict=True):
        passed[question] += outcome.passed
    choices = max((len(given) for given in texts.values()), default=0)
    questions_scores: dict[str, Scores] = {}
    reasons = {}
    for k in ks:
        if choices < k:
            reasons[f"pass@{k}"] = f"pass@{k} needs at least {k} choices per question, and the answers have {choices}"
        else:  # a question without an answer failed as often as the others were asked
            questions_scores[f"pass@{k}"] = {q: pass_at_k(choices, passed[q], k) for q in problems}
    return Graded(questions_scores, reasons=reasons, solved="pass@1" if "pass@1" in questions_scores else None)


def _problem(question: Question) -> CodeProblem | None:
    if question.test and question.entry_point:
        return CodeProblem.humaneval(question.prompt or "", question.test, question.entry_point)
    if question.test_list:
        return CodeProblem.mbpp(question.test_list, question.test_setup_code)
    return None


def _rouge(questions: Sequence[Question], texts: Mapping[QuestionId, list[str]]) -> Graded:
    scores: Scores = {}
    for question in questions:
        if not question.reference:
            return _without_reference(question, "ROUGE-L")
        scores[question.question_id] = _share([rouge_l(t, question.reference) for t in texts[question.question_id]])
    return Graded({"ROUGE-L": scores})


def _translation(questions: Sequence[Question], texts: Mapping[QuestionId, list[str]]) -> Graded:
    scores: Scores = {}
    flat: list[tuple[str, tuple[str, ...]]] = []
    for question in questions:
        if not question.reference:
            return _without_reference(question, "BLEU", "chrF")
        given = texts[question.question_id] or [""]
        scores[question.question_id] = fmean(sentence_chrf(text, question.reference) for text in given)
        flat += [(text, question.reference) for text in given]
    candidates, references = [text for text, _ in flat], [reference for _, reference in flat]
    corpus = {"BLEU": bleu(candidates, references), "chrF": chrf(candidates, references)}
    return Graded({"sentence chrF": scores}, corpus)


def _share(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _without_reference(question: Question, *metrics: str) -> Graded:
    reason = f"question {question.question_id} has no reference"
    return Graded(reasons=dict.fromkeys(metrics, reason))
