"""From an unhealthy figure to the tensor, or the layer and part, to suspect."""

from __future__ import annotations

from collections.abc import Sequence

from glm5next_plugin.health.report import Table
from glm5next_plugin.health.verdict import Finding

from .probe import Comparison, first_difference

_NAMED_TENSORS = 8


def weight_finding(lines: Sequence[str], when: str) -> Finding:
    """Tensors that trainer and engine hold with different values.

    Args:
        lines: what :func:`.weights.unequal_tensors` returned, not empty.
        when: which transfer was checked, such as ``"after the import"``.
    """
    shown = "; ".join(lines[:_NAMED_TENSORS])
    more = f"; and {len(lines) - _NAMED_TENSORS} more" if len(lines) > _NAMED_TENSORS else ""
    return Finding(
        f"unequal weights {when}: {lines[0].split(':')[0]}",
        f"{len(lines)} tensors differ: {shown}{more}",
        (
            "the import or export of that tensor: its name in the table, its shards, its dtype (five kinds stay fp32)",
            "the order of update and export: the engine got the weights of an earlier step",
        ),
    )


def probe_finding(comparisons: Sequence[Comparison], step: int) -> Finding:
    """The first part at which trainer and engine differ on the same tokens."""
    first = first_difference(list(comparisons))
    if first is None:
        return Finding(
            f"step {step}: trainer and engine agree part by part, yet not on the log-probabilities",
            "a forward pass of the whole sequences gives the same results on both sides up to the logits",
            (
                "decoding: the engine's step by step states (KDA, convolution, cached pools) against a forward pass",
                "the definition of log-probabilities: temperature, padded vocabulary, positions shifted by one",
            ),
        )
    return Finding(
        f"step {step}: trainer and engine part at {first.part.title}",
        f"everything before it agrees; {first.share:.0%} of its tokens differ, by {first.median:.2g} in the median",
        (first.part.look_at, "the weights of that part, if a transfer of weights is reported as well"),
    )


def probe_table(comparisons: Sequence[Comparison], step: int) -> Table:
    """All parts, for the report."""
    return Table(
        f"Trainer against engine at step {step}, in the order of the computation",
        ("part", "tokens that differ", "median difference", ""),
        tuple(
            (c.part.title, f"{c.share:.1%}", f"{c.median:.2g}", "agrees" if c.agrees else "DIFFERS")
            for c in comparisons
        ),
    )
