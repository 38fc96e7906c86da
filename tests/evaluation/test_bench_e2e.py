from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eagle_mars import DraftConfig, EaModel, VerifyConfig
from eagle_mars.compare import Comparison
from evaluation import bench_e2e, eagle_loop
from evaluation.forward_clock import ForwardClock
from evaluation.peers import hf_generate, shallow
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def ea(tiny_pair) -> EaModel:
    return EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)


@pytest.mark.parametrize("draft", [DraftConfig(total_token=14, depth=2, top_k=4), DraftConfig.chain(3)])
def test_eagles_loop_accepts_what_the_engine_accepts(ea: EaModel, draft: DraftConfig) -> None:
    accepted = 0
    for text in ("abc", "de", "q"):
        prompt = ea.chat_ids(text)
        ours = ea.generate(prompt, max_new_tokens=25, draft=draft, verify=VerifyConfig(rule="exact"))
        theirs = eagle_loop.decode(ea, draft, prompt, 25)
        assert theirs.token_ids == ours.token_ids
        # the last tree may differ: ours drafts nothing where one token is left
        assert theirs.accepted_lengths[: ours.cycles - 1] == ours.accepted_lengths[:-1]
        accepted += sum(theirs.accepted_lengths)
    assert accepted


def test_the_clock_counts_every_target_forward_once_and_leaves_nothing_behind(ea: EaModel) -> None:
    clock = ForwardClock()
    with clock.watching(ea):
        result = ea.generate("abc", max_new_tokens=12, verify=VerifyConfig(rule="exact"))
        undrafted = result.new_tokens - 1 - sum(n + 1 for n in result.accepted_lengths)  # the last token, if alone
        assert clock.target_calls == 1 + result.cycles + undrafted
        assert 0 < clock.seconds < result.seconds
    assert "forward" not in vars(ea.base_model)
    assert not {"forward", "fuse", "logits"} & vars(ea.ea_layer).keys()


def test_an_assistant_of_the_models_own_layers_shares_its_weights() -> None:
    model = tiny_model("Llama", vocab_size=16)
    assistant = shallow(model, 3)
    theirs, ours = model.model.layers, assistant.model.layers
    assert [ours[i].mlp.up_proj.weight.data_ptr() for i in range(3)] == [
        theirs[i].mlp.up_proj.weight.data_ptr() for i in (0, 1, 7)
    ]
    assert [layer.self_attn.layer_idx for layer in ours] == [0, 1, 2]


def test_every_arm_is_a_row_with_provenance(tiny_pair, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\ncd\nef\n")
    app = typer.Typer()
    app.command()(bench_e2e.main)
    options = ["--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "5", "--threads", "1"]
    options += ["--model", tiny_pair[0], "--head", tiny_pair[1], "--assistant-layers", "3", "--eagle-loop", "--static"]
    options += ["--cpu-time"]
    done = CliRunner().invoke(app, [*options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    row = json.loads((tmp_path / "e2e.jsonl").read_text())
    kinds = {"generate", "lookup", "assisted"}
    arms = {f"{kind} {weights}" for kind in kinds for weights in ("packed", "float32")}
    assert set(row["arms"]) == arms | {"ar", "exact", "mars", "eagle loop", "generate static", "generate bfloat16"}
    assert row["arms"]["exact"]["same text as ar"]["value"] == 2
    assert row["arms"]["generate packed"]["over generate packed"]["value"] == 1
    assert {"commit", "command", "threads"} <= row["provenance"].keys()
    assert "| eagle loop |" in (tmp_path / "e2e.md").read_text()


def test_another_text_of_a_lossless_arm_ends_the_run(ea: EaModel) -> None:
    prompt = ea.chat_ids("ab")
    base = ea.generate(prompt, max_new_tokens=6, method="autoregressive")
    stock = hf_generate(ea.base_model, ea.tokenizer, prompt, 6, "generate float32")
    results = {"ar": [base], "generate float32": [stock], "exact": [base]}
    bench_e2e.require_same_texts(Comparison(results))
    other = ea.generate(prompt, max_new_tokens=5, method="autoregressive")
    with pytest.raises(bench_e2e.DifferentTextError, match="'exact' differs from 'ar' on prompts \\[0\\]"):
        bench_e2e.require_same_texts(Comparison({**results, "exact": [other]}))
