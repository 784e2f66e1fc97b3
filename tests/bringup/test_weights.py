"""Digests, and which tensors count as unequal."""

import torch

from glm5next_plugin.bringup.engine_weights import released_tensors
from glm5next_plugin.bringup.weights import digest, unequal_tensors


def test_a_weight_has_one_digest_whether_kept_in_bf16_or_fp32():
    weight = torch.randn(3, 5).to(torch.bfloat16)
    assert digest(weight) == digest(weight.float())


def test_rounding_to_bf16_changes_the_digest():
    A_log = torch.tensor([0.3001, -0.2503])
    assert digest(A_log) != digest(A_log.to(torch.bfloat16))


def test_shape_and_order_are_part_of_the_digest():
    weight = torch.arange(6.0).view(2, 3)
    assert digest(weight) != digest(weight.view(3, 2))
    assert digest(weight) != digest(weight.T)
    assert digest(weight.T) == digest(weight.T.contiguous())


def test_nan_equals_itself():
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_every_kind_of_inequality_names_its_tensor():
    trainer = {"a": "1", "b": "2", "c": "3"}
    engine = {"a": "1", "b": "9", "d": "4", "model.visual.x": "5"}
    assert unequal_tensors(trainer, engine) == [
        "b: the engine holds other values than the trainer",
        "c: the engine has no such tensor",
        "d: the trainer has no such tensor",
    ]
    assert unequal_tensors({"a": "1"}, {"a": "1", "model.visual.x": "5"}) == []


def test_merged_tensors_of_transformers_come_apart_in_the_right_order():
    layer = "model.language_model.layers.0."
    state = {
        f"{layer}self_attn.conv1d.weight": torch.arange(6.0).view(6, 1, 1),
        f"{layer}self_attn.forget_gate.A_log": torch.tensor([7.0]),
        f"{layer}attn_hc.base": torch.tensor([8.0]),
        f"{layer}mlp.experts.gate_up_proj": torch.arange(8.0).view(2, 4, 1),
        f"{layer}mlp.experts.down_proj": torch.arange(2.0).view(2, 1, 1),
        "lm_head.weight": torch.tensor([9.0]),
    }
    found = {name: tensor.flatten().tolist() for name, tensor in released_tensors(state)}
    assert found == {
        f"{layer}self_attn.q_conv1d.weight": [0.0, 1.0],
        f"{layer}self_attn.k_conv1d.weight": [2.0, 3.0],
        f"{layer}self_attn.v_conv1d.weight": [4.0, 5.0],
        f"{layer}self_attn.A_log": [7.0],
        f"{layer}hc_attn_base": [8.0],
        f"{layer}mlp.experts.0.gate_proj.weight": [0.0, 1.0],
        f"{layer}mlp.experts.0.up_proj.weight": [2.0, 3.0],
        f"{layer}mlp.experts.1.gate_proj.weight": [4.0, 5.0],
        f"{layer}mlp.experts.1.up_proj.weight": [6.0, 7.0],
        f"{layer}mlp.experts.0.down_proj.weight": [0.0],
        f"{layer}mlp.experts.1.down_proj.weight": [1.0],
        "lm_head.weight": [9.0],
    }
