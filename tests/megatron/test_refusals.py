"""What would change the numbers, or lose a tensor, is refused with what to set."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5next_plugin.architecture import Architecture, ConfigError
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants
from tests.command import run_convert

from .process_pool import Layout

BUILD = "tests.megatron.module_runs:error_of_build"
LOAD = "tests.megatron.module_runs:error_of_load"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bias_activation_fusion": True}, ["bias_activation_fusion is True; needed: False", "clamp"]),
        ({"use_te_activation_func": True}, ["use_te_activation_func is True; needed: False"]),
        ({"moe_shared_expert_overlap": True}, ["moe_shared_expert_overlap is True; needed: False"]),
        ({"use_transformer_engine_op_fuser": True}, ["use_transformer_engine_op_fuser is True; needed: False"]),
        ({"moe_router_dtype": None}, ["moe_router_dtype is None; needed: 'fp32'"]),
        ({"moe_router_fusion": True}, ["moe_router_fusion is True; needed: False"]),
        ({"moe_router_bias_update_rate": 1e-3}, ["moe_router_bias_update_rate is 0.001; needed: 0"]),
        ({"moe_grouped_gemm": True}, ["moe_grouped_gemm is True; needed: False"]),
        ({"moe_router_topk": 2}, ["moe_router_topk is 2; needed: 4"]),
        ({"recompute_granularity": "selective"}, ["recompute_granularity is 'selective'"]),
        ({"mtp_num_layers": 1}, ["mtp_num_layers is 1; needed: None", "not trained"]),
        ({"context_parallel_size": 3}, ["context_parallel_size is 3", "divisor of linear_attn_config.num_heads (4)"]),
        (
            {"pipeline_model_parallel_size": 2, "variable_seq_lengths": False},
            ["variable_seq_lengths is False; needed: True"],
        ),
        ({"tensor_model_parallel_size": 2}, ["sequence_parallel is False; needed: True"]),
        ({"tensor_model_parallel_size": 3, "sequence_parallel": True}, ["divisor of num_attention_heads (4)"]),
        ({"expert_model_parallel_size": 3}, ["expert_model_parallel_size is 3", "n_routed_experts (16)"]),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "batch_p2p_comm": True,
                "overlap_p2p_comm": False,
            },
            ["batch_p2p_comm, overlap_p2p_comm is (True, False); needed: (False, True)"],
        ),
        ({"architecture": None}, ["config.architecture is None", "Architecture.from_pretrained"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_changes_numbers_is_refused_at_build(pool, checkpoints, settings, named):
    (message,) = pool.run(BUILD, Layout(), checkpoint=str(checkpoints(4)), settings=settings)
    assert all(part in message for part in named), message


def test_default_settings_build(pool, checkpoints):
    (message,) = pool.run(BUILD, Layout(), checkpoint=str(checkpoints(4)), settings={})
    assert message == ""


def test_an_explicit_wish_for_mtp_layers_is_refused():
    raw = variants.tiny(num_nextn_predict_layers=1).released_config()
    assert Architecture.from_config(raw).num_nextn_predict_layers == 1
    with pytest.raises(ConfigError, match="mtp_layers"):
        Architecture.from_config(raw, mtp_layers=1)


@pytest.fixture(scope="module")
def single_shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("faulty") / "source"
    return make_checkpoint(path, variants.tiny(vocab_size=128), dtype="float32")


ONE = "model.language_model.layers.3.self_attn.indexer.wk.weight"
FAULTS = {
    "removed": (lambda tensors: tensors.pop(ONE), [ONE]),
    "renamed": (
        lambda tensors: tensors.update({ONE.replace("wk", "w_k"): tensors.pop(ONE)}),
        [ONE, ONE.replace("wk", "w_k")],
    ),
    "shape": (lambda tensors: tensors.update({ONE: tensors[ONE][:-1].contiguous()}), [ONE]),
    "dtype": (
        lambda tensors: tensors.update(
            {"model.language_model.layers.0.self_attn.A_log": torch.zeros(4, dtype=torch.bfloat16)}
        ),
        ["model.language_model.layers.0.self_attn.A_log"],
    ),
}


@pytest.fixture(scope="module", params=FAULTS)
def faulty(request, single_shard, tmp_path_factory):
    """(checkpoint with one tensor at fault, names that an error must have)."""
    folder = tmp_path_factory.mktemp("faulty") / request.param
    shutil.copytree(single_shard, folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    change, names = FAULTS[request.param]
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard.name)}))
    return folder, names


def test_a_tensor_at_fault_is_named_on_load(pool, faulty):
    folder, names = faulty
    (message,) = pool.run(LOAD, Layout(), checkpoint=str(folder))
    assert all(name in message for name in names), message


def test_a_tensor_at_fault_is_named_by_the_command_which_exits_with_2(faulty, tmp_path):
    folder, names = faulty
    result = run_convert(folder, tmp_path / "out")
    assert result.returncode == 2
    assert all(name in result.stderr for name in names), result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.iterdir())


def test_parameters_and_tensors_that_do_not_pair_off_are_named(pool, checkpoints):
    (errors,) = pool.run(
        "tests.megatron.module_runs:errors_of_an_incomplete_table", Layout(), checkpoint=str(checkpoints(4))
    )
    assert "decoder.layers.0.ffn_hc.scale" in errors["unmapped"]
    assert "model.language_model.layers.0.hc_ffn_scale" in errors["unmapped"]
    assert "parameters without a tensor: none" in errors["unread"]
    assert "model.language_model.layers.7.hc_ffn_scale" in errors["unread"]
