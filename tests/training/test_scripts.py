"""From a target to a head that drafts for it, by the commands of docs/training.md, on a toy target."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_mars import EaModel
from eagle_mars.training import initialise
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.trainer import TrainingTimeTest, TrainOptions
from tests.training.conftest import toy_target

ROOT = Path(__file__).parents[2]
TRAIN = ["--single-steps", "0", "--unroll", "2", "--tokens-per-batch", "200", "--draft-vocab", "48", "--cpu"]


def run_script(name: str, *arguments: str | Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")


@pytest.fixture(scope="module")
def target_dir(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    toy_target().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(target_dir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    sizes = ["--shards", "2", "--per-shard", "6", "--rows", "12", "--max-length", "160"]
    run_script("generate_data.py", "--target", target_dir, "--out", directory, *sizes)
    return directory


def head_after_one_step_of_two(target, data: Path, options: TrainOptions) -> dict[str, torch.Tensor]:
    """What two processes must arrive at: the mean of their gradients, clipped, one AdamW step."""
    dataset = ShardDataset(data)
    torch.manual_seed(options.seed)
    start = initialise.starting_point(target, dataset, 48)
    module = TrainingTimeTest(start.head, start.vocabulary, target.lm_head, options)
    for rank in range(2):
        batch = next(dataset.forever(options.tokens_per_batch, options.seed, rank=rank, world=2, skip=0))
        (module(batch.scaled(start.scales), options.unroll)[0] / 2).backward()
    torch.nn.utils.clip_grad_norm_(start.head.parameters(), options.clip)
    for name, parameter in start.head.named_parameters():
        lr = options.lr * (options.lm_head_lr_ratio if name == "lm_head.weight" else 1)
        torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.95), weight_decay=0.0).step()
    return start.head.state_dict()


def test_a_head_in_five_commands(target, target_dir, data, tmp_path, capsys):
    work, out = tmp_path / "work", tmp_path / "head"
    files = ["--target", target_dir, "--data", data, "--held-out", data, "--work-dir", work, "--out", out]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*two, ROOT / "scripts" / "train_head.py", *files, *TRAIN, "--warm-up", "0", "--steps", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    options = TrainOptions(single_steps=0, unroll=2, tokens_per_batch=200, warm_up=0, steps=1)
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    for name, expected in head_after_one_step_of_two(target, data, options).items():
        # AdamW's first step is lr · sign of the gradient almost everywhere: rounding flips it where that is ~0.
        close = torch.isclose(state["head"][name].double(), expected.double(), rtol=1e-4, atol=1e-6)
        assert close.double().mean() > 0.99, name

    # On from there, as after a kill, in two processes and in one.
    command[-1] = "2"
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed at step 1" in done.stdout
    run_script("train_head.py", *files, *TRAIN, "--warm-up", "0", "--steps", "3")
    records = [json.loads(line) for line in (work / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert len(records[-1]["held_out"]["conditional"]) == 5
    assert (work / "curves.png").stat().st_size > 10_000

    questions = tmp_path / "question.jsonl"
    questions.write_text("".join(json.dumps({"category": "ab"[i % 2]}) + "\n" for i in range(12)), "utf-8")
    chosen = ["--checkpoint", work / "checkpoint.pt", "--held-out", data, "--questions", questions]
    run_script("evaluate_head.py", "--target", target_dir, *chosen, "--tree", "6", "1", "3")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| a", "| b"))]
    tokens = {name.strip("| "): int(n) for name, _, n, *_ in rows}
    assert tokens["all"] == tokens["a"] + tokens["b"]
    assert float(rows[0][3]) == pytest.approx(records[-1]["held_out"]["tau"], abs=5e-4)

    model = EaModel.from_pretrained(base_model_path=str(target_dir), ea_model_path=str(out), dtype=torch.float32)
    prompt = torch.tensor([[2, 5, 6, 7, 1, 2]])
    drafted = model.eagenerate(prompt, temperature=0, max_new_tokens=20, relaxation_threshold=None)
    plain = model.naivegenerate(prompt, temperature=0, max_new_tokens=20)
    assert torch.equal(drafted, plain)


def test_the_overlap_report_counts_per_file(target_dir, data, tokenizer, tmp_path):
    dataset = ShardDataset(data)
    tokens, source = next(x for e in dataset.entries if 1 in (x := dataset.tokens(e))[1].tolist())
    written = tokenizer.decode(tokens[source == 1].tolist(), skip_special_tokens=True)
    for turns, status in (["none of this"], 0), (["first", written], 1):
        questions = tmp_path / f"{status}.jsonl"
        questions.write_text(json.dumps({"turns": turns}), "utf-8")
        files = ["--target", target_dir, "--data", data, "--questions", questions, "--out", tmp_path / "overlap.md"]
        with pytest.raises(SystemExit) as ended:
            run_script("check_overlap.py", *files)
        assert ended.value.code == status
        report = (tmp_path / "overlap.md").read_text("utf-8")
        assert f"{len(dataset.entries)} sequences" in report
        assert f"/{status}.jsonl | 1 | {status} | 0 |" in report
