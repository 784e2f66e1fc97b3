"""Adapters, one folder a framework; installed as ``glm5next_plugin.adapters``. None imports another."""
