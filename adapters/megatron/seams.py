"""What megatron-core and Megatron-Bridge offer and what we bring, seam by seam, for ``glm5next doctor``."""

from __future__ import annotations

import importlib.util

import torch

from glm5next_plugin.hookspecs import Check

from .registration import register


def check_seams() -> list[Check]:
    """Import and register everything, then report; an exception of an import is the caller's to show."""
    register()
    from megatron.bridge.models.conversion import model_bridge
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    registered = "Glm5NextForConditionalGeneration" in {
        source if isinstance(source, str) else source.__name__ for source in model_bridge.get_model_bridge._exact_types
    }
    have_te = importlib.util.find_spec("transformer_engine") is not None
    return [
        Check(
            "layer spec lists",
            "native" if "layer_specs" in TransformerBlockSubmodules.__dataclass_fields__ else "missing",
            "a TransformerBlock takes one spec a layer",
        ),
        Check("hyper-connections, KDA, pooled DSA", "hooked", "our modules, from the layer specs"),
        Check(
            "AutoBridge registration",
            "hooked" if registered else "missing",
            "Glm5NextForConditionalGeneration, by name" if registered else "the bridge did not register",
        ),
        Check(
            "TransformerEngine",
            "ok",
            ("used by megatron-core" if HAVE_TE else "installed, not used by megatron-core")
            if have_te
            else "absent; a stub stands in while Megatron-Bridge is imported, and is gone afterwards",
        ),
        Check(
            "device",
            "native" if torch.cuda.is_available() else "hooked",
            torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device: CPU shim and gloo",
        ),
    ]
