"""``glm5next verify``: equal by the bit, across spellings, formats and dtypes, and each difference named."""

import pytest
import torch

from glm5next_plugin.adapters.megatron.convert import convert, open_source
from glm5next_plugin.checkpoint.comparing import compare
from glm5next_plugin.checkpoint.synthetic import make_checkpoint

from ..command import run_glm5next
from ..hf_oracle import modeling
from .editing import edited

L = "model.language_model.layers."
K_PROJ, A_LOG, DOWN = f"{L}0.self_attn.k_proj.weight", f"{L}2.self_attn.A_log", f"{L}1.mlp.experts.7.down_proj.weight"


def compared(first, second, **options):
    return compare(open_source(first), open_source(second), **options)


def changed(name, function):
    def edit(tensors):
        tensors[name] = function(tensors[name].clone())

    return edit


def lowest_bit(tensor):
    bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
    bits.view(-1)[-1] ^= 1
    return tensor


def with_first(value):
    def edit(tensor):
        tensor.view(-1)[0] = value
        return tensor

    return edit


@pytest.fixture(scope="module")
def total(whole):
    return len(open_source(whole).names())


def test_a_checkpoint_equals_its_torch_dist_and_that_one_exported(whole, total, tmp_path):
    convert(whole, tmp_path / "dist")
    convert(tmp_path / "dist", tmp_path / "back", max_shard_bytes=50_000)
    for first, second in [(whole, "dist"), (whole, "back"), (tmp_path / "back", "dist")]:
        result = run_glm5next("verify", first, tmp_path / second)
        assert result.returncode == 0
        assert result.stdout == (
            f"{total} tensors equal by the bit, 0 after rounding to BF16, 0 different, 0 and 0 in one alone\n"
        )


@pytest.mark.parametrize("name", [K_PROJ, A_LOG, DOWN, "model.visual.merger.proj.weight"])
def test_one_bit_is_found(name, whole, total, tmp_path):
    path = edited(whole, tmp_path / "edited", changed(name, lowest_bit))
    result = run_glm5next("verify", whole, path)
    assert result.returncode == 1
    assert f"{name}: 1 values differ, by up to " in result.stdout
    assert f"{total - 1} tensors equal by the bit, 0 after rounding to BF16, 1 different" in result.stdout


def test_a_zero_of_the_other_sign_is_a_difference(whole, tmp_path):
    one = edited(whole, tmp_path / "one", changed(K_PROJ, with_first(0.0)))
    other = edited(whole, tmp_path / "other", changed(K_PROJ, with_first(-0.0)))
    assert compared(one, other).different == {K_PROJ: "1 values differ, by up to 0"}


def test_tensors_that_one_side_lacks_and_shapes_that_differ_are_named(whole, tmp_path):
    text = edited(whole, tmp_path / "text", lambda t: [t.pop(name) for name in list(t) if ".layers.4." in name])
    mtp = sum(".layers.4." in name for name in open_source(whole).names())
    for pair in [(whole, text), (text, whole)]:
        result = run_glm5next("verify", *pair)
        assert result.returncode == 1
        assert f"{L}4.eh_proj.weight: only in {whole}" in result.stdout and f"and {mtp - 20} more" in result.stdout
        assert ("{} and 0 in one alone" if pair[0] == whole else "0 and {} in one alone").format(mtp) in result.stdout
    fewer = make_checkpoint(tmp_path / "fewer", "tiny", tokenizer=False)
    found = compared(whole, fewer)
    assert found.different[K_PROJ] == "shape [32, 64] and [256, 256]"


def test_fp32_is_rounded_and_counted_but_not_where_fp32_is_kept(whole, total, tmp_path):
    wide = make_checkpoint(tmp_path / "wide", "demo", seed=1, dtype="float32", vision=True, mtp=True)
    for pair in [(whole, wide), (wide, whole)]:
        found = compared(*pair)
        kept = [name for name in found.equal if name.endswith((".A_log", ".dt_bias", "_base", "_scale", "_bias"))]
        assert found.same and len(found.rounded) + len(found.equal) == total
        assert sorted(kept) == sorted(found.equal) and len(kept) == 3 * 2 + 4 * 4 + 4
    nudged = edited(wide, tmp_path / "nudged", changed(K_PROJ, lowest_bit))
    assert compared(whole, nudged).same  # rounded away
    assert compared(wide, nudged).different.keys() == {K_PROJ}
    bias = edited(wide, tmp_path / "bias", changed(A_LOG, lowest_bit))
    assert compared(whole, bias).different.keys() == {A_LOG}


def test_fp8_is_its_dequantisation_in_bf16(whole, tmp_path):
    convert(whole, tmp_path / "fp8", to="released", fp8=True)
    convert(tmp_path / "fp8", tmp_path / "bf16", to="released")
    assert run_glm5next("verify", tmp_path / "fp8", tmp_path / "bf16").returncode == 0
    lossy = compared(whole, tmp_path / "fp8")
    assert DOWN in lossy.different and K_PROJ in lossy.equal
    assert compared(whole, tmp_path / "fp8", requantised=(128, 128)).same
    scale = changed(DOWN + "_scale_inv", lambda tensor: tensor * 1.25)
    path = edited(tmp_path / "fp8", tmp_path / "scaled", scale)
    assert compared(tmp_path / "fp8", path).different.keys() == {DOWN}
    assert not compared(whole, path, requantised=(128, 128)).same


def test_spellings_of_transformers_are_compared_by_released_name(tmp_path):
    source = make_checkpoint(tmp_path / "source", "demo", seed=3)
    model = modeling().Glm5NextForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16)
    vision = [name for name in model.state_dict() if "visual" in name]
    model.save_pretrained(tmp_path / "saved")
    found = compared(source, tmp_path / "saved")
    # transformers makes the vision tower that the source lacks, and keeps the convolutions in fp32
    assert not found.different and not found.only_first and len(found.only_second) == len(vision)
    assert sorted(found.rounded) == sorted(name for name in open_source(source).names() if "conv1d" in name)


def test_workers_find_what_one_process_finds(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("glm5next_plugin.checkpoint.pieces._BYTES_WORTH_A_WORKER", 1)
    wide = make_checkpoint(tmp_path / "wide", "tiny", seed=1, vision=True)
    other = edited(wide, tmp_path / "other", changed(f"{L}3.mlp.experts.9.up_proj.weight", lowest_bit))
    alone, together = compared(wide, other), compared(wide, other, workers=3)
    assert len(alone.different) == 1
    assert together.different == alone.different and set(together.equal) == set(alone.equal)


def test_a_value_that_is_not_finite_is_a_fault_and_no_difference(whole, tmp_path):
    path = edited(whole, tmp_path / "nan", changed(K_PROJ, lambda tensor: tensor.fill_(float("nan"))))
    result = run_glm5next("verify", whole, path)
    assert result.returncode == 2 and K_PROJ in result.stderr and "Traceback" not in result.stderr
