"""What this adapter needs of megatron-core and Megatron-Bridge beyond their public seams, in one place.

* :func:`check_versions`: the releases that this adapter was written for, and an error for any other;
* :func:`import_megatron_bridge`: Megatron-Bridge imports TransformerEngine unconditionally (its LoRA layers name it);
  where it is missing, a stub stands in while the import runs and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings

from glm5next_plugin import versions


def check_versions() -> None:
    """Refuse releases that this adapter was not written for.

    Raises:
        glm5next_plugin.errors.VersionError: names what was found and what is needed.
    """
    versions.require(versions.requirements("torch", "megatron-core", "megatron-bridge"), extra="megatron")


class _StubModule(types.ModuleType):
    """A module whose capitalised attributes are empty classes and whose others are modules like it.

    That is enough for an import, for annotations and for ``isinstance``.
    """

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = type(name, (), {"__module__": self.__name__})
        else:
            value = _StubModule(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: str):
        self.root = root

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.root or fullname.startswith(self.root + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        module.__version__ = "0"


@contextlib.contextmanager
def quiet_imports():
    """Keep from the user what frameworks say, tracebacks included, of optional packages that they lack."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def import_megatron_bridge() -> types.ModuleType:
    """Import ``megatron.bridge``, with a stub of TransformerEngine where that is missing.

    megatron-core and modelopt are imported first, so that they settle on having no TransformerEngine: a stub would
    mislead them, and modelopt's import would fail half-way.
    """
    importlib.import_module("megatron.core.models.gpt")
    if "megatron.bridge" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        return importlib.import_module("megatron.bridge")
    if importlib.util.find_spec("modelopt") is not None:
        importlib.import_module("modelopt.torch.opt.plugins")
    finder = _StubFinder("transformer_engine")
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("megatron.bridge")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == finder.root]:
            del sys.modules[name]
