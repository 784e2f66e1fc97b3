"""GLM-5.3-Flash in stock megatron-core and Megatron-Bridge.

Stable names, imported when first used (the package itself loads no framework):

* ``AutoBridge``: Megatron-Bridge's, with the bridge of this model registered;
* ``Glm5NextProvider``: the transformer config that provides a GPTModel;
* ``glm5next_layer_spec``: the layer specs of a pipeline stage, for code that builds its own GPTModel;
* ``initialize``: process groups and seeds, on NCCL or, without a GPU, gloo;
* ``save_checkpoint``: the released spelling, from any parallel layout;
* ``save_torch_dist``, ``load_torch_dist``: Megatron's distributed checkpoints;
* ``attach_replay``, ``recorded``, ``set_router_replay``: choices of routers and indexers, repeated and recorded.
"""

import importlib

_HOMES = {
    "AutoBridge": "megatron.bridge",
    "Glm5NextProvider": ".provider",
    "glm5next_layer_spec": ".layer_spec",
    "initialize": ".runtime",
    "save_checkpoint": ".export",
    "save_torch_dist": ".torch_dist",
    "load_torch_dist": ".torch_dist",
    "attach_replay": ".replay",
    "recorded": ".replay",
    "set_router_replay": ".replay",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .registration import register

    register()
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
