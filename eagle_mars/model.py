"""`EaModel`: EAGLE's public interface over the engine, and a richer one beside it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Literal, Self, TypeVar

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel

from eagle_mars.batch import TargetBatch
from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.cpu import PackedWeights, pack_linears
from eagle_mars.draft.checkpoint import load_head
from eagle_mars.draft.draft_model import DraftModel, holds_language_model, require_same_tokens
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.files import find_checkpoint
from eagle_mars.draft.head import Head
from eagle_mars.draft.proposer import Proposer
from eagle_mars.eagle_api import EagleFunctions
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.loading import load_target
from eagle_mars.result import GenerationResult
from eagle_mars.speculative_batch import SpeculativeBatch
from eagle_mars.stream import ResponseStream
from eagle_mars.target import PREFILL_CHUNK, TargetModel, check_context
from eagle_mars.tuning.store import tuned
from eagle_mars.tuning.tuner import PROMPTS, Tuning
from eagle_mars.verify.guarantee import announce, guarantee

logger = logging.getLogger(__name__)

Method = Literal["speculative", "autoregressive"]
Prompt = str | Sequence[int] | Tensor
Option = TypeVar("Option", VerifyConfig, SamplingConfig)


class EaModel(EagleFunctions):
    """A target with its draft head or draft model. All options of `generate` and `stream` are per call.

    Calls may interleave, but not run in several threads: a forward taps features through hooks on the shared model.

    base_model: the unmodified Hugging Face model. ea_layer: the draft head, or a `DraftModel`. draft: the default
    tree.
    stop_ids: every id that ends a response. special_ids: what relaxation leaves alone by default.
    """

    def __init__(
        self,
        base_model: PreTrainedModel,
        tokenizer: Any,
        ea_layer: Proposer,
        draft: DraftConfig,
        prefill_chunk: int = PREFILL_CHUNK,
        compile: bool = False,
    ) -> None:
        self.target = TargetModel(base_model, ea_layer.capture_layers, prefill_chunk, compile)
        self.base_model = base_model
        self.tokenizer = tokenizer
        self.ea_layer = ea_layer
        self.draft = draft
        self.config = base_model.config
        self._engine = Engine(self.target, ea_layer)
        self.special_ids = _special_ids(base_model, tokenizer)
        self.stop_ids = _stop_ids(base_model, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        base_model_path: str,
        ea_model_path: str,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        threshold: float = 1.0,
        use_eagle3: bool = True,
        *,
        cpu_pack: bool | PackedWeights = False,
        prefill_chunk: int = PREFILL_CHUNK,
        compile: bool = False,
        entropy_stop: float | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load target and head from local directories or hub ids.

        ea_model_path may also hold a whole causal LM with the target's tokenizer, which then drafts by itself.
        total_token, depth, top_k, entropy_stop: `DraftConfig`; total_token=-1 measures which tree pays (`tune`). kwargs
        go to the Hugging Face loader; the dtype is the checkpoint's unless given. The head's family is read from its
        tensors; `use_eagle3` is only checked against it. `threshold` is taken because EAGLE's scripts pass it; EAGLE
        doesn't use it either. cpu_pack: see `eagle_mars.cpu`; True is "float32".
        prefill_chunk: prompt tokens per forward at most, which bounds memory. compile: see `eagle_mars.compiled`.
        Raises ConfigError, CheckpointError, UnsupportedTargetError.
        """
        automatic = total_token == -1
        shape: dict[str, Any] = {"depth": depth, "top_k": top_k, "entropy_stop": entropy_stop}
        draft = DraftConfig() if automatic else DraftConfig(total_token=total_token, **shape)
        base_model, tokenizer = load_target(base_model_path, **kwargs)
        target = TargetModel(base_model)
        head = _load_proposer(ea_model_path, target, tokenizer)
        if cpu_pack:
            if target.ranks is not None:
                raise ConfigError("cpu_pack replaces the layers that tensor parallelism cuts; leave one of them out.")
            weights: PackedWeights = "float32" if cpu_pack is True else cpu_pack
            pack_linears(base_model, weights)
            pack_linears(head, weights)
            if isinstance(head, Head):
                head.bind(target.embed_tokens, target.lm_head)
        if isinstance(head, Head) and use_eagle3 != isinstance(head, Eagle3Head):
            logger.warning(
                "use_eagle3=%s, but %s holds an %s; using the latter", use_eagle3, ea_model_path, type(head).__name__
            )
        model = cls(base_model, tokenizer, head, draft, prefill_chunk, compile)
        if automatic:
            model.tune()
        return model

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def eval(self) -> Self:
        """EAGLE's scripts call it; the models are in evaluation mode already."""
        return self

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    # --- text in, result out ---

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 512,
        draft: DraftConfig | None = None,
        verify: VerifyConfig | None = None,
        sampling: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        method: Method = "speculative",
    ) -> GenerationResult:
        """The response to a prompt: raw text, token ids, or ids as a tensor [L] or [1, L] (see also `chat_ids`).

        verify: `mars` with θ = 0.9 when None; `VerifyConfig(rule="exact")` is lossless. sampling: greedy when None.
        stop: string or strings that end the response. method: `autoregressive` is the target alone, the baseline.
        Raises ConfigError for unusable options, ContextLengthError, LogitsError.
        """
        return self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            draft=draft,
            verify=verify,
            sampling=sampling,
            stop=stop,
            method=method,
        ).result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 512,
        draft: DraftConfig | None = None,
        verify: VerifyConfig | None = None,
        sampling: SamplingConfig | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Collection[int] = (),
        method: Method = "speculative",
        top_logprobs: int | None = None,
        batch: SpeculativeBatch | TargetBatch | None = None,
    ) -> ResponseStream:
        """Like `generate`, piece by piece; the stream's `result` holds the whole response at the end.

        stop_ids: ids that end the response, besides the model's own.
        top_logprobs: pieces carry the target's scores of their tokens and of that many best ones.
        batch: share target forwards with the other responses of this `new_batch`, which decodes by the same method.
        """
        ids = self._ids(prompt)
        if method not in ("speculative", "autoregressive"):
            raise ConfigError(f"method={method!r} is not known; use 'speculative' or 'autoregressive'.")
        stop = (stop,) if isinstance(stop, str) else stop
        if not all(stop):
            raise ConfigError("a stop string is empty, so it would end every response at once; remove it.")
        baseline = method == "autoregressive"
        if batch is not None and isinstance(batch, TargetBatch) != baseline:
            raise ConfigError(f"this batch decodes by another method; ask new_batch(..., method={method!r}) for one.")
        verify = VerifyConfig(rule="exact") if baseline else verify or VerifyConfig()  # no draft, nothing to relax
        request = self._request(max_new_tokens, draft, verify, sampling, self.stop_ids.union(stop_ids), top_logprobs)
        check_context(self.target, ids.shape[1], max_new_tokens)
        decode = batch.decode if batch else self._engine.autoregress if baseline else self._engine.speculate
        rule = method if baseline else verify.rule
        return ResponseStream(decode(ids, request), self.tokenizer, ids.shape[1], stop, rule, guarantee(verify))

    def new_batch(
        self, places: int, draft: DraftConfig | None = None, method: Method = "speculative"
    ) -> SpeculativeBatch | TargetBatch:
        """Up to `places` responses that share target forwards: pass it to `stream`. draft: the tree of all of them."""
        if places < 1:
            raise ConfigError(f"a batch of {places} has no place for a response; use 1 or more.")
        if method == "autoregressive":
            if draft is not None:
                raise ConfigError("method='autoregressive' drafts nothing; leave draft out.")
            return TargetBatch(self._engine, places)
        return SpeculativeBatch(self._engine, draft or self.draft, places)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = 8,
        max_new_tokens: int = 512,
        draft: DraftConfig | None = None,
        verify: VerifyConfig | Sequence[VerifyConfig] | None = None,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
        stop: str | Sequence[str] = (),
        method: Method = "speculative",
    ) -> list[GenerationResult]:
        """The responses to many prompts, `batch_size` at a time, in the order of the prompts.

        verify, sampling: of all prompts, or one for each; a single seed s is s + i for prompt i. Where one response
        ends the next begins, so no row waits for the longest. At T = 0 in fp32 the texts are those of `generate`.
        A response's seconds include the cycles that it shared: they tell its latency, not its cost.
        Raises what `generate` raises.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts is one text, not several; give a list, or call generate.")
        batch = self.new_batch(batch_size, draft, method)
        options = zip(
            prompts,
            _one_each(verify or VerifyConfig(), len(prompts), "verify"),
            _seeded_each(sampling or SamplingConfig(), len(prompts)),
            strict=True,
        )
        waiting = deque(enumerate(options))
        running: dict[int, ResponseStream] = {}
        results: dict[int, GenerationResult] = {}
        while waiting or running:
            while waiting and len(running) < batch_size:
                index, (prompt, rule, warp) = waiting.popleft()
                running[index] = self.stream(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    draft=draft,
                    verify=rule,
                    sampling=warp,
                    stop=stop,
                    method=method,
                    batch=batch,
                )
            for index, stream in tuple(running.items()):
                if next(stream.cycles(), None) is None:
                    results[index] = stream.result
                    del running[index]
        return [results[index] for index in range(len(prompts))]

    def tune(self, prompts: Sequence[Prompt] | None = None, *, refresh: bool = False) -> Tuning:
        """Measure which draft tree pays for this pair on this device, and make it the default one.

        prompts: what to measure on; three short chat questions when None. Takes about a minute with a small model on
        two CPU cores; the result is kept in a file and found again unless `refresh` or `prompts` asks for new numbers.
        Raises ConfigError when the answers are too short.
        """
        as_text = self.tokenizer.chat_template is None
        ids = [self._ids(p) for p in prompts or [p if as_text else self.chat_ids(p) for p in PROMPTS]]
        found = tuned(self.target, self.ea_layer, ids, self.stop_ids, fresh=refresh or prompts is not None)
        self.draft = found.best.draft
        return found

    def chat_ids(
        self,
        messages: str | Sequence[dict[str, str]],
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a conversation under the tokenizer's chat template, ready for the assistant's turn.

        messages: role/content pairs, or one user message as a string. chat_template: Jinja, instead of the tokenizer's.
        continue_final_message: the response goes on where the last message, the assistant's, ends.
        Raises ConfigError without a chat template, or if it refuses the messages.
        """
        if chat_template is None and self.tokenizer.chat_template is None:
            raise ConfigError("this tokenizer has no chat template; give the whole prompt as text instead.")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
            )
        except (TemplateError, ValueError) as error:  # ValueError: the final message isn't found in what was rendered
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return self.text_ids(text, add_special_tokens=False)

    def text_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of raw text, by default with the special tokens that the tokenizer adds by itself.

        Raises ConfigError for text that isn't UTF-8, which Python reads from a terminal or an argument all the same.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError("the text holds bytes that are no UTF-8; correct its encoding.") from None
        return self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids

    def _request(
        self,
        max_new_tokens: int,
        draft: DraftConfig | None,
        verify: VerifyConfig,
        sampling: SamplingConfig | None,
        stop_ids: Collection[int],
        top_logprobs: int | None = None,
    ) -> Request:
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens} leaves nothing to generate; use 1 or more.")
        announce(verify)
        return Request(
            max_new_tokens=max_new_tokens,
            draft=draft or self.draft,
            verify=verify,
            sampling=sampling or SamplingConfig(),
            stop_ids=frozenset(stop_ids),
            special_ids=self.special_ids,
            top_logprobs=top_logprobs,
        )

    def _ids(self, prompt: Prompt) -> Tensor:
        if isinstance(prompt, str):
            prompt = self.text_ids(prompt)
        try:
            ids = torch.as_tensor(prompt, dtype=torch.long)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError("the prompt is neither text nor a row of ids; see chat_ids for messages.") from None
        if ids.dim() == 2 and ids.shape[0] != 1:
            raise ConfigError(f"the prompt has {ids.shape[0]} rows; give one sequence at a time.")
        if ids.dim() > 2 or ids.numel() == 0:
            raise ConfigError("the prompt is empty; give at least one token.")
        ids = ids.reshape(1, -1)
        vocab = self.target.config.vocab_size
        if ids.min() < 0 or ids.max() >= vocab:
            raise ConfigError(f"the prompt holds ids outside 0..{vocab - 1}; use this target's tokenizer.")
        return ids


def _one_each(options: Option | Sequence[Option], count: int, name: str) -> Sequence[Option]:
    if not isinstance(options, Sequence):
        return [options] * count
    if len(options) != count:
        raise ConfigError(f"{len(options)} {name} options for {count} prompts; give one for all or one for each.")
    return options


def _seeded_each(sampling: SamplingConfig | Sequence[SamplingConfig], count: int) -> Sequence[SamplingConfig]:
    if isinstance(sampling, SamplingConfig) and sampling.seed is not None:
        return [sampling.replace(seed=sampling.seed + index) for index in range(count)]
    return _one_each(sampling, count, "sampling")


def _load_proposer(path: str, target: TargetModel, tokenizer: Any) -> Proposer:
    """Head or draft model, told apart by the tensors, in the target's dtype on the device of its last layer."""
    device = target.layer_devices[-1]
    if holds_language_model(find_checkpoint(path)):
        model, own_tokenizer = load_target(path, role="draft model", dtype=target.dtype, device_map={"": device})
        require_same_tokens(tokenizer, own_tokenizer, path)
        return DraftModel(model, target.config.vocab_size)
    return load_head(
        path,
        target.config,
        embed_tokens=target.embed_tokens,
        lm_head=target.lm_head,
        dtype=target.dtype,
        device=device,
    )


def _stop_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's and all of the generation config's."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return frozenset(i for i in ids if i is not None)


def _special_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """What relaxation leaves alone by default: the stop ids and every token that the tokenizer calls special."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    vocab = model.config.get_text_config().vocab_size
    ids = {*_stop_ids(model, tokenizer), *tokenizer.all_special_ids, *added}
    return tuple(sorted(i for i in ids if i < vocab))
