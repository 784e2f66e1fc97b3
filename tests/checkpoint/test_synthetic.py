"""Synthetic checkpoints: released format, a tokenizer that loads, weights that hide no fault."""

import json

import pytest
import torch

from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.checkpoint.synthetic import Initialization, make_checkpoint
from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.variants import demo, special_token_ids, tiny, variant

from .editing import stored_tensors

L = "model.language_model.layers."


def test_dtypes_are_the_released_ones(whole):
    fp32 = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")
    for name, tensor in stored_tensors(whole).items():
        assert tensor.dtype == (torch.float32 if name.endswith(fp32) else torch.bfloat16), name


def test_fp32_checkpoint_is_fp32_throughout(tmp_path):
    path = make_checkpoint(tmp_path / "out", "demo", dtype="float32")
    assert {tensor.dtype for tensor in stored_tensors(path).values()} == {torch.float32}
    assert CheckpointReader(path).dtype == torch.float32


def test_vision_mtp_and_tokenizer_come_on_request(whole, tmp_path):
    reader = CheckpointReader(make_checkpoint(tmp_path / "out", "demo", tokenizer=False))
    reader.check()
    assert not reader.has_vision and not reader.has_mtp
    assert not (reader.path / "tokenizer.json").exists()
    whole = CheckpointReader(whole)
    assert whole.has_vision and whole.has_mtp and (whole.path / "tokenizer.json").exists()


def test_seed_and_name_decide_the_values(whole, tmp_path):
    text = CheckpointReader(make_checkpoint(tmp_path / "text", "demo", seed=1))
    other = CheckpointReader(make_checkpoint(tmp_path / "other", "demo", seed=2))
    whole = CheckpointReader(whole)
    for name in text.names():
        assert torch.equal(text.tensor(name), whole.tensor(name)), name
        assert not torch.equal(text.tensor(name), other.tensor(name)), name
    q, k = (whole.tensor(f"{L}0.self_attn.{which}_proj.weight") for which in "qk")
    assert not torch.equal(q, k)


def test_no_kind_is_constant_and_fp32_kinds_have_bits_that_bf16_drops(whole):
    signed = (
        "A_log",
        "_base",
        "e_score_correction_bias",
        "compress_gate",
        "compress_ape",
        "_proj.weight",
        "wq_b.weight",
    )
    tensors = stored_tensors(whole)
    for name, tensor in tensors.items():
        assert tensor.float().std() > 0, name
        if tensor.dtype == torch.float32:
            assert not torch.equal(tensor.bfloat16().float(), tensor), name
    for end in signed:
        values = torch.cat([tensor.flatten().float() for name, tensor in tensors.items() if name.endswith(end)])
        assert (values < 0).any() and (values > 0).any(), end


def test_values_lie_where_the_initialization_says(tmp_path):
    init = Initialization(
        weight_std=0.3,
        norm_std=0.01,
        hc_fn_std=0.02,
        hc_base_std=0.4,
        a_log_std=0.5,
        pooling_std=0.6,
        expert_bias_mean=7.0,
        expert_bias_std=0.001,
    )
    path = make_checkpoint(tmp_path / "out", tiny(), init=init, dtype="float32")
    tensors = stored_tensors(path)

    def mean_and_std(end):
        values = torch.cat([tensor.flatten() for name, tensor in tensors.items() if name.endswith(end)])
        return pytest.approx((values.mean().item(), values.std().item()), rel=0.35, abs=0.15)

    assert (0.0, 0.3) == mean_and_std("self_attn.q_proj.weight")
    assert (1.0, 0.01) == mean_and_std("input_layernorm.weight")
    assert (0.0, 0.4) == mean_and_std("_base")
    assert (1.0, 0.01) == mean_and_std("_scale")
    assert (0.0, 0.5) == mean_and_std("A_log")
    assert (0.0, 0.6) == mean_and_std("index_kpool_compress_gate")
    bias = torch.cat([tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")])
    assert 6.99 < bias.min() < bias.max() < 7.01
    # the softplus of dt_bias is a step in [1e-3, 1e-1]
    steps = torch.nn.functional.softplus(torch.cat([t for n, t in tensors.items() if n.endswith("dt_bias")]))
    assert 0.99e-3 < steps.min() < 2e-3 and 5e-2 < steps.max() < 0.101


def test_token_ids_of_the_config_lie_in_the_vocabulary(whole):
    config = json.loads((whole / "config.json").read_text())
    ids = [config[key] for key in config if key.endswith("_token_id")]
    ids += [*config["text_config"]["eos_token_id"], config["text_config"]["pad_token_id"]]
    assert len(ids) == 10 and all(55 <= number < 64 for number in ids)
    assert len(set(ids)) == 9
    generation = json.loads((whole / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["text_config"]["eos_token_id"] == [55, 56, 57]


def test_special_tokens_are_those_of_the_release_or_the_last_ids():
    assert special_token_ids(154880)["<|image|>"] == 154854
    assert list(special_token_ids(64).values()) == list(range(55, 64))
    with pytest.raises(InputError, match="vocab_size 9"):
        special_token_ids(9)


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_auto_tokenizer_loads_it_and_text_survives(name, tmp_path):
    from transformers import AutoTokenizer

    path = make_checkpoint(tmp_path / "out", name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocab_size = variant(name).vocab_size
    assert len(tokenizer) == vocab_size
    text = "Hello0 Abc 123" if name == "tiny" else "HELLO012abc"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and max(ids) < vocab_size
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(range(vocab_size)).count("<|") == 9
    assert tokenizer("a<|user|>b")["input_ids"][1] == special_token_ids(vocab_size)["<|user|>"]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == special_token_ids(vocab_size)["<|endoftext|>"]
    assert tokenizer("\u4e00")["input_ids"] == [0]
    assert [tokenizer.convert_ids_to_tokens(i) for i in (1, 10, 11)] == ["0", "9", "A"]


# ---------------------------------------------------------------------- variants
def test_tiny_is_the_model_of_the_tests():
    architecture = tiny()
    assert architecture.hidden_size == 256
    assert architecture.attention_kinds == ("kda", "kda", "kda", "dsa") * 2
    assert architecture.mlp_kinds == ("dense",) * 3 + ("moe",) * 5
    assert (architecture.kda_num_heads, architecture.kda_head_dim, architecture.hc_mult) == (4, 64, 4)
    assert (architecture.n_routed_experts, architecture.num_experts_per_tok) == (16, 4)
    assert (architecture.index_kpool, architecture.index_topk, architecture.selection_width) == (4, 16, 19)


def test_demo_is_the_model_of_the_bringup():
    architecture = demo()
    assert architecture.attention_kinds == ("kda", "kda", "kda", "dsa")
    assert architecture.mlp_kinds == ("dense", "moe", "moe", "moe")
    assert (architecture.vocab_size, architecture.hidden_size) == (64, 64)
    assert (architecture.n_routed_experts, architecture.num_experts_per_tok) == (8, 4)
    assert (architecture.index_kpool, architecture.index_topk) == (4, 16)


def test_overrides_reach_every_level_and_the_schedule_follows():
    architecture = tiny(
        num_hidden_layers=5,
        dsa_layers=[0, 4],
        first_k_dense_replace=0,
        index_kpool=16,
        index_topk=32,
        linear_attn_config={"num_heads": 2, "gate_lower_bound": -3.0},
        vision_config={"depth": 2},
    )
    assert architecture.attention_kinds == ("dsa", "kda", "kda", "kda", "dsa")
    assert architecture.mlp_kinds == ("moe",) * 5
    assert (architecture.kda_num_heads, architecture.kda_head_dim, architecture.gate_lower_bound) == (2, 64, -3.0)
    assert architecture.vision.depth == 2
    assert architecture.raw["text_config"]["first_k_dense_replace"] == 0
    assert tiny(num_attention_heads=2).raw["text_config"]["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    "override",
    [
        {"hidden_sise": 3},
        {"linear_attn_config": {"heads": 3}},
        {"vision_config": {"layers": 3}},
        {"layer_types": ["linear_attention"]},
    ],
)
def test_override_of_a_key_that_is_not_there_is_refused(override):
    with pytest.raises(InputError, match="no such key"):
        tiny(**override)


def test_unknown_variant_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="no variant 'huge'; there are demo, full, tiny"):
        make_checkpoint(tmp_path / "out", "huge")
