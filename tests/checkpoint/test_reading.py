"""Reading: every fault of a checkpoint is an error that names file and tensor; the tensors are those of the file."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.checkpoint.companions import copy_companions
from glm5next_plugin.checkpoint.files import aligned_memory
from glm5next_plugin.checkpoint.reading import CheckpointReader
from glm5next_plugin.errors import InputError

from .editing import INDEX, edited, stored_tensors

L = "model.language_model.layers."


def faults_of(path: Path) -> str:
    with pytest.raises(InputError) as error:
        CheckpointReader(path).check()
    return str(error.value)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of the sharded checkpoint whose files may be changed."""
    return shutil.copytree(whole, tmp_path / "copied")


def shard_of(path: Path, name: str) -> str:
    return json.loads((path / INDEX).read_text())["weight_map"][name]


def test_sharded_checkpoint_reads_as_it_was_stored(whole):
    reader = CheckpointReader(whole)
    reader.check()
    stored = stored_tensors(whole)
    assert len(list(whole.glob("*.safetensors"))) > 3
    assert set(reader.names()) == stored.keys() and len(reader.names()) == len(stored)
    for name in reader.names():
        tensor = reader.tensor(name)
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
        assert reader.spec(name).shape == tuple(tensor.shape)
        assert reader.spec(name).file == shard_of(whole, name)
    assert reader.has_vision and reader.has_mtp
    assert reader.spelling == {"released"}
    assert reader.dtype == torch.bfloat16
    assert "lm_head.weight" in reader and "lm_head.bias" not in reader


def test_single_file_without_an_index_is_read(whole, tmp_path):
    reader = CheckpointReader(edited(whole, tmp_path / "single"))
    reader.check()
    assert reader.spec("lm_head.weight").file == "model.safetensors"


def test_names_come_in_the_order_of_the_layers(whole):
    names = CheckpointReader(whole).names()
    assert names[0] == "model.language_model.embed_tokens.weight"
    places = [names.index(f"{L}{layer}.input_layernorm.weight") for layer in range(4)]
    assert places == sorted(places) and places[-1] < names.index("lm_head.weight")


def test_unknown_tensor_is_asked_for_by_name(whole):
    with pytest.raises(InputError, match="no tensor lm_head.bias"):
        CheckpointReader(whole).tensor("lm_head.bias")


# ---------------------------------------------------------------------- one thing changed in one file
def drop(name):
    return lambda tensors: tensors.pop(name)


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def change(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name])})


def transposed_shape(tensor):
    return tensor.reshape(*reversed(tensor.shape))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        # removed
        (drop(f"{L}1.self_attn.A_log"), [f"{L}1.self_attn.A_log is missing (F32 [2])"]),
        (drop("lm_head.weight"), ["lm_head.weight is missing (BF16 [64, 64])"]),
        (drop(f"{L}2.mlp.experts.7.up_proj.weight"), [f"{L}2.mlp.experts.7.up_proj.weight is missing"]),
        (drop(f"{L}4.eh_proj.weight"), [f"{L}4.eh_proj.weight is missing"]),
        (drop("model.visual.blocks.0.attn.qkv.bias"), ["model.visual.blocks.0.attn.qkv.bias is missing"]),
        # renamed
        (
            rename(f"{L}3.self_attn.indexer.wk.weight", f"{L}3.self_attn.indexer.wkey.weight"),
            [
                f"{L}3.self_attn.indexer.wk.weight is missing",
                f"({L}3.self_attn.indexer.wkey.weight in model.safetensors) is unknown",
            ],
        ),
        (
            rename(f"{L}0.hc_attn_fn", f"{L}0.hc_attn_fn.weight"),
            [f"{L}0.hc_attn_fn is missing", f"{L}0.hc_attn_fn.weight in model.safetensors) is unknown"],
        ),
        (
            rename("model.language_model.norm.weight", "model.language_model.final_norm.weight"),
            ["model.language_model.norm.weight is missing", "final_norm.weight in model.safetensors) is unknown"],
        ),
        # shape
        (
            change(f"{L}0.self_attn.f_a_proj.weight", transposed_shape),
            [
                f"{L}0.self_attn.f_a_proj.weight in model.safetensors) has shape [64, 16]; ",
                "needed by config.json: [16, 64]",
            ],
        ),
        (change(f"{L}0.self_attn.dt_bias", lambda t: t[:2]), ["dt_bias in model.safetensors) has shape [2]"]),
        (change(f"{L}0.self_attn.q_conv1d.weight", lambda t: t.squeeze(1)), ["has shape [32, 4]", "[32, 1, 4]"]),
        (change("lm_head.weight", lambda t: t[:63]), ["lm_head.weight in model.safetensors) has shape [63, 64]"]),
        # dtype
        (
            change(f"{L}1.self_attn.A_log", torch.Tensor.bfloat16),
            [f"{L}1.self_attn.A_log in model.safetensors) has dtype BF16; needed: F32"],
        ),
        (change(f"{L}2.hc_ffn_scale", torch.Tensor.bfloat16), [f"{L}2.hc_ffn_scale", "has dtype BF16; needed: F32"]),
        (
            change(f"{L}2.mlp.gate.e_score_correction_bias", torch.Tensor.half),
            ["e_score_correction_bias in model.safetensors) has dtype F16; needed: F32"],
        ),
        (change(f"{L}2.mlp.gate.weight", torch.Tensor.half), ["has dtype F16; needed: BF16 or F32"]),
        (change(f"{L}2.mlp.gate.weight", torch.Tensor.double), ["has dtype F64; needed: BF16 or F32"]),
        (
            change(f"{L}0.self_attn.o_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
            ["self_attn.o_proj.weight in model.safetensors) has dtype F8_E4M3; needed: BF16 or F32"],
        ),
        # added
        (
            lambda tensors: tensors.update({"model.language_model.hc_head_fn": torch.zeros(2)}),
            ["model.language_model.hc_head_fn (model.language_model.hc_head_fn in model.safetensors) is unknown"],
        ),
        (
            lambda tensors: tensors.update({f"{L}5.input_layernorm.weight": torch.zeros(64)}),
            [f"{L}5.input_layernorm.weight", "is unknown: config.json has 4 layers and 1 MTP layers"],
        ),
    ],
)
def test_one_changed_tensor_is_the_one_fault_that_is_named(edit, named, whole, tmp_path):
    message = faults_of(edited(whole, tmp_path / "edited", edit))
    for text in named:
        assert text in message
    assert message.count("\n- ") == (2 if "is missing" in message and "is unknown" in message else 1)


def test_vision_and_mtp_may_be_absent_as_a_whole(whole, tmp_path):
    def without(tensors):
        for name in list(tensors):
            if name.startswith(("model.visual.", f"{L}4.")):
                del tensors[name]

    reader = CheckpointReader(edited(whole, tmp_path / "text", without))
    reader.check()
    assert not reader.has_vision and not reader.has_mtp


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("index_kpool", 16, "index_kpool_compress_ape in model.safetensors) has shape [4, 16]"),
        ("n_routed_experts", 9, "mlp.gate.weight in model.safetensors) has shape [8, 64]"),
        ("vocab_size", 65, "embed_tokens.weight in model.safetensors) has shape [64, 64]"),
        ("num_nextn_predict_layers", 0, "is unknown: config.json has 4 layers and 0 MTP layers"),
        ("num_nextn_predict_layers", 2, f"{L}5.enorm.weight is missing"),
    ],
)
def test_config_that_contradicts_the_tensors_is_a_fault(key, value, named, whole, tmp_path):
    path = edited(whole, tmp_path / "edited", config=lambda config: config["text_config"].update({key: value}))
    assert named in faults_of(path)


def test_more_experts_in_the_config_are_missing_by_name(whole, tmp_path):
    path = edited(
        whole,
        tmp_path / "edited",
        lambda tensors: [
            tensors.update({f"{L}{layer}.mlp.gate.{name}": torch.zeros(9, *tail, dtype=dtype)})
            for layer in range(1, 5)
            for name, tail, dtype in (
                ("weight", (64,), torch.bfloat16),
                ("e_score_correction_bias", (), torch.float32),
            )
        ],
        lambda config: config["text_config"].update(n_routed_experts=9),
    )
    message = faults_of(path)
    assert "12 faults" in message
    assert f"{L}1.mlp.experts.8.gate_proj.weight is missing" in message


def test_fewer_layers_in_the_config_are_unknown_by_name(whole, tmp_path):
    from glm5next_plugin.recipes.variants import demo

    path = edited(
        whole, tmp_path / "edited", config=lambda config: config.update(demo(num_hidden_layers=3).released_config())
    )
    message = faults_of(path)
    assert f"{L}4." in message and "config.json has 3 layers and 1 MTP layers" in message


def test_many_faults_are_counted_and_twenty_are_shown(whole, tmp_path):
    def without_experts(tensors):
        for name in list(tensors):
            if ".mlp.experts." in name:
                del tensors[name]

    message = faults_of(edited(whole, tmp_path / "edited", without_experts))
    assert "96 faults" in message
    assert message.count("\n- ") == 21
    assert message.endswith("\n- and 76 more")


# ---------------------------------------------------------------------- files and index
def test_missing_shard_is_named(copied):
    shard = shard_of(copied, "lm_head.weight")
    (copied / shard).unlink()
    message = faults_of(copied)
    assert f"{shard} is missing; {INDEX} names " in message
    assert "lm_head.weight is missing" in message


def test_truncated_shard_is_named(copied):
    shard = copied / shard_of(copied, "lm_head.weight")
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 1)
    assert f"{shard.name}: cut short: {size - 1} bytes, its header tells of {size}" in faults_of(copied)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "shorter than 8 bytes"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "cut short"),
        (b"\xff" * 64, "its header would be"),
        (struct.pack("<Q", 8) + b"not json", "no JSON object"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 2) + b"{}", "no file holds a tensor"),
        (struct.pack("<Q", 8) + b'{"a": 3}', "tensor a is described by 3"),
        (
            struct.pack("<Q", 57) + b'{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}    ',
            "tensor a has dtype 'Q4'",
        ),
        (
            struct.pack("<Q", 57) + b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}    0',
            "tensor a (U8 [2], 2 bytes)",
        ),
        (struct.pack("<Q", 57) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}    00', "expected 0 to 1"),
        (struct.pack("<Q", 57) + b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}   0', "has shape [-1]"),
        (struct.pack("<Q", 57) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}      0', "has data_offsets [0]"),
    ],
)
def test_file_that_is_no_safetensors_file_is_named(content, named, whole, tmp_path):
    path = edited(whole, tmp_path / "edited")
    (path / "model.safetensors").write_bytes(content)
    message = faults_of(path)
    assert named in message
    assert "model.safetensors" in message or named == "no file holds a tensor"


def rewrite_index(path: Path, function) -> None:
    index = json.loads((path / INDEX).read_text())
    function(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_ghost_entry_of_the_index_is_named(copied):
    shard = shard_of(copied, "lm_head.weight")
    rewrite_index(copied, lambda weight_map: weight_map.update({f"{L}9.ghost": shard}))
    assert f"{INDEX} names {L}9.ghost in {shard}, which does not hold it" in faults_of(copied)


def test_tensor_that_the_index_leaves_out_is_named(copied):
    shard = shard_of(copied, "lm_head.weight")
    rewrite_index(copied, lambda weight_map: weight_map.pop("lm_head.weight"))
    assert f"lm_head.weight in {shard} is not in {INDEX}" in faults_of(copied)


def test_tensor_in_another_shard_than_the_index_says_is_named_both_ways(copied):
    shard = shard_of(copied, "lm_head.weight")
    other = shard_of(copied, "model.language_model.embed_tokens.weight")
    assert shard != other
    rewrite_index(copied, lambda weight_map: weight_map.update({"lm_head.weight": other}))
    message = faults_of(copied)
    assert f"{INDEX} names lm_head.weight in {other}, which does not hold it" in message


def test_shard_that_the_index_does_not_name_is_a_fault(copied):
    save_file({"a": torch.zeros(1)}, copied / "model-00099-of-00099.safetensors")
    assert f"model-00099-of-00099.safetensors is there, but {INDEX} does not name it" in faults_of(copied)
    (copied / "model-00099-of-00099.safetensors").rename(copied / "model.safetensors")
    assert f"model.safetensors is there, but {INDEX} does not name it" in faults_of(copied)


def test_shards_without_an_index_are_a_fault(copied):
    (copied / INDEX).unlink()
    assert f"{INDEX} is missing; there are shards: model-00001-of-" in faults_of(copied)


def test_directory_without_tensors_is_a_fault(copied):
    for file in copied.glob("*.safetensors"):
        file.unlink()
    (copied / INDEX).unlink()
    assert f"neither {INDEX} nor model.safetensors is there" in faults_of(copied)


def test_name_in_two_shards_is_named_with_both(copied):
    shard, other = shard_of(copied, "lm_head.weight"), shard_of(copied, "model.language_model.embed_tokens.weight")
    tensors = load_file(copied / other)
    save_file(tensors | {"lm_head.weight": load_file(copied / shard)["lm_head.weight"]}, copied / other)
    message = faults_of(copied)
    assert f"lm_head.weight is there twice: lm_head.weight in {other}, and lm_head.weight in {shard}" in message


def test_name_twice_in_one_header_is_named(whole, tmp_path):
    path = edited(whole, tmp_path / "edited")
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].rstrip()
    first, second = b'"model.language_model.layers.0.hc_attn_base"', b'"model.language_model.layers.0.hc_ffn_base"'
    header = header.replace(second, first)
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    message = faults_of(path)
    assert f"{L}0.hc_attn_base is there twice" in message
    assert f"{L}0.hc_ffn_base is missing" in message


def test_name_twice_in_the_index_is_named(copied):
    text = (copied / INDEX).read_text()
    entry = f'"lm_head.weight": "{shard_of(copied, "lm_head.weight")}"'
    (copied / INDEX).write_text(text.replace(entry, f"{entry}, {entry}"))
    assert f"lm_head.weight stands 2 times in {INDEX}" in faults_of(copied)


def test_same_tensor_in_two_spellings_is_named(whole, tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.A_log"] = tensors[f"{L}0.self_attn.A_log"].clone()

    message = faults_of(edited(whole, tmp_path / "edited", add))
    assert f"{L}0.self_attn.A_log is there twice: " in message
    assert "model.layers.0.self_attn.A_log in model.safetensors" in message


@pytest.mark.parametrize("text", ["", "[]", '{"metadata": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_no_index_is_refused(copied, text):
    (copied / INDEX).write_text(text)
    with pytest.raises(InputError, match="model.safetensors.index.json"):
        CheckpointReader(copied)


def test_index_that_leaves_the_directory_is_refused(copied):
    (copied / INDEX).write_text('{"weight_map": {"lm_head.weight": "../model.safetensors"}}')
    with pytest.raises(InputError, match="no file beside it"):
        CheckpointReader(copied)


def test_absent_directory_and_config_are_named(tmp_path, copied):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        CheckpointReader(tmp_path / "nowhere")
    (copied / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        CheckpointReader(copied)


# ---------------------------------------------------------------------- values
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_value_that_is_not_finite_is_named_when_read(value, whole, tmp_path):
    name = f"{L}1.self_attn.k_proj.weight"

    def plant(tensors):
        tensors[name][3, 5] = value

    reader = CheckpointReader(edited(whole, tmp_path / "edited", plant))
    reader.check()
    with pytest.raises(InputError, match=r"k_proj.weight in model.safetensors\) has 1 values that are NaN or infinite"):
        reader.tensor(name)


def test_rows_are_those_of_the_whole_tensor(whole):
    reader = CheckpointReader(whole)
    for name in ("lm_head.weight", f"{L}1.self_attn.k_conv1d.weight", f"{L}0.self_attn.A_log"):
        rows = len(reader.tensor(name))
        for start, stop in ((0, 1), (1, rows), (0, rows), (rows - 1, rows)):
            assert torch.equal(reader.tensor(name, slice(start, stop)), reader.tensor(name)[start:stop])


def test_memory_that_is_given_is_read_into(whole):
    reader, memory = CheckpointReader(whole), aligned_memory(1_000_000)
    name = "lm_head.weight"
    tensor = reader.tensor(name, into=memory)
    assert memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + len(memory)
    assert torch.equal(tensor, reader.tensor(name))


def test_dtype_is_the_narrowest_that_loses_nothing(whole, tmp_path):
    def widen(*ends):
        return lambda tensors: tensors.update(
            {name: tensor.float() for name, tensor in tensors.items() if name.endswith(ends)}
        )

    convolutions = CheckpointReader(edited(whole, tmp_path / "a", widen("conv1d.weight")))
    one_weight = CheckpointReader(edited(whole, tmp_path / "b", widen("lm_head.weight")))
    convolutions.check()
    one_weight.check()
    assert convolutions.dtype == torch.bfloat16
    assert one_weight.dtype == torch.float32
    assert one_weight.tensor("lm_head.weight").dtype == torch.float32


def test_companions_are_copied_without_config_index_and_weights(whole, tmp_path):
    copy_companions(CheckpointReader(whole).companions, tmp_path)
    copied = {file.name for file in tmp_path.iterdir()}
    assert copied == {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in copied:
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


# ---------------------------------------------------------------------- FP8
FP8_NAME = f"{L}3.self_attn.q_b_proj.weight"  # [64, 32]: one ragged block of 48 rows and two of 24 columns
BLOCK = [48, 24]


def quantise(tensors):
    generator = torch.Generator().manual_seed(3)
    tensors[FP8_NAME] = torch.randn(64, 32, generator=generator).to(torch.float8_e4m3fn)
    tensors[FP8_NAME + "_scale_inv"] = torch.tensor([[2.0, 0.5], [-1.0, 4.0]])


def with_block(config):
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": BLOCK}


def test_fp8_weight_is_read_dequantised_and_its_scale_is_no_name(whole, tmp_path):
    path = edited(whole, tmp_path / "edited", quantise, with_block)
    reader = CheckpointReader(path)
    reader.check()
    tensor, stored = reader.tensor(FP8_NAME), load_file(path / "model.safetensors")
    assert reader.fp8_block == (48, 24)
    assert tensor.dtype == torch.bfloat16 and reader.dtype == torch.bfloat16
    assert FP8_NAME + "_scale_inv" not in reader.names()
    for row, column, scale in [(0, 0, 2.0), (47, 23, 2.0), (47, 24, 0.5), (48, 23, -1.0), (63, 31, 4.0)]:
        assert tensor[row, column] == stored[FP8_NAME][row, column].float() * scale


@pytest.mark.parametrize(
    ("edit", "config", "named"),
    [
        (drop(FP8_NAME + "_scale_inv"), with_block, f"is FP8 without {FP8_NAME}_scale_inv"),
        (
            drop(FP8_NAME),
            with_block,
            f"{FP8_NAME}_scale_inv in model.safetensors is a scale without its weight",
        ),
        (
            change(FP8_NAME, torch.Tensor.bfloat16),
            with_block,
            f"_scale_inv in model.safetensors is a scale, but its weight ({FP8_NAME} in model.safetensors) is BF16",
        ),
        (
            change(FP8_NAME + "_scale_inv", lambda t: t[:1]),
            with_block,
            "_scale_inv in model.safetensors has shape [1, 2]; blocks of [48, 24] need [2, 2]",
        ),
        (
            change(FP8_NAME + "_scale_inv", torch.Tensor.bfloat16),
            with_block,
            "_scale_inv in model.safetensors has dtype BF16; needed: F32",
        ),
        (
            lambda tensors: None,
            lambda config: None,
            "is FP8, but config.json has no quantization_config with a weight_block_size",
        ),
    ],
)
def test_fault_of_a_scale_is_named(edit, config, named, whole, tmp_path):
    def both(tensors):
        quantise(tensors)
        edit(tensors)

    path = edited(whole, tmp_path / "edited", both, config)
    assert named in faults_of(path)
    if "without its weight" not in named and "but its weight" not in named:
        with pytest.raises(InputError, match="scale|FP8"):
            CheckpointReader(path).tensor(FP8_NAME)


def test_quantised_kind_that_must_not_be_is_refused(whole, tmp_path):
    name = f"{L}3.self_attn.kv_b_proj.weight"

    def plant(tensors):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.ones(3, 2)

    message = faults_of(edited(whole, tmp_path / "edited", plant, with_block))
    assert "kv_b_proj.weight in model.safetensors) has dtype F8_E4M3; needed: BF16 or F32" in message


def test_unknown_quantisation_is_refused(whole, tmp_path):
    path = edited(
        whole, tmp_path / "e", config=lambda config: config.update(quantization_config={"quant_method": "awq"})
    )
    with pytest.raises(ConfigError, match="quantization_config"):
        CheckpointReader(path)
