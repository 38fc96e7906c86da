"""Quantised targets: what can be loaded passes through, what can't is one sentence that names the package."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.errors import ConfigError
from eagle_mars.loading import load_target


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="the package that this test misses is installed")
@pytest.mark.parametrize(
    ("method", "package"), [("gptq", "gptqmodel|optimum"), ("awq", "gptqmodel"), ("compressed-tensors", "compressed")]
)
def test_a_quantised_checkpoint_names_the_package_that_it_needs(
    method: str, package: str, tiny_pair: tuple[str, str], tmp_path: Path
) -> None:
    shutil.copytree(tiny_pair[0], tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "quantization_config": {"quant_method": method, "bits": 4, "group_size": 32}})
    )
    with pytest.raises(ConfigError, match=f"quantised by {method}, which needs more packages.*({package})"):
        load_target(path.parent)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="the package that this test misses is installed")
def test_so_does_a_quantisation_that_is_asked_for(tiny_pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"quantised by bitsandbytes, which needs more packages.*bitsandbytes"):
        load_target(tiny_pair[0], quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_int8_weights_of_torchao_decode_beside_a_head_in_half_precision(tiny_pair: tuple[str, str]) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    ea = EaModel.from_pretrained(
        *tiny_pair,
        *(12, 3, 4),
        dtype=torch.bfloat16,
        quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()),
    )
    assert type(ea.base_model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert {p.dtype for p in ea.ea_layer.parameters()} == {torch.bfloat16}
    result = ea.generate("abc", max_new_tokens=16, verify=VerifyConfig(rule="exact"))
    assert result.new_tokens == 16
