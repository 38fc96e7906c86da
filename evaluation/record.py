"""The provenance of `NAME.jsonl`, kept beside it in `NAME.run.json`: what was asked, of whom, where, when, how far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_mars.draft.files import find_checkpoint
from eagle_mars.errors import ConfigError
from evaluation.data.questions import Question, fingerprint
from evaluation.provenance import checkpoint_identity, provenance, write_atomically
from evaluation.settings import RunSettings


class RunRecord:
    """The record of one answer file.

    settings, dataset, checkpoints: what every session of the run has to share. sessions: one per start, with its
    command, commit, versions and machine, and at its end the summary; a session that was killed has none.
    """

    def __init__(self, answer_file: Path) -> None:
        self._answer_file = answer_file
        self.path = answer_file.with_suffix(".run.json")
        self._content: dict[str, Any] = {}

    def begin(self, settings: RunSettings, source: str, questions: list[Question], processes: int) -> None:
        """Write the record, or add a session to one that says the same.

        source: where the questions come from. questions: all of them, before any slice, so that a slice may grow.
        Raises ConfigError if the answer file was made with other settings, questions or checkpoints, or if nothing
        says how it was made.
        """
        started = {
            "settings": settings.model_dump(mode="json"),
            "dataset": {"source": source, "questions": len(questions), "sha256": fingerprint(questions)},
            "checkpoints": {
                "target": checkpoint_identity(find_checkpoint(settings.model.target_path)),
                "head": checkpoint_identity(find_checkpoint(settings.model.head_path)),
            },
        }
        self._content = {**started, "sessions": []}
        if self._answer_file.is_file() and self._answer_file.stat().st_size:
            self._content["sessions"] = self._continued(started)["sessions"]
        self._content["sessions"].append({**provenance(), "processes": processes, "finished": None, "summary": None})
        self._write()

    def finish(self, summary: dict[str, Any]) -> None:
        """Close the session that `begin` opened."""
        session = self._content["sessions"][-1]
        session["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        session["summary"] = summary
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self._content, indent=2, ensure_ascii=False) + "\n")

    def _continued(self, started: dict[str, Any]) -> dict[str, Any]:
        try:
            earlier: dict[str, Any] = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self._answer_file} holds answers, but {self.path.name}, which would say how they were made, is "
                "missing; give another --answer-file."
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"can't read {self.path}: {error}; give another --answer-file.") from error
        before, now = dict(_leaves(earlier)), dict(_leaves(started))
        for name in sorted({*before, *now}):
            if name != "dataset.source" and before.get(name) != now.get(name):
                raise ConfigError(
                    f"{self._answer_file} was begun with {name}={before.get(name)!r}, and this run says "
                    f"{now.get(name)!r}; repeat the options or give another --answer-file."
                )
        return earlier


def read_settings(answer_file: Path) -> RunSettings:
    """How the answers were made. Raises ConfigError without the record that says so."""
    path = answer_file.with_suffix(".run.json")
    try:
        return RunSettings.model_validate(json.loads(path.read_text("utf-8"))["settings"])
    except (OSError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ConfigError(f"{path} doesn't say how {answer_file.name} was made ({reason}); repeat that run.") from error


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of what is compared."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{name}.")
        elif name != "sessions":
            yield prefix + name, inner
