"""Which tokens relaxation leaves alone in an engine: as the core's, and every token that was added to a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def protected_ids(tokenizer: Any, stop_ids: Iterable[int | None]) -> tuple[int, ...] | None:
    """Ascending ids that relaxation neither accepts nor overrides: ends of answers, roles, thinking, tool calls.

    tokenizer: a transformers tokenizer; the marks of thinking and tool calls are added tokens that not every vocabulary
    calls special. None where there is no tokenizer or it can't say: then nothing may be relaxed.
    """
    if not hasattr(tokenizer, "all_special_ids") or not hasattr(tokenizer, "get_added_vocab"):
        return None
    ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *stop_ids}
    return tuple(sorted(i for i in ids if i is not None))
