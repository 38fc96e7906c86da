"""`custom_generate`: draft trees inside `generate` of a stock transformers model, with its arguments and outputs."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.draft.checkpoint import load_head
from eagle_mars.draft.draft_model import DraftModel
from eagle_mars.draft.head import Head
from eagle_mars.draft.proposer import Proposer
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.result import Provenance, Step
from eagle_mars.target import TargetModel, check_context
from eagle_mars.verify.guarantee import announce, guarantee

# transformers' processors that the engine applies by itself, in its order: type, its attribute, our option.
_WARPERS = (
    (RepetitionPenaltyLogitsProcessor, "penalty", "repetition_penalty"),
    (TemperatureLogitsWarper, "temperature", "temperature"),
    (TopKLogitsWarper, "top_k", "top_k"),
    (TopPLogitsWarper, "top_p", "top_p"),
    (MinPLogitsWarper, "min_p", "min_p"),
)
# What `generate` prepares for its own loop and this one replaces, or checks apart.
_PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
_STORED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

Draft = str | os.PathLike[str] | Head | PreTrainedModel

_heads: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], Head]] = WeakKeyDictionary()


@dataclass
class GenerateSpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with return_dict_in_generate, and how the tokens came about.

    sequences: [1, L + new]. provenance: of each new token. accepted_lengths: accepted drafts of each cycle, uncut.
    regret: nats over the relaxed tokens, uncut. guarantee: the rule's promise in words. The other fields are None
    (and None is the only default that transformers allows here).
    """

    provenance: tuple[Provenance, ...] | None = None
    accepted_lengths: tuple[int, ...] | None = None
    regret: float | None = None
    guarantee: str | None = None


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: Draft | None = None,
    verify: VerifyConfig | None = None,
    tree: DraftConfig | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateSpeculativeOutput:
    """Decode by draft trees: `model.generate(ids, custom_generate=eagle_mars.custom_generate, draft=..., verify=...)`.

    draft: the draft head, as a directory, a hub id (loaded once per model) or a loaded `Head`; or a smaller model with
    the same tokenizer. verify: `mars` with θ = 0.9 when None; `VerifyConfig(rule="exact")` is lossless. tree: the shape
    of the draft tree.
    Everything else is `generate`'s: lengths, eos ids, sampling options and penalty of the generation config, stopping
    criteria (asked after every token, as ever) and a streamer. There is no tokenizer here, so relaxation leaves alone
    the bos, eos and pad ids only; `VerifyConfig(protected_ids=...)` names others.
    Returns ids [1, L + new], or a `GenerateSpeculativeOutput` with return_dict_in_generate.
    Raises ConfigError for what this loop can't honour, CheckpointError, ContextLengthError, UnsupportedTargetError.
    """
    _refuse_what_needs_another_loop(model, input_ids, generation_config, model_kwargs)
    sampling = _sampling(logits_processor, generation_config)
    streamer = streamer or _callers_argument("streamer")
    verify = verify or VerifyConfig()
    stop_ids, max_length, criteria = _stops(stopping_criteria, generation_config)
    proposer = _proposer(model, draft)
    target = TargetModel(model, proposer.capture_layers)
    max_new_tokens = max_length - input_ids.shape[1]
    check_context(target, input_ids.shape[1], max_new_tokens)
    announce(verify)
    request = Request(
        max_new_tokens=max_new_tokens,
        draft=tree or DraftConfig(),
        verify=verify,
        sampling=sampling,
        stop_ids=stop_ids,
        special_ids=_special_ids(generation_config, stop_ids, target.config.vocab_size),
    )
    ids = input_ids
    steps: list[Step] = []
    provenance: list[Provenance] = []
    for step in Engine(target, proposer).speculate(input_ids, request):
        steps.append(step)
        ids, done = _append(ids, step, criteria, streamer)
        provenance += step.provenance[: ids.shape[1] - input_ids.shape[1] - len(provenance)]
        if done:
            break
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return ids
    return GenerateSpeculativeOutput(
        sequences=cast("torch.LongTensor", ids),
        provenance=tuple(provenance),
        accepted_lengths=tuple(step.accepted for step in steps if step.accepted is not None),
        regret=sum(step.regret for step in steps),
        guarantee=guarantee(verify),
    )


def _append(
    ids: Tensor, step: Step, criteria: StoppingCriteriaList, streamer: BaseStreamer | None
) -> tuple[Tensor, bool]:
    """Add a step's tokens one by one, as if each had cost a forward: the first that ends the text is the last one."""
    new = torch.tensor([step.tokens], dtype=ids.dtype, device=ids.device)
    if not criteria and streamer is None:
        return torch.cat((ids, new), dim=1), False
    for token in new.split(1, dim=1):
        ids = torch.cat((ids, token), dim=1)
        if streamer is not None:
            streamer.put(token[0].cpu())
        if criteria and bool(criteria(ids, None).all()):
            return ids, True
    return ids, False


def _refuse_what_needs_another_loop(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(
            f"custom_generate decodes greedily or by sampling, not by {mode.value.replace('_', ' ')}; "
            "leave num_beams, penalty_alpha, prompt_lookup_num_tokens and the like out."
        )
    if _callers_argument("assistant_model") is not None:
        raise ConfigError("assistant_model isn't used here; pass that model as draft=... instead.")
    if input_ids.shape[0] != 1:
        raise ConfigError(
            f"custom_generate decodes one sequence per call, not {input_ids.shape[0]}; call generate once per prompt, "
            "with num_return_sequences=1."
        )
    if model.training:
        raise ConfigError("the model is in training mode, where dropout makes drafts useless; call model.eval() first.")
    stored = [name for name in _STORED if getattr(config, name, False)]
    if config.return_dict_in_generate and stored:
        raise ConfigError(f"custom_generate keeps no values per token, so {stored[0]}=True can't be had; leave it out.")
    unknown = [name for name, value in model_kwargs.items() if name not in _PREPARED and value is not None]
    if unknown:
        raise ConfigError(f"custom_generate takes token ids alone, so it can't pass on {unknown[0]}; leave it out.")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and not bool((mask == 1).all()):
        raise ConfigError("attention_mask hides tokens of the prompt; give the prompt without padding.")
    if positions is not None and not torch.equal(
        positions.reshape(-1), torch.arange(input_ids.shape[1], device=positions.device)
    ):
        raise ConfigError("position_ids aren't 0, 1, 2, ...; leave them out.")
    cache = model_kwargs.get("cache") or model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise ConfigError("custom_generate starts from the prompt, not from a filled cache; leave the cache out.")


def _sampling(processors: LogitsProcessorList, config: GenerationConfig) -> SamplingConfig:
    """The processors that `generate` has prepared, as options of the engine; greedy needs the penalty alone."""
    options: dict[str, Any] = {"temperature": 1.0}
    place = 0
    for processor in processors:
        if isinstance(processor, (InfNanRemoveLogitsProcessor, LogitNormalization)):
            continue  # the engine refuses NaN, and no choice depends on a constant in all logits
        at = next((i for i, (kind, *_) in enumerate(_WARPERS) if type(processor) is kind), None)
        plain = (
            getattr(processor, "min_tokens_to_keep", 1) == 1
            and getattr(processor, "filter_value", -torch.inf) == -torch.inf
            and not torch.as_tensor(getattr(processor, "prompt_ignore_length", None) or 0).any()
        )
        if at is None or at < place or not plain:
            raise ConfigError(
                f"custom_generate can't apply {type(processor).__name__} here; it knows repetition_penalty, "
                "temperature, top_k, top_p and min_p, in this order and with their defaults."
            )
        place = at + 1
        _, attribute, option = _WARPERS[at]
        options[option] = getattr(processor, attribute)
    if not config.do_sample:
        options = {"repetition_penalty": options.get("repetition_penalty", 1.0)}
    return SamplingConfig(**options)


def _stops(
    criteria: StoppingCriteriaList, config: GenerationConfig
) -> tuple[frozenset[int], int, StoppingCriteriaList]:
    """(stop ids, length of prompt and answer at most, the criteria that must be asked)."""
    stop_ids = {int(i) for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.reshape(-1)}
    lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    others = [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    return frozenset(stop_ids), min([config.max_length, *lengths]), StoppingCriteriaList(others)


def _special_ids(config: GenerationConfig, stop_ids: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    named = {i for i in (config.bos_token_id, config.pad_token_id) if isinstance(i, int)}
    return tuple(sorted(i for i in named | stop_ids if 0 <= i < vocab_size))


def _proposer(model: PreTrainedModel, draft: Draft | None) -> Proposer:
    if draft is None:
        raise ConfigError("custom_generate needs a draft head; pass draft=DIRECTORY or draft=HUB_ID.")
    embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(draft, PreTrainedModel):
        return DraftModel(draft, model.config.get_text_config().vocab_size)
    if isinstance(draft, Head):
        if draft.borrowed != (embed_tokens, lm_head):
            raise ConfigError("this draft head is bound to another model; pass its directory or hub id instead.")
        return draft
    target = TargetModel(model)
    device = target.layer_devices[-1]
    loaded = _heads.setdefault(model, {})
    key = (os.fspath(draft), target.dtype, device)
    if key not in loaded:
        loaded[key] = load_head(
            Path(draft) if isinstance(draft, os.PathLike) else draft,
            target.config,
            embed_tokens=embed_tokens,
            lm_head=lm_head,
            dtype=target.dtype,
            device=device,
        )
    return loaded[key]


def _callers_argument(name: str) -> Any:
    """The `streamer` or `assistant_model` that `generate` was called with.

    transformers 5.10 to 5.24 drops both when custom_generate is a callable (`_extract_generation_mode_kwargs`
    overwrites the keywords that hold them), after it has given the streamer the prompt: its reader would wait for ever.
    The calling frame still holds them.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        frame = frame.f_back
    return frame.f_locals[name] if frame is not None else None
