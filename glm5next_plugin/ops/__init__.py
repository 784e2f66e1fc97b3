"""The model's operators, one subject a file; importing the package makes every operator known to :mod:`.dispatch`.

An operator's file has its maths as a differentiable torch reference (fp32 inside) and the callable that dispatches to
it or to a kernel. Tokens are packed: ``[T, ...]``, all documents after one another, with int32 ``cu_seqlens``
``[N + 1]`` that starts at 0 and ends at T. Documents of length 0 are allowed.
"""

from . import (  # noqa: F401
    experts,
    gated_rms_norm,
    hyper_connection,
    indexer,
    kda,
    log_probs,
    rms_norm,
    router,
    short_conv,
    sparse_attention,
    swiglu,
)
