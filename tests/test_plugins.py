"""Plugins: found by entry point, called one at a time, and named in every error."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from glm5next_plugin import plugins, versions
from glm5next_plugin.errors import PluginError, VersionError
from glm5next_plugin.hookspecs import AdapterDescription, hookimpl
from glm5next_plugin.plugins import Registry


def plugin_of(**hooks) -> types.ModuleType:
    """A plugin whose hook ``glm5next_<name>`` is each given function."""
    module = types.ModuleType("a_plugin")
    vars(module).update({f"glm5next_{name}": hookimpl(function) for name, function in hooks.items()})
    return module


def installed(folder: Path, distribution: str, entry_point: str, source: str) -> None:
    """Lay a distribution with one plugin into ``folder`` as an installer would."""
    module = distribution.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[glm5next.adapters]\n{entry_point} = {module}\n")


@pytest.fixture
def registry(monkeypatch) -> Registry:
    """An empty registry, taken for the process's own."""
    empty = Registry()
    monkeypatch.setattr(plugins, "registry", lambda: empty)
    return empty


def test_the_megatron_adapter_is_found_by_its_entry_point():
    found = Registry()
    found.load_entry_points()
    assert "megatron" in found.names()
    assert found.distributions["megatron"].startswith("glm5next-plugin ")
    assert found.call("megatron", "glm5next_describe").extra == "megatron"


@pytest.mark.parametrize(
    "source", ["raise OSError('libfoo.so is missing')", "import no_such_module", "raise SystemExit(3)"]
)
def test_a_plugin_that_fails_on_import_is_named_and_the_others_load(source, tmp_path, monkeypatch):
    installed(tmp_path, "broken-plugin", "broken", source)
    monkeypatch.syspath_prepend(tmp_path)
    found = Registry()
    found.load_entry_points()
    assert "megatron" in found.names()
    assert str(found.failures["broken"]).startswith("plugin 'broken': cannot import broken_plugin: ")
    with pytest.raises(PluginError, match="plugin 'broken'"):
        found.call("broken", "glm5next_describe")


def test_a_misspelt_hook_is_refused_by_name_and_leaves_nothing_behind():
    found = Registry()
    with pytest.raises(PluginError, match="plugin 'theirs'.*glm5next_descibe"):
        found.register("theirs", plugin_of(descibe=lambda: None))
    assert found.names() == []
    found.register("ours", plugin_of(describe=lambda: None))
    assert found.names() == ["ours"]


def test_a_hook_with_an_unknown_argument_is_refused_by_name():
    found = Registry()
    with pytest.raises(PluginError, match="plugin 'theirs'.*registrar"):
        found.register("theirs", plugin_of(register_kernels=lambda registrar: None))
    assert found.names() == []


def test_two_plugins_of_one_name_are_refused():
    found = Registry()
    found.register("twice", plugin_of(describe=lambda: "first"))
    with pytest.raises(PluginError, match="plugin 'twice': the name is taken"):
        found.register("twice", plugin_of(describe=lambda: "second"))
    assert found.call("twice", "glm5next_describe") == "first"


def test_a_hook_is_called_on_the_named_plugin_only():
    found = Registry()
    found.register("first", plugin_of(describe=lambda: 1))
    found.register("second", plugin_of(describe=lambda: 2))
    assert [found.call(name, "glm5next_describe") for name in ("first", "second")] == [1, 2]


def test_a_hook_that_a_plugin_does_not_have_gives_none():
    found = Registry()
    found.register("bare", plugin_of(describe=lambda: 1))
    assert found.call("bare", "glm5next_check") is None


@pytest.mark.parametrize("failure", [ValueError("no registry"), SystemExit(1)])
def test_a_hook_that_raises_is_reported_with_the_plugin_and_the_hook(failure):
    def check():
        raise failure

    found = Registry()
    found.register("theirs", plugin_of(check=check))
    with pytest.raises(PluginError, match=f"plugin 'theirs': glm5next_check raised {type(failure).__name__}"):
        found.call("theirs", "glm5next_check")


def test_an_unknown_plugin_is_refused_with_the_names_of_those_installed():
    found = Registry()
    found.register("megatron", plugin_of(describe=lambda: 1))
    with pytest.raises(PluginError, match="plugin 'megatorn': not installed; installed are \\['megatron'\\]"):
        found.call("megatorn", "glm5next_install")


def adapter_of_framework_1(calls: list[str]) -> types.ModuleType:
    description = AdapterDescription("theirs", extra="megatron", requires={"framework": ">=1,<2"}, summary="")
    return plugin_of(describe=lambda: description, install=lambda: calls.append("installed"))


def test_install_calls_the_hook_when_the_versions_fit(registry, monkeypatch):
    calls = []
    monkeypatch.setattr(versions, "found", {"framework": "1.5"}.get)
    registry.register("theirs", adapter_of_framework_1(calls))
    plugins.install("theirs")
    assert calls == ["installed"]


def test_install_refuses_a_wrong_version_before_the_hook_runs(registry, monkeypatch):
    calls = []
    monkeypatch.setattr(versions, "found", {"framework": "2.0"}.get)
    registry.register("theirs", adapter_of_framework_1(calls))
    with pytest.raises(VersionError, match=r"framework 2\.0 found, >=1,<2 needed; .*glm5next-plugin\[megatron\]"):
        plugins.install("theirs")
    assert calls == []


def test_kernels_of_every_plugin_are_offered_and_a_broken_plugin_is_logged(registry, caplog):
    offered = []
    registry.register("first", plugin_of(register_kernels=lambda register: register("kda", "first", lambda: None)))
    registry.register("second", plugin_of(register_kernels=lambda register: register("kda", "second", lambda: None)))
    registry.failures["broken"] = PluginError("broken", "cannot import it")
    plugins.register_kernels(lambda operator, backend, loader: offered.append((operator, backend)))
    assert offered == [("kda", "first"), ("kda", "second")]
    assert "plugin 'broken': cannot import it; its kernels are not available" in caplog.text


KERNEL_PLUGIN = """
from glm5next_plugin.hookspecs import hookimpl


@hookimpl
def glm5next_register_kernels(register):
    register("rms_norm", "thirds", lambda: lambda x, weight, eps: x / 3, supports=supports)


def supports(x, weight, eps):
    return None if x.shape[-1] == 6 else f"width {x.shape[-1]}"
"""


@pytest.fixture(scope="module")
def kernel_distribution(tmp_path_factory) -> Path:
    """Folder into which pip installed a distribution that offers one kernel."""
    source, target = tmp_path_factory.mktemp("kernel_source"), tmp_path_factory.mktemp("kernel_target")
    (source / "their_kernels.py").write_text(KERNEL_PLUGIN)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "their-kernels"\nversion = "1.0"\n'
        '[project.entry-points."glm5next.adapters"]\ntheirs = "their_kernels"\n'
        '[tool.setuptools]\npy-modules = ["their_kernels"]\n'
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def run_with_kernels(folder: Path, code: str, backend: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "GLM5NEXT_BACKEND": backend}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_a_third_party_kernel_runs_where_it_is_chosen_and_only_there(kernel_distribution):
    code = """
import torch
from glm5next_plugin.ops.dispatch import set_backend
from glm5next_plugin.ops.rms_norm import rms_norm
x = torch.tensor([[6.0, 6.0, 6.0, -6.0, -6.0, -6.0]])
print(rms_norm(x, torch.ones(6), 0.0).tolist())
set_backend("rms_norm", "reference")
print(rms_norm(x, torch.ones(6), 0.0).tolist())
"""
    shown = run_with_kernels(kernel_distribution, code, "rms_norm=thirds")
    assert shown.stdout.splitlines() == ["[[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]]", "[[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]]"]


def test_a_third_party_kernel_that_does_not_support_a_call_is_an_error_not_a_fallback(kernel_distribution):
    code = """
import torch
from glm5next_plugin.ops.rms_norm import rms_norm
rms_norm(torch.ones(1, 5), torch.ones(5), 1e-6)
"""
    refused = run_with_kernels(kernel_distribution, code, "rms_norm=thirds")
    assert refused.returncode == 1
    assert "'thirds'" in refused.stderr and "width 5" in refused.stderr


def test_doctor_lists_a_third_party_kernel_and_the_choice(kernel_distribution):
    code = """
from glm5next_plugin.ops import dispatch
print([(row.chosen, row.available) for row in dispatch.describe_backends() if row.operator == "rms_norm"])
"""
    shown = run_with_kernels(kernel_distribution, code, "rms_norm=thirds")
    assert shown.stdout == "[('thirds', ('reference', 'thirds'))]\n", shown.stderr
