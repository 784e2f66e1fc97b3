"""The five fp32 kinds keep every bit through wrap, optimizer, save, load and export of a bf16 model."""

import pytest
import torch

from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants

from .conftest import INITIALIZATION
from .process_pool import Layout

ON_DISK = {
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "self_attention.A_log": "self_attn.A_log",
    "self_attention.dt_bias": "self_attn.dt_bias",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    architecture = variants.tiny(vocab_size=128)
    return make_checkpoint(tmp_path_factory.mktemp("bf16") / "source", architecture, seed=5, init=INITIALIZATION)


@pytest.fixture(scope="module")
def stages(pool, source, tmp_path_factory):
    scratch = str(tmp_path_factory.mktemp("stages"))
    (found,) = pool.run(
        "tests.megatron.module_runs:fp32_kinds_through_a_bf16_run", Layout(), checkpoint=str(source), scratch=scratch
    )
    return found | {"scratch": scratch}


def disk_name(name: str) -> str:
    number, _, inner = name.partition("layers.")[2].partition(".")
    return f"model.language_model.layers.{number}.{ON_DISK[inner]}"


@pytest.mark.parametrize("stage", ["wrapped", "stepped", "loaded"])
def test_every_fp32_tensor_keeps_its_bits(stages, source, stage):
    reader = CheckpointReader(source)
    # 8 layers of 4 mHC tensors, 6 KDA layers of 2, 5 MoE layers of 1
    assert len(stages[stage]) == 8 * 4 + 6 * 2 + 5
    assert stages["stepped_ok"] and stages["dtypes"] == ["torch.bfloat16", "torch.float32"]
    for name, tensor in stages[stage].items():
        expected = reader.tensor(disk_name(name))
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected), name
        rounded = expected.bfloat16().float()
        assert not name.endswith("A_log") or not torch.equal(expected, rounded), "the values would survive bf16 anyway"


def test_plain_megatron_casts_keep_the_bits(pool, source):
    """Without Megatron-Bridge, which restores parameters after its own cast."""
    (found,) = pool.run(
        "tests.megatron.module_runs:fp32_kinds_cast_by_plain_megatron", Layout(), checkpoint=str(source)
    )
    reader = CheckpointReader(source)
    for cast, tensors in found.items():
        assert len(tensors) == 8 * 4 + 6 * 2 + 5
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, reader.tensor(disk_name(name))), (cast, name)


def test_an_export_that_asks_for_bf16_keeps_fp32_kinds(stages, source):
    reader = CheckpointReader(source)
    for name, tensor in stages["exported"].items():
        expected = reader.tensor(name)
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


def test_a_written_checkpoint_equals_its_source(stages, source):
    reader, written = CheckpointReader(source), CheckpointReader(f"{stages['scratch']}/exported")
    written.check()
    assert written.names() == reader.names()
    for name in reader.names():
        assert torch.equal(written.tensor(name), reader.tensor(name)), name


def test_experts_with_biases_near_seven_are_chosen_as_in_fp64(pool, source):
    (answer,) = pool.run("tests.megatron.module_runs:stock_rounding_of_bias", Layout(), checkpoint=str(source))
    chosen, expected = answer
    assert torch.equal(chosen, expected)
