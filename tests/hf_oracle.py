"""The glm5_next model of transformers: the reference that shares no code with ours."""

import functools
import sys
from types import ModuleType

_NAME = "transformers.models.glm5_next.modeling_glm5_next"


@functools.cache
def modeling() -> ModuleType:
    """The modeling module, with its own torch code for KDA also where fla is installed.

    transformers binds fla's kernels while the module is imported, and without a GPU they fail; so fla is hidden for
    that moment only, in this test process only.
    """
    assert _NAME not in sys.modules, f"{_NAME} was imported before fla could be hidden; import it through hf_oracle"
    absent = object()
    fla = sys.modules.get("fla", absent)
    sys.modules["fla"] = None
    try:
        import transformers.models.glm5_next.modeling_glm5_next as module
    finally:
        if fla is absent:
            del sys.modules["fla"]
        else:
            sys.modules["fla"] = fla
    return module
