"""What every door shares (OpenAI server, FastChat worker, terminal, web page): messages in, pieces of text out.

service = ChatService(model)
response = service.chat([{"role": "user", "content": "Hi"}], ChatOptions(max_new_tokens=64))
for pieces in response:  # the `Piece`s of one or more cycles; `async for` in an event loop
    print("".join(piece.text for piece in pieces), end="")
response.result  # GenerationResult: finish reason, counts, tau, relaxed tokens, guarantee
response.cancel()  # at any time; takes effect within one cycle
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from eagle_mars.chat.limits import Limits
from eagle_mars.chat.response import Response
from eagle_mars.chat.scheduler import Scheduler
from eagle_mars.chat.templates import prompt_ids
from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.errors import ContextLengthError
from eagle_mars.model import EaModel


@dataclass(frozen=True)
class ChatOptions:
    """Options of one response.

    max_new_tokens: None is what the service's default and the context leave. verify, draft: None is the service's.
    stop, stop_ids: strings and token ids that end the response, besides the model's own ids.
    top_logprobs: pieces carry scores of their tokens and of that many best ones (2 shows both candidates of a relaxed
    token); None asks for none.
    """

    max_new_tokens: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    verify: VerifyConfig | None = None
    draft: DraftConfig | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None


class ChatService:
    """A model behind a queue. All methods may be called from any thread and return at once.

    template: Jinja text (`templates.chat_template`); None is the tokenizer's. verify: for who names no rule.
    limits: what requests may ask for. default_max_new_tokens: for who names no length; the key/value cache of a
    response grows up to it. max_active, max_waiting, on_end: see `Scheduler`.
    share_forwards: responses that run and draft with the model's own tree are decoded as one batch, which they join and
    leave at any cycle. More text per second for all of them; in half precision, and at exact ties, a text may then
    depend on who shares its forwards.
    """

    def __init__(
        self,
        model: EaModel,
        *,
        template: str | None = None,
        verify: VerifyConfig | None = None,
        limits: Limits | None = None,
        default_max_new_tokens: int = 1024,
        max_active: int = 4,
        max_waiting: int = 32,
        share_forwards: bool = False,
        on_end: Callable[[Response], None] | None = None,
    ) -> None:
        self.model = model
        self.template = template
        self.verify = verify or VerifyConfig()
        self.limits = (limits or Limits()).within(model.ea_layer.draft_vocab_size)
        self.limits.check(self.verify, model.draft)
        self.default_max_new_tokens = default_max_new_tokens
        self.scheduler = Scheduler(max_active, max_waiting, on_end)
        self._batch = model.new_batch(max_active) if share_forwards else None
        self._token_texts: dict[int, str] = {}
        self._tokenizer_lock = Lock()  # Hugging Face's fast tokenizers may change their state while they encode

    @property
    def max_context(self) -> int:
        """Tokens of prompt and response together."""
        return self.model.target.max_context

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt ids of a conversation; see `templates.prompt_ids`. Raises ConfigError."""
        with self._tokenizer_lock:
            return prompt_ids(self.model, messages, self.template)

    def text_ids(self, prompt: str) -> list[int]:
        """Prompt ids of raw text, with the special tokens that the tokenizer adds by itself."""
        with self._tokenizer_lock:
            return self.model.text_ids(prompt)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; a replacement character where it is part of a character."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.model.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return self._token_texts[token_id]

    def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> Response:
        """`submit` for a conversation."""
        return self.submit(self.chat_ids(messages), options)

    def submit(self, ids: Sequence[int], options: ChatOptions) -> Response:
        """Queue the response to `ids`.

        Raises ConfigError for unusable or forbidden options, ContextLengthError, QueueFullError,
        ClosedError.
        """
        verify, draft = options.verify or self.verify, options.draft or self.model.draft
        self.limits.check(verify, draft)
        stream = self.model.stream(
            ids,
            max_new_tokens=self._max_new_tokens(len(ids), options.max_new_tokens),
            draft=draft,
            verify=verify,
            sampling=options.sampling,
            stop=options.stop,
            stop_ids=options.stop_ids,
            top_logprobs=options.top_logprobs,
            batch=self._batch if draft == self.model.draft else None,
        )
        response = Response(stream, len(ids))
        self.scheduler.submit(response)
        return response

    def close(self) -> None:
        """Cancel what runs or waits, and end the decoding thread."""
        self.scheduler.close()

    def _max_new_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        if asked is not None:
            return asked
        room = self.max_context - prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens but the target's context is {self.max_context}; "
                "shorten the prompt."
            )
        return min(room, self.default_max_new_tokens)
