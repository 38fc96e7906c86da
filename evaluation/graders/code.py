"""Function completion (HumanEval, MBPP): the program in an answer, its verdict, pass@k.

What counts as the program: the last fenced block that defines the function asked for, else the last block that defines
any, else the last block, else the raw text without the prose around it. A block may be cut off by the token limit. An
answer that only continues the function's body is put behind the prompt, its lost first indent restored.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from textwrap import indent

from eagle_mars.errors import ConfigError
from evaluation.graders.maths import after_thinking
from evaluation.sandbox import Limits, Outcome, run_program

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
_INDENT = "    "


@dataclass(frozen=True)
class CodeProblem:
    """prompt: the code that the answer continues, "" if the question was prose (MBPP). test: runs after the program and
    raises unless it is right; it calls the function itself. entry_point: the function's name."""

    prompt: str
    test: str
    entry_point: str

    @classmethod
    def humaneval(cls, prompt: str, test: str, entry_point: str) -> CodeProblem:
        """HumanEval's test only defines `check`."""
        return cls(prompt, f"{test}\n\ncheck({entry_point})\n", entry_point)

    @classmethod
    def mbpp(cls, test_list: Sequence[str], setup: str = "") -> CodeProblem:
        """MBPP's tests are assertions; the function is what the first of them calls.

        Raises ConfigError if it calls nothing.
        """
        first = ast.walk(ast.parse(test_list[0])) if test_list else iter(())
        called = [n.func.id for n in first if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        own = [name for name in called if not hasattr(builtins, name)]
        if not own:
            raise ConfigError(f"the first of the tests {test_list!r} calls no function; correct the question file.")
        return cls("", "\n".join([setup, *test_list]), own[0])


def grade_code(
    samples: Sequence[tuple[str, CodeProblem]], limits: Limits | None = None, workers: int = 1
) -> list[Outcome]:
    """One verdict per (answer, problem), `workers` programs at a time. Raises SandboxError."""

    def run(sample: tuple[str, CodeProblem]) -> Outcome:
        answer, problem = sample
        return run_program(extract_program(answer, problem), problem.test, limits)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, samples))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes, from c of n that did (arXiv 2107.03374, section 2).

    Raises ValueError if there are fewer than k samples: no number can be made of them.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"{c} of {n} samples and k={k} make no sense")
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, not {n}")
    return 1.0 - prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 1.0


def extract_program(answer: str, problem: CodeProblem) -> str:
    """The program that the test runs against; something that doesn't compile if the answer holds none."""
    code = _code(after_thinking(answer), problem.entry_point)
    if _defines(code, problem.entry_point) or not problem.prompt:
        future = "".join(_FUTURE.findall(code))  # valid at the top only, and the prompt comes first
        stub = f"{problem.prompt.rstrip()}\n{_INDENT}pass\n\n" if problem.prompt else ""
        return f"{future}{stub}{_FUTURE.sub('', code)}"
    shifted = _INDENT + code.lstrip()
    bodies = (code, _until_dedent(code), shifted, _until_dedent(shifted), indent(code, _INDENT))
    programs = [problem.prompt.rstrip() + "\n" + body for body in bodies]
    return next((program for program in programs if _compiles(program)), programs[0])


def _code(text: str, entry_point: str) -> str:
    blocks = [match[2] for match in _FENCE.finditer(text)]
    for found in (
        [block for block in blocks if _defines(block, entry_point)],
        [block for block in blocks if re.search(r"^\s*(?:async\s+)?def\s", block, re.MULTILINE)],
        blocks,
    ):
        if found:
            return found[-1]
    return _without_prose(text, entry_point)


def _defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^[ \t]*(?:async\s+def|def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.M)
        is not None
    )


def _without_prose(text: str, entry_point: str) -> str:
    """Raw text from its first line of code on, as far as it compiles; the text itself where it holds no definition."""
    if not _defines(text, entry_point):
        return text.strip("\n")
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"(?:import|from|def|async def|class|@)\b|@", line)]
    return next(_compiling_parts(lines, starts), text)


def _until_dedent(body: str) -> str:
    """A body without what a base model went on to write behind the function."""
    lines = body.splitlines()
    end = next((i for i, line in enumerate(lines) if i and line[:1].strip()), len(lines))
    return "\n".join(lines[:end])


def _compiling_parts(lines: list[str], starts: list[int]) -> Iterator[str]:
    for start in starts:
        for end in range(len(lines), start, -1):
            part = "\n".join(lines[start:end])
            if _compiles(part):
                yield part
                break


def _compiles(program: str) -> bool:
    try:
        compile(program, "<answer>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
