"""The doctor: versions found and needed, adapters and why not, faults by name, never a traceback."""

import json
import sys
import types

import pytest
from typer.testing import CliRunner

from glm5next_plugin import plugins, versions
from glm5next_plugin.cli.main import app
from glm5next_plugin.diagnosis import diagnose
from glm5next_plugin.errors import PluginError, VersionError
from glm5next_plugin.hookspecs import AdapterDescription, Check, hookimpl
from glm5next_plugin.plugins import Registry

# The oldest of everything that is supported, no framework installed.
BASE = {"Python": "3.12.0", "torch": "2.11.0", "transformers": "5.17.0"}


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """What the doctor finds installed: distribution -> version. Starts as the bare minimum; tests change it."""
    found = dict(BASE)
    monkeypatch.setattr(versions, "found", found.get)
    return found


@pytest.fixture(autouse=True)
def registry(monkeypatch) -> Registry:
    """A registry without plugins, taken for the process's own."""
    empty = Registry()
    monkeypatch.setattr(plugins, "registry", lambda: empty)
    return empty


def add_adapter(registry: Registry, checks=list, **requires: str) -> None:
    adapter = types.ModuleType("an_adapter")
    adapter.glm5next_describe = hookimpl(
        lambda: AdapterDescription("frame", extra="megatron", requires=requires, summary="trains")
    )
    adapter.glm5next_check = hookimpl(checks)
    registry.register("frame", adapter)


def run_doctor(*options: str):
    return CliRunner().invoke(app, ["doctor", *options])


def test_an_environment_without_frameworks_is_healthy_and_the_extras_are_named(installed):
    result = run_doctor()
    assert result.exit_code == 0
    shown = " ".join(result.output.split())
    for extra in ("megatron", "kernels", "sglang", "verl"):
        assert f"glm5next-plugin[{extra}]" in shown
    assert "Nothing that is installed is broken." in shown


@pytest.mark.parametrize(
    ("distribution", "found", "needed"),
    [
        ("Python", "3.11.9", ">=3.12"),
        ("torch", "2.10.1", ">=2.11"),
        ("transformers", "5.7.0", ">=5.8"),
        ("triton", "3.5.1", ">=3.6"),
        ("megatron-core", "0.18.2", ">=0.19.0,<0.20"),
        ("megatron-core", "0.20.0", ">=0.19.0,<0.20"),
        ("megatron-bridge", "0.5.0", ">=0.6.0,<0.7"),
        ("fla-core", "0.5.1", ">=0.6.0"),
        ("fla-core", "0.6.0rc1", ">=0.6.0"),
        ("sglang", "0.5.12", ">=0.5.16"),
        ("verl", "0.8.0", ">=0.9.1,<0.10"),
    ],
)
def test_a_version_outside_its_range_is_one_fault_that_names_found_and_needed(distribution, found, needed, installed):
    installed[distribution] = found
    diagnosis = diagnose()
    assert len(diagnosis.faults) == 1
    assert diagnosis.faults[0].startswith(f"{distribution} {found} found, {needed} needed (")
    assert run_doctor().exit_code == 1
    with pytest.raises(VersionError) as refusal:
        versions.require(versions.requirements(distribution))
    assert str(refusal.value).startswith(f"{distribution} {found} found, {needed} needed (")


@pytest.mark.parametrize(
    ("distribution", "found"),
    [
        ("torch", "2.11.0+cu130"),
        ("torch", "2.12.0a0+5228986c39.nv26.6"),
        ("megatron-core", "0.19.3rc0"),
        ("fla-core", "1.0"),
    ],
)
def test_local_nightly_and_later_builds_in_the_range_are_accepted(distribution, found, installed):
    installed[distribution] = found
    assert diagnose().faults == []
    versions.require(versions.requirements(distribution))


def test_a_required_distribution_that_is_absent_is_a_fault(installed):
    del installed["torch"]
    assert diagnose().faults == ["torch not found, >=2.11 needed (oldest that was tested)"]


def test_transformers_without_the_model_limits_but_breaks_nothing(installed):
    installed["transformers"] = "5.16.4"
    diagnosis = diagnose()
    assert [row.state for row in diagnosis.versions if row.distribution == "transformers"] == ["ok", "limited"]
    assert diagnosis.healthy
    with pytest.raises(VersionError, match=r"transformers 5\.16\.4 found, >=5\.17 needed"):
        versions.require(versions.HF_REFERENCE)


def test_an_absent_framework_leaves_its_adapter_absent_without_calling_it(installed, registry):
    add_adapter(registry, checks=pytest.fail, frame=">=1,<2")
    [adapter] = diagnose().adapters
    assert (adapter.state, adapter.detail, adapter.extra) == ("absent", "frame not found, >=1,<2 needed", "megatron")
    assert diagnose().healthy


def test_a_framework_of_a_wrong_version_breaks_its_adapter_without_calling_it(installed, registry):
    installed["frame"] = "2.1"
    add_adapter(registry, checks=pytest.fail, frame=">=1,<2")
    assert diagnose().faults == ["adapter 'frame': frame 2.1 found, >=1,<2 needed"]


def test_a_transformers_too_new_for_the_bridge_breaks_the_adapter_and_not_the_rest(installed, registry):
    installed.update({"transformers": "5.24.0", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2"})
    add_adapter(registry, checks=pytest.fail, **versions.requirements("megatron-core", "megatron-bridge"))
    [fault] = diagnose().faults
    assert fault.startswith("adapter 'frame': transformers 5.24.0 found, >=5.8,<5.24 needed (5.24 dropped a module")
    del installed["megatron-bridge"]
    assert diagnose().healthy


def test_seams_are_shown_and_a_missing_one_breaks_nothing(installed, registry):
    checks = [
        Check("registry", "native", "has it"),
        Check("patch", "hooked", "ours"),
        Check("TE", "missing", "no GPU path"),
    ]
    add_adapter(registry, checks=lambda: checks)
    result = run_doctor()
    assert result.exit_code == 0
    for word in ("ready", "native", "hooked", "missing", "no GPU path"):
        assert word in result.output


def test_a_seam_in_error_is_a_fault_with_its_detail(installed, registry):
    add_adapter(registry, checks=lambda: [Check("ok seam", "ok", ""), Check("registry", "error", "has no add()")])
    diagnosis = diagnose()
    assert diagnosis.adapters[0].state == "broken"
    assert diagnosis.faults == ["adapter 'frame': registry: has no add()"]


@pytest.mark.parametrize("failure", [RuntimeError("CUDA driver is too old"), SystemExit(7)])
def test_a_check_that_raises_is_a_fault_that_names_the_adapter(failure, installed, registry):
    def checks():
        raise failure

    add_adapter(registry, checks=checks)
    result = run_doctor("--json")
    assert result.exit_code == 1
    [fault] = json.loads(result.stdout)["faults"]
    assert fault.startswith(f"adapter 'frame': glm5next_check raised {type(failure).__name__}: {failure}")


def test_a_plugin_that_cannot_be_imported_is_a_fault_that_names_it(installed, registry):
    registry.failures["theirs"] = PluginError("theirs", "cannot import theirs: ImportError: no libfoo")
    result = run_doctor()
    assert result.exit_code == 1
    assert "adapter 'theirs': cannot import theirs: ImportError: no libfoo" in " ".join(result.output.split())


def test_a_description_that_is_none_of_ours_is_a_fault(installed, registry):
    adapter = types.ModuleType("an_adapter")
    adapter.glm5next_describe = hookimpl(lambda: {"name": "frame"})
    registry.register("frame", adapter)
    assert diagnose().faults == ["adapter 'frame': AttributeError: 'dict' object has no attribute 'extra'"]


def test_operators_that_cannot_be_imported_are_a_fault(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "glm5next_plugin.ops", None)
    [fault] = diagnose().faults
    assert fault.startswith("operators: ")


def test_an_unknown_backend_in_the_environment_is_a_fault(installed, monkeypatch):
    monkeypatch.setenv("GLM5NEXT_BACKEND", "kda=no_such_backend")
    [fault] = diagnose().faults
    assert "'kda'" in fault and "'no_such_backend'" in fault


def test_every_operator_is_listed_with_the_backend_it_runs_on(installed):
    operators = {row.operator: (row.chosen, row.available) for row in diagnose().operators}
    assert {"kda", "rms_norm"} <= set(operators)
    assert operators["kda"][0] == "reference"


def test_json_is_all_that_stdout_gets_when_a_framework_prints(installed, registry):
    add_adapter(registry, checks=lambda: print("Apex is not installed") or [])
    result = run_doctor("--json")
    diagnosis = json.loads(result.stdout)
    assert diagnosis["healthy"] is True
    assert set(diagnosis) == {"healthy", "versions", "adapters", "operators", "faults"}
    assert "Apex is not installed" in result.stderr


def test_names_with_brackets_are_shown_as_they_are(installed, registry):
    add_adapter(registry, checks=lambda: [Check("seam [core]", "ok", "needs frame[all] [red]now[/red]")])
    shown = " ".join(run_doctor().output.split())
    assert "seam [core]" in shown and "frame[all] [red]now[/red]" in shown
