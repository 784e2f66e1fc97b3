"""Small checkpoints in the released format: config, dtypes, tensors and a tokenizer, with random weights."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import tempfile
from pathlib import Path

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.recipes.variants import variant

from .fp8 import quantization_config
from .header import encode_header, tensor_bytes
from .inventory import TensorSpec, expected_tensors
from .released_files import index_content, shard_name, write_json, written_config
from .shards import INDEX_NAME
from .staging import staged_directory
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


def make_header_only(
    path: str | Path,
    architecture: Architecture,
    *,
    shards: int,
    fp8_block: tuple[int, int] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint whose files have headers and the right length but no content: sparse files of zeros.

    It takes the room of its headers, whatever the model's size.

    Args:
        path: directory to make.
        architecture: the model; with its vision tower and MTP layers.
        shards: files to make, of about equal size.
        fp8_block: block size of the FP8 spelling; None for BF16.
        overwrite: replace a directory that is not empty.

    Returns:
        ``path``.

    Raises:
        InputError: an occupied path.
    """
    expected = expected_tensors(architecture, fp8_block=fp8_block)
    sizes = {name: tensor_bytes(spec.dtype, spec.shape) for name, spec in expected.items()}
    total, before = sum(sizes.values()), 0
    members: list[list[str]] = [[] for _ in range(shards)]
    for name, nbytes in sizes.items():
        members[before * shards // total].append(name)
        before += nbytes
    weight_map = {}
    with staged_directory(path, overwrite=overwrite) as staging:
        for number, names in enumerate(members, 1):
            header, entries = encode_header((name, expected[name].dtype, expected[name].shape) for name in names)
            file = staging / shard_name(number, shards)
            file.write_bytes(header)
            os.truncate(file, len(header) + sum(entry.nbytes for entry in entries))
            weight_map |= dict.fromkeys(names, file.name)
        write_json(staging / INDEX_NAME, index_content(weight_map, total))
        quantization = None if fp8_block is None else quantization_config(expected, fp8_block)
        config = written_config(architecture, dtype="bfloat16", mtp=True, quantization=quantization)
        write_json(staging / "config.json", config)
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


class PatternSource:
    """A source of a checkpoint that is nowhere stored: a fixed run of random numbers, at another place for each tensor.

    It makes a checkpoint of any size at the speed of the disk, for benchmarks; :func:`make_checkpoint` gives weights
    that a model can run with.

    Args:
        architecture: the model; its vision tower and MTP layers are left out.
        seed: of the random numbers.
    """

    fp8_block = None
    dtype = torch.bfloat16

    def __init__(self, architecture: Architecture, *, seed: int = 0):
        self.architecture = architecture
        self._specs = expected_tensors(architecture, vision=False, mtp=False)
        generator = torch.Generator().manual_seed(seed)
        self._values = torch.randn(_PATTERN_LENGTH, generator=generator) * architecture.initializer_range
        self._companions = tempfile.TemporaryDirectory()
        write_tokenizer(self.companions, architecture)

    @property
    def companions(self) -> Path:
        """A directory with a tokenizer."""
        return Path(self._companions.name)

    def names(self) -> list[str]:
        """Every text tensor."""
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor."""
        return self._specs[name]

    def tensor(self, name: str, rows: slice | None = None, *, into: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of a tensor, fp32."""
        shape = self._specs[name].shape
        rows = rows or slice(0, shape[0])
        width = math.prod(shape[1:])
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) + rows.start * width
        places = torch.arange(first, first + (rows.stop - rows.start) * width) % _PATTERN_LENGTH
        return self._values[places].view(rows.stop - rows.start, *shape[1:])

    def identity(self) -> dict[str, str]:
        """Nothing on a disk."""
        return {"path": "none"}


_PATTERN_LENGTH = 1_000_003  # no power of two, so that neighbouring rows differ
