"""The Megatron adapter as a plugin of ``glm5next``."""

from glm5next_plugin import versions
from glm5next_plugin.hookspecs import AdapterDescription, Check, hookimpl


@hookimpl
def glm5next_describe() -> AdapterDescription:
    """Training with stock megatron-core and Megatron-Bridge."""
    return AdapterDescription(
        name="megatron",
        extra="megatron",
        requires=versions.requirements("megatron-core", "megatron-bridge"),
        summary="training: GPTModel from layer specs, provider and bridge",
    )


@hookimpl
def glm5next_check() -> list[Check]:
    """Import both frameworks, register the bridge and look at each seam."""
    from .seams import check_seams

    return check_seams()


@hookimpl
def glm5next_install() -> None:
    """Register the bridge with Megatron-Bridge."""
    from .registration import register

    register()
