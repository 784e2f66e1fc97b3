"""The engine, and what its process has imported. It has a file of its own: a worker imports the file of its target."""

import sys

from glm5next_plugin.bringup.engine import HfEngine


class InspectedEngine(HfEngine):
    def modules(self):
        return sorted(sys.modules)
