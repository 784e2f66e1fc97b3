"""All faults of a checkpoint in one error, so that one run shows what there is to mend."""

from __future__ import annotations

from collections.abc import Sequence

from glm5next_plugin.errors import InputError

_SHOWN = 20


def raise_faults(where: object, faults: Sequence[str]) -> None:
    """Raise :class:`InputError` with the faults, the first 20 in full; nothing if there is none."""
    if not faults:
        return
    shown = [f"- {fault}" for fault in faults[:_SHOWN]]
    if len(faults) > _SHOWN:
        shown.append(f"- and {len(faults) - _SHOWN} more")
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    raise InputError("\n".join([f"{where}: {count}", *shown]))
