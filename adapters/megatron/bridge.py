"""Megatron-Bridge's bridge of the model: the table of names as mappings, and checks that nothing is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    ColumnParallelMapping,
    GatedMLPMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.core.models.gpt.gpt_model import GPTModel

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.checkpoint.inventory import FP32_KINDS, LAYERS, expected_tensors
from glm5next_plugin.errors import InputError

from . import names
from .provider import Glm5NextProvider
from .released_source import ReleasedSource, checkpoint_directory

_DISK_LAYER = LAYERS + "*."
_MAPPINGS = {"replicated": ReplicatedMapping, "column": ColumnParallelMapping, "row": RowParallelMapping}


@MegatronModelBridge.register_bridge(
    source="Glm5NextForConditionalGeneration", target=GPTModel, provider=Glm5NextProvider, model_type="glm5_next"
)
class Glm5NextBridge(MegatronModelBridge):
    """Weights of the text model between the released spelling and Megatron.

    Differences from the stock bridge: a checkpoint is read through our reader, so that all three spellings load and
    every name, shape and dtype is checked first; a tensor without a parameter, or a parameter without a tensor, is an
    error instead of a warning; exported tensors of the five fp32 kinds keep fp32. Vision and MTP tensors have no
    parameter here: :func:`.export.save_checkpoint` carries them over from the source.
    """

    def provider_bridge(self, hf_pretrained: Any) -> Glm5NextProvider:
        """The provider of the checkpoint's config (raw ``config.json`` where there is one)."""
        directory = checkpoint_directory(hf_pretrained)
        architecture = (
            Architecture.from_pretrained(directory) if directory else Architecture.from_config(hf_pretrained.config)
        )
        dtype = self.dtype_from_hf(hf_pretrained.config, default=torch.bfloat16)
        return Glm5NextProvider.from_architecture(
            architecture,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The tables above as mappings; new ones each time, since a mapping caches what it learnt of a layout."""
        mappings = [_MAPPINGS[split](ours, disk) for ours, (split, disk) in names.OUTSIDE.items()]
        mappings += [
            _MAPPINGS[split](names.LAYER + ours, _DISK_LAYER + disk)
            for split, table in (
                ("replicated", names.REPLICATED),
                ("column", names.COLUMN),
                ("row", names.ROW),
            )
            for ours, disk in table.items()
        ]
        mappings += [
            GatedMLPMapping(
                names.LAYER + ours,
                gate=f"{_DISK_LAYER}{disk}.gate_proj.weight",
                up=f"{_DISK_LAYER}{disk}.up_proj.weight",
            )
            for ours, disk in names.GATE_UP.items()
        ]
        return MegatronMappingRegistry(*mappings)

    def load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params=None):
        """Load a checked checkpoint directory into the model.

        Raises:
            InputError: the checkpoint has a missing, unknown or misshapen tensor, or no directory.
        """
        source = ReleasedSource.of(hf_pretrained)
        return super().load_weights_hf_to_megatron(source, megatron_model, allowed_mismatched_params)

    def build_conversion_tasks(self, hf_pretrained, megatron_model, weight_dtype=None):
        """The stock tasks, after a check that parameters and tensors of the text model pair off exactly.

        Raises:
            InputError: names every parameter without a tensor and every tensor without a parameter.
        """
        if not isinstance(hf_pretrained, ReleasedSource) and checkpoint_directory(hf_pretrained):
            hf_pretrained = ReleasedSource.names_only(megatron_model[0].config.architecture)
        names = self._megatron_global_param_names_all_pp_ranks(megatron_model)
        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, weight_dtype)
        unmapped = [name for name, task in zip(names, tasks, strict=True) if task is None]
        config = megatron_model[0].config
        mapped = {name for task in tasks if task is not None for name in _disk_names(task.mapping.hf_param)}
        unread = _text_names_of_rank(config) - mapped
        if unmapped or unread:
            raise InputError(
                "the model and the checkpoint do not pair off: "
                f"parameters without a tensor: {sorted(unmapped) or 'none'}; "
                f"tensors without a parameter: {sorted(unread) or 'none'}"
            )
        return tasks

    @staticmethod
    def _cast_export_weight_dtype(weights, weight_dtype):
        """Cast exported tensors, the five fp32 kinds excepted."""
        cast = MegatronModelBridge._cast_export_weight_dtype(weights, weight_dtype)
        return {name: weights[name] if name.endswith(FP32_KINDS) else cast[name] for name in weights}


def _disk_names(hf_param: str | Mapping[str, str]) -> list[str]:
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def _text_names_of_rank(config: Any) -> set[str]:
    """Text tensors whose parameter some rank of this pipeline group holds: all but other EP ranks' experts."""
    from megatron.core import parallel_state

    ep = parallel_state.get_expert_model_parallel_world_size()
    per_rank = config.architecture.n_routed_experts // ep
    first = parallel_state.get_expert_model_parallel_rank() * per_rank
    names = set()
    for name in expected_tensors(config.architecture, vision=False, mtp=False):
        _, separator, rest = name.partition(".mlp.experts.")
        if not separator or first <= int(rest.split(".")[0]) < first + per_rank:
            names.add(name)
    return names
