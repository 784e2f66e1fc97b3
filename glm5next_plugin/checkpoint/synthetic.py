"""Small checkpoints in the released format: config, dtypes, tensors and a tokenizer, with random weights."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tempfile
from pathlib import Path

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.recipes.variants import variant

from .inventory import TensorSpec, expected_tensors
from .tokenizer import write_tokenizer
from .writing import CheckpointWriter, WrittenDtype


@dataclasses.dataclass(frozen=True)
class Initialization:
    """Spreads of random weights. Everything is signed and nothing is at a value that hides a fault.

    transformers starts A_log, hc_base, the pooling gate and its ape at constants, where rounding A_log to bf16, a base
    that is dropped or a wrong pool grid changes nothing; here they are random.

    Attributes:
        weight_std: matrices and convolutions; None takes initializer_range of the config.
        norm_std: norm weights about 1 and norm biases about 0.
        hc_fn_std, hc_base_std: hyper-connections; their scales lie about 1 with ``norm_std``.
        a_log_std: A_log about 0.
        pooling_std: index_kpool_compress_gate and _ape.
        expert_bias_mean, expert_bias_std: e_score_correction_bias; the release lies near 7.
    """

    weight_std: float | None = None
    norm_std: float = 0.05
    hc_fn_std: float = 0.02
    hc_base_std: float = 0.1
    a_log_std: float = 0.3
    pooling_std: float = 0.3
    expert_bias_mean: float = 0.0
    expert_bias_std: float = 0.2


def make_checkpoint(
    path: str | Path,
    model: Architecture | str,
    *,
    seed: int = 0,
    dtype: WrittenDtype = "bfloat16",
    vision: bool = False,
    mtp: bool = False,
    tokenizer: bool = True,
    init: Initialization | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint with random weights.

    Args:
        path: directory to make.
        model: an architecture, or the name of a variant ("tiny", "demo").
        seed: the same seed gives the same bytes; a tensor's values do not depend on which others are written.
        dtype: "bfloat16" as released, or "float32"; the five fp32 kinds are fp32 in either.
        vision: with the tensors of the vision tower (its config is there in any case).
        mtp: with the tensors of the MTP layers.
        tokenizer: with tokenizer and generation_config.json.
        init: spreads of the weights.
        max_shard_bytes: size of a shard.
        overwrite: replace a directory that is not empty.

    Returns:
        ``path``.

    Raises:
        InputError: an occupied path, or an unknown variant.
    """
    architecture = variant(model) if isinstance(model, str) else model
    init = init or Initialization()
    with tempfile.TemporaryDirectory() as companions:
        if tokenizer:
            write_tokenizer(Path(companions), architecture)
        with CheckpointWriter(
            path,
            architecture,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            companions=companions,
            overwrite=overwrite,
        ) as writer:
            for name, spec in expected_tensors(architecture, vision=vision, mtp=mtp).items():
                writer.add(name, random_tensor(name, spec, architecture, seed=seed, init=init))
    return Path(path)


def random_tensor(
    name: str, spec: TensorSpec, architecture: Architecture, *, seed: int, init: Initialization
) -> torch.Tensor:
    """Random values of one tensor, fp32; they depend on seed, name and shape alone."""
    # torch uses the lower 32 bits of a seed alone, so seed and name are mixed into those
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))

    def normal(mean: float, std: float) -> torch.Tensor:
        return torch.randn(spec.shape, generator=generator) * std + mean

    end = spec.kind.rpartition(".")[2]
    if end in ("hc_attn_fn", "hc_ffn_fn"):
        return normal(0.0, init.hc_fn_std)
    if end in ("hc_attn_base", "hc_ffn_base"):
        return normal(0.0, init.hc_base_std)
    if end in ("hc_attn_scale", "hc_ffn_scale"):
        return normal(1.0, init.norm_std)
    if end == "A_log":
        return normal(0.0, init.a_log_std)
    if end == "dt_bias":
        # inverse softplus of steps that are log-uniform in [1e-3, 1e-1], as the model is initialised for training
        low, high = math.log(1e-3), math.log(1e-1)
        step = (torch.rand(spec.shape, generator=generator) * (high - low) + low).exp()
        return step + torch.log(-torch.expm1(-step))
    if end == "e_score_correction_bias":
        return normal(init.expert_bias_mean, init.expert_bias_std)
    if end in ("index_kpool_compress_gate", "index_kpool_compress_ape"):
        return normal(0.0, init.pooling_std)
    if end == "bias":
        return normal(0.0, init.norm_std)
    if len(spec.shape) == 1:
        return normal(1.0, init.norm_std)
    return normal(0.0, architecture.initializer_range if init.weight_std is None else init.weight_std)
