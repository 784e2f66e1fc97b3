"""Make Megatron-Bridge know the model in this process."""

from __future__ import annotations

import importlib

import torch

from glm5next_plugin.hf_config import register_hf_config

from . import compat


def register() -> None:
    """Check versions, import Megatron-Bridge and register the bridge. Safe to call twice.

    Without a CUDA device the CPU shim is installed first; megatron-core cannot run there otherwise.

    Raises:
        glm5next_plugin.errors.VersionError: a framework is absent or of a release that is not supported.
    """
    compat.check_versions()
    with compat.quiet_imports():
        if not torch.cuda.is_available():
            from . import cpu_shim

            cpu_shim.install()
        compat.import_megatron_bridge()
        register_hf_config()
        importlib.import_module(".bridge", __package__)
        # run_config.yaml of a converted checkpoint names our provider
        instantiation = importlib.import_module("megatron.bridge.utils.instantiate_utils")
        instantiation.register_allowed_target_prefix(f"{__package__}.")
