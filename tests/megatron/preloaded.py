"""What the process imports from which the ranks of the layout tests are forked: no process group, no thread."""

from glm5next_plugin.adapters import megatron as adapter

for _name in adapter.__all__:
    getattr(adapter, _name)
